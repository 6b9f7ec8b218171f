package volumelog

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// Want is what a new owner brings to Attach.
type Want struct {
	Epoch      uint64 // from 1, never used before by anybody the caller knows of
	Generation uint64 // from 1
	// Writer is made by NewIdentity for this epoch. If Attach fails with a transient error the
	// caller calls it again with the same Want; after success never again.
	Writer     Identity
	Attributes Attributes

	// From is the caller's place in the log: it has all objects before it, up to LSN FromLSN, in
	// its own state, and knows that they are stored: what Stored or State.Position said. Zero: it has nothing.
	From    Position
	FromLSN uint64

	// Holds is the highest LSN that the caller has, in its journal or from the bucket. If the
	// bucket holds more, Attach returns ErrAhead and does not open the epoch.
	Holds uint64
}

// State is what the bucket holds at the moment the epoch was opened.
type State struct {
	Epoch      uint64
	Generation uint64
	Position   Position  // of the next object to put
	LSN        uint64    // the object watermark
	Time       time.Time // of LSN
	Attributes Attributes
	Objects    int // data objects whose headers were read
	Fences     int // epochs that are closed, as far as read
	// Checkpoint is the one that the state was built from, nil if none was loaded.
	Checkpoint *Manifest
	// Damaged lists checkpoints that could not be used; the log replaced them.
	Damaged []Damage
}

// Attach makes the caller the writer of the volume's log in epoch want.Epoch. It closes every
// older epoch, oldest first, hands what the caller lacks to replay, and opens the
// epoch. When it returns, nothing that an older owner puts can come into the log.
//
// It returns ErrFenced if a newer owner was there before, ErrEpochTaken if
// another writer has opened the epoch, ErrSuperseded if the volume goes on in a newer generation, ErrAhead,
// an error that Is objectstore.ErrCorrupt if the log is damaged, or the store's error.
func Attach(ctx context.Context, b objectstore.Bucket, id uuid.UUID, want Want, replay Replay) (*Writer, State, error) {
	if want.From == (Position{Epoch: 1}) {
		want.From = Position{}
	}
	switch {
	case id == uuid.Nil || want.Epoch == 0 || want.Epoch >= math.MaxUint64-1 || want.Generation == 0:
		return nil, State{}, invalidf("volume %v, epoch %d, generation %d", id, want.Epoch, want.Generation)
	case want.Writer.Nonce == uuid.Nil:
		return nil, State{}, invalidf("no writer identity")
	case want.From.Epoch >= want.Epoch || (!want.From.IsZero() && want.From.Seq == 0) || want.FromLSN > want.Holds || (want.From.IsZero() && want.FromLSN != 0):
		return nil, State{}, invalidf("epoch %d from %v with LSN %d of %d", want.Epoch, want.From, want.FromLSN, want.Holds)
	}
	if err := want.Attributes.Validate(); err != nil {
		return nil, State{}, err
	}
	w := &walker{b: &steady{Bucket: b}, id: id, replay: replay, maxEpoch: want.Epoch, maxGeneration: want.Generation}
	if err := w.start(ctx, want.From, want.FromLSN); err != nil {
		return nil, State{}, unstop(err)
	}
	if err := w.walk(ctx, want.Epoch, w.fencer(want.Writer, want.Generation, want.Attributes)); err != nil {
		return nil, State{}, unstop(err)
	}
	if w.lsn < want.FromLSN {
		return nil, State{}, w.gapError("it ends at LSN %d, this node has stored up to %d", w.lsn, want.FromLSN)
	}
	if w.lsn > want.Holds {
		return nil, State{}, fmt.Errorf("%w: the bucket holds LSN %d, this node %d", ErrAhead, w.lsn, want.Holds)
	}
	return w.open(ctx, b, want.Epoch, want.Generation, want.Writer, want.Attributes)
}

// Restore takes the volume over from its bucket alone: it reads all that the
// bucket holds into replay, chooses an epoch above all that are there and the next multiple of LineageStride as generation, and opens it.
// ErrNoVolume: the bucket holds nothing of it. ErrFenced: another owner checkpoints
// meanwhile; a new call takes it over again. Other errors are those of Attach.
func Restore(ctx context.Context, b objectstore.Bucket, id uuid.UUID, writer Identity, replay Replay) (*Writer, State, error) {
	if id == uuid.Nil || writer.Nonce == uuid.Nil {
		return nil, State{}, invalidf("no volume or no writer identity")
	}
	w := &walker{b: &steady{Bucket: b}, id: id, replay: replay, maxGeneration: math.MaxUint64 - 1}
	highest, err := w.highestEpoch(ctx)
	if err != nil {
		return nil, State{}, err
	}
	if highest == 0 {
		return nil, State{}, fmt.Errorf("%w: %v", ErrNoVolume, id)
	}
	if highest >= math.MaxUint64-2 {
		return nil, State{}, corruptf("epoch %d in the bucket for volume %v", highest, id)
	}
	w.newest = Position{}
	w.maxEpoch = highest + 1
	if err := w.start(ctx, Position{}, 0); err != nil {
		return nil, State{}, unstop(err)
	}
	for {
		if err := w.walk(ctx, w.maxEpoch, w.fencer(writer, 0, Attributes{})); err != nil {
			return nil, State{}, unstop(err)
		}
		if w.attributes == (Attributes{}) {
			return nil, State{}, fmt.Errorf("%w: %v has fences only", ErrNoVolume, id)
		}
		generation, err := nextLineage(w.generation)
		if err != nil {
			return nil, State{}, err
		}
		wr, state, err := w.open(ctx, b, w.maxEpoch, generation, writer, w.attributes)
		if !errors.Is(err, ErrEpochTaken) && !errors.Is(err, ErrFenced) && !errors.Is(err, ErrSuperseded) {
			return wr, state, err
		}
		// Taken: close that one too and take the next.
		w.feed.forget()
		w.maxEpoch++
	}
}

// LineageStride is the distance of the generations that Restore takes. An owner that cannot reach the bucket may have raised its generation
// by one at each loss, unseen; it meets a higher one all the same when it comes back.
const LineageStride = 1 << 16

// nextLineage returns the generation of a restore from what is of an older one.
func nextLineage(generation uint64) (uint64, error) {
	if generation >= math.MaxUint64-2*LineageStride {
		return 0, corruptf("generation %d in the bucket", generation)
	}
	return (generation/LineageStride + 1) * LineageStride, nil
}

// fencer returns a function that puts a fence at the walker's position. Generation 0 means that of a restore.
func (w *walker) fencer(by Identity, generation uint64, attributes Attributes) func(context.Context) (*Header, error) {
	return func(ctx context.Context) (*Header, error) {
		generation := generation
		if generation == 0 {
			var err error
			if generation, err = nextLineage(w.generation); err != nil {
				return nil, err
			}
		}
		if w.attributes != (Attributes{}) {
			attributes = w.attributes
		}
		h := &Header{
			Kind: KindFence, Volume: w.id, Epoch: w.pos.Epoch, Seq: w.pos.Seq, Generation: generation, Writer: by,
			FirstLSN: w.lsn + 1, LastLSN: w.lsn, Time: w.time, Attributes: attributes,
		}
		body, err := encodeMark(h)
		if err != nil {
			return nil, err
		}
		if err := putOnce(ctx, w.b, LogKey(w.id, w.pos), body); err != nil {
			return nil, fmt.Errorf("volumelog: put fence %v: %w", w.pos, err)
		}
		return h, nil
	}
}

// open puts the object that opens the epoch, alone. The writer puts to b.
func (w *walker) open(ctx context.Context, b objectstore.Bucket, epoch, generation uint64, by Identity, attributes Attributes) (*Writer, State, error) {
	at := Position{Epoch: epoch}
	// A volume only grows: the caller may not have known yet what the log says.
	attributes.SizeBytes = max(attributes.SizeBytes, w.attributes.SizeBytes)
	h := &Header{
		Kind: KindOpen, Volume: w.id, Epoch: epoch, Generation: generation, Writer: by,
		FirstLSN: w.lsn + 1, LastLSN: w.lsn, Time: w.time, Attributes: attributes,
	}
	body, err := encodeMark(h)
	if err != nil {
		return nil, State{}, err
	}
	if err := putOnce(ctx, w.b, LogKey(w.id, at), body); err != nil {
		if errors.Is(err, errTaken) {
			h, err = w.whoOpened(ctx, h)
		}
		if err != nil {
			return nil, State{}, fmt.Errorf("volumelog: open epoch %d: %w", epoch, err)
		}
	}
	state := State{
		Epoch: epoch, Generation: generation, Position: Position{epoch, 1}, LSN: w.lsn, Time: w.time,
		Attributes: w.attributes, Objects: w.objects, Fences: w.fences, Checkpoint: w.loaded, Damaged: w.damaged,
	}
	if state.Attributes == (Attributes{}) {
		state.Attributes = attributes
	}
	return newWriter(b, w.id, h), state, nil
}

// whoOpened says why the epoch's first key is taken, or that it was taken by an earlier
// attempt of ours.
func (w *walker) whoOpened(ctx context.Context, mine *Header) (*Header, error) {
	at := mine.Position()
	h, err := readHeader(ctx, w.b, w.id, at, -1)
	switch {
	case err != nil:
		return nil, err
	case h.Kind == KindFence:
		return nil, fmt.Errorf("%w: fence at %v by %v", ErrFenced, at, h.Writer)
	case h.Writer == mine.Writer && h.Generation == mine.Generation && h.LastLSN == mine.LastLSN:
		return h, nil
	case h.Generation > mine.Generation:
		return nil, fmt.Errorf("%w: object %v has generation %d", ErrSuperseded, at, h.Generation)
	}
	return nil, fmt.Errorf("%w: %v by %v", ErrEpochTaken, at, h.Writer)
}
