package scsi

import (
	"context"
	"encoding/binary"
)

// The address and length fields of the four CDB sizes. Field offsets of the length are
// for field pointers.
func lbaCount6(cdb []byte) (lba, blocks uint64) {
	lba = uint64(cdb[1]&0x1F)<<16 | uint64(cdb[2])<<8 | uint64(cdb[3])
	blocks = uint64(cdb[4])
	if blocks == 0 {
		blocks = 256
	}
	return lba, blocks
}

func lbaCount10(cdb []byte) (lba, blocks uint64) {
	return uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint16(cdb[7:]))
}

func lbaCount12(cdb []byte) (lba, blocks uint64) {
	return uint64(binary.BigEndian.Uint32(cdb[2:])), uint64(binary.BigEndian.Uint32(cdb[6:]))
}

func lbaCount16(cdb []byte) (lba, blocks uint64) {
	return binary.BigEndian.Uint64(cdb[2:]), uint64(binary.BigEndian.Uint32(cdb[10:]))
}

// lengthField is the offset of the transfer length in a CDB.
func lengthField(cdb []byte) int {
	switch cdb[0] >> 5 {
	case 0:
		return 4
	case 1, 2:
		return 7
	case 5:
		return 6
	default:
		return 10
	}
}

func read6(ctx context.Context, c *call) Result {
	lba, n := lbaCount6(c.cdb)
	return c.read(ctx, lba, n, false)
}

func read10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.read(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

func read12(ctx context.Context, c *call) Result {
	lba, n := lbaCount12(c.cdb)
	return c.read(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

func read16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.read(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

func write6(ctx context.Context, c *call) Result {
	lba, n := lbaCount6(c.cdb)
	return c.write(ctx, lba, n, false)
}

func write10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.write(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

func write12(ctx context.Context, c *call) Result {
	lba, n := lbaCount12(c.cdb)
	return c.write(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

func write16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.write(ctx, lba, n, c.cdb[1]&b1FUA != 0)
}

// inRange reports whether blocks from lba on lie within the capacity.
func (c *call) inRange(lba, blocks uint64) bool {
	return blocks <= c.geometry.Blocks && lba <= c.geometry.Blocks-blocks
}

// checkTransfer checks a range against the capacity and the maximum transfer length.
func (c *call) checkTransfer(lba, blocks uint64) (fault, bool) {
	if !c.inRange(lba, blocks) {
		return faultLBARange, false
	}
	if blocks > uint64(c.unit.opt.MaxTransfer) {
		return invalidCDB(lengthField(c.cdb), -1), false
	}
	return fault{}, true
}

// checkWritable checks write protection.
func (c *call) checkWritable() (fault, bool) {
	switch {
	case !c.protected:
		return fault{}, true
	case c.softWP:
		return faultSoftwareWP, false
	default:
		return faultWriteProtected, false
	}
}

// read sends blocks to the initiator, a step at a time. With fua, what is read is at
// the flush level first.
func (c *call) read(ctx context.Context, lba, blocks uint64, fua bool) Result {
	if f, ok := c.checkTransfer(lba, blocks); !ok {
		return c.fail(f)
	}
	if fua && blocks > 0 {
		if err := c.medium().Flush(ctx); err != nil {
			return c.failErr(ctx, err)
		}
	}
	size := int64(c.geometry.BlockSize)
	total := int64(blocks) * size
	want := min(total, c.cmd.Data.InLength())
	for off := int64(0); off < want; {
		n := min(want-off, stepBytes)
		n = (n + size - 1) / size * size
		b, err := c.medium().Read(ctx, Extent{LBA: lba + uint64(off/size), Blocks: uint64(n / size)})
		if err == nil {
			if h, ok := c.cmd.Data.(Holder); ok && off+n >= want {
				err = h.SendLoan(ctx, b, off)
			} else {
				err = c.cmd.Data.Send(ctx, b.Buffers(), off)
				b.Release()
			}
		}
		if err != nil {
			res := c.failErr(ctx, err)
			res.DataIn = off
			return res
		}
		off += n
	}
	return Result{DataIn: total}
}

// write is the path of a write, top to bottom: check, reserve the journal's memory, let
// the initiator's bytes land in it, commit. Of each piece nothing is written unless all
// its bytes have arrived.
func (c *call) write(ctx context.Context, lba, blocks uint64, fua bool) Result {
	return c.writePieces(ctx, lba, blocks, func(e Extent, landing Landing) (Result, error) {
		// The range is held only while the write takes effect, never while an initiator
		// sends: COMPARE AND WRITE does not wait for a slow peer.
		if err := c.unit.locks.acquire(ctx, &c.lock, e.LBA, e.LBA+e.Blocks, false); err != nil {
			landing.Abort()
			return Result{}, err
		}
		defer c.unit.locks.release(&c.lock)
		return Result{}, landing.Commit(ctx, fua)
	})
}

// writePieces checks a write, and has its data-out land piece by piece. Each piece goes
// to take, which ends the landing; a status other than GOOD, or an error, ends the
// command there.
//
// An initiator may announce fewer bytes than the CDB needs. Whole blocks are then written
// and the rest of the range is left alone (FCP-4, 9.4.2, option a; iSCSI reports the
// residual overflow); with a torn block nothing is written.
func (c *call) writePieces(ctx context.Context, lba, blocks uint64, take func(Extent, Landing) (Result, error)) Result {
	if f, ok := c.checkTransfer(lba, blocks); !ok {
		return c.fail(f)
	}
	if f, ok := c.checkWritable(); !ok {
		return c.fail(f)
	}
	size := int64(c.geometry.BlockSize)
	total := int64(blocks) * size
	sent := min(c.cmd.Data.OutLength(), total)
	if sent%size != 0 {
		return c.shortDataOut(total)
	}
	for off := int64(0); off < sent; {
		n := min(sent-off, MaxLanding)
		e := Extent{LBA: lba + uint64(off/size), Blocks: uint64(n / size)}
		landing, err := c.land(ctx, e, off)
		var res Result
		if err == nil {
			off += n
			res, err = take(e, landing)
		}
		if err != nil {
			res = c.failErr(ctx, err)
		}
		if res.Status != Good {
			res.DataOut = off
			return res
		}
	}
	return Result{DataOut: total}
}

// land reserves e and receives its bytes, which begin at offset off of the data-out.
func (c *call) land(ctx context.Context, e Extent, off int64) (Landing, error) {
	landing, err := c.medium().Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Data.Receive(ctx, landing.Buffers(), off); err != nil {
		landing.Abort()
		return nil, err
	}
	return landing, nil
}

// shortDataOut ends a command whose initiator announced another number of bytes than the
// CDB needs: ILLEGAL REQUEST, INVALID FIELD IN COMMAND INFORMATION UNIT, and nothing is
// written.
func (c *call) shortDataOut(total int64) Result {
	res := c.fail(faultInformationUnit)
	res.DataOut = total
	return res
}
