package tcp_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/tcp"
)

// pair is a connection over loopback.
func pair(t *testing.T) (ours, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if theirs, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if ours, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(patience)
	theirs.SetDeadline(deadline)
	t.Cleanup(func() {
		ours.Close()
		theirs.Close()
	})
	return ours, theirs
}

// stamps counts what was numbered. It is called under the lock of the writer.
type stamps struct{ n uint32 }

func (s *stamps) Stamp(h *pdu.Header) {
	s.n++
	h.SetStatSN(pdu.Serial(s.n))
}

func loginRequest(data []byte) []byte {
	var h pdu.Header
	req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ITT: 7}
	req.Encode(&h)
	h.SetDataLength(len(data))
	b := append(h[:], data...)
	return append(b, make([]byte, pdu.Padding(len(data)))...)
}

func loginFinal() *iscsi.PDU {
	p := &iscsi.PDU{Data: []byte("RDMAExtensions=Yes\x00")}
	resp := pdu.LoginResponse{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ITT: 7}
	resp.Encode(&p.Header)
	return p
}

// What was read of a connection before comes out of it again, wherever it was cut.
func TestConnAfterFirstBytes(t *testing.T) {
	text := []byte("InitiatorName=iqn.x\x00")
	whole := loginRequest(text)
	for cut := range len(whole) + 1 {
		ours, theirs := pair(t)
		c := tcp.NewConnAfter(ours, whole[:cut])
		c.Start(new(stamps))
		if _, err := theirs.Write(whole[cut:]); err != nil {
			t.Fatal(err)
		}
		p, err := c.Receive()
		if err != nil || p.Header.Opcode() != pdu.OpLoginRequest || !bytes.Equal(p.Data, text) {
			t.Fatalf("cut at %d: %v, %v", cut, p, err)
		}
		c.Close(false)
		theirs.Close()
	}
}

// ISER-14: the final Login Response is the last that is sent, and not a byte behind the last Login Request is lost or
// taken for iSCSI, however much of it was read already.
func TestHandOver(t *testing.T) {
	mpa := bytes.Repeat([]byte("MPA ID Req Frame"), 8)
	for _, early := range []int{0, 1, 16, 100, len(mpa)} {
		ours, theirs := pair(t)
		c := tcp.NewConnAfter(ours, nil)
		numbers := new(stamps)
		c.Start(numbers)
		if _, err := theirs.Write(append(loginRequest(nil), mpa[:early]...)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Receive(); err != nil {
			t.Fatal(err)
		}

		// Others who send at the same time are before it or refused.
		var others sync.WaitGroup
		for range 8 {
			others.Go(func() {
				for {
					p := new(iscsi.PDU)
					r := pdu.NopIn{ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}
					r.Encode(&p.Header)
					if err := c.SendControl(p); err != nil {
						if !errors.Is(err, iscsi.ErrClosed) {
							t.Errorf("SendControl: %v", err)
						}
						return
					}
				}
			})
		}
		type result struct {
			last pdu.Header
			err  error
		}
		read := make(chan result)
		go func() {
			var r result
			for r.last.Opcode() != pdu.OpLoginResponse && r.err == nil {
				if _, r.err = io.ReadFull(theirs, r.last[:]); r.err == nil {
					n := r.last.DataLength()
					_, r.err = io.CopyN(io.Discard, theirs, int64(n+pdu.Padding(n)))
				}
			}
			read <- r
		}()
		nc, surplus, err := c.HandOver(loginFinal())
		if err != nil {
			t.Fatal(err)
		}
		if nc != ours {
			t.Error("another connection came back")
		}
		r := <-read
		if r.err != nil {
			t.Fatal(r.err)
		}
		others.Wait()
		if sn := r.last.StatSN(); uint32(sn) != numbers.n {
			t.Errorf("%d PDUs were numbered, and the last one sent has %d", numbers.n, sn)
		}

		// The connection is the caller's: Close does nothing to it, and nothing is read or written beside the caller.
		if err := c.Close(false); err != nil {
			t.Error(err)
		}
		c.Close(true)
		if _, err := theirs.Write(mpa[early:]); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(mpa))
		nc.SetReadDeadline(time.Now().Add(patience))
		if n := copy(got, surplus); n > early {
			t.Errorf("%d bytes of surplus, %d were sent", n, early)
		}
		if _, err := io.ReadFull(nc, got[len(surplus):]); err != nil || !bytes.Equal(got, mpa) {
			t.Errorf("%d sent early: the rest reads %q, %v", early, got, err)
		}
		if _, err := nc.Write([]byte("reply")); err != nil {
			t.Error(err)
		}
		reply := make([]byte, 5)
		if _, err := io.ReadFull(theirs, reply); err != nil || string(reply) != "reply" {
			t.Errorf("behind the final Login Response came %q, %v", reply, err)
		}
		if err := c.SendControl(loginFinal()); !errors.Is(err, iscsi.ErrClosed) {
			t.Errorf("SendControl afterwards: %v", err)
		}
		nc.Close()
	}
}

// A connection that was closed, or whose peer is gone, is not handed over.
func TestHandOverOfClosed(t *testing.T) {
	ours, _ := pair(t)
	c := tcp.NewConnAfter(ours, nil)
	c.Start(new(stamps))
	c.Close(false)
	if _, _, err := c.HandOver(loginFinal()); !errors.Is(err, iscsi.ErrClosed) {
		t.Errorf("closed: %v", err)
	}

	ours, theirs := pair(t)
	c = tcp.NewConnAfter(ours, nil)
	c.Start(new(stamps))
	theirs.(*net.TCPConn).SetLinger(0)
	theirs.Close()
	if _, err := c.Receive(); err == nil {
		t.Fatal("received from nobody")
	}
	if _, _, err := c.HandOver(loginFinal()); err == nil {
		t.Error("a connection that was reset was handed over")
	}
	c.Close(false)
}
