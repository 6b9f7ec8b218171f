package portal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/internal/loglimit"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/tcp"
)

// Transport says what a portal serves.
type Transport uint8

// Transports.
const (
	TransportAuto Transport = iota // both: each connection's first bytes tell
	TransportTCP                   // iSCSI over TCP
	TransportISER                  // iSER, over connections that begin as iWARP or that change over after login; discovery over TCP too
)

// String returns the word of the configuration.
func (t Transport) String() string {
	switch t {
	case TransportAuto:
		return "auto"
	case TransportTCP:
		return "tcp"
	case TransportISER:
		return "iser"
	}
	return fmt.Sprintf("unknown (%d)", uint8(t))
}

// ParseTransport is the inverse of String.
func ParseTransport(text string) (Transport, error) {
	for t := TransportAuto; t <= TransportISER; t++ {
		if text == t.String() {
			return t, nil
		}
	}
	return 0, fmt.Errorf("%q is no transport: use tcp, iser or auto", text)
}

// Defaults of Options.
const (
	DefaultTimeout              = 10 * time.Second
	DefaultMaxPending           = 256
	DefaultMaxPendingPerAddress = 64
)

// Of what anybody who reaches a portal can cause, logBurst lines are logged, and then one for each logInterval.
const (
	logBurst    = 20
	logInterval = time.Second
)

// Options of a Listener. The zero value of a field means its default.
type Options struct {
	Transport Transport
	// ISER serves iSER. It is needed unless Transport is TransportTCP.
	ISER *ISER

	// Timeout bounds how long a connection may take to show what it is, and then the exchange of MPA frames. Default 10 s.
	Timeout time.Duration
	// MaxPending bounds the connections that have not got so far, and MaxPendingPerAddress those of one IP address. Further ones are
	// closed at once. Defaults 256 and 64.
	MaxPending           int
	MaxPendingPerAddress int

	Metrics *Metrics     // nil: none
	Logger  *slog.Logger // nil: slog.Default
}

func (o *Options) ensureDefaults() {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.MaxPending == 0 {
		o.MaxPending = DefaultMaxPending
	}
	if o.MaxPendingPerAddress == 0 {
		o.MaxPendingPerAddress = DefaultMaxPendingPerAddress
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Validate returns every fault of the options, after their defaults.
func (o Options) Validate() error {
	o.ensureDefaults()
	var errs []error
	bad := func(wrong bool, text string) {
		if wrong {
			errs = append(errs, errors.New("portal: "+text))
		}
	}
	bad(o.Transport > TransportISER, "the transport is unknown")
	bad(o.Transport != TransportTCP && o.ISER == nil, "ISER is required")
	bad(o.Timeout < 0, "Timeout is negative")
	bad(o.MaxPending < 0 || o.MaxPendingPerAddress < 0, "a limit is negative")
	return errors.Join(errs...)
}

// Listener makes a Datamover of each connection that it accepts: which one, the first bytes of the connection tell. It implements
// iscsi.Listener. No connection holds up another one.
type Listener struct {
	l    net.Listener
	opt  Options
	logs loglimit.Limit // of lines that anybody who reaches the portal can cause

	ready  chan accepted
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	done   sync.WaitGroup // everything that Close waits for
	once   sync.Once

	mu sync.Mutex
	// The fields below are guarded by mu.
	pending map[net.Conn]string // by address
	perAddr map[string]int
}

// accepted is what Accept returns.
type accepted struct {
	dm  iscsi.Datamover
	err error
}

var _ iscsi.Listener = (*Listener)(nil)

// Serve returns a Listener on l, which it owns. It names every fault of the options.
func Serve(l net.Listener, o Options) (*Listener, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	p := &Listener{l: l, opt: o, ready: make(chan accepted), pending: make(map[net.Conn]string), perAddr: make(map[string]int)}
	p.logs.Init(logBurst, logInterval)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.done.Go(p.run)
	return p, nil
}

// Addr implements iscsi.Listener.
func (l *Listener) Addr() net.Addr { return l.l.Addr() }

// Accept implements iscsi.Listener. It returns connections in the order in which they showed what they are.
func (l *Listener) Accept() (iscsi.Datamover, error) {
	select {
	case a := <-l.ready:
		return a.dm, a.err
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close stops accepting, and closes the connections that Accept has not returned. It waits for them. Others stay. It is idempotent.
func (l *Listener) Close() error {
	var err error
	l.once.Do(func() {
		err = l.l.Close()
		l.cancel()
		l.mu.Lock()
		for nc := range l.pending {
			nc.Close()
		}
		l.mu.Unlock()
	})
	l.done.Wait()
	return err
}

// run accepts connections.
func (l *Listener) run() {
	for {
		nc, err := l.l.Accept()
		if err != nil {
			// Whoever calls Accept decides how soon to try again.
			if !l.deliver(accepted{err: err}) || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		if !l.enter(nc) {
			l.opt.Metrics.first.WithLabelValues(firstRefused).Inc()
			nc.Close()
			continue
		}
		l.done.Go(func() { l.sort(nc) })
	}
}

// deliver hands a to Accept. It reports false if that is over.
func (l *Listener) deliver(a accepted) bool {
	select {
	case l.ready <- a:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// enter counts a connection among those that are pending, unless a limit forbids it.
func (l *Listener) enter(nc net.Conn) bool {
	host := nc.RemoteAddr().String()
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil || len(l.pending) >= l.opt.MaxPending || l.perAddr[host] >= l.opt.MaxPendingPerAddress {
		return false
	}
	l.pending[nc] = host
	l.perAddr[host]++
	return true
}

// leave takes a connection out of that count.
func (l *Listener) leave(nc net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	host, ok := l.pending[nc]
	if !ok {
		return
	}
	delete(l.pending, nc)
	if l.perAddr[host]--; l.perAddr[host] == 0 {
		delete(l.perAddr, host)
	}
}

// sort makes a Datamover of one connection, and delivers it.
func (l *Listener) sort(nc net.Conn) {
	defer l.leave(nc)
	ctx, cancel := context.WithTimeout(l.ctx, l.opt.Timeout)
	defer cancel()
	read, mpa, err := peek(nc, time.Now().Add(l.opt.Timeout))
	if err != nil {
		nc.Close()
		l.opt.Metrics.first.WithLabelValues(firstNothing).Inc()
		return
	}
	var dm iscsi.Datamover
	if mpa {
		l.opt.Metrics.first.WithLabelValues(firstMPA).Inc()
		c := l.message(ctx, nc, read)
		if c == nil {
			return
		}
		dm = c
	} else {
		l.opt.Metrics.first.WithLabelValues(firstISCSI).Inc()
		if l.opt.Transport == TransportTCP {
			dm = tcp.NewConnAfter(nc, read)
		} else {
			dm = newStream(l, nc, read)
		}
	}
	if !l.deliver(accepted{dm: dm}) {
		dm.Close(false)
	}
}

// message answers an MPA request: the login follows in messages (ISER-D1, mode A). It returns nil if the connection is closed.
func (l *Listener) message(ctx context.Context, nc net.Conn, read []byte) *iser.Conn {
	if l.opt.Transport == TransportTCP {
		l.log(nc, slog.LevelWarn, "iSER connection refused: this portal serves TCP only; give it transport=auto or transport=iser, or let the initiator log in over TCP")
		l.result(byMessage, notServed)
		nc.Close()
		return nil
	}
	r, err := l.opt.ISER.respond(ctx, nc, read)
	if err != nil {
		l.log(nc, slog.LevelDebug, "no MPA request", "err", err)
		l.result(byMessage, noRequest)
		nc.Close()
		return nil
	}
	c, err := l.opt.ISER.target.Accept(ctx, r)
	if err != nil {
		l.log(nc, slog.LevelInfo, "iSER connection was not made", "err", err)
		l.result(byMessage, outcome(err))
		return nil
	}
	l.result(byMessage, established)
	l.opt.Metrics.watch(r)
	return c
}

// log writes a line about a connection, unless there were too many; the next one says how many.
func (l *Listener) log(nc net.Conn, level slog.Level, msg string, attrs ...any) {
	if !l.opt.Logger.Enabled(l.ctx, level) {
		return
	}
	left, ok := l.logs.Allow()
	if !ok {
		return
	}
	if left > 0 {
		attrs = append(attrs, "unlogged", left)
	}
	l.opt.Logger.With("portal", l.Addr().String(), "remote", nc.RemoteAddr().String()).Log(l.ctx, level, msg, attrs...)
}

func (l *Listener) result(login, result string) {
	l.opt.Metrics.requests.WithLabelValues(login, result).Inc()
}

func outcome(err error) string {
	if errors.Is(err, iscsi.ErrResources) {
		return noMemory
	}
	return failed
}
