package initiator

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

const readBuffer = 256 << 10

// PDU is one whole PDU of the raw level.
type PDU struct {
	Header pdu.Header // Send fills in the lengths
	AHS    []byte     // a multiple of 4 bytes
	Data   []byte     // without padding

	// BadHeaderDigest and BadDataDigest make Send falsify the digest, if there is one.
	BadHeaderDigest, BadDataDigest bool
}

// Message is what the PDU structs of package pdu have in common.
type Message interface {
	Encode(*pdu.Header)
	Decode(*pdu.Header) error
}

// Conn is one iSCSI connection at the level of PDUs. One goroutine may send
// while another receives.
type Conn struct {
	net net.Conn
	br  *bufio.Reader

	// What the login agreed on; set before the full feature phase begins.
	headerDigest, dataDigest bool
	maxRecv                  int // bytes of a data segment that we accept

	wbuf []byte // scratch of Send
	dig  [pdu.DigestLen]byte
}

// DialConn opens a connection to o.Portal without logging in. Only Portal, DialContext, LoginTimeout and
// MaxRecvDataSegmentLength are used.
func DialConn(ctx context.Context, o Options) (*Conn, error) {
	o.EnsureDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.LoginTimeout)
	defer cancel()
	c, err := o.DialContext(ctx, "tcp", o.address())
	if err != nil {
		return nil, fmt.Errorf("initiator: %w", err)
	}
	return NewConn(c), nil
}

// NewConn returns a Conn on an open transport connection, which it owns.
func NewConn(c net.Conn) *Conn {
	return &Conn{net: c, br: bufio.NewReaderSize(c, readBuffer), maxRecv: pdu.MinTextLength}
}

// Close closes the transport connection.
func (c *Conn) Close() error { return c.net.Close() }

// SetDeadline bounds Send and Receive; zero removes the bound.
func (c *Conn) SetDeadline(t time.Time) error { return c.net.SetDeadline(t) }

// SetDigests switches digests on or off, for tests that negotiate by hand.
func (c *Conn) SetDigests(header, data bool) { c.headerDigest, c.dataDigest = header, data }

// SetMaxRecv sets the longest data segment that Receive accepts, in bytes; 8192 before login.
func (c *Conn) SetMaxRecv(n int) { c.maxRecv = n }

// NetConn returns the transport connection, for tests that write broken frames.
func (c *Conn) NetConn() net.Conn { return c.net }

// Send writes one PDU. It fills in the lengths of the header and nothing else.
func (c *Conn) Send(p *PDU) error {
	p.Header.SetAHSLength(len(p.AHS))
	p.Header.SetDataLength(len(p.Data))
	b := append(c.wbuf[:0], p.Header[:]...)
	b = append(b, p.AHS...)
	if c.headerDigest {
		crc := pdu.HeaderDigest(&p.Header, p.AHS)
		if p.BadHeaderDigest {
			crc = ^crc
		}
		b = pdu.AppendDigest(b, crc)
	}
	b = append(b, p.Data...)
	b = append(b, padding[:pdu.Padding(len(p.Data))]...)
	if c.dataDigest && len(p.Data) > 0 {
		crc := pdu.PadDigest(pdu.Digest(0, p.Data), len(p.Data))
		if p.BadDataDigest {
			crc = ^crc
		}
		b = pdu.AppendDigest(b, crc)
	}
	c.wbuf = b
	_, err := c.net.Write(b)
	return err
}

// SendMessage is Send of a message with a data segment.
func (c *Conn) SendMessage(m Message, data []byte) error {
	p := PDU{Data: data}
	m.Encode(&p.Header)
	return c.Send(&p)
}

// Receive reads one PDU. io.EOF means that the target closed the connection between
// PDUs.
func (c *Conn) Receive() (*PDU, error) {
	p := new(PDU)
	ahs, err := c.readHeader(&p.Header)
	if err != nil {
		return nil, err
	}
	p.AHS = ahs
	n := p.Header.DataLength()
	if n > c.maxRecv {
		return nil, protocolError("%v with a data segment of %d bytes, %d declared", p.Header.Opcode(), n, c.maxRecv)
	}
	p.Data = make([]byte, n)
	crc := uint32(0)
	if err := c.readPart(p.Data, &crc); err != nil {
		return nil, err
	}
	return p, c.endData(n, crc)
}

// readHeader reads BHS, AHS and header digest.
func (c *Conn) readHeader(h *pdu.Header) (ahs []byte, err error) {
	if _, err := io.ReadFull(c.br, h[:]); err != nil {
		return nil, err
	}
	if n := h.AHSLength(); n > 0 {
		ahs = make([]byte, n)
		if err := c.fill(ahs); err != nil {
			return nil, err
		}
	}
	if c.headerDigest {
		if err := c.fill(c.dig[:]); err != nil {
			return nil, err
		}
		if pdu.DigestAt(&c.dig) != pdu.HeaderDigest(h, ahs) {
			return nil, fmt.Errorf("%w: header", ErrDigest)
		}
	}
	return ahs, nil
}

// readPart reads the next part of a data segment and continues its digest.
func (c *Conn) readPart(p []byte, crc *uint32) error {
	if err := c.fill(p); err != nil {
		return err
	}
	if c.dataDigest {
		*crc = pdu.Digest(*crc, p)
	}
	return nil
}

// endData reads padding and data digest after a data segment of n bytes.
func (c *Conn) endData(n int, crc uint32) error {
	if p := pdu.Padding(n); p > 0 {
		var pad [4]byte
		if err := c.readPart(pad[:p], &crc); err != nil {
			return err
		}
	}
	if c.dataDigest && n > 0 {
		if err := c.fill(c.dig[:]); err != nil {
			return err
		}
		if pdu.DigestAt(&c.dig) != crc {
			return fmt.Errorf("%w: data", ErrDigest)
		}
	}
	return nil
}

// fill reads len(p) bytes in the middle of a PDU, where the end is an error.
func (c *Conn) fill(p []byte) error {
	_, err := io.ReadFull(c.br, p)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// interrupt makes blocked I/O of the connection fail when ctx ends, until stop is called. Stop returns
// ctx's error if it ended.
func (c *Conn) interrupt(ctx context.Context) (stop func() error) {
	cancel := context.AfterFunc(ctx, func() { c.net.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if !cancel() {
			return ctx.Err()
		}
		return nil
	}
}

var padding [4]byte
