package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/journal"
)

// The path of a write, top to bottom: Reserve (dirty budget, journal space, memory) →
// the transport fills the buffers → Commit: journal.Submit → the committer gives the LSN
// (Engine.Assign), writes, syncs (Engine.Synced), publishes to the dirty map → Commit
// returns once the level due is reached.
//
// A write becomes readable when it is at `local`, or, under ack=memory, when it is acknowledged: a reader
// never sees what a crash may still take away, except where the policy says so.

// op is one journal record on its way. It is owned by the caller until Submit, then
// by the journal until Synced or Failed; done tells the caller about it.
type op struct {
	v      *Volume
	entry  journal.Entry
	bufs   [][]byte // arena memory, as allocated
	charge int64    // bytes of the dirty budget; 0: a note or a fence, nothing was reserved
	space  int64    // bytes of the journal
	early  bool     // ack=memory: publish and answer before the sync
	note   *note    // of a Note record
	done   chan error
}

// note is the payload of a journal Note: small state that has its place in the order
// of writes.
type note struct {
	Size   int64 `json:"size,omitempty"`   // the volume grew to this many bytes; takes an LSN
	Forget bool  `json:"forget,omitempty"` // the volume was dropped from this node; takes no LSN
	Clean  bool  `json:"clean,omitempty"`  // the engine was closed with nothing in flight; takes no LSN

	Reported bool `json:"reported,omitempty"` // a flush has reported that writes were lost; takes no LSN
	Barrier  bool `json:"barrier,omitempty"`  // means nothing but that what comes before is synced; takes no LSN
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// chargeOf is what a record with so many bytes of payload takes of the dirty budget.
func chargeOf(payload int64) int64 { return max(roundUp(payload, blockBytes), blockBytes) }

// check refuses a range that is not within the volume or not aligned.
func (v *Volume) check(off, n int64) error {
	v.mu.RLock()
	bs := int64(v.cfg.BlockSize)
	v.mu.RUnlock()
	if off < 0 || n <= 0 || off%bs != 0 || n%bs != 0 || off > v.size.Load()-n {
		return fmt.Errorf("%d bytes at %d: %w", n, off, ErrRange)
	}
	return nil
}

// reserve takes dirty budget and journal space for one record, and memory for its
// payload. This is where back-pressure acts, and only here.
func (v *Volume) reserve(ctx context.Context, payload int64) (*op, error) {
	if err := v.serving(); err != nil {
		return nil, err
	}
	if stalled := v.e.journal.Stalled(); stalled > v.e.opt.UnmetAfter {
		v.contractUnmet(Local, v.local.get().LSN, false)
		return nil, fmt.Errorf("the journal's device has not answered for %s: %w", stalled.Round(time.Second), ErrBusy)
	}
	o := &op{v: v, charge: chargeOf(payload), space: payload, done: make(chan error, 1)}
	wait := v.e.opt.CommandWait
	if v.policy.Load().OnUnmet == Error {
		wait = v.e.opt.UnmetAfter
	}
	err := waitFor(ctx, wait, func(ctx context.Context) error {
		if err := v.budget.acquire(ctx, o.charge); err != nil {
			return err
		}
		if err := v.e.journal.Reserve(ctx, o.space); err != nil {
			v.budget.release(o.charge)
			return err
		}
		if payload == 0 {
			return nil
		}
		var err error
		if o.bufs, err = v.e.arena.Alloc(ctx, payload); err != nil {
			v.e.journal.Unreserve(o.space)
			v.budget.release(o.charge)
		}
		o.entry.Payload = o.bufs
		return err
	})
	switch {
	case err == nil:
		return o, nil
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		v.contractUnmet(v.policy.Load().Ack, v.local.get().LSN, false)
		if v.policy.Load().OnUnmet == Error {
			return nil, fmt.Errorf("no room for a write in %s: %w", wait, ErrBudget)
		}
		return nil, fmt.Errorf("no room for a write in %s: %w", wait, ErrBusy)
	case errors.Is(err, journal.ErrFailed):
		return nil, fmt.Errorf("%w: %w", ErrJournal, err)
	}
	return nil, err
}

// abandon gives everything back; nothing was submitted.
func (o *op) abandon() {
	if o.bufs != nil {
		o.v.e.arena.Free(o.bufs)
		o.bufs = nil
	}
	if o.charge > 0 {
		o.v.e.journal.Unreserve(o.space)
		o.v.budget.release(o.charge)
	}
}

// submit hands the op to the journal.
func (o *op) submit(rec journal.Record) error {
	if err := o.v.serving(); err != nil {
		o.abandon()
		return err
	}
	rec.Volume = o.v.id
	o.entry.Record, o.entry.User = rec, o
	o.v.mu.RLock() // SetPolicy knows that what is early was submitted before it
	o.early = o.v.policy.Load().Ack == Memory && o.charge > 0
	err := o.v.e.journal.Submit(&o.entry)
	o.v.mu.RUnlock()
	if err != nil {
		o.abandon()
		return fmt.Errorf("%w: %w", ErrJournal, err)
	}
	return nil
}

// finish waits until the op is answered and at the level due. The journal's answer is waited
// for whatever happens to ctx: when finish returns, the write is visible or never will be, and a
// device that stalls holds the command.
func (o *op) finish(ctx context.Context, due Level) error {
	v := o.v
	if err := <-o.done; err != nil {
		return err
	}
	lsn := LSN(o.entry.Record.LSN)
	if err := v.reach(ctx, due, lsn); err != nil {
		return err
	}
	v.acked.advance(lsn, time.Now())
	return nil
}

// due is the level that a command must reach.
func (v *Volume) due(fua bool) Level {
	p := v.policy.Load()
	if fua {
		return p.Flush
	}
	return p.Ack
}

// Landing is the journal's own memory for one write. Exactly one of Commit and Abort
// ends it.
type Landing struct {
	o      *op
	off, n int64
}

// Reserve waits until a write of n bytes at off fits and returns the memory for it.
// off and n are bytes, multiples of the block size. ErrRange, ErrBusy, ErrBudget, or why the
// volume is not served.
func (v *Volume) Reserve(ctx context.Context, off, n int64) (*Landing, error) {
	if err := v.serving(); err != nil {
		return nil, err
	}
	if err := v.check(off, n); err != nil {
		return nil, err
	}
	if max := v.e.MaxWriteBytes(); n > max {
		return nil, fmt.Errorf("a write of %d bytes, at most %d go into one: %w", n, max, ErrRange)
	}
	o, err := v.reserve(ctx, n)
	if err != nil {
		return nil, err
	}
	return &Landing{o: o, off: off, n: n}, nil
}

// Buffers are page-aligned and together n bytes long.
func (l *Landing) Buffers() [][]byte { return l.o.bufs }

// Abort gives the reservation back; nothing was written.
func (l *Landing) Abort() { l.o.abandon() }

// Commit writes the buffers and returns when the ack level, or the flush level if
// fua, is reached. A cancelled ctx ends the waiting for a level beyond the journal; the write
// is visible then, or never will be.
func (l *Landing) Commit(ctx context.Context, fua bool) error {
	due := l.o.v.due(fua)
	if err := l.o.submit(journal.Record{Kind: journal.KindData, Offset: uint64(l.off), Length: uint64(l.n), PayloadBytes: uint32(l.n)}); err != nil {
		return err
	}
	return l.o.finish(ctx, due)
}

// Range is a range of bytes of a volume.
type Range struct{ Off, Len int64 }

// Deallocate makes the ranges read as zeros: metadata only, any size. It returns when the ack
// level, or the flush level if fua, is reached. The ranges take effect one by one, in order.
func (v *Volume) Deallocate(ctx context.Context, ranges []Range, fua bool) error {
	for _, r := range ranges {
		if err := v.check(r.Off, r.Len); err != nil {
			return err
		}
	}
	due := v.due(fua)
	var last *op
	var err error
	for _, r := range ranges {
		var o *op
		if o, err = v.reserve(ctx, 0); err != nil {
			break
		}
		if err = o.submit(journal.Record{Kind: journal.KindZero, Offset: uint64(r.Off), Length: uint64(r.Len)}); err != nil {
			break
		}
		last = o
	}
	switch {
	case last == nil:
		return err
	case err != nil:
		<-last.done // no outcome is open when the command ends
		return err
	}
	return last.finish(ctx, due) // the journal is in order: the last one is there when all are
}

// WriteSame writes block, one logical block, to every block of r: one block of
// payload, any size of range.
func (v *Volume) WriteSame(ctx context.Context, r Range, block []byte, fua bool) error {
	if err := v.check(r.Off, r.Len); err != nil {
		return err
	}
	v.mu.RLock()
	bs := int(v.cfg.BlockSize)
	v.mu.RUnlock()
	if len(block) != bs {
		return fmt.Errorf("a pattern of %d bytes for blocks of %d: %w", len(block), bs, ErrRange)
	}
	due := v.due(fua)
	o, err := v.reserve(ctx, int64(len(block)))
	if err != nil {
		return err
	}
	copy(o.bufs[0], block)
	if err := o.submit(journal.Record{Kind: journal.KindSame, Offset: uint64(r.Off), Length: uint64(r.Len), PayloadBytes: uint32(len(block))}); err != nil {
		return err
	}
	return o.finish(ctx, due)
}

// logNote journals n and waits for the sync. Notes draw on the journal's own reserve:
// they are few, and none of them waits for room.
func (v *Volume) logNote(ctx context.Context, n note) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	o := &op{v: v, note: &n, done: make(chan error, 1)}
	o.entry.Payload = [][]byte{b}
	if err := o.submit(journal.Record{Kind: journal.KindNote, PayloadBytes: uint32(len(b))}); err != nil {
		return err
	}
	return o.finish(ctx, Local)
}

// extentOf describes a journaled record as an extent of the dirty map.
func (v *Volume) extentOf(rec journal.Record, loc journal.Location, blockSize int32) extent.Extent {
	x := extent.Extent{Start: rec.Offset / sectorBytes, Sectors: rec.Length / sectorBytes, LSN: rec.LSN}
	x.Loc.Ref, x.Loc.Sector = loc.Segment, loc.Block*(blockBytes/sectorBytes)
	switch rec.Kind {
	case journal.KindData:
		x.Kind = extent.Data
	case journal.KindZero:
		x.Kind, x.Loc = extent.Zero, extent.Location{}
	case journal.KindSame:
		x.Kind = extent.Same
		x.Loc.Block = uint8(blockSize / sectorBytes)
	}
	return x
}
