package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isergate/isergate/cache/vfs"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/faulty"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// put writes pattern bytes and fails the test on an error.
func put(t *testing.T, v *Volume, off, n int64, fill byte) {
	t.Helper()
	if err := tryPut(t.Context(), v, off, n, fill, false); err != nil {
		t.Fatal(err)
	}
}

func tryPut(ctx context.Context, v *Volume, off, n int64, fill byte, fua bool) error {
	l, err := v.Reserve(ctx, off, n)
	if err != nil {
		return err
	}
	for _, b := range l.Buffers() {
		for i := range b {
			b[i] = fill
		}
	}
	return l.Commit(ctx, fua)
}

// wantBytes checks that a range holds one byte value.
func wantBytes(t *testing.T, v *Volume, off, n int64, fill byte) {
	t.Helper()
	b, err := v.Read(t.Context(), off, n)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	got := bytes.Join(b.Buffers(), nil)
	if !bytes.Equal(got, bytes.Repeat([]byte{fill}, int(n))) {
		t.Fatalf("%d bytes at %d: not all %#x: %x…", n, off, fill, got[:16])
	}
}

func create(t *testing.T, e *Engine, cfg VolumeConfig) *Volume {
	t.Helper()
	v, err := e.Create(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func closeEngine(t *testing.T, e *Engine) {
	t.Helper()
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestOverwriteReadDestage(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	defer closeEngine(t, e)
	v := create(t, e, w.config("a", 1))
	wantBytes(t, v, 0, 1<<20, 0)
	put(t, v, 0, 64<<10, 1)
	put(t, v, 512, 512, 2)
	wantBytes(t, v, 0, 512, 1)
	wantBytes(t, v, 512, 512, 2)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	if s := v.Status(); s.DirtyBytes != 0 || s.Watermarks.Object.LSN != s.Watermarks.Acked.LSN {
		t.Fatalf("after the barrier: %+v", s)
	}
	wantBytes(t, v, 1024, 63<<10, 1)
	put(t, v, 1024, 512, 3) // a dirty hole in home data
	wantBytes(t, v, 1024, 512, 3)
	wantBytes(t, v, 1536, 4096, 1)
	pattern := bytes.Repeat([]byte{9}, 512)
	if err := v.WriteSame(t.Context(), Range{1 << 20, 1 << 20}, pattern, true); err != nil {
		t.Fatal(err)
	}
	if err := v.Deallocate(t.Context(), []Range{{1<<20 + 4096, 4096}, {0, 512}}, false); err != nil {
		t.Fatal(err)
	}
	check := func() {
		wantBytes(t, v, 0, 512, 0)
		wantBytes(t, v, 512, 512, 2)
		wantBytes(t, v, 1<<20, 4096, 9)
		wantBytes(t, v, 1<<20+4096, 4096, 0)
		wantBytes(t, v, 1<<20+8192, 1<<20-8192, 9)
		if mapped, n, err := v.Mapped(t.Context(), 1<<20, 1<<20); err != nil || !mapped || n != 4096 {
			t.Fatalf("mapped %v %d, %v", mapped, n, err)
		}
		if mapped, n, err := v.Mapped(t.Context(), 2<<20, 2<<20); err != nil || mapped || n != 2<<20 {
			t.Fatalf("mapped %v %d, %v", mapped, n, err)
		}
	}
	check()
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	check()
}

func TestRangesAreChecked(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	defer closeEngine(t, e)
	cfg := w.config("a", 1)
	cfg.BlockSize = 4096
	v := create(t, e, cfg)
	for _, r := range []Range{{-4096, 4096}, {0, 0}, {0, -4096}, {512, 4096}, {0, 512}, {4 << 20, 4096}, {4<<20 - 4096, 8192}, {1<<63 - 4096, 4096}} {
		if _, err := v.Reserve(t.Context(), r.Off, r.Len); !errors.Is(err, ErrRange) {
			t.Errorf("reserve %v: %v", r, err)
		}
		if _, err := v.Read(t.Context(), r.Off, r.Len); !errors.Is(err, ErrRange) {
			t.Errorf("read %v: %v", r, err)
		}
		if err := v.Deallocate(t.Context(), []Range{r}, false); !errors.Is(err, ErrRange) {
			t.Errorf("deallocate %v: %v", r, err)
		}
		if err := v.WriteSame(t.Context(), r, make([]byte, 4096), false); !errors.Is(err, ErrRange) {
			t.Errorf("write same %v: %v", r, err)
		}
	}
	if err := v.WriteSame(t.Context(), Range{0, 4096}, make([]byte, 512), false); !errors.Is(err, ErrRange) {
		t.Errorf("short pattern: %v", err)
	}
	if _, err := v.Read(t.Context(), 0, 2<<20); !errors.Is(err, ErrRange) {
		t.Errorf("long read: %v", err)
	}
	if _, err := v.Reserve(t.Context(), 0, e.MaxWriteBytes()+4096); !errors.Is(err, ErrRange) {
		t.Errorf("long write: %v", err)
	}
}

// A 64 TiB volume is unmapped whole: metadata only.
func TestHugeRanges(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	cfg := w.config("huge", 1)
	cfg.SizeBytes = maxVolumeBytes
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 1)
	put(t, v, maxVolumeBytes-4096, 4096, 2)
	if err := v.WriteSame(t.Context(), Range{4096, maxVolumeBytes - 8192}, bytes.Repeat([]byte{7}, 512), false); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 33<<40, 64<<10, 7)
	wantBytes(t, v, maxVolumeBytes-4096, 4096, 2)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 33<<40, 64<<10, 7)
	if err := v.Deallocate(t.Context(), []Range{{0, maxVolumeBytes}}, false); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 33<<40, 64<<10, 0)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	e = w.open(t)
	defer closeEngine(t, e)
	if v, err := e.Volume(t.Context(), cfg); err != nil {
		t.Fatal(err)
	} else {
		wantBytes(t, v, 33<<40, 64<<10, 0)
	}
}

func TestResize(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	cfg := w.config("a", 1)
	v := create(t, e, cfg)
	if err := v.Resize(t.Context(), 2<<20); !errors.Is(err, ErrRange) {
		t.Fatalf("shrinking: %v", err)
	}
	if err := v.Resize(t.Context(), 8<<20); err != nil {
		t.Fatal(err)
	}
	put(t, v, 8<<20-512, 512, 5)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	// The caller's record is old: the volume knows better.
	e = w.open(t)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if n := v.Status().Config.SizeBytes; n != 8<<20 {
		t.Fatalf("size %d", n)
	}
	wantBytes(t, v, 8<<20-512, 512, 5)
	closeEngine(t, e)

	fresh := newWorld()
	fresh.bucket = w.bucket
	e = fresh.open(t)
	defer closeEngine(t, e)
	_, report, err := e.Restore(t.Context(), VolumeConfig{ID: cfg.ID, Policy: DefaultPolicy, Bucket: w.bucket})
	if err != nil || report.SizeBytes != 8<<20 {
		t.Fatalf("%+v, %v", report, err)
	}
}

// The first failed sync is final: nothing is acknowledged from then on, and nothing of the failed batch was.
func TestSyncFailureIsFinal(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	v := create(t, e, w.config("a", 1))
	put(t, v, 0, 4096, 1)
	var broken atomic.Bool
	broken.Store(true)
	w.setFault(func(op string) error {
		if op == "syncdata" && broken.Load() {
			return syscall.EIO
		}
		return nil
	})
	if err := tryPut(t.Context(), v, 4096, 4096, 2, false); !errors.Is(err, ErrJournal) {
		t.Fatalf("write over a failing sync: %v", err)
	}
	broken.Store(false)
	if err := tryPut(t.Context(), v, 4096, 4096, 2, false); !errors.Is(err, ErrJournal) {
		t.Fatalf("write after a failed sync: %v", err)
	}
	if err := v.Flush(t.Context()); !errors.Is(err, ErrJournal) {
		t.Fatalf("flush after a failed sync: %v", err)
	}
	if s := v.Status(); s.State != StateFailed || s.ContractMet || s.Watermarks.Local.LSN != 1 {
		t.Fatalf("%+v", s)
	}
	_ = e.Close(t.Context())
	w.setFault(nil)
	e = w.open(t)
	defer closeEngine(t, e)
	if v, err := e.Volume(t.Context(), w.config("a", 1)); err != nil {
		t.Fatal(err)
	} else {
		wantBytes(t, v, 0, 4096, 1)
	}
}

// on-unmet, in fake time: block ends with BUSY, error with an error, degrade with an
// announcement, and each recovers by itself.
func TestOnUnmet(t *testing.T) {
	for _, rule := range []OnUnmet{Block, Error, Degrade} {
		t.Run(rule.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				bucket := faulty.Wrap(w.bucket)
				var events []string
				o := w.options(t)
				o.Events = func(e Event) { events = append(events, e.Type) }
				e, err := Open(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				defer closeEngine(t, e)
				cfg := w.config("a", 1)
				cfg.Bucket, cfg.Policy = bucket, Policy{Ack: Object, Flush: Object, OnUnmet: rule}
				v := create(t, e, cfg)
				put(t, v, 0, 4096, 1)

				bucket.Down(objectstore.ErrUnknown)
				start := time.Now()
				err = tryPut(t.Context(), v, 4096, 4096, 2, false)
				took := time.Since(start)
				switch rule {
				case Block:
					if !errors.Is(err, ErrBusy) || took != o.CommandWait {
						t.Fatalf("after %s: %v", took, err)
					}
				case Error:
					if !errors.Is(err, ErrUnmet) || took != o.UnmetAfter {
						t.Fatalf("after %s: %v", took, err)
					}
				case Degrade:
					if err != nil || took != o.UnmetAfter {
						t.Fatalf("after %s: %v", took, err)
					}
					// From now on nobody waits, and it is said.
					start = time.Now()
					put(t, v, 8192, 4096, 3)
					if err := v.Flush(t.Context()); err != nil || time.Since(start) != 0 {
						t.Fatalf("degraded: %v after %s", err, time.Since(start))
					}
					if !strings.Contains(strings.Join(events, " "), "contract_degraded") {
						t.Fatalf("events %v", events)
					}
				}
				if s := v.Status(); s.ContractMet || s.State != StateDegraded || s.LastObjectError == "" {
					t.Fatalf("%+v", s)
				}
				bucket.Down(nil)
				time.Sleep(time.Minute) // fake: destage tries again
				put(t, v, 0, 4096, 4)
				synctest.Wait()
				if s := v.Status(); !s.ContractMet || s.State != StateAvailable {
					t.Fatalf("afterwards: %+v", s)
				}
				if o := v.Status().Watermarks; o.Object.LSN < o.Acked.LSN {
					t.Fatalf("acknowledged beyond `object`: %+v", o)
				}
			})
		})
	}
}

// P5: dirty bytes never exceed the budget, reads go on, and destage makes room.
func TestDirtyBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		o := w.options(t)
		o.DirtyBudget = 256 << 10
		e, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer closeEngine(t, e)
		cfg, other := w.config("a", 1), w.config("b", 2)
		cfg.Bucket, cfg.Policy.OnUnmet = bucket, Error
		v, u := create(t, e, cfg), create(t, e, other)
		bucket.Down(objectstore.ErrUnknown)
		var full error
		n := int64(0)
		for ; full == nil && n < 100; n++ {
			full = tryPut(t.Context(), v, n*4096, 4096, byte(n), false)
			if d := v.Status().DirtyBytes; d > o.DirtyBudget {
				t.Fatalf("%d dirty bytes, the budget is %d", d, o.DirtyBudget)
			}
		}
		if !errors.Is(full, ErrBudget) || n != 65 {
			t.Fatalf("write %d: %v", n, full)
		}
		wantBytes(t, v, 4096, 4096, 1)
		start := time.Now()
		put(t, u, 0, 4096, 1) // another volume does not notice
		if time.Since(start) != 0 {
			t.Fatal("the other volume was held up")
		}
		if _, err := v.Reserve(t.Context(), 0, 512<<10); !errors.Is(err, ErrRange) {
			t.Fatalf("larger than the budget: %v", err)
		}
		bucket.Down(nil)
		time.Sleep(time.Minute) // fake: destage tries again
		put(t, v, 0, 4096, 9)
	})
}

func TestFencedByRestoreElsewhere(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	v := create(t, e, w.config("a", 1))
	put(t, v, 0, 4096, 1)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	there := newWorld()
	there.bucket = w.bucket
	e2 := there.open(t)
	defer closeEngine(t, e2)
	v2, report, err := e2.Restore(t.Context(), VolumeConfig{ID: v.ID(), Policy: DefaultPolicy, Bucket: w.bucket})
	if err != nil || report.Generation != volumelog.LineageStride || report.LSN != 1 {
		t.Fatalf("%+v, %v", report, err)
	}
	put(t, v, 4096, 4096, 2) // the old owner acknowledges at local, which is true
	if err := v.Wait(t.Context(), Object); !errors.Is(err, ErrFenced) {
		t.Fatalf("the old owner's barrier: %v", err)
	}
	if err := tryPut(t.Context(), v, 0, 4096, 3, false); !errors.Is(err, ErrFenced) {
		t.Fatalf("the old owner's write: %v", err)
	}
	wantBytes(t, v2, 0, 4096, 1)
	wantBytes(t, v2, 4096, 4096, 0)
	closeEngine(t, e)
	// A restart of the old owner serves from its journal, and is fenced as soon as it reaches the bucket.
	e = w.open(t)
	defer closeEngine(t, e)
	v, err = e.Volume(t.Context(), w.config("a", 1))
	if err == nil {
		err = v.Wait(t.Context(), Object)
	}
	if !errors.Is(err, ErrFenced) {
		t.Fatalf("the old owner after a restart: %v", err)
	}
	put(t, v2, 0, 4096, 7)
	if err := v2.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
}

// Damage is reported, never read as something else, and stays where it is.
func TestJournalDamage(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	cfg := w.config("a", 1)
	bucket := faulty.Wrap(w.bucket)
	cfg.Bucket = bucket
	bucket.Down(objectstore.ErrUnknown) // it stays in the journal
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 0xa1)
	put(t, v, 4096, 4096, 0xa2)
	put(t, v, 8192, 4096, 0xa3)
	flip(t, w.disk, bytes.Repeat([]byte{0xa2}, 4096))
	wantBytes(t, v, 0, 4096, 0xa1)
	if _, err := v.Read(t.Context(), 4096, 4096); !errors.Is(err, ErrUnreadable) {
		t.Fatalf("read of damaged data: %v", err)
	}
	put(t, v, 4096, 4096, 0xa4) // overwritten, it is whole again
	wantBytes(t, v, 4096, 4096, 0xa4)
	closeEngine(t, e)
	e = w.open(t)
	defer closeEngine(t, e)
	cfg.Bucket = w.bucket
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 4096, 4096, 0xa4)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatalf("what was damaged is overwritten, so destage goes on: %v", err)
	}
}

// flip inverts a bit of the one place on the disk that holds want.
func flip(t *testing.T, disk *vfs.Mem, want []byte) {
	t.Helper()
	infos, err := disk.ReadDir("/cache/journal")
	if err != nil {
		t.Fatal(err)
	}
	for _, in := range infos {
		name := filepath.Join("/cache/journal", in.Name)
		b, err := vfs.ReadFile(disk, name, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		if at := bytes.Index(b, want); at >= 0 {
			if err := disk.Corrupt(name, int64(at)+100, []byte{4}); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatal("the data is not on the disk")
}

// The home maps' store is rebuilt from the bucket when its directory is gone or damaged.
func TestHomeMapsRebuilt(t *testing.T) {
	for _, how := range []string{"deleted", "damaged"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld()
			o := w.options(t)
			o.FS, o.HomeStore, o.Dir = vfs.OS(), nil, t.TempDir()
			open := func() (*Engine, *Volume) {
				e, err := Open(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				return e, nil
			}
			e, _ := open()
			cfg := w.config("a", 1)
			v := create(t, e, cfg)
			rng := rand.New(rand.NewPCG(7, 7))
			want := make([]byte, cfg.SizeBytes)
			for i := range 300 {
				n := int64(1+rng.IntN(32)) * 512
				off := rng.Int64N((cfg.SizeBytes-n)/512+1) * 512
				put(t, v, off, n, byte(i+1))
				copy(want[off:], bytes.Repeat([]byte{byte(i + 1)}, int(n)))
				if i == 200 {
					if err := e.Drain(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
			closeEngine(t, e)
			maps := filepath.Join(o.Dir, "maps")
			if how == "deleted" {
				if err := os.RemoveAll(maps); err != nil {
					t.Fatal(err)
				}
			} else {
				files, _ := filepath.Glob(filepath.Join(maps, "*"))
				for _, f := range files {
					if err := os.WriteFile(f, bytes.Repeat([]byte("x"), 5000), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			e, _ = open()
			defer closeEngine(t, e)
			v, err := e.Volume(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			for v.Status().State == StateOpening {
				time.Sleep(time.Millisecond)
			}
			for off := int64(0); off < cfg.SizeBytes; off += 256 << 10 {
				b, err := v.Read(t.Context(), off, 256<<10)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(bytes.Join(b.Buffers(), nil), want[off:off+(256<<10)]) {
					t.Fatalf("the volume is not what it was, in 256 KiB at %d", off)
				}
				b.Release()
			}
		})
	}
}

func TestForget(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	v := create(t, e, w.config("a", 1))
	put(t, v, 0, 4096, 1)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	put(t, v, 4096, 4096, 2)
	if err := e.Forget(t.Context(), v.ID(), w.bucket, false); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Read(t.Context(), 0, 4096); !errors.Is(err, ErrClosed) {
		t.Fatalf("read of a forgotten volume: %v", err)
	}
	// It comes back from the bucket alone, also after a restart in between.
	for range 2 {
		v, report, err := e.Restore(t.Context(), VolumeConfig{ID: v.ID(), Name: "b", Policy: DefaultPolicy, Bucket: w.bucket})
		if err != nil || report.Name != "b" {
			t.Fatalf("%+v, %v", report, err)
		}
		wantBytes(t, v, 0, 4096, 1)
		if err := e.Forget(t.Context(), v.ID(), w.bucket, false); err != nil {
			t.Fatal(err)
		}
		closeEngine(t, e)
		e = w.open(t)
	}
	if err := e.Forget(t.Context(), v.ID(), w.bucket, true); err != nil {
		t.Fatal(err)
	}
	if left, err := w.bucket.List(t.Context(), "", "", 10); err != nil || len(left) != 0 {
		t.Fatalf("after the purge: %v, %v", left, err)
	}
	closeEngine(t, e)
}

// ack=memory: a clean stop loses nothing, an unclean one says what it lost.
func TestMemoryLevel(t *testing.T) {
	w := newWorld()
	cfg := w.config("a", 1)
	cfg.Policy = Policy{Ack: Memory, Flush: Local}
	e := w.open(t)
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 1)
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	e = w.open(t)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil || v.Status().Generation != 1 {
		t.Fatalf("%+v, %v", v.Status(), err)
	}
	wantBytes(t, v, 0, 4096, 1)
	w2 := w.crash(rand.New(rand.NewPCG(1, 1)))
	_ = e.Close(t.Context())
	cfg.Bucket = w2.bucket
	e = w2.open(t)
	defer closeEngine(t, e)
	if v, err = e.Volume(t.Context(), cfg); err != nil || v.Status().Generation != 2 {
		t.Fatalf("%+v, %v", v.Status(), err)
	}
	if err := v.Flush(t.Context()); err != ErrLostWrites {
		t.Fatalf("the first flush: %v", err)
	}
	if err := v.Flush(t.Context()); err != nil {
		t.Fatalf("the second flush: %v", err)
	}
}

// A journal that was exchanged is noticed, and the volume goes on from the bucket.
func TestJournalLost(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	v := create(t, e, w.config("a", 1))
	put(t, v, 0, 4096, 1)
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	put(t, v, 0, 4096, 2)
	closeEngine(t, e)
	w.disk = vfs.NewMem()
	// What was put after the drain may or may not have reached the bucket.
	e = w.open(t)
	defer closeEngine(t, e)
	v, err := e.Volume(t.Context(), w.config("a", 1))
	if err != nil {
		t.Fatal(err)
	}
	for v.Status().State == StateOpening {
		time.Sleep(time.Millisecond)
	}
	if s := v.Status(); s.Generation != 2 || s.State != StateAvailable {
		t.Fatalf("%+v", s)
	}
	if err := v.Flush(t.Context()); err != ErrLostWrites {
		t.Fatalf("the first flush: %v", err)
	}
	b, err := v.Read(t.Context(), 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	if x := b.Buffers()[0][0]; x != 1 && x != 2 {
		t.Fatalf("content %d", x)
	}
}

func TestOptionsFaults(t *testing.T) {
	o := Options{SegmentBytes: 1000, JournalBytes: 1, DestageParallel: 1000, MaxObjectBytes: 1}
	o.EnsureDefaults()
	err := o.Validate()
	if err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Fatalf("want six faults at once: %v", err)
	}
	var c VolumeConfig
	if err := c.Validate(); err == nil || strings.Count(err.Error(), "\n") < 4 {
		t.Fatalf("want all faults of a configuration at once: %v", err)
	}
}

// A device that stalls holds what was handed to it, ends new writes with BUSY, and when it
// answers again nothing that was answered BUSY has taken effect.
func TestJournalStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		e := w.open(t)
		defer closeEngine(t, e)
		v := create(t, e, w.config("a", 1))
		put(t, v, 0, 4096, 1)
		stalled := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-stalled
			}
			return nil
		})
		held := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { held <- tryPut(ctx, v, 4096, 4096, 2, false) }()
		time.Sleep(time.Minute)
		cancel() // an abort does not answer for the device
		synctest.Wait()
		select {
		case err := <-held:
			t.Fatalf("answered while its outcome is open: %v", err)
		default:
		}
		if err := tryPut(t.Context(), v, 8192, 4096, 3, false); !errors.Is(err, ErrBusy) {
			t.Fatalf("a new write: %v", err)
		}
		wantBytes(t, v, 0, 4096, 1)
		if s := v.Status(); s.ContractMet {
			t.Fatal("the contract is not met while the journal stalls")
		}
		close(stalled)
		if err := <-held; err != nil {
			t.Fatal(err)
		}
		put(t, v, 12288, 4096, 4)
		wantBytes(t, v, 4096, 4096, 2)
		wantBytes(t, v, 8192, 4096, 0)
		synctest.Wait()
		if s := v.Status(); !s.ContractMet {
			t.Fatalf("afterwards: %+v", s)
		}
	})
}

// A volume whose write was refused while the device stalled, and that nobody writes to any more, says that the contract holds
// again once it does, and not before.
func TestUnmetWhileIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		e := w.open(t)
		defer closeEngine(t, e)
		busy, idle := create(t, e, w.config("a", 1)), create(t, e, w.config("b", 2))
		stalled := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-stalled
			}
			return nil
		})
		held := make(chan error, 1)
		go func() { held <- tryPut(t.Context(), busy, 0, 4096, 1, false) }()
		time.Sleep(time.Minute)
		if err := tryPut(t.Context(), idle, 0, 4096, 1, false); !errors.Is(err, ErrBusy) {
			t.Fatalf("a write while the device stalls: %v", err)
		}
		time.Sleep(time.Minute)
		if idle.Status().ContractMet {
			t.Fatal("the contract is met while the device stalls")
		}
		close(stalled)
		if err := <-held; err != nil {
			t.Fatal(err)
		}
		time.Sleep(e.opt.UnmetAfter)
		if s := idle.Status(); !s.ContractMet || s.State != StateAvailable {
			t.Fatalf("afterwards: %+v", s)
		}
	})
}

// When `memory` is left, what was acknowledged there is journaled before SetPolicy returns.
func TestLeavingMemory(t *testing.T) {
	w := newWorld()
	cfg := w.config("a", 1)
	cfg.Policy = Policy{Ack: Memory, Flush: Local}
	e := w.open(t)
	v := create(t, e, cfg)
	held := make(chan struct{})
	var hold atomic.Bool
	w.setFault(func(op string) error {
		if op == "syncdata" && hold.Load() {
			<-held
		}
		return nil
	})
	hold.Store(true)
	put(t, v, 0, 4096, 1) // acknowledged, and its sync does not end
	done := make(chan error, 1)
	go func() { done <- v.SetPolicy(Policy{Ack: Local, Flush: Local}, 0, false) }()
	for v.policy.Load().Ack == Memory {
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-done:
		t.Fatalf("SetPolicy returned before the sync: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	hold.Store(false)
	close(held)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	next := w.crash(rand.New(rand.NewPCG(1, 1)))
	_ = e.Close(t.Context())
	cfg.Policy, cfg.Bucket = Policy{Ack: Local, Flush: Local}, next.bucket
	e = next.open(t)
	defer closeEngine(t, e)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 0, 4096, 1)
	if err := v.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Adjacent frames come with one request.
func TestColdReadRequests(t *testing.T) {
	w := newWorld()
	o := w.options(t)
	o.MaxObjectBytes, o.MaxObjectAge = 1<<20, time.Hour
	e, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	v := create(t, e, w.config("a", 1))
	for off := int64(0); off < 1<<20; off += 64 << 10 {
		put(t, v, off, 64<<10, byte(off>>16)+1)
	}
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)

	bucket := faulty.Wrap(w.bucket)
	cfg := w.config("a", 1)
	cfg.Bucket = bucket
	e = w.open(t)
	v, err = e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for bucket.Calls(objectstore.OpPut) == 0 { // the epoch is opened after all else was read
		time.Sleep(time.Millisecond)
	}
	before := bucket.Calls(objectstore.OpGetRange)
	for off := int64(0); off < 1<<20; off += 256 << 10 {
		b, err := v.Read(t.Context(), off, 256<<10)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range bytes.Join(b.Buffers(), nil) {
			if want := byte((off+int64(i))>>16) + 1; p != want {
				t.Fatalf("byte %d: %d, want %d", off+int64(i), p, want)
			}
		}
		b.Release()
	}
	if n := bucket.Calls(objectstore.OpGetRange) - before; n > 8 {
		t.Errorf("%d requests for 16 adjacent frames", n)
	}
	closeEngine(t, e)
}

// Damage in one frame leaves its neighbours readable, although they are read together.
func TestDamagedFrame(t *testing.T) {
	w := newWorld()
	o := w.options(t)
	o.MaxObjectBytes, o.MaxObjectAge = 1<<20, time.Hour
	e, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	v := create(t, e, w.config("a", 1))
	for off := int64(0); off < 256<<10; off += 64 << 10 {
		put(t, v, off, 64<<10, byte(off>>16)+1)
	}
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	key := volumelog.LogKey(v.ID(), volumelog.Position{Epoch: 1, Seq: 1})
	body, err := w.bucket.Get(t.Context(), key, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(body, bytes.Repeat([]byte{2}, 4096))
	body[at+100] ^= 1
	if err := w.bucket.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if err := w.bucket.PutIfAbsent(t.Context(), key, body); err != nil {
		t.Fatal(err)
	}
	e = w.open(t)
	defer closeEngine(t, e)
	if v, err = e.Volume(t.Context(), w.config("a", 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Read(t.Context(), 0, 256<<10); !errors.Is(err, ErrUnreadable) {
		t.Fatalf("a read over the damage: %v", err)
	}
	wantBytes(t, v, 0, 64<<10, 1)
	wantBytes(t, v, 128<<10, 128<<10>>1, 3)
}
