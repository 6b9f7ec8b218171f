package tcp_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

// pipes is a Listener whose connections are made in memory.
type pipes struct {
	ch   chan net.Conn
	done chan struct{}
	once sync.Once
}

func pipeListener(t testing.TB) *pipes {
	p := &pipes{ch: make(chan net.Conn), done: make(chan struct{})}
	t.Cleanup(func() { p.Close() })
	return p
}

func (p *pipes) dial(t testing.TB) net.Conn {
	a, b := net.Pipe()
	p.ch <- b
	t.Cleanup(func() { a.Close() })
	return a
}

func (p *pipes) Accept() (iscsi.Datamover, error) {
	select {
	case c := <-p.ch:
		return tcp.NewConn(c), nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 3260} }

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

// fuzzTarget is a target on pipes that is used for many inputs.
func fuzzTarget(t testing.TB) (*iscsi.Server, *pipes, *scsitest.Medium) {
	r := &rig{t: t, medium: scsitest.NewMedium(1024, 512), units: scsi.NewInventory(), hidden: map[string]bool{}}
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: r.medium, Identity: scsi.Identity{UUID: [16]byte{1}}})
	if err != nil {
		t.Fatal(err)
	}
	r.units.Map(0, unit)
	srv, err := iscsi.NewServer(iscsi.Options{Backend: r, Logger: slog.New(slog.DiscardHandler), QueueDepth: 16, LogoutWait: time.Millisecond, StagingBytes: 8 << 20, MaxConnections: 1})
	if err != nil {
		t.Fatal(err)
	}
	l := pipeListener(t)
	go srv.Serve(l, iscsi.Portal{})
	t.Cleanup(func() { srv.Close() })
	return srv, l, r.medium
}

func loginBytes(keys string) []byte {
	var h pdu.Header
	(&pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: pdu.ISID{0x40}, ITT: 1, CmdSN: 1}).Encode(&h)
	text := "InitiatorName=" + initiatorName + "\x00TargetName=" + targetName + "\x00DefaultTime2Retain=0\x00" + keys
	h.SetDataLength(len(text))
	return append(append(h[:], text...), make([]byte, pdu.Padding(len(text)))...)
}

// feed sends input to a target, reads what it answers, and closes.
func feed(t testing.TB, l *pipes, input []byte) {
	c := l.dial(t)
	var wg sync.WaitGroup
	wg.Go(func() { io.Copy(io.Discard, c) })
	c.SetWriteDeadline(time.Now().Add(patience))
	c.Write(input)
	c.Close()
	wg.Wait()
}

// FuzzConnection sends arbitrary bytes, alone and after a login: the target does not panic, gives every buffer of the
// medium back, and forgets the session.
func FuzzConnection(f *testing.F) {
	add := func(after bool, encode func(h *pdu.Header), n int) {
		var h pdu.Header
		encode(&h)
		h.SetDataLength(n)
		f.Add(after, append(h[:], make([]byte, n+pdu.Padding(n))...))
	}
	f.Add(false, loginBytes(""))
	f.Add(false, []byte("GET / HTTP/1.1\r\nHost: example\r\n\r\n                        "))
	add(true, func(h *pdu.Header) {
		(&pdu.SCSICommand{Final: true, Write: true, EDTL: 1024, ITT: 2, CmdSN: 1, CDB: [16]byte(write16(0, 2))}).Encode(h)
	}, 512)
	add(true, func(h *pdu.Header) {
		(&pdu.SCSICommand{Write: true, EDTL: 1024, ITT: 2, CmdSN: 1, CDB: [16]byte(write16(0, 2))}).Encode(h)
	}, 0)
	add(true, func(h *pdu.Header) {
		(&pdu.SCSICommand{Final: true, Read: true, EDTL: 1024, ITT: 2, CmdSN: 1, CDB: [16]byte(read16(0, 2))}).Encode(h)
	}, 0)
	add(true, func(h *pdu.Header) { (&pdu.DataOut{Final: true, ITT: 2, TTT: 1}).Encode(h) }, 512)
	add(true, func(h *pdu.Header) { (&pdu.TextRequest{Final: true, ITT: 2, TTT: pdu.ReservedTag, CmdSN: 1}).Encode(h) }, 16)
	add(true, func(h *pdu.Header) { (&pdu.TaskRequest{Immediate: true, Function: 5, ITT: 2, CmdSN: 1}).Encode(h) }, 0)
	add(true, func(h *pdu.Header) { (&pdu.LogoutRequest{Immediate: true, ITT: 2, CmdSN: 1}).Encode(h) }, 0)
	add(true, func(h *pdu.Header) { (&pdu.NopOut{Immediate: true, ITT: 2, TTT: pdu.ReservedTag, CmdSN: 1}).Encode(h) }, 100)
	srv, l, medium := fuzzTarget(f)
	f.Fuzz(func(t *testing.T, after bool, input []byte) {
		if after {
			input = append(loginBytes("InitialR2T=No\x00"), input...)
		}
		feed(t, l, input)
		for _, s := range srv.Sessions() {
			// It may have negotiated that it outlives its connection.
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			if err := srv.Kick(ctx, s.TSIH); errors.Is(err, context.DeadlineExceeded) {
				buf := make([]byte, 1<<20)
				t.Fatalf("the session does not end: %+v\n%s", s, buf[:runtime.Stack(buf, true)])
			}
			cancel()
		}
		await(t, "the session ends", func() bool { return len(srv.Sessions()) == 0 && medium.Open() == 0 })
	})
}

// Random PDUs whose headers are almost right reach deeper than random bytes.
func TestGarbage(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 2))
	srv, l, medium := fuzzTarget(t)
	ops := []byte{0, 1, 1, 1, 2, 3, 4, 5, 5, 5, 6, 0x10, 0x1c, 0x21, 0x41, 0x40, 0x42, 0x44}
	for range 300 {
		input := loginBytes("InitialR2T=No\x00FirstBurstLength=4096\x00")
		sn := uint32(1)
		for range 1 + rnd.IntN(20) {
			var h pdu.Header
			h[0] = ops[rnd.IntN(len(ops))]
			h[1] = []byte{0x80, 0xa0, 0xc0, 0x20, 0x81, 0xa1, 0x40, byte(rnd.Uint32())}[rnd.IntN(8)]
			for i := 8; i < pdu.HeaderLen; i++ {
				if rnd.IntN(4) == 0 {
					h[i] = byte(rnd.Uint32())
				}
			}
			h[16], h[17], h[18], h[19] = 0, 0, 0, byte(2+rnd.IntN(4))
			h[20], h[21] = 0, 0
			h[24], h[25], h[26], h[27] = 0, 0, 0, byte(sn)
			if rnd.IntN(4) > 0 {
				h[8], h[9] = 0, 0
				sn++
			}
			if h[0]&0x3f == 1 {
				copy(h[32:], [][]byte{write16(0, 2), read16(0, 8), {0x12, 0, 0, 0, 36, 0}, {0x35}}[rnd.IntN(4)])
			}
			n := rnd.IntN(3) * rnd.IntN(3000)
			h.SetDataLength(n)
			input = append(append(input, h[:]...), make([]byte, n+pdu.Padding(n))...)
		}
		feed(t, l, input)
	}
	await(t, "the sessions end", func() bool { return len(srv.Sessions()) == 0 && medium.Open() == 0 })
}

// ISCSI-16: connections that do not log in cost little, and no more than the limits allow.
func TestMemoryBeforeLogin(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) { o.MaxLogins, o.MaxLoginsPerAddress = 200, 200 })
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := heap()
	var clients []*client
	for range 200 {
		c := r.dial()
		// As much as a login may hold without ever ending.
		var h pdu.Header
		(&pdu.LoginRequest{Continue: true, CSG: pdu.StageOperational, ITT: 1}).Encode(&h)
		c.write(&h, make([]byte, 8192))
		c.read()
		h.SetDataLength(8192)
		c.c.Write(h[:])
		clients = append(clients, c)
	}
	each := (int64(heap()) - int64(before)) / 200
	t.Logf("%d bytes for each connection", each)
	if each > 128<<10 {
		t.Errorf("%d bytes for each connection before login", each)
	}
	clients[0].ping2(t)
}

// ping2 shows that a connection still waits: its login can be completed.
func (c *client) ping2(t *testing.T) {
	t.Helper()
	c.c.Write(make([]byte, 8192))
	if _, _, err := c.tryRead(); err != nil {
		t.Error(err)
	}
}
