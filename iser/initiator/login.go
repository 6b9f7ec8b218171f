package initiator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// maxLoginText bounds what a target may send in one login exchange.
const maxLoginText = 64 << 10

// maxLoginRounds bounds the exchanges of one login.
const maxLoginRounds = 32

// maxRedirects bounds how many "target moved" answers Dial follows.
const maxRedirects = 4

// Parameters are what a login agreed on.
type Parameters struct {
	HeaderDigest, DataDigest bool
	InitialR2T               bool
	ImmediateData            bool
	MaxRecv                  uint32 // longest data segment that we accept, bytes
	MaxSend                  uint32 // longest data segment that the target accepts, bytes
	MaxBurst                 uint32 // bytes
	FirstBurst               uint32 // bytes
	MaxOutstandingR2T        uint16
	MaxConnections           uint16
	Time2Wait, Time2Retain   uint16 // seconds
	ErrorRecoveryLevel       uint8
	ProtocolLevel            uint8
	PortalGroup              int // TargetPortalGroupTag; -1 if the target did not say
	TargetAlias              string

	// ISER says that the session is iSER-assisted. MaxRecv and MaxSend are then InitiatorRecvDataSegmentLength and
	// TargetRecvDataSegmentLength.
	ISER bool
	// TargetUnexpected is the target's MaxOutstandingUnexpectedPDUs, 0 for no limit; TargetMaxAHS its MaxAHSLength in bytes, 0 for no limit.
	TargetUnexpected, TargetMaxAHS uint32
}

// Login is the outcome of a login.
type Login struct {
	Parameters
	ISID  pdu.ISID
	TSIH  uint16
	CmdSN pdu.Serial // of the next command
	// ExpStatSN is the StatSN expected next; the window is the target's.
	ExpStatSN          pdu.Serial
	ExpCmdSN, MaxCmdSN pdu.Serial

	hello bool // a Hello is due (RFC 7145, 5.1.3)
}

// loginConn is what carries a login: PDUs one by one, on a TCP stream or in messages.
type loginConn interface {
	SendMessage(m Message, data []byte) error
	Receive() (*PDU, error)
}

// login is the state of one login phase.
type login struct {
	c         loginConn
	o         *Options
	discovery bool
	iser      bool // RDMAExtensions=Yes is wanted
	out       Login
	itt       pdu.TaskTag
	cmdSN     pdu.Serial
	statSN    pdu.Serial
	started   bool // a response came: statSN is valid
	rounds    int
	offered   map[string]string // operational keys that we offered
}

// Login logs the connection in to o.TargetName, or to a discovery session if that is empty, and switches to
// the digests agreed on. A refusal is a LoginError. When ctx ends, the connection is unusable.
func (c *Conn) Login(ctx context.Context, o Options) (*Login, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, o.LoginTimeout)
	defer cancel()
	stop := c.interrupt(ctx)
	l := newLogin(c, &o)
	err := l.run()
	if ctxErr := stop(); ctxErr != nil {
		return nil, fmt.Errorf("initiator: login: %w", ctxErr)
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("%w: the target closed it during login", ErrConnection)
		}
		return nil, err
	}
	c.headerDigest, c.dataDigest = l.out.HeaderDigest, l.out.DataDigest
	if !l.out.ISER {
		c.maxRecv = int(l.out.MaxRecv)
	}
	return &l.out, nil
}

// newLogin prepares a login on c. A normal session is to be iSER-assisted if o says so.
func newLogin(c loginConn, o *Options) *login {
	l := &login{c: c, o: o, discovery: o.TargetName == "", itt: 1, cmdSN: 1}
	_, stream := c.(*Conn)
	l.iser = o.ISER != nil && !l.discovery && (o.ISER.Stream || !stream)
	return l
}

func (l *login) run() error {
	o := l.o
	l.out.ISID = o.ISID
	l.out.Parameters = Parameters{
		InitialR2T: true, ImmediateData: true, MaxRecv: o.MaxRecvDataSegmentLength, MaxSend: 8192,
		MaxBurst: 262144, FirstBurst: 65536, MaxOutstandingR2T: 1, MaxConnections: 1,
		Time2Wait: 2, Time2Retain: 20, ProtocolLevel: 1, PortalGroup: -1,
	}
	if l.iser || o.ISER != nil && l.discovery {
		l.out.MaxRecv = pdu.MinTextLength // until something else is agreed on
	}
	if l.iser {
		l.out.TargetMaxAHS = 256
		l.out.hello = o.ISER.Hello
	}
	if err := l.security(); err != nil {
		return err
	}
	if err := l.operational(); err != nil {
		return err
	}
	l.out.CmdSN = l.cmdSN
	l.out.ExpStatSN = l.statSN
	return nil
}

// security runs the SecurityNegotiation stage and leaves it.
func (l *login) security() error {
	keys := pdu.Pairs{{Key: "InitiatorName", Value: l.o.InitiatorName}}
	if l.o.InitiatorAlias != "" {
		keys.Add("InitiatorAlias", l.o.InitiatorAlias)
	}
	if l.discovery {
		keys.Add("SessionType", "Discovery")
	} else {
		keys.Add("SessionType", "Normal")
		keys.Add("TargetName", l.o.TargetName)
	}
	method := "None"
	if l.o.CHAP != nil {
		method = "CHAP"
	}
	keys.Add("AuthMethod", method)
	rsp, got, err := l.exchange(keys, pdu.StageSecurity, pdu.StageOperational, l.o.CHAP == nil)
	if err != nil {
		return err
	}
	if chosen, ok := got.Get("AuthMethod"); ok && chosen != method {
		return fmt.Errorf("%w: the target chose AuthMethod=%s, %s was offered", ErrAuth, chosen, method)
	} else if !ok && l.o.CHAP != nil {
		return fmt.Errorf("%w: the target chose no AuthMethod", ErrAuth)
	}
	l.declarations(got)
	if l.o.CHAP != nil {
		x := chapExchange{creds: l.o.CHAP}
		_, got, err = l.exchange(pdu.Pairs{{Key: "CHAP_A", Value: l.o.CHAP.offer()}}, pdu.StageSecurity, pdu.StageOperational, false)
		if err != nil {
			return err
		}
		answer, err := x.answer(got)
		if err != nil {
			return err
		}
		rsp, got, err = l.exchange(answer, pdu.StageSecurity, pdu.StageOperational, true)
		if err != nil {
			return err
		}
		if err := x.verify(got); err != nil {
			return err
		}
		l.declarations(got)
	}
	for !rsp.Transit {
		if rsp, got, err = l.exchange(nil, pdu.StageSecurity, pdu.StageOperational, true); err != nil {
			return err
		}
		l.declarations(got)
	}
	return nil
}

// operational runs the LoginOperationalNegotiation stage and enters the full feature phase.
func (l *login) operational() error {
	o := l.o
	num := func(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
	var keys pdu.Pairs
	switch {
	case l.iser:
		keys = o.ISER.keys()
	case o.ISER != nil: // discovery in messages, or before them
		keys = pdu.Pairs{
			{Key: "HeaderDigest", Value: "None"},
			{Key: "DataDigest", Value: "None"},
			{Key: "MaxRecvDataSegmentLength", Value: num(pdu.MinTextLength)},
		}
	default:
		keys = pdu.Pairs{
			{Key: "HeaderDigest", Value: o.HeaderDigest.offer()},
			{Key: "DataDigest", Value: o.DataDigest.offer()},
			{Key: "MaxRecvDataSegmentLength", Value: num(o.MaxRecvDataSegmentLength)},
		}
	}
	keys = append(keys, pdu.Pairs{
		{Key: "DefaultTime2Wait", Value: "2"},
		{Key: "DefaultTime2Retain", Value: "0"},
		{Key: "ErrorRecoveryLevel", Value: "0"},
	}...)
	if !l.discovery {
		keys = append(keys, pdu.Pairs{
			{Key: "InitialR2T", Value: pdu.FormatBool(o.InitialR2T)},
			{Key: "ImmediateData", Value: pdu.FormatBool(!o.NoImmediateData)},
			{Key: "MaxBurstLength", Value: num(o.MaxBurstLength)},
			{Key: "FirstBurstLength", Value: num(o.FirstBurstLength)},
			{Key: "MaxOutstandingR2T", Value: num(uint32(o.MaxOutstandingR2T))},
			{Key: "MaxConnections", Value: "1"},
			{Key: "DataPDUInOrder", Value: "Yes"},
			{Key: "DataSequenceInOrder", Value: "Yes"},
		}...)
		if o.ProtocolLevel > 1 {
			keys.Add("iSCSIProtocolLevel", num(uint32(o.ProtocolLevel)))
		}
	}
	l.offered = make(map[string]string, len(keys))
	for _, p := range keys {
		l.offered[p.Key] = p.Value
	}
	for {
		rsp, got, err := l.exchange(keys, pdu.StageOperational, pdu.StageFullFeature, true)
		if err != nil {
			return err
		}
		if keys, err = l.settle(got); err != nil {
			return err
		}
		if rsp.Transit {
			if len(keys) > 0 {
				return protocolError("the target left the stage with an offer")
			}
			if l.iser && !l.out.ISER {
				return ErrNoISER
			}
			return nil
		}
	}
}

// settle takes the target's keys of the operational stage and returns our answers to its own offers.
func (l *login) settle(got pdu.Pairs) (answers pdu.Pairs, err error) {
	for _, p := range got {
		offer, ours := l.offered[p.Key]
		switch p.Key {
		case "TargetAlias", "TargetAddress", "TargetPortalGroupTag":
			l.declarations(pdu.Pairs{p})
			continue
		case "MaxOutstandingUnexpectedPDUs", "MaxAHSLength":
			if err := l.limit(p); err != nil {
				return nil, err
			}
			continue
		case "MaxRecvDataSegmentLength":
			if l.iser { // it means nothing then (RFC 7145, 6.2)
				continue
			}
			n, err := pdu.ParseNumber(p.Value, 512, pdu.MaxDataLength)
			if err != nil {
				return nil, protocolError("%s=%q", p.Key, p.Value)
			}
			l.out.MaxSend = uint32(n)
			continue
		case "IFMarker", "OFMarker", "IFMarkInt", "OFMarkInt":
			answers.Add(p.Key, pdu.ValueReject)
			continue
		}
		if ours {
			// The entry stays, so that a second answer to the same key shows.
			if offer == "" {
				return nil, protocolError("%s answered twice", p.Key)
			}
			l.offered[p.Key] = ""
			if p.Key == "iSERHelloRequired" { // a declaration, which some answer all the same
				l.out.hello = p.Value == "Yes"
				continue
			}
			if p.Value == pdu.ValueNotUnderstood || p.Value == pdu.ValueIrrelevant {
				continue // the default holds
			}
			if p.Value == pdu.ValueReject {
				return nil, protocolError("%s=%s was rejected", p.Key, offer)
			}
			if err := l.result(p, offer); err != nil {
				return nil, err
			}
			continue
		}
		answer, err := l.respond(p)
		if err != nil {
			return nil, err
		}
		answers.Add(p.Key, answer)
	}
	return answers, nil
}

// limit takes a limit that the target declares (RFC 7145, 6.6 and 6.7). An answer to our own declaration says nothing.
func (l *login) limit(p pdu.Pair) error {
	if !l.iser || p.Value == pdu.ValueNotUnderstood || p.Value == pdu.ValueIrrelevant || p.Value == pdu.ValueReject {
		return nil
	}
	n, err := pdu.ParseNumber(p.Value, 0, 1<<32-1)
	if err != nil || n == 1 {
		return protocolError("%s=%q", p.Key, p.Value)
	}
	if p.Key == "MaxAHSLength" {
		l.out.TargetMaxAHS = uint32(n)
	} else {
		l.out.TargetUnexpected = uint32(n)
	}
	return nil
}

// result takes the target's answer to our offer: the result of the negotiation.
func (l *login) result(p pdu.Pair, offer string) error {
	bad := func() error { return protocolError("%s=%q answered with %q", p.Key, offer, p.Value) }
	number := func(into func(uint64), min, max uint64) error {
		n, err := pdu.ParseNumber(p.Value, min, max)
		if err != nil {
			return bad()
		}
		into(n)
		return nil
	}
	offered, _ := pdu.ParseNumber(offer, 0, 1<<32)
	out := &l.out
	switch p.Key {
	case "HeaderDigest", "DataDigest":
		found := false
		for _, item := range pdu.SplitList(offer) {
			found = found || item == p.Value
		}
		if !found {
			return bad()
		}
		if p.Key == "HeaderDigest" {
			out.HeaderDigest = p.Value == "CRC32C"
		} else {
			out.DataDigest = p.Value == "CRC32C"
		}
	case "RDMAExtensions":
		b, err := pdu.ParseBool(p.Value)
		if err != nil {
			return bad()
		}
		out.ISER = b
	case "InitiatorRecvDataSegmentLength":
		return number(func(n uint64) { out.MaxRecv = uint32(n) }, 512, offered)
	case "TargetRecvDataSegmentLength":
		return number(func(n uint64) { out.MaxSend = uint32(n) }, 512, offered)
	case "InitialR2T", "ImmediateData", "DataPDUInOrder", "DataSequenceInOrder":
		b, err := pdu.ParseBool(p.Value)
		if err != nil {
			return bad()
		}
		we := offer == "Yes"
		switch p.Key {
		case "InitialR2T":
			out.InitialR2T = b || we
		case "ImmediateData":
			out.ImmediateData = b && we
		}
	case "MaxBurstLength":
		return number(func(n uint64) { out.MaxBurst = uint32(n) }, 512, offered)
	case "FirstBurstLength":
		return number(func(n uint64) { out.FirstBurst = uint32(n) }, 512, offered)
	case "MaxOutstandingR2T":
		return number(func(n uint64) { out.MaxOutstandingR2T = uint16(n) }, 1, offered)
	case "MaxConnections":
		return number(func(n uint64) { out.MaxConnections = uint16(n) }, 1, offered)
	case "DefaultTime2Wait":
		return number(func(n uint64) { out.Time2Wait = uint16(n) }, offered, 3600)
	case "DefaultTime2Retain":
		return number(func(n uint64) { out.Time2Retain = uint16(n) }, 0, offered)
	case "ErrorRecoveryLevel":
		return number(func(n uint64) { out.ErrorRecoveryLevel = uint8(n) }, 0, offered)
	case "iSCSIProtocolLevel":
		return number(func(n uint64) { out.ProtocolLevel = uint8(n) }, 0, offered)
	}
	return nil
}

// respond answers a key that the target offers by itself.
func (l *login) respond(p pdu.Pair) (string, error) {
	switch p.Key {
	case "TaskReporting":
		for _, item := range pdu.SplitList(p.Value) {
			if item == "RFC3720" {
				return item, nil
			}
		}
		return pdu.ValueReject, nil
	case "RDMAExtensions":
		return "No", nil
	}
	if l.discovery {
		return pdu.ValueIrrelevant, nil
	}
	switch p.Key {
	case "MaxConnections", "MaxOutstandingR2T", "iSCSIProtocolLevel":
		return "1", nil
	}
	return pdu.ValueNotUnderstood, nil
}

// declarations takes what a target declares in any stage.
func (l *login) declarations(got pdu.Pairs) {
	if v, ok := got.Get("TargetAlias"); ok {
		l.out.TargetAlias = v
	}
	if v, ok := got.Get("TargetPortalGroupTag"); ok {
		if n, err := pdu.ParseNumber(v, 0, 65535); err == nil {
			l.out.PortalGroup = int(n)
		}
	}
}

// exchange sends keys and collects the answer, both over as many PDUs as they need.
func (l *login) exchange(keys pdu.Pairs, csg, nsg pdu.Stage, transit bool) (pdu.LoginResponse, pdu.Pairs, error) {
	var rsp pdu.LoginResponse
	text := keys.Append(nil)
	var got pdu.Text
	got.Limit = maxLoginText
	for {
		if l.rounds++; l.rounds > maxLoginRounds {
			return rsp, nil, protocolError("the login does not end after %d requests", maxLoginRounds)
		}
		req := pdu.LoginRequest{
			Transit: transit, CSG: csg, NSG: nsg, ISID: l.o.ISID, ITT: l.itt, CmdSN: l.cmdSN, ExpStatSN: l.statSN,
		}
		part := text
		if len(part) > pdu.MinTextLength {
			part = part[:pdu.MinTextLength]
			req.Transit, req.Continue = false, true
		}
		if !req.Transit {
			req.NSG = 0
		}
		text = text[len(part):]
		if err := l.c.SendMessage(&req, part); err != nil {
			return rsp, nil, err
		}
		p, err := l.c.Receive()
		if err != nil {
			return rsp, nil, err
		}
		if err := rsp.Decode(&p.Header); err != nil {
			return rsp, nil, protocolError("%v during login", p.Header.Opcode())
		}
		if rsp.Status != pdu.LoginSuccess {
			e := &LoginError{Status: rsp.Status}
			if pairs, err := pdu.ParseText(p.Data); err == nil {
				e.TargetAddress, _ = pairs.Get("TargetAddress")
			}
			return rsp, nil, e
		}
		switch {
		case rsp.ITT != l.itt || rsp.ISID != l.o.ISID:
			return rsp, nil, protocolError("login response with another ITT or ISID")
		case l.started && rsp.StatSN != l.statSN:
			return rsp, nil, protocolError("login response with StatSN %d, expected %d", rsp.StatSN, l.statSN)
		case rsp.CSG != csg:
			return rsp, nil, protocolError("login response of stage %v, requested %v", rsp.CSG, csg)
		case rsp.Transit && (!req.Transit || rsp.NSG != nsg):
			return rsp, nil, protocolError("login response leaves the stage unasked")
		case req.Continue && (len(p.Data) > 0 || rsp.Continue):
			return rsp, nil, protocolError("login response with text to an unfinished request")
		}
		l.started = true
		l.statSN = rsp.StatSN.Next()
		l.out.ExpCmdSN, l.out.MaxCmdSN = rsp.ExpCmdSN, rsp.MaxCmdSN
		if err := got.Add(p.Data); err != nil {
			return rsp, nil, fmt.Errorf("%w: %w", ErrProtocol, err)
		}
		if req.Continue {
			continue
		}
		if rsp.Continue {
			transit = false // an empty request asks for the rest
			continue
		}
		if rsp.Transit && nsg == pdu.StageFullFeature {
			if rsp.TSIH == 0 {
				return rsp, nil, protocolError("the final login response has no TSIH")
			}
			l.out.TSIH = rsp.TSIH
		}
		pairs, err := got.Parse()
		if err != nil {
			return rsp, nil, fmt.Errorf("%w: %w", ErrProtocol, err)
		}
		return rsp, pairs, nil
	}
}
