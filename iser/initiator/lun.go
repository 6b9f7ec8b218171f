package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Bounds of the repetitions that the LUN's methods do by themselves.
const (
	maxUnitAttentions = 16 // in a row
	firstBackoff      = time.Millisecond
	maxBackoff        = 200 * time.Millisecond
)

// LUN is a logical unit of a session: block commands as methods. They repeat a command that
// meets a unit attention, and one that meets BUSY or TASK SET FULL after a pause, until
// ctx ends; any other status is a StatusError. Methods may be called concurrently.
type LUN struct {
	s      *Session
	number uint16
	// BlockSize is the logical block length in bytes, Blocks the capacity, as of OpenLUN.
	BlockSize uint32
	Blocks    uint64
	// Capacity is all that READ CAPACITY (16) said.
	Capacity Capacity

	busy atomic.Uint64
}

// BusyAnswers returns how many commands were answered with BUSY or TASK SET FULL so far, repetitions included.
func (l *LUN) BusyAnswers() uint64 { return l.busy.Load() }

// Capacity is the parameter data of READ CAPACITY (16).
type Capacity struct {
	LastLBA          uint64
	BlockSize        uint32
	PhysicalExponent uint8  // logical blocks per physical block: 1 << PhysicalExponent
	LowestAligned    uint16 // lowest aligned LBA
	Thin             bool   // LBPME
	ReadsZeros       bool   // LBPRZ
}

// OpenLUN waits until the unit is ready as long as it says that it becomes ready, and reads its capacity.
func (s *Session) OpenLUN(ctx context.Context, number uint16) (*LUN, error) {
	l := &LUN{s: s, number: number}
	for pause := firstBackoff; ; pause = min(2*pause, maxBackoff) {
		err := l.TestUnitReady(ctx)
		if err == nil {
			break
		}
		var status *StatusError
		if !errors.As(err, &status) || !status.Sense.Is(KeyNotReady, 0x04, 0x01) {
			return nil, err
		}
		if err := sleep(ctx, pause); err != nil {
			return nil, err
		}
	}
	c, err := l.ReadCapacity(ctx)
	if err != nil {
		return nil, err
	}
	if c.BlockSize == 0 {
		return nil, protocolError("READ CAPACITY says block length 0")
	}
	l.Capacity, l.BlockSize, l.Blocks = c, c.BlockSize, c.LastLBA+1
	return l, nil
}

// Session returns the session.
func (l *LUN) Session() *Session { return l.s }

// Number returns the logical unit number.
func (l *LUN) Number() uint16 { return l.number }

// Size returns the capacity in bytes.
func (l *LUN) Size() uint64 { return l.Blocks * uint64(l.BlockSize) }

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Do runs a command until it ends with something else than a unit attention, BUSY or TASK SET FULL.
func (l *LUN) Do(ctx context.Context, cdb, out, in []byte) (Response, error) {
	attentions, pause := 0, firstBackoff
	for {
		rsp, err := l.s.Execute(ctx, l.number, cdb, out, in)
		if err != nil {
			return rsp, err
		}
		if rsp.Status == Good && rsp.Service == 0 {
			return rsp, nil
		}
		err = rsp.Err()
		var status *StatusError
		if !errors.As(err, &status) {
			return rsp, err
		}
		switch {
		case status.Status == CheckCondition && status.Sense.Key == KeyUnitAttention && !status.Sense.Deferred && attentions < maxUnitAttentions:
			attentions++
		case status.Status == Busy || status.Status == TaskSetFull:
			l.busy.Add(1)
			if e := sleep(ctx, pause); e != nil {
				return rsp, fmt.Errorf("%w: %w", err, e)
			}
			pause = min(2*pause, maxBackoff)
		default:
			return rsp, err
		}
	}
}

// blocks checks that n bytes are whole blocks, 1 to 2^32-1 of them.
func (l *LUN) blocks(n int) (uint32, error) {
	if n == 0 || n%int(l.BlockSize) != 0 {
		return 0, fmt.Errorf("initiator: %d bytes are not whole blocks of %d", n, l.BlockSize)
	}
	return uint32(n / int(l.BlockSize)), nil
}

// rw16 fills a CDB of the READ (16) layout.
func rw16(cdb *[16]byte, op, flags byte, lba uint64, blocks uint32) {
	cdb[0], cdb[1] = op, flags
	binary.BigEndian.PutUint64(cdb[2:], lba)
	binary.BigEndian.PutUint32(cdb[10:], blocks)
}

const flagFUA = 0x08

// Read fills p from lba on, with READ (16).
func (l *LUN) Read(ctx context.Context, lba uint64, p []byte) error {
	n, err := l.blocks(len(p))
	if err != nil {
		return err
	}
	var cdb [16]byte
	rw16(&cdb, 0x88, 0, lba, n)
	rsp, err := l.Do(ctx, cdb[:], nil, p)
	if err == nil && rsp.Transferred != len(p) {
		err = fmt.Errorf("%w: %d of %d bytes read", ErrShortTransfer, rsp.Transferred, len(p))
	}
	return err
}

// Write writes p at lba with WRITE (16); fua asks for the flush level.
func (l *LUN) Write(ctx context.Context, lba uint64, p []byte, fua bool) error {
	n, err := l.blocks(len(p))
	if err != nil {
		return err
	}
	var cdb [16]byte
	var flags byte
	if fua {
		flags = flagFUA
	}
	rw16(&cdb, 0x8a, flags, lba, n)
	rsp, err := l.Do(ctx, cdb[:], p, nil)
	if err == nil && (rsp.Residual != 0 || rsp.Overflow || rsp.Underflow) {
		err = fmt.Errorf("%w: residual of %d bytes in a write", ErrShortTransfer, rsp.Residual)
	}
	return err
}

// Flush is SYNCHRONIZE CACHE (16) of the whole unit.
func (l *LUN) Flush(ctx context.Context) error {
	var cdb [16]byte
	rw16(&cdb, 0x91, 0, 0, 0)
	_, err := l.Do(ctx, cdb[:], nil, nil)
	return err
}

// Range is a run of blocks.
type Range struct {
	LBA    uint64
	Blocks uint32
}

// Unmap deallocates ranges with UNMAP, at most 4095 of them.
func (l *LUN) Unmap(ctx context.Context, ranges ...Range) error {
	if len(ranges) > 4095 {
		return fmt.Errorf("initiator: %d ranges in one UNMAP", len(ranges))
	}
	list := make([]byte, 8+16*len(ranges))
	binary.BigEndian.PutUint16(list, uint16(len(list)-2))
	binary.BigEndian.PutUint16(list[2:], uint16(16*len(ranges)))
	for i, r := range ranges {
		d := list[8+16*i:]
		binary.BigEndian.PutUint64(d, r.LBA)
		binary.BigEndian.PutUint32(d[8:], r.Blocks)
	}
	var cdb [10]byte
	cdb[0] = 0x42
	binary.BigEndian.PutUint16(cdb[7:], uint16(len(list)))
	_, err := l.Do(ctx, cdb[:], list, nil)
	return err
}

// WriteSame writes block to each of count blocks with WRITE SAME (16); count 0 means to the end of
// the unit. With unmap, the unit may deallocate them if block is zeros.
func (l *LUN) WriteSame(ctx context.Context, lba uint64, count uint32, block []byte, unmap bool) error {
	if len(block) != int(l.BlockSize) {
		return fmt.Errorf("initiator: WRITE SAME with %d bytes, a block has %d", len(block), l.BlockSize)
	}
	var cdb [16]byte
	var flags byte
	if unmap {
		flags = 0x08
	}
	rw16(&cdb, 0x93, flags, lba, count)
	_, err := l.Do(ctx, cdb[:], block, nil)
	return err
}

// CompareAndWrite replaces the blocks at lba by write if they equal compare. If they don't, the error Is ErrMiscompare and nothing is
// written. Both slices have the same length, 1 to 255 blocks.
func (l *LUN) CompareAndWrite(ctx context.Context, lba uint64, compare, write []byte) error {
	n, err := l.blocks(len(compare))
	if err != nil {
		return err
	}
	if n > 255 || len(write) != len(compare) {
		return fmt.Errorf("initiator: COMPARE AND WRITE of %d and %d bytes", len(compare), len(write))
	}
	var cdb [16]byte
	cdb[0] = 0x89
	binary.BigEndian.PutUint64(cdb[2:], lba)
	cdb[13] = byte(n)
	out := make([]byte, 0, 2*len(compare))
	out = append(append(out, compare...), write...)
	_, err = l.Do(ctx, cdb[:], out, nil)
	return err
}

// TestUnitReady is TEST UNIT READY.
func (l *LUN) TestUnitReady(ctx context.Context) error {
	var cdb [6]byte
	_, err := l.Do(ctx, cdb[:], nil, nil)
	return err
}

// ReadCapacity is READ CAPACITY (16).
func (l *LUN) ReadCapacity(ctx context.Context) (Capacity, error) {
	var cdb [16]byte
	cdb[0], cdb[1], cdb[13] = 0x9e, 0x10, 32
	in := make([]byte, 32)
	rsp, err := l.Do(ctx, cdb[:], nil, in)
	if err != nil {
		return Capacity{}, err
	}
	if rsp.Transferred < 16 {
		return Capacity{}, fmt.Errorf("%w: READ CAPACITY (16) returned %d bytes", ErrShortTransfer, rsp.Transferred)
	}
	aligned := binary.BigEndian.Uint16(in[14:])
	return Capacity{
		LastLBA: binary.BigEndian.Uint64(in), BlockSize: binary.BigEndian.Uint32(in[8:]), PhysicalExponent: in[13] & 0xf,
		Thin: aligned&0x8000 != 0, ReadsZeros: aligned&0x4000 != 0, LowestAligned: aligned & 0x3fff,
	}, nil
}

// fetch runs a command that returns at most size bytes, and returns what came.
func (l *LUN) fetch(ctx context.Context, cdb []byte, size uint16) ([]byte, error) {
	in := make([]byte, size)
	rsp, err := l.Do(ctx, cdb, nil, in)
	if err != nil {
		return nil, err
	}
	return in[:rsp.Transferred], nil
}

// Inquiry returns standard INQUIRY data.
func (l *LUN) Inquiry(ctx context.Context) ([]byte, error) {
	return l.fetch(ctx, []byte{0x12, 0, 0, 0, 255, 0}, 255)
}

// InquiryPage returns a vital product data page, its header included.
func (l *LUN) InquiryPage(ctx context.Context, page uint8) ([]byte, error) {
	return l.fetch(ctx, []byte{0x12, 1, page, 0x10, 0, 0}, 4096)
}

// MaxTransfer returns the most blocks that one command may move, from the block limits page (SBC-4, 6.6.4), or 0 if the unit names no limit.
func (l *LUN) MaxTransfer(ctx context.Context) (uint32, error) {
	page, err := l.InquiryPage(ctx, 0xb0)
	var status *StatusError
	switch {
	case errors.As(err, &status) && status.Sense.Key == KeyIllegalRequest && ctx.Err() == nil: // it has no such page
		return 0, nil
	case err != nil:
		return 0, err
	case len(page) < 12 || page[1] != 0xb0:
		return 0, nil
	}
	return binary.BigEndian.Uint32(page[8:]), nil
}

// LogSense returns the current cumulative values of a log page, its header included.
func (l *LUN) LogSense(ctx context.Context, page, subpage uint8) ([]byte, error) {
	return l.fetch(ctx, []byte{0x4d, 0, 0x40 | page&0x3f, subpage, 0, 0, 0, 0x10, 0, 0}, 4096)
}

// ModeSense returns mode parameters with MODE SENSE (10), its header included, without block descriptors.
func (l *LUN) ModeSense(ctx context.Context, page, subpage uint8) ([]byte, error) {
	return l.fetch(ctx, []byte{0x5a, 0x08, page & 0x3f, subpage, 0, 0, 0, 0x10, 0, 0}, 4096)
}

// ReportLUNs returns the LUN fields that REPORT LUNS lists.
func (s *Session) ReportLUNs(ctx context.Context) ([]uint64, error) {
	l := &LUN{s: s}
	in, err := l.fetch(ctx, []byte{0xa0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0}, 16384)
	if err != nil {
		return nil, err
	}
	if len(in) < 8 {
		return nil, fmt.Errorf("%w: REPORT LUNS returned %d bytes", ErrShortTransfer, len(in))
	}
	n := min(int(binary.BigEndian.Uint32(in)), len(in)-8) / 8
	luns := make([]uint64, n)
	for i := range luns {
		luns[i] = binary.BigEndian.Uint64(in[8+8*i:])
	}
	return luns, nil
}
