package s3test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// spec is a program to run in the background.
type spec struct {
	log  string // file that gets its output
	env  []string
	argv []string
}

// process is a child that is killed when this process ends, in whatever way: a shell
// beside it waits for the end of a pipe that only this process holds open.
type process struct {
	spec spec
	cmd  *exec.Cmd
	pipe *os.File
	done chan struct{} // closed when it has ended
	err  error         // its end, valid once done is closed
}

const guard = `"$@" </dev/null 3<&- &
child=$!
exec 2>/dev/null
{ read -r _ <&3; kill -9 $child; } &
guard=$!
exec 3<&-
wait $child
status=$?
kill $guard
exit $status`

func startProcess(s spec) (*process, error) {
	log, err := os.OpenFile(s.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", append([]string{"-c", guard, "sh"}, s.argv...)...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{r}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("s3test: start %s: %w", s.argv[0], err)
	}
	p := &process{spec: s, cmd: cmd, pipe: w, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// kill ends the process at once and waits for that. It may be called twice.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	p.pipe.Close()
	<-p.done
}

// suspend returns once every thread of the program has stopped: the signal alone takes effect some time later.
func (p *process) suspend() error {
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for range 1000 {
		if p.stopped() {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
	return errors.New("s3test: the server does not stop")
}

// stopped reports whether all threads of the process group are stopped.
func (p *process) stopped() bool {
	group := strconv.Itoa(p.cmd.Process.Pid)
	members := 0
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range all {
		if f := statFields(name); len(f) < 3 || f[2] != group {
			continue
		}
		members++
		threads, _ := filepath.Glob(filepath.Join(filepath.Dir(name), "task/*/stat"))
		for _, thread := range threads {
			if f := statFields(thread); len(f) > 0 && f[0] != "T" && f[0] != "Z" {
				return false
			}
		}
	}
	return members > 0
}

// statFields are the fields of a /proc stat file behind the program's name: state, parent, process group, …; none if the
// process has ended.
func statFields(name string) []string {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
}

func (p *process) resume() error { return p.signal(syscall.SIGCONT) }

// signal reaches the whole process group.
func (p *process) signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return errors.New("s3test: server has ended")
	default:
		return syscall.Kill(-p.cmd.Process.Pid, sig)
	}
}

// tail returns the end of the output on one line.
func (p *process) tail() string {
	out, _ := os.ReadFile(p.spec.log)
	if len(out) > 1000 {
		out = out[len(out)-1000:]
	}
	return strings.Join(strings.Fields(string(out)), " ")
}
