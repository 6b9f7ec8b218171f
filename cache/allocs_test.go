//go:build !race

package cache

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/objectstore"
)

// TestAllocs: a command that finds room, and its data at hand, allocates nothing (C11). The race detector's pools
// forget at random, so it is not tested there.
func TestAllocs(t *testing.T) {
	const size = 32 << 20
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection empties pools
	open := func(ack Level, age time.Duration) (*Engine, *Volume) {
		e, err := Open(t.Context(), Options{
			Dir: t.TempDir(), Node: testNode, HomeStore: homemap.NewMem(), ReadCacheBytes: -1,
			JournalBytes: 128 << 20, SegmentBytes: 32 << 20, DirtyBudget: 96 << 20,
			MaxObjectBytes: 64 << 20, MaxObjectAge: age, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		cfg := newWorld().config("a", 1)
		cfg.SizeBytes, cfg.Policy, cfg.Bucket = size, Policy{Ack: ack, Flush: Local}, objectstore.NewMem()
		return e, create(t, e, cfg)
	}
	none := func(v *Volume, what string, warm, runs int, f func()) {
		t.Helper()
		for range warm { // what grows once has grown
			f()
		}
		// A queue that reaches a new length costs once: one round of three without is the rule. Each begins with the journal
		// abreast: who has to wait for it does not find room.
		n := 1.0
		for round := 0; n != 0 && round < 3; round++ {
			if err := v.Wait(t.Context(), Local); err != nil {
				t.Fatal(err)
			}
			n = testing.AllocsPerRun(runs, f)
		}
		if n != 0 {
			t.Errorf("%s: %v allocations", what, n)
		}
	}
	var off int64
	write := func(v *Volume, n int64) {
		l, err := v.Reserve(t.Context(), off, n)
		if err == nil {
			l.Buffers()[0][0]++
			err = l.Commit(t.Context(), false)
		}
		if err != nil {
			t.Fatal(err)
		}
		off = (off + n) % size
	}
	read := func(v *Volume, n int64) {
		b, err := v.Read(t.Context(), off, n)
		if err != nil {
			t.Fatal(err)
		}
		b.Release()
		off = (off + n) % size
	}
	for _, ack := range []Level{Memory, Local} {
		_, v := open(ack, time.Hour)
		for _, c := range []struct {
			n          int64
			warm, runs int
		}{{4096, 4000, 2000}, {256 << 10, 100, 100}} { // at memory, the first writes are ahead of the journal
			off = 0
			if ack == Local {
				c.warm /= 20
			}
			none(v, fmt.Sprintf("write of %d bytes at %s", c.n, ack), c.warm, c.runs/10, func() { write(v, c.n) })
			off = 0
			none(v, fmt.Sprintf("read of %d bytes of the journal", c.n), 10, c.runs, func() { read(v, c.n) })
			none(v, fmt.Sprintf("read of %d bytes that nobody wrote", c.n), 10, c.runs, func() {
				off = size / 2
				read(v, c.n)
			})
		}
	}
	_, v := open(Local, time.Millisecond)
	off = 0
	for range 8 {
		write(v, 1<<20)
	}
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int64{4096, 256 << 10} {
		at := int64(0)
		none(v, fmt.Sprintf("read of %d bytes of the read cache", n), 300, 300, func() {
			at = (at + 8<<20 - n - 64<<10) % (8 << 20) / n * n // backwards: reading ahead has nothing to do
			off = at
			read(v, n)
		})
	}
}
