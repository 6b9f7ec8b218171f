package scsi

import (
	"context"
	"encoding/binary"
	"math/bits"
)

// readCapacity10 is READ CAPACITY(10) (SBC-3, 5.15).
func readCapacity10(ctx context.Context, c *call) Result {
	var b [8]byte
	binary.BigEndian.PutUint32(b[:], uint32(min(c.geometry.Blocks-1, 0xFFFFFFFF)))
	binary.BigEndian.PutUint32(b[4:], c.geometry.BlockSize)
	return c.reply(ctx, b[:], int64(len(b)))
}

// readCapacity16 is READ CAPACITY(16) (SBC-3, 5.16).
func readCapacity16(ctx context.Context, c *call) Result {
	const lbpme, lbprz = 0x80, 0x40
	var b [32]byte
	binary.BigEndian.PutUint64(b[:], c.geometry.Blocks-1)
	binary.BigEndian.PutUint32(b[8:], c.geometry.BlockSize)
	if !c.unit.opt.PlainBlocks {
		b[13] = byte(bits.TrailingZeros32(c.geometry.PhysicalSize / c.geometry.BlockSize))
	}
	b[14] = lbpme | lbprz
	return c.reply(ctx, b[:], int64(binary.BigEndian.Uint32(c.cdb[10:])))
}

// Limits of one GET LBA STATUS: descriptors returned, and questions to the medium.
const (
	maxStatusDescs = 256
	maxStatusAsks  = 4096
)

// getLBAStatus is GET LBA STATUS (SBC-3, 5.6). It describes at least the first block
// asked for, and stops at its limits; initiators go on from there.
func getLBAStatus(ctx context.Context, c *call) Result {
	const deallocated = 1
	lba := binary.BigEndian.Uint64(c.cdb[2:])
	alloc := int64(binary.BigEndian.Uint32(c.cdb[10:]))
	if lba >= c.geometry.Blocks {
		return c.fail(faultLBARange)
	}
	descs := min(max((alloc-8)/16, 1), maxStatusDescs)
	out := make([]byte, 8, 8+16*descs)
	var start, count uint64
	status := byte(0)
	appendDesc := func() {
		out = binary.BigEndian.AppendUint64(out, start)
		out = binary.BigEndian.AppendUint32(out, uint32(count))
		out = append(out, status, 0, 0, 0)
	}
	for range maxStatusAsks {
		if lba == c.geometry.Blocks {
			break
		}
		most := min(c.geometry.Blocks-lba, 0xFFFFFFFF)
		mapped, n, err := c.medium().Mapped(ctx, lba, most)
		if err != nil {
			return c.failErr(ctx, err)
		}
		s := byte(deallocated)
		if mapped {
			s = 0
		}
		n = max(min(n, most), 1)
		if count > 0 && s == status && count+n <= 0xFFFFFFFF {
			count += n
		} else {
			if count > 0 {
				appendDesc()
				if int64(len(out)) >= 8+16*descs {
					count = 0
					break
				}
			}
			start, count, status = lba, n, s
		}
		lba += n
	}
	if count > 0 {
		appendDesc()
	}
	binary.BigEndian.PutUint32(out, uint32(len(out)-4))
	return c.reply(ctx, out, alloc)
}
