// Package faultproxy stands between a client and an S3 server in tests, and does to requests what networks, proxies and stores do
// to them: answers that refuse, connections that hang or break at each stage, bodies that are cut, slow or changed, lists that are
// old, puts that were done and say that they were not. What happens to a request is decided by a seed and by what the request is, not by
// when it comes. What was done is counted.
package faultproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Proxy is a running proxy. Its methods may be called concurrently.
type Proxy struct {
	target   *url.URL
	seed     uint64
	listener net.Listener
	server   *http.Server
	client   *http.Client
	life     context.Context // ends with Close
	end      context.CancelFunc
	served   sync.WaitGroup // the server and late puts

	mu       sync.Mutex // guards the rest
	rules    []*armed
	seen     map[string]int // requests that were alike
	injected map[Fault]map[Op]int
	requests map[Op]int
	refused  int
	down     bool
	conns    map[net.Conn]struct{}
	put      map[string]time.Time // keys that were created, and when
}

type armed struct {
	Rule
	done int
}

// Start runs a proxy in front of the server at target (http://host:port) on a free port of loopback.
func Start(target string, seed uint64) (*Proxy, error) {
	u, err := url.Parse(target)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		target: u, seed: seed, listener: l,
		client: &http.Client{
			Transport:     &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		seen: map[string]int{}, injected: map[Fault]map[Op]int{}, requests: map[Op]int{}, conns: map[net.Conn]struct{}{}, put: map[string]time.Time{},
	}
	p.life, p.end = context.WithCancel(context.Background())
	p.server = &http.Server{Handler: http.HandlerFunc(p.serve), ConnState: p.connState, ErrorLog: log.New(io.Discard, "", 0)}
	p.served.Go(func() { _ = p.server.Serve(l) }) // always an error: that of Close
	return p, nil
}

// Endpoint is where clients find it: http://127.0.0.1:port.
func (p *Proxy) Endpoint() string { return "http://" + p.listener.Addr().String() }

// Set replaces the rules. For each request the first rule that hits counts. What hangs goes on to hang.
func (p *Proxy) Set(rules ...Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = nil
	for _, r := range rules {
		r.ensureDefaults()
		p.rules = append(p.rules, &armed{Rule: r})
	}
}

// Down begins or ends an outage: every connection is reset, old ones and new ones.
func (p *Proxy) Down(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	for c := range p.conns {
		if down {
			reset(c)
		}
	}
}

// Injected is how often a fault happened so far.
func (p *Proxy) Injected(f Fault) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, of := range p.injected[f] {
		n += of
	}
	return n
}

// Counts is how often each fault happened to each kind of request so far.
func (p *Proxy) Counts() map[Fault]map[Op]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[Fault]map[Op]int{}
	for f, ops := range p.injected {
		out[f] = maps.Clone(ops)
	}
	return out
}

// Requests is how many requests of a kind came so far, changed ones included; Connections that were refused by
// Down are Refused's.
func (p *Proxy) Requests(op Op) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.requests[op]
}

// Total is how many requests and refused connections there were so far.
func (p *Proxy) Total() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.refused
	for _, of := range p.requests {
		n += of
	}
	return n
}

// Close ends the proxy and all that hangs in it. It may be called twice.
func (p *Proxy) Close() {
	p.end()
	_ = p.server.Close()
	p.Down(true)
	p.served.Wait()
	p.client.CloseIdleConnections()
}

func (p *Proxy) connState(c net.Conn, s http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch s {
	case http.StateNew:
		p.conns[c] = struct{}{}
		if p.down {
			p.refused++
			reset(c)
		}
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	}
}

// reset closes a connection so that its other end learns of it by an error.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// exchange is one request on its way.
type exchange struct {
	p    *Proxy
	w    http.ResponseWriter
	r    *http.Request
	q    request
	f    Fault
	hold time.Duration
	age  time.Duration
	dice uint64
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request) {
	x := &exchange{p: p, w: w, r: r, q: describe(r)}
	p.decide(x)
	switch x.f {
	case SlowDown:
		x.refuse(http.StatusServiceUnavailable, "SlowDown")
	case InternalError:
		x.refuse(http.StatusInternalServerError, "InternalError")
	case TooMany:
		x.refuse(http.StatusTooManyRequests, "TooManyRequests")
	case Denied:
		x.refuse(http.StatusForbidden, "AccessDenied")
	case Skewed:
		x.refuse(http.StatusBadRequest, "RequestTimeTooSkewed")
	case WrongRegion:
		w.Header().Set("X-Amz-Bucket-Region", OtherRegion)
		w.Header().Set("Location", "http://127.0.0.1:1/")
		x.refuse(http.StatusMovedPermanently, "PermanentRedirect")
	case HangConn:
		x.count()
		x.wait()
		x.reset()
	case ResetEarly:
		x.count()
		x.reset()
	case ResetUpload:
		x.count()
		_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
		x.reset()
	default:
		x.work()
	}
}

// OtherRegion is where WrongRegion says that the bucket is.
const OtherRegion = "mars-1"

// decide finds the rule for a request.
func (p *Proxy) decide(x *exchange) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests[x.q.op]++
	nth := p.seen[x.q.what]
	p.seen[x.q.what]++
	for _, r := range p.rules {
		if r.Times > 0 && r.done >= r.Times {
			continue
		}
		if f, dice, hit := r.choose(p.seed, &x.q, nth); hit {
			r.done++
			x.f, x.dice, x.hold, x.age = f, dice, r.Hold, r.Age
			return
		}
	}
}

// count notes that the fault happened.
func (x *exchange) count() {
	x.p.mu.Lock()
	defer x.p.mu.Unlock()
	if x.p.injected[x.f] == nil {
		x.p.injected[x.f] = map[Op]int{}
	}
	x.p.injected[x.f][x.q.op]++
}

// wait lasts as long as the fault does.
func (x *exchange) wait() {
	t := time.NewTimer(x.hold)
	defer t.Stop()
	select {
	case <-t.C:
	case <-x.r.Context().Done():
	case <-x.p.life.Done():
	}
}

func (x *exchange) reset() {
	if c, _, err := http.NewResponseController(x.w).Hijack(); err == nil {
		reset(c)
		return
	}
	panic(http.ErrAbortHandler)
}

// refuse answers as S3 does, after the body or, for half of the requests, before it.
func (x *exchange) refuse(status int, code string) {
	x.count()
	if x.dice%2 == 0 {
		_, _ = io.Copy(io.Discard, x.r.Body)
	}
	x.w.Header().Set("Content-Type", "application/xml")
	x.w.WriteHeader(status)
	if x.q.op != Head {
		fmt.Fprintf(x.w, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>%s</Code><Message>injected</Message><RequestId>fault</RequestId></Error>", code)
	}
}

// answer is what the server said.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// work passes the request on, unless it hangs before, and the answer back, as the fault has it.
func (x *exchange) work() {
	in := io.Reader(x.r.Body)
	if x.f == Trickle {
		x.count()
		in = &trickle{r: x.r.Body, life: x.p.life, until: time.Now().Add(x.hold)}
	}
	body, err := io.ReadAll(in)
	if err != nil {
		x.reset()
		return
	}
	switch x.f {
	case Hang:
		x.count()
		x.wait()
		x.reset()
		return
	case Late:
		x.count()
		x.later(body)
		x.reset()
		return
	case CorruptPut:
		if len(body) > 0 {
			x.count()
			body = bytes.Clone(body)
			flip(body, x.dice)
		}
	}
	a, err := x.p.forward(x.r.Context(), x.r, body)
	if err != nil {
		x.reset()
		return
	}
	x.note(a)
	switch x.f {
	case LostAnswer:
		x.count()
		x.reset()
	case HangAfter:
		x.count()
		x.wait()
		x.reset()
	case Repeat:
		if again, err := x.p.forward(x.r.Context(), x.r, body); err == nil {
			if a.status == http.StatusOK && again.status == http.StatusPreconditionFailed {
				x.count()
			}
			a = again
		}
		x.reply(a)
	case ResetAnswer, CutAnswer:
		x.cut(a)
	case ShortAnswer:
		x.shorten(a)
		x.reply(a)
	case CorruptGet:
		if a.status < 300 && len(a.body) > 0 {
			x.count()
			flip(a.body, x.dice)
		}
		x.reply(a)
	case StaleList:
		x.older(a)
		x.reply(a)
	default:
		x.reply(a)
	}
}

// forward sends the request to the server. The signature holds there, because the Host stays.
func (p *Proxy) forward(ctx context.Context, r *http.Request, body []byte) (*answer, error) {
	out := r.Clone(ctx)
	out.URL.Scheme, out.URL.Host, out.RequestURI = p.target.Scheme, p.target.Host, ""
	out.Header.Del("Expect")
	out.Header.Del("Connection")
	out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	if len(body) == 0 {
		out.Body = http.NoBody
	}
	resp, err := p.client.Do(out)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if a.body, err = io.ReadAll(resp.Body); err != nil {
		return nil, err
	}
	return a, nil
}

// note remembers when keys were created.
func (x *exchange) note(a *answer) {
	if x.q.op == Put && a.status == http.StatusOK {
		x.p.mu.Lock()
		defer x.p.mu.Unlock()
		x.p.put[x.q.key] = time.Now()
	}
}

// later sends a put when its sender has long given up.
func (x *exchange) later(body []byte) {
	p := x.p
	r := x.r.Clone(p.life)
	t := time.NewTimer(x.hold)
	p.served.Go(func() {
		defer t.Stop()
		select {
		case <-t.C:
			if a, err := p.forward(p.life, r, body); err == nil {
				x.note(a)
			}
		case <-p.life.Done():
		}
	})
}

// head writes what comes before the body.
func (a *answer) head(h http.Header) {
	for k, v := range a.header {
		if k != "Connection" && k != "Content-Length" {
			h[k] = v
		}
	}
}

// reply passes the answer on.
func (x *exchange) reply(a *answer) {
	h := x.w.Header()
	a.head(h)
	if n := a.header.Get("Content-Length"); x.q.op == Head && n != "" {
		h.Set("Content-Length", n)
	} else if x.q.op != Head {
		h.Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	x.w.WriteHeader(a.status)
	if x.f != Trickle {
		_, _ = x.w.Write(a.body)
		return
	}
	flush := http.NewResponseController(x.w).Flush
	out := &trickle{r: bytes.NewReader(a.body), life: x.p.life, until: time.Now().Add(x.hold)}
	buf := make([]byte, 64<<10)
	for {
		n, err := out.Read(buf)
		if _, werr := x.w.Write(buf[:n]); werr != nil || flush() != nil || err != nil {
			return
		}
	}
}

// cut passes half of the body on and ends the connection.
func (x *exchange) cut(a *answer) {
	if a.status >= 300 || len(a.body) < 2 {
		x.reply(a)
		return
	}
	c, rw, err := http.NewResponseController(x.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	x.count()
	h := http.Header{}
	a.head(h)
	h.Set("Content-Length", strconv.Itoa(len(a.body)))
	fmt.Fprintf(rw, "HTTP/1.1 %d %s\r\n", a.status, http.StatusText(a.status))
	_ = h.Write(rw)
	_, _ = rw.WriteString("\r\n")
	_, _ = rw.Write(a.body[:len(a.body)/2])
	_ = rw.Flush()
	if x.f == ResetAnswer {
		reset(c)
		return
	}
	_ = c.Close()
}

// shorten halves the body, its length and, for one request in two, the range that it says to be.
func (x *exchange) shorten(a *answer) {
	if a.status >= 300 || len(a.body) < 2 {
		return
	}
	x.count()
	a.body = a.body[:len(a.body)/2]
	var first, last int64
	var total string
	if _, err := fmt.Sscanf(a.header.Get("Content-Range"), "bytes %d-%d/%s", &first, &last, &total); err == nil && x.dice%2 == 0 {
		a.header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%s", first, first+int64(len(a.body))-1, total))
	}
}

var (
	contents = regexp.MustCompile(`(?s)<Contents>.*?</Contents>`)
	keyOf    = regexp.MustCompile(`<Key>([^<]*)</Key>`)
)

// older leaves out of a list what is too young.
func (x *exchange) older(a *answer) {
	if a.status != http.StatusOK {
		return
	}
	bucket, _, _ := strings.Cut(x.q.key, "/")
	now := time.Now()
	changed := false
	x.p.mu.Lock()
	a.body = contents.ReplaceAllFunc(a.body, func(entry []byte) []byte {
		m := keyOf.FindSubmatch(entry)
		if m == nil {
			return entry
		}
		if at, ok := x.p.put[bucket+"/"+string(m[1])]; ok && now.Sub(at) < x.age {
			changed = true
			return nil
		}
		return entry
	})
	x.p.mu.Unlock()
	if changed {
		x.count()
	}
}

// flip inverts one bit.
func flip(b []byte, dice uint64) { b[dice%uint64(len(b))] ^= 1 << (dice >> 60 & 7) }

// trickle reads a few bytes at a time until a moment, then all the rest.
type trickle struct {
	r     io.Reader
	life  context.Context
	until time.Time
}

var errEnded = errors.New("faultproxy: closed")

func (t *trickle) Read(b []byte) (int, error) {
	if time.Now().Before(t.until) {
		tick := time.NewTimer(20 * time.Millisecond)
		defer tick.Stop()
		select {
		case <-tick.C:
		case <-t.life.Done():
			return 0, errEnded
		}
		b = b[:min(len(b), 16)]
	}
	return t.r.Read(b)
}
