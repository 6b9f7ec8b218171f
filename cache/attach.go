package cache

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// attach opens the volume's epoch in the bucket: older owners are fenced, and what the bucket
// has beyond the home map (objects that arrived before a crash) is taken over.
func (v *Volume) attach(ctx context.Context) error {
	v.mu.RLock()
	at := v.home.at
	want := volumelog.Want{
		Epoch: v.epoch, Generation: v.generation, Writer: v.destage.identity,
		Attributes: volumelog.Attributes{Name: v.cfg.Name, SizeBytes: uint64(at.Size), BlockSize: uint32(v.cfg.BlockSize)},
		From:       at.Position, FromLSN: uint64(at.LSN), Holds: uint64(v.destage.began),
	}
	bucket := v.cfg.Bucket
	v.mu.RUnlock()
	t := v.takeOver()
	t.holds = want.Holds
	w, state, err := volumelog.Attach(ctx, bucket, v.id, want, t.replay())
	if errors.Is(err, volumelog.ErrAhead) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err != nil {
		return err
	}
	t.finish(w, state)
	return nil
}

// takeOver brings the home map up to what the bucket holds. It takes the apply lock for each
// step, not over the waiting for the store. While a checkpoint is being loaded the home map is
// marked as incomplete, also on disk.
type takeOver struct {
	v     *Volume
	holds uint64    // the last LSN that the node had when the epoch began: what the bucket has above it is another write
	recs  []pending // of the journal, while they are not in the destage queue
	base  homeMeta  // where the loaded checkpoint stands
}

func (v *Volume) takeOver() *takeOver { return &takeOver{v: v, holds: math.MaxUint64} }

// agrees returns an error if what the bucket holds up to lsn, of an epoch and before, cannot be what the journal holds under the same LSNs. A write
// is put in its own epoch or a later one. Where the bucket has another one in its place, the data directory was set back, and the volume
// went on from there: neither of the two may pass for the other.
func (t *takeOver) agrees(lsn, epoch uint64) error {
	const advice = "this node's data directory was set back; restore the volume from its bucket"
	if lsn > t.holds {
		return fmt.Errorf("%w: the bucket holds LSN %d, this node %d when it began: %w: %s", ErrDamaged, lsn, t.holds, volumelog.ErrAhead, advice)
	}
	d := &t.v.destage
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, recs := range [][]pending{t.recs, d.queue} {
		for i := range recs {
			rec := &recs[i].rec
			if rec.LSN > lsn {
				break
			}
			if rec.Epoch > epoch {
				return fmt.Errorf("%w: LSN %d was written in epoch %d, and the bucket has it from epoch %d: %s", ErrDamaged, rec.LSN, rec.Epoch, epoch, advice)
			}
		}
	}
	return nil
}

func (t *takeOver) replay() volumelog.Replay {
	return volumelog.Replay{Reset: t.reset, Entry: t.entry, Apply: t.apply}
}

func (t *takeOver) reset(m *volumelog.Manifest) error {
	v := t.v
	if m != nil {
		if err := t.agrees(m.LSN, m.Position.Epoch); err != nil {
			return err
		}
	}
	v.destage.apply.Lock()
	defer v.destage.apply.Unlock()
	if m == nil && v.home.at.LSN == 0 && !v.home.at.Loading {
		return nil // empty on both sides
	}
	if err := v.home.Reset(); err != nil {
		return err
	}
	t.base = homeMeta{Size: v.home.at.Size}
	if m != nil {
		t.base = homeMeta{Position: m.Position, LSN: LSN(m.LSN), Time: m.Time, Size: int64(m.SizeBytes)}
	}
	v.setHome(homeMeta{Loading: true})
	v.home.saved = homeMeta{}
	v.destage.objectBytes.Store(0)
	return nil
}

func (t *takeOver) entry(en volumelog.Entry) error {
	x, err := homeExtent(en.Location, volumelog.Extent{Kind: en.Kind, LSN: en.LSN, Offset: en.Offset, Length: en.Length, BlockLength: en.BlockLength})
	if err != nil {
		return err
	}
	t.v.destage.objectBytes.Add(int64(payloadOf(&x)))
	return t.v.home.Insert(x)
}

func (t *takeOver) apply(h *volumelog.Header) error {
	v := t.v
	if err := t.agrees(h.LastLSN, h.Epoch); err != nil {
		return err
	}
	xs := make([]extent.Extent, len(h.Extents))
	for i, e := range h.Extents {
		var err error
		if xs[i], err = homeExtent(h.Location(e), e); err != nil {
			return err
		}
	}
	v.destage.apply.Lock()
	defer v.destage.apply.Unlock()
	t.loaded()
	if err := v.home.Insert(xs...); err != nil {
		return err
	}
	v.destage.objectBytes.Add(h.ObjectBytes())
	at := v.home.at
	at.Size = max(at.Size, int64(h.SizeBytes))
	v.setHome(at)
	v.passed(LSN(h.LastLSN), h.Time, volumelog.Position{Epoch: h.Epoch, Seq: h.Seq + 1})
	return nil
}

// loaded ends the loading of a checkpoint. The caller holds apply.
func (t *takeOver) loaded() {
	if t.v.home.at.Loading {
		t.v.setHome(t.base)
	}
}

// finish starts destage where the bucket ends.
func (t *takeOver) finish(w *volumelog.Writer, state volumelog.State) {
	v, d := t.v, &t.v.destage
	d.apply.Lock()
	defer d.apply.Unlock()
	t.loaded()
	v.passed(LSN(state.LSN), state.Time, state.Position) // a checkpoint may be all that was replayed
	d.writer, d.nextSeq, d.size = w, state.Position.Seq, v.home.at.Size
}

// clearHome empties a home map of which nothing is known.
func (v *Volume) clearHome() error {
	v.destage.apply.Lock()
	defer v.destage.apply.Unlock()
	v.home.saved = homeMeta{}
	v.mu.RLock()
	size := v.cfg.SizeBytes
	v.mu.RUnlock()
	v.setHome(homeMeta{Size: size}) // what the journal knows of comes with its records
	v.destage.objectBytes.Store(0)
	return v.home.Reset()
}

func (v *Volume) setHome(at homeMeta) {
	v.mu.Lock()
	v.home.at = at
	v.mu.Unlock()
}

// loadHome makes the home map anew from the bucket and opens an epoch there, in one.
func (v *Volume) loadHome(ctx context.Context, r *replayed) error {
	bucket := v.bucket()
	newest, err := volumelog.Newest(ctx, bucket, v.id)
	if err != nil {
		return err
	}
	if newest == nil && !r.whole() {
		return fmt.Errorf("%w: the bucket holds nothing of the volume, and the journal not all of it: is it the right bucket?", ErrDamaged)
	}
	v.mu.Lock()
	v.epoch = r.epoch + 1
	if newest != nil {
		v.epoch = max(newest.Epoch, r.epoch) + 1
		if r.generation == 0 && newest.Writer.Node == v.e.opt.Node {
			// Nothing here knows the generation any more, and the bucket's is ours.
			v.generation = max(v.generation, newest.Generation)
			if v.lost.Load() {
				v.generation = max(v.generation, newest.Generation+1)
			}
		}
	}
	want := volumelog.Want{
		Epoch: v.epoch, Generation: v.generation, Writer: volumelog.NewIdentity(v.e.opt.Node), Holds: math.MaxUint64,
		// Not the size that the journal may know of: its record is not in the bucket yet.
		Attributes: volumelog.Attributes{Name: v.cfg.Name, SizeBytes: uint64(v.cfg.SizeBytes), BlockSize: uint32(v.cfg.BlockSize)},
	}
	v.mu.Unlock()
	if err := v.clearHome(); err != nil {
		return err
	}
	t := v.takeOver()
	t.recs = r.recs
	w, state, err := volumelog.Attach(ctx, bucket, v.id, want, t.replay())
	if err != nil {
		return err
	}
	t.finish(w, state)
	v.grow(v.home.at.Size)
	return nil
}

// whole reports whether the journal holds the volume from its first write on.
func (r *replayed) whole() bool { return r.seen && r.first <= 1 }

// RestoreReport says what a restore brought back.
type RestoreReport struct {
	LSN        LSN       `json:"lsn"`  // of the last write that is there
	Time       time.Time `json:"time"` // when that write was acknowledged or journaled
	Epoch      uint64    `json:"epoch"`
	Generation uint64    `json:"generation"`
	Objects    int       `json:"objects"` // log objects replayed, beyond the checkpoint
	Name       string    `json:"name"`
	SizeBytes  int64     `json:"size_bytes"`
	BlockSize  int32     `json:"block_size"`
	Gap        string    `json:"gap"` // what is or may be missing, in words
}

// Restore takes a volume over from its bucket alone, and serves it: what the bucket holds is a prefix
// of the volume's writes. Whoever owned it before is fenced. Of cfg, name, size and block size may be
// zero; they are then as the bucket says, and the report has them.
func (e *Engine) Restore(ctx context.Context, cfg VolumeConfig) (*Volume, RestoreReport, error) {
	var none RestoreReport
	if e.found(cfg.ID).needed() {
		return nil, none, fmt.Errorf("volume %s is in this node's journal: open it or forget it first", cfg.ID)
	}
	shell := cfg
	if shell.BlockSize == 0 {
		shell.BlockSize = 4096
	}
	if shell.SizeBytes == 0 {
		shell.SizeBytes = minVolumeBytes
	}
	v, err := e.newVolume(shell)
	if err != nil {
		return nil, none, err
	}
	if err := e.register(v); err != nil {
		return nil, none, err
	}
	ok := false
	defer func() {
		if !ok {
			v.discard()
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(v.ctx, cancel)()
	if err := v.openHome(); err != nil {
		return nil, none, err
	}
	if err := v.clearHome(); err != nil {
		return nil, none, err
	}
	t := v.takeOver()
	w, state, err := volumelog.Restore(ctx, cfg.Bucket, cfg.ID, volumelog.NewIdentity(e.opt.Node), t.replay())
	if err != nil {
		return nil, none, err
	}
	t.finish(w, state)
	v.mu.Lock()
	v.generation = state.Generation
	v.cfg.BlockSize = int32(state.Attributes.BlockSize)
	if v.cfg.Name == "" {
		v.cfg.Name = state.Attributes.Name
	}
	v.cfg.SizeBytes = max(cfg.SizeBytes, int64(state.Attributes.SizeBytes))
	v.size.Store(v.cfg.SizeBytes)
	v.home.at.Size = int64(state.Attributes.SizeBytes)
	v.destage.size = v.home.at.Size
	cfg = v.cfg
	v.mu.Unlock()
	if err := cfg.Validate(); err != nil {
		return nil, none, fmt.Errorf("the bucket's description of the volume: %w", err)
	}
	if err := v.adopt(&replayed{}); err != nil {
		return nil, none, err
	}
	if err := v.begin(ctx, state.Epoch); err != nil {
		return nil, none, err
	}
	ok = true
	return v, RestoreReport{
		LSN: LSN(state.LSN), Time: state.Time, Epoch: state.Epoch, Generation: state.Generation, Objects: state.Objects,
		Name: cfg.Name, SizeBytes: cfg.SizeBytes, BlockSize: cfg.BlockSize,
		Gap: fmt.Sprintf("everything up to LSN %d is here; writes that were acknowledged above it, at memory or local, had not reached the object store and are not", state.LSN),
	}, nil
}

// Forget drops a volume from this node: nothing of it is served, destaged or replayed any more. With
// purge its objects are deleted too. It may be repeated after a failure.
func (e *Engine) Forget(ctx context.Context, id [16]byte, bucket objectstore.Bucket, purge bool) error {
	e.mu.Lock()
	v := e.volumes[id]
	e.mu.Unlock()
	if v != nil {
		v.close()
		v.epochNow() // waits for who has v.mu: what is submitted comes before the note
		select {
		case <-v.destage.idle:
		case <-ctx.Done():
			return ctx.Err()
		}
		v.destage.checkpoint.Lock() // one that was being written ends with the volume
		err := v.home.Close()
		v.destage.checkpoint.Unlock()
		if err != nil {
			return err
		}
	}
	if err := e.store.Drop(id); err != nil {
		return err
	}
	if err := e.logForgotten(ctx, id); err != nil {
		return err
	}
	e.mu.Lock()
	delete(e.volumes, id)
	delete(e.replayed, id)
	e.mu.Unlock()
	e.reads.DropVolume(id)
	e.space.wake()
	if purge {
		_, err := volumelog.Purge(ctx, bucket, id)
		return err
	}
	return nil
}

// checkpointBucket writes the home map as it is at the object watermark to the bucket.
func (v *Volume) checkpointBucket(ctx context.Context) error {
	d := &v.destage
	d.checkpoint.Lock()
	defer d.checkpoint.Unlock()
	if err := v.serving(); err != nil {
		return err
	}
	d.apply.Lock()
	err := v.saveHome(ctx)
	var snap *homemap.Snapshot
	if err == nil {
		snap, err = v.home.Snapshot()
	}
	at, w := v.home.at, d.writer
	d.apply.Unlock()
	v.mu.RLock()
	name, bs := v.cfg.Name, uint32(v.cfg.BlockSize)
	v.mu.RUnlock()
	if err != nil {
		return err
	}
	defer snap.Close()
	if w == nil || at.Loading || at.Position.Epoch != w.Epoch() || at.Position.Seq < 2 {
		return nil // nothing of this epoch is in the bucket yet
	}
	errStop := errors.New("stopped")
	entries := func(yield func(volumelog.Entry, error) bool) {
		err := snap.Walk(func(x extent.Extent) error {
			if !yield(entryOf(x), nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop {
			yield(volumelog.Entry{}, err)
		}
	}
	ckpt := volumelog.Checkpoint{Position: at.Position, LSN: uint64(at.LSN), Time: at.Time}
	if err := w.SetAttributes(volumelog.Attributes{Name: name, SizeBytes: uint64(at.Size), BlockSize: bs}); err != nil {
		return err
	}
	if _, err := w.WriteCheckpoint(ctx, ckpt, entries); err != nil {
		return err
	}
	if _, err := w.CollectCheckpoints(ctx); err != nil {
		return err
	}
	return nil
}

// entryOf is the inverse of homeExtent.
func entryOf(x extent.Extent) volumelog.Entry {
	en := volumelog.Entry{LSN: x.LSN, Offset: x.Start * sectorBytes, Length: x.Sectors * sectorBytes}
	switch x.Kind {
	case extent.Data:
		en.Kind = volumelog.ExtentData
	case extent.Zero:
		en.Kind = volumelog.ExtentZero
		return en
	case extent.Same:
		en.Kind, en.BlockLength = volumelog.ExtentSame, uint32(x.Loc.Block)*sectorBytes
	}
	en.Location = volumelog.Location{Epoch: uint64(x.Loc.Epoch), Seq: x.Loc.Ref, HeaderBlocks: x.Loc.Header, Sector: x.Loc.Sector}
	return en
}
