package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/oracle"
)

// VerifyRange is how much of a unit Verify uses if Options.Size does not say: the fill and each check cover all of it.
const VerifyRange = 256 << 20

const (
	maxVerifyBytes = 4 << 20 // of an operation
	// verifyUpdates and verifyOperations bound what the oracle remembers between two checks of the range: about 8 bytes for each
	// block of each operation, and 100 for each operation.
	verifyUpdates    = 8 << 20
	verifyOperations = 1 << 20
	// Of 1000 operations; the rest are writes.
	verifyReads   = 400
	verifyFlushes = 5
	verifyFUA     = 50 // of 1000 writes
)

// Verification is what Verify found. It fills the range with blocks that name themselves: volume, block number, a sequence
// number and a CRC32C. Then it writes and reads runs of blocks at random places, each read judged at once, and from
// time to time, and at the end, reads the whole range and judges every block: it must hold its last acknowledged write.
type Verification struct {
	BlocksFilled  uint64 `json:"blocks_filled"`  // blocks of 4096 bytes that were written first
	Writes        uint64 `json:"writes"`         // acknowledged, after the fill
	Reads         uint64 `json:"reads"`          // judged
	Checks        uint64 `json:"checks"`         // times that the whole range was read and judged
	BlocksChecked uint64 `json:"blocks_checked"` // in those
	// Complete is true if the range was judged after the last write. Otherwise an operation failed or the run was interrupted.
	Complete bool `json:"complete"`
	// Violations counts blocks that are lost or wrong; Details describes the first of them.
	Violations uint64   `json:"violations"`
	Details    []string `json:"details,omitempty"`
}

func (v *Verification) add(violations uint64, details ...*oracle.Violation) {
	const most = 100
	v.Violations += violations
	for _, d := range details {
		if len(v.Details) < most {
			v.Details = append(v.Details, d.Error())
		}
	}
}

// metered is a unit that measures what is done to it. Half of what is in flight goes through memory of the unit, the rest
// does not, so that both are tried.
type metered struct {
	Unit
	r       *run
	buffers chan []byte

	mu   sync.Mutex
	hist *Histogram // guarded by mu
}

func (m *metered) record(start time.Time, bytes int, err error) error {
	took := time.Since(start)
	if err != nil {
		return err
	}
	m.r.ops.Add(1)
	m.r.bytes.Add(uint64(bytes))
	m.mu.Lock()
	m.hist.Record(took)
	m.mu.Unlock()
	return nil
}

func (m *metered) Read(ctx context.Context, lba uint64, p []byte) error {
	own := m.take()
	defer m.put(own)
	start := time.Now()
	if own == nil {
		return m.record(start, len(p), m.Unit.Read(ctx, lba, p))
	}
	err := m.record(start, len(p), m.Unit.Read(ctx, lba, own[:len(p)]))
	copy(p, own)
	return err
}

func (m *metered) Write(ctx context.Context, lba uint64, p []byte, fua bool) error {
	own := m.take()
	defer m.put(own)
	if own != nil {
		p = own[:copy(own, p)]
	}
	start := time.Now()
	return m.record(start, len(p), m.Unit.Write(ctx, lba, p, fua || m.r.o.FUA))
}

// take returns a buffer of the unit's memory, nil if all are in use.
func (m *metered) take() []byte {
	select {
	case b := <-m.buffers:
		return b
	default:
		return nil
	}
}

func (m *metered) put(b []byte) {
	if b != nil {
		m.buffers <- b
	}
}

func (m *metered) Flush(ctx context.Context) error {
	err := m.Unit.Flush(ctx)
	if err == nil {
		m.r.flushes.Add(1)
	}
	return err
}

func (m *metered) Unmap(context.Context, ...initiator.Range) error { return errors.ErrUnsupported }

func (m *metered) WriteSame(context.Context, uint64, uint32, []byte, bool) error {
	return errors.ErrUnsupported
}

// patient is a unit that gives an operation up when it takes longer than the rest of the run and Options.Grace.
type patient struct {
	u Unit
	r *run
}

func (p patient) do(ctx context.Context, f func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, max(0, time.Until(p.r.until))+p.r.o.Grace)
	defer cancel()
	err := f(bounded)
	if err != nil && ctx.Err() == nil && bounded.Err() != nil {
		p.r.unfinished.Add(1)
		err = fmt.Errorf("%w: %w", ErrOverdue, err)
	}
	return err
}

// Read implements Unit.
func (p patient) Read(ctx context.Context, lba uint64, b []byte) error {
	return p.do(ctx, func(ctx context.Context) error { return p.u.Read(ctx, lba, b) })
}

// Write implements Unit.
func (p patient) Write(ctx context.Context, lba uint64, b []byte, fua bool) error {
	return p.do(ctx, func(ctx context.Context) error { return p.u.Write(ctx, lba, b, fua) })
}

// Flush implements Unit.
func (p patient) Flush(ctx context.Context) error { return p.do(ctx, p.u.Flush) }

// verify runs the pattern Verify.
func (r *run) verify(ctx context.Context, units []*Opened, res *Result) error {
	o := r.o
	block := units[0].BlockSize
	if oracle.BlockSize%block != 0 || o.Offset%oracle.BlockSize != 0 {
		return badOption("verify needs a logical block that divides 4096 bytes, and an offset that is a multiple of them")
	}
	var volume oracle.Volume
	binary.LittleEndian.PutUint64(volume[:], o.Seed)
	copy(volume[8:], "isgbench")
	h, err := oracle.NewHistory(volume, o.Seed, o.Size/oracle.BlockSize)
	if err != nil {
		return badOption("%v", err)
	}
	first := o.Offset / oracle.BlockSize
	r.until = time.Now().Add(o.Duration)
	v := &Verification{}
	res.Verification, res.Histogram = v, new(Histogram)
	m := make([]*metered, len(units))
	for i, u := range units {
		n := (o.Depth + 1) / 2
		m[i] = &metered{Unit: patient{u.Unit, r}, r: r, hist: new(Histogram), buffers: make(chan []byte, n)}
		for range n {
			b, err := u.buffer(o.BlockSize)
			if err != nil {
				return err
			}
			m[i].buffers <- b
		}
	}
	defer func() {
		for _, u := range m {
			res.Histogram.Merge(u.hist)
		}
	}()
	// stopped notes why the run ends early.
	stopped := func(err error) {
		var wrong *oracle.Violation
		switch {
		case errors.As(err, &wrong):
			v.add(1, wrong)
		case errors.Is(err, ErrOverdue): // counted already
		case ctx.Err() == nil:
			r.failed.Add(1)
			r.firstError.CompareAndSwap(nil, &err)
		}
	}

	r.enter("fill")
	if err := r.fill(ctx, h, units[0], first); err != nil {
		stopped(err)
		return nil
	}
	v.BlocksFilled = h.Blocks()
	perOp := uint64(o.BlockSize / oracle.BlockSize)
	rng := rand.New(rand.NewPCG(o.Seed, 1))
	for left := o.Duration; left > 0; {
		r.enter("write and read")
		next := 0
		start, cpu := time.Now(), cpuTime()
		done, err := oracle.Run(ctx, func(context.Context) (oracle.Unit, uint32, func(), error) {
			next++
			return m[next-1], units[next-1].BlockSize, func() {}, nil
		}, oracle.Options{
			History: h, First: first, Workers: o.Depth * o.Sessions, Sessions: o.Sessions, Duration: left, Operations: min(verifyOperations, verifyUpdates/perOp),
			MaxBlocks: int(perOp), ReadShare: verifyReads, FlushShare: verifyFlushes, FUAShare: verifyFUA, Seed: rng.Uint64(),
		})
		took := time.Since(start)
		res.Elapsed += took
		res.CPU += cpuTime() - cpu
		left -= took
		v.Writes += done.Acknowledged
		v.Reads += done.Reads
		if err != nil {
			stopped(err)
			return nil
		}
		r.enter("check")
		report, err := h.Verify(ctx, oracle.UnitReader(m[0].unmetered(), first, block), oracle.KeepAcked)
		if err != nil {
			stopped(err)
			return nil
		}
		v.Checks++
		v.BlocksChecked += report.Blocks
		v.add(report.Violated, report.Violations...)
		if report.Violated > 0 {
			return nil
		}
		v.Complete = left <= 0
		if err := h.Rebase(report); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) enter(phase string) { r.phase.Store(&phase) }

// unmetered is the unit without the measurement.
func (m *metered) unmetered() oracle.Unit {
	return &metered{Unit: m.Unit, r: new(run), hist: new(Histogram)}
}

// fill writes the whole range in order, on record, Depth operations at a time.
func (r *run) fill(ctx context.Context, h *oracle.History, u *Opened, first uint64) error {
	const piece = 256 << 10 / oracle.BlockSize // blocks
	per := uint64(oracle.BlockSize / u.BlockSize)
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var mu sync.Mutex
	next := uint64(0) // guarded by mu
	var wg sync.WaitGroup
	for range min(r.o.Depth, 16) {
		wg.Go(func() {
			buf := make([]byte, piece*oracle.BlockSize)
			for ctx.Err() == nil {
				mu.Lock()
				at := next
				n := min(piece, h.Blocks()-at)
				next += n
				mu.Unlock()
				if n == 0 {
					return
				}
				op, err := h.Submit(oracle.Write, at, n, false)
				if err == nil {
					for i := range n {
						h.Fill(op, i, buf[i*oracle.BlockSize:][:oracle.BlockSize])
					}
					err = patient{u.Unit, r}.Write(ctx, (first+at)*per, buf[:n*oracle.BlockSize], false)
				}
				if err == nil {
					err = h.Ack(op)
				}
				if err != nil {
					fail(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}
