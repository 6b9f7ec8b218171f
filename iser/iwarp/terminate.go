package iwarp

import (
	"encoding/binary"
	"fmt"

	"github.com/isergate/isergate/iser/rdma"
)

// Layers, error types and codes of a Terminate (RFC 5040, 4.8 and 7; RFC 5041, 7; RFC 5044, 8; RFC 6581, 9.3).
const (
	layerRDMAP = 0
	layerDDP   = 1
	layerMPA   = 2

	rdmapCatastrophic = 0
	rdmapProtection   = 1
	rdmapOperation    = 2

	rdmapInvalidTag       = 0x00 // rdmapProtection
	rdmapBounds           = 0x01
	rdmapAccess           = 0x02
	rdmapNotAssociated    = 0x03
	rdmapWrap             = 0x04
	rdmapVersion          = 0x05 // rdmapOperation
	rdmapUnexpected       = 0x06
	rdmapStream           = 0x07
	rdmapGlobal           = 0x08
	rdmapCannotInvalidate = 0x09 // both
	rdmapUnspecified      = 0xff

	ddpCatastrophic = 0
	ddpTagged       = 1
	ddpUntagged     = 2

	ddpInvalidTag    = 0x00 // ddpTagged
	ddpBounds        = 0x01
	ddpNotAssociated = 0x02
	ddpWrap          = 0x03
	ddpTaggedVersion = 0x04

	ddpInvalidQueue    = 0x01 // ddpUntagged
	ddpNoBuffer        = 0x02
	ddpMSNRange        = 0x03
	ddpInvalidOffset   = 0x04
	ddpTooLong         = 0x05
	ddpUntaggedVersion = 0x06

	mpaConnection      = 0x01
	mpaCRC             = 0x02
	mpaFraming         = 0x03
	mpaInvalidFrame    = 0x04
	mpaCatastrophic    = 0x05
	mpaInsufficientIRD = 0x06
	mpaNoRTR           = 0x07
)

// fault is a reason for a Terminate: a bit that is always set, then layer, type and code. The zero value is none.
type fault uint32

const noFault fault = 0

func faultOf(layer, etype, code uint32) fault {
	return fault(1<<23 | layer<<12 | etype<<8 | code)
}

func (f fault) layer() byte { return byte(f >> 12 & 0xf) }
func (f fault) etype() byte { return byte(f >> 8 & 0xf) }
func (f fault) code() byte  { return byte(f) }

// protection reports whether the fault is about a right of the peer.
func (f fault) protection() bool {
	return f.layer() == layerRDMAP && f.etype() == rdmapProtection || f.layer() == layerDDP && f.etype() == ddpTagged && f.code() != ddpTaggedVersion
}

// String names the fault as the standards do.
func (f fault) String() string {
	type key [3]byte
	what := map[key]string{
		{0, 1, 0}: "invalid STag", {0, 1, 1}: "base or bounds violation", {0, 1, 2}: "access rights violation", {0, 1, 3}: "STag not associated with the stream",
		{0, 1, 4}: "TO wrap", {0, 1, 9}: "STag cannot be invalidated", {0, 1, 0xff}: "unspecified protection error",
		{0, 2, 5}: "invalid RDMAP version", {0, 2, 6}: "unexpected opcode", {0, 2, 7}: "catastrophic error of the stream", {0, 2, 8}: "catastrophic error",
		{0, 2, 9}: "STag cannot be invalidated", {0, 2, 0xff}: "unspecified operation error",
		{1, 0, 0}: "local catastrophic error",
		{1, 1, 0}: "invalid STag", {1, 1, 1}: "base or bounds violation", {1, 1, 2}: "STag not associated with the stream", {1, 1, 3}: "TO wrap", {1, 1, 4}: "invalid DDP version",
		{1, 2, 1}: "invalid queue", {1, 2, 2}: "no buffer available", {1, 2, 3}: "MSN out of range", {1, 2, 4}: "invalid MO", {1, 2, 5}: "message too long", {1, 2, 6}: "invalid DDP version",
		{2, 0, 1}: "connection closed or lost", {2, 0, 2}: "CRC error", {2, 0, 3}: "framing error", {2, 0, 4}: "invalid MPA frame", {2, 0, 5}: "local catastrophic error",
		{2, 0, 6}: "insufficient IRD", {2, 0, 7}: "no matching RTR",
	}[key{f.layer(), f.etype(), f.code()}]
	if f.layer() == layerRDMAP && f.etype() == rdmapCatastrophic {
		what = "local catastrophic error"
	}
	if what == "" {
		what = "unknown error"
	}
	layer := "layer " + fmt.Sprint(f.layer())
	if names := [...]string{"RDMAP", "DDP", "MPA"}; int(f.layer()) < len(names) {
		layer = names[f.layer()]
	}
	return fmt.Sprintf("%s: %s (layer %d, type %d, code %#02x)", layer, what, f.layer(), f.etype(), f.code())
}

// known reports whether the standards define the fault.
func (f fault) known() bool {
	c := f.code()
	switch f.layer() {
	case layerRDMAP:
		switch f.etype() {
		case rdmapCatastrophic:
			return true
		case rdmapProtection:
			return c <= rdmapWrap || c == rdmapCannotInvalidate || c == rdmapUnspecified
		case rdmapOperation:
			return c >= rdmapVersion && c <= rdmapCannotInvalidate || c == rdmapUnspecified
		}
	case layerDDP:
		switch f.etype() {
		case ddpCatastrophic:
			return true
		case ddpTagged:
			return c <= ddpTaggedVersion
		case ddpUntagged:
			return c >= ddpInvalidQueue && c <= ddpUntaggedVersion
		}
	case layerMPA:
		return f.etype() == 0 && c >= mpaConnection && c <= mpaNoRTR
	}
	return false
}

// The payload of a Terminate (RFC 5040, 4.8), after its untagged header (queue 2, MSN 1, MO 0, last):
//
//	0  layer (high nibble), type
//	1  code
//	2  M 0x80: segment length is there, D 0x40: DDP header, R 0x20: RDMA Read Request header
//	3  0
//	4  DDP segment length (2), if M
//	6  DDP header, 14 or 18 bytes, if D
//	   RDMA Read Request header, 28 bytes, if R
const (
	termFixed  = 4
	termMax    = termFixed + 2 + untaggedLen + readRequestLen
	termLength = 0x80
	termDDP    = 0x40
	termRDMA   = 0x20
)

// culprit is the segment that a fault is about.
type culprit struct {
	length  int // of the ULPDU
	header  [untaggedLen + readRequestLen]byte
	request bool // header holds a Read Request too
}

// appendTerminate appends the payload of a Terminate. The segment is included unless the fault is MPA's own (IWARP-61, 3.3).
func appendTerminate(b []byte, f fault, c *culprit) []byte {
	at := len(b)
	b = append(b, f.layer()<<4|f.etype(), f.code(), 0, 0)
	if f.layer() == layerMPA || c == nil || c.length < taggedLen {
		return b
	}
	header := taggedLen
	if c.header[0]&ctrlTagged == 0 {
		if header = untaggedLen; c.length < untaggedLen {
			return b
		}
	}
	b[at+2] = termLength | termDDP
	b = binary.BigEndian.AppendUint16(b, uint16(c.length))
	b = append(b, c.header[:header]...)
	if c.request && f.layer() == layerRDMAP && f.etype() == rdmapProtection {
		b[at+2] |= termRDMA
		b = append(b, c.header[untaggedLen:]...)
	}
	return b
}

// TerminateError is the reason of a connection that ended with a Terminate message, sent or received.
type TerminateError struct {
	// Received: the peer sent it, and what it says is about what we sent.
	Received bool
	Layer    uint8 // 0 RDMAP, 1 DDP, 2 MPA
	Type     uint8
	Code     uint8
	// Reversed: the message is from a sender that fills its bytes from the other end, as Linux's
	// siw does on little-endian machines. The fields above are as it meant them.
	Reversed bool
	// Ambiguous: both readings are possible; Other is the one not taken: layer, type.
	Ambiguous bool
	Other     [2]uint8
}

// Error implements error.
func (e *TerminateError) Error() string {
	who := "sent"
	if e.Received {
		who = "received"
	}
	s := fmt.Sprintf("iwarp: Terminate %s: %s", who, faultOf(uint32(e.Layer), uint32(e.Type), uint32(e.Code)))
	if e.Ambiguous {
		s += fmt.Sprintf(", or layer %d, type %d", e.Other[0], e.Other[1])
	}
	return s
}

// Unwrap gives the error of package rdma.
func (e *TerminateError) Unwrap() error {
	switch {
	case e.Received:
		return rdma.ErrRemote
	case faultOf(uint32(e.Layer), uint32(e.Type), uint32(e.Code)).protection():
		return rdma.ErrAccess
	}
	return rdma.ErrTransport
}

// decodeTerminate reads a Terminate by its standard layout, or by siw's: type in the high nibble, M, D and R in bits 0 to 2. Byte 2 tells which, unless
// it is 0; then the reading that the standards know is taken, the standard one first.
func decodeTerminate(b []byte) (*TerminateError, bool) {
	if len(b) < termFixed {
		return nil, false
	}
	e := &TerminateError{Received: true, Layer: b[0] >> 4, Type: b[0] & 0xf, Code: b[1]}
	straight := faultOf(uint32(b[0]>>4), uint32(b[0]&0xf), uint32(b[1])).known()
	reversed := faultOf(uint32(b[0]&0xf), uint32(b[0]>>4), uint32(b[1])).known()
	const high, low = termLength | termDDP | termRDMA, 0x07
	switch {
	case b[2]&high != 0 && b[2]&low == 0:
	case b[2]&low != 0 && b[2]&high == 0:
		e.Reversed = true
	default:
		e.Reversed = !straight && reversed
		e.Ambiguous = straight && reversed && e.Layer != e.Type
	}
	if e.Reversed {
		e.Layer, e.Type = e.Type, e.Layer
	}
	e.Other = [2]uint8{e.Type, e.Layer}
	return e, true
}
