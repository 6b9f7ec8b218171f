package cache

import (
	"bytes"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// filled checks that bufs hold n bytes of one value.
func filled(t *testing.T, bufs [][]byte, n int, fill byte) {
	t.Helper()
	if got := bytes.Join(bufs, nil); !bytes.Equal(got, bytes.Repeat([]byte{fill}, n)) {
		t.Errorf("not %d bytes of %#x: %x…", n, fill, got[:min(len(got), 16)])
	}
}

// Between the moment at which a reader finds data and the one at which it has read it, the data moves: from memory to the journal, from the journal to
// the bucket. What it found stays where it was (C10).
func TestFoundDataStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		e := w.open(t)
		defer closeEngine(t, e)
		cfg := w.config("a", 1)
		cfg.Policy = Policy{Ack: Memory, Flush: Local}
		v := create(t, e, cfg)
		find := func() *Borrowed {
			b := e.loans.Get().(*Borrowed)
			b.e = e
			if err := v.plan(b, 0, 64); err != nil {
				t.Fatal(err)
			}
			p := patience{ctx: t.Context(), limit: time.Minute}
			defer p.end()
			if err := v.provide(&p, b); err != nil {
				t.Fatal(err)
			}
			return b
		}
		read := func(b *Borrowed, inMem bool, fill byte) {
			t.Helper()
			x := &b.plan[0]
			if len(b.plan) != 1 || inMemory(x) != inMem {
				t.Fatalf("found %+v", b.plan)
			}
			if inMem {
				readMemory(b, x, b.held[0])
			} else if err := v.readJournal(b, x); err != nil {
				t.Fatal(err)
			}
			filled(t, b.Buffers(), 32<<10, fill)
			b.unpin()
			b.Release()
		}

		gate := make(chan struct{})
		open := sync.OnceFunc(func() { close(gate) })
		defer open()
		w.setFault(func(op string) error {
			if op == "syncdata" {
				<-gate
			}
			return nil
		})
		put(t, v, 0, 32<<10, 1)
		b := find()
		open()
		if err := v.Wait(t.Context(), Local); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		put(t, v, 1<<20, 32<<10, 2) // in memory that is free
		read(b, true, 1)

		if err := v.Wait(t.Context(), Local); err != nil {
			t.Fatal(err)
		}
		put(t, v, 0, 32<<10, 3)
		if err := v.Wait(t.Context(), Local); err != nil {
			t.Fatal(err)
		}
		b = find()
		for i := range byte(20) { // more than the journal has segments
			if err := e.Drain(t.Context()); err != nil {
				t.Fatal(err)
			}
			put(t, v, 1<<20, 128<<10, 4+i)
		}
		read(b, false, 3)
	})
}

// What was lent of the read cache stays, whatever is read meanwhile.
func TestLentFramesStay(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	defer closeEngine(t, e)
	cfg := w.config("a", 1)
	cfg.SizeBytes = 16 << 20
	v := create(t, e, cfg)
	const piece = 128 << 10
	for off := int64(0); off < 12<<20; off += piece { // three times the cache
		put(t, v, off, piece, byte(1+off/piece))
	}
	if err := e.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	read := func(off int64) *Borrowed {
		b, err := v.Read(t.Context(), off, piece)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	lent := read(0)
	if len(lent.chunks) == 0 {
		t.Fatal("nothing is lent from the cache")
	}
	for range 2 {
		for off := int64(piece); off < 12<<20; off += piece {
			b := read(off)
			filled(t, b.Buffers(), piece, byte(1+off/piece))
			b.Release()
		}
	}
	filled(t, lent.Buffers(), piece, 1)
	lent.Release()
}
