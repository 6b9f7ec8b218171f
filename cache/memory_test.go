package cache

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Under ack=memory a write is answered and readable while the device is in the middle of a sync: overwritten in part,
// repeated, zeroed, and after the sync as before it. How much is answered ahead of the journal is bounded (C2b), and a volume at
// `local` waits for its sync.
func TestMemoryAheadOfTheJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		o := w.options(t)
		o.JournalBytes, o.SegmentBytes, o.ArenaBytes, o.DirtyBudget = 64<<20, 8<<20, 64<<20, 48<<20
		o.UnmetAfter, o.CommandWait = time.Hour, 2*time.Hour
		e, err := Open(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer closeEngine(t, e)
		cfg := w.config("a", 1)
		cfg.SizeBytes, cfg.Policy = 32<<20, Policy{Ack: Memory, Flush: Local}
		v, other := create(t, e, cfg), create(t, e, w.config("b", 2))
		gate := make(chan struct{})
		open := sync.OnceFunc(func() { close(gate) })
		defer open()
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-gate
			}
			return nil
		})
		put(t, v, 0, 64<<10, 1)
		put(t, v, 4096+512, 1024, 2)
		put(t, v, 60<<10, 128<<10, 3)
		if err := v.WriteSame(t.Context(), Range{1 << 20, 1 << 20}, append(make([]byte, 511), 9), false); err != nil {
			t.Fatal(err)
		}
		put(t, v, 1<<20+512, 512, 4)
		if err := v.Deallocate(t.Context(), []Range{{8192, 4096}, {1<<20 + 4096, 512}}, false); err != nil {
			t.Fatal(err)
		}
		check := func() {
			t.Helper()
			wantBytes(t, v, 0, 4096+512, 1)
			wantBytes(t, v, 4096+512, 1024, 2)
			wantBytes(t, v, 4096+1536, 2560, 1)
			wantBytes(t, v, 8192, 4096, 0)
			wantBytes(t, v, 12288, 48<<10, 1)
			wantBytes(t, v, 60<<10, 128<<10, 3)
			wantBytes(t, v, 1<<20+512, 512, 4)
			b, err := v.Read(t.Context(), 1<<20+1024, 1024)
			if err != nil {
				t.Fatal(err)
			}
			defer b.Release()
			got := b.Buffers()[0]
			if got[0] != 0 || got[511] != 9 || got[1023] != 9 {
				t.Fatal("the repeated block is another one")
			}
			wantBytes(t, v, 1<<20+4096, 512, 0)
		}
		if s := v.Status(); s.Watermarks.Local.LSN != 0 || s.Watermarks.Acked.LSN != 7 {
			t.Fatalf("the device has not answered: %+v", s.Watermarks)
		}
		check()

		flushed, local := make(chan error, 1), make(chan error, 1)
		go func() { flushed <- v.Flush(t.Context()) }()
		go func() { local <- tryPut(t.Context(), other, 0, 4096, 1, false) }()
		acked := int64(0)
		for {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := tryPut(ctx, v, 4<<20+acked, 256<<10, 5, false)
			cancel()
			if errors.Is(err, context.DeadlineExceeded) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			acked += 256 << 10
		}
		if acked > aheadBytes || acked < aheadBytes/2 {
			t.Errorf("%d bytes are acknowledged ahead of the journal", acked)
		}
		select {
		case err := <-flushed:
			t.Fatalf("a flush before the sync: %v", err)
		case err := <-local:
			t.Fatalf("a write at local before the sync: %v", err)
		default:
		}
		open()
		if err := errors.Join(<-flushed, <-local); err != nil {
			t.Fatal(err)
		}
		if err := v.Wait(t.Context(), Local); err != nil {
			t.Fatal(err)
		}
		check()
		if err := v.Wait(t.Context(), Object); err != nil {
			t.Fatal(err)
		}
		check()
		wantBytes(t, v, 4<<20, 256<<10, 5)
		if n := e.ahead.used; n != 0 {
			t.Errorf("%d bytes are ahead of the journal, and nothing is under way", n)
		}
	})
}

// The ring grows, wraps around, and gives back what it was given.
func TestUnsynced(t *testing.T) {
	var u unsynced
	next, oldest := LSN(1), LSN(1)
	p := map[LSN]*payload{}
	for step := range 1000 {
		for range step % 37 {
			if next%3 > 0 {
				p[next] = new(payload)
			}
			u.push(next, p[next])
			next++
		}
		for range step % 41 {
			if oldest < next {
				u.pop(oldest)
				delete(p, oldest)
				oldest++
			}
		}
		for l := oldest - 1; l <= next; l++ {
			if u.get(l) != p[l] {
				t.Fatalf("step %d: LSN %d of %d to %d", step, l, oldest, next-1)
			}
		}
	}
}
