package volumelog

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

func TestListFindPurge(t *testing.T) {
	b := newMemBucket()
	b.set("volumes/not-a-uuid/log/1", []byte("x"))
	b.set("volumes/zzz", []byte("x"))
	b.set("other", []byte("x"))
	if all, err := List(ctx, b, true); err != nil || len(all) != 0 {
		t.Fatalf("%+v, %v", all, err)
	}
	r := newRand(t, 5)
	var ids []uuid.UUID
	for range 3 {
		ids = append(ids, randomUUID(r))
	}
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
	names := []string{"one", "two", "two"}
	for i, id := range ids {
		if ok, err := Exists(ctx, b, id); ok || err != nil {
			t.Fatal(ok, err)
		}
		w := want(uint64(i+1), 1, 0)
		w.Attributes.Name = names[i]
		a, _ := attach(t, b, id, w, "a")
		a.puts(2 + i)
		if i == 1 {
			a.checkpoint()
			a.puts(1)
		}
		if ok, err := Exists(ctx, b, id); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	for _, verify := range []bool{false, true} {
		all, err := List(ctx, b, verify)
		if err != nil || len(all) != 3 {
			t.Fatalf("%+v, %v", all, err)
		}
		for i, v := range all {
			lsn := uint64([]int{2, 4, 4}[i])
			var bytes int64
			for _, k := range b.keys(ids[i].String()) {
				bytes += int64(len(b.body(k)))
			}
			objects := len(b.keys(ids[i].String() + "/log/"))
			if v.ID != ids[i] || v.Name != names[i] || v.Epoch != uint64(i+1) || v.Generation != 1 || v.LSN != lsn || v.Time != time.Unix(int64(lsn), 0).UTC() ||
				v.SizeBytes != testAttributes.SizeBytes || v.BlockSize != 512 || v.Bytes != bytes || v.Objects != objects || v.Unreachable != 0 ||
				v.Err != nil || len(v.Damaged) != 0 || v.Checkpoint.IsZero() != (i != 1) {
				t.Errorf("%+v, want %d bytes, %d objects", v, bytes, objects)
			}
		}
	}
	if v, err := Find(ctx, b, "one"); err != nil || v.ID != ids[0] {
		t.Fatal(v, err)
	}
	if v, err := Find(ctx, b, ids[2].String()); err != nil || v.Name != "two" {
		t.Fatal(v, err)
	}
	_, err := Find(ctx, b, "two")
	wantErr(t, err, ErrAmbiguous)
	for _, n := range []string{"three", uuid.NewString(), ""} {
		_, err = Find(ctx, b, n)
		wantErr(t, err, ErrNoVolume)
	}
	_, _, err = Restore(ctx, b, uuid.New(), NewIdentity(uuid.New()), Replay{})
	wantErr(t, err, ErrNoVolume)

	count := len(b.keys(ids[1].String()))
	if n, err := Purge(ctx, b, ids[1]); err != nil || n != count || len(b.keys(ids[1].String())) != 0 {
		t.Fatal(n, err)
	}
	if all, err := List(ctx, b, false); err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if _, err := Find(ctx, b, "two"); err != nil {
		t.Fatal(err)
	}
	if len(b.keys("volumes/not-a-uuid")) != 1 || len(b.keys("volumes/zzz")) != 1 {
		t.Fatal("purge took more than the volume")
	}
}

// A purge that is cut short anywhere does not leave a shorter volume, and is finished by another.
func TestPurgeInterruptedAnywhere(t *testing.T) {
	for n := 1; ; n++ {
		b, id := newMemBucket(), uuid.New()
		a, _ := attach(t, b, id, want(1, 1, 0), "a")
		a.puts(3)
		a.checkpoint()
		a.puts(1)
		c, _ := attach(t, b, id, want(2, 1, 4), "c")
		c.puts(1)
		down := errors.New("down")
		count := 0
		b.hook = func(op, key string) error {
			if op == "delete" {
				if count++; count >= n {
					return down
				}
			}
			return nil
		}
		_, err := Purge(ctx, b, id)
		b.hook = nil
		if err == nil {
			if n < 8 {
				t.Fatalf("done after %d", n)
			}
			return
		}
		wantErr(t, err, down)
		_, state, err := Restore(ctx, b, id, NewIdentity(uuid.New()), Replay{})
		if err == nil && state.LSN != 5 {
			t.Fatalf("after %d deletions a volume of LSN %d is restored", n-1, state.LSN)
		}
		if _, err := Purge(ctx, b, id); err != nil || len(b.keys("")) != 0 {
			t.Fatal(err)
		}
	}
}

// Verification reads what nothing else reads.
func TestVerifyFindsDamage(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(3)
	m := a.checkpoint()
	a.puts(1)
	for _, key := range []string{LogKey(id, Position{1, 2}), LogKey(id, Position{1, 4}), partKey(id, m.Position, m.Attempt, 0)} {
		good := b.body(key)
		bad := slices.Clone(good)
		bad[len(bad)-20] ^= 1
		b.set(key, bad)
		info, err := Inspect(ctx, b, id, false)
		if err != nil || info.Err != nil || len(info.Damaged) != 0 || info.LSN != 4 {
			t.Fatalf("%s: %+v, %v", key, info, err)
		}
		info, err = Inspect(ctx, b, id, true)
		if err != nil || info.Err != nil || len(info.Damaged) != 1 || !errors.Is(info.Damaged[0].Err, objectstore.ErrCorrupt) || info.LSN != 4 {
			t.Fatalf("%s: %+v, %v", key, info, err)
		}
		b.set(key, good)
	}
	down := errors.New("down")
	for n := 1; ; n++ {
		b.failNth(n, down)
		_, err := List(ctx, b, true)
		if b.total < n {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		wantErr(t, err, down)
	}
}

// A change of attributes reaches the bucket by an object without writes.
func TestAttributesTravel(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	a, _ := attach(t, b, id, want(1, 1, 0), "a")
	a.puts(2)
	bigger := Attributes{Name: "new name", SizeBytes: 2 << 30, BlockSize: 512}
	wantErr(t, a.SetAttributes(Attributes{Name: "x", SizeBytes: 100, BlockSize: 512}), ErrInvalid)
	wantErr(t, a.SetAttributes(Attributes{Name: "a\x00b", SizeBytes: 512, BlockSize: 512}), ErrInvalid)
	if err := a.SetAttributes(bigger); err != nil {
		t.Fatal(err)
	}
	var bld Builder
	if err := bld.Reset(0, 0); err != nil {
		t.Fatal(err)
	}
	h := a.Header(3)
	h.FirstLSN, h.LastLSN, h.Time = 3, 2, time.Unix(9, 0)
	body, err := bld.Finish(&h)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Put(ctx, 3, body); err != nil {
		t.Fatal(err)
	}
	if p, lsn, _ := a.Stored(); p.Seq != 4 || lsn != 2 {
		t.Fatalf("stored %v, LSN %d", p, lsn)
	}
	a.puts(1)
	a.checkpoint()
	d, state := restore(t, b, id, "d")
	if state.Attributes != bigger || d.Attributes() != bigger {
		t.Fatalf("%+v", state)
	}
	wantTags(t, d, "aaa")
}

// A checkpoint of several parts, of all kinds of entries, comes back as it was.
func TestCheckpointRoundTrip(t *testing.T) {
	r := newRand(t, 6)
	b, id := newMemBucket(), uuid.New()
	w := want(1, 1, 0)
	w.Attributes.SizeBytes = MaxSize
	a, _ := attach(t, b, id, w, "a")
	a.puts(3)
	for _, n := range []int{0, 1, maxPartEntries, maxPartEntries + 1, 2*maxPartEntries + 77} {
		entries := randomEntries(r, n, 3)
		a.puts(1)
		p, lsn, at := a.Stored()
		m, err := a.WriteCheckpoint(ctx, Checkpoint{p, lsn, at}, func(yield func(Entry, error) bool) {
			for _, e := range entries {
				if !yield(e, nil) {
					return
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if m.Entries != uint64(n) || len(m.Parts) != (n+maxPartEntries-1)/maxPartEntries {
			t.Fatalf("%d entries in %d parts", m.Entries, len(m.Parts))
		}
		newest, err := NewestCheckpoint(ctx, b, id)
		if err != nil || newest.Position != p || newest.LSN != lsn || newest.Time != at || newest.Attributes != w.Attributes {
			t.Fatalf("%+v, %v", newest, err)
		}
		var got []Entry
		if err := ReadCheckpoint(ctx, b, newest, func(e Entry) error { got = append(got, e); return nil }); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, entries) {
			t.Fatalf("%d entries differ", n)
		}
		// Once more at the same place: what is there serves.
		again, err := a.WriteCheckpoint(ctx, Checkpoint{p, lsn, at}, func(func(Entry, error) bool) {})
		if err != nil || again.Attempt != m.Attempt {
			t.Fatalf("%+v, %v", again, err)
		}
	}
	if m, err := NewestCheckpoint(ctx, b, uuid.New()); m != nil || err != nil {
		t.Fatal(m, err)
	}
}

func randomEntries(r *rand.Rand, n int, lsn uint64) []Entry {
	entries := make([]Entry, n)
	off := uint64(0)
	for i := range entries {
		off += r.Uint64N(4) * sector
		e := Entry{Kind: ExtentKind(1 + r.IntN(3)), LSN: r.Uint64N(lsn + 1), Offset: off, Length: (1 + r.Uint64N(64)) * sector}
		if e.Kind != ExtentZero {
			e.Location = Location{Epoch: 1, Seq: 1 + r.Uint64N(3), HeaderBlocks: uint16(1 + r.IntN(4096)), Sector: r.Uint32N(MaxPayload/sector - 64)}
		}
		if e.Kind == ExtentSame {
			e.BlockLength = sector
		}
		off += e.Length
		entries[i] = e
	}
	return entries
}

func TestManifestAndPartDamage(t *testing.T) {
	r := newRand(t, 7)
	m := &Manifest{
		Volume: randomUUID(r), Position: Position{3, 9}, Generation: 2, Writer: Identity{randomUUID(r), randomUUID(r)},
		LSN: 77, Time: time.Unix(5, 6).UTC(), Attributes: Attributes{"näme", MaxSize, 4096}, Attempt: randomUUID(r),
	}
	var part partBuilder
	part.reset()
	for _, e := range randomEntries(r, 9, 77) {
		part.add(&e)
	}
	m.Parts = []Part{part.finish(m, 0)}
	m.Entries = 9
	body, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeManifest(body)
	if err != nil || got.Position != m.Position || got.Attributes != m.Attributes || got.Parts[0] != m.Parts[0] || got.Time != m.Time || got.Writer != m.Writer {
		t.Fatalf("%+v, %v", got, err)
	}
	none := func(Entry) error { return nil }
	if _, err := decodePart(m, 0, part.buf, 0, none); err != nil {
		t.Fatal(err)
	}
	damage := func(name string, good []byte, decode func([]byte) error) {
		for n := range good {
			if err := decode(good[:n]); !errors.Is(err, objectstore.ErrCorrupt) {
				t.Fatalf("%s, prefix of %d: %v", name, n, err)
			}
			bad := slices.Clone(good)
			bad[n] ^= 1 << r.IntN(8)
			if err := decode(bad); !errors.Is(err, objectstore.ErrCorrupt) {
				t.Fatalf("%s, byte %d flipped: %v", name, n, err)
			}
		}
		if err := decode(append(slices.Clone(good), 0)); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Fatalf("%s with a byte too many: %v", name, err)
		}
		newer := reseal(good, func(b []byte) { le.PutUint32(b[8:], version+1) })
		wantErr(t, decode(newer), ErrVersion)
	}
	damage("manifest", body, func(b []byte) error { _, err := DecodeManifest(b); return err })
	damage("part", part.buf, func(b []byte) error { _, err := decodePart(m, 0, b, 0, none); return err })
	for i, change := range []func(m *Manifest){
		func(m *Manifest) { m.Volume[3]++ }, func(m *Manifest) { m.Epoch++ }, func(m *Manifest) { m.Seq++ }, func(m *Manifest) { m.Attempt[0]++ },
		func(m *Manifest) { m.Parts = []Part{m.Parts[0], m.Parts[0]} }, func(m *Manifest) { m.Parts = []Part{{m.Parts[0].Bytes, 1, 9}} },
		func(m *Manifest) { m.SizeBytes = 4096 }, func(m *Manifest) { m.LSN = 0 },
	} {
		other := *m
		change(&other)
		if _, err := decodePart(&other, len(other.Parts)-1, part.buf, 0, none); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Errorf("misdirected part, case %d: %v", i, err)
		}
	}
}

func TestNewest(t *testing.T) {
	b, id := newMemBucket(), uuid.New()
	if h, err := Newest(ctx, b, id); h != nil || err != nil {
		t.Fatal(h, err)
	}
	a, _ := attach(t, b, id, want(3, 1, 0), "a")
	a.puts(2)
	if h, err := Newest(ctx, b, id); err != nil || h.Kind != KindOpen || h.Position() != (Position{3, 0}) || h.Generation != 1 {
		t.Fatal(h, err)
	}
	w := want(6, 1, 2)
	down := errors.New("down")
	b.hook = func(op, key string) error {
		if op == "put" && key == LogKey(id, Position{6, 0}) {
			return down
		}
		return nil
	}
	_, _, err := Attach(ctx, b, id, w, Replay{})
	wantErr(t, err, down)
	b.hook = nil
	if h, err := Newest(ctx, b, id); err != nil || h.Kind != KindFence || h.Position() != (Position{5, 0}) || h.Writer != w.Writer {
		t.Fatal(h, err)
	}
}
