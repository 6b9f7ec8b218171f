package journal

import (
	"errors"
	"fmt"
	"io"
)

// scanBlocks is how much is read at once when a segment is searched.
const scanBlocks = 256

// cursor walks the chain of batches of one segment.
type cursor struct {
	r           *recovery
	s           *segment
	incarnation [16]byte
	blind       bool // accepts any intact batch at next: its place in the chain was checked before

	next   uint32 // block of the next batch
	number uint64 // that the next batch must have
	prev   uint32 // CRC of the batch before
	tail   uint64 // highest seen
	sealed bool

	// The batch that step read. region is valid until the next step.
	h      batchHeader
	region []byte
}

func (r *recovery) cursor(s *segment) *cursor {
	h := r.headers[s.generation]
	return &cursor{r: r, s: s, incarnation: h.incarnation, next: 1, number: h.firstBatch, prev: h.prevCRC, tail: h.tail}
}

func (c *cursor) damage(block uint32, detail string) error {
	return &CorruptError{Path: c.s.path, Segment: c.s.generation, Block: block, Detail: detail + advice}
}

// step reads the batch at next and moves behind it. It returns false where no intact batch of this segment is: the end, a
// tear or damage, for the caller to decide. An intact batch that is out of sequence is damage for certain.
func (c *cursor) step() (bool, error) {
	if c.sealed || c.next >= c.s.blocks {
		return false, nil
	}
	h, region, err := c.r.batchAt(c.s, c.next)
	switch {
	case errors.Is(err, errNoBatch), errors.Is(err, errBadBatch):
		return false, nil
	case errors.Is(err, ErrVersion):
		if h.generation != c.s.generation || h.incarnation != c.incarnation {
			return false, nil // left from an earlier use of the file
		}
		return false, fmt.Errorf("%s, block %d: %w", c.s.path, c.next, err)
	case err != nil:
		return false, err
	}
	if !c.blind {
		if h.generation != c.s.generation || h.incarnation != c.incarnation {
			return false, nil
		}
		if h.number != c.number || h.prevCRC != c.prev {
			return false, c.damage(c.next, fmt.Sprintf("batch %d does not continue batch %d", h.number, c.number-1))
		}
	}
	c.h, c.region = h, append(c.region[:0], region...)
	c.next += h.blocks()
	c.number, c.prev = c.number+1, h.crc
	c.tail = max(c.tail, h.tail)
	c.sealed = h.flags&flagSeal != 0
	return true, nil
}

// nextBegun reports whether the block at next shows the beginning of the batch that must follow, intact or not.
func (c *cursor) nextBegun() (bool, error) {
	if c.sealed || c.next >= c.s.blocks {
		return false, nil
	}
	b, err := c.r.read(c.s, c.next, 1)
	if err != nil {
		return false, err
	}
	return le.Uint64(b) == batchMagic && [16]byte(b[16:32]) == c.incarnation &&
		le.Uint64(b[32:]) == c.s.generation && le.Uint64(b[40:]) == c.number, nil
}

// batchAt reads and decodes the header region of the batch that begins at block and says so. The region is valid
// until the next read. The batch lies within the segment.
func (r *recovery) batchAt(s *segment, block uint32) (h batchHeader, region []byte, err error) {
	region, err = r.read(s, block, 1)
	if err != nil {
		return h, nil, err
	}
	n, err := peekBatch(region, s.blocks-block)
	if err != nil {
		return h, nil, err
	}
	if n > 1 {
		if region, err = r.read(s, block, n); err != nil {
			return h, nil, err
		}
	}
	h, err = decodeBatch(region)
	if err == nil || errors.Is(err, ErrVersion) {
		if h.block != block || h.blocks() > s.blocks-block {
			err = errBadBatch
		}
	}
	return h, region, err
}

// findBatch looks for an intact batch, of a version known or not, that satisfies want, at any block from from on.
func (r *recovery) findBatch(s *segment, from uint32, want func(*batchHeader) bool) (uint32, bool, error) {
	var window []byte
	for base := from; base < s.blocks; {
		n := min(scanBlocks, s.blocks-base)
		b, err := r.read(s, base, n)
		if err != nil {
			return 0, false, err
		}
		window = append(window[:0], b...)
		for i := range n {
			if _, err := peekBatch(window[i*BlockSize:][:BlockSize], s.blocks-base-i); err != nil {
				continue
			}
			h, _, err := r.batchAt(s, base+i)
			switch {
			case err == nil, errors.Is(err, ErrVersion):
				if want(&h) {
					return base + i, true, nil
				}
			case errors.Is(err, errNoBatch), errors.Is(err, errBadBatch):
			default:
				return 0, false, err
			}
		}
		base += n
	}
	return 0, false, nil
}

// read returns n blocks of a segment file, in scratch memory.
func (r *recovery) read(s *segment, block, n uint32) ([]byte, error) {
	size := int(n) * BlockSize
	if cap(r.buf) < size {
		r.buf = make([]byte, size)
	}
	b := r.buf[:size]
	if got, err := s.file.ReadAt(b, int64(block)*BlockSize); got != size {
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("journal: read %s, block %d: %w", s.path, block, err)
	}
	return b, nil
}

func isZero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), BlockSize)
		if string(b[:n]) != string(zeroBlock[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}
