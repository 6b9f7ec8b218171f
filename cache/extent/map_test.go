package extent

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the randomized tests; 0: a new one")

func newRand(t testing.TB) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// naive maps each sector to the number of the operation that it comes from, plus 1.
type naive struct {
	ops []Extent
	at  []int32
}

func (n *naive) insert(e Extent) {
	n.ops = append(n.ops, e)
	id := int32(len(n.ops))
	for s := e.Start; s < e.End(); s++ {
		if x := n.at[s]; x == 0 || n.ops[x-1].LSN <= e.LSN {
			n.at[s] = id
		}
	}
}

func (n *naive) removeUpTo(start, count, lsn uint64) {
	for s := start; s < start+count; s++ {
		if x := n.at[s]; x != 0 && n.ops[x-1].LSN <= lsn {
			n.at[s] = 0
		}
	}
}

// check compares a lookup of [start, start+count) with the model.
func (n *naive) check(t *testing.T, what string, start, count uint64, got []Extent) {
	t.Helper()
	pos, end := start, start+count
	gap := func(to uint64) {
		for ; pos < to; pos++ {
			if n.at[pos] != 0 {
				t.Fatalf("%s %d+%d: sector %d is missing, want it from %+v", what, start, count, pos, n.ops[n.at[pos]-1])
			}
		}
	}
	for i, e := range got {
		if err := e.Validate(); err != nil || e.Start < pos || e.End() > end {
			t.Fatalf("%s %d+%d: extent %d is %+v, err %v", what, start, count, i, e, err)
		}
		if i > 0 && joins(&got[i-1], &e) {
			t.Fatalf("%s %d+%d: %+v and %+v are not joined", what, start, count, got[i-1], e)
		}
		gap(e.Start)
		for ; pos < e.End(); pos++ {
			if n.at[pos] == 0 {
				t.Fatalf("%s %d+%d: sector %d is in %+v, want a gap", what, start, count, pos, e)
			}
			op := n.ops[n.at[pos]-1]
			if g, w := e.Part(pos, 1), op.Part(pos, 1); g != w {
				t.Fatalf("%s %d+%d: sector %d is %+v, want %+v", what, start, count, pos, g, w)
			}
		}
	}
	gap(end)
}

// randomExtent returns an extent within [0, space) of roughly up to longest sectors.
func randomExtent(r *rand.Rand, space, longest, lsn uint64) Extent {
	e := Extent{LSN: lsn, Kind: Kind(1 + r.IntN(3))}
	e.Sectors = min(1+r.Uint64N(1+r.Uint64N(longest)), space)
	e.Start = r.Uint64N(space - e.Sectors + 1)
	if r.IntN(2) == 0 { // aligned, as a volume of 4096-byte blocks
		e.Start &^= 7
		e.Sectors = min((e.Sectors+7)&^7, space-e.Start)
	}
	e.Loc = Location{Ref: r.Uint64N(3), Epoch: uint32(r.IntN(2)), Sector: uint32(r.IntN(4)) * 1000, Header: uint16(r.IntN(2))}
	switch e.Kind {
	case Zero:
		e.Loc = Location{}
	case Same:
		e.Loc.Block = []uint8{1, 8}[r.IntN(2)]
	}
	return e
}

func TestMapModel(t *testing.T) {
	r := newRand(t)
	for round := range 12 {
		pages := uint64(3)
		ops := 1500
		longest := uint64(200)
		if round%3 == 2 { // with coarse ranges
			pages, ops = 3*MinCoarse, 60
		}
		space := pages * PageSectors
		m, n := NewMap(), &naive{at: make([]int32, space)}
		lsn := uint64(100)
		for op := range ops {
			lsn += r.Uint64N(2)
			size := longest
			if r.IntN(10) == 0 || round%3 == 2 && r.IntN(2) == 0 {
				size = 2 * space
			}
			e := randomExtent(r, space, size, lsn)
			switch r.IntN(8) {
			case 0: // an old one comes late
				e.LSN -= min(r.Uint64N(90), e.LSN-1)
				fallthrough
			default:
				m.Insert(e)
				n.insert(e)
			case 1, 2:
				old := lsn - min(lsn, r.Uint64N(60))
				m.RemoveUpTo(e.Start, e.Sectors, old)
				n.removeUpTo(e.Start, e.Sectors, old)
			}
			if round%3 != 2 || op%10 == 0 {
				q := randomExtent(r, space, size, 1)
				n.check(t, "lookup", q.Start, q.Sectors, m.Lookup(q.Start, q.Sectors, nil))
			}
		}
		n.check(t, "all", 0, space, m.Lookup(0, space, nil))
		n.check(t, "walk", 0, space, slices.Collect(m.Walk()))
		m.RemoveUpTo(0, space, lsn)
		if !m.Empty() || m.Bytes() > 1<<20 {
			t.Fatalf("not empty after everything was removed: %d extents, %d bytes", m.Extents(), m.Bytes())
		}
	}
}

// TestMapJoinsLookup: what Lookup appends never joins what the caller had before.
func TestMapAppends(t *testing.T) {
	m := NewMap()
	m.Insert(Extent{Start: 8, Sectors: 8, LSN: 1, Kind: Data})
	prefix := []Extent{{Start: 0, Sectors: 8, LSN: 1, Kind: Data, Loc: Location{Sector: 1<<32 - 8}}}
	if got := m.Lookup(8, 8, prefix); len(got) != 2 || got[0] != prefix[0] {
		t.Fatalf("got %+v", got)
	}
	m.Insert(Extent{Start: 16, Sectors: 2 * PageSectors, LSN: 2, Kind: Zero})
	prefix = []Extent{{Start: 8, Sectors: 8, LSN: 2, Kind: Zero}}
	if got := m.Lookup(16, 2*PageSectors, prefix); len(got) != 2 {
		t.Fatalf("got %+v", got)
	}
}

func TestMapWholeVolume(t *testing.T) {
	m := NewMap()
	for i := range uint64(1000) {
		m.Insert(Extent{Start: i << 27, Sectors: 8, LSN: i + 1, Kind: Data})
	}
	m.Insert(Extent{Start: 0, Sectors: MaxSectors, LSN: 500, Kind: Zero})
	if m.coarse.Len() != 1 || m.Pages() != 500 {
		t.Fatalf("%d coarse ranges, %d pages", m.coarse.Len(), m.Pages())
	}
	got := m.Lookup(0, MaxSectors, nil)
	if len(got) != 1001 || got[0].Kind != Zero || got[0].Sectors != 500<<27 || got[1000].End() != MaxSectors {
		t.Fatalf("%d extents, first %+v", len(got), got[0])
	}
	m.RemoveUpTo(4, MaxSectors-4, 500)
	got = m.Lookup(0, MaxSectors, nil)
	if len(got) != 501 || got[0] != (Extent{Start: 0, Sectors: 4, LSN: 500, Kind: Zero}) || m.coarse.Len() != 0 {
		t.Fatalf("%d extents, first %+v, %d coarse ranges", len(got), got[0], m.coarse.Len())
	}
}

func TestPhase(t *testing.T) {
	e := Extent{Start: 16, Sectors: 64, LSN: 1, Kind: Same, Loc: Location{Sector: 7, Block: 8}}
	for s := uint64(16); s < 80; s++ {
		p := e.Part(s, 1)
		if p.Loc != e.Loc || p.Phase() != s%8 {
			t.Fatalf("sector %d: %+v phase %d", s, p, p.Phase())
		}
	}
}

func TestValidate(t *testing.T) {
	bad := []Extent{
		{},
		{Sectors: 1},
		{Sectors: 1, Kind: 4},
		{Start: MaxSectors, Sectors: 1, Kind: Zero},
		{Start: 1, Sectors: 1<<64 - 1, Kind: Zero},
		{Sectors: MaxSectors + 1, Kind: Zero},
		{Sectors: 2, Kind: Data, Loc: Location{Sector: 1<<32 - 1}},
		{Sectors: 2, Kind: Data, Loc: Location{Block: 1}},
		{Sectors: 2, Kind: Same},
		{Sectors: 2, Kind: Same, Loc: Location{Block: 4}},
	}
	for _, e := range bad {
		if e.Validate() == nil {
			t.Errorf("%+v is valid", e)
		}
	}
	good := []Extent{
		{Sectors: MaxSectors, Kind: Zero},
		{Start: MaxSectors - 1, Sectors: 1, Kind: Data, Loc: Location{Sector: 1<<32 - 1}},
		{Sectors: MaxSectors, Kind: Same, Loc: Location{Block: 1}},
	}
	for _, e := range good {
		if err := e.Validate(); err != nil {
			t.Errorf("%+v: %v", e, err)
		}
	}
}

// TestMapKeepsMemory: growth and removal do not leak memory out of the books.
func TestMapBytes(t *testing.T) {
	m := NewMap()
	r := newRand(t)
	var lsn uint64
	for range 20 {
		for range 20000 {
			lsn++
			m.Insert(Extent{Start: r.Uint64N(1<<20) &^ 7, Sectors: 8, LSN: lsn, Kind: Data})
		}
		var real int64
		for i := range m.slots {
			real += m.slots[i].Bytes()
		}
		for _, f := range m.arena.free {
			for _, s := range f {
				real += int64(cap(s)) * entryBytes
			}
		}
		if real != m.arena.bytes {
			t.Fatalf("%d bytes in the books, %d in use", m.arena.bytes, real)
		}
		m.RemoveUpTo(0, 1<<20, lsn-uint64(r.IntN(20000)))
	}
}

func fullMap(b *testing.B) (*Map, *rand.Rand) {
	r := newRand(b)
	m := NewMap()
	for i := range uint64(1 << 20) { // 1 Mi extents of 4 KiB over 16 GiB, none joins
		m.Insert(Extent{Start: i * 32, Sectors: 8, LSN: i + 1, Kind: Data, Loc: Location{Ref: i}})
	}
	b.ReportMetric(float64(m.Bytes())/(1<<20), "B/extent")
	return m, r
}

func BenchmarkMapLookup(b *testing.B) {
	m, r := fullMap(b)
	out := make([]Extent, 0, 16)
	b.ReportAllocs()
	for b.Loop() {
		out = m.Lookup(r.Uint64N(1<<20)*32, 8, out[:0])
	}
	if len(out) != 1 {
		b.Fatal("not found")
	}
}

func BenchmarkMapLookup256K(b *testing.B) {
	m, r := fullMap(b)
	out := make([]Extent, 0, 64)
	b.ReportAllocs()
	for b.Loop() {
		out = m.Lookup(r.Uint64N(1<<20-32)*32, 512, out[:0])
	}
}

func BenchmarkMapInsert(b *testing.B) {
	m, r := fullMap(b)
	lsn := uint64(1 << 21)
	b.ReportAllocs()
	for b.Loop() {
		lsn++
		m.Insert(Extent{Start: r.Uint64N(1<<20) * 32, Sectors: 8, LSN: lsn, Kind: Data, Loc: Location{Ref: lsn}})
	}
}

// BenchmarkMapCycle is the life of a dirty extent: inserted, and removed later.
func BenchmarkMapCycle(b *testing.B) {
	r := newRand(b)
	m := NewMap()
	const live = 1 << 18
	ring := make([]uint64, live)
	lsn := uint64(0)
	step := func() {
		lsn++
		s := &ring[lsn%live]
		if lsn > live {
			m.RemoveUpTo(*s, 8, lsn-live)
		}
		*s = r.Uint64N(1<<30) &^ 7
		m.Insert(Extent{Start: *s, Sectors: 8, LSN: lsn, Kind: Data, Loc: Location{Ref: lsn}})
	}
	for range 2 * live {
		step()
	}
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
	b.ReportMetric(float64(m.Bytes())/live, "B/extent")
}

func BenchmarkMapUnmapVolume(b *testing.B) {
	b.ReportAllocs()
	m := NewMap()
	lsn := uint64(0)
	for b.Loop() {
		lsn += 2
		m.Insert(Extent{Start: 1 << 30, Sectors: 8, LSN: lsn, Kind: Data})
		m.Insert(Extent{Start: 0, Sectors: MaxSectors, LSN: lsn + 1, Kind: Zero})
	}
}
