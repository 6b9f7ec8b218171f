package homemap

import (
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/isergate/isergate/cache/extent"
)

var extentsFlag = flag.Int("extents", 60_000, "extents in the memory bound test; 4000000 is the full one")

// TestMemoryBound inserts random 4-KiB extents all over 16 TiB and looks some up; the
// page cache stays within its budget, whatever happens.
func TestMemoryBound(t *testing.T) {
	seed := newSeed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	s := mustOpenBadger(t, t.TempDir())
	defer s.Close()
	c := NewPageCache(CacheOptions{Bytes: 2 << 20})
	m := mustOpen(t, s, c)
	const space = 16 << 40 / extent.SectorSize
	type sample struct{ start, lsn uint64 }
	var samples []sample
	var high int64
	var lsn uint64
	batch := make([]extent.Extent, 0, 2048) // an object of 8 MiB
	for lsn < uint64(*extentsFlag) {
		batch = batch[:0]
		for range 2048 {
			lsn++
			e := extent.Extent{Start: r.Uint64N(space) &^ 7, Sectors: 8, LSN: lsn, Kind: extent.Data, Loc: extent.Location{Ref: lsn}}
			batch = append(batch, e)
			if r.IntN(200) == 0 {
				samples = append(samples, sample{e.Start, lsn})
			}
		}
		if err := m.Insert(batch...); err != nil {
			t.Fatal(err)
		}
		high = max(high, c.Bytes())
		if lsn%(2048*64) == 0 {
			if err := m.Checkpoint(ctx, Checkpoint{Position: Position{LSN: lsn}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := m.Checkpoint(ctx, Checkpoint{Position: Position{LSN: lsn}}); err != nil {
		t.Fatal(err)
	}
	var out []extent.Extent
	for _, x := range samples {
		var err error
		if out, err = m.Lookup(x.start, 8, out[:0]); err != nil {
			t.Fatal(err)
		}
		found := false
		for _, e := range out {
			found = found || e.LSN >= x.lsn
		}
		if !found {
			t.Fatalf("sector %d: %+v, want LSN %d or more", x.start, out, x.lsn)
		}
		high = max(high, c.Bytes())
	}
	if c.limit != 2<<20 || high > c.limit+64<<10 {
		t.Fatalf("%d bytes at most, the budget is %d", high, c.limit)
	}
	t.Logf("%d extents, %d pages, %d bytes of pages at most, %d beside", lsn, m.PresentPages(), high, m.Bytes())
}

func BenchmarkInsertRandom(b *testing.B) {
	s := mustOpenBadger(b, b.TempDir())
	defer s.Close()
	m := mustOpen(b, s, NewPageCache(CacheOptions{}))
	r := rand.New(rand.NewPCG(1, 1))
	lsn := uint64(0)
	const space = 16 << 40 / extent.SectorSize
	b.ReportAllocs()
	for b.Loop() {
		lsn++
		if err := m.Insert(extent.Extent{Start: r.Uint64N(space) &^ 7, Sectors: 8, LSN: lsn, Kind: extent.Data, Loc: extent.Location{Ref: lsn}}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLookupHit(b *testing.B) {
	m := mustOpen(b, NewMem(), NewPageCache(CacheOptions{Bytes: 128 << 20}))
	for i := range uint64(1 << 20) {
		if err := m.Insert(extent.Extent{Start: i * 32, Sectors: 8, LSN: i + 1, Kind: extent.Data, Loc: extent.Location{Ref: i}}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		var out []extent.Extent
		for pb.Next() {
			var err error
			if out, err = m.Lookup(r.Uint64N(1<<20)*32, 8, out[:0]); err != nil || len(out) != 1 {
				b.Fatal(err, len(out))
			}
		}
	})
}
