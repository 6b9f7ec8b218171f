package tcp

import (
	"net"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
)

// NewConnAfter is NewConn for a connection of which the first bytes were read already, at most 16 KiB: they are received again.
func NewConnAfter(nc net.Conn, read []byte) *Conn {
	if len(read) > readBuffer {
		panic("tcp: more was read of a connection than its reader holds")
	}
	c := NewConn(nc)
	c.r.to = copy(c.r.buf[:], read)
	return c
}

// HandOver ends the Datamover without ending the connection: it sends the final Login Response, and returns the connection, with what was
// received of it behind the last PDU. No byte of the peer is read meanwhile, and none is sent behind final: what follows
// is another protocol (ISER-14, IWARP-7). It takes the place of Enable, and is called by the goroutine that calls Receive. All other methods
// fail with ErrClosed from then on, and Close does not touch the connection. After an error the
// connection is still the Datamover's, and good for nothing but Close.
func (c *Conn) HandOver(final *iscsi.PDU) (net.Conn, []byte, error) {
	if err := c.w.last(c.numbers, final); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, iscsi.ErrClosed
	}
	c.closed = true
	close(c.done)
	c.nc.SetDeadline(time.Time{})
	surplus := append([]byte(nil), c.r.buf[c.r.from:c.r.to]...)
	c.r.from, c.r.to = 0, 0
	return c.nc, surplus, nil
}

// last queues a PDU behind which nothing is taken any more, and returns when it is written.
func (w *writer) last(n iscsi.Numbers, p *iscsi.PDU) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.usable(); err != nil {
		return err
	}
	h := p.Header
	w.put(n, &h, p.Data)
	w.closing = true
	w.cond.Broadcast()
	for w.writing {
		w.cond.Wait()
	}
	if w.err == nil {
		// As extend, which a writer that takes no more leaves to Close.
		w.nc.SetWriteDeadline(time.Now().Add(stallTimeout))
		w.writing = true
		w.drain()
	}
	return w.err
}
