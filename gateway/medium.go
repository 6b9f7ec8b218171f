package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/iser/scsi"
)

const (
	physicalBlock = 4096    // bytes that the engine writes without reading
	optimalBytes  = 1 << 20 // preferred transfer
)

// medium is a volume as a logical unit sees it. It outlives the engine's volume: one that is
// not open is not ready.
type medium struct {
	v *volume
}

var _ scsi.Medium = medium{}

// open returns the engine's volume.
func (m medium) open() (*cache.Volume, error) {
	if v := m.v.engine.Load(); v != nil {
		return v, nil
	}
	return nil, scsi.ErrNotReady
}

// Geometry implements scsi.Medium.
func (m medium) Geometry() scsi.Geometry {
	block, size := m.v.blockSize, m.v.size.Load()
	return scsi.Geometry{
		Blocks:        uint64(size) / uint64(block),
		BlockSize:     uint32(block),
		PhysicalSize:  physicalBlock,
		OptimalBlocks: uint32(optimalBytes / block),
	}
}

// Contract implements scsi.Medium.
func (m medium) Contract() scsi.Contract {
	v, err := m.open()
	if err != nil {
		p := m.v.policy()
		return scsi.Contract{Ack: scsi.Level(p.Ack), Flush: scsi.Level(p.Flush), OnUnmet: uint8(p.OnUnmet)}
	}
	s := v.Status()
	p := s.Config.Policy.Effective(s.Config.WriteThrough)
	return scsi.Contract{
		Ack: scsi.Level(p.Ack), Flush: scsi.Level(p.Flush), OnUnmet: uint8(p.OnUnmet),
		Met: s.ContractMet, Epoch: s.Epoch, Generation: s.Generation,
		Acked: watermark(s.Watermarks.Acked), Local: watermark(s.Watermarks.Local),
		Quorum: watermark(s.Watermarks.Quorum), Object: watermark(s.Watermarks.Object),
	}
}

func watermark(w cache.Watermark) scsi.Watermark {
	return scsi.Watermark{LSN: uint64(w.LSN), Time: w.Time}
}

// scsiErrors says what an initiator is told about each error of the engine. The first that
// matches counts.
var scsiErrors = []struct{ from, to error }{
	{cache.ErrBusy, scsi.ErrBusy},
	{cache.ErrBudget, scsi.ErrSpace},
	{cache.ErrUnmet, scsi.ErrUnmet},
	{cache.ErrLostWrites, scsi.ErrLostWrites},
	{cache.ErrUnreadable, scsi.ErrUnreadable},
	{cache.ErrJournal, scsi.ErrWrite},
	{cache.ErrOpening, scsi.ErrStarting},
	{cache.ErrFenced, scsi.ErrNotReady},
	{cache.ErrDamaged, scsi.ErrNotReady},
	{cache.ErrClosed, scsi.ErrNotReady},
}

// toSCSI translates an error of the engine. An error of the context stays what it is, and
// so does one that the table does not know: the initiator then tries again.
func toSCSI(err error) error {
	if err == nil {
		return nil
	}
	for _, e := range scsiErrors {
		if errors.Is(err, e.from) {
			return fmt.Errorf("%w: %w", e.to, err)
		}
	}
	return err
}

func (m medium) bytes(e scsi.Extent) (off, n int64) {
	block := uint64(m.v.blockSize)
	return int64(e.LBA * block), int64(e.Blocks * block)
}

// landing is a cache.Landing with SCSI's errors and the volume's counters.
type landing struct {
	*cache.Landing
	v     *volume
	bytes int64
	began time.Time
}

// landings recycles what ended, so that a write allocates nothing.
var landings = sync.Pool{New: func() any { return new(landing) }}

// end returns what l was and recycles it.
func (l *landing) end() landing {
	was := *l
	*l = landing{}
	landings.Put(l)
	return was
}

// Commit implements scsi.Landing.
func (l *landing) Commit(ctx context.Context, fua bool) error {
	was := l.end()
	err := toSCSI(was.Landing.Commit(ctx, fua))
	was.v.stats.done(opWrite, was.bytes, was.began, err)
	return err
}

// Abort implements scsi.Landing.
func (l *landing) Abort() { l.end().Landing.Abort() }

// Reserve implements scsi.Medium.
func (m medium) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	v, err := m.open()
	if err != nil {
		return nil, err
	}
	off, n := m.bytes(e)
	began := time.Now()
	l, err := v.Reserve(ctx, off, n)
	if err != nil {
		err = toSCSI(err)
		m.v.stats.done(opWrite, 0, began, err)
		return nil, err
	}
	landed := landings.Get().(*landing)
	*landed = landing{l, m.v, n, began}
	return landed, nil
}

// Read implements scsi.Medium.
func (m medium) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	v, err := m.open()
	if err != nil {
		return nil, err
	}
	off, n := m.bytes(e)
	began := time.Now()
	b, err := v.Read(ctx, off, n)
	err = toSCSI(err)
	m.v.stats.done(opRead, n, began, err)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Deallocate implements scsi.Medium.
func (m medium) Deallocate(ctx context.Context, extents []scsi.Extent, fua bool) error {
	v, err := m.open()
	if err != nil {
		return err
	}
	ranges := make([]cache.Range, len(extents))
	var total int64
	for i, e := range extents {
		ranges[i].Off, ranges[i].Len = m.bytes(e)
		total += ranges[i].Len
	}
	began := time.Now()
	err = toSCSI(v.Deallocate(ctx, ranges, fua))
	m.v.stats.done(opDeallocate, total, began, err)
	return err
}

// WriteSame implements scsi.Medium.
func (m medium) WriteSame(ctx context.Context, e scsi.Extent, block []byte, fua bool) error {
	v, err := m.open()
	if err != nil {
		return err
	}
	off, n := m.bytes(e)
	began := time.Now()
	err = toSCSI(v.WriteSame(ctx, cache.Range{Off: off, Len: n}, block, fua))
	m.v.stats.done(opWriteSame, n, began, err)
	return err
}

// Flush implements scsi.Medium.
func (m medium) Flush(ctx context.Context) error {
	v, err := m.open()
	if err != nil {
		return err
	}
	began := time.Now()
	err = toSCSI(v.Flush(ctx))
	m.v.stats.done(opFlush, 0, began, err)
	return err
}

// Mapped implements scsi.Medium.
func (m medium) Mapped(ctx context.Context, lba, max uint64) (bool, uint64, error) {
	v, err := m.open()
	if err != nil {
		return false, 0, err
	}
	block := uint64(m.v.blockSize)
	mapped, n, err := v.Mapped(ctx, int64(lba*block), int64(max*block))
	return mapped, uint64(n) / block, toSCSI(err)
}

// SetWriteCache implements scsi.Medium.
func (m medium) SetWriteCache(_ context.Context, enabled bool) error {
	return m.v.setWriteCache(enabled)
}
