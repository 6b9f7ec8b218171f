package iser

import (
	"compress/gzip"
	"encoding/binary"
	"io"
	"os"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// captured is an iSER message of a capture, in the order in which they were complete.
type captured struct {
	fromTarget bool
	control    byte // of RDMAP
	stag       uint32
	message    []byte
}

// loadSends reads the Sends of a capture: classic pcap, Ethernet, IPv4, TCP, and iWARP without markers.
func loadSends(t *testing.T, name string) (sends []captured) {
	t.Helper()
	f, err := os.Open("iwarp/testdata/" + name + ".pcap.gz")
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
	type stream struct {
		fromTarget, mpa bool
		next            uint32
		held            map[uint32][]byte
		buf             []byte
		message         []byte
	}
	type flow struct{ from, to uint16 }
	streams := make(map[flow]*stream)
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
			streams[k] = &stream{fromTarget: flags&16 != 0, next: seq + 1, held: make(map[uint32][]byte)}
			continue
		}
		s := streams[k]
		if s == nil || len(data) == 0 {
			continue
		}
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
		for len(s.buf) >= 20 {
			if !s.mpa {
				s.mpa, s.buf = true, s.buf[20+int(binary.BigEndian.Uint16(s.buf[18:])):]
				continue
			}
			n := int(binary.BigEndian.Uint16(s.buf))
			whole := (2+n+3)&^3 + 4
			if len(s.buf) < whole {
				break
			}
			u := s.buf[2 : 2+n]
			s.buf = s.buf[whole:]
			if u[0]&0x80 != 0 || binary.BigEndian.Uint32(u[6:]) != 0 {
				continue // tagged, or a Read Request
			}
			s.message = append(s.message, u[18:]...)
			if u[0]&0x40 != 0 {
				sends = append(sends, captured{s.fromTarget, u[1], binary.BigEndian.Uint32(u[2:]), s.message})
				s.message = nil
			}
		}
	}
	return sends
}

// Every iSER message of the kernel's initiator and target is decoded, and encoded again to the same bytes (ISER-30, ISER-R4; section 9).
func TestCapturedMessagesAreOurs(t *testing.T) {
	for _, name := range []string{"siw-default", "siw-unsolicited", "siw-crc"} {
		t.Run(name, func(t *testing.T) {
			counts := make(map[pdu.Opcode]int)
			invalidates, reads, writes := 0, 0, 0
			tags := make(map[pdu.TaskTag]controlHeader)
			for i, m := range loadSends(t, name) {
				b := m.message
				if len(b) < headerLen+pdu.HeaderLen {
					t.Fatalf("message %d of %d bytes", i, len(b))
				}
				head := (*[headerLen]byte)(b)
				if opcodeOf(head) != opControl {
					t.Fatalf("message %d: opcode %d", i, opcodeOf(head))
				}
				var c controlHeader
				c.decode(head)
				var again [headerLen]byte
				if c.encode(&again); again != *head {
					t.Errorf("message %d: %x, ours %x", i, *head, again)
				}
				h, err := pdu.ParseHeader(b[headerLen:])
				if err != nil {
					t.Fatal(err)
				}
				n := headerLen + pdu.HeaderLen + h.AHSLength() + h.DataLength()
				if len(b) < n || len(b) > n+pdu.Padding(h.DataLength()) {
					t.Errorf("ISER-R4: message %d of %d bytes holds a PDU of %d", i, len(b), n-headerLen)
				}
				counts[h.Opcode()]++
				if m.fromTarget && (c.readValid || c.writeValid) {
					t.Errorf("message %d: the target advertises", i)
				}
				if h.Opcode() == pdu.OpSCSICommand {
					tags[h.ITT()] = c
					if c.readValid {
						reads++
					}
					if c.writeValid {
						writes++
					}
				}
				if m.control&0xf == 4 { // Send with Invalidate
					invalidates++
					// ISER-39, R6: it names the Read STag if there is one, else the Write STag.
					c := Conn{invalidate: true}
					w := tags[h.ITT()]
					if key, ok := c.invalidates(&transfer{wire: w, read: w.readValid, write: w.writeValid}); !ok || key != m.stag {
						t.Errorf("message %d invalidates %#x, ours %#x, %v", i, m.stag, key, ok)
					}
				}
			}
			if counts[pdu.OpLoginRequest] != 2 || counts[pdu.OpLoginResponse] != 2 || counts[pdu.OpSCSICommand] == 0 ||
				counts[pdu.OpSCSICommand] != counts[pdu.OpSCSIResponse] || counts[pdu.OpTextRequest] != 1 || invalidates == 0 || reads == 0 {
				t.Errorf("messages %v, %d invalidate, %d reads, %d writes", counts, invalidates, reads, writes)
			}
			if counts[pdu.OpDataIn]+counts[pdu.OpR2T] != 0 {
				t.Errorf("ISER-31: %v", counts)
			}
		})
	}
}
