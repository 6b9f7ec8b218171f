package initiator

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// The keys of both session types, and what the session takes from the answers (ISER-1, 3, 4, 6, 8).
func TestISERLogin(t *testing.T) {
	requests := make(chan pdu.Pairs, 8)
	o := iserOptions(listenISER(t, accept{}, func(p *iserPeer) {
		p.login(p.expect(pdu.OpLoginRequest), nil)
		in := p.expect(pdu.OpLoginRequest)
		if in == nil {
			return
		}
		keys, err := pdu.ParseText(in.Data)
		if err != nil {
			p.t.Error(err)
		}
		requests <- keys
		answers := iserKeys(pdu.Pair{Key: "MaxOutstandingUnexpectedPDUs", Value: "7"}, pdu.Pair{Key: "MaxAHSLength", Value: "0"})
		if _, ok := keys.Get("RDMAExtensions"); !ok {
			answers = nil
		}
		p.login(in, answers)
		p.finish()
	}))
	o.HeaderDigest = DigestRequired // has no meaning
	o.ISER.WriteBase, o.ISER.RecvSegment, o.ISER.SendSegment = WriteBaseAll, 10000, 8192
	s := mustDial(t, o)
	if p := s.Parameters(); !p.ISER || p.HeaderDigest || p.MaxRecv != 8192 || p.MaxSend != 8192 || p.TargetUnexpected != 7 || p.TargetMaxAHS != 0 {
		t.Errorf("%+v", p)
	}
	got := <-requests
	if got[0] != (pdu.Pair{Key: "RDMAExtensions", Value: "Yes"}) {
		t.Errorf("%v is first", got[0])
	}
	for key, want := range map[string]string{
		"InitiatorRecvDataSegmentLength": "10000", "TargetRecvDataSegmentLength": "8192", "MaxOutstandingUnexpectedPDUs": "16",
		"TaggedBufferForSolicitedDataOnly": "No", "HeaderDigest": "", "DataDigest": "", "MaxRecvDataSegmentLength": "", "iSERHelloRequired": "",
	} {
		if v, _ := got.Get(key); v != want {
			t.Errorf("%s=%q, want %q", key, v, want)
		}
	}
	if err := s.Logout(testContext(t)); err != nil {
		t.Error(err)
	}
	if err := s.Err(); !errors.Is(err, ErrClosed) {
		t.Errorf("after the logout: %v", err)
	}
	o.TargetName = ""
	s, err := dial(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	s.Kill()
	for _, k := range <-requests {
		switch k.Key {
		case "HeaderDigest", "DataDigest":
			if k.Value != "None" {
				t.Errorf("%+v in a discovery session", k)
			}
		case "MaxRecvDataSegmentLength":
			if k.Value != "8192" {
				t.Errorf("%+v in a discovery session", k)
			}
		case "DefaultTime2Wait", "DefaultTime2Retain", "ErrorRecoveryLevel":
		default:
			t.Errorf("%+v in a discovery session", k)
		}
	}
}

// What the connection request says, and what its answer may say.
func TestISERConnect(t *testing.T) {
	asked := make(chan rdma.ConnParams, 1)
	portal := listenISER(t, accept{private: []byte{cmNotZeroBased | cmNoInvalidate, 0, 0, 0}}, func(p *iserPeer) {
		asked <- p.m.peer
		p.loginAll(iserKeys())
		if in := p.next(); in != nil {
			p.m.invalidate = p.m.readKey
			p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true)
			p.next()
		}
	})
	o := iserOptions(portal)
	o.QueueDepth = 20
	s := mustDial(t, o)
	if a := <-asked; !bytes.Equal(a.PrivateData, []byte{0x80, 0, 0, 0}) || a.IRD != 20 || a.ORD != 1 {
		t.Errorf("%+v", a)
	}
	// The answer said that it would not be done.
	if _, err := s.Execute(testContext(t), 0, readCDB, nil, make([]byte, 4096)); !errors.Is(err, ErrProtocol) {
		t.Errorf("an invalidation that was not agreed on: %v", err)
	}
	o.ISER = &ISER{NoInvalidate: true, IRD: 3}
	if s, err := Dial(testContext(t), o); err != nil {
		t.Error(err)
	} else {
		s.Kill()
	}
	if a := <-asked; !bytes.Equal(a.PrivateData, []byte{0xc0, 0, 0, 0}) || a.IRD != 3 {
		t.Errorf("%+v", a)
	}
	o.ISER = &ISER{}
	o.Portal = listenISER(t, accept{reject: true}, nil)
	var rejected *rdma.RejectedError
	if _, err := Dial(testContext(t), o); !errors.As(err, &rejected) {
		t.Errorf("a rejection: %v", err)
	}
}

// A login that the target breaks off, or does not agree to.
func TestISERLoginFails(t *testing.T) {
	for name, test := range map[string]struct {
		script func(*iserPeer)
		want   error
	}{
		"RDMAExtensions=No": {func(p *iserPeer) { p.loginAll(pdu.Pairs{{Key: "RDMAExtensions", Value: "No"}}); p.finish() }, ErrNoISER},
		"no answer":         {func(p *iserPeer) { p.loginAll(nil); p.finish() }, ErrNoISER},
		"closed at once":    {func(p *iserPeer) { p.expect(pdu.OpLoginRequest) }, ErrConnection},
		"above the offer": {func(p *iserPeer) {
			p.loginAll(append(iserKeys()[:2:2], pdu.Pair{Key: "TargetRecvDataSegmentLength", Value: "9000"}))
		}, ErrProtocol},
		"a limit of 1": {func(p *iserPeer) { p.loginAll(iserKeys(pdu.Pair{Key: "MaxOutstandingUnexpectedPDUs", Value: "1"})) }, ErrProtocol},
		"no PDU":       {func(p *iserPeer) { p.expect(pdu.OpLoginRequest); _ = p.m.message(make([]byte, 76)); p.next() }, ErrProtocol},
		"too short":    {func(p *iserPeer) { p.expect(pdu.OpLoginRequest); _ = p.m.message([]byte{0x10, 0}); p.next() }, ErrProtocol},
		"too long":     {func(p *iserPeer) { p.expect(pdu.OpLoginRequest); _ = p.m.message(make([]byte, 60000)) }, rdma.ErrTransport},
		"an RDMA Write": {func(p *iserPeer) {
			p.expect(pdu.OpLoginRequest)
			_ = p.m.write(1, 2, []byte{3})
			p.next()
		}, ErrProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			if s, err := Dial(testContext(t), iserOptions(listenISER(t, accept{}, test.script))); !errors.Is(err, test.want) {
				t.Errorf("%v, %v", s, err)
			}
		})
	}
	// Patience ends.
	ctx, cancel := context.WithCancel(context.Background())
	o := iserOptions(listenISER(t, accept{}, func(p *iserPeer) {
		p.expect(pdu.OpLoginRequest)
		cancel()
		p.next()
	}))
	if _, err := Dial(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A target that looks at the first message only when something comes behind it is made to look.
func TestISERNudge(t *testing.T) {
	reads := make(chan struct{}, 1000)
	o := iserOptions(listenISER(t, accept{reads: reads}, func(p *iserPeer) {
		in := p.expect(pdu.OpLoginRequest)
		for len(reads) > 0 {
			<-reads
		}
		<-reads
		p.login(in, nil)
		p.login(p.expect(pdu.OpLoginRequest), iserKeys())
		p.finish()
	}))
	mustDial(t, o)
}

func TestISERHello(t *testing.T) {
	hello := func(version byte, ord uint16, flags byte) []byte {
		b := make([]byte, 28)
		b[0], b[1] = 0x30|flags, 10<<4|version
		binary.BigEndian.PutUint16(b[2:], ord)
		return b
	}
	for name, test := range map[string]struct {
		reply []byte
		ok    bool
	}{
		"agreed":      {hello(10, 5, 0), true},
		"old version": {hello(1, 0, 0), true},
		"rejected":    {hello(10, 5, 1), false},
		"version":     {hello(3, 5, 0), false},
		"ORD":         {hello(10, 6, 0), false},
		"short":       {hello(10, 5, 0)[:27], false},
		"long":        {append(hello(10, 5, 0), 0), false},
		"a Hello":     {append([]byte{0x20}, hello(10, 5, 0)[1:]...), false},
	} {
		t.Run(name, func(t *testing.T) {
			o := iserOptions(listenISER(t, accept{}, func(p *iserPeer) {
				p.login(p.expect(pdu.OpLoginRequest), nil)
				if p.expectKeys()["iSERHelloRequired"] != "Yes" {
					p.t.Error("peer: no iSERHelloRequired=Yes")
				}
				p.loginLast(iserKeys())
				if in, err := p.c.Receive(); err == nil || !bytes.Equal(p.m.raw, []byte{0x20, 0xaa, 0, 5, 27: 0}) {
					p.t.Errorf("peer: %+v, % x is no Hello", in, p.m.raw)
				}
				_ = p.m.message(test.reply)
				p.finish()
			}))
			o.ISER.Hello, o.ISER.IRD = true, 5
			s, err := Dial(testContext(t), o)
			if test.ok != (err == nil) || err != nil && !errors.Is(err, ErrProtocol) {
				t.Errorf("%v", err)
			}
			if s != nil {
				s.Close()
			}
		})
	}
}

// Every shape of a write: what is immediate, what is unsolicited, what the target reads, and from where (ISER-32, 34, R1).
func TestISERWriteShapes(t *testing.T) {
	for _, test := range []struct {
		name                  string
		size                  int
		initialR2T, immediate string
		first                 string
		immediateLen, unsol   int // unsol includes what is immediate
	}{
		{"all", 30002, "No", "Yes", "20000", 4096, 20000},
		{"immediate", 30002, "Yes", "Yes", "20000", 4096, 4096},
		{"unsolicited", 30002, "No", "No", "20000", 0, 20000},
		{"solicited", 30002, "Yes", "No", "20000", 0, 0},
		{"nothing to read", 30002, "No", "Yes", "65536", 4096, 30002},
		{"large segments", 30002, "Yes", "Yes", "16384", 16384, 16384},
	} {
		size := test.size
		for _, base := range []WriteBase{WriteBaseDefault, WriteBaseSolicited, WriteBaseAll} {
			for _, registered := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/%v", test.name, base, registered), func(t *testing.T) {
					segment := "4096"
					if test.immediateLen > 4096 {
						segment = "20000"
					}
					data := pattern(size)
					s := iserSession(t, func(o *Options) { o.ISER.WriteBase, o.ISER.SendSegment = base, 20000 }, append(iserKeys()[:2:2], pdu.Pairs{
						{Key: "TargetRecvDataSegmentLength", Value: segment}, {Key: "InitialR2T", Value: test.initialR2T},
						{Key: "ImmediateData", Value: test.immediate}, {Key: "FirstBurstLength", Value: test.first}, {Key: "MaxBurstLength", Value: "65536"},
					}...), func(p *iserPeer) {
						in := p.expect(pdu.OpSCSICommand)
						if in == nil {
							return
						}
						var c pdu.SCSICommand
						if err := c.Decode(&in.Header); err != nil || !c.Write || int(c.EDTL) != size || c.Final != (test.unsol == test.immediateLen) || len(in.Data) != test.immediateLen {
							p.t.Errorf("peer: %+v with %d bytes, %v", c, len(in.Data), err)
						}
						key, to := p.m.writeKey, p.m.writeBase
						if (key != 0) != (test.unsol < size) || p.m.readKey != 0 {
							p.t.Errorf("peer: write STag %08x, read STag %08x", key, p.m.readKey)
						}
						got := bytes.Clone(in.Data)
						for sn := pdu.Serial(0); len(got) < test.unsol; sn++ {
							in := p.expect(pdu.OpDataOut)
							if in == nil {
								return
							}
							var d pdu.DataOut
							want := min(4096, test.unsol-len(got))
							if err := d.Decode(&in.Header); err != nil || d.TTT != pdu.ReservedTag || d.ITT != c.ITT || d.DataSN != sn || int(d.Offset) != len(got) ||
								len(in.Data) != want || d.Final != (len(got)+want == test.unsol) || p.m.writeKey != 0 || p.m.readKey != 0 {
								p.t.Errorf("peer: %+v with %d bytes at %d, %v", d, len(in.Data), len(got), err)
								return
							}
							got = append(got, in.Data...)
						}
						if base == WriteBaseAll {
							to += uint64(test.unsol)
						}
						for len(got) < size {
							n := min(11000, size-len(got))
							b, err := p.m.read(key, to, n)
							if err != nil {
								p.t.Errorf("peer: %v", err)
								return
							}
							got, to = append(got, b...), to+uint64(n)
						}
						if !bytes.Equal(got, data) {
							p.t.Error("peer: the data differ")
						}
						p.m.invalidate = key
						p.good(c)
						p.finish()
					})
					out := data
					if registered {
						b, err := s.Alloc(size)
						if err != nil {
							t.Fatal(err)
						}
						defer s.Free(b)
						copy(b, data)
						out = b
					}
					rsp, err := s.Execute(testContext(t), 3, []byte{0x2a}, out, nil)
					if err != nil || rsp.Err() != nil {
						t.Errorf("%+v, %v", rsp, err)
					}
				})
			}
		}
	}
}

// What a read delivers: all, a part, nothing; with and without an invalidation by the target, into memory of either kind.
func TestISERReadAndResiduals(t *testing.T) {
	const size = 10000
	data := pattern(size)
	sense := append([]byte{0, 18, 0x70, 0, 5, 0, 0, 0, 0, 10}, make([]byte, 10)...)
	for _, test := range []struct {
		name     string
		response pdu.SCSIResponse
		data     []byte
		written  int
		want     int
		ok       bool
	}{
		{"all", pdu.SCSIResponse{}, nil, size, size, true},
		{"in two parts", pdu.SCSIResponse{ExpDataSN: 2}, nil, size, size, true},
		{"underflow", pdu.SCSIResponse{Underflow: true, Residual: 1000}, nil, 9000, 9000, true},
		{"nothing", pdu.SCSIResponse{Underflow: true, Residual: size}, nil, 0, 0, true},
		{"overflow", pdu.SCSIResponse{Overflow: true, Residual: 5}, nil, size, size, true},
		{"check condition", pdu.SCSIResponse{Status: 2}, sense, 50, 0, false},
		{"check condition with data", pdu.SCSIResponse{Status: 2, Underflow: true, Residual: size - 50}, sense, 50, 50, false},
		{"target failure", pdu.SCSIResponse{Response: pdu.TargetFailure}, nil, 0, 0, false},
	} {
		for _, registered := range []bool{false, true} {
			for _, invalidate := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%v/%v", test.name, registered, invalidate), func(t *testing.T) {
					s := iserSession(t, nil, iserKeys(), func(p *iserPeer) {
						c := p.command()
						if p.m.writeKey != 0 || p.m.readKey == 0 {
							p.t.Errorf("peer: write STag %08x, read STag %08x", p.m.writeKey, p.m.readKey)
						}
						half := test.written / 2
						if err := errors.Join(p.m.write(p.m.readKey, p.m.readBase, data[:half]), p.m.write(p.m.readKey, p.m.readBase+uint64(half), data[half:test.written])); err != nil {
							p.t.Errorf("peer: %v", err)
						}
						if invalidate {
							p.m.invalidate = p.m.readKey
						}
						test.response.ITT = c.ITT
						p.send(&test.response, test.data, true)
						p.finish()
					})
					in := make([]byte, size)
					if registered {
						var err error
						if in, err = s.Alloc(size); err != nil {
							t.Fatal(err)
						}
						defer s.Free(in)
					}
					rsp, err := s.Execute(testContext(t), 0, readCDB, nil, in)
					if err != nil || rsp.Transferred != test.want || test.ok != (rsp.Err() == nil) || !bytes.Equal(in[:test.want], data[:test.want]) {
						t.Errorf("%+v, %v, %v", rsp, err, rsp.Err())
					}
				})
			}
		}
	}
}

// What a target must not do ends the session, names the reason, and leaves nothing behind.
func TestISERViolations(t *testing.T) {
	dataIn := func(c pdu.SCSICommand) *pdu.DataIn { return &pdu.DataIn{Final: true, ITT: c.ITT, TTT: pdu.ReservedTag} }
	raw := func(c pdu.SCSICommand, extra int) []byte {
		var h pdu.Header
		(&pdu.SCSIResponse{ITT: c.ITT, StatSN: 102, ExpCmdSN: 2, MaxCmdSN: 64}).Encode(&h)
		return append(append([]byte{0x10, 27: 0}, h[:]...), make([]byte, extra)...)
	}
	for name, test := range map[string]struct {
		script func(*iserPeer, pdu.SCSICommand)
		want   error
	}{
		"write past the end": {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.write(p.m.readKey, p.m.readBase+4095, []byte{1, 2}) }, ErrProtocol},
		"write before it":    {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.write(p.m.readKey, p.m.readBase-1, []byte{1}) }, ErrProtocol},
		"read of a read":     {func(p *iserPeer, c pdu.SCSICommand) { _, _ = p.m.read(p.m.readKey, p.m.readBase, 10) }, ErrProtocol},
		"another STag":       {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.write(p.m.readKey+1, p.m.readBase, []byte{1}) }, ErrProtocol},
		"STag 0":             {func(p *iserPeer, c pdu.SCSICommand) { _, _ = p.m.read(0, 0, 10) }, ErrProtocol},
		"invalidate another": {func(p *iserPeer, c pdu.SCSICommand) { p.m.invalidate = p.m.readKey + 1; p.good(c) }, ErrProtocol},
		"invalidate by a ping": {func(p *iserPeer, c pdu.SCSICommand) {
			p.m.invalidate = p.m.readKey
			p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}, nil, false)
		}, ErrProtocol},
		"invalidate for nobody": {func(p *iserPeer, c pdu.SCSICommand) { p.m.invalidate = p.m.readKey; c.ITT++; p.good(c) }, ErrProtocol},
		"invalidate twice": {func(p *iserPeer, c pdu.SCSICommand) {
			_ = p.m.do(rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: p.m.readKey, SGE: p.m.sge(peerSendAt, copy(p.m.buf[peerSendAt:], raw(c, 0)))})
			_ = p.m.do(rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: p.m.readKey, SGE: p.m.sge(peerSendAt, 76)})
		}, nil},
		"Data-In":       {func(p *iserPeer, c pdu.SCSICommand) { p.send(dataIn(c), nil, false) }, ErrProtocol},
		"R2T":           {func(p *iserPeer, c pdu.SCSICommand) { p.send(&pdu.R2T{ITT: c.ITT, TTT: 1, Length: 512}, nil, false) }, ErrProtocol},
		"Hello":         {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.message([]byte{0x20, 27: 0}) }, ErrProtocol},
		"empty message": {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.message(nil) }, ErrProtocol},
		"short message": {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.message(raw(c, 0)[:75]) }, ErrProtocol},
		"excess":        {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.message(raw(c, 4)) }, ErrProtocol},
		"missing data":  {func(p *iserPeer, c pdu.SCSICommand) { b := raw(c, 4); b[28+7] = 5; _ = p.m.message(b) }, ErrProtocol},
		"other opcode":  {func(p *iserPeer, c pdu.SCSICommand) { b := raw(c, 0); b[0] = 0x40; _ = p.m.message(b) }, ErrProtocol},
		"segment too long": {func(p *iserPeer, c pdu.SCSICommand) {
			p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: 5}, make([]byte, 1025), false)
		}, ErrProtocol},
		"message too long": {func(p *iserPeer, c pdu.SCSICommand) { _ = p.m.message(make([]byte, 20000)) }, rdma.ErrTransport},
		"residual": {func(p *iserPeer, c pdu.SCSICommand) {
			p.send(&pdu.SCSIResponse{ITT: c.ITT, Underflow: true, Residual: 5000}, nil, true)
		}, ErrProtocol},
		"unknown task":       {func(p *iserPeer, c pdu.SCSICommand) { c.ITT += 1 << 20; p.good(c) }, ErrProtocol},
		"StatSN":             {func(p *iserPeer, c pdu.SCSICommand) { p.statSN++; p.good(c) }, ErrProtocol},
		"ping of both kinds": {func(p *iserPeer, c pdu.SCSICommand) { p.send(&pdu.NopIn{ITT: 1, TTT: 1}, nil, true) }, ErrProtocol},
		"Login Response":     {func(p *iserPeer, c pdu.SCSICommand) { p.send(&pdu.LoginResponse{ITT: c.ITT}, nil, true) }, ErrProtocol},
		"gone":               {func(p *iserPeer, c pdu.SCSICommand) { p.m.qp.Disconnect() }, rdma.ErrPeerClosed},
	} {
		t.Run(name, func(t *testing.T) {
			s := iserSession(t, func(o *Options) { o.ISER.RecvSegment = 1024 }, append(pdu.Pairs{{Key: "InitiatorRecvDataSegmentLength", Value: "1024"}}, iserKeys()[0], iserKeys()[2]), func(p *iserPeer) {
				test.script(p, p.command())
				p.finish()
			})
			in, err := s.Alloc(3 * 4096)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Free(in)
			clear(in)
			_, err = s.Execute(testContext(t), 0, readCDB, nil, in[4096:8192])
			if test.want != nil && (!errors.Is(err, ErrConnection) || !errors.Is(err, test.want)) {
				t.Errorf("%v", err)
			}
			<-s.Done()
			if i := slices.IndexFunc(in, func(b byte) bool { return b != 0 }); i >= 0 {
				t.Errorf("byte %d was written", i-4096)
			}
			if _, err := s.Execute(testContext(t), 0, readCDB, nil, nil); !errors.Is(err, ErrClosed) {
				t.Errorf("a command on a dead session: %v", err)
			}
		})
	}
}

// After a command has ended in any way, the target reaches its memory no more (ISER-40); trying ends the session.
func TestISERLateAccess(t *testing.T) {
	for _, how := range []string{"response", "invalidated", "reset", "abort", "reject"} {
		for _, write := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%v", how, write), func(t *testing.T) {
				over := make(chan struct{})
				s := iserSession(t, nil, iserKeys(pdu.Pair{Key: "ImmediateData", Value: "No"}), func(p *iserPeer) {
					in := p.expect(pdu.OpSCSICommand)
					if in == nil {
						return
					}
					key, to := p.m.readKey|p.m.writeKey, p.m.readBase|p.m.writeBase
					access := func() error {
						if write {
							_, err := p.m.read(key, to, 4096)
							return err
						}
						return p.m.write(key, to, bytes.Repeat([]byte{0xee}, 4096))
					}
					if err := access(); err != nil {
						p.t.Errorf("peer: %v", err)
					}
					switch how {
					case "response":
						p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true)
					case "invalidated":
						p.m.invalidate = key
						p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true)
					case "reset", "abort":
						tmf := p.expect(pdu.OpTaskRequest)
						if err := access(); err != nil {
							p.t.Errorf("peer: %v", err)
						}
						p.send(&pdu.TaskResponse{ITT: tmf.Header.ITT()}, nil, true)
					case "reject":
						p.send(&pdu.Reject{Reason: pdu.RejectNotSupported}, in.Header[:], true)
					}
					<-over
					_ = access()
					p.next()
				})
				buf, err := s.Alloc(4096)
				if err != nil {
					t.Fatal(err)
				}
				defer s.Free(buf)
				clear(buf)
				ctx, cancel := context.WithCancel(testContext(t))
				defer cancel()
				var c *Command
				if write {
					c, err = s.Submit(ctx, 0, pdu.AttrSimple, []byte{0x2a}, buf, nil)
				} else {
					c, err = s.Submit(ctx, 0, pdu.AttrSimple, readCDB, nil, buf)
				}
				if err != nil {
					t.Fatal(err)
				}
				switch how {
				case "reset":
					if err := s.LUNReset(ctx, 0); err != nil {
						t.Error(err)
					}
				case "abort":
					cancel()
				}
				if _, err := c.Wait(ctx); (err == nil) != (how == "response" || how == "invalidated") {
					t.Errorf("%v", err)
				}
				for i := range buf {
					buf[i] = 0x11
				}
				close(over)
				<-s.Done()
				if err := s.Err(); !errors.Is(err, ErrProtocol) || !errors.Is(err, rdma.ErrAccess) {
					t.Errorf("%v", err)
				}
				if !bytes.Equal(buf, bytes.Repeat([]byte{0x11}, 4096)) {
					t.Error("the buffer was written")
				}
			})
		}
	}
}

// A target's limit of immediate PDUs is kept, however often either side pings (ISER-62).
func TestISERUnexpectedLimit(t *testing.T) {
	const limit, rounds = 2, 40
	s := iserSession(t, nil, iserKeys(pdu.Pair{Key: "MaxOutstandingUnexpectedPDUs", Value: fmt.Sprint(limit)}), func(p *iserPeer) {
		outstanding := 0
		var answers int
		for in := p.next(); in != nil; in = p.next() {
			if !in.Header.Immediate() {
				outstanding = 0 // the answer to it will acknowledge it
			} else if outstanding++; outstanding > limit {
				p.t.Errorf("peer: %d immediate PDUs, %d are allowed", outstanding, limit)
			}
			switch in.Header.Opcode() {
			case pdu.OpNopOut:
				if in.Header.ITT() == pdu.ReservedTag {
					answers++
					break
				}
				p.send(&pdu.NopIn{ITT: in.Header.ITT(), TTT: pdu.ReservedTag}, in.Data, true)
				if in.Header.Immediate() {
					p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.TaskTag(answers)}, nil, false)
				}
			case pdu.OpLogoutRequest:
				if answers < rounds-limit {
					p.t.Errorf("peer: %d of %d pings were answered", answers, rounds)
				}
				p.send(&pdu.LogoutResponse{ITT: in.Header.ITT()}, nil, true)
				return
			}
		}
	})
	ctx := testContext(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range rounds / 4 {
				if _, err := s.Ping(ctx, []byte("x")); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := s.Logout(ctx); err != nil {
		t.Error(err)
	}
}

// An MPA start of every kind, with a long CDB and odd lengths in both directions.
func TestISERWire(t *testing.T) {
	for name, test := range map[string]struct{ ours, theirs iwarp.Options }{
		"defaults":     {},
		"no CRC":       {iwarp.Options{NoCRC: true}, iwarp.Options{NoCRC: true}},
		"revision 1":   {iwarp.Options{Revision: 1}, iwarp.Options{}},
		"peer to peer": {iwarp.Options{PeerToPeer: true}, iwarp.Options{}},
		"RTR Read":     {iwarp.Options{PeerToPeer: true, RTR: iwarp.RTRRead}, iwarp.Options{}},
		"segments":     {iwarp.Options{MaxULPDU: 128}, iwarp.Options{MaxULPDU: 1442}},
	} {
		t.Run(name, func(t *testing.T) {
			provider, err := iwarp.New(test.ours)
			if err != nil {
				t.Fatal(err)
			}
			cdb, data := pattern(200), pattern(12345)
			o := iserOptions(listenISER(t, accept{wire: test.theirs}, func(p *iserPeer) {
				p.loginAll(iserKeys())
				in := p.expect(pdu.OpSCSICommand)
				if in == nil {
					return
				}
				var a pdu.AHS
				if err := a.Decode(in.AHS); err != nil || !bytes.Equal(append(in.Header[32:48:48], a.CDB...), cdb) {
					p.t.Errorf("peer: %x, %v", in.AHS, err)
				}
				rest, err := p.m.read(p.m.writeKey, p.m.writeBase, len(data)-len(in.Data))
				if err != nil || !bytes.Equal(append(bytes.Clone(in.Data), rest...), data) {
					p.t.Errorf("peer: the data differ: %v", err)
				}
				p.m.invalidate = p.m.writeKey
				p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true)
				in = p.expect(pdu.OpNopOut)
				p.send(&pdu.NopIn{ITT: in.Header.ITT(), TTT: pdu.ReservedTag}, in.Data, true)
				c := p.command()
				if err := p.m.write(p.m.readKey, p.m.readBase, data[:777]); err != nil {
					p.t.Errorf("peer: %v", err)
				}
				p.m.invalidate = p.m.readKey
				p.good(c)
				p.finish()
			}))
			o.ISER.Provider = provider
			s := mustDial(t, o)
			ctx := testContext(t)
			if rsp, err := s.Execute(ctx, 0, cdb, data, nil); err != nil || rsp.Err() != nil {
				t.Errorf("%+v, %v", rsp, err)
			}
			if got, err := s.Ping(ctx, []byte("abcde")); err != nil || string(got) != "abcde" {
				t.Errorf("%q, %v", got, err)
			}
			in := make([]byte, 777)
			if rsp, err := s.Execute(ctx, 0, readCDB, nil, in); err != nil || rsp.Err() != nil || !bytes.Equal(in, data[:777]) {
				t.Errorf("%+v, %v", rsp, err)
			}
			if _, err := s.Ping(ctx, make([]byte, 8193)); err == nil {
				t.Error("a ping that the target cannot take was sent")
			}
		})
	}
}
