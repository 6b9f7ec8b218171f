package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/isergate/isergate/gateway/api"
)

const (
	target = "iqn.2026-11.com.example:t"
	host   = "iqn.2026-11.com.example:host"
)

func TestUsage(t *testing.T) {
	t.Setenv("ISERGATE_API", "unix:"+filepath.Join(t.TempDir(), "none"))
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"nonsense"}, exitUsage, "unknown command"},
		{[]string{"volume"}, exitUsage, "takes one of create, delete"},
		{[]string{"volume", "nonsense"}, exitUsage, "unknown command"},
		{[]string{"volume", "create", "x"}, exitUsage, `required flag(s) "size" not set: see "isergate volume create --help"`},
		{[]string{"volume", "create", "x", "--size", "10 bananas"}, exitUsage, "no size"},
		{[]string{"volume", "set", "x"}, exitUsage, "at least one of the flags"},
		{[]string{"volume", "show"}, exitUsage, "accepts 1 arg"},
		{[]string{"acl", "add", "a", "b", "--chap-user", "u"}, exitUsage, "chap-secret-file"},
		{[]string{"status", "--output", "xml"}, exitUsage, "use table or json"},
		{[]string{"status", "--api", "http://x"}, exitUsage, "no API address"},
		{[]string{"serve", "--portal", "localhost:1"}, exitUsage, "no IP address"},
		{[]string{"serve", "--demo", "--portal", "0.0.0.0:3260"}, exitUsage, "loopback"},
		{[]string{"status"}, exitFailed, "no gateway answers"},
		{[]string{"bucket", "inspect", "file:///no/such/bucket"}, exitFailed, "no bucket"},
		{[]string{"bucket", "inspect", "nonsense"}, exitUsage, "scheme"},
	} {
		r := execute(t, nil, binary, c.args...)
		if r.code != c.code || !strings.Contains(r.stderr, c.text) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%q: exit %d, want %d with one line that holds %q:\n%s", c.args, r.code, c.code, c.text, r.stderr)
		}
	}
	for _, args := range [][]string{{"version"}, {"help"}, {"completion", "bash"}, {"volume", "--help"}, {"version", "--output", "json"}} {
		if r := execute(t, nil, binary, args...); r.code != exitOK || r.stdout == "" || r.stderr != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

func TestConfigurationFaultsAreAllReported(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("opne: true\ncache:\n  journal: many\nlog: {level: loud}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := execute(t, nil, binary, "serve", "--config", file)
	if r.code != exitUsage || strings.Count(r.stderr, "\n") != 3 {
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{file + ":1: opne: unknown key", file + ":3: cache.journal", file + ":4: log.level"} {
		if !strings.Contains(r.stderr, want) {
			t.Errorf("missing %q in\n%s", want, r.stderr)
		}
	}
}

// The whole command line against one gateway.
func TestCommands(t *testing.T) {
	t.Parallel()
	g := newGateway(t).start()
	if out := g.run("volume", "create", "db01", "--size", "10GiB", "--target", target, "--lun", "3"); !strings.Contains(out, "LUN 3 of "+target) || !strings.Contains(out, "A write is acknowledged when it is synced to this node's journal") {
		t.Errorf("volume create does not print the contract:\n%s", out)
	}
	g.run("volume", "create", "db02", "--size", "1TB", "--block-size", "4096", "--ack", "local", "--flush", "object", "--on-unmet", "error", "--dirty-budget", "32MiB")

	// The fields that later checks rely on, by their names.
	var fields map[string]any
	g.json(&fields, "volume", "show", "db02")
	for _, name := range []string{"name", "uuid", "size_bytes", "block_size", "contract", "contract_met", "epoch", "generation", "dirty_bytes", "dirty_budget_bytes", "object_bytes", "state"} {
		if _, there := fields[name]; !there {
			t.Errorf("volume show has no %s", name)
		}
	}
	if policy := fields["policy"].(map[string]any); policy["ack"] != "local" || policy["flush"] != "object" || policy["on_unmet"] != "error" {
		t.Errorf("policy %v", policy)
	}
	for _, level := range []string{"acked", "local", "quorum", "object"} {
		w := fields["watermarks"].(map[string]any)[level].(map[string]any)
		if _, lsn := w["lsn"]; !lsn {
			t.Errorf("watermark %s: %v", level, w)
		}
		if _, time := w["time"]; !time {
			t.Errorf("watermark %s: %v", level, w)
		}
	}
	if fields["size_bytes"] != 1e12 || fields["dirty_budget_bytes"] != float64(32<<20) {
		t.Errorf("%v", fields)
	}

	g.run("volume", "resize", "db01", "20GiB")
	g.fails(exitUsage, "only grows", "volume", "resize", "db01", "10GiB")
	g.fails(exitUsage, "needs a cluster", "volume", "create", "q", "--size", "1GiB", "--ack", "quorum")
	g.fails(exitFailed, "another name", "volume", "create", "db01", "--size", "1GiB")
	if out := g.run("volume", "set", "db01", "--ack", "object"); !strings.Contains(out, "object store") {
		t.Errorf("volume set does not print the contract: %s", out)
	}
	g.run("volume", "wait", "db01", "--level", "object", "--timeout", "30s")
	g.fails(exitUsage, "cluster", "volume", "wait", "db01", "--level", "quorum")

	g.run("target", "create", "iqn.2026-11.com.example:u")
	g.fails(exitFailed, "already", "target", "create", "iqn.2026-11.com.example:u")
	g.run("lun", "map", "iqn.2026-11.com.example:u", "db02")
	g.run("lun", "unmap", "iqn.2026-11.com.example:u", "0")
	secret := filepath.Join(g.dir, "secret")
	if err := os.WriteFile(secret, []byte("a very long secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g.run("acl", "add", "iqn.2026-11.com.example:u", host, "--chap-user", "u", "--chap-secret-file", secret)
	if out := g.run("acl", "list", "iqn.2026-11.com.example:u"); !strings.Contains(out, host) || strings.Contains(out, "very long") {
		t.Errorf("acl list:\n%s", out)
	}
	if out := g.run("acl", "add", "iqn.2026-11.com.example:u", host); !strings.Contains(out, "may log in to iqn.2026-11.com.example:u without authentication; this replaced its entry with CHAP: it now needs no authentication.") {
		t.Errorf("acl add that replaces: %s", out)
	}
	g.run("acl", "remove", "iqn.2026-11.com.example:u", host)
	g.fails(exitFailed, "no ACL entry", "acl", "remove", "iqn.2026-11.com.example:u", host)
	g.run("target", "delete", "iqn.2026-11.com.example:u")
	g.run("session", "list")

	g.fails(exitFailed, "lun unmap "+target+" 3", "volume", "delete", "db01")
	g.run("lun", "unmap", target, "3")
	g.run("volume", "delete", "db01")
	var inBucket []api.BucketVolume
	g.json(&inBucket, "bucket", "inspect", g.bucket())
	names := map[string]bool{}
	for _, v := range inBucket {
		names[v.Name] = true
	}
	if !names["db01"] {
		t.Errorf("the bucket does not keep the deleted volume: %+v", inBucket)
	}
	var restored api.Restored
	g.json(&restored, "volume", "restore", "--from", g.bucket(), "--volume", "db01", "--as", "again")
	if restored.Volume.Name != "again" || restored.Generation != 1<<16 || restored.Volume.SizeBytes != 20<<30 {
		t.Errorf("%+v", restored)
	}
	g.run("drain")
	for _, name := range []string{"again", "db02"} {
		g.run("volume", "delete", name, "--purge")
	}
	g.json(&inBucket, "bucket", "inspect", g.bucket(), "--verify")
	if len(inBucket) != 0 {
		t.Errorf("purged volumes are left: %+v", inBucket)
	}
	if code := g.stop(); code != exitOK {
		t.Errorf("exit %d after SIGTERM", code)
	}
	g.fails(exitFailed, "no gateway answers", "status")
}

// What succeeds because nothing had to be brought to the bucket says so if the bucket does not answer.
func TestBucketThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	g := newGateway(t).start()
	g.run("volume", "create", "v", "--size", "64MiB")
	commands := [][]string{
		{"drain"}, {"volume", "wait", "v", "--level", "object"}, {"volume", "create", "w", "--size", "64MiB"},
	}
	check := func(there bool) {
		t.Helper()
		for _, args := range commands {
			r := g.try(args...)
			if r.code != exitOK || strings.Contains(r.stderr, "does not answer at present") == there {
				t.Errorf("bucket there: %v, %v: %+v", there, args, r)
			}
		}
	}
	dir := strings.TrimPrefix(g.bucket(), "file://")
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	check(false)
	if r := g.try("volume", "wait", "v", "--level", "local"); r.code != exitOK || r.stderr != "" {
		t.Errorf("a wait for another level: %+v", r)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	g.run("volume", "delete", "w", "--purge")
	check(true)
}

// What a replaced ACL entry changes is said.
func TestReplacedACL(t *testing.T) {
	open, chap, mutual := api.ACL{Initiator: "i"}, api.ACL{Initiator: "i", CHAPUser: "u"}, api.ACL{Initiator: "i", CHAPUser: "u", MutualUser: "m"}
	for _, c := range []struct {
		now  api.ACL
		was  *api.ACL
		text string
	}{
		{chap, nil, "i may log in to t with CHAP."},
		{open, nil, "i may log in to t without authentication."},
		{chap, &open, "i may log in to t with CHAP; this replaced its entry without authentication."},
		{chap, &mutual, "i may log in to t with CHAP; this replaced its entry with mutual CHAP."},
		{open, &open, "i may log in to t without authentication; this replaced its entry without authentication."},
		{open, &mutual, "i may log in to t without authentication; this replaced its entry with mutual CHAP: it now needs no authentication."},
	} {
		c.now.Replaced = c.was
		if text := added(c.now, "t"); text != c.text {
			t.Errorf("%q, want %q", text, c.text)
		}
	}
}

// Everything but the cache's defaults: no configuration, the current directory, an
// ordinary user.
func TestDemoAsAnOrdinaryUser(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "isergate-demo-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command(binary, "serve", "--demo", "--portal", "127.0.0.1:0")
	cmd.Dir = dir
	if os.Geteuid() == 0 {
		const nobody = 65534
		if err := os.Chown(dir, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	address := "unix:" + filepath.Join(dir, "isergate-data", "api.sock")
	r := execute(t, nil, binary, "status", "--wait", "60s", "--api", address, "--output", "json")
	var s api.Status
	err = json.Unmarshal([]byte(r.stdout), &s)
	_ = cmd.Process.Signal(os.Interrupt)
	if werr := cmd.Wait(); werr != nil || err != nil || r.code != exitOK {
		t.Fatalf("exit %d, %v, %v\n%s", r.code, err, werr, stderr.String())
	}
	for _, want := range []string{
		fmt.Sprintf("iscsi-ls -s iscsi://%s\n", s.Portals[0].Listen), "iscsi-inq iscsi://", "qemu-img convert", "qemu-io -f raw",
		"iscsiadm -m discovery -t sendtargets -p " + s.Portals[0].Listen, "--login", "bench iser://" + s.Portals[0].Listen + "/", "volume wait demo --level object",
	} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("the demo does not print %q:\n%s", want, stdout.String())
		}
	}
}
