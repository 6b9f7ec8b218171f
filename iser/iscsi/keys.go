package iscsi

import (
	"strconv"
	"strings"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Parameters are the values in force on a connection and its session (RFC 7143, 13).
// Lengths are bytes, times are seconds.
type Parameters struct {
	HeaderDigest bool // CRC32C, each connection
	DataDigest   bool

	// MaxRecvDataSegmentLength is what the target declared, and
	// InitiatorMaxRecvDataSegmentLength what the initiator declared, for this connection.
	MaxRecvDataSegmentLength          uint32
	InitiatorMaxRecvDataSegmentLength uint32

	MaxConnections      uint16
	InitialR2T          bool
	ImmediateData       bool
	MaxBurstLength      uint32
	FirstBurstLength    uint32 // never above MaxBurstLength
	DefaultTime2Wait    uint16
	DefaultTime2Retain  uint16
	MaxOutstandingR2T   uint16
	DataPDUInOrder      bool
	DataSequenceInOrder bool
	ErrorRecoveryLevel  uint8
	ProtocolLevel       uint8 // iSCSIProtocolLevel

	// The keys of RFC 7145, section 6. They mean something if RDMAExtensions is true.
	RDMAExtensions              bool
	TargetRecvDataSegmentLength uint32
	InitiatorRecvDataSegmentLen uint32 // InitiatorRecvDataSegmentLength
	// MaxOutstandingUnexpectedPDUs is what the initiator declared, 0 for no limit.
	MaxOutstandingUnexpectedPDUs uint32
	UnexpectedPDUsDeclared       bool // it sent MaxOutstandingUnexpectedPDUs
	HelloRequired                bool // iSERHelloRequired
	TaggedBufferForSolicitedOnly bool // TaggedBufferForSolicitedDataOnly
	TaggedBufferDeclared         bool // it sent TaggedBufferForSolicitedDataOnly

	// CommandWindow is how many commands the initiator may have in progress. The server sets it before Enable.
	CommandWindow int

	message                       bool // Traits.message of the connection
	initiatorAlias, initiatorArch string
}

// Lengths of data segments over iSER.
const (
	// recvISER is offered as TargetRecvDataSegmentLength: immediate data of a write (ISER-R13).
	recvISER = 8192
	// sendISER is what known initiators can receive in full feature phase, whatever they declare (ISER-R2).
	sendISER = 128
)

// ControlLimit is the longest data segment of a control PDU that the initiator can receive, in bytes.
func (p *Parameters) ControlLimit() uint32 {
	switch {
	case p.RDMAExtensions:
		return min(p.InitiatorRecvDataSegmentLen, sendISER)
	case p.message: // a discovery session: its only buffer is that of login
		return min(p.InitiatorMaxRecvDataSegmentLength, loginSegment)
	}
	return p.InitiatorMaxRecvDataSegmentLength
}

// defaults are the values of RFC 7143 and RFC 7145 that hold if nothing is negotiated.
func defaults() Parameters {
	return Parameters{
		MaxRecvDataSegmentLength: 8192, InitiatorMaxRecvDataSegmentLength: 8192,
		MaxConnections: 1, InitialR2T: true, ImmediateData: true,
		MaxBurstLength: 262144, FirstBurstLength: 65536,
		DefaultTime2Wait: 2, DefaultTime2Retain: 20,
		MaxOutstandingR2T: 1, DataPDUInOrder: true, DataSequenceInOrder: true,
		ProtocolLevel:               1,
		TargetRecvDataSegmentLength: 8192, InitiatorRecvDataSegmentLen: 8192,
	}
}

// Unsolicited reports the most bytes that a command may bring without an R2T.
func (p *Parameters) Unsolicited() uint32 {
	if p.InitialR2T && !p.ImmediateData {
		return 0
	}
	return p.FirstBurstLength
}

// offer is the target's side of the negotiation.
type offer struct {
	maxRecv       uint32 // declared
	maxConns      uint16
	maxBurst      uint32
	firstBurst    uint32
	maxR2T        uint16
	time2Retain   uint16
	protocolLevel uint8
	noDigests     bool
	rdma          bool
	message       bool // login runs in messages: RDMAExtensions, or a discovery session
	unsolicited   bool // unsolicited Data-Out over iSER
	required      bool // a normal session without RDMAExtensions is refused
}

// A keyRule evaluates one key that the initiator sent: it changes p and returns the answer, "" for none.
type keyRule struct {
	// where the key may be sent by an initiator
	login, fullFeature bool
	leading            bool // only on the first connection of a session
	normalOnly         bool // irrelevant in a discovery session
	apply              func(n *negotiation, value string) string
}

// negotiation evaluates operational keys for one connection.
type negotiation struct {
	offer       offer
	p           Parameters
	discovery   bool
	leading     bool
	fullFeature bool
	declared    bool // our MaxRecvDataSegmentLength is sent
	explicit    map[string]bool
}

// number is a rule for a numeric key in [min,max].
func number(min, max uint64, set func(n *negotiation, v uint64) string) func(*negotiation, string) string {
	return func(n *negotiation, value string) string {
		v, err := pdu.ParseNumber(value, min, max)
		if err != nil {
			return pdu.ValueReject
		}
		return set(n, v)
	}
}

func boolean(set func(n *negotiation, v bool) string) func(*negotiation, string) string {
	return func(n *negotiation, value string) string {
		v, err := pdu.ParseBool(value)
		if err != nil {
			return pdu.ValueReject
		}
		return set(n, v)
	}
}

// choose returns the first item of the initiator's list that the target supports (RFC 7143, 6.2.1).
func choose(list string, supported ...string) string {
	for _, item := range pdu.SplitList(list) {
		for _, s := range supported {
			if item == s {
				return item
			}
		}
	}
	return pdu.ValueReject
}

func digest(set func(p *Parameters, on bool)) func(*negotiation, string) string {
	return func(n *negotiation, value string) string {
		var answer string
		switch {
		case n.p.RDMAExtensions || n.offer.message:
			answer = "None" // whatever was offered (ISER-6)
		case n.offer.noDigests:
			answer = choose(value, "None")
		default:
			answer = choose(value, "CRC32C", "None")
		}
		set(&n.p, answer == "CRC32C")
		return answer
	}
}

func itoa[T uint8 | uint16 | uint32 | uint64](v T) string { return strconv.FormatUint(uint64(v), 10) }

// the largest value of the length keys
const maxLength = 1<<24 - 1

// keyRules is the table of RFC 7143, section 13, and RFC 7145, section 6. Keys that login consumes
// itself (InitiatorName, TargetName, SessionType, AuthMethod, CHAP) are not in it.
var keyRules = map[string]keyRule{
	"HeaderDigest": {login: true, apply: digest(func(p *Parameters, on bool) { p.HeaderDigest = on })},
	"DataDigest":   {login: true, apply: digest(func(p *Parameters, on bool) { p.DataDigest = on })},
	"MaxConnections": {login: true, leading: true, normalOnly: true, apply: number(1, 65535, func(n *negotiation, v uint64) string {
		n.p.MaxConnections = min(uint16(v), n.offer.maxConns)
		return itoa(n.p.MaxConnections)
	})},
	"InitialR2T": {login: true, leading: true, normalOnly: true, apply: boolean(func(n *negotiation, v bool) string {
		// OR. Over iSER small writes are immediate data, and large ones one RDMA Read (ISER-R13).
		n.p.InitialR2T = v || n.p.RDMAExtensions && !n.offer.unsolicited
		return pdu.FormatBool(n.p.InitialR2T)
	})},
	"ImmediateData": {login: true, leading: true, normalOnly: true, apply: boolean(func(n *negotiation, v bool) string {
		n.p.ImmediateData = v
		return pdu.FormatBool(v)
	})},
	"MaxRecvDataSegmentLength": {login: true, fullFeature: true, apply: number(512, maxLength, func(n *negotiation, v uint64) string {
		n.p.InitiatorMaxRecvDataSegmentLength = uint32(v)
		return ""
	})},
	"MaxBurstLength": {login: true, leading: true, normalOnly: true, apply: number(512, maxLength, func(n *negotiation, v uint64) string {
		n.p.MaxBurstLength = min(uint32(v), n.offer.maxBurst)
		return itoa(n.p.MaxBurstLength)
	})},
	"FirstBurstLength": {login: true, leading: true, normalOnly: true, apply: number(512, maxLength, func(n *negotiation, v uint64) string {
		// MaxBurstLength of the same text is evaluated before (evaluate).
		n.p.FirstBurstLength = min(uint32(v), n.offer.firstBurst, n.p.MaxBurstLength)
		n.explicit["FirstBurstLength"] = true
		return itoa(n.p.FirstBurstLength)
	})},
	"DefaultTime2Wait": {login: true, leading: true, apply: number(0, 3600, func(n *negotiation, v uint64) string {
		n.p.DefaultTime2Wait = uint16(v)
		return itoa(uint16(v))
	})},
	"DefaultTime2Retain": {login: true, leading: true, apply: number(0, 3600, func(n *negotiation, v uint64) string {
		n.p.DefaultTime2Retain = min(uint16(v), n.offer.time2Retain)
		return itoa(n.p.DefaultTime2Retain)
	})},
	"MaxOutstandingR2T": {login: true, leading: true, normalOnly: true, apply: number(1, 65535, func(n *negotiation, v uint64) string {
		n.p.MaxOutstandingR2T = min(uint16(v), n.offer.maxR2T)
		return itoa(n.p.MaxOutstandingR2T)
	})},
	"DataPDUInOrder": {login: true, leading: true, normalOnly: true, apply: boolean(func(n *negotiation, v bool) string {
		return "Yes" // OR, and the target asks for order
	})},
	"DataSequenceInOrder": {login: true, leading: true, normalOnly: true, apply: boolean(func(n *negotiation, v bool) string {
		return "Yes"
	})},
	"ErrorRecoveryLevel": {login: true, leading: true, apply: number(0, 2, func(n *negotiation, v uint64) string {
		return "0"
	})},
	"TaskReporting": {login: true, leading: true, normalOnly: true, apply: func(n *negotiation, value string) string {
		return choose(value, "RFC3720")
	}},
	"iSCSIProtocolLevel": {login: true, leading: true, normalOnly: true, apply: number(0, 31, func(n *negotiation, v uint64) string {
		n.p.ProtocolLevel = min(uint8(v), n.offer.protocolLevel)
		return itoa(n.p.ProtocolLevel)
	})},
	"X#NodeArchitecture": {login: true, fullFeature: true, apply: func(n *negotiation, value string) string {
		n.p.initiatorArch = value
		return ""
	}},
	"InitiatorAlias": {login: true, fullFeature: true, apply: func(n *negotiation, value string) string {
		n.p.initiatorAlias = value
		return ""
	}},

	// Markers are obsolete (RFC 7143, 13.25). No is what initiators that still send these keys understand.
	"IFMarker":  {login: true, apply: func(*negotiation, string) string { return "No" }},
	"OFMarker":  {login: true, apply: func(*negotiation, string) string { return "No" }},
	"IFMarkInt": {login: true, apply: func(*negotiation, string) string { return pdu.ValueReject }},
	"OFMarkInt": {login: true, apply: func(*negotiation, string) string { return pdu.ValueReject }},

	"RDMAExtensions": {login: true, leading: true, normalOnly: true, apply: boolean(func(n *negotiation, v bool) string {
		n.p.RDMAExtensions = v && n.offer.rdma
		if n.p.RDMAExtensions {
			n.p.HeaderDigest, n.p.DataDigest = false, false
		}
		return pdu.FormatBool(n.p.RDMAExtensions)
	})},
	"TargetRecvDataSegmentLength": {login: true, normalOnly: true, apply: rdmaOnly(number(512, maxLength, func(n *negotiation, v uint64) string {
		n.p.TargetRecvDataSegmentLength = min(uint32(v), recvISER)
		return itoa(n.p.TargetRecvDataSegmentLength)
	}))},
	"InitiatorRecvDataSegmentLength": {login: true, normalOnly: true, apply: rdmaOnly(number(512, maxLength, func(n *negotiation, v uint64) string {
		n.p.InitiatorRecvDataSegmentLen = uint32(v)
		return itoa(uint32(v))
	}))},
	"MaxOutstandingUnexpectedPDUs": {login: true, leading: true, normalOnly: true, apply: rdmaOnly(number(0, 1<<32-1, func(n *negotiation, v uint64) string {
		if v == 1 {
			return pdu.ValueReject
		}
		n.p.MaxOutstandingUnexpectedPDUs, n.p.UnexpectedPDUsDeclared = uint32(v), true
		return ""
	}))},
	"MaxAHSLength": {login: true, leading: true, normalOnly: true, apply: rdmaOnly(number(0, 1<<32-1, func(n *negotiation, v uint64) string {
		if v == 1 {
			return pdu.ValueReject
		}
		return "" // no PDU of a target has additional header segments
	}))},
	"TaggedBufferForSolicitedDataOnly": {login: true, leading: true, normalOnly: true, apply: rdmaOnly(boolean(func(n *negotiation, v bool) string {
		n.p.TaggedBufferForSolicitedOnly, n.p.TaggedBufferDeclared = v, true
		return ""
	}))},
	"iSERHelloRequired": {login: true, leading: true, normalOnly: true, apply: rdmaOnly(boolean(func(n *negotiation, v bool) string {
		n.p.HelloRequired = v
		return ""
	}))},

	// These an initiator never sends.
	"TargetAlias": {}, "TargetAddress": {}, "TargetPortalGroupTag": {},
}

func rdmaOnly(rule func(*negotiation, string) string) func(*negotiation, string) string {
	return func(n *negotiation, value string) string {
		if !n.p.RDMAExtensions {
			return pdu.ValueIrrelevant
		}
		return rule(n, value)
	}
}

// evaluationOrder lists keys on which others depend; they are evaluated first,
// wherever they stand in the text (RFC 7145, 6.3).
var evaluationOrder = []string{"RDMAExtensions", "MaxBurstLength"}

// evaluate answers the keys of one complete text in their order. It returns false if a key is not
// allowed here, which is a protocol error.
func (n *negotiation) evaluate(in pdu.Pairs) (out pdu.Pairs, ok bool) {
	if n.explicit == nil {
		n.explicit = make(map[string]bool)
	}
	early := make(map[string]string)
	for _, key := range evaluationOrder {
		if v, has := in.Get(key); has {
			answer, ok := n.one(key, v)
			if !ok {
				return nil, false
			}
			early[key] = answer
		}
	}
	for _, kv := range in {
		answer, done := early[kv.Key]
		if !done {
			if answer, ok = n.one(kv.Key, kv.Value); !ok {
				return nil, false
			}
		}
		if answer != "" {
			out.Add(kv.Key, answer)
		}
	}
	return out, true
}

// one evaluates one key.
func (n *negotiation) one(key, value string) (answer string, ok bool) {
	rule, known := keyRules[key]
	switch {
	case !known:
		if value == pdu.ValueNotUnderstood || value == pdu.ValueIrrelevant || value == pdu.ValueReject {
			return "", false
		}
		return pdu.ValueNotUnderstood, true
	case rule.apply == nil:
		// A peer may say that it did not understand what the target declared (ISCSI-26).
		return "", value == pdu.ValueNotUnderstood
	case value == pdu.ValueNotUnderstood || value == pdu.ValueIrrelevant || value == pdu.ValueReject:
		return "", key == "MaxRecvDataSegmentLength" && n.declared
	case n.fullFeature && !rule.fullFeature:
		return pdu.ValueReject, true
	case n.discovery && rule.normalOnly:
		return pdu.ValueIrrelevant, true
	case rule.leading && !n.leading:
		return pdu.ValueReject, true
	}
	return rule.apply(n, value), true
}

// finish checks the parameters as a whole before they take effect.
func (n *negotiation) finish() bool {
	if n.p.FirstBurstLength > n.p.MaxBurstLength {
		if n.explicit["FirstBurstLength"] {
			return false
		}
		n.p.FirstBurstLength = n.p.MaxBurstLength
	}
	return true
}

// session copies what is session-wide from the leading connection.
func (p *Parameters) session(from *Parameters) {
	s := *from
	s.HeaderDigest, s.DataDigest = p.HeaderDigest, p.DataDigest
	s.MaxRecvDataSegmentLength = p.MaxRecvDataSegmentLength
	s.InitiatorMaxRecvDataSegmentLength = p.InitiatorMaxRecvDataSegmentLength
	s.TargetRecvDataSegmentLength = p.TargetRecvDataSegmentLength
	s.InitiatorRecvDataSegmentLen = p.InitiatorRecvDataSegmentLen
	s.message = p.message
	*p = s
}

// Keys lists the parameters as text keys, for session lists.
func (p *Parameters) Keys() map[string]string {
	dig := func(on bool) string {
		if on {
			return "CRC32C"
		}
		return "None"
	}
	m := map[string]string{
		"HeaderDigest": dig(p.HeaderDigest), "DataDigest": dig(p.DataDigest),
		"TargetMaxRecvDataSegmentLength":    itoa(p.MaxRecvDataSegmentLength),
		"InitiatorMaxRecvDataSegmentLength": itoa(p.InitiatorMaxRecvDataSegmentLength),
		"MaxConnections":                    itoa(p.MaxConnections),
		"InitialR2T":                        pdu.FormatBool(p.InitialR2T), "ImmediateData": pdu.FormatBool(p.ImmediateData),
		"MaxBurstLength": itoa(p.MaxBurstLength), "FirstBurstLength": itoa(p.FirstBurstLength),
		"DefaultTime2Wait": itoa(p.DefaultTime2Wait), "DefaultTime2Retain": itoa(p.DefaultTime2Retain),
		"MaxOutstandingR2T": itoa(p.MaxOutstandingR2T), "ErrorRecoveryLevel": itoa(p.ErrorRecoveryLevel),
		"DataPDUInOrder": pdu.FormatBool(p.DataPDUInOrder), "DataSequenceInOrder": pdu.FormatBool(p.DataSequenceInOrder),
		"iSCSIProtocolLevel": itoa(p.ProtocolLevel), "RDMAExtensions": pdu.FormatBool(p.RDMAExtensions),
	}
	if p.RDMAExtensions {
		m["TargetRecvDataSegmentLength"] = itoa(p.TargetRecvDataSegmentLength)
		m["InitiatorRecvDataSegmentLength"] = itoa(p.InitiatorRecvDataSegmentLen)
	}
	if p.initiatorAlias != "" {
		m["InitiatorAlias"] = strings.ToValidUTF8(p.initiatorAlias, "?")
	}
	return m
}
