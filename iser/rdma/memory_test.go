package rdma_test

import (
	"context"
	"errors"
	"testing"
	"unsafe"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

func newArena(t *testing.T, bytes int64) (*rdma.Arena, *arena.Arena, rdma.PD) {
	t.Helper()
	p, err := iwarp.New(iwarp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	pd, err := p.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := arena.New(bytes)
	if err != nil {
		t.Fatal(err)
	}
	a, err := rdma.NewArena(pd, mem)
	if err != nil {
		t.Fatal(err)
	}
	return a, mem, pd
}

func TestArena(t *testing.T) {
	a, mem, pd := newArena(t, 2<<20)
	if err := pd.Close(); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("closed with a region: %v", err)
	}
	bufs, err := a.Alloc(context.Background(), 60<<10)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bufs {
		if !a.Contains(b) || a.SGE(b).LKey != a.MR().LKey() || uintptr(unsafe.Pointer(&b[0]))%4096 != 0 {
			t.Error("a piece is not in the arena")
		}
	}
	if a.Contains(make([]byte, 10)) {
		t.Error("other memory is in the arena")
	}
	r := mem.Region()
	if !a.Contains(r) || !a.Contains(r[len(r):]) || !a.Contains(r[5:6]) {
		t.Error("the region is not in the arena")
	}
	a.Free(bufs)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := pd.Close(); err != nil {
		t.Error(err)
	}
	if _, err := pd.Register(r, 0); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := mem.Close(); err != nil {
		t.Error(err)
	}
	if _, err := rdma.NewArena(pd, mem); err == nil {
		t.Error("an arena of memory that is gone")
	}
}

func TestSlab(t *testing.T) {
	for _, size := range []int{1, 64, 204, 4096, 8268, 8296, 70_000, 1 << 20} {
		a, mem, _ := newArena(t, 16<<20)
		count := min(300, 8<<20/size)
		s, err := rdma.NewSlab(context.Background(), a, count, size)
		if err != nil {
			t.Fatal(err)
		}
		var taken []int
		for {
			i, ok := s.Take()
			if !ok {
				break
			}
			taken = append(taken, i)
			b := s.Buf(i)
			if len(b) != size || cap(b) != size || !a.Contains(b) || uintptr(unsafe.Pointer(&b[0]))%64 != 0 {
				t.Fatalf("buffer of %d, capacity %d, want %d", len(b), cap(b), size)
			}
			for j := range b {
				if b[j] != 0 {
					t.Fatal("buffers overlap")
				}
				b[j] = 1
			}
			if e := s.SGE(i, 1); len(e.Buf) != 1 || &e.Buf[0] != &b[0] {
				t.Fatal("wrong element")
			}
		}
		if len(taken) != count {
			t.Errorf("size %d: %d buffers, want %d", size, len(taken), count)
		}
		for _, i := range taken {
			s.Give(i)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Error("giving a buffer back twice did not panic")
				}
			}()
			s.Give(taken[0])
		}()
		s.Close()
		if u := mem.Usage(); u.UsedBytes != 0 {
			t.Errorf("size %d: %d bytes are lost", size, u.UsedBytes)
		}
	}
	a, mem, _ := newArena(t, 1<<20)
	for _, c := range [][2]int{{0, 1}, {1, 0}, {1, 1<<20 + 1}, {-1, 5}} {
		if _, err := rdma.NewSlab(context.Background(), a, c[0], c[1]); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%v: got %v", c, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := rdma.NewSlab(ctx, a, 3, 1<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	// Memory in pages apart from each other holds no larger buffer.
	var odd [][][]byte
	for i := range 256 {
		b, err := a.Alloc(context.Background(), 4096)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 1 {
			odd = append(odd, b)
			continue
		}
		defer a.Free(b)
	}
	for _, b := range odd {
		a.Free(b)
	}
	if _, err := rdma.NewSlab(context.Background(), a, 1, 5000); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	if u := mem.Usage(); u.UsedBytes != 128*4096 {
		t.Errorf("%d bytes are used", u.UsedBytes)
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		rdma.OpRead.String(): "RDMA Read", rdma.Opcode(77).String(): "unknown (77)", rdma.StatusSuccess.String(): "success", rdma.Status(99).String(): "unknown (99)",
		(&rdma.RejectedError{}).Error(): "rdma: connection was rejected by the peer",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
