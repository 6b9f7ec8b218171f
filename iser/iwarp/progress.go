package iwarp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// One goroutine receives at a time, and has the role for it. It is that of the queue pair, run; or, if the completion queues belong to this queue pair
// alone, whoever waits for completions, who then needs no waking: most completions are found in a read that he did himself. He gives the role up when he has
// what he waited for, and is back in a moment as a rule. If he is not, run takes over: the peer must not wait for the user. When run has woken somebody who
// waits, it leaves the role to him.

const (
	roleFree   int32 = iota
	roleTaken        // by run or by who waits for completions
	roleBroken       // the connection is over; the rest is run's
)

// watchEvery is how long nobody receives at least before run takes over. It is twice that at most.
const watchEvery = 4 * time.Millisecond

// progress is who receives.
type progress struct {
	role  atomic.Int32
	turns atomic.Uint64 // how often the role was given up
	armed atomic.Bool   // the timer runs, or its function does

	// into belongs to who has the role: where receives that complete go at once if he waits for them himself.
	into []rdma.WC

	timer    *time.Timer
	attached bool
	seen     uint64        // of turns, by the timer's function
	takeover chan struct{} // wakes run
	err      error         // why it is broken; set before that
}

// call wakes run if it has not got the role.
func (q *queuePair) call() {
	select {
	case q.prog.takeover <- struct{}{}:
	default:
	}
}

// acquire takes the role if it is free.
func (q *queuePair) acquire() bool { return q.prog.role.CompareAndSwap(roleFree, roleTaken) }

// yield gives the role up. Somebody who waits for receives gets it if there is one: whoever has it now may have waited for something else.
func (q *queuePair) yield() {
	p := &q.prog
	p.turns.Add(1)
	p.role.Store(roleFree)
	if !q.exclusive() {
		q.call()
		return
	}
	q.recvCQ.promote()
	if !p.armed.Load() && p.armed.CompareAndSwap(false, true) {
		p.timer.Reset(watchEvery)
	}
}

// attach and detach tell the completion queues when the queue pair is connected.
func (q *queuePair) attach() {
	q.prog.attached = true
	q.sendCQ.attach(q)
	if q.recvCQ != q.sendCQ {
		q.recvCQ.attach(q)
	}
}

func (q *queuePair) detach() {
	q.prog.timer.Stop()
	if !q.prog.attached {
		return
	}
	q.sendCQ.detach(q)
	if q.recvCQ != q.sendCQ {
		q.recvCQ.detach(q)
	}
}

// exclusive reports whether the completion queues are of this queue pair alone.
func (q *queuePair) exclusive() bool { return q.recvCQ.only.Load() == q && q.sendCQ.only.Load() == q }

// watch is the timer's function.
func (q *queuePair) watch() {
	p := &q.prog
	if p.role.Load() == roleFree {
		turns := p.turns.Load()
		if turns == p.seen {
			p.armed.Store(false)
			q.call()
			return
		}
		p.seen = turns
		p.timer.Reset(watchEvery)
		return
	}
	p.armed.Store(false)
	// It may have been given up before that, by one who saw that the timer is armed.
	if p.role.Load() == roleFree && p.armed.CompareAndSwap(false, true) {
		p.timer.Reset(watchEvery)
	}
}

// attend is run's part of receiving. It returns the reason of the end.
func (q *queuePair) attend() error {
	for {
		if q.acquire() {
			if err := q.receive(); err != nil {
				q.prog.role.Store(roleBroken)
				return err
			}
			q.yield()
		}
		<-q.prog.takeover
		if q.prog.role.Load() == roleBroken {
			return q.prog.err
		}
	}
}

// receive handles what the peer sends. It returns nil when somebody who waits was woken, and can go on. An error is the reason of the end.
func (q *queuePair) receive() error {
	for {
		if err := q.look(); err != nil {
			return err
		}
		if woke := q.recvCQ.woke.Swap(false); (q.sendCQ.woke.Swap(false) || woke) && q.exclusive() {
			return nil
		}
		if _, err := q.read(); err != nil {
			return err
		}
	}
}

// drive receives for one who waits on c, until there is something for him, or he has to look again: then n is 0. The caller has the role, and
// loses it, and has parked. The last one who had the role has looked at all that was read.
func (q *queuePair) drive(ctx context.Context, c *completionQueue, wc []rdma.WC, solicited bool) (n int, err error) {
	for parked := true; parked && n == 0; {
		select {
		case <-ctx.Done(): // Err may take a lock
			c.parked.Store(false)
			q.yield()
			return 0, ctx.Err()
		default:
		}
		interrupted, broken := q.read()
		c.parked.Store(false)
		if broken == nil {
			n, broken = q.lookFor(c, wc, solicited)
		}
		if broken != nil {
			q.prog.err = broken
			q.prog.role.Store(roleBroken)
			q.call()
			return n, nil
		}
		if interrupted || n > 0 {
			break
		}
		n, parked, err = c.takeOrPark(wc, solicited)
	}
	q.yield()
	return n, err
}

// lookFor is look on behalf of one who waits on c, which was empty: receives that complete go to wc at once, and it returns how many did. Those that do not
// fit, and all others, go to their queues.
func (q *queuePair) lookFor(c *completionQueue, wc []rdma.WC, solicited bool) (int, error) {
	if c == q.recvCQ && !solicited {
		q.prog.into = wc[:0:len(wc)]
	}
	err := q.look()
	n := len(q.prog.into)
	q.prog.into = nil
	return n, err
}

// look handles the events in what was read.
func (q *queuePair) look() error {
	var e event
	for q.rcv.step(&e) {
		if err := q.handle(&e); err != nil {
			return err
		}
	}
	return nil
}

// read reads once. It may be interrupted. An error is the reason of the end.
func (q *queuePair) read() (interrupted bool, err error) {
	err = q.sock.read(&q.rcv)
	switch {
	case err == nil:
		return false, nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		if !q.resume() {
			return false, rdma.ErrDisconnected // fail came first
		}
		return true, nil
	case errors.Is(err, net.ErrClosed):
		return false, rdma.ErrDisconnected
	case errors.Is(err, io.EOF):
		return false, rdma.ErrPeerClosed
	}
	return false, fmt.Errorf("%w: %w: %w", rdma.ErrTransport, errBroken, err)
}

// resume lets reads wait again after they were interrupted. It reports whether the connection goes on.
func (q *queuePair) resume() bool {
	if !q.alive() {
		return false
	}
	q.sock.nc.SetReadDeadline(time.Time{})
	return q.alive() // fail sets a deadline after the state
}

func (q *queuePair) alive() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state == stateConnected
}

// interrupt makes who receives look again.
func (q *queuePair) interrupt() { q.sock.nc.SetReadDeadline(time.Unix(1, 0)) }
