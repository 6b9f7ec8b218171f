package homemap

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/uuid"
)

// stores runs a test with each implementation.
func stores(t *testing.T, f func(t *testing.T, s Store)) {
	t.Run("mem", func(t *testing.T) { f(t, NewMem()) })
	t.Run("badger", func(t *testing.T) {
		s, err := OpenBadger(t.TempDir(), BadgerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		f(t, s)
	})
}

func put(t testing.TB, s Store, v uuid.UUID, records ...Record) {
	t.Helper()
	if err := s.Apply(v, &Batch{Records: records}); err != nil {
		t.Fatal(err)
	}
}

func dump(t testing.TB, s Reader, v uuid.UUID, table Table, from uint64) (out []string) {
	t.Helper()
	err := s.Scan(v, table, from, false, func(key uint64, value []byte) (bool, error) {
		out = append(out, fmt.Sprintf("%d=%s", key, value))
		return true, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestStore(t *testing.T) {
	stores(t, func(t *testing.T, s Store) {
		a, b := uuid.UUID{15: 1}, uuid.UUID{15: 2}
		put(t, s, a, Record{Pages, 3, []byte("a3")}, Record{Pages, 1 << 60, []byte("big")}, Record{Meta, 0, []byte("meta")})
		put(t, s, a, Record{Pages, 255, []byte("a255")}, Record{Pages, 256, []byte("a256")})
		put(t, s, b, Record{Pages, 3, []byte("b3")})

		if v, ok, err := s.Get(a, Pages, 255, []byte("x")); err != nil || !ok || string(v) != "xa255" {
			t.Fatalf("got %q %v %v", v, ok, err)
		}
		if v, ok, err := s.Get(a, Presence, 255, []byte("x")); err != nil || ok || string(v) != "x" {
			t.Fatalf("got %q %v %v", v, ok, err)
		}
		if got := dump(t, s, a, Pages, 4); !slices.Equal(got, []string{"255=a255", "256=a256", "1152921504606846976=big"}) {
			t.Fatalf("got %q", got)
		}
		n := 0
		stop := errors.New("stop")
		err := s.Scan(a, Pages, 0, true, func(key uint64, value []byte) (bool, error) {
			if n++; value != nil {
				t.Error("a value with keysOnly")
			}
			return true, stop
		})
		if n != 1 || err != stop {
			t.Fatalf("%d calls, %v", n, err)
		}

		view, err := s.View()
		if err != nil {
			t.Fatal(err)
		}
		put(t, s, a, Record{Pages, 3, []byte("new")}, Record{Pages, 255, nil}, Record{Pages, 7, []byte("a7")})
		if got := dump(t, view, a, Pages, 0); !slices.Equal(got, []string{"3=a3", "255=a255", "256=a256", "1152921504606846976=big"}) {
			t.Fatalf("the view has %q", got)
		}
		if v, ok, err := view.Get(a, Pages, 3, nil); err != nil || !ok || string(v) != "a3" {
			t.Fatalf("the view has %q %v %v", v, ok, err)
		}
		view.Close()
		if got := dump(t, s, a, Pages, 0); !slices.Equal(got, []string{"3=new", "7=a7", "256=a256", "1152921504606846976=big"}) {
			t.Fatalf("got %q", got)
		}

		if v, err := s.Volumes(); err != nil || len(v) != 1 || v[0] != a {
			t.Fatalf("volumes %v %v", v, err)
		}
		if err := s.Drop(a); err != nil {
			t.Fatal(err)
		}
		if got := append(dump(t, s, a, Pages, 0), dump(t, s, a, Meta, 0)...); len(got) != 0 {
			t.Fatalf("left: %q", got)
		}
		if got := dump(t, s, b, Pages, 0); !slices.Equal(got, []string{"3=b3"}) {
			t.Fatalf("the other volume has %q", got)
		}
		if v, err := s.Volumes(); err != nil || len(v) != 0 {
			t.Fatalf("volumes %v %v", v, err)
		}
		put(t, s, a, Record{Pages, 9, []byte("again")})
		if got := dump(t, s, a, Pages, 0); !slices.Equal(got, []string{"9=again"}) {
			t.Fatalf("got %q", got)
		}

		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Get(a, Pages, 9, nil); !errors.Is(err, ErrClosed) {
			t.Fatalf("get after Close: %v", err)
		}
		if err := s.Apply(a, &Batch{Records: []Record{{Pages, 1, []byte("x")}}}); !errors.Is(err, ErrClosed) {
			t.Fatalf("apply after Close: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestStoreLargestBatch: all that Batch allows is taken.
func TestStoreLargestBatch(t *testing.T) {
	stores(t, func(t *testing.T, s Store) {
		var b Batch
		value := bytes.Repeat([]byte("v"), 300000)
		for i := uint64(0); b.Fits(len(value)); i++ {
			b.put(Pages, i, func(dst []byte) []byte { return append(dst, value...) })
		}
		for i := uint64(1000); b.Fits(1); i++ {
			b.put(Pages, i, func(dst []byte) []byte { return append(dst, 'x') })
		}
		if err := s.Apply(volume, &b); err != nil {
			t.Fatalf("%d records, %d bytes: %v", len(b.Records), b.Bytes(), err)
		}
		b.reset()
		for i := uint64(0); b.Fits(0); i++ {
			b.delete(Pages, i)
		}
		if err := s.Apply(volume, &b); err != nil {
			t.Fatalf("%d records, %d bytes: %v", len(b.Records), b.Bytes(), err)
		}
	})
}

func randomMeta(r *rand.Rand) *meta {
	m := &meta{Checkpoint: Checkpoint{Position: Position{r.Uint64(), r.Uint64(), r.Uint64()}}, digest: digest{r.Uint32(), r.Uint64()}}
	m.Blob = make([]byte, r.IntN(100))
	pos := uint64(0)
	for range r.IntN(5) {
		from := pos + r.Uint64N(1000)
		pos = from + 1 + r.Uint64N(1000)
		m.stale = append(m.stale, pageRange{from, pos})
	}
	g := generator{r: r}
	for range 3 {
		for _, e := range g.batch() {
			if e.Kind == 3 && e.Start&8191 == 0 && e.Sectors&8191 == 0 {
				m.coarse.Insert(e)
			}
		}
	}
	return m
}

func TestMetaCodec(t *testing.T) {
	r := rand.New(rand.NewPCG(newSeed(t), 0))
	for range 50 {
		m := randomMeta(r)
		rec := m.appendTo([]byte("abc"), volume)[3:]
		got, err := decodeMeta(rec, volume)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.appendTo(nil, volume), rec) || got.Position != m.Position || !slices.Equal(got.stale, m.stale) ||
			!slices.Equal(got.coarse.All(), m.coarse.All()) {
			t.Fatalf("got %+v, want %+v", got, m)
		}
		for i := range rec {
			if _, err := decodeMeta(rec[:i], volume); !errors.Is(err, ErrDamaged) {
				t.Fatalf("prefix of %d bytes: %v", i, err)
			}
			x := bytes.Clone(rec)
			x[i] ^= 1 << r.IntN(8)
			if _, err := decodeMeta(x, volume); !errors.Is(err, ErrDamaged) {
				t.Fatalf("byte %d flipped: %v", i, err)
			}
		}
		if _, err := decodeMeta(rec, uuid.UUID{}); !errors.Is(err, ErrDamaged) {
			t.Fatalf("as another volume's: %v", err)
		}
	}
}

func TestPresence(t *testing.T) {
	r := rand.New(rand.NewPCG(newSeed(t), 0))
	const pages = 3 * chunkPages
	p, n := new(presence), make([]bool, pages)
	for range 2000 {
		from := r.Uint64N(pages)
		to := min(pages, from+r.Uint64N(1+r.Uint64N(pages)))
		if r.IntN(4) == 0 {
			want := 0
			for i := from; i < to; i++ {
				if n[i] {
					want++
				}
				n[i] = false
			}
			if got := p.clear(from, to); got != want {
				t.Fatalf("cleared %d, want %d", got, want)
			}
		} else {
			for range 20 {
				i := r.Uint64N(pages)
				p.set(i)
				n[i] = true
			}
		}
		i := r.Uint64N(pages)
		if p.has(i) != n[i] {
			t.Fatalf("page %d", i)
		}
		next, ok := p.next(i)
		for i < pages && !n[i] {
			i++
		}
		if ok != (i < pages) || ok && next != i {
			t.Fatalf("next is %d %v, want %d", next, ok, i)
		}
	}
	q := new(presence)
	for i := range p.chunks {
		if p.chunks[i] != nil {
			rec := p.appendChunk(nil, volume, i)
			if err := q.decodeChunk(rec, volume, uint64(i)); err != nil {
				t.Fatal(err)
			}
			for k := range len(rec) {
				x := bytes.Clone(rec)
				x[k] ^= 1 << r.IntN(8)
				if err := new(presence).decodeChunk(x, volume, uint64(i)); !errors.Is(err, ErrDamaged) {
					t.Fatalf("byte %d flipped: %v", k, err)
				}
			}
			if err := q.decodeChunk(rec, volume, uint64(i+1)); !errors.Is(err, ErrDamaged) {
				t.Fatalf("as another record: %v", err)
			}
		}
	}
	if q.count() != p.count() {
		t.Fatalf("%d pages, want %d", q.count(), p.count())
	}
}

func FuzzMetaDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 5 {
		f.Add(randomMeta(r).appendTo(nil, volume), true)
	}
	f.Fuzz(func(t *testing.T, rec []byte, fix bool) {
		if fix && len(rec) >= metaHeader {
			rec = bytes.Clone(rec)
			sum := metaCRC(rec)
			rec[72], rec[73], rec[74], rec[75] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
		}
		m, err := decodeMeta(rec, volume)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		if _, err := decodeMeta(m.appendTo(nil, volume), volume); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzPresenceDecode(f *testing.F) {
	p := new(presence)
	p.set(77)
	f.Add(p.appendChunk(nil, volume, 0))
	f.Fuzz(func(t *testing.T, rec []byte) {
		q := new(presence)
		if len(rec) == chunkRecord {
			rec = bytes.Clone(rec)
			sum := chunkCRC(rec)
			rec[32], rec[33], rec[34], rec[35] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
		}
		if q.decodeChunk(rec, volume, 0) == nil {
			q.next(0)
			q.clear(0, chunkPages)
		}
	})
}
