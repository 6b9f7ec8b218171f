package iscsi

import (
	"context"
	"errors"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Limits of the login phase.
const (
	maxLoginText     = 16384 // bytes of key text in one exchange (RFC 7143, 6.1 wants at least 8192)
	maxLoginKeys     = 128   // keys in one login
	maxLoginRequests = 64    // Login Requests in one login
	loginSegment     = 8192  // the default MaxRecvDataSegmentLength rules login PDUs
)

// loginConfig is what the login machine needs from outside.
type loginConfig struct {
	backend    Backend
	offer      offer
	algorithms []CHAPAlgorithm
	book       *challenges
	group      uint16 // TargetPortalGroupTag
	// session finds an existing session and reports whether the TSIH names it (RFC 7143, 6.3.1). It changes nothing.
	session func(k sessionKey, tsih uint16) (s *session, matches bool)
}

// loginMachine is the target's side of one login (RFC 7143, 6.3): a Login Request goes in, a Login Response comes out. It has
// no clock, goroutine or connection, and changes no session: the driver attaches the connection when the machine is done.
type loginMachine struct {
	cfg loginConfig
	ctx context.Context

	first    *pdu.LoginRequest // the constant fields of the phase
	requests int
	keys     map[string]bool // keys the initiator has sent
	stage    pdu.Stage
	text     pdu.Text
	pending  []byte // response text not yet sent

	initiator, target string
	discovery         bool
	named             bool // the first complete text was evaluated
	access            Access
	joins             *session // the session that this connection joins
	chap              *chapExchange
	authenticated     bool
	chapUser          string
	tagSent           bool
	n                 negotiation

	status pdu.LoginStatus
	reason string // why it failed, for logs and metrics
	done   bool   // full feature phase follows the last response
}

func newLogin(ctx context.Context, cfg loginConfig) *loginMachine {
	m := &loginMachine{cfg: cfg, ctx: ctx, keys: make(map[string]bool)}
	m.text.Limit = maxLoginText
	m.n.offer = cfg.offer
	m.n.p = defaults()
	m.n.p.message = cfg.offer.message
	return m
}

// close gives back what the login holds outside of itself.
func (m *loginMachine) close() { m.chap.close() }

// step takes one Login Request with its data segment, and returns the response with its. If the
// status of the response is not success, the connection is to be closed after it.
func (m *loginMachine) step(h *pdu.Header, data []byte) (pdu.LoginResponse, []byte) {
	var req pdu.LoginRequest
	err := req.Decode(h)
	if m.first == nil {
		first := req
		m.first = &first
		m.stage = req.CSG
	}
	if err != nil {
		return m.fail(pdu.LoginInitiatorError, err.Error())
	}
	if status, why := m.check(&req); status != pdu.LoginSuccess {
		return m.fail(status, why)
	}
	if len(m.pending) > 0 {
		if len(data) > 0 {
			return m.fail(pdu.LoginInitiatorError, "text while the answer is not complete")
		}
		return m.respond(&req, nil, m.mayLeave(&req))
	}
	if err := m.text.Add(data); err != nil {
		return m.fail(pdu.LoginInitiatorError, err.Error())
	}
	if req.Continue {
		return m.respond(&req, nil, false)
	}
	pairs, err := m.text.Parse()
	if err != nil {
		return m.fail(pdu.LoginInitiatorError, err.Error())
	}
	for _, kv := range pairs {
		if m.keys[kv.Key] || len(m.keys) >= maxLoginKeys {
			return m.fail(pdu.LoginInitiatorError, "a key is negotiated twice, or there are too many")
		}
		m.keys[kv.Key] = true
	}
	out, status, why := m.exchange(pairs)
	if status != pdu.LoginSuccess {
		return m.fail(status, why)
	}
	return m.respond(&req, out.Append(nil), m.mayLeave(&req))
}

// check judges the header against the phase so far (ISCSI-4, ISCSI-7, ISCSI-13).
func (m *loginMachine) check(req *pdu.LoginRequest) (pdu.LoginStatus, string) {
	m.requests++
	switch f := m.first; {
	case m.requests > maxLoginRequests:
		return pdu.LoginInitiatorError, "too many login requests"
	case m.done || m.status != pdu.LoginSuccess:
		return pdu.LoginInvalidRequest, "login is over"
	case f.VersionMin > pdu.Version:
		return pdu.LoginUnsupportedVersion, "version"
	case req.ISID != f.ISID || req.TSIH != f.TSIH || req.CID != f.CID || req.ITT != f.ITT ||
		req.VersionMin != f.VersionMin || req.VersionMax != f.VersionMax:
		return pdu.LoginInitiatorError, "a constant field changed during login"
	case req.CSG != m.stage:
		return pdu.LoginInitiatorError, "the stage is not the one agreed"
	}
	return pdu.LoginSuccess, ""
}

// exchange evaluates one complete text.
func (m *loginMachine) exchange(in pdu.Pairs) (out pdu.Pairs, status pdu.LoginStatus, why string) {
	if !m.named {
		if status, why = m.identify(in); status != pdu.LoginSuccess {
			return nil, status, why
		}
		m.named = true
	} else if _, late := in.Get("SessionType"); late {
		return nil, pdu.LoginInitiatorError, "SessionType after the first request"
	}
	if !m.tagSent && m.target != "" {
		m.tagSent = true
		out.Add("TargetPortalGroupTag", itoa(m.cfg.group))
		if m.access.Alias != "" {
			out.Add("TargetAlias", m.access.Alias)
		}
	}

	// Names and the type belong to login itself, the rest to one of the stages.
	var security, operational pdu.Pairs
	for _, kv := range in {
		switch kv.Key {
		case "InitiatorName", "TargetName", "SessionType":
			if value, _ := m.declared(kv.Key); value != kv.Value {
				return nil, pdu.LoginInitiatorError, kv.Key + " changed during login"
			}
		case "InitiatorAlias":
			operational = append(operational, kv)
		case "AuthMethod", "CHAP_A", "CHAP_N", "CHAP_R", "CHAP_I", "CHAP_C":
			security = append(security, kv)
		case "SendTargets":
			return nil, pdu.LoginInitiatorError, "SendTargets belongs to full feature phase"
		default:
			operational = append(operational, kv)
		}
	}
	if m.stage == pdu.StageSecurity {
		for _, kv := range operational {
			if rule, known := keyRules[kv.Key]; known && kv.Key != "InitiatorAlias" && !(rule.apply == nil && kv.Value == pdu.ValueNotUnderstood) {
				return nil, pdu.LoginInitiatorError, kv.Key + " belongs to the operational stage"
			}
		}
		var answers pdu.Pairs
		if answers, status, why = m.authenticate(security); status != pdu.LoginSuccess {
			return nil, status, why
		}
		out = append(out, answers...)
	} else {
		if len(security) > 0 {
			return nil, pdu.LoginInitiatorError, "a security key outside of its stage"
		}
		if m.access.CHAP != nil && !m.authenticated {
			return nil, pdu.LoginAuthFailure, "authentication was skipped"
		}
	}
	answers, ok := m.n.evaluate(operational)
	if !ok {
		return nil, pdu.LoginInitiatorError, "a key is not allowed here"
	}
	out = append(out, answers...)
	if m.stage == pdu.StageOperational && !m.n.declared && !m.n.p.RDMAExtensions && !m.cfg.offer.message {
		m.n.declared = true
		m.n.p.MaxRecvDataSegmentLength = m.cfg.offer.maxRecv
		out.Add("MaxRecvDataSegmentLength", itoa(m.cfg.offer.maxRecv))
	}
	return out, pdu.LoginSuccess, ""
}

func (m *loginMachine) declared(key string) (string, bool) {
	switch key {
	case "InitiatorName":
		return m.initiator, true
	case "TargetName":
		return m.target, true
	case "SessionType":
		if m.discovery {
			return "Discovery", true
		}
		return "Normal", true
	}
	return "", false
}

// identify evaluates who asks for what: the keys of the first complete text (ISCSI-3).
func (m *loginMachine) identify(in pdu.Pairs) (pdu.LoginStatus, string) {
	var ok bool
	if m.initiator, ok = in.Get("InitiatorName"); !ok {
		return pdu.LoginMissingParameter, "InitiatorName is missing"
	}
	if err := CheckName(m.initiator); err != nil {
		return pdu.LoginInitiatorError, err.Error()
	}
	switch kind, has := in.Get("SessionType"); {
	case has && kind == "Discovery":
		m.discovery = true
	case has && kind != "Normal":
		return pdu.LoginUnsupportedType, "unknown SessionType"
	}
	if m.target, ok = in.Get("TargetName"); ok {
		if err := CheckName(m.target); err != nil {
			return pdu.LoginNotFound, err.Error()
		}
	} else if !m.discovery {
		return pdu.LoginMissingParameter, "TargetName is missing"
	}

	m.n.discovery = m.discovery
	m.n.leading = m.first.TSIH == 0
	if m.first.TSIH != 0 {
		s, matches := m.cfg.session(m.key(), m.first.TSIH)
		if s == nil || !matches || m.discovery {
			return pdu.LoginNoSession, "no session has this TSIH"
		}
		m.joins = s
		m.n.p.RDMAExtensions = s.params.RDMAExtensions // inherited, not negotiated again (ISER-5)
	}

	var err error
	target := m.target
	if m.discovery {
		target = ""
	}
	if m.access, err = m.cfg.backend.Authorize(m.ctx, m.initiator, target); err == nil && m.discovery && m.target != "" {
		// A named discovery session is as open as the target it names.
		m.access, err = m.cfg.backend.Authorize(m.ctx, m.initiator, m.target)
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrForbidden):
		return pdu.LoginForbidden, "not authorized"
	case errors.Is(err, ErrNotFound):
		return pdu.LoginNotFound, "no such target"
	case errors.Is(err, ErrRemoved):
		return pdu.LoginRemoved, "target was removed"
	case errors.Is(err, ErrUnavailable):
		return pdu.LoginServiceUnavailable, "target is not available"
	default:
		return pdu.LoginTargetError, err.Error()
	}
	if c := m.access.CHAP; c != nil {
		if err := c.Validate(); err != nil {
			return pdu.LoginTargetError, err.Error()
		}
	}
	if !m.discovery && m.access.Units == nil {
		return pdu.LoginTargetError, "the target has no logical units"
	}
	return pdu.LoginSuccess, ""
}

func (m *loginMachine) key() sessionKey {
	return sessionKey{initiator: m.initiator, isid: m.first.ISID, target: m.target, group: m.cfg.group, discovery: m.discovery}
}

// authenticate evaluates the keys of the security stage.
func (m *loginMachine) authenticate(in pdu.Pairs) (out pdu.Pairs, status pdu.LoginStatus, why string) {
	if methods, has := in.Get("AuthMethod"); has {
		want := "None"
		if m.access.CHAP != nil {
			want = "CHAP"
		}
		if choose(methods, want) != want {
			return nil, pdu.LoginAuthFailure, "no acceptable AuthMethod"
		}
		out.Add("AuthMethod", want)
		if want == "CHAP" {
			m.chap = &chapExchange{creds: m.access.CHAP, allowed: m.cfg.algorithms, book: m.cfg.book}
		}
		in = without(in, "AuthMethod")
	}
	if len(in) == 0 {
		return out, pdu.LoginSuccess, ""
	}
	if m.chap == nil || m.chap.done {
		return nil, pdu.LoginInitiatorError, "a CHAP key without AuthMethod=CHAP"
	}
	answers, status := m.chap.step(in)
	if status != pdu.LoginSuccess {
		return nil, status, "CHAP: " + status.String()
	}
	if m.chap.done {
		m.authenticated = true
		m.chapUser = m.access.CHAP.User
		if m.joins != nil && m.joins.chapUser != m.chapUser {
			return nil, pdu.LoginAuthFailure, "another CHAP user than the session's"
		}
	}
	return append(out, answers...), pdu.LoginSuccess, ""
}

func without(in pdu.Pairs, key string) pdu.Pairs {
	var out pdu.Pairs
	for _, kv := range in {
		if kv.Key != key {
			out = append(out, kv)
		}
	}
	return out
}

// mayLeave reports whether the target follows the initiator out of the stage.
func (m *loginMachine) mayLeave(req *pdu.LoginRequest) bool {
	if !req.Transit {
		return false
	}
	return m.stage != pdu.StageSecurity || m.access.CHAP == nil || m.authenticated
}

// respond builds the response to req: the next piece of the answer, and the stage transition if this is the last piece.
func (m *loginMachine) respond(req *pdu.LoginRequest, text []byte, leave bool) (pdu.LoginResponse, []byte) {
	m.pending = append(m.pending, text...)
	r := m.response()
	if req.Transit && req.CSG == pdu.StageSecurity && !leave && !req.Continue && m.access.CHAP != nil && m.chap == nil {
		return m.fail(pdu.LoginAuthFailure, "authentication was skipped")
	}
	piece := m.pending
	if len(piece) > loginSegment {
		piece = piece[:loginSegment]
		r.Continue = true
	}
	m.pending = m.pending[len(piece):]
	if leave && !r.Continue {
		r.Transit, r.NSG = true, req.NSG
		if req.NSG == pdu.StageFullFeature {
			if !m.n.finish() {
				return m.fail(pdu.LoginInitiatorError, "FirstBurstLength exceeds MaxBurstLength")
			}
			if m.cfg.offer.message && !m.discovery && !m.n.p.RDMAExtensions {
				// There is no byte stream to go on with (RFC 7145, 5.1).
				return m.fail(pdu.LoginInitiatorError, "RDMAExtensions was not negotiated over an RDMA transport")
			}
			if m.cfg.offer.required && !m.discovery && !m.n.p.RDMAExtensions {
				return m.fail(pdu.LoginInitiatorError, "this portal serves iSER only, and the initiator did not negotiate RDMAExtensions=Yes: let it log in over iSER")
			}
			if m.joins != nil {
				m.n.p.session(&m.joins.params)
			}
			m.done = true
		}
		m.stage = req.NSG
	}
	return r, piece
}

func (m *loginMachine) response() pdu.LoginResponse {
	return pdu.LoginResponse{CSG: m.stage, VersionMax: pdu.Version, VersionActive: pdu.Version,
		ISID: m.first.ISID, TSIH: m.first.TSIH, ITT: m.first.ITT}
}

// fail ends the login with a status.
func (m *loginMachine) fail(status pdu.LoginStatus, why string) (pdu.LoginResponse, []byte) {
	m.status, m.reason, m.done = status, why, false
	r := m.response()
	r.Status = status
	return r, nil
}
