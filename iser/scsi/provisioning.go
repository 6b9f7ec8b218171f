package scsi

import (
	"context"
	"encoding/binary"
)

// unmap is UNMAP (SBC-3, 5.25). All descriptors are checked before any block changes.
func unmap(ctx context.Context, c *call) Result {
	n := int(binary.BigEndian.Uint16(c.cdb[7:]))
	if f, ok := c.checkWritable(); !ok {
		return c.fail(f)
	}
	list, res, ok := c.parameterList(ctx, n)
	if !ok {
		return res
	}
	if n == 0 {
		return Result{}
	}
	if f, ok := c.unmapExtents(list); !ok {
		res = c.fail(f)
	} else if len(c.extents) > 0 {
		first, end := c.extents[0].LBA, uint64(0)
		for _, e := range c.extents {
			first, end = min(first, e.LBA), max(end, e.LBA+e.Blocks)
		}
		if err := c.unit.locks.acquire(ctx, &c.lock, first, end, false); err != nil {
			return c.failErr(ctx, err)
		}
		err := c.medium().Deallocate(ctx, c.extents, false)
		c.unit.locks.release(&c.lock)
		if err != nil {
			res = c.failErr(ctx, err)
		}
	}
	res.DataOut = int64(n)
	return res
}

// unmapExtents decodes the parameter list of UNMAP into c.extents: 2 bytes data length,
// 2 bytes block descriptor data length, 4 reserved, then descriptors of 8 bytes LBA, 4
// bytes count, 4 reserved.
func (c *call) unmapExtents(list []byte) (fault, bool) {
	const header, desc = 8, 16
	if len(list) < header {
		return faultListLength, false
	}
	n := int(binary.BigEndian.Uint16(list[2:]))
	if n > len(list)-header {
		return faultListLength, false
	}
	if n/desc > maxUnmapDescs {
		return invalidParameter(2, -1), false
	}
	c.extents = c.extents[:0]
	for at := header; at+desc <= header+n; at += desc {
		e := Extent{LBA: binary.BigEndian.Uint64(list[at:]), Blocks: uint64(binary.BigEndian.Uint32(list[at+8:]))}
		if e.Blocks == 0 {
			continue // no block, so any address will do
		}
		if !c.inRange(e.LBA, e.Blocks) {
			return faultLBARange, false
		}
		c.extents = append(c.extents, e)
	}
	return fault{}, true
}

func writeSame10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.writeSame(ctx, lba, n, false)
}

func writeSame16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.writeSame(ctx, lba, n, c.cdb[1]&b1NDOB != 0)
}

// writeSame is WRITE SAME (SBC-3, 5.46). A block of zeros deallocates, with UNMAP or
// without: deallocated blocks read as zeros (LBPRZ). UNMAP deallocates whatever the block
// holds, as the targets do that initiators and the conformance suite know.
func (c *call) writeSame(ctx context.Context, lba, blocks uint64, noDataOut bool) Result {
	if blocks == 0 {
		// To the end of the medium.
		if lba >= c.geometry.Blocks {
			return c.fail(faultLBARange)
		}
		blocks = c.geometry.Blocks - lba
	}
	if !c.inRange(lba, blocks) {
		return c.fail(faultLBARange)
	}
	if blocks > maxWriteSame {
		return c.fail(invalidCDB(lengthField(c.cdb), -1))
	}
	if f, ok := c.checkWritable(); !ok {
		return c.fail(f)
	}
	var block []byte
	var total int64
	if !noDataOut {
		total = int64(c.geometry.BlockSize)
		if c.cmd.Data.OutLength() != total {
			return c.shortDataOut(total)
		}
		block = make([]byte, total)
		c.one[0] = block
		if err := c.cmd.Data.Receive(ctx, c.one[:], 0); err != nil {
			return c.failErr(ctx, err)
		}
	}
	if err := c.unit.locks.acquire(ctx, &c.lock, lba, lba+blocks, false); err != nil {
		return c.failErr(ctx, err)
	}
	var err error
	e := Extent{LBA: lba, Blocks: blocks}
	if block == nil || c.cdb[1]&b1UNMAP != 0 || isZero(block) {
		c.extents = append(c.extents[:0], e)
		err = c.medium().Deallocate(ctx, c.extents, false)
	} else {
		err = c.medium().WriteSame(ctx, e, block, false)
	}
	c.unit.locks.release(&c.lock)
	var res Result
	if err != nil {
		res = c.failErr(ctx, err)
	}
	res.DataOut = total
	return res
}
