package rdma

import (
	"context"
	"fmt"
	"math/bits"
	"unsafe"
)

// Memory hands out page-aligned buffers outside the Go heap, of a bounded amount. *arena.Arena of cache/arena is one.
type Memory interface {
	// Region is all the memory that Alloc hands out parts of, at the same place for ever.
	Region() []byte
	// Alloc returns pieces of n bytes in all, each starting on a page, and waits while there are too few. They belong to the caller until Free.
	Alloc(ctx context.Context, n int64) ([][]byte, error)
	// Free takes back what Alloc returned.
	Free(pieces [][]byte)
}

// Arena is Memory that is registered as a whole, once, in one protection domain: whatever it hands out can be received into, sent from, and made
// a window of, without any further registration. Registering is what is dear with hardware. Methods may be called concurrently.
type Arena struct {
	Memory
	mr         MR
	base, size uintptr
}

// NewArena registers m. The arena does not own it.
func NewArena(pd PD, m Memory) (*Arena, error) {
	r := m.Region()
	mr, err := pd.Register(r, LocalWrite)
	if err != nil {
		return nil, fmt.Errorf("rdma: register %d bytes: %w", len(r), err)
	}
	return &Arena{Memory: m, mr: mr, base: uintptr(unsafe.Pointer(unsafe.SliceData(r))), size: uintptr(len(r))}, nil
}

// MR is the region of all the memory.
func (a *Arena) MR() MR { return a.mr }

// Contains reports whether b lies in the arena. Other memory has to be copied through a buffer that does.
func (a *Arena) Contains(b []byte) bool {
	off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - a.base
	return off <= a.size && uintptr(len(b)) <= a.size-off
}

// SGE returns the element for b, which must lie in the arena.
func (a *Arena) SGE(b []byte) SGE { return SGE{Buf: b, LKey: a.mr.LKey()} }

// Close deregisters the memory. It fails with ErrBusy while a window is bound to it.
func (a *Arena) Close() error { return a.mr.Deregister() }

// Slab is a number of buffers of one size out of an arena, as receives and control messages need them. A buffer has one
// owner: the slab, who took it, or the queue pair it is posted to. It is not safe for concurrent use.
type Slab struct {
	arena  *Arena
	allocs [][][]byte
	bufs   [][]byte
	free   []int32
	out    []bool
}

// NewSlab takes count buffers of size bytes. A buffer starts at a multiple of 64 bytes and lies within one piece of the arena. It waits
// for memory as Memory.Alloc does.
func NewSlab(ctx context.Context, a *Arena, count, size int) (*Slab, error) {
	if count <= 0 || size <= 0 || size > slabPiece || count > 1<<24 {
		return nil, fmt.Errorf("%w: slab of %d buffers of %d bytes", ErrInvalid, count, size)
	}
	stride := (size + 63) &^ 63
	s := &Slab{arena: a, bufs: make([][]byte, 0, count), free: make([]int32, count), out: make([]bool, count)}
	for left := count; left > 0; {
		// A power of two comes in one piece, unless the arena is fragmented.
		n := min(slabPiece, 1<<bits.Len(uint(left*stride-1)))
		pieces, err := a.Alloc(ctx, int64(n))
		if err != nil {
			s.Close()
			return nil, err
		}
		s.allocs = append(s.allocs, pieces)
		before := left
		for _, p := range pieces {
			for ; len(p) >= stride && left > 0; p = p[stride:] {
				s.bufs = append(s.bufs, p[:size:size])
				left--
			}
		}
		if left == before {
			s.Close()
			return nil, fmt.Errorf("%w: the arena is too fragmented for buffers of %d bytes", ErrInvalid, size)
		}
	}
	for i := range s.free {
		s.free[i] = int32(count - 1 - i)
	}
	return s, nil
}

// slabPiece is the most that a slab asks the arena for at once, in bytes.
const slabPiece = 1 << 20

// Take returns a buffer and its number, which fits in a work request's ID; false if none is left.
func (s *Slab) Take() (int, bool) {
	if len(s.free) == 0 {
		return 0, false
	}
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.out[i] = true
	return int(i), true
}

// Buf is the buffer with a number.
func (s *Slab) Buf(i int) []byte { return s.bufs[i] }

// SGE is the element for the first n bytes of a buffer.
func (s *Slab) SGE(i, n int) SGE { return s.arena.SGE(s.bufs[i][:n]) }

// Give takes a buffer back. Giving what was not taken panics.
func (s *Slab) Give(i int) {
	if !s.out[i] {
		panic("rdma: buffer given back twice")
	}
	s.out[i] = false
	s.free = append(s.free, int32(i))
}

// Close returns all memory to the arena. No buffer may be in use.
func (s *Slab) Close() {
	for _, p := range s.allocs {
		s.arena.Free(p)
	}
	s.allocs, s.bufs, s.free = nil, nil, nil
}
