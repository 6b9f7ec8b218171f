package iser

import (
	"encoding/binary"
	"errors"
)

// headerLen is the length of the iSER header, the first bytes of every Send (RFC 7145, 9.1).
const headerLen = 28

// opcode is the kind of an iSER message.
type opcode uint8

// Opcodes.
const (
	opControl    opcode = 1 // a control-type PDU follows
	opHello      opcode = 2
	opHelloReply opcode = 3
)

// Bits of byte 0 behind the opcode.
const (
	bitWrite  = 0x08 // control: Write STag and Base Offset are valid
	bitRead   = 0x04 // control: Read STag and Base Offset are valid
	bitReject = 0x01 // HelloReply
)

// Versions of iSER. RFC 7145 says 10 in its text (9.3) and 1 in its figures (B.1).
const (
	version    = 10
	versionOld = 1
)

// controlHeader is the header before a control-type PDU (RFC 7145, 9.2). Tags and offsets that are not valid are 0.
//
//	0   1  opcode 1 << 4, WSV 0x08, RSV 0x04
//	1   3  reserved
//	4   4  Write STag
//	8   8  Write Base Offset
//	16  4  Read STag
//	20  8  Read Base Offset
type controlHeader struct {
	writeValid, readValid bool
	writeTag, readTag     uint32
	writeBase, readBase   uint64
}

func (h *controlHeader) encode(b *[headerLen]byte) {
	*b = [headerLen]byte{byte(opControl) << 4}
	if h.writeValid {
		b[0] |= bitWrite
		binary.BigEndian.PutUint32(b[4:], h.writeTag)
		binary.BigEndian.PutUint64(b[8:], h.writeBase)
	}
	if h.readValid {
		b[0] |= bitRead
		binary.BigEndian.PutUint32(b[16:], h.readTag)
		binary.BigEndian.PutUint64(b[20:], h.readBase)
	}
}

// decode reads a header whose opcode is opControl. Reserved bits, and fields that are not valid, are ignored (ISER-30).
func (h *controlHeader) decode(b *[headerLen]byte) {
	*h = controlHeader{writeValid: b[0]&bitWrite != 0, readValid: b[0]&bitRead != 0}
	if h.writeValid {
		h.writeTag, h.writeBase = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint64(b[8:])
	}
	if h.readValid {
		h.readTag, h.readBase = binary.BigEndian.Uint32(b[16:]), binary.BigEndian.Uint64(b[20:])
	}
}

// opcodeOf is the opcode of a message that has at least a header.
func opcodeOf(b *[headerLen]byte) opcode { return opcode(b[0] >> 4) }

// hello is the Hello message (RFC 7145, 9.3): a header and nothing else.
//
//	0  1  opcode 2 << 4
//	1  1  MaxVer << 4, MinVer
//	2  2  iSER-IRD
type hello struct {
	maxVer, minVer uint8
	ird            uint16
}

func (m *hello) encode(b *[headerLen]byte) {
	*b = [headerLen]byte{byte(opHello) << 4, m.maxVer<<4 | m.minVer&0xf}
	binary.BigEndian.PutUint16(b[2:], m.ird)
}

func (m *hello) decode(b *[headerLen]byte) {
	*m = hello{maxVer: b[1] >> 4, minVer: b[1] & 0xf, ird: binary.BigEndian.Uint16(b[2:])}
}

// helloReply is the answer (RFC 7145, 9.4).
//
//	0  1  opcode 3 << 4, REJ 0x01
//	1  1  MaxVer << 4, CurVer
//	2  2  iSER-ORD
type helloReply struct {
	reject         bool
	maxVer, curVer uint8
	ord            uint16
}

func (m *helloReply) encode(b *[headerLen]byte) {
	*b = [headerLen]byte{byte(opHelloReply) << 4, m.maxVer<<4 | m.curVer&0xf}
	if m.reject {
		b[0] |= bitReject
	}
	binary.BigEndian.PutUint16(b[2:], m.ord)
}

func (m *helloReply) decode(b *[headerLen]byte) {
	*m = helloReply{reject: b[0]&bitReject != 0, maxVer: b[1] >> 4, curVer: b[1] & 0xf, ord: binary.BigEndian.Uint16(b[2:])}
}

// answer is the reply to m of a target that can have ord RDMA Reads outstanding (ISER-22, 23).
func (m *hello) answer(ord int) helloReply {
	r := helloReply{maxVer: version, curVer: version, ord: uint16(min(ord, int(m.ird)))}
	within := func(v uint8) bool { return m.minVer <= v && v <= m.maxVer }
	switch {
	case within(version):
	case within(versionOld):
		r.curVer = versionOld
	default:
		r.reject = true
	}
	if m.ird > 0 && ord == 0 {
		r.reject = true
	}
	return r
}

// The private data with which a connection is made begins with the iSER CM header: a byte of flags and three reserved bytes (InfiniBand
// annex A12; over iWARP it is the private data of MPA).
const (
	cmHeaderLen = 4

	// cmNoZeroBased: offsets do not begin at 0. To a target it makes no difference: it adds to offsets.
	cmNoZeroBased = 0x80
	// cmNoInvalidate: Send with Invalidate is not supported (request), or will not be used (reply).
	cmNoInvalidate = 0x40
)

// errPrivateData: private data is not an iSER CM header.
var errPrivateData = errors.New("iser: private data is no iSER header")

// peerFlags reads the flags in a peer's private data. What is missing supports nothing. Some transports pad it with zeros.
func peerFlags(private []byte) (byte, error) {
	if len(private) == 0 {
		return cmNoZeroBased | cmNoInvalidate, nil
	}
	if len(private) < cmHeaderLen {
		return 0, errPrivateData
	}
	for _, b := range private[cmHeaderLen:] {
		if b != 0 {
			return 0, errPrivateData
		}
	}
	return private[0], nil
}
