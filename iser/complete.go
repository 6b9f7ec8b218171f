package iser

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// Completions of the send queue have no goroutine either. Who posted looks for them when there are many, and whoever waits for
// one waits on the completion queue himself and tells the others what has become of theirs: one leads, the others wait for their
// own, or to lead.

// op counts the work requests of one owner that are not complete. pending and failed are changed under Conn.mu.
type op struct {
	pending atomic.Int32
	failed  bool          // one of them was not carried out; read it when pending is 0
	wake    chan struct{} // capacity 1
}

func (o *op) init() { o.wake = make(chan struct{}, 1) }

// finish ends one of them.
func (o *op) finish(ok bool) {
	if !ok {
		o.failed = true
	}
	if o.pending.Add(-1) == 0 {
		o.notify()
	}
}

func (o *op) notify() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// await waits until all work requests of o are complete: nobody touches their memory any more. It is bounded by what bounds them:
// the transport, for a peer that does not read; ReadTimeout, for one that does not answer; the end of the connection.
func (c *Conn) await(o *op) {
	for o.pending.Load() > 0 {
		select {
		case <-o.wake:
		case c.lead <- struct{}{}:
			if o.pending.Load() > 0 {
				c.follow()
			}
			<-c.lead
			c.relieve()
		case <-c.gone:
			return
		}
	}
}

// follow waits for completions. The caller leads.
func (c *Conn) follow() {
	n, err := c.sendCQ.Wait(c.life, c.done, false)
	c.settle(c.done[:n])
	if err != nil && !errors.Is(err, context.Canceled) {
		c.mu.Lock()
		c.failLocked(fmt.Errorf("%w: %w", errSendQueue, err))
		c.mu.Unlock()
		c.end()
		<-c.life.Done()
	}
}

// reap handles the completions that are there, unless somebody else does.
func (c *Conn) reap() {
	select {
	case c.lead <- struct{}{}:
	default:
		return
	}
	n, _ := c.sendCQ.Poll(c.done)
	c.settle(c.done[:n])
	<-c.lead
}

// relieve posts what waited for room in the send queue.
func (c *Conn) relieve() {
	c.mu.Lock()
	waiting := len(c.q.items) > 0 && !c.q.posting
	c.mu.Unlock()
	if waiting {
		c.flush()
	}
}

// attend waits for completions on behalf of what does not fit into the send queue.
func (c *Conn) attend() {
	for {
		c.mu.Lock()
		if c.q.posted-c.q.completed < sendDepth || c.q.stopped {
			c.q.attending = false
			c.mu.Unlock()
			c.flush() // and whoever posts meanwhile calls for another attendant if it needs one
			return
		}
		c.mu.Unlock()
		select {
		case c.lead <- struct{}{}:
			c.follow()
			<-c.lead
		case <-c.gone:
		}
	}
}

// settle takes completions. They come in the order of the work requests. The caller leads.
func (c *Conn) settle(wcs []rdma.WC) {
	if len(wcs) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	q := &c.q
	for i := range wcs {
		wc := &wcs[i]
		q.completed = max(q.completed, wc.ID+1)
		if o := &q.owners[wc.ID%sendDepth]; *o != nil {
			(*o).finish(wc.Status == rdma.StatusSuccess)
			*o = nil
		}
		if wc.Op == rdma.OpRead {
			c.r.returnLocked()
		}
	}
	if q.drained.pending.Load() > 0 && q.completed >= q.target {
		q.drained.finish(true)
	}
}

// drain waits until everything queued is sent, for closeTimeout at most. Nothing is queued any more.
func (c *Conn) drain() {
	c.mu.Lock()
	q := &c.q
	if q.stopped {
		c.mu.Unlock()
		return
	}
	if n := len(q.items); n > 0 {
		q.items[n-1].wr.Flags |= rdma.Signaled
	} else if q.posted > q.completed && !q.signaled {
		// Its completion is that of what lies before. It is empty and names no memory.
		q.addLocked(item{wr: rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.Signaled}})
	}
	if q.target = q.posted + uint64(len(q.items)); q.target > q.completed {
		q.drained.pending.Store(1)
	}
	c.mu.Unlock()
	late := time.AfterFunc(closeTimeout, c.qp.Disconnect)
	defer late.Stop()
	c.flush()
	c.await(&q.drained)
}
