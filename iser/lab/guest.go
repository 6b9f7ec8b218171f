package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// Options say what the guest is like. The zero value is a machine with one processor and
// 1 GiB of memory.
type Options struct {
	CPUs      int // default 1: with one, emulation leaves the host a processor
	MemoryMiB int // default 1024
	// Forward lists ports of the guest that are to be reached from this machine.
	Forward []int
	// Disk is a second disk, /dev/vdb in the guest, as qemu names one: a file or the URI of a server. Flushes reach it.
	Disk string
	// Terminal gives the guest's console /dev/hvc0 this process's standard input and output.
	Terminal bool
}

// ensureDefaults fills in what was not said.
func (o *Options) ensureDefaults() {
	if o.CPUs == 0 {
		o.CPUs = 1
	}
	if o.MemoryMiB == 0 {
		o.MemoryMiB = 1024
	}
}

// Guest is a machine that runs. Its methods may be called concurrently.
type Guest struct {
	dir     string // holds the socket and the console; removed by Close
	cmd     *exec.Cmd
	forward map[int]string
	port    net.Conn
	ready   chan struct{} // closed when the agent has said that it is there
	gone    chan struct{} // closed when qemu has ended
	closed  sync.Once

	mu       sync.Mutex // guards all below, and writes to port
	out      *json.Encoder
	last     int
	console  string // what there was at the end
	commands map[int]*Command
}

// Command is a script that runs in the guest, or ran.
type Command struct {
	guest *Guest
	id    int
	done  chan struct{}

	mu     sync.Mutex // guards both
	output bytes.Buffer
	exit   int
}

// Boot starts a guest and returns when it takes scripts; a context that ends before ends
// the guest. The error tells what the guest's console had to say.
func Boot(ctx context.Context, o Options) (*Guest, error) {
	o.ensureDefaults()
	from, err := Find()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "isergate-lab-") // short: a socket's path is limited
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	g := &Guest{
		dir: dir, forward: make(map[int]string), ready: make(chan struct{}), gone: make(chan struct{}),
		commands: make(map[int]*Command),
	}
	if err := g.start(o, from); err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("lab: %w", err)
	}
	select {
	case <-g.ready:
	case <-g.gone:
		err = ErrGone
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil {
		_, err = g.Run(ctx, "cat >/lab/lib.sh <<'end of the library'\n"+library+"\nend of the library\n")
	}
	if err != nil {
		err = fmt.Errorf("lab: booting: %w; its console:\n%s", err, g.Console())
		g.Close()
		return nil, err
	}
	return g, nil
}

// start runs qemu, which connects to us: whichever ends, the other learns of it.
func (g *Guest) start(o Options, from string) error {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(g.dir, "port"), Net: "unix"})
	if err != nil {
		return err
	}
	defer listener.Close()
	user := "user,id=net,net=10.0.2.0/24,host=" + Host
	for _, port := range o.Forward {
		address, err := freePort()
		if err != nil {
			return err
		}
		g.forward[port] = address
		user += fmt.Sprintf(",hostfwd=tcp:%s-:%d", address, port)
	}
	args := []string{
		"-machine", "q35,usb=off,vmport=off,graphics=off", "-accel", "tcg,thread=multi", "-cpu", "max",
		"-smp", fmt.Sprint(o.CPUs), "-m", fmt.Sprint(o.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", filepath.Join(from, "vmlinux"), "-initrd", filepath.Join(from, "initrd.img"),
		// What costs time in emulation and tells nothing here is off.
		"-append", "console=ttyS0 loglevel=6 panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable cryptomgr.notests net.ifnames=0 random.trust_cpu=on",
		"-serial", "file:" + g.consoleFile(),
		"-drive", "file=" + filepath.Join(from, "disk.img") + ",format=raw,if=virtio,snapshot=on,cache=unsafe",
		"-netdev", user, "-device", "virtio-net-pci,netdev=net,romfile=",
		"-device", "virtio-rng-pci", "-device", "virtio-serial-pci",
		"-chardev", "socket,id=lab,path=" + listener.Addr().String(), "-device", "virtserialport,chardev=lab,name=lab",
	}
	if o.Disk != "" {
		args = append(args, "-drive", "file="+o.Disk+",format=raw,if=virtio,cache=writeback")
	}
	if o.Terminal {
		args = append(args, "-chardev", "stdio,id=tty,signal=off", "-device", "virtconsole,chardev=tty")
	}
	g.cmd = exec.Command(qemu, args...)
	g.cmd.Env = append(os.Environ(), "TMPDIR="+g.dir) // what the guest writes to its disk
	var complaint bytes.Buffer
	g.cmd.Stderr = &complaint
	if o.Terminal {
		g.cmd.Stdin, g.cmd.Stdout = os.Stdin, os.Stdout
	}
	if err := g.cmd.Start(); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() {
		exited <- g.cmd.Wait()
		_ = listener.Close() // nobody comes any more
	}()
	if g.port, err = listener.Accept(); err != nil {
		return fmt.Errorf("%s: %w: %s", qemu, <-exited, strings.TrimSpace(complaint.String()))
	}
	g.out = json.NewEncoder(g.port)
	go func() {
		g.receive()
		_ = g.port.Close() // a guest without its port has no use
		<-exited
		close(g.gone)
	}()
	return nil
}

// freePort is an address of loopback that was free a moment ago.
func freePort() (string, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// message is one line between host and guest. To the guest: Script starts a script, Kill
// ends it. From the guest: Output as it comes, then Exit. A first message without an ID
// says that the agent is there.
type message struct {
	ID     int    `json:"id"`
	Script string `json:"script,omitempty"`
	Kill   bool   `json:"kill,omitempty"`
	Output []byte `json:"output,omitempty"`
	Exit   *int   `json:"exit,omitempty"`
}

// receive hands out what the guest says until it says no more.
func (g *Guest) receive() {
	in := json.NewDecoder(bufio.NewReader(g.port))
	for {
		var m message
		if err := in.Decode(&m); err != nil {
			return
		}
		if m.ID == 0 {
			select {
			case <-g.ready:
			default:
				close(g.ready)
			}
			continue
		}
		g.mu.Lock()
		c := g.commands[m.ID]
		if m.Exit != nil {
			delete(g.commands, m.ID)
		}
		g.mu.Unlock()
		if c == nil {
			continue
		}
		c.mu.Lock()
		c.output.Write(m.Output)
		if m.Exit != nil {
			c.exit = *m.Exit
		}
		c.mu.Unlock()
		if m.Exit != nil {
			close(c.done)
		}
	}
}

func (g *Guest) send(m message) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.out.Encode(m); err != nil {
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
	return nil
}

// Start runs a script of bash in the guest. The functions of lib.sh are there, and the
// first command that fails ends the script.
func (g *Guest) Start(script string) (*Command, error) {
	c := &Command{guest: g, done: make(chan struct{})}
	g.mu.Lock()
	g.last++
	c.id = g.last
	g.commands[c.id] = c
	g.mu.Unlock()
	if err := g.send(message{ID: c.id, Script: script}); err != nil {
		return nil, err
	}
	return c, nil
}

// Run runs a script to its end and returns what it printed, on either stream. A script that
// fails is an *ExitError; one that is not done when ctx ends is killed.
func (g *Guest) Run(ctx context.Context, script string) (string, error) {
	c, err := g.Start(script)
	if err != nil {
		return "", err
	}
	return c.Wait(ctx)
}

// ExitError is the error of a script that did not succeed.
type ExitError struct {
	Code   int    // exit status; above 128 the signal that ended it
	Output string // all that it printed
}

func (e *ExitError) Error() string { return fmt.Sprintf("lab: a script ended with status %d", e.Code) }

// Output returns what the script has printed so far.
func (c *Command) Output() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.output.String()
}

// Done is closed when the script has ended.
func (c *Command) Done() <-chan struct{} { return c.done }

// Wait is the rest of Run.
func (c *Command) Wait(ctx context.Context) (string, error) {
	select {
	case <-c.done:
	case <-c.guest.gone:
		return c.Output(), ErrGone
	case <-ctx.Done():
		_ = c.guest.send(message{ID: c.id, Kill: true})
		return c.Output(), ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exit != 0 {
		return c.output.String(), &ExitError{Code: c.exit, Output: c.output.String()}
	}
	return c.output.String(), nil
}

// Forwarded returns the address on this machine that leads to a port of the guest, one of
// Options.Forward.
func (g *Guest) Forwarded(port int) string { return g.forward[port] }

func (g *Guest) consoleFile() string { return filepath.Join(g.dir, "console") }

// Console returns what the guest's kernel has printed, after Close too.
func (g *Guest) Console() string {
	text, err := os.ReadFile(g.consoleFile())
	if errors.Is(err, os.ErrNotExist) {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.console
	}
	if err != nil {
		return err.Error()
	}
	return string(bytes.ReplaceAll(text, []byte("\r"), nil))
}

// Close ends the guest, as a cut of its power would, and waits until it is gone.
func (g *Guest) Close() {
	g.closed.Do(func() {
		_ = g.cmd.Process.Signal(syscall.SIGKILL)
		<-g.gone
		console := g.Console()
		g.mu.Lock()
		g.console = console
		g.mu.Unlock()
		_ = os.RemoveAll(g.dir)
	})
}

// WaitGone waits until the guest has ended by itself.
func (g *Guest) WaitGone() { <-g.gone }
