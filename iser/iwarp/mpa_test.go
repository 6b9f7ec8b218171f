package iwarp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The answers to the requests that the kernel's peers send with each of their switches turned, from byte 16 on (IWARP-3, 9, 11 to 15).
func TestAnswer(t *testing.T) {
	tests := []struct {
		name, request string
		want          string // "" if the request is refused
		agreed        agreed
		nocrc         bool
	}{
		{"siw", "10 02 00 08 0080 0001 80000000", "10 02 00 08 0001 0080 c0de", agreed{ird: 1, ord: 128}, true},
		{"siw, we prefer CRC", "10 02 00 08 0080 0001 80000000", "50 02 00 08 0001 0080 c0de", agreed{crc: true, ird: 1, ord: 128}, false},
		{"siw with CRC", "50 02 00 08 0080 0001 80000000", "50 02 00 08 0001 0080 c0de", agreed{crc: true, ird: 1, ord: 128}, true},
		{"siw, revision 1", "00 01 00 04 80000000", "00 01 00 02 c0de", agreed{ird: 200, ord: 150}, true},
		{"siw, peer to peer", "10 02 00 08 8080 c001 80000000", "10 02 00 08 8001 c080 c0de", agreed{ird: 1, ord: 128, rtr: RTRWrite | RTRRead}, true},
		{"siw with GSO", "18 02 00 08 0080 0001 80000000", "10 02 00 08 0001 0080 c0de", agreed{ird: 1, ord: 128}, true},
		{"rping", "10 02 00 04 0001 0001", "10 02 00 08 0001 0001 c0de", agreed{ird: 1, ord: 1}, true},
		{"revision 2 that is not enhanced", "00 02 00 04 80000000", "00 02 00 02 c0de", agreed{ird: 200, ord: 150}, true},
		{"more than we want", "10 02 00 04 012c 012c", "10 02 00 08 00c8 0096 c0de", agreed{ird: 200, ord: 150}, true},
		{"no Reads", "10 02 00 04 0000 0000", "10 02 00 08 0000 0000 c0de", agreed{}, true},
		{"markers", "90 02 00 04 0001 0001", "10 02 00 08 0001 0001 c0de", agreed{markers: true, ird: 1, ord: 1}, true},
		{"IWARP-14 depths are not negotiated", "10 02 00 04 3fff 3fff", "10 02 00 08 3fff 3fff c0de", agreed{ird: 200, ord: 150}, true},
		{"IWARP-14 IRD is not negotiated", "10 02 00 04 3fff 0002", "10 02 00 08 0002 3fff c0de", agreed{ird: 2, ord: 150}, true},
		{"IWARP-15 all forms", "10 02 00 04 c001 c001", "10 02 00 08 c001 c001 c0de", agreed{ird: 1, ord: 1, rtr: RTRWrite | RTRRead | RTRSend}, true},
		{"IWARP-15 a Read, but no depth", "10 02 00 04 8001 4000", "10 02 00 08 8000 8001 c0de", agreed{ord: 1, rtr: RTRWrite}, true},
		{"IWARP-15 no form", "10 02 00 04 8001 0001", "10 02 00 08 8001 8001 c0de", agreed{ird: 1, ord: 1, rtr: RTRWrite}, true},
		{"IWARP-15 forms without A", "10 02 00 04 4001 c001", "10 02 00 08 0001 0001 c0de", agreed{ird: 1, ord: 1}, true},
		{"IWARP-10 revision 0", "00 00 00 00", "", agreed{}, true},
		{"revision 3", "10 03 00 04 0001 0001", "", agreed{}, true},
		{"IWARP-11 enhanced revision 1", "10 01 00 04 0001 0001", "", agreed{}, true},
		{"enhanced without the words", "10 02 00 03 000000", "", agreed{}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, err := readFrame(bytes.NewReader(append([]byte(requestKey), unhex(t, tt.request)...)), requestKey)
			if tt.want == "" {
				if !errors.Is(err, ErrRevision) && !errors.Is(err, ErrMPA) {
					t.Fatalf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			reply, a := answer(f, wish{crc: !tt.nocrc, ird: 200, ord: 150}, []byte{0xc0, 0xde})
			if a != tt.agreed {
				t.Errorf("agreed %+v, want %+v", a, tt.agreed)
			}
			want := tt.want
			if !f.enhanced {
				want = strings.Replace(want, "00 02 00 08", "00 02 00 02", 1)
			} else {
				want = strings.Replace(want, "00 08", "00 06", 1) // two bytes of private data here
			}
			if b := reply.append(nil, replyKey); !bytes.Equal(b[16:], unhex(t, want)) {
				t.Errorf("reply %x, want %s", b[16:], want)
			}
		})
	}
}

// What the initiator makes of replies (IWARP-9, 11 to 16).
func TestConclude(t *testing.T) {
	v1, v2 := frame{revision: 1}, frame{revision: 2, enhanced: true, ird: 10, ord: 20}
	with := func(f frame, change func(*frame)) frame { change(&f); return f }
	p2p := with(v2, func(f *frame) { f.peer, f.rtr = true, RTRWrite|RTRRead|RTRSend })
	tests := []struct {
		name           string
		request, reply frame
		agreed         agreed
		terminate      fault
		err            error
	}{
		{"revision 1", v1, v1, agreed{ird: 10, ord: 20}, 0, nil},
		{"revision 1 with CRC and markers", v1, with(v1, func(f *frame) { f.crc, f.markers = true, true }), agreed{crc: true, markers: true, ird: 10, ord: 20}, 0, nil},
		{"CRC because we asked", with(v1, func(f *frame) { f.crc = true }), v1, agreed{crc: true, ird: 10, ord: 20}, 0, nil},
		{"enhanced", v2, with(v2, func(f *frame) { f.ird, f.ord = 20, 10 }), agreed{ird: 10, ord: 20}, 0, nil},
		{"the peer serves less", v2, with(v2, func(f *frame) { f.ird, f.ord = 3, 4 }), agreed{ird: 10, ord: 3}, 0, nil},
		{"IWARP-13 the peer wants more", v2, with(v2, func(f *frame) { f.ird, f.ord = 3, 11 }), agreed{}, faultOf(2, 0, 6), ErrNegotiation},
		{"IWARP-14 not negotiated", v2, with(v2, func(f *frame) { f.ird, f.ord = depthMask, depthMask }), agreed{ird: 10, ord: 20}, 0, nil},
		{"IWARP-11 not enhanced", v2, with(v2, func(f *frame) { f.enhanced = false }), agreed{}, 0, ErrRevision},
		{"IWARP-11 enhanced unasked", v1, v2, agreed{}, 0, ErrRevision},
		{"a Write", p2p, with(p2p, func(f *frame) { f.ird, f.ord = 20, 10 }), agreed{ird: 10, ord: 20, rtr: RTRWrite}, 0, nil},
		{"a Read", p2p, with(p2p, func(f *frame) { f.ird, f.ord, f.rtr = 20, 10, RTRRead|RTRSend }), agreed{ird: 10, ord: 20, rtr: RTRRead}, 0, nil},
		{"a Send, as no Read is served", p2p, with(p2p, func(f *frame) { f.ird, f.ord, f.rtr = 0, 10, RTRRead|RTRSend }), agreed{ird: 10, rtr: RTRSend}, 0, nil},
		{"IWARP-16 no common form", with(p2p, func(f *frame) { f.rtr = RTRSend }), with(p2p, func(f *frame) { f.ord, f.rtr = 10, RTRWrite }), agreed{}, faultOf(2, 0, 7), ErrNegotiation},
		{"IWARP-16 not peer to peer", p2p, v2, agreed{}, faultOf(2, 0, 6), ErrNegotiation},
		{"IWARP-16 not peer to peer, depths fine", p2p, with(v2, func(f *frame) { f.ord = 1 }), agreed{}, faultOf(2, 0, 7), ErrNegotiation},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, term, err := conclude(&tt.request, &tt.reply, wish{crc: tt.request.crc, ird: 10, ord: 20})
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
				t.Fatalf("got %v", err)
			}
			if err == nil && a != tt.agreed {
				t.Errorf("agreed %+v, want %+v", a, tt.agreed)
			}
			if (term != nil) != (tt.terminate != 0) || term != nil && *term != tt.terminate {
				t.Errorf("Terminate %v, want %v", term, tt.terminate)
			}
		})
	}
}

// Random frames come back as they were; every proper prefix fails (IWARP-4), and nothing behind a frame is read.
func TestFrames(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		f := frame{markers: rnd.IntN(2) > 0, crc: rnd.IntN(2) > 0, reject: rnd.IntN(2) > 0, revision: uint8(1 + rnd.IntN(2)), private: []byte{}}
		if f.revision == 2 && rnd.IntN(4) > 0 {
			f.enhanced, f.ird, f.ord = true, rnd.IntN(depthMask+1), rnd.IntN(depthMask+1)
			if rnd.IntN(2) > 0 {
				f.peer, f.rtr = true, RTR(rnd.IntN(8))
			}
		}
		f.private = pattern(rnd.Uint64(), make([]byte, rnd.IntN(f.room()+1)))
		b := f.append(nil, replyKey)
		r := bytes.NewReader(append(bytes.Clone(b), 1, 2, 3))
		got, err := readFrame(r, replyKey)
		if err != nil || !reflect.DeepEqual(*got, f) || r.Len() != 3 {
			t.Fatalf("%+v: got %+v, %v", f, got, err)
		}
		for _, n := range []int{0, rnd.IntN(len(b)), len(b) - 1} {
			if _, err := readFrame(bytes.NewReader(b[:n]), replyKey); err == nil {
				t.Fatalf("%d bytes of %d are a frame", n, len(b))
			}
		}
		if _, err := readFrame(bytes.NewReader(b), requestKey); !errors.Is(err, ErrMPA) {
			t.Fatalf("got %v", err)
		}
	}
	long := append([]byte(requestKey), 0, 1, 2, 1)
	long = append(long, make([]byte, 513)...)
	if _, err := readFrame(bytes.NewReader(long), requestKey); !errors.Is(err, ErrMPA) {
		t.Errorf("513 bytes of private data: got %v", err)
	}
}

// A connection that does not bring a valid request is closed, without an answer; iSCSI's login is noticed by its first byte (IWARP-1, 2, 3, 4).
func TestListenerRefuses(t *testing.T) {
	p, err := New(Options{StartupTimeout: 200 * time.Millisecond, MaxPending: 3})
	if err != nil {
		t.Fatal(err)
	}
	l, err := p.Listen(context.Background(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func() net.Conn {
		nc, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return nc
	}
	for _, b := range []string{
		"", requestKey, replyKey, "\x43", "MPA ID Req Fram\x00", requestKey + "\x00\x00\x00\x00", requestKey + "\x10\x03\x00\x04\x00\x01\x00\x01",
		requestKey + "\x00\x01\x02\x01" + strings.Repeat("x", 513), requestKey + "\x10\x02\x00\x03\x00\x00\x00",
	} {
		nc := dial()
		io.WriteString(nc, b)
		nc.SetDeadline(time.Now().Add(20 * time.Second))
		if got, _ := io.ReadAll(nc); len(got) > 0 { // closed, or reset because of what it did not read
			t.Errorf("%q: answered by %q", b, got)
		}
		nc.Close()
	}
	// Connections that stop are bounded in number; later ones are closed at once, and those that ask in time are served.
	var idle []net.Conn
	for range 10 {
		idle = append(idle, dial())
	}
	for _, nc := range idle {
		nc.SetDeadline(time.Now().Add(20 * time.Second))
		if got, _ := io.ReadAll(nc); len(got) > 0 {
			t.Errorf("got %q", got)
		}
		nc.Close()
	}
	nc := dial()
	defer nc.Close()
	io.WriteString(nc, requestKey+"\x00\x01\x00\x00")
	req, err := l.Accept(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if err := req.Reject(nil); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(nc); err != nil || string(got) != replyKey+"\x20\x01\x00\x00" {
		t.Errorf("%q, %v", got, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A peer whose reply does not come, is none, or cannot be agreed with (IWARP-2, 13, 16).
func TestConnectFails(t *testing.T) {
	tests := []struct {
		name  string
		opt   Options
		reply string // hex; from byte 16 if it starts with +
		want  error
		sent  *fault // the Terminate that follows our request
	}{
		{"nothing", Options{StartupTimeout: 100 * time.Millisecond}, "", nil, nil},
		{"a request: both are initiators", Options{}, hex.EncodeToString([]byte(requestKey)) + "00010000", ErrMPA, nil},
		{"revision 1", Options{}, "+00010000", ErrRevision, nil},
		{"too much private data", Options{}, "+00010201", ErrMPA, nil},
		{"insufficient IRD", Options{}, "+100200040001 0003", ErrNegotiation, ptr(faultOf(2, 0, 6))},
		{"no RTR", Options{PeerToPeer: true, RTR: RTRSend}, "+100200048001 8001", ErrNegotiation, ptr(faultOf(2, 0, 7))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnd(t, tt.opt)
			a, b := overTCP(t)
			defer b.Close()
			d := e.p.Initiate(a, nil)
			e.create(d)
			if tt.reply != "" {
				s, part := strings.CutPrefix(tt.reply, "+")
				reply := unhex(t, s)
				if part {
					reply = append([]byte(replyKey), reply...)
				}
				(&raw{t, b}).write(reply)
			}
			_, err := d.Connect(context.Background(), rdma.ConnParams{IRD: 2, ORD: 2})
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Fatalf("got %v", err)
			}
			e.ended()
			got, err := io.ReadAll(b)
			if err != nil && tt.sent != nil {
				t.Fatal(err)
			}
			if tt.sent != nil {
				got = got[frameLen+4:]
				if want := fpdu(true, segment{op: opTerminate, queue: 2, msn: 1, last: true}, appendTerminate(nil, *tt.sent, nil)); !bytes.Equal(got, want) {
					t.Errorf("%x, want %x", got, want)
				}
			}
			if _, err := d.Connect(context.Background(), rdma.ConnParams{}); !errors.Is(err, rdma.ErrClosed) {
				t.Errorf("Connect again: %v", err)
			}
		})
	}
}

func ptr[T any](x T) *T { return &x }

// Every form of the first frame, byte for byte, and that it takes no receive and gives no completion (IWARP-16, IWARP-17).
func TestFirstFrames(t *testing.T) {
	for _, tt := range []struct {
		form RTR
		want string
	}{
		{RTRWrite, "000e c140 00000001 0000000000000000"},
		{RTRRead, "002e 4141 00000000 00000001 00000001 00000000" + strings.Repeat("00", 28)},
		{RTRSend, "0012 4143 00000000 00000000 00000001 00000000"},
	} {
		i, r := newEnd(t, Options{PeerToPeer: true, RTR: tt.form, NoCRC: true}), newEnd(t, Options{NoCRC: true})
		var seen bytes.Buffer
		tap := func(t testing.TB) (net.Conn, net.Conn) {
			a, b := overTCP(t)
			return &tapped{Conn: a, seen: &seen}, b
		}
		r.t = t
		connect(t, tap, i, r, rdma.ConnParams{IRD: 2, ORD: 2}, rdma.ConnParams{IRD: 2, ORD: 2})
		// The responder talks first, as it may after that frame; the initiator counts on from it.
		i.recv(rdma.RecvWR{ID: 1})
		r.recv(rdma.RecvWR{ID: 2})
		r.send(rdma.SendWR{Op: rdma.OpSend})
		if wc := i.good(1)[0]; wc.ID != 1 {
			t.Errorf("%+v", wc)
		}
		w := r.bind(0, 100, rdma.RemoteRead)
		copy(r.buf, "hello")
		i.send(rdma.SendWR{ID: 3, Op: rdma.OpRead, SGE: []rdma.SGE{i.sge(0, 5)}, RKey: w.RKey(), RemoteAddr: w.Addr(), Flags: rdma.Signaled},
			rdma.SendWR{Op: rdma.OpSend})
		if wc := i.good(1)[0]; wc.ID != 3 || string(i.buf[:5]) != "hello" {
			t.Errorf("%+v", wc)
		}
		if wc := r.good(1)[0]; wc.ID != 2 || wc.Bytes != 0 {
			t.Errorf("%+v", wc)
		}
		i.qp.Close()
		r.qp.Close()
		w.Close()
		if b := seen.Bytes()[frameLen+4:]; !bytes.HasPrefix(b, unhex(t, tt.want)) {
			t.Errorf("%x, want %s", b, tt.want)
		}
	}
}

// tapped keeps what is written.
type tapped struct {
	net.Conn
	seen *bytes.Buffer
}

func (c *tapped) Write(b []byte) (int, error) {
	c.seen.Write(b)
	return c.Conn.Write(b)
}

// A peer that agreed on a first frame and sends another, or one of another form (IWARP-16).
func TestFirstFrameAbuse(t *testing.T) {
	write := fpdu(true, segment{op: opWrite, tagged: true, last: true}, nil)
	send := fpdu(true, segment{op: opSend, msn: 1, last: true}, nil)
	for name, tt := range map[string]struct {
		words string
		first []byte
	}{
		"a Send with bytes":            {"c001 0001", fpdu(true, segment{op: opSend, msn: 1, last: true}, []byte("x"))},
		"a Write instead of a Send":    {"c001 0001", write},
		"a Send instead of a Write":    {"8001 8001", send},
		"a Terminate":                  {"8001 8001", fpdu(true, segment{op: opTerminate, queue: 2, msn: 1, last: true}, make([]byte, 4))},
		"a Read with the wrong MSN":    {"8001 4001", fpdu(true, segment{op: opReadRequest, queue: 1, msn: 2, last: true}, make([]byte, 28))},
		"a Write that does not end":    {"8001 8001", fpdu(true, segment{op: opWrite, tagged: true}, nil)},
		"a Write with bytes to STag 0": {"8001 8001", fpdu(true, segment{op: opWrite, tagged: true, last: true}, []byte("x"))},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnd(t, Options{})
			nc, ours := overTCP(t)
			defer nc.Close()
			peer := &raw{t, nc}
			peer.write(append([]byte(requestKey), unhex(t, "10020004"+tt.words)...))
			req, err := e.p.Respond(context.Background(), ours, nil)
			if err != nil {
				t.Fatal(err)
			}
			e.create(req)
			e.recv(rdma.RecvWR{ID: 5})
			if err := req.Accept(context.Background(), rdma.ConnParams{IRD: 1, ORD: 1}); err != nil {
				t.Fatal(err)
			}
			peer.write(tt.first)
			if b := peer.rest(); len(b) != frameLen+enhancedLen {
				t.Errorf("%x", b)
			}
			if err := e.ended(); !errors.Is(err, rdma.ErrTransport) {
				t.Errorf("ended by %v", err)
			}
			if wc := e.wait(1)[0]; wc.ID != 5 || wc.Status != rdma.StatusFlushed {
				t.Errorf("%+v", wc)
			}
		})
	}
}

// What was read of a stream before it became iWARP, and what arrives in one piece with the MPA frame, is not lost (IWARP-7, IWARP-R1).
func TestSurplus(t *testing.T) {
	request := (&frame{revision: 1}).append(nil, requestKey)
	all := append(bytes.Clone(request), fpdu(true, segment{op: opSend, msn: 1, last: true}, []byte("first"))...)
	for n := range len(all) + 1 {
		e := newEnd(t, Options{})
		nc, ours := overTCP(t)
		peer := &raw{t, nc}
		peer.write(all[n:])
		req, err := e.p.Respond(context.Background(), ours, all[:n])
		if err != nil {
			t.Fatal(err)
		}
		e.create(req)
		e.recv(rdma.RecvWR{SGE: []rdma.SGE{e.sge(0, 100)}})
		if err := req.Accept(context.Background(), rdma.ConnParams{}); err != nil {
			t.Fatal(err)
		}
		if wc := e.good(1)[0]; wc.Bytes != 5 || string(e.buf[:5]) != "first" {
			t.Errorf("%+v", wc)
		}
		nc.Close()
		e.qp.Close()
	}
}
