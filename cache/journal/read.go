package journal

import (
	"fmt"
	"sync"
)

var bounce = sync.Pool{New: func() any { return new([BlockSize]byte) }}

// ReadAt reads len(into) bytes of the payload at loc, from its byte off on. Every 4 KiB block that is touched
// is verified; damage is a *CorruptError. The range must lie within one payload. It fails with ErrReleased if the
// segment is neither live nor pinned: the caller looks up again where the data is by now.
func (j *Journal) ReadAt(loc Location, off int64, into []byte) error {
	s, err := j.acquire(loc, off, int64(len(into)))
	if err != nil {
		return err
	}
	err = j.read(s, int64(loc.Block)*BlockSize+off, into)
	j.giveBack(s)
	return err
}

// ReadvAt is ReadAt into several buffers.
func (j *Journal) ReadvAt(loc Location, off int64, into [][]byte) error {
	total := int64(0)
	for _, b := range into {
		total += int64(len(b))
	}
	s, err := j.acquire(loc, off, total)
	if err != nil {
		return err
	}
	at := int64(loc.Block)*BlockSize + off
	for _, b := range into {
		if err = j.read(s, at, b); err != nil {
			break
		}
		at += int64(len(b))
	}
	j.giveBack(s)
	return err
}

// acquire checks the range and pins the segment for the time of one read.
func (j *Journal) acquire(loc Location, off, n int64) (*segment, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, ErrClosed
	}
	s := j.byGen[loc.Segment]
	if s == nil || s.released && s.pins == 0 {
		return nil, fmt.Errorf("%w: generation %d", ErrReleased, loc.Segment)
	}
	size := int64(s.next) * BlockSize
	start := int64(loc.Block) * BlockSize
	if loc.Block == 0 || off < 0 || start > size || off > size-start || n > size-start-off {
		return nil, fmt.Errorf("%w: %d bytes at block %d + %d of segment generation %d", ErrInvalid, n, loc.Block, off, loc.Segment)
	}
	s.pins++
	return s, nil
}

func (j *Journal) giveBack(s *segment) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.unpinLocked(s)
}

// read reads and verifies file bytes from at on. Whole blocks go straight into b, others through a bounce buffer.
func (j *Journal) read(s *segment, at int64, b []byte) error {
	for len(b) > 0 {
		in := at % BlockSize
		n := int64(len(b)) / BlockSize * BlockSize
		if in != 0 || n == 0 {
			n = min(BlockSize-in, int64(len(b)))
			whole := bounce.Get().(*[BlockSize]byte)
			err := j.readBlocks(s, uint32(at/BlockSize), whole[:])
			copy(b[:n], whole[in:])
			bounce.Put(whole)
			if err != nil {
				return err
			}
		} else if err := j.readBlocks(s, uint32(at/BlockSize), b[:n]); err != nil {
			return err
		}
		at, b = at+n, b[n:]
	}
	return nil
}

func (j *Journal) readBlocks(s *segment, block uint32, b []byte) error {
	if n, err := s.file.ReadAt(b, int64(block)*BlockSize); n != len(b) {
		return fmt.Errorf("journal: read %s, block %d: %w", s.path, block, err)
	}
	if bad, ok := verify(b, s.sums[block:]); !ok {
		j.metrics.corrupt.Inc()
		return &CorruptError{
			Path:    s.path,
			Segment: s.generation, // does not change while the segment is pinned
			Block:   block + uint32(bad),
			Detail:  wrongChecksum,
		}
	}
	return nil
}

// verify compares whole blocks with their checksums and returns the first that differs.
func verify(b []byte, sums []uint32) (bad int, ok bool) {
	for i := range len(b) / BlockSize {
		if sumOf(b[i*BlockSize:(i+1)*BlockSize]) != sums[i] {
			return i, false
		}
	}
	return 0, true
}
