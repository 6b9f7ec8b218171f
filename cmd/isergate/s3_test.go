package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/objectstore/s3test"
)

// singleWriter is what a store without conditional writes needs.
const singleWriter = `
bucket:
  single_writer: true
`

// The life of a volume whose bucket is on a real S3 server: an image goes through it, the server fails and comes back,
// the gateway restarts during the outage, and the volume comes back from the bucket alone.
func TestRealS3(t *testing.T) {
	t.Parallel()
	need(t, "qemu-img", "qemu-io")
	for _, kind := range s3test.Kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			if kind == s3test.Radosgw && testing.Short() {
				t.Skip("radosgw takes half a minute to start; not with -short")
			}
			server := s3test.New(t, kind)
			g := newGatewayOnServer(t, server, "--open")
			g.start()
			g.run("volume", "create", "v", "--size", "32MiB", "--target", target)
			raw := image(t, g.dir, 32)
			must(t, "qemu-img", "convert", "-n", "--target-image-opts", "-f", "raw", raw, g.imageOptions(target, 0, ""))
			g.equal(raw, "", "writing")
			g.run("volume", "wait", "v", "--level", "object")

			// Outage. Under ack=local the volume is served on, through a restart too.
			server.Kill()
			must(t, "qemu-io", "-f", "raw", "-c", "write -P 0x5a 0 1M", "-c", "flush", g.url(target, 0))
			if r := g.try("volume", "wait", "v", "--level", "object", "--timeout", "1s"); r.code != exitFailed || !strings.Contains(lastLine(r.stderr), "did not reach level object") {
				t.Fatalf("a barrier during an outage: %+v", r)
			}
			var s api.Status
			if g.json(&s, "status"); s.Bucket.Error == "" {
				t.Errorf("the status does not tell of the outage: %+v", s)
			}
			g.kill()
			g.start()
			if out := must(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 1M", g.url(target, 0)); strings.Contains(out, "failed") {
				t.Fatal(out)
			}
			var v api.Volume
			g.json(&v, "volume", "show", "v")
			if v.DirtyBytes == 0 || v.Watermarks.Object.LSN >= v.Watermarks.Acked.LSN {
				t.Fatalf("%+v", v)
			}
			if err := server.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			g.run("drain")
			must(t, "qemu-io", "-f", "raw", "-c", "write -s "+raw+" 0 1M", g.url(target, 0))
			g.equal(raw, "", "the outage")

			g.run("lun", "unmap", target, "0")
			g.run("volume", "delete", "v")
			g.kill()
			if err := os.RemoveAll(g.data()); err != nil {
				t.Fatal(err)
			}
			g.start()
			var found []api.BucketVolume
			g.json(&found, "bucket", "inspect", g.bucket(), "--verify")
			if len(found) != 1 || found[0].Name != "v" || found[0].Error != "" || len(found[0].Damaged) != 0 {
				t.Fatalf("%+v", found)
			}
			g.run("volume", "restore", "--from", g.bucket(), "--volume", found[0].UUID)
			g.run("target", "create", target)
			g.run("lun", "map", target, "v")
			g.equal(raw, "", "restore from the bucket alone")
			if code := g.stop(); code != exitOK {
				t.Fatalf("exit %d", code)
			}
		})
	}
}

// newGatewayOnServer prepares a gateway whose bucket is on a real server, as that server can have it.
func newGatewayOnServer(t *testing.T, server *s3test.Server, args ...string) *gatewayProcess {
	t.Helper()
	if err := server.CreateBucket(t.Context(), "isergate"); err != nil {
		t.Fatal(err)
	}
	url := server.URL("isergate", "a/prefix")
	g := newGatewayOn(t, url, smallCache, args...)
	g.env = server.Env()
	if refused(t, g) {
		g = newGatewayOn(t, url, smallCache+singleWriter, args...)
		g.env = server.Env()
	}
	return g
}

// refused reports whether the store does not keep two writers apart: the gateway then says so and
// does not start. One that does start is stopped again.
func refused(t *testing.T, g *gatewayProcess) bool {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, g.args...)
	cmd.Env = append(os.Environ(), g.env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	status := exec.CommandContext(t.Context(), binary, "status", "--wait", "2m", "--api", g.api())
	served := make(chan error, 1)
	if err := status.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { served <- status.Wait() }()
	select {
	case err := <-ended:
		_ = status.Process.Kill()
		<-served
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != exitFailed || !strings.Contains(stderr.String(), "single_writer") {
			t.Fatalf("%v\n%s", err, stderr.String())
		}
		t.Logf("without single_writer: %s", lastLine(stderr.String()))
		return true
	case err := <-served:
		_ = cmd.Process.Signal(os.Interrupt)
		if err2 := <-ended; err != nil || err2 != nil {
			t.Fatalf("%v, %v\n%s", err, err2, stderr.String())
		}
		return false
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// A volume with ack=object and on-unmet=degrade says that its contract is not met during an outage, and
// that it is met again afterwards, with no hand moved.
func TestDegradeIsAnnounced(t *testing.T) {
	t.Parallel()
	need(t, "qemu-io", "iscsi-inq")
	server := s3test.New(t, s3test.Versitygw)
	if err := server.CreateBucket(t.Context(), "isergate"); err != nil {
		t.Fatal(err)
	}
	g := newGatewayOn(t, server.URL("isergate", "p"), smallCache, "--open")
	g.env = server.Env()
	g.start()
	for i, rule := range []string{"degrade", "error"} {
		g.run("volume", "create", rule, "--size", "32MiB", "--ack", "object", "--on-unmet", rule, "--target", target, "--lun", fmt.Sprint(i))
		must(t, "qemu-io", "-f", "raw", "-c", "write -P 1 0 64k", g.url(target, i))
	}
	server.Kill()
	must(t, "qemu-io", "-f", "raw", "-c", "write -P 2 0 64k", g.url(target, 0))
	if r := execute(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 2 0 64k", g.url(target, 1)); !strings.Contains(r.stdout+r.stderr, "write failed") {
		t.Errorf("a write was acknowledged at a level that it did not reach: %s%s", r.stdout, r.stderr)
	}
	var s api.Status
	g.json(&s, "status")
	seen := map[string]bool{}
	for _, e := range s.Events {
		seen[e.Volume+" "+e.Type] = true
	}
	if len(s.ContractUnmet) != 2 || !seen["degrade contract_degraded"] || !seen["error contract_unmet"] {
		t.Errorf("%+v", s)
	}
	var v api.Volume
	g.json(&v, "volume", "show", "degrade")
	if v.ContractMet || v.State != "degraded" || v.Reason == "" || v.LastObjectError == "" {
		t.Errorf("%+v", v)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	g.run("drain")
	for _, name := range []string{"degrade", "error"} {
		g.run("volume", "wait", name, "--level", "object")
	}
	must(t, "qemu-io", "-f", "raw", "-c", "write -P 3 0 64k", g.url(target, 0))
	deadline := time.Now().Add(time.Minute)
	for g.json(&s, "status"); len(s.ContractUnmet) > 0; g.json(&s, "status") {
		if time.Now().After(deadline) {
			t.Fatalf("the contract is not met again: %+v", s)
		}
	}
}

// The API on TCP wants TLS and the token.
func TestAPIOverTLS(t *testing.T) {
	t.Parallel()
	need(t, "openssl")
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
		"-addext", "subjectAltName=IP:127.0.0.1", "-keyout", in("key"), "-out", in("cert"))
	if err := os.WriteFile(in("token"), []byte("a-token-that-is-long-enough\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	settings := smallCache + fmt.Sprintf("api: {listen: %q, tls_cert: %q, tls_key: %q, token_file: %q}\n", address, in("cert"), in("key"), in("token"))
	newGatewayOn(t, "", settings).start()
	flags := []string{"status", "--api", "https://" + address, "--api-ca", in("cert")}
	if r := execute(t, []string{"ISERGATE_TOKEN=a-token-that-is-long-enough"}, binary, flags...); r.code != exitOK {
		t.Errorf("with the token in the environment: %+v", r)
	}
	if r := execute(t, nil, binary, append(flags, "--token-file", in("token"))...); r.code != exitOK {
		t.Errorf("with the token in a file: %+v", r)
	}
	if r := execute(t, []string{"ISERGATE_TOKEN=wrong"}, binary, flags...); r.code != exitFailed || !strings.Contains(r.stderr, "token") {
		t.Errorf("with a wrong token: %+v", r)
	}
	if err := os.Chmod(in("token"), 0o644); err != nil {
		t.Fatal(err)
	}
	other := newGatewayOn(t, "", settings)
	if r := execute(t, nil, binary, other.args...); r.code != exitFailed || !strings.Contains(r.stderr, "chmod 600") {
		t.Errorf("a token that others may read: %+v", r)
	}
}
