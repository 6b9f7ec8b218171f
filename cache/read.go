package cache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/cache/readcache"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// The path of a read: the dirty map first; what it does not have, the home map; what
// neither has is zeros. Journal segments are pinned, and the memory of writes that are not in the journal yet is held, under the
// lock under which they were found, so that they cannot be reused before they were read. An extent that destage moves home in between
// is at one of the two places at any time: it is put into the home map before it leaves the dirty map.

// Borrowed is memory lent to a reader until Release.
type Borrowed struct {
	e      *Engine
	bufs   [][]byte
	mem    [][]byte // of the read arena, all that this read may copy into
	piece  int      // of mem: those before it are used
	used   int      // bytes of that piece
	chunks []readcache.Ref
	claim  int // chunks that are reserved
	most   int // chunks that may be held
	room   *room
	share  int64 // of room
	wait   budgetWaiter

	// While the read is going on.
	dirty, plan []extent.Extent
	pinned      []uint64   // segments of the journal
	held        []*payload // one for each extent of plan that is in memory only, in order
}

// lendBytes is the least that is lent out of a cached frame; less is copied, so that a read of many small
// extents does not hold a frame for each.
const lendBytes = volumelog.FramePayload / 2

// Buffers hold the bytes read, in order. They must not be written to.
func (b *Borrowed) Buffers() [][]byte { return b.bufs }

// Release gives the memory back. It must be called exactly once.
func (b *Borrowed) Release() {
	e := b.e
	if e == nil {
		panic("cache: a Borrowed is released twice")
	}
	if b.mem != nil {
		e.readArena.Free(b.mem)
	}
	for _, c := range b.chunks {
		c.Release()
	}
	if b.claim > 0 {
		e.reads.Unreserve(b.claim)
	}
	if b.share > 0 {
		b.room.budget.release(b.share)
	}
	clear(b.bufs)
	clear(b.chunks)
	*b = Borrowed{
		wait: b.wait, bufs: b.bufs[:0], chunks: b.chunks[:0],
		dirty: b.dirty[:0], plan: b.plan[:0], pinned: b.pinned[:0], held: b.held[:0],
	}
	e.loans.Put(b)
}

// unpin lets go of what the read was made from.
func (b *Borrowed) unpin() {
	for _, gen := range b.pinned {
		b.e.journal.Unpin(gen)
	}
	for _, p := range b.held {
		p.leave()
	}
	clear(b.held)
	b.pinned, b.held = b.pinned[:0], b.held[:0]
}

func (b *Borrowed) zeros(n int64) {
	for n > 0 {
		k := min(n, zeroBytes)
		b.bufs = append(b.bufs, b.e.zeros[:k:k])
		n -= k
	}
}

// take appends n bytes of b.mem to what is lent, and returns them to be filled.
func (b *Borrowed) take(n int64) [][]byte {
	from := len(b.bufs)
	for n > 0 {
		p := b.mem[b.piece][b.used:]
		k := int(min(n, int64(len(p))))
		b.bufs = append(b.bufs, p[:k:k])
		if b.used += k; k == len(p) {
			b.piece, b.used = b.piece+1, 0
		}
		n -= int64(k)
	}
	return b.bufs[from:]
}

// lookups recycles the slices that extents are looked up into.
var lookups = sync.Pool{New: func() any { s := make([]extent.Extent, 0, 64); return &s }}

// Read returns n bytes at off, both multiples of the block size. The result must be
// released. ErrRange, ErrUnreadable for damage, ErrBusy when the object store does not
// answer for as long as a command may wait, or why the volume is not served.
func (v *Volume) Read(ctx context.Context, off, n int64) (*Borrowed, error) {
	if err := v.serving(); err != nil {
		return nil, err
	}
	if err := v.check(off, n); err != nil {
		return nil, err
	}
	if max := v.e.opt.ArenaBytes / 4; n > max {
		return nil, fmt.Errorf("a read of %d bytes, at most %d are lent at once: %w", n, max, ErrRange)
	}
	b := v.e.loans.Get().(*Borrowed)
	b.e = v.e
	p := patience{ctx: ctx, limit: v.e.opt.CommandWait}
	err := v.read(&p, b, off, n)
	p.end()
	b.unpin()
	if err == nil {
		return b, nil
	}
	b.Release()
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil, fmt.Errorf("no answer in %s: %w", v.e.opt.CommandWait, ErrBusy)
	}
	return nil, err
}

// patience bounds the waiting of one command. The clock starts with the first wait: a command that finds
// everything at hand does not pay for a timer.
type patience struct {
	ctx     context.Context
	limit   time.Duration
	until   time.Time       // zero until something is waited for
	bounded context.Context // likewise
	cancel  context.CancelFunc
}

// deadline is when it ends.
func (p *patience) deadline() time.Time {
	if p.until.IsZero() {
		p.until = time.Now().Add(p.limit)
	}
	return p.until
}

// context bounds what is about to be waited for; the limit shows as context.DeadlineExceeded.
func (p *patience) context() context.Context {
	if p.bounded == nil {
		p.bounded, p.cancel = context.WithDeadline(p.ctx, p.deadline())
	}
	return p.bounded
}

func (p *patience) end() {
	if p.cancel != nil {
		p.cancel()
	}
}

func (v *Volume) read(p *patience, b *Borrowed, off, n int64) error {
	start, sectors := uint64(off)/sectorBytes, uint64(n)/sectorBytes
	if err := v.plan(b, start, sectors); err != nil {
		return err
	}
	if err := v.provide(p, b); err != nil {
		return err
	}
	if b.claim > 0 {
		v.bring(b.plan, false)
	}
	pos, home, held := start, false, b.held
	for i := range b.plan {
		x := &b.plan[i]
		b.zeros(int64(x.Start-pos) * sectorBytes)
		var err error
		switch {
		case x.Kind == extent.Zero:
			b.zeros(int64(x.Sectors) * sectorBytes)
		case inMemory(x):
			readMemory(b, x, held[0])
			held = held[1:]
		case x.Loc.Epoch == 0:
			err = v.readJournal(b, x)
		default:
			home = true
			err = v.readObject(p, b, x)
		}
		if err != nil {
			return err
		}
		pos = x.End()
	}
	b.zeros(int64(start+sectors-pos) * sectorBytes)
	if home {
		v.readAhead(start, sectors)
	}
	return nil
}

// plan says where the range is: extents in memory and of the journal, whose Epoch is 0 and which are held or
// pinned, and of the bucket, in order. What is in no extent is zeros.
func (v *Volume) plan(b *Borrowed, start, sectors uint64) (err error) {
	if err := v.lookupDirty(b, start, sectors); err != nil {
		return err
	}
	pos := start
	for i := range b.dirty {
		x := &b.dirty[i]
		if x.Start > pos {
			if b.plan, err = v.home.Lookup(pos, x.Start-pos, b.plan); err != nil {
				break
			}
		}
		b.plan = append(b.plan, *x)
		pos = x.End()
	}
	if end := start + sectors; err == nil && pos < end {
		b.plan, err = v.home.Lookup(pos, end-pos, b.plan)
	}
	if errors.Is(err, homemap.ErrDamaged) {
		err = v.homeDamaged(err)
	}
	return err
}

// homeDamaged takes the volume out of service, and sees to it that the next start makes the
// home map anew from the bucket.
func (v *Volume) homeDamaged(cause error) error {
	err := fmt.Errorf("%w: %w: restart the gateway, the home map is then rebuilt from the bucket", ErrDamaged, cause)
	if v.stop(StateFailed, err) {
		if err := v.e.store.Drop(v.id); err != nil {
			v.log.Error("damaged home map not dropped", "err", err)
		}
	}
	return err
}

// provide gets the memory that the plan needs: first, if the bucket may be asked, a share of what its readers may hold, then of
// the arena, then of the read cache, each all at once, so that readers never wait for each other in a circle.
func (v *Volume) provide(p *patience, b *Borrowed) (err error) {
	var copied, object int64
	chunks := false
	for i := range b.plan {
		x := &b.plan[i]
		n := int64(x.Sectors) * sectorBytes
		switch {
		case x.Kind == extent.Zero:
		case x.Loc.Epoch == 0:
			copied += n
		case x.Kind == extent.Same:
			copied, chunks = copied+n, true
		default:
			object, chunks = object+n, true
		}
	}
	reserve := min(int(object/lendBytes)+2, v.e.reads.MaxReserve())
	if chunks {
		n := v.e.shareOf(copied+object, reserve)
		if !v.room.budget.tryAcquire(n) {
			if err := v.room.budget.acquire(p.ctx, &b.wait, p.deadline(), n); err != nil {
				return err
			}
		}
		b.room, b.share = v.room, n
	}
	// How much of an object's extents is copied is not known yet; at most all of it.
	if n := copied + object; n > 0 {
		if b.mem = v.e.readArena.TryAlloc(n); b.mem == nil {
			if b.mem, err = v.e.readArena.Alloc(p.context(), n); err != nil {
				return err
			}
		}
	}
	if chunks {
		if !v.e.reads.TryReserve(reserve) {
			if err := v.e.reads.Reserve(p.context(), reserve); err != nil {
				return err
			}
		}
		b.claim = reserve
		b.most = reserve - 1 // and one in passing
	}
	return nil
}

// lookupDirty returns in b what the dirty map has of the range, and pins or holds where it is.
func (v *Volume) lookupDirty(b *Borrowed, start, sectors uint64) error {
	v.mu.RLock()
	defer v.mu.RUnlock()
	b.dirty = v.dirty.Lookup(start, sectors, b.dirty)
	for i := range b.dirty {
		x := &b.dirty[i]
		gen := x.Loc.Ref
		switch {
		case x.Kind == extent.Zero || len(b.pinned) > 0 && b.pinned[len(b.pinned)-1] == gen:
		case inMemory(x):
			p := v.unsynced.get(LSN(x.LSN))
			if p == nil {
				if err := v.serving(); err != nil {
					return err // the journal failed, and the memory is gone
				}
				return fmt.Errorf("LSN %d is neither in the journal nor in memory: %w", x.LSN, ErrUnreadable)
			}
			p.hold()
			b.held = append(b.held, p)
		case v.e.journal.Pin(gen):
			b.pinned = append(b.pinned, gen)
		default:
			return fmt.Errorf("segment %d of the journal is gone although the dirty map refers to it: %w", gen, ErrUnreadable)
		}
	}
	return nil
}

// inMemory reports whether an extent of the dirty map is not in the journal yet. Segments count from 1.
func inMemory(x *extent.Extent) bool {
	return x.Kind != extent.Zero && x.Loc.Epoch == 0 && x.Loc.Ref == 0
}

// readMemory copies, so that a slow reader does not hold what a writer waits for.
func readMemory(b *Borrowed, x *extent.Extent, from *payload) {
	into := b.take(int64(x.Sectors) * sectorBytes)
	if x.Kind == extent.Same {
		repeat(into, from.bufs[0][:int(x.Loc.Block)*sectorBytes], x.Phase())
		return
	}
	from.copyTo(into, int64(x.Loc.Sector)*sectorBytes)
}

// journalLocation is where in the journal an extent's sector lies.
func journalLocation(x *extent.Extent) (loc journal.Location, off int64) {
	const perBlock = blockBytes / sectorBytes
	return journal.Location{Segment: x.Loc.Ref, Block: x.Loc.Sector / perBlock}, int64(x.Loc.Sector%perBlock) * sectorBytes
}

func (v *Volume) readJournal(b *Borrowed, x *extent.Extent) error {
	loc, off := journalLocation(x)
	if x.Kind == extent.Same {
		var block [blockBytes]byte
		p := block[:int(x.Loc.Block)*sectorBytes]
		if err := v.e.journal.ReadAt(loc, off, p); err != nil {
			return v.unreadable(x, err)
		}
		repeat(b.take(int64(x.Sectors)*sectorBytes), p, x.Phase())
		return nil
	}
	if err := v.e.journal.ReadvAt(loc, off, b.take(int64(x.Sectors)*sectorBytes)); err != nil {
		return v.unreadable(x, err)
	}
	return nil
}

// repeat fills bufs with the pattern, beginning at its sector phase.
func repeat(bufs [][]byte, pattern []byte, phase uint64) {
	at := int(phase) * sectorBytes
	for _, b := range bufs {
		for len(b) > 0 {
			n := copy(b, pattern[at:])
			b, at = b[n:], (at+n)%len(pattern)
		}
	}
}

func (v *Volume) unreadable(x *extent.Extent, err error) error {
	v.event("error", "unreadable", fmt.Sprintf("%d sectors at sector %d (LSN %d): %v", x.Sectors, x.Start, x.LSN, err))
	return fmt.Errorf("%w: %w", ErrUnreadable, err)
}

// runFrames is how many adjacent frames one request reads at most: 1 MiB.
const runFrames = 16

// run is a number of adjacent frames that one request reads, whichever of them is needed first.
type run struct {
	v     *Volume
	loc   volumelog.Location
	from  uint32 // the first frame
	n     int
	begun atomic.Bool
	done  chan struct{} // closed when got and err are set
	got   []byte        // their payloads
	err   error
}

// bring starts to read the frames of data extents that are not at hand, those that are adjacent in an
// object with one request, and leaves out what is alone if alone is false. It does not wait: frame joins what
// is under way.
func (v *Volume) bring(list []extent.Extent, alone bool) {
	var r struct { // the run that is being put together
		loc  volumelog.Location
		from uint32
		n    int
	}
	start := func() {
		if r.n > 1 || (r.n == 1 && alone) {
			v.startRun(r.loc, r.from, r.n)
		}
		r.n = 0
	}
	for i := range list {
		x := &list[i]
		if x.Kind != extent.Data || x.Loc.Epoch == 0 {
			continue
		}
		loc := volumelog.Location{Epoch: uint64(x.Loc.Epoch), Seq: x.Loc.Ref, HeaderBlocks: x.Loc.Header}
		last := (x.Loc.Sector + uint32(x.Sectors) - 1) / frameSectors
		for f := x.Loc.Sector / frameSectors; f <= last; f++ {
			same := r.n > 0 && r.loc == loc
			if same && f >= r.from && f < r.from+uint32(r.n) {
				continue // it is in the run already
			}
			if !same || f != r.from+uint32(r.n) || r.n == runFrames {
				start()
			}
			if v.e.reads.Contains(v.frameKey(loc, f)) {
				start()
				continue
			}
			if r.n == 0 {
				r.loc, r.from = loc, f
			}
			r.n++
		}
	}
	start()
}

func (v *Volume) startRun(loc volumelog.Location, from uint32, n int) {
	r := &run{v: v, loc: loc, from: from, n: n, done: make(chan struct{})}
	for f := from; f < from+uint32(n); f++ {
		v.e.reads.Prefetch(v.ctx, v.frameKey(loc, f), r.fetch(f))
	}
}

// fetch reads frame f of the run. When the run as a whole cannot be read, the frame is read by itself: damage
// elsewhere does not concern it.
func (r *run) fetch(f uint32) func(context.Context, []byte) (int, error) {
	return func(ctx context.Context, into []byte) (int, error) {
		if r.begun.CompareAndSwap(false, true) {
			wire := make([]byte, r.n*volumelog.FrameBytes)
			r.got, r.err = volumelog.ReadFrames(ctx, r.v.bucket(), r.v.id, r.loc, int(r.from), r.n, wire)
			close(r.done)
		}
		select {
		case <-r.done:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		off := int(f-r.from) * volumelog.FramePayload
		if r.err != nil || off >= len(r.got) {
			loc := r.loc
			loc.Sector = f * frameSectors
			return r.v.fetch(loc)(ctx, into)
		}
		return copy(into[:volumelog.FramePayload], r.got[off:]), nil
	}
}

func (v *Volume) frameKey(loc volumelog.Location, frame uint32) readcache.Key {
	return readcache.Key{Volume: v.id, Epoch: loc.Epoch, Seq: loc.Seq, Chunk: frame, Home: v.room.number}
}

// readAhead brings what a sequential reader will ask for next into the read cache.
func (v *Volume) readAhead(start, sectors uint64) {
	v.aheadMu.Lock()
	from, n := v.ahead.Access(int64(start)*sectorBytes, int64(sectors)*sectorBytes)
	v.aheadMu.Unlock()
	n = min(n, v.size.Load()-from)
	if n <= 0 {
		return
	}
	go func() {
		list := lookups.Get().(*[]extent.Extent)
		defer lookups.Put(list)
		found, err := v.home.Lookup(uint64(from)/sectorBytes, uint64(n)/sectorBytes, (*list)[:0])
		*list = found
		if err != nil {
			return // whoever reads it for real meets the error again
		}
		v.bring(found, true)
	}()
}

// frameSectors is the unit in which objects are read, verified and cached.
const frameSectors = volumelog.FramePayload / sectorBytes

func (v *Volume) readObject(p *patience, b *Borrowed, x *extent.Extent) error {
	if x.Kind == extent.Same {
		ref, data, err := v.frame(p, x, x.Loc.Sector)
		if err != nil {
			return err
		}
		defer ref.Release()
		size := int(x.Loc.Block) * sectorBytes
		if len(data) < size {
			return v.unreadable(x, errShortObject)
		}
		repeat(b.take(int64(x.Sectors)*sectorBytes), data[:size], x.Phase())
		return nil
	}
	for sector, left := x.Loc.Sector, x.Sectors; left > 0; {
		ref, data, err := v.frame(p, x, sector)
		if err != nil {
			return err
		}
		n := min(left, uint64(len(data))/sectorBytes)
		if n == 0 {
			ref.Release()
			return v.unreadable(x, errShortObject)
		}
		data = data[:n*sectorBytes]
		if len(data) >= lendBytes && len(b.chunks) < b.most {
			b.chunks = append(b.chunks, ref)
			b.bufs = append(b.bufs, data)
		} else {
			for _, into := range b.take(int64(len(data))) {
				data = data[copy(into, data):]
			}
			ref.Release()
		}
		sector, left = sector+uint32(n), left-n
	}
	return nil
}

var errShortObject = errors.New("the object ends before the extent does")

// frame returns the frame of x's object that holds a payload sector, and its bytes from
// that sector on. It tries again while the store does not answer, until p ends.
func (v *Volume) frame(p *patience, x *extent.Extent, sector uint32) (readcache.Ref, []byte, error) {
	loc := volumelog.Location{Epoch: uint64(x.Loc.Epoch), Seq: x.Loc.Ref, HeaderBlocks: x.Loc.Header, Sector: sector}
	key := v.frameKey(loc, sector/frameSectors)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		ref, err := v.e.reads.Hit(key), error(nil)
		if ref == nil {
			ref, err = v.e.reads.Get(p.context(), key, v.fetch(loc))
		}
		if err == nil {
			data := ref.Bytes()
			if skip := int(sector%frameSectors) * sectorBytes; skip < len(data) {
				return ref, data[skip:], nil
			}
			ref.Release()
			return nil, nil, v.unreadable(x, errShortObject)
		}
		ctx := p.context()
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		if errors.Is(err, objectstore.ErrNotFound) || errors.Is(err, objectstore.ErrCorrupt) {
			return nil, nil, v.unreadable(x, err)
		}
		select {
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-time.After(wait/2 + rand.N(wait)):
		}
	}
}

// frames are what fetch reads into: a frame is a little longer on the wire than in the cache.
var frames = sync.Pool{New: func() any { return new([volumelog.FrameBytes]byte) }}

// fetch reads one frame from the bucket.
func (v *Volume) fetch(loc volumelog.Location) func(context.Context, []byte) (int, error) {
	return func(ctx context.Context, into []byte) (int, error) {
		wire := frames.Get().(*[volumelog.FrameBytes]byte)
		defer frames.Put(wire)
		got, err := volumelog.ReadFrames(ctx, v.bucket(), v.id, loc, int(loc.Sector/frameSectors), 1, wire[:])
		return copy(into, got), err
	}
}

func (v *Volume) bucket() objectstore.Bucket {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.cfg.Bucket
}

// Mapped reports whether the bytes from off on are backed by data, and for how many bytes, at most max,
// that holds. What was never written, and what was deallocated or zeroed, is not.
func (v *Volume) Mapped(ctx context.Context, off, maxBytes int64) (mapped bool, n int64, err error) {
	if err := v.serving(); err != nil {
		return false, 0, err
	}
	if err := v.check(off, maxBytes); err != nil {
		return false, 0, err
	}
	maxBytes = min(maxBytes, mappedMax)
	pos, end := uint64(off)/sectorBytes, uint64(off+maxBytes)/sectorBytes
	first, run := true, uint64(0)
	note := func(m bool, sectors uint64) bool {
		if first {
			mapped, first = m, false
		}
		if m == mapped {
			run += sectors
		}
		return m == mapped
	}
	_, err = v.mappedIn(pos, end-pos, note)
	return mapped, int64(run) * sectorBytes, err
}

// mappedMax is how far one call of Mapped looks, in bytes.
const mappedMax = 4 << 30

func (v *Volume) mappedIn(start, sectors uint64, note func(bool, uint64) bool) (more bool, err error) {
	v.mu.RLock()
	dirty := v.dirty.Lookup(start, sectors, nil)
	v.mu.RUnlock()
	home := func(from, to uint64) (bool, error) {
		if from == to {
			return true, nil
		}
		xs, err := v.home.Lookup(from, to-from, nil)
		if errors.Is(err, homemap.ErrDamaged) {
			err = v.homeDamaged(err)
		}
		if err != nil {
			return false, err
		}
		for _, x := range xs {
			if x.Start > from && !note(false, x.Start-from) {
				return false, nil
			}
			if !note(x.Kind != extent.Zero, x.Sectors) {
				return false, nil
			}
			from = x.End()
		}
		return from == to || note(false, to-from), nil
	}
	pos := start
	for _, x := range dirty {
		if more, err := home(pos, x.Start); err != nil || !more {
			return false, err
		}
		if !note(x.Kind != extent.Zero, x.Sectors) {
			return false, nil
		}
		pos = x.End()
	}
	return home(pos, start+sectors)
}
