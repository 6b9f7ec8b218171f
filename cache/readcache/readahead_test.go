package readcache

import (
	"math/rand/v2"
	"testing"
)

// TestReadaheadSequential: a sequential reader finds all but its first reads prefetched, never
// twice, and never more than the limit ahead.
func TestReadaheadSequential(t *testing.T) {
	for _, size := range []int64{4 << 10, 64 << 10, 1 << 20} {
		r := Readahead{Max: 2 << 20}
		var upTo int64 = -1
		missed := 0
		for off := int64(1 << 30); off < 1<<30+64<<20; off += size {
			if off+size > upTo {
				missed++
			}
			from, n := r.Access(off, size)
			if n == 0 {
				continue
			}
			if from != max(upTo, off+size) || from+n > off+size+r.Max {
				t.Fatalf("at %d: prefetch %d+%d, before up to %d", off, from, n, upTo)
			}
			upTo = from + n
		}
		if missed > 3 {
			t.Errorf("reads of %d: %d were not prefetched", size, missed)
		}
	}
}

func TestReadaheadRandom(t *testing.T) {
	r := Readahead{}
	rnd := rand.New(rand.NewPCG(newSeed(t), 0))
	asked := int64(0)
	for range 10000 {
		_, n := r.Access(rnd.Int64N(1<<40)&^4095, 4096)
		asked += n
	}
	if asked > 1<<20 {
		t.Fatalf("%d bytes prefetched for random reads", asked)
	}
}

// TestReadaheadStreams: several readers, each with reads out of order among the last few.
func TestReadaheadStreams(t *testing.T) {
	r := Readahead{}
	rnd := rand.New(rand.NewPCG(newSeed(t), 0))
	const streams, reads, size = 8, 400, 16 << 10
	var next, upTo [streams]int64
	missed := 0
	var pending [streams][]int64
	for range reads * streams {
		s := rnd.IntN(streams)
		for len(pending[s]) < 4 {
			pending[s] = append(pending[s], next[s])
			next[s] += size
		}
		i := 0
		if next[s] > 20*size {
			i = rnd.IntN(4)
		}
		off := pending[s][i]
		pending[s] = append(pending[s][:i], pending[s][i+1:]...)
		base := int64(s) << 35
		if off+size > upTo[s] {
			missed++
		}
		if from, n := r.Access(base+off, size); n > 0 {
			upTo[s] = max(upTo[s], from+n-base)
		}
	}
	if missed > reads*streams/20 {
		t.Fatalf("%d of %d reads were not prefetched", missed, reads*streams)
	}
}

func BenchmarkReadahead(b *testing.B) {
	var r Readahead
	rnd := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	for b.Loop() {
		r.Access(rnd.Int64N(1<<40), 4096)
	}
}
