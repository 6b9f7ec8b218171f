package iscsi

import (
	"bytes"
	"net"
	"strings"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// maxText bounds the key text of one exchange in full feature phase, in bytes.
const maxText = 16384

// textExchange is the text negotiation of a connection, one at a time (ISCSI-72).
type textExchange struct {
	open bool
	itt  pdu.TaskTag
	ttt  pdu.TaskTag
	last uint32 // the last tag given out
	in   pdu.Text
	out  []byte // what is still to be sent
}

// textRequest takes a Text Request.
func (c *conn) textRequest(p *PDU) {
	var r pdu.TextRequest
	r.Decode(&p.Header)
	limit := int(c.sendLimit())
	c.textMu.Lock()
	defer c.textMu.Unlock()
	x := &c.text
	switch {
	case r.TTT == pdu.ReservedTag:
		// A new exchange; an unfinished one is given up (RFC 7143, 11.10.4).
		*x = textExchange{open: true, itt: r.ITT, last: x.last}
		x.in.Limit = maxText
	case !x.open || r.TTT != x.ttt || r.ITT != x.itt:
		c.reject(p, pdu.RejectInvalidField)
		return
	}
	if len(x.out) > 0 {
		if len(p.Data) > 0 {
			x.open = false
			c.reject(p, pdu.RejectProtocolError)
			return
		}
		c.textPiece(x, &r, limit)
		return
	}
	if err := x.in.Add(p.Data); err != nil {
		x.open = false
		c.reject(p, pdu.RejectLongOperation)
		return
	}
	if r.Continue {
		c.textPiece(x, &r, limit)
		return
	}
	pairs, err := x.in.Parse()
	if err != nil || len(pairs) > maxLoginKeys {
		x.open = false
		c.reject(p, pdu.RejectProtocolError)
		return
	}
	out, ok := c.negotiate(pairs)
	if !ok {
		x.open = false
		c.reject(p, pdu.RejectProtocolError)
		return
	}
	x.out = out
	c.textPiece(x, &r, limit)
}

// textPiece sends the next piece of the answer.
func (c *conn) textPiece(x *textExchange, r *pdu.TextRequest, limit int) {
	piece := x.out
	if len(piece) > limit {
		piece = piece[:limit]
		if end := bytes.LastIndexByte(piece, 0); end >= 0 {
			piece = piece[:end+1] // whole pairs, for readers that parse each piece
		}
	}
	x.out = x.out[len(piece):]
	resp := pdu.TextResponse{ITT: x.itt, LUN: r.LUN}
	resp.Continue = len(x.out) > 0
	resp.Final = r.Final && !resp.Continue
	if resp.Final {
		resp.TTT = pdu.ReservedTag
		x.open = false
	} else {
		if x.last++; pdu.TaskTag(x.last) == pdu.ReservedTag {
			x.last = 0
		}
		x.ttt = pdu.TaskTag(x.last)
		resp.TTT = x.ttt
	}
	out := &PDU{Data: piece}
	resp.Encode(&out.Header)
	c.say(out)
}

// negotiate answers the keys of one text in full feature phase.
func (c *conn) negotiate(in pdu.Pairs) ([]byte, bool) {
	var out []byte
	n := negotiation{offer: c.srv.offer(c.dm.Traits()), p: c.params, discovery: c.s.key.discovery, fullFeature: true, declared: true}
	for _, kv := range in {
		if kv.Key == "SendTargets" {
			out = c.sendTargets(out, kv.Value)
			continue
		}
		switch kv.Key {
		case "InitiatorName", "TargetName", "SessionType", "AuthMethod":
			return nil, false // login only
		}
		if c.s.key.discovery && kv.Key != "MaxRecvDataSegmentLength" {
			// Discovery sessions negotiate nothing else; the answer must not depend on the key.
			out = pdu.AppendPair(out, kv.Key, pdu.ValueIrrelevant)
			continue
		}
		answer, ok := n.one(kv.Key, kv.Value)
		if !ok {
			return nil, false
		}
		if answer != "" {
			out = pdu.AppendPair(out, kv.Key, answer)
		}
	}
	if n.p != c.params {
		c.params = n.p
		c.dm.NoticeKeyValues(&n.p)
	}
	return out, true
}

// sendTargets answers SendTargets (RFC 7143, Appendix C). What the initiator may not see does not exist.
func (c *conn) sendTargets(out []byte, value string) []byte {
	var names []string
	switch {
	case value == "All":
		// RFC 7143 allows All in a discovery session only. Initiators ask for it in normal
		// sessions too, and get what this session can see anyway.
		if !c.s.key.discovery {
			names = []string{c.s.key.target}
			break
		}
		names = c.srv.opt.Backend.Targets(c.srv.ctx, c.s.key.initiator)
		if c.s.key.target != "" {
			names = keep(names, c.s.key.target)
		}
	case value == "" && !c.s.key.discovery:
		names = []string{c.s.key.target}
	case CheckName(value) != nil:
		return pdu.AppendPair(out, "SendTargets", pdu.ValueReject)
	case !c.s.key.discovery:
		if value != c.s.key.target {
			return pdu.AppendPair(out, "SendTargets", pdu.ValueReject)
		}
		names = []string{value}
	default:
		names = keep(c.srv.opt.Backend.Targets(c.srv.ctx, c.s.key.initiator), value)
	}
	addresses := c.srv.addresses(c)
	for _, name := range names {
		out = pdu.AppendPair(out, "TargetName", name)
		for _, a := range addresses {
			out = pdu.AppendPair(out, "TargetAddress", a)
		}
	}
	return out
}

func keep(names []string, name string) []string {
	for _, n := range names {
		if n == name {
			return []string{name}
		}
	}
	return nil
}

// addresses lists the portals as this connection's initiator can reach them, its own portal first.
func (s *Server) addresses(c *conn) []string {
	s.mu.Lock()
	portals := append([]*Portal(nil), s.portals...)
	s.mu.Unlock()
	local, _, _ := net.SplitHostPort(addrString(c.dm.LocalAddr()))
	var out []string
	add := func(p *Portal) {
		address := p.Advertise
		if address == "" {
			host, port, err := net.SplitHostPort(p.address)
			if err != nil {
				return
			}
			if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
				host = local
			}
			if host == "" {
				return
			}
			address = net.JoinHostPort(host, port)
		}
		address += "," + itoa(p.group())
		for _, have := range out {
			if have == address {
				return
			}
		}
		out = append(out, address)
	}
	add(c.portal)
	for _, p := range portals {
		if p != c.portal {
			add(p)
		}
	}
	return out
}

func addrString(a net.Addr) string {
	if a == nil {
		return ""
	}
	// A zone belongs to this host only.
	s := a.String()
	if i := strings.IndexByte(s, '%'); i >= 0 {
		if j := strings.IndexByte(s[i:], ']'); j >= 0 {
			return s[:i] + s[i+j:]
		}
	}
	return s
}
