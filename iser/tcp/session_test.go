package tcp_test

import (
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

// ISCSI-2, ISCSI-1 and the table of RFC 7143, 6.3.1.
func TestSessionTable(t *testing.T) {
	t.Run("new ISID and TSIH 0: a new session", func(t *testing.T) {
		r := newRig(t)
		a, b := r.login(), r.dial()
		b.isid[5] = 7
		b.login()
		if a.tsih == 0 || b.tsih == 0 || a.tsih == b.tsih {
			t.Errorf("TSIH %d and %d", a.tsih, b.tsih)
		}
		a.tur()
		b.tur()
	})
	t.Run("unknown TSIH: 020a", func(t *testing.T) {
		c := newRig(t).dial()
		c.tsih = 77
		if s := c.tryLogin().Status; s != pdu.LoginNoSession {
			t.Error(s)
		}
		c.closed() // ISCSI-12
	})
	t.Run("existing ISID with another TSIH: 020a", func(t *testing.T) {
		r := newRig(t)
		a, c := r.login(), r.dial()
		c.tsih = a.tsih + 1
		if s := c.tryLogin().Status; s != pdu.LoginNoSession {
			t.Error(s)
		}
		a.tur()
	})
	t.Run("existing ISID and TSIH 0: session reinstatement", func(t *testing.T) {
		r := newRig(t)
		old := r.ready()
		c := r.login()
		old.closed()
		// ISCSI-83: the nexus was lost.
		if res := c.run(make([]byte, 6), 0, nil); res.key() != [3]byte{6, 0x29, 7} {
			t.Errorf("status %#x, sense %x", res.status, res.sense)
		}
		if s := r.srv.Sessions(); len(s) != 1 || s[0].TSIH != c.tsih {
			t.Errorf("%+v", s)
		}
	})
	t.Run("another target is another nexus", func(t *testing.T) {
		r := newRig(t)
		a := r.ready()
		b := r.login("TargetName=" + secondTarget)
		b.tur()
		a.tur()
		a.ping()
		b.ping()
	})
	t.Run("new CID: a connection more; too many: 0206", func(t *testing.T) {
		r := newRig(t)
		a := r.ready("MaxConnections=2")
		b := r.dial()
		b.tsih, b.cid, b.cmdSN = a.tsih, 1, a.cmdSN
		b.login()
		if s := r.srv.Sessions(); len(s) != 1 || len(s[0].Connections) != 2 {
			t.Errorf("%+v", s)
		}
		c := r.dial()
		c.tsih, c.cid = a.tsih, 2
		if s := c.tryLogin().Status; s != pdu.LoginTooManyConnections {
			t.Error(s)
		}
		a.good(make([]byte, 6), 0, nil)
		b.cmdSN = a.cmdSN
		b.good(make([]byte, 6), 0, nil)
	})
	t.Run("ISCSI-92 MaxConnections=1: 0206", func(t *testing.T) {
		r := newRig(t)
		a, b := r.login(), r.dial()
		b.tsih, b.cid = a.tsih, 1
		if s := b.tryLogin().Status; s != pdu.LoginTooManyConnections {
			t.Error(s)
		}
	})
	t.Run("existing CID: connection reinstatement", func(t *testing.T) {
		r := newRig(t)
		a := r.ready()
		b := r.dial()
		b.tsih, b.cmdSN = a.tsih, a.cmdSN
		b.login()
		a.closed()
		b.good(make([]byte, 6), 0, nil) // no unit attention: the nexus lives on
	})
	t.Run("ISCSI-83 a session outlives its connection for Time2Retain", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.Time2Retain = time.Hour })
		a := r.ready("DefaultTime2Retain=100")
		a.c.Close()
		await(t, "the connection is gone", func() bool { return len(r.srv.Sessions()[0].Connections) == 0 })
		b := r.dial()
		b.tsih, b.cmdSN = a.tsih, a.cmdSN
		b.login()
		b.good(make([]byte, 6), 0, nil)
	})
	t.Run("ISCSI-83 and not without", func(t *testing.T) {
		r := newRig(t)
		r.ready("DefaultTime2Retain=0").c.Close()
		await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
	})
}

// The same nexus logs in from many connections at once: one session is left, and it works.
func TestReinstatementRace(t *testing.T) {
	r := newRig(t)
	g := r.gate(scsitest.OpRead)
	first := r.ready()
	first.command(read16(0, 1), 512, nil, 0)
	<-g.entered // a command of the first session is in progress
	var wg sync.WaitGroup
	var mu sync.Mutex
	var won []*client
	for range 16 {
		c := r.dial()
		wg.Go(func() {
			c.t = silent{t}
			var h pdu.Header
			req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: c.isid, ITT: 1}
			req.Encode(&h)
			text := "InitiatorName=" + initiatorName + "\x00TargetName=" + targetName + "\x00"
			h.SetDataLength(len(text))
			c.c.Write(append(append(h[:], text...), make([]byte, pdu.Padding(len(text)))...))
			rh, _, err := c.tryRead()
			if err == nil && rh[36] == 0 {
				mu.Lock()
				won = append(won, c)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	first.closed()
	if len(won) == 0 {
		t.Fatal("nobody logged in")
	}
	await(t, "one session is left", func() bool { return len(r.srv.Sessions()) == 1 })
	c := r.login()
	c.run(make([]byte, 6), 0, nil)
	c.ping()
}

// silent drops what a client that is expected to fail complains about.
type silent struct{ testing.TB }

func (silent) Errorf(string, ...any) {}

// A session is not replaced before its commands have ended: a write of the old one cannot come after one of the new.
func TestReinstatementWaits(t *testing.T) {
	r := newRig(t, func(r *rig, o *iscsi.Options) { o.LoginTimeout = 50 * time.Millisecond; r.checked = true })
	stuck := make(chan struct{})
	entered := make(chan struct{}, 1)
	r.medium.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
		if op == scsitest.OpCommit {
			entered <- struct{}{}
			<-stuck // deaf to its context, as a disk that hangs
		}
		return nil
	}
	a := r.ready()
	a.command(write16(0, 1), 0, pattern(1, 512), 512)
	<-entered
	b := r.dial()
	if s := b.tryLogin().Status; s != pdu.LoginServiceUnavailable {
		t.Errorf("status %v while a command of the old session runs", s)
	}
	close(stuck)
	await(t, "the old session ends", func() bool { return len(r.srv.Sessions()) == 0 })
	r.login().tur()
}

// ISCSI-30, ISCSI-32: CHAP against a server, both directions.
func TestCHAPLogin(t *testing.T) {
	r := newRig(t, func(r *rig, _ *iscsi.Options) {
		r.chap = &iscsi.CHAP{User: "joe", Secret: []byte("a secret of joe"), MutualUser: "disk", MutualSecret: []byte("a secret of disk")}
	})
	response := func(id byte, secret string, c []byte) string {
		s := md5.Sum(append(append([]byte{id}, secret...), c...))
		return pdu.FormatHex(s[:])
	}
	login := func(secret string) (pdu.LoginStatus, pdu.Pairs, *client) {
		c := r.dial()
		step := func(transit bool, keys ...string) (pdu.LoginResponse, pdu.Pairs) {
			var h pdu.Header
			req := pdu.LoginRequest{Transit: transit, CSG: pdu.StageSecurity, NSG: pdu.StageFullFeature, ISID: c.isid, ITT: 3, CmdSN: c.cmdSN}
			req.Encode(&h)
			c.write(&h, []byte(strings.Join(keys, "\x00")+"\x00"))
			rh, data := c.read()
			var resp pdu.LoginResponse
			if err := resp.Decode(&rh); err != nil {
				t.Fatal(err)
			}
			p, _ := pdu.ParseText(data)
			c.stat = resp.StatSN.Next()
			return resp, p
		}
		step(false, "InitiatorName="+initiatorName, "TargetName="+targetName, "AuthMethod=CHAP")
		_, p := step(false, "CHAP_A=5")
		v, _ := p.Get("CHAP_C")
		challenge, _ := pdu.ParseBinary(v, 1024)
		v, _ = p.Get("CHAP_I")
		id, _ := pdu.ParseNumber(v, 0, 255)
		resp, p := step(true, "CHAP_N=joe", "CHAP_R="+response(byte(id), secret, challenge), "CHAP_I=9", "CHAP_C=0x00112233445566778899aabbccddeeff")
		return resp.Status, p, c
	}
	status, p, c := login("a secret of joe")
	if v, _ := p.Get("CHAP_R"); status != pdu.LoginSuccess || v != response(9, "a secret of disk", []byte{0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}) {
		t.Fatalf("%v %v", status, p)
	}
	c.tur()
	if status, _, c = login("a secret of jim"); status != pdu.LoginAuthFailure {
		t.Error(status)
	}
	c.closed()
}

// ISCSI-13 over the wire, and ISCSI-16: what comes before login.
func TestBeforeLogin(t *testing.T) {
	t.Run("another PDU first", func(t *testing.T) {
		c := newRig(t).dial()
		var h pdu.Header
		(&pdu.NopOut{Immediate: true, ITT: 1, TTT: pdu.ReservedTag}).Encode(&h)
		c.write(&h, nil)
		if _, _, err := c.tryRead(); err == nil {
			t.Error("it was answered")
		}
	})
	t.Run("another PDU during login: 020b", func(t *testing.T) {
		c := newRig(t).dial()
		var h pdu.Header
		(&pdu.LoginRequest{CSG: pdu.StageOperational, ITT: 1}).Encode(&h)
		c.write(&h, []byte("InitiatorName="+initiatorName+"\x00TargetName="+targetName+"\x00"))
		c.read()
		(&pdu.NopOut{Immediate: true, ITT: 1, TTT: pdu.ReservedTag}).Encode(&h)
		c.write(&h, nil)
		rh, _ := c.read()
		var resp pdu.LoginResponse
		if err := resp.Decode(&rh); err != nil || resp.Status != pdu.LoginInvalidRequest {
			t.Error(resp.Status, err)
		}
		c.closed()
	})
	t.Run("a data segment above 8192", func(t *testing.T) {
		c := newRig(t).dial()
		var h pdu.Header
		(&pdu.LoginRequest{CSG: pdu.StageOperational, ITT: 1}).Encode(&h)
		h.SetDataLength(8193)
		c.c.Write(h[:])
		c.closed()
	})
	t.Run("slow loris", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.LoginTimeout = 50 * time.Millisecond })
		silent, slow := r.dial(), r.dial()
		var h pdu.Header
		(&pdu.LoginRequest{CSG: pdu.StageOperational, ITT: 1}).Encode(&h)
		slow.c.Write(h[:20])
		silent.closed()
		slow.closed()
	})
	t.Run("limits", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.MaxLoginsPerAddress = 2 })
		a, b := r.dial(), r.dial()
		c := r.dial()
		// The third is closed at once, whichever of them that is.
		type gone struct{ i int }
		ch := make(chan gone, 3)
		for i, c := range []*client{a, b, c} {
			go func() { c.c.Read(make([]byte, 1)); ch <- gone{i} }()
		}
		g := <-ch
		if g.i != 2 {
			t.Logf("connection %d was refused", g.i)
		}
	})
	t.Run("a login makes room", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.MaxLoginsPerAddress = 1 })
		for i := range 5 {
			c := r.dial()
			c.isid[5] = byte(i)
			c.login()
			c.tur()
		}
	})
}

// The window is cut to what the memory for unsolicited data allows; when nothing is left, logins fail with 0302.
func TestStagingBudget(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) { o.StagingBytes = 3 << 20 })
	a := r.login("FirstBurstLength=65536", "InitialR2T=No")
	if got := a.max - a.cmdSN + 1; got != 48-17 {
		t.Errorf("window of %d commands", got)
	}
	b := r.dial()
	b.isid[5] = 2
	if s := b.tryLogin("FirstBurstLength=65536").Status; s != pdu.LoginOutOfResources {
		t.Error(s)
	}
	c := r.dial()
	c.isid[5] = 3
	c.login("InitialR2T=Yes", "ImmediateData=No") // needs none
	if got := c.max - c.cmdSN + 1; got != 128 {
		t.Errorf("window of %d commands", got)
	}
	a.logout(pdu.CloseSession, 0)
	a.closed()
	await(t, "the memory is free", func() bool { return len(r.srv.Sessions()) == 1 })
	d := r.dial()
	d.isid[5] = 4
	d.login()
}

// ISCSI-75.
func TestLogout(t *testing.T) {
	t.Run("session", func(t *testing.T) {
		r := newRig(t)
		c := r.ready()
		if l := c.logout(pdu.CloseSession, 0); l.Response != pdu.LogoutOK {
			t.Error(l.Response)
		}
		c.closed()
		await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
	})
	t.Run("with a command in progress", func(t *testing.T) {
		r := newRig(t)
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		c.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		if l := c.logout(pdu.CloseConnection, 0); l.Response != pdu.LogoutOK {
			t.Error(l.Response)
		}
		c.closed()
	})
	t.Run("unknown CID", func(t *testing.T) {
		c := newRig(t).ready()
		if l := c.logout(pdu.CloseConnection, 5); l.Response != pdu.LogoutCIDNotFound {
			t.Error(l.Response)
		}
		c.ping()
	})
	t.Run("recovery", func(t *testing.T) {
		c := newRig(t).ready()
		if l := c.logout(pdu.RemoveForRecovery, 0); l.Response != pdu.LogoutNoRecovery {
			t.Error(l.Response)
		}
		c.ping()
	})
	t.Run("another connection of the session", func(t *testing.T) {
		r := newRig(t)
		a := r.ready("MaxConnections=2")
		b := r.dial()
		b.tsih, b.cid, b.cmdSN = a.tsih, 1, a.cmdSN
		b.login()
		if l := a.logout(pdu.CloseConnection, 1); l.Response != pdu.LogoutOK {
			t.Error(l.Response)
		}
		b.closed()
		a.good(make([]byte, 6), 0, nil)
	})
}

// ISCSI-40, ISCSI-41: CmdSN within one connection.
func TestCommandWindow(t *testing.T) {
	t.Run("outside and twice: dropped", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.QueueDepth = 4 })
		c := r.ready()
		for _, sn := range []pdu.Serial{c.cmdSN - 1, c.cmdSN + 4, c.cmdSN + 1<<30, c.cmdSN - 1<<30} {
			c.command(make([]byte, 6), 0, nil, 0, func(p *pdu.SCSICommand) { p.CmdSN = sn })
			c.cmdSN--
		}
		c.command(write16(0, 1), 0, pattern(1, 512), 512, func(p *pdu.SCSICommand) { p.CmdSN += 100 })
		c.cmdSN--
		c.ping()
		c.good(make([]byte, 6), 0, nil)
	})
	t.Run("ISCSI-43 the tag of a task in progress", func(t *testing.T) {
		r := newRig(t)
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		itt := c.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		c.command(read16(0, 1), 512, nil, 0, func(p *pdu.SCSICommand) { p.ITT, p.CmdSN = itt, p.CmdSN-1 }) // a retry
		c.cmdSN--
		c.ping()
		c.command(read16(0, 1), 512, nil, 0, func(p *pdu.SCSICommand) { p.ITT = itt })
		c.cmdSN--
		c.reject(pdu.RejectTaskInProgress)
		close(g.open)
		if res := c.finish(itt, nil); res.status != scsi.Good {
			t.Error(res.status)
		}
		c.good(make([]byte, 6), 0, nil)
	})
	t.Run("the window closes and opens", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.QueueDepth = 2 })
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		a, b := c.command(read16(0, 1), 512, nil, 0), c.command(read16(1, 1), 512, nil, 0)
		<-g.entered
		<-g.entered
		c.ping()
		if c.max != c.cmdSN-1 {
			t.Errorf("MaxCmdSN %d, next CmdSN %d", c.max, c.cmdSN)
		}
		close(g.open)
		for range 2 {
			h := c.status()
			if h.ITT() != a && h.ITT() != b {
				t.Error(h.String())
			}
		}
		if c.max != c.cmdSN+1 {
			t.Errorf("MaxCmdSN %d, next CmdSN %d", c.max, c.cmdSN)
		}
	})
	t.Run("ISCSI-45 the window opens without a response", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.QueueDepth = 1 })
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		itt := c.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		f := c.manage(pdu.AbortTask, itt)
		opened := false
		for {
			h, _ := c.read()
			opened = opened || !h.MaxCmdSN().Before(c.cmdSN)
			if h.Opcode() == pdu.OpTaskResponse && h.ITT() == f {
				break
			}
		}
		if !opened {
			t.Error("the window stayed closed")
		}
	})
	t.Run("ISCSI-42 immediate commands", func(t *testing.T) {
		r := newRig(t)
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		immediate := func(p *pdu.SCSICommand) { p.Immediate = true }
		for range 16 {
			c.command(read16(0, 1), 512, nil, 0, immediate)
			c.cmdSN--
			<-g.entered
		}
		c.command(read16(0, 1), 512, nil, 0, immediate)
		c.cmdSN--
		c.reject(pdu.RejectTooManyImmediate)
		close(g.open)
		for range 16 {
			if h := c.status(); h.ExpCmdSN() != c.cmdSN {
				t.Error("an immediate command advanced CmdSN")
			}
		}
		itt := c.command(make([]byte, 6), 0, nil, 0, immediate)
		c.cmdSN--
		c.finish(itt, nil)
	})
}

// ISCSI-41, ISCSI-46: CmdSN order across the connections of a session.
func TestMultipleConnections(t *testing.T) {
	setup := func(t *testing.T) (*rig, *client, *client) {
		r := newRig(t)
		a := r.ready("MaxConnections=2", "DefaultTime2Retain=0")
		b := r.dial()
		b.tsih, b.cid, b.cmdSN = a.tsih, 1, a.cmdSN
		b.login()
		return r, a, b
	}
	t.Run("order", func(t *testing.T) {
		_, a, b := setup(t)
		base := a.cmdSN
		// The later command comes first: it waits, and its answer comes on its own connection.
		second := b.command(write16(0, 1), 0, pattern(2, 512), 512, func(p *pdu.SCSICommand) { p.CmdSN = base + 1; p.Attr = pdu.AttrOrdered })
		b.ping()
		first := a.command(write16(0, 1), 0, pattern(1, 512), 512, func(p *pdu.SCSICommand) { p.CmdSN = base; p.Attr = pdu.AttrOrdered })
		if res := a.finish(first, nil); res.status != scsi.Good {
			t.Error(res.status)
		}
		if res := b.finish(second, nil); res.status != scsi.Good {
			t.Error(res.status)
		}
		a.cmdSN = base + 2
		if res := a.good(read16(0, 1), 512, nil); string(res.data) != string(pattern(2, 512)) {
			t.Error("the writes took effect in the wrong order")
		}
	})
	t.Run("ISCSI-62 a function waits for commands before it", func(t *testing.T) {
		_, a, b := setup(t)
		base := a.cmdSN
		f := b.manage(pdu.AbortTaskSet, pdu.ReservedTag, func(p *pdu.TaskRequest) { p.CmdSN = base + 1 })
		b.ping()
		itt := a.command(read16(0, 1), 512, nil, 0, func(p *pdu.SCSICommand) { p.CmdSN = base })
		// Either the command was aborted and has no answer, or it was over before.
		if res := b.managed(f); res.Response != pdu.FunctionComplete {
			t.Error(res.Response)
		}
		n := pdu.NopOut{Immediate: true, ITT: a.tag(), TTT: pdu.ReservedTag, CmdSN: base + 1}
		var h pdu.Header
		n.Encode(&h)
		a.write(&h, nil)
		if rh, _ := a.read(); rh.ITT() != n.ITT && rh.ITT() != itt {
			t.Error(rh.String())
		}
	})
	t.Run("ISCSI-76, ISCSI-84 one connection is lost", func(t *testing.T) {
		r, a, b := setup(t)
		g := r.gate(scsitest.OpRead)
		b.cmdSN = a.cmdSN
		b.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		a.cmdSN++
		b.command(read16(0, 1), 512, nil, 0, func(p *pdu.SCSICommand) { p.CmdSN += 100 }) // waits for others
		b.ping()
		b.c.Close()
		await(t, "the connection is gone", func() bool { return len(r.srv.Sessions()[0].Connections) == 1 })
		var res result
		await(t, "the unit attention", func() bool {
			res = a.run(make([]byte, 6), 0, nil)
			return res.status == scsi.CheckCondition
		})
		if res.key() != [3]byte{6, 0x47, 0x7f} {
			t.Errorf("sense %x", res.sense)
		}
		a.good(make([]byte, 6), 0, nil)
	})
	t.Run("the last connection ends the session", func(t *testing.T) {
		r, a, b := setup(t)
		a.c.Close()
		b.ping()
		b.c.Close()
		await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
	})
}

// ISCSI-80: a format error ends the session.
func TestFormatErrors(t *testing.T) {
	for name, h := range map[string]func(h *pdu.Header){
		"R and W 0 with a length": func(h *pdu.Header) {
			(&pdu.SCSICommand{Final: true, EDTL: 5, ITT: 1}).Encode(h)
		},
		"reserved attribute":   func(h *pdu.Header) { (&pdu.SCSICommand{Final: true, Attr: 7, ITT: 1}).Encode(h) },
		"reserved task tag":    func(h *pdu.Header) { (&pdu.SCSICommand{Final: true, ITT: pdu.ReservedTag}).Encode(h) },
		"a target's PDU":       func(h *pdu.Header) { (&pdu.R2T{ITT: 1}).Encode(h) },
		"text with F and C":    func(h *pdu.Header) { (&pdu.TextRequest{Final: true, Continue: true, ITT: 1}).Encode(h) },
		"ping without the bit": func(h *pdu.Header) { (&pdu.NopOut{ITT: pdu.ReservedTag}).Encode(h) },
		"segment too long":     func(h *pdu.Header) { (&pdu.NopOut{ITT: 5}).Encode(h); h.SetDataLength(262145) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c := r.ready()
			var hd pdu.Header
			h(&hd)
			c.c.Write(hd[:])
			c.closed()
			await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
		})
	}
}

// ISCSI-78, ISCSI-79, ISER-16: what is rejected while the session lives on.
func TestRejects(t *testing.T) {
	c := newRig(t).ready()
	var h pdu.Header
	(&pdu.Snack{ITT: 1}).Encode(&h)
	c.write(&h, nil)
	c.reject(pdu.RejectProtocolError)
	(&pdu.LoginRequest{ITT: 1}).Encode(&h)
	c.write(&h, nil)
	c.reject(pdu.RejectProtocolError)
	h = pdu.Header{0x1c | 0x40, 0x80}
	c.write(&h, []byte("vendor"))
	if bad := c.reject(pdu.RejectNotSupported); bad[0] != 0x5c {
		t.Errorf("header %x", bad)
	}
	c.ping()
}

// ISCSI-71, ISCSI-85: pings of the target, and dead peers.
func TestDeadPeer(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) {
		o.PingInterval, o.PingTimeout = 20*time.Millisecond, 200*time.Millisecond
	})
	c := r.ready("DefaultTime2Retain=0")
	for range 3 {
		h, _ := c.read()
		var p pdu.NopIn
		if err := p.Decode(&h); err != nil || p.ITT != pdu.ReservedTag || p.TTT == pdu.ReservedTag {
			t.Fatalf("%v: %v", h.String(), err)
		}
		answer := pdu.NopOut{Immediate: true, LUN: p.LUN, ITT: pdu.ReservedTag, TTT: p.TTT, CmdSN: c.cmdSN, ExpStatSN: c.stat}
		answer.Encode(&h)
		c.write(&h, nil)
	}
	c.closed() // it does not answer any more
	await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
}

func TestShutdown(t *testing.T) {
	t.Run("waits for commands, and asks for a logout", func(t *testing.T) {
		r := newRig(t)
		g := r.gate(scsitest.OpCommit)
		c := r.ready()
		itt := c.command(write16(0, 1), 0, pattern(1, 512), 512)
		<-g.entered
		done := make(chan error, 1)
		go func() { done <- r.srv.Shutdown(context.Background()) }()
		h, _ := c.read()
		var a pdu.Async
		if err := a.Decode(&h); err != nil || a.Event != pdu.AsyncLogoutRequest || a.Param3 == 0 { // ISCSI-77
			t.Errorf("%+v %v", a, err)
		}
		close(g.open)
		if res := c.finish(itt, nil); res.status != scsi.Good {
			t.Error(res.status)
		}
		if h, _ := c.read(); h.Opcode() != pdu.OpAsync || h[36] != byte(pdu.AsyncDropSession) {
			t.Error(h.String())
		}
		c.closed()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := r.srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	t.Run("aborts commands when the time is over", func(t *testing.T) {
		r := newRig(t)
		g := r.gate(scsitest.OpRead)
		c := r.ready()
		c.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if err := r.srv.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		c.closed()
	})
	t.Run("an initiator that logs out", func(t *testing.T) {
		r := newRig(t, func(_ *rig, o *iscsi.Options) { o.LogoutWait = time.Hour })
		c := r.ready()
		done := make(chan error, 1)
		go func() { done <- r.srv.Shutdown(context.Background()) }()
		if h, _ := c.read(); h.Opcode() != pdu.OpAsync {
			t.Fatal(h.String())
		}
		c.logout(pdu.CloseSession, 0)
		c.closed()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestKick(t *testing.T) {
	r := newRig(t)
	c := r.ready()
	if err := r.srv.Kick(context.Background(), c.tsih+1); !errors.Is(err, iscsi.ErrNoSession) {
		t.Error(err)
	}
	if err := r.srv.Kick(context.Background(), c.tsih); err != nil {
		t.Error(err)
	}
	if h, _ := c.read(); h.Opcode() != pdu.OpAsync || h[36] != byte(pdu.AsyncDropSession) {
		t.Error(h.String())
	}
	c.closed()
	if len(r.srv.Sessions()) != 0 {
		t.Error("the session is still there")
	}
	c = r.ready()
	if err := r.srv.DropInitiator(context.Background(), initiatorName, secondTarget); err != nil {
		t.Error(err)
	}
	c.ping()
	if err := r.srv.DropTarget(context.Background(), targetName); err != nil {
		t.Error(err)
	}
	c.read()
	c.closed()
}

// lingering are connections whose graceful close takes as long as the test wants, as those of initiators that do not read.
type lingering struct {
	iscsi.Listener
	closing chan struct{} // one close has begun
	open    chan struct{} // closed: they end
}

type lingeringConn struct {
	iscsi.Datamover
	l *lingering
}

func (l *lingering) Accept() (iscsi.Datamover, error) {
	dm, err := l.Listener.Accept()
	return &lingeringConn{dm, l}, err
}

func (c *lingeringConn) Close(graceful bool) error {
	if graceful {
		c.l.closing <- struct{}{}
		<-c.l.open
	}
	return c.Datamover.Close(graceful)
}

// Sessions that are to end do not wait for each other, and who ends them waits no longer than he wants.
func TestDropDoesNotWait(t *testing.T) {
	const sessions = 3
	for _, how := range []func(r *rig, ctx context.Context, tsih []uint16) error{
		func(r *rig, ctx context.Context, _ []uint16) error { return r.srv.DropTarget(ctx, targetName) },
		func(r *rig, ctx context.Context, _ []uint16) error {
			return r.srv.DropInitiator(ctx, initiatorName, targetName)
		},
		func(r *rig, ctx context.Context, tsih []uint16) (err error) {
			for _, n := range tsih {
				err = r.srv.Kick(ctx, n)
			}
			return err
		},
	} {
		r := newRig(t)
		nl, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l := &lingering{Listener: tcp.NewListener(nl), closing: make(chan struct{}, sessions), open: make(chan struct{})}
		served := make(chan error, 1)
		go func() { served <- r.srv.Serve(l, iscsi.Portal{}) }()
		r.addr = nl.Addr().String()
		var tsih []uint16
		for i := range sessions {
			c := r.dial()
			c.isid[5] = byte(i)
			c.login()
			tsih = append(tsih, c.tsih)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := how(r, ctx, tsih); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		for range sessions {
			<-l.closing
		}
		close(l.open)
		await(t, "the sessions end", func() bool { return len(r.srv.Sessions()) == 0 })
		l.Listener.Close()
		<-served
	}
}

func TestSessions(t *testing.T) {
	r := newRig(t)
	c := r.ready("HeaderDigest=CRC32C", "InitiatorAlias=me")
	c.good(read16(0, 1), 512, nil)
	c.good(write16(0, 1), 0, pattern(1, 512))
	s := r.srv.Sessions()
	if len(s) != 1 {
		t.Fatal(len(s))
	}
	got := fmt.Sprint(s[0].Initiator, s[0].Target, s[0].ISID, s[0].TSIH == c.tsih, s[0].Transport, s[0].Discovery, s[0].Reads, s[0].Writes, s[0].Keys["HeaderDigest"],
		s[0].Alias, len(s[0].Connections), s[0].Connections[0].Remote == c.c.LocalAddr().String(), s[0].PortalGroup)
	want := fmt.Sprint(initiatorName, targetName, c.isid, true, "tcp", false, 1, 1, "CRC32C", "me", 1, true, 1)
	if got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

// Discovery sessions need no authorization: there are few of them, and silent ones end.
func TestDiscoveryLimits(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) {
		o.MaxSessions, o.PingInterval, o.PingTimeout = 8, 20*time.Millisecond, 20*time.Millisecond
	})
	var all []*client
	for i := range 3 {
		c := r.dial()
		c.isid[5] = byte(i)
		if s := c.tryLogin("SessionType=Discovery").Status; s != pdu.LoginSuccess && i < 2 || s == pdu.LoginSuccess && i == 2 && len(r.srv.Sessions()) > 2 {
			t.Errorf("%d: %v", i, s)
		}
		all = append(all, c)
	}
	for _, c := range all {
		if h, _, err := c.tryRead(); err == nil {
			t.Errorf("%v in a discovery session", h.Opcode())
		}
	}
}

// An initiator that does not read what it asked for is dropped when too much piles up.
func TestPeerThatDoesNotRead(t *testing.T) {
	r := newRig(t)
	c := r.ready("DefaultTime2Retain=0")
	var h pdu.Header
	(&pdu.NopOut{Immediate: true, ITT: 5, TTT: pdu.ReservedTag, CmdSN: c.cmdSN}).Encode(&h)
	h.SetDataLength(8192)
	ping := append(h[:], make([]byte, 8192)...)
	c.c.SetWriteDeadline(time.Now().Add(patience))
	for range 100000 {
		if _, err := c.c.Write(ping); err != nil {
			break
		}
	}
	await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
}
