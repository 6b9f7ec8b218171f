package iscsi

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// maxLinger bounds how long a connection stays open behind a Logout Response.
const maxLinger = time.Second

// maxImmediate bounds the immediate commands in progress on one connection (ISCSI-42 wants at least two).
const maxImmediate = 16

// conn is one connection, from its first byte to its last.
type conn struct {
	srv    *Server
	dm     Datamover
	portal *Portal
	log    *slog.Logger

	// s, cid and params are set at the end of login, before the session knows the connection.
	s      *session
	cid    uint16
	params Parameters

	// statSN is used by Stamp only, which the Datamover serializes.
	statSN pdu.Serial
	// loginCmdSN is CmdSN of the first Login Request.
	loginCmdSN pdu.Serial

	gone      bool        // guarded by s.mu: takes no more commands
	replaced  bool        // guarded by s.mu: another connection takes its place
	hurry     *time.Timer // guarded by s.mu: calls hurryUp; nil: none of its tasks is watched
	around    progress    // guarded by s.mu: of the time when hurryUp was called last
	loggedOut atomic.Bool

	// speech decides what may be sent that is no answer of login; see say.
	speech sync.Mutex
	speaks bool // guarded by speech

	immediates atomic.Int32
	draining   atomic.Bool // commands are ignored, a shutdown waits for those in progress

	textMu sync.Mutex
	text   textExchange // guarded by textMu

	closing sync.Once
	stopped chan struct{} // closed when run has returned
	pinger  pinger
}

// Stamp implements Numbers.
func (c *conn) Stamp(h *pdu.Header) {
	h.SetStatSN(c.statSN)
	if advancesStatSN(h) {
		c.statSN = c.statSN.Next()
	}
	if s := c.s; s != nil {
		// exp first: max never goes back, so that max >= exp-1 in what is sent.
		exp := pdu.Serial(s.exp.Load())
		h.SetWindow(exp, pdu.Serial(s.max.Load()))
		return
	}
	h.SetWindow(c.loginCmdSN, c.loginCmdSN)
}

// advancesStatSN tells responses from what only carries the next StatSN (ISCSI-44).
func advancesStatSN(h *pdu.Header) bool {
	switch h.Opcode() {
	case pdu.OpR2T:
		return false
	case pdu.OpDataIn:
		return h[1]&1 != 0
	case pdu.OpNopIn:
		return h.ITT() != pdu.ReservedTag
	}
	return true
}

// run serves the connection to its end.
func (c *conn) run() {
	defer close(c.stopped)
	defer c.srv.forget(c)
	c.dm.Start(c)
	ok := c.login()
	if !ok {
		return
	}
	c.pinger.start(c)
	err := c.serve()
	c.pinger.stop()
	c.ended(err)
	c.close(c.loggedOut.Load())
	c.s.lose(c)
}

// begin starts full feature phase: the initiator has been sent its final Login Response.
func (c *conn) begin() {
	c.speech.Lock()
	defer c.speech.Unlock()
	c.speaks = true
}

// say sends a control PDU that ends no command. Before the final Login Response and behind a Logout Response nothing is sent: whoever says
// something there is late, or early, and it is dropped.
func (c *conn) say(p *PDU) {
	c.speech.Lock()
	defer c.speech.Unlock()
	if c.speaks {
		c.dm.SendControl(p) // an error ends the connection, and the reader sees it too
	}
}

// sayLast is say for a Logout Response.
func (c *conn) sayLast(p *PDU) {
	c.speech.Lock()
	defer c.speech.Unlock()
	if c.speaks {
		c.speaks = false
		c.dm.SendControl(p)
	}
}

// linger gives the initiator time to close the connection behind a Logout Response. If the target's end came right behind the
// response, soft-iWARP of Linux would take it for an error, its Logout Request not being complete yet.
func (c *conn) linger() {
	timer := time.NewTimer(min(c.srv.opt.LogoutWait, maxLinger))
	defer timer.Stop()
	select {
	case <-c.stopped:
	case <-c.s.dying:
	case <-timer.C:
	}
}

func (c *conn) close(graceful bool) {
	c.closing.Do(func() { c.dm.Close(graceful) })
}

// ended logs why the connection ends, and ends what has to end with it.
func (c *conn) ended(err error) {
	switch {
	case c.loggedOut.Load():
		c.log.Debug("connection logged out")
	case errors.Is(err, ErrHeaderDigest):
		c.srv.metrics.digestErrors.WithLabelValues("header").Inc()
		c.srv.logs.end.log(c.log, slog.LevelWarn, "header digest error: connection closed")
	case errors.Is(err, ErrFormat) || errors.Is(err, ErrSegment):
		c.srv.logs.end.log(c.log, slog.LevelWarn, "protocol violation: session closed", "err", err)
		c.s.violated()
	case errors.Is(err, net.ErrClosed) || errors.Is(err, ErrClosed):
		c.log.Debug("connection closed")
	default:
		c.srv.logs.end.log(c.log, slog.LevelInfo, "connection lost", "err", err)
	}
}

// login runs the login phase. It reports whether the connection is in full feature phase.
func (c *conn) login() bool {
	ctx, cancel := context.WithTimeout(c.srv.ctx, c.srv.opt.LoginTimeout)
	defer cancel()
	overdue := context.AfterFunc(ctx, func() { c.dm.Close(false) })
	defer overdue()
	m := newLogin(ctx, c.srv.loginConfig(c))
	defer m.close()
	log := c.log // without the names, which c.log tells once there is a session
	fail := func(result string, attrs ...any) bool {
		c.srv.metrics.logins.WithLabelValues(result).Inc()
		c.srv.logs.failed.log(log, slog.LevelInfo, "login failed", append([]any{"result", result, "initiator", m.initiator, "target", m.target}, attrs...)...)
		c.close(true)
		return false
	}
	for {
		p, err := c.dm.Receive()
		if err != nil {
			if m.first == nil && ctx.Err() == nil {
				c.srv.metrics.logins.WithLabelValues("no login").Inc()
				c.close(false)
				return false
			}
			if ctx.Err() != nil {
				return fail("timeout")
			}
			return fail("connection lost", "err", err)
		}
		if p.Header.Opcode() != pdu.OpLoginRequest {
			if m.first == nil {
				return fail("not a login") // closed without an answer (RFC 7143, 6.3)
			}
			resp, _ := m.fail(pdu.LoginInvalidRequest, p.Header.Opcode().String()+" during login")
			c.respondLogin(&resp, nil)
			return fail(m.status.String(), "reason", m.reason)
		}
		if m.first == nil {
			c.loginCmdSN = p.Header.CmdSN()
			c.statSN = p.Header.ExpStatSN()
		}
		resp, text := m.step(&p.Header, p.Data)
		if m.done {
			overdue() // attach keeps to ctx, and its failure is answered
			var status pdu.LoginStatus
			var why string
			if status, why = c.srv.attach(ctx, c, m); status != pdu.LoginSuccess {
				resp, text = m.fail(status, why)
			}
		}
		if m.status != pdu.LoginSuccess {
			c.respondLogin(&resp, nil)
			return fail(m.status.String(), "reason", m.reason)
		}
		if !m.done {
			if err := c.respondLogin(&resp, text); err != nil {
				return fail("connection lost", "err", err)
			}
			continue
		}
		resp.TSIH = c.s.tsih
		final := &PDU{Data: text}
		resp.Encode(&final.Header)
		c.log = c.log.With("initiator", m.initiator, "target", m.target, "tsih", c.s.tsih, "cid", c.cid)
		if err := c.dm.Enable(&c.params, final); err != nil {
			if errors.Is(err, ErrResources) {
				resp, _ = m.fail(pdu.LoginOutOfResources, err.Error())
				c.respondLogin(&resp, nil)
				c.s.lose(c)
				return fail(m.status.String(), "reason", m.reason)
			}
			c.s.lose(c)
			return fail("connection lost", "err", err)
		}
		c.srv.metrics.logins.WithLabelValues("success").Inc()
		c.srv.loggedIn(c)
		c.begin()
		c.srv.logs.begin.log(c.log, slog.LevelInfo, "login", "transport", c.dm.Traits().Transport, "discovery", c.s.key.discovery)
		return true
	}
}

func (c *conn) respondLogin(resp *pdu.LoginResponse, text []byte) error {
	p := &PDU{Data: text}
	resp.Encode(&p.Header)
	return c.dm.SendControl(p)
}

// serve is full feature phase: it reads requests until the connection ends.
func (c *conn) serve() error {
	for {
		p, err := c.dm.Receive()
		if err != nil {
			return err
		}
		if err := c.handle(p); err != nil {
			return err
		}
	}
}

// handle takes one request. An error ends the connection.
func (c *conn) handle(p *PDU) error {
	op := p.Header.Opcode()
	if c.loggedOut.Load() {
		// Nothing may follow a Logout Request; the connection closes after its response.
		if op == pdu.OpSCSICommand {
			c.dm.Discard(p.Transfer)
		}
		return nil
	}
	if p.Fault != 0 {
		c.reject(p, p.Fault)
		if op != pdu.OpSCSICommand {
			return nil
		}
	}
	if c.s.key.discovery && op != pdu.OpTextRequest && op != pdu.OpLogoutRequest {
		// ISCSI-74: nothing else belongs into a discovery session.
		if op == pdu.OpSCSICommand {
			c.dm.Discard(p.Transfer)
		}
		c.reject(p, pdu.RejectProtocolError)
		return nil
	}
	switch op {
	case pdu.OpSCSICommand:
		return c.command(p)
	case pdu.OpNopOut, pdu.OpTaskRequest, pdu.OpTextRequest, pdu.OpLogoutRequest:
		if err := validate(p); err != nil {
			return errors.Join(ErrFormat, err)
		}
		if p.Header.Immediate() {
			c.request(p)
			return nil
		}
		c.s.arrive(p.Header.CmdSN(), arrival{c: c, pdu: p})
		return nil
	case pdu.OpDataOut:
		return nil // its fault was answered
	case pdu.OpSnack, pdu.OpLoginRequest:
		c.reject(p, pdu.RejectProtocolError) // ISCSI-79, ISER-16
		return nil
	}
	if op.FromTarget() {
		return errors.Join(ErrFormat, pdu.ErrOpcode)
	}
	c.reject(p, pdu.RejectNotSupported)
	return nil
}

// validate decodes a request only to find format errors.
func validate(p *PDU) error {
	switch p.Header.Opcode() {
	case pdu.OpNopOut:
		var r pdu.NopOut
		return r.Decode(&p.Header)
	case pdu.OpTaskRequest:
		var r pdu.TaskRequest
		return r.Decode(&p.Header)
	case pdu.OpTextRequest:
		var r pdu.TextRequest
		return r.Decode(&p.Header)
	case pdu.OpLogoutRequest:
		var r pdu.LogoutRequest
		return r.Decode(&p.Header)
	}
	return nil
}

// command takes a SCSI Command.
func (c *conn) command(p *PDU) error {
	var cmd pdu.SCSICommand
	var ahs pdu.AHS
	err := cmd.Decode(&p.Header)
	if err == nil {
		err = ahs.Decode(p.AHS)
	}
	if err != nil {
		c.dm.Discard(p.Transfer)
		return errors.Join(ErrFormat, err)
	}
	if c.draining.Load() {
		c.dm.Discard(p.Transfer)
		return nil
	}
	t := newTask(c, &cmd, p, &ahs)
	var d disposition
	if cmd.Immediate {
		d = c.s.immediate(c, t)
	} else {
		d = c.s.arrive(cmd.CmdSN, arrival{c: c, task: t})
	}
	if d == accepted {
		return nil // and t may be another command by now
	}
	c.s.discard(t)
	switch d {
	case inProgress:
		c.reject(p, pdu.RejectTaskInProgress)
	case surplus:
		c.reject(p, pdu.RejectTooManyImmediate)
	}
	return nil
}

// takeImmediate claims a slot for an immediate command.
func (c *conn) takeImmediate() bool {
	if c.immediates.Add(1) > maxImmediate {
		c.immediates.Add(-1)
		return false
	}
	return true
}

// request runs a request other than a SCSI Command, at its turn. It must not wait. p is valid until it returns.
func (c *conn) request(p *PDU) {
	// The window moves by one for each non-immediate request that ended, before it is answered.
	task := p.Header.Opcode() == pdu.OpTaskRequest
	if !p.Header.Immediate() && !task {
		c.s.max.Add(1)
	}
	switch p.Header.Opcode() {
	case pdu.OpNopOut:
		c.nop(p)
	case pdu.OpTextRequest:
		c.textRequest(p)
	case pdu.OpLogoutRequest:
		c.logout(p)
	case pdu.OpTaskRequest:
		c.manage(p)
	}
}

// reject answers p by a Reject with its header.
func (c *conn) reject(p *PDU, reason pdu.RejectReason) {
	c.srv.metrics.rejects.WithLabelValues(reason.String()).Inc()
	if reason == pdu.RejectDataDigest {
		c.srv.metrics.digestErrors.WithLabelValues("data").Inc()
	}
	c.log.Debug("reject", "reason", reason.String(), "pdu", p.Header.String())
	r := pdu.Reject{Reason: reason}
	out := &PDU{Data: p.Header[:]}
	r.Encode(&out.Header)
	c.say(out)
}

// nop takes a NOP-Out: the initiator's ping, or its answer to ours.
func (c *conn) nop(p *PDU) {
	var r pdu.NopOut
	r.Decode(&p.Header)
	if r.ITT == pdu.ReservedTag {
		if r.TTT != pdu.ReservedTag {
			c.pinger.answered(uint32(r.TTT))
		}
		return
	}
	resp := pdu.NopIn{ITT: r.ITT, TTT: pdu.ReservedTag}
	data := p.Data
	if limit := int(c.sendLimit()); len(data) > limit {
		data = data[:limit]
	}
	out := &PDU{Data: data}
	resp.Encode(&out.Header)
	c.say(out)
}

// sendLimit is the longest data segment of a control PDU that the initiator takes.
func (c *conn) sendLimit() uint32 {
	c.textMu.Lock()
	defer c.textMu.Unlock()
	return c.params.ControlLimit()
}

// windowUpdate sends the command window when nothing else carries it (ISCSI-45).
func (c *conn) windowUpdate() {
	r := pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}
	out := new(PDU)
	r.Encode(&out.Header)
	c.say(out)
}

// async sends an Asynchronous Message. Discovery sessions get none (ISCSI-74).
func (c *conn) async(a pdu.Async) {
	if c.s.key.discovery {
		return
	}
	out := new(PDU)
	a.Encode(&out.Header)
	c.say(out)
}

// pinger finds dead peers: it pings when nothing was received for a while, and closes the connection if
// nothing is received after that either.
type pinger struct {
	mu      sync.Mutex
	timer   *time.Timer // guarded by mu; nil: off
	seen    uint64      // PDUs received at the last tick
	waiting bool        // a ping is out
	tag     uint32
}

func (g *pinger) start(c *conn) {
	if c.srv.opt.PingInterval < 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.timer = time.AfterFunc(c.srv.opt.PingInterval, func() { g.tick(c) })
}

func (g *pinger) tick(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer == nil {
		return
	}
	received := c.dm.Received()
	idle := received == g.seen
	g.seen = received
	switch {
	case !idle:
		g.waiting = false
		g.timer.Reset(c.srv.opt.PingInterval)
	case g.waiting:
		c.srv.logs.end.log(c.log, slog.LevelWarn, "initiator does not answer: connection closed", "timeout", c.srv.opt.PingTimeout)
		c.srv.metrics.deadPeers.Inc()
		go c.close(false)
		g.timer = nil
	case c.s.key.discovery:
		g.waiting = true // it is not pinged, and closed when it stays silent
		g.timer.Reset(c.srv.opt.PingTimeout)
	default:
		g.waiting = true
		if g.tag++; pdu.TaskTag(g.tag) == pdu.ReservedTag {
			g.tag = 0
		}
		r := pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.TaskTag(g.tag)}
		out := new(PDU)
		r.Encode(&out.Header)
		c.say(out)
		g.timer.Reset(c.srv.opt.PingTimeout)
	}
}

func (g *pinger) answered(tag uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if tag == g.tag {
		g.waiting = false
	}
}

func (g *pinger) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.timer != nil {
		g.timer.Stop()
		g.timer = nil
	}
}
