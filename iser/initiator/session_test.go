package initiator

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// session logs in to a peer that then runs script, with the negotiated keys.
func session(t testing.TB, change func(*Options), keys pdu.Pairs, script func(*peer)) *Session {
	t.Helper()
	o := peerOptions(listen(t, func(p *peer) {
		p.loginAll(keys)
		for _, k := range keys {
			switch k.Key {
			case "HeaderDigest":
				p.c.(*Conn).headerDigest = k.Value == "CRC32C"
			case "DataDigest":
				p.c.(*Conn).dataDigest = k.Value == "CRC32C"
			}
		}
		script(p)
	}))
	if change != nil {
		change(&o)
	}
	return mustDial(t, o)
}

// command receives a SCSI Command.
func (p *peer) command() pdu.SCSICommand {
	var c pdu.SCSICommand
	if in := p.expect(pdu.OpSCSICommand); in != nil {
		if err := c.Decode(&in.Header); err != nil {
			p.t.Error(err)
		}
	}
	return c
}

func (p *peer) good(c pdu.SCSICommand) {
	p.send(&pdu.SCSIResponse{ITT: c.ITT}, nil, true)
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// Every shape of a write: what is immediate, what is unsolicited, what waits for an R2T.
func TestWriteShapes(t *testing.T) {
	const size = 20000
	for _, test := range []struct {
		name                     string
		initialR2T, immediate    string
		immediateLen, unsolicits int
		final                    bool
	}{
		{"all", "No", "Yes", 4096, 8192 - 4096, false},
		{"immediate", "Yes", "Yes", 4096, 0, true},
		{"unsolicited", "No", "No", 0, 8192, false},
		{"solicited", "Yes", "No", 0, 0, true},
	} {
		for _, digest := range []string{"None", "CRC32C"} {
			t.Run(test.name+"/"+digest, func(t *testing.T) {
				data := pattern(size)
				s := session(t, func(o *Options) { o.HeaderDigest, o.DataDigest = DigestPrefer, DigestPrefer }, pdu.Pairs{
					{Key: "InitialR2T", Value: test.initialR2T}, {Key: "ImmediateData", Value: test.immediate}, {Key: "FirstBurstLength", Value: "8192"},
					{Key: "MaxBurstLength", Value: "10000"}, {Key: "MaxRecvDataSegmentLength", Value: "4096"},
					{Key: "HeaderDigest", Value: digest}, {Key: "DataDigest", Value: digest},
				}, func(p *peer) {
					in := p.expect(pdu.OpSCSICommand)
					if in == nil {
						return
					}
					var c pdu.SCSICommand
					if err := c.Decode(&in.Header); err != nil || !c.Write || c.Read || c.EDTL != size || c.Final != test.final || len(in.Data) != test.immediateLen {
						p.t.Errorf("peer: %+v with %d bytes, %v", c, len(in.Data), err)
					}
					got := bytes.Clone(in.Data)
					collect := func(ttt pdu.TaskTag, n int) {
						end, sn := len(got)+n, pdu.Serial(0)
						for len(got) < end {
							in := p.expect(pdu.OpDataOut)
							if in == nil {
								return
							}
							var d pdu.DataOut
							if err := d.Decode(&in.Header); err != nil || d.TTT != ttt || d.ITT != c.ITT || d.DataSN != sn || int(d.Offset) != len(got) ||
								d.Final != (len(got)+len(in.Data) == end) || len(in.Data) > 4096 {
								p.t.Errorf("peer: %+v with %d bytes at %d, %v", d, len(in.Data), len(got), err)
							}
							sn++
							got = append(got, in.Data...)
						}
					}
					if test.unsolicits > 0 {
						collect(pdu.ReservedTag, test.unsolicits)
					}
					for sn := pdu.Serial(0); len(got) < size; sn++ {
						n := min(10000, size-len(got))
						ttt := pdu.TaskTag(0x100 + sn)
						p.send(&pdu.R2T{LUN: c.LUN, ITT: c.ITT, TTT: ttt, R2TSN: sn, Offset: uint32(len(got)), Length: uint32(n)}, nil, false)
						collect(ttt, n)
					}
					if !bytes.Equal(got, data) {
						p.t.Error("peer: the data differ")
					}
					p.good(c)
					p.finish()
				})
				rsp, err := s.Execute(testContext(t), 3, []byte{0x2a}, data, nil)
				if err != nil || rsp.Err() != nil {
					t.Errorf("%+v, %v", rsp, err)
				}
			})
		}
	}
}

func TestReadAndResiduals(t *testing.T) {
	data := pattern(9000)
	s := session(t, nil, nil, func(p *peer) {
		c := p.command()
		p.send(&pdu.DataIn{ITT: c.ITT, TTT: pdu.ReservedTag}, data[:4001], false)
		p.send(&pdu.DataIn{ITT: c.ITT, TTT: pdu.ReservedTag, DataSN: 1, Offset: 4001}, nil, false)
		p.send(&pdu.DataIn{Final: true, HasStatus: true, Underflow: true, Residual: 1000, ITT: c.ITT, TTT: pdu.ReservedTag, DataSN: 2, Offset: 4001}, data[4001:9000], true)
		c = p.command()
		p.send(&pdu.DataIn{Final: true, ITT: c.ITT, TTT: pdu.ReservedTag}, data[:100], false)
		p.send(&pdu.SCSIResponse{ITT: c.ITT, Overflow: true, Residual: 5, ExpDataSN: 1}, nil, true)
		c = p.command()
		sense := append([]byte{0, 18, 0x70, 0, 5, 0, 0, 0, 0, 10}, make([]byte, 10)...)
		sense[14] = 0x24
		p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, sense, true)
		c = p.command()
		p.send(&pdu.SCSIResponse{ITT: c.ITT, Response: pdu.TargetFailure}, nil, true)
		p.finish()
	})
	ctx := testContext(t)
	in := make([]byte, 10000)
	rsp, err := s.Execute(ctx, 0, readCDB, nil, in)
	if err != nil || rsp.Err() != nil || rsp.Transferred != 9000 || !rsp.Underflow || rsp.Overflow || rsp.Residual != 1000 || !bytes.Equal(in[:9000], data) {
		t.Errorf("underflow: %+v, %v", rsp, err)
	}
	rsp, err = s.Execute(ctx, 0, readCDB, nil, in[:100])
	if err != nil || rsp.Transferred != 100 || !rsp.Overflow || rsp.Residual != 5 {
		t.Errorf("overflow: %+v, %v", rsp, err)
	}
	rsp, err = s.Execute(ctx, 0, readCDB, nil, in)
	var status *StatusError
	if err != nil || !errors.As(rsp.Err(), &status) || !status.Sense.Is(KeyIllegalRequest, 0x24, 0) {
		t.Errorf("check condition: %+v, %v", rsp, err)
	}
	rsp, err = s.Execute(ctx, 0, readCDB, nil, in)
	if err != nil || !errors.Is(rsp.Err(), ErrProtocol) {
		t.Errorf("target failure: %+v, %v", rsp, err)
	}
}

// What a target must not do ends the session and names the reason.
func TestSessionViolations(t *testing.T) {
	dataIn := func(c pdu.SCSICommand) *pdu.DataIn { return &pdu.DataIn{Final: true, ITT: c.ITT, TTT: pdu.ReservedTag} }
	r2t := func(c pdu.SCSICommand) *pdu.R2T { return &pdu.R2T{ITT: c.ITT, TTT: 1, Length: 512} }
	for name, script := range map[string]func(*peer, pdu.SCSICommand){
		"unknown task":     func(p *peer, c pdu.SCSICommand) { c.ITT += 1 << 20; p.good(c) },
		"slot of another":  func(p *peer, c pdu.SCSICommand) { c.ITT++; p.good(c) },
		"data for nobody":  func(p *peer, c pdu.SCSICommand) { c.ITT++; p.send(dataIn(c), nil, false) },
		"DataSN":           func(p *peer, c pdu.SCSICommand) { d := dataIn(c); d.DataSN = 1; p.send(d, nil, false) },
		"offset":           func(p *peer, c pdu.SCSICommand) { d := dataIn(c); d.Offset = 4; p.send(d, make([]byte, 4), false) },
		"past the end":     func(p *peer, c pdu.SCSICommand) { p.send(dataIn(c), make([]byte, 4097), false) },
		"segment too long": func(p *peer, c pdu.SCSICommand) { p.send(dataIn(c), make([]byte, 300000), false) },
		"StatSN":           func(p *peer, c pdu.SCSICommand) { p.statSN++; p.good(c) },
		"ExpDataSN":        func(p *peer, c pdu.SCSICommand) { p.send(&pdu.SCSIResponse{ITT: c.ITT, ExpDataSN: 2}, nil, true) },
		"no sense":         func(p *peer, c pdu.SCSICommand) { p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, nil, true) },
		"sense length": func(p *peer, c pdu.SCSICommand) {
			p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, []byte{0, 9, 1}, true)
		},
		"R2T of a read":  func(p *peer, c pdu.SCSICommand) { p.send(r2t(c), nil, false) },
		"R2TSN":          func(p *peer, c pdu.SCSICommand) { r := r2t(c); r.R2TSN = 2; p.send(r, nil, false) },
		"R2T for nobody": func(p *peer, c pdu.SCSICommand) { c.ITT++; p.send(r2t(c), nil, false) },
		"R2T with data":  func(p *peer, c pdu.SCSICommand) { p.send(r2t(c), []byte{1}, false) },
		"R2T too long":   func(p *peer, c pdu.SCSICommand) { r := r2t(c); r.Length = 1 << 30; p.send(r, nil, false) },
		"initiator PDU":  func(p *peer, c pdu.SCSICommand) { p.send(&pdu.NopOut{Immediate: true}, nil, false) },
		"reserved opcode": func(p *peer, c pdu.SCSICommand) {
			out := PDU{}
			out.Header[0] = 0x3a
			_ = p.c.Send(&out)
		},
		"ping of both kinds": func(p *peer, c pdu.SCSICommand) { p.send(&pdu.NopIn{ITT: 1, TTT: 1}, nil, true) },
		"short reject": func(p *peer, c pdu.SCSICommand) {
			p.send(&pdu.Reject{Reason: pdu.RejectInvalidField}, make([]byte, 47), true)
		},
		"stray logout": func(p *peer, c pdu.SCSICommand) { p.send(&pdu.LogoutResponse{ITT: c.ITT}, nil, true) },
	} {
		t.Run(name, func(t *testing.T) {
			s := session(t, nil, nil, func(p *peer) {
				script(p, p.command())
				p.finish()
			})
			_, err := s.Execute(testContext(t), 0, readCDB, nil, make([]byte, 4096))
			if !errors.Is(err, ErrConnection) || !errors.Is(err, ErrProtocol) {
				t.Errorf("%v", err)
			}
			<-s.Done()
			if _, err := s.Execute(testContext(t), 0, readCDB, nil, nil); !errors.Is(err, ErrClosed) {
				t.Errorf("a command on a dead session: %v", err)
			}
		})
	}
}

func TestDigestErrors(t *testing.T) {
	for _, header := range []bool{true, false} {
		s := session(t, func(o *Options) { o.HeaderDigest, o.DataDigest = DigestRequired, DigestRequired },
			pdu.Pairs{{Key: "HeaderDigest", Value: "CRC32C"}, {Key: "DataDigest", Value: "CRC32C"}}, func(p *peer) {
				c := p.command()
				out := &PDU{Data: pattern(10), BadHeaderDigest: header, BadDataDigest: !header}
				(&pdu.DataIn{ITT: c.ITT, TTT: pdu.ReservedTag}).Encode(&out.Header)
				_ = p.c.Send(out)
				p.finish()
			})
		if _, err := s.Execute(testContext(t), 0, readCDB, nil, make([]byte, 4096)); !errors.Is(err, ErrDigest) || !errors.Is(err, ErrConnection) {
			t.Errorf("%v", err)
		}
	}
}

// The command window closes and opens again; what waits is sent in order, and a context ends the waiting.
func TestCommandWindow(t *testing.T) {
	closed := make(chan struct{})
	s := session(t, nil, nil, func(p *peer) {
		c := p.command()
		p.max = p.exp - 1
		p.good(c)
		<-closed
		p.max = p.exp + 10
		p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}, nil, false)
		for range 3 {
			p.good(p.command())
		}
		p.finish()
	})
	ctx := testContext(t)
	// The window was open to the 64th command when the session began; the peer cannot take that back. So fill it up.
	s.mu.Lock()
	s.maxCmdSN = s.cmdSN
	s.mu.Unlock()
	if _, err := s.Execute(ctx, 0, make([]byte, 6), nil, nil); err != nil {
		t.Fatal(err)
	}
	waiting, cancel := context.WithCancel(ctx)
	result := make(chan error, 1)
	go func() {
		_, err := s.Execute(waiting, 0, make([]byte, 6), nil, nil)
		result <- err
	}()
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) || errors.Is(err, ErrAborted) {
		t.Errorf("a command that was never sent: %v", err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := s.Execute(ctx, 0, make([]byte, 6), nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	close(closed)
	wg.Wait()
}

func TestPings(t *testing.T) {
	s := session(t, nil, nil, func(p *peer) {
		in := p.expect(pdu.OpNopOut)
		p.send(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: 0x77, LUN: pdu.LUNOf(5)}, nil, false)
		var out pdu.NopOut
		if reply := p.expect(pdu.OpNopOut); reply == nil || out.Decode(&reply.Header) != nil || out.TTT != 0x77 || out.ITT != pdu.ReservedTag ||
			out.LUN != pdu.LUNOf(5) || !out.Immediate {
			p.t.Errorf("peer: %+v", out)
		}
		p.send(&pdu.NopIn{ITT: in.Header.ITT(), TTT: pdu.ReservedTag}, in.Data, true)
		p.finish()
	})
	if got, err := s.Ping(testContext(t), []byte("abc")); err != nil || string(got) != "abc" {
		t.Errorf("%q, %v", got, err)
	}
}

// A target that falls silent ends the session.
func TestSilence(t *testing.T) {
	release := make(chan struct{})
	s := session(t, func(o *Options) { o.PingInterval, o.PingTimeout = time.Millisecond, time.Millisecond }, nil, func(p *peer) {
		p.command()
		<-release
	})
	if _, err := s.Execute(testContext(t), 0, make([]byte, 6), nil, nil); !errors.Is(err, ErrConnection) {
		t.Errorf("%v", err)
	}
	close(release)
}

func TestAbort(t *testing.T) {
	s := session(t, nil, nil, func(p *peer) {
		c := p.command()
		var f pdu.TaskRequest
		in := p.expect(pdu.OpTaskRequest)
		if in == nil || f.Decode(&in.Header) != nil || f.Function != pdu.AbortTask || f.Referenced != c.ITT || f.RefCmdSN != c.CmdSN || f.LUN != c.LUN || !f.Immediate {
			p.t.Errorf("peer: %+v", f)
		}
		p.send(&pdu.TaskResponse{ITT: f.ITT}, nil, true)
		// The next command ends while its abort is under way: then it was not aborted.
		c = p.command()
		in = p.expect(pdu.OpTaskRequest)
		p.send(&pdu.TaskResponse{ITT: in.Header.ITT(), Response: pdu.TaskDoesNotExist}, nil, true)
		p.good(c)
		p.finish()
	})
	for _, aborted := range []bool{true, false} {
		ctx, cancel := context.WithCancel(testContext(t))
		c, err := s.Submit(ctx, 4, pdu.AttrOrdered, make([]byte, 6), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		_, err = c.Wait(ctx)
		if aborted && (!errors.Is(err, ErrAborted) || !errors.Is(err, context.Canceled)) || !aborted && err != nil {
			t.Errorf("aborted %v: %v", aborted, err)
		}
	}
}

// A reset ends the commands that it covers and no others.
func TestReset(t *testing.T) {
	s := session(t, nil, nil, func(p *peer) {
		p.command()
		other := p.command()
		in := p.expect(pdu.OpTaskRequest)
		p.send(&pdu.TaskResponse{ITT: in.Header.ITT()}, nil, true)
		p.good(other)
		in = p.expect(pdu.OpTaskRequest)
		p.send(&pdu.TaskResponse{ITT: in.Header.ITT(), Response: pdu.LUNDoesNotExist}, nil, true)
		p.finish()
	})
	ctx := testContext(t)
	covered, err1 := s.Submit(ctx, 1, pdu.AttrSimple, make([]byte, 6), nil, nil)
	other, err2 := s.Submit(ctx, 2, pdu.AttrSimple, make([]byte, 6), nil, nil)
	if err := errors.Join(err1, err2, s.LUNReset(ctx, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := covered.Wait(ctx); !errors.Is(err, ErrAborted) {
		t.Errorf("covered: %v", err)
	}
	if _, err := other.Wait(ctx); err != nil {
		t.Errorf("other: %v", err)
	}
	var failed *TaskError
	if err := s.LUNReset(ctx, 9); !errors.As(err, &failed) || failed.Response != pdu.LUNDoesNotExist {
		t.Errorf("no such LUN: %v", err)
	}
}

func TestRejects(t *testing.T) {
	s := session(t, nil, nil, func(p *peer) {
		in := p.next()
		p.send(&pdu.Reject{Reason: pdu.RejectNotSupported}, in.Header[:], true)
		p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true) // a rejected command may still get a response
		in = p.expect(pdu.OpTaskRequest)
		p.send(&pdu.Reject{Reason: pdu.RejectTooManyImmediate}, in.Header[:], true)
		p.good(p.command())
		p.finish()
	})
	ctx := testContext(t)
	var rejected *RejectError
	if _, err := s.Execute(ctx, 0, make([]byte, 6), nil, nil); !errors.As(err, &rejected) || rejected.Reason != pdu.RejectNotSupported {
		t.Errorf("%v", err)
	}
	if err := s.LUNReset(ctx, 0); !errors.As(err, &rejected) || rejected.Reason != pdu.RejectTooManyImmediate {
		t.Errorf("%v", err)
	}
	if _, err := s.Execute(ctx, 0, make([]byte, 6), nil, nil); err != nil {
		t.Error(err)
	}
}

func TestAsyncLogout(t *testing.T) {
	events := make(chan AsyncMessage, 1)
	s := session(t, func(o *Options) { o.OnAsync = func(m AsyncMessage) { events <- m } }, nil, func(p *peer) {
		c := p.command()
		p.send(&pdu.Async{Event: pdu.AsyncLogoutRequest, Param3: 30}, nil, true)
		p.good(c)
		in := p.expect(pdu.OpLogoutRequest)
		p.send(&pdu.LogoutResponse{ITT: in.Header.ITT()}, nil, true)
	})
	if _, err := s.Execute(testContext(t), 0, make([]byte, 6), nil, nil); err != nil {
		t.Errorf("the command that was outstanding: %v", err)
	}
	if m := <-events; m.Event != pdu.AsyncLogoutRequest || m.Param3 != 30 {
		t.Errorf("%+v", m)
	}
	<-s.Done()
	if _, err := s.Execute(testContext(t), 0, make([]byte, 6), nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("a command after the logout: %v", err)
	}
}

func TestAsyncDrop(t *testing.T) {
	s := session(t, nil, nil, func(p *peer) {
		p.command()
		p.send(&pdu.Async{Event: pdu.AsyncDropSession}, nil, true)
	})
	if _, err := s.Execute(testContext(t), 0, make([]byte, 6), nil, nil); !errors.Is(err, ErrConnection) {
		t.Errorf("%v", err)
	}
}

// An answer to SendTargets comes in pieces that break in the middle of a pair.
func TestSendTargets(t *testing.T) {
	text := (pdu.Pairs{
		{Key: "TargetName", Value: "iqn.a"}, {Key: "TargetAddress", Value: "[::1]:3260,1"}, {Key: "TargetAddress", Value: "10.0.0.1,0x2"},
		{Key: "TargetName", Value: "iqn.b"},
	}).Append(nil)
	s := session(t, nil, nil, func(p *peer) {
		in := p.expect(pdu.OpTextRequest)
		if string(in.Data) != "SendTargets=All\x00" {
			p.t.Errorf("peer: %q", in.Data)
		}
		itt := in.Header.ITT()
		for len(text) > 20 {
			p.send(&pdu.TextResponse{Continue: true, ITT: itt, TTT: 5}, text[:20], true)
			text = text[20:]
			if in := p.expect(pdu.OpTextRequest); in == nil || len(in.Data) > 0 || in.Header.ITT() != itt || in.Header.TTT() != 5 {
				p.t.Errorf("peer: %v", in)
			}
		}
		p.send(&pdu.TextResponse{Final: true, ITT: itt, TTT: pdu.ReservedTag}, text, true)
		in = p.expect(pdu.OpTextRequest)
		p.send(&pdu.TextResponse{Final: true, ITT: in.Header.ITT(), TTT: pdu.ReservedTag}, []byte("SendTargets=NotUnderstood\x00"), true)
		p.finish()
	})
	targets, err := s.SendTargets(testContext(t), "All")
	if err != nil || len(targets) != 2 || targets[0].Name != "iqn.a" || len(targets[0].Portals) != 2 || targets[0].Portals[0] != (Portal{"[::1]:3260", 1}) ||
		targets[0].Portals[1] != (Portal{"10.0.0.1:3260", 2}) || targets[1].Name != "iqn.b" || targets[1].Portals[0].Address != s.o.Portal {
		t.Errorf("%+v, %v", targets, err)
	}
	if _, err := s.SendTargets(testContext(t), ""); !errors.Is(err, ErrProtocol) {
		t.Errorf("a refusal: %v", err)
	}
}

// A long CDB travels in an additional header segment.
func TestLongCDB(t *testing.T) {
	cdb := pattern(32)
	s := session(t, nil, nil, func(p *peer) {
		in := p.expect(pdu.OpSCSICommand)
		var a pdu.AHS
		if err := a.Decode(in.AHS); err != nil || !bytes.Equal(in.Header[32:48], cdb[:16]) || !bytes.Equal(a.CDB, cdb[16:]) {
			p.t.Errorf("peer: %x, %x, %v", in.Header[32:48], in.AHS, err)
		}
		p.send(&pdu.SCSIResponse{ITT: in.Header.ITT()}, nil, true)
		p.finish()
	})
	if _, err := s.Execute(testContext(t), 0, cdb, nil, nil); err != nil {
		t.Error(err)
	}
	for _, bad := range [][]byte{nil, make([]byte, 261)} {
		if _, err := s.Execute(testContext(t), 0, bad, nil, nil); err == nil {
			t.Errorf("a CDB of %d bytes", len(bad))
		}
	}
	if _, err := s.Execute(testContext(t), 0, cdb, cdb, cdb); err == nil {
		t.Error("a bidirectional command")
	}
}

// unit answers commands from memory like a disk of 512-byte blocks, with a unit attention and BUSY on the way.
func unit(p *peer) {
	sense := func(key, asc, ascq byte) []byte {
		b := make([]byte, 20)
		b[1], b[2], b[4], b[9], b[14], b[15] = 18, 0x70, key, 10, asc, ascq
		return b
	}
	answers := []func(pdu.SCSICommand){
		func(c pdu.SCSICommand) {
			p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, sense(6, 0x29, 0), true)
		},
		func(c pdu.SCSICommand) {
			p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, sense(2, 4, 1), true)
		},
		p.good, // TEST UNIT READY
		func(c pdu.SCSICommand) { // READ CAPACITY (16)
			b := make([]byte, 32)
			binary.BigEndian.PutUint64(b, 999)
			binary.BigEndian.PutUint32(b[8:], 512)
			b[13], b[14] = 3, 0xc0
			p.send(&pdu.DataIn{Final: true, HasStatus: true, ITT: c.ITT, TTT: pdu.ReservedTag}, b, true)
		},
		func(c pdu.SCSICommand) { p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 8}, nil, true) },
		func(c pdu.SCSICommand) { p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 0x28}, nil, true) },
		p.good, // the write
		func(c pdu.SCSICommand) {
			p.send(&pdu.SCSIResponse{ITT: c.ITT, Status: 2}, sense(0xe, 0x1d, 0), true)
		},
		func(c pdu.SCSICommand) { // short read
			p.send(&pdu.DataIn{Final: true, HasStatus: true, Underflow: true, Residual: 512, ITT: c.ITT, TTT: pdu.ReservedTag}, nil, true)
		},
	}
	for _, answer := range answers {
		answer(p.command())
	}
	p.finish()
}

func TestLUN(t *testing.T) {
	s := session(t, nil, nil, unit)
	ctx := testContext(t)
	l, err := s.OpenLUN(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	if l.Blocks != 1000 || l.BlockSize != 512 || l.Size() != 512000 || !l.Capacity.Thin || !l.Capacity.ReadsZeros || l.Capacity.PhysicalExponent != 3 {
		t.Errorf("%+v", l)
	}
	block := make([]byte, 512)
	if err := l.Write(ctx, 0, block, false); err != nil {
		t.Errorf("a write that meets BUSY and TASK SET FULL: %v", err)
	}
	if err := l.CompareAndWrite(ctx, 0, block, block); !errors.Is(err, ErrMiscompare) {
		t.Errorf("%v", err)
	}
	if err := l.Read(ctx, 0, block); !errors.Is(err, ErrShortTransfer) {
		t.Errorf("%v", err)
	}
	for _, err := range []error{l.Read(ctx, 0, nil), l.Write(ctx, 0, block[:100], false), l.WriteSame(ctx, 0, 1, nil, false),
		l.CompareAndWrite(ctx, 0, block, nil), l.Unmap(ctx, make([]Range, 5000)...)} {
		if err == nil {
			t.Error("nonsense was accepted")
		}
	}
}

func TestSense(t *testing.T) {
	fixed := []byte{0xf0, 0, 0x0e, 0, 0, 1, 2, 10, 0, 0, 0, 0, 0x1d, 0x01, 0, 0xc0, 0, 9}
	s, ok := DecodeSense(fixed)
	if !ok || s.Key != KeyMiscompare || s.ASC != 0x1d || s.ASCQ != 1 || !s.HasInformation || s.Information != 0x102 || s.Pointer != [3]byte{0xc0, 0, 9} {
		t.Errorf("%+v", s)
	}
	descriptor := []byte{0x73, 5, 0x24, 0, 0, 0, 0, 20, 0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 6, 0, 0, 0xc8, 0, 7, 0}
	s, ok = DecodeSense(descriptor)
	if !ok || s.Key != KeyIllegalRequest || !s.Deferred || s.Information != 0x102 || s.Pointer != [3]byte{0xc8, 0, 7} {
		t.Errorf("%+v", s)
	}
	for n := range descriptor {
		DecodeSense(descriptor[:n])
	}
	for n := range fixed {
		DecodeSense(fixed[:n])
	}
	for _, bad := range [][]byte{nil, {0x70, 0}, {0x00, 0, 0, 0}} {
		if _, ok := DecodeSense(bad); ok {
			t.Errorf("%x is sense data", bad)
		}
	}
}

func FuzzSense(f *testing.F) {
	f.Add([]byte{0x72, 5, 0x24, 0, 0, 0, 0, 12, 0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, ok := DecodeSense(b); ok {
			_ = s.String()
		}
	})
}

func TestOptions(t *testing.T) {
	o := Options{}
	o.EnsureDefaults()
	if err := o.Validate(); err == nil {
		t.Error("no portal, no name")
	}
	o.Portal, o.InitiatorName = "h", "iqn.a"
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	for in, want := range map[string]string{"h": "h:3260", "h:1": "h:1", "::1": "[::1]:3260", "[::1]": "[::1]:3260", "[::1]:5": "[::1]:5"} {
		if got := withPort(in); got != want {
			t.Errorf("%s became %s", in, got)
		}
	}
	bad := o
	bad.MaxBurstLength, bad.QueueDepth, bad.ProtocolLevel, bad.TargetName = 100, 5000, 32, string(make([]byte, 300))
	if err := bad.Validate(); err == nil {
		t.Error("bad values")
	}
	if _, err := Dial(context.Background(), o); err == nil {
		t.Error("no target")
	}
}

// Nothing a target sends after the login makes the initiator panic or hang.
func FuzzSession(f *testing.F) {
	var h pdu.Header
	(&pdu.NopIn{ITT: pdu.ReservedTag, TTT: 5}).Encode(&h)
	f.Add(h[:])
	(&pdu.R2T{ITT: 1 << tagBits, TTT: 5, Length: 512}).Encode(&h)
	f.Add(h[:])
	(&pdu.SCSIResponse{ITT: 1 << tagBits, Status: 2}).Encode(&h)
	f.Add(h[:])
	(&pdu.DataIn{ITT: 1 << tagBits, Final: true, HasStatus: true}).Encode(&h)
	f.Add(h[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		ours, theirs := net.Pipe()
		o := peerOptions("x")
		o.QueueDepth = 2
		o.EnsureDefaults()
		s := newSession(NewConn(ours), o, &Login{Parameters: Parameters{MaxSend: 8192, MaxBurst: 65536, FirstBurst: 8192, MaxRecv: 8192, ImmediateData: true},
			CmdSN: 1, MaxCmdSN: 10})
		var wg sync.WaitGroup
		wg.Go(func() { // the peer reads all and answers b to the first thing it gets
			buf := make([]byte, 65536)
			theirs.Read(buf)
			wg.Go(func() {
				theirs.Write(b)
				theirs.Close()
			})
			for {
				if _, err := theirs.Read(buf); err != nil {
					return
				}
			}
		})
		s.Execute(context.Background(), 0, []byte{0x2a}, make([]byte, 16384), nil)
		s.Kill()
		wg.Wait()
	})
}
