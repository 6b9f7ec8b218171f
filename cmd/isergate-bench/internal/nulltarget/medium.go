// Package nulltarget is a target of ours with a logical unit that keeps nothing: what is measured with it is the way of a
// command from the socket to the medium and back, and nothing behind it. Reads return zeros, writes land in memory that is
// used again.
package nulltarget

import (
	"context"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/iser/scsi"
)

const (
	blockSize = 512
	blocks    = 1 << 30 / blockSize
	landings  = 256 // writes at once; more of them wait
)

// medium is a scsi.Medium that keeps nothing.
type medium struct {
	memory []byte // not of the Go heap: a slot of scsi.MaxLanding for each landing, and one for all reads
	zeros  []byte // never written to
	tokens chan struct{}

	mu   sync.Mutex // guards free
	free []*landing // the last that was given back is used first: its memory is in the cache of the CPU
}

// landing is memory for a write. It is also what Read returns, with other buffers.
type landing struct {
	m       *medium
	slot    []byte
	buffers [1][]byte
}

func newMedium() (*medium, error) {
	memory, err := unix.Mmap(-1, 0, (landings+1)*scsi.MaxLanding, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	m := &medium{memory: memory, zeros: memory[:scsi.MaxLanding:scsi.MaxLanding], tokens: make(chan struct{}, landings)}
	for i := 1; i <= landings; i++ {
		at := i * scsi.MaxLanding
		m.free = append(m.free, &landing{m: m, slot: memory[at : at+scsi.MaxLanding : at+scsi.MaxLanding]})
		m.tokens <- struct{}{}
	}
	return m, nil
}

func (m *medium) take() *landing {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.free[len(m.free)-1]
	m.free = m.free[:len(m.free)-1]
	return l
}

func (l *landing) giveBack() {
	l.m.mu.Lock()
	l.m.free = append(l.m.free, l)
	l.m.mu.Unlock()
	l.m.tokens <- struct{}{}
}

func (m *medium) borrow(ctx context.Context, from func(*landing) []byte, e scsi.Extent) (*landing, error) {
	select {
	case <-m.tokens:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	l := m.take()
	l.buffers[0] = from(l)[:e.Blocks*blockSize]
	return l, nil
}

// Geometry implements scsi.Medium.
func (m *medium) Geometry() scsi.Geometry {
	return scsi.Geometry{Blocks: blocks, BlockSize: blockSize, PhysicalSize: 4096}
}

// Contract implements scsi.Medium.
func (m *medium) Contract() scsi.Contract {
	return scsi.Contract{Ack: scsi.LevelMemory, Flush: scsi.LevelMemory, Met: true, Epoch: 1, Generation: 1}
}

// Reserve implements scsi.Medium.
func (m *medium) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	return m.borrow(ctx, func(l *landing) []byte { return l.slot }, e)
}

// Read implements scsi.Medium.
func (m *medium) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	return m.borrow(ctx, func(l *landing) []byte { return l.m.zeros }, e)
}

// Buffers implements scsi.Landing and scsi.Borrowed.
func (l *landing) Buffers() [][]byte { return l.buffers[:] }

// Commit implements scsi.Landing.
func (l *landing) Commit(context.Context, bool) error {
	l.giveBack()
	return nil
}

// Abort implements scsi.Landing.
func (l *landing) Abort() { l.giveBack() }

// Release implements scsi.Borrowed.
func (l *landing) Release() { l.giveBack() }

// Deallocate implements scsi.Medium.
func (m *medium) Deallocate(context.Context, []scsi.Extent, bool) error { return nil }

// WriteSame implements scsi.Medium.
func (m *medium) WriteSame(context.Context, scsi.Extent, []byte, bool) error { return nil }

// Flush implements scsi.Medium.
func (m *medium) Flush(context.Context) error { return nil }

// Mapped implements scsi.Medium.
func (m *medium) Mapped(_ context.Context, _, most uint64) (bool, uint64, error) {
	return false, most, nil
}

// SetWriteCache implements scsi.Medium.
func (m *medium) SetWriteCache(context.Context, bool) error { return nil }
