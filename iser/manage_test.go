package iser_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

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

// ISER-50, R12: after the answer to a task management function nothing reaches the task's buffers any more, and its memory is free.
func TestTaskManagement(t *testing.T) {
	var g *gate
	r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) { g = r.gate(scsitest.OpRead) })
	c := r.ready(dialing{})
	data := pattern(1, 65536)
	c.good(write16(0, 128), 0, data)
	for _, f := range []pdu.TaskFunction{pdu.AbortTask, pdu.AbortTaskSet, pdu.LogicalUnitReset} {
		s := c.command(read16(0, 128), 65536, nil, 0)
		<-g.entered
		if resp := c.managed(c.manage(f, s.itt)); resp.Response != pdu.FunctionComplete {
			t.Errorf("%v: %v", f, resp.Response)
		}
		// Its STag dies now: an RDMA Write to it would end the connection.
		if b := s.in.free(); !bytes.Equal(b, make([]byte, 65536)) {
			t.Errorf("ISER-50: %v: data came", f)
		}
		c.ping()
		if f == pdu.LogicalUnitReset {
			c.run(make([]byte, 6), 0, nil) // unit attention
		}
	}
	if resp := c.managed(c.manage(pdu.TaskReassign, 0x99)); resp.Response != pdu.ReassignNotSupported {
		t.Errorf("ISER-52: %v", resp.Response)
	}
	close(g.open)
	if got := c.good(read16(0, 128), 65536, nil); !bytes.Equal(got.data, data) {
		t.Error("read something else")
	}
}

// A TASK REASSIGN may bring STags in its header; other requests may not (ISER-48, 52).
func TestTagsInHeaders(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	p := pdu.TaskRequest{Immediate: true, Function: pdu.TaskReassign, ITT: c.tag(), Referenced: 5, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	c.write(head{first: 0x1c, writeTag: 1, readTag: 2}, &h, nil)
	if resp := c.managed(p.ITT); resp.Response != pdu.ReassignNotSupported {
		t.Errorf("%v", resp.Response)
	}
	n := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	n.Encode(&h)
	c.write(head{first: 0x14, readTag: 2}, &h, nil)
	c.closed()
}

// silent is an iWARP initiator over a TCP connection whose reading the test can stop.
type silent struct {
	net.Conn
	mu      sync.Mutex
	cond    sync.Cond
	stopped bool
	closed  bool
}

func newSilent(nc net.Conn) *silent {
	s := &silent{Conn: nc}
	s.cond.L = &s.mu
	return s
}

func (s *silent) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.stopped && !s.closed {
		s.cond.Wait()
	}
	return n, err
}

func (s *silent) stop(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = on
	s.cond.Broadcast()
}

func (s *silent) Close() error {
	s.mu.Lock()
	s.closed = true
	s.cond.Broadcast()
	s.mu.Unlock()
	return s.Conn.Close()
}

// dialSilent connects by way of a silent connection.
func (r *rig) dialSilent(d dialing) (*client, *silent) {
	r.t.Helper()
	nc, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := iwarp.New(d.iwarp)
	if err != nil {
		r.t.Fatal(err)
	}
	s := newSilent(nc)
	c := &client{t: r.t, isid: pdu.ISID{0x40, 0, 0, 9}, cmdSN: 0xfffffff0, itt: 1}
	if err := c.connect(p, p.Initiate(s, nil), d); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { s.stop(false) })
	return c, s
}

// ISER-R12, ISER-82: an initiator that never answers a Read holds up nobody but itself: its connection ends, and the buffer is not touched
// after the write gave it back.
func TestReadIsNeverAnswered(t *testing.T) {
	r := newRig(t, func(_ *rig, _ *iscsi.Options, o *iser.Options) { o.ReadTimeout = 100 * time.Millisecond })
	other := r.ready(dialing{})
	for _, abort := range []bool{false, true} {
		c, s := r.dialSilent(dialing{})
		c.login()
		c.run(make([]byte, 6), 0, nil)
		s.stop(true)
		cmd := c.command(write16(0, 512), 0, pattern(1, 262144), 8192)
		await(t, "the write has begun", func() bool { return r.lent.Usage().UsedBytes > 0 })
		if abort {
			c.manage(pdu.AbortTask, cmd.itt)
		}
		await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 1 })
		await(t, "the landing is given back", func() bool { return r.lent.Usage().UsedBytes == 0 })
		await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 1 })
		s.stop(false)
		c.closed()
		other.ping()
	}
}

// A reset of the unit waits for commands of initiators that answer no Read, but not for long: their connections end, and those of the others go on.
func TestResetDoesNotWaitForReads(t *testing.T) {
	r := newRig(t, func(_ *rig, i *iscsi.Options, o *iser.Options) {
		o.ReadTimeout, i.AbortWait = 10*patience, 50*time.Millisecond
	})
	other := r.ready(dialing{})
	c, s := r.dialSilent(dialing{})
	c.login()
	c.run(make([]byte, 6), 0, nil)
	s.stop(true)
	c.command(write16(0, 512), 0, pattern(1, 262144), 8192)
	await(t, "the write has begun", func() bool { return r.lent.Usage().UsedBytes > 0 })
	if resp := other.managed(other.manage(pdu.LogicalUnitReset, 0)); resp.Response != pdu.FunctionComplete {
		t.Errorf("%v", resp.Response)
	}
	await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 1 })
	await(t, "the landing is given back", func() bool { return r.lent.Usage().UsedBytes == 0 })
	s.stop(false)
	c.closed()
	other.run(make([]byte, 6), 0, nil) // unit attention
	other.good(write16(0, 512), 0, pattern(2, 262144))
}

// The same of commands of an initiator that does not read what it asked for: those that have not ended are waited for (ISER-R12).
func TestResetDoesNotWaitForReaders(t *testing.T) {
	for _, function := range []pdu.TaskFunction{pdu.LogicalUnitReset, pdu.ClearTaskSet, pdu.TargetWarmReset} {
		r := newRig(t, func(r *rig, i *iscsi.Options, _ *iser.Options) {
			r.iwarp.StallTimeout, i.AbortWait = 10*patience, 50*time.Millisecond
		})
		other := r.ready(dialing{})
		c, s := r.dialSilent(dialing{})
		s.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
		c.login()
		c.run(make([]byte, 6), 0, nil)
		giveUp := r.fill(c, s, 2<<20)
		if resp := other.managed(other.manage(function, 0)); resp.Response != pdu.FunctionComplete {
			t.Errorf("%v", resp.Response)
		}
		giveUp()
		await(t, "what the unit lent is given back", func() bool { return r.lent.Usage().UsedBytes == 0 })
		other.run(make([]byte, 6), 0, nil) // unit attention
		other.good(write16(0, 512), 0, pattern(2, 262144))
	}
}

// Initiators that answer no Read, of data that goes through bounce buffers, do not use up those of the others.
func TestBounceBuffersAreOnesOwn(t *testing.T) {
	r := newRig(t, func(_ *rig, _ *iscsi.Options, o *iser.Options) { o.ReadTimeout = 10 * patience })
	other := r.ready(dialing{})
	unmap := []byte{0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0}
	list := []byte{0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0}
	for i := range 2 {
		c, s := r.dialSilent(dialing{recvs: 300, ird: 128})
		c.isid[5] = byte(0x20 + i)
		c.login()
		c.run(make([]byte, 6), 0, nil)
		s.stop(true)
		for range 128 {
			c.command(unmap, 0, list, 0)
		}
		await(t, "the commands have begun", func() bool {
			for _, info := range r.srv.Sessions() {
				if info.ISID == c.isid {
					return info.Running == 128
				}
			}
			return false
		})
	}
	for range 10 {
		if r := other.finish(other.command(unmap, 0, list, 0)); r.status != scsi.Good {
			t.Fatalf("%v", r.status)
		}
	}
}

// An initiator that does not take what it is sent: its backlog is bounded, the others go on.
func TestPeerThatDoesNotRead(t *testing.T) {
	r := newRig(t)
	other := r.ready(dialing{})
	c, s := r.dialSilent(dialing{recvs: 300})
	c.login()
	c.run(make([]byte, 6), 0, nil)
	s.stop(true)
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	ended := false
	for i := 0; i < 1_000_000 && !ended; i++ {
		p.ITT = c.tag()
		var h pdu.Header
		p.Encode(&h)
		ended = c.raw(message(head{}, &h, nil, nil)) != nil
	}
	if !ended {
		t.Error("the connection goes on for ever")
	}
	other.ping()
	s.stop(false)
	await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 1 })
}

// An initiator that does not read holds up a stop for a while only: its commands end.
func TestShutdownWithPeerThatDoesNotRead(t *testing.T) {
	r := newRig(t)
	c, s := r.dialSilent(dialing{})
	s.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	c.login()
	c.run(make([]byte, 6), 0, nil)
	giveUp := r.fill(c, s, 1<<20)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.srv.Shutdown(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, iscsi.ErrStuck) {
		t.Errorf("Shutdown: %v", err)
	}
	await(t, "what the unit lent is given back", func() bool { return r.lent.Usage().UsedBytes == 0 })
	giveUp()
}

// fill has a client read more than TCP keeps, by commands of size bytes, without taking it, and waits until the connection is full.
func (r *rig) fill(c *client, s *silent, size int) (giveUp func()) {
	t := r.t
	t.Helper()
	before := len(r.srv.Sessions()) - 1
	s.stop(true)
	const commands = 12
	in := c.expose(1<<20, nil, rdma.RemoteWrite) // nothing is placed in it
	for range commands {
		c.command(read16(0, size/512), 0, nil, 0, func(p *pdu.SCSICommand, w *head) {
			p.Read, p.EDTL = true, uint32(size)
			w.first, w.readTag, w.readBase = 0x14, in.w.RKey(), in.w.Addr()
		})
	}
	still := 0 // polls since the last change
	running := 0
	await(t, "the connection is full", func() bool {
		all := r.srv.Sessions()
		if len(all) != before+1 {
			t.Fatal("the session has ended")
		}
		var mine iscsi.SessionInfo
		for _, info := range all {
			if info.ISID == c.isid {
				mine = info
			}
		}
		if mine.Commands != commands+1 || mine.Running != running || r.lent.Usage().UsedBytes < int64(running)<<20 {
			still, running = 0, mine.Running
		}
		still++
		return still > 200 && running > 0
	})
	return func() {
		s.stop(false)
		in.w.Close()
		c.mem.Free(in.pieces)
	}
}

// ISER-54: a connection that breaks gives everything back, whatever was in progress.
func TestConnectionBreaks(t *testing.T) {
	var g *gate
	for _, op := range []scsitest.Op{scsitest.OpRead, scsitest.OpCommit, scsitest.OpReserve} {
		r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) { g = r.gate(op) })
		c := r.ready(dialing{})
		for i := range 20 {
			if op == scsitest.OpRead {
				c.command(read16(0, 128), 65536, nil, 0)
			} else {
				c.command(write16(i*128, 128), 0, pattern(1, 65536), 8192)
			}
		}
		for range 20 {
			<-g.entered
		}
		c.qp.Close()
		await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })
		await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 0 && r.lent.Usage().UsedBytes == 0 })
		close(g.open)
	}
}

// ISER-53: the Logout Response is delivered, then the target closes; also with commands in progress, and when the server goes away.
func TestLogout(t *testing.T) {
	var g *gate
	r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) { g = r.gate(scsitest.OpRead) })
	for range 10 {
		c := r.ready(dialing{})
		c.command(read16(0, 128), 65536, nil, 0)
		<-g.entered
		c.logout()
		c.closed()
		await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 0 })
	}
	close(g.open)
	// Nothing is sent by itself, except what a shutdown says.
	c := r.ready(dialing{})
	done := make(chan error, 1)
	go func() { done <- r.srv.Close() }()
	in, err := c.tryRead()
	if err == nil && in.h.Opcode() != pdu.OpAsync {
		t.Errorf("%v", in.h.Opcode())
	}
	c.closed()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Every goroutine of a connection ends with it.
func TestNoGoroutinesLeft(t *testing.T) {
	r := newRig(t)
	before := runtime.NumGoroutine()
	for range 20 {
		c := r.ready(dialing{})
		c.good(write16(0, 128), 0, pattern(1, 65536))
		c.good(read16(0, 128), 65536, nil)
		c.qp.Close()
	}
	await(t, "all connections are gone", func() bool { return r.target.Usage().Connections == 0 && len(r.srv.Sessions()) == 0 })
	// Workers of the iSCSI layer stay for a while.
	await(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before+20 })
}

// Target.Close waits for connections that were closed, as long as it may, and fails for those that were not.
func TestTargetClose(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	if err := r.target.Close(t.Context()); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("%v", err)
	}
	c.ping()
	c.logout()
	c.closed()
}

// What is held for longer than Target.Close may wait is not deregistered.
func TestTargetCloseIsBounded(t *testing.T) {
	release := make(chan struct{})
	entered := make(chan struct{})
	r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) {
		r.medium.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
			if op == scsitest.OpRead {
				close(entered)
				<-release // whatever its context says
			}
			return nil
		}
	})
	c := r.ready(dialing{})
	c.command(read16(0, 128), 65536, nil, 0)
	<-entered
	c.qp.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	for ctx.Err() == nil { // while the connection is open it does not wait
		if err := r.target.Close(ctx); !errors.Is(err, rdma.ErrBusy) {
			t.Errorf("%v", err)
		}
	}
	close(release)
	await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })
}
