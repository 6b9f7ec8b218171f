package iwarp

import (
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// readBytes is the size of a read buffer. It is only held while there is something in it, or where reads wait for other than TCP.
	readBytes = 320 << 10
	// plainBytes is how much of it is read into at a time, unless a wrong guess of what comes needs more.
	plainBytes = 64 << 10
)

var ins = sync.Pool{New: func() any { return new([readBytes]byte) }}

// sock drives a connection. raw is nil if it is not a TCP connection of the system; then reads go through the buffer and writes wait.
type sock struct {
	nc  net.Conn
	raw syscall.RawConn
	sys system
	// surplus is what was read of the connection before it was given to us.
	surplus []byte
}

func newSock(nc net.Conn, surplus []byte) *sock {
	s := &sock{nc: nc, surplus: surplus}
	if t, ok := nc.(*net.TCPConn); ok {
		s.raw = s.sys.open(t)
	}
	return s
}

// Read implements io.Reader for the MPA frame.
func (s *sock) Read(p []byte) (int, error) {
	if len(s.surplus) > 0 {
		n := copy(p, s.surplus)
		s.surplus = s.surplus[n:]
		return n, nil
	}
	return s.nc.Read(p)
}

// read gives r at least one byte.
func (s *sock) read(r *receiver) error {
	if s.raw != nil && len(s.surplus) == 0 {
		return s.sys.read(s.raw, r)
	}
	take(r)
	n, err := s.Read(r.space(plainBytes))
	r.to += n
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

// take makes sure that r has a buffer.
func take(r *receiver) {
	if r.buf == nil {
		r.buf = ins.Get().(*[readBytes]byte)[:]
		r.view, r.from, r.to = r.buf, 0, 0
	}
}

// release takes the buffer back from r.
func (s *sock) release(r *receiver) {
	if r.buf != nil {
		ins.Put((*[readBytes]byte)(r.buf))
		r.buf, r.view, r.from, r.to = nil, nil, 0, 0
	}
}

// write writes b, and says so to it. With a stall time of 0 it stops where it would wait; otherwise it fails if the peer reads
// nothing for so long.
func (s *sock) write(b *flight, stall time.Duration) (int, error) {
	if stall > 0 {
		s.nc.SetWriteDeadline(time.Now().Add(stall))
		defer s.nc.SetWriteDeadline(time.Time{})
	}
	if s.raw != nil {
		return s.sys.write(s.raw, b, stall > 0)
	}
	total := 0
	for len(b.pending()) > 0 {
		n, err := s.nc.Write(b.pending()[0])
		total += n
		b.wrote(n)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// linger ends our half and waits, for a bounded time, until the peer ends its own: a reset could destroy what it has not read (IWARP-61).
func (s *sock) linger() {
	half, ok := s.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	s.nc.SetReadDeadline(time.Now().Add(lingerTimeout))
	io.Copy(io.Discard, io.LimitReader(s.nc, lingerBytes))
}

// segmentSize is the size of TCP's segments.
func (s *sock) segmentSize() int {
	if s.raw != nil {
		if n := s.sys.segmentSize(s.raw); n > 0 {
			return n
		}
	}
	return defaultSegment
}

// defaultSegment is assumed where it cannot be known: Ethernet's.
const defaultSegment = 1448
