package s3test

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// envParent makes the test binary a process that starts a server and gets killed.
const envParent = "ISERGATE_TEST_S3_PARENT"

var longRunning = []string{"/bin/sh", "-c", "echo started; exec sleep 100000"}

func TestMain(m *testing.M) {
	if log := os.Getenv(envParent); log != "" {
		if _, err := startProcess(spec{log: log, argv: longRunning}); err != nil {
			panic(err)
		}
		select {}
	}
	os.Exit(m.Run())
}

// startWithFifo runs start, which lets longRunning write to a pipe, and returns the pipe's
// other end once it runs. The pipe ends when all that hold it have.
func startWithFifo(t *testing.T, start func(fifo string)) *bufio.Reader {
	t.Helper()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	// Both ends, so that neither side's open waits; the writing one is closed below.
	both, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	start(fifo)
	out := bufio.NewReader(r)
	if line, err := out.ReadString('\n'); line != "started\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	both.Close()
	return out
}

// TestDiesWithParent: nothing of a server outlives a process that was killed.
func TestDiesWithParent(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	out := startWithFifo(t, func(fifo string) {
		cmd.Env = append(os.Environ(), envParent+"="+fifo)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	})
	cmd.Process.Kill()
	cmd.Wait()
	if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
		t.Fatalf("%q, %v", rest, err)
	}
}

func TestKill(t *testing.T) {
	var p *process
	out := startWithFifo(t, func(fifo string) {
		var err error
		if p, err = startProcess(spec{log: fifo, argv: longRunning}); err != nil {
			t.Fatal(err)
		}
	})
	if err := p.suspend(); err != nil {
		t.Error(err)
	}
	if err := p.resume(); err != nil {
		t.Error(err)
	}
	p.kill()
	p.kill()
	if _, err := io.ReadAll(out); err != nil {
		t.Fatal(err)
	}
	if err := p.suspend(); err == nil {
		t.Error("suspended a dead process")
	}
}

func TestEndIsSeen(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	p, err := startProcess(spec{log: log, argv: []string{"/bin/sh", "-c", "echo no space; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	<-p.done
	if p.err == nil || p.tail() != "no space" {
		t.Errorf("%v, %q", p.err, p.tail())
	}
	p.kill()
}
