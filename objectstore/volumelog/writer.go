package volumelog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// Writer puts the objects of one epoch that it has opened. Safe for concurrent use.
type Writer struct {
	b          objectstore.Bucket
	id         uuid.UUID
	epoch      uint64
	generation uint64
	writer     Identity

	mu         sync.Mutex // guards the rest
	attributes Attributes
	final      error // ErrFenced or ErrConflict: nothing is put any more
	next       uint64
	lsn        uint64 // all objects before next are stored and end at lsn
	time       time.Time
	sent       map[uint64]*sentObject // from next on
}

type sentObject struct {
	first, last uint64 // LSN
	time        time.Time
	crc         uint32 // of the header, and so of the object
	stored      bool
}

func newWriter(b objectstore.Bucket, id uuid.UUID, open *Header) *Writer {
	return &Writer{
		b: b, id: id, epoch: open.Epoch, generation: open.Generation, writer: open.Writer, attributes: open.Attributes,
		next: 1, lsn: open.LastLSN, time: open.Time, sent: make(map[uint64]*sentObject),
	}
}

// Epoch returns the epoch that the writer has opened.
func (w *Writer) Epoch() uint64 { return w.epoch }

// Generation returns the generation of the epoch.
func (w *Writer) Generation() uint64 { return w.generation }

// Attributes returns what headers and checkpoints say of the volume from now on.
func (w *Writer) Attributes() Attributes {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attributes
}

// SetAttributes changes what headers and checkpoints say of the volume from now on. The
// bucket learns of it with the next object; one without writes will do (FirstLSN is LastLSN+1).
func (w *Writer) SetAttributes(a Attributes) error {
	if err := a.Validate(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attributes = a
	return nil
}

// Header returns the header of data object seq, complete but for FirstLSN, LastLSN,
// Time and what Builder.Finish sets.
func (w *Writer) Header(seq uint64) Header {
	return Header{
		Kind: KindData, Volume: w.id, Epoch: w.epoch, Seq: seq, Generation: w.generation, Writer: w.writer, Attributes: w.Attributes(),
	}
}

// Stored returns the position before which every object is known to be stored, and the LSN and
// time that the bucket has thereby reached: the object watermark. It never goes back.
func (w *Writer) Stored() (Position, uint64, time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return Position{w.epoch, w.next}, w.lsn, w.time
}

// Err returns the error that has ended the writer, nil as long as it may put.
func (w *Writer) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.final
}

// fail ends the writer; the first reason stays.
func (w *Writer) fail(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.final == nil {
		w.final = err
	}
	return w.final
}

// Put stores data object seq, which Builder.Finish returned, and returns nil once it is
// known to be in the bucket. That is no more than its part: the object watermark is Stored, which waits for all objects
// before. Several may be under way; sequence numbers are used from 1 on without a
// gap, LSNs join.
//
// ErrFenced and ErrConflict are final: the writer has ended, and so do all later calls. After any other error
// the object may be stored or not: the caller puts the same bytes under the same seq again. object is not kept.
func (w *Writer) Put(ctx context.Context, seq uint64, object []byte) error {
	crc, err := w.register(seq, object)
	if err != nil {
		return err
	}
	key := LogKey(w.id, Position{w.epoch, seq})
	err = putOnce(ctx, w.b, key, object)
	switch {
	case errors.Is(err, errTaken):
		if err := w.taken(ctx, seq, object); err != nil {
			return err
		}
	case err != nil:
		return about("put", key, err)
	}
	w.confirm(seq, crc)
	return nil
}

// register checks that the object is the one that belongs at seq before it is sent.
func (w *Writer) register(seq uint64, object []byte) (crc uint32, err error) {
	head, err := unseal(object, magicLog, MaxHeader)
	if err != nil {
		return 0, invalidf("object %d: %v", seq, err)
	}
	h, _, err := decodeFixed(head)
	if err != nil {
		return 0, invalidf("object %d: %v", seq, err)
	}
	if h.Kind != KindData || h.Volume != w.id || h.Position() != (Position{w.epoch, seq}) || h.Writer != w.writer ||
		h.Generation != w.generation || seq == 0 || int64(len(object)) != h.ObjectBytes() {
		return 0, invalidf("object %d is not a data object of this writer", seq)
	}
	s := &sentObject{first: h.FirstLSN, last: h.LastLSN, time: h.Time, crc: le.Uint32(head[16:])}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.final != nil {
		return 0, w.final
	}
	if seq < w.next {
		return s.crc, nil // stored already
	}
	conflict := func(format string, args ...any) (uint32, error) {
		w.final = fmt.Errorf("%w: object %d: %s", ErrConflict, seq, fmt.Sprintf(format, args...))
		return 0, w.final
	}
	if old := w.sent[seq]; old != nil {
		if old.crc != s.crc {
			return conflict("not the object that was sent before")
		}
		return s.crc, nil
	}
	before := w.lsn
	if seq > w.next {
		before = s.first - 1
		if p := w.sent[seq-1]; p != nil {
			before = p.last
		}
	}
	if s.first != before+1 {
		return conflict("begins at LSN %d, the one before ends at %d", s.first, before)
	}
	if n := w.sent[seq+1]; n != nil && n.first != s.last+1 {
		return conflict("ends at LSN %d, the one behind begins at %d", s.last, n.first)
	}
	w.sent[seq] = s
	return s.crc, nil
}

// confirm notes that seq is stored and moves the watermark over what is stored without a gap.
func (w *Writer) confirm(seq uint64, crc uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.sent[seq]; s != nil && s.crc == crc {
		s.stored = true
	}
	for s := w.sent[w.next]; s != nil && s.stored; s = w.sent[w.next] {
		w.lsn, w.time = s.last, s.time
		delete(w.sent, w.next)
		w.next++
	}
}

// taken decides what it means that the key of seq seems to hold another object than the one that was put. It returns nil if it
// is ours after all: what was read back first had changed on its way.
func (w *Writer) taken(ctx context.Context, seq uint64, object []byte) error {
	p := Position{w.epoch, seq}
	h, err := readHeader(ctx, w.b, w.id, p, -1)
	switch {
	case errors.Is(err, objectstore.ErrCorrupt):
		return err
	case err != nil:
		return fmt.Errorf("%w: object %v is taken, and reading it back: %w", objectstore.ErrUnknown, p, err)
	case h.Kind == KindFence || h.Writer != w.writer:
		return w.fail(fmt.Errorf("%w: %v object at %v by %v", ErrFenced, h.Kind, p, h.Writer))
	}
	if mine, err := DecodeHeader(object); err == nil && h.FirstLSN == mine.FirstLSN && h.LastLSN == mine.LastLSN &&
		h.FramesCRC == mine.FramesCRC && slices.Equal(h.Extents, mine.Extents) {
		return nil
	}
	return w.fail(fmt.Errorf("%w: object %v is there with other content", ErrConflict, p))
}

// checkCheckpoint refuses a checkpoint that the log does not bear out.
func (w *Writer) checkCheckpoint(c Checkpoint) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.final != nil:
		return w.final
	case c.Position.Epoch != w.epoch || c.Position.Seq == 0 || c.Position.Seq > w.next:
		return invalidf("checkpoint at %v, stored is up to %v", c.Position, Position{w.epoch, w.next})
	case c.LSN > w.lsn || (c.Position.Seq == w.next && c.LSN != w.lsn):
		return invalidf("checkpoint at %v with LSN %d, stored is up to %d", c.Position, c.LSN, w.lsn)
	}
	return nil
}
