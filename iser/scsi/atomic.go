package scsi

import (
	"bytes"
	"context"
)

// vector walks a vector of slices piece by piece.
type vector struct {
	bufs [][]byte
	off  int // in bufs[0]
}

// next returns up to n bytes that are contiguous, and moves past them.
func (v *vector) next(n int) []byte {
	for len(v.bufs) > 0 && v.off == len(v.bufs[0]) {
		v.bufs, v.off = v.bufs[1:], 0
	}
	if len(v.bufs) == 0 {
		return nil
	}
	b := v.bufs[0][v.off:]
	b = b[:min(n, len(b))]
	v.off += len(b)
	return b
}

// compareAndWrite is COMPARE AND WRITE (SBC-3, 5.2): atomic against every change of the
// same blocks, from any nexus. The data-out is the blocks to compare, then the blocks to
// write; both must have arrived before the range is taken, so that a holder of the
// range never waits for an initiator or for journal space.
func compareAndWrite(ctx context.Context, c *call) Result {
	lba, _ := lbaCount16(c.cdb)
	blocks := uint64(c.cdb[13])
	if blocks > maxCompareBlocks {
		return c.fail(invalidCDB(13, -1))
	}
	if !c.inRange(lba, blocks) {
		return c.fail(faultLBARange)
	}
	if f, ok := c.checkWritable(); !ok {
		return c.fail(f)
	}
	half := int64(blocks) * int64(c.geometry.BlockSize)
	if c.cmd.Data.OutLength() != 2*half {
		res := c.fail(invalidCDB(13, -1))
		res.DataOut = 2 * half
		return res
	}
	if blocks == 0 {
		return Result{}
	}
	e := Extent{LBA: lba, Blocks: blocks}
	landing, err := c.medium().Reserve(ctx, e)
	if err != nil {
		return c.failErr(ctx, err)
	}
	want := make([]byte, half)
	c.one[0] = want
	err = c.cmd.Data.Receive(ctx, c.one[:], 0)
	if err == nil {
		err = c.cmd.Data.Receive(ctx, landing.Buffers(), half)
	}
	if err == nil {
		err = c.unit.locks.acquire(ctx, &c.lock, lba, lba+blocks, true)
	}
	if err != nil {
		landing.Abort()
		return c.failErr(ctx, err)
	}
	defer c.unit.locks.release(&c.lock)
	diff, err := c.compare(ctx, e, want)
	var res Result
	switch {
	case err != nil:
		landing.Abort()
		res = c.failErr(ctx, err)
	case diff >= 0:
		landing.Abort()
		res = c.miscompare(diff)
	default:
		if err := landing.Commit(ctx, c.cdb[1]&b1FUA != 0); err != nil {
			res = c.failErr(ctx, err)
		}
	}
	res.DataOut = 2 * half
	return res
}

// orWrite is ORWRITE(16) (SBC-3, 5.10): the blocks become their bitwise or with data-out,
// each piece atomic like COMPARE AND WRITE.
func orWrite(ctx context.Context, c *call) Result {
	lba, blocks := lbaCount16(c.cdb)
	return c.writePieces(ctx, lba, blocks, func(e Extent, landing Landing) (Result, error) {
		if err := c.unit.locks.acquire(ctx, &c.lock, e.LBA, e.LBA+e.Blocks, true); err != nil {
			landing.Abort()
			return Result{}, err
		}
		defer c.unit.locks.release(&c.lock)
		b, err := c.medium().Read(ctx, e)
		if err != nil {
			landing.Abort()
			return Result{}, err
		}
		into := vector{bufs: landing.Buffers()}
		for _, from := range b.Buffers() {
			for len(from) > 0 {
				to := into.next(len(from))
				for i := range to {
					to[i] |= from[i]
				}
				from = from[len(to):]
			}
		}
		b.Release()
		return Result{}, landing.Commit(ctx, c.cdb[1]&b1FUA != 0)
	})
}

// zeroBlock is the largest block of zeros.
var zeroBlock [4096]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeroBlock[:len(b)]) }
