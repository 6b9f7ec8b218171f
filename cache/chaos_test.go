package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/semaphore"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/cache/vfs"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/faulty"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// TestChaos is TestCrash with everything else that may go wrong or change meanwhile: buckets that fail, hang and
// lose replies, a home map store without room, a journal device that fails, a journal that is recycled many
// times over, resizes, changes of policy, volumes that are forgotten and restored, and a second gateway of the same
// identity that takes the volumes over while the first goes on. Readers check that nothing is ever
// older than what was acknowledged before they asked. It runs in fake time.
func TestChaos(t *testing.T) {
	from, to := seeds(t, 200, 25)
	for seed := from; seed < to; seed++ {
		if !t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { chaosRun(t, seed) })
		}) {
			t.Fatalf("run it again with ISERGATE_SEED=%d", seed)
		}
	}
}

// chaosVolume is a volume and its history over all lives.
type chaosVolume struct {
	*history
	level Level // that what was acknowledged survives up to the next check

	ops *semaphore.Weighted // held in part by each command, wholly while v is exchanged
	v   *Volume             // guarded by ops

	forgotten  bool // let go of, and not yet known to be restored
	policies   bool // changed in this life
	generation uint64
	dirtyMost  int64 // what replay found, or the budget
}

// chaos is one run.
type chaos struct {
	t     *testing.T
	w     *world
	e     *Engine
	vs    []*chaosVolume
	small bool // journal

	reborns bool // volumes may be forgotten and restored

	armed atomic.Bool // faults are due
	noMap atomic.Bool // the home map store has no room
	mu    sync.Mutex
	ops   int // guarded by mu
}

func chaosRun(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 11))
	c := &chaos{t: t, w: newWorld(), small: rng.IntN(2) == 0}
	for i := range 1 + rng.IntN(3) {
		cfg := c.w.config(fmt.Sprint("v", i), byte(i+1))
		cfg.Policy = randomPolicy(rng)
		if rng.IntN(2) == 0 {
			cfg.BlockSize = 4096
		}
		c.vs = append(c.vs, &chaosVolume{history: &history{cfg: cfg}, level: Local, ops: semaphore.NewWeighted(64)})
	}
	for life := range 2 + rng.IntN(4) {
		c.life(rng, life == 0)
		if t.Failed() {
			return
		}
	}
	hs := make([]*history, 0, len(c.vs))
	for _, h := range c.vs {
		if !h.forgotten {
			hs = append(hs, h.history)
		}
	}
	restoreAll(t, c.w, hs)
}

func randomPolicy(rng *rand.Rand) Policy {
	levels := []Policy{{Ack: Local, Flush: Local}, {Ack: Object, Flush: Object}, {Ack: Memory, Flush: Local}, {Ack: Local, Flush: Object}, {Ack: Memory, Flush: Object}}
	p := levels[rng.IntN(len(levels))]
	p.OnUnmet = []OnUnmet{Block, Block, Error, Degrade}[rng.IntN(4)]
	return p
}

// impatient ends a call that takes longer than any client of a store waits.
type impatient struct{ objectstore.Bucket }

func within[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return f(ctx)
}

func (b impatient) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	_, err := within(ctx, func(ctx context.Context) (int, error) { return 0, b.Bucket.PutIfAbsent(ctx, key, body) })
	return err
}
func (b impatient) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	return within(ctx, func(ctx context.Context) ([]byte, error) { return b.Bucket.Get(ctx, key, limit) })
}
func (b impatient) Head(ctx context.Context, key string) (objectstore.Info, error) {
	return within(ctx, func(ctx context.Context) (objectstore.Info, error) { return b.Bucket.Head(ctx, key) })
}
func (b impatient) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	return within(ctx, func(ctx context.Context) (int, error) { return b.Bucket.GetRange(ctx, key, off, into) })
}
func (b impatient) List(ctx context.Context, prefix, after string, limit int) ([]objectstore.Info, error) {
	return within(ctx, func(ctx context.Context) ([]objectstore.Info, error) { return b.Bucket.List(ctx, prefix, after, limit) })
}
func (b impatient) Delete(ctx context.Context, keys ...string) error {
	_, err := within(ctx, func(ctx context.Context) (int, error) { return 0, b.Bucket.Delete(ctx, keys...) })
	return err
}

// bucket returns the world's bucket with some faults.
func (c *chaos) bucket(w *world, rng *rand.Rand) objectstore.Bucket {
	f := faulty.Wrap(gateBucket{w.bucket, w})
	ops := []objectstore.Op{"", objectstore.OpPut, objectstore.OpPut, objectstore.OpGetRange, objectstore.OpList}
	errs := []error{nil, objectstore.ErrTransient, objectstore.ErrUnknown, objectstore.ErrDenied}
	for range rng.IntN(6) {
		f.Add(faulty.Fault{
			Op: ops[rng.IntN(len(ops))], Nth: 1 + rng.IntN(60), Times: 1 + rng.IntN(4),
			Action: []faulty.Action{faulty.Fail, faulty.WinThenFail, faulty.Hang, faulty.WinThenHang}[rng.IntN(4)],
			Err:    errs[rng.IntN(len(errs))],
		})
	}
	return impatient{f}
}

type chaosStore struct {
	homemap.Store
	c *chaos
}

func (s chaosStore) Apply(id uuid.UUID, b *homemap.Batch) error {
	if s.c.noMap.Load() {
		return homemap.ErrNoSpace
	}
	return s.Store.Apply(id, b)
}

// open opens the engine on the world.
func (c *chaos) open(w *world) *Engine {
	c.t.Helper()
	o := w.options(c.t)
	if w == c.w {
		o.HomeStore = chaosStore{o.HomeStore, c}
	}
	o.ArenaBytes = 1 << 20
	o.UnmetAfter, o.CommandWait = time.Second, 3*time.Second
	o.DirtyBudget = 512 << 10
	if c.small {
		o.JournalBytes = 4 << 20
	}
	e, err := Open(c.t.Context(), o)
	if err == nil {
		e.arena.SetMangle(true)
		e.readArena.SetMangle(true)
		e.reads.SetMangle(true)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return e
}

// ways in which a life ends.
const (
	endClean = iota
	endPower
	endDevice // the journal's device fails, then the power
	endTakeOver
)

// life is the time from one start of the engine to the next.
func (c *chaos) life(rng *rand.Rand, first bool) {
	t, w := c.t, c.w
	if rng.IntN(8) == 0 {
		w.store = homemap.NewMem()
	}
	end := []int{endClean, endPower, endPower, endPower, endDevice, endTakeOver}[rng.IntN(6)]
	at := 1 + rng.IntN(500)
	crashRng := rand.New(rand.NewPCG(rng.Uint64(), 2))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var next *world
	c.ops = 0
	c.armed.Store(false)
	c.noMap.Store(false)
	w.setFault(func(op string) error {
		if !c.armed.Load() {
			return nil
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ops++
		device := op == "writev" || op == "write" || op == "syncdata"
		switch {
		case c.ops < at || next != nil:
		case end == endPower:
			next = w.crash(crashRng)
			cancel()
		case end == endDevice && device:
			next = w.crash(crashRng)
			cancel()
			return syscall.EIO
		}
		return nil
	})
	e := c.open(w)
	c.e, c.reborns = e, end != endTakeOver
	for _, h := range c.vs {
		h.cfg.Bucket = c.bucket(w, rng)
		c.begin(h, first)
		if t.Failed() {
			_ = e.Close(t.Context())
			return
		}
	}
	c.armed.Store(true)
	var wg sync.WaitGroup
	for _, h := range c.vs {
		for range 1 + rng.IntN(3) {
			rng := rand.New(rand.NewPCG(rng.Uint64(), 3))
			wg.Go(func() { c.work(ctx, h, rng) })
		}
		rng := rand.New(rand.NewPCG(rng.Uint64(), 4))
		wg.Go(func() { c.readers(ctx, h, rng) })
	}
	var second *takenOver
	if end == endTakeOver {
		second = c.takeOver(rng)
	}
	wg.Wait()
	c.noMap.Store(false)
	switch end {
	case endClean:
		for _, h := range c.vs {
			if h.v.serving() == nil {
				h.check(t, h.v, Memory)
				h.level = Memory
			}
		}
		if err := e.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.w = &world{disk: w.disk.CrashClone(rng, vfs.CrashOptions{}), store: w.store.CrashClone(), bucket: w.bucket}
	case endTakeOver:
		_ = e.Close(t.Context())
		c.w = second.check(c)
	default:
		c.mu.Lock()
		if next == nil {
			next = w.crash(crashRng)
		}
		c.w = next
		c.mu.Unlock()
		_ = e.Close(t.Context()) // its device is gone
	}
}

// begin opens a volume in a new life, and compares it with the history.
func (c *chaos) begin(h *chaosVolume, first bool) {
	t := c.t
	var err error
	switch {
	case first:
		h.v, err = c.e.Create(t.Context(), h.cfg)
	case h.forgotten:
		c.restore(h)
		return
	default:
		h.v, err = c.e.Volume(t.Context(), h.cfg)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := settled(t, h.v).serving(); err != nil {
		t.Error(err)
		return
	}
	s := h.v.Status()
	loss := LSN(0)
	for _, w := range h.writes {
		if w.acked == Memory && w.lsn > s.Watermarks.Acked.LSN {
			loss = w.lsn
		}
	}
	if loss > 0 && !h.policies {
		if s.Generation <= h.generation {
			t.Errorf("volume %s: LSN %d is lost, and the generation is %d as before", h.cfg.Name, loss, s.Generation)
		}
		if err := h.v.Flush(t.Context()); err != ErrLostWrites {
			t.Errorf("volume %s: LSN %d is lost, and the first flush says %v", h.cfg.Name, loss, err)
		}
	}
	h.check(t, h.v, h.level)
	h.level = Local
	h.entered()
}

// entered notes how a volume was when it came into service.
func (h *chaosVolume) entered() {
	s := h.v.Status()
	h.generation, h.policies, h.degrades = s.Generation, false, h.cfg.Policy.OnUnmet == Degrade
	h.dirtyMost = max(s.DirtyBytes, s.DirtyBudgetBytes)
}

// restore lets go of a volume, whatever was done of that, and takes it from its bucket.
func (c *chaos) restore(h *chaosVolume) {
	t := c.t
	for try := 0; ; try++ {
		c.noMap.Store(false)
		err := c.e.Forget(t.Context(), h.cfg.ID, h.cfg.Bucket, false)
		var v *Volume
		if err == nil {
			v, _, err = c.e.Restore(t.Context(), VolumeConfig{ID: h.cfg.ID, Policy: h.cfg.Policy, Bucket: h.cfg.Bucket})
		}
		switch {
		case err == nil:
			if lsn := v.object.get().LSN; lsn < h.claimed || lsn < h.atObject {
				t.Errorf("volume %s was restored at LSN %d, %d was reported at object", h.cfg.Name, lsn, max(h.claimed, h.atObject))
			}
			if err := h.compare(t, v, Object); err != nil {
				if !c.w.isDead() {
					t.Error(err)
				}
				return // the next life does it again
			}
			h.v, h.forgotten = v, false
			h.entered()
			return
		case errors.Is(err, errPower), errors.Is(err, ErrJournal), c.w.isDead():
			return
		case errors.Is(err, volumelog.ErrNoVolume) && h.claimed == 0 && h.atObject == 0: // it never reached the bucket
			h.writes = nil
			if err := c.e.Forget(t.Context(), h.cfg.ID, h.cfg.Bucket, true); err != nil {
				continue
			}
			if h.v, err = c.e.Create(t.Context(), h.cfg); err == nil {
				h.forgotten = false
				h.entered()
				return
			}
		}
		if try > 100 {
			t.Errorf("volume %s (LSN %d at object) does not come back: %v", h.cfg.Name, h.claimed, err)
			return
		}
		time.Sleep(time.Second) // fake: the bucket's faults end
	}
}

func (w *world) isDead() bool {
	w.gate.RLock()
	defer w.gate.RUnlock()
	return w.dead
}

// work writes, and does what an administrator does.
func (c *chaos) work(ctx context.Context, h *chaosVolume, rng *rand.Rand) {
	for range 60 {
		if rng.IntN(60) == 0 && c.reborn(ctx, h) {
			continue
		}
		if h.ops.Acquire(ctx, 1) != nil {
			return
		}
		err := c.command(ctx, h, rng)
		h.ops.Release(1)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil, errors.Is(err, ErrBusy), errors.Is(err, ErrUnmet), errors.Is(err, ErrBudget), errors.Is(err, ErrLostWrites):
		case errors.Is(err, ErrJournal), errors.Is(err, ErrFenced), errors.Is(err, ErrClosed), errors.Is(err, errPower):
			return
		default:
			c.t.Errorf("volume %s: %v", h.cfg.Name, err)
			return
		}
	}
}

// reborn forgets the volume and restores it from its bucket.
func (c *chaos) reborn(ctx context.Context, h *chaosVolume) bool {
	if h.ops.Acquire(ctx, 64) != nil {
		return false
	}
	defer h.ops.Release(64)
	if !c.reborns || h.forgotten || h.v.serving() != nil {
		return false
	}
	h.mu.Lock()
	h.claimed = max(h.claimed, h.v.object.get().LSN)
	h.mu.Unlock()
	h.forgotten = true
	c.restore(h)
	return true
}

func (c *chaos) command(ctx context.Context, h *chaosVolume, rng *rand.Rand) error {
	v := h.v
	if h.forgotten {
		return ErrClosed
	}
	defer func() {
		h.mu.Lock()
		h.claimed = max(h.claimed, v.object.get().LSN)
		h.mu.Unlock()
		if s := v.Status(); s.DirtyBytes < 0 || s.DirtyBytes > h.dirtyMost {
			c.t.Errorf("volume %s: %d dirty bytes, the most is %d", h.cfg.Name, s.DirtyBytes, h.dirtyMost)
		}
	}()
	switch rng.IntN(40) {
	case 0:
		return v.Flush(ctx)
	case 1:
		soon, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := v.Wait(soon, Object); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	case 2:
		h.mu.Lock()
		defer h.mu.Unlock()
		p := randomPolicy(rng)
		h.cfg.Policy, h.policies, h.degrades = p, true, h.degrades || p.OnUnmet == Degrade
		return v.SetPolicy(p, 0, rng.IntN(4) == 0)
	case 3:
		return h.resize(ctx, v, rng)
	case 4:
		c.noMap.Store(rng.IntN(2) == 0)
		return nil
	case 5:
		if err := c.e.reclaim(ctx); err != nil && !errors.Is(err, homemap.ErrNoSpace) && !errors.Is(err, homemap.ErrClosed) && ctx.Err() == nil && !errors.Is(err, errPower) {
			return err
		}
		return nil
	}
	return h.write(ctx, v, rng)
}

// resize grows the volume by up to 64 KiB and notes it.
func (h *history) resize(ctx context.Context, v *Volume, rng *rand.Rand) error {
	w := &histWrite{kind: journal.KindNote, size: v.size.Load() + int64(1+rng.IntN(16))*4096}
	b, err := json.Marshal(note{Size: w.size})
	if err != nil {
		return err
	}
	o := v.newOp()
	o.note, o.entry.Payload = &note{Size: w.size}, [][]byte{b}
	h.note(w)
	lsn, err := o.submit(journal.Record{Kind: journal.KindNote, PayloadBytes: uint32(len(b))}, Local)
	if err != nil {
		h.drop(w)
		if errors.Is(err, journal.ErrFull) {
			return nil
		}
		return err
	}
	return h.finish(ctx, w, o, Local, lsn)
}

// readers checks that each sector that is read holds the newest write that was acknowledged before, or
// one that came after it.
func (c *chaos) readers(ctx context.Context, h *chaosVolume, rng *rand.Rand) {
	for range 40 {
		if ctx.Err() != nil {
			return
		}
		if h.ops.Acquire(ctx, 1) != nil {
			return
		}
		err := c.readOnce(ctx, h, rng)
		h.ops.Release(1)
		if ctx.Err() != nil {
			return
		}
		switch {
		case err == nil, errors.Is(err, ErrBusy):
		case errors.Is(err, ErrJournal), errors.Is(err, ErrFenced), errors.Is(err, ErrClosed), errors.Is(err, errPower):
			return
		default:
			c.t.Errorf("volume %s: read: %v", h.cfg.Name, err)
			return
		}
		time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
	}
}

func (c *chaos) readOnce(ctx context.Context, h *chaosVolume, rng *rand.Rand) error {
	if h.forgotten {
		return ErrClosed
	}
	v, bs := h.v, int64(h.cfg.BlockSize)
	n := bs * (1 + rng.Int64N(32<<10/bs))
	off := rng.Int64N((min(v.size.Load(), 128<<10)-n)/bs+1) * bs
	h.mu.Lock()
	acked := make([]LSN, n/sectorBytes) // per sector
	for _, w := range h.writes {
		if w.acked == 0 {
			continue
		}
		for s := max(w.off, off); s < min(w.off+w.n, off+n); s += sectorBytes {
			acked[(s-off)/sectorBytes] = max(acked[(s-off)/sectorBytes], w.lsn)
		}
	}
	h.mu.Unlock()
	b, err := v.Read(ctx, off, n)
	if err != nil {
		return err
	}
	got := bytes.Join(b.Buffers(), nil)
	b.Release()
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, floor := range acked {
		at := off + int64(i)*sectorBytes
		have := got[i*sectorBytes : (i+1)*sectorBytes]
		ok := floor == 0 && isZeros(have)
		for j := len(h.writes) - 1; j >= 0 && !ok; j-- {
			w := h.writes[j]
			ok = at >= w.off && at < w.off+w.n && (w.lsn == 0 || w.lsn >= floor) && bytes.Equal(have, w.sector(at))
		}
		if !ok {
			c.t.Errorf("volume %s, sector %d: LSN %d was acknowledged before the read, which has stamp %x", h.cfg.Name, at/sectorBytes, floor, have[:8])
			return nil
		}
	}
	return nil
}

func isZeros(b []byte) bool { return !slices.ContainsFunc(b, func(x byte) bool { return x != 0 }) }

var zeroSector [sectorBytes]byte

// sector is what the write has at a byte of the volume.
func (w *histWrite) sector(at int64) []byte {
	switch w.kind {
	case journal.KindData:
		return w.data[at-w.off:][:sectorBytes]
	case journal.KindSame:
		return w.data[(at-w.off)%int64(len(w.data)):][:sectorBytes]
	}
	return zeroSector[:]
}

// takeOver restores all volumes on a second node of the same identity while the first goes on.
func (c *chaos) takeOver(rng *rand.Rand) *takenOver {
	t := c.t
	time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond) // fake
	n := &takenOver{w: newWorld()}
	n.w.bucket = c.w.bucket
	n.e = c.open(n.w)
	for _, h := range c.vs {
		h.mu.Lock()
		before := max(h.claimed, h.atObject)
		h.mu.Unlock()
		v, _, err := n.e.Restore(t.Context(), VolumeConfig{ID: h.cfg.ID, Policy: DefaultPolicy, Bucket: gateBucket{n.w.bucket, n.w}})
		if err != nil && (before > 0 || !errors.Is(err, volumelog.ErrNoVolume)) {
			t.Errorf("volume %s, of which LSN %d was reported at object, on the second node: %v", h.cfg.Name, before, err)
		}
		n.vs = append(n.vs, v)
	}
	return n
}

// takenOver is a second node.
type takenOver struct {
	w  *world
	e  *Engine
	vs []*Volume // nil: the bucket had nothing of it yet, and the first owner goes on
}

// check compares the volumes with what the first node, which is closed now, ever claimed of the bucket.
func (n *takenOver) check(c *chaos) *world {
	t := c.t
	for i, h := range c.vs {
		v := n.vs[i]
		if v == nil {
			h.forgotten = true
			continue
		}
		lsn := v.object.get().LSN
		if h.claimed > lsn || h.atObject > lsn {
			t.Errorf("volume %s: the fenced owner reported LSN %d, and acknowledged %d, at object; the new one has %d", h.cfg.Name, h.claimed, h.atObject, lsn)
		}
		h.writes = slices.DeleteFunc(h.writes, func(w *histWrite) bool { return w.lsn == 0 || w.lsn > lsn })
		h.forgotten = false
		h.check(t, v, Object)
	}
	if err := n.e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return &world{disk: n.w.disk, store: n.w.store, bucket: n.w.bucket}
}
