package iser

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// ISER-30, section 9: what is written is what the standard draws, and is read again; what is not valid is 0 and ignored.
func TestHeader(t *testing.T) {
	for _, c := range []struct {
		h    controlHeader
		want string
	}{
		{controlHeader{}, "10000000 00000000 0000000000000000 00000000 0000000000000000"},
		{controlHeader{writeValid: true, writeTag: 0x11223344, writeBase: 0x5566778899aabbcc}, "18000000 11223344 5566778899aabbcc 00000000 0000000000000000"},
		{controlHeader{readValid: true, readTag: 0x11223344, readBase: 0xff66778899aabbcc}, "14000000 00000000 0000000000000000 11223344 ff66778899aabbcc"},
		{controlHeader{true, true, 1, 2, 3, 4}, "1c000000 00000001 0000000000000003 00000002 0000000000000004"},
	} {
		var b [headerLen]byte
		c.h.encode(&b)
		want, _ := hex.DecodeString(string(bytes.ReplaceAll([]byte(c.want), []byte(" "), nil)))
		if !bytes.Equal(b[:], want) {
			t.Errorf("%+v: %x, want %x", c.h, b, want)
		}
		var got controlHeader
		got.decode(&b)
		if got != c.h {
			t.Errorf("%x: %+v, want %+v", b, got, c.h)
		}
	}
	var got controlHeader
	dirty := [headerLen]byte{0x13, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27}
	if got.decode(&dirty); got != (controlHeader{}) || opcodeOf(&dirty) != opControl {
		t.Errorf("ISER-30: %+v", got)
	}
}

// ISER-20 to 23: Hello and HelloReply, and the policy for versions.
func TestHello(t *testing.T) {
	var b [headerLen]byte
	m := hello{maxVer: 10, minVer: 1, ird: 0x1234}
	m.encode(&b)
	if want := (append([]byte{0x20, 0xa1, 0x12, 0x34}, make([]byte, 24)...)); !bytes.Equal(b[:], want) {
		t.Errorf("%x", b)
	}
	var m2 hello
	if m2.decode(&b); m2 != m {
		t.Errorf("%+v", m2)
	}
	r := helloReply{reject: true, maxVer: 10, curVer: 1, ord: 7}
	r.encode(&b)
	if want := (append([]byte{0x31, 0xa1, 0, 7}, make([]byte, 24)...)); !bytes.Equal(b[:], want) {
		t.Errorf("%x", b)
	}
	var r2 helloReply
	if r2.decode(&b); r2 != r {
		t.Errorf("%+v", r2)
	}
	for _, c := range []struct {
		m    hello
		ord  int
		want helloReply
	}{
		{hello{10, 10, 4}, 32, helloReply{false, 10, 10, 4}},
		{hello{10, 1, 64}, 32, helloReply{false, 10, 10, 32}},
		{hello{1, 1, 64}, 32, helloReply{false, 10, 1, 32}},
		{hello{9, 2, 64}, 32, helloReply{true, 10, 10, 32}},
		{hello{15, 11, 64}, 32, helloReply{true, 10, 10, 32}},
		{hello{1, 10, 64}, 32, helloReply{true, 10, 10, 32}}, // an empty range
		{hello{10, 10, 1}, 0, helloReply{true, 10, 10, 0}},
		{hello{10, 10, 0}, 0, helloReply{false, 10, 10, 0}},
	} {
		if got := c.m.answer(c.ord); got != c.want {
			t.Errorf("ISER-23: %+v, ORD %d: %+v, want %+v", c.m, c.ord, got, c.want)
		}
	}
}

// Section 1.2: what private data of a request means.
func TestPeerFlags(t *testing.T) {
	for _, c := range []struct {
		n     int
		b     []byte
		flags byte
		bad   bool
	}{
		{n: 0, flags: 0xc0},
		{n: 1, bad: true}, {n: 3, bad: true},
		{b: []byte{0x80, 0, 0, 0}, flags: 0x80},
		{b: []byte{0xc0, 0, 0, 0}, flags: 0xc0},
		{b: []byte{0, 9, 9, 9}, flags: 0}, // reserved: ignored
		{n: 56, flags: 0},                 // padded with zeros by the transport
		{n: 508, flags: 0},
		{b: append(make([]byte, 55), 1), bad: true},
	} {
		b := c.b
		if b == nil {
			b = make([]byte, c.n)
		}
		flags, err := peerFlags(b)
		if errors.Is(err, errPrivateData) != c.bad || !c.bad && flags != c.flags {
			t.Errorf("%x: %#x, %v", b, flags, err)
		}
	}
}

// ISER-62 to 64, 24: what an initiator is not asked for is bounded.
func TestUnexpectedPDUs(t *testing.T) {
	async := func() *iscsi.PDU {
		p := new(iscsi.PDU)
		(&pdu.Async{Event: pdu.AsyncLogoutRequest}).Encode(&p.Header)
		return p
	}
	ping := func(ttt pdu.TaskTag) *iscsi.PDU {
		p := new(iscsi.PDU)
		(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: ttt}).Encode(&p.Header)
		return p
	}
	stat := pdu.Serial(100)
	var u unexpected
	send := func(p *iscsi.PDU) bool {
		if !u.admit(p) {
			return false
		}
		p.Header.SetStatSN(stat)
		if p.Header.Opcode() == pdu.OpAsync {
			stat = stat.Next()
		}
		u.sent(&p.Header)
		return true
	}
	hear := func(exp pdu.Serial, pong pdu.TaskTag) {
		p := pdu.NopOut{Immediate: true, ITT: pdu.ReservedTag, TTT: pong, ExpStatSN: exp}
		if pong == pdu.ReservedTag {
			p.ITT = 1
		}
		var h pdu.Header
		p.Encode(&h)
		u.heard(&h)
	}
	for _, c := range []struct {
		name     string
		declared bool
		value    uint32
		asyncs   int // that fit, before the last place
	}{{"not declared", false, 0, 3}, {"2", true, 2, 1}, {"5", true, 5, 4}} {
		u.init(&iscsi.Parameters{RDMAExtensions: true, UnexpectedPDUsDeclared: c.declared, MaxOutstandingUnexpectedPDUs: c.value})
		if send(async()) {
			t.Errorf("ISER-24: %s: sent before the initiator spoke", c.name)
		}
		hear(stat, pdu.ReservedTag)
		for i := range c.asyncs {
			if !send(async()) {
				t.Errorf("ISER-63: %s: %d fit, want %d", c.name, i, c.asyncs)
			}
		}
		if send(async()) || send(ping(pdu.ReservedTag)) {
			t.Errorf("ISER-64: %s: the last place is taken by no ping", c.name)
		}
		if !send(ping(7)) || send(ping(8)) {
			t.Errorf("ISER-64: %s: the last place is for one ping", c.name)
		}
		hear(stat.Add(int32(-c.asyncs)), 7) // answers the ping, acknowledges nothing
		if send(async()) || !send(ping(9)) {
			t.Errorf("ISER-63: %s: the answered ping makes room for one", c.name)
		}
		hear(stat, 9) // acknowledges all Asynchronous Messages, too
		if !send(async()) {
			t.Errorf("ISER-63: %s: acknowledged, and no room", c.name)
		}
	}
	u.init(&iscsi.Parameters{RDMAExtensions: true, UnexpectedPDUsDeclared: true})
	hear(stat, pdu.ReservedTag)
	for range 100 {
		if !send(async()) {
			t.Fatal("section 4: 0 is no limit")
		}
	}
	u.init(&iscsi.Parameters{})
	for range 100 {
		if !send(async()) {
			t.Fatal("limited in a session without RDMAExtensions")
		}
	}
	response := new(iscsi.PDU)
	(&pdu.NopIn{ITT: 5, TTT: pdu.ReservedTag}).Encode(&response.Header)
	u.init(&iscsi.Parameters{RDMAExtensions: true, UnexpectedPDUsDeclared: true, MaxOutstandingUnexpectedPDUs: 2})
	if !u.admit(response) {
		t.Error("an answer counts as unexpected")
	}
}

func TestReceives(t *testing.T) {
	p := iscsi.Parameters{RDMAExtensions: true, CommandWindow: 128, InitialR2T: true, TargetRecvDataSegmentLength: 8192, FirstBurstLength: 65536}
	if n := receives(&p); n < 128+immediates || n > DefaultReceives {
		t.Errorf("ISER-61: %d receives", n)
	}
	p.InitialR2T = false
	if n := receives(&p); n < (128+immediates)*9 {
		t.Errorf("ISER-61: %d receives with 8 Data-Outs for each command", n)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		count, size := 1+rnd.IntN(3000), 1+rnd.IntN(20000)
		if got := slabBytes(count, size); got < int64(count*size) {
			t.Fatalf("%d buffers of %d bytes in %d", count, size, got)
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(make([]byte, headerLen))
	f.Add([]byte{0x1c, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24})
	f.Add([]byte{0x20, 0xa1, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		peerFlags(in)
		if len(in) < headerLen {
			return
		}
		b := (*[headerLen]byte)(in)
		var out [headerLen]byte
		switch opcodeOf(b) {
		case opControl:
			var h, h2 controlHeader
			h.decode(b)
			h.encode(&out)
			if h2.decode(&out); h != h2 {
				t.Errorf("%x: %+v, then %+v", b, h, h2)
			}
		case opHello:
			var h, h2 hello
			h.decode(b)
			h.encode(&out)
			if h2.decode(&out); h != h2 {
				t.Errorf("%x: %+v, then %+v", b, h, h2)
			}
			if r := h.answer(8); !r.reject && (r.curVer < h.minVer || r.curVer > h.maxVer || r.ord > h.ird) {
				t.Errorf("%+v: %+v", h, r)
			}
		case opHelloReply:
			var h, h2 helloReply
			h.decode(b)
			h.encode(&out)
			if h2.decode(&out); h != h2 {
				t.Errorf("%x: %+v, then %+v", b, h, h2)
			}
		}
	})
}
