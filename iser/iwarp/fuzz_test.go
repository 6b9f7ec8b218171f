package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// FuzzMPA: any bytes as a frame. What is accepted is encoded again to what matters of it, and can be answered and concluded from.
func FuzzMPA(f *testing.F) {
	for _, b := range []string{
		requestKey + "\x10\x02\x00\x08\x00\x80\x00\x01\x80\x00\x00\x00", replyKey + "\x50\x02\x00\x08\x00\x01\x00\x80\x80\x00\x00\x00", requestKey + "\x00\x01\x00\x00",
		requestKey + "\x98\x02\x00\x04\xc0\x01\xc0\x01", requestKey + "\x10\x02\x00\x04\x3f\xff\x3f\xff", requestKey + "\x20\x03\x02\x00",
	} {
		f.Add([]byte(b))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, key := range []string{requestKey, replyKey} {
			r := bytes.NewReader(b)
			got, err := readFrame(r, key)
			if err != nil {
				continue
			}
			read := len(b) - r.Len()
			again, err := readFrame(bytes.NewReader(got.append(nil, key)), key)
			if err != nil || again.ird != got.ird || again.ord != got.ord || again.rtr != got.rtr || !bytes.Equal(again.private, got.private) || len(got.append(nil, key)) != read {
				t.Fatalf("%+v, again %+v, %v", got, again, err)
			}
			reply, a := answer(got, wish{crc: true, ird: 3, ord: 4}, nil)
			if got.enhanced && got.ird != depthMask && a.ord > got.ird {
				t.Fatalf("ORD %d of an IRD of %d", a.ord, got.ird)
			}
			if got.peer && got.enhanced && (reply.rtr == 0 || !reply.peer) {
				t.Fatalf("%+v", reply)
			}
			back, err := readFrame(bytes.NewReader(reply.append(nil, replyKey)), replyKey)
			if err != nil {
				t.Fatal(err)
			}
			conclude(got, back, wish{ird: 3, ord: 4})
			conclude(&frame{revision: 2, enhanced: true, ird: 3, ord: 4, peer: true, rtr: 7}, got, wish{ird: 3, ord: 4})
		}
	})
}

// fence is memory of which a part may be written to.
type fence struct {
	mem     []byte
	allowed [][2]int
}

func (f *fence) check(t *testing.T) {
	t.Helper()
	at := 0
	for _, a := range append(f.allowed, [2]int{len(f.mem), len(f.mem)}) {
		for ; at < a[0]; at++ {
			if f.mem[at] != 0xa5 {
				t.Fatalf("byte %d was written", at)
			}
		}
		at = a[1]
	}
}

// machine is a receive side without a connection: two receives of 100 bytes, a window to read and write, one to read, a Read under way.
type machine struct {
	fence
	receiver
	q                  queues
	writable, readable uint32
	base, readableBase uint64
}

const (
	fuzzTag  = 0x11223344 // of the sink
	fuzzTO   = 0x5566
	fuzzSize = 700
)

func newMachine(t testing.TB, crc bool, rtr RTR) *machine {
	m := &machine{}
	m.mem = bytes.Repeat([]byte{0xa5}, 8192)
	m.allowed = [][2]int{{100, 150}, {200, 250}, {300, 400}, {1000, 2000}, {4000, 4300}, {4400, 4800}}
	d := newDomain()
	mr, err := d.Register(m.mem, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	m.q.tags = newTagTable()
	m.q.tags.gen.Seed([32]byte{7}) // the same keys in every run
	m.q.recvs.init(2, false)
	m.q.reads.init(2)
	m.q.resps.init(2)
	bind := func(from, to int, a rdma.Access) (uint32, uint64) {
		w, _ := d.AllocWindow()
		key, _, bound, err := m.q.tags.reserve(&rdma.Bind{Window: w, MR: mr, Buf: m.mem[from:to], Access: a}, true)
		if err != nil || !bound {
			t.Fatal("bind", err)
		}
		return key, w.Addr()
	}
	m.writable, m.base = bind(1000, 2000, rdma.RemoteRead|rdma.RemoteWrite)
	m.readable, m.readableBase = bind(2000, 3000, rdma.RemoteRead)
	sge := func(from, to int) rdma.SGE { return rdma.SGE{Buf: m.mem[from:to], LKey: mr.LKey()} }
	m.q.recvs.post([]rdma.RecvWR{{ID: 1, SGE: []rdma.SGE{sge(100, 150), sge(200, 250)}}})
	m.q.recvs.post([]rdma.RecvWR{{ID: 2, SGE: []rdma.SGE{sge(300, 400)}}})
	m.q.reads.push(fuzzTag, fuzzTO, &sendWQE{sge: []rdma.SGE{sge(4000, 4300), sge(4400, 4800)}})
	m.receiver.init(crc, rtr, &m.q)
	return m
}

// feed gives the machine bytes in pieces, directly into its places as far as direct says, and acts on the events as a queue pair does.
func (m *machine) feed(b []byte, cut func() int, direct bool) (events []event) {
	var e event
	for {
		for m.step(&e) {
			events = append(events, e)
			switch e.kind {
			case eventReceived:
				m.q.recvs.pop()
			case eventRead:
				m.q.reads.pop()
			}
		}
		if len(b) == 0 || m.phase == phaseDead {
			(*sock)(nil).release(&m.receiver)
			return events
		}
		n := min(len(b), max(1, cut()))
		take(&m.receiver)
		if !direct {
			n = copy(m.space(len(m.buf)), b[:n])
			m.to += n
			b = b[n:]
			continue
		}
		m.tags.mu.Lock()
		got := 0
		for _, p := range m.places() {
			got += copy(p, b[got:n])
		}
		m.filled(got)
		m.tags.mu.Unlock()
		b = b[got:]
	}
}

// fuzzSeeds are FPDUs of all kinds for a machine.
func fuzzSeeds(m *machine, crc bool) [][]byte {
	var req [readRequestLen]byte
	(&readRequest{sinkTag: 1, size: 10, sourceTag: m.readable, sourceTO: m.readableBase}).encode(req[:])
	big := pattern(1, make([]byte, fuzzSize))
	return [][]byte{
		fpdu(crc, segment{op: opSend, msn: 1, last: true}, []byte("hello")),
		fpdu(crc, segment{op: opSendInvalidate, msn: 1, last: true, stag: m.writable}, []byte("hello")),
		fpdu(crc, segment{op: opSend, msn: 1}, big[:60]),
		fpdu(crc, segment{op: opSend, msn: 1, mo: 60, last: true}, big[:40]),
		fpdu(crc, segment{op: opSendSolicited, msn: 2, last: true}, big[:100]),
		fpdu(crc, segment{op: opWrite, tagged: true, stag: m.writable, to: m.base + 300, last: true}, big),
		fpdu(crc, segment{op: opWrite, tagged: true, last: true}, nil),
		fpdu(crc, segment{op: opReadResponse, tagged: true, stag: fuzzTag, to: fuzzTO}, big[:400]),
		fpdu(crc, segment{op: opReadResponse, tagged: true, stag: fuzzTag, to: fuzzTO + 400, last: true}, big[400:]),
		fpdu(crc, segment{op: opReadRequest, queue: 1, msn: 1, last: true}, req[:]),
		fpdu(crc, segment{op: opTerminate, queue: 2, msn: 1, last: true}, []byte{0x11, 0, 0, 0}),
	}
}

// FuzzFPDU: FPDUs whose header and payload are anything, but whose length and CRC are right, so that they get past MPA. However the bytes are cut and wherever they are
// read to, the machine says the same and writes the same, and only where it may.
func FuzzFPDU(f *testing.F) {
	m := newMachine(f, true, 0)
	for _, b := range fuzzSeeds(m, true) {
		n := binary.BigEndian.Uint16(b)
		f.Add(b[lengthLen:lengthLen+n], []byte(nil), uint8(0), byte(0))
		f.Add(b[lengthLen:lengthLen+n], b[lengthLen:lengthLen+n], uint8(3), byte(1))
	}
	f.Fuzz(func(t *testing.T, u1, u2 []byte, cut uint8, rtr byte) {
		var b []byte
		for _, u := range [][]byte{u1, u2} {
			if len(u) > 65535 {
				return
			}
			at := len(b)
			b = binary.BigEndian.AppendUint16(b, uint16(len(u)))
			b = append(append(b, u...), zero[:padding(len(u))]...)
			s := sender{crc: true, out: b}
			s.close(at, len(u))
			b = s.out
		}
		compare(t, b, int(cut), true, RTR(rtr&7))
	})
}

// compare feeds b to machines in several ways.
func compare(t *testing.T, b []byte, cut int, crc bool, rtr RTR) {
	var first *machine
	var events []event
	for k, way := range []struct {
		cut    int
		direct bool
	}{{len(b), false}, {cut, true}, {cut%5 + 1, false}, {len(b), true}} {
		m := newMachine(t, crc, rtr)
		got := m.feed(b, func() int { return way.cut }, way.direct)
		m.check(t)
		if k == 0 {
			first, events = m, got
			continue
		}
		if len(got) != len(events) {
			t.Fatalf("%d events, before %d", len(got), len(events))
		}
		for j := range got {
			a, b := got[j], events[j]
			if a.kind != b.kind || a.wc != b.wc || a.sse != b.sse || a.fault != b.fault || a.culprit != b.culprit {
				t.Fatalf("event %d is %+v, before %+v", j, a, b)
			}
		}
		for _, x := range []*machine{first, m} {
			if k := x.q.reads.oldest(); k != nil { // what is in a sink before its Read is complete depends on what was guessed
				clear(x.mem[4000:4300])
				clear(x.mem[4400:4800])
			}
		}
		// After a fault, what of the faulty segment was placed depends on how it came.
		if n := len(got); (n == 0 || got[n-1].kind != eventFault) && m.phase == phaseHeader && !m.buffered() && !bytes.Equal(m.mem, first.mem) {
			t.Fatal("memory differs")
		}
	}
}

// FuzzStream: any bytes behind the MPA frames, in any pieces, at the machine and at a whole connection over a pipe: never a panic, never a byte
// outside what is registered for the peer, always an end.
func FuzzStream(f *testing.F) {
	for _, crc := range []bool{true, false} {
		m := newMachine(f, crc, 0)
		seeds := fuzzSeeds(m, crc)
		f.Add(bytes.Join(seeds, nil), crc, uint16(13))
		f.Add(bytes.Join(seeds[2:5], nil), crc, uint16(1))
		f.Add(bytes.Join(seeds[5:], nil), crc, uint16(1000))
		for _, b := range seeds {
			f.Add(b, crc, uint16(len(b)-1))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, crc bool, cut uint16) {
		compare(t, b, int(cut), crc, 0)
		streamConnection(t, b, crc, int(cut))
	})
}

// streamConnection is the same against a queue pair.
func streamConnection(t *testing.T, b []byte, crc bool, cut int) {
	p, err := New(Options{NoCRC: !crc})
	if err != nil {
		t.Fatal(err)
	}
	x := &fence{mem: bytes.Repeat([]byte{0xa5}, 8192), allowed: [][2]int{{100, 150}, {200, 250}, {1000, 2000}}}
	pd, _ := p.AllocPD()
	mr, err := pd.Register(x.mem, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	cq, _ := p.CreateCQ(64)
	q, err := newQueuePair(1, &p.opt, pd, rdma.QPAttr{SendCQ: cq, RecvCQ: cq, MaxSend: 4, MaxRecv: 4, MaxRecvSGE: 2})
	if err != nil {
		t.Fatal(err)
	}
	q.q.tags.gen.Seed([32]byte{7})
	if _, err := q.PostRecv([]rdma.RecvWR{{SGE: []rdma.SGE{{Buf: x.mem[100:150], LKey: mr.LKey()}, {Buf: x.mem[200:250], LKey: mr.LKey()}}}, {}}); err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	if err := q.start(newSock(ours, nil), agreed{crc: crc, ird: 2, ord: 2}, false); err != nil {
		t.Fatal(err)
	}
	w, _ := pd.AllocWindow()
	if _, err := q.PostSend([]rdma.SendWR{{Op: rdma.OpBind, Bind: rdma.Bind{Window: w, MR: mr, Buf: x.mem[1000:2000], Access: rdma.RemoteRead | rdma.RemoteWrite}, Flags: rdma.Signaled}}); err != nil {
		t.Fatal(err)
	}
	var wc [8]rdma.WC
	for n := 0; n == 0; runtime.Gosched() { // who waits would receive, and then nobody for a moment
		if n, err = cq.Poll(wc[:]); err != nil {
			t.Fatal(err)
		}
	}
	drained := make(chan struct{})
	go func() {
		io.Copy(io.Discard, theirs)
		close(drained)
	}()
	for len(b) > 0 {
		n, err := theirs.Write(b[:min(len(b), max(1, cut))])
		if err != nil {
			if !errors.Is(err, io.ErrClosedPipe) {
				t.Fatal(err)
			}
			break
		}
		b = b[n:]
	}
	theirs.Close()
	<-drained
	<-q.Done()
	q.Close()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := mr.Deregister(); err != nil {
		t.Fatal(err)
	}
	x.check(t)
	recvs := 0
	for {
		n, err := cq.Poll(wc[:])
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			break
		}
		for _, c := range wc[:n] {
			if c.Op == rdma.OpRecv {
				recvs++
			}
		}
	}
	if recvs != 2 {
		t.Fatalf("%d of 2 receives are complete", recvs)
	}
}
