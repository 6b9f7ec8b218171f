package bench

import (
	"math"
	"math/bits"
	"time"
)

// The histogram has 64 linear buckets for each power of two, so that a reported quantile is at most 1/64 (1.6 %)
// above a recorded value.
const (
	subBits    = 6
	subBuckets = 1 << subBits
	maxBits    = 42 // 2^42 ns: 73 minutes; longer ones count as that
	buckets    = (maxBits - subBits + 1) * subBuckets
)

// Histogram counts durations. The zero value is empty. It is not safe for concurrent use: give
// each goroutine its own and Merge.
type Histogram struct {
	counts   [buckets]uint64
	n        uint64
	sum      float64 // ns
	min, max uint64  // ns
}

// bucket returns the index for v nanoseconds.
func bucket(v uint64) int {
	if v < subBuckets {
		return int(v)
	}
	v = min(v, 1<<maxBits-1)
	shift := bits.Len64(v) - subBits - 1
	return shift<<subBits + int(v>>shift)
}

// upper returns the largest value of a bucket.
func upper(i int) uint64 {
	if i < 2*subBuckets {
		return uint64(i)
	}
	shift := i>>subBits - 1
	return (uint64(i&(subBuckets-1)|subBuckets)+1)<<shift - 1
}

// Record counts one duration; a negative one counts as 0.
func (h *Histogram) Record(d time.Duration) {
	v := uint64(max(d, 0))
	h.counts[bucket(v)]++
	if h.n == 0 || v < h.min {
		h.min = v
	}
	h.max = max(h.max, v)
	h.n++
	h.sum += float64(v)
}

// Merge adds what o counted.
func (h *Histogram) Merge(o *Histogram) {
	if o.n == 0 {
		return
	}
	for i, n := range o.counts {
		h.counts[i] += n
	}
	if h.n == 0 || o.min < h.min {
		h.min = o.min
	}
	h.max = max(h.max, o.max)
	h.n += o.n
	h.sum += o.sum
}

// Count returns the number of durations recorded.
func (h *Histogram) Count() uint64 { return h.n }

// Mean returns the arithmetic mean, 0 if empty.
func (h *Histogram) Mean() time.Duration {
	if h.n == 0 {
		return 0
	}
	return time.Duration(h.sum / float64(h.n))
}

// Quantile returns a duration that at least the share q (0 to 1) of those recorded does not exceed.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	if q <= 0 {
		return time.Duration(h.min)
	}
	rank := min(uint64(math.Ceil(q*float64(h.n))), h.n)
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			return time.Duration(min(upper(i), h.max))
		}
	}
	return time.Duration(h.max)
}
