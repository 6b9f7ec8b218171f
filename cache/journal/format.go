package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/zeebo/xxh3"
)

// The layout of the bytes is drawn in DESIGN.md. All integers are little-endian.

const (
	segmentMagic   uint64 = 0x31474553_47545349 // "ISTGSEG1"
	batchMagic     uint64 = 0x31484342_47545349 // "ISTGBCH1"
	segmentVersion uint32 = 1
	batchVersion   uint16 = 2

	batchFixedBytes = 128
	recordBytes     = 64
	sumBytes        = 4

	batchCRCAt   = 80
	segmentCRCAt = BlockSize - 4
)

// Flags of a batch.
const flagSeal uint16 = 1 // nothing follows in this segment

// castagnoli is for what the journal itself writes; sumOf is for what initiators write.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sumOf is the checksum of a block of payload. It is no CRC: a block that ends with its own CRC32C, as file systems and databases write
// them, has the CRC32C of every other such block, and an old one in the place of a new one would pass.
func sumOf(block []byte) uint32 { return uint32(xxh3.Hash(block)) }

var le = binary.LittleEndian

// zeroBlock is never written.
var zeroBlock [BlockSize]byte

// errNoBatch: the block does not begin a batch. errBadBatch: it claims to, and its header region is not intact.
var (
	errNoBatch  = errors.New("no batch")
	errBadBatch = errors.New("batch header is not intact")
)

// segmentHeader is block 0 of a segment.
type segmentHeader struct {
	incarnation  [16]byte
	generation   uint64 // from 1
	segmentBytes uint64
	firstBatch   uint64 // number of the first batch in this segment
	tail         uint64 // lowest generation still needed when the segment was begun
	prevCRC      uint32 // header CRC of batch firstBatch-1; 0 for the first of all
}

func (h *segmentHeader) encode(b []byte) {
	b = b[:BlockSize]
	clear(b)
	le.PutUint64(b[0:], segmentMagic)
	le.PutUint32(b[8:], segmentVersion)
	copy(b[16:32], h.incarnation[:])
	le.PutUint64(b[32:], h.generation)
	le.PutUint64(b[40:], h.segmentBytes)
	le.PutUint64(b[48:], h.firstBatch)
	le.PutUint64(b[56:], h.tail)
	le.PutUint32(b[64:], h.prevCRC)
	le.PutUint32(b[segmentCRCAt:], crc32.Checksum(b[:segmentCRCAt], castagnoli))
}

var errBadSegment = errors.New("segment header is not intact")

// decode returns errBadSegment unless b is an intact header, and ErrVersion for an intact one of another version.
func (h *segmentHeader) decode(b []byte) error {
	if len(b) < BlockSize || le.Uint64(b) != segmentMagic ||
		le.Uint32(b[segmentCRCAt:]) != crc32.Checksum(b[:segmentCRCAt], castagnoli) {
		return errBadSegment
	}
	if v := le.Uint32(b[8:]); v != segmentVersion {
		return fmt.Errorf("%w: segment version %d, this program knows %d", ErrVersion, v, segmentVersion)
	}
	copy(h.incarnation[:], b[16:32])
	h.generation = le.Uint64(b[32:])
	h.segmentBytes = le.Uint64(b[40:])
	h.firstBatch = le.Uint64(b[48:])
	h.tail = le.Uint64(b[56:])
	h.prevCRC = le.Uint32(b[64:])
	if h.generation == 0 || h.firstBatch == 0 || h.tail == 0 || h.tail > h.generation {
		return errBadSegment
	}
	return nil
}

// batchHeader is the fixed part of a batch's header region.
type batchHeader struct {
	flags         uint16
	headerBlocks  uint32
	incarnation   [16]byte
	generation    uint64
	number        uint64 // counts batches of the journal's whole life, from 1
	tail          uint64 // lowest generation still needed
	time          int64  // Unix nanoseconds
	block         uint32 // where in the segment the batch begins
	records       uint32
	payloadBlocks uint32
	prevCRC       uint32 // CRC of the header region of batch number-1
	crc           uint32
}

// headerBlocks returns the size of the header region of a batch.
func headerBlocks(records, payloadBlocks uint32) uint32 {
	bytes := batchFixedBytes + recordBytes*uint64(records) + sumBytes*uint64(payloadBlocks)
	return uint32((bytes + BlockSize - 1) / BlockSize)
}

// blocks returns the size of the whole batch.
func (h *batchHeader) blocks() uint32 { return h.headerBlocks + h.payloadBlocks }

// encodeFixed writes the fixed part, except the CRC, which seal adds once the region is complete.
func (h *batchHeader) encodeFixed(region []byte) {
	le.PutUint64(region[0:], batchMagic)
	le.PutUint16(region[8:], batchVersion)
	le.PutUint16(region[10:], h.flags)
	le.PutUint32(region[12:], h.headerBlocks)
	copy(region[16:32], h.incarnation[:])
	le.PutUint64(region[32:], h.generation)
	le.PutUint64(region[40:], h.number)
	le.PutUint64(region[48:], h.tail)
	le.PutUint64(region[56:], uint64(h.time))
	le.PutUint32(region[64:], h.block)
	le.PutUint32(region[68:], h.records)
	le.PutUint32(region[72:], h.payloadBlocks)
	le.PutUint32(region[76:], h.prevCRC)
}

// sealRegion computes the CRC of a complete header region and stores it.
func sealRegion(region []byte) uint32 {
	crc := regionCRC(region)
	le.PutUint32(region[batchCRCAt:], crc)
	return crc
}

func regionCRC(region []byte) uint32 {
	crc := crc32.Update(0, castagnoli, region[:batchCRCAt])
	crc = crc32.Update(crc, castagnoli, zeroBlock[:4])
	return crc32.Update(crc, castagnoli, region[batchCRCAt+4:])
}

func encodeRecord(region []byte, i uint32, r *Record, block uint32) {
	b := region[batchFixedBytes+recordBytes*i:][:recordBytes]
	copy(b[0:16], r.Volume[:])
	le.PutUint64(b[16:], r.Epoch)
	le.PutUint64(b[24:], r.LSN)
	b[32], b[33] = byte(r.Kind), r.Flags
	le.PutUint32(b[36:], block)
	le.PutUint64(b[40:], r.Offset)
	le.PutUint64(b[48:], r.Length)
	le.PutUint32(b[56:], r.PayloadBytes)
}

// record decodes record i of an intact region.
func (h *batchHeader) record(region []byte, i uint32) (r Record, block uint32) {
	b := region[batchFixedBytes+recordBytes*i:][:recordBytes]
	copy(r.Volume[:], b[0:16])
	r.Epoch = le.Uint64(b[16:])
	r.LSN = le.Uint64(b[24:])
	r.Kind, r.Flags = Kind(b[32]), b[33]
	block = le.Uint32(b[36:])
	r.Offset = le.Uint64(b[40:])
	r.Length = le.Uint64(b[48:])
	r.PayloadBytes = le.Uint32(b[56:])
	r.Time = h.time
	return r, block
}

// sumTable returns the bytes of the payload's checksums in the region, 4 per block.
func (h *batchHeader) sumTable(region []byte) []byte {
	at := batchFixedBytes + recordBytes*uint64(h.records)
	return region[at:][:sumBytes*uint64(h.payloadBlocks)]
}

// peekBatch looks at the first block of a batch and returns the length of its header region in
// blocks, at most limit. It returns errNoBatch without the magic, errBadBatch for an impossible length.
func peekBatch(first []byte, limit uint32) (uint32, error) {
	if len(first) < batchFixedBytes || le.Uint64(first) != batchMagic {
		return 0, errNoBatch
	}
	n := le.Uint32(first[12:])
	if n == 0 || n > limit {
		return 0, errBadBatch
	}
	return n, nil
}

// decodeBatch decodes a complete header region. Everything in it is checked, so that record and sumTable are
// safe afterwards. It returns errNoBatch, errBadBatch, or ErrVersion for an intact header that this program
// does not understand; then the identity in h (incarnation, generation, number, block) is set all the same.
func decodeBatch(region []byte) (h batchHeader, err error) {
	if len(region)%BlockSize != 0 || len(region)/BlockSize > math.MaxUint32 {
		return h, errBadBatch
	}
	n, err := peekBatch(region, uint32(len(region)/BlockSize))
	if err != nil {
		return h, err
	}
	h.crc = le.Uint32(region[batchCRCAt:])
	if int(n) != len(region)/BlockSize || h.crc != regionCRC(region) {
		return h, errBadBatch
	}
	h.flags = le.Uint16(region[10:])
	h.headerBlocks = n
	copy(h.incarnation[:], region[16:32])
	h.generation = le.Uint64(region[32:])
	h.number = le.Uint64(region[40:])
	h.tail = le.Uint64(region[48:])
	h.time = int64(le.Uint64(region[56:]))
	h.block = le.Uint32(region[64:])
	h.records = le.Uint32(region[68:])
	h.payloadBlocks = le.Uint32(region[72:])
	h.prevCRC = le.Uint32(region[76:])
	if v := le.Uint16(region[8:]); v != batchVersion {
		return h, fmt.Errorf("%w: batch version %d, this program knows %d", ErrVersion, v, batchVersion)
	}
	if h.tail == 0 || h.tail > h.generation || h.number == 0 || h.block == 0 || h.block+h.blocks() < h.block ||
		headerBlocks(h.records, h.payloadBlocks) != n {
		return h, errBadBatch
	}
	if h.flags&^flagSeal != 0 {
		return h, fmt.Errorf("%w: batch flags %#x", ErrVersion, h.flags)
	}
	next := uint64(h.block) + uint64(h.headerBlocks)
	for i := range h.records {
		r, block := h.record(region, i)
		if err := r.validate(); errors.Is(err, ErrVersion) {
			return h, err
		} else if err != nil || uint64(block) != next {
			return h, errBadBatch
		}
		next += uint64(r.payloadBlocks())
	}
	if next != uint64(h.block)+uint64(h.blocks()) {
		return h, errBadBatch
	}
	return h, nil
}
