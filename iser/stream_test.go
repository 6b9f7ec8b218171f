package iser_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// numbers stamps as a connection of the iSCSI layer does.
type numbers struct{ stat pdu.Serial }

func (n *numbers) Stamp(h *pdu.Header) {
	h.SetStatSN(n.stat)
	if h.Opcode() != pdu.OpNopIn || h.ITT() != pdu.ReservedTag {
		n.stat = n.stat.Next()
	}
	h.SetWindow(1, 100)
}

// bare is a target without an iSCSI layer: the test is that.
type bare struct {
	t      *testing.T
	p      *iwarp.Provider
	mem    *arena.Arena
	target *iser.Target
}

func newBare(t *testing.T, bytes int64) *bare {
	t.Helper()
	b := &bare{t: t}
	var err error
	if b.p, err = iwarp.New(iwarp.Options{}); err != nil {
		t.Fatal(err)
	}
	if b.mem, err = arena.New(bytes); err != nil {
		t.Fatal(err)
	}
	if b.target, err = iser.NewTarget(iser.Options{Provider: b.p, Memory: b.mem, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.target.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if u := b.mem.Usage(); u.UsedBytes != 0 {
			t.Errorf("%d bytes of memory are lost", u.UsedBytes)
		}
		if err := b.mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// become makes an RDMA connection of a stream, as after the final Login Response: the initiator's side, and the request.
func (b *bare) become(d dialing) (*client, rdma.Request, chan error) {
	b.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	defer l.Close()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.t.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		b.t.Fatal(err)
	}
	ip, err := iwarp.New(d.iwarp)
	if err != nil {
		b.t.Fatal(err)
	}
	c := &client{t: b.t, itt: 1, stat: 77}
	connected := make(chan error, 1)
	prepared := make(chan struct{})
	go func() {
		defer close(prepared)
		connected <- c.connect(ip, ip.Initiate(nc, nil), d)
	}()
	b.t.Cleanup(func() { <-prepared })
	req, err := b.p.Respond(context.Background(), other, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return c, req, connected
}

func parameters() *iscsi.Parameters {
	return &iscsi.Parameters{RDMAExtensions: true, InitialR2T: true, ImmediateData: true, FirstBurstLength: 65536, MaxBurstLength: 262144,
		TargetRecvDataSegmentLength: 8192, InitiatorRecvDataSegmentLen: 8192, CommandWindow: 128}
}

// ISER-10, 11, 14, R6, R9: the memory is there before the stream becomes an RDMA connection, which is in full feature phase at once, with the
// numbers of the login, and gets plain Sends.
func TestStreamMode(t *testing.T) {
	b := newBare(t, 8<<20)
	base := b.target.Usage()
	x, err := b.target.Prepare(context.Background(), parameters())
	if err != nil {
		t.Fatal(err)
	}
	if u := b.target.Usage(); u.UsedBytes <= base.UsedBytes || u.Connections != 1 {
		t.Errorf("ISER-10: %+v", u)
	}
	c, req, connected := b.become(dialing{})
	conn, err := x.Accept(context.Background(), req, &numbers{stat: 77})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(c.reply.PrivateData, []byte{0xc0, 0, 0, 0}) {
		t.Errorf("ISER-R6: %x", c.reply.PrivateData)
	}
	x.Release() // does nothing any more
	if tr := conn.Traits(); tr.Transport != "iser" || !tr.RDMA {
		t.Errorf("%+v", tr)
	}

	// A read: its data and its response.
	s := c.command(read16(0, 1), 512, nil, 0)
	p, err := conn.Receive()
	if err != nil || p.Header.Opcode() != pdu.OpSCSICommand || p.Header.ITT() != s.itt {
		t.Fatalf("%v: %v", p, err)
	}
	task := &iscsi.Task{ITT: s.itt, Read: true, EDTL: 512, Transfer: p.Transfer}
	want := pattern(5, 512)
	if err := conn.PutData(context.Background(), task, [][]byte{want[:100], want[100:]}, 0); err != nil {
		t.Fatal(err)
	}
	if err := conn.PutData(context.Background(), task, [][]byte{want}, 100); !errors.Is(err, iscsi.ErrRange) {
		t.Errorf("ISER-R5: %v", err)
	}
	resp := &iscsi.PDU{Task: task}
	(&pdu.SCSIResponse{ITT: s.itt}).Encode(&resp.Header)
	if err := conn.SendControl(resp); err != nil {
		t.Fatal(err)
	}
	conn.Release(task)
	res := c.finish(s)
	if res.invalidated || !bytes.Equal(res.data, want) {
		t.Errorf("ISER-R6: invalidated %v", res.invalidated)
	}

	// A write, all of it fetched, to memory that is not registered.
	out := pattern(6, 40000)
	s = c.command(write16(0, 1), 0, out, 0)
	if p, err = conn.Receive(); err != nil {
		t.Fatal(err)
	}
	task = &iscsi.Task{ITT: s.itt, Write: true, EDTL: 40000, Transfer: p.Transfer}
	got := make([]byte, 40000)
	if err := conn.GetData(context.Background(), task, [][]byte{got[:15000]}, 0); err != nil {
		t.Fatal(err)
	}
	if err := conn.GetData(context.Background(), task, [][]byte{got}, 15000); !errors.Is(err, iscsi.ErrRange) {
		t.Errorf("ISER-R5: %v", err)
	}
	if err := conn.GetData(context.Background(), task, [][]byte{got[15000:]}, 15000); err != nil || !bytes.Equal(got, out) {
		t.Errorf("got something else, or %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := conn.GetData(ctx, task, nil, 40000); !errors.Is(err, iscsi.ErrAborted) {
		t.Errorf("aborted: %v", err)
	}
	if err := conn.Finish(context.Background(), task); err != nil {
		t.Error(err)
	}
	conn.Release(task)
	s.out.free()
	conn.Close(true)
	c.closed()
	if _, err := conn.Receive(); !errors.Is(err, iscsi.ErrClosed) {
		t.Errorf("%v", err)
	}
	if err := conn.SendControl(&iscsi.PDU{}); !errors.Is(err, iscsi.ErrClosed) {
		t.Errorf("%v", err)
	}
}

// What was prepared is given back, whatever becomes of it; and 0302 is for those who find nothing (ISER-13, 17).
func TestPrepareAndRelease(t *testing.T) {
	b := newBare(t, 6<<20)
	var held []*iser.Prepared
	for {
		x, err := b.target.Prepare(context.Background(), parameters())
		if errors.Is(err, iscsi.ErrResources) {
			break
		}
		if err != nil || len(held) > 10 {
			t.Fatalf("%d: %v", len(held), err)
		}
		held = append(held, x)
	}
	if len(held) == 0 {
		t.Error("nothing fits")
	}
	for _, x := range held {
		x.Release()
		x.Release()
	}
	x, err := b.target.Prepare(context.Background(), parameters())
	if err != nil {
		t.Fatal(err)
	}
	_, req, connected := b.become(dialing{private: []byte{1, 2}})
	if _, err := x.Accept(context.Background(), req, &numbers{}); err == nil {
		t.Error("accepted with private data of 2 bytes")
	}
	if err := <-connected; err == nil {
		t.Error("connected")
	}
	_, req, connected = b.become(dialing{})
	if _, err := x.Accept(context.Background(), req, &numbers{}); err == nil {
		t.Error("used twice")
	}
	<-connected
	p := parameters()
	p.CommandWindow = 4096
	if _, err := b.target.Prepare(context.Background(), p); !errors.Is(err, iscsi.ErrResources) {
		t.Errorf("%v", err)
	}
	if u := b.target.Usage(); u.Connections != 0 {
		t.Errorf("%+v", u)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []iser.Options{{}, {Receives: 1}, {ORD: 5000}, {IRD: -1}, {ReadTimeout: -1}} {
		if _, err := iser.NewTarget(o); err == nil {
			t.Errorf("%+v", o)
		}
	}
	small, err := arena.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	p, err := iwarp.New(iwarp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := iser.NewTarget(iser.Options{Provider: p, Memory: small}); err == nil {
		t.Error("1 MiB is enough")
	}
}
