package iwarp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// The captures in testdata are sessions of Linux 6.1's ib_iser and LIO over soft-iWARP: each a discovery session and a normal one.
var captures = []struct {
	name  string
	crc   bool
	fpdus map[opcode]int
}{
	{"siw-default", false, map[opcode]int{opWrite: 251, opReadRequest: 1, opReadResponse: 178, opSend: 82, opSendInvalidate: 43}},
	{"siw-unsolicited", false, map[opcode]int{opWrite: 251, opReadRequest: 1, opReadResponse: 138, opSend: 120, opSendInvalidate: 43}},
	{"siw-crc", true, map[opcode]int{opWrite: 59, opSend: 62, opSendInvalidate: 40}},
}

// captured is a DDP message of a capture, in the order in which messages became complete.
type captured struct {
	conn       int
	fromTarget bool
	frames     [][]byte // its FPDUs; or one MPA frame
	mpa        bool
	first      segment
	payload    []byte
}

// segmentOf decodes an FPDU of valid framing.
func segmentOf(t testing.TB, b []byte) (segment, []byte) {
	t.Helper()
	n := int(binary.BigEndian.Uint16(b))
	var s segment
	if f := s.decode(b[lengthLen:]); f != noFault {
		t.Fatalf("%x: %v", b[:20], f)
	}
	return s, b[lengthLen+s.headerLen() : lengthLen+n]
}

// stream is one direction of a TCP connection.
type stream struct {
	conn       int
	fromTarget bool
	next       uint32
	held       map[uint32][]byte
	buf        []byte
	mpa        bool
	msg        map[bool]*captured // by T bit: siw interleaves tagged and untagged
	fpdus      [][]byte           // as they came
}

// add puts a TCP segment into the stream and calls emit for what is complete.
func (s *stream) add(t testing.TB, seq uint32, data []byte, emit func(*captured)) {
	s.held[seq] = data
	for again := true; again; {
		again = false
		for at, d := range s.held {
			if skip := s.next - at; int32(skip) >= 0 {
				delete(s.held, at)
				if int(skip) < len(d) {
					s.buf = append(s.buf, d[skip:]...)
					s.next += uint32(len(d)) - skip
				}
				again = true
			}
		}
	}
	for {
		b := s.buf
		if !s.mpa {
			if len(b) < frameLen || len(b) < frameLen+int(binary.BigEndian.Uint16(b[18:])) {
				return
			}
			n := frameLen + int(binary.BigEndian.Uint16(b[18:]))
			emit(&captured{conn: s.conn, fromTarget: s.fromTarget, mpa: true, frames: [][]byte{bytes.Clone(b[:n])}})
			s.mpa, s.buf = true, b[n:]
			continue
		}
		if len(b) < lengthLen {
			return
		}
		n := int(binary.BigEndian.Uint16(b))
		n += lengthLen + padding(n) + crcLen
		if len(b) < n {
			return
		}
		f := bytes.Clone(b[:n])
		s.fpdus = append(s.fpdus, f)
		s.buf = b[n:]
		seg, payload := segmentOf(t, f)
		m := s.msg[seg.tagged]
		if m == nil {
			m = &captured{conn: s.conn, fromTarget: s.fromTarget, first: seg}
			s.msg[seg.tagged] = m
		}
		m.frames = append(m.frames, f)
		m.payload = append(m.payload, payload...)
		if seg.last {
			s.msg[seg.tagged] = nil
			emit(m)
		}
	}
}

// load reads the messages of a capture.
func load(t testing.TB, name string) []*captured {
	t.Helper()
	messages, _ := parse(t, unpack(t, name))
	return messages
}

// unpack returns a capture file.
func unpack(t testing.TB, name string) []byte {
	t.Helper()
	f, err := os.Open("testdata/" + name + ".pcap.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// parse reads classic pcap, Ethernet, IPv4. The streams are in the order of their SYNs.
func parse(t testing.TB, b []byte) (messages []*captured, all []*stream) {
	t.Helper()
	if binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		t.Fatal("not a pcap file of Ethernet frames")
	}
	type flow struct {
		from, to uint16
	}
	streams := make(map[flow]*stream)
	conns := 0
	for b = b[24:]; len(b) > 0; {
		n := binary.LittleEndian.Uint32(b[8:])
		p := b[16+14 : 16+n]
		b = b[16+n:]
		if p[0]>>4 != 4 || p[9] != 6 {
			continue
		}
		p = p[int(p[0]&15)*4 : binary.BigEndian.Uint16(p[2:])]
		k := flow{binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:])}
		seq, flags, data := binary.BigEndian.Uint32(p[4:]), p[13], p[p[12]>>4*4:]
		if flags&2 != 0 {
			if flags&16 == 0 {
				conns++
			}
			streams[k] = &stream{conn: conns, fromTarget: flags&16 != 0, next: seq + 1, held: make(map[uint32][]byte), msg: make(map[bool]*captured)}
			all = append(all, streams[k])
		} else if s := streams[k]; s != nil && len(data) > 0 {
			s.add(t, seq, data, func(c *captured) { messages = append(messages, c) })
		}
	}
	return messages, all
}

// Every frame of the kernel's is decoded, and encoded again to the same bytes (IWARP-20, 21, 30 to 33; the CRC is checked wherever it is used).
func TestCapturedFramesAreOurs(t *testing.T) {
	for _, c := range captures {
		t.Run(c.name, func(t *testing.T) {
			mpa, fpdus, ops, counts := 0, 0, make(map[opcode]int), make(map[opcode]int)
			for _, m := range load(t, c.name) {
				if m.mpa {
					key := requestKey
					if m.fromTarget {
						key = replyKey
					}
					f, err := readFrame(bytes.NewReader(m.frames[0]), key)
					if err != nil {
						t.Fatal(err)
					}
					if f.crc != c.crc || !f.enhanced || f.revision != 2 || f.peer {
						t.Errorf("%+v", f)
					}
					if b := f.append(nil, key); !bytes.Equal(b, m.frames[0]) {
						t.Errorf("MPA frame\n%x, ours\n%x", m.frames[0], b)
					}
					mpa++
					continue
				}
				ops[m.first.op]++
				for _, f := range m.frames {
					seg, payload := segmentOf(t, f)
					if b := fpdu(c.crc, seg, payload); !bytes.Equal(b, f) {
						t.Fatalf("FPDU %d of a %v\n%x, ours\n%x", fpdus, seg.op, f, b)
					}
					fpdus++
					counts[seg.op]++
				}
			}
			t.Logf("%d MPA frames, %d FPDUs, messages %v", mpa, fpdus, ops)
			if mpa != 4 || !maps.Equal(counts, c.fpdus) {
				t.Errorf("the capture was not read whole: %v, want %v", counts, c.fpdus)
			}
		})
	}
}

// Our receive side reads every byte of both directions of the captures, however they are cut and wherever they are read to, finds every CRC right,
// and places each payload where the frames say: the initiator's and LIO's (IWARP-22, 24, 30 to 38). The windows and Reads that the frames are about are made from them.
func TestCapturedFramesAreReceived(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, c := range captures {
		_, streams := parse(t, unpack(t, c.name))
		if len(streams) != 4 {
			t.Fatalf("%d streams", len(streams))
		}
		got := make(map[opcode]int)
		for i, s := range streams {
			for _, direct := range []bool{false, true} {
				rnd := rand.New(rand.NewPCG(seed, uint64(i)))
				for op, n := range receiveCaptured(t, s, c.crc, direct, rnd) {
					if !direct {
						got[op] += n
					}
				}
			}
		}
		if !maps.Equal(got, c.fpdus) {
			t.Errorf("%s: received %v, want %v", c.name, got, c.fpdus)
		}
	}
}

// put makes a binding of an STag that is given.
func (t *tagTable) put(key uint32, b binding) {
	b.key = key
	s := t.slotLocked(key)
	for s.key != 0 && s.key != key {
		t.growLocked()
		s = t.slotLocked(key)
	}
	if s.key == 0 {
		t.used++
	}
	*s = b
}

// receiveCaptured gives a stream to a machine, a few FPDUs at a time.
func receiveCaptured(t *testing.T, s *stream, crc, direct bool, rnd *rand.Rand) map[opcode]int {
	const room = 1 << 20
	m := newMachine(t, crc, 0)
	m.mem = make([]byte, 2*room)
	m.q.recvs, m.q.reads, m.q.resps = recvQueue{}, readQueue{}, responseQueue{}
	m.q.recvs.init(64, false)
	m.q.reads.init(64)
	m.q.resps.init(128)
	count := make(map[opcode]int)
	sends, writes := m.mem[:room], m.mem[room:]
	type place struct{ at, want []byte }
	var places []place
	var events []kind
	var window struct {
		tag  uint32
		base uint64
	}
	var read *sink
	for i := 0; i < len(s.fpdus); {
		var b []byte
	batch:
		for n := 1 + rnd.IntN(5); n > 0 && i < len(s.fpdus); n-- {
			f := s.fpdus[i]
			seg, payload := segmentOf(t, f)
			count[seg.op]++
			switch {
			case seg.op == opWrite && len(payload) > 0:
				if window.tag != seg.stag || seg.to < window.base || seg.to-window.base+uint64(len(payload)) > room {
					if len(b) > 0 { // what is read so far needs the window as it is
						count[seg.op]--
						break batch
					}
					window.tag, window.base = seg.stag, seg.to
					m.q.tags.put(seg.stag, binding{mr: &region{}, buf: writes, base: seg.to, access: rdma.RemoteWrite, live: true})
				}
				at := seg.to - window.base
				places = append(places, place{writes[at : at+uint64(len(payload))], payload})
			case seg.op == opReadResponse:
				if read == nil {
					size := 0
					for _, g := range s.fpdus[i:] {
						next, p := segmentOf(t, g)
						if next.op == opReadResponse {
							if size += len(p); next.last {
								break
							}
						}
					}
					sge := []rdma.SGE{{Buf: make([]byte, size)}}
					m.q.reads.push(seg.stag, seg.to, &sendWQE{sge: sge})
					read = &sink{to: seg.to, cur: cursor{sge: sge}}
				}
				at := seg.to - read.to
				places = append(places, place{read.cur.sge[0].Buf[at : at+uint64(len(payload))], payload})
				if seg.last {
					read = nil
					events = append(events, eventRead)
				}
			case seg.op == opReadRequest:
				var q readRequest
				q.decode(payload)
				m.q.tags.put(q.sourceTag, binding{mr: &region{}, buf: make([]byte, q.size), base: q.sourceTO, access: rdma.RemoteRead, live: true})
				events = append(events, eventRequest)
			case seg.op.isSend():
				if seg.mo == 0 {
					if len(sends) < 16<<10 {
						sends = m.mem[:room]
					}
					m.q.recvs.post([]rdma.RecvWR{{SGE: []rdma.SGE{{Buf: sends[:16<<10]}}}})
				}
				places = append(places, place{sends[seg.mo : int(seg.mo)+len(payload)], payload})
				if seg.last {
					sends = sends[16<<10:]
					if seg.op.invalidates() {
						if m.q.tags.findLocked(seg.stag) == nil {
							m.q.tags.put(seg.stag, binding{mr: &region{}, buf: writes, live: true})
						}
						window.tag = 0
					}
					events = append(events, eventReceived)
				}
			}
			b = append(b, f...)
			i++
		}
		for _, e := range m.feed(b, func() int { return rnd.IntN(3000) }, direct) {
			if e.kind == eventOpen {
				continue
			}
			if e.kind == eventFault {
				t.Fatalf("before FPDU %d: %v", i, e.fault)
			}
			if len(events) == 0 || e.kind != events[0] {
				t.Fatalf("before FPDU %d: event %d, want %v", i, e.kind, events)
			}
			events = events[1:]
		}
		for _, p := range places {
			if !bytes.Equal(p.at, p.want) {
				t.Fatalf("before FPDU %d: %d bytes are not in their place", i, len(p.want))
			}
		}
		places = places[:0]
	}
	if len(events) > 0 || m.buffered() || m.phase != phaseHeader {
		t.Errorf("events %v did not come", events)
	}
	return count
}

// The initiator's side of each captured session is played against our responder, and our responder does what LIO did. What it
// sends is LIO's, byte for byte, but for the STag and TO of Read sinks, which it is free to choose.
func TestCapturedSessionReplayed(t *testing.T) {
	for _, c := range captures {
		for conn := 1; conn <= 2; conn++ {
			for _, cut := range []int{0, 7, 3000} {
				t.Run(fmt.Sprintf("%s/connection %d/cut %d", c.name, conn, cut), func(t *testing.T) {
					var msgs []*captured
					for _, m := range load(t, c.name) {
						if m.conn == conn {
							msgs = append(msgs, m)
						}
					}
					replay(t, c.crc, msgs, cut)
				})
			}
		}
	}
}

func replay(t *testing.T, crc bool, msgs []*captured, cut int) {
	nc, ours := overTCP(t)
	defer nc.Close()
	if cut > 0 {
		nc = &cutting{Conn: nc, rnd: rand.New(rand.NewPCG(1, uint64(cut))), max: cut}
	}
	peer := &raw{t, nc}
	// The frames of siw on this path: its MSS of 1448, rounded down to a multiple of 8, less length and CRC.
	r := newEnd(t, Options{NoCRC: true, MaxULPDU: 1442})
	peer.write(msgs[0].frames[0])
	req, err := r.p.Respond(context.Background(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	if p := req.Peer(); p.IRD != 128 || p.ORD != 1 || !bytes.Equal(p.PrivateData, []byte{0x80, 0, 0, 0}) {
		t.Errorf("%+v", p)
	}
	r.create(req)
	const room, bufs, at = 28 + 48 + 8192, 40, 600 << 10
	recv := func(i int) { r.recv(rdma.RecvWR{ID: uint64(i), SGE: []rdma.SGE{r.sge(i*room, room)}}) }
	for i := range bufs {
		recv(i)
	}
	if err := req.Accept(context.Background(), rdma.ConnParams{IRD: 128, ORD: 128, PrivateData: []byte{0x80, 0, 0, 0}}); err != nil {
		t.Fatal(err)
	}
	expect := func(want []byte) []byte {
		t.Helper()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(nc, got); err != nil {
			t.Fatalf("%v (%v)", err, r.qp.Err())
		}
		return got
	}
	if got := expect(msgs[1].frames[0]); !bytes.Equal(got, msgs[1].frames[0]) {
		t.Fatalf("MPA reply\n%x, LIO's\n%x", got, msgs[1].frames[0])
	}
	var theirs, sink segment // of the Read that is under way: LIO's sink and ours
	for _, m := range msgs[2:] {
		if !m.fromTarget {
			for _, f := range m.frames {
				if m.first.op == opReadResponse {
					seg, payload := segmentOf(t, f)
					seg.stag, seg.to = sink.stag, seg.to-theirs.to+sink.to
					f = fpdu(crc, seg, payload)
				}
				peer.write(f)
			}
			wc := r.good(1)[0]
			if wc.Bytes != len(m.payload) {
				t.Fatalf("%v of %d bytes: %+v", m.first.op, len(m.payload), wc)
			}
			if wc.Op == rdma.OpRecv {
				if i := int(wc.ID); !bytes.Equal(r.buf[i*room:i*room+wc.Bytes], m.payload) {
					t.Fatal("a Send differs")
				}
				recv(int(wc.ID))
			} else if !bytes.Equal(r.buf[at:at+wc.Bytes], m.payload) {
				t.Fatal("a Read differs")
			}
			continue
		}
		wr := rdma.SendWR{Flags: rdma.Inline, SGE: []rdma.SGE{{Buf: m.payload}}, RKey: m.first.stag}
		switch m.first.op {
		case opSend:
			wr.Op = rdma.OpSend
		case opSendInvalidate:
			wr.Op = rdma.OpSendInvalidate
		case opWrite:
			wr.Op, wr.RemoteAddr = rdma.OpWrite, m.first.to
		case opReadRequest:
			var q readRequest
			q.decode(m.payload)
			wr = rdma.SendWR{Op: rdma.OpRead, Flags: rdma.Signaled, RKey: q.sourceTag, RemoteAddr: q.sourceTO, SGE: []rdma.SGE{r.sge(at, int(q.size))}}
		}
		if wr.Op != rdma.OpRead && len(m.payload) > 256 {
			copy(r.buf[at:], m.payload)
			wr.Flags, wr.SGE = 0, []rdma.SGE{r.sge(at, len(m.payload))}
		}
		r.send(wr)
		for _, f := range m.frames {
			got := expect(f)
			if m.first.op == opReadRequest {
				_, q := segmentOf(t, got)
				_, p := segmentOf(t, f)
				sink = segment{stag: binary.BigEndian.Uint32(q), to: binary.BigEndian.Uint64(q[4:])}
				theirs = segment{stag: binary.BigEndian.Uint32(p), to: binary.BigEndian.Uint64(p[4:])}
				f = fpdu(crc, m.first, append(bytes.Clone(q[:12]), p[12:]...))
			}
			if !bytes.Equal(got, f) {
				t.Fatalf("%v\n%x, LIO's\n%x", m.first.op, got, f)
			}
		}
	}
	r.qp.Disconnect()
	if b := peer.rest(); len(b) > 0 {
		t.Errorf("%x is sent at the end", b)
	}
}

var _ net.Conn = (*cutting)(nil)
