package iser

import (
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

const (
	// unexpectedDefault is how many unexpected PDUs an initiator takes that does not declare it: two pings and
	// two Asynchronous Messages (ISER-R10).
	unexpectedDefault = 4
	// holdBack is how long unexpected PDUs are held back from an initiator that has not spoken in full feature phase (ISER-24).
	holdBack = time.Second
)

// unexpected counts the PDUs that no request of the initiator made room for: Asynchronous Messages, and NOP-Ins that answer
// nothing (RFC 7145, 8.1.2). All Rejects of the target are early ones: they answer a request that gets no other answer. Guarded by Conn.mu.
type unexpected struct {
	on      bool
	limit   int           // 0: none
	out     []outstanding // not known to be taken
	spoken  bool
	enabled time.Time
}

// outstanding is one that the initiator may not have taken yet.
type outstanding struct {
	statSN pdu.Serial
	ping   pdu.TaskTag // of a NOP-In that asks for an answer, or ReservedTag
}

func (u *unexpected) init(p *iscsi.Parameters) {
	*u = unexpected{on: p.RDMAExtensions, limit: unexpectedDefault, enabled: time.Now()}
	if p.UnexpectedPDUsDeclared {
		u.limit = int(p.MaxOutstandingUnexpectedPDUs)
	}
}

// is reports whether a header is that of an unexpected PDU, and the tag of a ping.
func (u *unexpected) is(h *pdu.Header) (ping pdu.TaskTag, yes bool) {
	switch h.Opcode() {
	case pdu.OpAsync:
		return pdu.ReservedTag, true
	case pdu.OpNopIn:
		return h.TTT(), h.ITT() == pdu.ReservedTag
	}
	return pdu.ReservedTag, false
}

// admit reports whether a PDU may be sent. The last place is kept for a ping, whose answer makes room (ISER-64).
func (u *unexpected) admit(p *iscsi.PDU) bool {
	ping, yes := u.is(&p.Header)
	if !u.on || !yes {
		return true
	}
	if !u.spoken && time.Since(u.enabled) < holdBack {
		return false
	}
	free := u.limit - len(u.out)
	return u.limit == 0 || free > 1 || free == 1 && ping != pdu.ReservedTag
}

// sent counts a PDU that was stamped. It reports whether what it counted has to be acknowledged.
func (u *unexpected) sent(h *pdu.Header) bool {
	ping, yes := u.is(h)
	if !yes || !u.on || u.limit == 0 {
		return false
	}
	u.out = append(u.out, outstanding{h.StatSN(), ping})
	return true
}

// heard takes what a request acknowledges.
func (u *unexpected) heard(h *pdu.Header) {
	u.spoken = true
	if len(u.out) == 0 {
		return
	}
	pong := pdu.ReservedTag
	if h.Opcode() == pdu.OpNopOut && h.ITT() == pdu.ReservedTag {
		pong = h.TTT()
	}
	exp := h.ExpStatSN()
	keep := u.out[:0]
	for _, x := range u.out {
		if x.statSN.Before(exp) || x.ping == pong && pong != pdu.ReservedTag {
			continue
		}
		keep = append(keep, x)
	}
	u.out = keep
}
