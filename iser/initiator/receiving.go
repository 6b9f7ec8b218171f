package initiator

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// One goroutine of an iSER session receives at a time, and has the role for it. Who waits for the end of a command takes the role if it is
// free, so that a lone command needs no other goroutine. If commands are outstanding when he has what he waited for, the role goes to the
// mover's own goroutine, which keeps it until there are none. If there are none, the role stays free for a while, for the next
// command; what comes unasked has time. After that, the mover's goroutine takes it.

const (
	roleFree int32 = iota
	roleTaken
)

// idleAfter is how long nobody receives at least before the mover's goroutine does; it is twice that at most.
const idleAfter = 4 * time.Millisecond

// receiving is who receives.
type receiving struct {
	role atomic.Int32
	turn chan struct{} // capacity 1: the role is handed to the mover's goroutine
	err  error         // why receiving has ended, if another goroutine found out; set before turn

	turns atomic.Uint64 // how often the role became free
	armed atomic.Bool   // the timer runs, or its function does
	timer *time.Timer
	seen  uint64 // of turns, by the timer's function
}

// init leaves the role to run.
func (r *receiving) init(watch func()) {
	r.role.Store(roleTaken)
	r.turn = make(chan struct{}, 1)
	r.timer = time.AfterFunc(time.Hour, watch)
	r.timer.Stop()
}

// acquire takes the role if it is free.
func (r *receiving) acquire() bool {
	return r.role.Load() == roleFree && r.role.CompareAndSwap(roleFree, roleTaken)
}

// rouse implements datamover.
func (m *iserMover) rouse() {
	if m.recv.acquire() {
		m.recv.turn <- struct{}{}
	}
}

// leave gives the role up.
func (m *iserMover) leave() {
	r := &m.recv
	r.turns.Add(1)
	r.role.Store(roleFree)
	if m.tasks.Load() > 0 { // who waits for them may have seen that the role is taken
		m.rouse()
	} else if r.armed.CompareAndSwap(false, true) {
		r.timer.Reset(idleAfter)
	}
}

// watch is the timer's function.
func (m *iserMover) watch() {
	r := &m.recv
	if turns := r.turns.Load(); r.role.Load() == roleFree && turns != r.seen {
		r.seen = turns
		r.timer.Reset(idleAfter)
		return
	}
	r.armed.Store(false)
	if r.role.Load() == roleFree {
		m.rouse()
	}
}

// attend implements datamover.
func (m *iserMover) attend(ctx context.Context, t *task) {
	if !m.recv.acquire() {
		return
	}
	for len(t.done) == 0 && ctx.Err() == nil {
		if err := m.step(ctx); err != nil {
			m.recv.err = err
			m.recv.turn <- struct{}{} // run ends the connection
			return
		}
	}
	m.leave()
}

// receive is run's part of receiving. It returns why it cannot go on; then the role stays taken.
func (m *iserMover) receive() error {
	for {
		if err := m.step(context.Background()); err != nil {
			return err
		}
		if m.tasks.Load() > 0 {
			continue
		}
		m.leave()
		<-m.recv.turn
		if m.recv.err != nil {
			return m.recv.err
		}
	}
}

// step waits for messages until ctx ends, and takes them. The caller has the role.
func (m *iserMover) step(ctx context.Context) error {
	n, err := m.recvCQ.Wait(ctx, m.wcs[:], false)
	switch {
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return nil
	default:
		return m.reason(err)
	}
	m.reposted = m.reposted[:0]
	for i := range m.wcs[:n] {
		wc := &m.wcs[i]
		if wc.Status != rdma.StatusSuccess {
			return m.reason(nil)
		}
		if err := m.message(wc); err != nil {
			return err
		}
		m.reposted = append(m.reposted, m.recvs[wc.ID])
	}
	if _, err := m.qp.PostRecv(m.reposted); err != nil {
		return m.reason(err)
	}
	m.flush(false)
	return nil
}
