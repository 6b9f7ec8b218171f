package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/objectstore/s3test"
)

// long reports whether the long variants of tests were asked for.
func long() bool { return os.Getenv("ISERGATE_LONG") == "1" }

// ext4Image makes an ext4 file system of that many MiB, two thirds full with a part of /usr, and returns its path.
// It is made without root and without mounting anything.
func ext4Image(t *testing.T, dir string, mebibytes int) string {
	t.Helper()
	stage := filepath.Join(dir, "usr")
	room := int64(mebibytes) << 20 / 3 * 2
	errFull := errors.New("full")
	var files int
	for _, from := range []string{"/usr/bin", "/usr/sbin", "/usr/lib", "/usr/share"} {
		err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil // not for us to read
			}
			to := stage + strings.TrimPrefix(path, "/usr")
			switch {
			case d.IsDir():
				return os.MkdirAll(to, 0o755)
			case d.Type() == fs.ModeSymlink:
				link, err := os.Readlink(path)
				if err != nil {
					return err
				}
				return os.Symlink(link, to)
			case !d.Type().IsRegular():
				return nil
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			// A file system needs room for its own blocks.
			if room -= (info.Size()+4095)/4096*4096 + 512; room < 0 {
				return errFull
			}
			files++
			return copyFile(to, path)
		})
		if errors.Is(err, errFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "image.ext4")
	must(t, "mkfs.ext4", "-q", "-d", stage, path, fmt.Sprintf("%dM", mebibytes))
	must(t, "e2fsck", "-fn", path)
	if err := os.RemoveAll(stage); err != nil {
		t.Fatal(err)
	}
	t.Logf("an ext4 file system of %d MiB with %d files", mebibytes, files)
	return path
}

// copyFile copies the content of a file that the user may read, and makes an empty one of another.
func copyFile(to, from string) error {
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	defer w.Close()
	r, err := os.Open(from)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	if _, err := io.Copy(w, r); err != nil {
		return err
	}
	return w.Close()
}

// A real file system goes to a LUN, is checked there in every way of reading, and is the same after the
// volume came back from the bucket. With -short it is small; the slow server gets a small one too, unless ISERGATE_LONG=1.
func TestFilesystemImage(t *testing.T) {
	t.Parallel()
	need(t, "qemu-img", "qemu-io", "mkfs.ext4", "e2fsck", "cmp")
	dir := t.TempDir()
	images := make(map[int]string)
	for _, store := range []string{"file", string(s3test.Versitygw), string(s3test.Radosgw)} {
		size := 1024
		switch {
		case testing.Short():
			size = 32
		case store == string(s3test.Radosgw) && !long():
			size = 128
		}
		if images[size] == "" {
			where := filepath.Join(dir, strconv.Itoa(size))
			if err := os.Mkdir(where, 0o755); err != nil {
				t.Fatal(err)
			}
			images[size] = ext4Image(t, where, size)
		}
		t.Run(fmt.Sprintf("%s-%dMiB", store, size), func(t *testing.T) {
			t.Parallel()
			if store != "file" && testing.Short() {
				t.Skip("not with -short")
			}
			var g *gatewayProcess
			if store == "file" {
				g = newGateway(t)
			} else {
				g = newGatewayOnServer(t, s3test.New(t, s3test.Kind(store)))
			}
			imageTravels(t, g.start(), images[size], size)
		})
	}
}

func imageTravels(t *testing.T, g *gatewayProcess, raw string, mebibytes int) {
	const own, user, secret, peer, peerSecret = host + "-own", "u", "forward-secret-1", "m", "reverse-secret-2"
	files := make(map[string]string)
	for name, text := range map[string]string{"one": secret, "two": peerSecret} {
		files[name] = filepath.Join(g.dir, name)
		if err := os.WriteFile(files[name], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// QEMU proves itself by CHAP; our own initiator wants the target to do so too.
	g.run("volume", "create", "v", "--size", fmt.Sprintf("%dMiB", mebibytes), "--target", target)
	g.run("volume", "create", "scratch", "--size", "64MiB", "--target", target, "--lun", "1")
	g.run("acl", "add", target, host, "--chap-user", user, "--chap-secret-file", files["one"])
	g.run("acl", "add", target, own, "--chap-user", user, "--chap-secret-file", files["one"], "--mutual-user", peer, "--mutual-secret-file", files["two"])
	const chap = ",initiator-name=" + host + ",user=" + user + ",password-secret=chap"
	object := []string{"--object", "secret,id=chap,file=" + files["one"]}
	lun := func(number int, digest string) string {
		return g.imageOptions(target, number, chap+",header-digest="+digest)
	}
	qemuImg := func(what string, args ...string) string {
		t.Helper()
		return must(t, "qemu-img", append(append([]string{what}, object...), args...)...)
	}
	took := func(what string, began time.Time) {
		d := time.Since(began)
		t.Logf("%-40s %6.1f s, %4.0f MiB/s", what, d.Seconds(), float64(mebibytes)/d.Seconds())
	}

	began := time.Now()
	qemuImg("convert", "-n", "-f", "raw", "--target-image-opts", raw, lun(0, "crc32c"))
	took("convert, with header digests", began)

	copied := filepath.Join(g.dir, "back")
	began = time.Now()
	qemuImg("convert", "-O", "raw", "--image-opts", lun(0, "crc32c"), copied)
	took("read back, with header digests", began)
	must(t, "cmp", copied, raw)
	must(t, "e2fsck", "-fn", copied)
	if err := os.Remove(copied); err != nil {
		t.Fatal(err)
	}

	for _, digest := range []string{"none", "crc32c"} {
		args := append([]string{"--image-opts", "-d", "unmap"}, object...)
		for _, command := range []string{"write -P 0x5a 0 4M", "write -P 0xa5 3M 5M", "flush", "discard 2M 2M", "write -z 7M 1M",
			"read -P 0x5a 0 2M", "read -P 0 2M 2M", "read -P 0xa5 4M 3M", "read -P 0 7M 1M"} {
			args = append(args, "-c", command)
		}
		if out := must(t, "qemu-io", append(args, lun(1, digest))...); strings.Contains(out, "failed") {
			t.Fatal(out)
		}
	}

	began = time.Now()
	checkWithDigests(t, initiator.Options{
		Portal: g.portal, InitiatorName: own, TargetName: target, HeaderDigest: initiator.DigestRequired, DataDigest: initiator.DigestRequired,
		CHAP: &initiator.CHAP{User: user, Secret: secret, TargetUser: peer, TargetSecret: peerSecret},
	}, raw)
	t.Logf("read a quarter and wrote an eighth, with all digests, in %s", time.Since(began).Round(time.Millisecond))

	// Without --purge the bucket keeps the volume.
	g.run("lun", "unmap", target, "0")
	g.run("volume", "delete", "v")
	g.fails(exitFailed, "there is no volume", "volume", "show", "v")
	began = time.Now()
	g.run("volume", "restore", "--from", g.bucket(), "--volume", "v")
	t.Logf("restored in %s", time.Since(began).Round(time.Millisecond))
	g.run("lun", "map", target, "v", "--lun", "0")
	began = time.Now()
	qemuImg("compare", "--image-opts", "driver=raw,file.driver=file,file.filename="+raw, lun(0, "none"))
	took("compare after deletion and restore", began)
}

// checkWithDigests compares every fourth MiB of LUN 0 with an image through our own initiator, and writes every eighth again
// as it reads.
func checkWithDigests(t *testing.T, o initiator.Options, raw string) {
	t.Helper()
	ctx := t.Context()
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if p := s.Parameters(); !p.HeaderDigest || !p.DataDigest {
		t.Fatalf("digests were not negotiated: %+v", p)
	}
	l, err := s.OpenLUN(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const step = 1 << 20
	var (
		next atomic.Int64
		wg   sync.WaitGroup
		errs = make(chan error, 4)
	)
	work := func() error {
		want, got := make([]byte, step), make([]byte, step)
		for {
			off := (next.Add(1) - 1) * 4 * step
			if off >= int64(l.Size()) {
				return nil
			}
			if _, err := f.ReadAt(want, off); err != nil {
				return err
			}
			lba := uint64(off) / uint64(l.BlockSize)
			for rewrite := off/step%8 == 0; ; rewrite = false {
				if err := l.Read(ctx, lba, got); err != nil {
					return err
				}
				if !bytes.Equal(got, want) {
					return fmt.Errorf("the MiB at %d differs", off)
				}
				if !rewrite {
					break
				}
				if err := l.Write(ctx, lba, want, false); err != nil {
					return err
				}
			}
		}
	}
	for range cap(errs) {
		wg.Go(func() { errs <- work() })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if err := l.Flush(ctx); err != nil {
		t.Error(err)
	}
}
