package iscsi

import (
	"log/slog"
	"time"
)

// A command that was aborted, or was to be but is responding already, or that a stop waits for, may wait for its initiator: to read
// what is on its way, to answer an RDMA Read. What was posted cannot be called back, so the connection is closed if that takes longer than
// AbortWait: a reset of the unit by another initiator, PREEMPT AND ABORT and a stop do not depend on one that reads nothing. A command that
// waits for its medium is not affected, nor one that makes progress. One that waits behind others of its connection that do has maxPatience
// times as long.
const maxPatience = 4

// progress changes whenever a command of a connection does anything that has to do with its initiator.
type progress struct{ moves, window uint32 }

func (c *conn) progressLocked() progress {
	p := progress{window: c.s.max.Load()} // which moves with each command that ends
	for _, t := range c.s.tasks {
		if t.c == c {
			p.moves += t.moves.Load()
		}
	}
	return p
}

// enterMover and leaveMover are around every call of the Datamover that may wait for the initiator. A Task makes one at a time.
func (t *Task) enterMover() { t.moves.Add(1) }

func (t *Task) leaveMover() { t.moves.Add(1) }

// hurryLocked has the end of a task watched. s.mu is held, and the task is one of s.tasks.
func (t *Task) hurryLocked() {
	if !t.hurried.IsZero() {
		return
	}
	t.hurried, t.moved = time.Now(), t.moves.Load()
	if c := t.c; c.hurry == nil {
		c.around = c.progressLocked()
		c.hurry = time.AfterFunc(c.srv.opt.AbortWait/2, c.hurryUp)
	}
}

// hurry has all tasks of a session watched.
func (s *session) hurry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.tasks {
		t.hurryLocked()
	}
}

// hurryUp closes the connection if one of the tasks that are watched has been in one call of the Datamover for too long. It looks every half of
// AbortWait.
func (c *conn) hurryUp() {
	s, wait := c.s, c.srv.opt.AbortWait
	s.mu.Lock()
	now, around := time.Now(), c.progressLocked()
	quiet := around == c.around
	c.around = around
	watched, stuck := false, false
	for _, t := range s.tasks {
		if t.c != c || t.hurried.IsZero() {
			continue
		}
		watched = true
		if moves := t.moves.Load(); moves != t.moved || moves%2 == 0 {
			t.hurried, t.moved = now, moves
			continue
		}
		age := now.Sub(t.hurried)
		stuck = stuck || age >= wait && quiet || age >= maxPatience*wait
	}
	c.hurry = nil
	if watched && !stuck {
		c.hurry = time.AfterFunc(wait/2, c.hurryUp)
	}
	s.mu.Unlock()
	if stuck {
		c.srv.logs.end.log(c.log, slog.LevelWarn, "initiator holds up the end of a command, by not reading or not answering: connection closed", "timeout", wait)
		c.srv.metrics.deadPeers.Inc()
		c.close(false)
	}
}
