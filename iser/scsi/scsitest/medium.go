// Package scsitest has what tests of logical units and transports need: a Medium in
// memory, and Data for one command.
package scsitest

import (
	"context"
	"fmt"
	"sync"

	"github.com/isergate/isergate/iser/scsi"
)

// Op names a method of a Medium for Medium.Before.
type Op string

// Operations.
const (
	OpReserve       Op = "reserve"
	OpCommit        Op = "commit"
	OpRead          Op = "read"
	OpDeallocate    Op = "deallocate"
	OpWriteSame     Op = "write same"
	OpFlush         Op = "flush"
	OpMapped        Op = "mapped"
	OpSetWriteCache Op = "set write cache"
)

// Medium is a scsi.Medium in memory. The zero value is not usable; NewMedium makes one.
type Medium struct {
	// Before, if set, runs at the start of each operation; an error fails the
	// operation before it has any effect. Set it before the first command. The
	// extent is zero where an operation has none.
	Before func(ctx context.Context, op Op, e scsi.Extent) error

	mu       sync.RWMutex // guards all below
	geometry scsi.Geometry
	contract scsi.Contract
	ack      scsi.Level // as configured
	data     []byte
	mapped   []bool
	flushes  int
	fua      int
	open     int // landings and loans not ended

	landings sync.Pool
	loans    sync.Pool
}

// NewMedium returns a medium of zeros, nothing mapped, with the contract ack=local,
// flush=local.
func NewMedium(blocks uint64, blockSize uint32) *Medium {
	return &Medium{
		geometry: scsi.Geometry{Blocks: blocks, BlockSize: blockSize, PhysicalSize: 4096, OptimalBlocks: (1 << 20) / blockSize},
		contract: scsi.Contract{Ack: scsi.LevelLocal, Flush: scsi.LevelLocal, Met: true, Epoch: 1, Generation: 1},
		ack:      scsi.LevelLocal,
		data:     make([]byte, blocks*uint64(blockSize)),
		mapped:   make([]bool, blocks),
	}
}

// SetContract replaces the contract; its Ack becomes the configured one.
func (m *Medium) SetContract(c scsi.Contract) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.contract, m.ack = c, c.Ack
}

// Grow raises the capacity to blocks.
func (m *Medium) Grow(blocks uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if more := blocks - m.geometry.Blocks; blocks > m.geometry.Blocks {
		m.data = append(m.data, make([]byte, more*uint64(m.geometry.BlockSize))...)
		m.mapped = append(m.mapped, make([]bool, more)...)
		m.geometry.Blocks = blocks
	}
}

// Bytes returns a copy of everything on the medium.
func (m *Medium) Bytes() []byte {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return append([]byte(nil), m.data...)
}

// Flushes returns how many Flush calls succeeded, and how many changes asked for FUA.
func (m *Medium) Flushes() (flushes, fua int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.flushes, m.fua
}

// Open returns how many landings and loans were not ended. At rest it must be 0.
func (m *Medium) Open() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.open
}

// Geometry implements scsi.Medium.
func (m *Medium) Geometry() scsi.Geometry {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.geometry
}

// Contract implements scsi.Medium.
func (m *Medium) Contract() scsi.Contract {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.contract
}

func (m *Medium) before(ctx context.Context, op Op, e scsi.Extent) error {
	if m.Before != nil {
		return m.Before(ctx, op, e)
	}
	return nil
}

// rangeLocked returns the byte range of e, or panics: a logical unit must never ask for
// blocks that are not there.
func (m *Medium) rangeLocked(e scsi.Extent) (from, to uint64) {
	if e.Blocks == 0 || e.Blocks > m.geometry.Blocks || e.LBA > m.geometry.Blocks-e.Blocks {
		panic(fmt.Sprintf("scsitest: extent %+v outside of %d blocks", e, m.geometry.Blocks))
	}
	size := uint64(m.geometry.BlockSize)
	return e.LBA * size, (e.LBA + e.Blocks) * size
}

type landing struct {
	m     *Medium
	e     scsi.Extent
	bufs  [2][]byte
	store []byte
	ended bool
}

// Reserve implements scsi.Medium. The landing has two buffers where it can.
func (m *Medium) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	if err := m.before(ctx, OpReserve, e); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	from, to := m.rangeLocked(e)
	l, _ := m.landings.Get().(*landing)
	if l == nil {
		l = new(landing)
	}
	if uint64(cap(l.store)) < to-from {
		l.store = make([]byte, to-from)
	}
	l.m, l.e, l.ended, l.store = m, e, false, l.store[:to-from]
	half := (to - from) / 2
	l.bufs[0], l.bufs[1] = l.store[:half], l.store[half:]
	m.open++
	return l, nil
}

func (l *landing) Buffers() [][]byte { return l.bufs[:] }

func (l *landing) end() {
	if l.ended {
		panic("scsitest: landing ended twice")
	}
	l.ended = true
}

func (l *landing) Commit(ctx context.Context, fua bool) error {
	l.end()
	m := l.m
	err := m.before(ctx, OpCommit, l.e)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open--
	if err == nil {
		from, to := m.rangeLocked(l.e)
		copy(m.data[from:to], l.store)
		m.changedLocked(l.e, true, fua)
	}
	clear(l.store) // late readers fail loudly
	m.landings.Put(l)
	return err
}

func (l *landing) Abort() {
	l.end()
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.open--
	clear(l.store)
	l.m.landings.Put(l)
}

func (m *Medium) changedLocked(e scsi.Extent, mapped, fua bool) {
	for i := e.LBA; i < e.LBA+e.Blocks; i++ {
		m.mapped[i] = mapped
	}
	m.contract.Acked.LSN++
	if fua {
		m.fua++
	}
}

type loan struct {
	m     *Medium
	bufs  [2][]byte
	store []byte
}

// Read implements scsi.Medium.
func (m *Medium) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	if err := m.before(ctx, OpRead, e); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	from, to := m.rangeLocked(e)
	b, _ := m.loans.Get().(*loan)
	if b == nil {
		b = new(loan)
	}
	b.m = m
	b.store = append(b.store[:0], m.data[from:to]...)
	third := len(b.store) / 3
	b.bufs[0], b.bufs[1] = b.store[:third], b.store[third:]
	m.open++
	return b, nil
}

func (b *loan) Buffers() [][]byte { return b.bufs[:] }

func (b *loan) Release() {
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	b.m.open--
	clear(b.store)
	b.m.loans.Put(b)
}

// Deallocate implements scsi.Medium.
func (m *Medium) Deallocate(ctx context.Context, extents []scsi.Extent, fua bool) error {
	for _, e := range extents {
		if err := m.before(ctx, OpDeallocate, e); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range extents {
		from, to := m.rangeLocked(e)
		clear(m.data[from:to])
		m.changedLocked(e, false, fua)
	}
	return nil
}

// WriteSame implements scsi.Medium.
func (m *Medium) WriteSame(ctx context.Context, e scsi.Extent, block []byte, fua bool) error {
	if err := m.before(ctx, OpWriteSame, e); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	from, to := m.rangeLocked(e)
	for ; from < to; from += uint64(len(block)) {
		copy(m.data[from:to], block)
	}
	m.changedLocked(e, true, fua)
	return nil
}

// Flush implements scsi.Medium.
func (m *Medium) Flush(ctx context.Context) error {
	if err := m.before(ctx, OpFlush, scsi.Extent{}); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.flushes++
	return nil
}

// Mapped implements scsi.Medium.
func (m *Medium) Mapped(ctx context.Context, lba, most uint64) (bool, uint64, error) {
	if err := m.before(ctx, OpMapped, scsi.Extent{LBA: lba, Blocks: most}); err != nil {
		return false, 0, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	m.rangeLocked(scsi.Extent{LBA: lba, Blocks: most})
	mapped := m.mapped[lba]
	n := uint64(1)
	for n < most && m.mapped[lba+n] == mapped {
		n++
	}
	return mapped, n, nil
}

// SetWriteCache implements scsi.Medium.
func (m *Medium) SetWriteCache(ctx context.Context, enabled bool) error {
	if err := m.before(ctx, OpSetWriteCache, scsi.Extent{}); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if enabled {
		m.contract.Ack = m.ack
	} else {
		m.contract.Ack = m.contract.Flush
	}
	return nil
}
