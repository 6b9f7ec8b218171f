package iwarp

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxIovec is the most pieces of one writev.
const maxIovec = 1024

// system does vectored I/O on the descriptor without waiting in the kernel, so that memory is only touched while the caller's
// locks are held. Reading and writing are used by one goroutine each.
//
// The scheduler is not told of these system calls (RawSyscall): none waits, and none moves more than a batch, so they are over in 0.2 ms. Telling it costs as much as a small one does when
// little else goes on, because its monitor has to be woken each time; and of a large one the monitor takes the processor away, which has to be got back.
type system struct {
	readFn, writeFn func(fd uintptr) bool

	r       *receiver
	readN   int
	readErr error

	w       *flight
	wait    bool
	writeN  int
	writErr error

	riov, wiov []unix.Iovec

	infoFn func(fd uintptr)
	info   unix.TCPInfo
}

// vector makes the argument of readv and writev of pieces that are not empty.
func vector(iov []unix.Iovec, pieces [][]byte) []unix.Iovec {
	iov = iov[:0]
	for _, b := range pieces {
		v := unix.Iovec{Base: &b[0]}
		v.SetLen(len(b))
		iov = append(iov, v)
	}
	return iov
}

// open returns nil if the descriptor cannot be had.
func (s *system) open(t *net.TCPConn) syscall.RawConn {
	raw, err := t.SyscallConn()
	if err != nil {
		return nil
	}
	s.readFn, s.writeFn, s.infoFn = s.doRead, s.doWrite, s.doInfo
	return raw
}

func (s *system) read(raw syscall.RawConn, r *receiver) error {
	s.r, s.readN, s.readErr = r, 0, nil
	if err := raw.Read(s.readFn); err != nil {
		return err
	}
	if s.readErr != nil {
		return s.readErr
	}
	if s.readN == 0 {
		return io.EOF
	}
	return nil
}

func (s *system) doRead(fd uintptr) bool {
	take(s.r)
	for {
		n, err := s.readv(int(fd))
		switch err {
		case 0:
			s.readN = n
			return true
		case unix.EINTR:
		case unix.EAGAIN:
			if !s.r.buffered() {
				(*sock)(nil).release(s.r)
			}
			return false
		default:
			s.readErr = os.NewSyscallError("readv", err)
			return true
		}
	}
}

// readv reads into the places of the receiver. A window is looked up, written to and summed up under the lock that invalidation takes.
func (s *system) readv(fd int) (int, syscall.Errno) {
	if direct, window := s.r.direct(); direct && window {
		s.r.tags.mu.Lock()
		defer s.r.tags.mu.Unlock()
	}
	places := s.r.places()
	var n uintptr
	var errno syscall.Errno
	if len(places) == 1 {
		n, _, errno = syscall.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&places[0][0])), uintptr(len(places[0])))
	} else {
		s.riov = vector(s.riov, places)
		n, _, errno = syscall.RawSyscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&s.riov[0])), uintptr(len(s.riov)))
		clear(s.riov)
	}
	if errno != 0 {
		return 0, errno
	}
	s.r.filled(int(n))
	return int(n), 0
}

func (s *system) write(raw syscall.RawConn, w *flight, wait bool) (int, error) {
	s.w, s.wait, s.writeN, s.writErr = w, wait, 0, nil
	if err := raw.Write(s.writeFn); err != nil {
		return s.writeN, err
	}
	return s.writeN, s.writErr
}

func (s *system) doWrite(fd uintptr) bool {
	for len(s.w.pending()) > 0 {
		n, err, sound := s.writev(fd)
		if !sound {
			s.writErr = errRevoked
			return true
		}
		switch err {
		case 0:
			s.writeN += n
			s.w.wrote(n)
		case unix.EINTR:
		case unix.EAGAIN:
			return !s.wait
		default:
			s.writErr = os.NewSyscallError("writev", err)
			return true
		}
	}
	return true
}

// writev writes what is pending, what lies in windows only if they are bound, and under the lock that invalidation takes.
func (s *system) writev(fd uintptr) (n int, errno syscall.Errno, sound bool) {
	if len(s.w.refs) > 0 {
		s.w.tags.mu.Lock()
		defer s.w.tags.mu.Unlock()
		if !s.w.sound() {
			return 0, 0, false
		}
	}
	v := s.w.pending()
	var r uintptr
	if len(v) == 1 {
		r, _, errno = syscall.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&v[0][0])), uintptr(len(v[0])))
	} else {
		s.wiov = vector(s.wiov, v[:min(len(v), maxIovec)])
		r, _, errno = syscall.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&s.wiov[0])), uintptr(len(s.wiov)))
		clear(s.wiov)
	}
	return int(r), errno, true
}

// segmentSize is asked by who writes, and by start.
func (s *system) segmentSize(raw syscall.RawConn) int {
	s.info.Snd_mss = 0
	raw.Control(s.infoFn)
	return int(s.info.Snd_mss)
}

func (s *system) doInfo(fd uintptr) {
	size := uint32(unsafe.Sizeof(s.info))
	if _, _, err := syscall.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&s.info)), uintptr(unsafe.Pointer(&size)), 0); err != 0 {
		s.info.Snd_mss = 0
	}
}
