package pdu

import (
	"encoding/binary"
	"fmt"
)

// HeaderLen is the length of the basic header segment in bytes.
const HeaderLen = 48

// Limits of the frame.
const (
	MaxAHSLength  = 255 * 4   // bytes of additional header segments
	MaxDataLength = 1<<24 - 1 // bytes of a data segment
)

// Version is the only protocol version (RFC 7143, 11.12.4).
const Version = 0x00

// TaskTag is an Initiator Task Tag or a Target Transfer Tag.
type TaskTag uint32

// ReservedTag is the tag that names no task and no transfer.
const ReservedTag TaskTag = 0xffffffff

// ISID is the initiator's part of a session identifier (RFC 7143, 11.12.5).
type ISID [6]byte

// String returns the ISID as 12 hexadecimal digits.
func (i ISID) String() string { return fmt.Sprintf("%x", i[:]) }

// LUN is the 8-byte LUN field as SAM-5 encodes it.
type LUN uint64

// LUNOf encodes logical unit number n: below 256 in the peripheral device addressing method, up to
// 16383 in the flat space method. Larger numbers are truncated to 14 bits.
func LUNOf(n uint16) LUN {
	if n < 256 {
		return LUN(n) << 48
	}
	return LUN(0x4000|n&0x3fff) << 48
}

// Number decodes a single-level LUN. It is false for multi-level
// and well-known logical units, and for buses other than 0.
func (l LUN) Number() (uint16, bool) {
	if l&(1<<48-1) != 0 {
		return 0, false
	}
	first := uint16(l >> 48)
	switch first >> 14 {
	case 0:
		return first & 0xff, first>>8 == 0
	case 1:
		return first & 0x3fff, true
	}
	return 0, false
}

// Header is a basic header segment:
//
//	 0      1      opcode: bit 6 is I (immediate delivery), bits 5-0 the opcode
//	 1      1      bit 7 is F (final); the rest depends on the opcode
//	 2      2      depends on the opcode
//	 4      1      TotalAHSLength, in words of 4 bytes
//	 5      3      DataSegmentLength, in bytes, without padding
//	 8      8      LUN, or depends on the opcode
//	16      4      Initiator Task Tag
//	20     28      depends on the opcode
//
// It is the bytes themselves; the accessors may be used on any header, and
// mean something where the opcode has the field.
type Header [HeaderLen]byte

// ParseHeader copies the first 48 bytes of b. A shorter b is ErrShort.
func ParseHeader(b []byte) (h Header, err error) {
	if len(b) < HeaderLen {
		return h, ErrShort
	}
	copy(h[:], b)
	return h, nil
}

// Opcode returns the opcode without the immediate bit.
func (h *Header) Opcode() Opcode { return Opcode(h[0] & 0x3f) }

// Immediate reports the I bit. It is meaningful in requests.
func (h *Header) Immediate() bool { return h[0]&0x40 != 0 }

// Final reports the F bit.
func (h *Header) Final() bool { return h[1]&0x80 != 0 }

// AHSLength returns TotalAHSLength in bytes, 0 to 1020.
func (h *Header) AHSLength() int { return int(h[4]) * 4 }

// SetAHSLength sets TotalAHSLength from bytes: a multiple of 4, at most MaxAHSLength.
func (h *Header) SetAHSLength(n int) { h[4] = byte(n / 4) }

// DataLength returns DataSegmentLength: bytes without padding, 0 to MaxDataLength.
func (h *Header) DataLength() int { return int(h[5])<<16 | int(h[6])<<8 | int(h[7]) }

// SetDataLength sets DataSegmentLength, at most MaxDataLength.
func (h *Header) SetDataLength(n int) { h[5], h[6], h[7] = byte(n>>16), byte(n>>8), byte(n) }

// LUN returns the LUN field.
func (h *Header) LUN() LUN { return LUN(h.u64(8)) }

// ITT returns the Initiator Task Tag.
func (h *Header) ITT() TaskTag { return TaskTag(h.u32(16)) }

// TTT returns the Target Transfer Tag of the opcodes that have one.
func (h *Header) TTT() TaskTag { return TaskTag(h.u32(20)) }

// CmdSN returns CmdSN of a request.
func (h *Header) CmdSN() Serial { return Serial(h.u32(24)) }

// SetCmdSN sets CmdSN of a request.
func (h *Header) SetCmdSN(s Serial) { h.put32(24, uint32(s)) }

// ExpStatSN returns ExpStatSN of a request, Data-Out included.
func (h *Header) ExpStatSN() Serial { return Serial(h.u32(28)) }

// SetExpStatSN sets ExpStatSN of a request.
func (h *Header) SetExpStatSN(s Serial) { h.put32(28, uint32(s)) }

// StatSN returns StatSN of a response.
func (h *Header) StatSN() Serial { return Serial(h.u32(24)) }

// SetStatSN sets StatSN of a response.
func (h *Header) SetStatSN(s Serial) { h.put32(24, uint32(s)) }

// ExpCmdSN returns ExpCmdSN of a response.
func (h *Header) ExpCmdSN() Serial { return Serial(h.u32(28)) }

// MaxCmdSN returns MaxCmdSN of a response.
func (h *Header) MaxCmdSN() Serial { return Serial(h.u32(32)) }

// SetWindow sets ExpCmdSN and MaxCmdSN of a response.
func (h *Header) SetWindow(exp, max Serial) {
	h.put32(28, uint32(exp))
	h.put32(32, uint32(max))
}

// String describes the header for logs: opcode, tags and lengths. It shows no data.
func (h *Header) String() string {
	return fmt.Sprintf("%v itt=%08x flags=%02x ahs=%d data=%d", h.Opcode(), uint32(h.ITT()), h[1], h.AHSLength(), h.DataLength())
}

// start clears the header and sets opcode and flags.
func (h *Header) start(op Opcode, immediate bool, flags byte) {
	*h = Header{}
	h[0] = byte(op)
	if immediate {
		h[0] |= 0x40
	}
	h[1] = flags
}

// is returns ErrOpcode unless the header carries op.
func (h *Header) is(op Opcode) error {
	if h.Opcode() != op {
		return ErrOpcode
	}
	return nil
}

func (h *Header) u16(at int) uint16       { return binary.BigEndian.Uint16(h[at:]) }
func (h *Header) u32(at int) uint32       { return binary.BigEndian.Uint32(h[at:]) }
func (h *Header) u64(at int) uint64       { return binary.BigEndian.Uint64(h[at:]) }
func (h *Header) put16(at int, v uint16)  { binary.BigEndian.PutUint16(h[at:], v) }
func (h *Header) put32(at int, v uint32)  { binary.BigEndian.PutUint32(h[at:], v) }
func (h *Header) put64(at int, v uint64)  { binary.BigEndian.PutUint64(h[at:], v) }
func (h *Header) tags(itt, ttt TaskTag)   { h.put32(16, uint32(itt)); h.put32(20, uint32(ttt)) }
func (h *Header) request(cmd, exp Serial) { h.SetCmdSN(cmd); h.SetExpStatSN(exp) }
func (h *Header) response(stat, exp, max Serial) {
	h.SetStatSN(stat)
	h.SetWindow(exp, max)
}

func bit(set bool, mask byte) byte {
	if set {
		return mask
	}
	return 0
}
