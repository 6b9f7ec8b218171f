package scsi

import (
	"bytes"
	"context"
	"crypto/sha256"
	"hash"
)

// Values of BYTCHK (SBC-3, 5.27).
const (
	bytchkNone = 0 // read only
	bytchkAll  = 1 // compare all blocks with data-out
	bytchkOne  = 3 // compare each block with the one block of data-out
)

func verify10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.verify(ctx, lba, n)
}

func verify12(ctx context.Context, c *call) Result {
	lba, n := lbaCount12(c.cdb)
	return c.verify(ctx, lba, n)
}

func verify16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.verify(ctx, lba, n)
}

func writeVerify10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.writeVerify(ctx, lba, n)
}

func writeVerify12(ctx context.Context, c *call) Result {
	lba, n := lbaCount12(c.cdb)
	return c.writeVerify(ctx, lba, n)
}

func writeVerify16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.writeVerify(ctx, lba, n)
}

// miscompare ends a command at the first byte that differs.
func (c *call) miscompare(off int64) Result {
	return c.fail(faultMiscompare.withInfo(uint64(off)))
}

// verify is VERIFY: it reads, and with BYTCHK compares, a step at a time.
func (c *call) verify(ctx context.Context, lba, blocks uint64) Result {
	size := int64(c.geometry.BlockSize)
	check := (c.cdb[1] & b1BYTCH) >> 1
	var dataOut int64
	switch check {
	case bytchkNone:
	case bytchkAll:
		dataOut = int64(blocks) * size
	case bytchkOne:
		if blocks > 0 {
			dataOut = size
		}
	default:
		return c.fail(invalidCDB(1, 2))
	}
	if !c.inRange(lba, blocks) {
		return c.fail(faultLBARange)
	}
	if check == bytchkAll && blocks > uint64(c.unit.opt.MaxTransfer) {
		return c.fail(invalidCDB(lengthField(c.cdb), -1))
	}
	if c.cmd.Data.OutLength() < dataOut {
		return c.shortDataOut(dataOut)
	}
	var want []byte // what the next step is compared with
	if check == bytchkOne && blocks > 0 {
		want = make([]byte, size)
		c.one[0] = want
		if err := c.cmd.Data.Receive(ctx, c.one[:], 0); err != nil {
			return c.failErr(ctx, err)
		}
	}
	total := int64(blocks) * size
	if check == bytchkAll {
		want = make([]byte, min(total, stepBytes))
	}
	for off := int64(0); off < total; {
		n := min(total-off, stepBytes)
		if check == bytchkAll {
			c.one[0] = want[:n]
			if err := c.cmd.Data.Receive(ctx, c.one[:], off); err != nil {
				return c.failErr(ctx, err)
			}
		}
		diff, err := c.compare(ctx, Extent{LBA: lba + uint64(off/size), Blocks: uint64(n / size)}, want)
		var res Result
		switch {
		case err != nil:
			res = c.failErr(ctx, err)
		case diff >= 0:
			res = c.miscompare(off + diff)
		default:
			off += n
			continue
		}
		if check == bytchkAll {
			res.DataOut = off + n
		} else {
			res.DataOut = dataOut
		}
		return res
	}
	return Result{DataOut: dataOut}
}

// compare reads e and compares it with want, repeated as often as it fits; want may be
// empty. It returns the offset of the first difference, or -1.
func (c *call) compare(ctx context.Context, e Extent, want []byte) (int64, error) {
	b, err := c.medium().Read(ctx, e)
	if err != nil {
		return 0, err
	}
	defer b.Release()
	if len(want) == 0 {
		return -1, nil
	}
	off := int64(0)
	rest := want
	for _, have := range b.Buffers() {
		for len(have) > 0 {
			n := min(len(have), len(rest))
			if !bytes.Equal(have[:n], rest[:n]) {
				for i := range n {
					if have[i] != rest[i] {
						return off + int64(i), nil
					}
				}
			}
			off += int64(n)
			have, rest = have[n:], rest[n:]
			if len(rest) == 0 {
				rest = want
			}
		}
	}
	return -1, nil
}

// writeVerify is WRITE AND VERIFY: the blocks reach the flush level, and are then read
// back, and with BYTCHK compared. Nobody else changes them meanwhile.
func (c *call) writeVerify(ctx context.Context, lba, blocks uint64) Result {
	check := (c.cdb[1] & b1BYTCH) >> 1
	if check > bytchkAll {
		return c.fail(invalidCDB(1, 2))
	}
	return c.writePieces(ctx, lba, blocks, func(e Extent, landing Landing) (Result, error) {
		// The landing's buffers are not ours after Commit, and a copy of them would cost
		// as much again for each command in flight: what is read back is compared by
		// digest.
		var sent []byte
		if check == bytchkAll {
			sent = digest(landing.Buffers())
		}
		if err := c.unit.locks.acquire(ctx, &c.lock, e.LBA, e.LBA+e.Blocks, true); err != nil {
			landing.Abort()
			return Result{}, err
		}
		defer c.unit.locks.release(&c.lock)
		if err := landing.Commit(ctx, true); err != nil {
			return Result{}, err
		}
		stored := sha256.New()
		if err := c.readBack(ctx, e, stored); err != nil {
			return Result{}, err
		}
		if check == bytchkAll && !bytes.Equal(stored.Sum(nil), sent) {
			return c.fail(faultMiscompare), nil
		}
		return Result{}, nil
	})
}

// digest is the SHA-256 of the bytes in bufs.
func digest(bufs [][]byte) []byte {
	h := sha256.New()
	for _, b := range bufs {
		h.Write(b) // never fails
	}
	return h.Sum(nil)
}

// readBack reads e, a step at a time, into h.
func (c *call) readBack(ctx context.Context, e Extent, h hash.Hash) error {
	step := uint64(stepBytes) / uint64(c.geometry.BlockSize)
	for end := e.LBA + e.Blocks; e.LBA < end; {
		e.Blocks = min(end-e.LBA, step)
		b, err := c.medium().Read(ctx, e)
		if err != nil {
			return err
		}
		for _, buf := range b.Buffers() {
			h.Write(buf)
		}
		b.Release()
		e.LBA += e.Blocks
	}
	return nil
}
