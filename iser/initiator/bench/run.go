package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

// run is the state of one Run.
type run struct {
	o       *Options
	slots   uint64 // operations that fit in the range
	perSlot uint64 // logical blocks
	first   uint64 // logical block
	left    atomic.Int64
	next    atomic.Uint64 // of the sequential patterns
	stop    atomic.Bool

	phase                       atomic.Pointer[string]
	ops, bytes, flushes, failed atomic.Uint64
	unfinished                  atomic.Uint64
	firstError, permanent       atomic.Pointer[error]

	units []*Opened
	until time.Time // end of the duration, of Verify
}

// PermanentErrors is how many operations in a row the target refuses, with any status but BUSY and TASK SET FULL, until a stream
// ends, and the run with it.
const PermanentErrors = 100

// busy returns how often the target said so.
func (r *run) busy() (n uint64) {
	for _, u := range r.units {
		if u.Busy != nil {
			n += u.Busy()
		}
	}
	return n
}

// prepare bounds a step before the load by Options.Prepare. what names the step.
func (r *run) prepare(ctx context.Context, what string, step func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, r.o.Prepare)
	defer cancel()
	err := step(bounded)
	if err != nil && ctx.Err() == nil && bounded.Err() != nil { // where it was in the step says nothing more
		busy := ""
		if n := r.busy(); n > 0 {
			busy = fmt.Sprintf(", with %d answers BUSY", n)
		}
		err = fmt.Errorf("%w: %s took longer than %v%s", ErrOverdue, what, r.o.Prepare, busy)
	}
	return err
}

// Run puts load on the unit until the duration or count is reached, ctx ends, every stream has lost its
// connection, or the target refuses what a stream asks for again and again. Operations in flight at the end of the duration are
// finished and counted if they end within Options.Grace. An error means that nothing was
// measured; failed operations, and blocks that Verify found lost or wrong, are in the result.
func Run(ctx context.Context, o Options) (*Result, error) {
	if err := o.ensureDefaults(); err != nil {
		return nil, err
	}
	r := &run{o: &o}
	units := make([]*Opened, o.Sessions)
	for i := range units {
		if err := r.prepare(ctx, "the login", func(ctx context.Context) (err error) {
			units[i], err = o.Open(ctx)
			return err
		}); err != nil {
			return nil, err
		}
		defer units[i].Close()
	}
	r.units = units
	if err := r.layout(units[0]); err != nil {
		return nil, err
	}
	if o.Pattern.Writes() && !o.Force {
		var what string
		if err := r.prepare(ctx, "to read what the unit holds", func(ctx context.Context) (err error) {
			what, err = content(ctx, units[0])
			return err
		}); err != nil {
			return nil, err
		}
		if what != "" {
			return nil, fmt.Errorf("%w: it has %s", ErrInUse, what)
		}
	}
	stopReports := r.reports(time.Now())
	defer stopReports()
	res := &Result{Pattern: o.Pattern, BlockSize: o.BlockSize, Depth: o.Depth, Sessions: o.Sessions, Offset: o.Offset, Size: o.Size, Seed: o.Seed}
	var err error
	if o.Pattern == Verify {
		err = r.verify(ctx, units, res)
	} else {
		err = r.load(ctx, units, res)
	}
	if err != nil {
		return nil, err
	}
	res.Operations, res.Bytes, res.Flushes, res.Errors = r.ops.Load(), r.bytes.Load(), r.flushes.Load(), r.failed.Load()
	res.Unfinished, res.Busy = r.unfinished.Load(), r.busy()
	if err := r.firstError.Load(); err != nil {
		res.FirstError = (*err).Error()
	}
	if err := r.permanent.Load(); err != nil {
		res.Permanent = *err
	}
	h := res.Histogram
	res.Latency = Latency{Min: h.Quantile(0), Mean: h.Mean(), P50: h.Quantile(0.5), P90: h.Quantile(0.9),
		P99: h.Quantile(0.99), P999: h.Quantile(0.999), Max: h.Quantile(1)}
	if s := res.Elapsed.Seconds(); s > 0 {
		res.IOPS = float64(res.Operations) / s
		res.MBps = float64(res.Bytes) / s / 1e6
	}
	if res.Operations > 0 {
		res.CPUPerOp = float64(res.CPU) / float64(res.Operations)
	}
	return res, nil
}

// load runs all patterns but Verify.
func (r *run) load(ctx context.Context, units []*Opened, res *Result) error {
	o := r.o
	hists := make([]Histogram, o.Sessions*o.Depth)
	buffers := make([][]byte, len(hists))
	for i := range buffers {
		var err error
		if buffers[i], err = units[i%o.Sessions].buffer(o.BlockSize); err != nil {
			return err
		}
	}
	rngs := make([]*rand.Rand, len(hists))
	var filled sync.WaitGroup
	for i := range rngs {
		rngs[i] = rand.New(rand.NewPCG(o.Seed, uint64(i)))
		filled.Go(func() { fillRandom(rngs[i], buffers[i]) })
	}
	filled.Wait()
	r.left.Store(1 << 62)
	if o.Count > 0 {
		r.left.Store(int64(min(o.Count, 1<<62)))
	}
	if o.Duration > 0 {
		timer := time.AfterFunc(o.Duration, func() { r.stop.Store(true) })
		defer timer.Stop()
		bounded, cancel := context.WithTimeoutCause(ctx, o.Duration+o.Grace, ErrOverdue)
		defer cancel()
		ctx = bounded
	}
	cancelled := context.AfterFunc(ctx, func() { r.stop.Store(true) })
	defer cancelled()

	allocated, start, cpu := allocations(), time.Now(), cpuTime()
	var wg sync.WaitGroup
	for i := range hists {
		wg.Go(func() {
			r.stream(ctx, units[i%o.Sessions].Unit, rngs[i], &hists[i], buffers[i])
		})
	}
	wg.Wait()
	res.Elapsed, res.CPU, res.Allocations = time.Since(start), cpuTime()-cpu, allocations()-allocated
	res.Histogram = new(Histogram)
	for i := range hists {
		res.Histogram.Merge(&hists[i])
	}
	return nil
}

// layout divides the range into slots of one operation.
func (r *run) layout(u *Opened) error {
	o := r.o
	block := uint64(u.BlockSize)
	size := u.Blocks * block
	if block == 0 || uint64(o.BlockSize)%block != 0 || o.Offset%block != 0 {
		return badOption("block size %d and offset %d must be multiples of the logical block, %d bytes", o.BlockSize, o.Offset, block)
	}
	if u.MaxTransfer > 0 && uint64(o.BlockSize) > u.MaxTransfer {
		return badOption("a block size of %d bytes is above the most that the unit moves at once, %d bytes", o.BlockSize, u.MaxTransfer)
	}
	if o.Offset >= size {
		return badOption("offset %d is beyond the unit, %d bytes", o.Offset, size)
	}
	length := o.Size
	if length == 0 {
		length = size - o.Offset
		if o.Pattern == Verify {
			length = min(length, VerifyRange)
		}
	}
	if length > size-o.Offset {
		return badOption("%d bytes from offset %d pass the end of the unit, %d bytes", length, o.Offset, size)
	}
	o.Size = length
	r.slots = length / uint64(o.BlockSize)
	if r.slots == 0 {
		return badOption("a range of %d bytes holds no operation of %d", length, o.BlockSize)
	}
	r.first, r.perSlot = o.Offset/block, uint64(o.BlockSize)/block
	return nil
}

// fillRandom fills whole words of b.
func fillRandom(rng *rand.Rand, b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
}

// stream keeps one operation in flight.
func (r *run) stream(ctx context.Context, u Unit, rng *rand.Rand, h *Histogram, buf []byte) {
	o := r.o
	sinceFlush, refused := 0, 0
	for !r.stop.Load() && r.left.Add(-1) >= 0 {
		var slot uint64
		write := o.Pattern.Writes()
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
		if err == nil {
			refused = 0
			continue
		}
		if r.fail(ctx, err, time.Since(begin)) {
			return
		}
		var status *initiator.StatusError
		if !errors.As(err, &status) || status.Status == initiator.Busy || status.Status == initiator.TaskSetFull {
			refused = 0
		} else if refused++; refused == PermanentErrors {
			reason := err // err itself stays off the heap
			r.permanent.CompareAndSwap(nil, &reason)
			r.stop.Store(true)
		}
	}
}

// longWait is from when on an operation that an interrupt ends counts as unfinished.
const longWait = time.Second

// fail counts an error and reports whether the stream must end.
func (r *run) fail(ctx context.Context, err error, took time.Duration) bool {
	if ctx.Err() != nil {
		if took >= longWait || errors.Is(context.Cause(ctx), ErrOverdue) {
			r.unfinished.Add(1)
		}
		return true
	}
	r.failed.Add(1)
	r.firstError.CompareAndSwap(nil, &err)
	return errors.Is(err, initiator.ErrConnection) || errors.Is(err, initiator.ErrClosed)
}

// reports calls Progress until the function that it returns was called.
func (r *run) reports(start time.Time) (stop func()) {
	if r.o.Progress == nil {
		return func() {}
	}
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				p := Progress{Elapsed: time.Since(start), Operations: r.ops.Load(), Bytes: r.bytes.Load(), Errors: r.failed.Load(), Busy: r.busy(), Phase: string(r.o.Pattern)}
				if phase := r.phase.Load(); phase != nil {
					p.Phase = *phase
				}
				r.o.Progress(p)
			}
		}
	})
	return func() {
		close(done)
		running.Wait()
	}
}

// allocations returns the number of objects that this process has put on the heap.
func allocations() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s) // exact, other than runtime/metrics
	return s.Mallocs
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
