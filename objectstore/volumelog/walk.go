package volumelog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// Replay receives what the bucket holds, in order, from one goroutine. A nil function is not
// called. An error ends the call and is returned as it is.
type Replay struct {
	// Reset says that all that was received or known before is void: what follows builds the state anew, entries of the
	// checkpoint m first; m is nil if the volume is empty at first. Without a Reset
	// the state at the caller's own position stands.
	Reset func(m *Manifest) error
	// Entry receives the entries of the checkpoint in ascending order of offset.
	Entry func(Entry) error
	// Apply receives the header of each data object, in log order. The callee may keep it.
	Apply func(*Header) error
}

const (
	headerGuess  = 16 << 10 // bytes fetched at first for a header
	fetchWindow  = 16       // headers fetched in parallel
	maxEpochJump = 1 << 20  // epochs that one call closes at most
)

// walker reads the log in order and knows the rules of its reading. It is the one reader: Attach and
// Restore give it a fence to put at each end, Inspect does not.
type walker struct {
	b      objectstore.Bucket
	id     uuid.UUID
	replay Replay
	feed   feed

	maxEpoch      uint64 // a checkpoint at or above this epoch means that we are fenced
	maxGeneration uint64 // more than this is ErrSuperseded
	skipEntries   bool   // do not read checkpoints' parts

	pos        Position // next object to read
	lsn        uint64   // reached
	time       time.Time
	generation uint64
	attributes Attributes
	writer     Identity // of the epoch of pos; zero if not known

	newest Position // the newest checkpoint that is known to exist, readable or not
	base   Position // newest when pos was last set from checkpoints or by the caller
	at     uint64   // LSN of the newest checkpoint if private and known
	atOK   bool
	// private: pos comes from the caller and the newest checkpoint may lie ahead of it. Objects
	// before that may have been collected: a gap there means to load the checkpoint.
	private bool

	objects, fences int
	loaded          *Manifest
	damaged         []Damage
	onFence         func(Position)
}

// Damage is one object that is not what it should be.
type Damage struct {
	Key string
	Err error
}

// start sets the walker to from, where the caller has all up to LSN lsn, or to the newest checkpoint.
func (w *walker) start(ctx context.Context, from Position, lsn uint64) error {
	if from.IsZero() {
		return w.load(ctx)
	}
	if err := w.refresh(ctx); err != nil {
		return err
	}
	w.pos, w.lsn, w.base, w.private = from, lsn, w.newest, true
	var m *Manifest
	if !w.newest.IsZero() {
		var err error
		m, err = readManifest(ctx, w.b, w.id, w.newest)
		switch {
		case err == nil:
			if err := w.admit(m); err != nil {
				return err
			}
			w.at, w.atOK = m.LSN, true
		case errors.Is(err, objectstore.ErrCorrupt) || errors.Is(err, objectstore.ErrNotFound):
			if w.newest.Epoch >= w.maxEpoch {
				return fmt.Errorf("%w: checkpoint %v", ErrFenced, w.newest)
			}
			w.damaged = append(w.damaged, Damage{checkpointKey(w.id, w.newest), err})
		default:
			return err
		}
	}
	if from.Before(w.newest) {
		return nil
	}
	if m != nil && from == m.Position { // walk compares the LSN
		w.time, w.generation, w.attributes, w.writer = m.Time, m.Generation, m.Attributes, m.Writer
		return nil
	}
	// What this node knows to be stored must be there.
	before := Position{from.Epoch, from.Seq - 1}
	h, err := readHeader(ctx, w.b, w.id, before, -1)
	if errors.Is(err, objectstore.ErrNotFound) {
		// Collected, if a checkpoint has come beyond it meanwhile.
		if err := w.refresh(ctx); err != nil {
			return err
		}
		if w.base.Before(w.newest) {
			return w.start(ctx, from, lsn)
		}
	}
	if errors.Is(err, objectstore.ErrNotFound) || (err == nil && (h.LastLSN != lsn || h.Kind == KindFence)) {
		return w.gapError("object %v with LSN %d, which this node has stored, is not there", before, lsn)
	}
	if err != nil {
		return err
	}
	if err := w.admitHeader(h); err != nil {
		return err
	}
	w.time, w.generation, w.attributes, w.writer = h.Time, h.Generation, h.Attributes, h.Writer
	return nil
}

// load begins anew from the newest checkpoint that is whole, or from the start of the log.
func (w *walker) load(ctx context.Context) error {
	w.private, w.writer, w.loaded = false, Identity{}, nil
	w.feed.forget()
again:
	for {
		all, err := listCheckpoints(ctx, w.b, w.id, Position{})
		if err != nil {
			return err
		}
		if len(all) > 0 && w.newest.Before(all[len(all)-1]) {
			w.newest = all[len(all)-1]
		}
		w.base = w.newest
		for i := len(all) - 1; i >= 0; i-- {
			err := w.loadFrom(ctx, all[i])
			if err == nil {
				return nil
			}
			if errors.Is(err, objectstore.ErrNotFound) {
				// Deleted because newer ones came, or lost.
				if err := w.refresh(ctx); err != nil {
					return err
				}
				if w.base.Before(w.newest) {
					continue again
				}
			} else if !errors.Is(err, objectstore.ErrCorrupt) {
				return err
			}
			if all[i].Epoch >= w.maxEpoch {
				return fmt.Errorf("%w: checkpoint %v", ErrFenced, all[i])
			}
			w.damaged = append(w.damaged, Damage{checkpointKey(w.id, all[i]), err})
		}
		break
	}
	w.pos, w.lsn, w.time = Position{Epoch: 1}, 0, time.Time{}
	if w.replay.Reset != nil {
		return stop(w.replay.Reset(nil))
	}
	return nil
}

// stopError carries an error of the caller's own function past the decisions on errors of the store.
type stopError struct{ err error }

func (e stopError) Error() string { return e.err.Error() }

func stop(err error) error {
	if err == nil {
		return nil
	}
	return stopError{err}
}

// unstop returns the error that the caller's function returned.
func unstop(err error) error {
	if s, ok := err.(stopError); ok {
		return s.err
	}
	return err
}

func (w *walker) loadFrom(ctx context.Context, p Position) error {
	m, err := readManifest(ctx, w.b, w.id, p)
	if err != nil {
		return err
	}
	if err := w.admit(m); err != nil {
		return err
	}
	if w.replay.Reset != nil {
		if err := w.replay.Reset(m); err != nil {
			return stop(err)
		}
	}
	if !w.skipEntries {
		err := ReadCheckpoint(ctx, w.b, m, func(e Entry) error {
			if w.replay.Entry == nil {
				return nil
			}
			return stop(w.replay.Entry(e))
		})
		if err != nil {
			return err
		}
	}
	w.pos, w.lsn, w.time = m.Position, m.LSN, m.Time
	w.generation, w.attributes, w.writer, w.loaded = m.Generation, m.Attributes, m.Writer, m
	return nil
}

// admit stops a writer that a checkpoint shows to be out of date.
func (w *walker) admit(m *Manifest) error {
	if m.Generation > w.maxGeneration {
		return fmt.Errorf("%w: checkpoint %v has generation %d", ErrSuperseded, m.Position, m.Generation)
	}
	if m.Epoch >= w.maxEpoch {
		return fmt.Errorf("%w: checkpoint %v", ErrFenced, m.Position)
	}
	return nil
}

// admitHeader stops a writer that meets a newer lineage. A fence does not count: who
// put it may never have opened an epoch.
func (w *walker) admitHeader(h *Header) error {
	if h.Kind != KindFence && h.Generation > w.maxGeneration {
		return fmt.Errorf("%w: object %v has generation %d", ErrSuperseded, h.Position(), h.Generation)
	}
	return nil
}

// refresh looks for newer checkpoints.
func (w *walker) refresh(ctx context.Context) error {
	newer, err := listCheckpoints(ctx, w.b, w.id, w.newest)
	if err == nil && len(newer) > 0 {
		w.newest = newer[len(newer)-1]
	}
	return err
}

// walk reads on up to the first object of epoch end. At the end of an older
// epoch fence is called to put a fence there; it returns errTaken if something came first. With a nil
// fence, walk returns at the end of the log.
func (w *walker) walk(ctx context.Context, end uint64, fence func(context.Context) (*Header, error)) error {
	if end-w.pos.Epoch > maxEpochJump && w.pos.Epoch < end && fence != nil {
		return invalidf("epoch %d is too far above epoch %d of the log", end, w.pos.Epoch)
	}
	for w.pos.Epoch < end {
		if w.private && w.pos == w.newest && w.atOK && w.lsn != w.at {
			if err := w.gap(ctx, "checkpoint %v has LSN %d", w.newest, w.at); err != nil {
				return err
			}
			continue
		}
		h, err := w.feed.next(ctx, w)
		if err == nil {
			if err := w.take(ctx, h); err != nil {
				return err
			}
			continue
		}
		if !errors.Is(err, objectstore.ErrNotFound) {
			return err
		}
		if w.pos.Before(w.newest) {
			if err := w.gap(ctx, "object %v is missing", w.pos); err != nil {
				return err
			}
			continue
		}
		if lost, err := w.openLost(ctx); err != nil || lost {
			return err
		}
		if fence != nil {
			h, err := fence(ctx)
			switch {
			case err == nil:
				err = w.take(ctx, h)
			case errors.Is(err, errTaken):
				// The listing was older than the object: its key tells the truth.
				w.feed.forget()
				if h, err = readHeader(ctx, w.b, w.id, w.pos, -1); err == nil {
					err = w.take(ctx, h)
				} else if errors.Is(err, objectstore.ErrNotFound) {
					err = nil // collected since
				}
			}
			if err != nil {
				return err
			}
			continue
		}
		if done, err := w.atEnd(ctx); err != nil || done {
			return err
		}
	}
	return nil
}

// openLost returns an error if the epoch's first object is not there and others of
// the epoch are: nothing is put before it is stored, and it is never collected.
func (w *walker) openLost(ctx context.Context) (bool, error) {
	if w.pos.Seq != 0 || len(w.feed.listed) == 0 || w.feed.listed[0].pos.Epoch != w.pos.Epoch {
		return false, nil
	}
	_, err := readHeader(ctx, w.b, w.id, w.pos, -1)
	w.feed.forget()
	if errors.Is(err, objectstore.ErrNotFound) {
		return true, w.gapError("object %v, which opens the epoch, is missing", w.pos)
	}
	return false, err
}

// atEnd decides, without a fence, whether the object at pos was never written.
func (w *walker) atEnd(ctx context.Context) (bool, error) {
	// What comes later is looked for first: it was put after the fence that should be at pos.
	later, err := laterEpoch(ctx, w.b, w.id, w.pos.Epoch)
	if err != nil {
		return false, err
	}
	if err := w.refresh(ctx); err != nil {
		return false, err
	}
	_, err = readHeader(ctx, w.b, w.id, w.pos, -1)
	switch {
	case err == nil:
		w.feed.forget()
		return false, nil
	case !errors.Is(err, objectstore.ErrNotFound):
		return false, err
	case later != 0 || w.pos.Before(w.newest):
		return false, w.gap(ctx, "object %v is missing, epoch %d follows", w.pos, later)
	}
	return true, nil
}

// take accepts the object at pos and moves on.
func (w *walker) take(ctx context.Context, h *Header) error {
	if h.Kind == KindFence {
		return w.takeFence(ctx, h)
	}
	if err := w.admitHeader(h); err != nil {
		return err
	}
	join := h.FirstLSN == w.lsn+1
	switch {
	case (h.Kind == KindOpen) != (w.pos.Seq == 0):
		return corruptf("object %v is of kind %v", w.pos, h.Kind)
	case join && h.Generation < w.generation:
		return corruptf("object %v has generation %d, after %d", w.pos, h.Generation, w.generation)
	case join && w.pos.Seq > 0 && w.writer != (Identity{}) && h.Writer != w.writer:
		return corruptf("object %v is of writer %v, its epoch of %v", w.pos, h.Writer, w.writer)
	case !join:
		return w.gap(ctx, "object %v begins at LSN %d, the log before it ends at %d", w.pos, h.FirstLSN, w.lsn)
	}
	w.writer, w.generation, w.attributes = h.Writer, h.Generation, h.Attributes
	if h.Kind == KindData {
		w.objects++
		if w.replay.Apply != nil {
			if err := w.replay.Apply(h); err != nil {
				return stop(err)
			}
		}
	}
	w.lsn, w.time = h.LastLSN, h.Time
	w.pos.Seq++
	return nil
}

// takeFence goes on in the next epoch, unless a newer checkpoint lies beyond the
// fence: then its number was missing because it had been collected, and the fence means nothing.
func (w *walker) takeFence(ctx context.Context, h *Header) error {
	if err := w.refresh(ctx); err != nil {
		return err
	}
	if w.pos.Before(w.newest) && (w.newest != w.base || w.newest.Epoch == w.pos.Epoch) {
		return w.gap(ctx, "fence at %v, before checkpoint %v", w.pos, w.newest)
	}
	if w.onFence != nil {
		w.onFence(w.pos)
	}
	w.fences++
	w.pos = Position{Epoch: w.pos.Epoch + 1}
	w.writer = Identity{}
	return nil
}

// gap is called where the log does not join: it goes on from a newer checkpoint if there is one ahead, and
// otherwise returns ErrGap.
func (w *walker) gap(ctx context.Context, format string, args ...any) error {
	if err := w.refresh(ctx); err != nil {
		return err
	}
	if w.pos.Before(w.newest) && (w.private || w.base.Before(w.newest)) {
		return w.load(ctx)
	}
	return w.gapError(format, args...)
}

func (w *walker) gapError(format string, args ...any) error {
	return fmt.Errorf("%w: volume %v: %s", ErrGap, w.id, fmt.Sprintf(format, args...))
}

// laterEpoch returns the first epoch above e that has any object, 0 if there is none.
func laterEpoch(ctx context.Context, b objectstore.Bucket, id uuid.UUID, e uint64) (later uint64, err error) {
	err = certain(func() error {
		later, err = laterEpochOnce(ctx, b, id, e)
		return err
	})
	return later, err
}

func laterEpochOnce(ctx context.Context, b objectstore.Bucket, id uuid.UUID, e uint64) (uint64, error) {
	prefix := logPrefix(id)
	after := fmt.Sprintf("%s%016x0", prefix, e) // '0' follows '/'
	for {
		infos, err := b.List(ctx, prefix, after, 1)
		if err != nil {
			return 0, about("list", prefix, err)
		}
		if len(infos) == 0 {
			return 0, nil
		}
		if p, ok := parsePosition(strings.TrimPrefix(infos[0].Key, prefix)); ok {
			return p.Epoch, confirm(ctx, b, infos[0].Key)
		}
		after = infos[0].Key
	}
}

// highestEpoch returns the highest epoch that has an object or a checkpoint.
func (w *walker) highestEpoch(ctx context.Context) (uint64, error) {
	if err := w.refresh(ctx); err != nil {
		return 0, err
	}
	highest := w.newest.Epoch
	for {
		e, err := laterEpoch(ctx, w.b, w.id, highest)
		if err != nil || e == 0 {
			return highest, err
		}
		highest = e
	}
}

// feed hands out headers in the order of the log: it lists keys and fetches some headers ahead.
type feed struct {
	listed  []listedObject
	ended   bool // the last listing reached the end
	valid   bool
	fetched []fetched // of the first of listed
}

type listedObject struct {
	pos  Position
	size int64
}

type fetched struct {
	h   *Header
	err error
}

// forget drops what was listed, so that the next call looks again.
func (f *feed) forget() { *f = feed{} }

// next returns the header of the object at w.pos, or objectstore.ErrNotFound.
func (f *feed) next(ctx context.Context, w *walker) (*Header, error) {
	for {
		for len(f.listed) > 0 && f.listed[0].pos.Before(w.pos) {
			f.pop()
		}
		if len(f.listed) > 0 || (f.valid && f.ended) {
			break
		}
		if err := f.list(ctx, w); err != nil {
			return nil, err
		}
	}
	if len(f.listed) == 0 || f.listed[0].pos != w.pos {
		return nil, objectstore.ErrNotFound
	}
	if len(f.fetched) == 0 {
		f.fetch(ctx, w)
	}
	got := f.fetched[0]
	f.pop()
	if errors.Is(got.err, objectstore.ErrNotFound) {
		f.forget()
	}
	return got.h, got.err
}

func (f *feed) pop() {
	f.listed = f.listed[1:]
	if len(f.fetched) > 0 {
		f.fetched = f.fetched[1:]
	}
}

func (f *feed) list(ctx context.Context, w *walker) error {
	prefix := logPrefix(w.id)
	after := justBefore(w.id, w.pos)
	for {
		infos, err := w.b.List(ctx, prefix, after, listMax)
		if err != nil {
			return about("list", prefix, err)
		}
		for _, info := range infos {
			after = info.Key
			if p, ok := parsePosition(strings.TrimPrefix(info.Key, prefix)); ok && !p.Before(w.pos) {
				f.listed = append(f.listed, listedObject{p, info.Size})
			}
		}
		f.valid, f.ended = true, len(infos) < listMax
		if f.ended || len(f.listed) > 0 {
			return nil
		}
	}
}

// fetch reads the headers of the first objects listed, in parallel.
func (f *feed) fetch(ctx context.Context, w *walker) {
	f.fetched = make([]fetched, min(len(f.listed), fetchWindow))
	var wg sync.WaitGroup
	for i := range f.fetched {
		wg.Go(func() {
			o := f.listed[i]
			h, err := readHeader(ctx, w.b, w.id, o.pos, o.size)
			f.fetched[i] = fetched{h, err}
		})
	}
	wg.Wait()
}

// ReadHeader reads and checks the header of the log object at p. A missing object is
// objectstore.ErrNotFound.
func ReadHeader(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position) (*Header, error) {
	return readHeader(ctx, b, id, p, -1)
}

// readHeader also compares the object's size with the header's unless size is negative.
func readHeader(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position, size int64) (h *Header, err error) {
	err = certain(func() error {
		h, err = readHeaderOnce(ctx, b, id, p, size)
		return err
	})
	return h, err
}

func readHeaderOnce(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position, size int64) (*Header, error) {
	key := LogKey(id, p)
	guess := int64(headerGuess)
	if size >= 0 {
		guess = min(guess, max(size, 1))
	}
	buf := make([]byte, guess)
	got, err := b.GetRange(ctx, key, 0, buf)
	if err != nil {
		return nil, about("read", key, err)
	}
	h, err := DecodeHeader(buf[:got])
	if short, ok := err.(ErrShort); ok && got == len(buf) && short.Need > got {
		buf = append(make([]byte, 0, short.Need), buf...)[:short.Need]
		more, rerr := b.GetRange(ctx, key, int64(got), buf[got:])
		if rerr != nil {
			return nil, about("read", key, rerr)
		}
		h, err = DecodeHeader(buf[:got+more])
	}
	if short, ok := err.(ErrShort); ok {
		return nil, corruptf("%s ends inside of its header of %d bytes", key, short.Need)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if h.Volume != id || h.Position() != p {
		return nil, corruptf("%s holds object %v of volume %v", key, h.Position(), h.Volume)
	}
	if size >= 0 && size != h.ObjectBytes() {
		return nil, corruptf("%s has %d bytes instead of %d", key, size, h.ObjectBytes())
	}
	return h, nil
}
