package iwarp

import (
	"encoding/binary"
	"strconv"
)

// A ULPDU is one DDP segment (RFC 5041, 4) with the RDMAP control byte (RFC 5040, 4.1). All fields are big-endian.
//
//	tagged                         untagged
//	 0  T 0x80 set, L 0x40, DV 0x03    0  T clear, L, DV
//	 1  RV 0xc0, opcode 0x0f           1  RV, opcode
//	 2  STag (4)                       2  STag to invalidate, or 0 (4)
//	 6  TO (8)                         6  QN (4)
//	14  payload                       10  MSN (4)
//	                                  14  MO (4)
//	                                  18  payload
const (
	taggedLen      = 14
	untaggedLen    = 18
	maxHeaderLen   = untaggedLen
	readRequestLen = 28 // after the DDP header

	ctrlTagged   = 0x80
	ctrlLast     = 0x40
	ddpVersion   = 1
	rdmapControl = 1 << 6

	queueSend      = 0
	queueRead      = 1
	queueTerminate = 2
)

// opcode is an RDMAP opcode (RFC 5040, 4.3).
type opcode uint8

const (
	opWrite                   opcode = 0
	opReadRequest             opcode = 1
	opReadResponse            opcode = 2
	opSend                    opcode = 3
	opSendInvalidate          opcode = 4
	opSendSolicited           opcode = 5
	opSendSolicitedInvalidate opcode = 6
	opTerminate               opcode = 7
)

func (o opcode) String() string {
	names := [...]string{
		"RDMA Write", "RDMA Read Request", "RDMA Read Response", "Send", "Send with Invalidate", "Send with Solicited Event",
		"Send with Solicited Event and Invalidate", "Terminate",
	}
	if int(o) < len(names) {
		return names[o]
	}
	return "opcode " + strconv.Itoa(int(o))
}

func (o opcode) isSend() bool      { return o >= opSend && o <= opSendSolicitedInvalidate }
func (o opcode) invalidates() bool { return o == opSendInvalidate || o == opSendSolicitedInvalidate }
func (o opcode) solicited() bool   { return o == opSendSolicited || o == opSendSolicitedInvalidate }
func (o opcode) isTagged() bool    { return o == opWrite || o == opReadResponse }

// segment is a decoded DDP header.
type segment struct {
	op     opcode
	tagged bool
	last   bool
	stag   uint32 // tagged: where to; untagged: to invalidate
	to     uint64
	queue  uint32
	msn    uint32
	mo     uint32
}

// decode decodes the header at the start of b, which is as long as its T bit demands. The fault is about the header alone (IWARP-30, IWARP-50).
func (s *segment) decode(b []byte) fault {
	*s = segment{op: opcode(b[1] & 0x0f), tagged: b[0]&ctrlTagged != 0, last: b[0]&ctrlLast != 0, stag: binary.BigEndian.Uint32(b[2:])}
	if s.tagged {
		s.to = binary.BigEndian.Uint64(b[6:])
	} else {
		s.queue, s.msn, s.mo = binary.BigEndian.Uint32(b[6:]), binary.BigEndian.Uint32(b[10:]), binary.BigEndian.Uint32(b[14:])
	}
	switch {
	case b[0]&3 != ddpVersion && s.tagged:
		return faultOf(layerDDP, ddpTagged, ddpTaggedVersion)
	case b[0]&3 != ddpVersion:
		return faultOf(layerDDP, ddpUntagged, ddpUntaggedVersion)
	case !s.tagged && s.queue > queueTerminate:
		return faultOf(layerDDP, ddpUntagged, ddpInvalidQueue)
	case b[1]&0xc0 != rdmapControl:
		return faultOf(layerRDMAP, rdmapOperation, rdmapVersion)
	case s.op > opTerminate || s.tagged != s.op.isTagged():
		return faultOf(layerRDMAP, rdmapOperation, rdmapUnexpected)
	case s.op.isSend() && s.queue != queueSend, s.op == opReadRequest && s.queue != queueRead, s.op == opTerminate && s.queue != queueTerminate:
		return faultOf(layerRDMAP, rdmapOperation, rdmapUnexpected)
	}
	return noFault
}

// encode writes the header to b and returns its length.
func (s *segment) encode(b []byte) int {
	b[0], b[1] = ddpVersion, rdmapControl|byte(s.op)
	if s.last {
		b[0] |= ctrlLast
	}
	binary.BigEndian.PutUint32(b[2:], s.stag)
	if s.tagged {
		b[0] |= ctrlTagged
		binary.BigEndian.PutUint64(b[6:], s.to)
		return taggedLen
	}
	binary.BigEndian.PutUint32(b[6:], s.queue)
	binary.BigEndian.PutUint32(b[10:], s.msn)
	binary.BigEndian.PutUint32(b[14:], s.mo)
	return untaggedLen
}

// readRequest is the payload of an RDMA Read Request (RFC 5040, 4.4).
//
//	 0  sink STag (4)
//	 4  sink TO (8)
//	12  size (4)
//	16  source STag (4)
//	20  source TO (8)
type readRequest struct {
	sinkTag   uint32
	sinkTO    uint64
	size      uint32
	sourceTag uint32
	sourceTO  uint64
}

func (r *readRequest) decode(b []byte) {
	r.sinkTag, r.sinkTO, r.size = binary.BigEndian.Uint32(b), binary.BigEndian.Uint64(b[4:]), binary.BigEndian.Uint32(b[12:])
	r.sourceTag, r.sourceTO = binary.BigEndian.Uint32(b[16:]), binary.BigEndian.Uint64(b[20:])
}

func (r *readRequest) encode(b []byte) {
	binary.BigEndian.PutUint32(b, r.sinkTag)
	binary.BigEndian.PutUint64(b[4:], r.sinkTO)
	binary.BigEndian.PutUint32(b[12:], r.size)
	binary.BigEndian.PutUint32(b[16:], r.sourceTag)
	binary.BigEndian.PutUint64(b[20:], r.sourceTO)
}
