package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OS returns the file system of the machine.
func OS() FS { return osFS{} }

type osFS struct{}

func (osFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.IsDir() {
		err = &fs.PathError{Op: "open", Path: name, Err: syscall.EISDIR}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return &osFile{f: f, fd: int(f.Fd())}, nil
}

func (osFS) Remove(name string) error { return os.Remove(name) }

func (osFS) Rename(oldName, newName string) error {
	if filepath.Dir(oldName) != filepath.Dir(newName) {
		return &os.LinkError{Op: "rename", Old: oldName, New: newName, Err: syscall.EXDEV}
	}
	return os.Rename(oldName, newName)
}

func (osFS) ReadDir(dir string) ([]Info, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	infos := make([]Info, 0, len(entries))
	for _, e := range entries {
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		infos = append(infos, infoOf(st))
	}
	return infos, nil
}

func infoOf(st fs.FileInfo) Info {
	i := Info{Name: st.Name(), Dir: st.IsDir()}
	if !i.Dir {
		i.Size = st.Size()
	}
	return i
}

func (s osFS) MkdirAll(dir string, perm fs.FileMode) error {
	st, err := os.Stat(dir)
	if err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := s.MkdirAll(parent, perm); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return s.SyncDir(parent)
}

func (osFS) SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

func (osFS) Stat(name string) (Info, error) {
	st, err := os.Stat(name)
	if err != nil {
		return Info{}, err
	}
	return infoOf(st), nil
}

func (osFS) Free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// maxIov is the system's limit of vectors in one call (IOV_MAX).
const maxIov = 1024

// maxCall bounds the bytes of one call: the system stops at 2 GiB - 4 KiB.
const maxCall = 1 << 30

type osFile struct {
	f *os.File

	// mu keeps the descriptor from being closed, and its number from being reused, under
	// a system call that is made on fd directly.
	mu     sync.RWMutex
	fd     int
	closed bool

	iov []unix.Iovec // of the one WritevAt in progress
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error)  { return f.f.ReadAt(p, off) }
func (f *osFile) WriteAt(p []byte, off int64) (int, error) { return f.f.WriteAt(p, off) }
func (f *osFile) Sync() error                              { return f.f.Sync() }
func (f *osFile) Truncate(size int64) error                { return f.f.Truncate(size) }

func (f *osFile) Size() (int64, error) {
	st, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

func (f *osFile) Close() error {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	return f.f.Close()
}

func (f *osFile) SyncData() error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return f.fault("fdatasync", fs.ErrClosed)
	}
	for {
		err := unix.Fdatasync(f.fd)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return f.fault("fdatasync", err)
		}
		return nil
	}
}

// vectors are the descriptors of one system call; the readers of all files share them.
var vectors = sync.Pool{New: func() any { return new([]unix.Iovec) }}

func (f *osFile) ReadvAt(bufs [][]byte, off int64) (int, error) {
	iov := vectors.Get().(*[]unix.Iovec)
	defer vectors.Put(iov)
	return f.vectored("preadv", unix.SYS_PREADV, io.EOF, iov, bufs, off)
}

func (f *osFile) WritevAt(bufs [][]byte, off int64) (int, error) {
	return f.vectored("pwritev", unix.SYS_PWRITEV, io.ErrShortWrite, &f.iov, bufs, off)
}

// vectored transfers all of bufs. nothing is the error when the system transfers no byte.
func (f *osFile) vectored(op string, call uintptr, nothing error, vectors *[]unix.Iovec, bufs [][]byte, off int64) (int, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return 0, f.fault(op, fs.ErrClosed)
	}
	if off < 0 {
		return 0, f.fault(op, fmt.Errorf("negative offset %d", off))
	}
	total := 0
	skip := 0 // bytes of bufs[0] that are done
	for {
		// Gather as much as one call takes.
		iov, bytes := (*vectors)[:0], 0
		for i, b := range bufs {
			if i == 0 {
				b = b[skip:]
			}
			if len(b) == 0 {
				continue
			}
			if len(iov) == maxIov || bytes == maxCall {
				break
			}
			b = b[:min(len(b), maxCall-bytes)]
			v := unix.Iovec{Base: &b[0]}
			v.SetLen(len(b))
			iov, bytes = append(iov, v), bytes+len(b)
		}
		*vectors = iov
		if bytes == 0 {
			return total, nil
		}
		const longBits = 32 << (^uintptr(0) >> 63)
		n, _, errno := unix.Syscall6(call, uintptr(f.fd), uintptr(unsafe.Pointer(&iov[0])),
			uintptr(len(iov)), uintptr(off), uintptr(uint64(off)>>(longBits-1)>>1), 0)
		clear(iov)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return total, f.fault(op, errno)
		}
		if n == 0 {
			if nothing == io.EOF {
				return total, io.EOF
			}
			return total, f.fault(op, nothing)
		}
		total, off = total+int(n), off+int64(n)
		skip += int(n)
		for len(bufs) > 0 && skip >= len(bufs[0]) {
			skip -= len(bufs[0])
			bufs = bufs[1:]
		}
		if len(bufs) == 0 {
			return total, nil
		}
	}
}

func (f *osFile) fault(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.f.Name(), Err: err}
}
