package initiator

import (
	"context"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// A target may limit how many immediate PDUs it has to receive at a time beyond the command window (MaxOutstandingUnexpectedPDUs; RFC 7145, 6.7
// and 8.1.1). An immediate PDU is over for this purpose when a later PDU that is not immediate was acknowledged by ExpCmdSN. So an idle
// session that only answers pings sends a ping in the command window now and then.

// maxOwed is how many pings may wait for an answer.
const maxOwed = 64

// roomLocked reports whether one more immediate PDU may be sent.
func (s *Session) roomLocked() bool {
	limit := s.login.TargetUnexpected
	return limit == 0 || len(s.immediate) < int(limit)
}

// crowdedLocked reports whether half of the limit is used.
func (s *Session) crowdedLocked() bool {
	return len(s.immediate) >= (int(s.login.TargetUnexpected)+1)/2
}

// sentImmediateLocked counts an immediate PDU with the current CmdSN.
func (s *Session) sentImmediateLocked() {
	if s.login.TargetUnexpected == 0 {
		return
	}
	s.immediate = append(s.immediate, s.cmdSN)
	if s.crowdedLocked() && !s.retiring && s.err == nil {
		s.retiring = true
		s.wg.Go(s.retire)
	}
}

// retire ends the immediate PDUs so far, by a ping that is not immediate.
func (s *Session) retire() {
	for {
		ctx, cancel := context.WithTimeout(context.Background(), s.o.TaskTimeout)
		_, _, err := s.roundTrip(ctx, false, nil, nopOut(false))
		cancel()
		s.mu.Lock()
		s.retiring = err == nil && s.crowdedLocked() // by those that were sent meanwhile
		again := s.retiring
		s.mu.Unlock()
		if err != nil {
			s.o.Logger.Debug("the target does not answer a ping in the command window", "target", s.o.TargetName, "portal", s.o.Portal, "err", err)
		}
		if !again {
			return
		}
	}
}

// acknowledgedLocked takes ExpCmdSN.
func (s *Session) acknowledgedLocked(exp pdu.Serial) {
	n := 0
	for n < len(s.immediate) && exp.After(s.immediate[n]) {
		n++
	}
	if n == 0 {
		return
	}
	s.immediate = append(s.immediate[:0], s.immediate[n:]...)
	for len(s.owed) > 0 && s.roomLocked() {
		s.answerLocked(&s.owed[0])
		s.owed = append(s.owed[:0], s.owed[1:]...)
	}
	s.wakeLocked()
}

// pong answers a ping of the target, now or as soon as that is allowed.
func (s *Session) pong(p *pdu.NopIn) error {
	s.mu.Lock()
	if !s.roomLocked() {
		defer s.mu.Unlock()
		if len(s.owed) == maxOwed {
			return protocolError("%d pings, and no room for an answer", maxOwed)
		}
		s.owed = append(s.owed, *p)
		return nil
	}
	s.answerLocked(p)
	s.mu.Unlock()
	s.mover.flush(false)
	return nil
}

func (s *Session) answerLocked(p *pdu.NopIn) {
	var out pdu.Header
	(&pdu.NopOut{Immediate: true, LUN: p.LUN, ITT: pdu.ReservedTag, TTT: p.TTT, CmdSN: s.cmdSN, ExpStatSN: s.ack()}).Encode(&out)
	s.mover.control(&out, nil)
	s.sentImmediateLocked()
}

// nopOut encodes a ping.
func nopOut(immediate bool) func(t *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header) {
	return func(_ *task, tag pdu.TaskTag, cmd, exp pdu.Serial, h *pdu.Header) {
		(&pdu.NopOut{Immediate: immediate, ITT: tag, TTT: pdu.ReservedTag, CmdSN: cmd, ExpStatSN: exp}).Encode(h)
	}
}
