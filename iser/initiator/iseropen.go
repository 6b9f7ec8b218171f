package initiator

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// WriteBase is what the write base offset of a command stands for when a part of the data goes unsolicited. RFC 7145, 6.9 has a key for it, which deployed
// targets do not know.
type WriteBase uint8

// Meanings of the write base offset.
const (
	// WriteBaseDefault sends no key: the first byte after the unsolicited data, as Linux has it.
	WriteBaseDefault WriteBase = iota
	// WriteBaseSolicited is the same with TaggedBufferForSolicitedDataOnly=Yes.
	WriteBaseSolicited
	// WriteBaseAll is the start of all data, with TaggedBufferForSolicitedDataOnly=No.
	WriteBaseAll
)

// ISER configures iSER (RFC 7145). The zero value of each field has the default that its comment names.
type ISER struct {
	// Provider makes the RDMA connection. Default: iwarp with CRC. With one that has iwarp's Initiate, Options.DialContext
	// opens the TCP connection.
	Provider rdma.Provider
	// Stream logs in on the TCP connection, which becomes an RDMA connection after the final Login Response (RFC 7145, 5.1). Default: the
	// login goes in messages of the RDMA connection, as Linux does it. Needs a Provider with Initiate.
	Stream bool
	// Hello declares iSERHelloRequired=Yes.
	Hello bool
	// NoInvalidate tells the target not to send Send with Invalidate.
	NoInvalidate bool
	WriteBase    WriteBase
	// LaxStatSN takes responses whatever their StatSN: LIO numbers responses that it sends at the same time twice, or out of order.
	LaxStatSN bool

	RecvSegment uint32 // InitiatorRecvDataSegmentLength, bytes; default 8192
	SendSegment uint32 // TargetRecvDataSegmentLength, bytes: longest immediate data and Data-Out; default 8192
	Unexpected  uint32 // MaxOutstandingUnexpectedPDUs, 2 to 4096; default 16
	// StartDelay passes between the answer to the connection request and the first message. Linux's soft-iWARP may lose what comes at once.
	StartDelay time.Duration
	IRD        int // RDMA Reads of the target that are served at once; default the lower of QueueDepth and 128
}

// keys are those of the operational stage that iSER has in the place of others (RFC 7145, 6). RDMAExtensions comes first.
func (i *ISER) keys() pdu.Pairs {
	num := func(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
	keys := pdu.Pairs{
		{Key: "RDMAExtensions", Value: "Yes"},
		{Key: "InitiatorRecvDataSegmentLength", Value: num(i.RecvSegment)},
		{Key: "TargetRecvDataSegmentLength", Value: num(i.SendSegment)},
		{Key: "MaxOutstandingUnexpectedPDUs", Value: num(i.Unexpected)},
	}
	if i.Hello {
		keys.Add("iSERHelloRequired", "Yes")
	}
	if i.WriteBase != WriteBaseDefault {
		keys.Add("TaggedBufferForSolicitedDataOnly", pdu.FormatBool(i.WriteBase == WriteBaseSolicited))
	}
	return keys
}

// initiating is a provider that makes an RDMA connection of a TCP connection.
type initiating interface {
	Initiate(nc net.Conn, surplus []byte) rdma.Dialer
}

// withDefaults returns a copy without zero values.
func (i *ISER) withDefaults(depth int) (*ISER, error) {
	c := *i
	if c.Provider == nil {
		p, err := iwarp.New(iwarp.Options{})
		if err != nil {
			return nil, err
		}
		c.Provider = p
	}
	for _, v := range []*uint32{&c.RecvSegment, &c.SendSegment} {
		if *v == 0 {
			*v = pdu.MinTextLength
		}
	}
	if c.Unexpected == 0 {
		c.Unexpected = 16
	}
	if c.IRD == 0 {
		c.IRD = min(depth, 128)
	}
	return &c, nil
}

func (i *ISER) validate(bad func(format string, args ...any)) {
	for name, v := range map[string]uint32{"RecvSegment": i.RecvSegment, "SendSegment": i.SendSegment} {
		if v != 0 && (v < 512 || v > pdu.MaxDataLength) {
			bad("%s %d is not between 512 and 16777215", name, v)
		}
	}
	if i.Unexpected == 1 || i.Unexpected > 4096 {
		bad("MaxOutstandingUnexpectedPDUs %d is not between 2 and 4096", i.Unexpected)
	}
	if i.IRD < 0 || i.IRD > 1024 {
		bad("IRD %d is not between 1 and 1024", i.IRD)
	}
	if i.WriteBase > WriteBaseAll {
		bad("unknown WriteBase %d", i.WriteBase)
	}
	if i.StartDelay < 0 {
		bad("StartDelay is negative")
	}
	if i.Provider != nil && i.Stream {
		if _, ok := i.Provider.(initiating); !ok {
			bad("a login on the stream needs a provider with Initiate")
		}
	}
}

// dialISER connects and logs in over iSER: to a discovery session if o has no target name.
func dialISER(ctx context.Context, o *Options) (*iserMover, *Login, error) {
	ctx, cancel := context.WithTimeout(ctx, o.LoginTimeout)
	defer cancel()
	i, err := o.ISER.withDefaults(o.QueueDepth)
	if err != nil {
		return nil, nil, err
	}
	full := *o
	full.ISER = i
	m, err := newISERMover(&full)
	if err != nil {
		return nil, nil, err
	}
	l, err := m.open(ctx, &full)
	if err != nil {
		m.abandon()
		if ctx.Err() != nil {
			err = fmt.Errorf("initiator: login: %w", ctx.Err())
		} else if errors.Is(err, rdma.ErrPeerClosed) {
			err = fmt.Errorf("%w: the target closed it during login: %w", ErrConnection, err)
		}
		return nil, nil, err
	}
	return m, l, nil
}

// newISERMover allocates what a connection needs, before it is made (ISER-12).
func newISERMover(o *Options) (*iserMover, error) {
	pd, err := o.ISER.Provider.AllocPD()
	if err != nil {
		return nil, fmt.Errorf("initiator: %w", err)
	}
	m := &iserMover{
		pd: pd, mem: newMemory(pd), remoteInv: !o.ISER.NoInvalidate, wholeBase: o.ISER.WriteBase == WriteBaseAll,
		kick: make(chan struct{}, 1), stop: make(chan struct{}),
		slots: make([]slot, sendSlots), wrs: make([]rdma.SendWR, 0, sendSlots), heads: make([][maxHead]byte, sendSlots), reposted: make([]rdma.RecvWR, 0, pollBatch),
	}
	m.idle.L = &m.mu
	m.recv.init(m.watch)
	if err := m.allocate(o); err != nil {
		m.abandon()
		return nil, err
	}
	return m, nil
}

func (m *iserMover) allocate(o *Options) error {
	// One receive for each reply that can come, those that nobody asked for, and those that are being looked at. Each is large enough
	// for a Login Response, too.
	count := o.QueueDepth + controlSlots + int(o.ISER.Unexpected) + pollBatch
	size := iserHeaderLen + pdu.HeaderLen + max(pdu.MinTextLength, int(o.ISER.RecvSegment)+3)
	bufs, mr, err := m.carve(count, size)
	if err != nil {
		return err
	}
	m.maxRecv = pdu.MinTextLength
	m.recvs = make([]rdma.RecvWR, count)
	for i := range m.recvs {
		m.recvs[i] = rdma.RecvWR{ID: uint64(i), SGE: []rdma.SGE{{Buf: bufs[i], LKey: mr.LKey()}}}
	}
	if bufs, m.slotMR, err = m.carve(sendSlots, slotLen); err != nil {
		return err
	}
	for i := range m.slots {
		m.slots[i].buf = bufs[i]
	}
	m.windows = make([]rdma.Window, 0, o.QueueDepth)
	for range o.QueueDepth {
		w, err := m.pd.AllocWindow()
		if err != nil {
			return fmt.Errorf("initiator: %w", err)
		}
		m.windows = append(m.windows, w)
	}
	for cq, depth := range map[*rdma.CQ]int{&m.recvCQ: count, &m.sendCQ: sendSlots} {
		if *cq, err = o.ISER.Provider.CreateCQ(depth); err != nil {
			return fmt.Errorf("initiator: %w", err)
		}
	}
	return nil
}

// carve takes count buffers of one size from one piece of registered memory.
func (m *iserMover) carve(count, size int) ([][]byte, rdma.MR, error) {
	stride := (size + 63) &^ 63
	p, err := m.mem.get(count * stride)
	if err != nil {
		return nil, nil, err
	}
	m.fixed = append(m.fixed, p)
	bufs := make([][]byte, count)
	for i := range bufs {
		bufs[i] = p.buf[i*stride : i*stride+size : i*stride+size]
	}
	return bufs, p.r.mr, nil
}

// open makes the connection and logs in.
func (m *iserMover) open(ctx context.Context, o *Options) (*Login, error) {
	var l *Login
	var d rdma.Dialer
	discovery := o.TargetName == ""
	provider, ok := o.ISER.Provider.(initiating)
	switch {
	case o.ISER.Stream:
		c, err := DialConn(ctx, *o)
		if err != nil {
			return nil, err
		}
		if l, err = c.Login(ctx, *o); err != nil {
			c.Close()
			return nil, err
		}
		// What was read behind the final Login Response belongs to the RDMA connection.
		surplus, _ := c.br.Peek(c.br.Buffered())
		d = provider.Initiate(c.net, surplus)
	case ok:
		nc, err := o.DialContext(ctx, "tcp", o.address())
		if err != nil {
			return nil, fmt.Errorf("initiator: %w", err)
		}
		d = provider.Initiate(nc, nil)
	default:
		var err error
		if d, err = o.ISER.Provider.Resolve(ctx, o.address()); err != nil {
			return nil, fmt.Errorf("initiator: %w", err)
		}
	}
	if err := m.connect(ctx, d, o.ISER); err != nil {
		return nil, err
	}
	if !o.ISER.Stream {
		var err error
		if l, err = m.login(ctx, o); err != nil {
			return nil, err
		}
	}
	m.maxRecv = int(l.MaxRecv)
	if l.hello {
		if err := m.hello(ctx); err != nil {
			return nil, err
		}
	}
	if discovery {
		l.MaxSend = min(l.MaxSend, pdu.MinTextLength)
	}
	return l, nil
}

// connect makes the RDMA connection, with all receives posted before.
func (m *iserMover) connect(ctx context.Context, d rdma.Dialer, i *ISER) error {
	defer d.Close()
	attr := rdma.QPAttr{SendCQ: m.sendCQ, RecvCQ: m.recvCQ, MaxSend: sendSlots, MaxRecv: len(m.recvs), MaxSendSGE: sendSGEs, RecvAnyOrder: true, MaxInline: slotLen}
	qp, err := d.CreateQP(m.pd, attr)
	if errors.Is(err, rdma.ErrInvalid) {
		attr.MaxInline = 0 // adapters take less
		qp, err = d.CreateQP(m.pd, attr)
	}
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	m.inline = attr.MaxInline
	m.qp = qp
	if _, err := qp.PostRecv(m.recvs); err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	p := rdma.ConnParams{IRD: i.IRD, ORD: 1}
	if !i.Stream { // RFC 7145 has no private data
		p.PrivateData = []byte{cmNotZeroBased, 0, 0, 0}
		if i.NoInvalidate {
			p.PrivateData[0] |= cmNoInvalidate
		}
	}
	peer, err := d.Connect(ctx, p)
	if err != nil {
		return fmt.Errorf("initiator: %w", err)
	}
	if len(peer.PrivateData) > 0 && peer.PrivateData[0]&cmNoInvalidate != 0 {
		m.remoteInv = false
	}
	if i.StartDelay > 0 {
		return sleep(ctx, i.StartDelay)
	}
	return nil
}

// loginChannel is the way of a login over messages.
type loginChannel struct {
	m   *iserMover
	ctx context.Context // of the login
}

// SendMessage implements loginConn.
func (c loginChannel) SendMessage(msg Message, data []byte) error {
	var h pdu.Header
	msg.Encode(&h)
	c.m.control(&h, data)
	c.m.flush(true)
	return nil
}

// Receive implements loginConn.
func (c loginChannel) Receive() (*PDU, error) {
	wc, err := c.m.nextMessage(c.ctx)
	if err != nil {
		return nil, err
	}
	if wc.Invalidated {
		return nil, protocolError("a login response invalidates an STag")
	}
	h, data, err := parseMessage(c.m.recvs[wc.ID].SGE[0].Buf[:wc.Bytes], c.m.maxRecv)
	if err != nil {
		return nil, err
	}
	p := &PDU{Header: *h, Data: append([]byte(nil), data...)}
	// The target may have closed the connection behind what it said: that is found at the next call.
	_ = c.m.repost(wc.ID)
	return p, nil
}

func (m *iserMover) login(ctx context.Context, o *Options) (*Login, error) {
	l := newLogin(loginChannel{m, ctx}, o)
	if err := l.run(); err != nil {
		return nil, err
	}
	return &l.out, nil
}

// attach gives the mover to a session.
func (m *iserMover) attach(s *Session) {
	m.p = &s.login.Parameters
	m.expStatSN = s.ack
	m.table = s.tasks
	for i := range m.windows {
		s.tasks[i].move.win = m.windows[i]
	}
}
