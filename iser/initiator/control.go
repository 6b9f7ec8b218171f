package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// lookupLocked returns the active task with a tag, or nil.
func (s *Session) lookupLocked(tag pdu.TaskTag, kind taskKind) *task {
	i := int(tag & tagMask)
	if i >= len(s.tasks) {
		return nil
	}
	t := &s.tasks[i]
	if !t.active || t.tag != tag || t.kind != kind {
		return nil
	}
	return t
}

// task implements upcalls.
func (s *Session) task(tag pdu.TaskTag) *task {
	s.received.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lookupLocked(tag, scsiTask)
}

// window implements upcalls.
func (s *Session) window(exp, max pdu.Serial) {
	if max == s.seenMax && s.login.TargetUnexpected == 0 {
		return
	}
	s.mu.Lock()
	s.windowLocked(exp, max)
	s.mu.Unlock()
}

// windowLocked takes a new MaxCmdSN. It never retreats, and one below ExpCmdSN-1 is
// ignored (RFC 7143, 4.2.2.1).
func (s *Session) windowLocked(exp, max pdu.Serial) {
	if s.login.TargetUnexpected > 0 {
		s.acknowledgedLocked(exp)
	}
	if !max.After(s.maxCmdSN) || max.Before(exp.Add(-1)) {
		return
	}
	s.maxCmdSN, s.seenMax = max, max
	s.wakeLocked()
}

// advance takes the StatSN of a PDU that consumes one.
func (s *Session) advance(op pdu.Opcode, stat pdu.Serial) error {
	want := s.ack()
	if stat != want {
		if s.o.ISER == nil || !s.o.ISER.LaxStatSN {
			return protocolError("%v with StatSN %d, expected %d", op, stat, want)
		}
		if stat.Before(want) {
			return nil
		}
	}
	s.expStatSN.Store(uint32(stat.Next()))
	return nil
}

// status implements upcalls.
func (s *Session) status(t *task, p *pdu.DataIn) error {
	if err := s.advance(pdu.OpDataIn, p.StatSN); err != nil {
		return err
	}
	t.rsp = Response{
		Status: Status(p.Status), Transferred: int(t.received), Residual: p.Residual,
		Overflow: p.Overflow, Underflow: p.Underflow, CmdSN: t.cmd.CmdSN,
	}
	s.mu.Lock()
	s.windowLocked(p.ExpCmdSN, p.MaxCmdSN)
	s.finishLocked(t, nil)
	s.mu.Unlock()
	return nil
}

// receive implements upcalls.
func (s *Session) receive(h *pdu.Header, data []byte) error {
	s.received.Add(1)
	switch h.Opcode() {
	case pdu.OpSCSIResponse:
		return s.scsiResponse(h, data)
	case pdu.OpNopIn:
		return s.nopIn(h, data)
	case pdu.OpTaskResponse:
		return s.taskResponse(h)
	case pdu.OpTextResponse:
		var p pdu.TextResponse
		if err := p.Decode(h); err != nil {
			return protocolError("%v", err)
		}
		return s.reply(h, data)
	case pdu.OpLogoutResponse:
		s.loggedOut(h)
		return s.reply(h, data)
	case pdu.OpAsync:
		return s.async(h, data)
	case pdu.OpReject:
		return s.reject(h, data)
	}
	return protocolError("%v in the full feature phase", h.Opcode())
}

func (s *Session) scsiResponse(h *pdu.Header, data []byte) error {
	var p pdu.SCSIResponse
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	if err := s.advance(pdu.OpSCSIResponse, p.StatSN); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.windowLocked(p.ExpCmdSN, p.MaxCmdSN)
	t := s.lookupLocked(p.ITT, scsiTask)
	if t == nil {
		if s.rejected[p.ITT] {
			delete(s.rejected, p.ITT)
			return nil
		}
		return protocolError("SCSI Response for an unknown task %08x", uint32(p.ITT))
	}
	if s.login.ISER {
		if p.Underflow && uint64(p.Residual) > uint64(t.cmd.EDTL) {
			return protocolError("a residual of %d bytes of %d", p.Residual, t.cmd.EDTL)
		}
		t.received = placed(t, &p)
	}
	t.rsp = Response{
		Status: Status(p.Status), Service: p.Response, Transferred: int(t.received), Residual: p.Residual,
		Overflow: p.Overflow, Underflow: p.Underflow, CmdSN: t.cmd.CmdSN,
	}
	if p.Response == pdu.Completed {
		if p.ExpDataSN != 0 && p.ExpDataSN != t.dataSN && !s.login.ISER {
			return protocolError("SCSI Response after %d Data-In PDUs says %d", t.dataSN, p.ExpDataSN)
		}
		if len(data) >= 2 {
			n := int(binary.BigEndian.Uint16(data))
			if n > len(data)-2 {
				return protocolError("sense length %d in a data segment of %d bytes", n, len(data))
			}
			t.rsp.Sense = append([]byte(nil), data[2:2+n]...)
		}
		if t.rsp.Status == CheckCondition && len(t.rsp.Sense) == 0 {
			return protocolError("CHECK CONDITION without sense data")
		}
	}
	s.finishLocked(t, nil)
	return nil
}

// placed is how much of its data-in the target says that it wrote, where it wrote it by itself. A command that failed and
// does not say how much has none.
func placed(t *task, p *pdu.SCSIResponse) uint32 {
	n := uint32(len(t.in))
	if p.Underflow {
		return min(n, t.cmd.EDTL-p.Residual)
	}
	if st := Status(p.Status); p.Response != pdu.Completed || st != Good && st != ConditionMet {
		return 0
	}
	return n
}

// nopIn answers a ping of the target, or ends one of ours.
func (s *Session) nopIn(h *pdu.Header, data []byte) error {
	var p pdu.NopIn
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	if p.ITT != pdu.ReservedTag {
		return s.reply(h, data)
	}
	s.window(p.ExpCmdSN, p.MaxCmdSN)
	if p.TTT == pdu.ReservedTag {
		return nil
	}
	return s.pong(&p)
}

// reply ends a control task with a PDU that carries status.
func (s *Session) reply(h *pdu.Header, data []byte) error {
	if err := s.advance(h.Opcode(), h.StatSN()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.windowLocked(h.ExpCmdSN(), h.MaxCmdSN())
	t := s.lookupLocked(h.ITT(), controlTask)
	if t == nil {
		return protocolError("%v for an unknown task %08x", h.Opcode(), uint32(h.ITT()))
	}
	t.reply = *h
	t.data = append([]byte(nil), data...)
	s.finishLocked(t, nil)
	return nil
}

// taskResponse ends the tasks that the function covers, then the function.
func (s *Session) taskResponse(h *pdu.Header) error {
	var p pdu.TaskResponse
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	s.mu.Lock()
	if t := s.lookupLocked(p.ITT, controlTask); t != nil {
		s.endCoveredLocked(&t.tmf, p.Response)
	}
	s.mu.Unlock()
	return s.reply(h, nil)
}

// endCoveredLocked ends the tasks that a task management function aborted: no response of theirs follows its own.
func (s *Session) endCoveredLocked(f *pdu.TaskRequest, r pdu.TaskResult) {
	switch f.Function {
	case pdu.AbortTask:
		if r == pdu.FunctionComplete {
			if t := s.lookupLocked(f.Referenced, scsiTask); t != nil {
				s.finishLocked(t, ErrAborted)
			}
		}
	case pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset, pdu.TargetColdReset:
		if r != pdu.FunctionComplete {
			return
		}
		all := f.Function == pdu.TargetWarmReset || f.Function == pdu.TargetColdReset
		for i := range s.tasks {
			t := &s.tasks[i]
			if t.active && t.kind == scsiTask && (all || t.cmd.LUN == f.LUN) && t.cmd.CmdSN.Before(f.CmdSN) {
				s.finishLocked(t, ErrAborted)
			}
		}
	}
}

func (s *Session) async(h *pdu.Header, data []byte) error {
	var p pdu.Async
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	if err := s.advance(pdu.OpAsync, p.StatSN); err != nil {
		return err
	}
	s.window(p.ExpCmdSN, p.MaxCmdSN)
	if s.o.OnAsync != nil {
		s.o.OnAsync(AsyncMessage{Async: p, Data: append([]byte(nil), data...)})
	}
	switch p.Event {
	case pdu.AsyncLogoutRequest:
		s.leave(time.Duration(p.Param3) * time.Second)
	case pdu.AsyncDropConnection, pdu.AsyncDropSession:
		return fmt.Errorf("%w: asynchronous message: %v", ErrConnection, p.Event)
	}
	return nil
}

// leave lets outstanding commands end and logs out, within the time that the target gives.
func (s *Session) leave(within time.Duration) {
	s.mu.Lock()
	if s.leaving || s.err != nil {
		s.mu.Unlock()
		return
	}
	s.leaving = true
	idle := make(chan struct{})
	if s.busy == 0 {
		close(idle)
	} else {
		s.idle = idle
	}
	s.wakeLocked()
	s.mu.Unlock()
	s.wg.Go(func() {
		timer := time.NewTimer(within)
		defer timer.Stop()
		select {
		case <-idle:
		case <-timer.C:
		case <-s.done:
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.o.TaskTimeout)
		defer cancel()
		why := fmt.Errorf("%w: the target asked for a logout", ErrConnection)
		err := s.logout(ctx, why)
		s.part(errors.Join(why, err), err == nil)
	})
}

// reject ends the task whose request was rejected. A rejected Data-Out ends nothing: its command still gets a response.
func (s *Session) reject(h *pdu.Header, data []byte) error {
	var p pdu.Reject
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	if err := s.advance(pdu.OpReject, p.StatSN); err != nil {
		return err
	}
	bad, err := pdu.ParseHeader(data)
	if err != nil {
		return protocolError("Reject with a data segment of %d bytes", len(data))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.windowLocked(p.ExpCmdSN, p.MaxCmdSN)
	kind := controlTask
	switch bad.Opcode() {
	case pdu.OpDataOut, pdu.OpSnack:
		return nil
	case pdu.OpSCSICommand:
		kind = scsiTask
	}
	if t := s.lookupLocked(bad.ITT(), kind); t != nil {
		if kind == scsiTask {
			if len(s.rejected) >= len(s.tasks) {
				clear(s.rejected) // responses that never came
			}
			s.rejected[bad.ITT()] = true
		}
		s.finishLocked(t, &RejectError{Reason: p.Reason, Opcode: bad.Opcode()})
	}
	return nil
}

// roundTrip sends one control PDU and waits for its reply. encode runs with the slot's tag and the current numbers. What is not
// immediate takes a CmdSN.
func (s *Session) roundTrip(ctx context.Context, immediate bool, data []byte, encode func(t *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header)) (pdu.Header, []byte, error) {
	t, err := s.acquire(ctx, s.control)
	if err != nil {
		return pdu.Header{}, nil, err
	}
	h, got, err := s.roundTripOn(ctx, t, t.renew(), immediate, data, encode)
	if err == nil {
		s.release(t)
	}
	return h, got, err
}

// roundTripOn is roundTrip on an acquired slot, which stays acquired unless there is an error.
func (s *Session) roundTripOn(ctx context.Context, t *task, tag pdu.TaskTag, immediate bool, data []byte, encode func(t *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header)) (pdu.Header, []byte, error) {
	var h pdu.Header
	s.mu.Lock()
	for s.err == nil && (immediate && !s.roomLocked() || !immediate && s.cmdSN.After(s.maxCmdSN)) {
		if err := s.waitWindowLocked(ctx); err != nil {
			s.mu.Unlock()
			s.release(t)
			return h, nil, err
		}
	}
	if s.err != nil {
		err := s.closedLocked()
		s.mu.Unlock()
		s.release(t)
		return h, nil, err
	}
	t.tag, t.active = tag, true
	encode(t, tag, s.cmdSN, s.ack(), &h)
	s.mover.control(&h, data)
	if immediate {
		s.sentImmediateLocked()
	} else {
		s.cmdSN++
	}
	s.mu.Unlock()
	s.mover.flush(true)
	s.mover.rouse()
	select {
	case <-t.done:
	case <-ctx.Done():
		s.mu.Lock()
		if t.active {
			t.orphan = true
			s.mu.Unlock()
			return h, nil, ctx.Err()
		}
		s.mu.Unlock()
		<-t.done
	}
	if t.err != nil {
		err := t.err
		s.release(t)
		return h, nil, err
	}
	return t.reply, t.data, nil
}

// Ping sends a NOP-Out and returns the data that came back, which may be a prefix of what was sent.
func (s *Session) Ping(ctx context.Context, data []byte) ([]byte, error) {
	if most := min(int(s.login.MaxSend), int(s.login.MaxRecv), s.mover.maxControl()); s.login.ISER && len(data) > most {
		return nil, fmt.Errorf("initiator: a ping of %d bytes, %d are possible", len(data), most)
	}
	_, got, err := s.roundTrip(ctx, true, data, nopOut(true))
	return got, err
}

// manage runs a task management function; tag and numbers are filled in.
func (s *Session) manage(ctx context.Context, f pdu.TaskRequest) (pdu.TaskResult, error) {
	h, _, err := s.roundTrip(ctx, true, nil, func(t *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header) {
		f.Immediate, f.ITT, f.CmdSN, f.ExpStatSN = true, tag, cmd, exp
		if f.Function != pdu.AbortTask && f.Function != pdu.TaskReassign && f.Function != pdu.QueryTask {
			f.Referenced = pdu.ReservedTag
		}
		t.tmf = f
		f.Encode(h)
	})
	if err != nil {
		return 0, err
	}
	var p pdu.TaskResponse
	if err := p.Decode(&h); err != nil {
		return 0, protocolError("%v answers a task management request", h.Opcode())
	}
	return p.Response, nil
}

// TaskManagement runs a function that needs no task: a reset, a query or a function on a task set. Outstanding commands that
// it aborts end with ErrAborted.
func (s *Session) TaskManagement(ctx context.Context, f pdu.TaskFunction, lun uint16) (pdu.TaskResult, error) {
	return s.manage(ctx, pdu.TaskRequest{Function: f, LUN: pdu.LUNOf(lun)})
}

// AbortTask runs ABORT TASK on a command whose Wait has not returned. If the target aborted it, Wait
// returns ErrAborted.
func (s *Session) AbortTask(ctx context.Context, c *Command) (pdu.TaskResult, error) {
	return s.manage(ctx, pdu.TaskRequest{Function: pdu.AbortTask, LUN: c.lun, Referenced: c.Tag, RefCmdSN: c.CmdSN})
}

// QueryTask runs QUERY TASK (RFC 7144) on a command.
func (s *Session) QueryTask(ctx context.Context, c *Command) (pdu.TaskResult, error) {
	return s.manage(ctx, pdu.TaskRequest{Function: pdu.QueryTask, LUN: c.lun, Referenced: c.Tag, RefCmdSN: c.CmdSN})
}

// LUNReset runs LOGICAL UNIT RESET. A response other than complete is a TaskError.
func (s *Session) LUNReset(ctx context.Context, lun uint16) error {
	r, err := s.TaskManagement(ctx, pdu.LogicalUnitReset, lun)
	if err == nil && r != pdu.FunctionComplete {
		err = &TaskError{Function: pdu.LogicalUnitReset, Response: r}
	}
	return err
}

// loggedOut ends the session for those who still want something of it, if h is the good answer to a logout: the target may end
// the connection now.
func (s *Session) loggedOut(h *pdu.Header) {
	var p pdu.LogoutResponse
	if p.Decode(h) != nil || p.Response != pdu.LogoutOK {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = s.parting // nil if nobody asked for a logout; reply sees that
	}
}

// logout closes the session at the target; why is the session's error from then on.
func (s *Session) logout(ctx context.Context, why error) error {
	s.mu.Lock()
	s.parting = why
	s.mu.Unlock()
	h, _, err := s.roundTrip(ctx, true, nil, func(_ *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header) {
		(&pdu.LogoutRequest{Immediate: true, Reason: pdu.CloseSession, ITT: tag, CmdSN: cmd, ExpStatSN: exp}).Encode(h)
	})
	if err != nil {
		return err
	}
	var p pdu.LogoutResponse
	if err := p.Decode(&h); err != nil {
		return protocolError("%v answers a logout request", h.Opcode())
	}
	if p.Response != pdu.LogoutOK {
		return fmt.Errorf("initiator: logout: %v", p.Response)
	}
	return nil
}

// Logout closes the session in order and reports the target's answer. Close does the same without an answer.
func (s *Session) Logout(ctx context.Context) error {
	err := s.logout(ctx, ErrClosed)
	s.closing.Do(func() { s.part(ErrClosed, err == nil) })
	s.wg.Wait()
	return err
}

// Text sends keys in a Text Request and returns the answer, over as many exchanges as it takes.
// A key may repeat in the answer.
func (s *Session) Text(ctx context.Context, keys pdu.Pairs) (pdu.Pairs, error) {
	out := keys.Append(nil)
	if most := min(int(s.login.MaxSend), s.mover.maxControl()); len(out) > most {
		return nil, fmt.Errorf("%w: %d bytes of text, %d are possible", pdu.ErrTextTooLong, len(out), most)
	}
	text := pdu.Text{Limit: 16 << 20}
	t, err := s.acquire(ctx, s.control)
	if err != nil {
		return nil, err
	}
	tag := t.renew()
	req := pdu.TextRequest{Immediate: true, Final: true, TTT: pdu.ReservedTag}
	for {
		h, data, err := s.roundTripOn(ctx, t, tag, true, out, func(_ *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header) {
			req.ITT, req.CmdSN, req.ExpStatSN = tag, cmd, exp
			req.Encode(h)
		})
		if err != nil {
			return nil, err
		}
		var p pdu.TextResponse
		if p.Decode(&h) != nil {
			err = protocolError("%v answers a text request", h.Opcode())
		} else if e := text.Add(data); e != nil {
			err = fmt.Errorf("%w: %w", ErrProtocol, e)
		}
		if err != nil || p.Final {
			s.release(t)
			if err != nil {
				return nil, err
			}
			pairs, err := text.ParseList()
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
			}
			return pairs, nil
		}
		// The exchange goes on with an empty request that copies the target's tag and keeps ours.
		req.TTT, req.LUN, out = p.TTT, p.LUN, nil
		t.refs.Store(1)
	}
}
