package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// The examples of RFC 5044, and more, down to the bytes of the CRC (IWARP-20, 21; IWARP-8 for the markers).
func TestFPDUVectors(t *testing.T) {
	seg := segment{op: opSend, queue: 0, msn: 1, last: true}
	for _, tt := range []struct {
		name    string
		markers bool
		pos     int
		msn     uint32
		want    string
	}{
		{"RFC 5044, a marker in front", true, 0, 1, "00000000 002a 4143 00000000 00000000 00000001 00000000" + fmt.Sprintf("%048d", 0) + "52239983"},
		{"the same without a marker", false, 0, 1, "002a 4143 00000000 00000000 00000001 00000000" + fmt.Sprintf("%048d", 0) + "b7243ec3"},
		{"RFC 5044, a marker inside", true, 512 - 20, 2, "002a 4143 00000000 00000000 00000002 00000000 00000014" + fmt.Sprintf("%048d", 0) + "84925898"},
	} {
		var s sender
		s.init(true, tt.markers, maxULPDU)
		s.pos = tt.pos
		seg.msn = tt.msn
		s.segment(&seg, make([]byte, 24))
		if want := unhex(t, tt.want); !bytes.Equal(s.out, want) {
			t.Errorf("%s:\n%x, want\n%x", tt.name, s.out, want)
		}
	}
	if sum := crc32.Checksum(make([]byte, 32), castagnoli); binary.LittleEndian.AppendUint32(nil, sum)[0] != 0xaa {
		t.Errorf("CRC of 32 zeroes: %#x", sum)
	}
}

// IWARP-23.
func TestMULPDU(t *testing.T) {
	for _, tt := range []struct {
		mss     int
		markers bool
		want    int
	}{
		{1448, false, 1442}, {1460, false, 1454}, {1461, false, 1454}, {1463, false, 1454}, {1448, true, 1430}, {8948, false, 8942}, {65483, false, 64768}, {1 << 20, false, 64768},
		{536, false, 530}, {88, false, 128}, {0, false, 128},
	} {
		if n := mulpdu(tt.mss, tt.markers); n != tt.want {
			t.Errorf("MSS %d, markers %v: %d, want %d", tt.mss, tt.markers, n, tt.want)
		}
		if n := mulpdu(tt.mss, false); !tt.markers && n > minULPDU && lengthLen+n+padding(n)+crcLen > max(tt.mss, 128) {
			t.Errorf("MSS %d: an FPDU of %d", tt.mss, n)
		}
	}
}

// unmark takes markers out of a stream and checks them and the CRCs that cover them (RFC 5044, 4.3). pos is where the stream is, modulo 512.
func unmark(t *testing.T, b []byte) [][]byte {
	t.Helper()
	var out [][]byte
	for at := 0; at < len(b); {
		begin := at // of what the CRC covers
		field := -1
		var plain []byte
		take := func(n int) {
			for ; n > 0; n-- {
				if at%markerEvery == 0 {
					if at+markerLen > len(b) {
						t.Fatal("cut in a marker")
					}
					back := int(binary.BigEndian.Uint16(b[at+2:]))
					if b[at] != 0 || b[at+1] != 0 || field >= 0 && back != at-field || field < 0 && back != 0 {
						t.Fatalf("marker %x at %d, the FPDU begins at %d", b[at:at+4], at, field)
					}
					at += markerLen
				}
				if field < 0 {
					field = at
				}
				plain = append(plain, b[at])
				at++
			}
		}
		take(lengthLen)
		n := int(binary.BigEndian.Uint16(plain))
		take(n + padding(n))
		if at%markerEvery == 0 {
			take(1) // the marker before the CRC is covered by it
			at--
			plain = plain[:len(plain)-1]
		}
		sum := crc32.Checksum(b[begin:at], castagnoli)
		take(crcLen)
		if got := binary.LittleEndian.Uint32(plain[len(plain)-crcLen:]); got != sum {
			t.Fatalf("CRC %#x, want %#x", got, sum)
		}
		out = append(out, plain)
	}
	return out
}

// Messages of all sizes with markers: with them taken out, they are what was sent (IWARP-8).
func TestMarkers(t *testing.T) {
	for _, limit := range []int{minULPDU, 500, 504, 508, 512, 516, 1430, maxULPDU} {
		var s sender
		s.init(true, true, limit)
		s.out = getOut()
		var all []byte
		var want []byte
		for n := 0; n < 3000; n = n*5/4 + 1 {
			p := pattern(uint64(n), make([]byte, n))
			want = append(want, p...)
			var m message
			m.cur.reset([]rdma.SGE{{Buf: p[:n/3]}, {Buf: p[n/3:]}})
			s.start(&m, segment{op: opSend})
			for whole := false; !whole; {
				whole = s.encode(&m)
				s.flush()
				for _, b := range s.vec {
					all = append(all, b...)
				}
				s.clear()
			}
		}
		var got []byte
		for _, f := range unmark(t, all) {
			n := int(binary.BigEndian.Uint16(f))
			if n > limit {
				t.Errorf("a ULPDU of %d bytes, the limit is %d", n, limit)
			}
			got = append(got, f[lengthLen+untaggedLen:lengthLen+n]...)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("limit %d: the bytes differ", limit)
		}
	}
}

// A peer that demands markers gets them, in every message, and sends none (IWARP-8).
func TestMarkersOnTheWire(t *testing.T) {
	e := newEnd(t, Options{})
	nc, ours := overTCP(t)
	defer nc.Close()
	peer := &raw{t, nc}
	peer.write((&frame{revision: 1, markers: true}).append(nil, requestKey))
	req, err := e.p.Respond(context.Background(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.create(req)
	e.recv(rdma.RecvWR{})
	if err := req.Accept(context.Background(), rdma.ConnParams{}); err != nil {
		t.Fatal(err)
	}
	pattern(1, e.buf)
	const size = 300_000
	e.send(rdma.SendWR{Op: rdma.OpWrite, SGE: []rdma.SGE{e.sge(1, size)}, RKey: 5, RemoteAddr: 7}, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.Signaled})
	done := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(nc)
		done <- b
	}()
	peer.write(fpdu(true, segment{op: opSend, msn: 1, last: true}, nil))
	e.good(2)
	e.qp.Close()
	b, ok := bytes.CutPrefix(<-done, (&frame{revision: 1, crc: true}).append(nil, replyKey))
	if !ok {
		t.Fatalf("reply %x", b[:40])
	}
	frames := unmark(t, b)
	var got []byte
	for _, f := range frames[:len(frames)-1] {
		seg, p := segmentOf(t, f)
		if seg.stag != 5 || seg.to != 7+uint64(len(got)) {
			t.Fatalf("%+v", seg)
		}
		got = append(got, p...)
	}
	if !bytes.Equal(got, e.buf[1:1+size]) {
		t.Error("the bytes differ")
	}
}

// Both layouts of a Terminate, and what is known of both when they cannot be told apart.
func TestDecodeTerminate(t *testing.T) {
	for _, tt := range []struct {
		b         string
		layer     uint8
		etype     uint8
		code      uint8
		reversed  bool
		ambiguous bool
	}{
		{"1101c000 0010 c140", 1, 1, 1, false, false},
		{"1201c000 0010 4143", 1, 2, 1, false, false},
		{"0102e000 0010 4141", 0, 1, 2, false, false},
		{"20020000", 2, 0, 2, false, false},
		{"02020000", 2, 0, 2, true, false}, // layer 0, type 2 has no code 2
		{"02060000", 0, 2, 6, false, true}, // or no room for IRD, from siw
		{"21010300 0010 c140", 1, 2, 1, true, false},
		{"10010300 0010 c140", 0, 1, 1, true, false},
		{"ff010000", 15, 15, 1, false, false},
	} {
		e, ok := decodeTerminate(unhex(t, tt.b))
		if !ok || e.Layer != tt.layer || e.Type != tt.etype || e.Code != tt.code || e.Reversed != tt.reversed || e.Ambiguous != tt.ambiguous || !e.Received || e.Error() == "" {
			t.Errorf("%s: %+v", tt.b, e)
		}
	}
	for n := range termFixed {
		if _, ok := decodeTerminate(make([]byte, n)); ok {
			t.Errorf("%d bytes are a Terminate", n)
		}
	}
}
