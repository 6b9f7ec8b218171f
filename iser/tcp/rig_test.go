package tcp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

const (
	initiatorName = "iqn.2001-04.com.example:host"
	targetName    = "iqn.2024-01.net.isergate:disk"
	secondTarget  = "iqn.2024-01.net.isergate:other"
	patience      = 20 * time.Second // after which a test has hung
)

// rig is a target with one logical unit in memory of 512-byte blocks, at LUN 0 of two targets.
type rig struct {
	t       testing.TB
	srv     *iscsi.Server
	addr    string
	medium  *scsitest.Medium
	units   *scsi.Inventory
	access  iscsi.LogicalUnits // what initiators get; nil: units
	chap    *iscsi.CHAP
	hidden  map[string]bool // targets that the initiator may not see
	checked bool
}

func (r *rig) Authorize(_ context.Context, initiator, target string) (iscsi.Access, error) {
	switch {
	case target == "":
		return iscsi.Access{}, nil
	case target != targetName && target != secondTarget:
		return iscsi.Access{}, iscsi.ErrNotFound
	case r.hidden[target]:
		return iscsi.Access{}, iscsi.ErrForbidden
	}
	if r.access != nil {
		return iscsi.Access{Units: r.access, CHAP: r.chap}, nil
	}
	return iscsi.Access{Units: r.units, CHAP: r.chap}, nil
}

func (r *rig) Targets(context.Context, string) (names []string) {
	for _, n := range []string{targetName, secondTarget} {
		if !r.hidden[n] {
			names = append(names, n)
		}
	}
	return names
}

// newRig starts a target on loopback; change adapts its options, and may set what the rig's methods answer.
func newRig(t testing.TB, change ...func(*rig, *iscsi.Options)) *rig {
	t.Helper()
	r := &rig{t: t, medium: scsitest.NewMedium(8192, 512), units: scsi.NewInventory(), hidden: map[string]bool{}}
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: r.medium, Identity: scsi.Identity{UUID: [16]byte{1}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.units.Map(0, unit); err != nil {
		t.Fatal(err)
	}
	opt := iscsi.Options{Backend: r, Logger: slog.New(slog.DiscardHandler), LogoutWait: time.Millisecond}
	for _, f := range change {
		f(r, &opt)
	}
	if r.srv, err = iscsi.NewServer(opt); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.srv.Serve(tcp.NewListener(l), iscsi.Portal{}) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := r.srv.Shutdown(ctx); err != nil && !r.checked {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) {
			t.Errorf("Serve: %v", err)
		}
		if n := r.medium.Open(); n != 0 {
			t.Errorf("%d landings or loans were not given back", n)
		}
	})
	return r
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

// client is an initiator of raw PDUs: it sends what it is told, right or wrong.
type client struct {
	t     testing.TB
	c     net.Conn
	isid  pdu.ISID
	tsih  uint16
	cid   uint16
	cmdSN pdu.Serial
	stat  pdu.Serial // the next StatSN expected
	itt   uint32
	hd    bool
	dd    bool
	max   pdu.Serial
	keys  pdu.Pairs // the answers of the login
}

func (r *rig) dial() *client {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return &client{t: r.t, c: c, isid: pdu.ISID{0x40, 0, 0, 1}, cmdSN: 0xfffffff0, itt: 1}
}

// login dials and logs in with the given keys, and takes the unit attention of the new nexus.
func (r *rig) login(keys ...string) *client {
	r.t.Helper()
	c := r.dial()
	c.login(keys...)
	return c
}

func (r *rig) ready(keys ...string) *client {
	r.t.Helper()
	c := r.login(keys...)
	c.tur()
	return c
}

func (c *client) tur() {
	c.t.Helper()
	c.run(make([]byte, 6), 0, nil)
}

func (c *client) tryLogin(keys ...string) pdu.LoginResponse {
	c.t.Helper()
	text := "InitiatorName=" + initiatorName + "\x00"
	named := false
	for _, k := range keys {
		text += k + "\x00"
		named = named || strings.HasPrefix(k, "TargetName=") || k == "SessionType=Discovery"
	}
	if !named {
		text += "TargetName=" + targetName + "\x00"
	}
	var h pdu.Header
	req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: c.isid, TSIH: c.tsih, CID: c.cid, ITT: 0x10, CmdSN: c.cmdSN}
	req.Encode(&h)
	c.write(&h, []byte(text))
	rh, data := c.read()
	var resp pdu.LoginResponse
	if err := resp.Decode(&rh); err != nil {
		c.t.Fatalf("login: %v: %v", rh.Opcode(), err)
	}
	if resp.Status == pdu.LoginSuccess {
		c.keys, _ = pdu.ParseText(data)
		c.tsih = resp.TSIH
		c.stat = resp.StatSN.Next()
		c.max = resp.MaxCmdSN
		v, _ := c.keys.Get("HeaderDigest")
		c.hd = v == "CRC32C"
		v, _ = c.keys.Get("DataDigest")
		c.dd = v == "CRC32C"
		if resp.ExpCmdSN != c.cmdSN && req.TSIH == 0 {
			c.t.Errorf("ISCSI-5: ExpCmdSN %d after login, want %d", resp.ExpCmdSN, c.cmdSN)
		}
	}
	return resp
}

func (c *client) login(keys ...string) {
	c.t.Helper()
	if r := c.tryLogin(keys...); r.Status != pdu.LoginSuccess || !r.Transit {
		c.t.Fatalf("login: %v, T=%v", r.Status, r.Transit)
	}
}

// write sends one PDU with correct digests.
func (c *client) write(h *pdu.Header, data []byte) {
	c.t.Helper()
	c.writeDamaged(h, data, 0, 0)
}

func (c *client) writeDamaged(h *pdu.Header, data []byte, spoilHeader, spoilData uint32) {
	c.t.Helper()
	h.SetDataLength(len(data))
	b := append([]byte(nil), h[:]...)
	if c.hd {
		b = pdu.AppendDigest(b, pdu.HeaderDigest(h, nil)^spoilHeader)
	}
	b = append(b, data...)
	b = append(b, make([]byte, pdu.Padding(len(data)))...)
	if c.dd && len(data) > 0 {
		b = pdu.AppendDigest(b, pdu.PadDigest(pdu.Digest(0, data), len(data))^spoilData)
	}
	if _, err := c.c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) tryRead() (h pdu.Header, data []byte, err error) {
	c.c.SetReadDeadline(time.Now().Add(patience))
	if _, err = io.ReadFull(c.c, h[:]); err != nil {
		return h, nil, err
	}
	if c.hd {
		var d [4]byte
		if _, err = io.ReadFull(c.c, d[:]); err != nil {
			return h, nil, err
		}
		if pdu.DigestAt(&d) != pdu.HeaderDigest(&h, nil) {
			c.t.Error("wrong header digest")
		}
	}
	n := h.DataLength()
	data = make([]byte, n+pdu.Padding(n))
	if _, err = io.ReadFull(c.c, data); err != nil {
		return h, nil, err
	}
	if c.dd && n > 0 {
		var d [4]byte
		if _, err = io.ReadFull(c.c, d[:]); err != nil {
			return h, nil, err
		}
		if pdu.DigestAt(&d) != pdu.Digest(0, data) {
			c.t.Error("wrong data digest")
		}
	}
	return h, data[:n], nil
}

// read takes the next PDU, and checks its numbers (ISCSI-41, ISCSI-44).
func (c *client) read() (pdu.Header, []byte) {
	c.t.Helper()
	h, data, err := c.tryRead()
	if err != nil {
		c.t.Fatalf("read: %v", err)
	}
	if op := h.Opcode(); op != pdu.OpLoginResponse {
		status := op != pdu.OpR2T && !(op == pdu.OpDataIn && h[1]&1 == 0) && !(op == pdu.OpNopIn && h.ITT() == pdu.ReservedTag)
		if status || op != pdu.OpDataIn {
			if h.StatSN() != c.stat {
				c.t.Errorf("%v: StatSN %d, want %d", op, h.StatSN(), c.stat)
			}
		}
		if status {
			c.stat = c.stat.Next()
		}
		if h.MaxCmdSN().Before(h.ExpCmdSN() - 1) {
			c.t.Errorf("%v: window [%d,%d]", op, h.ExpCmdSN(), h.MaxCmdSN())
		}
		if h.MaxCmdSN().After(c.max) {
			c.max = h.MaxCmdSN()
		}
	}
	return h, data
}

// closed expects that the target closes the connection, whatever it still sends.
func (c *client) closed() {
	c.t.Helper()
	for {
		if _, _, err := c.tryRead(); err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				c.t.Fatal("the connection was not closed")
			}
			return
		}
	}
}

func (c *client) tag() pdu.TaskTag { c.itt++; return pdu.TaskTag(c.itt) }

// sn numbers a non-immediate request.
func (c *client) sn() pdu.Serial { sn := c.cmdSN; c.cmdSN = sn.Next(); return sn }

// command sends a SCSI Command and returns its tag. read is the length of a read; out is data-out, of which
// the first immediate bytes go along.
func (c *client) command(cdb []byte, read int, out []byte, immediate int, change ...func(*pdu.SCSICommand)) pdu.TaskTag {
	c.t.Helper()
	p := pdu.SCSICommand{Final: true, Attr: pdu.AttrSimple, ITT: c.tag(), CmdSN: c.sn(), ExpStatSN: c.stat, Read: read > 0, Write: out != nil}
	p.EDTL = uint32(read)
	if out != nil {
		p.EDTL = uint32(len(out))
	}
	copy(p.CDB[:], cdb)
	for _, f := range change {
		f(&p)
	}
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, out[:immediate])
	return p.ITT
}

// result is how a command ended.
type result struct {
	status    scsi.Status
	sense     []byte
	data      []byte
	over      bool
	under     bool
	residual  uint32
	dataIn    int // Data-In PDUs
	collapsed bool
	r2ts      int
	expDataSN uint32
}

func (r *result) key() [3]byte {
	if len(r.sense) < 14 {
		return [3]byte{}
	}
	return [3]byte{r.sense[2] & 0xf, r.sense[12], r.sense[13]}
}

// status reads until a command has its status, which comes with the last Data-In or behind it, and returns that header.
func (c *client) status() pdu.Header {
	c.t.Helper()
	for {
		h, _ := c.read()
		switch op := h.Opcode(); {
		case op == pdu.OpSCSIResponse, op == pdu.OpDataIn && h[1]&1 != 0:
			return h
		case op != pdu.OpDataIn:
			c.t.Fatalf("%v, want the status of a command", op)
		}
	}
}

// finish follows a command to its status, and answers its R2Ts with out.
func (c *client) finish(itt pdu.TaskTag, out []byte) result {
	c.t.Helper()
	var res result
	for {
		h, data := c.read()
		if h.ITT() != itt {
			c.t.Fatalf("%v for task %#x, want %#x", h.Opcode(), h.ITT(), itt)
		}
		switch h.Opcode() {
		case pdu.OpR2T:
			var r pdu.R2T
			if err := r.Decode(&h); err != nil {
				c.t.Fatal(err)
			}
			if int(r.R2TSN) != res.r2ts {
				c.t.Errorf("R2TSN %d, want %d", r.R2TSN, res.r2ts)
			}
			res.r2ts++
			c.dataOut(itt, r.TTT, int(r.Offset), out[r.Offset:r.Offset+r.Length], 8192)
		case pdu.OpDataIn:
			var d pdu.DataIn
			if err := d.Decode(&h); err != nil {
				c.t.Fatal(err)
			}
			if int(d.DataSN) != res.dataIn || int(d.Offset) != len(res.data) {
				c.t.Errorf("Data-In %d at %d, want %d at %d", d.DataSN, d.Offset, res.dataIn, len(res.data))
			}
			res.dataIn++
			res.data = append(res.data, data...)
			if d.HasStatus {
				res.collapsed = true
				res.status, res.over, res.under, res.residual = scsi.Status(d.Status), d.Overflow, d.Underflow, d.Residual
				return res
			}
		case pdu.OpSCSIResponse:
			var r pdu.SCSIResponse
			if err := r.Decode(&h); err != nil {
				c.t.Fatal(err)
			}
			res.status, res.over, res.under, res.residual = scsi.Status(r.Status), r.Overflow, r.Underflow, r.Residual
			res.expDataSN = uint32(r.ExpDataSN)
			if int(r.ExpDataSN) != res.dataIn {
				c.t.Errorf("ISCSI-47: ExpDataSN %d after %d Data-In", r.ExpDataSN, res.dataIn)
			}
			if len(data) > 2 {
				res.sense = data[2 : 2+binary.BigEndian.Uint16(data)]
			}
			if res.status == scsi.CheckCondition && len(res.sense) == 0 {
				c.t.Error("ISCSI-56: CHECK CONDITION without sense data")
			}
			return res
		default:
			c.t.Fatalf("%v", h.Opcode())
		}
	}
}

// dataOut sends data as one sequence of Data-Out of at most segment bytes each.
func (c *client) dataOut(itt, ttt pdu.TaskTag, off int, data []byte, segment int) {
	c.t.Helper()
	for sn := 0; ; sn++ {
		n := min(segment, len(data))
		d := pdu.DataOut{Final: n == len(data), ITT: itt, TTT: ttt, DataSN: pdu.Serial(sn), Offset: uint32(off), ExpStatSN: c.stat}
		var h pdu.Header
		d.Encode(&h)
		c.write(&h, data[:n])
		off, data = off+n, data[n:]
		if len(data) == 0 {
			return
		}
	}
}

// run executes a command with all that it takes.
func (c *client) run(cdb []byte, read int, out []byte) result {
	c.t.Helper()
	return c.finish(c.command(cdb, read, out, 0), out)
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

// reject expects a Reject.
func (c *client) reject(reason pdu.RejectReason) pdu.Header {
	c.t.Helper()
	h, data := c.read()
	var r pdu.Reject
	if err := r.Decode(&h); err != nil {
		c.t.Fatalf("%v instead of a Reject", h.Opcode())
	}
	if r.Reason != reason {
		c.t.Fatalf("rejected with %v, want %v", r.Reason, reason)
	}
	bad, err := pdu.ParseHeader(data)
	if err != nil {
		c.t.Fatal(err)
	}
	return bad
}

// ping proves that the connection works.
func (c *client) ping() {
	c.t.Helper()
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, []byte("ping"))
	rh, data := c.read()
	var r pdu.NopIn
	if err := r.Decode(&rh); err != nil || r.ITT != p.ITT || r.TTT != pdu.ReservedTag || string(data) != "ping" {
		c.t.Fatalf("NOP-In %v %q: %v", rh.String(), data, err)
	}
}

// manage sends an immediate task management function and returns the tag.
func (c *client) manage(f pdu.TaskFunction, rtt pdu.TaskTag, change ...func(*pdu.TaskRequest)) pdu.TaskTag {
	c.t.Helper()
	p := pdu.TaskRequest{Immediate: true, Function: f, ITT: c.tag(), Referenced: rtt, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	for _, f := range change {
		f(&p)
	}
	if !p.Immediate {
		p.CmdSN = c.sn()
	}
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, nil)
	return p.ITT
}

func (c *client) managed(itt pdu.TaskTag) pdu.TaskResponse {
	c.t.Helper()
	h, _ := c.read()
	var r pdu.TaskResponse
	if err := r.Decode(&h); err != nil || r.ITT != itt {
		c.t.Fatalf("%v instead of the response to %#x", h.String(), itt)
	}
	return r
}

func (c *client) logout(reason pdu.LogoutReason, cid uint16) pdu.LogoutResponse {
	c.t.Helper()
	p := pdu.LogoutRequest{Immediate: true, Reason: reason, ITT: c.tag(), CID: cid, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, nil)
	rh, _ := c.read()
	var r pdu.LogoutResponse
	if err := r.Decode(&rh); err != nil {
		c.t.Fatalf("%v instead of a Logout Response", rh.Opcode())
	}
	return r
}

// text sends one Text Request and returns the response with its text.
func (c *client) text(p pdu.TextRequest, text string) (pdu.TextResponse, string) {
	c.t.Helper()
	c.sendText(p, text)
	rh, data := c.read()
	var r pdu.TextResponse
	if err := r.Decode(&rh); err != nil {
		c.t.Fatalf("%v instead of a Text Response: %v", rh.Opcode(), err)
	}
	return r, string(data)
}

func (c *client) sendText(p pdu.TextRequest, text string) {
	c.t.Helper()
	if p.CmdSN = c.cmdSN; !p.Immediate {
		p.CmdSN = c.sn()
	}
	p.ExpStatSN = c.stat
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, []byte(text))
}

// gate lets a test hold operations of the medium.
type gate struct {
	op      scsitest.Op
	entered chan struct{} // an operation has arrived
	open    chan struct{} // closed: all go on
}

func (r *rig) gate(op scsitest.Op) *gate {
	g := &gate{op: op, entered: make(chan struct{}, 1024), open: make(chan struct{})}
	r.medium.Before = func(ctx context.Context, op scsitest.Op, _ scsi.Extent) error {
		if op != g.op {
			return nil
		}
		g.entered <- struct{}{}
		select {
		case <-g.open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return g
}
