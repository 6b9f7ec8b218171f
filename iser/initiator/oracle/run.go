package oracle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

// Unit is what the driver writes to; *initiator.LUN is one. A logical block must divide BlockSize.
type Unit interface {
	Read(ctx context.Context, lba uint64, p []byte) error
	Write(ctx context.Context, lba uint64, p []byte, fua bool) error
	Flush(ctx context.Context) error
	Unmap(ctx context.Context, ranges ...initiator.Range) error
	WriteSame(ctx context.Context, lba uint64, count uint32, block []byte, unmap bool) error
}

// Factory opens the unit, and returns with it the length of a logical block in bytes and
// what closes it.
type Factory func(ctx context.Context) (u Unit, logicalBlock uint32, closeUnit func(), err error)

// Options configure Run. The zero value of each field has the default that its comment names.
type Options struct {
	History *History // required
	First   uint64   // block of the unit at which the history's region begins; default 0
	Workers int      // operations in parallel; default 16
	// Operations ends the run after so many operations, Duration after so much time; default: when ctx ends.
	Operations uint64
	Duration   time.Duration
	MaxBlocks  int // longest write, in blocks; default 64 (256 KiB)

	// Shares of 1000 operations; the rest are writes. Default 0.
	ZeroShare, UnmapShare, SameShare, FlushShare, ReadShare, FUAShare int

	// Sessions is how many units are opened, each for a part of the workers; default 1.
	Sessions int
	Seed     uint64 // of the choices; print it
	// OnAck, if set, is called after each acknowledgement with their number so far, from a worker.
	OnAck func(acknowledged uint64)
}

func (o *Options) ensureDefaults() error {
	if o.Workers == 0 {
		o.Workers = 16
	}
	if o.MaxBlocks == 0 {
		o.MaxBlocks = 64
	}
	if o.Sessions == 0 {
		o.Sessions = 1
	}
	sum, negative := 0, o.FUAShare < 0
	for _, s := range []int{o.ZeroShare, o.UnmapShare, o.SameShare, o.FlushShare, o.ReadShare} {
		negative = negative || s < 0
		sum += s
	}
	switch {
	case o.History == nil:
		return errors.New("oracle: no history")
	case negative || sum > 1000 || o.FUAShare > 1000:
		return errors.New("oracle: shares are not within 1000")
	case o.Workers < 1 || o.Sessions < 1 || o.Sessions > o.Workers:
		return fmt.Errorf("oracle: %d workers on %d sessions", o.Workers, o.Sessions)
	case o.MaxBlocks < 1 || o.MaxBlocks > 4096:
		return fmt.Errorf("oracle: writes of %d blocks", o.MaxBlocks)
	}
	return nil
}

// Result is what a run did.
type Result struct {
	Operations, Acknowledged, Flushes, Reads uint64
}

// run is the state of one Run.
type run struct {
	o       Options
	logical uint32 // bytes
	left    atomic.Int64
	flushes atomic.Uint64
	reads   atomic.Uint64

	mu   sync.Mutex // guards busy
	busy []bool     // per block: an operation holds it, or ended with an unknown outcome
}

// Run writes to the unit until ctx ends, the limits are reached, or an operation fails. A failed operation is of unknown outcome: its error is
// returned, and unless the target is known to be alive and done with it, the next step is History.Crash. A read that
// returns what it must not is a *Violation.
func Run(ctx context.Context, open Factory, o Options) (Result, error) {
	var res Result
	if err := o.ensureDefaults(); err != nil {
		return res, err
	}
	r := &run{o: o, busy: make([]bool, o.History.Blocks())}
	r.left.Store(int64(min(o.Operations, 1<<62)))
	if o.Operations == 0 {
		r.left.Store(1 << 62)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	units := make([]Unit, o.Sessions)
	for i := range units {
		u, logical, closeUnit, err := open(ctx)
		if err != nil {
			return res, err
		}
		defer closeUnit()
		if logical == 0 || BlockSize%logical != 0 || r.logical != 0 && logical != r.logical {
			return res, fmt.Errorf("oracle: a logical block of %d bytes", logical)
		}
		r.logical, units[i] = logical, u
	}
	ended := make(chan struct{}) // closed when the duration is over: workers finish what they do
	if o.Duration > 0 {
		timer := time.AfterFunc(o.Duration, func() { close(ended) })
		defer timer.Stop()
	}
	submitted, acked := o.History.Counts()
	var wg sync.WaitGroup
	for w := range o.Workers {
		wg.Go(func() {
			err := r.work(ctx, ended, units[w%len(units)], rand.New(rand.NewPCG(o.Seed, uint64(w))))
			if err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	s, a := o.History.Counts()
	res = Result{Operations: s - submitted, Acknowledged: a - acked, Flushes: r.flushes.Load(), Reads: r.reads.Load()}
	return res, context.Cause(ctx)
}

// hold takes a free run of 1 to most blocks, or returns 0 after some attempts.
func (r *run) hold(rng *rand.Rand, most int) (first, count uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	total := uint64(len(r.busy))
	for range 64 {
		count = 1 + rng.Uint64N(min(uint64(most), total))
		first = rng.Uint64N(total - count + 1)
		free := uint64(0)
		for free < count && !r.busy[first+free] {
			free++
		}
		if free == 0 {
			continue
		}
		count = free
		for b := first; b < first+count; b++ {
			r.busy[b] = true
		}
		return first, count
	}
	return 0, 0
}

func (r *run) release(first, count uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for b := first; b < first+count; b++ {
		r.busy[b] = false
	}
}

func (r *run) lba(block uint64) uint64 { return (r.o.First + block) * uint64(BlockSize/r.logical) }

func (r *run) work(ctx context.Context, ended <-chan struct{}, u Unit, rng *rand.Rand) error {
	buf := make([]byte, r.o.MaxBlocks*BlockSize)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
			return nil
		default:
		}
		if r.left.Add(-1) < 0 {
			return nil
		}
		if err := r.one(ctx, u, rng, buf); err != nil {
			return err
		}
	}
}

// one does one operation.
func (r *run) one(ctx context.Context, u Unit, rng *rand.Rand, buf []byte) error {
	h, o := r.o.History, &r.o
	pick := rng.IntN(1000)
	chosen := func(share int) bool {
		pick -= share
		return pick < 0
	}
	kind := Write
	switch {
	case chosen(o.FlushShare):
		id, err := h.BeginFlush()
		if err != nil {
			return err
		}
		if err := u.Flush(ctx); err != nil {
			return err
		}
		r.flushes.Add(1)
		return h.EndFlush(id)
	case chosen(o.ReadShare):
		return r.read(ctx, u, rng, buf)
	case chosen(o.ZeroShare):
		kind = Zero
	case chosen(o.UnmapShare):
		kind = Unmap
	case chosen(o.SameShare):
		kind = Same
	}
	first, count := r.hold(rng, o.MaxBlocks)
	if count == 0 {
		return nil // everything is busy
	}
	fua := kind == Write && rng.IntN(1000) < o.FUAShare
	op, err := h.Submit(kind, first, count, fua)
	if err != nil {
		return err
	}
	if err := r.send(ctx, u, op, buf); err != nil {
		return fmt.Errorf("oracle: %v %d: %w", kind, op.Seq, err) // the blocks stay held
	}
	if err := h.Ack(op); err != nil {
		return err
	}
	r.release(first, count)
	if o.OnAck != nil {
		_, acked := h.Counts()
		o.OnAck(acked)
	}
	return nil
}

func (r *run) send(ctx context.Context, u Unit, op *Op, buf []byte) error {
	h, lba := r.o.History, r.lba(op.First)
	logical := uint32(op.Count) * (BlockSize / r.logical)
	switch op.Kind {
	case Zero:
		block := buf[:r.logical]
		clear(block)
		return u.WriteSame(ctx, lba, logical, block, false)
	case Unmap:
		return u.Unmap(ctx, initiator.Range{LBA: lba, Blocks: logical})
	case Same:
		block := buf[:r.logical]
		h.FillSame(op, block)
		return u.WriteSame(ctx, lba, logical, block, false)
	}
	for i := range op.Count {
		h.Fill(op, i, buf[i*BlockSize:(i+1)*BlockSize])
	}
	return u.Write(ctx, lba, buf[:op.Count*BlockSize], op.FUA)
}

// read checks some blocks while the target runs.
func (r *run) read(ctx context.Context, u Unit, rng *rand.Rand, buf []byte) error {
	first, count := r.hold(rng, r.o.MaxBlocks)
	if count == 0 {
		return nil
	}
	defer r.release(first, count)
	p := buf[:count*BlockSize]
	if err := u.Read(ctx, r.lba(first), p); err != nil {
		return err
	}
	r.reads.Add(1)
	for i := range count {
		if err := r.o.History.CheckRead(first+i, p[i*BlockSize:(i+1)*BlockSize]); err != nil {
			return err
		}
	}
	return nil
}

// UnitReader returns a Reader for Verify on a unit with the given logical block length, whose region begins at block first.
func UnitReader(u Unit, first uint64, logicalBlock uint32) Reader {
	return func(ctx context.Context, block uint64, p []byte) error {
		return u.Read(ctx, (first+block)*uint64(BlockSize/logicalBlock), p)
	}
}

// Initialize zeroes the region with write-same and flushes, on record.
func Initialize(ctx context.Context, open Factory, h *History, first uint64) error {
	u, logical, closeUnit, err := open(ctx)
	if err != nil {
		return err
	}
	defer closeUnit()
	if logical == 0 || BlockSize%logical != 0 {
		return fmt.Errorf("oracle: a logical block of %d bytes", logical)
	}
	per := uint64(BlockSize / logical)
	const step = 4096 // blocks: 16 MiB
	block := make([]byte, logical)
	for b := uint64(0); b < h.Blocks(); b += step {
		n := min(step, h.Blocks()-b)
		op, err := h.Submit(Zero, b, n, false)
		if err != nil {
			return err
		}
		if err := u.WriteSame(ctx, (first+b)*per, uint32(n*per), block, false); err != nil {
			return err
		}
		if err := h.Ack(op); err != nil {
			return err
		}
	}
	id, err := h.BeginFlush()
	if err != nil {
		return err
	}
	if err := u.Flush(ctx); err != nil {
		return err
	}
	return h.EndFlush(id)
}
