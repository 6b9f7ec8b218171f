package portal

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/tcp"
)

// stream is a connection whose login is iSCSI over TCP, as RFC 7145, 5.1.2 has it. If that negotiates RDMAExtensions=Yes, it is iSER
// over the same TCP connection from the final Login Response on; if not, it stays what it is. It implements iscsi.Datamover.
type stream struct {
	l       *Listener
	tcp     *tcp.Conn
	numbers iscsi.Numbers
	iser    atomic.Pointer[iser.Conn] // once the connection has changed over

	mu     sync.Mutex
	closed bool               // guarded by mu
	cancel context.CancelFunc // guarded by mu; ends a change that is under way
}

var _ iscsi.Datamover = (*stream)(nil)

func newStream(l *Listener, nc net.Conn, read []byte) *stream {
	return &stream{l: l, tcp: tcp.NewConnAfter(nc, read)}
}

// now is who carries the connection.
func (s *stream) now() iscsi.Datamover {
	if c := s.iser.Load(); c != nil {
		return c
	}
	return s.tcp
}

// Traits implements iscsi.Datamover.
func (s *stream) Traits() iscsi.Traits {
	if c := s.iser.Load(); c != nil {
		return c.Traits()
	}
	return iscsi.Traits{Transport: "tcp", RDMA: true, RDMARequired: s.l.opt.Transport == TransportISER}
}

// Start implements iscsi.Datamover.
func (s *stream) Start(n iscsi.Numbers) {
	s.numbers = n
	s.tcp.Start(n)
}

// Enable implements iscsi.Datamover. With RDMAExtensions it takes what the connection needs first (ISER-10), so that a lack of
// it is answered by the Login Response, and returns when the initiator's MPA request has been accepted.
func (s *stream) Enable(p *iscsi.Parameters, final *iscsi.PDU) error {
	if !p.RDMAExtensions {
		return s.tcp.Enable(p, final)
	}
	ctx, cancel := context.WithTimeout(s.l.ctx, s.l.opt.Timeout)
	defer cancel()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return iscsi.ErrClosed
	}
	s.cancel = cancel
	s.mu.Unlock()

	prepared, err := s.l.opt.ISER.target.Prepare(ctx, p)
	if err != nil {
		s.l.result(byStream, outcome(err))
		return err
	}
	c, err := s.change(ctx, prepared, final)
	if err != nil {
		return err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel = nil
	if s.closed {
		c.Close(false)
		return iscsi.ErrClosed
	}
	s.iser.Store(c)
	return nil
}

// change sends the final Login Response and makes the rest of the connection iWARP.
func (s *stream) change(ctx context.Context, prepared *iser.Prepared, final *iscsi.PDU) (*iser.Conn, error) {
	nc, surplus, err := s.tcp.HandOver(final)
	if err != nil {
		prepared.Release()
		return nil, err
	}
	r, err := s.l.opt.ISER.respond(ctx, nc, surplus)
	if err != nil {
		nc.Close()
		prepared.Release()
		s.l.result(byStream, noRequest)
		return nil, fmt.Errorf("after a login with RDMAExtensions=Yes: %w", s.why(err))
	}
	c, err := prepared.Accept(ctx, r, s.numbers)
	if err != nil {
		s.l.result(byStream, outcome(err))
		return nil, s.why(err)
	}
	s.l.result(byStream, established)
	s.l.opt.Metrics.watch(r)
	return c, nil
}

// why prefers that the connection was closed.
func (s *stream) why(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed && !errors.Is(err, iscsi.ErrClosed) {
		return errors.Join(iscsi.ErrClosed, err)
	}
	return err
}

// Close implements iscsi.Datamover.
func (s *stream) Close(graceful bool) error {
	s.mu.Lock()
	s.closed = true
	if s.cancel != nil {
		s.cancel()
	}
	c := s.iser.Load()
	s.mu.Unlock()
	if c != nil {
		return c.Close(graceful)
	}
	return s.tcp.Close(graceful)
}

// The rest is for whoever carries the connection.

// LocalAddr implements iscsi.Datamover.
func (s *stream) LocalAddr() net.Addr { return s.tcp.LocalAddr() }

// RemoteAddr implements iscsi.Datamover.
func (s *stream) RemoteAddr() net.Addr { return s.tcp.RemoteAddr() }

// Receive implements iscsi.Datamover.
func (s *stream) Receive() (*iscsi.PDU, error) { return s.now().Receive() }

// Received implements iscsi.Datamover.
func (s *stream) Received() uint64 { return s.now().Received() }

// SendControl implements iscsi.Datamover.
func (s *stream) SendControl(p *iscsi.PDU) error { return s.now().SendControl(p) }

// NoticeKeyValues implements iscsi.Datamover.
func (s *stream) NoticeKeyValues(p *iscsi.Parameters) { s.now().NoticeKeyValues(p) }

// PutData implements iscsi.Datamover.
func (s *stream) PutData(ctx context.Context, t *iscsi.Task, from [][]byte, off int64) error {
	return s.now().PutData(ctx, t, from, off)
}

// GetData implements iscsi.Datamover.
func (s *stream) GetData(ctx context.Context, t *iscsi.Task, into [][]byte, off int64) error {
	return s.now().GetData(ctx, t, into, off)
}

// Finish implements iscsi.Datamover.
func (s *stream) Finish(ctx context.Context, t *iscsi.Task) error { return s.now().Finish(ctx, t) }

// Release implements iscsi.Datamover.
func (s *stream) Release(t *iscsi.Task) { s.now().Release(t) }

// Discard implements iscsi.Datamover.
func (s *stream) Discard(transfer any) { s.now().Discard(transfer) }
