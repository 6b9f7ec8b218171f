package extent

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

func randomPage(r *rand.Rand, ops int, base uint64) (*Page, *naive) {
	p, n := new(Page), &naive{at: make([]int32, base+PageSectors)}
	for i := range ops {
		e := randomExtent(r, PageSectors, 100, uint64(i/2+1))
		e.Start += base
		p.Insert(e)
		n.insert(e)
	}
	return p, n
}

func TestPageModel(t *testing.T) {
	r := newRand(t)
	for round := range 30 {
		base := uint64(round%2) * 5 * PageSectors
		p, n := randomPage(r, 400, base)
		for range 100 {
			q := randomExtent(r, PageSectors, PageSectors, 0)
			n.check(t, "lookup", base+q.Start, q.Sectors, p.Lookup(base+q.Start, q.Sectors, nil))
			switch q.Kind {
			case Data:
				lsn := r.Uint64N(220)
				p.RemoveUpTo(base+q.Start, q.Sectors, lsn)
				n.removeUpTo(base+q.Start, q.Sectors, lsn)
			case Same: // fill gaps only: lower than all
				q.Start += base
				before := slices.Clone(n.at)
				p.fill(q, nil)
				n.insert(q)
				for s, x := range before {
					if x != 0 {
						n.at[s] = x
					}
				}
			}
		}
		p.DropZeros()
		for s, x := range n.at {
			if x != 0 && n.ops[x-1].Kind == Zero {
				n.at[s] = 0
			}
		}
		n.check(t, "without zeros", base, PageSectors, p.Lookup(base, PageSectors, nil))
	}
}

func TestPageCodec(t *testing.T) {
	r := newRand(t)
	id := PageID{Volume: [16]byte{1, 2, 3}, Number: 5}
	for _, ops := range []int{0, 1, 10, 300} {
		p, n := randomPage(r, ops, 5*PageSectors)
		p.SetLSN(1000)
		rec := p.AppendEncode([]byte("abc"), id)[3:]
		if len(rec) != p.EncodedLen() {
			t.Fatalf("%d bytes, said %d", len(rec), p.EncodedLen())
		}
		var q Page
		if err := q.Decode(rec, id); err != nil {
			t.Fatal(err)
		}
		if q.LSN() != 1000 {
			t.Fatalf("LSN %d", q.LSN())
		}
		n.check(t, "decoded", 5*PageSectors, PageSectors, q.Lookup(5*PageSectors, PageSectors, nil))
		if !bytes.Equal(q.AppendEncode(nil, id), rec) {
			t.Fatal("encoded again, it differs")
		}
		for i := range rec {
			if err := q.Decode(rec[:i], id); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("prefix of %d of %d bytes: %v", i, len(rec), err)
			}
			x := bytes.Clone(rec)
			x[i] ^= 1 << r.IntN(8)
			if err := q.Decode(x, id); err == nil || q.Len() != 0 {
				t.Fatalf("byte %d flipped: %v", i, err)
			}
		}
		for _, other := range []PageID{{Number: 5}, {Volume: id.Volume, Number: 6}} {
			if err := q.Decode(rec, other); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("as another page: %v", err)
			}
		}
		x := bytes.Clone(rec)
		x[4] = 2
		if err := q.Decode(x, id); !errors.Is(err, ErrVersion) {
			t.Fatalf("version 2: %v", err)
		}
	}
}

// TestPageDecodeChecks: a record with a good checksum is looked at too.
func TestPageDecodeChecks(t *testing.T) {
	good := entry{start: 10, n: 5, kind: Data, lsn: 3}
	bad := map[string][]entry{
		"empty entry":      {{start: 10, kind: Data}},
		"unknown kind":     {{start: 10, n: 1, kind: 9}},
		"beyond the page":  {{start: 8191, n: 2, kind: Zero}},
		"overlap":          {good, {start: 14, n: 5, kind: Zero}},
		"order":            {good, {start: 2, n: 5, kind: Zero}},
		"above page's LSN": {{start: 1, n: 1, kind: Zero, lsn: 11}},
		"block of zeros":   {{start: 1, n: 1, kind: Zero, block: 1}},
		"block of 3":       {{start: 1, n: 1, kind: Same, block: 3}},
		"payload's end":    {{start: 1, n: 2, kind: Data, sector: 1<<32 - 1}},
	}
	for name, list := range bad {
		rec := (&Page{lsn: 10, entries: list}).AppendEncode(nil, PageID{})
		var q Page
		if err := q.Decode(rec, PageID{}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	rec := (&Page{lsn: 10, entries: []entry{good}}).AppendEncode(nil, PageID{})
	if err := new(Page).Decode(rec, PageID{}); err != nil {
		t.Error(err)
	}
}

func FuzzPageDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, ops := range []int{0, 3, 50} {
		p, _ := randomPage(r, ops, 0)
		f.Add(p.AppendEncode(nil, PageID{}), true)
	}
	f.Fuzz(func(t *testing.T, rec []byte, fix bool) {
		if fix && len(rec) >= pageHeader { // reach what is behind the checksum
			sum := pageCRC(rec)
			rec = append(append(bytes.Clone(rec[:44]), byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)), rec[48:]...)
		}
		var p Page
		if p.Decode(rec, PageID{}) != nil {
			return
		}
		if got := p.AppendEncode(nil, PageID{}); !bytes.Equal(got, rec) {
			t.Fatal("encoded again, it differs")
		}
		p.Insert(Extent{Start: 100, Sectors: 1000, LSN: 1<<64 - 1, Kind: Zero})
		if got := p.Lookup(100, 1000, nil); len(got) != 1 {
			t.Fatalf("got %+v", got)
		}
		p.RemoveUpTo(0, PageSectors, 1<<64-1)
		if p.Len() != 0 {
			t.Fatal("not empty")
		}
	})
}

func BenchmarkPageInsert(b *testing.B) {
	r := newRand(b)
	var p Page
	lsn := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		lsn++
		p.Insert(Extent{Start: r.Uint64N(1024) * 8, Sectors: 8, LSN: lsn, Kind: Data, Loc: Location{Ref: lsn}})
	}
}

func BenchmarkPageDecode(b *testing.B) {
	var p Page
	for i := range uint64(1024) {
		p.Insert(Extent{Start: i * 8, Sectors: 8, LSN: i, Kind: Data, Loc: Location{Ref: i}})
	}
	rec := p.AppendEncode(nil, PageID{})
	b.SetBytes(int64(len(rec)))
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Decode(rec, PageID{}); err != nil {
			b.Fatal(err)
		}
	}
}
