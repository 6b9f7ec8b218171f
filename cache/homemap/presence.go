package homemap

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/bits"

	"github.com/isergate/isergate/cache/extent"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const (
	chunkPages  = 1 << 15 // pages per chunk: 128 GiB of volume
	chunkWords  = chunkPages / 64
	chunkCount  = extent.MaxPages / chunkPages
	chunkRecord = 40 + chunkPages/8
)

// presence says which pages of a volume have content of their own, in the cache or in
// the store: one bit each, in chunks that exist where a bit was ever set.
type presence struct {
	chunks [chunkCount]*[chunkWords]uint64
	dirty  [chunkCount]bool // differs from the store
}

func (p *presence) has(page uint64) bool {
	c := p.chunks[page/chunkPages]
	return c != nil && c[page%chunkPages/64]&(1<<(page%64)) != 0
}

func (p *presence) set(page uint64) {
	i := page / chunkPages
	if p.chunks[i] == nil {
		p.chunks[i] = new([chunkWords]uint64)
	}
	w, bit := &p.chunks[i][page%chunkPages/64], uint64(1)<<(page%64)
	if *w&bit == 0 {
		*w |= bit
		p.dirty[i] = true
	}
}

// clear clears the bits of pages [from, to) and reports how many were set.
func (p *presence) clear(from, to uint64) (cleared int) {
	for from < to {
		i := from / chunkPages
		end := min(to, (i+1)*chunkPages)
		c := p.chunks[i]
		if c == nil {
			from = end
			continue
		}
		for from < end {
			next := min(end, (from/64+1)*64)
			mask := (^uint64(0) >> (64 - (next - from))) << (from % 64)
			w := &c[from%chunkPages/64]
			if n := bits.OnesCount64(*w & mask); n > 0 {
				cleared += n
				*w &^= mask
				p.dirty[i] = true
			}
			from = next
		}
	}
	return cleared
}

func (p *presence) count() (n int) {
	for _, c := range p.chunks {
		if c != nil {
			for _, w := range c {
				n += bits.OnesCount64(w)
			}
		}
	}
	return n
}

// next returns the first present page from page on.
func (p *presence) next(page uint64) (uint64, bool) {
	for page < extent.MaxPages {
		c := p.chunks[page/chunkPages]
		if c == nil {
			page = (page/chunkPages + 1) * chunkPages
			continue
		}
		if w := c[page%chunkPages/64] >> (page % 64); w != 0 {
			return page + uint64(bits.TrailingZeros64(w)), true
		}
		page = (page/64 + 1) * 64
	}
	return 0, false
}

func (p *presence) clone() *presence {
	q := new(presence)
	for i, c := range p.chunks {
		if c != nil {
			d := *c
			q.chunks[i] = &d
		}
	}
	return q
}

func (c *presence) empty(i int) bool {
	if c.chunks[i] == nil {
		return true
	}
	return *c.chunks[i] == [chunkWords]uint64{}
}

// An encoded chunk, little-endian: magic "IGXB", version 1 (2), 0 (2), volume (16),
// number (8), CRC32C of all other bytes (4), 0 (4), then one bit per page, that of the
// lowest page in the lowest bit of the first byte.
const chunkMagic, chunkVersion = 0x42584749, 1

func (p *presence) appendChunk(dst []byte, volume [16]byte, i int) []byte {
	at := len(dst)
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, chunkMagic)
	dst = le.AppendUint16(dst, chunkVersion)
	dst = le.AppendUint16(dst, 0)
	dst = append(dst, volume[:]...)
	dst = le.AppendUint64(dst, uint64(i))
	dst = le.AppendUint64(dst, 0)
	for _, w := range p.chunks[i] {
		dst = le.AppendUint64(dst, w)
	}
	le.PutUint32(dst[at+32:], chunkCRC(dst[at:]))
	return dst
}

func chunkCRC(rec []byte) uint32 {
	crc := crc32.Checksum(rec[:32], castagnoli)
	return crc32.Update(crc, castagnoli, rec[36:])
}

func (p *presence) decodeChunk(rec []byte, volume [16]byte, i uint64) error {
	le := binary.LittleEndian
	switch {
	case i >= chunkCount || len(rec) != chunkRecord || le.Uint32(rec) != chunkMagic:
		return fmt.Errorf("%w: presence record %d of %d bytes", ErrDamaged, i, len(rec))
	case le.Uint16(rec[4:]) != chunkVersion:
		return fmt.Errorf("%w: presence record has unknown version %d", ErrDamaged, le.Uint16(rec[4:]))
	case le.Uint32(rec[32:]) != chunkCRC(rec):
		return fmt.Errorf("%w: checksum of presence record %d", ErrDamaged, i)
	case [16]byte(rec[8:24]) != volume || le.Uint64(rec[24:]) != i:
		return fmt.Errorf("%w: presence record %d is another one", ErrDamaged, i)
	}
	c := new([chunkWords]uint64)
	for k := range c {
		c[k] = le.Uint64(rec[40+8*k:])
	}
	p.chunks[i] = c
	return nil
}

// digest identifies the whole: the number of records and the sum of their checksums.
type digest struct {
	records uint32
	sum     uint64
}

func (d *digest) add(rec []byte) {
	d.records++
	d.sum += uint64(crc32.Checksum(rec, castagnoli))
}
