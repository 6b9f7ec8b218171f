package gateway

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
)

// A directory bucket whose file system is not mounted at a start: its volumes are served, nothing is put into the
// directory below the mount, and destaging goes on when it is back.
func TestBucketDirectoryIsMissing(t *testing.T) {
	for name, leave := range map[string]func(dir string) error{
		"missing": func(string) error { return nil },
		"empty":   func(dir string) error { return os.Mkdir(dir, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			dir := strings.TrimPrefix(cfg.Bucket.URL, "file://")
			n := startNode(t, cfg)
			v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20, BlockSize: 4096})
			stopNode(t, n)
			if err := os.Rename(dir, dir+".away"); err != nil {
				t.Fatal(err)
			}
			if err := leave(dir); err != nil {
				t.Fatal(err)
			}

			n = startNode(t, cfg)
			data := bytes.Repeat([]byte("0123456789abcdef"), 256)
			writeBlocks(t, medium{n.volume(v.id)}, 3, data)
			s, err := n.Status(t.Context())
			if err != nil || !strings.Contains(s.Bucket.Error, "missing or empty") {
				t.Errorf("status %+v, %v", s.Bucket, err)
			}
			if !isMissing(dir) {
				t.Error("a bucket was made in its place")
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(dir+".away", dir); err != nil {
				t.Fatal(err)
			}
			if _, err := n.WaitVolume(t.Context(), "v", api.WaitVolume{Level: cache.Object.String()}); err != nil {
				t.Error(err)
			}
		})
	}
}

// Why a directory will not do as a bucket is said once: where it is, and what is wrong there.
func TestDirectoryThatIsNoBucket(t *testing.T) {
	cfg := testConfig(t)
	dir := strings.TrimPrefix(cfg.Bucket.URL, "file://")
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := tryNode(t, cfg, io.Discard)
	if err == nil || strings.Count(err.Error(), dir) != 1 || strings.Count(err.Error(), "objectstore:") != 1 || !strings.Contains(err.Error(), "it is not a directory") {
		t.Errorf("%v", err)
	}
}

// What only reads a bucket makes none.
func TestNoBucketIsMadeByReading(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	missing, empty := filepath.Join(t.TempDir(), "none"), t.TempDir()
	for _, dir := range []string{missing, empty} {
		_, err := n.RestoreVolume(t.Context(), api.RestoreVolume{From: "file://" + dir, Volume: "v"})
		wantCode(t, err, api.CodeNotFound, "there is no bucket")
		_, err = InspectBucket(t.Context(), "file://"+dir, false, new(ReadSoFar))
		wantCode(t, err, api.CodeNotFound, "there is no bucket")
		if !isMissing(dir) {
			t.Errorf("%s was made a bucket", dir)
		}
	}
}

// The files of the API on TCP are read, and all faults of them reported, before anything is made.
func TestFilesOfTheAPIAreReadFirst(t *testing.T) {
	cfg := testConfig(t)
	cfg.API.Listen, cfg.API.TLSCert, cfg.API.TLSKey, cfg.API.TokenFile = "127.0.0.1:0", "/none/cert", "/none/key", "/none/token"
	var log syncBuffer
	_, err := tryNode(t, cfg, &log)
	for _, want := range []string{"api.tls_cert", "api.token_file"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in %v", want, err)
		}
	}
	if _, err := os.Stat(cfg.DataDir); !os.IsNotExist(err) {
		t.Errorf("the data directory was made: %v", err)
	}
	if strings.Contains(log.String(), "gateway stopped") {
		t.Errorf("a start that failed says: %s", log.String())
	}
}
