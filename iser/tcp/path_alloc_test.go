//go:build !race

// The race detector allocates, and has sync.Pool forget at random.

package tcp_test

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/isergate/isergate/iser/initiator"
)

// A command allocates nothing in steady state, from the initiator's call to its return, in the whole process. The collector
// is off while that is counted, because it empties pools.
func TestCommandsDoNotAllocate(t *testing.T) {
	for _, way := range []struct {
		name   string
		change func(*initiator.Options)
	}{
		{"defaults", nil},
		{"digests", func(o *initiator.Options) {
			o.HeaderDigest, o.DataDigest = initiator.DigestRequired, initiator.DigestRequired
		}},
		{"unsolicited Data-Out", func(o *initiator.Options) { o.NoImmediateData, o.InitialR2T = true, false }},
		{"R2T", func(o *initiator.Options) { o.NoImmediateData, o.InitialR2T = true, true }},
		{"small bursts", func(o *initiator.Options) {
			o.MaxBurstLength, o.FirstBurstLength, o.MaxRecvDataSegmentLength = 16384, 4096, 8192
		}},
	} {
		for _, size := range []int{4096, 262144} {
			for _, depth := range []int{1, 8} {
				for _, write := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%s/%d/%d", way.name, direction(write), size, depth), func(t *testing.T) {
						l := newLoad(t, write, size, depth, way.change)
						commands := uint64(2000)
						if size > 65536 {
							commands = 500
						}
						objects, bytes := ^uint64(0), ^uint64(0)
						few := func() bool { return objects < commands/20 && bytes < 64*commands }
						for round := 0; round < 10 && !few(); round++ { // the first warms up; a queue that grows longer than ever allocates once
							o, b := allocated(func() { l.run(int(commands)) })
							objects, bytes = min(objects, o), min(bytes, b)
						}
						if !few() {
							t.Errorf("%d commands: %d objects, %d bytes", commands, objects, bytes)
						}
					})
				}
			}
		}
	}
}

// allocated counts what the process allocates while f runs.
func allocated(f func()) (objects, bytes uint64) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.Mallocs - before.Mallocs, after.TotalAlloc - before.TotalAlloc
}
