package cache

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// Space keeps the journal usable: a segment is given back once all its records are at
// `object` and the home map's checkpoint covers them, so that what is in the journal and what is in the
// home maps always add up to the volume.

// homeMeta is kept with each checkpoint of a home map.
type homeMeta struct {
	Epoch       uint64             `json:"epoch"`      // the highest epoch that was started
	Generation  uint64             `json:"generation"` // of the volume
	Position    volumelog.Position `json:"position"`   // the last object that the map holds
	LSN         LSN                `json:"lsn"`        // and its last LSN
	Time        time.Time          `json:"time"`       // when that LSN reached the object store
	Size        int64              `json:"size"`       // of the volume as of that LSN, in bytes
	Incarnation uuid.UUID          `json:"incarnation"`
	ObjectBytes int64              `json:"object_bytes"`
	Loading     bool               `json:"loading,omitempty"` // the map is incomplete: a checkpoint is being loaded
	Lost        bool               `json:"lost,omitempty"`    // acknowledged writes were lost, and no flush has said so yet
}

// space is the engine's background work on journal space and checkpoints.
type space struct {
	e    *Engine
	kick chan struct{} // buffered
	ckpt chan *Volume  // volumes whose bucket checkpoint is due
	done chan struct{} // closed when the loops have ended

	mu      sync.Mutex // guards trouble
	trouble string     // why journal space cannot be given back; empty while it can
}

func newSpace(e *Engine) *space {
	return &space{e: e, kick: make(chan struct{}, 1), ckpt: make(chan *Volume, 1024), done: make(chan struct{})}
}

func (s *space) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// wantBucketCheckpoint asks for one; when too many are due it comes with a later object.
func (s *space) wantBucketCheckpoint(v *Volume) {
	select {
	case s.ckpt <- v:
	default:
	}
}

// told notes how a reclaim went, and announces what has changed.
func (s *space) told(err error) {
	now := ""
	if err != nil {
		now = err.Error()
	}
	s.mu.Lock()
	before := s.trouble
	s.trouble = now
	s.mu.Unlock()
	switch {
	case now != "" && before == "":
		s.e.opt.Events(Event{Time: time.Now(), Severity: "error", Type: "journal_not_reclaimed",
			Text: now + "; it is tried again, and writes wait when the journal is full"})
	case now == "" && before != "":
		s.e.opt.Events(Event{Time: time.Now(), Severity: "info", Type: "journal_reclaimed", Text: "journal space is given back again"})
	}
}

// why says why journal space cannot be given back, if it cannot.
func (s *space) why() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trouble
}

// A reclaim that failed is tried again after these times, twice as long each time: what was in its way may be gone, and with a full journal
// nothing else happens that would call for it.
const (
	reclaimFirst = 500 * time.Millisecond
	reclaimMost  = 10 * time.Second
)

// growEvery is how often a journal that is smaller than it should be tries to grow.
const growEvery = time.Minute

func (s *space) run(ctx context.Context) {
	defer close(s.done)
	var checkpoints sync.WaitGroup
	defer checkpoints.Wait()
	checkpoints.Go(func() { s.checkpoints(ctx) })
	grow := time.NewTicker(growEvery)
	defer grow.Stop()
	contracts := time.NewTicker(max(s.e.opt.UnmetAfter/2, time.Millisecond))
	defer contracts.Stop()
	again, wait := time.NewTimer(time.Hour), reclaimFirst
	again.Stop()
	reclaim := func() {
		err := s.e.reclaim(ctx)
		if ctx.Err() != nil {
			return
		}
		s.told(err)
		if err == nil {
			wait = reclaimFirst
			return
		}
		again.Reset(wait)
		wait = min(2*wait, reclaimMost)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-grow.C:
			s.e.journal.Grow() // if the device had no room for all segments, it may have now
		case <-contracts.C:
			for _, v := range s.e.all() {
				v.contractIdle()
			}
		case <-s.kick:
			reclaim()
		case <-again.C:
			reclaim()
		}
	}
}

// checkpoints writes those that are due, one after the other. It works beside run: a bucket that is slow, or a
// large map, holds no journal space.
func (s *space) checkpoints(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case v := <-s.ckpt:
			if err := v.checkpointBucket(v.ctx); err != nil && v.ctx.Err() == nil {
				v.log.Warn("checkpoint in the bucket failed; the next one makes up for it", "err", err)
			}
		}
	}
}

// reclaim releases the oldest segments while nothing in them is needed.
func (e *Engine) reclaim(ctx context.Context) error {
	e.reclaiming.Lock()
	defer e.reclaiming.Unlock()
	for {
		segs := e.journal.Segments()
		if len(segs) == 0 || segs[0].Active || e.orphanIn(segs[0].Generation) {
			return nil
		}
		gen := segs[0].Generation
		all := e.all()
		for _, v := range all {
			if lsn, any := v.segs.upTo(gen); any && v.object.get().LSN < lsn {
				return nil
			}
		}
		for _, v := range all {
			if _, any := v.segs.upTo(gen); !any {
				continue
			}
			if v.serving() != nil {
				return nil // its records stay as they are, whatever they are worth; one that is being opened comes to it later
			}
			covered, err := v.checkpointHome(ctx, gen)
			if errors.Is(err, homemap.ErrClosed) {
				return nil // the volume was closed meanwhile
			}
			if err != nil || !covered {
				return err
			}
		}
		if err := e.stand(ctx, all, gen); errors.Is(err, ErrClosed) {
			return nil
		} else if err != nil {
			return err
		}
		if err := e.journal.Release(gen); err != nil {
			return err
		}
		for _, v := range all {
			v.segs.drop(gen)
		}
	}
}

// stand keeps the journal saying where each volume stands when the segments up to gen are released: with nothing of a volume in the journal, a home
// map that lost its last checkpoints could not be told from one that is up to date.
func (e *Engine) stand(ctx context.Context, all []*Volume, gen uint64) (err error) {
	var fences []*op
	settle := func() (err error) {
		for _, o := range fences {
			err = errors.Join(err, o.fenced(ctx))
		}
		fences = fences[:0]
		return err
	}
	for _, v := range all {
		if _, any := v.segs.upTo(gen); !any || v.segs.beyond(gen) {
			continue
		}
		o, err := v.fence()
		if errors.Is(err, journal.ErrFull) && len(fences) > 0 { // one batch takes less than each by itself
			if err = settle(); err == nil {
				o, err = v.fence()
			}
		}
		if errors.Is(err, journal.ErrFull) {
			continue // what is released makes the room
		}
		if err != nil {
			return errors.Join(err, settle())
		}
		fences = append(fences, o)
	}
	return settle()
}

// checkpointHome makes the home map durable up to all that the volume has in the segments up to
// gen, and reports whether that is so.
func (v *Volume) checkpointHome(ctx context.Context, gen uint64) (covered bool, err error) {
	v.destage.apply.Lock()
	defer v.destage.apply.Unlock()
	lsn, _ := v.segs.upTo(gen)
	covers := func() bool {
		m := v.home.saved
		return m.Epoch == v.epochNow() && m.LSN >= lsn && !m.Loading && m.Lost == v.lost.Load()
	}
	if !covers() {
		err = v.saveHome(ctx)
	}
	return covers(), err
}

// saveHome writes the home map's changes and where it stands. The caller holds apply.
func (v *Volume) saveHome(ctx context.Context) error {
	v.mu.RLock()
	meta := v.home.at
	meta.Epoch, meta.Generation = v.epoch, v.generation
	v.mu.RUnlock()
	meta.Incarnation = v.e.journal.Incarnation()
	meta.ObjectBytes = v.destage.objectBytes.Load()
	meta.Lost = v.lost.Load()
	b, err := json.Marshal(meta)
	if err != nil {
		return err
	}
	at := homemap.Position{Epoch: meta.Position.Epoch, Seq: meta.Position.Seq, LSN: uint64(meta.LSN)}
	err = v.home.Checkpoint(ctx, homemap.Checkpoint{Position: at, Blob: b})
	if errors.Is(err, homemap.ErrDamaged) {
		err = v.homeDamaged(err)
	}
	if err != nil {
		return fmt.Errorf("checkpoint of the home map of volume %s: %w", v.id, err)
	}
	v.home.saved = meta
	return nil
}
