// Package journal is the one thing that must be durable for the persistence level "local": a log of
// records of all volumes of a node, in pre-zeroed, recycled segment files, with group commit. DESIGN.md in
// this directory states the invariants and draws the layout.
package journal

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/cache/vfs"
)

// Journal is an open journal. Methods may be called concurrently. Nobody else may have the directory open.
type Journal struct {
	opts        Options
	incarnation [16]byte
	metrics     *metrics
	base        time.Time     // of opStart
	opStart     atomic.Int64  // nanoseconds since base at which the disk operation in progress began; 0: none
	stop        chan struct{} // closed by Close and by a failure: ends the making of segments
	committer   chan struct{} // closed when the committer has returned
	creating    sync.WaitGroup

	mu      sync.Mutex // guards all below, and the fields of segments that say so
	wake    sync.Cond  // the committer waits here
	queue   []*Entry   // entries to be committed, from head on
	head    int
	space   space
	slots   []*segment          // by slot number
	byGen   map[uint64]*segment // live ones, and released ones that are still pinned
	live    []*segment          // not released, in order of generation; the last is the active one
	free    []*segment          // can be overwritten, in the order of use
	target  int                 // number of segments to have
	full    bool                // the device had no room for another segment
	making  bool                // a goroutine makes segments
	seals   []chan error        // callers of Seal
	failed  error               // wraps ErrFailed once set
	closing bool
	stopped bool // stop is closed
	closed  bool

	// The committer's own, set up by Open.
	nextNumber uint64 // of the next batch
	prevCRC    uint32 // of the last batch
	batch      []*Entry
	region     []byte
	padded     [BlockSize]byte // a last block with its zeros
	iov        [][]byte
}

// Incarnation identifies this journal's content: made anew with a new or emptied
// directory, kept by a restart.
func (j *Journal) Incarnation() [16]byte { return j.incarnation }

// MaxEntryBytes returns the largest payload of an entry.
func (j *Journal) MaxEntryBytes() int64 { return j.opts.MaxEntryBytes }

// Err returns nil, or the error that made the journal fail for ever. It wraps ErrFailed.
func (j *Journal) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.failed
}

// Submit queues an entry for commit and returns at once. Data, Zero and Same use up the
// reservation that the caller got from Reserve for exactly PayloadBytes; Fence and Note draw on a private
// reserve and fail with ErrFull when that is used up. Entries are committed in the order in which Submit
// was called. If Submit returns an error the entry stays with the caller, with its reservation, and Sink hears nothing of it;
// otherwise exactly one of Synced and Failed follows.
func (j *Journal) Submit(e *Entry) error {
	if err := e.validate(); err != nil {
		return err
	}
	if int64(e.PayloadBytes) > max(j.opts.MaxEntryBytes, MaxNoteBytes) {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, e.PayloadBytes, j.opts.MaxEntryBytes)
	}
	e.cost = entryCost(int64(e.PayloadBytes))
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.usableLocked(); err != nil {
		return err
	}
	if e.Kind.reserved() {
		if j.space.granted < e.cost {
			return fmt.Errorf("%w: no reservation for a %v record with %d bytes", ErrInvalid, e.Kind, e.PayloadBytes)
		}
		j.space.granted -= e.cost
	} else if j.space.promised()+e.cost > j.space.guaranteed() {
		return ErrFull
	}
	j.space.queued += e.cost
	j.queue = append(j.queue, e)
	j.wake.Signal()
	return nil
}

func (j *Journal) usableLocked() error {
	switch {
	case j.failed != nil:
		return j.failed
	case j.closing:
		return ErrClosed
	}
	return nil
}

// Seal ends the active segment early, if it holds anything, so that it can be released. It returns
// when the next segment is active. It fails with ErrFull when no other segment is free.
func (j *Journal) Seal(ctx context.Context) error {
	done := make(chan error, 1)
	j.mu.Lock()
	if err := j.usableLocked(); err != nil {
		j.mu.Unlock()
		return err
	}
	j.seals = append(j.seals, done)
	j.wake.Signal()
	j.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close commits what is queued, stops, and closes the files. Who waits in Reserve gets ErrClosed. It waits
// for the disk operation in progress, however long that takes. Close is idempotent; it
// returns the error that made the journal fail, if any.
func (j *Journal) Close() error {
	j.mu.Lock()
	j.closing = true
	j.stopLocked()
	j.space.failWaiters(ErrClosed)
	j.wake.Signal()
	j.mu.Unlock()
	<-j.committer
	j.creating.Wait()

	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return j.failed
	}
	j.closed = true
	j.metrics.unregister()
	err := j.failed
	for _, s := range j.slots {
		if cerr := s.file.Close(); err == nil && cerr != nil {
			err = cerr
		}
	}
	return err
}

func (j *Journal) stopLocked() {
	if !j.stopped {
		j.stopped = true
		close(j.stop)
	}
}

// fail poisons the journal: the first cause stays.
func (j *Journal) fail(cause error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.failed == nil {
		j.failed = fmt.Errorf("%w: %w", ErrFailed, cause)
		j.opts.Logger.Error("journal device failed; nothing more is accepted until the process restarts", "err", cause)
	}
	j.stopLocked()
	j.space.failWaiters(j.failed)
	j.wake.Signal()
}

// Stalled returns how long the write or sync in progress has taken so far; 0 if none is in progress. Whoever
// supervises the node decides from which duration on the device counts as failed.
func (j *Journal) Stalled() time.Duration {
	start := j.opStart.Load()
	if start == 0 {
		return 0
	}
	return max(1, time.Since(j.base)-time.Duration(start))
}

// timed does one disk operation under the eyes of Stalled.
func (j *Journal) timed(op func() error) (time.Duration, error) {
	start := max(1, time.Since(j.base))
	j.opStart.Store(int64(start))
	err := op()
	j.opStart.Store(0)
	return time.Since(j.base) - start, err
}

// SegmentInfo describes a segment that holds records.
type SegmentInfo struct {
	Generation uint64
	Slot       int   // number in the file name
	Bytes      int64 // written so far, headers included
	Active     bool  // is being written
	Released   bool  // Release was called; older segments are still needed
	Pins       int
}

// Segments lists the segments that hold records which may still be needed, oldest first.
func (j *Journal) Segments() []SegmentInfo {
	j.mu.Lock()
	defer j.mu.Unlock()
	infos := make([]SegmentInfo, len(j.live))
	for i, s := range j.live {
		infos[i] = SegmentInfo{
			Generation: s.generation,
			Slot:       s.slot,
			Bytes:      int64(s.next) * BlockSize,
			Active:     i == len(j.live)-1,
			Released:   s.unneeded,
			Pins:       s.pins,
		}
	}
	return infos
}

// Release says that no record of the segment is needed any more: replay may skip it. Segments are released in
// order of generation: one takes effect as soon as it holds for all older ones, and then frees its space unless it is
// pinned. After a crash a released segment may be replayed once more. Releasing twice, or
// a generation that is gone, does nothing. The active segment cannot be released (ErrActive).
func (j *Journal) Release(generation uint64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byGen[generation]
	if s == nil || s.released {
		return nil
	}
	if s == j.live[len(j.live)-1] {
		return ErrActive
	}
	s.unneeded = true
	for j.live[0].unneeded {
		s := j.live[0]
		j.live = append(j.live[:0], j.live[1:]...)
		s.released = true
		j.recycleLocked(s)
	}
	j.space.serve()
	return nil
}

// recycleLocked makes a released segment free unless it is pinned.
func (j *Journal) recycleLocked(s *segment) {
	if !s.released || s.pins > 0 {
		return
	}
	delete(j.byGen, s.generation)
	s.generation, s.next, s.sealed, s.unneeded, s.released = 0, 0, false, false, false
	j.freeLocked(s)
}

func (j *Journal) freeLocked(s *segment) {
	j.free = append(j.free, s)
	j.space.free++
	j.wake.Signal()
}

// Pin keeps the payload of a segment readable, even after its release, until Unpin. It returns false if
// the segment was released already.
func (j *Journal) Pin(generation uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.byGen[generation]
	if s == nil || s.released {
		return false
	}
	s.pins++
	return true
}

// Unpin undoes one Pin that returned true.
func (j *Journal) Unpin(generation uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.unpinLocked(j.byGen[generation])
}

func (j *Journal) unpinLocked(s *segment) {
	if s == nil || s.pins == 0 {
		panic("journal: Unpin without Pin")
	}
	s.pins--
	j.recycleLocked(s)
	j.space.serve()
}

// segment is one slot.
type segment struct {
	slot   int
	path   string
	file   vfs.File
	blocks uint32
	sums   []uint32 // per block: checksum of a payload block; header blocks have 0 and are not read through it

	// Guarded by Journal.mu.
	generation uint64 // 0: free
	next       uint32 // first block that is not written
	pins       int
	sealed     bool // its last batch says that nothing follows
	unneeded   bool // Release was called
	released   bool // and it is so for all older ones
}

// usable returns the bytes of a segment that entries can fill: all but the header and room for the seal.
func usable(segmentBytes int64) int64 { return segmentBytes - 2*BlockSize }

var errNoSegment = errors.New("no free segment")
