// Package tgtd runs the Linux SCSI target framework's user-space daemon for interoperability tests.
package tgtd

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
)

// Names of what Start sets up.
const (
	Target     = "iqn.2026-01.com.example:tgt"
	CHAPTarget = "iqn.2026-01.com.example:tgt-chap"
	User       = "joe"
	Secret     = "a-secret-of-21-bytes!"
	LUN        = 1 // LUN 0 is tgtd's controller
)

// Server is a running tgtd with two targets: Target is open to all, CHAPTarget wants
// User and Secret. Each has one file-backed LUN.
type Server struct {
	Portal string
	Size   int64 // of each LUN, bytes

	t       testing.TB
	control string
	images  [2]string
	log     bytes.Buffer
	daemon  *exec.Cmd
	exited  chan struct{}
}

var serial atomic.Int32

// Start runs tgtd on a free loopback port until the test ends. It skips the test if tgtd is not
// installed, and fails it instead if ISERGATE_REQUIRE_ALL=1.
func Start(t testing.TB) *Server {
	t.Helper()
	for _, tool := range []string{"tgtd", "tgtadm"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
				t.Fatalf("%v, and ISERGATE_REQUIRE_ALL=1", err)
			}
			t.Skipf("%v (Debian package tgt)", err)
		}
	}
	if os.Geteuid() != 0 {
		if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
			t.Fatal("tgtd needs root, and ISERGATE_REQUIRE_ALL=1")
		}
		t.Skip("tgtd needs root")
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	portal := free.Addr().String()
	free.Close()
	s := &Server{images: [2]string{filepath.Join(t.TempDir(), "lun"), filepath.Join(t.TempDir(), "lun")},
		Portal: portal, Size: 64 << 20, t: t, control: strconv.Itoa(1000 + (os.Getpid()*16+int(serial.Add(1)))%29000)}
	for _, image := range s.images {
		f, err := os.Create(image)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(s.Size); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() && s.log.Len() > 0 {
			t.Logf("tgtd: %s", s.log.Bytes())
		}
	})
	s.Restart()
	return s
}

// Kill ends the daemon with SIGKILL. What it acknowledged is in its image files.
func (s *Server) Kill() {
	if s.daemon == nil {
		return
	}
	s.daemon.Process.Kill()
	<-s.exited
	s.daemon = nil
	os.Remove("/var/run/tgtd/socket." + s.control)
	os.Remove("/var/run/tgtd/socket." + s.control + ".lock")
}

// Restart runs the daemon again, on the same portal and images.
func (s *Server) Restart() {
	s.t.Helper()
	s.daemon = exec.Command("tgtd", "-f", "-C", s.control, "--iscsi", "portal="+s.Portal)
	s.daemon.Stdout, s.daemon.Stderr = &s.log, &s.log
	if err := s.daemon.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.exited = make(chan struct{})
	go func(d *exec.Cmd, exited chan struct{}) {
		d.Wait()
		close(exited)
	}(s.daemon, s.exited)
	deadline := time.After(20 * time.Second)
	for {
		if _, err := s.admin("--op", "show", "--mode", "sys"); err == nil {
			break
		}
		select {
		case <-s.exited:
			s.t.Fatalf("tgtd ended: %s", s.log.Bytes())
		case <-deadline:
			s.t.Fatal("tgtd does not come up")
		case <-time.After(20 * time.Millisecond):
		}
	}
	for i, name := range []string{Target, CHAPTarget} {
		tid := strconv.Itoa(i + 1)
		s.must("--op", "new", "--mode", "target", "--tid", tid, "-T", name)
		s.must("--op", "new", "--mode", "logicalunit", "--tid", tid, "--lun", strconv.Itoa(LUN), "-b", s.images[i])
		s.must("--op", "update", "--mode", "logicalunit", "--tid", tid, "--lun", strconv.Itoa(LUN), "--params", "thin_provisioning=1")
		s.must("--op", "bind", "--mode", "target", "--tid", tid, "-I", "ALL")
	}
	s.must("--op", "new", "--mode", "account", "--user", User, "--password", Secret)
	s.must("--op", "bind", "--mode", "account", "--tid", "2", "--user", User)
}

// Set changes a target parameter of the open target, such as InitialR2T or HeaderDigest.
func (s *Server) Set(name, value string) {
	s.t.Helper()
	s.must("--op", "update", "--mode", "target", "--tid", "1", "--name", name, "--value", value)
}

func (s *Server) admin(args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "tgtadm", append([]string{"-C", s.control, "--lld", "iscsi"}, args...)...).CombinedOutput()
	if err != nil {
		return out, fmt.Errorf("tgtadm %q: %w: %s", args, err, out)
	}
	return out, nil
}

func (s *Server) must(args ...string) {
	s.t.Helper()
	if _, err := s.admin(args...); err != nil {
		s.t.Fatal(err)
	}
}
