package journal

import (
	"context"
	"fmt"
)

// space is the ledger of the journal's room, in bytes of whole blocks. The journal's mutex guards it.
//
// A payload is never split between segments, so that up to one entry less a block may be lost at the end of
// each. What can be promised is therefore less than what is free: guaranteed(). The invariant
//
//	promised() <= guaranteed()
//
// holds from reservation to commit: a commit of cost c takes c off the left side and at most c off the right one, also
// when it has to begin a new segment. So whatever was promised can be written.
type space struct {
	usable     int64 // of one empty segment
	entry      int64 // cost of the largest entry
	private    int64 // kept back for fences and notes
	activeLeft int64 // usable bytes left in the active segment
	free       int   // free segments

	granted int64 // reserved, not submitted
	queued  int64 // submitted, not written

	head, tail *spaceWaiter
}

// entryCost returns the bytes that an entry takes at most: a batch of its own.
func entryCost(payload int64) int64 {
	blocks := (payload + BlockSize - 1) / BlockSize
	return (int64(headerBlocks(1, uint32(blocks))) + blocks) * BlockSize
}

// sure returns what surely fits into left bytes of a segment, whatever the sizes.
func (s *space) sure(left int64) int64 { return max(0, left-s.entry+BlockSize) }

func (s *space) guaranteed() int64 { return s.sure(s.activeLeft) + int64(s.free)*s.sure(s.usable) }
func (s *space) promised() int64   { return s.granted + s.queued }

func (s *space) fits(cost int64) bool { return s.promised()+cost+s.private <= s.guaranteed() }

type spaceWaiter struct {
	cost       int64
	err        error
	done       chan struct{}
	queued     bool
	prev, next *spaceWaiter
}

func (s *space) push(w *spaceWaiter) {
	w.queued, w.prev = true, s.tail
	if s.tail != nil {
		s.tail.next = w
	} else {
		s.head = w
	}
	s.tail = w
}

func (s *space) remove(w *spaceWaiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		s.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		s.tail = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
}

// serve grants room to those who wait, in order. It is called whenever room appeared.
func (s *space) serve() {
	for w := s.head; w != nil && s.fits(w.cost); w = s.head {
		s.granted += w.cost
		s.remove(w)
		close(w.done)
	}
}

func (s *space) failWaiters(err error) {
	for w := s.head; w != nil; w = s.head {
		s.remove(w)
		w.err = err
		close(w.done)
	}
}

// Reserve waits until the journal has room for one entry with a payload of the given bytes (0 for a record without
// payload), first come, first served. Each reservation is used up by the Submit of one entry of exactly that
// size, or given back by Unreserve. It fails with ctx.Err(), ErrTooLarge, ErrClosed or ErrFailed.
func (j *Journal) Reserve(ctx context.Context, bytes int64) error {
	if bytes < 0 || bytes > j.opts.MaxEntryBytes {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, bytes, j.opts.MaxEntryBytes)
	}
	cost := entryCost(bytes)
	j.mu.Lock()
	if err := j.usableLocked(); err != nil {
		j.mu.Unlock()
		return err
	}
	if j.space.head == nil && j.space.fits(cost) {
		j.space.granted += cost
		j.mu.Unlock()
		return nil
	}
	w := &spaceWaiter{cost: cost, done: make(chan struct{})}
	j.space.push(w)
	j.mu.Unlock()
	j.metrics.waits.Inc()

	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !w.queued {
		return w.err // served at the same moment
	}
	j.space.remove(w)
	j.space.serve() // whoever stood behind may fit
	return ctx.Err()
}

// TryReserve is Reserve without the waiting: it returns false, and reserves nothing, where Reserve would wait or fail.
func (j *Journal) TryReserve(bytes int64) bool {
	if bytes < 0 || bytes > j.opts.MaxEntryBytes {
		return false
	}
	cost := entryCost(bytes)
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.usableLocked() != nil || j.space.head != nil || !j.space.fits(cost) {
		return false
	}
	j.space.granted += cost
	return true
}

// Unreserve gives back a reservation that was made with the same number of bytes.
func (j *Journal) Unreserve(bytes int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.space.granted -= entryCost(bytes)
	if j.space.granted < 0 {
		panic("journal: Unreserve without Reserve")
	}
	j.space.serve()
}

// Usage returns how many bytes are written and not released, or promised, of how many. Both count headers and what may be
// lost at the ends of segments. When no room is left for the smallest entry, used is capacity, give or take a block. Segments
// that are still being made in the background count as room, although Reserve waits for them.
func (j *Journal) Usage() (used, capacity int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.usageLocked()
}

func (j *Journal) usageLocked() (used, capacity int64) {
	s := &j.space
	n := len(j.slots)
	if !j.full {
		n = max(n, j.target)
	}
	capacity = int64(n)*s.sure(s.usable) - s.private
	available := max(0, s.guaranteed()-s.promised()-s.private) + int64(n-len(j.slots))*s.sure(s.usable)
	return capacity - min(available, capacity), capacity
}
