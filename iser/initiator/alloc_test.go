package initiator

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// loop is a connection whose other end is a target without a goroutine of its own: a read command written
// to it becomes a Data-In of 4 KiB with status to be read from it, a write becomes a SCSI Response.
type loop struct {
	mu     sync.Mutex
	cond   *sync.Cond
	in     []byte
	out    []byte
	at     int
	stat   pdu.Serial
	closed bool
}

const loopBlock = 4096

func newLoop() *loop {
	l := &loop{stat: 1}
	l.cond = sync.NewCond(&l.mu)
	return l
}

func (l *loop) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return 0, net.ErrClosed
	}
	l.in = append(l.in, b...)
	used := 0
	for len(l.in)-used >= pdu.HeaderLen {
		h := (*pdu.Header)(l.in[used:])
		n := h.DataLength()
		if len(l.in)-used < pdu.HeaderLen+n {
			break
		}
		used += pdu.HeaderLen + n
		var rsp pdu.Header
		exp := h.CmdSN().Next()
		if h.Opcode() == pdu.OpSCSICommand && n == 0 {
			(&pdu.DataIn{Final: true, HasStatus: true, ITT: h.ITT(), TTT: pdu.ReservedTag, StatSN: l.stat, ExpCmdSN: exp, MaxCmdSN: exp + 64}).Encode(&rsp)
			rsp.SetDataLength(loopBlock)
			l.out = append(append(l.out, rsp[:]...), zeroData[:]...)
		} else {
			(&pdu.SCSIResponse{ITT: h.ITT(), StatSN: l.stat, ExpCmdSN: exp, MaxCmdSN: exp + 64}).Encode(&rsp)
			l.out = append(l.out, rsp[:]...)
		}
		l.stat++
	}
	l.in = append(l.in[:0], l.in[used:]...)
	l.cond.Signal()
	return len(b), nil
}

var zeroData [loopBlock]byte

func (l *loop) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.at == len(l.out) {
		if l.closed {
			return 0, io.EOF
		}
		l.cond.Wait()
	}
	n := copy(p, l.out[l.at:])
	if l.at += n; l.at == len(l.out) {
		l.out, l.at = l.out[:0], 0
	}
	return n, nil
}

func (l *loop) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.cond.Broadcast()
	return nil
}

func (l *loop) LocalAddr() net.Addr              { return nil }
func (l *loop) RemoteAddr() net.Addr             { return nil }
func (l *loop) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (l *loop) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (l *loop) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

func loopLUN(t testing.TB) *LUN {
	o := peerOptions("x")
	o.EnsureDefaults()
	s := newSession(NewConn(newLoop()), o, &Login{Parameters: Parameters{MaxSend: 65536, MaxBurst: 1 << 20, FirstBurst: 65536, MaxRecv: 262144, ImmediateData: true, InitialR2T: true},
		CmdSN: 1, ExpStatSN: 1, MaxCmdSN: 64})
	t.Cleanup(s.Kill)
	return &LUN{s: s, BlockSize: 512, Blocks: 1 << 20}
}

func TestExecuteDoesNotAllocate(t *testing.T) {
	l := loopLUN(t)
	ctx := context.Background()
	p := make([]byte, loopBlock)
	for name, f := range map[string]func() error{
		"read":  func() error { return l.Read(ctx, 8, p) },
		"write": func() error { return l.Write(ctx, 8, p, false) },
	} {
		if n := testing.AllocsPerRun(1000, func() {
			if err := f(); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkExecute(b *testing.B) {
	l := loopLUN(b)
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
