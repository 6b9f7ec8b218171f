package arena

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"
)

func mustNew(t testing.TB, bytes int64) *Arena {
	t.Helper()
	a, err := New(bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func mustAlloc(t testing.TB, a *Arena, n int64) [][]byte {
	t.Helper()
	bufs, err := a.Alloc(context.Background(), n)
	if err != nil {
		t.Fatal(err)
	}
	return bufs
}

func TestShapes(t *testing.T) {
	a := mustNew(t, 3<<20)
	for _, n := range []int64{1, 511, 4096, 4097, 60 << 10, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3 << 20} {
		bufs := mustAlloc(t, a, n)
		total, room := int64(0), int64(0)
		for i, b := range bufs {
			if uintptr(unsafe.Pointer(&b[0]))%PageSize != 0 {
				t.Errorf("%d: piece %d is not aligned", n, i)
			}
			if c := cap(b); c > ChunkSize || c < PageSize || c&(c-1) != 0 {
				t.Errorf("%d: piece %d has capacity %d", n, i, c)
			}
			if i < len(bufs)-1 && len(b) != cap(b) {
				t.Errorf("%d: piece %d has %d of %d bytes", n, i, len(b), cap(b))
			}
			total, room = total+int64(len(b)), room+int64(cap(b))
		}
		if total != n || room != (n+PageSize-1)/PageSize*PageSize {
			t.Errorf("%d: got %d bytes in pages of %d", n, total, room)
		}
		if used := a.Usage().UsedBytes; used != room {
			t.Errorf("%d: %d used, want %d", n, used, room)
		}
		a.Free(bufs)
	}
	if n := len(mustAlloc(t, a, 60<<10)); n != 4 {
		t.Errorf("60 KiB in %d pieces, want 32+16+8+4", n)
	}
	for _, n := range []int64{0, -1, 3<<20 + 1} {
		if _, err := a.Alloc(context.Background(), n); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%d: got %v", n, err)
		}
	}
	for _, n := range []int64{0, -1, 1 << 62} {
		if _, err := New(n); err == nil {
			t.Errorf("New(%d) succeeded", n)
		}
	}
}

// TestRandom fills and empties the arena at random: pieces never overlap, every request that fits in number of pages is
// served at once however fragmented, and in the end everything has joined again.
func TestRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const chunks = 4
	a := mustNew(t, chunks<<20)
	a.SetMangle(true)
	type piece struct {
		bufs [][]byte
		mark byte
	}
	var out []piece
	free := func(i int) {
		p := out[i]
		for _, b := range p.bufs {
			for _, x := range b[:cap(b)] {
				if x != p.mark {
					t.Fatal("pieces overlap")
				}
			}
		}
		first := p.bufs[0]
		a.Free(p.bufs)
		if first[0] == p.mark && p.mark != 0xdb {
			t.Fatal("not mangled")
		}
		out[i] = out[len(out)-1]
		out = out[:len(out)-1]
	}
	for step := range 3000 {
		left := chunks<<20 - a.Usage().UsedBytes
		n := 1 + rng.Int64N(1<<(3+rng.IntN(19)))
		if (n+PageSize-1)/PageSize*PageSize > left || rng.IntN(3) == 0 {
			if len(out) > 0 {
				free(rng.IntN(len(out)))
			}
			continue
		}
		p := piece{mustAlloc(t, a, n), byte(step)}
		for _, b := range p.bufs {
			b = b[:cap(b)]
			for i := range b {
				b[i] = p.mark
			}
		}
		out = append(out, p)
	}
	for len(out) > 0 {
		free(0)
	}
	whole := mustAlloc(t, a, chunks<<20)
	if len(whole) != chunks {
		t.Errorf("%d pieces after everything was freed, want %d", len(whole), chunks)
	}
	a.Free(whole)
}

func waitFor(a *Arena, waiting int) {
	for a.Usage().Waiting != waiting {
		runtime.Gosched()
	}
}

// TestOrder: a large request is not overtaken by small ones that would fit, and one that gives up lets the next through.
func TestOrder(t *testing.T) {
	a := mustNew(t, 1<<20)
	most := mustAlloc(t, a, 1<<20-8192)
	ctx, cancel := context.WithCancel(context.Background())
	type result struct {
		bufs [][]byte
		err  error
	}
	ask := func(ctx context.Context, n int64) chan result {
		c := make(chan result, 1)
		go func() {
			bufs, err := a.Alloc(ctx, n)
			c <- result{bufs, err}
		}()
		return c
	}
	large := ask(ctx, 64<<10)
	waitFor(a, 1)
	small := ask(context.Background(), 4096)
	waitFor(a, 2)
	larger := ask(context.Background(), 1<<20-4096)
	waitFor(a, 3)
	cancel()
	if r := <-large; !errors.Is(r.err, context.Canceled) {
		t.Errorf("got %v", r.err)
	}
	s := <-small
	if s.err != nil {
		t.Fatal(s.err)
	}
	a.Free(most)
	l := <-larger
	if l.err != nil {
		t.Fatal(l.err)
	}
	last := ask(context.Background(), 4096)
	waitFor(a, 1)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if r := <-last; !errors.Is(r.err, ErrClosed) {
		t.Errorf("got %v", r.err)
	}
	if _, err := a.Alloc(context.Background(), 1); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	// The memory stays until the last piece is back.
	l.bufs[0][0] = 1
	a.Free(l.bufs)
	s.bufs[0][0] = 1
	if a.mem == nil {
		t.Error("unmapped under a piece")
	}
	a.Free(s.bufs)
	if a.mem != nil {
		t.Error("still mapped")
	}
	if err := a.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestWrongFreePanics(t *testing.T) {
	a := mustNew(t, 1<<20)
	mustPanic := func(what string, bufs [][]byte) {
		defer func() {
			if recover() == nil {
				t.Errorf("%s: no panic", what)
			}
		}()
		a.Free(bufs)
	}
	bufs := mustAlloc(t, a, 8192)
	again := [][]byte{bufs[0]}
	mustPanic("foreign", [][]byte{make([]byte, 4096)})
	mustPanic("inside", [][]byte{bufs[0][4096:]})
	mustPanic("unaligned", [][]byte{bufs[0][1:]})
	a.Free(bufs)
	mustPanic("twice", again)
}

func TestConcurrent(t *testing.T) {
	a := mustNew(t, 2<<20)
	done := make(chan error)
	for w := range 8 {
		go func() {
			rng := rand.New(rand.NewPCG(uint64(w), 0))
			for range 300 {
				bufs, err := a.Alloc(context.Background(), 1+rng.Int64N(1<<20))
				if err != nil {
					done <- err
					return
				}
				for _, b := range bufs {
					b[0] = byte(w)
				}
				for _, b := range bufs {
					if b[0] != byte(w) {
						done <- errors.New("pieces overlap")
						return
					}
				}
				a.Free(bufs)
			}
			done <- nil
		}()
	}
	for range 8 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if u := a.Usage(); u.UsedBytes != 0 || u.Waiting != 0 {
		t.Errorf("left over: %+v", u)
	}
}

func BenchmarkAllocFree(b *testing.B) {
	for _, size := range []struct {
		name string
		n    int64
	}{{"4K", 4 << 10}, {"60K", 60 << 10}, {"64K", 64 << 10}, {"1M", 1 << 20}} {
		b.Run(size.name, func(b *testing.B) {
			a := mustNew(b, 16<<20)
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				bufs, err := a.Alloc(ctx, size.n)
				if err != nil {
					b.Fatal(err)
				}
				a.Free(bufs)
			}
		})
	}
}
