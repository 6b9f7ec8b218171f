package api

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// recorder is a Service that notes calls and returns what it is told to.
type recorder struct {
	calls []string
	err   error
}

func note[T any](r *recorder, result T, name string, args ...any) (T, error) {
	text := name
	for _, a := range args {
		text += fmt.Sprintf(" %+v", a)
	}
	r.calls = append(r.calls, text)
	return result, r.err
}

func (r *recorder) Status(context.Context) (Status, error) {
	return note(r, Status{State: Serving}, "Status")
}
func (r *recorder) Volumes(context.Context) ([]Volume, error) {
	return note(r, []Volume{{Name: "a"}}, "Volumes")
}
func (r *recorder) Volume(_ context.Context, n string) (Volume, error) {
	return note(r, Volume{Name: n}, "Volume", n)
}
func (r *recorder) CreateVolume(_ context.Context, c CreateVolume) (Volume, error) {
	return note(r, Volume{Name: c.Name}, "CreateVolume", c.Name, c.SizeBytes)
}
func (r *recorder) ChangeVolume(_ context.Context, n string, c ChangeVolume) (Volume, error) {
	return note(r, Volume{Name: n}, "ChangeVolume", n, *c.SizeBytes)
}
func (r *recorder) DeleteVolume(_ context.Context, n string, d DeleteVolume) error {
	_, err := note(r, 0, "DeleteVolume", n, d)
	return err
}
func (r *recorder) WaitVolume(_ context.Context, n string, w WaitVolume) (Volume, error) {
	return note(r, Volume{Name: n}, "WaitVolume", n, w)
}
func (r *recorder) RestoreVolume(_ context.Context, q RestoreVolume) (Restored, error) {
	return note(r, Restored{LSN: 7}, "RestoreVolume", q)
}
func (r *recorder) Targets(context.Context) ([]Target, error) { return note(r, []Target{}, "Targets") }
func (r *recorder) CreateTarget(_ context.Context, q CreateTarget) (Target, error) {
	return note(r, Target{Name: q.Name}, "CreateTarget", q)
}
func (r *recorder) DeleteTarget(_ context.Context, t string) error {
	_, err := note(r, 0, "DeleteTarget", t)
	return err
}
func (r *recorder) MapLUN(_ context.Context, t string, m MapLUN) (LUN, error) {
	return note(r, LUN{Number: 3}, "MapLUN", t, m.Volume, *m.LUN)
}
func (r *recorder) UnmapLUN(_ context.Context, t string, n uint16) error {
	_, err := note(r, 0, "UnmapLUN", t, n)
	return err
}
func (r *recorder) AddACL(_ context.Context, t string, a AddACL) (ACL, error) {
	return note(r, ACL{Initiator: a.Initiator}, "AddACL", t, a.Initiator, string(a.CHAPSecret))
}
func (r *recorder) RemoveACL(_ context.Context, t, i string) error {
	_, err := note(r, 0, "RemoveACL", t, i)
	return err
}
func (r *recorder) Sessions(context.Context) ([]Session, error) {
	return note(r, []Session{}, "Sessions")
}
func (r *recorder) Drain(context.Context) error { _, err := note(r, 0, "Drain"); return err }

var quiet = slog.New(slog.DiscardHandler)

// serveUnix serves h on a unix socket and returns a client of it.
func serveUnix(t *testing.T, h http.Handler) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := NewHTTPServer(h, quiet)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	c, err := NewClient("unix:"+path, ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Every method of the client arrives at the same method of the service with the
// same arguments, names with odd characters included.
func TestClientMeetsServer(t *testing.T) {
	r := &recorder{}
	c := serveUnix(t, Handler(Options{Service: r, Logger: quiet}))
	ctx := t.Context()
	size, lun := int64(5), 3
	const iqn = "iqn.2026-11.x:a%b?c#d"
	results := []error{
		only(c.Status(ctx)), only(c.Volumes(ctx)), only(c.Volume(ctx, "a b")),
		only(c.CreateVolume(ctx, CreateVolume{Name: "v", SizeBytes: 9})),
		only(c.ChangeVolume(ctx, "v", ChangeVolume{SizeBytes: &size})),
		c.DeleteVolume(ctx, "v", DeleteVolume{Purge: true}),
		only(c.WaitVolume(ctx, "v", WaitVolume{Level: "object", TimeoutSeconds: 1.5})),
		only(c.RestoreVolume(ctx, RestoreVolume{From: "mem:", Volume: "v"})),
		only(c.Targets(ctx)), only(c.CreateTarget(ctx, CreateTarget{iqn})), c.DeleteTarget(ctx, iqn),
		only(c.MapLUN(ctx, iqn, MapLUN{Volume: "v", LUN: &lun})), c.UnmapLUN(ctx, iqn, 255),
		only(c.AddACL(ctx, iqn, AddACL{Initiator: "i", CHAPSecret: []byte("s")})), c.RemoveACL(ctx, iqn, "iqn.x:/y"),
		only(c.Sessions(ctx)), c.Drain(ctx),
	}
	for i, err := range results {
		if err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	want := []string{"Status", "Volumes", "Volume a b", "CreateVolume v 9", "ChangeVolume v 5", "DeleteVolume v {Purge:true}",
		"WaitVolume v {Level:object TimeoutSeconds:1.5}", "RestoreVolume {From:mem: Volume:v As:}", "Targets",
		"CreateTarget {Name:" + iqn + "}", "DeleteTarget " + iqn, "MapLUN " + iqn + " v 3", "UnmapLUN " + iqn + " 255",
		"AddACL " + iqn + " i s", "RemoveACL " + iqn + " iqn.x:/y", "Sessions", "Drain"}
	if !reflect.DeepEqual(r.calls, want) {
		t.Fatalf("got  %q\nwant %q", r.calls, want)
	}
}

// A call may take longer than any deadline of the connection, and ends when its caller goes.
func TestLongCall(t *testing.T) {
	began, ended := make(chan struct{}), make(chan error, 1)
	c := serveUnix(t, Handler(Options{Service: &waiter{began: began, ended: ended}, Logger: quiet}))
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- c.Drain(ctx) }()
	<-began
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the call went on: %v", err)
	}
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if server := NewHTTPServer(nil, quiet); server.ReadTimeout != 0 || server.WriteTimeout != 0 || server.ReadHeaderTimeout == 0 {
		t.Error("a deadline of the connection would end a long call, or a slow header none")
	}
}

// waiter is a Service whose Drain waits for the end of its caller.
type waiter struct {
	recorder
	began chan struct{}
	ended chan error
}

func (w *waiter) Drain(ctx context.Context) error {
	close(w.began)
	<-ctx.Done()
	w.ended <- ctx.Err()
	return ctx.Err()
}

func TestErrorsKeepTheirCode(t *testing.T) {
	r := &recorder{}
	c := serveUnix(t, Handler(Options{Service: r, Logger: quiet}))
	for code := range httpStatus {
		r.err = Errorf(code, "what to do")
		if err := c.Drain(t.Context()); CodeOf(err) != code || err.Error() != "what to do" {
			t.Errorf("%s: %v", code, err)
		}
	}
	r.err = errors.New("odd")
	if err := c.Drain(t.Context()); CodeOf(err) != CodeInternal || err.Error() != "odd" {
		t.Error(err)
	}
}

func TestBadRequests(t *testing.T) {
	r := &recorder{}
	h := Handler(Options{Service: r, Logger: quiet})
	for name, q := range map[string]struct {
		method, path, body string
		status             int
	}{
		"unknown field": {"POST", "/v1/targets", `{"nam":"x"}`, 400},
		"not JSON":      {"POST", "/v1/targets", `{`, 400},
		"two documents": {"POST", "/v1/targets", `{} {}`, 400},
		"wrong type":    {"POST", "/v1/volumes", `{"size_bytes":"10"}`, 400},
		"too large":     {"POST", "/v1/volumes", `{"name":"` + strings.Repeat("x", maxBody) + `"}`, 400},
		"no such path":  {"GET", "/v2/volumes", "", 404},
		"bad LUN":       {"DELETE", "/v1/targets/x/luns/70000", "", 400},
		"no metrics":    {"GET", "/metrics", "", 404},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(q.method, q.path, strings.NewReader(q.body)))
		if w.Code != q.status || !strings.Contains(w.Body.String(), `"error":{"code":`) {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
	}
	if r.calls != nil {
		t.Errorf("a bad request reached the service: %q", r.calls)
	}
}

func TestTokenOverTLS(t *testing.T) {
	cert, ca := certificate(t)
	r := &recorder{}
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "up 1\n") })
	server := httptest.NewUnstartedServer(Handler(Options{Service: r, Metrics: metrics, Token: "right", Logger: quiet}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	server.StartTLS()
	defer server.Close()
	for token, want := range map[string]Code{"right": "", "wrong": CodeDenied, "": CodeDenied} {
		c, err := NewClient(server.URL, ClientOptions{Token: token, CAFile: ca})
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Status(t.Context())
		c.Close()
		if (err == nil) != (want == "") || err != nil && CodeOf(err) != want {
			t.Errorf("token %q: %v", token, err)
		}
	}
	c, err := NewClient(server.URL, ClientOptions{Token: "right"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Status(t.Context()); CodeOf(err) != CodeUnavailable {
		t.Errorf("an unknown certificate was trusted: %v", err)
	}
	w := httptest.NewRecorder()
	server.Config.Handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != http.StatusUnauthorized {
		t.Errorf("metrics without a token: %d", w.Code)
	}
}

func TestNoNode(t *testing.T) {
	c, err := NewClient("unix:"+filepath.Join(t.TempDir(), "none"), ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Status(t.Context()); CodeOf(err) != CodeUnavailable || !Unreachable(err) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
	for _, bad := range []string{"", "unix:", "http://x", "https://", "https://u:p@x", "https://x/y", "x"} {
		if _, err := NewClient(bad, ClientOptions{}); CodeOf(err) != CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// certificate makes a key pair for 127.0.0.1 and the file that trusts it.
func certificate(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, path
}
