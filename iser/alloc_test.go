//go:build !race

// The race detector allocates, and has sync.Pool forget at random.

package iser_test

import (
	"context"
	"math"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// Commands allocate nothing in steady state, the initiator included. The collector is off while that is counted, because it empties pools; what is
// left is the runtime's.
func TestCommandsDoNotAllocate(t *testing.T) {
	var null *regionNull
	r := newRig(t, func(r *rig, _ *iscsi.Options, _ *iser.Options) {
		null = &regionNull{Null: scsitest.NewNull(1<<20, 512), mem: r.lent, out: map[int][]*regionLoan{}}
		r.lent.SetMangle(false)
		r.unit = null
	})
	t.Cleanup(func() {
		for _, list := range null.out {
			for _, l := range list {
				r.lent.Free(l.bufs)
			}
		}
	})
	ctx := context.Background()
	s, err := initiator.Dial(ctx, initiator.Options{Portal: r.addr, InitiatorName: initiatorName, TargetName: targetName, ISER: &initiator.ISER{}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	lun, err := s.OpenLUN(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 4
	for _, size := range []int{4096, 65536} {
		bufs := make([][]byte, depth)
		for i := range bufs {
			if bufs[i], err = s.Alloc(size); err != nil {
				t.Fatal(err)
			}
		}
		each := func(n int) {
			var wg sync.WaitGroup
			for _, b := range bufs {
				wg.Add(1)
				go func() {
					defer wg.Done()
					for range n {
						if err := lun.Write(ctx, 0, b, false); err != nil {
							t.Error(err)
						}
						if err := lun.Read(ctx, 0, b); err != nil {
							t.Error(err)
						}
					}
				}()
			}
			wg.Wait()
		}
		per := math.Inf(1)
		for round := 0; round < 10 && per > 0.1; round++ { // the first warms up
			collector := debug.SetGCPercent(-1)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			const rounds = 250
			each(rounds)
			runtime.ReadMemStats(&after)
			debug.SetGCPercent(collector)
			per = min(per, float64(after.Mallocs-before.Mallocs)/(2*depth*rounds))
		}
		t.Logf("%d bytes: %.3f allocations per command", size, per)
		if per > 0.1 {
			t.Errorf("%d bytes: %.3f allocations per command", size, per)
		}
		for _, b := range bufs {
			s.Free(b)
		}
	}
}
