package volumelog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// A PUT whose reply was lost is ours if it is there.
func TestPutOfUnknownOutcome(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	_, one := a.object(1, 1, 1)
	key := LogKey(id, Position{1, 1})

	b.hook = func(op, k string) error {
		if op == "put" {
			return objectstore.ErrUnknown // not stored
		}
		return nil
	}
	wantErr(t, a.Put(ctx, 1, one), objectstore.ErrUnknown)
	if p, _, _ := a.Stored(); p.Seq != 1 {
		t.Fatalf("stored %v", p)
	}
	b.hook = func(op, k string) error {
		if op == "put" {
			_ = b.put(k, one) // stored, the reply is lost
			return objectstore.ErrUnknown
		}
		return nil
	}
	if err := a.Put(ctx, 1, one); err != nil {
		t.Fatal(err)
	}
	b.hook = nil
	if err := a.Put(ctx, 1, one); err != nil { // 412 that is our own
		t.Fatal(err)
	}
	if p, lsn, _ := a.Stored(); p.Seq != 2 || lsn != 1 {
		t.Fatalf("stored %v, LSN %d", p, lsn)
	}

	// A 412 that cannot be read back decides nothing.
	_, two := a.object(2, 2, 2)
	_ = b.put(LogKey(id, Position{1, 2}), two)
	down := errors.New("down")
	b.hook = func(op, k string) error {
		if op == "get" {
			return down
		}
		return nil
	}
	err := a.Put(ctx, 2, two)
	wantErr(t, err, objectstore.ErrUnknown)
	wantErr(t, err, down)
	if errors.Is(err, objectstore.ErrExists) || a.Err() != nil {
		t.Fatal(err)
	}
	b.hook = nil
	if err := a.Put(ctx, 2, two); err != nil {
		t.Fatal(err)
	}

	// A damaged object in our place is damage, not a fence.
	_, three := a.object(3, 3, 3)
	bad := slices.Clone(three)
	bad[200] ^= 1
	b.set(LogKey(id, Position{1, 3}), bad)
	err = a.Put(ctx, 3, three)
	wantErr(t, err, objectstore.ErrCorrupt)
	if errors.Is(err, ErrFenced) || a.Err() != nil {
		t.Fatal(err)
	}
	if b.body(key) == nil {
		t.Fatal("object 1 is gone")
	}
}

func TestPutRefusesWhatDoesNotFit(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	fresh := func(epoch uint64) *owner {
		o, _ := attach(t, b, id, want(epoch, 1, 1000), "a")
		return o
	}
	a := fresh(1)
	_, one := a.object(1, 1, 1)
	for name, body := range map[string][]byte{"empty": nil, "cut": one[:len(one)-1], "header only": one[:HeaderBlock], "garbage": make([]byte, 8192)} {
		if err := a.Put(ctx, 1, body); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantErr(t, a.Put(ctx, 2, one), ErrInvalid) // under another number
	if a.Err() != nil {
		t.Fatal(a.Err())
	}
	if err := a.put(2, 2, 3); err != nil {
		t.Fatal(err)
	}
	wantErr(t, a.put(3, 5, 5), ErrConflict) // LSN 4 is left out

	a = fresh(2)
	wantErr(t, a.put(1, 5, 5), ErrConflict) // does not join the log

	a = fresh(3)
	if err := a.put(2, 2, 2); err != nil {
		t.Fatal(err)
	}
	wantErr(t, a.put(1, 1, 2), ErrConflict) // does not join what follows

	a = fresh(4)
	b.hook = func(op, k string) error {
		if op == "put" {
			return objectstore.ErrUnknown
		}
		return nil
	}
	wantErr(t, a.put(1, 1, 1), objectstore.ErrUnknown)
	a.tag = "x"
	wantErr(t, a.put(1, 1, 1), ErrConflict) // other bytes under the same number
	b.hook = nil
	wantErr(t, a.put(1, 1, 1), ErrConflict) // final

	a = fresh(5)
	_, one = a.object(1, 1, 1)
	b.set(LogKey(id, Position{5, 1}), one)
	a.tag = "x"
	wantErr(t, a.put(1, 1, 1), ErrConflict)
}

func TestParallelPuts(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	const n = 40
	var bodies [n + 1][]byte
	for seq := uint64(1); seq <= n; seq++ {
		_, bodies[seq] = a.object(seq, seq, seq)
	}
	var wg sync.WaitGroup
	for seq := uint64(1); seq <= n; seq++ {
		wg.Go(func() {
			if err := a.Put(ctx, seq, bodies[seq]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if p, lsn, _ := a.Stored(); p.Seq != n+1 || lsn != n {
		t.Fatalf("stored %v, LSN %d", p, lsn)
	}
}

// Attach fails at every request in turn, before or after it took effect, and is
// called again with the same Want: in the end the epoch is open, once.
func TestAttachInterruptedAnywhere(t *testing.T) {
	for _, late := range []bool{false, true} {
		for n := 1; ; n++ {
			b, id := newCollected(), uuid.New()
			a, _ := attach(t, b, id, want(1, 1, 0), "a")
			a.puts(3)
			a.checkpoint()
			a.puts(2)
			w := want(3, 1, 5)
			down := errors.New("down")
			var bucket objectstore.Bucket = b
			var last *lateErrors
			if late {
				last = &lateErrors{b, n, 0, down}
				bucket = last
			} else {
				b.failNth(n, down)
			}
			img := newImage(t, b, id)
			_, _, err := Attach(ctx, bucket, id, w, img.replay())
			fired := b.total >= n
			if late {
				fired = last.puts >= n
			}
			b.failNth(0, nil)
			if !fired {
				if err != nil || n < 3 {
					t.Fatalf("%d requests: %v", n, err)
				}
				break
			}
			b.hook = nil
			if err != nil {
				wantErr(t, err, down)
				c, state := attach(t, b, id, w, "c")
				if state.LSN != 5 {
					t.Fatalf("LSN %d", state.LSN)
				}
				c.puts(1)
				wantTags(t, c, "aaaaac")
			}
			wantErr(t, a.put(6, 6, 6), ErrFenced)
		}
	}
}

// lateErrors lets the nth put take effect and then fails it and the read that follows.
type lateErrors struct {
	*collected
	n, puts int
	err     error
}

func (l *lateErrors) PutIfAbsent(_ context.Context, key string, body []byte) error {
	l.puts++
	if l.puts != l.n {
		return l.collected.PutIfAbsent(ctx, key, body)
	}
	_ = l.put(key, body)
	l.hook = func(op, k string) error {
		l.hook = nil
		return l.err
	}
	return fmt.Errorf("%w: %w", objectstore.ErrUnknown, l.err)
}

func TestRestoreInterruptedAnywhere(t *testing.T) {
	for n := 1; ; n++ {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(3)
		a.checkpoint()
		a.puts(2)
		down := errors.New("down")
		b.failNth(n, down)
		_, _, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
		fired := b.total >= n
		b.failNth(0, nil)
		if !fired {
			if err != nil || n < 5 {
				t.Fatalf("%d requests: %v", n, err)
			}
			return
		}
		d, state := restore(t, b, id, "d")
		if state.LSN != 5 || state.Generation < LineageStride {
			t.Fatalf("%+v", state)
		}
		d.puts(1)
		wantTags(t, d, "aaaaad")
	}
}

// A caller with its own place in the log gets only what follows it.
func TestAttachFromOwnPosition(t *testing.T) {
	setup := func() (*collected, uuid.UUID, *owner) {
		b, id := newCollected(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(6)
		return b, id, a
	}
	from := func(seq, lsn, holds uint64) Want {
		w := want(2, 1, holds)
		w.From, w.FromLSN = Position{1, seq}, lsn
		return w
	}
	t.Run("no checkpoint", func(t *testing.T) {
		b, id, _ := setup()
		c, state := attach(t, b, id, from(5, 4, 6), "c")
		if state.LSN != 6 || c.img.resets != 0 || !slices.Equal(c.img.applied, []Position{{1, 5}, {1, 6}}) {
			t.Fatalf("%+v, applied %v", state, c.img.applied)
		}
	})
	t.Run("nothing follows", func(t *testing.T) {
		b, id, _ := setup()
		c, state := attach(t, b, id, from(7, 6, 6), "c")
		if state.LSN != 6 || state.Time != time.Unix(6, 0).UTC() || state.Attributes != testAttributes || len(c.img.applied) != 0 {
			t.Fatalf("%+v, applied %v", state, c.img.applied)
		}
	})
	t.Run("at the checkpoint", func(t *testing.T) {
		b, id, a := setup()
		b.collect(id, a.checkpoint().Position)
		c, state := attach(t, b, id, from(7, 6, 6), "c")
		if state.LSN != 6 || state.Time != time.Unix(6, 0).UTC() || c.img.resets != 0 {
			t.Fatalf("%+v", state)
		}
		_, _, err := Attach(ctx, b, id, func() Want { w := from(7, 5, 6); w.Epoch = 3; return w }(), Replay{})
		wantErr(t, err, ErrGap)
	})
	t.Run("before a checkpoint, all there", func(t *testing.T) {
		b, id, a := setup()
		a.checkpoint()
		a.puts(1)
		c, state := attach(t, b, id, from(5, 4, 7), "c")
		if state.LSN != 7 || c.img.resets != 0 || len(c.img.applied) != 3 {
			t.Fatalf("%+v, applied %v", state, c.img.applied)
		}
	})
	t.Run("before a checkpoint, collected", func(t *testing.T) {
		b, id, a := setup()
		m := a.checkpoint()
		a.puts(1)
		b.collect(id, m.Position)
		c, state := attach(t, b, id, from(5, 4, 7), "c")
		if state.LSN != 7 || c.img.resets != 1 || state.Checkpoint == nil {
			t.Fatalf("%+v, applied %v", state, c.img.applied)
		}
		wantTags(t, c, "aaaaaaa")
	})
	t.Run("before a checkpoint, a fence in the gap", func(t *testing.T) {
		b, id, a := setup()
		m := a.checkpoint()
		b.collect(id, m.Position)
		h := &Header{Kind: KindFence, Volume: id, Epoch: 1, Seq: 5, Generation: 1, Writer: NewIdentity(uuid.New()), FirstLSN: 5, LastLSN: 4}
		body, err := encodeMark(h)
		if err != nil {
			t.Fatal(err)
		}
		b.set(LogKey(id, Position{1, 5}), body)
		c, state := attach(t, b, id, from(5, 4, 6), "c")
		if state.LSN != 6 || c.img.resets != 1 {
			t.Fatalf("%+v", state)
		}
		wantTags(t, c, "aaaaaa")
	})
	t.Run("a bucket that lost objects", func(t *testing.T) {
		b, id, _ := setup()
		b.set(LogKey(id, Position{1, 6}), nil)
		n := len(b.keys(""))
		_, _, err := Attach(ctx, b, id, from(7, 6, 6), Replay{})
		wantErr(t, err, ErrGap)
		_, _, err = Attach(ctx, newMemBucket(), id, from(7, 6, 6), Replay{})
		wantErr(t, err, ErrGap)
		if len(b.keys("")) != n {
			t.Fatal("a fence was put behind a gap")
		}
	})
	t.Run("a checkpoint comes and the object before it goes", func(t *testing.T) {
		b, id, a := setup()
		moved := false
		b.hook = func(op, key string) error {
			if op == "get" && key == LogKey(id, Position{1, 6}) && !moved {
				moved = true
				a.puts(1)
				b.collect(id, a.checkpoint().Position)
			}
			return nil
		}
		c, state := attach(t, b, id, from(7, 6, 7), "c")
		if !moved || state.LSN != 7 || c.img.resets != 1 {
			t.Fatalf("%+v", state)
		}
		wantTags(t, c, "aaaaaaa")
	})
	t.Run("another LSN", func(t *testing.T) {
		b, id, _ := setup()
		_, _, err := Attach(ctx, b, id, from(7, 5, 6), Replay{})
		wantErr(t, err, ErrGap)
	})
	t.Run("ahead of the log after a reset", func(t *testing.T) {
		b, id, a := setup()
		m := a.checkpoint()
		b.collect(id, m.Position)
		_, _, err := Attach(ctx, b, id, from(5, 9, 9), Replay{})
		wantErr(t, err, ErrGap)
	})
}

// Checkpoints only make a start quicker: damaged ones are passed over.
func TestDamagedCheckpoints(t *testing.T) {
	for _, what := range []string{"manifest", "part", "part missing", "manifest misdirected"} {
		for _, all := range []bool{false, true} {
			b, id := newMemBucket(), uuid.New()
			a, _ := attach(t, b, id, want(1, 1, 0), "a")
			a.puts(3)
			old := a.checkpoint()
			a.puts(3)
			m := a.checkpoint()
			a.puts(1)
			bad := []*Manifest{m}
			if all {
				bad = append(bad, old)
			}
			for _, m := range bad {
				key, part := checkpointKey(id, m.Position), partKey(id, m.Position, m.Attempt, 0)
				switch what {
				case "manifest":
					body := b.body(key)
					body[100] ^= 1
					b.set(key, body)
				case "manifest misdirected":
					c, _ := attach(t, newMemBucket(), uuid.New(), want(1, 1, 0), "a")
					c.puts(int(m.LSN))
					c.checkpoint()
					b.set(key, c.img.b.(*memBucket).body(checkpointKey(c.img.id, m.Position)))
				case "part":
					body := b.body(part)
					body[len(body)-1] ^= 1
					b.set(part, body)
				case "part missing":
					b.set(part, nil)
				}
			}
			c, state := attach(t, b, id, want(2, 1, 7), "c")
			if state.LSN != 7 || len(state.Damaged) != len(bad) || (state.Checkpoint == nil) != all {
				t.Fatalf("%s: %+v", what, state)
			}
			wantTags(t, c, "aaaaaaa")
		}
	}
}

// A checkpoint that a newer version wrote is not passed over.
func TestCheckpointOfNewerVersion(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(1)
	key := checkpointKey(id, a.checkpoint().Position)
	b.set(key, reseal(b.body(key), func(m []byte) { le.PutUint32(m[8:], version+1) }))
	_, _, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
	wantErr(t, err, ErrVersion)
}

// With the newest checkpoint damaged and the log before it collected there is no way, and that is said.
func TestDamagedCheckpointAndCollectedLog(t *testing.T) {
	b, id := newCollected(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	a.checkpoint()
	a.puts(3)
	m := a.checkpoint()
	b.collect(id, m.Position)
	key := checkpointKey(id, m.Position)
	body := b.body(key)
	b.set(key, []byte("damaged"))
	n := len(b.keys("log/"))
	_, _, err := Attach(ctx, b, id, want(2, 1, 6), Replay{})
	wantErr(t, err, ErrGap)
	_, _, err = Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
	wantErr(t, err, ErrGap)
	if len(b.keys("log/")) != n {
		t.Fatal("a fence was put where an object had been")
	}
	b.set(key, body)
	c, _ := attach(t, b, id, want(2, 1, 6), "c")
	wantTags(t, c, "aaaaaa")
}

// A damaged object of the log stops everyone, and nobody puts a fence over it.
func TestDamagedLogObject(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(4)
	_, other := func() (*Header, []byte) {
		o, _ := attach(t, newMemBucket(), id, want(1, 1, 0), "o")
		o.puts(2)
		return o.object(3, 3, 3)
	}()
	key := LogKey(id, Position{1, 3})
	good := b.body(key)
	flipped := slices.Clone(good)
	flipped[50] ^= 4
	for name, body := range map[string][]byte{
		"flipped": flipped, "cut in the header": good[:100], "cut in a frame": good[:len(good)-1], "empty": {},
		"another object's": b.body(LogKey(id, Position{1, 2})), "another writer's": other, "open": b.body(LogKey(id, Position{1, 0})),
	} {
		b.set(key, body)
		n := len(b.keys(""))
		_, _, err := Attach(ctx, b, id, want(2, 1, 4), Replay{})
		if !errors.Is(err, objectstore.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		_, _, err = Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
		if !errors.Is(err, objectstore.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		info, err := Inspect(ctx, b, id, true)
		if err != nil || !errors.Is(info.Err, objectstore.ErrCorrupt) || info.LSN != 2 {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
		if len(b.keys("")) != n {
			t.Errorf("%s: something was put", name)
		}
	}
}

// The caller's own errors come back as they are, whatever they look like.
func TestReplayErrors(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	a.checkpoint()
	a.puts(1)
	mine := fmt.Errorf("mine: %w", objectstore.ErrCorrupt)
	for _, r := range []Replay{
		{Reset: func(*Manifest) error { return mine }},
		{Entry: func(Entry) error { return mine }},
		{Apply: func(*Header) error { return mine }},
	} {
		if _, _, err := Attach(ctx, b, id, want(2, 1, 9), r); err != mine {
			t.Errorf("attach: %v", err)
		}
		if _, _, err := Restore(ctx, b, id, NewIdentity(uuid.New()), r); err != mine {
			t.Errorf("restore: %v", err)
		}
	}
}

// An open object that arrived although nobody said so is found by the next try, also if the volume was
// resized in between.
func TestOpenArrivedUnseen(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	w := want(1, 1, 0)
	down := errors.New("down")
	key := LogKey(id, Position{1, 0})
	b.hook = func(op, k string) error {
		if op == "put" {
			h := Header{Kind: KindOpen, Volume: id, Epoch: 1, Generation: 1, Writer: w.Writer, FirstLSN: 1, Attributes: w.Attributes}
			body, err := encodeMark(&h)
			if err != nil {
				t.Fatal(err)
			}
			_ = b.put(k, body)
			return objectstore.ErrUnknown
		}
		if op == "get" && k == key {
			return down
		}
		return nil
	}
	_, _, err := Attach(ctx, b, id, w, Replay{})
	wantErr(t, err, objectstore.ErrUnknown)
	b.hook = nil
	w.Attributes.SizeBytes *= 2
	a, _ := attach(t, b, id, w, "a")
	a.puts(1)
	other := want(1, 1, 1)
	_, _, err = Attach(ctx, b, id, other, Replay{})
	wantErr(t, err, ErrEpochTaken)
}

// A header that is whole and lies under another key is damage.
func TestMisdirectedHeader(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	body := b.body(LogKey(id, Position{1, 1}))
	other := uuid.New()
	for _, to := range []struct {
		id uuid.UUID
		p  Position
	}{{other, Position{1, 1}}, {id, Position{1, 7}}, {id, Position{2, 1}}} {
		b.set(LogKey(to.id, to.p), body)
		if _, err := ReadHeader(ctx, b, to.id, to.p); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Errorf("%v: %v", to.p, err)
		}
	}
}

// Bytes that change on their way, in one answer, are neither damage of what is there nor another's object.
func TestOneBadAnswer(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	a.checkpoint()
	bad, epoch := &badAnswers{memBucket: b}, uint64(1)
	for name, spoil := range map[string]func([]byte) int{
		"inverted bit": func(p []byte) int { p[len(p)/3] ^= 4; return len(p) },
		"short":        func(p []byte) int { return len(p) / 2 },
	} {
		t.Run(name, func(t *testing.T) {
			for n := range 20 {
				bad.spoil, bad.nth, bad.seen = spoil, n, 0
				img := newImage(t, bad, id)
				epoch++
				wr, state, err := Attach(ctx, bad, id, want(epoch, 1, 1000), img.replay())
				if err != nil || len(state.Damaged) > 0 {
					t.Fatalf("answer %d: %+v, %v", n, state, err)
				}
				o := &owner{wr, img, "a"}
				before := bad.seen
				_, body := o.object(1, state.LSN+1, state.LSN+1)
				if _ = b.put(LogKey(id, Position{epoch, 1}), body); n%2 == 0 {
					bad.nth = bad.seen // the answer that tells whose object it is
				}
				if err := wr.Put(ctx, 1, body); err != nil {
					t.Fatalf("answer %d: our own object after a 412: %v", n, err)
				}
				if bad.seen == before {
					t.Fatal("nothing was read back")
				}
				wr.b, img.b = b, bad
				_ = img.replay().Apply(mustHeader(t, body))
				if tags := img.tags(); uint64(len(tags)) != state.LSN+1 {
					t.Fatalf("answer %d: %q", n, tags)
				}
				if info, err := Inspect(ctx, bad, id, true); err != nil || info.Err != nil || len(info.Damaged) > 0 {
					t.Fatalf("answer %d: %+v, %v", n, info, err)
				}
			}
		})
	}
}

func mustHeader(t *testing.T, body []byte) *Header {
	t.Helper()
	h, err := DecodeHeader(body)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// badAnswers spoils the nth answer that brings bytes.
type badAnswers struct {
	*memBucket
	mu        sync.Mutex // guards nth and seen during a call
	nth, seen int
	spoil     func([]byte) int
}

func (b *badAnswers) now() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seen++
	return b.seen-1 == b.nth
}

func (b *badAnswers) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	n, err := b.memBucket.GetRange(ctx, key, off, into)
	if err == nil && n > 0 && b.now() {
		n = b.spoil(into[:n])
	}
	return n, err
}

func (b *badAnswers) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	body, err := b.memBucket.Get(ctx, key, limit)
	if err == nil && len(body) > 0 && b.now() {
		body = body[:b.spoil(body)]
	}
	return body, err
}

// badLists changes listings.
type badLists struct {
	*memBucket
	change func(prefix string, page []objectstore.Info) []objectstore.Info
}

func (b *badLists) List(ctx context.Context, prefix, after string, limit int) ([]objectstore.Info, error) {
	page, err := b.memBucket.List(ctx, prefix, after, limit)
	if err == nil {
		page = b.change(prefix, page)
	}
	return page, err
}

// A key that is in a listing and not in the bucket makes nobody think that there is a newer owner.
func TestListingNamesWhatIsNotThere(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	a.checkpoint()
	for name, where := range map[string]string{"checkpoint": checkpointPrefix(id), "log": logPrefix(id)} {
		t.Run(name, func(t *testing.T) {
			lists := 0
			bad := &badLists{memBucket: b, change: func(prefix string, page []objectstore.Info) []objectstore.Info {
				if prefix != where {
					return page
				}
				if lists++; lists > 1 {
					return page
				}
				return append(slices.Clone(page), objectstore.Info{Key: where + "0000000000080003/0000000000000001"})
			}}
			_, state, err := Restore(ctx, bad, id, NewIdentity(uuid.New()), Replay{})
			if err != nil || state.LSN != 3 || state.Epoch > 5 || lists < 2 {
				t.Fatalf("%+v, %v, %d lists", state, err, lists)
			}
			lists = 0
			if _, state, err = Attach(ctx, bad, id, want(state.Epoch+1, state.Generation, 3), Replay{}); err != nil || state.LSN != 3 {
				t.Fatalf("%+v, %v", state, err)
			}
		})
	}
	always := &badLists{memBucket: b, change: func(prefix string, page []objectstore.Info) []objectstore.Info {
		if prefix != checkpointPrefix(id) || len(page) == 0 {
			return page
		}
		return append(slices.Clone(page), objectstore.Info{Key: checkpointKey(id, Position{1 << 40, 1})})
	}}
	_, _, err := Attach(ctx, always, id, want(100, LineageStride*9, 3), Replay{})
	wantErr(t, err, objectstore.ErrCorrupt)
	if errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
}

// Listings that are older than the bucket cost requests and nothing else: not more than a few for each object that they hide.
func TestOldListings(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	known := len(b.keys(""))
	a.puts(20)
	young := map[string]bool{}
	for _, k := range b.keys("")[known:] {
		young[k] = true
	}
	old := &badLists{memBucket: b, change: func(_ string, page []objectstore.Info) []objectstore.Info {
		return slices.DeleteFunc(slices.Clone(page), func(i objectstore.Info) bool { return young[i.Key] })
	}}
	before := b.count("put") + b.count("get") + b.count("list")
	c, state := attach(t, old, id, want(2, 1, 22), "c")
	if state.LSN != 22 {
		t.Fatalf("%+v", state)
	}
	wantTags(t, c, "aaaaaaaaaaaaaaaaaaaaaa")
	if n := b.count("put") + b.count("get") + b.count("list") - before; n > 150 {
		t.Errorf("%d requests", n)
	}
	d, state := restore(t, old, id, "d")
	if state.LSN != 22 || state.Epoch < 3 {
		t.Fatalf("%+v", state)
	}
	wantTags(t, d, "aaaaaaaaaaaaaaaaaaaaaa")
}

// An outage that ends between a put and its read-back costs no pause of the caller.
func TestOutageEndsWhileReadingBack(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	b.failNth(1, objectstore.ErrTransient)
	if err := a.put(1, 1, 1); err != nil {
		t.Fatal(err)
	}
	b.failNth(1, objectstore.ErrDenied) // a refusal is not tried again at once
	before := b.count("put")
	wantErr(t, a.put(2, 2, 2), objectstore.ErrDenied)
	if n := b.count("put") - before; n != 1 {
		t.Errorf("%d puts", n)
	}
}

// A store that refuses one request in ten does not keep a long log from being read to its end; one that refuses all is asked once.
func TestSomeRequestsAreRefused(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(150)
	var mu sync.Mutex
	n, every := 0, 10
	b.hook = func(string, string) error {
		mu.Lock()
		defer mu.Unlock()
		if n++; n%every == 0 {
			return fmt.Errorf("%w: now and then", objectstore.ErrDenied)
		}
		return nil
	}
	info, err := Inspect(ctx, b, id, true)
	if err != nil || info.Err != nil || info.LSN != 150 {
		t.Fatalf("%+v, %v", info, err)
	}
	_, state, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
	if err != nil || state.LSN != 150 {
		t.Fatalf("%+v, %v", state, err)
	}
	if _, state, err = Attach(ctx, b, id, want(state.Epoch+1, state.Generation, 150), Replay{}); err != nil || state.LSN != 150 {
		t.Fatalf("%+v, %v", state, err)
	}
	n, every = 0, 1
	_, _, err = Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
	if wantErr(t, err, objectstore.ErrDenied); n != 1 {
		t.Errorf("%d requests", n)
	}
}
