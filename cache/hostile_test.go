package cache

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/vfs"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/faulty"
)

// settled waits until a volume is no longer being opened.
func settled(t *testing.T, v *Volume) *Volume {
	t.Helper()
	for v.Status().State == StateOpening {
		if t.Context().Err() != nil {
			t.Fatal(t.Context().Err())
		}
		time.Sleep(time.Millisecond)
	}
	return v
}

// A barrier on a volume whose maps are still being rebuilt covers what the journal holds of it:
// otherwise a drain, or a deletion that is to keep the bucket, lets go of acknowledged writes.
func TestBarrierWhileOpening(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket = bucket
		e := w.open(t)
		v := create(t, e, cfg)
		put(t, v, 0, 4096, 1)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		bucket.Down(objectstore.ErrTransient)
		put(t, v, 4096, 4096, 2)
		closeEngine(t, e)
		w.store = homemap.NewMem()
		e = w.open(t)
		defer closeEngine(t, e)
		v, err := e.Volume(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		soon, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := v.Wait(soon, Object); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("the barrier while the bucket is away: %v", err)
		}
		if err := e.Drain(soon); err == nil {
			t.Fatal("drained while the bucket is away")
		}
		bucket.Down(nil)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		wantBytes(t, v, 4096, 4096, 2)
		if s := v.Status(); s.Watermarks.Object.LSN != 2 {
			t.Fatalf("%+v", s.Watermarks)
		}
	})
}

// What only the journal holds of a volume that nobody opened is not drained, and a drain says so.
func TestDrainWithOrphans(t *testing.T) {
	w := newWorld()
	bucket := faulty.Wrap(w.bucket)
	cfg := w.config("a", 1)
	cfg.Bucket = bucket
	e := w.open(t)
	v := create(t, e, cfg)
	bucket.Down(objectstore.ErrTransient)
	put(t, v, 0, 4096, 1)
	closeEngine(t, e)
	e = w.open(t)
	defer closeEngine(t, e)
	if err := e.Drain(t.Context()); err == nil || !strings.Contains(err.Error(), cfg.ID.String()) {
		t.Fatalf("drain with writes of %s in the journal: %v", cfg.ID, err)
	}
}

// Under ack=memory a write that the device refuses was answered before, or is answered with the failure; what stands
// on the journal fails.
func TestMemoryWriteOverAFailingJournal(t *testing.T) {
	for _, op := range []string{"writev", "syncdata"} {
		t.Run(op, func(t *testing.T) {
			w := newWorld()
			cfg := w.config("a", 1)
			cfg.Policy = Policy{Ack: Memory, Flush: Local}
			e := w.open(t)
			v := create(t, e, cfg)
			w.setFault(func(o string) error {
				if o == op {
					return errors.New("I/O error")
				}
				return nil
			})
			answered := make(chan error, 1)
			go func() { answered <- tryPut(t.Context(), v, 0, 4096, 1, false) }()
			select {
			case err := <-answered:
				if err != nil && !errors.Is(err, ErrJournal) {
					t.Fatal(err)
				}
			case <-time.After(30 * time.Second): // the failure; nothing waits for it otherwise
				t.Fatal("the write is never answered")
			}
			if err := v.Flush(t.Context()); !errors.Is(err, ErrJournal) {
				t.Fatalf("flush: %v", err)
			}
			_ = e.Close(t.Context())
		})
	}
}

// While flushes are degraded from `object`, they still stand on `local`, also under ack=memory.
func TestDegradedFlushIsLocal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket, cfg.Policy = bucket, Policy{Ack: Memory, Flush: Object, OnUnmet: Degrade}
		e := w.open(t)
		defer closeEngine(t, e)
		v := create(t, e, cfg)
		bucket.Down(objectstore.ErrTransient)
		put(t, v, 0, 4096, 1)
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := v.Status(); s.State != StateDegraded {
			t.Fatalf("%+v", s)
		}
		gate := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-gate
			}
			return nil
		})
		put(t, v, 4096, 4096, 2) // it is in memory, and acknowledged there
		flushed := make(chan error, 1)
		go func() { flushed <- v.Flush(t.Context()) }()
		synctest.Wait()
		select {
		case err := <-flushed:
			t.Fatalf("flushed (%v) with %+v", err, v.Status().Watermarks)
		default:
		}
		close(gate)
		if err := <-flushed; err != nil {
			t.Fatal(err)
		}
	})
}

// A volume that is stopped while its epoch begins stays stopped.
func TestStoppedWhileOpening(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	cfg := w.config("a", 1)
	put(t, create(t, e, cfg), 0, 4096, 1)
	closeEngine(t, e)
	w.store = homemap.NewMem()
	e = w.open(t)
	defer func() { _ = e.Close(t.Context()) }()
	cause := errors.New("stopped")
	w.setFault(func(op string) error {
		if op == "apply" { // the home map is saved when the epoch's fence is durable
			for _, v := range e.all() {
				v.stop(StateFailed, cause)
			}
		}
		return nil
	})
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	<-v.destage.idle
	if err := v.serving(); !errors.Is(err, cause) {
		t.Fatalf("served after it was stopped: %v", err)
	}
}

// Making a volume that is open already fails, and does the open one no harm.
func TestCreateTwice(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	defer closeEngine(t, e)
	cfg := w.config("a", 1)
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 1)
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Create(t.Context(), cfg); err == nil {
		t.Fatal("made twice")
	}
	if _, err := e.Volume(t.Context(), cfg); err == nil {
		t.Fatal("opened twice")
	}
	wantBytes(t, v, 0, 4096, 1)
	put(t, v, 4096, 4096, 2)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	if ids, err := w.store.Volumes(); err != nil || len(ids) != 1 {
		t.Fatalf("the home map of the open volume is gone from the store: %v, %v", ids, err)
	}
}

// A creation that its caller gave up leaves nothing behind that holds the journal's segments.
func TestCreateGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var stalled atomic.Bool
		gate := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "syncdata" && stalled.Load() {
				<-gate
			}
			return nil
		})
		e := w.open(t)
		defer closeEngine(t, e)
		v := create(t, e, w.config("a", 1))
		synctest.Wait()
		stalled.Store(true)
		soon, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := e.Create(soon, w.config("b", 2)); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		close(gate)
		if vs := e.all(); len(vs) != 1 {
			t.Fatalf("%d volumes", len(vs))
		}
		put(t, v, 0, 4096, 1)
		if err := e.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		if segs := e.journal.Segments(); len(segs) != 1 {
			t.Fatalf("after a drain: %+v", segs)
		}
		if _, err := e.Create(t.Context(), w.config("b", 2)); err != nil {
			t.Fatalf("the second attempt: %v", err)
		}
	})
}

// With journal and maps both gone, what was acknowledged above the bucket's end is lost, and that is said.
func TestCacheDirectoryLost(t *testing.T) {
	w := newWorld()
	bucket := faulty.Wrap(w.bucket)
	cfg := w.config("a", 1)
	cfg.Bucket = bucket
	e := w.open(t)
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 1)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	bucket.Down(objectstore.ErrTransient)
	put(t, v, 0, 4096, 2)
	closeEngine(t, e)
	bucket.Down(nil)
	w.disk, w.store = vfs.NewMem(), homemap.NewMem()
	e = w.open(t)
	defer closeEngine(t, e)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	settled(t, v)
	wantBytes(t, v, 0, 4096, 1)
	if s := v.Status(); s.Generation != 2 || s.State != StateAvailable {
		t.Fatalf("%+v", s)
	}
	if err := v.Flush(t.Context()); err != ErrLostWrites {
		t.Fatalf("the first flush: %v", err)
	}
}

// Home maps that are older than the journal are rebuilt from the bucket; nothing old is served.
func TestHomeMapsOlderThanJournal(t *testing.T) {
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
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	put(t, v, 8192, 4096, 4)
	closeEngine(t, e)
	for _, more := range []bool{false, true} {
		w.store = old.CrashClone()
		e = w.open(t)
		v, err := e.Volume(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		settled(t, v)
		wantBytes(t, v, 0, 4096, 2)
		if s := v.Status(); s.State != StateAvailable || s.Generation != 1 {
			t.Fatalf("%+v", s)
		}
		if !more {
			put(t, v, 4096, 4096, 3)
		} else {
			wantBytes(t, v, 4096, 4096, 3)
		}
		closeEngine(t, e)
	}
}

// A checkpoint that a bucket does not answer holds nobody else's journal space.
func TestCheckpointHangs(t *testing.T) {
	w := newWorld()
	bucket := faulty.Wrap(w.bucket)
	began := make(chan struct{}, 1)
	bucket.Add(faulty.Fault{Op: objectstore.OpPut, Prefix: "volumes/" + w.config("a", 1).ID.String() + "/checkpoint", Action: faulty.Hang, Began: began})
	e := w.open(t)
	defer closeEngine(t, e)
	cfg := w.config("a", 1)
	cfg.Bucket = bucket
	v, u := create(t, e, cfg), create(t, e, w.config("b", 2))
	for len(began) == 0 {
		put(t, v, 0, 4096, 1)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 300 { // several times the journal
		if err := tryPut(t.Context(), u, int64(i%32)*(128<<10), 128<<10, byte(i), false); err != nil {
			t.Fatalf("write %d: %v", i, err)
		}
	}
}

// A volume that is deleted with its objects leaves none behind, also if a checkpoint was being written.
func TestPurgeDuringCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		cfg := w.config("a", 1)
		bucket := faulty.Wrap(w.bucket)
		began, gate := make(chan struct{}, 1), make(chan struct{})
		bucket.Add(faulty.Fault{Op: objectstore.OpPut, Prefix: "volumes/" + cfg.ID.String() + "/checkpoint", Action: faulty.Delay, Gate: gate, Began: began})
		cfg.Bucket = bucket
		e := w.open(t)
		v := create(t, e, cfg)
		for len(began) == 0 {
			put(t, v, 0, 4096, 1)
			if err := v.Wait(t.Context(), Object); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if err := e.Forget(t.Context(), cfg.ID, bucket, true); err != nil {
			t.Fatal(err)
		}
		close(gate)
		synctest.Wait()
		if left, err := w.bucket.List(t.Context(), "", "", 10); err != nil || len(left) != 0 {
			t.Fatalf("after the purge: %v, %v", left, err)
		}
		closeEngine(t, e)
	})
}

// Volumes whose bucket hangs leave the others the memory to build objects in.
func TestHungBucketLeavesBuilders(t *testing.T) {
	w := newWorld()
	o := w.options(t)
	o.MaxObjectBytes, o.DestageParallel = 256<<20, 4
	e, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, e)
	hung := faulty.Wrap(named{w.bucket, "mem:hung"})
	began := make(chan struct{}, 8)
	for i := range byte(4) {
		cfg := w.config("hung", 10+i)
		cfg.Bucket = hung
		v := create(t, e, cfg)
		put(t, v, 0, 4096, 1)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
	}
	hung.Add(faulty.Fault{Op: objectstore.OpPut, Action: faulty.Hang, Began: began})
	for _, v := range e.all() {
		put(t, v, 0, 4096, 2)
		<-began
	}
	v := create(t, e, w.config("well", 2))
	put(t, v, 0, 4096, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := v.Wait(ctx, Object); err != nil {
		t.Fatalf("a volume on another bucket: %v", err)
	}
}

// Readers whose bucket hangs leave those of another bucket, and of the journal, the memory and the fetches to go on.
func TestHungBucketLeavesReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		o := w.options(t)
		o.MaxObjectBytes = 1 << 20
		e, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer closeEngine(t, e)
		bucket := faulty.Wrap(named{w.bucket, "mem:hung"})
		var hung [3]*Volume
		for i := range hung {
			cfg := w.config("hung", byte(10+i))
			cfg.Bucket = bucket
			hung[i] = create(t, e, cfg)
		}
		well := create(t, e, w.config("well", 2))
		for _, v := range e.all() {
			for off := int64(0); off < 2<<20; off += 128 << 10 {
				put(t, v, off, 128<<10, 7)
			}
			if err := v.Wait(t.Context(), Object); err != nil {
				t.Fatal(err)
			}
		}
		bucket.Add(faulty.Fault{Op: objectstore.OpGetRange, Action: faulty.Hang})
		ended := make(chan error, 1000)
		readers := 0
		for _, v := range hung {
			for _, n := range []int64{4096, 128 << 10, 512 << 10} {
				for off := int64(0); off+n <= 2<<20; off += max(n, 64<<10) {
					readers++
					go func() {
						b, err := v.Read(t.Context(), off, n)
						if err == nil {
							b.Release()
						}
						ended <- err
					}()
				}
			}
		}
		synctest.Wait() // all of them wait for the bucket, or for room
		began := time.Now()
		for off := int64(0); off < 2<<20; off += 256 << 10 {
			wantBytes(t, well, off, 256<<10, 7)
		}
		put(t, hung[0], 0, 4096, 8)
		wantBytes(t, hung[0], 0, 4096, 8)
		if d := time.Since(began); d > 0 { // fake: nobody waited for a deadline
			t.Errorf("the others waited for %s", d)
		}
		for range readers {
			if err := <-ended; !errors.Is(err, ErrBusy) {
				t.Fatalf("a reader of the bucket that hangs: %v", err)
			}
		}
		wantBytes(t, well, 0, 1<<20, 7)
	})
}

type named struct {
	objectstore.Bucket
	url string
}

func (n named) URL() string { return n.url }

// A loss is reported to a flush even if the node is stopped, cleanly or not, before one comes; and
// once it was reported, it is not again.
func TestLossIsReportedAfterARestart(t *testing.T) {
	for _, drained := range []bool{false, true} {
		w := newWorld()
		cfg := w.config("a", 1)
		e := w.open(t)
		put(t, create(t, e, cfg), 0, 4096, 1)
		if err := e.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		closeEngine(t, e)
		w.disk = vfs.NewMem()
		open := func() *Volume {
			t.Helper()
			e = w.open(t)
			v, err := e.Volume(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			return settled(t, v)
		}
		v := open()
		if drained {
			put(t, v, 0, 4096, 2)
			if err := e.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		closeEngine(t, e)
		v = open()
		if g := v.Status().Generation; g != 2 {
			t.Fatalf("generation %d", g)
		}
		if err := v.Flush(t.Context()); err != ErrLostWrites {
			t.Fatalf("drained %v: the first flush: %v", drained, err)
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if drained {
			put(t, v, 0, 4096, 3)
			if err := e.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		closeEngine(t, e)
		v = open()
		if err := v.Flush(t.Context()); err != nil {
			t.Fatalf("drained %v: reported again: %v", drained, err)
		}
		closeEngine(t, e)
	}
}

// A clock that was ahead and is set back does not keep replayed records from the bucket.
func TestClockSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket = bucket
		e := w.open(t)
		v := create(t, e, cfg)
		bucket.Down(objectstore.ErrTransient)
		put(t, v, 0, 4096, 1)
		closeEngine(t, e)
		bucket.Down(nil)
		e = w.open(t)
		defer closeEngine(t, e)
		r := e.found(cfg.ID)
		for i := range r.recs { // as a clock a year ahead would have had it
			r.recs[i].rec.Time += int64(365 * 24 * time.Hour)
			r.recs[i].at = time.Unix(0, r.recs[i].rec.Time)
		}
		v, err := e.Volume(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // fake
		synctest.Wait()
		if s := v.Status(); s.DirtyBytes != 0 {
			t.Fatalf("a minute later: %+v", s)
		}
	})
}

// A volume that the caller knows to be larger than journal and bucket say is so.
func TestSizeOfTheCaller(t *testing.T) {
	w := newWorld()
	cfg := w.config("a", 1)
	e := w.open(t)
	put(t, create(t, e, cfg), 0, 4096, 1)
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	w.disk = vfs.NewMem() // and with it the record of the resize
	cfg.SizeBytes = 8 << 20
	e = w.open(t)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	settled(t, v)
	put(t, v, 8<<20-4096, 4096, 2)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, v, 8<<20-4096, 4096, 2)
	if err := e.Forget(t.Context(), cfg.ID, w.bucket, false); err != nil {
		t.Fatal(err)
	}
	v, report, err := e.Restore(t.Context(), VolumeConfig{ID: cfg.ID, SizeBytes: 16 << 20, Policy: DefaultPolicy, Bucket: w.bucket})
	if err != nil || report.SizeBytes != 16<<20 {
		t.Fatalf("%+v, %v", report, err)
	}
	put(t, v, 16<<20-4096, 4096, 3)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
}

// A home map that destage finds damaged takes its volume out of service, and holds nobody else's journal space.
func TestDestageMeetsADamagedHomeMap(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	cfg := w.config("a", 1)
	put(t, create(t, e, cfg), 0, 4096, 1)
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, e)
	o := w.options(t)
	o.HomeStore = damagedPages{o.HomeStore, cfg.ID}
	e, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, e)
	v, err := e.Volume(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	put(t, v, 4096, 4096, 2)
	if err := v.Wait(t.Context(), Object); !errors.Is(err, ErrDamaged) {
		t.Fatalf("%v; %+v", err, v.Status())
	}
}

// damagedPages is a store whose pages of one volume do not decode.
type damagedPages struct {
	homemap.Store
	id uuid.UUID
}

func (d damagedPages) Get(id uuid.UUID, t homemap.Table, key uint64, dst []byte) ([]byte, bool, error) {
	if id == d.id && t == homemap.Pages {
		return append(dst, "damaged"...), true, nil
	}
	return d.Store.Get(id, t, key, dst)
}

// A disk that was full and has room again frees the journal by itself: with a full journal nothing else happens that would call for it. Meanwhile
// an event and the volume's status say what is missing.
func TestRoomComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var full atomic.Bool
		w.setFault(func(op string) error {
			if op == "apply" && full.Load() {
				return fmt.Errorf("%w: 1 MiB are free in /cache/maps", homemap.ErrNoSpace)
			}
			return nil
		})
		opt := w.options(t)
		var mu sync.Mutex
		var events []Event
		opt.Events = func(ev Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, ev)
		}
		e, err := Open(t.Context(), opt)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close(context.WithoutCancel(t.Context()))
		v := create(t, e, w.config("a", 1))
		full.Store(true)
		data := make([]byte, 64<<10)
		write := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			l, err := v.Reserve(ctx, 0, int64(len(data)))
			if err != nil {
				return err
			}
			return l.Commit(ctx, false)
		}
		for err == nil {
			err = write()
		}
		time.Sleep(10 * time.Minute) // of the bubble: nobody writes
		if s := v.Status(); !strings.Contains(s.Reason, "1 MiB are free") {
			t.Errorf("the status says %q", s.Reason)
		}
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		if err := e.Drain(t.Context()); !errors.Is(err, ErrKept) || !strings.Contains(err.Error(), "1 MiB are free") {
			t.Errorf("drain: %v", err)
		}
		full.Store(false)
		time.Sleep(time.Minute)
		if err := write(); err != nil {
			t.Errorf("a write when there is room again: %v", err)
		}
		mu.Lock()
		defer mu.Unlock()
		said := map[string]int{}
		for _, ev := range events {
			said[ev.Type]++
		}
		if said["journal_not_reclaimed"] != 1 || said["journal_reclaimed"] != 1 {
			t.Errorf("events: %v", said)
		}
	})
}

// A journal that fails while nothing is being written stops its volumes all the same.
func TestJournalFailsWhileIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		var segments atomic.Int32
		gate := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "rename" && segments.Add(1) > 2 { // of a segment that is made in the background
				<-gate
				return errors.New("I/O error")
			}
			return nil
		})
		e := w.open(t)
		v := create(t, e, w.config("a", 1))
		close(gate)
		synctest.Wait()
		if s := v.Status(); s.State != StateFailed {
			t.Fatalf("%+v", s)
		}
		_ = e.Close(t.Context())
	})
}

// An engine that is closed while a volume is being restored does not wait for it.
func TestCloseDuringRestore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		e := w.open(t)
		cfg := w.config("a", 1)
		v := create(t, e, cfg)
		put(t, v, 0, 4096, 1)
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		if err := e.Forget(t.Context(), cfg.ID, w.bucket, false); err != nil {
			t.Fatal(err)
		}
		bucket := faulty.Wrap(w.bucket)
		began := make(chan struct{}, 1)
		bucket.Add(faulty.Fault{Action: faulty.Hang, Began: began})
		restored := make(chan error, 1)
		go func() {
			_, _, err := e.Restore(t.Context(), VolumeConfig{ID: cfg.ID, Policy: DefaultPolicy, Bucket: bucket})
			restored <- err
		}()
		<-began
		soon, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := e.Close(soon); err != nil {
			t.Fatalf("close: %v", err)
		}
		if err := <-restored; err == nil {
			t.Fatal("restored into a closed engine")
		}
	})
}

// A command that ends with an error part of the way has no outcome open.
func TestDeallocateHasNoOpenOutcome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		o := w.options(t)
		o.DirtyBudget = 64 << 10
		bucket := faulty.Wrap(w.bucket)
		cfg := w.config("a", 1)
		cfg.Bucket = bucket
		e, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer closeEngine(t, e)
		v := create(t, e, cfg)
		bucket.Down(objectstore.ErrTransient)
		for i := range int64(15) {
			put(t, v, i*4096, 4096, 1)
		}
		gate := make(chan struct{})
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-gate
			}
			return nil
		})
		ended := make(chan error, 1)
		go func() { ended <- v.Deallocate(t.Context(), []Range{{0, 4096}, {4096, 4096}}, false) }()
		time.Sleep(time.Minute) // fake
		select {
		case err := <-ended:
			t.Fatalf("ended with %v, and the first range is on its way", err)
		default:
		}
		close(gate)
		if err := <-ended; !errors.Is(err, ErrBusy) {
			t.Fatal(err)
		}
		wantBytes(t, v, 0, 4096, 0)
		wantBytes(t, v, 4096, 4096, 1)
	})
}

// The size of a volume never goes back: not by resizes that cross, and not by an owner that learns of a resize from the
// bucket only.
func TestSizeNeverGoesBack(t *testing.T) {
	w := newWorld()
	cfg := w.config("a", 1)
	e := w.open(t)
	v := create(t, e, cfg)
	put(t, v, 0, 4096, 1)
	for _, size := range []int64{8 << 20, 6 << 20} { // as two callers at once would have it
		if err := v.logNote(t.Context(), note{Size: size}); err != nil {
			t.Fatal(err)
		}
	}
	closeEngine(t, e)
	for range 2 {
		e = w.open(t)
		v, err := e.Volume(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if n := v.Status().Config.SizeBytes; n != 8<<20 {
			t.Fatalf("size %d", n)
		}
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		for v.destageAttached() < v.Status().Epoch { // the epoch is open in the bucket
			time.Sleep(time.Millisecond)
		}
		closeEngine(t, e) // the home map is not saved
	}
	fresh := newWorld()
	fresh.bucket = w.bucket
	e = fresh.open(t)
	defer closeEngine(t, e)
	v, report, err := e.Restore(t.Context(), VolumeConfig{ID: cfg.ID, Policy: DefaultPolicy, Bucket: w.bucket})
	if err != nil || report.SizeBytes != 8<<20 || v.size.Load() != 8<<20 {
		t.Fatalf("%+v, %v", report, err)
	}
}

// destageAttached is the epoch that destage has opened in the bucket.
func (v *Volume) destageAttached() uint64 {
	v.destage.apply.Lock()
	defer v.destage.apply.Unlock()
	if v.destage.writer == nil {
		return 0
	}
	return v.destage.writer.Epoch()
}
