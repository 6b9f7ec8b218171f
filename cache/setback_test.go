package cache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/cache/vfs"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/faulty"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// A cache directory that is older than the bucket: the disk of a virtual machine was rolled back, or a disk lost what it had synced. What is written
// there has the LSNs of other writes in the bucket. Neither may take the place of the other.
func TestSetBack(t *testing.T) {
	for _, restart := range []string{"none", "maps kept", "maps lost"} {
		t.Run(restart, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				bucket := faulty.Wrap(w.bucket)
				cfg := w.config("a", 1)
				cfg.Bucket = bucket
				e := w.open(t)
				v := create(t, e, cfg)
				put(t, v, 0, 4096, 1)
				if err := e.Drain(t.Context()); err != nil {
					t.Fatal(err)
				}
				old := &world{disk: w.disk.CrashClone(nil, vfs.CrashOptions{Survive: vfs.SurviveAll}), store: w.store.CrashClone(), bucket: w.bucket}
				for i := range int64(4) {
					put(t, v, i*4096, 4096, 2) // LSN 2 to 5
				}
				if err := e.Drain(t.Context()); err != nil {
					t.Fatal(err)
				}
				closeEngine(t, e)

				bucket.Down(objectstore.ErrTransient)
				e = old.open(t)
				v, err := e.Volume(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				for i := range 6 {
					put(t, v, 0, 4096, byte(10+i)) // LSN 2 to 7
				}
				bucket.Down(nil)
				time.Sleep(time.Minute)
				if restart != "none" {
					closeEngine(t, e)
					if restart == "maps lost" {
						old.store = homemap.NewMem()
					}
					e = old.open(t)
					if v, err = e.Volume(t.Context(), cfg); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Minute)
				}
				defer closeEngine(t, e)
				if s := v.Status(); s.State != StateFailed || !errors.Is(v.serving(), ErrDamaged) || s.Watermarks.Object.LSN > 1 {
					t.Fatalf("%+v", s)
				}
			})
		})
	}
}

// A home map that lost its last checkpoint is found out, also when all records of the volume have left the journal.
func TestOldHomeMapOfAnIdleVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket = bucket
		e := w.open(t)
		v := create(t, e, cfg)
		put(t, v, 0, 4096, 1)
		if err := e.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		old := w.store.CrashClone()
		put(t, v, 0, 4096, 2)
		for range 3 { // the segment of LSN 2 goes, and the one after it
			if err := e.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		closeEngine(t, e)
		w.store = old
		bucket.Down(objectstore.ErrTransient)
		e = w.open(t)
		defer closeEngine(t, e)
		if v, err := e.Volume(t.Context(), cfg); err != nil {
			t.Fatal(err)
		} else if err := tryPut(t.Context(), v, 4096, 4096, 3, false); !errors.Is(err, ErrOpening) {
			t.Fatalf("a write where LSN 2 is missing: %v", err)
		} else {
			bucket.Down(nil)
			settled(t, v)
			wantBytes(t, v, 0, 4096, 2)
		}
	})
}

// A flush covers what others can read, also if its writer was not answered yet.
func TestFlushCoversWhatIsReadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket, cfg.Policy = bucket, Policy{Ack: Local, Flush: Object, OnUnmet: Error}
		e := w.open(t)
		defer closeEngine(t, e)
		v := create(t, e, cfg)
		bucket.Down(objectstore.ErrTransient)
		o, err := v.reserve(t.Context(), 512)
		if err != nil {
			t.Fatal(err)
		}
		copy(o.mem.bufs[0], make([]byte, 512))
		lsn, err := o.submit(journal.Record{Kind: journal.KindData, Length: 512, PayloadBytes: 512}, Local)
		if err != nil {
			t.Fatal(err)
		}
		if err := v.local.wait(t.Context(), lsn); err != nil {
			t.Fatal(err)
		}
		if err := v.Flush(t.Context()); !errors.Is(err, ErrUnmet) {
			t.Errorf("flush while a readable write is not in the bucket: %v", err)
		}
		if err := o.finish(t.Context(), Local, lsn); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCrashOldMaps is TestCrash with home maps that lost their last writes, or all, with processes that die and leave what they had not synced, and with
// crashes at any operation of a start, several in a row.
func TestCrashOldMaps(t *testing.T) {
	from, to := seeds(t, 100, 15)
	for seed := from; seed < to; seed++ {
		if !t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { oldMapsRun(t, seed) })
		}) {
			t.Fatalf("run it again with ISERGATE_SEED=%d", seed)
		}
	}
}

type oldMaps struct {
	t    *testing.T
	olds []*homemap.Mem // earlier states of the store
	hs   []*history
}

func oldMapsRun(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 77))
	w := newWorld()
	levels := []Policy{{Ack: Local, Flush: Local}, {Ack: Object, Flush: Object}, {Ack: Memory, Flush: Local}, {Ack: Local, Flush: Object}, {Ack: Memory, Flush: Object}}
	b := &oldMaps{t: t}
	for i := range 1 + rng.IntN(3) {
		cfg := w.config(fmt.Sprint("v", i), byte(i+1))
		cfg.Policy = levels[rng.IntN(len(levels))]
		if rng.IntN(2) == 0 {
			cfg.BlockSize = 4096
		}
		b.hs = append(b.hs, &history{cfg: cfg})
	}
	for life := range 3 + rng.IntN(4) {
		w = b.life(w, rng, life == 0)
		if t.Failed() {
			return
		}
	}
	restoreAll(t, w, b.hs)
}

// end is what is left of w.
func (b *oldMaps) end(w *world, rng *rand.Rand) *world {
	w.gate.Lock()
	defer w.gate.Unlock()
	w.dead = true
	b.olds = append(b.olds, w.store.CrashClone())
	disk := w.disk
	if rng.IntN(2) == 0 {
		disk = w.disk.CrashClone(rng, vfs.CrashOptions{})
	}
	return &world{disk: disk, store: w.store.CrashClone(), bucket: w.bucket}
}

func (b *oldMaps) life(w *world, rng *rand.Rand, first bool) *world {
	t := b.t
	switch {
	case rng.IntN(8) == 0:
		w.store = homemap.NewMem()
	case len(b.olds) > 0 && rng.IntN(3) == 0:
		w.store = b.olds[rng.IntN(len(b.olds))].CrashClone()
	}
	if !first {
		for range rng.IntN(3) { // starts that do not get far
			at := 1 + rng.IntN(80)
			var mu sync.Mutex
			ops := 0
			ctx, cancel := context.WithCancel(t.Context())
			var next *world
			crng := rand.New(rand.NewPCG(rng.Uint64(), 5))
			this := w
			w.setFault(func(string) error {
				mu.Lock()
				defer mu.Unlock()
				if ops++; ops == at {
					next = b.end(this, crng)
					cancel()
				}
				return nil
			})
			e, err := Open(ctx, w.options(t))
			if err == nil {
				e.reclaiming.Lock()
				all := true
				for _, h := range b.hs {
					h.cfg.Bucket = gateBucket{w.bucket, w}
					if _, err := e.Volume(ctx, h.cfg); err != nil {
						all = false
						break
					}
				}
				if !all {
					mu.Lock()
					if next == nil {
						next = b.end(this, crng)
						ops = at
					}
					mu.Unlock()
				}
				e.reclaiming.Unlock()
				time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			}
			mu.Lock()
			if next == nil {
				next = b.end(this, crng)
				ops = at
			}
			mu.Unlock()
			cancel()
			if e != nil {
				_ = e.Close(t.Context())
			}
			w = next
			if rng.IntN(4) == 0 && len(b.olds) > 0 {
				w.store = b.olds[rng.IntN(len(b.olds))].CrashClone()
			}
		}
	}
	e := w.open(t)
	e.reclaiming.Lock()
	vs := make([]*Volume, len(b.hs))
	for i, h := range b.hs {
		h.cfg.Bucket = gateBucket{w.bucket, w}
		var err error
		if first {
			vs[i], err = e.Create(t.Context(), h.cfg)
		} else {
			vs[i], err = e.Volume(t.Context(), h.cfg)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	e.reclaiming.Unlock()
	for i, h := range b.hs {
		settled(t, vs[i])
		if err := vs[i].serving(); err != nil {
			t.Fatal(err)
		}
		h.check(t, vs[i], Local)
		if rng.IntN(3) == 0 {
			b.olds = append(b.olds, w.store.CrashClone())
		}
	}
	if t.Failed() {
		return w
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var next *world
	var mu sync.Mutex
	ops, at := 0, 1+rng.IntN(600)
	oldAt := 1 + rng.IntN(400)
	crng := rand.New(rand.NewPCG(rng.Uint64(), 2))
	this := w
	w.setFault(func(string) error {
		mu.Lock()
		defer mu.Unlock()
		ops++
		if ops == oldAt {
			b.olds = append(b.olds, this.store.CrashClone())
		}
		if ops == at {
			next = b.end(this, crng)
			cancel()
		}
		return nil
	})
	var wg sync.WaitGroup
	for i, h := range b.hs {
		for range 1 + rng.IntN(3) {
			rng := rand.New(rand.NewPCG(rng.Uint64(), 3))
			wg.Go(func() {
				for range 60 {
					if err := h.write(ctx, vs[i], rng); err != nil {
						return
					}
					var err error
					switch rng.IntN(20) {
					case 0:
						err = vs[i].Flush(ctx)
					case 1:
						err = vs[i].Wait(ctx, Object)
					case 2:
						_ = e.reclaim(ctx)
					case 3:
						_ = e.journal.Seal(ctx)
					}
					if err != nil && err != ErrLostWrites {
						return
					}
					h.mu.Lock()
					h.claimed = max(h.claimed, vs[i].object.get().LSN)
					h.mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	mu.Lock()
	if next == nil {
		next = b.end(w, crng)
		ops = at
	}
	mu.Unlock()
	_ = e.Close(t.Context())
	return next
}

// What a checkpoint of the bucket holds is not destaged again, also if nothing follows it there.
func TestTakenOverFromACheckpointAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		cfg := w.config("a", 1)
		e := w.open(t)
		v := create(t, e, cfg)
		put(t, v, 0, 4096, 1)
		if err := e.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		old := w.store.CrashClone()
		for i := range byte(3) {
			put(t, v, 4096, 4096, 2+i)
			if err := v.Wait(t.Context(), Object); err != nil {
				t.Fatal(err)
			}
		}
		if err := v.checkpointBucket(t.Context()); err != nil {
			t.Fatal(err)
		}
		closeEngine(t, e)
		w.store = old
		if err := w.bucket.Delete(t.Context(), volumelog.LogKey(cfg.ID, volumelog.Position{Epoch: 1, Seq: 2})); err != nil { // collected
			t.Fatal(err)
		}
		e = w.open(t)
		defer closeEngine(t, e)
		v, err := e.Volume(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		put(t, v, 8192, 4096, 9)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		wantBytes(t, v, 0, 4096, 1)
		wantBytes(t, v, 4096, 4096, 4)
		if s := v.Status(); s.DirtyBytes != 0 || s.Watermarks.Object.LSN != 5 {
			t.Fatalf("%+v", s)
		}
	})
}
