package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// messages is the peer's end of an iSER connection, over software iWARP. It shares no code with the initiator but the PDU codec.
type messages struct {
	t    testing.TB
	qp   rdma.QP
	cq   rdma.CQ
	mr   rdma.MR
	buf  []byte // receives, then one message that is sent, then data
	came []rdma.WC
	raw  []byte // of the message that Receive returned last
	peer rdma.ConnParams

	// What the last command advertised; the keys are 0 if nothing was.
	writeKey, readKey   uint32
	writeBase, readBase uint64
	// invalidate makes the next Send invalidate this key.
	invalidate uint32
}

const (
	peerReceives = 64
	peerRecvLen  = 28 + 48 + 24<<10
	peerSendAt   = peerReceives * peerRecvLen
	peerSendLen  = 70_000
	peerDataAt   = peerSendAt + peerSendLen
	peerDataLen  = 1 << 20
)

// iserPeer is a scripted target that is reached by iSER.
type iserPeer struct {
	peer
	m *messages
}

// accept says how a peer answers connection requests.
type accept struct {
	wire    iwarp.Options
	private []byte
	reject  bool
	reads   chan<- struct{} // gets a value for each read of the connection that brings something
}

// watchedListener reports reads of its connections.
type watchedListener struct {
	net.Listener
	reads chan<- struct{}
}

type watchedConn struct {
	net.Conn
	reads chan<- struct{}
}

func (l watchedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return watchedConn{c, l.reads}, err
}

func (c watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.reads <- struct{}{}
	}
	return n, err
}

// listenISER runs script for each connection to the portal it returns.
func listenISER(t testing.TB, a accept, script func(*iserPeer)) string {
	t.Helper()
	provider, err := iwarp.New(a.wire)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if a.reads != nil {
		tcp = watchedListener{tcp, a.reads}
	}
	l := provider.Serve(tcp)
	done := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			r, err := l.Accept(ctx)
			if err != nil {
				return
			}
			if a.reject {
				_ = r.Reject(nil)
				continue
			}
			m, err := newMessages(t, provider, r, a.private)
			if err != nil {
				t.Errorf("peer: %v", err)
				continue
			}
			script(&iserPeer{peer{t: t, c: m, statSN: 100, exp: 1, max: 64}, m})
			m.Close()
		}
	}()
	return l.Addr().String()
}

func newMessages(t testing.TB, p *iwarp.Provider, r rdma.Request, private []byte) (*messages, error) {
	pd, err := p.AllocPD()
	if err != nil {
		return nil, err
	}
	m := &messages{t: t, buf: make([]byte, peerDataAt+peerDataLen), peer: r.Peer()}
	if m.mr, err = pd.Register(m.buf, rdma.LocalWrite); err != nil {
		return nil, err
	}
	if m.cq, err = p.CreateCQ(1024); err != nil {
		return nil, err
	}
	m.qp, err = r.CreateQP(pd, rdma.QPAttr{SendCQ: m.cq, RecvCQ: m.cq, MaxSend: 256, MaxRecv: peerReceives})
	if err != nil {
		return nil, err
	}
	for i := range peerReceives {
		if err := m.receive(uint64(i)); err != nil {
			return nil, err
		}
	}
	return m, r.Accept(context.Background(), rdma.ConnParams{PrivateData: private, IRD: 1, ORD: 16})
}

func (m *messages) sge(at, n int) []rdma.SGE {
	return []rdma.SGE{{Buf: m.buf[at : at+n], LKey: m.mr.LKey()}}
}

func (m *messages) receive(id uint64) error {
	_, err := m.qp.PostRecv([]rdma.RecvWR{{ID: id, SGE: m.sge(int(id)*peerRecvLen, peerRecvLen)}})
	return err
}

// wait returns the next completion of a receive or of a send; what else comes waits.
func (m *messages) wait(recv bool) (rdma.WC, error) {
	for {
		for i, wc := range m.came {
			if (wc.Op == rdma.OpRecv) == recv {
				m.came = append(m.came[:i], m.came[i+1:]...)
				if wc.Status != rdma.StatusSuccess {
					return wc, fmt.Errorf("%v: %w", wc.Status, m.qp.Err())
				}
				return wc, nil
			}
		}
		var wcs [16]rdma.WC
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		n, err := m.cq.Wait(ctx, wcs[:], false)
		cancel()
		if err != nil {
			return rdma.WC{}, err
		}
		m.came = append(m.came, wcs[:n]...)
	}
}

// Receive implements peerConn.
func (m *messages) Receive() (*PDU, error) {
	wc, err := m.wait(true)
	if err != nil {
		return nil, io.EOF
	}
	b := append([]byte(nil), m.buf[int(wc.ID)*peerRecvLen:][:wc.Bytes]...)
	m.raw = b
	if err := m.receive(wc.ID); err != nil && !errors.Is(err, rdma.ErrDisconnected) {
		m.t.Errorf("peer: %v", err)
	}
	if len(b) < 76 {
		return nil, fmt.Errorf("a message of %d bytes", len(b))
	}
	if b[0]&0xf0 != 0x10 || b[0]&3 != 0 || b[1] != 0 || b[2] != 0 || b[3] != 0 {
		m.t.Errorf("peer: iSER header % x", b[:28])
	}
	m.writeKey, m.readKey = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[16:])
	m.writeBase, m.readBase = binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[20:])
	if (b[0]&8 != 0) != (m.writeKey != 0) || (b[0]&4 != 0) != (m.readKey != 0) || b[0]&8 == 0 && m.writeBase != 0 || b[0]&4 == 0 && m.readBase != 0 {
		m.t.Errorf("peer: flags and STags disagree: % x", b[:28])
	}
	p := &PDU{Header: pdu.Header(b[28:76])}
	ahs, n := p.Header.AHSLength(), p.Header.DataLength()
	if len(b) != 76+ahs+n+pdu.Padding(n) {
		m.t.Errorf("peer: a message of %d bytes with %d and %d bytes behind the header", len(b), ahs, n)
		return nil, io.ErrUnexpectedEOF
	}
	p.AHS, p.Data = b[76:76+ahs], b[76+ahs:76+ahs+n]
	return p, nil
}

// Send implements peerConn.
func (m *messages) Send(p *PDU) error {
	p.Header.SetAHSLength(len(p.AHS))
	p.Header.SetDataLength(len(p.Data))
	b := append(make([]byte, 28, 100), p.Header[:]...)
	b[0] = 0x10
	b = append(append(b, p.AHS...), p.Data...)
	return m.message(append(b, make([]byte, pdu.Padding(len(p.Data)))...))
}

// message sends bytes as they are.
func (m *messages) message(b []byte) error {
	wr := rdma.SendWR{Op: rdma.OpSend, SGE: m.sge(peerSendAt, copy(m.buf[peerSendAt:peerDataAt], b))}
	if m.invalidate != 0 {
		wr.Op, wr.RKey, m.invalidate = rdma.OpSendInvalidate, m.invalidate, 0
	}
	return m.do(wr)
}

// write is an RDMA Write to the initiator.
func (m *messages) write(key uint32, to uint64, b []byte) error {
	return m.do(rdma.SendWR{Op: rdma.OpWrite, RKey: key, RemoteAddr: to, SGE: m.sge(peerDataAt, copy(m.buf[peerDataAt:], b))})
}

// read is an RDMA Read.
func (m *messages) read(key uint32, to uint64, n int) ([]byte, error) {
	if err := m.do(rdma.SendWR{Op: rdma.OpRead, RKey: key, RemoteAddr: to, SGE: m.sge(peerDataAt, n)}); err != nil {
		return nil, err
	}
	return append([]byte(nil), m.buf[peerDataAt:peerDataAt+n]...), nil
}

// do posts and waits.
func (m *messages) do(wr rdma.SendWR) error {
	wr.Flags = rdma.Signaled
	if _, err := m.qp.PostSend([]rdma.SendWR{wr}); err != nil {
		return err
	}
	_, err := m.wait(false)
	return err
}

// Close implements peerConn.
func (m *messages) Close() error { return errors.Join(m.qp.Close(), m.cq.Close()) }

// iserKeys are the answers of a target that agrees.
func iserKeys(more ...pdu.Pair) pdu.Pairs {
	return append(pdu.Pairs{
		{Key: "RDMAExtensions", Value: "Yes"}, {Key: "InitiatorRecvDataSegmentLength", Value: "8192"}, {Key: "TargetRecvDataSegmentLength", Value: "8192"},
	}, more...)
}

func iserOptions(portal string) Options {
	o := peerOptions(portal)
	o.ISER = &ISER{}
	return o
}

// iserSession logs in to a peer that then runs script, with the negotiated keys.
func iserSession(t testing.TB, change func(*Options), keys pdu.Pairs, script func(*iserPeer)) *Session {
	t.Helper()
	o := iserOptions("")
	if change != nil {
		change(&o)
	}
	o.Portal = listenISER(t, accept{private: []byte{cmNotZeroBased, 0, 0, 0}}, func(p *iserPeer) {
		p.loginAll(keys)
		script(p)
	})
	s := mustDial(t, o)
	t.Cleanup(func() {
		s.Close()
		checkMemory(t, s)
	})
	return s
}

// checkMemory checks that a session that is over has given back what it had.
func checkMemory(t testing.TB, s *Session) {
	t.Helper()
	<-s.Done()
	m := s.mover.(*iserMover).mem
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.out != 0 || !m.closed || len(*m.regions.Load()) != 0 {
		t.Errorf("%d pieces of memory are out, closed %v, %d regions", m.out, m.closed, len(*m.regions.Load()))
	}
}
