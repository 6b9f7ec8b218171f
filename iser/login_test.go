package iser_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// Section 1.2: private data of any length, and what the flags in the answer say.
func TestPrivateData(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		private []byte
		none    bool
		want    byte // of the reply; 0: rejected
	}{
		{none: true, want: 0xc0},
		{private: []byte{0x80, 0, 0, 0}, want: 0x80},
		{private: []byte{0xc0, 0, 0, 0}, want: 0xc0},
		{private: []byte{0x00, 0, 0, 0}, want: 0x80},
		{private: []byte{0x80}},
		{private: []byte{0x80, 0, 0}},
		{private: append([]byte{0x80, 0, 0, 0}, make([]byte, 504)...), want: 0x80},
		{private: bytes.Repeat([]byte{0xff}, 508)},
	} {
		cl, err := r.tryDial(dialing{private: c.private, noPrivate: c.none})
		var rejected *rdma.RejectedError
		switch {
		case c.want == 0:
			if !errors.As(err, &rejected) || !bytes.Equal(rejected.Peer.PrivateData, []byte{0xc0, 0, 0, 0}) {
				t.Errorf("%d bytes: %v", len(c.private), err)
			}
		case err != nil:
			t.Errorf("%d bytes: %v", len(c.private), err)
		case !bytes.Equal(cl.reply.PrivateData, []byte{c.want, 0, 0, 0}):
			t.Errorf("%d bytes: answered %x, want %#x", len(c.private), cl.reply.PrivateData, c.want)
		default:
			cl.login()
			cl.ping()
			cl.logout()
		}
	}
}

// Section 6 and 4: what open-iscsi offers over iSER, in its order, and what it is answered. It fails a login with a key that it does not know.
func TestKeysOfOpenISCSI(t *testing.T) {
	r := newRig(t)
	c := r.dial(dialing{}).login()
	want := map[string]string{
		"TargetPortalGroupTag": "1", "DefaultTime2Wait": "2", "DefaultTime2Retain": "0", "IFMarker": "No", "OFMarker": "No", "ErrorRecoveryLevel": "0",
		"InitialR2T": "Yes", "ImmediateData": "Yes", "MaxBurstLength": "1048576", "FirstBurstLength": "65536", "MaxOutstandingR2T": "1", "MaxConnections": "1",
		"DataPDUInOrder": "Yes", "DataSequenceInOrder": "Yes", "InitiatorRecvDataSegmentLength": "262144", "TargetRecvDataSegmentLength": "8192", "RDMAExtensions": "Yes",
	}
	for _, kv := range c.keys {
		if want[kv.Key] != kv.Value {
			t.Errorf("ISER-R10, R13, 6, 8: %s=%s, want %q", kv.Key, kv.Value, want[kv.Key])
		}
		delete(want, kv.Key)
	}
	for k := range want {
		t.Errorf("ISER-9: no answer to %s", k)
	}
	infos := r.srv.Sessions()
	if len(infos) != 1 || infos[0].Transport != "iser" || infos[0].Keys["RDMAExtensions"] != "Yes" {
		t.Errorf("sessions %+v", infos)
	}
}

// Section 4: the keys of iSER, one by one.
func TestKeys(t *testing.T) {
	r := newRig(t)
	base := []string{"RDMAExtensions=Yes"}
	for _, c := range []struct {
		keys []string
		want string // an answer, or "-KEY" for none
	}{
		{[]string{"HeaderDigest=CRC32C,None"}, "HeaderDigest=None"},
		{[]string{"DataDigest=CRC32C"}, "DataDigest=None"},
		{[]string{"MaxRecvDataSegmentLength=65536"}, "-MaxRecvDataSegmentLength"},
		{[]string{"IFMarkInt=2048~8192"}, "IFMarkInt=Reject"},
		{[]string{"OFMarkInt=2048~8192"}, "OFMarkInt=Reject"},
		{[]string{"TargetRecvDataSegmentLength=512"}, "TargetRecvDataSegmentLength=512"},
		{[]string{"TargetRecvDataSegmentLength=1048576"}, "TargetRecvDataSegmentLength=8192"},
		{[]string{"TargetRecvDataSegmentLength=511"}, "TargetRecvDataSegmentLength=Reject"},
		{[]string{"InitiatorRecvDataSegmentLength=512"}, "InitiatorRecvDataSegmentLength=512"},
		{[]string{"InitiatorRecvDataSegmentLength=16777216"}, "InitiatorRecvDataSegmentLength=Reject"},
		{[]string{"MaxOutstandingUnexpectedPDUs=8"}, "-MaxOutstandingUnexpectedPDUs"},
		{[]string{"MaxOutstandingUnexpectedPDUs=1"}, "MaxOutstandingUnexpectedPDUs=Reject"},
		{[]string{"MaxAHSLength=0"}, "-MaxAHSLength"},
		{[]string{"MaxAHSLength=1"}, "MaxAHSLength=Reject"},
		{[]string{"TaggedBufferForSolicitedDataOnly=Yes"}, "-TaggedBufferForSolicitedDataOnly"},
		{[]string{"TaggedBufferForSolicitedDataOnly=Maybe"}, "TaggedBufferForSolicitedDataOnly=Reject"},
		{[]string{"iSERHelloRequired=No"}, "-iSERHelloRequired"},
	} {
		for _, keys := range [][]string{append(c.keys, base...), append(base, c.keys...)} { // ISER-R14
			cl := r.dial(dialing{}).login(keys...)
			key, value, _ := strings.Cut(c.want, "=")
			key, none := strings.CutPrefix(key, "-")
			if got, has := cl.keys.Get(key); has == none || got != value {
				t.Errorf("ISER-9: %v: answered %q, want %q", keys, got, c.want)
			}
			cl.logout()
			cl.closed()
		}
	}
}

// ISER-1, D2: without RDMAExtensions=Yes there is nothing to go on with.
func TestLoginWithoutRDMAExtensions(t *testing.T) {
	r := newRig(t)
	for _, keys := range [][]string{{"SessionType=Normal"}, {"RDMAExtensions=No"}, {"HeaderDigest=CRC32C,None", "DataDigest=CRC32C,None"}} {
		c := r.dial(dialing{})
		if resp := c.tryLogin(keys...); resp.Status.Class() == 0 {
			t.Errorf("ISER-D2: %v: %v", keys, resp.Status)
		}
		c.closed() // ISER-17
	}
	if n := len(r.srv.Sessions()); n != 0 {
		t.Errorf("%d sessions", n)
	}
}

// ISER-3, D3: discovery in messages, as Linux does it; it just closes afterwards. ISER-6: no digests.
func TestDiscovery(t *testing.T) {
	r := newRig(t)
	keys := []string{"SessionType=Discovery", "HeaderDigest=CRC32C,None", "DataDigest=None", "MaxRecvDataSegmentLength=8192", "DefaultTime2Wait=0", "IFMarker=No"}
	c := r.dial(dialing{recvs: 1}).login(keys...)
	for _, k := range []string{"HeaderDigest", "DataDigest"} {
		if v, _ := c.keys.Get(k); v != "None" {
			t.Errorf("ISER-6: %s=%s", k, v)
		}
	}
	for _, k := range []string{"RDMAExtensions", "MaxRecvDataSegmentLength", "TargetRecvDataSegmentLength"} {
		if v, has := c.keys.Get(k); has {
			t.Errorf("ISER-3, R10: %s=%s", k, v)
		}
	}
	p := pdu.TextRequest{Final: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.sn(), ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(head{}, &h, []byte("SendTargets=All\x00"))
	in := c.read()
	if text := string(in.data); in.h.Opcode() != pdu.OpTextResponse || text != "TargetName="+targetName+"\x00TargetAddress="+r.addr+",1\x00" {
		t.Errorf("ISER-D3: %v: %q", in.h.Opcode(), text)
	}
	c.qp.Close()
	await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })

	if c := r.dial(dialing{}).login("SessionType=Discovery", "RDMAExtensions=Yes"); true {
		if v, _ := c.keys.Get("RDMAExtensions"); v != "Irrelevant" {
			t.Errorf("ISER-3: RDMAExtensions=%s", v)
		}
		// A SCSI Command has no place there.
		c.itt++
		var h pdu.Header
		(&pdu.SCSICommand{Final: true, ITT: 7, CmdSN: c.sn(), Attr: pdu.AttrSimple}).Encode(&h)
		c.write(head{}, &h, nil)
		if in := c.read(); in.h.Opcode() != pdu.OpReject {
			t.Errorf("%v", in.h.Opcode())
		}
		c.logout()
		c.closed()
	}
}

// ISER-10, 11, 80: the memory of full feature phase is taken after authentication, and before the final Login Response; ISER-13, 17.
func TestMemoryComesAfterAuthentication(t *testing.T) {
	r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) {
		r.chap = &iscsi.CHAP{User: "user", Secret: []byte("secretsecret12")}
	})
	before := r.target.Usage().UsedBytes
	c := r.dial(dialing{})
	text := "InitiatorName=" + initiatorName + "\x00TargetName=" + targetName + "\x00AuthMethod=CHAP\x00"
	req := pdu.LoginRequest{CSG: pdu.StageSecurity, NSG: pdu.StageOperational, ISID: c.isid, ITT: 0x10, CmdSN: c.cmdSN}
	var h pdu.Header
	req.Encode(&h)
	c.write(head{}, &h, []byte(text))
	in := c.read()
	var resp pdu.LoginResponse
	if err := resp.Decode(&in.h); err != nil || resp.Status != pdu.LoginSuccess {
		t.Fatalf("%v: %v", in.h.Opcode(), err)
	}
	login := r.target.Usage().UsedBytes - before
	if login <= 0 || login > 64<<10 {
		t.Errorf("ISER-11: %d bytes for a connection that has not logged in", login)
	}
	// It may not skip what is asked of it.
	req.Transit, req.CSG, req.NSG = true, pdu.StageSecurity, pdu.StageFullFeature
	req.Encode(&h)
	c.write(head{}, &h, nil)
	in = c.read()
	if err := resp.Decode(&in.h); err != nil || resp.Transit && resp.NSG == pdu.StageFullFeature {
		t.Errorf("logged in: %v", err)
	}
	if got := r.target.Usage().UsedBytes - before; got > login {
		t.Errorf("ISER-80: %d bytes", got)
	}
	c.qp.Close()
	await(t, "memory is given back", func() bool { return r.target.Usage().UsedBytes == before })
}

// ISER-13: who finds no memory is told so, and others are not harmed.
func TestOutOfMemory(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options, _ *iser.Options) { o.MaxConnections = 1 })
	var sessions []*client
	for i := 0; ; i++ {
		c := r.dial(dialing{recvs: 4})
		c.isid[5] = byte(i)
		resp := c.tryLogin(normalKeys...)
		if resp.Status == pdu.LoginOutOfResources {
			c.closed()
			break
		}
		if resp.Status != pdu.LoginSuccess || i > 30 {
			t.Fatalf("login %d: %v", i, resp.Status)
		}
		sessions = append(sessions, c)
	}
	if len(sessions) < 4 {
		t.Errorf("%d sessions fit", len(sessions))
	}
	await(t, "the failed login leaves", func() bool { return len(r.srv.Sessions()) == len(sessions) })
	for _, c := range sessions {
		c.ping()
	}
	sessions[0].logout()
	sessions[0].closed()
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections < len(sessions) })
	c := r.dial(dialing{recvs: 4})
	c.isid[5] = 77
	c.login()
	c.ping()

	// Connections that only begin take a share, and no more.
	refused := 0
	for range 400 {
		if _, err := r.tryDial(dialing{recvs: 1}); err != nil {
			var rejected *rdma.RejectedError
			if !errors.As(err, &rejected) {
				t.Fatal(err)
			}
			refused++
			break
		}
	}
	c.ping()
	if refused == 0 {
		t.Error("400 connections that only begin were all taken")
	}
}

// A window larger than what may be posted is refused, not cut (ISER-R8).
func TestWindowTooLarge(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options, _ *iser.Options) { o.QueueDepth = 1000 })
	c := r.dial(dialing{})
	if resp := c.tryLogin(normalKeys...); resp.Status != pdu.LoginOutOfResources {
		t.Errorf("ISER-R8: %v", resp.Status)
	}
	c.closed()
}

// ISER-R8: whatever the initiator may send at once finds a receive.
func TestWholeWindowAtOnce(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options, _ *iser.Options) { o.QueueDepth = 128 })
	c := r.dial(dialing{recvs: 200}).login()
	c.run(make([]byte, 6), 0, nil)
	var cmds []sent
	n := int(int32(c.max-c.cmdSN)) + 1
	if n != 128 {
		t.Errorf("window of %d", n)
	}
	for i := range n {
		cmds = append(cmds, c.command(write16(i*16, 16), 0, pattern(i, 8192), 8192))
	}
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	for range 8 {
		p.ITT = c.tag()
		var h pdu.Header
		p.Encode(&h)
		c.write(head{}, &h, nil)
	}
	got := map[pdu.TaskTag]bool{}
	for range n + 8 {
		in := c.read()
		got[in.h.ITT()] = true
	}
	for _, s := range cmds {
		if !got[s.itt] {
			t.Fatalf("no answer to %#x", s.itt)
		}
	}
	if want := pattern(127, 8192); !bytes.Equal(r.medium.Bytes()[127*8192:][:8192], want) {
		t.Error("the last write is not there")
	}
}

// ISER-5, 6: a further connection is one of iSER without negotiating again.
func TestSecondConnection(t *testing.T) {
	r := newRig(t)
	keys := make([]string, 0, len(normalKeys))
	for _, k := range normalKeys {
		if k != "MaxConnections=1" {
			keys = append(keys, k)
		}
	}
	first := r.dial(dialing{}).login(append(keys, "MaxConnections=2")...)
	first.run(make([]byte, 6), 0, nil)
	for _, again := range []bool{false, true} {
		c := r.dial(dialing{})
		c.isid, c.tsih, c.cid, c.cmdSN = first.isid, first.tsih, 1, first.cmdSN
		more := []string{"InitiatorRecvDataSegmentLength=4096", "HeaderDigest=CRC32C"}
		if again {
			more = append(more, "RDMAExtensions=Yes")
		}
		c.login(more...)
		if v, _ := c.keys.Get("HeaderDigest"); v != "None" {
			t.Errorf("ISER-6: HeaderDigest=%s", v)
		}
		if v, has := c.keys.Get("RDMAExtensions"); has != again || again && v != "Reject" {
			t.Errorf("ISER-5: RDMAExtensions=%q", v)
		}
		want := pattern(9, 65536)
		c.good(write16(0, 128), 0, want)
		first.cmdSN = c.cmdSN
		if got := first.good(read16(0, 128), 65536, nil); !bytes.Equal(got.data, want) {
			t.Error("read something else")
		}
		c.qp.Close()
		await(t, "the connection is gone", func() bool { return len(r.srv.Sessions()[0].Connections) == 1 })
	}
}

// Any revision and model of MPA that a peer may ask for (IWARP-15 to 17), and depths (ISER-18, 19, R7).
func TestWaysToConnect(t *testing.T) {
	for _, crc := range []bool{true, false} {
		r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) { r.iwarp.NoCRC = !crc })
		for _, o := range []iwarp.Options{
			{}, {NoCRC: true}, {Revision: 1}, {PeerToPeer: true, RTR: iwarp.RTRWrite}, {PeerToPeer: true, RTR: iwarp.RTRRead}, {PeerToPeer: true, RTR: iwarp.RTRSend},
			{MaxULPDU: 512},
		} {
			t.Run(fmt.Sprintf("crc=%v/%+v", crc, o), func(t *testing.T) {
				for _, ird := range []int{1, 3, 128} {
					c := r.ready(dialing{iwarp: o, ird: ird})
					want := pattern(ird, 1<<18)
					c.good(write16(0, 512), 0, want)
					if got := c.good(read16(0, 512), len(want), nil); !bytes.Equal(got.data, want) {
						t.Error("read something else")
					}
					c.logout()
					c.closed()
				}
			})
		}
	}
}

// ISER-37, R7: an initiator that serves no Reads is served until a write needs one.
func TestNoReadsServed(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{ird: -1})
	c.good(write16(0, 16), 0, pattern(1, 8192))
	c.good(read16(0, 16), 8192, nil)
	c.command(write16(0, 32), 0, pattern(1, 16384), 8192)
	c.closed()
}
