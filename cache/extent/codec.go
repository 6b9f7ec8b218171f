package extent

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// An encoded page, little-endian:
//
//	offset  bytes  meaning
//	0       4      magic "IGXP"
//	4       2      version, 1
//	6       2      0
//	8       16     volume
//	24      8      number of the page in the volume
//	32      8      LSN: the page holds the effect of all writes up to it
//	40      4      number of entries, 0 to 8192
//	44      4      CRC32C of all other bytes of the record
//	48      32*n   entries, in ascending order
//
// An entry:
//
//	0       2      first sector within the page
//	2       2      sectors
//	4       1      kind
//	5       1      sectors of the repeated block; 0 unless the kind is Same
//	6       2      length of the object's header in 4-KiB blocks
//	8       4      sector in the payload
//	12      4      epoch
//	16      8      segment generation or object sequence
//	24      8      LSN
const (
	pageMagic   = 0x50584749 // "IGXP"
	pageVersion = 1
	pageHeader  = 48
)

// MaxEncoded is the size of the largest encoded page.
const MaxEncoded = pageHeader + PageSectors*entryBytes

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// PageID says which page of which volume a record holds.
type PageID struct {
	Volume [16]byte
	Number uint64
}

// EncodedLen is the length of the page's record.
func (p *Page) EncodedLen() int { return pageHeader + len(p.entries)*entryBytes }

// AppendEncode appends the page's record to dst.
func (p *Page) AppendEncode(dst []byte, id PageID) []byte {
	at := len(dst)
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, pageMagic)
	dst = le.AppendUint16(dst, pageVersion)
	dst = le.AppendUint16(dst, 0)
	dst = append(dst, id.Volume[:]...)
	dst = le.AppendUint64(dst, id.Number)
	dst = le.AppendUint64(dst, p.lsn)
	dst = le.AppendUint32(dst, uint32(len(p.entries)))
	dst = le.AppendUint32(dst, 0)
	for i := range p.entries {
		x := &p.entries[i]
		dst = le.AppendUint16(dst, x.start)
		dst = le.AppendUint16(dst, x.n)
		dst = append(dst, byte(x.kind), x.block)
		dst = le.AppendUint16(dst, x.header)
		dst = le.AppendUint32(dst, x.sector)
		dst = le.AppendUint32(dst, x.epoch)
		dst = le.AppendUint64(dst, x.ref)
		dst = le.AppendUint64(dst, x.lsn)
	}
	rec := dst[at:]
	le.PutUint32(rec[44:], pageCRC(rec))
	return dst
}

func pageCRC(rec []byte) uint32 {
	return crc32.Update(crc32.Checksum(rec[:44], castagnoli), castagnoli, rec[pageHeader:])
}

// checkPage verifies the frame of a record and returns its LSN.
func checkPage(rec []byte, id PageID) (lsn uint64, err error) {
	le := binary.LittleEndian
	switch {
	case len(rec) < pageHeader || len(rec) > MaxEncoded:
		return 0, fmt.Errorf("%w: %d bytes", ErrCorrupt, len(rec))
	case le.Uint32(rec) != pageMagic:
		return 0, fmt.Errorf("%w: magic %#x", ErrCorrupt, le.Uint32(rec))
	case le.Uint16(rec[4:]) != pageVersion:
		return 0, fmt.Errorf("%w: %d", ErrVersion, le.Uint16(rec[4:]))
	case le.Uint16(rec[6:]) != 0:
		return 0, fmt.Errorf("%w: reserved bytes are set", ErrCorrupt)
	case le.Uint32(rec[44:]) != pageCRC(rec):
		return 0, fmt.Errorf("%w: checksum", ErrCorrupt)
	case [16]byte(rec[8:24]) != id.Volume || le.Uint64(rec[24:]) != id.Number:
		return 0, fmt.Errorf("%w: it is page %d of volume %x", ErrCorrupt, le.Uint64(rec[24:]), rec[8:24])
	case uint64(le.Uint32(rec[40:]))*entryBytes != uint64(len(rec)-pageHeader):
		return 0, fmt.Errorf("%w: %d entries in %d bytes", ErrCorrupt, le.Uint32(rec[40:]), len(rec))
	}
	return le.Uint64(rec[32:]), nil
}

// Decode replaces the page by the record rec, which must be that of id. On an error,
// ErrCorrupt or ErrVersion, the page is empty. rec is not kept.
func (p *Page) Decode(rec []byte, id PageID) error {
	p.Clear()
	lsn, err := checkPage(rec, id)
	if err != nil {
		return err
	}
	n := (len(rec) - pageHeader) / entryBytes
	if cap(p.entries) < n {
		p.entries = make([]entry, 0, n)
	}
	le := binary.LittleEndian
	pos := uint32(0)
	p.entries = p.entries[:n]
	for i := range p.entries {
		b := rec[pageHeader+i*entryBytes:][:entryBytes]
		x := &p.entries[i]
		*x = entry{
			start: le.Uint16(b), n: le.Uint16(b[2:]), kind: Kind(b[4]), block: b[5], header: le.Uint16(b[6:]),
			sector: le.Uint32(b[8:]), epoch: le.Uint32(b[12:]), ref: le.Uint64(b[16:]), lsn: le.Uint64(b[24:]),
		}
		if !x.valid() || uint32(x.start) < pos || x.lsn > lsn {
			p.Clear()
			return fmt.Errorf("%w: entry %d", ErrCorrupt, i)
		}
		pos = x.end()
	}
	p.lsn = lsn
	return nil
}

// valid reports whether an entry is one that a page may have; it is Extent.Validate
// for entries.
func (x *entry) valid() bool {
	if x.n == 0 || x.end() > PageSectors {
		return false
	}
	switch x.kind {
	case Data:
		return x.block == 0 && uint64(x.sector)+uint64(x.n) <= 1<<32
	case Zero:
		return x.block == 0
	case Same:
		return x.block == 1 || x.block == 8
	}
	return false
}
