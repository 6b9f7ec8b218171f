package iser_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math/bits"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

const (
	initiatorName = "iqn.2001-04.com.example:host"
	targetName    = "iqn.2024-01.net.isergate:disk"
	patience      = 30 * time.Second // after which a test has hung
	recvBytes     = 28 + 48 + 8192
)

// rig is a target with one logical unit in memory of 512-byte blocks, reached over software iWARP on loopback.
type rig struct {
	t      testing.TB
	srv    *iscsi.Server
	target *iser.Target
	addr   string
	medium *scsitest.Medium
	unit   scsi.Medium // what the unit stands on
	units  *scsi.Inventory
	memory *arena.Arena // of the target
	lent   *arena.Arena // of the unit: landings and loans, registered
	chap   *iscsi.CHAP
	iwarp  iwarp.Options
}

func (r *rig) Authorize(_ context.Context, _, target string) (iscsi.Access, error) {
	switch target {
	case "":
		return iscsi.Access{}, nil
	case targetName:
		return iscsi.Access{Units: r.units, CHAP: r.chap}, nil
	}
	return iscsi.Access{}, iscsi.ErrNotFound
}

func (r *rig) Targets(context.Context, string) []string { return []string{targetName} }

// newRig starts a target. change adapts the options of its parts.
func newRig(t testing.TB, change ...func(*rig, *iscsi.Options, *iser.Options)) *rig {
	t.Helper()
	r := &rig{t: t, medium: scsitest.NewMedium(8192, 512), units: scsi.NewInventory()}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	r.memory, err = arena.New(24 << 20)
	check(err)
	r.lent, err = arena.New(16 << 20)
	check(err)
	r.lent.SetMangle(true)
	r.unit = &lentMedium{Medium: r.medium, mem: r.lent}
	opt := iscsi.Options{Backend: r, Logger: slog.New(slog.DiscardHandler), LogoutWait: time.Millisecond}
	iopt := iser.Options{Memory: r.memory, Regions: [][]byte{r.lent.Region()}, Logger: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(r, &opt, &iopt)
	}
	provider, err := iwarp.New(r.iwarp)
	check(err)
	if iopt.Provider == nil {
		iopt.Provider = provider
	}
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: r.unit, Identity: scsi.Identity{UUID: [16]byte{1}}})
	check(err)
	check(r.units.Map(0, unit))
	r.srv, err = iscsi.NewServer(opt)
	check(err)
	r.target, err = iser.NewTarget(iopt)
	check(err)
	l, err := iopt.Provider.Listen(context.Background(), "127.0.0.1:0")
	check(err)
	r.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.srv.Serve(r.target.Listener(l), iscsi.Portal{}) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := r.srv.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) {
			t.Errorf("Serve: %v", err)
		}
		if n := r.medium.Open(); n != 0 {
			t.Errorf("%d landings or loans were not given back", n)
		}
		if err := r.target.Close(ctx); err != nil {
			t.Errorf("Target.Close: %v", err)
		}
		for _, m := range []*arena.Arena{r.memory, r.lent} {
			if u := m.Usage(); u.UsedBytes != 0 {
				t.Errorf("%d bytes of memory are lost", u.UsedBytes)
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return r
}

// lentMedium is a medium whose landings and loans lie in an arena, as the journal's do.
type lentMedium struct {
	*scsitest.Medium
	mem *arena.Arena
}

type lentLanding struct {
	scsi.Landing
	mem  *arena.Arena
	bufs [][]byte
}

func (m *lentMedium) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	l, err := m.Medium.Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	bufs, err := m.mem.Alloc(ctx, int64(e.Blocks)*int64(m.Geometry().BlockSize))
	if err != nil {
		l.Abort()
		return nil, err
	}
	return &lentLanding{l, m.mem, bufs}, nil
}

func (l *lentLanding) Buffers() [][]byte { return l.bufs }

func (l *lentLanding) Commit(ctx context.Context, fua bool) error {
	copyAll(l.Landing.Buffers(), l.bufs)
	l.mem.Free(l.bufs)
	return l.Landing.Commit(ctx, fua)
}

func (l *lentLanding) Abort() {
	l.mem.Free(l.bufs)
	l.Landing.Abort()
}

type lentLoan struct {
	mem  *arena.Arena
	bufs [][]byte
}

func (m *lentMedium) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	b, err := m.Medium.Read(ctx, e)
	if err != nil {
		return nil, err
	}
	defer b.Release()
	bufs, err := m.mem.Alloc(ctx, int64(e.Blocks)*int64(m.Geometry().BlockSize))
	if err != nil {
		return nil, err
	}
	copyAll(bufs, b.Buffers())
	return &lentLoan{m.mem, bufs}, nil
}

func (l *lentLoan) Buffers() [][]byte { return l.bufs }
func (l *lentLoan) Release()          { l.mem.Free(l.bufs) }

// copyAll copies all bytes of one vector to another of the same length.
func copyAll(to, from [][]byte) {
	var flat []byte
	for _, b := range from {
		flat = append(flat, b...)
	}
	for _, b := range to {
		flat = flat[copy(b, flat):]
	}
}

// await polls until ok, for states that nothing announces.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("timed out: %s", what)
		}
	}
}

// head is an iSER header as the initiator sees it.
type head struct {
	first               byte
	writeTag, readTag   uint32
	writeBase, readBase uint64
}

func (h head) bytes() []byte {
	b := make([]byte, 28)
	b[0] = h.first
	binary.BigEndian.PutUint32(b[4:], h.writeTag)
	binary.BigEndian.PutUint64(b[8:], h.writeBase)
	binary.BigEndian.PutUint32(b[16:], h.readTag)
	binary.BigEndian.PutUint64(b[20:], h.readBase)
	return b
}

// options of a client's connection.
type dialing struct {
	private   []byte
	noPrivate bool
	ird       int
	iwarp     iwarp.Options
	recvs     int
	recvSize  int
}

// client is an initiator of raw iSER messages: it sends what it is told, right or wrong.
type client struct {
	t      testing.TB
	mem    *arena.Arena
	pd     rdma.PD
	arena  *rdma.Arena
	qp     rdma.QP
	sendCQ rdma.CQ
	recvCQ rdma.CQ
	bufs   [][]byte // receives
	sendMu sync.Mutex
	out    [][]byte // for Sends
	free   []int    // of out
	reply  rdma.ConnParams

	isid  pdu.ISID
	tsih  uint16
	cid   uint16
	cmdSN pdu.Serial
	stat  pdu.Serial
	max   pdu.Serial
	itt   uint32
	keys  pdu.Pairs
	wcs   []rdma.WC
}

// dial connects; it fails the test if it cannot.
func (r *rig) dial(d dialing) *client {
	r.t.Helper()
	c, err := r.tryDial(d)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) tryDial(d dialing) (*client, error) {
	r.t.Helper()
	c := &client{t: r.t, isid: pdu.ISID{0x40, 0, 0, 1}, cmdSN: 0xfffffff0, itt: 1}
	p, err := iwarp.New(d.iwarp)
	if err != nil {
		return nil, err
	}
	dialer, err := p.Resolve(context.Background(), r.addr)
	if err != nil {
		return nil, err
	}
	return c, c.connect(p, dialer, d)
}

// connect takes a connection that is being made.
func (c *client) connect(p *iwarp.Provider, dialer rdma.Dialer, d dialing) error {
	t := c.t
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if d.private == nil && !d.noPrivate {
		d.private = []byte{0x80, 0, 0, 0}
	}
	if d.ird == 0 {
		d.ird = 16
	} else if d.ird < 0 {
		d.ird = 0
	}
	if d.recvs == 0 {
		d.recvs = 64
	}
	if d.recvSize == 0 {
		d.recvSize = recvBytes
	}
	var err error
	c.pd, err = p.AllocPD()
	check(err)
	c.sendCQ, err = p.CreateCQ(4096)
	check(err)
	c.recvCQ, err = p.CreateCQ(4096)
	check(err)
	c.mem, err = arena.New(8 << 20)
	check(err)
	c.arena, err = rdma.NewArena(c.pd, c.mem)
	check(err)
	c.qp, err = dialer.CreateQP(c.pd, rdma.QPAttr{SendCQ: c.sendCQ, RecvCQ: c.recvCQ, MaxSend: 1024, MaxRecv: 1024, MaxSendSGE: 1, MaxRecvSGE: 1})
	check(err)
	var pieces [][][]byte
	alloc := func(n int) []byte {
		b, err := c.mem.Alloc(context.Background(), int64(n))
		check(err)
		pieces = append(pieces, b)
		return b[0][:n]
	}
	for i := range d.recvs {
		c.bufs = append(c.bufs, alloc(16384)[:d.recvSize])
		_, err := c.qp.PostRecv([]rdma.RecvWR{{ID: uint64(i), SGE: []rdma.SGE{c.arena.SGE(c.bufs[i])}}})
		check(err)
	}
	for i := range 16 {
		c.out = append(c.out, alloc(16384))
		c.free = append(c.free, i)
	}
	t.Cleanup(func() {
		c.qp.Close()
		if err := c.arena.Close(); err != nil {
			t.Error(err)
		}
		for _, b := range pieces {
			c.mem.Free(b)
		}
		if err := c.mem.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c.reply, err = dialer.Connect(ctx, rdma.ConnParams{PrivateData: d.private, IRD: d.ird, ORD: 1})
	return err
}

// raw sends bytes as one Send. It does not wait for the completion, by which it might receive.
func (c *client) raw(b []byte) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	deadline := time.Now().Add(patience)
	var wcs [16]rdma.WC
	for len(c.free) == 0 {
		n, _ := c.sendCQ.Poll(wcs[:])
		for _, wc := range wcs[:n] {
			if wc.Status != rdma.StatusSuccess {
				return errDone
			}
			if wc.Op == rdma.OpSend {
				c.free = append(c.free, int(wc.ID))
			}
		}
		if n == 0 {
			if err := c.qp.Err(); err != nil {
				return err
			}
			if time.Now().After(deadline) {
				return context.DeadlineExceeded
			}
			runtime.Gosched()
		}
	}
	i := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	n := copy(c.out[i], b)
	_, err := c.qp.PostSend([]rdma.SendWR{{ID: uint64(i), Op: rdma.OpSend, Flags: rdma.Signaled, SGE: []rdma.SGE{c.arena.SGE(c.out[i][:n])}}})
	return err
}

// write sends a control-type PDU.
func (c *client) write(w head, h *pdu.Header, data []byte) {
	c.t.Helper()
	if err := c.raw(message(w, h, nil, data)); err != nil {
		c.t.Fatal(err)
	}
}

func message(w head, h *pdu.Header, ahs, data []byte) []byte {
	if w.first == 0 {
		w.first = 0x10
	}
	h.SetDataLength(len(data))
	h.SetAHSLength(len(ahs))
	b := append(w.bytes(), h[:]...)
	b = append(append(b, ahs...), data...)
	return append(b, make([]byte, pdu.Padding(len(data)))...)
}

// incoming is a message from the target.
type incoming struct {
	head        []byte
	h           pdu.Header
	data        []byte
	invalidated bool
	key         uint32
}

var errDone = errors.New("the connection has ended")

// message waits for the next message.
func (c *client) message() (b []byte, wc rdma.WC, err error) {
	if len(c.wcs) == 0 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var wcs [16]rdma.WC
		n, err := c.recvCQ.Wait(ctx, wcs[:], false)
		if err != nil {
			return nil, wc, err
		}
		c.wcs = append(c.wcs, wcs[:n]...)
	}
	wc, c.wcs = c.wcs[0], c.wcs[1:]
	if wc.Status != rdma.StatusSuccess {
		return nil, wc, errDone
	}
	b = append([]byte(nil), c.bufs[wc.ID][:wc.Bytes]...)
	c.qp.PostRecv([]rdma.RecvWR{{ID: wc.ID, SGE: []rdma.SGE{c.arena.SGE(c.bufs[wc.ID])}}})
	return b, wc, nil
}

func (c *client) tryRead() (in incoming, err error) {
	c.t.Helper()
	b, wc, err := c.message()
	if err != nil {
		return in, err
	}
	in.invalidated, in.key = wc.Invalidated, wc.InvalidatedKey
	if len(b) < 76 {
		return in, io.ErrUnexpectedEOF
	}
	in.head = b[:28]
	copy(in.h[:], b[28:])
	n := in.h.DataLength()
	if want := 76 + in.h.AHSLength() + n + pdu.Padding(n); len(b) != want {
		c.t.Errorf("message of %d bytes, want %d", len(b), want)
	}
	in.data = b[76:][:n]
	if in.head[0] != 0x10 {
		c.t.Errorf("ISER-30: first byte of the iSER header is %#x", in.head[0])
	}
	for _, x := range in.head[1:] {
		if x != 0 {
			c.t.Errorf("ISER-30: iSER header %x", in.head)
			break
		}
	}
	return in, nil
}

// read takes the next PDU, and checks its numbers.
func (c *client) read() incoming {
	c.t.Helper()
	in, err := c.tryRead()
	if err != nil {
		c.t.Fatalf("read: %v (%v)", err, c.qp.Err())
	}
	h := &in.h
	if op := h.Opcode(); op != pdu.OpLoginResponse {
		status := !(op == pdu.OpNopIn && h.ITT() == pdu.ReservedTag)
		if h.StatSN() != c.stat {
			c.t.Errorf("%v: StatSN %d, want %d", op, h.StatSN(), c.stat)
		}
		if status {
			c.stat = c.stat.Next()
		}
		if h.MaxCmdSN().After(c.max) {
			c.max = h.MaxCmdSN()
		}
		if len(in.data) > 128 && len(c.bufs[0]) == recvBytes && c.tsih != 0 && op != pdu.OpTextResponse {
			c.t.Errorf("ISER-R2: %d bytes of data in a %v", len(in.data), op)
		}
	}
	return in
}

// closed expects that the target ends the connection, whatever it still sends.
func (c *client) closed() {
	c.t.Helper()
	for {
		if _, _, err := c.message(); err != nil {
			if !errors.Is(err, errDone) {
				c.t.Fatalf("the connection was not closed: %v", err)
			}
			return
		}
	}
}

func (c *client) tag() pdu.TaskTag { c.itt++; return pdu.TaskTag(c.itt) }

func (c *client) sn() pdu.Serial { sn := c.cmdSN; c.cmdSN = sn.Next(); return sn }

// normalKeys is what open-iscsi sends over iSER, in its order.
var normalKeys = []string{
	"InitiatorAlias=host", "SessionType=Normal", "DefaultTime2Wait=2", "DefaultTime2Retain=0", "IFMarker=No", "OFMarker=No", "ErrorRecoveryLevel=0", "InitialR2T=No",
	"ImmediateData=Yes", "MaxBurstLength=16776192", "FirstBurstLength=262144", "MaxOutstandingR2T=1", "MaxConnections=1", "DataPDUInOrder=Yes", "DataSequenceInOrder=Yes",
	"InitiatorRecvDataSegmentLength=262144", "TargetRecvDataSegmentLength=8192", "RDMAExtensions=Yes",
}

func (c *client) loginPDU(h *pdu.Header, keys []string) []byte {
	text := "InitiatorName=" + initiatorName + "\x00"
	named := false
	for _, k := range keys {
		text += k + "\x00"
		named = named || strings.HasPrefix(k, "TargetName=") || k == "SessionType=Discovery"
	}
	if !named {
		text += "TargetName=" + targetName + "\x00"
	}
	req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: c.isid, TSIH: c.tsih, CID: c.cid, ITT: 0x10, CmdSN: c.cmdSN}
	req.Encode(h)
	return []byte(text)
}

func (c *client) tryLogin(keys ...string) pdu.LoginResponse {
	c.t.Helper()
	var h pdu.Header
	text := c.loginPDU(&h, keys)
	c.write(head{}, &h, text)
	in := c.read()
	var resp pdu.LoginResponse
	if err := resp.Decode(&in.h); err != nil {
		c.t.Fatalf("login: %v: %v", in.h.Opcode(), err)
	}
	if resp.Status == pdu.LoginSuccess {
		c.keys, _ = pdu.ParseText(in.data)
		c.tsih = resp.TSIH
		c.stat = resp.StatSN.Next()
		c.max = resp.MaxCmdSN
	}
	return resp
}

func (c *client) login(keys ...string) *client {
	c.t.Helper()
	if len(keys) == 0 {
		keys = normalKeys
	}
	if r := c.tryLogin(keys...); r.Status != pdu.LoginSuccess || !r.Transit {
		c.t.Fatalf("login: %v, T=%v", r.Status, r.Transit)
	}
	return c
}

// ready dials, logs in and takes the unit attention.
func (r *rig) ready(d dialing, keys ...string) *client {
	r.t.Helper()
	c := r.dial(d).login(keys...)
	c.run(make([]byte, 6), 0, nil)
	return c
}

// buffer is memory of the initiator that the target may reach.
type buffer struct {
	c      *client
	pieces [][]byte
	b      []byte
	w      rdma.Window
}

// expose makes n bytes reachable; content may be nil.
func (c *client) expose(n int, content []byte, access rdma.Access) *buffer {
	c.t.Helper()
	pieces, err := c.mem.Alloc(context.Background(), 1<<bits.Len(uint(max(n, 4096)-1))) // in one piece
	if err != nil {
		c.t.Fatal(err)
	}
	if len(pieces[0]) < n {
		c.t.Fatalf("initiator memory is fragmented: %d of %d", len(pieces[0]), n)
	}
	x := &buffer{c: c, pieces: pieces, b: pieces[0][:n]}
	clear(x.b)
	copy(x.b, content)
	if x.w, err = c.pd.AllocWindow(); err != nil {
		c.t.Fatal(err)
	}
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	if _, err := c.qp.PostSend([]rdma.SendWR{{Op: rdma.OpBind, Bind: rdma.Bind{Window: x.w, MR: c.arena.MR(), Buf: x.b, Access: access}}}); err != nil {
		c.t.Fatal(err)
	}
	return x
}

// free ends the exposure, and returns the content.
func (x *buffer) free() []byte {
	x.w.Close()
	b := append([]byte(nil), x.b...)
	x.c.mem.Free(x.pieces)
	return b
}

// sent is a command in progress.
type sent struct {
	itt pdu.TaskTag
	in  *buffer
	out *buffer
}

// command sends a SCSI Command. read is the length of a read; out is data-out, of which the first immediate
// bytes go along, and the rest is advertised as Linux does: from the first byte that is not sent.
func (c *client) command(cdb []byte, read int, out []byte, immediate int, change ...func(*pdu.SCSICommand, *head)) sent {
	c.t.Helper()
	p := pdu.SCSICommand{Final: true, Attr: pdu.AttrSimple, ITT: c.tag(), CmdSN: c.sn(), ExpStatSN: c.stat, Read: read > 0, Write: out != nil}
	p.EDTL = uint32(read)
	w := head{first: 0x10}
	s := sent{itt: p.ITT}
	if read > 0 {
		s.in = c.expose(read, nil, rdma.RemoteWrite)
		w.first |= 0x04
		w.readTag, w.readBase = s.in.w.RKey(), s.in.w.Addr()
	}
	if out != nil {
		p.EDTL = uint32(len(out))
		if len(out) > immediate {
			s.out = c.expose(len(out), out, rdma.RemoteRead)
			w.first |= 0x08
			w.writeTag, w.writeBase = s.out.w.RKey(), s.out.w.Addr()+uint64(immediate)
		}
	}
	copy(p.CDB[:], cdb)
	for _, f := range change {
		f(&p, &w)
	}
	var h pdu.Header
	p.Encode(&h)
	c.write(w, &h, out[:immediate])
	return s
}

// result is how a command ended.
type result struct {
	status      scsi.Status
	sense       []byte
	data        []byte
	over, under bool
	residual    uint32
	invalidated bool
}

func (r *result) key() [3]byte {
	if len(r.sense) < 14 {
		return [3]byte{}
	}
	return [3]byte{r.sense[2] & 0xf, r.sense[12], r.sense[13]}
}

// finish takes the response to a command.
func (c *client) finish(s sent) result {
	c.t.Helper()
	return c.judge(s, c.read())
}

func (c *client) judge(s sent, in incoming) result {
	c.t.Helper()
	var r pdu.SCSIResponse
	if err := r.Decode(&in.h); err != nil {
		c.t.Fatalf("%v instead of a SCSI Response: %v", in.h.String(), err)
	}
	if r.ITT != s.itt {
		c.t.Fatalf("response to %#x, want %#x", r.ITT, s.itt)
	}
	res := result{status: scsi.Status(r.Status), over: r.Overflow, under: r.Underflow, residual: r.Residual, invalidated: in.invalidated}
	if len(in.data) > 2 {
		res.sense = in.data[2:][:binary.BigEndian.Uint16(in.data)]
	}
	if in.invalidated {
		want := uint32(0)
		switch {
		case s.in != nil:
			want = s.in.w.RKey()
		case s.out != nil:
			want = s.out.w.RKey()
		}
		if in.key != want {
			c.t.Errorf("ISER-39: invalidated %#x, want %#x", in.key, want)
		}
	}
	if s.in != nil {
		res.data = s.in.free()
	}
	if s.out != nil {
		s.out.free()
	}
	return res
}

// run executes a command; 8 KiB of a write are immediate.
func (c *client) run(cdb []byte, read int, out []byte) result {
	c.t.Helper()
	return c.finish(c.command(cdb, read, out, min(len(out), 8192)))
}

func (c *client) good(cdb []byte, read int, out []byte) result {
	c.t.Helper()
	res := c.run(cdb, read, out)
	if res.status != scsi.Good {
		c.t.Fatalf("status %#x, sense %x", res.status, res.sense)
	}
	return res
}

func rw(op byte, lba, blocks int) []byte {
	b := make([]byte, 16)
	b[0] = op
	binary.BigEndian.PutUint64(b[2:], uint64(lba))
	binary.BigEndian.PutUint32(b[10:], uint32(blocks))
	return b
}

func read16(lba, blocks int) []byte  { return rw(0x88, lba, blocks) }
func write16(lba, blocks int) []byte { return rw(0x8a, lba, blocks) }

// pattern is n bytes that differ by seed and place.
func pattern(seed, n int) []byte {
	b := make([]byte, n)
	x := uint32(seed)*2654435761 + 1
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

// ping proves that the connection works.
func (c *client) ping() {
	c.t.Helper()
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(head{}, &h, nil)
	in := c.read()
	var r pdu.NopIn
	if err := r.Decode(&in.h); err != nil || r.ITT != p.ITT {
		c.t.Fatalf("NOP-In %v: %v", in.h.String(), err)
	}
}

// manage sends an immediate task management function and returns the tag.
func (c *client) manage(f pdu.TaskFunction, rtt pdu.TaskTag) pdu.TaskTag {
	c.t.Helper()
	p := pdu.TaskRequest{Immediate: true, Function: f, ITT: c.tag(), Referenced: rtt, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(head{}, &h, nil)
	return p.ITT
}

func (c *client) managed(itt pdu.TaskTag) pdu.TaskResponse {
	c.t.Helper()
	in := c.read()
	var r pdu.TaskResponse
	if err := r.Decode(&in.h); err != nil || r.ITT != itt {
		c.t.Fatalf("%v instead of the response to %#x", in.h.String(), itt)
	}
	return r
}

func (c *client) logout() {
	c.t.Helper()
	p := pdu.LogoutRequest{Immediate: true, Reason: pdu.CloseSession, ITT: c.tag(), CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(head{}, &h, nil)
	in := c.read()
	var r pdu.LogoutResponse
	if err := r.Decode(&in.h); err != nil {
		c.t.Fatalf("%v instead of a Logout Response", in.h.Opcode())
	}
}
