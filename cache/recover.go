package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// replayed is what the journal holds of a volume that is not open yet.
type replayed struct {
	recs       []pending // consecutive LSNs
	seen       bool      // there is any record
	first      LSN       // of the oldest record, 0 if that is the fence of a new volume
	last       LSN       // of the newest record
	epoch      uint64    // the highest seen
	generation uint64    // of the newest fence record
	size       int64     // of the newest note about it
	forgotten  bool      // dropped from this node, and nothing came after
	damage     error     // the records do not follow each other
	lost       bool      // as of the newest fence, less what was reported since: writes were lost and no flush has said so
	lostKnown  bool      // lost is known from the journal
	segs       []segmentMark
}

// flagLost in a fence: acknowledged writes were lost, and no flush has said so yet.
const flagLost = 1

// replay is called by the journal for each record, oldest first.
func (e *Engine) replay(rec journal.Record, loc journal.Location) error {
	e.clean = false
	var n note
	if rec.Kind == journal.KindNote {
		if err := json.Unmarshal(rec.Note, &n); err != nil {
			return fmt.Errorf("a note in the journal cannot be read: %w: was the data directory written by a newer version?", err)
		}
	}
	if rec.Volume == uuid.Nil {
		e.clean = n.Clean
		return nil
	}
	id := uuid.UUID(rec.Volume)
	r := e.replayed[id]
	if r == nil {
		r = &replayed{}
		e.replayed[id] = r
	}
	switch {
	case n.Forget:
		*r = replayed{forgotten: true}
		return nil
	case n.Reported:
		r.lost, r.lostKnown = false, true
		return nil
	case n.Barrier:
		return nil
	}
	if r.forgotten && rec.Kind == journal.KindFence {
		*r = replayed{} // the volume came back from its bucket
	}
	if rec.Kind != journal.KindFence && rec.Epoch < r.epoch {
		return nil // it was on its way when its volume was forgotten, and came after another's fence
	}
	lsn := LSN(rec.LSN)
	if !r.seen {
		r.seen, r.first = true, lsn
	}
	if s := len(r.segs); s > 0 && r.segs[s-1].gen == loc.Segment {
		r.segs[s-1].last = max(r.segs[s-1].last, lsn)
	} else {
		r.segs = append(r.segs, segmentMark{loc.Segment, lsn})
	}
	if rec.Kind == journal.KindFence {
		r.epoch, r.generation, r.last = rec.Epoch, rec.Offset, max(r.last, lsn)
		r.lost, r.lostKnown = rec.Flags&flagLost != 0, true
		return nil
	}
	if len(r.recs) > 0 && lsn != r.last+1 {
		r.damage = fmt.Errorf("the journal holds LSN %d of volume %s after LSN %d: %w", lsn, id, r.last, ErrDamaged)
	}
	r.last, r.epoch = lsn, max(r.epoch, rec.Epoch)
	rec.Note = nil
	p := pending{rec: rec, loc: loc, at: time.Unix(0, rec.Time)}
	if rec.Kind == journal.KindNote {
		p.note = &n
		r.size = max(r.size, n.Size)
	}
	if rec.Kind != journal.KindNote {
		p.charge = chargeOf(int64(rec.PayloadBytes))
	}
	r.recs = append(r.recs, p)
	return nil
}

// found returns what the journal holds of a volume that is not open yet. It stays in
// e.replayed, and keeps its segments, until register takes the volume in.
func (e *Engine) found(id uuid.UUID) *replayed {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.replayed[id]; r != nil {
		return r
	}
	return &replayed{}
}

// behind reports whether records are missing between at, the LSN of a home map, and what the journal
// holds: the map is older than the journal then.
func (r *replayed) behind(at LSN) bool {
	if len(r.recs) > 0 {
		return LSN(r.recs[0].rec.LSN) > at+1
	}
	return r.last > at
}

// needed: nobody may take what the journal holds of the volume for nothing.
func (r *replayed) needed() bool { return !r.forgotten && len(r.recs) > 0 }

// orphanIn reports whether a segment holds records of a volume that nobody has opened
// since the start. They pin the segment: they may be all that there is of it.
func (e *Engine) orphanIn(gen uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.replayed {
		if r.needed() && r.segs[0].gen <= gen {
			return true
		}
	}
	return false
}

// Orphans are the volumes of which the journal holds records and that were not opened
// since the start.
func (e *Engine) Orphans() []uuid.UUID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []uuid.UUID
	for id, r := range e.replayed {
		if r.needed() {
			ids = append(ids, id)
		}
	}
	return ids
}

// Create makes a new volume and serves it. cfg.ID must be new.
func (e *Engine) Create(ctx context.Context, cfg VolumeConfig) (*Volume, error) {
	v, err := e.newVolume(cfg)
	if err != nil {
		return nil, err
	}
	if e.found(cfg.ID).needed() {
		return nil, fmt.Errorf("volume %s is in the journal already: open it or forget it", cfg.ID)
	}
	if err := e.register(v); err != nil {
		return nil, err
	}
	v.generation = 1
	if err = v.openHome(); err == nil {
		err = v.clearHome()
	}
	if err == nil {
		err = v.begin(ctx, 1)
	}
	if err != nil {
		v.discard()
		return nil, err
	}
	return v, nil
}

// Volume opens a volume that exists and begins a new epoch of it. When the home map is
// here, the volume is served at once, whatever the bucket does; else it is in StateOpening until
// the map is rebuilt from the bucket.
func (e *Engine) Volume(ctx context.Context, cfg VolumeConfig) (*Volume, error) {
	v, err := e.newVolume(cfg)
	if err != nil {
		return nil, err
	}
	r := e.found(cfg.ID)
	if r.damage != nil {
		return nil, r.damage
	}
	v.grow(r.size)
	if err := v.openHome(); err != nil {
		return nil, err
	}
	meta, known := v.home.saved, v.home.saved.Epoch != 0 && !v.home.saved.Loading
	v.grow(meta.Size)
	v.generation = max(1, meta.Generation, r.generation)
	if known && r.behind(meta.LSN) {
		v.event("warning", "home_map_old", fmt.Sprintf("the home map ends at LSN %d and the journal begins behind it: the map is older", meta.LSN))
		known = false
	}
	lost := ""
	switch {
	case !known && !r.seen && !r.forgotten && e.journal.Segments()[0].Generation == 1:
		lost = "neither home map nor journal is the one that this volume was written with: what was acknowledged and had not reached the object store is lost"
	case known && meta.Incarnation != e.journal.Incarnation():
		lost = fmt.Sprintf("the journal is not the one that this volume was written with: what was acknowledged after LSN %d and had not reached the object store is lost", meta.LSN)
		known = false // the bucket knows better than the map how far it got
	case !e.clean && cfg.Policy.Effective(cfg.WriteThrough).Ack == Memory:
		lost = fmt.Sprintf("the node stopped without closing the journal: writes after LSN %d that were acknowledged at memory and not flushed may be lost", max(r.last, meta.LSN))
	}
	if lost != "" {
		v.generation++
	}
	v.lost.Store(lost != "" || (r.lostKnown && r.lost) || (!r.lostKnown && meta.Lost))
	v.segs.list = r.segs
	if err := e.register(v); err != nil {
		return nil, err
	}
	if lost != "" {
		v.event("error", "writes_lost", lost)
	}
	if !known {
		// What the journal holds counts as acknowledged from now on: a barrier waits for it.
		v.local.advance(r.last, time.Now())
		v.acked.advance(r.last, time.Now())
		go v.rebuild(r)
		return v, nil
	}
	if err := v.adopt(r); err != nil {
		v.stop(StateFailed, err)
		v.destage.end()
		return v, nil
	}
	return v, v.begin(ctx, max(meta.Epoch, r.epoch)+1)
}

// openHome opens the home map and reads where it stands. A map that is damaged is dropped, as if
// it had never been there.
func (v *Volume) openHome() error {
	opt := homemap.Options{Cache: v.e.mapCache}
	m, err := homemap.Open(v.e.store, v.id, opt)
	if errors.Is(err, homemap.ErrDamaged) {
		v.log.Error("the home map is damaged; it is rebuilt from the bucket", "err", err)
		if err := v.e.store.Drop(v.id); err != nil {
			return fmt.Errorf("damaged home map of volume %s: %w", v.id, err)
		}
		m, err = homemap.Open(v.e.store, v.id, opt)
	}
	if err != nil {
		return fmt.Errorf("home map of volume %s: %w", v.id, err)
	}
	v.home.Map = m
	if c, ok := m.Position(); ok {
		if err := json.Unmarshal(c.Blob, &v.home.saved); err != nil {
			v.log.Error("the home map's state cannot be read; it is rebuilt from the bucket", "err", err)
			v.home.saved = homeMeta{}
		}
	}
	v.home.at = v.home.saved
	v.destage.objectBytes.Store(v.home.at.ObjectBytes)
	return nil
}

// adopt puts what the journal holds beyond the home map into the dirty map and the
// destage queue. Records must follow the home map without a gap.
func (v *Volume) adopt(r *replayed) error {
	at := v.home.at.LSN
	if r.behind(at) {
		return fmt.Errorf("the journal begins behind LSN %d, where the object store ends, and goes on to %d: %w: what lies between is missing; restore the volume from its bucket", at, r.last, ErrDamaged)
	}
	now, next := time.Now(), max(at, r.last)
	v.mu.Lock()
	v.next = next
	v.destage.mu.Lock()
	for _, p := range r.recs {
		if LSN(p.rec.LSN) <= at {
			continue
		}
		switch p.rec.Kind {
		case journal.KindData, journal.KindZero, journal.KindSame:
			v.dirty.Insert(v.extentOf(p.rec, p.loc, v.cfg.BlockSize))
		}
		p.at = now.Add(-max(0, now.Sub(p.at))) // on the monotonic clock: the other may have been ahead, or be set
		v.destage.queue = append(v.destage.queue, p)
		v.budget.force(p.charge)
	}
	v.destage.mu.Unlock()
	v.mu.Unlock()
	v.object.advance(at, v.home.at.Time)
	v.local.advance(next, now)
	v.acked.advance(next, now)
	return nil
}

// fence has the journal say that the volume stands at its last LSN, in its epoch. It takes no LSN: the next write continues from it.
func (v *Volume) fence() (*op, error) {
	v.mu.Lock() // as in submit: what is submitted before it has no higher LSN
	defer v.mu.Unlock()
	if o := v.down.Load(); o != nil && o.state != StateOpening {
		return nil, o.err
	}
	o := v.newOp()
	o.entry.Record = journal.Record{Volume: v.id, Kind: journal.KindFence, Epoch: v.epoch, Offset: v.generation, LSN: uint64(v.next)}
	if v.lost.Load() {
		o.entry.Record.Flags = flagLost
	}
	o.entry.User = o
	o.holders.Add(1)
	if err := v.e.journal.Submit(&o.entry); err != nil {
		o.holders.Add(-1)
		o.leave()
		return nil, err
	}
	return o, nil
}

// fenced waits until a fence is synced.
func (o *op) fenced(ctx context.Context) (err error) {
	select {
	case err = <-o.done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	o.leave()
	return err
}

// begin starts an epoch: it is durable before anything is served in it.
func (v *Volume) begin(ctx context.Context, epoch uint64) error {
	v.mu.Lock()
	v.epoch = epoch
	v.destage.began = v.next
	v.mu.Unlock()
	o, err := v.fence()
	if err == nil {
		err = o.fenced(ctx)
	}
	if err == nil {
		// From here on an absent home map means a lost one, and another journal a lost journal.
		v.destage.apply.Lock()
		if v.home.saved.Epoch == 0 || v.home.saved.Incarnation != v.e.journal.Incarnation() {
			err = v.saveHome(ctx)
		}
		v.destage.apply.Unlock()
	}
	if err != nil {
		v.stop(StateFailed, fmt.Errorf("epoch %d of volume %s not begun: %w", epoch, v.id, err))
		v.destage.end()
		return err
	}
	v.floorSize()
	v.destage.identity = volumelog.NewIdentity(v.e.opt.Node)
	v.destage.hello = v.destage.writer == nil
	if err := v.serve(); err != nil {
		v.destage.end()
		return err
	}
	go v.run(v.ctx)
	v.e.space.wake()
	return nil
}

// floorSize has destage describe a volume as large as it is, when the caller knows of a size that neither the
// bucket nor the journal does: objects are never larger than the volume that they describe.
func (v *Volume) floorSize() {
	d := &v.destage
	d.apply.Lock()
	defer d.apply.Unlock()
	known := v.home.at.Size
	d.mu.Lock()
	for _, p := range d.queue {
		if p.note != nil {
			known = max(known, p.note.Size)
		}
	}
	d.mu.Unlock()
	if size := v.size.Load(); size > known {
		at := v.home.at
		at.Size = size
		v.setHome(at)
	}
	d.size = v.home.at.Size
}

// rebuild makes the home map anew from the bucket, then opens the volume.
func (v *Volume) rebuild(r *replayed) {
	ctx := v.ctx
	fail := func(err error) {
		v.stop(StateFailed, err)
		v.destage.end()
	}
	v.event("warning", "home_map_rebuild", "the home map is being rebuilt from the bucket")
	err := v.retry(ctx, func(ctx context.Context) error { return v.loadHome(ctx, r) })
	if err == nil {
		err = v.adopt(r)
	}
	if err != nil {
		fail(err)
		return
	}
	lsn := v.home.at.LSN
	if err := v.begin(ctx, v.epoch); err != nil {
		return
	}
	v.event("info", "home_map_rebuilt", fmt.Sprintf("the home map holds LSN %d again", lsn))
}

// close ends the volume's work. Who waits is told; what was submitted is still journaled.
func (v *Volume) close() {
	v.stop(StateClosed, ErrClosed)
	v.cancel()
}

// logForgotten makes it durable that the journal's records of a volume mean nothing any more.
func (e *Engine) logForgotten(ctx context.Context, id uuid.UUID) error {
	return e.logOwn(ctx, id, note{Forget: true})
}

// markClean makes it durable that nothing was in flight when the engine closed.
func (e *Engine) markClean(ctx context.Context) error {
	return e.logOwn(ctx, uuid.Nil, note{Clean: true})
}

// logOwn journals a note of the engine's own, which takes no LSN, and waits for the sync.
func (e *Engine) logOwn(ctx context.Context, id uuid.UUID, n note) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	done := ownNote(make(chan error, 1))
	en := &journal.Entry{
		Record:  journal.Record{Volume: id, Kind: journal.KindNote, PayloadBytes: uint32(len(b))},
		Payload: [][]byte{b}, User: done,
	}
	if err := e.journal.Submit(en); err != nil {
		return fmt.Errorf("%w: %w", ErrJournal, err)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ownNote is the User of an entry of the engine's own.
type ownNote chan error
