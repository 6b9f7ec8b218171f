package iser

import (
	"context"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
)

// readSlots bounds the RDMA Reads that are outstanding (ISER-R7), so that none waits in the send queue and holds up what
// is behind it. Guarded by Conn.mu.
type readSlots struct {
	ord     int
	out     int
	waiting []*transfer // first come, first served
	done    uint64      // completed, ever

	// tasks are the contexts of the commands whose Reads are outstanding, in order: a ring, from head to tail.
	tasks      []context.Context
	head, tail uint64

	// The watchdog: a timer that runs while Reads are outstanding.
	timer   *time.Timer
	armed   bool
	seen    uint64        // done, when it was set
	idle    time.Duration // how long that had not changed
	aborted bool          // one of the tasks had been aborted then
	ended   bool
}

func (r *readSlots) init(ord int) { r.ord, r.tasks = ord, make([]context.Context, ord) }

// postedLocked is called with each Read that is queued.
func (r *readSlots) postedLocked(c *Conn, ctx context.Context) {
	r.tasks[r.tail%uint64(len(r.tasks))] = ctx
	r.tail++
	r.watchLocked(c)
}

// abortedLocked reports whether a task that waits for a Read was aborted.
func (r *readSlots) abortedLocked() bool {
	for i := r.head; i < r.tail; i++ {
		if r.tasks[i%uint64(len(r.tasks))].Err() != nil {
			return true
		}
	}
	return false
}

// tryLocked takes a slot if one is free and nobody waits.
func (r *readSlots) tryLocked() bool {
	if r.out >= r.ord || len(r.waiting) > 0 {
		return false
	}
	r.out++
	return true
}

// returnLocked gives a slot back.
func (r *readSlots) returnLocked() {
	r.out--
	r.done++
	r.tasks[r.head%uint64(len(r.tasks))] = nil
	r.head++
	if len(r.waiting) > 0 {
		r.waiting[0].notify()
	}
}

// takeRead waits for a slot. While it does, the task can be aborted at once.
func (c *Conn) takeRead(ctx context.Context, tr *transfer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.r
	if err := c.errorLocked(tr); err != nil {
		return err
	}
	if r.ord == 0 {
		c.failLocked(errNoReads) // ISER-37
		return iscsi.ErrClosed
	}
	if r.tryLocked() {
		return nil
	}
	r.waiting = append(r.waiting, tr)
	var err error
	for err == nil && (r.waiting[0] != tr || r.out >= r.ord) {
		mine := tr.pending.Load() > 0
		c.mu.Unlock()
		if mine {
			c.await(&tr.op) // its own Reads are among those that are outstanding
		} else {
			err = c.wait(ctx, tr)
		}
		c.mu.Lock()
		if e := c.errorLocked(tr); err == nil && e != nil {
			err = e
		}
	}
	for i := range r.waiting {
		if r.waiting[i] == tr {
			r.waiting = append(r.waiting[:i], r.waiting[i+1:]...)
			break
		}
	}
	if err == nil {
		r.out++
	}
	if r.out < r.ord && len(r.waiting) > 0 {
		r.waiting[0].notify()
	}
	return err
}

// watchLocked starts the watchdog, unless it runs.
func (r *readSlots) watchLocked(c *Conn) {
	if r.armed || r.ended {
		return
	}
	r.armed, r.seen, r.idle, r.aborted = true, r.done, 0, false
	if r.timer == nil {
		r.timer = time.AfterFunc(c.t.opt.watchInterval(), func() { c.watch() })
		return
	}
	r.timer.Reset(c.t.opt.watchInterval())
}

func (o *Options) watchInterval() time.Duration { return min(o.ReadTimeout, o.AbortTimeout) }

// watch ends the connection if no Read was answered for ReadTimeout, or for AbortTimeout since a task that waits for one was aborted: others may
// wait for the end of that task.
func (c *Conn) watch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.r
	if r.ended || r.out == 0 {
		r.armed = false
		return
	}
	if r.done != r.seen {
		r.seen, r.idle, r.aborted = r.done, 0, false
	} else if r.idle += c.t.opt.watchInterval(); r.idle >= c.t.opt.ReadTimeout || r.aborted {
		r.armed = false
		c.failLocked(errStalled)
		return
	}
	r.aborted = r.abortedLocked()
	r.timer.Reset(c.t.opt.watchInterval())
}

func (r *readSlots) stopLocked() {
	r.ended = true
	if r.timer != nil {
		r.timer.Stop()
	}
}
