package homemap

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache/extent"
)

var (
	seedFlag   = flag.Uint64("seed", 0, "seed of the randomized tests; 0: a new one")
	roundsFlag = flag.Int("rounds", 2, "rounds of the model test")
	damageFlag = flag.Int("damage", 3, "kinds of damage per file of the store")
)

func newSeed(t testing.TB) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	return seed
}

var (
	ctx    = context.Background()
	volume = uuid.MustParse("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
)

const testPages = 3 * extent.MinCoarse // of the volume in model tests

// model is what a map must say: per sector the extent that it comes from.
type model struct {
	ops []extent.Extent
	at  []int32 // number of the operation plus 1
}

func newModel() *model { return &model{at: make([]int32, testPages*extent.PageSectors)} }

func (n *model) insert(e extent.Extent) {
	n.ops = append(n.ops, e)
	id := int32(len(n.ops))
	for s := e.Start; s < e.End(); s++ {
		if x := n.at[s]; x == 0 || n.ops[x-1].LSN <= e.LSN {
			n.at[s] = id
		}
	}
}

func (n *model) clone() *model {
	return &model{ops: n.ops[:len(n.ops):len(n.ops)], at: append([]int32(nil), n.at...)}
}

func (n *model) check(what string, start, count uint64, got []extent.Extent) error {
	pos, end := start, start+count
	gap := func(to uint64) error {
		for ; pos < to; pos++ {
			if x := n.at[pos]; x != 0 && n.ops[x-1].Kind != extent.Zero {
				return fmt.Errorf("%s %d+%d: sector %d (page %d) reads as zeros, want it from %+v", what, start, count, pos, pos>>13, n.ops[x-1])
			}
		}
		return nil
	}
	for _, e := range got {
		if e.Validate() != nil || e.Start < pos || e.End() > end || e.Kind == extent.Zero {
			return fmt.Errorf("%s %d+%d: extent %+v", what, start, count, e)
		}
		if err := gap(e.Start); err != nil {
			return err
		}
		for ; pos < e.End(); pos++ {
			x := n.at[pos]
			if x == 0 || e.Part(pos, 1) != n.ops[x-1].Part(pos, 1) {
				want := extent.Extent{}
				if x != 0 {
					want = n.ops[x-1]
				}
				return fmt.Errorf("%s %d+%d: sector %d (page %d) is in %+v, want it from %+v", what, start, count, pos, pos>>13, e, want)
			}
		}
	}
	return gap(end)
}

func (n *model) checkMap(m *Map) error {
	got, err := m.Lookup(0, testPages*extent.PageSectors, nil)
	if err != nil {
		return err
	}
	return n.check("lookup", 0, testPages*extent.PageSectors, got)
}

// generator makes the object log of a volume: batches of extents.
type generator struct {
	r    *rand.Rand
	lsn  uint64
	half uint64 // the half page to be zeroed next, if it is odd
}

func (g *generator) batch() []extent.Extent {
	list := make([]extent.Extent, 1+g.r.IntN(12))
	const space = testPages * extent.PageSectors
	for i := range list {
		g.lsn++
		e := extent.Extent{LSN: g.lsn, Kind: extent.Data, Sectors: 1 + g.r.Uint64N(64)}
		switch g.r.IntN(10) {
		case 0, 1:
			e.Kind = extent.Zero
		case 2:
			e.Kind, e.Loc.Block = extent.Same, 8
		case 3:
			e.Sectors = 1 + g.r.Uint64N(3*extent.PageSectors)
		case 4: // half a page; the other half often follows
			e.Kind = extent.Zero
			half := g.half
			if g.half ^= 1; half&1 == 0 {
				g.half = 2*g.r.Uint64N(testPages) + 1
				half = g.half ^ 1
			}
			e.Start, e.Sectors = half*extent.PageSectors/2, extent.PageSectors/2
			list[i] = e
			continue
		}
		if e.Kind != extent.Data && g.r.IntN(20) == 0 {
			e.Sectors = 1 + g.r.Uint64N(space)
		}
		e.Sectors = min(e.Sectors, space)
		e.Start = g.r.Uint64N(space - e.Sectors + 1)
		if g.r.IntN(3) == 0 { // whole pages
			e.Start &^= extent.PageSectors - 1
			e.Sectors = min((e.Sectors+extent.PageSectors-1)&^(extent.PageSectors-1), space-e.Start)
		}
		if e.Kind != extent.Zero {
			e.Loc.Ref, e.Loc.Sector = g.lsn, uint32(g.r.IntN(1000))
		}
		list[i] = e
	}
	g.r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

func smallCache(bytes int64) *PageCache {
	c := NewPageCache(CacheOptions{Registerer: prometheus.NewRegistry()})
	c.limit = bytes
	return c
}

func mustOpen(t testing.TB, s Store, c *PageCache) *Map {
	t.Helper()
	m, err := Open(s, volume, Options{Cache: c})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// replay opens a map after a crash and inserts what the log has behind its position.
func replay(r *rand.Rand, s Store, log [][]extent.Extent, between func(*Map, uint64) error) (*Map, error) {
	m, err := Open(s, volume, Options{Cache: smallCache(5 << 10)})
	if err != nil {
		return nil, err
	}
	c, _ := m.Position()
	for i := c.Seq; i < uint64(len(log)); {
		var call []extent.Extent
		for range 1 + r.IntN(2) { // several objects in one call
			if i < uint64(len(log)) {
				call = append(call, log[i]...)
				i++
			}
		}
		if err := m.Insert(call...); err != nil {
			return nil, err
		}
		if between != nil {
			if err := between(m, i); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

func TestMapModel(t *testing.T) {
	for range *roundsFlag {
		modelRun(t, newSeed(t))
	}
}

func modelRun(t *testing.T, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	s := NewMem()
	var crashed []*Mem
	faults := 0
	s.Fault = func(op string, applied bool) error {
		if len(crashed) < 4 && r.IntN(8) == 0 {
			crashed = append(crashed, s.CrashClone())
		}
		if !applied && r.IntN(10) == 0 {
			faults++
			return ErrNoSpace
		}
		return nil
	}
	m := mustOpen(t, s, smallCache(5<<10))
	n := newModel()
	g := &generator{r: r}
	var log [][]extent.Extent
	try := func(f func() error) {
		t.Helper()
		for {
			err := f()
			if err == nil {
				return
			}
			if !errors.Is(err, ErrNoSpace) {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
	}
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	for op := range 150 {
		b := g.batch()
		log = append(log, b)
		for _, e := range b {
			n.insert(e)
		}
		try(func() error { return m.Insert(b...) })
		start := r.Uint64N(testPages*extent.PageSectors - 20000)
		count := r.Uint64N(20000)
		got, err := m.Lookup(start, count, nil)
		fatal(err)
		fatal(n.check("lookup", start, count, got))
		if r.IntN(15) == 0 {
			c := Checkpoint{Position: Position{Epoch: 1, Seq: uint64(len(log)), LSN: g.lsn}, Blob: []byte{byte(op)}}
			try(func() error { return m.Checkpoint(ctx, c) })
			sn, err := m.Snapshot()
			fatal(err)
			if sn.Position != c.Position || string(sn.Blob) != string(c.Blob) {
				t.Fatalf("snapshot is at %+v, want %+v", sn.Checkpoint, c)
			}
			then := n.clone()
			for range r.IntN(5) { // Inserts go on
				b := g.batch()
				log = append(log, b)
				for _, e := range b {
					n.insert(e)
				}
				try(func() error { return m.Insert(b...) })
			}
			var all []extent.Extent
			fatal(sn.Walk(func(e extent.Extent) error { all = append(all, e); return nil }))
			sn.Close()
			fatal(then.check("snapshot", 0, testPages*extent.PageSectors, all))
		}
	}
	fatal(n.checkMap(m))
	fatal(m.Close())
	crashed = append(crashed, s.CrashClone())
	for _, c := range crashed {
		// Some crash once more while they catch up.
		var again []*Mem
		c.Fault = func(string, bool) error {
			if r.IntN(20) == 0 && len(again) < 2 {
				again = append(again, c.CrashClone())
			}
			return nil
		}
		m, err := replay(r, c, log, func(m *Map, seq uint64) error {
			if r.IntN(20) != 0 {
				return nil
			}
			return m.Checkpoint(ctx, Checkpoint{Position: Position{Seq: seq}})
		})
		fatal(err)
		fatal(n.checkMap(m))
		for _, c := range again {
			m, err := replay(r, c, log, nil)
			fatal(err)
			fatal(n.checkMap(m))
			fatal(m.Checkpoint(ctx, Checkpoint{Position: Position{Seq: uint64(len(log))}}))
			sn, err := m.Snapshot()
			fatal(err)
			var all []extent.Extent
			fatal(sn.Walk(func(e extent.Extent) error { all = append(all, e); return nil }))
			fatal(n.check("snapshot", 0, testPages*extent.PageSectors, all))
		}
	}
	t.Logf("%d objects, %d crashes, %d failed writes", len(log), len(crashed), faults)
}

// counting counts the calls of a store.
type counting struct {
	Store
	calls atomic.Int64
}

func (s *counting) Get(v uuid.UUID, t Table, key uint64, dst []byte) ([]byte, bool, error) {
	s.calls.Add(1)
	return s.Store.Get(v, t, key, dst)
}

func (s *counting) Scan(v uuid.UUID, t Table, from uint64, keys bool, fn func(uint64, []byte) (bool, error)) error {
	s.calls.Add(1)
	return s.Store.Scan(v, t, from, keys, fn)
}

func (s *counting) Apply(v uuid.UUID, b *Batch) error {
	s.calls.Add(1)
	return s.Store.Apply(v, b)
}

// TestUnmapVolume: an unmap of 64 TiB does no I/O, and the pages go in the course of
// later checkpoints.
func TestUnmapVolume(t *testing.T) {
	s := &counting{Store: NewMem()}
	m := mustOpen(t, s, smallCache(64<<10))
	for i := range uint64(1000) {
		if err := m.Insert(extent.Extent{Start: i << 27, Sectors: 8, LSN: i + 1, Kind: extent.Data}); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Checkpoint(ctx, Checkpoint{Position: Position{Seq: 1}}); err != nil {
		t.Fatal(err)
	}
	before := s.calls.Load()
	if err := m.Insert(extent.Extent{Sectors: extent.MaxSectors, LSN: 2000, Kind: extent.Zero}); err != nil {
		t.Fatal(err)
	}
	if err := m.Insert(extent.Extent{Start: 1 << 20, Sectors: 1 << 36, LSN: 2001, Kind: extent.Same, Loc: extent.Location{Block: 8}}); err != nil {
		t.Fatal(err)
	}
	got, err := m.Lookup(0, extent.MaxSectors, nil)
	if err != nil || len(got) != 1 || got[0].Sectors != 1<<36 {
		t.Fatalf("got %+v, err %v", got, err)
	}
	if n := s.calls.Load() - before; n != 0 {
		t.Fatalf("%d calls of the store", n)
	}
	if err := m.Checkpoint(ctx, Checkpoint{Position: Position{Seq: 2}}); err != nil {
		t.Fatal(err)
	}
	left := 0
	if err := s.Store.Scan(volume, Pages, 0, true, func(uint64, []byte) (bool, error) { left++; return true, nil }); err != nil {
		t.Fatal(err)
	}
	if left != 0 || m.PresentPages() != 0 {
		t.Fatalf("%d pages in the store, %d present", left, m.PresentPages())
	}
}

// TestManyCoarse: the number of coarse ranges stays bounded.
func TestManyCoarse(t *testing.T) {
	m := mustOpen(t, NewMem(), smallCache(1<<20))
	var list []extent.Extent
	for i := range uint64(maxCoarse + 200) {
		e := extent.Extent{Start: i * 128 * extent.PageSectors, Sectors: extent.MinCoarse * extent.PageSectors, LSN: i + 1, Kind: extent.Same, Loc: extent.Location{Block: 1, Ref: i}}
		list = append(list, e)
		if i == 100 || i == maxCoarse+100 {
			if err := m.Insert(list...); err != nil {
				t.Fatal(err)
			}
			list = nil
		}
	}
	if err := m.Insert(list...); err != nil {
		t.Fatal(err)
	}
	if m.coarse.Len() > maxCoarse {
		t.Fatalf("%d coarse ranges", m.coarse.Len())
	}
	if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	m.Close()
	m = mustOpen(t, m.store, smallCache(1<<20))
	for i := range uint64(maxCoarse + 200) {
		got, err := m.Lookup(i*128*extent.PageSectors, 128*extent.PageSectors, nil)
		if err != nil || len(got) != 1 || got[0].LSN != i+1 || got[0].Sectors != extent.MinCoarse*extent.PageSectors {
			t.Fatalf("range %d: %+v, err %v", i, got, err)
		}
	}
}

// TestManyStale: the list of stale ranges stays bounded and covers what it must.
func TestManyStale(t *testing.T) {
	m := mustOpen(t, NewMem(), smallCache(64<<20))
	const pages = 4 * maxStale
	var list, holes []extent.Extent
	for i := range uint64(pages) {
		list = append(list, extent.Extent{Start: i * extent.PageSectors, Sectors: 8, LSN: i + 1, Kind: extent.Data})
		if i%2 == 0 {
			holes = append(holes, extent.Extent{Start: i * extent.PageSectors, Sectors: extent.PageSectors, LSN: 2*pages + i, Kind: extent.Zero})
		}
	}
	for _, call := range [][]extent.Extent{list, holes} {
		if err := m.Insert(call...); err != nil {
			t.Fatal(err)
		}
		if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
			t.Fatal(err)
		}
	}
	left := 0
	m.store.Scan(volume, Pages, 0, true, func(num uint64, _ []byte) (bool, error) { left++; return true, nil })
	if left != pages/2 {
		t.Fatalf("%d pages left, want %d", left, pages/2)
	}
}

// TestLostPage: a page that is gone, or older than it must be, is damage, not zeros.
func TestLostPage(t *testing.T) {
	s := NewMem()
	m := mustOpen(t, s, smallCache(1<<20))
	if err := m.Insert(extent.Extent{Start: 5 * extent.PageSectors, Sectors: 8, LSN: 1, Kind: extent.Data}); err != nil {
		t.Fatal(err)
	}
	if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Snapshot(); err != nil {
		t.Fatal(err)
	}
	m.Close()
	if _, err := m.Lookup(0, 8, nil); !errors.Is(err, ErrClosed) {
		t.Fatalf("lookup after Close: %v", err)
	}

	lost := s.CrashClone()
	if err := lost.Apply(volume, &Batch{Records: []Record{{Pages, 5, nil}}}); err != nil {
		t.Fatal(err)
	}
	m = mustOpen(t, lost, smallCache(1<<20))
	if _, err := m.Lookup(5*extent.PageSectors, 8, nil); !errors.Is(err, ErrDamaged) {
		t.Fatalf("lookup of a lost page: %v", err)
	}
	if err := m.Insert(extent.Extent{Start: 5*extent.PageSectors + 100, Sectors: 8, LSN: 2, Kind: extent.Data}); !errors.Is(err, ErrDamaged) {
		t.Fatalf("insert into a lost page: %v", err)
	}
	sn, err := m.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if err := sn.Walk(func(extent.Extent) error { return nil }); !errors.Is(err, ErrDamaged) {
		t.Fatalf("walk over a lost page: %v", err)
	}

	for _, table := range []Table{Pages, Presence, Meta} {
		bad := s.CrashClone()
		key := uint64(0)
		if table == Pages {
			key = 5
		}
		v, _, _ := bad.Get(volume, table, key, nil)
		v[len(v)/2] ^= 4
		if err := bad.Apply(volume, &Batch{Records: []Record{{table, key, v}}}); err != nil {
			t.Fatal(err)
		}
		m, err := Open(bad, volume, Options{Cache: smallCache(1 << 20)})
		if err == nil {
			_, err = m.Lookup(5*extent.PageSectors, 8, nil)
		}
		if !errors.Is(err, ErrDamaged) {
			t.Fatalf("bit flipped in table %c: %v", table, err)
		}
	}
	gone := s.CrashClone()
	if err := gone.Apply(volume, &Batch{Records: []Record{{Presence, 0, nil}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(gone, volume, Options{Cache: smallCache(1 << 20)}); !errors.Is(err, ErrDamaged) {
		t.Fatalf("presence record gone: %v", err)
	}
}

func TestResetAndDrop(t *testing.T) {
	s := NewMem()
	m := mustOpen(t, s, smallCache(1<<20))
	insert := func(lsn uint64) {
		t.Helper()
		if err := m.Insert(extent.Extent{Start: 8 * lsn, Sectors: 8, LSN: lsn, Kind: extent.Data}); err != nil {
			t.Fatal(err)
		}
	}
	insert(1)
	if _, err := m.Snapshot(); !errors.Is(err, ErrNotCheckpointed) {
		t.Fatalf("snapshot: %v", err)
	}
	if err := m.Checkpoint(ctx, Checkpoint{Position: Position{LSN: 1}}); err != nil {
		t.Fatal(err)
	}
	if err := m.Reset(); err != nil {
		t.Fatal(err)
	}
	if _, ok := m.Position(); ok {
		t.Fatal("position after Reset")
	}
	insert(2)
	if got, err := m.Lookup(0, 1000, nil); err != nil || len(got) != 1 || got[0].LSN != 2 {
		t.Fatalf("got %+v, err %v", got, err)
	}
	// A crash before the first checkpoint: pages without a meta record are dropped.
	m.flushMu.Lock()
	if _, err := m.flushSome(); err != nil {
		t.Fatal(err)
	}
	m.flushMu.Unlock()
	c := s.CrashClone()
	m2 := mustOpen(t, c, smallCache(1<<20))
	if got, err := m2.Lookup(0, 1000, nil); err != nil || len(got) != 0 || len(c.records) != 0 {
		t.Fatalf("got %+v, err %v, %d records", got, err, len(c.records))
	}
	if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	if v, err := s.Volumes(); err != nil || len(v) != 1 || v[0] != volume {
		t.Fatalf("volumes %v, err %v", v, err)
	}
	if err := m.Drop(); err != nil || len(s.records) != 0 {
		t.Fatalf("%v, %d records", err, len(s.records))
	}
	if m.cache.Bytes() != 0 || m.cache.DirtyBytes() != 0 || len(m.cache.ring) != 0 || len(m.cache.maps) != 0 {
		t.Fatalf("the cache still has %d bytes", m.cache.Bytes())
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	// An interrupted drop.
	fail := errors.New("power cut")
	d := c.CrashClone()
	m3 := mustOpen(t, d, smallCache(1<<20))
	if err := m3.Insert(extent.Extent{Start: 0, Sectors: 8, LSN: 1, Kind: extent.Data}); err != nil {
		t.Fatal(err)
	}
	if err := m3.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	steps := 0
	d.Fault = func(op string, applied bool) error {
		if steps++; op == "drop" && steps == 2 {
			return fail
		}
		return nil
	}
	if err := m3.Drop(); !errors.Is(err, fail) {
		t.Fatal(err)
	}
	m4 := mustOpen(t, d.CrashClone(), smallCache(1<<20))
	if _, ok := m4.Position(); ok || m4.PresentPages() != 0 {
		t.Fatal("a volume whose drop was interrupted came back")
	}
}

// TestConcurrent runs lookups beside inserts, checkpoints and another volume, with a
// cache that is far too small. Each page has one extent, whose LSN only grows.
func TestConcurrent(t *testing.T) {
	s := NewMem()
	c := smallCache(16 << 10)
	const pages = 400
	var floor [pages]atomic.Uint64
	maps := make([]*Map, 2)
	for i := range maps {
		m, err := Open(s, uuid.New(), Options{Cache: c})
		if err != nil {
			t.Fatal(err)
		}
		maps[i] = m
	}
	seed := newSeed(t)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	fail := func(err error) bool {
		if err != nil {
			t.Error(err)
		}
		return err != nil
	}
	for i, m := range maps {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			defer func() {
				if i == 0 {
					close(stop)
				}
			}()
			for lsn := uint64(1); lsn < 4000; lsn++ {
				p := r.Uint64N(pages)
				e := extent.Extent{Start: p*extent.PageSectors + 16, Sectors: 8, LSN: lsn, Kind: extent.Data, Loc: extent.Location{Ref: lsn}}
				if fail(m.Insert(e)) {
					return
				}
				if i == 0 {
					floor[p].Store(lsn)
				}
				if r.IntN(300) == 0 && fail(m.Checkpoint(ctx, Checkpoint{Position: Position{LSN: lsn}})) {
					return
				}
			}
		})
	}
	for i := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(10+i)))
			var out []extent.Extent
			for {
				select {
				case <-stop:
					return
				default:
				}
				p := r.Uint64N(pages)
				least := floor[p].Load()
				var err error
				out, err = maps[0].Lookup(p*extent.PageSectors, extent.PageSectors, out[:0])
				if fail(err) {
					return
				}
				if least > 0 && (len(out) != 1 || out[0].LSN < least || out[0].Loc.Ref != out[0].LSN) {
					t.Errorf("page %d: %+v, want LSN %d or more", p, out, least)
					return
				}
			}
		})
	}
	wg.Wait()
	if c.DirtyBytes() > c.limit || c.Bytes() > c.limit+4*(pageOverhead+64) {
		t.Fatalf("%d bytes, %d dirty, limit %d", c.Bytes(), c.DirtyBytes(), c.limit)
	}
	for _, m := range maps {
		m.Close()
	}
	if c.Bytes() != 0 || c.DirtyBytes() != 0 {
		t.Fatalf("%d bytes, %d dirty after Close", c.Bytes(), c.DirtyBytes())
	}
}

// hooked calls functions in the middle of a store's calls.
type hooked struct {
	Store
	got      func() // after a Get, before it returns
	applying func() // before an Apply
}

func once(f *func()) {
	if g := *f; g != nil {
		*f = nil
		g()
	}
}

func (s *hooked) Get(v uuid.UUID, t Table, key uint64, dst []byte) ([]byte, bool, error) {
	dst, ok, err := s.Store.Get(v, t, key, dst)
	once(&s.got)
	return dst, ok, err
}

func (s *hooked) Apply(v uuid.UUID, b *Batch) error {
	once(&s.applying)
	return s.Store.Apply(v, b)
}

// TestOldRecord: what a lookup read from the store does not count if the page was
// changed, written and evicted meanwhile, or unmapped.
func TestOldRecord(t *testing.T) {
	for _, kind := range []extent.Kind{extent.Data, extent.Zero} {
		s := &hooked{Store: NewMem()}
		m := mustOpen(t, s, smallCache(1<<20))
		insert := func(e extent.Extent) {
			if err := m.Insert(e); err != nil {
				t.Fatal(err)
			}
		}
		out := func() { // write and evict all
			if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
				t.Fatal(err)
			}
			m.cache.limit = 0
			m.cache.evict()
			m.cache.limit = 1 << 20
			if len(m.pages) != 0 {
				t.Fatal("not evicted")
			}
		}
		insert(extent.Extent{Start: 8, Sectors: 8, LSN: 1, Kind: extent.Data})
		out()
		s.got = func() {
			if kind == extent.Data {
				insert(extent.Extent{Start: 8, Sectors: 8, LSN: 2, Kind: extent.Data})
			} else {
				insert(extent.Extent{Start: 0, Sectors: extent.PageSectors, LSN: 2, Kind: extent.Zero})
			}
			out()
		}
		got, err := m.Lookup(8, 8, nil)
		if err != nil || (kind == extent.Data) != (len(got) == 1) || (len(got) == 1 && got[0].LSN != 2) {
			t.Fatalf("%v: got %+v, err %v", kind, got, err)
		}
	}
}

// TestDirtyAgain: a page that changes while it is written stays dirty.
func TestDirtyAgain(t *testing.T) {
	mem := NewMem()
	s := &hooked{Store: mem}
	m := mustOpen(t, s, smallCache(1<<20))
	if err := m.Insert(extent.Extent{Start: 8, Sectors: 8, LSN: 1, Kind: extent.Data}); err != nil {
		t.Fatal(err)
	}
	s.applying = func() {
		if err := m.Insert(extent.Extent{Start: 8, Sectors: 8, LSN: 2, Kind: extent.Data}); err != nil {
			t.Error(err)
		}
	}
	if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	m = mustOpen(t, mem.CrashClone(), smallCache(1<<20))
	if got, err := m.Lookup(8, 8, nil); err != nil || len(got) != 1 || got[0].LSN != 2 {
		t.Fatalf("got %+v, err %v", got, err)
	}
}

func TestCheckpointContext(t *testing.T) {
	m := mustOpen(t, NewMem(), smallCache(1<<20))
	done, cancel := context.WithCancel(ctx)
	cancel()
	if err := m.Checkpoint(done, Checkpoint{}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := m.Checkpoint(ctx, Checkpoint{Blob: make([]byte, MaxBlob+1)}); err == nil {
		t.Fatal("too large a blob was taken")
	}
	if err := m.Insert(extent.Extent{Sectors: 1, Kind: 77}); !errors.Is(err, extent.ErrInvalid) {
		t.Fatal(err)
	}
	if _, err := m.Lookup(extent.MaxSectors, 1, nil); !errors.Is(err, extent.ErrInvalid) {
		t.Fatal(err)
	}
}
