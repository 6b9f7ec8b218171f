package objectstore

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// slowWire is a transport that takes pause for each step of an exchange; steps of
// the upload and of the download are of so many bytes.
type slowWire struct {
	upload, header, download time.Duration
	bytes                    int
}

func (s slowWire) step(req *http.Request, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-req.Context().Done():
		return req.Context().Err()
	}
}

func (s slowWire) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body != nil {
		for buf := make([]byte, s.bytes); ; {
			n, err := req.Body.Read(buf)
			if n > 0 {
				if err := s.step(req, s.upload); err != nil {
					return nil, err
				}
			}
			if err == io.EOF {
				break
			}
		}
	}
	if err := s.step(req, s.header); err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: 200, Body: &slowBody{s, req, 20}}, nil
}

type slowBody struct {
	wire slowWire
	req  *http.Request
	left int
}

func (b *slowBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	if err := b.wire.step(b.req, b.wire.download); err != nil {
		return 0, err
	}
	b.left--
	return copy(p, make([]byte, b.wire.bytes)), nil
}

func (b *slowBody) Close() error { return nil }

// TestWatchdog: what moves is never cut, however slow; what does not move, or trickles, is.
func TestWatchdog(t *testing.T) {
	const stall, header = 10 * time.Second, 60 * time.Second
	for _, c := range []struct {
		name string
		wire slowWire
		ok   bool
	}{
		{"slow but moving", slowWire{9 * time.Second, 59 * time.Second, 9 * time.Second, 40 << 10}, true},
		{"upload stalls", slowWire{upload: 11 * time.Second, bytes: 40 << 10}, false},
		{"upload trickles", slowWire{upload: time.Second, bytes: 3 << 10}, false},
		{"answer does not come", slowWire{header: 71 * time.Second, bytes: 40 << 10}, false},
		{"download stalls", slowWire{download: 11 * time.Second, bytes: 40 << 10}, false},
		{"download trickles", slowWire{download: time.Second, bytes: 3 << 10}, false},
	} {
		for _, size := range []int{0, 1 << 20} {
			if size == 0 && c.wire.upload > 0 && !c.ok {
				continue
			}
			synctest.Test(t, func(t *testing.T) {
				var body io.Reader
				if size > 0 {
					body = bytes.NewReader(make([]byte, size))
				}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://h/", body)
				if err != nil {
					t.Fatal(err)
				}
				w := &watchdog{next: c.wire, stall: stall, header: header}
				resp, err := w.RoundTrip(req)
				got := 0
				if err == nil {
					got, err = io.ReadFull(resp.Body, make([]byte, 20*c.wire.bytes))
					resp.Body.Close()
				}
				var stalled *stalledError
				if c.ok && (err != nil || got != 20*c.wire.bytes) || !c.ok && !errors.As(err, &stalled) {
					t.Errorf("%s, %d bytes up: %d bytes down, %v", c.name, size, got, err)
				}
			})
		}
	}
}

// lingeringWire is a transport that gives a request up and goes on reading its body, as net/http may.
type lingeringWire struct {
	answer  bool // instead of giving up, answers before the body was read
	started chan struct{}
	done    chan error // the error that ends the reading
}

func (l *lingeringWire) RoundTrip(req *http.Request) (*http.Response, error) {
	go func() {
		var first bool
		for buf := make([]byte, 16); ; {
			_, err := req.Body.Read(buf)
			if !first {
				first = true
				close(l.started)
			}
			if err != nil {
				l.done <- err
				return
			}
		}
	}()
	<-l.started
	if l.answer {
		return &http.Response{StatusCode: 503, Body: io.NopCloser(bytes.NewReader(nil))}, nil
	}
	return nil, errors.New("given up")
}

// endless is a body that has no end and is read from the caller's memory.
type endless struct{ memory []byte }

func (e *endless) Read(p []byte) (int, error) { return copy(p, e.memory), nil }
func (e *endless) Close() error               { return nil }

// TestUploadRevoked: once a request has returned, its body's memory belongs to the caller again, whatever the transport still does. The race
// detector sees it if not.
func TestUploadRevoked(t *testing.T) {
	for _, answer := range []bool{false, true} {
		wire := &lingeringWire{answer: answer, started: make(chan struct{}), done: make(chan error, 1)}
		body := &endless{memory: make([]byte, 64)}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://store.test/", body)
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = 1 << 30
		resp, err := (&watchdog{next: wire, stall: time.Minute, header: time.Minute}).RoundTrip(req)
		if answer != (err == nil) {
			t.Fatal(err)
		}
		if resp != nil {
			resp.Body.Close()
		}
		for i := range body.memory {
			body.memory[i] = 1
		}
		if err := <-wire.done; !errors.Is(err, errRevoked) {
			t.Fatalf("reading after the end: %v", err)
		}
	}
}
