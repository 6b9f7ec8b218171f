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
// the upload and of the download are of 10 bytes.
type slowWire struct {
	upload, header, download time.Duration
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
		for buf := make([]byte, 10); ; {
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
	return copy(p, make([]byte, 10)), nil
}

func (b *slowBody) Close() error { return nil }

// TestWatchdog: what moves is never cut, however slow; what does not move is.
func TestWatchdog(t *testing.T) {
	const stall, header = 10 * time.Second, 60 * time.Second
	for _, c := range []struct {
		name string
		wire slowWire
		ok   bool
	}{
		{"slow but moving", slowWire{upload: 9 * time.Second, header: 59 * time.Second, download: 9 * time.Second}, true},
		{"upload stalls", slowWire{upload: 11 * time.Second}, false},
		{"answer does not come", slowWire{header: 71 * time.Second}, false},
		{"download stalls", slowWire{download: 11 * time.Second}, false},
	} {
		for _, size := range []int{0, 1000} {
			if size == 0 && c.wire.upload > stall {
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
					var data []byte
					data, err = io.ReadAll(resp.Body)
					got = len(data)
					resp.Body.Close()
				}
				var stalled *stalledError
				if c.ok && (err != nil || got != 200) || !c.ok && !errors.As(err, &stalled) {
					t.Errorf("%s, %d bytes up: %d bytes down, %v", c.name, size, got, err)
				}
			})
		}
	}
}
