package main

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/isergate/isergate/gateway/api"
)

// image makes a raw image of that many MiB with random data, zeros and holes, and returns its path.
func image(t *testing.T, dir string, mebibytes int) string {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed of the image: %d", seed)
	source := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24), byte(seed >> 32)})
	path := filepath.Join(dir, "image.raw")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for i := range mebibytes {
		switch i % 4 {
		case 0, 1:
			_, _ = source.Read(block)
		case 2:
			clear(block)
		case 3: // a hole, but for some sectors that are not aligned to 4 KiB
			if _, err := f.WriteAt(bytes.Repeat([]byte{byte(i)}, 1536), int64(i)<<20+512); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if _, err := f.WriteAt(block, int64(i)<<20); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(int64(mebibytes) << 20); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLibiscsiTools(t *testing.T) {
	t.Parallel()
	need(t, "iscsi-ls", "iscsi-inq", "iscsi-readcapacity16")
	g := newGateway(t, "--open").start()
	for i, block := range []string{"512", "4096"} {
		g.run("volume", "create", "v"+block, "--size", "1GiB", "--block-size", block, "--target", target, "--lun", fmt.Sprint(i))
	}
	if out := must(t, "iscsi-ls", "-s", "iscsi://"+g.portal); !strings.Contains(out, "Target:"+target) || !strings.Contains(out, "Lun:0") || !strings.Contains(out, "Lun:1") {
		t.Errorf("iscsi-ls:\n%s", out)
	}
	for i, block := range []string{"512", "4096"} {
		if out := must(t, "iscsi-inq", g.url(target, i)); !strings.Contains(out, "Vendor:ISERGATE") || !strings.Contains(out, "DIRECT_ACCESS") {
			t.Errorf("iscsi-inq:\n%s", out)
		}
		if out := must(t, "iscsi-readcapacity16", g.url(target, i)); !strings.Contains(out, "LOGICAL BLOCK LENGTH IN BYTES:"+block) || !strings.Contains(out, "Total size:1073741824") {
			t.Errorf("iscsi-readcapacity16:\n%s", out)
		}
	}
	var v api.Volume
	g.json(&v, "volume", "show", "v512")
	if out := must(t, "iscsi-inq", "-e", "1", "-c", "128", g.url(target, 0)); !strings.Contains(out, v.UUID) {
		t.Errorf("the serial number is not the volume's UUID:\n%s", out)
	}
	g.run("volume", "resize", "v512", "2GiB")
	if out := must(t, "iscsi-readcapacity16", g.url(target, 0)); !strings.Contains(out, "Total size:2147483648") {
		t.Errorf("after a resize:\n%s", out)
	}
	g.fails(exitFailed, "mapped", "volume", "delete", "v512")
}

// equal compares LUN 0 of the target with an image, byte by byte.
func (g *gatewayProcess) equal(raw, options, after string) {
	g.t.Helper()
	r := execute(g.t, nil, "qemu-img", "compare", "--image-opts", "driver=raw,file.driver=file,file.filename="+raw, g.imageOptions(target, 0, options))
	if r.code != 0 {
		g.t.Fatalf("after %s: %s%s", after, r.stdout, r.stderr)
	}
}

// QEMU writes an image, compares it, and compares it again after each way in which a gateway can come back.
func TestImageSurvives(t *testing.T) {
	t.Parallel()
	need(t, "qemu-img")
	digests := []string{"none", "crc32c"}
	if testing.Short() {
		digests = digests[1:]
	}
	for _, digest := range digests {
		t.Run("digest-"+digest, func(t *testing.T) {
			g := newGateway(t, "--open").start()
			g.run("volume", "create", "v", "--size", "64MiB", "--ack", "local", "--target", target)
			raw := image(t, g.dir, 64)
			options := ",header-digest=" + digest
			equal := func(after string) { t.Helper(); g.equal(raw, options, after) }
			must(t, "qemu-img", "convert", "-n", "--target-image-opts", "-f", "raw", raw, g.imageOptions(target, 0, options))
			equal("writing")
			g.kill()
			g.start()
			equal("kill -9")
			if code := g.stop(); code != exitOK {
				t.Fatalf("exit %d after SIGTERM", code)
			}
			g.start()
			equal("a stop and a start")

			g.run("lun", "unmap", target, "0")
			g.run("volume", "delete", "v")
			g.run("volume", "restore", "--from", g.bucket(), "--volume", "v")
			g.run("lun", "map", target, "v")
			equal("deletion and restore")

			g.run("drain")
			g.kill()
			if err := os.RemoveAll(g.data()); err != nil {
				t.Fatal(err)
			}
			g.start()
			g.run("volume", "restore", "--from", g.bucket(), "--volume", "v", "--as", "w")
			g.run("target", "create", target)
			g.run("lun", "map", target, "w")
			equal("the loss of the data directory")
		})
	}
}

// Under ack=object everything acknowledged survives the loss of the whole data directory.
func TestObjectLevelSurvivesTheDataDirectory(t *testing.T) {
	t.Parallel()
	need(t, "qemu-io")
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--ack", "object", "--target", target)
	must(t, "qemu-io", "-f", "raw", "-c", "write -P 0x11 0 1M", "-c", "write -P 0x22 512k 256k", "-c", "discard 0 64k", "-c", "write -P 0x33 8M 4k", g.url(target, 0))
	g.kill()
	if err := os.RemoveAll(g.data()); err != nil {
		t.Fatal(err)
	}
	g.start()
	g.run("volume", "restore", "--from", g.bucket(), "--volume", "v")
	g.run("target", "create", target)
	g.run("lun", "map", target, "v")
	out := must(t, "qemu-io", "-f", "raw", "-c", "read -P 0 0 64k", "-c", "read -P 0x11 64k 448k", "-c", "read -P 0x22 512k 256k",
		"-c", "read -P 0x11 768k 256k", "-c", "read -P 0 1M 7M", "-c", "read -P 0x33 8M 4k", g.url(target, 0))
	if strings.Contains(out, "Pattern verification failed") {
		t.Fatal(out)
	}
}

// What was flushed is there after kill -9, at each level, in several rounds.
func TestKillRounds(t *testing.T) {
	t.Parallel()
	need(t, "qemu-io")
	g := newGateway(t, "--open").start()
	levels := []string{"local", "object"}
	for i, level := range levels {
		g.run("volume", "create", level, "--size", "64MiB", "--ack", level, "--target", target, "--lun", fmt.Sprint(i))
	}
	for round := range 4 {
		for i := range levels {
			must(t, "qemu-io", "-f", "raw", "-c", fmt.Sprintf("write -P %d %dM 1M", round+1, round), "-c", fmt.Sprintf("write -P %d 32M 64k", round+1), "-c", "flush", g.url(target, i))
		}
		g.kill()
		g.start()
		for i, level := range levels {
			args := []string{"-f", "raw", "-c", fmt.Sprintf("read -P %d 32M 64k", round+1)}
			for r := range round + 1 {
				args = append(args, "-c", fmt.Sprintf("read -P %d %dM 1M", r+1, r))
			}
			if out := must(t, "qemu-io", append(args, g.url(target, i))...); strings.Contains(out, "failed") {
				t.Fatalf("%s, round %d:\n%s", level, round, out)
			}
			var v api.Volume
			g.json(&v, "volume", "show", level)
			if v.Epoch != uint64(round)+2 || v.Generation != 1 {
				t.Fatalf("%s, round %d: epoch %d, generation %d", level, round, v.Epoch, v.Generation)
			}
		}
	}
}

func TestAccessControl(t *testing.T) {
	t.Parallel()
	need(t, "iscsi-inq", "iscsi-ls")
	g := newGateway(t).start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	url := g.url(target, 0)
	inq := func(env ...string) result { return execute(t, env, "iscsi-inq", "-i", host, url) }
	if r := inq(); r.code == 0 {
		t.Fatal("an initiator without an ACL entry got in")
	}
	if r := execute(t, nil, "iscsi-ls", "-i", host, "iscsi://"+g.portal); strings.Contains(r.stdout, target) {
		t.Fatalf("an initiator without an ACL entry is told of the target: %s", r.stdout)
	}
	g.run("acl", "add", target, host)
	if r := inq(); r.code != 0 {
		t.Fatalf("an initiator with an ACL entry was refused: %s", r.stderr)
	}
	if r := execute(t, nil, "iscsi-inq", "-i", host+"2", url); r.code == 0 {
		t.Fatal("another initiator got in")
	}

	secrets := map[string]string{"one": "forward-secret-1", "two": "reverse-secret-2"}
	files := map[string]string{}
	for name, secret := range secrets {
		files[name] = filepath.Join(g.dir, name)
		if err := os.WriteFile(files[name], []byte(secret+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	g.fails(exitUsage, "differ", "acl", "add", target, host, "--chap-user", "u", "--chap-secret-file", files["one"], "--mutual-user", "m", "--mutual-secret-file", files["one"])
	g.run("acl", "add", target, host, "--chap-user", "u", "--chap-secret-file", files["one"], "--mutual-user", "m", "--mutual-secret-file", files["two"])
	const user, password = "LIBISCSI_CHAP_USERNAME=u", "LIBISCSI_CHAP_PASSWORD=forward-secret-1"
	const peer, peerPassword = "LIBISCSI_CHAP_TARGET_USERNAME=m", "LIBISCSI_CHAP_TARGET_PASSWORD=reverse-secret-2"
	for _, c := range []struct {
		env []string
		in  bool
	}{
		{nil, false},
		{[]string{user, "LIBISCSI_CHAP_PASSWORD=forward-secret-2"}, false},
		{[]string{"LIBISCSI_CHAP_USERNAME=x", password}, false},
		{[]string{user, password}, true},
		{[]string{user, password, peer, peerPassword}, true},
		{[]string{user, password, peer, "LIBISCSI_CHAP_TARGET_PASSWORD=reverse-secret-3"}, false},
	} {
		if r := inq(c.env...); (r.code == 0) != c.in {
			t.Errorf("%q: exit %d\n%s", c.env, r.code, r.stderr)
		}
	}
	g.kill()
	g.start()
	url = g.url(target, 0)
	if r := inq(user, password); r.code != 0 {
		t.Errorf("the entry did not survive a restart: %s", r.stderr)
	}
	g.run("acl", "remove", target, host)
	if r := inq(user, password); r.code == 0 {
		t.Error("an initiator got in after its entry was removed")
	}
}

// A stop with a session that is in use exits with code 0; a target in use is not deleted; a second signal
// does not wait.
func TestStopWithSession(t *testing.T) {
	t.Parallel()
	need(t, "qemu-io")
	for _, twice := range []bool{false, true} {
		g := newGateway(t, "--open").start()
		g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
		client := exec.Command("qemu-io", "-f", "raw", g.url(target, 0))
		stdin, err := client.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := client.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := client.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintln(stdin, "write -P 0x77 0 64k"); err != nil {
			t.Fatal(err)
		}
		var seen []byte
		for b := make([]byte, 1024); !bytes.Contains(seen, []byte("wrote 65536/65536")); {
			n, err := stdout.Read(b)
			if err != nil {
				t.Fatalf("%v after %s", err, seen)
			}
			seen = append(seen, b[:n]...)
		}
		var sessions []api.Session
		g.json(&sessions, "session", "list")
		if len(sessions) != 1 || sessions[0].Target != target || sessions[0].Transport != "tcp" {
			t.Fatalf("%+v", sessions)
		}
		g.fails(exitFailed, "1 session:", "target", "delete", target)
		if twice {
			_ = g.cmd.Process.Signal(syscall.SIGTERM)
			_ = g.cmd.Process.Signal(syscall.SIGINT)
			<-g.exited
			_ = g.log.Close()
			g.cmd = nil
		} else if code := g.stop(); code != exitOK {
			t.Errorf("exit %d", code)
		}
		_ = client.Process.Kill()
		_ = client.Wait()
		g.start()
		if out := must(t, "qemu-io", "-f", "raw", "-c", "read -P 0x77 0 64k", g.url(target, 0)); strings.Contains(out, "failed") {
			t.Fatal(out)
		}
	}
}
