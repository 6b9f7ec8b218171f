package extent

import (
	"fmt"
	"iter"
	"slices"
)

// Map maps the sectors of one volume in memory. Its size follows the number of
// extents, not the length of the ranges: large ranges of Zero and Same are kept as
// such. The zero value is not usable; see NewMap.
//
// Not safe for concurrent use: the caller locks. Methods that only read (Lookup,
// Walk, Bytes, Extents) may run together.
type Map struct {
	index  map[uint32]uint32 // page number → slot
	slots  []Page
	spare  []uint32 // free slots
	arena  arena
	coarse Coarse
	// Invariant: where a coarse element covers a page, all entries of the page have
	// an LSN that is not lower, and lie on top of it.
}

// NewMap returns an empty map.
func NewMap() *Map { return &Map{index: make(map[uint32]uint32)} }

// Bytes is the memory that the map takes, an estimate for what the runtime owns.
func (m *Map) Bytes() int64 {
	const perIndex = 16 // key, value, control byte, at the usual load
	return int64(len(m.index))*perIndex + int64(cap(m.slots))*40 + int64(cap(m.spare))*4 + m.arena.bytes + m.coarse.Bytes()
}

// Pages is the number of pages that have entries of their own.
func (m *Map) Pages() int { return len(m.index) }

// Empty reports whether nothing is mapped.
func (m *Map) Empty() bool { return len(m.index) == 0 && m.coarse.Len() == 0 }

// Clear unmaps everything and gives the memory back.
func (m *Map) Clear() { *m = *NewMap() }

func (m *Map) page(n uint64) *Page {
	if s, ok := m.index[uint32(n)]; ok {
		return &m.slots[s]
	}
	return nil
}

func (m *Map) addPage(n uint64) *Page {
	if p := m.page(n); p != nil {
		return p
	}
	var s uint32
	if k := len(m.spare); k > 0 {
		s = m.spare[k-1]
		m.spare = m.spare[:k-1]
	} else {
		s = uint32(len(m.slots))
		m.slots = append(m.slots, Page{})
	}
	m.index[uint32(n)] = s
	return &m.slots[s]
}

// tidy removes the page if it is empty.
func (m *Map) tidy(n uint32, p *Page) {
	if len(p.entries) > 0 {
		return
	}
	m.arena.give(p.entries)
	s := m.index[n]
	*p = Page{}
	delete(m.index, n)
	if len(m.index) == 0 { // the runtime never shrinks a map
		m.index, m.slots, m.spare = make(map[uint32]uint32), nil, nil
		return
	}
	m.spare = append(m.spare, s)
}

// checkRange panics on a range that no volume has: a fault of the caller, see
// Extent.Validate.
func checkRange(start, n uint64) {
	if n > MaxSectors || start > MaxSectors-n {
		panic(fmt.Sprintf("extent: sectors %d+%d", start, n))
	}
}

// Insert maps e, which must be valid. Where the map has a higher LSN, that stays;
// an equal or lower one is replaced.
func (m *Map) Insert(e Extent) {
	checkRange(e.Start, e.Sectors)
	head, mid, tail := Split(e, MinCoarse)
	m.insertPages(head)
	if mid.Sectors > 0 {
		m.coarse.Insert(mid)
		m.eachPage(mid.Start, mid.Sectors, func(n uint32, p *Page) {
			p.removeUpTo(uint64(n)<<PageShift, PageSectors, mid.LSN, &m.arena)
			m.tidy(n, p)
		})
	}
	m.insertPages(tail)
}

func (m *Map) insertPages(e Extent) {
	for e.Sectors > 0 {
		n := e.Start >> PageShift
		size := min(e.Sectors, PageSectors-e.Start&pageMask)
		if m.coarse.Len() > 0 {
			if c, ok := m.coarse.At(n); ok && c.LSN > e.LSN {
				size = min(e.Sectors, c.End()-e.Start)
				e = rest(e, size)
				continue
			}
		}
		part := e.Part(e.Start, size)
		m.addPage(n).insert(&part, part.LSN, &m.arena)
		e = rest(e, size)
	}
}

// rest is e without its first n sectors.
func rest(e Extent, n uint64) Extent {
	if n == e.Sectors {
		return Extent{}
	}
	return e.Part(e.Start+n, e.Sectors-n)
}

// eachPage calls f for each page that is present and overlaps the range, in no
// order. f may remove that page.
func (m *Map) eachPage(start, n uint64, f func(uint32, *Page)) {
	first, last := start>>PageShift, (start+n-1)>>PageShift
	if last-first < uint64(len(m.index)) {
		for i := first; i <= last; i++ {
			if p := m.page(i); p != nil {
				f(uint32(i), p)
			}
		}
		return
	}
	for i, s := range m.index {
		if uint64(i) >= first && uint64(i) <= last {
			f(i, &m.slots[s])
		}
	}
}

// RemoveUpTo unmaps the n sectors from start on where their LSN is at most lsn.
func (m *Map) RemoveUpTo(start, n, lsn uint64) {
	checkRange(start, n)
	if n == 0 {
		return
	}
	end := start + n
	if m.coarse.Len() > 0 {
		// The pages at the edges are covered in part: move them out of the list.
		if start&pageMask != 0 {
			m.settle(start>>PageShift, lsn)
		}
		if end&pageMask != 0 {
			m.settle(end>>PageShift, lsn)
		}
		from, to := (start+pageMask)&^pageMask, end&^pageMask
		if from < to {
			m.coarse.RemoveUpTo(from, to-from, lsn)
		}
	}
	m.eachPage(start, n, func(i uint32, p *Page) {
		base := uint64(i) << PageShift
		s, t := max(start, base), min(end, base+PageSectors)
		p.removeUpTo(s, t-s, lsn, &m.arena)
		m.tidy(i, p)
	})
}

// settle moves what the coarse list has for page, if its LSN is at most lsn, into
// the page.
func (m *Map) settle(page, lsn uint64) {
	c, ok := m.coarse.At(page)
	if !ok || c.LSN > lsn {
		return
	}
	base := page << PageShift
	m.coarse.RemoveUpTo(base, PageSectors, c.LSN)
	m.addPage(page).fill(c.Part(base, PageSectors), &m.arena)
}

// Lookup appends to out what is mapped of the n sectors from start on, clipped and
// in order; gaps are left out. Extents that continue each other are joined.
func (m *Map) Lookup(start, n uint64, out []Extent) []Extent {
	checkRange(start, n)
	if n == 0 {
		return out
	}
	end := start + n
	first, last := start>>PageShift, (end-1)>>PageShift
	if first == last && m.coarse.Len() == 0 { // the common case
		if p := m.page(first); p != nil {
			return p.Lookup(start, n, out)
		}
		return out
	}
	from, pos := len(out), start
	if last-first < 4096 || last-first < uint64(len(m.index)) {
		for i := first; i <= last; i++ {
			if p := m.page(i); p != nil {
				out, pos = m.appendPage(i, p, pos, end, out, from)
			}
		}
	} else {
		for _, i := range m.sorted() {
			if uint64(i) >= first && uint64(i) <= last {
				out, pos = m.appendPage(uint64(i), m.page(uint64(i)), pos, end, out, from)
			}
		}
	}
	return m.coarse.Append(pos, end, out, from)
}

// appendPage appends what is mapped from pos to the end of page i, or to end.
func (m *Map) appendPage(i uint64, p *Page, pos, end uint64, out []Extent, from int) ([]Extent, uint64) {
	base := i << PageShift
	if base > pos {
		out = m.coarse.Append(pos, base, out, from)
		pos = base
	}
	stop := min(end, base+PageSectors)
	for k := p.search(uint32(pos - base)); k < len(p.entries); k++ {
		e := p.entries[k].extent(base)
		if e.Start >= stop {
			break
		}
		s, t := max(pos, e.Start), min(stop, e.End())
		out = m.coarse.Append(pos, s, out, from)
		out = Append(out, from, e.Part(s, t-s))
		pos = t
	}
	return m.coarse.Append(pos, stop, out, from), stop
}

func (m *Map) sorted() []uint32 {
	keys := make([]uint32, 0, len(m.index))
	for k := range m.index {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Walk returns everything that is mapped, in order, extents that continue each other
// joined. The map must not change meanwhile.
func (m *Map) Walk() iter.Seq[Extent] {
	return func(yield func(Extent) bool) {
		var buf []Extent
		pos := uint64(0)
		flush := func(keep int) bool {
			for len(buf) > keep {
				for _, e := range buf[:len(buf)-keep] {
					if !yield(e) {
						return false
					}
				}
				buf = append(buf[:0], buf[len(buf)-keep:]...)
			}
			return true
		}
		for _, i := range m.sorted() {
			buf, pos = m.appendPage(uint64(i), m.page(uint64(i)), pos, MaxSectors, buf, 0)
			if !flush(1) { // the last one may go on in the next page
				return
			}
		}
		buf = m.coarse.Append(pos, MaxSectors, buf, 0)
		flush(0)
	}
}

// Extents counts the extents as stored: entries of pages plus coarse elements.
func (m *Map) Extents() int {
	n := m.coarse.Len()
	for _, s := range m.index {
		n += len(m.slots[s].entries)
	}
	return n
}
