package iscsi

import (
	"log/slog"
	"time"
)

// A command that was aborted, or was to be but is responding already, or that a stop waits for, may wait for its initiator: to read
// what is on its way, to answer an RDMA Read. What was posted cannot be called back, so the connection is closed if that takes longer than
// AbortWait: a reset of the unit by another initiator, PREEMPT AND ABORT and a stop do not depend on one that reads nothing. A command that
// waits for its medium is not affected, nor one that makes progress.

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
		c.hurry = time.AfterFunc(c.srv.opt.AbortWait, c.hurryUp)
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

// hurryUp closes the connection if one of the tasks that are watched has been in the same call of the Datamover for AbortWait.
func (c *conn) hurryUp() {
	s := c.s
	wait := c.srv.opt.AbortWait
	s.mu.Lock()
	next := time.Duration(0)
	stuck := false
	now := time.Now()
	for _, t := range s.tasks {
		if t.c != c || t.hurried.IsZero() {
			continue
		}
		left := wait - now.Sub(t.hurried)
		if left <= 0 {
			moves := t.moves.Load()
			stuck = stuck || moves == t.moved && moves%2 == 1
			t.hurried, t.moved, left = now, moves, wait
		}
		if next == 0 || left < next {
			next = left
		}
	}
	c.hurry = nil
	if next > 0 && !stuck {
		c.hurry = time.AfterFunc(next, c.hurryUp)
	}
	s.mu.Unlock()
	if stuck {
		c.srv.logs.end.log(c.log, slog.LevelWarn, "initiator holds up the end of a command, by not reading or not answering: connection closed", "timeout", wait)
		c.srv.metrics.deadPeers.Inc()
		c.close(false)
	}
}
