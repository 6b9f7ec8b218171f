package tcp_test

import (
	"bytes"
	"context"
	"net"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

// landingMedium is a medium that notes its landings, and what they hold when they are committed.
type landingMedium struct {
	*scsitest.Medium
	mu       sync.Mutex
	landings [][]byte // guarded by mu
	content  []byte   // guarded by mu
}

func (m *landingMedium) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	l, err := m.Medium.Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.landings = append(m.landings, l.Buffers()...)
	return &notedLanding{l, m}, nil
}

type notedLanding struct {
	scsi.Landing
	m *landingMedium
}

func (l *notedLanding) Commit(ctx context.Context, fua bool) error {
	l.m.mu.Lock()
	l.m.content = bytes.Join(l.Buffers(), nil)
	l.m.mu.Unlock()
	return l.Landing.Commit(ctx, fua)
}

// landed counts what of b lies in landings.
func (m *landingMedium) landed(b []byte) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for _, l := range m.landings {
		from := uintptr(unsafe.Pointer(unsafe.SliceData(l)))
		if at >= from && at+uintptr(len(b)) <= from+uintptr(len(l)) {
			return len(b)
		}
	}
	return 0
}

// counting is a connection that counts the bytes that are read from it right into landings.
type counting struct {
	net.Conn
	m      *landingMedium
	mu     sync.Mutex
	direct int // guarded by mu
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		landed := c.m.landed(b[:n])
		c.mu.Lock()
		c.direct += landed
		c.mu.Unlock()
	}
	return n, err
}

func (c *counting) SyscallConn() (syscall.RawConn, error) { return c.Conn.(*net.TCPConn).SyscallConn() }

type countingListener struct {
	net.Listener
	m     *landingMedium
	conns chan *counting
}

func (l *countingListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &counting{Conn: nc, m: l.m}
	l.conns <- c
	return c, nil
}

// A write of 256 KiB that is asked for by R2T: every byte is read from the socket into the landing itself, which holds it when the write is
// committed. Also with digests, which are computed in place.
func TestSolicitedDataIsNotCopied(t *testing.T) {
	for _, digest := range []string{"None", "CRC32C"} {
		t.Run(digest, func(t *testing.T) {
			r := newRig(t)
			m := &landingMedium{Medium: r.medium}
			unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: m, Identity: scsi.Identity{UUID: [16]byte{3}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.units.Map(1, unit); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			cl := &countingListener{l, m, make(chan *counting, 1)}
			served := make(chan struct{})
			go func() {
				defer close(served)
				r.srv.Serve(tcp.NewListener(cl), iscsi.Portal{})
			}()
			t.Cleanup(func() { l.Close(); <-served })
			r.addr = l.Addr().String()
			c := r.login("HeaderDigest="+digest, "DataDigest="+digest, "InitialR2T=Yes", "ImmediateData=No", "MaxBurstLength=262144")
			nc := <-cl.conns
			want := pattern(9, 256<<10)
			lun1 := func(p *pdu.SCSICommand) { p.LUN = pdu.LUNOf(1) }
			c.finish(c.command(make([]byte, 6), 0, nil, 0, lun1), nil)
			itt := c.command(write16(0, 512), 0, want, 0, lun1)
			h, _ := c.read()
			var r2t pdu.R2T
			if err := r2t.Decode(&h); err != nil || r2t.Length != 256<<10 {
				t.Fatalf("%v: %v", h.String(), err)
			}
			for at := 0; at < len(want); at += 64 << 10 {
				d := pdu.DataOut{Final: at+64<<10 == len(want), LUN: pdu.LUNOf(1), ITT: itt, TTT: r2t.TTT, DataSN: pdu.Serial(at >> 16), Offset: uint32(at), ExpStatSN: c.stat}
				d.Encode(&h)
				c.write(&h, want[at:][:64<<10])
			}
			if res := c.finish(itt, nil); res.status != scsi.Good {
				t.Fatalf("status %#x", uint8(res.status))
			}
			nc.mu.Lock()
			defer nc.mu.Unlock()
			m.mu.Lock()
			defer m.mu.Unlock()
			if nc.direct != 256<<10 {
				t.Errorf("%d bytes of %d were read into the landing", nc.direct, 256<<10)
			}
			if !bytes.Equal(m.content, want) {
				t.Error("something else was written")
			}
		})
	}
}
