package objectstore

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// newTransport tunes the SDK's transport, which carries the trusted authorities.
func newTransport(client *awshttp.BuildableClient, o Options) *http.Transport {
	t := client.GetTransport()
	t.DialContext = client.GetDialer().DialContext
	t.MaxIdleConns = o.Connections
	t.MaxIdleConnsPerHost = o.Connections
	t.ResponseHeaderTimeout = o.ResponseHeaderTimeout
	t.ReadBufferSize = 64 << 10
	t.WriteBufferSize = 64 << 10
	// One connection for all requests would line them up; S3 speaks HTTP/1.1.
	t.ForceAttemptHTTP2 = false
	t.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	return t
}

// newHTTPClient returns the client of one bucket. It does not follow redirects: they mean
// another region, and the signature would not hold there.
func newHTTPClient(t *http.Transport, o Options) *http.Client {
	return &http.Client{
		Transport:     &watchdog{next: t, stall: o.StallTimeout, header: o.ResponseHeaderTimeout},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// leastRate is what a transfer has to reach over the stall time, in bytes per second. A connection that trickles would otherwise hold an
// object, and with it all that come after it, for hours, while a new connection may be fine.
const leastRate = 4 << 10

// watchdog aborts a request when less than leastRate of its body or of the answer's body moves for
// the stall time. Such a transfer otherwise lasts until the caller's context ends;
// faster ones, however slow, must not be cut.
type watchdog struct {
	next          http.RoundTripper
	stall, header time.Duration
}

// stalledError is the cause of an aborted request.
type stalledError struct{ after time.Duration }

func (e *stalledError) Error() string {
	return fmt.Sprintf("no progress, or less than %d bytes/s, for %v", leastRate, e.after)
}

// RoundTrip implements http.RoundTripper.
func (w *watchdog) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	stalled := &stalledError{w.stall}
	timer := time.AfterFunc(w.stall, func() { cancel(stalled) })
	p := &progress{timer: timer, stall: w.stall, least: int64(leastRate * w.stall.Seconds()), ctx: ctx, stop: func() { timer.Stop(); cancel(nil) }}

	out := req.WithContext(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		upload := &watchedUpload{body: req.Body, p: p, left: req.ContentLength, whole: w.stall + w.header}
		defer upload.revoke()
		out.Body = upload
		out.GetBody = nil
	} else {
		// Nothing to upload: connecting comes first, then the wait for the answer.
		p.extend(w.stall + w.header)
	}
	resp, err := w.next.RoundTrip(out)
	if err != nil {
		p.stop()
		return nil, p.cause(err)
	}
	p.extend(w.stall)
	resp.Body = &watchedBody{ReadCloser: resp.Body, p: p}
	return resp, nil
}

// progress is the timer of one request.
type progress struct {
	timer *time.Timer
	stall time.Duration
	least int64        // bytes that move the deadline
	moved atomic.Int64 // bytes since the deadline was moved
	ctx   context.Context
	stop  func()
}

// move counts bytes, and moves the deadline when they are enough.
func (p *progress) move(n int) {
	if p.moved.Add(int64(n)) >= p.least {
		p.extend(p.stall)
	}
}

// extend moves the deadline, unless it has passed.
func (p *progress) extend(d time.Duration) {
	p.moved.Store(0)
	if p.ctx.Err() == nil {
		p.timer.Reset(d)
	}
}

// cause replaces a bare cancellation by what caused it.
func (p *progress) cause(err error) error {
	var stalled *stalledError
	if err != nil && err != io.EOF && errors.As(context.Cause(p.ctx), &stalled) {
		return stalled
	}
	return err
}

// watchedUpload is the body of a request until its RoundTrip has returned. A transport may go on sending after that, when the
// request was given up or answered early; by then the memory holds something else.
type watchedUpload struct {
	p     *progress
	whole time.Duration // deadline once all was read

	mu      sync.Mutex // held while the body's memory is read
	body    io.ReadCloser
	left    int64
	revoked bool
}

var errRevoked = errors.New("the request has ended")

// revoke ends the use of the body's memory: nobody reads it when revoke has returned.
func (u *watchedUpload) revoke() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.revoked = true
}

// Close implements io.Closer.
func (u *watchedUpload) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.body.Close()
}

// Read implements io.Reader. There is no WriteTo: what is sent is a copy.
func (u *watchedUpload) Read(b []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.revoked {
		return 0, errRevoked
	}
	n, err := u.body.Read(b)
	u.left -= int64(n)
	if u.left <= 0 || err != nil {
		u.p.extend(u.whole)
	} else {
		u.p.move(n)
	}
	return n, err
}

type watchedBody struct {
	io.ReadCloser
	p    *progress
	once sync.Once
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.p.move(n)
	if err != nil {
		err = b.p.cause(err)
		b.once.Do(b.p.stop)
	}
	return n, err
}

func (b *watchedBody) Close() error {
	err := b.ReadCloser.Close()
	b.once.Do(b.p.stop)
	return err
}

// storeError is the answer of a store in few words; Unwrap gives the SDK's error.
type storeError struct {
	status  int
	code    string
	message string
	region  string // where the bucket is, if the store said it
	id      string
	err     error
}

func (e *storeError) Error() string {
	s := fmt.Sprintf("%d", e.status)
	if e.code != "" {
		s += " " + e.code
	} else {
		s += " " + http.StatusText(e.status)
	}
	if e.message != "" {
		s += fmt.Sprintf(": %.300s", e.message)
	}
	if e.region != "" {
		s += ": the bucket is in region " + e.region
	}
	if e.id != "" {
		s += " (request " + e.id + ")"
	}
	return s
}

func (e *storeError) Unwrap() error { return e.err }

// shortCause strips what the SDK wraps around an error.
func shortCause(err error) error {
	var re *smithyhttp.ResponseError
	if errors.As(err, &re) && re.Response != nil && re.Response.Response != nil {
		if re.HTTPStatusCode() == 0 {
			return re.Err // nothing came back
		}
		e := &storeError{status: re.HTTPStatusCode(), err: err}
		var ae smithy.APIError
		if errors.As(err, &ae) {
			e.code, e.message = ae.ErrorCode(), ae.ErrorMessage()
		} else {
			e.message = re.Err.Error()
		}
		h := re.Response.Header
		e.id = h.Get("X-Amz-Request-Id")
		if s := statusSentinel(e.status, e.code); s == ErrWrongRegion {
			e.region = h.Get("X-Amz-Bucket-Region")
		}
		return e
	}
	var oe *smithy.OperationError
	if errors.As(err, &oe) {
		return oe.Err
	}
	return err
}
