package iwarp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// Provider implements rdma.Provider.
type Provider struct {
	opt    Options
	lastQP atomic.Uint32
}

// New returns a provider.
func New(o Options) (*Provider, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Provider{opt: o}, nil
}

// Name implements rdma.Provider.
func (p *Provider) Name() string { return "iwarp" }

// AllocPD implements rdma.Provider.
func (p *Provider) AllocPD() (rdma.PD, error) { return newDomain(), nil }

// CreateCQ implements rdma.Provider.
func (p *Provider) CreateCQ(depth int) (rdma.CQ, error) {
	c, err := newCompletionQueue(depth)
	if err != nil {
		return nil, err // not a non-nil interface of a nil pointer
	}
	return c, nil
}

// endpoint is a connection before it is established.
type endpoint struct {
	p    *Provider
	sock *sock
	qp   *queuePair
	over bool // Accept, Reject, Connect or Close was called
}

// LocalAddr implements rdma.Endpoint.
func (e *endpoint) LocalAddr() net.Addr { return e.sock.nc.LocalAddr() }

// RemoteAddr implements rdma.Endpoint.
func (e *endpoint) RemoteAddr() net.Addr { return e.sock.nc.RemoteAddr() }

// CreateQP implements rdma.Endpoint.
func (e *endpoint) CreateQP(pd rdma.PD, attr rdma.QPAttr) (rdma.QP, error) {
	if e.qp != nil || e.over {
		return nil, fmt.Errorf("%w: the connection has its queue pair already, or is over", rdma.ErrInvalid)
	}
	q, err := newQueuePair(e.p.lastQP.Add(1), &e.p.opt, pd, attr)
	if err != nil {
		return nil, err
	}
	e.qp = q
	return q, nil
}

// begin checks what Accept and Connect have in common, and bounds the exchange. The function that it returns ends that.
func (e *endpoint) begin(ctx context.Context, p *rdma.ConnParams, room int) (func(), error) {
	if e.over {
		return nil, rdma.ErrClosed
	}
	switch {
	case e.qp == nil:
		return nil, fmt.Errorf("%w: no queue pair", rdma.ErrInvalid)
	case len(p.PrivateData) > room:
		return nil, fmt.Errorf("%w: %d bytes of private data, %d fit", rdma.ErrInvalid, len(p.PrivateData), room)
	case p.IRD < 0 || p.IRD > MaxDepth || p.ORD < 0 || p.ORD > MaxDepth:
		return nil, fmt.Errorf("%w: IRD %d, ORD %d", rdma.ErrInvalid, p.IRD, p.ORD)
	}
	e.over = true
	return bound(ctx, e.sock.nc, e.p.opt.StartupTimeout), nil
}

// bound makes the reads and writes of nc fail after a time, or when ctx ends, until the function that it returns is called.
func bound(ctx context.Context, nc net.Conn, d time.Duration) func() {
	nc.SetDeadline(time.Now().Add(d))
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	return func() {
		if stop() {
			nc.SetDeadline(time.Time{})
		}
	}
}

// abandon ends a connection that could not be established.
func (e *endpoint) abandon() {
	e.over = true
	if e.qp != nil {
		e.qp.Disconnect()
	}
	e.sock.nc.Close()
}

// outcome prefers the reason of ctx.
func outcome(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// params are those of a frame.
func (f *frame) params() rdma.ConnParams {
	p := rdma.ConnParams{PrivateData: f.private, IRD: f.ird, ORD: f.ord, DepthUnknown: !f.enhanced}
	if f.ird == depthMask {
		p.IRD = MaxDepth
	}
	if f.ord == depthMask {
		p.ORD = MaxDepth
	}
	return p
}

// request implements rdma.Request.
type request struct {
	endpoint
	frame *frame
}

// Respond reads the MPA request of a connection that was accepted elsewhere, and of which surplus was read already: how one
// port serves more than iWARP, and how a stream becomes one (RFC 7145, 5.1). It owns nc unless it fails with
// an error; then nothing was sent, and the caller closes nc.
func (p *Provider) Respond(ctx context.Context, nc net.Conn, surplus []byte) (rdma.Request, error) {
	r := &request{endpoint: endpoint{p: p, sock: newSock(nc, surplus)}}
	end := bound(ctx, nc, p.opt.StartupTimeout)
	f, err := readFrame(r.sock, requestKey)
	end()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, outcome(ctx, err)
	}
	r.frame = f
	return r, nil
}

// Peer implements rdma.Request.
func (r *request) Peer() rdma.ConnParams { return r.frame.params() }

// Accept implements rdma.Request.
func (r *request) Accept(ctx context.Context, p rdma.ConnParams) error {
	end, err := r.begin(ctx, &p, r.frame.room())
	if err != nil {
		r.abandon()
		return err
	}
	reply, a := answer(r.frame, wish{crc: !r.p.opt.NoCRC, ird: p.IRD, ord: p.ORD}, p.PrivateData)
	_, err = r.sock.nc.Write(reply.append(nil, replyKey))
	end()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = r.qp.start(r.sock, a, false)
	}
	if err != nil {
		r.abandon()
		return outcome(ctx, fmt.Errorf("iwarp: accept: %w", err))
	}
	return nil
}

// Reject implements rdma.Request.
func (r *request) Reject(private []byte) error {
	if r.over {
		return rdma.ErrClosed
	}
	if len(private) > r.frame.room() {
		return fmt.Errorf("%w: %d bytes of private data", rdma.ErrInvalid, len(private))
	}
	reply := &frame{reject: true, enhanced: r.frame.enhanced, revision: r.frame.revision, ird: r.frame.ord, ord: r.frame.ird, private: private}
	r.sock.nc.SetWriteDeadline(time.Now().Add(r.p.opt.StartupTimeout))
	_, err := r.sock.nc.Write(reply.append(nil, replyKey))
	r.abandon()
	return err
}

// dialer implements rdma.Dialer.
type dialer struct{ endpoint }

// Resolve implements rdma.Provider. The TCP connection is made here.
func (p *Provider) Resolve(ctx context.Context, address string) (rdma.Dialer, error) {
	d := net.Dialer{Timeout: p.opt.StartupTimeout}
	nc, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return p.Initiate(nc, nil), nil
}

// Initiate makes an iWARP connection of one that exists already, and of which surplus was read. It owns nc.
func (p *Provider) Initiate(nc net.Conn, surplus []byte) rdma.Dialer {
	return &dialer{endpoint{p: p, sock: newSock(nc, surplus)}}
}

// Close implements rdma.Dialer.
func (d *dialer) Close() error {
	if !d.over {
		d.abandon()
	}
	return nil
}

// Connect implements rdma.Dialer.
func (d *dialer) Connect(ctx context.Context, p rdma.ConnParams) (rdma.ConnParams, error) {
	o := &d.p.opt
	ask := &frame{crc: !o.NoCRC, revision: uint8(o.Revision), enhanced: o.Revision >= 2, ird: p.IRD, ord: p.ORD, private: p.PrivateData}
	if o.PeerToPeer {
		ask.peer, ask.rtr = true, o.RTR
		if p.ORD == 0 {
			ask.rtr &^= RTRRead
		}
	}
	end, err := d.begin(ctx, &p, ask.room())
	if err != nil {
		d.abandon()
		return rdma.ConnParams{}, err
	}
	reply, err := d.exchange(ask)
	end()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		d.abandon()
		return rdma.ConnParams{}, outcome(ctx, fmt.Errorf("iwarp: connect: %w", err))
	}
	peer := reply.params()
	if reply.reject {
		d.abandon()
		return peer, &rdma.RejectedError{Peer: peer}
	}
	a, terminate, err := conclude(ask, reply, wish{crc: !o.NoCRC, ird: p.IRD, ord: p.ORD})
	if terminate != nil {
		var s sender
		s.init(a.crc, a.markers, minULPDU)
		s.segment(&segment{op: opTerminate, last: true, queue: queueTerminate, msn: 1}, appendTerminate(nil, *terminate, nil))
		d.sock.nc.SetWriteDeadline(time.Now().Add(finishTimeout))
		d.sock.nc.Write(s.out)
	}
	if err == nil {
		err = d.qp.start(d.sock, a, true)
	}
	if err != nil {
		d.abandon()
		return peer, fmt.Errorf("iwarp: connect: %w", err)
	}
	return peer, nil
}

func (d *dialer) exchange(ask *frame) (*frame, error) {
	if _, err := d.sock.nc.Write(ask.append(nil, requestKey)); err != nil {
		return nil, err
	}
	return readFrame(d.sock, replyKey)
}

// listener implements rdma.Listener.
type listener struct {
	p       *Provider
	l       net.Listener
	ready   chan *request
	closed  chan struct{}
	once    sync.Once
	done    sync.WaitGroup
	mu      sync.Mutex // guards pending
	pending map[net.Conn]struct{}
}

// Listen implements rdma.Provider.
func (p *Provider) Listen(ctx context.Context, address string) (rdma.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return p.Serve(l), nil
}

// Serve makes an iWARP listener of one of TCP, which it owns.
func (p *Provider) Serve(l net.Listener) rdma.Listener {
	x := &listener{p: p, l: l, ready: make(chan *request), closed: make(chan struct{}), pending: make(map[net.Conn]struct{})}
	x.done.Add(1)
	go x.accept()
	return x
}

// Addr implements rdma.Listener.
func (l *listener) Addr() net.Addr { return l.l.Addr() }

// Accept implements rdma.Listener.
func (l *listener) Accept(ctx context.Context) (rdma.Request, error) {
	select {
	case r := <-l.ready:
		return r, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close implements rdma.Listener.
func (l *listener) Close() error {
	var err error
	l.once.Do(func() {
		close(l.closed)
		err = l.l.Close()
		l.mu.Lock()
		for nc := range l.pending {
			nc.Close()
		}
		l.mu.Unlock()
		l.done.Wait()
	})
	return err
}

// accept takes connections. Each waits for its request on its own, so that none holds up others; beyond
// MaxPending, and when the process is out of descriptors, new ones are dropped.
func (l *listener) accept() {
	defer l.done.Done()
	for delay := time.Duration(0); ; {
		nc, err := l.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			select {
			case <-time.After(delay):
			case <-l.closed:
				return
			}
			continue
		}
		delay = 0
		if !l.enter(nc) {
			nc.Close()
			continue
		}
		l.done.Add(1)
		go l.respond(nc)
	}
}

func (l *listener) enter(nc net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return false
	default:
	}
	if len(l.pending) >= l.p.opt.MaxPending {
		return false
	}
	l.pending[nc] = struct{}{}
	return true
}

func (l *listener) respond(nc net.Conn) {
	defer l.done.Done()
	r, err := l.p.Respond(context.Background(), nc, nil)
	if err == nil {
		select {
		case l.ready <- r.(*request):
		case <-l.closed:
			err = net.ErrClosed
		}
	}
	l.mu.Lock()
	delete(l.pending, nc)
	l.mu.Unlock()
	if err != nil {
		nc.Close()
	}
}
