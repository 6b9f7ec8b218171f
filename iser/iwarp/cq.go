package iwarp

import (
	"context"
	"fmt"
	"sync"

	"github.com/isergate/isergate/iser/rdma"
)

// completionQueue implements rdma.CQ.
type completionQueue struct {
	notify chan struct{} // holds a token while something may be there for Wait

	mu        sync.Mutex // guards all below
	ring      []entry
	head      int
	n         int
	solicited int // entries that wake a solicited Wait
	lost      bool
	closed    bool
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
	c.ring[(c.head+c.n)%len(c.ring)] = entry{wc, solicited}
	c.n++
	c.wake()
	return true
}

func (c *completionQueue) wake() {
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

// Poll implements rdma.CQ.
func (c *completionQueue) Poll(wc []rdma.WC) (int, error) { return c.take(wc, false) }

func (c *completionQueue) take(wc []rdma.WC, solicited bool) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		c.wake()
		return 0, rdma.ErrClosed
	case c.n == 0 && c.lost:
		c.wake()
		return 0, rdma.ErrOverrun
	case solicited && c.solicited == 0 && !c.lost:
		return 0, nil
	}
	k := min(len(wc), c.n)
	for i := range k {
		e := &c.ring[c.head]
		wc[i] = e.wc
		if e.solicited {
			c.solicited--
		}
		c.head = (c.head + 1) % len(c.ring)
	}
	if c.n -= k; c.n > 0 || c.lost {
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
		if n, err := c.take(wc, solicited); n > 0 || err != nil {
			return n, err
		}
		select {
		case <-c.notify:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Close implements rdma.CQ.
func (c *completionQueue) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.ring, c.n, c.head = nil, 0, 0
	c.wake()
	return nil
}
