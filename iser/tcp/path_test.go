package tcp_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// load keeps depth commands of size bytes in flight on a target with a Null medium, by our initiator.
type load struct {
	lun   *initiator.LUN
	write bool
	size  int
	depth int
	work  chan int
	wg    sync.WaitGroup
	done  sync.WaitGroup
	t     testing.TB
}

func newLoad(t testing.TB, write bool, size, depth int, change func(*initiator.Options)) *load {
	r := newRig(t, func(r *rig, _ *iscsi.Options) {
		unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: scsitest.NewNull(1<<20, 512), Identity: scsi.Identity{UUID: [16]byte{2}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.units.Map(1, unit); err != nil {
			t.Fatal(err)
		}
	})
	o := initiator.Options{Portal: r.addr, InitiatorName: initiatorName, TargetName: targetName, QueueDepth: 64}
	if change != nil {
		change(&o)
	}
	ctx := context.Background()
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	lun, err := s.OpenLUN(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	l := &load{lun: lun, write: write, size: size, depth: depth, work: make(chan int), t: t}
	for i := range depth {
		l.done.Go(func() { l.serve(uint64(i)) })
	}
	t.Cleanup(func() {
		close(l.work)
		l.done.Wait()
	})
	return l
}

func (l *load) serve(i uint64) {
	buf := make([]byte, l.size)
	ctx := context.Background()
	lba := i * uint64(l.size) / 512
	for n := range l.work {
		for range n {
			var err error
			if l.write {
				err = l.lun.Write(ctx, lba, buf, false)
			} else {
				err = l.lun.Read(ctx, lba, buf)
			}
			if err != nil {
				l.t.Error(err)
				break
			}
		}
		l.wg.Done()
	}
}

// run executes n commands, rounded up to a multiple of depth.
func (l *load) run(n int) {
	l.wg.Add(l.depth)
	for range l.depth {
		l.work <- (n + l.depth - 1) / l.depth
	}
	l.wg.Wait()
}

// BenchmarkPath measures whole commands through our initiator, loopback, the datamover, the session and the unit to a medium that does
// nothing. All is in one process: cpu-ns/op and allocations are those of both sides.
func BenchmarkPath(b *testing.B) {
	for _, c := range []struct{ size, depth int }{{4096, 1}, {4096, 32}, {262144, 1}, {262144, 8}} {
		for _, write := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/%dKiB/depth%d", direction(write), c.size>>10, c.depth), func(b *testing.B) {
				l := newLoad(b, write, c.size, c.depth, nil)
				l.run(100)
				b.SetBytes(int64(c.size))
				b.ReportAllocs()
				cpu := cpuTime()
				b.ResetTimer()
				l.run(b.N)
				b.StopTimer()
				b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

func direction(write bool) string {
	if write {
		return "write"
	}
	return "read"
}
