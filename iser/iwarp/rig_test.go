package iwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/rdma"
)

// end is one side of a connection under test.
type end struct {
	t     testing.TB
	p     *Provider
	pd    rdma.PD
	cq    rdma.CQ
	qp    rdma.QP
	mem   *arena.Arena
	arena *rdma.Arena
	buf   []byte // 1 MiB of it
	peer  rdma.ConnParams
	// separate is for receives if they have a completion queue of their own.
	separate rdma.CQ
	anyOrder bool
}

const endBytes = 1 << 20

func newEnd(t testing.TB, o Options) *end {
	t.Helper()
	e := &end{t: t}
	var err error
	check := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e.p, err = New(o)
	check()
	e.pd, err = e.p.AllocPD()
	check()
	e.cq, err = e.p.CreateCQ(4096)
	check()
	e.mem, err = arena.New(4 << 20)
	check()
	e.arena, err = rdma.NewArena(e.pd, e.mem)
	check()
	pieces, err := e.mem.Alloc(context.Background(), endBytes)
	check()
	e.buf = pieces[0]
	t.Cleanup(func() {
		if e.qp != nil {
			e.qp.Close()
		}
		if err := e.arena.Close(); err != nil {
			t.Error(err)
		}
		e.mem.Free(pieces)
		if err := e.mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *end) attr() rdma.QPAttr {
	recv := e.cq
	if e.separate != nil {
		recv = e.separate
	}
	return rdma.QPAttr{SendCQ: e.cq, RecvCQ: recv, MaxSend: 64, MaxRecv: 64, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInline: 256, RecvAnyOrder: e.anyOrder}
}

func (e *end) create(c rdma.Endpoint) {
	e.t.Helper()
	var err error
	if e.qp, err = c.CreateQP(e.pd, e.attr()); err != nil {
		e.t.Fatal(err)
	}
}

// sge is part of the end's buffer.
func (e *end) sge(from, n int) rdma.SGE { return e.arena.SGE(e.buf[from : from+n]) }

func (e *end) send(wrs ...rdma.SendWR) {
	e.t.Helper()
	if n, err := e.qp.PostSend(wrs); err != nil || n != len(wrs) {
		e.t.Fatalf("posted %d of %d: %v", n, len(wrs), err)
	}
}

func (e *end) recv(wrs ...rdma.RecvWR) {
	e.t.Helper()
	if n, err := e.qp.PostRecv(wrs); err != nil || n != len(wrs) {
		e.t.Fatalf("posted %d of %d: %v", n, len(wrs), err)
	}
}

// wait returns the next n completions.
func (e *end) wait(n int) []rdma.WC {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	wcs := make([]rdma.WC, n)
	for got := 0; got < n; {
		k, err := e.cq.Wait(ctx, wcs[got:], false)
		if err != nil {
			e.t.Fatalf("waiting for completion %d of %d: %v (queue pair: %v)", got+1, n, err, e.qp.Err())
		}
		got += k
	}
	return wcs
}

// good waits for n completions that are all successful.
func (e *end) good(n int) []rdma.WC {
	e.t.Helper()
	wcs := e.wait(n)
	for _, wc := range wcs {
		if wc.Status != rdma.StatusSuccess {
			e.t.Fatalf("completion %+v (queue pair: %v)", wc, e.qp.Err())
		}
	}
	return wcs
}

// ended waits for the end of the connection and returns its reason.
func (e *end) ended() error {
	e.t.Helper()
	select {
	case <-e.qp.Done():
	case <-time.After(20 * time.Second):
		e.t.Fatal("the connection has not ended")
	}
	return e.qp.Err()
}

// bind makes a window. Nothing else may be about to complete.
func (e *end) bind(from, n int, a rdma.Access) rdma.Window {
	e.t.Helper()
	w, err := e.pd.AllocWindow()
	if err != nil {
		e.t.Fatal(err)
	}
	e.send(rdma.SendWR{Op: rdma.OpBind, Flags: rdma.Signaled, Bind: rdma.Bind{Window: w, MR: e.arena.MR(), Buf: e.buf[from : from+n], Access: a}})
	e.good(1)
	return w
}

// conns returns both ends of a connection.
type conns func(t testing.TB) (initiator, responder net.Conn)

func overTCP(t testing.TB) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func overPipe(testing.TB) (net.Conn, net.Conn) { return net.Pipe() }

// cutting writes in pieces of random sizes, so that reads find any segmentation.
type cutting struct {
	net.Conn
	mu  sync.Mutex
	rnd *rand.Rand
	max int
}

func (c *cutting) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for n < len(b) {
		k, err := c.Conn.Write(b[n:min(len(b), n+1+c.rnd.IntN(c.max))])
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func (c *cutting) CloseWrite() error {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		return t.CloseWrite()
	}
	return errors.ErrUnsupported
}

// shaken cuts both directions of what under gives.
func shaken(under conns, seed uint64, max int) conns {
	return func(t testing.TB) (net.Conn, net.Conn) {
		a, b := under(t)
		return &cutting{Conn: a, rnd: rand.New(rand.NewPCG(seed, 1)), max: max}, &cutting{Conn: b, rnd: rand.New(rand.NewPCG(seed, 2)), max: max}
	}
}

// pair connects two ends: the first is the initiator.
func pair(t testing.TB, c conns, oi, or Options) (*end, *end) {
	t.Helper()
	i, r := newEnd(t, oi), newEnd(t, or)
	connect(t, c, i, r, rdma.ConnParams{IRD: 8, ORD: 8}, rdma.ConnParams{IRD: 8, ORD: 8})
	return i, r
}

func connect(t testing.TB, c conns, i, r *end, ip, rp rdma.ConnParams) {
	t.Helper()
	a, b := c(t)
	accepted := make(chan error, 1)
	go func() {
		req, err := r.p.Respond(context.Background(), b, nil)
		if err == nil {
			r.peer = req.Peer()
			r.qp, err = req.CreateQP(r.pd, r.attr())
			if err == nil {
				err = req.Accept(context.Background(), rp)
			}
		}
		accepted <- err
	}()
	d := i.p.Initiate(a, nil)
	i.create(d)
	var err error
	if i.peer, err = d.Connect(context.Background(), ip); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
}

// raw is a peer made of bytes, that writes what it wants.
type raw struct {
	t  testing.TB
	nc net.Conn
}

func (r *raw) write(b []byte) {
	r.t.Helper()
	r.nc.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := r.nc.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

// rest returns what the other side sends until it closes.
func (r *raw) rest() []byte {
	r.t.Helper()
	r.nc.SetDeadline(time.Now().Add(20 * time.Second))
	b, err := io.ReadAll(r.nc)
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

// fpdu makes an FPDU.
func fpdu(crc bool, seg segment, payload []byte) []byte {
	var s sender
	s.init(crc, false, maxULPDU)
	s.segment(&seg, payload)
	return bytes.Clone(s.out)
}

func pattern(seed uint64, b []byte) []byte {
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24), 1})
	rnd.Read(b)
	return b
}

// clear empties the batch.
func (s *sender) clear() {
	out := s.out
	var f flight
	s.launch(&f)
	s.out = out[:0]
}
