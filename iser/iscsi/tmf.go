package iscsi

import (
	"log/slog"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// missingWait bounds how long a task management function waits for commands with a lower CmdSN
// that are on their way on other connections (ISCSI-62).
const missingWait = 10 * time.Second

// manage starts a task management function.
func (c *conn) manage(p *PDU) {
	var r pdu.TaskRequest
	r.Decode(&p.Header)
	if r.Immediate && !c.takeImmediate() {
		c.reject(p, pdu.RejectTooManyImmediate)
		return
	}
	s := c.s
	if !s.enter() {
		return
	}
	s.srv.workers.start(func() {
		defer s.leave()
		result, additional, respond := s.function(c, &r)
		if r.Immediate {
			c.immediates.Add(-1)
		} else {
			s.max.Add(1)
		}
		if respond {
			resp := pdu.TaskResponse{Response: result, Additional: additional, ITT: r.ITT}
			out := new(PDU)
			resp.Encode(&out.Header)
			c.say(out)
		}
		s.srv.logs.manage.log(c.log, slog.LevelInfo, "task management", "function", r.Function.String(), "lun", lunText(r.LUN), "result", result.String())
		switch {
		case result != pdu.FunctionComplete:
		case r.Function == pdu.TargetColdReset:
			s.srv.resetTarget(s.key.target)
		case r.Function == pdu.NexusReset:
			s.end(scsi.SessionClosed, true)
		}
	})
}

// function performs one task management function (RFC 7143, 11.5 and RFC 7144, 6). It is false if the response must not be sent.
func (s *session) function(c *conn, r *pdu.TaskRequest) (result pdu.TaskResult, additional [3]byte, respond bool) {
	ctx := s.srv.ctx
	level2 := s.params.ProtocolLevel >= 2
	if r.Function > pdu.TaskReassign && !level2 || r.Function == 0 || r.Function > pdu.QueryAsyncEvent {
		return pdu.FunctionNotSupported, additional, true
	}
	if r.Function.UsesLUN() && !s.units.Exists(uint64(r.LUN)) {
		return pdu.LUNDoesNotExist, additional, true
	}
	if !s.waitFor(r.CmdSN, r.Immediate) {
		s.srv.logs.end.log(c.log, slog.LevelWarn, "commands before a task management function did not come: connection closed")
		c.close(false)
		return pdu.FunctionRejected, additional, false
	}
	switch r.Function {
	case pdu.AbortTask:
		result = s.abortTask(r)
	case pdu.AbortTaskSet:
		s.abortAll(r, func(t *Task) bool { return t.LUN == r.LUN })
	case pdu.ClearTaskSet:
		s.abortAll(r, func(t *Task) bool { return t.LUN == r.LUN })
		result = s.reach(s.units.ClearTaskSet(ctx, s.nexus, uint64(r.LUN)))
	case pdu.LogicalUnitReset:
		s.abortAll(r, func(t *Task) bool { return t.LUN == r.LUN })
		result = s.reach(s.units.Reset(ctx, s.nexus, uint64(r.LUN)))
	case pdu.TargetWarmReset, pdu.TargetColdReset:
		s.abortAll(r, func(*Task) bool { return true })
		result = s.reach(s.units.ResetAll(ctx, s.nexus))
	case pdu.ClearACA:
		result = pdu.FunctionNotSupported // NORMACA is 0: there is no ACA
	case pdu.TaskReassign:
		result = pdu.ReassignNotSupported
	case pdu.QueryTask:
		s.mu.Lock()
		if t := s.tasks[r.Referenced]; t != nil && t.LUN == r.LUN && t.state == taskRunning {
			result = pdu.FunctionSucceeded
		}
		s.mu.Unlock()
	case pdu.QueryTaskSet:
		s.mu.Lock()
		for _, t := range s.tasks {
			if t.LUN == r.LUN && t.state == taskRunning {
				result = pdu.FunctionSucceeded
			}
		}
		s.mu.Unlock()
	case pdu.NexusReset:
		s.abortAll(r, func(*Task) bool { return true })
	case pdu.QueryAsyncEvent:
		if key, asc, ascq, pending := s.units.UnitAttention(s.nexus, uint64(r.LUN)); pending {
			// Additional response information: UADE depth, sense key, ASC, ASCQ (SAM-5, 7.10).
			result, additional = pdu.FunctionSucceeded, [3]byte{0x10 | byte(key), asc, ascq}
		}
	}
	return result, additional, true
}

func (s *session) reach(err error) pdu.TaskResult {
	if err != nil {
		return pdu.FunctionRejected
	}
	return pdu.FunctionComplete
}

// waitFor waits until all commands below sn were received, as far as they can still come.
func (s *session) waitFor(sn pdu.Serial, immediate bool) bool {
	if !immediate {
		return true // delivered in order
	}
	var expired <-chan time.Time
	for {
		s.order.Lock()
		if sn.AtMost(pdu.Serial(s.exp.Load())) {
			s.order.Unlock()
			return true
		}
		if s.expMoved == nil {
			s.expMoved = make(chan struct{})
		}
		moved := s.expMoved
		s.order.Unlock()
		s.mu.Lock()
		alone := len(s.conns) <= 1
		s.mu.Unlock()
		if alone {
			// Nothing with a lower CmdSN can be on its way: the initiator left a gap.
			return true
		}
		if expired == nil {
			timer := time.NewTimer(missingWait)
			defer timer.Stop()
			expired = timer.C
		}
		select {
		case <-moved:
		case <-expired:
			return false
		case <-s.srv.ctx.Done():
			return false
		case <-s.dying:
			return false
		}
	}
}

// abortTask is ABORT TASK (RFC 7143, 11.5.1 and 11.6.1).
func (s *session) abortTask(r *pdu.TaskRequest) pdu.TaskResult {
	s.mu.Lock()
	t := s.tasks[r.Referenced]
	if t != nil && t.LUN == r.LUN {
		aborted := t.abortLocked()
		left := t.leftLocked()
		s.mu.Unlock()
		<-left
		if aborted {
			return pdu.FunctionComplete
		}
		return pdu.TaskDoesNotExist // it completed, and its response is sent
	}
	s.mu.Unlock()

	s.order.Lock()
	defer s.order.Unlock()
	for sn, a := range s.held {
		if a.c == nil {
			continue
		}
		switch {
		case a.task != nil && a.task.ITT == r.Referenced && a.task.LUN == r.LUN:
			a.c.dm.Discard(a.task.Transfer)
			s.held[sn] = arrival{}
			s.max.Add(1)
			return pdu.FunctionComplete
		case a.pdu != nil && a.pdu.Header.ITT() == r.Referenced:
			return pdu.FunctionRejected // ISCSI-61: not a SCSI task
		}
	}
	exp := pdu.Serial(s.exp.Load())
	if r.RefCmdSN.InWindow(exp, pdu.Serial(s.max.Load())) && r.RefCmdSN.Before(r.CmdSN) {
		// The command is lost or late: its number counts as received.
		s.max.Add(1)
		if r.RefCmdSN == exp {
			s.advance(exp.Next())
			return pdu.FunctionComplete
		}
		if _, have := s.held[r.RefCmdSN]; !have {
			if s.held == nil {
				s.held = make(map[pdu.Serial]arrival)
			}
			s.held[r.RefCmdSN] = arrival{}
		}
		return pdu.FunctionComplete
	}
	return pdu.TaskDoesNotExist
}

// abortAll ends the tasks that were before the function and match, and waits until they and their responses are out.
func (s *session) abortAll(r *pdu.TaskRequest, match func(*Task) bool) {
	s.mu.Lock()
	var left []<-chan struct{}
	for _, t := range s.tasks {
		// An immediate command carries the CmdSN of its successor (ISCSI-64).
		if !match(t) || !t.CmdSN.Before(r.CmdSN) && !(t.immediate && t.CmdSN == r.CmdSN) {
			continue
		}
		t.abortLocked()
		left = append(left, t.leftLocked())
	}
	s.mu.Unlock()
	for _, ch := range left {
		<-ch
	}
}

// logout takes a Logout Request (RFC 7143, 11.14).
func (c *conn) logout(p *PDU) {
	var r pdu.LogoutRequest
	r.Decode(&p.Header)
	s := c.s
	resp := pdu.LogoutResponse{ITT: r.ITT, Time2Wait: s.params.DefaultTime2Wait, Time2Retain: s.params.DefaultTime2Retain}
	respond := func(say func(*PDU)) {
		out := new(PDU)
		resp.Encode(&out.Header)
		say(out)
	}
	s.mu.Lock()
	other := s.conns[r.CID]
	s.mu.Unlock()
	switch {
	case r.Reason == pdu.RemoveForRecovery:
		resp.Response = pdu.LogoutNoRecovery
		respond(c.say)
	case r.Reason > pdu.RemoveForRecovery:
		c.reject(p, pdu.RejectInvalidField)
	case r.Reason == pdu.CloseSession || s.key.discovery:
		c.loggedOut.Store(true)
		s.srv.workers.start(func() {
			s.quiesce(nil)
			respond(c.sayLast)
			c.linger()
			s.end(scsi.SessionClosed, true)
		})
	case other == nil:
		resp.Response = pdu.LogoutCIDNotFound
		respond(c.say)
	case other == c:
		c.loggedOut.Store(true)
		s.srv.workers.start(func() {
			s.quiesce(c)
			respond(c.sayLast)
			c.linger()
			c.close(true)
		})
	default:
		s.srv.workers.start(func() {
			s.quiesce(other)
			other.close(true)
			respond(c.say)
		})
	}
}

// quiesce aborts the commands of a connection, of all if c is nil, and waits until they have left (ISCSI-75).
func (s *session) quiesce(c *conn) {
	s.mu.Lock()
	var left []<-chan struct{}
	for _, t := range s.tasks {
		if c == nil || t.c == c {
			t.abortLocked()
			left = append(left, t.leftLocked())
		}
	}
	s.mu.Unlock()
	for _, ch := range left {
		<-ch
	}
}

// violated ends the session after a format error (ISCSI-80).
func (s *session) violated() { s.end(scsi.SessionClosed, false) }
