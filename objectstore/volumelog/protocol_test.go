package volumelog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// The tests of this file take the counterexamples of the protocol's model, and the failures
// of the store, one at a time. A volume of the tests holds one sector per LSN, at offset LSN*512, stamped
// with LSN and a tag.

var ctx = context.Background()

var testAttributes = Attributes{Name: "vol", SizeBytes: 1 << 30, BlockSize: 512}

func stamp(lsn uint64, tag string) []byte {
	b := make([]byte, sector)
	copy(b, fmt.Sprintf("%d %s", lsn, tag))
	return b
}

// image is what a caller builds from a replay: the tag per LSN, and where its data is.
type image struct {
	t       testing.TB
	b       objectstore.Bucket
	id      uuid.UUID
	entries map[uint64]Entry
	lsn     uint64
	resets  int
	applied []Position
}

func newImage(t testing.TB, b objectstore.Bucket, id uuid.UUID) *image {
	return &image{t: t, b: b, id: id, entries: make(map[uint64]Entry)}
}

func (m *image) replay() Replay {
	return Replay{
		Reset: func(c *Manifest) error {
			m.resets++
			m.applied = nil
			clear(m.entries)
			m.lsn = 0
			if c != nil {
				m.lsn = c.LSN
			}
			return nil
		},
		Entry: func(e Entry) error {
			m.entries[e.Offset/sector] = e
			return nil
		},
		Apply: func(h *Header) error {
			m.applied = append(m.applied, h.Position())
			for _, e := range h.Extents {
				m.entries[e.Offset/sector] = Entry{Kind: e.Kind, LSN: e.LSN, Offset: e.Offset, Length: e.Length, Location: h.Location(e)}
			}
			m.lsn = h.LastLSN
			return nil
		},
	}
}

// tags reads every record from the bucket and returns the tags in order of LSN; it fails on a gap.
func (m *image) tags() string {
	m.t.Helper()
	var all []string
	for lsn := uint64(1); lsn <= m.lsn; lsn++ {
		e, ok := m.entries[lsn]
		if !ok {
			m.t.Fatalf("LSN %d of %d is missing", lsn, m.lsn)
		}
		first, off := e.Location.Frame()
		data, err := ReadFrames(ctx, m.b, m.id, e.Location, first, 1, make([]byte, FrameBytes))
		if err != nil {
			m.t.Fatal(err)
		}
		var got uint64
		var tag string
		if _, err := fmt.Sscanf(string(bytes.TrimRight(data[off:off+sector], "\x00")), "%d %s", &got, &tag); err != nil || got != lsn {
			m.t.Fatalf("LSN %d holds %q", lsn, data[off:off+8])
		}
		all = append(all, tag)
	}
	if uint64(len(m.entries)) != m.lsn {
		m.t.Fatalf("%d entries, LSN %d", len(m.entries), m.lsn)
	}
	return strings.Join(all, "")
}

func (m *image) sorted() func(yield func(Entry, error) bool) {
	return func(yield func(Entry, error) bool) {
		lsns := make([]uint64, 0, len(m.entries))
		for l := range m.entries {
			lsns = append(lsns, l)
		}
		slices.Sort(lsns)
		for _, l := range lsns {
			if !yield(m.entries[l], nil) {
				return
			}
		}
	}
}

// owner is a writer with its image, which a real caller updates as objects are stored.
type owner struct {
	*Writer
	img *image
	tag string
}

func want(epoch, generation, holds uint64) Want {
	return Want{Epoch: epoch, Generation: generation, Writer: NewIdentity(uuid.New()), Attributes: testAttributes, Holds: holds}
}

func attach(t testing.TB, b objectstore.Bucket, id uuid.UUID, w Want, tag string) (*owner, State) {
	t.Helper()
	img := newImage(t, b, id)
	wr, state, err := Attach(ctx, b, id, w, img.replay())
	if err != nil {
		t.Fatalf("attach epoch %d: %v", w.Epoch, err)
	}
	return &owner{wr, img, tag}, state
}

func restore(t testing.TB, b objectstore.Bucket, id uuid.UUID, tag string) (*owner, State) {
	t.Helper()
	img := newImage(t, b, id)
	wr, state, err := Restore(ctx, b, id, NewIdentity(uuid.New()), img.replay())
	if err != nil {
		t.Fatalf("restore: %v", err)
	}
	return &owner{wr, img, tag}, state
}

// object builds object seq with the writes first to last.
func (o *owner) object(seq, first, last uint64) (*Header, []byte) {
	o.img.t.Helper()
	var b Builder
	n := int(last - first + 1)
	if err := b.Reset(n, n*sector); err != nil {
		o.img.t.Fatal(err)
	}
	for lsn := first; lsn <= last; lsn++ {
		if err := b.AppendData(lsn, lsn*sector, stamp(lsn, o.tag)); err != nil {
			o.img.t.Fatal(err)
		}
	}
	h := o.Header(seq)
	h.FirstLSN, h.LastLSN, h.Time = first, last, time.Unix(int64(last), 0).UTC()
	body, err := b.Finish(&h)
	if err != nil {
		o.img.t.Fatal(err)
	}
	return &h, body
}

func (o *owner) put(seq, first, last uint64) error {
	o.img.t.Helper()
	h, body := o.object(seq, first, last)
	err := o.Put(ctx, seq, body)
	if err == nil {
		_ = o.img.replay().Apply(h)
	}
	return err
}

// puts stores n objects with one write each, beginning where the writer stands.
func (o *owner) puts(n int) {
	o.img.t.Helper()
	for range n {
		p, lsn, _ := o.Stored()
		if err := o.put(p.Seq, lsn+1, lsn+1); err != nil {
			o.img.t.Fatal(err)
		}
	}
}

func (o *owner) checkpoint() *Manifest {
	o.img.t.Helper()
	p, lsn, at := o.Stored()
	m, err := o.WriteCheckpoint(ctx, Checkpoint{p, lsn, at}, o.img.sorted())
	if err != nil {
		o.img.t.Fatal(err)
	}
	return m
}

// collected is a bucket whose log before a checkpoint may be collected. A real collector moves live data
// first; here the object goes and its frames are still served, so that the image can be compared.
type collected struct {
	*memBucket
	gone map[string][]byte
}

// collect removes the data objects before the position; fences and open objects stay.
func (c *collected) collect(id uuid.UUID, before Position) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, body := range c.objs {
		p, ok := parsePosition(strings.TrimPrefix(k, logPrefix(id)))
		if !ok || !p.Before(before) {
			continue
		}
		if h, err := DecodeHeader(body); err != nil || h.Kind != KindData {
			continue
		}
		c.gone[k] = body
		delete(c.objs, k)
	}
}

func (c *collected) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if off > 0 {
		c.mu.Lock()
		body, ok := c.gone[key]
		c.mu.Unlock()
		if ok {
			return copy(into, body[off:]), nil
		}
	}
	return c.memBucket.GetRange(ctx, key, off, into)
}

func newCollected() *collected { return &collected{newMemBucket(), make(map[string][]byte)} }

func wantErr(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("got %v, want %v", err, target)
	}
}

func wantTags(t testing.TB, o *owner, tags string) {
	t.Helper()
	if got := o.img.tags(); got != tags {
		t.Fatalf("the bucket holds %q, want %q", got, tags)
	}
}

func TestNewOwnerContinues(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, state := attach(t, b, id, want(1, 1, 0), "a")
	if state.LSN != 0 || state.Position != (Position{1, 1}) || state.Attributes != testAttributes {
		t.Fatalf("%+v", state)
	}
	if keys := b.keys(""); len(keys) != 1 || keys[0] != LogKey(id, Position{1, 0}) {
		t.Fatalf("opening put %v", keys)
	}
	a.puts(3)
	c, state := attach(t, b, id, want(2, 1, 3), "c")
	if state.LSN != 3 || state.Time != time.Unix(3, 0).UTC() || state.Objects != 3 || state.Fences != 1 {
		t.Fatalf("%+v", state)
	}
	c.puts(2)
	d, state := restore(t, b, id, "d")
	if state.LSN != 5 || state.Epoch != 3 || state.Generation != LineageStride || state.Attributes != testAttributes {
		t.Fatalf("%+v", state)
	}
	wantTags(t, d, "aaacc")
}

// Without a fence the old owner's put lands, and the write is there twice.
func TestFenceStopsOldOwner(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	attach(t, b, id, want(2, 1, 3), "c")
	puts := b.count("put")
	wantErr(t, a.put(4, 4, 4), ErrFenced)
	wantErr(t, a.Err(), ErrFenced)
	wantErr(t, a.put(4, 4, 4), ErrFenced)
	_, err := a.WriteCheckpoint(ctx, Checkpoint{Position{1, 4}, 3, time.Time{}}, a.img.sorted())
	wantErr(t, err, ErrFenced)
	if b.count("put") != puts+1 {
		t.Fatal("a fenced writer goes on putting")
	}
}

// What lies beyond a fence is garbage, whenever it arrives.
func TestPutBeyondFenceIsGarbage(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	_, four := a.object(4, 4, 4)
	_, five := a.object(5, 5, 5)
	_, six := a.object(6, 6, 6)
	if err := a.Put(ctx, 5, five); err != nil {
		t.Fatal(err)
	}
	c, state := attach(t, b, id, want(2, 1, 4), "c")
	if state.LSN != 3 {
		t.Fatalf("LSN %d", state.LSN)
	}
	c.puts(1)
	if err := b.put(LogKey(id, Position{1, 6}), six); err != nil {
		t.Fatal(err)
	}
	wantErr(t, a.Put(ctx, 4, four), ErrFenced)
	if p, lsn, _ := a.Stored(); p.Seq != 4 || lsn != 3 {
		t.Fatalf("stored %v, LSN %d", p, lsn)
	}
	info, err := Inspect(ctx, b, id, true)
	if err != nil || info.Err != nil || info.Unreachable != 2 || info.LSN != 4 || len(info.Damaged) != 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	d, _ := restore(t, b, id, "d")
	wantTags(t, d, "aaac")
}

// The watermark waits for every object before.
func TestWatermarkInOrder(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	b.hook = func(op, key string) error {
		if key == LogKey(id, Position{1, 1}) {
			return objectstore.ErrUnknown
		}
		return nil
	}
	wantErr(t, a.put(1, 1, 1), objectstore.ErrUnknown)
	b.hook = nil
	for _, seq := range []uint64{3, 2} {
		if err := a.put(seq, seq, seq); err != nil {
			t.Fatal(err)
		}
		if p, lsn, _ := a.Stored(); p != (Position{1, 1}) || lsn != 0 {
			t.Fatalf("stored %v, LSN %d", p, lsn)
		}
		_, err := a.WriteCheckpoint(ctx, Checkpoint{Position{1, seq + 1}, seq, time.Time{}}, a.img.sorted())
		wantErr(t, err, ErrInvalid)
	}
	if err := a.put(1, 1, 1); err != nil {
		t.Fatal(err)
	}
	if p, lsn, at := a.Stored(); p != (Position{1, 4}) || lsn != 3 || at != time.Unix(3, 0).UTC() {
		t.Fatalf("stored %v, LSN %d, %v", p, lsn, at)
	}
}

// Every epoch has its own keys: an old owner's put never lands among the new one's.
func TestKeysCarryTheEpoch(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	_, one := a.object(1, 1, 1)
	_, two := a.object(2, 2, 2)
	attach(t, b, id, want(2, 1, 2), "c")
	wantErr(t, b.put(LogKey(id, Position{1, 1}), one), objectstore.ErrExists)
	if err := b.put(LogKey(id, Position{1, 2}), two); err != nil {
		t.Fatal(err)
	}
	d, _ := attach(t, b, id, want(3, 1, 2), "d")
	wantTags(t, d, "")
}

// A fence put into a gap that collection left means nothing: the newest checkpoint is looked at again.
func TestFenceIsCheckedAgainstNewestCheckpoint(t *testing.T) {
	for _, how := range []string{"attach", "attach from own position", "restore", "inspect"} {
		t.Run(how, func(t *testing.T) {
			b, id := newCollected(), uuid.New()
			a, _ := attach(t, b, id, want(1, 1, 0), "a")
			a.puts(3)
			a.checkpoint()
			p, _, _ := a.Stored()
			a.puts(4)
			moved := false
			b.hook = func(op, key string) error {
				// The reader has seen the old checkpoint; then a newer one comes and the log before it goes.
				if op == "list" && key == logPrefix(id) && !moved {
					moved = true
					m := a.checkpoint()
					b.collect(id, m.Position)
					a.puts(1)
				}
				return nil
			}
			switch how {
			case "attach":
				c, state := attach(t, b, id, want(2, 1, 8), "c")
				if state.LSN != 8 {
					t.Fatalf("LSN %d", state.LSN)
				}
				wantTags(t, c, "aaaaaaaa")
			case "attach from own position":
				w := want(2, 1, 8)
				w.From, w.FromLSN = p, 3
				c, state := attach(t, b, id, w, "c")
				if state.LSN != 8 {
					t.Fatalf("LSN %d", state.LSN)
				}
				wantTags(t, c, "aaaaaaaa")
			case "restore":
				// The restore's first list is for the epoch; the trigger there is too early to hurt.
				moved = true
				n := 0
				inner := b.hook
				b.hook = func(op, key string) error {
					if op == "list" && key == logPrefix(id) {
						if n++; n == 2 {
							moved = false
						}
					}
					return inner(op, key)
				}
				c, state := restore(t, b, id, "c")
				if state.LSN != 8 || n < 2 {
					t.Fatalf("LSN %d, %d lists", state.LSN, n)
				}
				wantTags(t, c, "aaaaaaaa")
			case "inspect":
				info, err := Inspect(ctx, b, id, false)
				if err != nil || info.Err != nil || info.LSN != 8 {
					t.Fatalf("%+v, %v", info, err)
				}
			}
			if !moved {
				t.Fatal("the checkpoint did not move")
			}
		})
	}
}

// An owner that died before it closed anything leaves nothing open behind the next one.
func TestEveryOlderEpochIsFenced(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	died := errors.New("died")
	b.hook = func(op, key string) error {
		if op == "put" {
			return died
		}
		return nil
	}
	two := want(2, 1, 2)
	_, _, err := Attach(ctx, b, id, two, Replay{})
	wantErr(t, err, died)
	b.hook = nil
	c, state := attach(t, b, id, want(3, 1, 2), "c")
	if state.Fences != 2 {
		t.Fatalf("%d fences", state.Fences)
	}
	wantErr(t, a.put(3, 3, 3), ErrFenced)
	_, _, err = Attach(ctx, b, id, two, Replay{})
	wantErr(t, err, ErrFenced)
	c.puts(1)
	d, _ := restore(t, b, id, "d")
	wantTags(t, d, "aac")
}

// A restore elsewhere and a takeover choose the same epoch: one object decides.
func TestEpochIsOpenedOnce(t *testing.T) {
	race := func(t *testing.T, first func(b *memBucket, id uuid.UUID)) (*memBucket, uuid.UUID, func(op, key string) error) {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(2)
		done := false
		return b, id, func(op, key string) error {
			if op == "put" && key == LogKey(id, Position{2, 0}) && !done {
				done = true
				first(b, id)
			}
			return nil
		}
	}
	t.Run("takeover first", func(t *testing.T) {
		var c *owner
		b, id, hook := race(t, func(b *memBucket, id uuid.UUID) {
			c, _ = attach(t, b, id, want(2, 1, 2), "c")
			c.puts(1)
		})
		b.hook = hook
		d, state := restore(t, b, id, "d")
		if state.Epoch != 3 || state.Generation != LineageStride || state.LSN != 3 {
			t.Fatalf("%+v", state)
		}
		wantTags(t, d, "aac")
		wantErr(t, c.put(2, 4, 4), ErrFenced)
	})
	t.Run("restore first", func(t *testing.T) {
		b, id, hook := race(t, func(b *memBucket, id uuid.UUID) { restore(t, b, id, "d") })
		b.hook = hook
		_, _, err := Attach(ctx, b, id, want(2, 1, 2), Replay{})
		wantErr(t, err, ErrSuperseded)
	})
	t.Run("same generation", func(t *testing.T) {
		b, id, hook := race(t, func(b *memBucket, id uuid.UUID) { attach(t, b, id, want(2, 1, 2), "c") })
		b.hook = hook
		_, _, err := Attach(ctx, b, id, want(2, 1, 2), Replay{})
		wantErr(t, err, ErrEpochTaken)
	})
	t.Run("two restores", func(t *testing.T) {
		var c *owner
		b, id, hook := race(t, func(b *memBucket, id uuid.UUID) {
			c, _ = restore(t, b, id, "c")
			c.puts(1)
		})
		b.hook = hook
		d, state := restore(t, b, id, "d")
		if state.Epoch != 3 || state.Generation != 2*LineageStride || state.LSN != 3 || c.Generation() != LineageStride {
			t.Fatalf("%+v", state)
		}
		wantTags(t, d, "aac")
		wantErr(t, c.put(2, 4, 4), ErrFenced)
		_, _, err := Attach(ctx, b, id, want(4, LineageStride+7, 9), Replay{})
		wantErr(t, err, ErrSuperseded)
	})
	t.Run("restore from an open object alone", func(t *testing.T) {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(7, 1, 0), "a")
		_, state := restore(t, b, id, "d")
		if state.Epoch != 8 || state.Attributes != testAttributes {
			t.Fatalf("%+v", state)
		}
		wantErr(t, a.put(1, 1, 1), ErrFenced)
	})
}

// An owner of the lineage that was given up stops, and does not fence the new one.
func TestOldGenerationStops(t *testing.T) {
	for _, with := range []string{"open", "data", "checkpoint", "own position"} {
		t.Run(with, func(t *testing.T) {
			b, id := newMemBucket(), uuid.New()
			a, _ := attach(t, b, id, want(1, 1, 0), "a")
			a.puts(2)
			r, _ := restore(t, b, id, "r")
			w := want(5, 4, 100) // three losses that the bucket does not know of
			switch with {
			case "data":
				r.puts(2)
			case "checkpoint":
				r.puts(2)
				r.checkpoint()
			case "own position":
				w.From, w.FromLSN = Position{1, 3}, 2
			}
			keys := b.keys("log/")
			_, _, err := Attach(ctx, b, id, w, Replay{})
			wantErr(t, err, ErrSuperseded)
			if !slices.Equal(keys, b.keys("log/")) {
				t.Fatal("the other lineage was touched")
			}
			r.puts(1)
		})
	}
	t.Run("a fence alone does not supersede", func(t *testing.T) {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(2)
		died := errors.New("died")
		b.hook = func(op, key string) error {
			if op == "put" && key == LogKey(id, Position{2, 0}) {
				return died
			}
			return nil
		}
		_, _, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
		wantErr(t, err, died)
		b.hook = nil
		wantErr(t, a.put(3, 3, 3), ErrFenced)
		attach(t, b, id, want(2, 1, 2), "c")
	})
}

// Nothing of the log is ever deleted by this package, and of checkpoints the newest two stay.
func TestCollectCheckpoints(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	var kept []*Manifest
	for range 4 {
		a.puts(2)
		kept = append(kept, a.checkpoint())
	}
	b.set(partKey(id, Position{1, 4}, uuid.New(), 0), []byte("left by an unfinished one"))
	log := b.keys("log/")
	n, err := a.CollectCheckpoints(ctx)
	if err != nil || n != 5 {
		t.Fatalf("%d deleted, %v", n, err)
	}
	if !slices.Equal(log, b.keys("log/")) {
		t.Fatal("objects of the log were deleted")
	}
	if got := b.keys("checkpoint/"); len(got) != 2 || got[0] != checkpointKey(id, kept[2].Position) {
		t.Fatalf("kept %v", got)
	}
	if n, err := a.CollectCheckpoints(ctx); n != 0 || err != nil {
		t.Fatalf("%d deleted, %v", n, err)
	}
	m, err := NewestCheckpoint(ctx, b, id)
	if err != nil || m.Position != kept[3].Position {
		t.Fatalf("%+v, %v", m, err)
	}
	d, state := restore(t, b, id, "d")
	if state.Objects != 0 || state.Checkpoint == nil {
		t.Fatalf("%+v", state)
	}
	wantTags(t, d, "aaaaaaaa")
}

// An object that is missing between others is damage, not the end.
func TestGapInTheLog(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(5)
	c, _ := attach(t, b, id, want(2, 1, 5), "c")
	c.puts(1)
	for _, p := range []Position{{1, 3}, {1, 0}, {1, 6}, {2, 0}} {
		key := LogKey(id, p)
		body := b.body(key)
		b.set(key, nil)
		info, err := Inspect(ctx, b, id, false)
		if err != nil {
			t.Fatal(err)
		}
		wantErr(t, info.Err, ErrGap)
		if p != (Position{1, 6}) { // a missing fence is put again
			n := len(b.keys(""))
			_, _, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
			wantErr(t, err, ErrGap)
			wantErr(t, err, objectstore.ErrCorrupt)
			if p.Seq == 0 && len(b.keys("")) != n {
				t.Fatal("a fence was put where an open object had been")
			}
			for _, k := range b.keys(p.path()) { // the fence in the gap
				b.set(k, nil)
			}
		}
		b.set(key, body)
	}
}

// A checkpoint holds nothing above the object watermark.
func TestCheckpointRefusesWhatIsAhead(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	good := a.img.entries[2]
	one := func(e Entry) func(yield func(Entry, error) bool) {
		return func(yield func(Entry, error) bool) { yield(e, nil) }
	}
	at := Position{1, 3}
	ahead, beyond, overlap := good, good, good
	ahead.LSN = 3
	beyond.Location.Seq = 3
	overlap.Offset -= 0
	for name, c := range map[string]struct {
		c Checkpoint
		e func(yield func(Entry, error) bool)
	}{
		"position ahead":     {Checkpoint{Position{1, 4}, 2, time.Time{}}, a.img.sorted()},
		"LSN ahead":          {Checkpoint{at, 3, time.Time{}}, a.img.sorted()},
		"LSN behind":         {Checkpoint{at, 1, time.Time{}}, a.img.sorted()},
		"open object":        {Checkpoint{Position{1, 0}, 2, time.Time{}}, a.img.sorted()},
		"other epoch":        {Checkpoint{Position{2, 1}, 2, time.Time{}}, a.img.sorted()},
		"entry's LSN ahead":  {Checkpoint{at, 2, time.Time{}}, one(ahead)},
		"entry's data ahead": {Checkpoint{at, 2, time.Time{}}, one(beyond)},
		"entries overlap": {Checkpoint{at, 2, time.Time{}}, func(yield func(Entry, error) bool) {
			_ = yield(good, nil) && yield(overlap, nil)
		}},
	} {
		if _, err := a.WriteCheckpoint(ctx, c.c, c.e); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	stop := errors.New("stop")
	_, err := a.WriteCheckpoint(ctx, Checkpoint{at, 2, time.Time{}}, func(yield func(Entry, error) bool) { yield(Entry{}, stop) })
	wantErr(t, err, stop)
	if keys := b.keys("checkpoint/"); len(keys) != 0 {
		t.Fatalf("manifests of failed checkpoints: %v", keys)
	}
	a.checkpoint()
}

// A bucket that is ahead of the journal is not appended to.
func TestBucketAheadOfJournal(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(5)
	_, _, err := Attach(ctx, b, id, want(2, 1, 4), Replay{})
	wantErr(t, err, ErrAhead)
	if keys := b.keys("log/" + fmt.Sprintf("%016x", 2)); len(keys) != 0 {
		t.Fatalf("opened: %v", keys)
	}
}

// A checkpoint of our epoch or a later one means that somebody newer is there.
func TestCheckpointOfNewerEpochFences(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(4, 1, 0), "a")
	a.puts(2)
	m := a.checkpoint()
	for _, epoch := range []uint64{3, 4} {
		_, _, err := Attach(ctx, b, id, want(epoch, 1, 9), Replay{})
		wantErr(t, err, ErrFenced)
		body := b.body(checkpointKey(id, m.Position))
		b.set(checkpointKey(id, m.Position), []byte("damaged"))
		_, _, err = Attach(ctx, b, id, want(epoch, 1, 9), Replay{})
		wantErr(t, err, ErrFenced)
		b.set(checkpointKey(id, m.Position), body)
	}
}

func TestAttachArguments(t *testing.T) {
	id := uuid.New()
	for name, change := range map[string]func(w *Want){
		"epoch 0":        func(w *Want) { w.Epoch = 0 },
		"last epoch":     func(w *Want) { w.Epoch = ^uint64(0) },
		"generation 0":   func(w *Want) { w.Generation = 0 },
		"no writer":      func(w *Want) { w.Writer = Identity{} },
		"from own epoch": func(w *Want) { w.From = Position{2, 1} },
		"from an open":   func(w *Want) { w.Epoch, w.From = 3, Position{2, 0} },
		"LSN, no place":  func(w *Want) { w.FromLSN, w.Holds = 1, 1 },
		"LSN above":      func(w *Want) { w.From, w.FromLSN = Position{1, 1}, 1 },
		"attributes":     func(w *Want) { w.Attributes.BlockSize = 1 },
		"epoch too far":  func(w *Want) { w.Epoch = 1 << 40 },
	} {
		w := want(2, 1, 0)
		change(&w)
		if _, _, err := Attach(ctx, newMemBucket(), id, w, Replay{}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A write, or another newcomer's fence, that comes just before the fence is read and passed.
func TestFenceComesSecond(t *testing.T) {
	for _, first := range []string{"write", "fence"} {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(3)
		_, four := a.object(4, 4, 4)
		done := false
		b.hook = func(op, key string) error {
			if b.count("put") > 20 {
				return errors.New("goes round in circles")
			}
			if op == "put" && key == LogKey(id, Position{1, 4}) && !done {
				done = true
				if first == "write" {
					return errors.Join(b.put(key, four), objectstore.ErrExists)
				}
				attach(t, b, id, want(2, 1, 3), "c")
			}
			return nil
		}
		d, state := attach(t, b, id, want(3, 1, 4), "d")
		b.hook = nil
		if state.Fences != 2 {
			t.Fatalf("%s: %+v", first, state)
		}
		wantTags(t, d, map[string]string{"write": "aaaa", "fence": "aaa"}[first])
		if err := a.Put(ctx, 4, four); (err == nil) != (first == "write") {
			t.Fatalf("%s: %v", first, err)
		}
		wantErr(t, a.put(5, 5, 5), ErrFenced)
	}
}
