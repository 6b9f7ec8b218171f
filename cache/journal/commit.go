package journal

import (
	"fmt"
	"io"
	"slices"
)

// commitLoop is the one goroutine that writes. Per batch: take what is queued, checksum, one write, one sync,
// tell. A batch is not written before the one before it is synced: that is why, after a crash, only the
// last one can be torn. There is no timer: while a sync runs, the next batch gathers.
//
// Tried and dropped: a timer to gather more (delays the lone writer, and gains nothing under load), and a
// second batch in flight (then two batches can be torn, and damage looks like a tear).
func (j *Journal) commitLoop() {
	defer close(j.committer)
	for {
		j.mu.Lock()
		for j.head == len(j.queue) && len(j.seals) == 0 && !j.closing && j.failed == nil {
			j.wake.Wait()
		}
		if j.failed != nil {
			j.drain() // unlocks
			return
		}
		if len(j.seals) > 0 {
			seals := j.seals
			j.seals = nil
			j.mu.Unlock()
			err := j.sealActive()
			for _, done := range seals {
				done <- err
			}
			if err != nil && err != ErrFull {
				j.fail(err)
			}
			continue
		}
		if j.head == len(j.queue) { // closing
			j.mu.Unlock()
			return
		}
		header := j.takeLocked()
		active := j.live[len(j.live)-1]
		j.mu.Unlock()

		if len(j.batch) == 0 { // not even one fits
			if err := j.beginSegment(); err != nil {
				j.fail(err)
			}
			continue
		}
		if err := j.commit(active, header); err != nil {
			j.fail(err)
			j.opts.Sink.Failed(j.batch, j.Err())
			clear(j.batch)
			continue
		}
		j.opts.Sink.Synced(j.batch)
		clear(j.batch)
	}
}

// drain fails everything that is queued. It is called with the mutex held and returns without.
func (j *Journal) drain() {
	entries, seals, err := slices.Clone(j.queue[j.head:]), j.seals, j.failed
	j.queue, j.head, j.seals = nil, 0, nil
	j.space.queued = 0
	j.mu.Unlock()
	for _, done := range seals {
		done <- err
	}
	j.opts.Sink.Failed(entries, err)
}

// takeLocked moves entries from the queue to j.batch: as many as fit into the active segment and into
// MaxBatchBytes, but at least one if it fits into the segment. It returns the header that describes them, less the checksum.
func (j *Journal) takeLocked() batchHeader {
	active := j.live[len(j.live)-1]
	left := uint32(j.space.activeLeft / BlockSize)
	limit := min(uint64(left), max(1, uint64(j.opts.MaxBatchBytes)/BlockSize))
	h := batchHeader{
		incarnation: j.incarnation,
		generation:  active.generation,
		number:      j.nextNumber,
		tail:        j.live[0].generation,
		block:       active.next,
		prevCRC:     j.prevCRC,
	}
	j.batch = j.batch[:0]
	cost := int64(0)
	for _, e := range j.queue[j.head:] {
		payload := h.payloadBlocks + e.payloadBlocks()
		header := headerBlocks(h.records+1, payload)
		total := uint64(header) + uint64(payload)
		if total > uint64(left) || total > limit && h.records > 0 {
			break
		}
		h.records, h.payloadBlocks, h.headerBlocks = h.records+1, payload, header
		j.batch = append(j.batch, e)
		cost += e.cost
	}
	if len(j.batch) == 0 {
		return h
	}
	clear(j.queue[j.head : j.head+len(j.batch)])
	j.head += len(j.batch)
	if j.head == len(j.queue) {
		j.queue, j.head = j.queue[:0], 0
	} else if j.head > len(j.queue)/2 {
		n := copy(j.queue, j.queue[j.head:])
		clear(j.queue[n:])
		j.queue, j.head = j.queue[:n], 0
	}
	active.next += h.blocks()
	j.space.activeLeft -= int64(h.blocks()) * BlockSize
	j.space.queued -= cost
	j.space.serve()
	return h
}

// commit makes one batch durable.
func (j *Journal) commit(s *segment, h batchHeader) error {
	h.time = j.opts.Now().UnixNano()
	block := h.block + h.headerBlocks
	for _, e := range j.batch {
		e.Time = h.time
		e.Loc = Location{Segment: h.generation, Block: block}
		block += e.payloadBlocks()
	}

	region := j.regionOf(h.headerBlocks)
	h.encodeFixed(region)
	iov := append(j.iov[:0], region)
	table := h.sumTable(region)
	for i, e := range j.batch {
		encodeRecord(region, uint32(i), &e.Record, e.Loc.Block)
		iov, table = j.appendPayload(iov, table, e.Payload)
	}
	if len(table) != 0 {
		return fmt.Errorf("%w: a payload changed after Submit", ErrInvalid)
	}
	crc := sealRegion(region)
	j.iov = iov

	bytes := int64(h.blocks()) * BlockSize
	_, err := j.timed(func() error { return writeAll(s, iov, h.block, bytes) })
	clear(iov)
	if err != nil {
		return err
	}
	fillSums(s.sums[h.block+h.headerBlocks:], h.sumTable(region))
	took, err := j.timed(s.file.SyncData)
	if err != nil {
		return err
	}
	j.metrics.committed(took, bytes, len(j.batch))
	j.nextNumber++
	j.prevCRC = crc
	return nil
}

// regionOf returns a zeroed header region.
func (j *Journal) regionOf(blocks uint32) []byte {
	n := int(blocks) * BlockSize
	if cap(j.region) < n {
		j.region = make([]byte, n)
	}
	region := j.region[:n]
	clear(region)
	return region
}

// appendPayload adds the pieces, and the zeros that fill the last block, to the write, and the blocks' checksums
// to the table, whose unused rest it returns.
func (j *Journal) appendPayload(iov [][]byte, table []byte, pieces [][]byte) ([][]byte, []byte) {
	for _, p := range pieces {
		if len(p) == 0 {
			continue
		}
		iov = append(iov, p)
		for len(p) >= BlockSize {
			le.PutUint32(table, sumOf(p[:BlockSize]))
			p, table = p[BlockSize:], table[sumBytes:]
		}
		if len(p) > 0 {
			iov = append(iov, zeroBlock[len(p):])
			clear(j.padded[copy(j.padded[:], p):])
			le.PutUint32(table, sumOf(j.padded[:]))
			table = table[sumBytes:]
		}
	}
	return iov, table
}

func fillSums(into []uint32, table []byte) {
	for i := range len(table) / sumBytes {
		into[i] = le.Uint32(table[i*sumBytes:])
	}
}

func writeAll(s *segment, iov [][]byte, block uint32, bytes int64) error {
	n, err := s.file.WritevAt(iov, int64(block)*BlockSize)
	if err == nil && int64(n) != bytes {
		err = io.ErrShortWrite
	}
	return err
}

// sealActive is Seal: it begins a segment if the active one holds anything and if that breaks no promise.
func (j *Journal) sealActive() error {
	j.mu.Lock()
	s := &j.space
	if j.live[len(j.live)-1].next == 1 {
		j.mu.Unlock()
		return nil
	}
	if s.free == 0 || s.promised()+s.private > int64(s.free)*s.sure(s.usable) {
		j.mu.Unlock()
		return ErrFull
	}
	s.activeLeft = 0
	j.mu.Unlock()
	return j.beginSegment()
}

// beginSegment ends the active segment and makes a free one active. An empty batch seals the old one: it carries the
// tail that allows the new one to be overwritten, and is durable before that happens. A torn new header is then harmless,
// because nothing needs what was there. An error is final.
func (j *Journal) beginSegment() error {
	j.mu.Lock()
	if len(j.free) == 0 {
		j.mu.Unlock()
		return fmt.Errorf("%w, although space was promised", errNoSegment) // breaks the invariant of space
	}
	old, s := j.live[len(j.live)-1], j.free[0]
	j.free = append(j.free[:0], j.free[1:]...)
	j.space.free--
	tail := j.live[0].generation
	sealed := old.sealed
	seal := batchHeader{
		flags:        flagSeal,
		headerBlocks: 1,
		incarnation:  j.incarnation,
		generation:   old.generation,
		number:       j.nextNumber,
		tail:         tail,
		time:         j.opts.Now().UnixNano(),
		block:        old.next,
		prevCRC:      j.prevCRC,
	}
	if !sealed {
		old.next++
		old.sealed = true
	}
	j.mu.Unlock()

	if !sealed {
		region := j.regionOf(1)
		seal.encodeFixed(region)
		crc := sealRegion(region)
		if err := j.writeSynced(old, region, seal.block); err != nil {
			return fmt.Errorf("seal segment: %w", err)
		}
		j.nextNumber++
		j.prevCRC = crc
	}
	return j.activate(s, old.generation+1, tail)
}

// activate writes the header of a free segment and makes it the active one. tail is durable elsewhere, or there is no older segment.
func (j *Journal) activate(s *segment, generation, tail uint64) error {
	h := segmentHeader{
		incarnation:  j.incarnation,
		generation:   generation,
		segmentBytes: uint64(j.opts.SegmentBytes),
		firstBatch:   j.nextNumber,
		tail:         tail,
		prevCRC:      j.prevCRC,
	}
	region := j.regionOf(1)
	h.encode(region)
	if err := j.writeSynced(s, region, 0); err != nil {
		return fmt.Errorf("begin segment: %w", err)
	}
	if s.sums == nil {
		s.sums = make([]uint32, s.blocks)
	}
	clear(s.sums)
	j.mu.Lock()
	defer j.mu.Unlock()
	s.generation, s.next, s.sealed = generation, 1, false
	j.byGen[generation] = s
	j.live = append(j.live, s)
	j.space.activeLeft = j.space.usable
	j.space.serve()
	return nil
}

func (j *Journal) writeSynced(s *segment, b []byte, block uint32) error {
	if _, err := j.timed(func() error { return writeAll(s, [][]byte{b}, block, int64(len(b))) }); err != nil {
		return err
	}
	_, err := j.timed(s.file.SyncData)
	return err
}
