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

	// The watchdog: a timer that runs while Reads are outstanding.
	timer *time.Timer
	armed bool
	seen  uint64 // done, when it was set
	ended bool
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
	r.armed, r.seen = true, r.done
	if r.timer == nil {
		r.timer = time.AfterFunc(c.t.opt.ReadTimeout, func() { c.watch() })
		return
	}
	r.timer.Reset(c.t.opt.ReadTimeout)
}

// watch ends the connection if no Read was answered since it was set.
func (c *Conn) watch() {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.r
	switch {
	case r.ended || r.out == 0:
		r.armed = false
	case r.done == r.seen:
		r.armed = false
		c.failLocked(errStalled)
	default:
		r.seen = r.done
		r.timer.Reset(c.t.opt.ReadTimeout)
	}
}

func (r *readSlots) stopLocked() {
	r.ended = true
	if r.timer != nil {
		r.timer.Stop()
	}
}
