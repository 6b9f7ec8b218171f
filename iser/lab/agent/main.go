// Command agent runs shell scripts in the lab's guest, for the host. It is process 1's
// only child: when the host goes, it ends, and the guest powers off.
//
// The device is a byte stream both ways. Each message is one line of JSON, as package lab
// documents it.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
)

// request is what the host says: run a script, or end one that runs.
type request struct {
	ID     int    `json:"id"`
	Script string `json:"script,omitempty"`
	Kill   bool   `json:"kill,omitempty"`
}

// reply is what the host hears: output as it comes, then one exit status.
type reply struct {
	ID     int    `json:"id"`
	Output []byte `json:"output,omitempty"`
	Exit   *int   `json:"exit,omitempty"`
}

// agent holds what runs.
type agent struct {
	mu     sync.Mutex // guards out and running
	out    *json.Encoder
	groups map[int]int // process group of each script, by request
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
}

func run(device string) error {
	// The device has no end of file to wait for, and no poll that Go's runtime could use.
	fd, err := syscall.Open(device, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", device, err)
	}
	port := os.NewFile(uintptr(fd), device)
	a := &agent{out: json.NewEncoder(port), groups: make(map[int]int)}
	a.send(reply{})
	in := json.NewDecoder(bufio.NewReader(port))
	for {
		var r request
		if err := in.Decode(&r); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if r.Kill {
			a.kill(r.ID)
			continue
		}
		a.script(r)
	}
}

func (a *agent) send(r reply) {
	a.mu.Lock()
	defer a.mu.Unlock()
	_ = a.out.Encode(r)
}

func (a *agent) kill(id int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if group, ok := a.groups[id]; ok {
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
}

// script starts one script; what it prints and how it ends is sent as it comes. The
// script can be killed from here on.
func (a *agent) script(r request) {
	failed := func(err error) {
		exit := 127
		a.send(reply{ID: r.ID, Output: []byte(err.Error() + "\n")})
		a.send(reply{ID: r.ID, Exit: &exit})
	}
	read, write, err := os.Pipe()
	if err != nil {
		failed(err)
		return
	}
	cmd := exec.Command("/bin/bash", "-c", r.Script, "script")
	cmd.Dir = "/root"
	cmd.Env = append(os.Environ(), "BASH_ENV=/lab/lib.sh")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdout, cmd.Stderr = write, write
	err = cmd.Start()
	_ = write.Close()
	if err != nil {
		_ = read.Close()
		failed(err)
		return
	}
	a.mu.Lock()
	a.groups[r.ID] = cmd.Process.Pid
	a.mu.Unlock()
	go func() {
		defer read.Close()
		buf := make([]byte, 4096)
		for {
			n, err := read.Read(buf)
			if n > 0 {
				a.send(reply{ID: r.ID, Output: buf[:n]})
			}
			if err != nil {
				break
			}
		}
		_ = cmd.Wait()
		a.mu.Lock()
		delete(a.groups, r.ID)
		a.mu.Unlock()
		exit := cmd.ProcessState.ExitCode()
		if exit < 0 {
			exit = 128 + int(cmd.ProcessState.Sys().(syscall.WaitStatus).Signal())
		}
		a.send(reply{ID: r.ID, Exit: &exit})
	}()
}
