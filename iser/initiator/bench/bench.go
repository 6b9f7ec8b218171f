// Package bench generates load on a logical unit and measures it: a library for the benchmark command.
package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

// Pattern is an access pattern.
type Pattern string

// Patterns. The sequential ones are one stream, shared by all that is in flight, which starts over at the end of the range.
const (
	RandRead  Pattern = "randread"
	RandWrite Pattern = "randwrite"
	RandRW    Pattern = "randrw" // 70 % reads
	Read      Pattern = "read"
	Write     Pattern = "write"
)

// Patterns lists all patterns.
var Patterns = []Pattern{RandRead, RandWrite, RandRW, Read, Write}

const readShare = 70 // percent, of RandRW

// Unit is what load is put on; *initiator.LUN is one.
type Unit interface {
	Read(ctx context.Context, lba uint64, p []byte) error
	Write(ctx context.Context, lba uint64, p []byte, fua bool) error
	Flush(ctx context.Context) error
}

// Opened is a unit with its geometry.
type Opened struct {
	Unit      Unit
	BlockSize uint32 // logical block, bytes
	Blocks    uint64
	Close     func()
}

// Options configure Run. The zero value of each field has the default that its comment names.
type Options struct {
	Pattern   Pattern       // required
	BlockSize int           // bytes of an operation, a multiple of the logical block; default 4096
	Depth     int           // operations in flight on each session; default 16
	Sessions  int           // default 1
	Duration  time.Duration // default 10 s, unless Count is set
	Count     uint64        // operations; default no limit
	Offset    uint64        // first byte of the range; default 0
	Size      uint64        // bytes of the range; default to the end of the unit
	FUA       bool          // writes with FUA
	// FlushEvery sends a flush after so many writes of each of the Depth streams; default never.
	FlushEvery int
	Seed       uint64 // of offsets and data

	// Open opens one session.
	Open func(ctx context.Context) (*Opened, error)
	// Progress, if set, is called about once a second with the operations and bytes so far.
	Progress func(elapsed time.Duration, operations, bytes uint64)
}

// Latency summarizes a histogram. A quantile is at most 1.6 % above the truth.
type Latency struct {
	Min  time.Duration `json:"min_ns"`
	Mean time.Duration `json:"mean_ns"`
	P50  time.Duration `json:"p50_ns"`
	P90  time.Duration `json:"p90_ns"`
	P99  time.Duration `json:"p99_ns"`
	P999 time.Duration `json:"p999_ns"`
	Max  time.Duration `json:"max_ns"`
}

// Result is what was measured.
type Result struct {
	Pattern    Pattern       `json:"pattern"`
	BlockSize  int           `json:"block_size"`
	Depth      int           `json:"depth"`
	Sessions   int           `json:"sessions"`
	Operations uint64        `json:"operations"` // reads and writes that succeeded
	Bytes      uint64        `json:"bytes"`
	Flushes    uint64        `json:"flushes"`
	Errors     uint64        `json:"errors"`
	FirstError string        `json:"first_error,omitempty"`
	Elapsed    time.Duration `json:"elapsed_ns"`
	IOPS       float64       `json:"iops"`
	MBps       float64       `json:"mb_per_s"` // 10^6 bytes
	Latency    Latency       `json:"latency"`
	// CPU is what this process used, user and system.
	CPU time.Duration `json:"cpu_ns"`

	Histogram *Histogram `json:"-"`
}

// String returns the result in one line.
func (r *Result) String() string {
	return fmt.Sprintf("%-9s bs=%d depth=%dx%d  %.0f IOPS  %.1f MB/s  p50 %v  p99 %v  p99.9 %v  max %v  errors %d  own CPU %v",
		r.Pattern, r.BlockSize, r.Depth, r.Sessions, r.IOPS, r.MBps, r.Latency.P50, r.Latency.P99, r.Latency.P999, r.Latency.Max,
		r.Errors, r.CPU.Round(time.Millisecond))
}

func (o *Options) ensureDefaults() error {
	if o.BlockSize == 0 {
		o.BlockSize = 4096
	}
	if o.Depth == 0 {
		o.Depth = 16
	}
	if o.Sessions == 0 {
		o.Sessions = 1
	}
	if o.Duration == 0 && o.Count == 0 {
		o.Duration = 10 * time.Second
	}
	var errs []error
	known := false
	for _, p := range Patterns {
		known = known || p == o.Pattern
	}
	if !known {
		errs = append(errs, fmt.Errorf("bench: pattern %q is not one of %v", o.Pattern, Patterns))
	}
	if o.BlockSize < 512 || o.BlockSize > 64<<20 {
		errs = append(errs, fmt.Errorf("bench: a block size of %d bytes is not between 512 B and 64 MiB", o.BlockSize))
	}
	if o.Depth < 1 || o.Depth > 4096 || o.Sessions < 1 || o.Sessions > 256 {
		errs = append(errs, fmt.Errorf("bench: %d sessions of depth %d: at most 256 of depth 4096", o.Sessions, o.Depth))
	}
	if o.Duration < 0 || o.FlushEvery < 0 {
		errs = append(errs, errors.New("bench: negative duration or flush interval"))
	}
	if o.Open == nil {
		errs = append(errs, errors.New("bench: nothing to open"))
	}
	return errors.Join(errs...)
}

// run is the state of one Run.
type run struct {
	o       *Options
	slots   uint64 // operations that fit in the range
	perSlot uint64 // logical blocks
	first   uint64 // logical block
	left    atomic.Int64
	next    atomic.Uint64 // of the sequential patterns
	stop    atomic.Bool

	ops, bytes, flushes, failed atomic.Uint64
	firstError                  atomic.Pointer[error]
}

// Run puts load on the unit until the duration or count is reached, ctx ends, or every stream has lost its
// connection. Operations in flight at the end of the duration are finished and counted. An error means that nothing was
// measured; failed operations are in the result.
func Run(ctx context.Context, o Options) (*Result, error) {
	if err := o.ensureDefaults(); err != nil {
		return nil, err
	}
	r := &run{o: &o}
	units := make([]*Opened, o.Sessions)
	for i := range units {
		u, err := o.Open(ctx)
		if err != nil {
			return nil, err
		}
		defer u.Close()
		units[i] = u
	}
	if err := r.layout(units[0]); err != nil {
		return nil, err
	}
	r.left.Store(1 << 62)
	if o.Count > 0 {
		r.left.Store(int64(min(o.Count, 1<<62)))
	}
	if o.Duration > 0 {
		timer := time.AfterFunc(o.Duration, func() { r.stop.Store(true) })
		defer timer.Stop()
	}
	cancelled := context.AfterFunc(ctx, func() { r.stop.Store(true) })
	defer cancelled()

	start, cpu := time.Now(), cpuTime()
	done := make(chan struct{})
	var progress sync.WaitGroup
	if o.Progress != nil {
		progress.Go(func() { r.report(start, done) })
	}
	hists := make([]Histogram, o.Sessions*o.Depth)
	var wg sync.WaitGroup
	for i := range hists {
		wg.Go(func() { r.stream(ctx, units[i%o.Sessions].Unit, rand.New(rand.NewPCG(o.Seed, uint64(i))), &hists[i]) })
	}
	wg.Wait()
	elapsed := time.Since(start)
	cpu = cpuTime() - cpu
	close(done)
	progress.Wait()

	all := new(Histogram)
	for i := range hists {
		all.Merge(&hists[i])
	}
	res := &Result{
		Pattern: o.Pattern, BlockSize: o.BlockSize, Depth: o.Depth, Sessions: o.Sessions,
		Operations: r.ops.Load(), Bytes: r.bytes.Load(), Flushes: r.flushes.Load(), Errors: r.failed.Load(), Elapsed: elapsed,
		Latency: Latency{Min: all.Quantile(0), Mean: all.Mean(), P50: all.Quantile(0.5), P90: all.Quantile(0.9),
			P99: all.Quantile(0.99), P999: all.Quantile(0.999), Max: all.Quantile(1)},
		CPU: cpu, Histogram: all,
	}
	if err := r.firstError.Load(); err != nil {
		res.FirstError = (*err).Error()
	}
	if s := elapsed.Seconds(); s > 0 {
		res.IOPS = float64(res.Operations) / s
		res.MBps = float64(res.Bytes) / s / 1e6
	}
	return res, nil
}

// layout divides the range into slots of one operation.
func (r *run) layout(u *Opened) error {
	o := r.o
	block := uint64(u.BlockSize)
	size := u.Blocks * block
	if block == 0 || uint64(o.BlockSize)%block != 0 || o.Offset%block != 0 {
		return fmt.Errorf("bench: block size %d and offset %d must be multiples of the logical block, %d bytes", o.BlockSize, o.Offset, block)
	}
	if o.Offset >= size {
		return fmt.Errorf("bench: offset %d is beyond the unit, %d bytes", o.Offset, size)
	}
	length := o.Size
	if length == 0 {
		length = size - o.Offset
	}
	if length > size-o.Offset {
		return fmt.Errorf("bench: %d bytes from offset %d pass the end of the unit, %d bytes", length, o.Offset, size)
	}
	r.slots = length / uint64(o.BlockSize)
	if r.slots == 0 {
		return fmt.Errorf("bench: a range of %d bytes holds no operation of %d", length, o.BlockSize)
	}
	r.first, r.perSlot = o.Offset/block, uint64(o.BlockSize)/block
	return nil
}

// stream keeps one operation in flight.
func (r *run) stream(ctx context.Context, u Unit, rng *rand.Rand, h *Histogram) {
	o := r.o
	buf := make([]byte, o.BlockSize)
	for i := 0; i+8 <= len(buf); i += 8 {
		v := rng.Uint64()
		for j := range 8 {
			buf[i+j] = byte(v >> (8 * j))
		}
	}
	sinceFlush := 0
	for !r.stop.Load() && r.left.Add(-1) >= 0 {
		var slot uint64
		write := o.Pattern == Write || o.Pattern == RandWrite
		switch o.Pattern {
		case Read, Write:
			slot = (r.next.Add(1) - 1) % r.slots
		case RandRW:
			write = rng.IntN(100) >= readShare
			fallthrough
		default:
			slot = rng.Uint64N(r.slots)
		}
		lba := r.first + slot*r.perSlot
		var err error
		begin := time.Now()
		if write {
			// Change the data a little, so that nothing behind the unit takes it for the same.
			v := rng.Uint64()
			for j := range 8 {
				buf[j] = byte(v >> (8 * j))
			}
			err = u.Write(ctx, lba, buf, o.FUA)
		} else {
			err = u.Read(ctx, lba, buf)
		}
		took := time.Since(begin)
		if err == nil {
			h.Record(took)
			r.ops.Add(1)
			r.bytes.Add(uint64(o.BlockSize))
			if write {
				if sinceFlush++; sinceFlush == o.FlushEvery {
					sinceFlush = 0
					if err = u.Flush(ctx); err == nil {
						r.flushes.Add(1)
					}
				}
			}
		}
		if err != nil && r.fail(ctx, err) {
			return
		}
	}
}

// fail counts an error and reports whether the stream must end.
func (r *run) fail(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return true
	}
	r.failed.Add(1)
	r.firstError.CompareAndSwap(nil, &err)
	return errors.Is(err, initiator.ErrConnection) || errors.Is(err, initiator.ErrClosed)
}

func (r *run) report(start time.Time, done <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			r.o.Progress(time.Since(start), r.ops.Load(), r.bytes.Load())
		}
	}
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// OpenLUN returns an Open for Options: each call logs in to a session of its own.
func OpenLUN(o initiator.Options, lun uint16) func(ctx context.Context) (*Opened, error) {
	return func(ctx context.Context) (*Opened, error) {
		s, err := initiator.Dial(ctx, o)
		if err != nil {
			return nil, err
		}
		l, err := s.OpenLUN(ctx, lun)
		if err != nil {
			s.Close()
			return nil, err
		}
		return &Opened{Unit: l, BlockSize: l.BlockSize, Blocks: l.Blocks, Close: func() { s.Close() }}, nil
	}
}
