package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// Attacks that only count by their number. Each of them runs beside a connection of the same protection domain, which must not notice, and everything that they
// made us hold must be given back.

// long asks for the full number where it takes minutes.
func long() bool { return os.Getenv("ISERGATE_LONG") == "1" }

// held is what the process holds for connections.
type held struct{ goroutines, descriptors int }

func holding(t testing.TB) held {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip(err)
	}
	return held{runtime.NumGoroutine(), len(fds)}
}

// eventually waits until f is true.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(30 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: has not come true", what)
		}
	}
}

// settled waits until no more is held than before.
func settled(t testing.TB, before held) {
	t.Helper()
	var now held
	defer func() {
		if t.Failed() {
			t.Logf("%+v are held, %+v before", now, before)
		}
	}()
	eventually(t, "everything is given back", func() bool {
		now = holding(t)
		return now.goroutines <= before.goroutines && now.descriptors <= before.descriptors
	})
}

// bystander is a connection that is not attacked, of an end's own domain.
type bystander struct {
	near, far *end
	window    rdma.Window
	n         int
}

// newBystander uses the end's buffer from 512 KiB on.
func newBystander(t *testing.T, e *end) *bystander {
	b := &bystander{near: e.sibling(), far: newEnd(t, Options{})}
	connect(t, overTCP, b.far, b.near, rdma.ConnParams{IRD: 2, ORD: 2}, rdma.ConnParams{IRD: 2, ORD: 2})
	b.far.recv(rdma.RecvWR{})
	b.near.recv(rdma.RecvWR{})
	b.far.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Inline}) // the responder may talk now
	b.near.good(1)
	b.window = b.near.bind(512<<10, 64<<10, rdma.RemoteRead|rdma.RemoteWrite)
	return b
}

// work writes to the near end, reads it back and compares.
func (b *bystander) work() {
	f := b.far
	f.t.Helper()
	b.n++
	pattern(uint64(b.n), f.buf[:20000])
	clear(f.buf[32<<10 : 32<<10+20000])
	f.send(rdma.SendWR{Op: rdma.OpWrite, SGE: []rdma.SGE{f.sge(0, 20000)}, RKey: b.window.RKey(), RemoteAddr: b.window.Addr()},
		rdma.SendWR{Op: rdma.OpRead, Flags: rdma.Signaled, SGE: []rdma.SGE{f.sge(32<<10, 20000)}, RKey: b.window.RKey(), RemoteAddr: b.window.Addr()})
	f.good(1)
	if !bytes.Equal(f.buf[:20000], f.buf[32<<10:32<<10+20000]) {
		f.t.Fatal("a connection that was not attacked has wrong bytes")
	}
}

func (b *bystander) close() {
	b.far.qp.Close()
	b.near.qp.Close()
	b.window.Close()
}

// serve accepts what comes to l as a target would: queue pair, receives, Accept. It keeps at most keep connections whose peers have not talked; the
// oldest is closed. Every fifth is rejected. The function that it returns waits for its end, after that of l.
func (e *end) serve(l rdma.Listener, keep int, served *atomic.Int64) (wait func()) {
	slab, err := rdma.NewSlab(context.Background(), e.arena, 4*keep, 128)
	if err != nil {
		e.t.Fatal(err)
	}
	type conn struct {
		end
		bufs []int
	}
	var conns []*conn
	end := func(c *conn) {
		c.qp.Close()
		c.flush(len(c.bufs))
		for _, i := range c.bufs {
			slab.Give(i)
		}
		c.cq.Close()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			req, err := l.Accept(context.Background())
			if err != nil {
				break
			}
			served.Add(1)
			if n%5 == 4 {
				req.Reject([]byte("no"))
				continue
			}
			if len(conns) == keep {
				end(conns[0])
				conns = append(conns[:0], conns[1:]...)
			}
			c := &conn{end: *e.sibling()}
			c.create(req)
			for range 2 {
				i, ok := slab.Take()
				if !ok {
					e.t.Error("a receive buffer is lost")
					return
				}
				c.bufs = append(c.bufs, i)
				c.recv(rdma.RecvWR{ID: uint64(i), SGE: []rdma.SGE{slab.SGE(i, 128)}})
			}
			req.Accept(context.Background(), rdma.ConnParams{IRD: 4, ORD: 4}) // an error has ended it, and flushes
			conns = append(conns, c)
		}
		for _, c := range conns {
			end(c)
		}
		slab.Close()
	}()
	return func() { <-done }
}

// flush checks that n receives, all there are, are complete.
func (e *end) flush(n int) {
	var wcs [8]rdma.WC
	k, err := e.cq.Poll(wcs[:])
	if err != nil || k != n {
		e.t.Errorf("%d of %d completions, %v", k, n, err)
	}
}

// 10,000 peers that stop after their MPA request, or within it: some stay, some close, some reset. What they cost is bounded while they are there and nothing
// when they are gone, and the connections of others work.
func TestPeersThatStop(t *testing.T) {
	const all, wave, keep = 10_000, 500, 32
	e := newEnd(t, Options{MaxPending: 64})
	other := newBystander(t, e)
	before := holding(t)
	used := e.mem.Usage().UsedBytes
	l, err := e.p.Listen(context.Background(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served atomic.Int64
	wait := e.serve(l, keep, &served)
	request := (&frame{revision: 2, enhanced: true, ird: 4, ord: 4, private: []byte{0x80, 0, 0, 0}}).append(nil, requestKey)
	most := held{}
	for n := 0; n < all; {
		var open []net.Conn
		for range wave {
			nc, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			b := request
			if n%7 == 0 {
				b = b[:n/7%len(b)]
			}
			nc.SetDeadline(time.Now().Add(20 * time.Second))
			nc.Write(b) // fails if the listener has enough of those
			open = append(open, nc)
			n++
			if n%100 == 0 {
				other.work()
			}
		}
		now := holding(t)
		most = held{max(most.goroutines, now.goroutines-before.goroutines), max(most.descriptors, now.descriptors-before.descriptors-wave)}
		for i, nc := range open {
			if i%2 == 0 {
				nc.(*net.TCPConn).SetLinger(0)
			}
			nc.Close()
		}
	}
	// Two goroutines and a descriptor of each connection that is kept, one of each that is pending; and those of the listener.
	if most.goroutines > 3*keep+2*64+20 || most.descriptors > 2*keep+64+70 {
		t.Errorf("%+v more were held at a time", most)
	}
	t.Logf("%d of %d came to the user; at most %+v more were held at a time", served.Load(), all, most)
	if served.Load() < all/100 {
		t.Error("nobody was served")
	}
	// An honest peer is still served.
	i := newEnd(t, Options{})
	for connected := false; !connected; {
		d, err := i.p.Resolve(context.Background(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		i.create(d)
		_, err = d.Connect(context.Background(), rdma.ConnParams{IRD: 4, ORD: 4})
		connected = err == nil // else it was one of those that are rejected
		i.qp.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	wait()
	other.work()
	settled(t, before)
	if now := e.mem.Usage().UsedBytes; now != used {
		t.Errorf("%d bytes of the arena are used, %d before", now, used)
	}
	other.close()
}

// 10^6 guesses at the STags and TOs of 64 windows that stay: more than a peer gets, whose connection, and with it all its STags, ends with
// the first wrong one. Nothing is read or written.
func TestGuessesAtTags(t *testing.T) {
	const windows = 64
	guesses := 1_000_000
	if testing.Short() {
		guesses = 50_000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	mem := bytes.Repeat([]byte{0xa5}, windows*4096)
	d := newDomain()
	mr, err := d.Register(mem, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	q := queues{tags: newTagTable()}
	q.recvs.init(1, false)
	q.reads.init(1)
	q.resps.init(1)
	q.recvs.post([]rdma.RecvWR{{}})
	tags := make(map[uint32]bool)
	for i := range windows {
		w, _ := d.AllocWindow()
		key, _, bound, err := q.tags.reserve(&rdma.Bind{Window: w, MR: mr, Buf: mem[i*4096 : (i+1)*4096], Access: rdma.RemoteRead | rdma.RemoteWrite}, true)
		if err != nil || !bound {
			t.Fatal("bind", err)
		}
		tags[key] = true
	}
	var r receiver
	take(&r)
	buf := r.buf
	var s sender
	s.init(true, false, maxULPDU)
	hits := 0
	for range guesses {
		tag, to := rnd.Uint32(), rnd.Uint64()
		switch rnd.IntN(4) {
		case 0:
			to = 0
		case 1:
			to &^= 0xfff
		}
		s.clear()
		form := rnd.IntN(3)
		switch form {
		case 0:
			s.segment(&segment{op: opWrite, tagged: true, last: true, stag: tag, to: to}, []byte("mine"))
		case 1:
			var b [readRequestLen]byte
			(&readRequest{sinkTag: 1, size: 8, sourceTag: tag, sourceTO: to}).encode(b[:])
			s.segment(&segment{op: opReadRequest, queue: queueRead, last: true, msn: 1}, b[:])
		case 2:
			for tags[tag] { // a hit would be allowed: an invalidation needs no TO
				tag = rnd.Uint32()
			}
			s.segment(&segment{op: opSendInvalidate, last: true, msn: 1, stag: tag}, nil)
		}
		r = receiver{buf: buf, view: buf}
		r.init(true, 0, &q)
		r.to = copy(buf, s.out)
		var e event
		if !r.step(&e) || e.kind != eventFault {
			t.Fatalf("STag %#x, TO %#x: %+v", tag, to, e)
		}
		if e.fault.code() != 0 && form < 2 { // the STag of one of them, but not its TO
			hits++
		}
	}
	(*sock)(nil).release(&r)
	t.Logf("%d guesses of %d were an STag", hits, guesses)
	if hits > 5 {
		t.Errorf("%d guesses of %d were one of %d STags", hits, guesses, windows)
	}
	if !bytes.Equal(mem, bytes.Repeat([]byte{0xa5}, len(mem))) {
		t.Error("memory was written")
	}
	if q.resps.oldest() != nil {
		t.Error("a Read was accepted")
	}
}

// The same over connections of TCP: each has 2 windows, gets one guess, and ends by the Terminate for it. ISERGATE_LONG=1 makes it 10^6 connections.
func TestGuessesOverConnections(t *testing.T) {
	guesses := 2000
	if long() {
		guesses = 1_000_000
	} else if testing.Short() {
		guesses = 300
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	e := newEnd(t, Options{})
	other := newBystander(t, e)
	before := holding(t)
	used := e.mem.Usage().UsedBytes
	l, err := e.p.Listen(context.Background(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const attackers = 2
	image := bytes.Clone(e.buf[:512<<10])
	var wg sync.WaitGroup
	target := func(slot int) error {
		c := e.sibling()
		defer c.cq.Close()
		req, err := l.Accept(context.Background())
		if err != nil {
			return err
		}
		c.create(req)
		defer c.qp.Close()
		at := slot * (128 << 10)
		if _, err := c.qp.PostRecv([]rdma.RecvWR{{ID: 1, SGE: []rdma.SGE{c.sge(at, 128)}}, {ID: 2, SGE: []rdma.SGE{c.sge(at+128, 128)}}}); err != nil {
			return err
		}
		if err := req.Accept(context.Background(), rdma.ConnParams{IRD: 4, ORD: 4}); err != nil {
			return err
		}
		var wcs [8]rdma.WC
		for n := range 2 {
			w, err := c.pd.AllocWindow()
			if err != nil {
				return err
			}
			defer w.Close()
			bind := rdma.Bind{Window: w, MR: c.arena.MR(), Buf: c.buf[at+(n+1)*4096 : at+(n+2)*4096], Access: rdma.RemoteRead | rdma.RemoteWrite}
			if _, err := c.qp.PostSend([]rdma.SendWR{{Op: rdma.OpBind, Bind: bind}}); err != nil && !errors.Is(err, rdma.ErrDisconnected) {
				return err
			}
		}
		<-c.qp.Done()
		if err := c.qp.Err(); !errors.Is(err, rdma.ErrAccess) {
			return fmt.Errorf("ended by %w", err)
		}
		c.qp.Close()
		for got := 0; got < 2; {
			k, err := c.cq.Wait(context.Background(), wcs[:], false)
			if err != nil {
				return err
			}
			for _, wc := range wcs[:k] {
				if wc.Op == rdma.OpRecv {
					got++
				}
			}
		}
		return nil
	}
	attack := func(rnd *rand.Rand) error {
		nc, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		defer nc.Close()
		nc.(*net.TCPConn).SetLinger(0) // no port waits for its peer
		nc.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := nc.Write((&frame{revision: 2, crc: true, enhanced: true, ird: 4, ord: 4}).append(nil, requestKey)); err != nil {
			return err
		}
		if _, err := readFrame(nc, replyKey); err != nil {
			return err
		}
		tag, to := rnd.Uint32(), rnd.Uint64()&^0xfff
		// The first frame opens the other half, so that the Terminate may come.
		b := fpdu(true, segment{op: opWrite, tagged: true, last: true}, nil)
		want := faultOf(1, 1, 0)
		switch rnd.IntN(3) {
		case 0:
			b = append(b, fpdu(true, segment{op: opWrite, tagged: true, last: true, stag: tag, to: to}, []byte("mine"))...)
		case 1:
			var r [readRequestLen]byte
			(&readRequest{sinkTag: 1, size: 8, sourceTag: tag, sourceTO: to}).encode(r[:])
			b = append(b, fpdu(true, segment{op: opReadRequest, queue: queueRead, last: true, msn: 1}, r[:])...)
			want = faultOf(0, 1, 0)
		case 2:
			b = append(b, fpdu(true, segment{op: opSendInvalidate, last: true, msn: 1, stag: tag}, nil)...)
			want = faultOf(0, 1, 9)
		}
		if _, err := nc.Write(b); err != nil {
			return err
		}
		got, err := io.ReadAll(nc)
		if err != nil {
			return err
		}
		if len(got) < lengthLen+untaggedLen+6 || int(binary.BigEndian.Uint16(got))+lengthLen > len(got) || got[3]&15 != byte(opTerminate) {
			return fmt.Errorf("no Terminate: %x", got)
		}
		if p := got[lengthLen+untaggedLen:]; faultOf(uint32(p[0]>>4), uint32(p[0]&15), uint32(p[1])) != want {
			return fmt.Errorf("Terminate %x, want %v", p[:4], want)
		}
		return nil
	}
	for slot := range attackers {
		wg.Add(2)
		go func() {
			defer wg.Done()
			for range guesses / attackers {
				if err := target(slot); err != nil {
					t.Errorf("target: %v", err)
					l.Close()
					return
				}
			}
		}()
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(seed, uint64(slot)))
			for range guesses / attackers {
				if err := attack(rnd); err != nil {
					t.Errorf("attacker: %v", err)
					l.Close()
					return
				}
			}
		}()
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for over := false; !over; {
		other.work()
		select {
		case <-done:
			over = true
		case <-time.After(time.Millisecond):
		}
	}
	l.Close()
	if !bytes.Equal(image, e.buf[:512<<10]) {
		t.Error("memory was written")
	}
	settled(t, before)
	if now := e.mem.Usage().UsedBytes; now != used {
		t.Errorf("%d bytes of the arena are used, %d before", now, used)
	}
	if n := e.pd.(*domain).windows; n != 1 {
		t.Errorf("%d windows are left, want that of the other connection", n)
	}
	other.close()
}

// More Reads than IRD while none can be answered: those within are taken, the next is refused (IWARP-54).
func TestReadsBeyondIRD(t *testing.T) {
	for _, ird := range []int{1, 2, 7} {
		m := newMachine(t, true, 0)
		m.q.resps.init(ird)
		var b []byte
		var req [readRequestLen]byte
		(&readRequest{sinkTag: 1, size: 10, sourceTag: m.readable, sourceTO: m.readableBase}).encode(req[:])
		for n := range ird + 1 {
			b = append(b, fpdu(true, segment{op: opReadRequest, queue: 1, msn: uint32(n + 1), last: true}, req[:])...)
		}
		got := m.feed(b, func() int { return len(b) }, true)
		if len(got) != ird+1 || got[ird].kind != eventFault || got[ird].fault != faultOf(1, 2, 2) {
			t.Errorf("IRD %d: %d events, the last %+v", ird, len(got), got[len(got)-1])
		}
		m.check(t)
	}
}

// Every length of private data that matters, of both revisions, goes to the user as it came, or the connection is closed without an answer (IWARP-4).
func TestPrivateData(t *testing.T) {
	e := newEnd(t, Options{})
	for _, revision := range []uint8{1, 2} {
		for _, tt := range []struct {
			n       int
			refused bool
		}{{0, revision == 2}, {3, revision == 2}, {4, false}, {511, false}, {512, false}, {513, true}, {65535, true}} {
			nc, ours := overTCP(t)
			flags := byte(0)
			if revision == 2 {
				flags = flagEnhanced
			}
			data := pattern(uint64(tt.n), make([]byte, tt.n))
			b := append([]byte(requestKey), flags, revision)
			b = append(binary.BigEndian.AppendUint16(b, uint16(tt.n)), data...)
			peer := &raw{t, nc}
			peer.write(b)
			req, err := e.p.Respond(context.Background(), ours, nil)
			if tt.refused {
				if !errors.Is(err, ErrMPA) {
					t.Errorf("revision %d, %d bytes: %v", revision, tt.n, err)
				}
				ours.Close()
			} else if err != nil {
				t.Errorf("revision %d, %d bytes: %v", revision, tt.n, err)
			} else {
				if revision == 2 {
					data = data[enhancedLen:]
				}
				if p := req.Peer().PrivateData; !bytes.Equal(p, data) {
					t.Errorf("revision %d, %d bytes: the user gets %d", revision, tt.n, len(p))
				}
				if err := req.Reject(nil); err != nil {
					t.Error(err)
				}
				if _, err := readFrame(nc, replyKey); err != nil {
					t.Error(err)
				}
			}
			nc.Close()
		}
	}
}
