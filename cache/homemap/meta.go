package homemap

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/isergate/isergate/cache/extent"
)

// Position is how far in the volume's object log the map is.
type Position struct {
	Epoch uint64 // of the last object whose extents are in the map
	Seq   uint64 // its sequence number
	LSN   uint64 // the object watermark
}

// Checkpoint is what a checkpoint saves beside the map.
type Checkpoint struct {
	Position
	Blob []byte // the caller's, at most MaxBlob bytes
}

// Limits of a meta record.
const (
	MaxBlob   = 64 << 10
	maxCoarse = 8192 // ranges
	maxStale  = 1024 // ranges
)

// pageRange is [from, to).
type pageRange struct{ from, to uint64 }

// meta is the content of a meta record.
type meta struct {
	Checkpoint
	digest digest
	coarse extent.Coarse // of kind Same only
	stale  []pageRange   // where the store may have pages that are not present
}

// An encoded meta record, little-endian:
//
//	offset  bytes  meaning
//	0       4      magic "IGXM"
//	4       2      version, 1
//	6       2      0
//	8       16     volume
//	24      8      epoch
//	32      8      sequence number
//	40      8      LSN
//	48      4      presence records
//	52      8      sum of their CRC32Cs
//	60      4      bytes of the blob
//	64      4      coarse ranges
//	68      4      stale ranges
//	72      4      CRC32C of all other bytes
//	76      …      blob
//	…       40*n   coarse ranges, ascending: first page (4), pages (4), block sectors (1), 0 (1),
//	               header (2), sector (4), epoch (4), 0 (4), ref (8), LSN (8)
//	…       8*n    stale ranges: first page (4), pages (4)
const (
	metaMagic   = 0x4d584749
	metaVersion = 1
	metaHeader  = 76
	coarseBytes = 40
)

func (m *meta) appendTo(dst []byte, volume [16]byte) []byte {
	at := len(dst)
	le := binary.LittleEndian
	dst = le.AppendUint32(dst, metaMagic)
	dst = le.AppendUint16(dst, metaVersion)
	dst = le.AppendUint16(dst, 0)
	dst = append(dst, volume[:]...)
	dst = le.AppendUint64(dst, m.Epoch)
	dst = le.AppendUint64(dst, m.Seq)
	dst = le.AppendUint64(dst, m.LSN)
	dst = le.AppendUint32(dst, m.digest.records)
	dst = le.AppendUint64(dst, m.digest.sum)
	dst = le.AppendUint32(dst, uint32(len(m.Blob)))
	dst = le.AppendUint32(dst, uint32(m.coarse.Len()))
	dst = le.AppendUint32(dst, uint32(len(m.stale)))
	dst = le.AppendUint32(dst, 0)
	dst = append(dst, m.Blob...)
	for _, e := range m.coarse.All() {
		dst = le.AppendUint32(dst, uint32(e.Start>>extent.PageShift))
		dst = le.AppendUint32(dst, uint32(e.Sectors>>extent.PageShift))
		dst = append(dst, e.Loc.Block, 0)
		dst = le.AppendUint16(dst, e.Loc.Header)
		dst = le.AppendUint32(dst, e.Loc.Sector)
		dst = le.AppendUint32(dst, e.Loc.Epoch)
		dst = le.AppendUint32(dst, 0)
		dst = le.AppendUint64(dst, e.Loc.Ref)
		dst = le.AppendUint64(dst, e.LSN)
	}
	for _, r := range m.stale {
		dst = le.AppendUint32(dst, uint32(r.from))
		dst = le.AppendUint32(dst, uint32(r.to-r.from))
	}
	le.PutUint32(dst[at+72:], metaCRC(dst[at:]))
	return dst
}

func metaCRC(rec []byte) uint32 {
	return crc32.Update(crc32.Checksum(rec[:72], castagnoli), castagnoli, rec[metaHeader:])
}

func decodeMeta(rec []byte, volume [16]byte) (*meta, error) {
	le := binary.LittleEndian
	switch {
	case len(rec) < metaHeader || le.Uint32(rec) != metaMagic:
		return nil, fmt.Errorf("%w: meta record of %d bytes", ErrDamaged, len(rec))
	case le.Uint16(rec[4:]) != metaVersion:
		return nil, fmt.Errorf("%w: meta record has unknown version %d", ErrDamaged, le.Uint16(rec[4:]))
	case le.Uint32(rec[72:]) != metaCRC(rec):
		return nil, fmt.Errorf("%w: checksum of meta record", ErrDamaged)
	case [16]byte(rec[8:24]) != volume:
		return nil, fmt.Errorf("%w: meta record of volume %x", ErrDamaged, rec[8:24])
	}
	blob, coarse, stale := uint64(le.Uint32(rec[60:])), uint64(le.Uint32(rec[64:])), uint64(le.Uint32(rec[68:]))
	if blob > MaxBlob || coarse > maxCoarse || stale > maxStale ||
		metaHeader+blob+coarse*coarseBytes+stale*8 != uint64(len(rec)) {
		return nil, fmt.Errorf("%w: lengths in meta record", ErrDamaged)
	}
	m := &meta{
		Checkpoint: Checkpoint{Position: Position{Epoch: le.Uint64(rec[24:]), Seq: le.Uint64(rec[32:]), LSN: le.Uint64(rec[40:])}},
		digest:     digest{records: le.Uint32(rec[48:]), sum: le.Uint64(rec[52:])},
	}
	b := rec[metaHeader:]
	m.Blob = append(m.Blob, b[:blob]...)
	b = b[blob:]
	var pos uint64
	for range coarse {
		first, n := uint64(le.Uint32(b)), uint64(le.Uint32(b[4:]))
		e := extent.Extent{
			Start: first << extent.PageShift, Sectors: n << extent.PageShift, LSN: le.Uint64(b[32:]), Kind: extent.Same,
			Loc: extent.Location{
				Block: b[8], Header: le.Uint16(b[10:]), Sector: le.Uint32(b[12:]), Epoch: le.Uint32(b[16:]), Ref: le.Uint64(b[24:]),
			},
		}
		if err := e.Validate(); err != nil || first < pos {
			return nil, fmt.Errorf("%w: coarse range in meta record", ErrDamaged)
		}
		pos = first + n
		m.coarse.Insert(e)
		b = b[coarseBytes:]
	}
	pos = 0
	for range stale {
		first, n := uint64(le.Uint32(b)), uint64(le.Uint32(b[4:]))
		if n == 0 || first < pos || first+n > extent.MaxPages {
			return nil, fmt.Errorf("%w: stale range in meta record", ErrDamaged)
		}
		pos = first + n
		m.stale = append(m.stale, pageRange{first, pos})
		b = b[8:]
	}
	return m, nil
}
