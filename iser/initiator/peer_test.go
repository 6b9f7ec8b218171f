package initiator

import (
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// peer is a scripted target: the test plays it PDU by PDU.
type peer struct {
	t      testing.TB
	c      peerConn
	statSN pdu.Serial
	exp    pdu.Serial // ExpCmdSN
	max    pdu.Serial // MaxCmdSN
	last   *PDU       // the login request that expectKeys received
}

// peerConn is a connection of the peer: TCP, or messages.
type peerConn interface {
	Send(p *PDU) error
	Receive() (*PDU, error)
	Close() error
}

// listen runs script for each connection to the portal it returns.
func listen(t testing.TB, script func(*peer)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tcp := NewConn(c)
			tcp.SetMaxRecv(1 << 20)
			p := &peer{t: t, c: tcp, statSN: 100, exp: 1, max: 64}
			script(p)
			p.c.Close()
		}
	}()
	return l.Addr().String()
}

// next receives a PDU, nil at the end of the connection, and keeps the numbers.
func (p *peer) next() *PDU {
	in, err := p.c.Receive()
	if err != nil {
		return nil
	}
	if !in.Header.Immediate() && in.Header.Opcode() != pdu.OpDataOut && in.Header.Opcode() != pdu.OpSnack {
		if in.Header.CmdSN() != p.exp {
			p.t.Errorf("peer: %v with CmdSN %d, expected %d", in.Header.Opcode(), in.Header.CmdSN(), p.exp)
		}
		p.exp++
		p.max++
	}
	return in
}

// expect receives PDUs until one has the opcode; others fail the test.
func (p *peer) expect(op pdu.Opcode) *PDU {
	in := p.next()
	if in == nil || in.Header.Opcode() != op {
		p.t.Errorf("peer: expected %v, got %v", op, in)
		return nil
	}
	return in
}

// send sends a response with the right numbers; advance consumes a StatSN.
func (p *peer) send(m Message, data []byte, advance bool) {
	out := &PDU{Data: data}
	m.Encode(&out.Header)
	out.Header.SetStatSN(p.statSN)
	out.Header.SetWindow(p.exp, p.max)
	if advance {
		p.statSN++
	}
	_ = p.c.Send(out) // the initiator may be gone: the test sees it there
}

// login answers one login request.
func (p *peer) login(in *PDU, keys pdu.Pairs) {
	var req pdu.LoginRequest
	if in == nil || req.Decode(&in.Header) != nil {
		p.t.Errorf("peer: not a login request")
		return
	}
	rsp := pdu.LoginResponse{Transit: req.Transit, CSG: req.CSG, NSG: req.NSG, ISID: req.ISID, ITT: req.ITT}
	if rsp.Transit && rsp.NSG == pdu.StageFullFeature {
		rsp.TSIH = 7
	}
	p.send(&rsp, keys.Append(nil), true)
}

// loginAll answers a login without authentication.
func (p *peer) loginAll(operational pdu.Pairs) {
	p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "AuthMethod", Value: "None"}, {Key: "TargetPortalGroupTag", Value: "3"}})
	p.login(p.expect(pdu.OpLoginRequest), operational)
}

// finish answers a logout, if one comes.
func (p *peer) finish() {
	for in := p.next(); in != nil; in = p.next() {
		if in.Header.Opcode() == pdu.OpLogoutRequest {
			p.send(&pdu.LogoutResponse{ITT: in.Header.ITT()}, nil, true)
			return
		}
	}
}

func peerOptions(portal string) Options {
	return Options{Portal: portal, InitiatorName: testInitiator, TargetName: "iqn.2026-01.com.example:peer", PingInterval: -1}
}

var readCDB = []byte{0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0}

func TestLoginNegotiation(t *testing.T) {
	portal := listen(t, func(p *peer) {
		p.loginAll(pdu.Pairs{
			{Key: "HeaderDigest", Value: "None"}, {Key: "DataDigest", Value: "None"}, {Key: "InitialR2T", Value: "Yes"}, {Key: "ImmediateData", Value: "No"},
			{Key: "MaxBurstLength", Value: "0x4000"}, {Key: "FirstBurstLength", Value: "8192"}, {Key: "MaxOutstandingR2T", Value: "2"},
			{Key: "MaxRecvDataSegmentLength", Value: "65536"}, {Key: "DefaultTime2Wait", Value: "5"}, {Key: "DefaultTime2Retain", Value: "0"},
			{Key: "TargetAlias", Value: "a peer"}, {Key: "ErrorRecoveryLevel", Value: "0"}, {Key: "MaxConnections", Value: "1"},
			{Key: "DataPDUInOrder", Value: "Yes"}, {Key: "DataSequenceInOrder", Value: "Irrelevant"},
		})
		p.finish()
	})
	s := mustDial(t, peerOptions(portal))
	want := Parameters{InitialR2T: true, MaxRecv: 262144, MaxSend: 65536, MaxBurst: 16384, FirstBurst: 8192, MaxOutstandingR2T: 2, MaxConnections: 1,
		Time2Wait: 5, ProtocolLevel: 1, PortalGroup: 3, TargetAlias: "a peer"}
	if got := s.Parameters(); got != want {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	if s.TSIH() != 7 {
		t.Errorf("TSIH %d", s.TSIH())
	}
	if err := s.Logout(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := s.Execute(testContext(t), 0, readCDB, nil, make([]byte, 4096)); !errors.Is(err, ErrClosed) {
		t.Errorf("after the logout: %v", err)
	}
}

// The target makes offers of its own, in text that spans two responses, before it lets the initiator on.
func TestLoginTargetOffers(t *testing.T) {
	answers := make(chan pdu.Pairs, 1)
	portal := listen(t, func(p *peer) {
		p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "AuthMethod", Value: "None"}})
		in := p.expect(pdu.OpLoginRequest)
		var req pdu.LoginRequest
		if in == nil || req.Decode(&in.Header) != nil {
			return
		}
		stay := pdu.LoginResponse{CSG: pdu.StageOperational, ISID: req.ISID, ITT: req.ITT}
		text := (pdu.Pairs{{Key: "TaskReporting", Value: "FastAbort,RFC3720"}, {Key: "X-com.example.new", Value: "1"}, {Key: "OFMarker", Value: "No"}}).Append(nil)
		stay.Continue = true
		p.send(&stay, text[:20], true)
		if in = p.expect(pdu.OpLoginRequest); in == nil || len(in.Data) != 0 {
			p.t.Errorf("peer: text in a request for the rest: %q", in.Data)
		}
		stay.Continue = false
		p.send(&stay, text[20:], true)
		in = p.expect(pdu.OpLoginRequest)
		if in == nil {
			return
		}
		got, err := pdu.ParseText(in.Data)
		if err != nil {
			p.t.Error(err)
		}
		answers <- got
		p.login(in, nil)
		p.finish()
	})
	mustDial(t, peerOptions(portal))
	got := <-answers
	for key, want := range map[string]string{"TaskReporting": "RFC3720", "X-com.example.new": pdu.ValueNotUnderstood, "OFMarker": pdu.ValueReject} {
		if v, _ := got.Get(key); v != want {
			t.Errorf("%s answered with %q, want %q", key, v, want)
		}
	}
}

func TestLoginRefused(t *testing.T) {
	away := listen(t, func(p *peer) {
		p.loginAll(nil)
		p.finish()
	})
	portal := listen(t, func(p *peer) {
		in := p.expect(pdu.OpLoginRequest)
		if in == nil {
			return
		}
		rsp := pdu.LoginResponse{ITT: in.Header.ITT(), Status: pdu.LoginMovedTemporarily}
		if keys, err := pdu.ParseText(in.Data); err == nil {
			if name, _ := keys.Get("TargetName"); strings.HasSuffix(name, "missing") {
				rsp.Status = pdu.LoginNotFound
			}
		}
		p.send(&rsp, pdu.AppendPair(nil, "TargetAddress", away), true)
	})
	if s := mustDial(t, peerOptions(portal)); s.Err() != nil {
		t.Error(s.Err())
	}
	o := peerOptions(portal)
	o.TargetName += "-missing"
	var refused *LoginError
	if _, err := Dial(testContext(t), o); !errors.As(err, &refused) || refused.Status != pdu.LoginNotFound {
		t.Errorf("%v", err)
	}
}

func TestLoginViolations(t *testing.T) {
	first := func(p *peer) (*PDU, pdu.LoginResponse) {
		in := p.expect(pdu.OpLoginRequest)
		var req pdu.LoginRequest
		if in == nil || req.Decode(&in.Header) != nil {
			return nil, pdu.LoginResponse{}
		}
		return in, pdu.LoginResponse{Transit: req.Transit, CSG: req.CSG, NSG: req.NSG, ISID: req.ISID, ITT: req.ITT}
	}
	for name, script := range map[string]func(*peer){
		"other ITT":   func(p *peer) { _, r := first(p); r.ITT++; p.send(&r, nil, true) },
		"other ISID":  func(p *peer) { _, r := first(p); r.ISID[3]++; p.send(&r, nil, true) },
		"other stage": func(p *peer) { _, r := first(p); r.CSG, r.Transit = pdu.StageOperational, false; p.send(&r, nil, true) },
		"too far":     func(p *peer) { _, r := first(p); r.NSG = pdu.StageFullFeature; p.send(&r, nil, true) },
		"other PDU":   func(p *peer) { first(p); p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}, nil, true) },
		"bad text":    func(p *peer) { _, r := first(p); p.send(&r, []byte("AuthMethod"), true) },
		"duplicate":   func(p *peer) { _, r := first(p); p.send(&r, []byte("AuthMethod=None\x00AuthMethod=None\x00"), true) },
		"too much":    func(p *peer) { _, r := first(p); p.send(&r, make([]byte, 9000), true) },
		"no TSIH": func(p *peer) {
			p.login(p.expect(pdu.OpLoginRequest), nil)
			_, r := first(p)
			p.send(&r, nil, true)
		},
		"StatSN": func(p *peer) {
			p.login(p.expect(pdu.OpLoginRequest), nil)
			p.statSN++
			p.login(p.expect(pdu.OpLoginRequest), nil)
		},
		"unoffered digest": func(p *peer) { p.loginAll(pdu.Pairs{{Key: "HeaderDigest", Value: "CRC32C"}}) },
		"above the offer":  func(p *peer) { p.loginAll(pdu.Pairs{{Key: "MaxBurstLength", Value: "16777215"}}) },
		"not a number":     func(p *peer) { p.loginAll(pdu.Pairs{{Key: "FirstBurstLength", Value: "many"}}) },
		"bad segment":      func(p *peer) { p.loginAll(pdu.Pairs{{Key: "MaxRecvDataSegmentLength", Value: "1"}}) },
		"endless": func(p *peer) {
			for in := p.next(); in != nil; in = p.next() {
				var req pdu.LoginRequest
				if err := req.Decode(&in.Header); err != nil {
					p.t.Error(err)
				}
				p.send(&pdu.LoginResponse{CSG: req.CSG, ISID: req.ISID, ITT: req.ITT}, nil, true)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := Dial(testContext(t), peerOptions(listen(t, script)))
			if !errors.Is(err, ErrProtocol) {
				t.Errorf("%v, %v", s, err)
			}
		})
	}
}

func TestLoginTimeout(t *testing.T) {
	release := make(chan struct{})
	portal := listen(t, func(p *peer) { <-release })
	defer close(release)
	ctx, cancel := context.WithCancel(context.Background())
	o := peerOptions(portal)
	o.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		cancel() // once connected, the caller loses patience
		return c, err
	}
	if _, err := Dial(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// chapPeer is a target that authenticates both ways; secret is what it proves to know.
func chapPeer(p *peer, secret string, check bool) {
	p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "AuthMethod", Value: "CHAP"}})
	if p.expectKeys()["CHAP_A"] != "5" {
		p.t.Error("peer: CHAP_A")
	}
	p.loginLast(pdu.Pairs{{Key: "CHAP_A", Value: "5"}, {Key: "CHAP_I", Value: "9"}, {Key: "CHAP_C", Value: "0bAQIDBA=="}})
	keys := p.expectKeys()
	sum := md5.Sum([]byte("\x09forward-secret\x01\x02\x03\x04"))
	if keys["CHAP_N"] != "me" || keys["CHAP_R"] != pdu.FormatHex(sum[:]) {
		p.t.Errorf("peer: %v", keys)
	}
	var answer pdu.Pairs
	if check {
		id, err := pdu.ParseNumber(keys["CHAP_I"], 0, 255)
		challenge, err2 := pdu.ParseBinary(keys["CHAP_C"], 1024)
		if err := errors.Join(err, err2); err != nil {
			p.t.Error(err)
		}
		r := md5.Sum(fmt.Appendf([]byte{byte(id)}, "%s%s", secret, challenge))
		answer = pdu.Pairs{{Key: "CHAP_N", Value: "target"}, {Key: "CHAP_R", Value: pdu.FormatHex(r[:])}}
	}
	p.loginLast(answer)
	if in := p.next(); in != nil {
		p.login(in, nil)
		p.finish()
	}
}

// expectKeys receives a login request and keeps it for loginLast.
func (p *peer) expectKeys() map[string]string {
	in := p.expect(pdu.OpLoginRequest)
	out := map[string]string{}
	if in == nil {
		return out
	}
	keys, err := pdu.ParseText(in.Data)
	if err != nil {
		p.t.Error(err)
	}
	for _, k := range keys {
		out[k.Key] = k.Value
	}
	p.last = in
	return out
}

func (p *peer) loginLast(keys pdu.Pairs) {
	p.login(p.last, keys)
	p.last = nil
}

func TestMutualCHAP(t *testing.T) {
	o := peerOptions("")
	o.CHAP = &CHAP{User: "me", Secret: "forward-secret", TargetUser: "target", TargetSecret: "reverse-secret", Algorithms: []CHAPAlgorithm{CHAPMD5}}
	o.Portal = listen(t, func(p *peer) { chapPeer(p, "reverse-secret", true) })
	mustDial(t, o)
	for name, script := range map[string]func(*peer){
		"wrong secret": func(p *peer) { chapPeer(p, "forward-secret", true) },
		"no proof":     func(p *peer) { chapPeer(p, "", false) },
		"no CHAP":      func(p *peer) { p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "AuthMethod", Value: "None"}}) },
		"nothing":      func(p *peer) { p.login(p.expect(pdu.OpLoginRequest), nil) },
		"other hash": func(p *peer) {
			p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "AuthMethod", Value: "CHAP"}})
			p.login(p.expect(pdu.OpLoginRequest), pdu.Pairs{{Key: "CHAP_A", Value: "7"}, {Key: "CHAP_I", Value: "1"}, {Key: "CHAP_C", Value: "0x01"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			o.Portal = listen(t, script)
			if _, err := Dial(testContext(t), o); !errors.Is(err, ErrAuth) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestCHAPHashes(t *testing.T) {
	for a, want := range map[CHAPAlgorithm]int{CHAPMD5: 16, CHAPSHA1: 20, CHAPSHA256: 32, CHAPSHA3_256: 32} {
		if r := a.response(1, "secret", []byte{2}); len(r) != want {
			t.Errorf("algorithm %d: %d bytes", a, len(r))
		}
	}
	for _, c := range []CHAP{{}, {User: "u", Secret: "s", TargetSecret: "s"}, {User: "u", Secret: "s", Algorithms: []CHAPAlgorithm{9}}} {
		if c.validate() == nil {
			t.Errorf("%+v is valid", c)
		}
	}
}
