package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/bench"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

func TestBenchUsage(t *testing.T) {
	const lun, secret = "iscsi://127.0.0.1:1/iqn.x/0", "untold-secret"
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{nil, exitUsage, "accepts 1 arg"},
		{[]string{"nonsense"}, exitUsage, "use iscsi://HOST:PORT/TARGET/LUN or iser://"},
		{[]string{"http://127.0.0.1/iqn.x/0"}, exitUsage, "use iscsi://HOST:PORT/TARGET/LUN or iser://"},
		{[]string{"iscsi://127.0.0.1:1"}, exitUsage, "no target name"},
		{[]string{"iscsi://127.0.0.1:1/iqn.x/y"}, exitUsage, "no logical unit number"},
		{[]string{lun + "?colour=blue"}, exitUsage, "initial-r2t"},
		{[]string{lun + "?digests=none", "--crc", "on"}, exitUsage, "--crc on and digests=none"},
		{[]string{"iser://127.0.0.1:1/iqn.x/0?mpa=3"}, exitUsage, "neither 1 nor 2"},
		{[]string{"iscsi://127.0.0.1:99999/iqn.x/0"}, exitUsage, "between 1 and 65535"},
		{[]string{"iser://user:untold/" + secret + "@127.0.0.1:1/iqn.x/0"}, exitUsage, "%2F"},
		{[]string{"iser://user:" + secret + "/more@127.0.0.1:1/iqn.x/0"}, exitUsage, "%2F"},
		{[]string{"iser://user:1?" + secret + "@127.0.0.1:1/iqn.x/0"}, exitUsage, "%3F"},
		{[]string{"iser://user:%zz" + secret + "@127.0.0.1:1/iqn.x/0"}, exitUsage, "percent-encoded"},
		{[]string{"iser://user:" + secret + "/iqn.x/0"}, exitUsage, "the port is not a number"},
		{[]string{lun, "--bs", "0"}, exitUsage, "above 0"},
		{[]string{lun, "--fua", "--rw", "read"}, exitUsage, "for writes"},
		{[]string{lun, "--rw", "backwards"}, exitUsage, "use one of"},
		{[]string{lun, "--bs", "3"}, exitUsage, "block size"},
		{[]string{lun, "--bs", "some"}, exitUsage, "no size"},
		{[]string{lun, "--rw", "verify", "--bs", "512"}, exitUsage, "multiples of 4096"},
		{[]string{lun, "--depth", "0"}, exitUsage, "depth"},
		{[]string{lun, "--depth", "5000"}, exitUsage, "depth"},
		{[]string{lun, "--sessions", "-1"}, exitUsage, "sessions"},
		{[]string{lun, "--time", "30"}, exitUsage, "--time"},
		{[]string{lun, "--time", "-1s"}, exitUsage, "above 0"},
		{[]string{lun, "--crc", "maybe"}, exitUsage, "on or off"},
		{[]string{lun, "--output", "xml"}, exitUsage, "table or json"},
		{[]string{lun, "--initiator", ""}, exitUsage, "initiator name"},
		{[]string{"iscsi://user@127.0.0.1:1/iqn.x/0"}, exitUsage, "a user without a secret"},
		{[]string{"iscsi://user:" + secret + "@127.0.0.1:1"}, exitUsage, "no target name"},
		{[]string{"iscsi://user:" + secret + "@127.0.0.1:x/iqn.x/0"}, exitUsage, "port"},
		{[]string{"iscsi://user:" + secret + "@127.0.0.1:1/iqn.x/0"}, exitFailed, "connection refused"},
		{[]string{"iser://user:" + secret + "@127.0.0.1:1/iqn.x/0"}, exitFailed, "connection refused"},
		{[]string{lun}, exitFailed, "connection refused"},
	} {
		r := execute(t, []string{"LIBISCSI_CHAP_USERNAME=", "LIBISCSI_CHAP_PASSWORD="}, binary, append([]string{"bench"}, c.args...)...)
		if r.code != c.code || !strings.Contains(r.stderr, c.text) || strings.Count(r.stderr, "\n") != 1 || r.stdout != "" || strings.Contains(r.stderr, secret) {
			t.Errorf("%q: exit %d, want %d with one line that holds %q, and no secret:\n%s", c.args, r.code, c.code, c.text, r.stderr)
		}
	}
	help := execute(t, nil, binary, "bench", "--help")
	for _, want := range []string{"--rw", "--bs", "--depth", "--time", "iser://", "LIBISCSI_CHAP_USERNAME"} {
		if !strings.Contains(help.stdout, want) {
			t.Errorf("the help does not mention %s", want)
		}
	}
	for _, c := range []struct{ flag, words string }{{"--rw", "read write randread randwrite randrw verify"}, {"--crc", "on off"}} {
		r := execute(t, nil, binary, "__complete", "bench", c.flag, "")
		if got := strings.Join(strings.Fields(r.stdout), " "); !strings.HasPrefix(got, c.words) {
			t.Errorf("completion of %s: %q", c.flag, got)
		}
	}
}

// documented returns the fields of the JSON result that the help names.
func documented() map[string]bool {
	fields := map[string]bool{}
	_, text, _ := strings.Cut(benchHelp, "With --output json")
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \n,:;(){}", r) }) {
		fields[word] = true
	}
	return fields
}

// benchJSON runs bench and checks that the help names each field of what it prints.
func benchJSON(t *testing.T, env []string, code int, args ...string) (r bench.Result) {
	t.Helper()
	out := execute(t, env, binary, append([]string{"bench", "--output", "json", "--time", "200ms"}, args...)...)
	if out.code != code {
		t.Fatalf("bench %q: exit %d, want %d\n%s%s", args, out.code, code, out.stdout, out.stderr)
	}
	var fields map[string]any
	if err := json.Unmarshal([]byte(out.stdout), &fields); err != nil {
		t.Fatalf("bench %q: %v in %s", args, err, out.stdout)
	}
	known := documented()
	var check func(m map[string]any)
	check = func(m map[string]any) {
		for name, value := range m {
			if !known[name] {
				t.Errorf("the help does not name %s", name)
			}
			if inner, ok := value.(map[string]any); ok {
				check(inner)
			}
		}
	}
	check(fields)
	for _, name := range []string{"url", "transport", "crc", "rw", "seed", "operations", "iops", "mb_per_s", "latency", "cpu_ns", "errors"} {
		if _, there := fields[name]; !there {
			t.Errorf("bench %q prints no %s", args, name)
		}
	}
	if err := json.Unmarshal([]byte(out.stdout), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// Every pattern against the gateway.
func TestBench(t *testing.T) {
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	g.run("volume", "create", "w", "--size", "64MiB", "--block-size", "4096", "--target", target)
	for i := range 2 * len(bench.Patterns) {
		p, url := bench.Patterns[i/2], g.url(target, i/2%2)
		if i%2 == 1 {
			url = "iser" + strings.TrimPrefix(url, "iscsi")
		}
		r := benchJSON(t, nil, exitOK, url, "--rw", string(p), "--bs", "16KiB", "--depth", "4", "--sessions", "2", "--size", "8MiB", "--offset", "1MiB", "--seed", "7", "--crc", []string{"on", "off"}[i/4%2])
		if r.Pattern != p || r.BlockSize != 16<<10 || r.Depth != 4 || r.Sessions != 2 || r.Size != 8<<20 || r.Offset != 1<<20 || r.Seed != 7 || r.Operations == 0 || r.Errors != 0 || r.Latency.Max == 0 {
			t.Errorf("%s, %s: %+v", url, p, r)
		}
		if v := r.Verification; (v != nil) != (p == bench.Verify) || v != nil && (v.Violations > 0 || !v.Complete || v.Reads == 0) {
			t.Errorf("%s, %s: %+v", url, p, v)
		}
	}
	r := execute(t, nil, binary, "bench", g.url(target, 0), "--rw", "verify", "--size", "4MiB", "--time", "100ms")
	for _, want := range []string{"IOPS", "MB/s", "p99.9", "of this process", "0 blocks lost or wrong", "seed "} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("missing %q in\n%s", want, r.stdout)
		}
	}
	if r.code != exitOK || r.stderr != "" { // no progress line where there is no terminal
		t.Errorf("%+v", r)
	}
	completed := execute(t, []string{"ISERGATE_API=" + g.api()}, binary, "__complete", "bench", "")
	for _, want := range []string{g.url(target, 0), g.url(target, 1), "iser" + strings.TrimPrefix(g.url(target, 1), "iscsi")} {
		if !strings.Contains("\n"+completed.stdout, "\n"+want+"\n") {
			t.Errorf("completion of the URL: no %s in %+v", want, completed)
		}
	}
	for _, c := range []struct{ url, text string }{
		{g.url("iqn.2026-11.com.example:none", 0), "isergate target list"},
		{g.url(target, 9), "no LUN 9"},
	} {
		if r := execute(t, nil, binary, "bench", c.url); r.code != exitFailed || !strings.Contains(r.stderr, c.text) {
			t.Errorf("%s: %+v", c.url, r)
		}
	}
}

// Messages say what to do.
func TestBenchHints(t *testing.T) {
	for tr, other := range map[string]string{"tcp": "iser", "iser": "iscsi"} {
		g := newGateway(t, "--open")
		g.args[slices.Index(g.args, "127.0.0.1:0")] += ",transport=" + tr
		g.start()
		g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
		_, rest, _ := strings.Cut(g.url(target, 0), "://")
		hint := map[string]string{"tcp": "use iscsi://", "iser": "use iser://"}[tr]
		if r := execute(t, nil, binary, "bench", other+"://"+rest); r.code != exitFailed || !strings.Contains(r.stderr, hint) || r.stdout != "" {
			t.Errorf("%s to a portal of %s: %+v", other, tr, r)
		}
		url := map[string]string{"tcp": "iscsi", "iser": "iser"}[tr] + "://" + rest
		if r := execute(t, nil, binary, "bench", url, "--bs", "64MiB", "--time", "500ms"); r.code != exitUsage || !strings.Contains(r.stderr, "33554432") || r.stdout != "" {
			t.Errorf("too large an operation: %+v", r)
		}
		if r := execute(t, nil, binary, "bench", url+"?max-burst=65536", "--time", "100ms"); r.code != exitOK || !strings.Contains(r.stdout, url+"?max-burst=65536\n") {
			t.Errorf("options of the URL: %+v", r)
		}
	}
	for _, env := range []string{"LIBISCSI_CHAP_USERNAME=u", "LIBISCSI_CHAP_PASSWORD=p", "LIBISCSI_CHAP_TARGET_USERNAME=u"} {
		if r := execute(t, []string{env}, binary, "bench", "iscsi://127.0.0.1:1/iqn.x/0"); r.code != exitUsage || !strings.Contains(r.stderr, "set both LIBISCSI_CHAP_") {
			t.Errorf("%s: %+v", env, r)
		}
	}
}

// A run that measured nothing, or not all, is no success.
func TestBenchVerdict(t *testing.T) {
	gone := &initiator.StatusError{Status: initiator.CheckCondition, Sense: initiator.Sense{Key: initiator.KeyIllegalRequest, ASC: noUnit}}
	away := &initiator.StatusError{Status: initiator.CheckCondition, Sense: initiator.Sense{Key: initiator.KeyNotReady, ASC: 0x04, ASCQ: 0x03}}
	for _, c := range []struct {
		r    bench.Result
		text string
	}{
		{bench.Result{}, "no operation"},
		{bench.Result{Busy: 5}, "BUSY 5 times"},
		{bench.Result{Operations: 9, Unfinished: 4, Busy: 5}, "4 operations did not end within 10s after --time; the target answered BUSY 5 times"},
		{bench.Result{Operations: 9, Errors: 100, FirstError: gone.Error(), Permanent: gone}, "the target has no LUN 3"},
		{bench.Result{Operations: 9, Errors: 100, FirstError: away.Error(), Permanent: away}, "ended early, because the target refused 100 operations in a row: 100 of 109 operations failed"},
		{bench.Result{Operations: 9, Errors: 100, FirstError: away.Error(), Permanent: away}, `LUN 3 is not ready: see "isergate volume list"`},
	} {
		if err := verdict(t.Context(), &c.r, 3); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %v", c.r, err)
		}
	}
	if err := verdict(t.Context(), &bench.Result{Operations: 1}, 3); err != nil {
		t.Error(err)
	}
	for status, text := range map[uint16]string{loginInitiatorError: "use iser://", loginOutOfResources: "iser.memory", loginForbidden: "acl add"} {
		err := benchError("iscsi://h/t/0", 0, benchFlags{}, &initiator.LoginError{Status: pdu.LoginStatus(status)})
		if !strings.Contains(err.Error(), text) {
			t.Errorf("login status %04x: %v", status, err)
		}
	}
}

// A LUN with a file system is not overwritten by mistake.
func TestBenchProtectsFileSystems(t *testing.T) {
	need(t, "mkfs.ext4", "qemu-img")
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	raw := g.dir + "/raw"
	must(t, "mkfs.ext4", "-q", raw, "32M")
	must(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", raw, g.url(target, 0))
	for _, rw := range []string{"write", "randwrite", "randrw", "verify"} {
		r := execute(t, nil, binary, "bench", g.url(target, 0), "--rw", rw, "--time", "100ms")
		if r.code != exitFailed || !strings.Contains(r.stderr, "ext4") || !strings.Contains(r.stderr, "--force") || r.stdout != "" {
			t.Errorf("--rw %s: %+v", rw, r)
		}
	}
	must(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", raw, g.url(target, 0))
	benchJSON(t, nil, exitOK, g.url(target, 0), "--rw", "randread")
	benchJSON(t, nil, exitOK, g.url(target, 0), "--rw", "write", "--force")
}

func TestBenchCHAP(t *testing.T) {
	g := newGateway(t).start()
	g.run("volume", "create", "v", "--size", "16MiB", "--target", target)
	secrets := map[string]string{"s": "a very long secret", "m": "another long secret"}
	for name, text := range secrets {
		if err := os.WriteFile(g.dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if r := execute(t, nil, binary, "bench", g.url(target, 0)); r.code != exitFailed || !strings.Contains(r.stderr, "isergate acl add") || !strings.Contains(r.stderr, benchInitiator) {
		t.Errorf("without an ACL entry: %+v", r)
	}
	g.run("acl", "add", target, host, "--chap-user", "u", "--chap-secret-file", g.dir+"/s", "--mutual-user", "t", "--mutual-secret-file", g.dir+"/m")
	env := func(secret, mutual string) []string {
		return []string{"LIBISCSI_CHAP_USERNAME=u", "LIBISCSI_CHAP_PASSWORD=" + secret, "LIBISCSI_CHAP_TARGET_USERNAME=t", "LIBISCSI_CHAP_TARGET_PASSWORD=" + mutual}
	}
	benchJSON(t, env(secrets["s"], secrets["m"]), exitOK, g.url(target, 0), "--initiator", host)
	if r := execute(t, env("a very wrong secret", secrets["m"]), binary, "bench", g.url(target, 0), "--initiator", host); r.code != exitFailed || !strings.Contains(r.stderr, "CHAP") {
		t.Errorf("with a wrong secret: %+v", r)
	}
	if r := execute(t, env(secrets["s"], "a very wrong secret"), binary, "bench", g.url(target, 0), "--initiator", host); r.code != exitFailed || !strings.Contains(r.stderr, "the target does not know its secret") {
		t.Errorf("with a wrong secret of the target: %+v", r)
	}
}

// The gateway dies under a run: the result tells what failed.
func TestBenchLosesTheTarget(t *testing.T) {
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	for i, rw := range []string{"randread", "verify", "randread", "verify"} {
		url := g.url(target, 0)
		if i > 1 {
			url = "iser" + strings.TrimPrefix(url, "iscsi")
		}
		cmd := exec.CommandContext(t.Context(), binary, "bench", url, "--rw", rw, "--time", "10m", "--output", "json")
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		g.awaitSessions(1)
		g.kill()
		_ = cmd.Wait()
		var r bench.Result
		if err := json.Unmarshal([]byte(stdout.String()), &r); err != nil {
			// The unit may not have been open yet.
			if !strings.Contains(stderr.String(), "connection lost") {
				t.Errorf("%s --rw %s: %v in %q, %s", url, rw, err, stdout.String(), stderr.String())
			}
		} else if r.Errors == 0 || r.FirstError == "" || !strings.Contains(stderr.String(), "failed") {
			t.Errorf("%s --rw %s: %+v, %s", url, rw, r, stderr.String())
		}
		if cmd.ProcessState.ExitCode() != exitFailed {
			t.Errorf("%s --rw %s: exit %d", url, rw, cmd.ProcessState.ExitCode())
		}
		g.start()
	}
}

// The LUN is taken away under a run: it ends, and says why.
func TestBenchLosesTheLUN(t *testing.T) {
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	cmd := exec.CommandContext(t.Context(), binary, "bench", g.url(target, 0), "--rw", "randread", "--time", "10m")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	g.awaitSessions(1)
	g.run("lun", "unmap", target, "0")
	_ = cmd.Wait()
	// The unit may not have been open yet.
	if cmd.ProcessState.ExitCode() != exitFailed || !strings.Contains(stderr.String(), "the target has no LUN 0") {
		t.Errorf("exit %d, %s", cmd.ProcessState.ExitCode(), stderr.String())
	}
}

// An interrupt ends a run in good order, with the result so far.
func TestBenchInterrupted(t *testing.T) {
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	cmd := exec.CommandContext(t.Context(), binary, "bench", g.url(target, 0), "--rw", "randrw", "--time", "10m", "--output", "json")
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	g.awaitSessions(1)
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if cmd.ProcessState.ExitCode() != exitFailed || !strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("exit %d, %s", cmd.ProcessState.ExitCode(), stderr.String())
	}
	g.awaitSessions(0)
}

// On a terminal a line tells what goes on, and is gone at the end.
func TestBenchProgress(t *testing.T) {
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	terminal, end := newTerminal(t)
	cmd := exec.CommandContext(t.Context(), binary, "bench", g.url(target, 0), "--time", "10m")
	var stdout strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, end
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = end.Close()
	var shown []byte
	buf := make([]byte, 4096)
	interrupted := false
	for {
		n, err := terminal.Read(buf)
		shown = append(shown, buf[:n]...)
		if !interrupted && strings.Contains(string(shown), " errors") {
			interrupted = true
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil { // EIO when nobody has the other end any more
			break
		}
	}
	_ = cmd.Wait()
	if !strings.Contains(string(shown), "randread") || !strings.Contains(string(shown), "IOPS") || !strings.Contains(string(shown), "\r\x1b[Kisergate: interrupted") || !strings.Contains(stdout.String(), "LATENCY") {
		t.Errorf("on the terminal %q, on standard output %q", shown, stdout.String())
	}
}

// newTerminal returns both ends of a pseudo terminal.
func newTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// awaitSessions waits until so many sessions are logged in.
func (g *gatewayProcess) awaitSessions(n int) {
	g.t.Helper()
	var sessions []any
	for end := time.Now().Add(time.Minute); ; {
		g.json(&sessions, "session", "list")
		if len(sessions) == n {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("%d sessions, want %d", len(sessions), n)
		}
	}
}
