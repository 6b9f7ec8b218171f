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
	if blocks > uint64(c.unit.opt.MaxTransfer)/uint64(c.geometry.BlockSize) {
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
			err = c.cmd.Data.Send(ctx, b.Buffers(), off)
			b.Release()
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
// the initiator's bytes land in it, commit. Nothing is written unless all bytes that the
// CDB asks for have arrived.
func (c *call) write(ctx context.Context, lba, blocks uint64, fua bool) Result {
	if f, ok := c.checkTransfer(lba, blocks); !ok {
		return c.fail(f)
	}
	if f, ok := c.checkWritable(); !ok {
		return c.fail(f)
	}
	if blocks == 0 {
		return Result{}
	}
	total := int64(blocks) * int64(c.geometry.BlockSize)
	if c.cmd.Data.OutLength() < total {
		return c.shortDataOut(total)
	}
	e := Extent{LBA: lba, Blocks: blocks}
	landing, err := c.medium().Reserve(ctx, e)
	if err != nil {
		return c.failErr(ctx, err)
	}
	if err := c.cmd.Data.Receive(ctx, landing.Buffers(), 0); err != nil {
		landing.Abort()
		return c.failErr(ctx, err)
	}
	// The range is held only while the write takes effect, never while an initiator
	// sends: COMPARE AND WRITE does not wait for a slow peer.
	if err := c.unit.locks.acquire(ctx, &c.lock, lba, lba+blocks, false); err != nil {
		landing.Abort()
		return c.failErr(ctx, err)
	}
	err = landing.Commit(ctx, fua)
	c.unit.locks.release(&c.lock)
	if err != nil {
		res := c.failErr(ctx, err)
		res.DataOut = total
		return res
	}
	return Result{DataOut: total}
}

// shortDataOut ends a command whose initiator announced fewer bytes than the CDB needs:
// ILLEGAL REQUEST, INVALID FIELD IN COMMAND INFORMATION UNIT, and nothing is written.
func (c *call) shortDataOut(total int64) Result {
	res := c.fail(faultInformationUnit)
	res.DataOut = total
	return res
}
