package initiator

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/initiator/internal/target"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iwarp"
)

// Our own target on loopback, whose unit is in memory: what the transports cost, both ends in one process.
func BenchmarkTransport(b *testing.B) {
	provider, err := iwarp.New(iwarp.Options{NoCRC: true})
	if err != nil {
		b.Fatal(err)
	}
	for _, way := range []struct {
		name    string
		iser    *ISER
		digests DigestPolicy
	}{{"tcp", nil, DigestNone}, {"iser", &ISER{Provider: provider}, DigestNone}, {"tcp-crc", nil, DigestRequired}, {"iser-crc", &ISER{}, DigestNone}} {
		for _, load := range []struct{ size, depth int }{{4096, 1}, {4096, 32}, {256 << 10, 8}} {
			for _, write := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%d/%d/write=%v", way.name, load.size, load.depth, write), func(b *testing.B) {
					m, err := arena.New(32 << 20)
					if err != nil {
						b.Fatal(err)
					}
					srv := target.StartBoth(b, iscsi.Options{}, m, nil, 32<<20/512, 512)
					o := ownOptions(own{srv, way.iser})
					o.HeaderDigest, o.DataDigest = way.digests, way.digests
					s := mustDial(b, o)
					l, err := s.OpenLUN(context.Background(), target.LUN)
					if err != nil {
						b.Fatal(err)
					}
					b.SetBytes(int64(load.size))
					b.ReportAllocs()
					b.ResetTimer()
					before := processTime(b)
					var left atomic.Int64
					left.Store(int64(b.N))
					var wg sync.WaitGroup
					for w := range load.depth {
						wg.Go(func() {
							p, err := s.Alloc(load.size)
							if err != nil {
								b.Error(err)
								return
							}
							defer s.Free(p)
							lba := uint64(w * load.size / 512)
							for left.Add(-1) >= 0 {
								if write {
									err = l.Write(context.Background(), lba, p, false)
								} else {
									err = l.Read(context.Background(), lba, p)
								}
								if err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
					wg.Wait()
					b.ReportMetric(float64(processTime(b)-before)/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}

// processTime is what this process used, user and system, in nanoseconds: unlike the time that passes it does not depend on what else the machine does.
func processTime(b *testing.B) int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}
