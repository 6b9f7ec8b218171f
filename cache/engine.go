package cache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/cache/readcache"
)

// Engine is the cache of one node: the journal that all its volumes share, the home
// maps, the read cache, and the work between them. All methods may be called concurrently.
type Engine struct {
	opt Options
	log *slog.Logger

	journal   *journal.Journal
	arena     *arena.Arena // landing buffers
	readArena *arena.Arena // what reads of the journal are lent
	store     homemap.Store
	mapCache  *homemap.PageCache
	reads     *readcache.Cache
	zeros     []byte // what unwritten blocks are read from; read-only
	space     *space

	pools pools // of objects being built or sent

	ahead budget // what ack=memory has acknowledged and no sync covers yet

	rooms rooms // of the readers of each bucket

	ops, payloads, loans sync.Pool // of *op, *payload, *Borrowed

	ctx    context.Context // ends when the engine closes
	cancel context.CancelFunc

	mu       sync.Mutex
	volumes  map[uuid.UUID]*Volume
	replayed map[uuid.UUID]*replayed // found in the journal, not opened yet
	closed   bool
	draining bool

	reclaiming sync.Mutex // one reclaim at a time

	clean bool // the journal ends with a clean shutdown
}

// Open opens the cache in opt.Dir, replays the journal, and returns an engine without volumes. A damaged
// journal is an error that says what to do, and nothing is changed then. A home map store that is
// damaged is deleted: the maps are rebuilt from the buckets when the volumes are opened.
func Open(ctx context.Context, opt Options) (*Engine, error) {
	opt.EnsureDefaults()
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		opt: opt, log: opt.Logger,
		volumes:  map[uuid.UUID]*Volume{},
		replayed: map[uuid.UUID]*replayed{},
		pools:    pools{each: int(max(4, (256<<20)/opt.MaxObjectBytes))},
		mapCache: homemap.NewPageCache(homemap.CacheOptions{Bytes: opt.MapMemoryBytes, Registerer: opt.Registerer}),
	}
	e.ops.New = func() any {
		o := &op{done: make(chan error, 1)} // answers the budgets first, then the journal
		o.wait = budgetWaiter{ch: o.done, timer: time.NewTimer(time.Hour)}
		o.wait.timer.Stop()
		return o
	}
	e.payloads.New = func() any { return new(payload) }
	e.loans.New = func() any {
		b := &Borrowed{wait: budgetWaiter{ch: make(chan error, 1), timer: time.NewTimer(time.Hour)}}
		b.wait.timer.Stop()
		return b
	}
	e.space = newSpace(e)
	e.ctx, e.cancel = context.WithCancel(context.Background())
	ok := false
	defer func() {
		if !ok {
			e.release()
		}
	}()
	var err error
	if e.arena, err = arena.New(opt.ArenaBytes / 4 * 3); err != nil {
		return nil, err
	}
	if e.readArena, err = arena.New(opt.ArenaBytes / 4); err != nil {
		return nil, err
	}
	if e.zeros, err = zeroMemory(); err != nil {
		return nil, err
	}
	if err := opt.FS.MkdirAll(opt.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("cache directory: %w", err)
	}
	if e.store = opt.HomeStore; e.store == nil {
		if e.store, err = e.openStore(); err != nil {
			return nil, err
		}
	}
	e.reads, err = readcache.Open(readcache.Options{
		FS: opt.FS, Path: filepath.Join(opt.Dir, "readcache"), Bytes: max(opt.ReadCacheBytes, 0), MemoryBytes: opt.ReadCacheMemoryBytes,
		Registerer: opt.Registerer, Logger: opt.Logger,
		OnMediaFailure: func(err error) {
			opt.Events(Event{Time: time.Now(), Severity: "warning", Type: "read_cache_media_failed", Text: "the read cache goes on in memory alone: " + err.Error()})
		},
	})
	if err != nil {
		return nil, err
	}
	e.journal, err = journal.Open(journal.Options{
		FS: opt.FS, Dir: filepath.Join(opt.Dir, "journal"), SegmentBytes: opt.SegmentBytes, JournalBytes: opt.JournalBytes,
		Sink: e, Registerer: opt.Registerer, Logger: opt.Logger, KeepFree: journalKeepsFree,
	}, e.replay)
	if err != nil {
		return nil, err
	}
	e.ahead.limit = max(aheadBytes, chargeOf(e.journal.MaxEntryBytes()))
	go e.space.run(e.ctx)
	ok = true
	return e, nil
}

// aheadBytes bounds Engine.ahead. It is twice what one batch of the journal takes, so that the device is never idle,
// and a sync waits for no more than that.
const aheadBytes = 8 << 20

// openStore opens the home maps' store; one that cannot be opened for damage is
// started anew, because it holds nothing that the buckets and the journal do not hold.
func (e *Engine) openStore() (homemap.Store, error) {
	dir := filepath.Join(e.opt.Dir, "maps")
	opt := homemap.BadgerOptions{Logger: e.log}
	store, err := homemap.OpenBadger(dir, opt)
	if errors.Is(err, homemap.ErrDamaged) {
		e.log.Error("home map store is damaged; it is deleted and rebuilt from the buckets", "dir", dir, "err", err)
		e.opt.Events(Event{Time: time.Now(), Severity: "error", Type: "home_map_rebuilt", Text: "the home map store was damaged and is rebuilt from the buckets: " + err.Error()})
		if err := homemap.Wipe(dir); err != nil {
			return nil, err
		}
		store, err = homemap.OpenBadger(dir, opt)
	}
	if err != nil {
		return nil, fmt.Errorf("home map store: %w", err)
	}
	return store, nil
}

// all returns the open volumes.
func (e *Engine) all() []*Volume {
	e.mu.Lock()
	defer e.mu.Unlock()
	vs := make([]*Volume, 0, len(e.volumes))
	for _, v := range e.volumes {
		vs = append(vs, v)
	}
	return vs
}

// Volumes returns the open volumes, in no order.
func (e *Engine) Volumes() []*Volume { return e.all() }

func (e *Engine) budgetOf(cfg VolumeConfig) int64 {
	if cfg.DirtyBudget != 0 {
		return cfg.DirtyBudget
	}
	return e.opt.DirtyBudget
}

// pressed: destage should not wait for more records.
func (e *Engine) pressed() bool {
	e.mu.Lock()
	draining := e.draining
	e.mu.Unlock()
	used, capacity := e.journal.Usage()
	return draining || used > capacity/4*3
}

// MaxWriteBytes is the largest single write.
func (e *Engine) MaxWriteBytes() int64 { return e.journal.MaxEntryBytes() }

// JournalStalled is for how long the journal's device has not answered an operation; zero
// when none is in progress.
func (e *Engine) JournalStalled() time.Duration { return e.journal.Stalled() }

// register takes a volume in, and with it what the journal holds of it; it refuses a second one
// of the same UUID.
func (e *Engine) register(v *Volume) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if e.volumes[v.id] != nil {
		return fmt.Errorf("volume %s is open on this node already", v.id)
	}
	e.volumes[v.id] = v
	delete(e.replayed, v.id)
	return nil
}

func (e *Engine) unregister(v *Volume) {
	e.mu.Lock()
	if e.volumes[v.id] == v {
		delete(e.volumes, v.id)
	}
	e.mu.Unlock()
}

// newVolume makes the shell of a volume: nothing is served yet.
func (e *Engine) newVolume(cfg VolumeConfig) (*Volume, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	v := &Volume{e: e, id: cfg.ID, cfg: cfg, log: e.log.With("volume", cfg.Name, "uuid", cfg.ID), dirty: extent.NewMap()}
	v.ctx, v.cancel = context.WithCancel(e.ctx)
	v.size.Store(cfg.SizeBytes)
	eff := cfg.Policy.Effective(cfg.WriteThrough)
	v.policy.Store(&eff)
	v.down.Store(&outage{StateOpening, ErrOpening})
	if cfg.Bucket != nil {
		v.room = e.rooms.of(cfg.Bucket.URL())
	} else {
		v.room = e.rooms.of("")
	}
	v.budget.limit, v.budget.ramp = e.budgetOf(cfg), rampMax
	v.destage.kick, v.destage.idle = make(chan struct{}, 1), make(chan struct{})
	return v, nil
}

// Drain brings everything that is acknowledged to the object store and gives the journal's
// segments back. It waits until ctx ends. With ErrKept the first was done and the second was not.
func (e *Engine) Drain(ctx context.Context) error {
	e.mu.Lock()
	e.draining = true
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		e.draining = false
		e.mu.Unlock()
	}()
	var errs []error
	for _, id := range e.Orphans() {
		errs = append(errs, fmt.Errorf("volume %s is not open: its writes are in the journal only", id))
	}
	for _, v := range e.all() {
		v.destage.wake()
	}
	for _, v := range e.all() {
		if err := v.Wait(ctx, Object); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", v.Status().Config.Name, err))
		}
	}
	if errs != nil {
		return errors.Join(errs...)
	}
	err := e.reclaim(ctx) // a full journal has no room for the end of a segment
	if err == nil {
		err = e.journal.Seal(ctx)
	}
	if err == nil {
		err = e.reclaim(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrKept, err)
	}
	return nil
}

// Close stops taking commands, journals everything that was accepted, and returns. It
// destages nothing: what is dirty stays in the journal.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil
	}
	e.closed = true
	e.mu.Unlock()
	for _, v := range e.all() {
		v.close()
	}
	e.cancel()
	for _, v := range e.all() {
		select {
		case <-v.destage.idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	<-e.space.done
	var errs []error
	if err := e.markClean(ctx); err != nil { // the last record: all that was submitted comes before it
		errs = append(errs, err)
	}
	errs = append(errs, e.release())
	return errors.Join(errs...)
}

// release closes what is open.
func (e *Engine) release() error {
	e.cancel()
	var errs []error
	if e.journal != nil {
		errs = append(errs, e.journal.Close())
	}
	if e.reads != nil {
		errs = append(errs, e.reads.Close())
	}
	if e.store != nil && e.opt.HomeStore == nil {
		errs = append(errs, e.store.Close())
	}
	if e.arena != nil {
		errs = append(errs, e.arena.Close())
	}
	if e.readArena != nil {
		errs = append(errs, e.readArena.Close())
	}
	return errors.Join(errs...)
}
