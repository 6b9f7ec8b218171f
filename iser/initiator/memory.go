package initiator

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/iser/rdma"
)

// Sizes of registered memory.
const (
	minPiece    = 4096
	regionSize  = 1 << 20 // of a region that holds several pieces
	maxPieceLog = 32
)

// memory is the registered memory of a session: pieces of powers of two, in regions outside the Go heap that are mapped and registered as
// they are needed, and stay until the session is over and the last piece is given back. Methods may be called concurrently.
type memory struct {
	pd rdma.PD
	// regions is sorted by address and replaced as a whole: a look-up takes no lock.
	regions atomic.Pointer[[]*region]

	mu     sync.Mutex // guards all below
	free   [maxPieceLog + 1][]piece
	out    int // pieces that are handed out
	closed bool
}

// region is mapped and registered memory, cut into pieces of 1<<class bytes.
type region struct {
	buf   []byte
	mr    rdma.MR
	class int
	taken []bool // guarded by memory.mu
}

// piece is a part of a region.
type piece struct {
	buf []byte
	r   *region
}

func newMemory(pd rdma.PD) *memory {
	m := &memory{pd: pd}
	m.regions.Store(new([]*region))
	return m
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// get returns a piece of at least n bytes.
func (m *memory) get(n int) (piece, error) {
	class := bits.Len(uint(max(n, minPiece) - 1))
	if class > maxPieceLog {
		return piece{}, fmt.Errorf("initiator: %d bytes of registered memory in one piece", n)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return piece{}, ErrClosed
	}
	if len(m.free[class]) == 0 {
		if err := m.growLocked(class); err != nil {
			return piece{}, err
		}
	}
	f := &m.free[class]
	p := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	p.r.taken[p.index()] = true
	m.out++
	return p, nil
}

// index is the piece's place in its region.
func (p piece) index() int { return int((addressOf(p.buf) - addressOf(p.r.buf)) >> p.r.class) }

// growLocked maps and registers one more region of a class.
func (m *memory) growLocked(class int) error {
	size := max(regionSize, 1<<class)
	buf, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("initiator: map %d bytes: %w", size, err)
	}
	mr, err := m.pd.Register(buf, rdma.LocalWrite)
	if err != nil {
		return errors.Join(fmt.Errorf("initiator: register %d bytes: %w", size, err), unix.Munmap(buf))
	}
	r := &region{buf: buf, mr: mr, class: class, taken: make([]bool, size>>class)}
	old := *m.regions.Load()
	at, _ := slices.BinarySearchFunc(old, addressOf(buf), func(r *region, a uintptr) int {
		if addressOf(r.buf) < a {
			return -1
		}
		return 1
	})
	grown := slices.Insert(slices.Clone(old), at, r)
	m.regions.Store(&grown)
	for i := len(r.taken) - 1; i >= 0; i-- {
		off := i << class
		m.free[class] = append(m.free[class], piece{buf: buf[off : off+1<<class : off+1<<class], r: r})
	}
	return nil
}

// find returns the region that holds all of b, or nil.
func (m *memory) find(b []byte) *region {
	all := *m.regions.Load()
	a := addressOf(b)
	lo, hi := 0, len(all) // the last region that does not begin behind a is at lo-1
	for lo < hi {
		mid := (lo + hi) / 2
		if addressOf(all[mid].buf) <= a {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return nil
	}
	r := all[lo-1]
	if off := a - addressOf(r.buf); off > uintptr(len(r.buf)) || uintptr(len(b)) > uintptr(len(r.buf))-off {
		return nil
	}
	return r
}

// put takes a piece back.
func (m *memory) put(p piece) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.putLocked(p)
}

func (m *memory) putLocked(p piece) {
	i := p.index()
	if !p.r.taken[i] {
		panic("initiator: registered memory is given back twice")
	}
	p.r.taken[i] = false
	m.free[p.r.class] = append(m.free[p.r.class], p)
	m.out--
	m.unmapLocked()
}

// alloc is get for users.
func (m *memory) alloc(n int) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("initiator: %d bytes of memory", n)
	}
	p, err := m.get(n)
	if err != nil {
		return nil, err
	}
	return p.buf[:n], nil
}

// release takes back what alloc returned.
func (m *memory) release(b []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.find(b)
	if r == nil {
		panic("initiator: Free of memory that Alloc did not return")
	}
	off := int(addressOf(b) - addressOf(r.buf))
	if off&(1<<r.class-1) != 0 {
		panic("initiator: Free of a part of what Alloc returned")
	}
	m.putLocked(piece{buf: r.buf[off : off+1<<r.class : off+1<<r.class], r: r})
}

// close ends the memory. It is unmapped when the last piece is back. No work request may refer to it, and no window be bound.
func (m *memory) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.unmapLocked()
}

func (m *memory) unmapLocked() {
	if !m.closed || m.out > 0 {
		return
	}
	for _, r := range *m.regions.Load() {
		// Neither fails for memory that was mapped and registered once and is not in use.
		_ = r.mr.Deregister()
		_ = unix.Munmap(r.buf)
	}
	m.regions.Store(new([]*region))
	_ = m.pd.Close()
}
