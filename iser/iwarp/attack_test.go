package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// victim is a responder with a raw peer that has sent one valid Send, of 4 bytes.
type victim struct {
	*end
	*raw
	both, readable, writable, dead, foreign rdma.Window // of 1000 bytes each; foreign is of another connection
	crc                                     bool
}

const windowLen = 1000

func newVictim(t *testing.T, crc bool, private *rdma.ConnParams) *victim {
	t.Helper()
	e := newEnd(t, Options{NoCRC: !crc})
	nc, ours := overTCP(t)
	v := &victim{end: e, raw: &raw{t, nc}, crc: crc}
	t.Cleanup(func() { nc.Close() })
	v.write((&frame{revision: 2, enhanced: true, ird: 4, ord: 4}).append(nil, requestKey))
	req, err := e.p.Respond(context.Background(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.create(req)
	for i := range 2 {
		e.recv(rdma.RecvWR{ID: uint64(i), SGE: []rdma.SGE{e.sge(200*i, 50), e.sge(200*i+60, 50)}})
	}
	p := rdma.ConnParams{IRD: 2, ORD: 2}
	if private != nil {
		p = *private
	}
	if err := req.Accept(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	if _, err := readFrame(nc, replyKey); err != nil {
		t.Fatal(err)
	}
	v.write(v.untagged(opSend, queueSend, 1, 0, true, 0, []byte("good")))
	e.good(1)
	v.both = e.bind(4096, windowLen, rdma.RemoteRead|rdma.RemoteWrite)
	v.readable = e.bind(8192, windowLen, rdma.RemoteRead)
	v.writable = e.bind(12288, windowLen, rdma.RemoteWrite)
	v.dead = e.bind(16384, windowLen, rdma.RemoteRead|rdma.RemoteWrite)
	e.send(rdma.SendWR{Op: rdma.OpLocalInvalidate, RKey: v.dead.RKey(), Flags: rdma.Signaled})
	e.good(1)
	t.Cleanup(func() {
		for _, w := range []rdma.Window{v.both, v.readable, v.writable, v.dead} {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return v
}

func (v *victim) untagged(op opcode, queue, msn, mo uint32, last bool, tag uint32, payload []byte) []byte {
	return fpdu(v.crc, segment{op: op, queue: queue, msn: msn, mo: mo, last: last, stag: tag}, payload)
}

func (v *victim) tagged(op opcode, tag uint32, to uint64, last bool, payload []byte) []byte {
	return fpdu(v.crc, segment{op: op, tagged: true, stag: tag, to: to, last: last}, payload)
}

func (v *victim) readRequest(msn uint32, size uint32, tag uint32, to uint64) []byte {
	var b [readRequestLen]byte
	(&readRequest{sinkTag: 1, sinkTO: 2, size: size, sourceTag: tag, sourceTO: to}).encode(b[:])
	return v.untagged(opReadRequest, queueRead, msn, 0, true, 0, b[:])
}

// raw ULPDU, with a CRC.
func (v *victim) ulpdu(u []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(u)))
	b = append(b, u...)
	b = append(b, zero[:padding(len(u))]...)
	s := sender{crc: v.crc, out: b}
	if v.crc {
		s.out = nil
		s.append(b)
		n := len(u)
		s.out = s.out[:lengthLen+n]
		s.close(0, n)
		return s.out
	}
	return append(b, 0, 0, 0, 0)
}

// read lets the victim issue a Read of 500 bytes and returns the sink in its request.
func (v *victim) read() (tag uint32, to uint64) {
	v.send(rdma.SendWR{ID: 77, Op: rdma.OpRead, SGE: []rdma.SGE{v.sge(20480, 300), v.sge(24576, 200)}, RKey: 9, RemoteAddr: 9, Flags: rdma.Signaled})
	b := make([]byte, lengthLen+untaggedLen+readRequestLen+crcLen)
	if _, err := io.ReadFull(v.nc, b); err != nil {
		v.raw.t.Fatal(err)
	}
	_, p := segmentOf(v.raw.t, b)
	return binary.BigEndian.Uint32(p), binary.BigEndian.Uint64(p[4:])
}

var attacks = []struct {
	name string
	want fault
	make func(v *victim) []byte
}{
	{"IWARP-22 CRC", faultOf(2, 0, 2), func(v *victim) []byte {
		b := v.untagged(opSend, 0, 2, 0, true, 0, []byte("wrong"))
		b[25] ^= 1
		return b
	}},
	{"IWARP-22 CRC of a header that is invalid besides", faultOf(2, 0, 2), func(v *victim) []byte {
		b := v.untagged(opSend, 3, 2, 0, true, 0, []byte("wrong"))
		b[25] ^= 1
		return b
	}},
	{"length 0", faultOf(2, 0, 3), func(v *victim) []byte { return v.ulpdu(nil) }},
	{"length 1", faultOf(2, 0, 3), func(v *victim) []byte { return v.ulpdu([]byte{0xc1}) }},
	{"length 13", faultOf(2, 0, 3), func(v *victim) []byte { return v.ulpdu(append([]byte{0xc1, 0x40}, make([]byte, 11)...)) }},
	{"length 17", faultOf(2, 0, 3), func(v *victim) []byte { return v.ulpdu(append([]byte{0x41, 0x43}, make([]byte, 15)...)) }},
	{"length 65535", faultOf(1, 1, 1), func(v *victim) []byte {
		return v.tagged(opWrite, v.both.RKey(), v.both.Addr(), true, make([]byte, 65535-taggedLen))
	}},
	{"length 65535 of a Send", faultOf(1, 2, 5), func(v *victim) []byte {
		return v.untagged(opSend, 0, 2, 0, true, 0, make([]byte, 65535-untaggedLen))
	}},
	{"IWARP-30 DDP version, tagged", faultOf(1, 1, 4), func(v *victim) []byte { return v.ulpdu(append([]byte{0xc0, 0x40}, make([]byte, 30)...)) }},
	{"IWARP-30 DDP version, untagged", faultOf(1, 2, 6), func(v *victim) []byte { return v.ulpdu(append([]byte{0x42, 0x43}, make([]byte, 30)...)) }},
	{"IWARP-50 RDMAP version", faultOf(0, 2, 5), func(v *victim) []byte { return v.ulpdu(append([]byte{0xc1, 0x80}, make([]byte, 30)...)) }},
	{"IWARP-50 opcode 8", faultOf(0, 2, 6), func(v *victim) []byte { return v.untagged(8, 0, 2, 0, true, 0, nil) }},
	{"IWARP-50 opcode 15", faultOf(0, 2, 6), func(v *victim) []byte { return v.tagged(15, 0, 2, true, nil) }},
	{"IWARP-50 tagged Send", faultOf(0, 2, 6), func(v *victim) []byte { return v.tagged(opSend, v.both.RKey(), v.both.Addr(), true, []byte("x")) }},
	{"IWARP-50 untagged Write", faultOf(0, 2, 6), func(v *victim) []byte { return v.untagged(opWrite, 0, 2, 0, true, 0, []byte("x")) }},
	{"IWARP-50 Send on queue 1", faultOf(0, 2, 6), func(v *victim) []byte { return v.untagged(opSend, 1, 1, 0, true, 0, []byte("x")) }},
	{"IWARP-50 Read Request on queue 0", faultOf(0, 2, 6), func(v *victim) []byte { return v.untagged(opReadRequest, 0, 2, 0, true, 0, make([]byte, 28)) }},
	{"IWARP-50 Terminate on queue 0", faultOf(0, 2, 6), func(v *victim) []byte { return v.untagged(opTerminate, 0, 2, 0, true, 0, make([]byte, 4)) }},
	{"IWARP-36 queue 3", faultOf(1, 2, 1), func(v *victim) []byte { return v.untagged(opSend, 3, 1, 0, true, 0, []byte("x")) }},
	{"IWARP-36 queue 2^32-1", faultOf(1, 2, 1), func(v *victim) []byte { return v.untagged(opSend, 1<<32-1, 1, 0, true, 0, []byte("x")) }},
	{"IWARP-32 MSN again", faultOf(1, 2, 3), func(v *victim) []byte { return v.untagged(opSend, 0, 1, 0, true, 0, []byte("x")) }},
	{"IWARP-32 MSN gap", faultOf(1, 2, 3), func(v *victim) []byte { return v.untagged(opSend, 0, 3, 0, true, 0, []byte("x")) }},
	{"IWARP-32 MSN of queue 1", faultOf(1, 2, 3), func(v *victim) []byte { return v.readRequest(2, 0, 0, 0) }},
	{"IWARP-38 MO at the start", faultOf(1, 2, 4), func(v *victim) []byte { return v.untagged(opSend, 0, 2, 4, true, 0, []byte("x")) }},
	{"IWARP-38 MO gap", faultOf(1, 2, 4), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, false, 0, []byte("x")), v.untagged(opSend, 0, 2, 2, true, 0, []byte("x"))...)
	}},
	{"IWARP-38 MO overlap", faultOf(1, 2, 4), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, false, 0, []byte("xx")), v.untagged(opSend, 0, 2, 1, true, 0, []byte("x"))...)
	}},
	{"IWARP-31 MSN within a message", faultOf(1, 2, 3), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, false, 0, []byte("xx")), v.untagged(opSend, 0, 3, 2, true, 0, []byte("x"))...)
	}},
	{"IWARP-31 opcode within a message", faultOf(0, 2, 6), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, false, 0, []byte("xx")), v.untagged(opSendSolicited, 0, 2, 2, true, 0, []byte("x"))...)
	}},
	{"IWARP-31 STag within a message", faultOf(0, 2, 6), func(v *victim) []byte {
		return append(v.untagged(opSendInvalidate, 0, 2, 0, false, v.both.RKey(), []byte("xx")), v.untagged(opSendInvalidate, 0, 2, 2, true, v.dead.RKey(), []byte("x"))...)
	}},
	{"IWARP-55 too long", faultOf(1, 2, 5), func(v *victim) []byte { return v.untagged(opSend, 0, 2, 0, true, 0, make([]byte, 101)) }},
	{"IWARP-55 too long in its second segment", faultOf(1, 2, 5), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, false, 0, make([]byte, 100)), v.untagged(opSend, 0, 2, 100, true, 0, []byte("x"))...)
	}},
	{"IWARP-55 no buffer", faultOf(1, 2, 2), func(v *victim) []byte {
		return append(v.untagged(opSend, 0, 2, 0, true, 0, []byte("xx")), v.untagged(opSend, 0, 3, 0, true, 0, nil)...)
	}},
	{"IWARP-59 invalidates nothing", faultOf(0, 1, 9), func(v *victim) []byte { return v.untagged(opSendInvalidate, 0, 2, 0, true, 0, []byte("x")) }},
	{"IWARP-59 invalidates twice", faultOf(0, 1, 9), func(v *victim) []byte {
		return v.untagged(opSendSolicitedInvalidate, 0, 2, 0, true, v.dead.RKey(), []byte("x"))
	}},
	{"IWARP-59 invalidates a sink", faultOf(0, 1, 9), func(v *victim) []byte {
		tag, _ := v.read()
		return v.untagged(opSendInvalidate, 0, 2, 0, true, tag, []byte("x"))
	}},
	{"IWARP-36 STag 0", faultOf(1, 1, 0), func(v *victim) []byte { return v.tagged(opWrite, 0, v.both.Addr(), true, []byte("x")) }},
	{"IWARP-36 STag that was never", faultOf(1, 1, 0), func(v *victim) []byte { return v.tagged(opWrite, v.both.RKey()+1, v.both.Addr(), true, []byte("x")) }},
	{"IWARP-63 dead STag", faultOf(1, 1, 0), func(v *victim) []byte { return v.tagged(opWrite, v.dead.RKey(), v.dead.Addr(), true, []byte("x")) }},
	{"IWARP-63 STag of another connection", faultOf(1, 1, 0), func(v *victim) []byte {
		return v.tagged(opWrite, v.foreign.RKey(), v.foreign.Addr(), true, []byte("x"))
	}},
	{"IWARP-36 Write without the right", faultOf(1, 1, 0), func(v *victim) []byte {
		return v.tagged(opWrite, v.readable.RKey(), v.readable.Addr(), true, []byte("x"))
	}},
	{"IWARP-36 past the end", faultOf(1, 1, 1), func(v *victim) []byte {
		return v.tagged(opWrite, v.both.RKey(), v.both.Addr()+windowLen-1, true, []byte("xx"))
	}},
	{"IWARP-36 before the start", faultOf(1, 1, 1), func(v *victim) []byte { return v.tagged(opWrite, v.both.RKey(), v.both.Addr()-1, true, []byte("xx")) }},
	{"IWARP-36 second segment past the end", faultOf(1, 1, 1), func(v *victim) []byte {
		return append(v.tagged(opWrite, v.both.RKey(), v.both.Addr(), false, make([]byte, 1000)), v.tagged(opWrite, v.both.RKey(), v.both.Addr()+windowLen, true, []byte("x"))...)
	}},
	{"IWARP-36 TO wrap", faultOf(1, 1, 3), func(v *victim) []byte { return v.tagged(opWrite, v.both.RKey(), 1<<64-1, true, []byte("xx")) }},
	{"IWARP-36 TO wrap to 0", faultOf(1, 1, 3), func(v *victim) []byte { return v.tagged(opWrite, v.both.RKey(), 1<<64-2, true, []byte("xx")) }},
	{"IWARP-52 source STag", faultOf(0, 1, 0), func(v *victim) []byte { return v.readRequest(1, 1, v.dead.RKey(), v.dead.Addr()) }},
	{"IWARP-52 source STag of another connection", faultOf(0, 1, 0), func(v *victim) []byte { return v.readRequest(1, 1, v.foreign.RKey(), v.foreign.Addr()) }},
	{"IWARP-52 source bounds", faultOf(0, 1, 1), func(v *victim) []byte { return v.readRequest(1, windowLen+1, v.both.RKey(), v.both.Addr()) }},
	{"IWARP-52 source of 4 GiB", faultOf(0, 1, 1), func(v *victim) []byte { return v.readRequest(1, 1<<32-1, v.both.RKey(), v.both.Addr()) }},
	{"IWARP-52 source right", faultOf(0, 1, 2), func(v *victim) []byte { return v.readRequest(1, 1, v.writable.RKey(), v.writable.Addr()) }},
	{"IWARP-52 source wrap", faultOf(0, 1, 4), func(v *victim) []byte { return v.readRequest(1, 8, v.both.RKey(), 1<<64-4) }},
	{"Read Request is short", faultOf(2, 0, 3), func(v *victim) []byte { return v.untagged(opReadRequest, 1, 1, 0, true, 0, make([]byte, 27)) }},
	{"Read Request is long", faultOf(1, 2, 5), func(v *victim) []byte { return v.untagged(opReadRequest, 1, 1, 0, true, 0, make([]byte, 29)) }},
	{"Read Request has a MO", faultOf(1, 2, 4), func(v *victim) []byte { return v.untagged(opReadRequest, 1, 1, 4, true, 0, make([]byte, 28)) }},
	{"Read Request in segments", faultOf(1, 2, 5), func(v *victim) []byte { return v.untagged(opReadRequest, 1, 1, 0, false, 0, make([]byte, 28)) }},
	{"Terminate is short", faultOf(2, 0, 3), func(v *victim) []byte { return v.untagged(opTerminate, 2, 1, 0, true, 0, make([]byte, 3)) }},
	{"Terminate with MSN 2", faultOf(1, 2, 3), func(v *victim) []byte { return v.untagged(opTerminate, 2, 2, 0, true, 0, make([]byte, 4)) }},
	{"IWARP-R11 Read Response nobody asked for", faultOf(1, 1, 0), func(v *victim) []byte {
		return v.tagged(opReadResponse, v.both.RKey(), v.both.Addr(), true, []byte("x"))
	}},
	{"IWARP-R10 Write to a sink", faultOf(1, 1, 0), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opWrite, tag, to, true, []byte("x"))
	}},
	{"IWARP-R10 Read from a sink", faultOf(0, 1, 0), func(v *victim) []byte {
		tag, to := v.read()
		return v.readRequest(1, 1, tag, to)
	}},
	{"IWARP-R11 Read Response to a window", faultOf(1, 1, 0), func(v *victim) []byte {
		v.read()
		return v.tagged(opReadResponse, v.both.RKey(), v.both.Addr(), true, make([]byte, 500))
	}},
	{"IWARP-R11 Read Response ahead", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opReadResponse, tag, to+4, false, make([]byte, 100))
	}},
	{"IWARP-R11 Read Response is too long", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opReadResponse, tag, to, true, make([]byte, 501))
	}},
	{"IWARP-R11 Read Response ends early", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opReadResponse, tag, to, true, make([]byte, 499))
	}},
	{"IWARP-R11 Read Response does not end", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opReadResponse, tag, to, false, make([]byte, 500))
	}},
	{"IWARP-R11 Read Response overlaps", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return append(v.tagged(opReadResponse, tag, to, false, make([]byte, 100)), v.tagged(opReadResponse, tag, to+50, false, make([]byte, 100))...)
	}},
	{"IWARP-35 empty segment of a Read Response", faultOf(1, 1, 1), func(v *victim) []byte {
		tag, to := v.read()
		return v.tagged(opReadResponse, tag, to, false, nil)
	}},
}

// Each mistake of a peer is answered by the Terminate that the standards have for it (IWARP-61, IWARP-62), nothing is written where it may not be, nothing after
// it is placed (IWARP-37), every work request gets its completion, and another connection of the same domain goes on.
func TestAttacks(t *testing.T) {
	for _, crc := range []bool{true, false} {
		for _, a := range attacks {
			if !crc && a.want == faultOf(2, 0, 2) {
				continue
			}
			name := a.name
			if !crc {
				name += ", no CRC"
			}
			t.Run(name, func(t *testing.T) {
				v := newVictim(t, crc, nil)
				other, friend := newEnd(t, Options{}), v.end.sibling()
				connect(t, overTCP, other, friend, rdma.ConnParams{IRD: 1, ORD: 1}, rdma.ConnParams{IRD: 1, ORD: 1})
				v.foreign = friend.bind(32768, windowLen, rdma.RemoteRead|rdma.RemoteWrite)
				defer v.foreign.Close()
				defer friend.qp.Close()
				before := bytes.Clone(v.buf)
				b := a.make(v)
				b = append(b, v.tagged(opWrite, v.both.RKey(), v.both.Addr(), true, []byte("late"))...)
				v.write(b)
				v.terminated(a.want, b)
				var te *TerminateError
				if err := v.ended(); !errors.As(err, &te) || faultOf(uint32(te.Layer), uint32(te.Type), uint32(te.Code)) != a.want || te.Received ||
					errors.Is(err, rdma.ErrAccess) != a.want.protection() || errors.Is(err, rdma.ErrRemote) {
					t.Errorf("ended by %v", err)
				}
				v.qp.Close()
				if bytes.Contains(v.buf, []byte("late")) {
					t.Error("a segment after the fault was placed")
				}
				for i := range v.buf {
					in := func(from, n int) bool { return i >= from && i < from+n }
					if v.buf[i] != before[i] && !in(200, 50) && !in(260, 50) && !in(4096, windowLen) && !in(20480, 300) && !in(24576, 200) {
						t.Fatalf("byte %d was written", i)
					}
				}
				v.flushed(a.want)
				friend.recv(rdma.RecvWR{SGE: []rdma.SGE{friend.sge(0, 10)}})
				other.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Inline, SGE: []rdma.SGE{{Buf: []byte("hello")}}})
				friend.good(1)
			})
		}
	}
}

// sibling is another connection's end on the same memory and domain.
func (e *end) sibling() *end {
	s := *e
	s.qp = nil
	cq, err := e.p.CreateCQ(64)
	if err != nil {
		e.t.Fatal(err)
	}
	s.cq = cq
	return &s
}

// terminated checks that a Terminate is the last that comes, and what it holds. sent is what it is about.
func (v *victim) terminated(want fault, sent []byte) {
	t := v.raw.t
	t.Helper()
	b := v.rest()
	var last []byte
	for len(b) > 0 {
		n := int(binary.BigEndian.Uint16(b))
		last, b = b[:lengthLen+n+padding(n)+crcLen], b[lengthLen+n+padding(n)+crcLen:]
	}
	if last == nil {
		t.Fatal("no Terminate")
	}
	seg, p := segmentOf(t, last)
	if seg.op != opTerminate || seg.queue != 2 || seg.msn != 1 || seg.mo != 0 || !seg.last || seg.stag != 0 || !bytes.Equal(last, fpdu(v.crc, seg, p)) {
		t.Fatalf("%+v", seg)
	}
	if got := faultOf(uint32(p[0]>>4), uint32(p[0]&15), uint32(p[1])); got != want {
		t.Fatalf("Terminate says %v, want %v", got, want)
	}
	if want.layer() == layerMPA {
		if !bytes.Equal(p[2:], []byte{0, 0}) {
			t.Errorf("%x", p)
		}
		return
	}
	// The segment it is about is one that was sent.
	header := taggedLen
	if p[6]&ctrlTagged == 0 {
		header = untaggedLen
	}
	if p[2]&0xc0 != 0xc0 || p[3] != 0 || !bytes.Contains(sent, append(bytes.Clone(p[4:6]), p[6:6+header]...)) {
		t.Errorf("%x is not about what was sent", p)
	}
	rdmap := want.layer() == 0 && want.etype() == 1 && p[7]&15 == byte(opReadRequest)
	if rdmap != (p[2]&0x20 != 0) || len(p) != 6+header+map[bool]int{true: 28}[rdmap] || rdmap && !bytes.Contains(sent, p[6:]) {
		t.Errorf("%x: Read Request header", p)
	}
}

// flushed checks the completions of a victim: what was received, then the flushed rest.
func (v *victim) flushed(why fault) {
	t := v.raw.t
	t.Helper()
	var wcs [16]rdma.WC
	n, err := v.cq.Poll(wcs[:])
	if err != nil {
		t.Fatal(err)
	}
	recvs := 0
	for _, wc := range wcs[:n] {
		switch {
		case wc.Op == rdma.OpRecv:
			recvs++
			want := rdma.StatusFlushed
			if why == faultOf(layerDDP, ddpUntagged, ddpTooLong) && recvs == 1 {
				want = rdma.StatusLength
			}
			if wc.Status != want && (why != faultOf(layerDDP, ddpUntagged, ddpNoBuffer) || wc.Status != rdma.StatusSuccess) {
				t.Errorf("%+v", wc)
			}
		case wc.ID != 77 || wc.Status != rdma.StatusFlushed:
			t.Errorf("%+v", wc)
		}
	}
	if recvs != 1 {
		t.Errorf("%d receives are complete, want 1", recvs)
	}
}

// IWARP-54: a Read beyond IRD.
func TestTooManyReads(t *testing.T) {
	v := newVictim(t, true, &rdma.ConnParams{IRD: 0, ORD: 1})
	b := v.readRequest(1, 0, 0, 0)
	v.write(b)
	v.terminated(faultOf(1, 2, 2), b)
}

// A first frame that is wrong gets no Terminate: the peer is not there yet (IWARP-6, IWARP-R3).
func TestFaultBeforeAnyFrame(t *testing.T) {
	e := newEnd(t, Options{})
	nc, ours := overTCP(t)
	defer nc.Close()
	peer := &raw{t, nc}
	peer.write((&frame{revision: 1}).append(nil, requestKey))
	req, err := e.p.Respond(context.Background(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !req.Peer().DepthUnknown {
		t.Error("revision 1 carries no depths")
	}
	e.create(req)
	if err := req.Accept(context.Background(), rdma.ConnParams{IRD: 1, ORD: 1}); err != nil {
		t.Fatal(err)
	}
	e.recv(rdma.RecvWR{})
	e.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Signaled}) // is held back
	peer.write(fpdu(true, segment{op: opSend, last: true, msn: 5}, nil))
	if b := peer.rest(); !bytes.Equal(b, (&frame{revision: 1, crc: true}).append(nil, replyKey)) {
		t.Errorf("got %x", b)
	}
	for _, wc := range e.wait(2) {
		if wc.Status != rdma.StatusFlushed {
			t.Errorf("%+v", wc)
		}
	}
}

// The window a Write is landing in is invalidated in its middle: what comes after is not written (IWARP-63), and the connection ends.
func TestInvalidatedWhileItLands(t *testing.T) {
	v := newVictim(t, false, nil)
	pattern(1, v.buf[4096:8192])
	before := bytes.Clone(v.buf)
	b := v.tagged(opWrite, v.both.RKey(), v.both.Addr(), true, bytes.Repeat([]byte{0xee}, windowLen))
	v.write(b[:lengthLen+taggedLen+400])
	// What was written so far has landed when it can be seen under the lock.
	tags := v.qp.(*queuePair).q.tags
	for landed := false; !landed; {
		tags.mu.Lock()
		landed = v.buf[4096+399] == 0xee
		tags.mu.Unlock()
	}
	v.send(rdma.SendWR{Op: rdma.OpLocalInvalidate, RKey: v.both.RKey(), Flags: rdma.Signaled})
	v.good(1)
	v.write(b[lengthLen+taggedLen+400:])
	v.terminated(faultOf(1, 1, 0), b)
	v.qp.Close()
	if !bytes.Equal(v.buf[4096+400:8192], before[4096+400:8192]) {
		t.Error("bytes were written after the invalidation")
	}
}

// The window that the peer is reading, and does not read on, is closed: nothing of it is sent that is there only afterwards, and the connection ends. Large responses
// are written from where they lie, small ones were copied.
func TestRevokedWhileItIsRead(t *testing.T) {
	for _, size := range []int{512 << 10, copyLimit} {
		e := newEnd(t, Options{})
		nc, ours := overTCP(t)
		defer nc.Close()
		nc.(*net.TCPConn).SetReadBuffer(32 << 10)
		ours.(*net.TCPConn).SetWriteBuffer(32 << 10)
		peer := &raw{t, nc}
		const reads = 64
		peer.write((&frame{revision: 2, crc: true, enhanced: true, ird: 1, ord: reads}).append(nil, requestKey))
		req, err := e.p.Respond(context.Background(), ours, nil)
		if err != nil {
			t.Fatal(err)
		}
		e.create(req)
		if err := req.Accept(context.Background(), rdma.ConnParams{IRD: reads, ORD: 1}); err != nil {
			t.Fatal(err)
		}
		if _, err := readFrame(nc, replyKey); err != nil {
			t.Fatal(err)
		}
		peer.write(fpdu(true, segment{op: opWrite, tagged: true, last: true}, nil))
		w := e.bind(0, size, rdma.RemoteRead)
		clear(e.buf)
		for n := range reads {
			var b [readRequestLen]byte
			(&readRequest{sinkTag: 1, size: uint32(size), sourceTag: w.RKey(), sourceTO: w.Addr()}).encode(b[:])
			peer.write(fpdu(true, segment{op: opReadRequest, queue: queueRead, last: true, msn: uint32(n + 1)}, b[:]))
		}
		some := make([]byte, 100_000)
		if _, err := io.ReadFull(nc, some); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		for i := range e.buf {
			e.buf[i] = 0xee
		}
		got, _ := io.ReadAll(nc) // it may be reset
		if bytes.Contains(got, bytes.Repeat([]byte{0xee}, 16)) {
			t.Errorf("reads of %d: bytes were sent after the window was closed", size)
		}
		if len(got) > reads*size*3/4 {
			t.Errorf("reads of %d: %d bytes followed", size, len(got))
		}
		if err := e.ended(); !errors.Is(err, rdma.ErrAccess) {
			t.Errorf("reads of %d: ended by %v", size, err)
		}
		e.qp.Close()
	}
}

// A Terminate of the peer ends the connection; siw's byte order is understood (IWARP-61 and section 4).
func TestTerminateReceived(t *testing.T) {
	v := newVictim(t, true, nil)
	v.read()
	v.write(v.untagged(opTerminate, 2, 1, 0, true, 0, []byte{0x11, 0x01, 0x06, 0, 0, 14}))
	if b := v.rest(); len(b) > 0 {
		t.Errorf("%x was sent after a Terminate came", b)
	}
	var te *TerminateError
	if err := v.ended(); !errors.As(err, &te) || !te.Received || !te.Reversed || te.Layer != 1 || te.Type != 1 || te.Code != 1 || !errors.Is(err, rdma.ErrRemote) {
		t.Errorf("ended by %v", err)
	}
	v.qp.Close()
	v.flushed(noFault)
}
