package initiator

import (
	"encoding/binary"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// The iSER header before each PDU (RFC 7145, 9.1 to 9.4):
//
//	 0      1      bits 7-4 opcode: 1 control, 2 Hello, 3 HelloReply; control: bit 3 write STag valid, bit 2 read
//	               STag valid; HelloReply: bit 0 rejected
//	 1      1      control: 0; Hello, HelloReply: bits 7-4 highest version, bits 3-0 lowest, or current version
//	 2      2      control: 0; Hello: iSER-IRD; HelloReply: iSER-ORD
//	 4      4      write STag
//	 8      8      write base offset
//	16      4      read STag
//	20      8      read base offset
const iserHeaderLen = 28

// Values of byte 0.
const (
	iserOpcodeMask    = 0xf0
	iserControl       = 0x10
	iserWriteValid    = 0x08
	iserReadValid     = 0x04
	iserHello         = 0x20
	iserHelloReply    = 0x30
	iserHelloRejected = 0x01
)

// iserVersion is what RFC 7145, 9.3 wants; its figures show 1, which is taken as well.
const iserVersion = 10

// Flags of the first of the four bytes of private data (the CM header of InfiniBand's annex A12; RFC 7145 has none).
const (
	cmNotZeroBased = 0x80 // offsets do not start at 0
	cmNoInvalidate = 0x40 // no Send with Invalidate
)

// putControl writes the header of a control PDU, without STags.
func putControl(b []byte) {
	clear(b[:iserHeaderLen])
	b[0] = iserControl
}

func putWriteTag(b []byte, tag uint32, base uint64) {
	b[0] |= iserWriteValid
	binary.BigEndian.PutUint32(b[4:], tag)
	binary.BigEndian.PutUint64(b[8:], base)
}

func putReadTag(b []byte, tag uint32, base uint64) {
	b[0] |= iserReadValid
	binary.BigEndian.PutUint32(b[16:], tag)
	binary.BigEndian.PutUint64(b[20:], base)
}

// parseMessage takes a message of the target apart: a control PDU and its data segment.
func parseMessage(b []byte, maxRecv int) (h *pdu.Header, data []byte, err error) {
	if len(b) < iserHeaderLen+pdu.HeaderLen || b[0]&iserOpcodeMask != iserControl {
		return nil, nil, protocolError("a message of %d bytes that is no iSER control PDU", len(b))
	}
	h = (*pdu.Header)(b[iserHeaderLen:])
	rest := b[iserHeaderLen+pdu.HeaderLen:]
	ahs, n := h.AHSLength(), h.DataLength()
	switch {
	case n > maxRecv:
		return nil, nil, protocolError("%v with a data segment of %d bytes, %d agreed on", h.Opcode(), n, maxRecv)
	case len(rest) < ahs+n:
		return nil, nil, protocolError("%v with %d bytes behind its header, %d announced", h.Opcode(), len(rest), ahs+n)
	case len(rest) > ahs+n+pdu.Padding(n):
		return nil, nil, protocolError("%v with %d bytes behind its header, %d announced", h.Opcode(), len(rest), ahs+n)
	}
	return h, rest[ahs : ahs+n], nil
}
