package scsitest

import (
	"context"
	"sync"

	"github.com/isergate/isergate/iser/scsi"
)

// Null is a scsi.Medium that keeps nothing: reads are zeros, writes land in memory that is used again. It waits for nothing and
// does not allocate in steady state, so that what a measurement shows is the path to it.
type Null struct {
	geometry scsi.Geometry
	zeros    []byte

	mu       sync.Mutex
	landings []*nullLanding // guarded by mu
	loans    []*nullLoan    // guarded by mu
}

// NewNull returns a medium of blocks of blockSize bytes.
func NewNull(blocks uint64, blockSize uint32) *Null {
	return &Null{
		geometry: scsi.Geometry{Blocks: blocks, BlockSize: blockSize, PhysicalSize: 4096, OptimalBlocks: (1 << 20) / blockSize},
		zeros:    make([]byte, scsi.MaxLanding),
	}
}

type nullLanding struct {
	m     *Null
	bufs  [1][]byte
	store []byte
}

type nullLoan struct {
	m    *Null
	bufs [1][]byte
}

// Geometry implements scsi.Medium.
func (m *Null) Geometry() scsi.Geometry { return m.geometry }

// Contract implements scsi.Medium.
func (m *Null) Contract() scsi.Contract {
	return scsi.Contract{Ack: scsi.LevelMemory, Flush: scsi.LevelMemory, Met: true, Epoch: 1, Generation: 1}
}

// Reserve implements scsi.Medium.
func (m *Null) Reserve(_ context.Context, e scsi.Extent) (scsi.Landing, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var l *nullLanding
	if n := len(m.landings); n > 0 {
		l, m.landings = m.landings[n-1], m.landings[:n-1]
	} else {
		l = &nullLanding{m: m}
	}
	n := int(e.Blocks) * int(m.geometry.BlockSize)
	if cap(l.store) < n {
		l.store = make([]byte, n)
	}
	l.bufs[0] = l.store[:n]
	return l, nil
}

func (l *nullLanding) Buffers() [][]byte { return l.bufs[:] }

func (l *nullLanding) Commit(context.Context, bool) error {
	l.Abort()
	return nil
}

func (l *nullLanding) Abort() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.landings = append(l.m.landings, l)
}

// Read implements scsi.Medium.
func (m *Null) Read(_ context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var l *nullLoan
	if n := len(m.loans); n > 0 {
		l, m.loans = m.loans[n-1], m.loans[:n-1]
	} else {
		l = &nullLoan{m: m}
	}
	l.bufs[0] = m.zeros[:int(e.Blocks)*int(m.geometry.BlockSize)]
	return l, nil
}

func (l *nullLoan) Buffers() [][]byte { return l.bufs[:] }

func (l *nullLoan) Release() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.loans = append(l.m.loans, l)
}

// Deallocate implements scsi.Medium.
func (m *Null) Deallocate(context.Context, []scsi.Extent, bool) error { return nil }

// WriteSame implements scsi.Medium.
func (m *Null) WriteSame(context.Context, scsi.Extent, []byte, bool) error { return nil }

// Flush implements scsi.Medium.
func (m *Null) Flush(context.Context) error { return nil }

// Mapped implements scsi.Medium.
func (m *Null) Mapped(_ context.Context, _, most uint64) (bool, uint64, error) {
	return false, most, nil
}

// SetWriteCache implements scsi.Medium.
func (m *Null) SetWriteCache(context.Context, bool) error { return nil }
