package cache

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/readcache"
)

// Volume is one volume that this node owns. All methods may be called concurrently.
type Volume struct {
	e   *Engine
	id  uuid.UUID
	log *slog.Logger

	ctx    context.Context // ends with the volume's background work
	cancel context.CancelFunc

	size   atomic.Int64           // bytes; only grows
	policy atomic.Pointer[Policy] // the effective one
	down   atomic.Pointer[outage] // why nothing is served; nil while it is

	mu         sync.RWMutex // guards what follows; never held across I/O
	cfg        VolumeConfig
	epoch      uint64
	generation uint64
	dirty      *extent.Map // what is in the journal, or acknowledged at memory, and not at `object`
	unsynced   unsynced    // the payloads of what is in the dirty map and not in the journal
	next       LSN         // the last LSN given out
	unmet      unmet
	objectErr  string

	home home // what is at `object`

	acked, local, object mark
	budget               budget

	room *room // of the readers of its bucket

	lost atomic.Bool // acknowledged writes were lost and no flush has said so yet

	destage destager
	segs    segments

	aheadMu sync.Mutex
	ahead   readcache.Readahead // guarded by aheadMu
}

// home is the home map and where it stands; destage.apply guards the changes.
type home struct {
	*homemap.Map
	at    homeMeta // what the map in memory holds
	saved homeMeta // what its last checkpoint holds
}

// outage is why a volume is not served.
type outage struct {
	state State
	err   error
}

// unmet describes the time during which the contract does not hold.
type unmet struct {
	since    time.Time // zero: the contract is met
	level    Level     // the level that is out of reach
	degraded bool      // writes are acknowledged below the level due, as policy says
	until    LSN       // the contract is met again once this LSN is at the level
}

// ID returns the volume's UUID.
func (v *Volume) ID() uuid.UUID { return v.id }

// serving returns nil, or why the volume is not served.
func (v *Volume) serving() error {
	if o := v.down.Load(); o != nil {
		return o.err
	}
	return nil
}

// stop takes the volume out of service for good and ends all waiting with err. The
// first reason stands; stop reports whether it was this one.
func (v *Volume) stop(state State, err error) bool {
	for {
		prev := v.down.Load()
		if prev != nil && prev.state != StateOpening {
			return false
		}
		if v.down.CompareAndSwap(prev, &outage{state, err}) {
			break
		}
	}
	v.acked.fail(err)
	v.local.fail(err)
	v.object.fail(err)
	v.budget.fail(err)
	if state != StateClosed {
		v.event("error", "volume_"+string(state), err.Error())
	}
	return true
}

// serve ends the opening of a volume. If it was stopped meanwhile it stays so, and serve returns why.
func (v *Volume) serve() error {
	prev := v.down.Load()
	if prev != nil && prev.state == StateOpening && v.down.CompareAndSwap(prev, nil) {
		return nil
	}
	return v.serving()
}

// discard lets go of a volume whose opening failed: nothing works on it, and nobody waits for it.
func (v *Volume) discard() {
	v.stop(StateClosed, ErrClosed)
	v.cancel()
	v.destage.end()
	if v.home.Map != nil {
		_ = v.home.Close() // it only frees memory
	}
	v.e.unregister(v)
}

func (v *Volume) event(severity, kind, text string) {
	v.log.Log(context.Background(), map[string]slog.Level{"info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError}[severity],
		"volume event", "type", kind, "text", text)
	v.e.opt.Events(Event{Time: time.Now(), Severity: severity, Type: kind, Volume: v.id, Text: text})
}

// Status returns a snapshot.
func (v *Volume) Status() Status {
	v.mu.RLock()
	s := Status{
		Config: v.cfg, Epoch: v.epoch, Generation: v.generation,
		ContractMet: v.unmet.since.IsZero(), LastObjectError: v.objectErr,
	}
	level := v.unmet.level
	v.mu.RUnlock()
	s.Config.SizeBytes = v.size.Load()
	s.Watermarks = Watermarks{Acked: v.acked.get(), Local: v.local.get(), Object: v.object.get()}
	s.DirtyBytes, s.DirtyBudgetBytes, _ = v.budget.usage()
	s.ObjectBytes = v.destage.objectBytes.Load()
	s.OldestDirty = v.destage.oldest()
	switch o := v.down.Load(); {
	case o != nil:
		s.State, s.Reason, s.ContractMet = o.state, o.err.Error(), false
	case !s.ContractMet:
		s.State, s.Reason = StateDegraded, outOfReach(level, cmp.Or(s.LastObjectError, v.e.space.why()))
	default:
		s.State, s.Reason = StateAvailable, v.e.space.why() // soon no write can be taken
	}
	return s
}

// SetPolicy changes policy, dirty budget (0: the engine's default) and the
// write-through switch. A stronger level holds for commands that come in later. When `memory` is
// left, everything that was acknowledged there is in the journal when SetPolicy returns: whoever records the policy for
// the next start does so after it, and before it when `memory` is entered, so that an unclean stop is
// judged by a policy that may have lost writes if any was.
func (v *Volume) SetPolicy(p Policy, dirtyBudget int64, writeThrough bool) error {
	left, err := v.setPolicy(p, dirtyBudget, writeThrough)
	if err != nil || !left {
		return err
	}
	err = waitFor(v.ctx, v.e.opt.CommandWait, func(ctx context.Context) error {
		return v.e.logOwn(ctx, v.id, note{Barrier: true}) // what was submitted before comes before it
	})
	if err != nil {
		return fmt.Errorf("the policy is in force, and what was acknowledged at memory before is not journaled yet: %w", err)
	}
	return nil
}

func (v *Volume) setPolicy(p Policy, dirtyBudget int64, writeThrough bool) (leftMemory bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	cfg := v.cfg
	cfg.Policy, cfg.DirtyBudget, cfg.WriteThrough = p, dirtyBudget, writeThrough
	cfg.SizeBytes = v.size.Load()
	if err := cfg.Validate(); err != nil {
		return false, err
	}
	v.cfg = cfg
	eff := p.Effective(writeThrough)
	old := v.policy.Swap(&eff)
	v.budget.setLimit(v.e.budgetOf(cfg))
	return old.Ack == Memory && eff.Ack != Memory, nil
}

// Resize grows the volume to size bytes and returns once that is durable. A
// smaller size is refused.
func (v *Volume) Resize(ctx context.Context, size int64) error {
	if err := v.serving(); err != nil {
		return err
	}
	v.mu.RLock()
	cfg := v.cfg
	v.mu.RUnlock()
	now := v.size.Load()
	if size < now {
		return fmt.Errorf("volume %s is %d bytes, a volume never shrinks: %w", cfg.Name, now, ErrRange)
	}
	cfg.SizeBytes = size
	if err := cfg.Validate(); err != nil {
		return err
	}
	if size == now {
		return nil
	}
	return v.logNote(ctx, note{Size: size})
}

// Wait is the persistence barrier: it returns once everything acknowledged before the
// call is at level. It waits until ctx ends, whatever the policy says.
func (v *Volume) Wait(ctx context.Context, level Level) error {
	if err := level.reachable(); err != nil {
		return err
	}
	if o := v.down.Load(); o != nil && o.state != StateOpening {
		return o.err
	}
	lsn := v.acked.get().LSN
	if level == Object {
		v.destage.urge(lsn)
	}
	if m := v.markOf(level); m != nil {
		return m.wait(ctx, lsn)
	}
	return nil
}

func (l Level) reachable() error {
	switch l {
	case Memory, Local, Object:
		return nil
	case Quorum:
		return fmt.Errorf("level quorum needs a cluster, and this node has none: use local or object")
	}
	return fmt.Errorf("%s is no persistence level", l)
}

// markOf returns the watermark of a level, nil for memory: what is acknowledged is
// there.
func (v *Volume) markOf(level Level) *mark {
	switch level {
	case Local:
		return &v.local
	case Object:
		return &v.object
	}
	return nil
}

// Flush returns when everything acknowledged or readable before the call has reached the flush
// level. The first flush after acknowledged writes were lost returns ErrLostWrites, once.
func (v *Volume) Flush(ctx context.Context) error {
	if err := v.serving(); err != nil {
		return err
	}
	if v.lost.CompareAndSwap(true, false) {
		v.event("warning", "lost_writes_reported", "a flush was failed to report the loss")
		if err := v.e.logOwn(ctx, v.id, note{Reported: true}); err != nil {
			v.log.Warn("that a loss was reported is not durable; it is reported again after a restart", "err", err)
		}
		return ErrLostWrites
	}
	// What the journal has is readable before its writer has been answered.
	return v.reach(ctx, v.policy.Load().Flush, max(v.acked.get().LSN, v.local.get().LSN))
}

// reach waits until lsn is at level, or for as long as the policy allows: then it
// returns the policy's error, or nil after it announced the degradation.
func (v *Volume) reach(ctx context.Context, level Level, lsn LSN) error {
	m := v.markOf(level)
	if m == nil || m.get().LSN >= lsn {
		return nil
	}
	p := v.policy.Load()
	if level == Object {
		if p.OnUnmet == Degrade && v.isDegraded(lsn) {
			return v.reach(ctx, Local, lsn) // below that there is nothing to stand on
		}
		v.destage.urge(lsn)
	}
	err := waitFor(ctx, v.e.opt.UnmetAfter, func(ctx context.Context) error { return m.wait(ctx, lsn) })
	if err != context.DeadlineExceeded || ctx.Err() != nil {
		return err
	}
	switch p.OnUnmet {
	case Degrade:
		// Only the object level can be left out: below `local` there is nothing to stand on.
		if level == Object && v.local.get().LSN >= lsn {
			v.contractUnmet(level, lsn, true)
			return nil
		}
	case Error:
		v.contractUnmet(level, lsn, false)
		return fmt.Errorf("level %s not reached in %s: %w", level, v.e.opt.UnmetAfter, ErrUnmet)
	}
	v.contractUnmet(level, lsn, false)
	err = waitFor(ctx, v.e.opt.CommandWait-v.e.opt.UnmetAfter, func(ctx context.Context) error { return m.wait(ctx, lsn) })
	if err == context.DeadlineExceeded && ctx.Err() == nil {
		return fmt.Errorf("level %s not reached in %s: %w", level, v.e.opt.CommandWait, ErrBusy)
	}
	return err
}

// waitFor bounds f by d; its own deadline shows as context.DeadlineExceeded while ctx
// has none.
func waitFor(ctx context.Context, d time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return f(ctx)
}

// isDegraded reports whether writes are being acknowledged below the object level,
// and notes that lsn is one of them.
func (v *Volume) isDegraded(lsn LSN) bool {
	v.mu.RLock()
	degraded, until := v.unmet.degraded, v.unmet.until
	v.mu.RUnlock()
	if degraded && lsn > until {
		v.mu.Lock()
		degraded = v.unmet.degraded
		v.unmet.until = max(v.unmet.until, lsn)
		v.mu.Unlock()
	}
	return degraded
}

// outOfReach says why a level is not reached, as far as it is known.
func outOfReach(level Level, reason string) string {
	switch {
	case reason != "":
		return fmt.Sprintf("level %s is out of reach: %s", level, reason)
	case level == Object:
		return "level object is out of reach: the object store has not answered yet"
	}
	return fmt.Sprintf("level %s is out of reach: the journal's device does not answer, or there is no room for more writes", level)
}

// contractUnmet notes, and announces once, that a level is out of reach.
func (v *Volume) contractUnmet(level Level, lsn LSN, degrade bool) {
	v.mu.Lock()
	begins, degrades := v.unmet.since.IsZero(), degrade && !v.unmet.degraded
	if begins {
		v.unmet.since, v.unmet.level = time.Now(), level
	}
	v.unmet.degraded = v.unmet.degraded || degrade
	v.unmet.until = max(v.unmet.until, lsn)
	reason := v.objectErr
	v.mu.Unlock()
	if begins {
		v.event("error", "contract_unmet", outOfReach(level, cmp.Or(reason, v.e.space.why())))
	}
	if degrades {
		v.event("error", "contract_degraded", fmt.Sprintf("writes are acknowledged at %s although the policy asks for %s", Local, level))
	}
}

// contractIdle ends the unmet interval of a volume that nobody writes to, when a write would not have to wait any more: the
// device answers, and there is room. Where the object level was out of reach, its watermark tells.
func (v *Volume) contractIdle() {
	v.mu.RLock()
	unmet := v.unmet
	v.mu.RUnlock()
	if unmet.since.IsZero() || unmet.level == Object || v.e.journal.Stalled() > v.e.opt.UnmetAfter/2 {
		return
	}
	used, limit, waiting := v.budget.usage()
	if waiting || used+blockBytes > limit || !v.e.journal.TryReserve(0) {
		return
	}
	v.e.journal.Unreserve(0)
	v.contractReached()
}

// contractReached is called when a watermark moved on: it ends the time of degradation
// once destage keeps up again, and the unmet interval once all of it is at the level.
func (v *Volume) contractReached() {
	v.mu.RLock()
	quiet := v.unmet.since.IsZero()
	v.mu.RUnlock()
	if quiet {
		return
	}
	oldest := v.destage.oldest()
	behind := !oldest.IsZero() && time.Since(oldest) > v.e.opt.UnmetAfter/2
	v.mu.Lock()
	if !behind {
		v.unmet.degraded = false
	}
	m := v.local.get()
	if v.unmet.level == Object {
		m = v.object.get()
	}
	met := !v.unmet.degraded && m.LSN >= v.unmet.until
	since := v.unmet.since
	if met {
		v.unmet = unmet{}
	}
	v.mu.Unlock()
	if met {
		v.event("info", "contract_met", fmt.Sprintf("the contract holds again; it did not for %s", time.Since(since).Round(time.Millisecond)))
	}
}
