package iser

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/rdma"
)

// Accept takes a connection whose login will run in messages. It owns the request: on an error it was rejected. What it holds is
// one receive and two buffers for responses.
func (t *Target) Accept(ctx context.Context, req rdma.Request) (*Conn, error) {
	flags, err := peerFlags(req.Peer().PrivateData)
	if err != nil {
		return nil, reject(req, err)
	}
	bytes := slabBytes(loginBuffers, recvSize)
	if err := t.enter(bytes, true); err != nil {
		return nil, reject(req, err)
	}
	c := newConn(t, req)
	c.bytes, c.loginBytes = bytes, bytes
	c.invalidate = flags&cmNoInvalidate == 0 && !t.opt.NoSendInvalidate
	if c.login, err = t.slab(ctx, loginBuffers, recvSize); err != nil {
		c.abandon()
		return nil, reject(req, err)
	}
	for i := range loginBuffers {
		c.addBuffer(c.login.SGE(i, recvSize))
	}
	for i := range c.responses {
		c.responses[i].buffer = 1 + i
	}
	if err := c.establish(ctx, req, []int{0}); err != nil {
		return nil, err
	}
	return c, nil
}

// reject says no, with the same header as a yes.
func reject(req rdma.Request, err error) error {
	req.Reject([]byte{cmNoZeroBased | cmNoInvalidate, 0, 0, 0})
	return fmt.Errorf("iser: connection from %v rejected: %w", req.RemoteAddr(), err)
}

// Prepared is what full feature phase of one connection needs, taken before it becomes an RDMA connection (ISER-10, 11). It is used
// by one goroutine.
type Prepared struct {
	t      *Target
	params iscsi.Parameters
	memory phaseMemory
	count  int
	bytes  int64
	over   sync.Once
}

// Prepare takes what full feature phase of a connection with these parameters needs: to be called before the final Login
// Response of a stream-mode login is sent, after the initiator proved who it is. An error that is iscsi.ErrResources becomes login status 0302.
func (t *Target) Prepare(ctx context.Context, p *iscsi.Parameters) (*Prepared, error) {
	n, err := t.count(p)
	if err != nil {
		return nil, err
	}
	x := &Prepared{t: t, params: *p, count: n, bytes: phaseBytes(p, n)}
	if err := t.enter(x.bytes, false); err != nil {
		return nil, err
	}
	if x.memory, err = t.phase(ctx, p, n); err != nil {
		t.closing()
		t.leave(x.bytes)
		return nil, err
	}
	return x, nil
}

// count is how many receives a connection posts, if that is within bounds.
func (t *Target) count(p *iscsi.Parameters) (int, error) {
	n := receives(p)
	if n > t.opt.Receives {
		return 0, fmt.Errorf("%w: %d receives are needed for a window of %d commands, %d are allowed", iscsi.ErrResources, n, p.CommandWindow, t.opt.Receives)
	}
	return n, nil
}

// Release gives everything back, unless Accept was called. It may be called more than once.
func (p *Prepared) Release() {
	p.over.Do(func() {
		p.memory.close()
		p.t.closing()
		p.t.leave(p.bytes)
	})
}

// Accept takes the RDMA connection that the stream of a login became. The connection is in full feature phase: Start and Enable are
// not called. Numbers go on where the login left them. It owns the request, and uses p up.
func (p *Prepared) Accept(ctx context.Context, req rdma.Request, n iscsi.Numbers) (*Conn, error) {
	var c *Conn
	p.over.Do(func() {
		c = newConn(p.t, req)
		c.bytes = p.bytes
		c.hold(p.memory)
	})
	if c == nil {
		return nil, reject(req, rdma.ErrClosed)
	}
	if _, err := peerFlags(req.Peer().PrivateData); err != nil {
		c.abandon()
		return nil, reject(req, err)
	}
	c.numbers = n
	first := make([]int, p.count)
	for i := range first {
		first[i] = c.addBuffer(c.memory.recvs.SGE(i, recvSize))
	}
	c.fullFeature(&p.params)
	if err := c.establish(ctx, req, first); err != nil {
		return nil, err
	}
	return c, nil
}

// establish makes the queue pair, posts the first receives and answers the request.
func (c *Conn) establish(ctx context.Context, req rdma.Request, first []int) error {
	if err := c.create(req, first); err != nil {
		c.abandon()
		return reject(req, err)
	}
	o := &c.t.opt
	p := rdma.ConnParams{PrivateData: []byte{cmNoZeroBased, 0, 0, 0}, IRD: o.IRD, ORD: o.ORD}
	if req.Peer().DepthUnknown {
		p.ORD = min(p.ORD, unknownORD)
	}
	if !c.invalidate {
		p.PrivateData[0] |= cmNoInvalidate
	}
	if err := req.Accept(ctx, p); err != nil {
		c.abandon()
		return fmt.Errorf("iser: accept %v: %w", req.RemoteAddr(), err)
	}
	_, ord := c.qp.Depth()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.r.ord = ord
	return nil
}

func (c *Conn) create(req rdma.Request, first []int) (err error) {
	o := &c.t.opt
	depth := o.Receives + loginBuffers
	if c.recvCQ, err = o.Provider.CreateCQ(depth); err != nil {
		return err
	}
	if c.sendCQ, err = o.Provider.CreateCQ(sendDepth); err != nil {
		return err
	}
	attr := rdma.QPAttr{SendCQ: c.sendCQ, RecvCQ: c.recvCQ, MaxSend: sendDepth, MaxRecv: depth, MaxSendSGE: maxSGE, MaxRecvSGE: 1, MaxInline: inlineWrite, RecvAnyOrder: true}
	c.qp, err = req.CreateQP(c.t.pd, attr)
	if errors.Is(err, rdma.ErrInvalid) {
		// Adapters take less.
		attr.MaxInline = controlSize
		c.qp, err = req.CreateQP(c.t.pd, attr)
	}
	if err != nil {
		return err
	}
	c.inline = attr.MaxInline
	c.alive = ended{qp: c.qp}
	c.mu.Lock()
	c.freed = append(c.freed, first...)
	wrs := c.takeReceivesLocked()
	c.mu.Unlock()
	_, err = c.qp.PostRecv(wrs)
	return err
}

// listener makes an iscsi.Listener of one of RDMA.
type listener struct {
	t      *Target
	l      rdma.Listener
	ctx    context.Context
	cancel context.CancelFunc
}

// Listener accepts what l hands out, as Accept does. It owns l.
func (t *Target) Listener(l rdma.Listener) iscsi.Listener {
	x := &listener{t: t, l: l}
	x.ctx, x.cancel = context.WithCancel(context.Background())
	return x
}

// Accept implements iscsi.Listener. A connection that is rejected is logged, and is no error.
func (l *listener) Accept() (iscsi.Datamover, error) {
	for {
		req, err := l.l.Accept(l.ctx)
		if err != nil {
			if l.ctx.Err() != nil {
				err = net.ErrClosed
			}
			return nil, err
		}
		c, err := l.t.Accept(l.ctx, req)
		if err == nil {
			return c, nil
		}
		l.t.opt.Logger.Debug("iSER connection refused", "err", err)
	}
}

// Addr implements iscsi.Listener.
func (l *listener) Addr() net.Addr { return l.l.Addr() }

// Close implements iscsi.Listener.
func (l *listener) Close() error {
	l.cancel()
	return l.l.Close()
}
