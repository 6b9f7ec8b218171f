package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Limits of a connection.
const (
	loginSegment = 8192            // bytes of a data segment before full feature phase (RFC 7143, 13.12)
	closeTimeout = 2 * time.Second // a graceful Close sends what is queued within this
	lingerTime   = 2 * time.Second // and reads until the peer closes, so that no reset destroys what it has not read
	readBuffer   = 16 << 10        // bytes
	largeOut     = 32 << 10        // bytes of a Data-Out whose header is worth a read of its own
	keepControl  = 64 << 10        // bytes of control data a connection keeps memory for
	past         = int64(1)        // a deadline that is over
)

// Conn is one iSCSI connection over TCP. It implements iscsi.Datamover.
type Conn struct {
	nc       net.Conn
	numbers  iscsi.Numbers
	received atomic.Uint64
	live     atomic.Int32 // commands that were received and not released
	w        writer

	// The fields below belong to the goroutine that calls Receive.
	r            reader
	headerDigest bool
	dataDigest   bool
	fullFeature  bool
	limit        int // bytes of a received data segment
	pdu          iscsi.PDU
	ahs          [pdu.MaxAHSLength]byte
	trailer      [pdu.DigestLen]byte // padding or digest
	vector       [1][]byte
	control      []byte
	out          pdu.DataOut      // the last one received
	smallOut     bool             // it answered an R2T, with less than largeOut
	params       iscsi.Parameters // constant in full feature phase, apart from what the writer has for itself

	mu sync.Mutex
	// The fields below are guarded by mu.
	closed    bool
	transfers map[pdu.TaskTag]*transfer // commands whose unsolicited Data-Out is on its way
	bursts    bursts                    // R2Ts that are not answered completely
	landing   *transfer                 // whose Data-Out Receive is reading: it may touch the transfer and its buffers; changed by Receive only
	final     *pdu.DataOut              // that Data-Out

	done chan struct{} // closed by Close
}

// NewConn returns the datamover of one connection, which it owns.
func NewConn(nc net.Conn) *Conn {
	c := &Conn{
		nc: nc, limit: loginSegment, done: make(chan struct{}),
		transfers: make(map[pdu.TaskTag]*transfer),
	}
	c.r.c = c
	c.r.late = newLateRead(nc, c.r.ahead)
	c.w.init(nc)
	c.w.failed = func() { c.Close(false) }
	return c
}

// Traits implements iscsi.Datamover.
func (c *Conn) Traits() iscsi.Traits { return iscsi.Traits{Transport: "tcp"} }

// LocalAddr implements iscsi.Datamover.
func (c *Conn) LocalAddr() net.Addr { return c.nc.LocalAddr() }

// RemoteAddr implements iscsi.Datamover.
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// Received implements iscsi.Datamover.
func (c *Conn) Received() uint64 { return c.received.Load() }

// Start implements iscsi.Datamover.
func (c *Conn) Start(n iscsi.Numbers) { c.numbers = n }

// Enable implements iscsi.Datamover. Digests begin with the first PDU after the final Login Response, in both directions.
func (c *Conn) Enable(p *iscsi.Parameters, final *iscsi.PDU) error {
	c.params = *p
	c.limit = int(p.MaxRecvDataSegmentLength)
	c.headerDigest, c.dataDigest = p.HeaderDigest, p.DataDigest
	c.fullFeature = true
	return c.w.enable(c.numbers, final, p)
}

// NoticeKeyValues implements iscsi.Datamover.
func (c *Conn) NoticeKeyValues(p *iscsi.Parameters) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.w.segment = int(p.InitiatorMaxRecvDataSegmentLength)
}

// SendControl implements iscsi.Datamover.
func (c *Conn) SendControl(p *iscsi.PDU) error {
	if p.Task != nil {
		return c.sendStatus(p)
	}
	if err := c.w.control(c.numbers, p); err != nil {
		if errors.Is(err, errBacklog) {
			c.Close(false)
		}
		return err
	}
	go c.w.flush() // the caller may be the reader, which must not wait for the peer to read
	return nil
}

// Close implements iscsi.Datamover.
func (c *Conn) Close(graceful bool) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.done)
	c.mu.Unlock()
	if !graceful {
		c.w.abort()
		return c.nc.Close()
	}
	c.nc.SetReadDeadline(time.Unix(past, 0)) // wakes Receive
	c.w.finish(time.Now().Add(closeTimeout))
	half, ok := c.nc.(interface{ CloseWrite() error })
	if !ok {
		return c.nc.Close()
	}
	half.CloseWrite()
	go func() {
		c.nc.SetReadDeadline(time.Now().Add(lingerTime))
		io.Copy(io.Discard, io.LimitReader(c.nc, 1<<20))
		c.nc.Close()
	}()
	return nil
}

// reader reads from the connection through a small buffer, which large reads bypass.
type reader struct {
	c        *Conn
	buf      [readBuffer]byte
	from, to int
	// exact: nothing is read ahead, so that no payload passes through buf.
	exact bool
	late  lateRead // nil: how much to read is decided before there is something
}

// full fills p, which is not a logical unit's memory.
func (r *reader) full(p []byte) error {
	for len(p) > 0 {
		if r.from == r.to && len(p) < len(r.buf) && !r.exact {
			if err := r.fill(len(p)); err != nil {
				return err
			}
		}
		if r.from < r.to {
			p = p[r.copy(p):]
			continue
		}
		n, err := r.read(p, false)
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// fill reads into the empty buffer. need is how much the caller needs next.
func (r *reader) fill(need int) error {
	n, err := r.readInto(r.buf[:], need)
	r.from, r.to = 0, n
	return err
}

// ahead returns the part of p to read into now that bytes are there: only what is needed, if what follows has a place of its own.
func (r *reader) ahead(p []byte, need int) []byte {
	if need < len(p) && r.c.expectsLarge() {
		r.exact = true
		return p[:need]
	}
	return p
}

func (r *reader) copy(p []byte) int {
	n := copy(p, r.buf[r.from:r.to])
	r.from += n
	return n
}

// errDetached: the task whose buffers are being filled gave them back.
var errDetached = errors.New("tcp: transfer is detached")

// read reads at least one byte. A deadline is not an error but a wake-up: from Close, or from a task that wants its
// buffers back. In the second case the reader leaves the task's transfer, and read returns errDetached
// if p is the task's memory.
func (r *reader) read(p []byte, tasks bool) (int, error) { return r.readUntil(p, tasks, 0) }

// readInto is read of a buffer that is not a task's, of which need bytes are needed.
func (r *reader) readInto(p []byte, need int) (int, error) { return r.readUntil(p, false, need) }

func (r *reader) readUntil(p []byte, tasks bool, need int) (int, error) {
	for {
		var n int
		var err error
		if need > 0 && r.late != nil {
			n, err = r.late.read(p, need)
		} else {
			n, err = r.c.nc.Read(p)
		}
		if n > 0 {
			return n, nil
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, os.ErrDeadlineExceeded):
			if r.c.isClosed() {
				return 0, iscsi.ErrClosed
			}
			return 0, err
		}
		if left, err := r.c.woken(); err != nil || left && tasks {
			if err == nil {
				err = errDetached
			}
			return 0, err
		}
	}
}

// woken handles the wake-up of the reader: it reports whether the reader left a transfer.
func (c *Conn) woken() (left bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false, iscsi.ErrClosed
	}
	c.nc.SetReadDeadline(time.Time{})
	if c.landing == nil || !c.landing.detached {
		return false, nil
	}
	c.leave()
	return true, nil
}

func (c *Conn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}
