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
// the transport fills the buffers → Commit: submit gives the LSN and queues it in the journal →
// the committer writes and syncs (Engine.Synced), publishes to the dirty map → Commit returns once the level
// due is reached.
//
// A write becomes readable when it is at `local`, or, under ack=memory, when it is acknowledged: a reader
// never sees what a crash may still take away, except where the policy says so. What ack=memory has
// acknowledged ahead of the journal is bounded for all volumes together (Engine.ahead): the journal is one queue, and the
// next sync of any volume waits behind it.

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
	o := v.newOp()
	o.charge, o.space = chargeOf(payload), payload
	p := v.policy.Load()
	if p.Ack == Memory {
		o.ahead = o.charge
	}
	if o.takeNow() {
		return o, nil
	}
	wait := v.e.opt.CommandWait
	if p.OnUnmet == Error {
		wait = v.e.opt.UnmetAfter
	}
	err := o.take(ctx, time.Now().Add(wait))
	if err == nil {
		return o, nil
	}
	o.leave()
	switch {
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

// takeNow takes what the op needs if there is no need to wait for any of it.
func (o *op) takeNow() bool {
	v := o.v
	if !v.budget.tryAcquire(o.charge) {
		return false
	}
	if o.ahead > 0 && !v.e.ahead.tryAcquire(o.ahead) {
		v.budget.release(o.charge)
		return false
	}
	if o.takeRoomNow() {
		return true
	}
	v.budget.release(o.charge)
	v.e.ahead.release(o.ahead)
	return false
}

// takeRoomNow takes room in the journal and memory if there are both.
func (o *op) takeRoomNow() bool {
	if !o.v.e.journal.TryReserve(o.space) {
		return false
	}
	if o.space == 0 {
		return true
	}
	if bufs := o.v.e.arena.TryAlloc(o.space); bufs != nil {
		o.land(bufs)
		return true
	}
	o.v.e.journal.Unreserve(o.space)
	return false
}

// take waits for what the op needs, until the deadline, which shows as context.DeadlineExceeded.
func (o *op) take(ctx context.Context, deadline time.Time) error {
	v := o.v
	if err := v.budget.acquire(ctx, &o.wait, deadline, o.charge); err != nil {
		return err
	}
	if o.ahead > 0 {
		if err := v.e.ahead.acquire(ctx, &o.wait, deadline, o.ahead); err != nil {
			v.budget.release(o.charge)
			return err
		}
	}
	if o.takeRoomNow() {
		return nil
	}
	err := o.takeRoom(ctx, deadline)
	if err != nil {
		v.budget.release(o.charge)
		v.e.ahead.release(o.ahead)
	}
	return err
}

// takeRoom waits for room in the journal and for memory.
func (o *op) takeRoom(ctx context.Context, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if err := o.v.e.journal.Reserve(ctx, o.space); err != nil || o.space == 0 {
		return err
	}
	bufs, err := o.v.e.arena.Alloc(ctx, o.space)
	if err != nil {
		o.v.e.journal.Unreserve(o.space)
		return err
	}
	o.land(bufs)
	return nil
}

func (o *op) land(bufs [][]byte) {
	o.mem = o.v.e.newPayload(bufs)
	o.entry.Payload = bufs
}

// abandon gives everything back; nothing was submitted.
func (o *op) abandon() {
	if o.mem != nil {
		o.mem.leave()
	}
	if o.charge > 0 {
		o.v.e.journal.Unreserve(o.space)
		o.v.budget.release(o.charge)
		o.v.e.ahead.release(o.ahead)
	}
	o.leave()
}

// submit gives the op its place in the volume's order of writes and hands it to the journal. One lock is held over
// both, so that the order of LSNs is that of the journal. Under ack=memory the write is readable from here on, out of
// the memory in which it landed, and answered if due is no more than that; the journal may be in
// the middle of a sync. After an error the op is gone.
func (o *op) submit(rec journal.Record, due Level) (LSN, error) {
	v := o.v
	rec.Volume = v.id
	v.mu.Lock() // SetPolicy knows that what is early was submitted before it, Forget that nothing is submitted after it
	if err := v.serving(); err != nil {
		v.mu.Unlock()
		o.abandon()
		return 0, err
	}
	rec.Epoch = v.epoch
	lsn := v.next + 1
	rec.LSN = uint64(lsn)
	o.entry.Record, o.entry.User = rec, o
	o.early = o.ahead > 0 && v.policy.Load().Ack == Memory
	o.told = o.early && due == Memory
	o.holders.Add(1)
	if err := v.e.journal.Submit(&o.entry); err != nil {
		v.mu.Unlock()
		o.holders.Add(-1)
		o.abandon()
		return 0, fmt.Errorf("%w: %w", ErrJournal, err)
	}
	v.next = lsn
	if o.early {
		v.unsynced.push(lsn, o.mem)
		v.dirty.Insert(v.extentOf(rec, journal.Location{}, v.cfg.BlockSize))
		v.acked.advance(lsn, time.Now()) // what is readable counts as acknowledged
	} else {
		v.unsynced.push(lsn, nil)
	}
	v.mu.Unlock()
	return lsn, nil
}

// settle waits until the op is answered. The journal's answer is waited for whatever happens to the command: when settle
// returns, the write is visible or never will be, and a device that stalls holds the command.
func (o *op) settle() error {
	var err error
	if !o.told {
		err = <-o.done
	}
	o.leave()
	return err
}

// finish waits until the op is answered and at the level due.
func (o *op) finish(ctx context.Context, due Level, lsn LSN) error {
	v, told := o.v, o.told
	if err := o.settle(); err != nil || told {
		return err
	}
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
	o.landing = Landing{o: o, off: off, n: n}
	return &o.landing, nil
}

// Buffers are page-aligned and together n bytes long.
func (l *Landing) Buffers() [][]byte { return l.o.mem.bufs }

// Abort gives the reservation back; nothing was written.
func (l *Landing) Abort() { l.o.abandon() }

// Commit writes the buffers and returns when the ack level, or the flush level if
// fua, is reached. A cancelled ctx ends the waiting for a level beyond the journal; the write
// is visible then, or never will be.
func (l *Landing) Commit(ctx context.Context, fua bool) error {
	o := l.o
	due := o.v.due(fua)
	lsn, err := o.submit(journal.Record{Kind: journal.KindData, Offset: uint64(l.off), Length: uint64(l.n), PayloadBytes: uint32(l.n)}, due)
	if err != nil {
		return err
	}
	return o.finish(ctx, due, lsn)
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
	var lsn LSN
	for _, r := range ranges {
		o, err := v.reserve(ctx, 0)
		var l LSN
		if err == nil {
			l, err = o.submit(journal.Record{Kind: journal.KindZero, Offset: uint64(r.Off), Length: uint64(r.Len)}, due)
		}
		if err != nil {
			if last != nil {
				_ = last.settle() // no outcome is open when the command ends, with the first error
			}
			return err
		}
		if last != nil {
			last.leave() // the journal is in order: the last one is there when all are
		}
		last, lsn = o, l
	}
	if last == nil {
		return nil
	}
	return last.finish(ctx, due, lsn)
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
	copy(o.mem.bufs[0], block)
	lsn, err := o.submit(journal.Record{Kind: journal.KindSame, Offset: uint64(r.Off), Length: uint64(r.Len), PayloadBytes: uint32(len(block))}, due)
	if err != nil {
		return err
	}
	return o.finish(ctx, due, lsn)
}

// logNote journals n and waits for the sync. Notes draw on the journal's own reserve:
// they are few, and none of them waits for room.
func (v *Volume) logNote(ctx context.Context, n note) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	o := v.newOp()
	o.note, o.entry.Payload = &n, [][]byte{b}
	lsn, err := o.submit(journal.Record{Kind: journal.KindNote, PayloadBytes: uint32(len(b))}, Local)
	if err != nil {
		return err
	}
	return o.finish(ctx, Local, lsn)
}

// extentOf describes a record as an extent of the dirty map. Without a location it is where it landed: Volume.unsynced has
// its payload, and the extent's location counts from there.
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
