package iser_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"testing"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"

	"github.com/isergate/isergate/iser"
)

// regionNull is a medium that keeps nothing, and whose memory lies in an arena.
type regionNull struct {
	*scsitest.Null
	mem *arena.Arena
	mu  sync.Mutex
	out map[int][]*regionLoan // by size, for reuse
}

type regionLoan struct {
	m    *regionNull
	bufs [][]byte
	n    int
}

func (m *regionNull) take(ctx context.Context, e scsi.Extent) (*regionLoan, error) {
	n := int(e.Blocks) * int(m.Geometry().BlockSize)
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.out[n]; len(l) > 0 {
		m.out[n] = l[:len(l)-1]
		return l[len(l)-1], nil
	}
	bufs, err := m.mem.Alloc(ctx, int64(n))
	return &regionLoan{m: m, bufs: bufs, n: n}, err
}

func (m *regionNull) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	return m.take(ctx, e)
}

func (m *regionNull) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	return m.take(ctx, e)
}

func (l *regionLoan) Buffers() [][]byte                  { return l.bufs }
func (l *regionLoan) Commit(context.Context, bool) error { l.Release(); return nil }
func (l *regionLoan) Abort()                             { l.Release() }
func (l *regionLoan) Release() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.out[l.n] = append(l.m.out[l.n], l)
}

// BenchmarkCommand compares whole commands over loopback, iSER over software iWARP and plain iSCSI, with the project's own initiator in the same
// process, against a medium that keeps nothing.
func BenchmarkCommand(b *testing.B) {
	for _, crc := range []string{"off", "on"} {
		for _, shape := range []struct{ size, depth int }{{4096, 1}, {4096, 32}, {65536, 8}, {262144, 8}} {
			for _, kind := range []string{"read", "write"} {
				for _, scheme := range []string{"iscsi", "iser"} {
					b.Run(fmt.Sprintf("crc=%s/%dK-depth%d/%s/%s", crc, shape.size>>10, shape.depth, kind, scheme), func(b *testing.B) {
						benchmark(b, scheme, crc == "on", kind == "write", shape.size, shape.depth)
					})
				}
			}
		}
	}
}

func benchmark(b *testing.B, scheme string, crc, write bool, size, depth int) {
	var null *regionNull
	r := newRig(b, func(r *rig, o *iscsi.Options, _ *iser.Options) {
		null = &regionNull{Null: scsitest.NewNull(1<<20, 512), mem: r.lent, out: map[int][]*regionLoan{}}
		r.lent.SetMangle(false)
		r.unit = null
		r.iwarp.NoCRC = !crc
	})
	b.Cleanup(func() {
		for _, list := range null.out {
			for _, l := range list {
				r.lent.Free(l.bufs)
			}
		}
	})
	o := initiator.Options{Portal: r.addr, InitiatorName: initiatorName, TargetName: targetName, Logger: slog.New(slog.DiscardHandler), QueueDepth: 128}
	if scheme == "iser" {
		p, err := iwarp.New(iwarp.Options{NoCRC: !crc})
		if err != nil {
			b.Fatal(err)
		}
		o.ISER = &initiator.ISER{Provider: p}
	} else {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		go r.srv.Serve(tcp.NewListener(l), iscsi.Portal{})
		o.Portal = l.Addr().String()
		if crc {
			o.HeaderDigest, o.DataDigest = initiator.DigestRequired, initiator.DigestRequired
		}
	}
	ctx := context.Background()
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	lun, err := s.OpenLUN(ctx, 0)
	if err != nil {
		b.Fatal(err)
	}
	bufs := make([][]byte, depth)
	for i := range bufs {
		if bufs[i], err = s.Alloc(size); err != nil {
			b.Fatal(err)
		}
	}
	each := func(n int) {
		var wg sync.WaitGroup
		for i := range depth {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for k := i; k < n; k += depth {
					var err error
					if write {
						err = lun.Write(ctx, 0, bufs[i], false)
					} else {
						err = lun.Read(ctx, 0, bufs[i])
					}
					if err != nil {
						b.Error(err)
						return
					}
				}
			}()
		}
		wg.Wait()
	}
	each(4 * depth)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	cpu := cpuTime()
	b.ResetTimer()
	each(b.N)
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N), "cpu-ns/op")
	for i := range bufs {
		s.Free(bufs[i])
	}
}

func cpuTime() int64 {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}
