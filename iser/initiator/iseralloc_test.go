package initiator

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// mirror is an RDMA provider without a network: what is posted is carried out at once by a target without a goroutine of its own, which
// answers every command with GOOD, and invalidates the window if it is told to.
type mirror struct {
	rdma.Provider
	mu         sync.Mutex
	cond       *sync.Cond
	wcs        [2][]rdma.WC // of receives, and of sends
	recvs      []rdma.RecvWR
	key        uint32
	stat       pdu.Serial
	invalidate bool
	closed     bool
}

type (
	mirrorPD     struct{ rdma.PD }
	mirrorMR     struct{ rdma.MR }
	mirrorWindow struct {
		rdma.Window
		key atomic.Uint32
	}
	mirrorCQ struct {
		rdma.CQ
		m   *mirror
		wcs *[]rdma.WC
	}
	mirrorQP struct {
		rdma.QP
		m *mirror
	}
)

func (p *mirror) AllocPD() (rdma.PD, error)                    { return mirrorPD{}, nil }
func (p *mirror) CreateCQ(int) (rdma.CQ, error)                { return &mirrorCQ{m: p}, nil }
func (mirrorPD) Register([]byte, rdma.Access) (rdma.MR, error) { return mirrorMR{}, nil }
func (mirrorPD) AllocWindow() (rdma.Window, error)             { return new(mirrorWindow), nil }
func (mirrorPD) Close() error                                  { return nil }
func (mirrorMR) LKey() uint32                                  { return 1 }
func (mirrorMR) Deregister() error                             { return nil }
func (w *mirrorWindow) RKey() uint32                           { return w.key.Load() }
func (w *mirrorWindow) Addr() uint64                           { return 0x1000 }
func (w *mirrorWindow) Close() error                           { return nil }
func (c *mirrorCQ) Close() error                               { return nil }
func (q mirrorQP) Err() error                                  { return rdma.ErrDisconnected }
func (q mirrorQP) Close() error                                { q.Disconnect(); return nil }

func (c *mirrorCQ) Poll(wc []rdma.WC) (int, error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	return c.takeLocked(wc), nil
}

func (c *mirrorCQ) takeLocked(wc []rdma.WC) int {
	n := copy(wc, *c.wcs)
	*c.wcs = append((*c.wcs)[:0], (*c.wcs)[n:]...)
	return n
}

func (c *mirrorCQ) Wait(_ context.Context, wc []rdma.WC, _ bool) (int, error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for len(*c.wcs) == 0 {
		if c.m.closed {
			return 0, rdma.ErrClosed
		}
		c.m.cond.Wait()
	}
	return c.takeLocked(wc), nil
}

func (q mirrorQP) Disconnect() {
	q.m.mu.Lock()
	defer q.m.mu.Unlock()
	q.m.closed = true
	q.m.cond.Broadcast()
}

func (q mirrorQP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	q.m.mu.Lock()
	defer q.m.mu.Unlock()
	q.m.recvs = append(q.m.recvs, wrs...)
	return len(wrs), nil
}

func (q mirrorQP) PostSend(wrs []rdma.SendWR) (int, error) {
	m := q.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range wrs {
		wr := &wrs[i]
		switch wr.Op {
		case rdma.OpBind:
			m.key++
			wr.Bind.Window.(*mirrorWindow).key.Store(m.key)
		case rdma.OpSend:
			m.answer(wr.SGE[0].Buf)
		}
		if wr.Flags&rdma.Signaled != 0 {
			m.wcs[1] = append(m.wcs[1], rdma.WC{ID: wr.ID, Op: wr.Op})
		}
	}
	m.cond.Broadcast()
	return len(wrs), nil
}

// answer ends the command in b.
func (m *mirror) answer(b []byte) {
	h := (*pdu.Header)(b[iserHeaderLen:])
	key := uint32(b[4])<<24 | uint32(b[5])<<16 | uint32(b[6])<<8 | uint32(b[7]) |
		uint32(b[16])<<24 | uint32(b[17])<<16 | uint32(b[18])<<8 | uint32(b[19])
	r := m.recvs[0]
	m.recvs = append(m.recvs[:0], m.recvs[1:]...)
	out := r.SGE[0].Buf
	putControl(out)
	exp := h.CmdSN().Next()
	(&pdu.SCSIResponse{ITT: h.ITT(), StatSN: m.stat, ExpCmdSN: exp, MaxCmdSN: exp + 64}).Encode((*pdu.Header)(out[iserHeaderLen:]))
	m.stat++
	wc := rdma.WC{ID: r.ID, Op: rdma.OpRecv, Bytes: iserHeaderLen + pdu.HeaderLen}
	if m.invalidate && key != 0 {
		wc.Invalidated, wc.InvalidatedKey = true, key
	}
	m.wcs[0] = append(m.wcs[0], wc)
}

func mirrorLUN(t testing.TB, invalidate bool) *LUN {
	m := &mirror{stat: 1, invalidate: invalidate}
	m.cond = sync.NewCond(&m.mu)
	o := iserOptions("x")
	o.ISER.Provider = m
	o.EnsureDefaults()
	var err error
	if o.ISER, err = o.ISER.withDefaults(o.QueueDepth); err != nil {
		t.Fatal(err)
	}
	mover, err := newISERMover(&o)
	if err != nil {
		t.Fatal(err)
	}
	mover.qp = mirrorQP{m: m}
	mover.recvCQ.(*mirrorCQ).wcs, mover.sendCQ.(*mirrorCQ).wcs = &m.wcs[0], &m.wcs[1]
	m.recvs = append(m.recvs, mover.recvs...)
	s := prepareSession(o, &Login{Parameters: Parameters{ISER: true, MaxSend: 8192, MaxBurst: 1 << 20, FirstBurst: 65536, MaxRecv: 8192, ImmediateData: true, InitialR2T: true},
		CmdSN: 1, ExpStatSN: 1, MaxCmdSN: 64})
	mover.attach(s)
	s.start(mover)
	t.Cleanup(s.Kill)
	return &LUN{s: s, BlockSize: 512, Blocks: 1 << 20}
}

func TestISERExecuteDoesNotAllocate(t *testing.T) {
	ctx := context.Background()
	for _, invalidate := range []bool{true, false} {
		l := mirrorLUN(t, invalidate)
		registered, err := l.s.Alloc(256 << 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range [][]byte{make([]byte, 4096), make([]byte, 256<<10), registered} {
			for name, f := range map[string]func() error{
				"read":  func() error { return l.Read(ctx, 8, p) },
				"write": func() error { return l.Write(ctx, 8, p, false) },
			} {
				if n := testing.AllocsPerRun(1000, func() {
					if err := f(); err != nil {
						t.Fatal(err)
					}
				}); n > 0 {
					t.Errorf("%s of %d bytes: %v allocations", name, len(p), n)
				}
			}
		}
		l.s.Free(registered)
	}
}

func BenchmarkISERExecute(b *testing.B) {
	l := mirrorLUN(b, true)
	ctx := context.Background()
	for name, f := range map[string]func(p []byte) error{
		"read":  func(p []byte) error { return l.Read(ctx, 8, p) },
		"write": func(p []byte) error { return l.Write(ctx, 8, p, false) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(loopBlock)
			b.SetParallelism(16)
			b.RunParallel(func(pb *testing.PB) {
				p := make([]byte, loopBlock)
				for pb.Next() {
					if err := f(p); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
