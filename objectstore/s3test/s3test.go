// Package s3test starts real S3 servers on loopback for tests: versitygw, and radosgw with
// a Ceph monitor and one OSD in memory. The servers die with the process that started them.
package s3test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/isergate/isergate/objectstore"
)

// Kind is a server program.
type Kind string

// The servers. Versitygw follows AWS closely and starts in a second; Radosgw is an old
// clone with deviations of its own, and takes about 15 to 30 seconds to start.
const (
	Versitygw Kind = "versitygw"
	Radosgw   Kind = "radosgw"
)

// Kinds lists all servers.
var Kinds = []Kind{Versitygw, Radosgw}

// Environment variables.
const (
	// EnvVersitygw names the versitygw binary; without it the cache that .ci/install
	// fills is searched.
	EnvVersitygw = "ISERGATE_VERSITYGW"
	// EnvRequireAll set to 1 makes a missing server fail the test instead of skipping it.
	EnvRequireAll = "ISERGATE_REQUIRE_ALL"
)

// ErrNotInstalled: the server's program is not on this machine.
var ErrNotInstalled = errors.New("s3test: server is not installed")

// startTimeout bounds the start of a server on a loaded machine.
const startTimeout = 3 * time.Minute

// Server is a running S3 server. Its methods are for one goroutine at a time.
type Server struct {
	Kind      Kind
	Endpoint  string // http://127.0.0.1:port
	Region    string
	AccessKey string
	SecretKey string

	dir   string
	front *process   // the one that speaks S3
	back  []*process // what it stands on
	ready func(ctx context.Context) error
}

// New starts a server for the length of the test. It skips the test when the server
// is not installed, or fails it if ISERGATE_REQUIRE_ALL=1.
func New(t testing.TB, kind Kind) *Server {
	t.Helper()
	s, err := Start(t.Context(), kind)
	if errors.Is(err, ErrNotInstalled) && os.Getenv(EnvRequireAll) != "1" {
		t.Skipf("%v (set %s=1 to make this a failure)", err, EnvRequireAll)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Start starts a server. Its data is in a temporary directory that Stop removes. The
// error Is ErrNotInstalled when a program is missing.
func Start(ctx context.Context, kind Kind) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	dir, err := os.MkdirTemp("", "isergate-"+string(kind)+"-")
	if err != nil {
		return nil, err
	}
	s := &Server{Kind: kind, dir: dir, Region: "us-east-1", AccessKey: "AK" + random(9), SecretKey: random(20)}
	switch kind {
	case Versitygw:
		err = s.startVersitygw(ctx)
	case Radosgw:
		err = s.startRadosgw(ctx)
	default:
		err = fmt.Errorf("s3test: unknown server %q", kind)
	}
	if err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

func random(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// URL returns the bucket URL for a bucket and prefix of the server.
func (s *Server) URL(bucket, prefix string) string {
	q := url.Values{"endpoint": {s.Endpoint}, "region": {s.Region}}
	return "s3://" + bucket + "/" + prefix + "?" + q.Encode()
}

// Credentials returns the keys for objectstore.Options.
func (s *Server) Credentials() *objectstore.Credentials {
	return &objectstore.Credentials{AccessKeyID: s.AccessKey, SecretAccessKey: s.SecretKey}
}

// Env returns the keys as environment variables for a child process, free of what else the
// environment says about AWS.
func (s *Server) Env() []string {
	return []string{
		"AWS_ACCESS_KEY_ID=" + s.AccessKey,
		"AWS_SECRET_ACCESS_KEY=" + s.SecretKey,
		"AWS_SESSION_TOKEN=",
		"AWS_PROFILE=",
		"AWS_ENDPOINT_URL=",
		"AWS_ENDPOINT_URL_S3=",
		"AWS_EC2_METADATA_DISABLED=true",
	}
}

// Open creates the bucket if it is missing and opens it.
func (s *Server) Open(ctx context.Context, bucket, prefix string) (objectstore.Bucket, error) {
	if err := s.CreateBucket(ctx, bucket); err != nil {
		return nil, err
	}
	return objectstore.Open(ctx, s.URL(bucket, prefix), objectstore.Options{Credentials: s.Credentials()})
}

// CreateBucket creates a bucket; one that the server has already is no error.
func (s *Server) CreateBucket(ctx context.Context, name string) error {
	client := s3.New(s3.Options{
		BaseEndpoint: aws.String(s.Endpoint),
		Region:       s.Region,
		UsePathStyle: true,
		Credentials:  credentials.NewStaticCredentialsProvider(s.AccessKey, s.SecretKey, ""),
	})
	_, err := client.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &name})
	if err != nil {
		if _, herr := client.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: &name}); herr != nil {
			return fmt.Errorf("s3test: create bucket %s: %w", name, err)
		}
	}
	return nil
}

// Kill ends the server like a crash. Connections to it are refused until Restart.
func (s *Server) Kill() { s.front.kill() }

// Restart starts the server again on its old port and data, and waits until it serves.
func (s *Server) Restart(ctx context.Context) error {
	s.front.kill()
	front, err := startProcess(s.front.spec)
	if err != nil {
		return err
	}
	s.front = front
	return s.waitReady(ctx)
}

// Suspend stops the server's program where it is: connections stay open and nothing
// moves on them until Resume.
func (s *Server) Suspend() error { return s.front.suspend() }

// Resume ends Suspend.
func (s *Server) Resume() error { return s.front.resume() }

// Stop ends the server and removes its data. It may be called twice.
func (s *Server) Stop() {
	if s.front != nil {
		s.front.kill()
	}
	for _, p := range s.back {
		p.kill()
	}
	os.RemoveAll(s.dir)
}

// waitReady calls ready until it succeeds, the server ends, or ctx does.
func (s *Server) waitReady(ctx context.Context) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := s.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-s.front.done:
			return fmt.Errorf("s3test: %s ended before it served: %w; it said: %s", s.Kind, s.front.err, s.front.tail())
		case <-ctx.Done():
			return fmt.Errorf("s3test: %s does not serve: %w; it said: %s", s.Kind, err, s.front.tail())
		case <-tick.C:
		}
	}
}

// freePort returns a port that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }
