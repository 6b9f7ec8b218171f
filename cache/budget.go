package cache

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// budget bounds a volume's dirty bytes (invariant P5). What is acquired is given
// back when the object watermark passes the write, or when a landing is aborted.
// Waiters are served in order.
type budget struct {
	mu      sync.Mutex
	used    int64
	limit   int64
	err     error // final
	waiters []*budgetWaiter
}

type budgetWaiter struct {
	n  int64
	ch chan error // buffered
}

// rampStart is the share of the limit from which on writers are slowed down, and
// rampMax the longest delay, reached at the limit.
const (
	rampStart = 0.8
	rampMax   = 25 * time.Millisecond
)

// acquire takes n bytes, waiting in line while they do not fit. More than the whole
// budget is ErrRange.
func (b *budget) acquire(ctx context.Context, n int64) error {
	b.mu.Lock()
	if n > b.limit {
		defer b.mu.Unlock()
		return fmt.Errorf("a write of %d bytes is larger than the dirty budget of %d: %w", n, b.limit, ErrRange)
	}
	if b.err != nil {
		defer b.mu.Unlock()
		return b.err
	}
	if len(b.waiters) == 0 && b.fitsLocked(n) {
		b.used += n
		delay := b.delayLocked()
		b.mu.Unlock()
		if delay > 0 {
			t := time.NewTimer(delay)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
				b.release(n)
				return ctx.Err()
			}
		}
		return nil
	}
	w := &budgetWaiter{n, make(chan error, 1)}
	b.waiters = append(b.waiters, w)
	b.mu.Unlock()
	select {
	case err := <-w.ch:
		return err
	case <-ctx.Done():
	}
	b.mu.Lock()
	for i, x := range b.waiters {
		if x == w {
			b.waiters = append(b.waiters[:i], b.waiters[i+1:]...)
			b.grantLocked()
			b.mu.Unlock()
			return ctx.Err()
		}
	}
	b.mu.Unlock()
	if err := <-w.ch; err != nil { // it was served while we gave up
		return err
	}
	b.release(n)
	return ctx.Err()
}

func (b *budget) fitsLocked(n int64) bool { return b.used+n <= b.limit }

func (b *budget) delayLocked() time.Duration {
	f := (float64(b.used)/float64(b.limit) - rampStart) / (1 - rampStart)
	if f <= 0 {
		return 0
	}
	return time.Duration(min(f, 1) * min(f, 1) * float64(rampMax))
}

func (b *budget) grantLocked() {
	for len(b.waiters) > 0 && b.fitsLocked(b.waiters[0].n) {
		w := b.waiters[0]
		b.waiters = b.waiters[1:]
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
	return b.used, b.limit, len(b.waiters) > 0
}

// fail ends all waiting, now and later, with err.
func (b *budget) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	for _, w := range b.waiters {
		w.ch <- err
	}
	b.waiters = nil
}
