package tcp

import (
	"io"
	"net"
	"os"
	"syscall"
)

// lateRead reads from a connection into a part of a buffer that is chosen when bytes are there, not when waiting for them begins: by then it
// may be known where they belong.
type lateRead = *system

type system struct {
	raw    syscall.RawConn
	choose func(p []byte, need int) []byte
	fn     func(fd uintptr) bool

	p    []byte
	need int
	n    int
	err  error
}

// newLateRead returns nil if the connection has no descriptor.
func newLateRead(nc net.Conn, choose func(p []byte, need int) []byte) lateRead {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	s := &system{raw: raw, choose: choose}
	s.fn = s.try
	return s
}

func (s *system) read(p []byte, need int) (int, error) {
	s.p, s.need, s.n, s.err = p, need, 0, nil
	if err := s.raw.Read(s.fn); err != nil {
		return 0, err
	}
	return s.n, s.err
}

// try reads without waiting; false if there is nothing.
func (s *system) try(fd uintptr) bool {
	for {
		n, err := syscall.Read(int(fd), s.choose(s.p, s.need))
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			s.err = os.NewSyscallError("read", err)
		case n == 0:
			s.err = io.EOF
		default:
			s.n = n
		}
		return true
	}
}
