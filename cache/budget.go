package cache

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// budget bounds bytes: a volume's dirty ones (invariant P5), which are given back when the object watermark passes the
// write, or when a landing is aborted; and Engine.ahead.
// Waiters are served in order.
type budget struct {
	mu         sync.Mutex
	used       int64
	limit      int64
	ramp       time.Duration // the longest delay of a writer, reached at the limit; 0: none
	err        error         // final
	head, tail *budgetWaiter // in line
}

// budgetWaiter is a place in a budget's line. It is used again and again, in one line at a time.
type budgetWaiter struct {
	n          int64
	ch         chan error  // buffered; receives once per time in line
	timer      *time.Timer // stopped while nobody waits
	queued     bool
	prev, next *budgetWaiter
}

// rampStart is the share of the limit from which on writers are slowed down, and
// rampMax the longest delay of a volume's writers.
const (
	rampStart = 0.8
	rampMax   = 25 * time.Millisecond
)

// tryAcquire takes n bytes if they fit, nobody waits for them and nobody needs to be slowed down.
func (b *budget) tryAcquire(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil || b.head != nil || !b.fitsLocked(n) {
		return false
	}
	b.used += n
	if b.delayLocked() > 0 {
		b.used -= n
		return false
	}
	return true
}

// acquire takes n bytes, waiting in line with w while they do not fit: until the deadline, which shows as
// context.DeadlineExceeded. More than the whole budget is ErrRange.
func (b *budget) acquire(ctx context.Context, w *budgetWaiter, deadline time.Time, n int64) error {
	b.mu.Lock()
	if n > b.limit {
		defer b.mu.Unlock()
		return fmt.Errorf("a write of %d bytes is larger than the dirty budget of %d: %w", n, b.limit, ErrRange)
	}
	if b.err != nil {
		defer b.mu.Unlock()
		return b.err
	}
	if b.head == nil && b.fitsLocked(n) {
		b.used += n
		delay := b.delayLocked()
		b.mu.Unlock()
		if delay > 0 {
			w.timer.Reset(delay)
			defer w.timer.Stop()
			select {
			case <-w.timer.C:
			case <-ctx.Done():
				b.release(n)
				return ctx.Err()
			}
		}
		return nil
	}
	w.n = n
	b.pushLocked(w)
	b.mu.Unlock()
	err := context.DeadlineExceeded
	w.timer.Reset(time.Until(deadline))
	defer w.timer.Stop()
	select {
	case err := <-w.ch:
		return err
	case <-w.timer.C:
	case <-ctx.Done():
		err = ctx.Err()
	}
	b.mu.Lock()
	if w.queued {
		b.removeLocked(w)
		b.grantLocked() // whoever stood behind may fit
		b.mu.Unlock()
		return err
	}
	b.mu.Unlock()
	if err := <-w.ch; err != nil { // it was served while we gave up
		return err
	}
	b.release(n)
	return err
}

func (b *budget) pushLocked(w *budgetWaiter) {
	w.queued, w.prev = true, b.tail
	if b.tail != nil {
		b.tail.next = w
	} else {
		b.head = w
	}
	b.tail = w
}

func (b *budget) removeLocked(w *budgetWaiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		b.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		b.tail = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
}

func (b *budget) fitsLocked(n int64) bool { return b.used+n <= b.limit }

func (b *budget) delayLocked() time.Duration {
	f := (float64(b.used)/float64(b.limit) - rampStart) / (1 - rampStart)
	if f <= 0 {
		return 0
	}
	return time.Duration(min(f, 1) * min(f, 1) * float64(b.ramp))
}

func (b *budget) grantLocked() {
	for b.head != nil && b.fitsLocked(b.head.n) {
		w := b.head
		b.removeLocked(w)
		b.used += w.n
		w.ch <- nil
	}
}

// force takes n bytes without waiting: what replay found is dirty whatever the limit is.
func (b *budget) force(n int64) {
	b.mu.Lock()
	b.used += n
	b.mu.Unlock()
}

func (b *budget) release(n int64) {
	b.mu.Lock()
	b.used -= n
	b.grantLocked()
	b.mu.Unlock()
}

func (b *budget) setLimit(n int64) {
	b.mu.Lock()
	b.limit = n
	b.grantLocked()
	b.mu.Unlock()
}

// usage returns the bytes taken, the limit, and whether a writer is waiting.
func (b *budget) usage() (used, limit int64, waiting bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used, b.limit, b.head != nil
}

// fail ends all waiting, now and later, with err.
func (b *budget) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	for b.head != nil {
		w := b.head
		b.removeLocked(w)
		w.ch <- err
	}
}
