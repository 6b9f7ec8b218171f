package iwarp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/isergate/isergate/iser/rdma"
)

// completionQueue implements rdma.CQ.
type completionQueue struct {
	notify chan struct{} // holds a token while somebody who waits should look
	// only is the queue pair that is connected and uses the queue, if there is one, and never were two at a time.
	only atomic.Pointer[queuePair]
	woke atomic.Bool // push has woken somebody who waits

	mu        sync.Mutex // guards all below
	ring      []entry
	head      int
	n         int
	solicited int // entries that wake a solicited Wait
	lost      bool
	closed    bool
	users     int
	shared    bool // there were two at a time

	waiting atomic.Int32 // in Wait, for notify
	// parked: one who waits reads from the connection of only, and has to be interrupted if something comes that he did not bring himself. It
	// becomes true under mu.
	parked    atomic.Bool
	parkedSE  bool            // he waits for solicited ones
	ctxDone   <-chan struct{} // of the last one who parked
	ctxIgnore func() bool     // ends the watch of that
}

type entry struct {
	wc        rdma.WC
	solicited bool
}

func newCompletionQueue(depth int) (*completionQueue, error) {
	if depth < 1 || depth > 1<<22 {
		return nil, fmt.Errorf("%w: completion queue of %d", rdma.ErrInvalid, depth)
	}
	return &completionQueue{notify: make(chan struct{}, 1), ring: make([]entry, depth)}, nil
}

// push adds a completion. It reports whether the queue is still sound.
func (c *completionQueue) push(wc rdma.WC, solicited bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.lost {
		return c.closed
	}
	if c.n == len(c.ring) {
		c.lost = true
		c.wake()
		return false
	}
	if solicited = solicited || wc.Status != rdma.StatusSuccess; solicited {
		c.solicited++
	}
	at := c.head + c.n
	if at >= len(c.ring) {
		at -= len(c.ring)
	}
	c.ring[at] = entry{wc, solicited}
	c.n++
	c.wake()
	return true
}

// wake makes those who wait look. mu is held.
func (c *completionQueue) wake() {
	if c.parked.Load() && c.readyLocked(c.parkedSE) {
		c.disturb()
	}
	if c.waiting.Load() == 0 {
		return
	}
	c.woke.Store(true)
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

// disturb interrupts who parks. mu is held.
func (c *completionQueue) disturb() {
	if c.parked.CompareAndSwap(true, false) {
		c.only.Load().interrupt()
	}
}

// Poll implements rdma.CQ.
func (c *completionQueue) Poll(wc []rdma.WC) (int, error) { return c.take(wc, false) }

func (c *completionQueue) take(wc []rdma.WC, solicited bool) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.takeLocked(wc, solicited)
}

// readyLocked reports whether there is something for one who waits.
func (c *completionQueue) readyLocked(solicited bool) bool {
	return c.closed || c.lost || c.n > 0 && (!solicited || c.solicited > 0)
}

func (c *completionQueue) takeLocked(wc []rdma.WC, solicited bool) (int, error) {
	switch {
	case c.closed:
		c.wake()
		return 0, rdma.ErrClosed
	case c.n == 0 && c.lost:
		c.wake()
		return 0, rdma.ErrOverrun
	case !c.readyLocked(solicited):
		return 0, nil
	}
	k := min(len(wc), c.n)
	for i := range k {
		e := &c.ring[c.head]
		wc[i] = e.wc
		if e.solicited {
			c.solicited--
		}
		if c.head++; c.head == len(c.ring) {
			c.head = 0
		}
	}
	if c.n -= k; c.n == 0 {
		c.head = 0 // begin again, where the ring is in the processor's cache
	}
	if c.n > 0 || c.lost {
		c.wake() // for the next one who waits
	}
	return k, nil
}

// Wait implements rdma.CQ.
func (c *completionQueue) Wait(ctx context.Context, wc []rdma.WC, solicited bool) (int, error) {
	if len(wc) == 0 {
		return 0, fmt.Errorf("%w: no room for completions", rdma.ErrInvalid)
	}
	for {
		c.mu.Lock()
		n, err := c.takeLocked(wc, solicited)
		if n > 0 || err != nil {
			c.mu.Unlock()
			return n, err
		}
		q := c.only.Load()
		if q != nil && !q.exclusive() {
			q = nil
		}
		if q != nil && q.acquire() {
			c.watchLocked(ctx)
			c.parkLocked(solicited)
			c.mu.Unlock()
			n, err := q.drive(ctx, c, wc, solicited)
			if n > 0 || err != nil {
				return n, err
			}
			continue
		}
		c.waiting.Add(1)
		c.mu.Unlock()
		if q != nil && q.prog.role.Load() == roleFree { // it was given up by one who did not see that somebody waits
			c.waiting.Add(-1)
			continue
		}
		select {
		case <-c.notify:
		case <-ctx.Done():
			err = ctx.Err()
		}
		c.waiting.Add(-1)
		if err != nil {
			c.mu.Lock()
			c.wake() // the token may have been for this one
			c.mu.Unlock()
			return 0, err
		}
	}
}

// watchLocked makes the end of ctx interrupt who parks.
func (c *completionQueue) watchLocked(ctx context.Context) {
	done := ctx.Done()
	if done == c.ctxDone {
		return
	}
	if c.ctxIgnore != nil {
		c.ctxIgnore()
		c.ctxIgnore = nil
	}
	if c.ctxDone = done; done != nil {
		c.ctxIgnore = context.AfterFunc(ctx, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.ctxDone == done {
				c.disturb()
			}
		})
	}
}

// parkLocked is called by one who is about to read from the connection of only.
func (c *completionQueue) parkLocked(solicited bool) {
	c.parkedSE = solicited
	c.parked.Store(true)
}

// takeOrPark is take, and parks if there is nothing. It does not if the queue is not for him alone any more.
func (c *completionQueue) takeOrPark(wc []rdma.WC, solicited bool) (n int, parked bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err = c.takeLocked(wc, solicited)
	if n > 0 || err != nil || c.only.Load() == nil {
		return n, false, err
	}
	c.parkLocked(solicited)
	return 0, true, nil
}

// promote lets one who waits look whether he can receive himself.
func (c *completionQueue) promote() {
	if c.waiting.Load() > 0 {
		select {
		case c.notify <- struct{}{}:
		default:
		}
	}
}

// attach adds a queue pair that is connected.
func (c *completionQueue) attach(q *queuePair) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.only.Load()
	if c.users++; c.users == 1 && !c.shared {
		c.only.Store(q)
		return
	}
	c.shared = true
	c.only.Store(nil)
	if before == nil {
		return
	}
	if c.parked.CompareAndSwap(true, false) {
		before.interrupt()
	}
	before.call()
}

// detach removes it. A queue that was shared stays so.
func (c *completionQueue) detach(q *queuePair) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.users--
	c.only.CompareAndSwap(q, nil)
}

// Close implements rdma.CQ.
func (c *completionQueue) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.ring, c.n, c.head = nil, 0, 0
	if c.ctxIgnore != nil {
		c.ctxIgnore()
		c.ctxDone, c.ctxIgnore = nil, nil
	}
	c.wake()
	return nil
}
