package homemap

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/extent"
)

// Options configure a Map.
type Options struct {
	Cache *PageCache // required; shared by the maps of a node
}

// Map is the home map of one volume. Lookup may be called concurrently with
// everything; Insert, Checkpoint, Snapshot and Reset exclude each other and are meant
// for the one goroutine that follows the object log.
type Map struct {
	store  Store
	volume uuid.UUID
	cache  *PageCache

	insertMu sync.Mutex // held by whoever changes what the map says; first in the order
	flushMu  sync.Mutex // held by whoever writes to the store; second
	batch    Batch      // guarded by flushMu

	mu         sync.RWMutex // guards what follows; third
	pages      map[uint64]*page
	dirty      map[uint64]*page
	dirtyBytes atomic.Int64
	present    *presence
	coarse     extent.Coarse // Same only, below the pages
	stale      []pageRange   // where the store may hold pages that are not present
	removals   [256]uint32   // pages that left memory, by number
	last       Checkpoint    // the durable one
	hasLast    bool
	changed    bool  // since the last checkpoint
	closed     error // why no call works any more
}

// Open opens the volume's map as its last checkpoint left it, or empty if there is
// none. After a crash pages may be ahead of the checkpoint; the caller inserts all
// that the object log has behind Position again, before it looks anything up.
func Open(store Store, volume uuid.UUID, o Options) (*Map, error) {
	if o.Cache == nil {
		return nil, fmt.Errorf("homemap: no page cache given")
	}
	m := &Map{store: store, volume: volume, cache: o.Cache}
	m.clear()
	rec, ok, err := store.Get(volume, Meta, 0, nil)
	if err != nil {
		return nil, err
	}
	if !ok {
		// A drop that was interrupted, or a crash before the first checkpoint.
		found := false
		for _, t := range []Table{Pages, Presence} {
			err := store.Scan(volume, t, 0, true, func(uint64, []byte) (bool, error) { found = true; return false, nil })
			if err != nil {
				return nil, err
			}
		}
		if found {
			if err := store.Drop(volume); err != nil {
				return nil, err
			}
		}
	} else {
		d, err := decodeMeta(rec, volume)
		if err != nil {
			return nil, err
		}
		var sum digest
		err = store.Scan(volume, Presence, 0, false, func(key uint64, value []byte) (bool, error) {
			sum.add(value)
			return true, m.present.decodeChunk(value, volume, key)
		})
		if err != nil {
			return nil, err
		}
		if sum != d.digest {
			return nil, fmt.Errorf("%w: presence records do not belong to the checkpoint", ErrDamaged)
		}
		m.last, m.coarse, m.stale, m.hasLast = d.Checkpoint, d.coarse, d.stale, true
	}
	m.cache.attach(m)
	return m, nil
}

func (m *Map) clear() {
	m.pages, m.dirty, m.present = make(map[uint64]*page), make(map[uint64]*page), new(presence)
	m.coarse, m.stale = extent.Coarse{}, nil
	m.last, m.hasLast, m.changed = Checkpoint{}, false, false
}

// Position returns what the last durable checkpoint saved. ok is false if there was
// none: the map then starts from nothing.
func (m *Map) Position() (c Checkpoint, ok bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.last, m.hasLast
}

// Bytes is the memory of the map outside of the page cache: presence bits and coarse
// ranges. It is at most 3 MiB for 64 TiB.
func (m *Map) Bytes() int64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	n := m.coarse.Bytes()
	for _, c := range m.present.chunks {
		if c != nil {
			n += chunkPages / 8
		}
	}
	return n
}

// PresentPages is the number of pages with content of their own.
func (m *Map) PresentPages() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.present.count()
}

// dropPageLocked removes a page from memory.
func (m *Map) dropPageLocked(p *page) {
	delete(m.pages, p.num)
	m.removals[p.num%256]++
	m.cleanLocked(p)
	m.cache.used.Add(-p.size)
	m.cache.remove(p)
}

func (m *Map) cleanLocked(p *page) {
	if p.dirty.Load() {
		p.dirty.Store(false)
		delete(m.dirty, p.num)
		m.dirtyBytes.Add(-p.size)
		m.cache.dirty.Add(-p.size)
	}
}

// addPageLocked puts a clean page into memory.
func (m *Map) addPageLocked(p *page) {
	p.size = p.Bytes() + pageOverhead
	p.ref.Store(true)
	m.pages[p.num] = p
	m.cache.used.Add(p.size)
	m.cache.add(p)
}

// resizedLocked accounts for a page that changed size.
func (m *Map) resizedLocked(p *page) {
	d := p.Bytes() + pageOverhead - p.size
	p.size += d
	m.cache.used.Add(d)
	if p.dirty.Load() {
		m.dirtyBytes.Add(d)
		m.cache.dirty.Add(d)
	}
}

func (m *Map) markDirtyLocked(p *page) {
	p.gen++
	m.resizedLocked(p)
	if !p.dirty.Load() {
		p.dirty.Store(true)
		m.dirty[p.num] = p
		m.dirtyBytes.Add(p.size)
		m.cache.dirty.Add(p.size)
	}
}

// read reads and decodes a page from the store. nil: it has none.
func (m *Map) read(num uint64) (*page, error) {
	buf := recordBufs.Get().(*[]byte)
	defer recordBufs.Put(buf)
	rec, ok, err := m.store.Get(m.volume, Pages, num, (*buf)[:0])
	*buf = rec[:0]
	if err != nil || !ok {
		return nil, err
	}
	p := &page{m: m, num: num}
	if err := p.Decode(rec, extent.PageID{Volume: m.volume, Number: num}); err != nil {
		return nil, fmt.Errorf("%w: volume %s page %d: %w", ErrDamaged, m.volume, num, err)
	}
	return p, nil
}

var recordBufs = sync.Pool{New: func() any { return new([]byte) }}

// load brings a present page into memory. It returns with m.mu held for writing,
// without error; the page is nil if it turned out not to be present.
func (m *Map) load(num uint64) (*page, error) {
	for try := 0; ; try++ {
		m.mu.Lock()
		if m.closed != nil {
			defer m.mu.Unlock()
			return nil, m.closed
		}
		if p := m.pages[num]; p != nil || !m.present.has(num) {
			return p, nil
		}
		seen := m.removals[num%256]
		wait := try < 3 // then read with the lock held, so that it comes to an end
		if wait {
			m.mu.Unlock()
		}
		p, err := m.read(num)
		if wait {
			m.mu.Lock()
		}
		if err == nil && m.closed != nil {
			err = m.closed
		}
		if err != nil {
			m.mu.Unlock()
			return nil, err
		}
		// If the page was in memory meanwhile, what was read may be old.
		if m.pages[num] != nil || !m.present.has(num) || m.removals[num%256] != seen {
			m.mu.Unlock()
			continue
		}
		if p == nil {
			m.mu.Unlock()
			return nil, fmt.Errorf("%w: volume %s page %d is missing", ErrDamaged, m.volume, num)
		}
		m.cache.misses.Inc()
		m.addPageLocked(p)
		return p, nil
	}
}

// Lookup appends to out what is in the bucket of the n sectors from start on, clipped
// and in order. What is left out is zeros; no extent of kind Zero is returned. An error
// is ErrDamaged, ErrClosed or one of the store.
func (m *Map) Lookup(start, n uint64, out []extent.Extent) ([]extent.Extent, error) {
	if n > extent.MaxSectors || start > extent.MaxSectors-n {
		return out, fmt.Errorf("%w: lookup of %d+%d", extent.ErrInvalid, start, n)
	}
	from, pos, end := len(out), start, start+n
	for pos < end {
		num := pos >> extent.PageShift
		m.mu.RLock()
		if m.closed != nil {
			defer m.mu.RUnlock()
			return out[:from], m.closed
		}
		p := m.pages[num]
		switch {
		case p != nil:
			stop := min(end, (num+1)<<extent.PageShift)
			out = appendPage(p, pos, stop, out, from)
			pos = stop
			if !p.ref.Load() {
				p.ref.Store(true)
			}
			m.mu.RUnlock()
			m.cache.hits.Inc()
		case !m.present.has(num):
			// Up to the next present page only the coarse ranges count.
			stop := end
			if end > (num+1)<<extent.PageShift {
				if next, ok := m.present.next(num); ok {
					stop = min(end, next<<extent.PageShift)
				}
			}
			out = m.coarse.Append(pos, stop, out, from)
			pos = stop
			m.mu.RUnlock()
		default:
			m.mu.RUnlock()
			p, err := m.load(num)
			if err != nil {
				return out[:from], err
			}
			if p != nil {
				stop := min(end, (num+1)<<extent.PageShift)
				out = appendPage(p, pos, stop, out, from)
				pos = stop
			}
			m.mu.Unlock()
			m.cache.evict()
		}
	}
	return out, nil
}

// appendPage appends the part of a page without zeros.
func appendPage(p *page, pos, stop uint64, out []extent.Extent, from int) []extent.Extent {
	at := len(out)
	out = p.Lookup(pos, stop-pos, out)
	w := at
	for _, e := range out[at:] {
		if e.Kind != extent.Zero {
			out = extent.Append(out[:w], from, e)
			w = len(out)
		}
	}
	return out[:w]
}

// piece is the part of an extent in one page.
type piece struct {
	num uint64
	e   extent.Extent
}

// Insert maps extents that are in the bucket now. Calls follow the object log; within
// a call the higher LSN wins, in any order. It may write pages to the store to keep the
// number of dirty ones bounded, and is repeated after an error (ErrNoSpace, say): it
// does not matter how much of it was done.
func (m *Map) Insert(extents ...extent.Extent) error {
	m.insertMu.Lock()
	defer m.insertMu.Unlock()
	var ranges []extent.Extent // whole pages of one origin
	var pieces []piece
	for _, e := range extents {
		if err := e.Validate(); err != nil {
			return err
		}
		atLeast := uint64(1)
		if e.Kind == extent.Same {
			atLeast = extent.MinCoarse
		}
		head, mid, tail := extent.Split(e, atLeast)
		pieces = appendPieces(pieces, head)
		pieces = appendPieces(pieces, tail)
		if mid.Sectors > 0 {
			ranges = append(ranges, mid)
		}
	}
	var over extent.Coarse // the ranges of this call, to hide older pieces of it
	if len(ranges) > 0 {
		slices.SortStableFunc(ranges, func(a, b extent.Extent) int { return cmp.Compare(a.LSN, b.LSN) })
		m.mu.Lock()
		if m.closed != nil {
			defer m.mu.Unlock()
			return m.closed
		}
		for _, e := range ranges {
			m.setRangeLocked(e)
			over.Insert(e)
		}
		m.mu.Unlock()
		if err := m.settle(); err != nil {
			return err
		}
	}
	slices.SortStableFunc(pieces, func(a, b piece) int { return cmp.Compare(a.num, b.num) })
	for len(pieces) > 0 {
		k := 1
		for k < len(pieces) && pieces[k].num == pieces[0].num {
			k++
		}
		here := pieces[:k]
		pieces = pieces[k:]
		if c, ok := over.At(here[0].num); ok {
			here = slices.DeleteFunc(slices.Clone(here), func(p piece) bool { return p.e.LSN < c.LSN })
			if len(here) == 0 {
				continue
			}
		}
		if err := m.insertPage(here); err != nil {
			return err
		}
	}
	return nil
}

func appendPieces(list []piece, e extent.Extent) []piece {
	for e.Sectors > 0 {
		num := e.Start >> extent.PageShift
		n := min(e.Sectors, (num+1)<<extent.PageShift-e.Start)
		list = append(list, piece{num, e.Part(e.Start, n)})
		if n == e.Sectors {
			break
		}
		e = e.Part(e.Start+n, e.Sectors-n)
	}
	return list
}

// setRangeLocked makes whole pages zero, or one repeated block.
func (m *Map) setRangeLocked(e extent.Extent) {
	from, to := e.Start>>extent.PageShift, e.End()>>extent.PageShift
	if m.present.clear(from, to) > 0 {
		m.addStaleLocked(pageRange{from, to})
		if to-from < uint64(len(m.pages)) {
			for num := from; num < to; num++ {
				if p := m.pages[num]; p != nil {
					m.dropPageLocked(p)
				}
			}
		} else {
			for num, p := range m.pages {
				if num >= from && num < to {
					m.dropPageLocked(p)
				}
			}
		}
	}
	m.coarse.RemoveUpTo(e.Start, e.Sectors, ^uint64(0))
	if e.Kind == extent.Same {
		m.coarse.Insert(e)
	}
	m.changed = true
}

// insertPage applies the pieces of one page in one step, so that a page is never
// written with half of a call.
func (m *Map) insertPage(here []piece) error {
	num := here[0].num
	var p *page
	whole := slices.ContainsFunc(here, func(x piece) bool { return x.e.Sectors == extent.PageSectors })
	if whole { // nothing below shines through
		m.mu.Lock()
		if m.closed != nil {
			defer m.mu.Unlock()
			return m.closed
		}
		p = m.pages[num]
	} else {
		var err error
		if p, err = m.load(num); err != nil {
			return err
		}
	}
	if p == nil {
		p = &page{m: m, num: num}
		if c, ok := m.coarse.At(num); ok && !whole {
			p.Insert(c.Part(num<<extent.PageShift, extent.PageSectors))
		}
		m.addPageLocked(p)
		m.present.set(num)
	} else if whole {
		p.Clear()
	}
	for i := range here {
		p.Insert(here[i].e)
	}
	p.ref.Store(true)
	m.markDirtyLocked(p)
	m.changed = true
	m.mu.Unlock()
	if m.cache.dirty.Load() > m.cache.limit/2 {
		if err := m.cache.spill(); err != nil {
			return err
		}
	}
	m.cache.evict()
	return nil
}

// settle keeps the list of coarse ranges short: it gives the pages of the smallest
// ones entries of their own.
func (m *Map) settle() error {
	for {
		m.mu.RLock()
		var smallest extent.Extent
		if m.coarse.Len() > maxCoarse {
			for _, e := range m.coarse.All() {
				if smallest.Sectors == 0 || e.Sectors < smallest.Sectors {
					smallest = e
				}
			}
		}
		m.mu.RUnlock()
		if smallest.Sectors == 0 {
			return nil
		}
		for num := smallest.Start >> extent.PageShift; num < smallest.End()>>extent.PageShift; num++ {
			m.mu.RLock()
			own := m.present.has(num)
			m.mu.RUnlock()
			if !own {
				if err := m.insertPage([]piece{{num, smallest.Part(num<<extent.PageShift, extent.PageSectors)}}); err != nil {
					return err
				}
			}
		}
		m.mu.Lock()
		m.coarse.RemoveUpTo(smallest.Start, smallest.Sectors, ^uint64(0))
		m.mu.Unlock()
	}
}

// addStaleLocked remembers that the store may hold pages of r that are not present. The
// list is sorted, disjoint and short; if it overflows, the closest neighbours join.
func (m *Map) addStaleLocked(r pageRange) {
	i, _ := slices.BinarySearchFunc(m.stale, r.from, func(x pageRange, from uint64) int { return cmp.Compare(x.to, from) })
	j := i
	for j < len(m.stale) && m.stale[j].from <= r.to {
		r.from, r.to = min(r.from, m.stale[j].from), max(r.to, m.stale[j].to)
		j++
	}
	m.stale = slices.Replace(m.stale, i, j, r)
	if len(m.stale) > maxStale {
		best := 1
		for k := 1; k < len(m.stale); k++ {
			if m.stale[k].from-m.stale[k-1].to < m.stale[best].from-m.stale[best-1].to {
				best = k
			}
		}
		m.stale[best-1].to = m.stale[best].to
		m.stale = slices.Delete(m.stale, best, best+1)
	}
}
