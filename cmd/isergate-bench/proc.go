package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// launcher starts programs that die with this process, in whatever way it ends. The kernel sends the
// signal for that when the thread that started the program ends, so one thread, which lives as long as
// the launcher, starts them all.
type launcher struct {
	starts  chan func()
	stopped chan struct{}

	mu      sync.Mutex
	running map[*process]bool // guarded by mu
}

func newLauncher() *launcher {
	l := &launcher{starts: make(chan func()), stopped: make(chan struct{}), running: map[*process]bool{}}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer close(l.stopped)
		for start := range l.starts {
			start()
		}
	}()
	return l
}

// close kills what still runs. Nothing may be started afterwards.
func (l *launcher) close() {
	l.mu.Lock()
	left := make([]*process, 0, len(l.running))
	for p := range l.running {
		left = append(left, p)
	}
	l.mu.Unlock()
	for _, p := range left {
		p.kill()
	}
	close(l.starts)
	<-l.stopped
}

// process is a program that a launcher started.
type process struct {
	name string
	cmd  *exec.Cmd
	log  *os.File      // nil if its output goes elsewhere
	done chan struct{} // closed when it has ended
	err  error         // its end, valid once done is closed
}

// start runs cmd. Without a Stdout of its own its output goes to the file name.log in dir.
func (l *launcher) start(name, dir string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, done: make(chan struct{})}
	if cmd.Stdout == nil {
		log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
		if err != nil {
			return nil, err
		}
		p.log, cmd.Stdout, cmd.Stderr = log, log, log
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	l.starts <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		if p.log != nil {
			p.log.Close()
		}
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	l.mu.Lock()
	l.running[p] = true
	l.mu.Unlock()
	go func() {
		p.err = cmd.Wait()
		l.mu.Lock()
		delete(l.running, p)
		l.mu.Unlock()
		close(p.done)
	}()
	return p, nil
}

// kill ends the process at once and waits for that. It may be called twice.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
	if p.log != nil {
		p.log.Close()
	}
}

// stop asks the process to end in good order, and kills it if it takes longer than patience.
func (p *process) stop(patience time.Duration) error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	<-p.done
	err := p.err
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", p.name, err, p.tail())
	}
	p.kill()
	return err
}

// ended is an error once the process is gone.
func (p *process) ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %v: %s", p.name, p.err, p.tail())
	default:
		return nil
	}
}

// tail returns the end of the output on one line.
func (p *process) tail() string {
	if p.log == nil {
		return ""
	}
	text, _ := os.ReadFile(p.log.Name())
	return strings.Join(strings.Fields(string(text[max(0, len(text)-1000):])), " ")
}

// tick is the unit of CPU times in /proc; it is 100 a second on all Linux architectures that Go runs on.
const tick = time.Second / 100

// stat is what /proc/PID/stat says, as far as it matters here (proc_pid_stat(5)).
type stat struct {
	pid, parent int
	own, waited time.Duration // CPU of all its threads; CPU of children that it has waited for
}

var errStat = errors.New("not the format of /proc/PID/stat")

// parseStat reads the text of /proc/PID/stat.
func parseStat(text []byte) (stat, error) {
	// The second field is the name in parentheses, which may hold blanks and parentheses.
	first, last := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if first < 1 || last < first {
		return stat{}, errStat
	}
	fields := strings.Fields(string(text[last+1:]))
	if len(fields) < 15 {
		return stat{}, errStat
	}
	var faults []error
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		faults = append(faults, err)
		return n
	}
	// fields[0] is field 3 of the manual.
	s := stat{
		pid:    int(number(strings.TrimSpace(string(text[:first])))),
		parent: int(number(fields[1])),
		own:    time.Duration(number(fields[11])+number(fields[12])) * tick,
		waited: time.Duration(number(fields[13])+number(fields[14])) * tick,
	}
	if err := errors.Join(faults...); err != nil {
		return stat{}, fmt.Errorf("%w: %w", errStat, err)
	}
	return s, nil
}

// processes reads /proc/PID/stat of all processes. One that ends meanwhile is left out.
func processes() ([]stat, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var all []stat
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		s, err := parseStat(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, s)
	}
	return all, nil
}

// descendants returns the stat of pid and of everything below it.
func descendants(all []stat, pid int) []stat {
	var out []stat
	for _, s := range all {
		switch {
		case s.pid == pid:
			out = append(out, s)
		case s.parent == pid:
			out = append(out, descendants(all, s.pid)...)
		}
	}
	return out
}

// cpu returns the CPU time, user and system, that a process and its children have used, to 10 ms. What the kernel does
// for it in threads of its own, such as writing back the page cache, is not in it.
func cpu(pid int) (time.Duration, error) {
	all, err := processes()
	if err != nil {
		return 0, err
	}
	tree := descendants(all, pid)
	if len(tree) == 0 {
		return 0, fmt.Errorf("process %d is gone", pid)
	}
	var sum time.Duration
	for _, s := range tree {
		sum += s.own + s.waited
	}
	return sum, nil
}
