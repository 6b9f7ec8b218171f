package gateway

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another process uses the data directory.
var ErrLocked = errors.New("gateway: data directory is in use")

// dirLock holds a data directory for this process. The kernel gives it back when the
// process ends, however it ends.
type dirLock struct{ f *os.File }

// lockDir makes the directory if it is missing and locks it.
func lockDir(dir string) (*dirLock, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner, _ := io.ReadAll(io.LimitReader(f, 32))
		_ = f.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("data directory %s cannot be locked: %w: it must be on a local file system", dir, err)
		}
		who := "another process"
		if pid := strings.TrimSpace(string(owner)); pid != "" {
			who = "process " + pid
		}
		return nil, fmt.Errorf("%w: %s is held by %s: stop it, or use another --data-dir", ErrLocked, dir, who)
	}
	// The number is for people; the lock is what counts.
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	}
	return &dirLock{f}, nil
}

// release gives the directory back.
func (l *dirLock) release() error { return l.f.Close() }
