package portal_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/portal"
)

// loginRequest is a whole login in one PDU. The session ends with its connection.
func loginRequest(isid byte, keys ...string) []byte { return joinRequest(isid, 0, 0, keys...) }

// joinRequest is the same for a further connection of a session.
func joinRequest(isid byte, tsih, cid uint16, keys ...string) []byte {
	text := "InitiatorName=" + host + "\x00TargetName=" + disk + "\x00DefaultTime2Retain=0\x00" + strings.Join(keys, "\x00") + "\x00"
	var h pdu.Header
	req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: pdu.ISID{0x80, 0, 0, isid}, TSIH: tsih, CID: cid, ITT: 7}
	req.Encode(&h)
	h.SetDataLength(len(text))
	b := append(h[:], text...)
	return append(b, make([]byte, pdu.Padding(len(text)))...)
}

// loginResponse reads a Login Response, which must say so, and returns its text.
func loginResponse(t *testing.T, c net.Conn) (pdu.LoginResponse, string) {
	t.Helper()
	var h pdu.Header
	if _, err := io.ReadFull(c, h[:]); err != nil {
		t.Fatalf("no Login Response: %v", err)
	}
	var resp pdu.LoginResponse
	if err := resp.Decode(&h); err != nil {
		t.Fatalf("%v: %v", h.Opcode(), err)
	}
	n := h.DataLength()
	text := make([]byte, n+pdu.Padding(n))
	if _, err := io.ReadFull(c, text); err != nil {
		t.Fatal(err)
	}
	return resp, string(text[:n])
}

func nopOut() []byte {
	var h pdu.Header
	r := pdu.NopOut{ITT: 9, TTT: pdu.ReservedTag}
	r.Encode(&h)
	h[0] |= 0x40
	return h[:]
}

// ISER-14, IWARP-7: behind the last Login Request and the final Login Response both directions are MPA, at that octet. The MPA request may
// be cut anywhere, and may come together with the Login Request.
func TestStreamChangesAtOneOctet(t *testing.T) {
	r := newRig(t, settings{})
	for cut := range len(request()) + 1 {
		c := r.dial()
		c.Write(append(loginRequest(byte(cut), "RDMAExtensions=Yes"), request()[:cut]...))
		resp, text := loginResponse(t, c)
		if resp.Status != pdu.LoginSuccess || !strings.Contains(text, "RDMAExtensions=Yes\x00") {
			t.Fatalf("%v, %q", resp.Status, text)
		}
		c.Write(request()[cut:])
		changed(t, c)
		await(t, "the session is iSER", func() bool { return r.transports()["iser"] == 1 })
		c.Close()
		await(t, "the session ends", func() bool { return len(r.server.Sessions()) == 0 })
	}
}

// After RDMAExtensions=Yes no byte is iSCSI any more: what is not an MPA request ends the connection unanswered, and so
// does silence. The session goes with it.
func TestStreamWithoutRequest(t *testing.T) {
	r := newRig(t, settings{portal: portal.Options{Timeout: 2 * time.Second}})
	for name, sent := range map[string][]byte{
		"NOP-Out":   nopOut(),
		"login":     loginRequest(99, "RDMAExtensions=Yes"),
		"MPA reply": append([]byte("MPA ID Rep Frame"), 0x10, 2, 0, 4, 0, 1, 0, 1),
		"revision":  append([]byte(key), 0, 3, 0, 0),
		"too long":  append([]byte(key), 0, 1, 2, 1),
		"half":      []byte(key[:7]),
		"nothing":   nil,
	} {
		c := r.dial()
		c.Write(loginRequest(1, "RDMAExtensions=Yes"))
		if resp, _ := loginResponse(t, c); resp.Status != pdu.LoginSuccess {
			t.Fatal(resp.Status)
		}
		c.Write(sent)
		if b := closed(t, c); len(b) != 0 {
			t.Errorf("%s was answered by %q", name, b)
		}
		await(t, name+": the session ends", func() bool { return len(r.server.Sessions()) == 0 })
	}
	// The same connection without RDMAExtensions=Yes stays iSCSI, whatever it looks like.
	c := r.dial()
	c.Write(append(loginRequest(1, "RDMAExtensions=No"), nopOut()...))
	if resp, text := loginResponse(t, c); resp.Status != pdu.LoginSuccess || !strings.Contains(text, "RDMAExtensions=No\x00") {
		t.Errorf("%v, %q", resp.Status, text)
	}
	var h pdu.Header
	if _, err := io.ReadFull(c, h[:]); err != nil || h.Opcode() != pdu.OpNopIn {
		t.Errorf("%v, %v", h.Opcode(), err)
	}
}

// Whoever ends a session whose connection is just changing over does not wait for the initiator.
func TestEndWhileChanging(t *testing.T) {
	r := newRig(t, settings{portal: portal.Options{Timeout: time.Hour}})
	c := r.dial()
	c.Write(loginRequest(1, "RDMAExtensions=Yes"))
	resp, _ := loginResponse(t, c)
	if err := r.server.Kick(r.context(), resp.TSIH); err != nil {
		t.Fatal(err)
	}
	if b := closed(t, c); len(b) != 0 {
		t.Errorf("%q", b)
	}

	// Reinstatement: the second login takes the place of the first.
	c = r.dial()
	c.Write(loginRequest(2, "RDMAExtensions=Yes"))
	loginResponse(t, c)
	d := r.dial()
	d.Write(append(loginRequest(2, "RDMAExtensions=Yes"), request()...))
	if resp, _ := loginResponse(t, d); resp.Status != pdu.LoginSuccess {
		t.Errorf("the second login: %v", resp.Status)
	}
	closed(t, c)

	// Shutdown.
	c = r.dial()
	c.Write(loginRequest(3, "RDMAExtensions=Yes"))
	loginResponse(t, c)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.server.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	closed(t, c)
}

// ISER-5: a further connection of an iSER session is iSER without being asked, and changes over as the first did. One that cannot, on a
// portal of the same node that serves TCP only, is not included; nor may the key be negotiated again.
func TestStreamJoins(t *testing.T) {
	r := newRig(t, settings{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := portal.Serve(l, portal.Options{Transport: portal.TransportTCP})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(plain, iscsi.Portal{}) }()
	t.Cleanup(func() {
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(func() { r.server.Close() })

	lead := r.dial()
	lead.Write(append(loginRequest(1, "RDMAExtensions=Yes", "MaxConnections=4"), request()...))
	resp, _ := loginResponse(t, lead)
	changed(t, lead)
	await(t, "the session is iSER", func() bool { return r.transports()["iser"] == 1 })

	second := r.dial()
	second.Write(append(joinRequest(1, resp.TSIH, 1), request()...))
	if again, text := loginResponse(t, second); again.Status != pdu.LoginSuccess || again.TSIH != resp.TSIH || strings.Contains(text, "RDMAExtensions") {
		t.Fatalf("%v, TSIH %d, %q", again.Status, again.TSIH, text)
	}
	changed(t, second)
	await(t, "the session has two connections", func() bool {
		s := r.server.Sessions()
		return len(s) == 1 && len(s[0].Connections) == 2
	})

	third, err := net.Dial("tcp", plain.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	third.SetDeadline(time.Now().Add(patience))
	third.Write(joinRequest(1, resp.TSIH, 2))
	if again, _ := loginResponse(t, third); again.Status != pdu.LoginCannotInclude {
		t.Errorf("TCP in an iSER session: %v", again.Status)
	}
	closed(t, third)

	// And the other way: a session over TCP stays one.
	lead = r.dial()
	lead.Write(loginRequest(2, "RDMAExtensions=No", "MaxConnections=4"))
	resp, _ = loginResponse(t, lead)
	fourth := r.dial()
	fourth.Write(append(joinRequest(2, resp.TSIH, 1), nopOut()...))
	if again, _ := loginResponse(t, fourth); again.Status != pdu.LoginSuccess {
		t.Errorf("%v", again.Status)
	}
	var h pdu.Header
	if _, err := io.ReadFull(fourth, h[:]); err != nil || h.Opcode() != pdu.OpNopIn {
		t.Errorf("%v, %v", h.Opcode(), err)
	}
}

// changed reads the MPA reply, which must say yes.
func changed(t *testing.T, c net.Conn) {
	t.Helper()
	reply := make([]byte, 20)
	if _, err := io.ReadFull(c, reply); err != nil || !bytes.HasPrefix(reply, []byte("MPA ID Rep Frame")) || reply[16]&0x20 != 0 {
		t.Fatalf("the final Login Response was followed by %q, %v", reply, err)
	}
	if n := int(reply[18])<<8 | int(reply[19]); n > 0 {
		if _, err := io.CopyN(io.Discard, c, int64(n)); err != nil {
			t.Fatal(err)
		}
	}
}

// An iser-only portal refuses a normal session without RDMAExtensions in the Login Response, and lets discovery pass (ISER-3).
func TestStreamOnISEROnly(t *testing.T) {
	r := newRig(t, settings{portal: portal.Options{Transport: portal.TransportISER}})
	for _, keys := range [][]string{nil, {"RDMAExtensions=No"}} {
		c := r.dial()
		c.Write(loginRequest(1, keys...))
		if resp, _ := loginResponse(t, c); resp.Status == pdu.LoginSuccess || resp.Status>>8 != 2 {
			t.Errorf("%q: %v", keys, resp.Status)
		}
		closed(t, c)
	}
}
