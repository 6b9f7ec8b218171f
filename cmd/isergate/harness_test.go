package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
)

// These tests build the program and run it as a person would: with its command
// line, on loopback, against clients that others wrote.

// binary is the program under test.
var binary string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "isergate-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // another user runs it too
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binary = filepath.Join(dir, "isergate")
	args := []string{"build", "-o", binary}
	if raceEnabled { // the program is what the detector should watch
		args = append(args, "-race")
	}
	build := exec.Command("go", append(args, ".")...)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		return 1
	}
	// Where the programs of system administrators are, which an ordinary user's PATH has not.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// Most tests wait, for the guest, for servers to start, for outages: twice as many at once as there are processors.
	flag.Parse()
	if n := flag.Lookup("test.parallel"); n.Value.String() == n.DefValue {
		if err := n.Value.Set(strconv.Itoa(2 * runtime.GOMAXPROCS(0))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return m.Run()
}

// need skips the test without a program, or fails it when everything is required.
func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err == nil {
			continue
		}
		if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
			t.Fatalf("%s is not installed, and ISERGATE_REQUIRE_ALL=1 asks for it", p)
		}
		t.Skipf("%s is not installed: run .ci/install", p)
	}
}

// result is how a command ended.
type result struct {
	code           int
	stdout, stderr string
}

// execute runs a program to its end, with a bound on its time.
func execute(t *testing.T, env []string, program string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("%s %q: %v %v\n%s", program, args, err, ctx.Err(), stderr.String())
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// must runs a client program, which has to succeed.
func must(t *testing.T, program string, args ...string) string {
	t.Helper()
	r := execute(t, nil, program, args...)
	if r.code != 0 {
		t.Fatalf("%s %q: exit %d\n%s%s", program, args, r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// gatewayProcess is one running gateway with a directory of its own.
type gatewayProcess struct {
	t      *testing.T
	dir    string // holds data and bucket
	args   []string
	env    []string
	home   string // URL of the bucket
	cmd    *exec.Cmd
	log    *os.File
	exited chan error
	portal string
}

// smallCache keeps test machines from being filled.
const smallCache = `
cache:
  journal: 256MiB
  segment: 32MiB
  arena: 64MiB
  map_memory: 32MiB
  read_cache: 64MiB
  read_cache_memory: 16MiB
  object_age: 200ms
  unmet_after: 2s
`

// newGateway prepares a gateway on a free port; its bucket lies beside its data.
func newGateway(t *testing.T, args ...string) *gatewayProcess {
	t.Helper()
	return newGatewayOn(t, "", smallCache, args...)
}

// newGatewayOn is newGateway with a bucket elsewhere and a configuration of its own.
func newGatewayOn(t *testing.T, home, settings string, args ...string) *gatewayProcess {
	t.Helper()
	dir, err := os.MkdirTemp("", "isergate-e2e-") // short: a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	file := filepath.Join(dir, "isergate.yaml")
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	if home == "" {
		home = "file://" + dir + "/bucket"
	}
	g := &gatewayProcess{t: t, dir: dir, home: home}
	g.args = append([]string{"serve", "--config", file, "--data-dir", g.data(), "--bucket", g.bucket(), "--portal", "127.0.0.1:0"}, args...)
	t.Cleanup(func() {
		if g.cmd != nil {
			g.kill()
		}
		if t.Failed() {
			text, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("log of the gateway:\n%s", digest(string(text)))
		}
	})
	return g
}

func (g *gatewayProcess) data() string   { return filepath.Join(g.dir, "data") }
func (g *gatewayProcess) bucket() string { return g.home }
func (g *gatewayProcess) api() string    { return "unix:" + filepath.Join(g.data(), "api.sock") }

// start runs the gateway and waits until it serves.
func (g *gatewayProcess) start() *gatewayProcess {
	g.t.Helper()
	var err error
	if g.log, err = os.OpenFile(filepath.Join(g.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		g.t.Fatal(err)
	}
	g.cmd = exec.Command(binary, g.args...)
	g.cmd.Env = append(os.Environ(), g.env...)
	g.cmd.Stdout, g.cmd.Stderr = g.log, g.log
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.exited = make(chan error, 1)
	go func() { g.exited <- g.cmd.Wait() }()
	var s api.Status
	g.json(&s, "status", "--wait", "60s")
	g.portal = s.Portals[0].Listen
	return g
}

// kill ends the gateway without warning.
func (g *gatewayProcess) kill() {
	_ = g.cmd.Process.Kill()
	<-g.exited
	_ = g.log.Close()
	g.cmd = nil
}

// stop asks the gateway to stop, and returns its exit code.
func (g *gatewayProcess) stop() int {
	g.t.Helper()
	if err := g.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		g.t.Fatal(err)
	}
	select {
	case <-g.exited:
	case <-time.After(time.Minute):
		g.t.Fatal("the gateway does not stop")
	}
	code := g.cmd.ProcessState.ExitCode()
	_ = g.log.Close()
	g.cmd = nil
	return code
}

// try runs a command against the gateway.
func (g *gatewayProcess) try(args ...string) result {
	g.t.Helper()
	return execute(g.t, g.env, binary, append(args, "--api", g.api())...)
}

// run is try for a command that has to succeed.
func (g *gatewayProcess) run(args ...string) string {
	g.t.Helper()
	r := g.try(args...)
	if r.code != exitOK {
		g.t.Fatalf("isergate %q: exit %d\n%s", args, r.code, r.stderr)
	}
	return r.stdout
}

// json runs a command and decodes what it prints.
func (g *gatewayProcess) json(into any, args ...string) {
	g.t.Helper()
	text := g.run(append(args, "--output", "json")...)
	if err := json.Unmarshal([]byte(text), into); err != nil {
		g.t.Fatalf("isergate %q: %v in %s", args, err, text)
	}
}

// fails runs a command that has to fail with a code, and one line that holds text.
func (g *gatewayProcess) fails(code int, text string, args ...string) {
	g.t.Helper()
	r := g.try(args...)
	if r.code != code || !strings.Contains(r.stderr, text) || strings.Count(r.stderr, "\n") != 1 {
		g.t.Errorf("isergate %q: exit %d, want %d with one line that holds %q:\n%s", args, r.code, code, text, r.stderr)
	}
}

// url is the URL of a LUN as libiscsi and QEMU take it.
func (g *gatewayProcess) url(target string, lun int) string {
	return fmt.Sprintf("iscsi://%s/%s/%d", g.portal, target, lun)
}

// imageOptions is the same LUN as QEMU's --image-opts take it.
func (g *gatewayProcess) imageOptions(target string, lun int, more string) string {
	options := fmt.Sprintf("driver=iscsi,transport=tcp,portal=%s,target=%s,lun=%d%s", g.portal, target, lun, more)
	return "driver=raw,file." + strings.ReplaceAll(options, ",", ",file.")
}

// freeAddress is a port of loopback that was free a moment ago, and is not one that the system gives to whoever asks for any.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 1000 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 12000+rand.IntN(20000)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}
