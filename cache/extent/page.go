package extent

import "fmt"

// entry is one extent of a page. 32 bytes, no pointers.
type entry struct {
	ref    uint64
	lsn    uint64
	epoch  uint32
	sector uint32
	start  uint16 // sector within the page
	n      uint16 // 1 to 8192
	header uint16
	kind   Kind
	block  uint8
}

const entryBytes = 32

func (e *entry) end() uint32 { return uint32(e.start) + uint32(e.n) }

func (e *entry) extent(base uint64) Extent {
	return Extent{
		Start: base + uint64(e.start), Sectors: uint64(e.n), LSN: e.lsn, Kind: e.kind,
		Loc: Location{Ref: e.ref, Epoch: e.epoch, Sector: e.sector, Header: e.header, Block: e.block},
	}
}

// trim leaves the sectors [from, to) of e, which it must contain.
func (e *entry) trim(from, to uint32) {
	if e.kind == Data {
		e.sector += from - uint32(e.start)
	}
	e.start, e.n = uint16(from), uint16(to-from)
}

func (e *entry) continues(a *entry) bool {
	if a.end() != uint32(e.start) || a.lsn != e.lsn || a.ref != e.ref || a.kind != e.kind ||
		a.epoch != e.epoch || a.header != e.header || a.block != e.block {
		return false
	}
	if a.kind == Data {
		return uint64(a.sector)+uint64(a.n) == uint64(e.sector)
	}
	return a.sector == e.sector
}

// Page maps the PageSectors sectors of one aligned piece of a volume. Its entries
// are sorted, do not overlap, and neighbours that continue each other are joined.
// The zero value is an empty page.
//
// Methods take absolute sectors; the caller knows which page of the volume this is
// and passes ranges within it only. Not safe for concurrent use, except that
// methods that only read may run together.
type Page struct {
	lsn     uint64
	entries []entry
}

// Len is the number of extents.
func (p *Page) Len() int { return len(p.entries) }

// Bytes is the memory that the entries take.
func (p *Page) Bytes() int64 { return int64(cap(p.entries)) * entryBytes }

// LSN is the highest LSN that was inserted, or what SetLSN raised it to.
func (p *Page) LSN() uint64 { return p.lsn }

// SetLSN raises the page's LSN: the page holds the effect of all writes up to it.
func (p *Page) SetLSN(lsn uint64) { p.lsn = max(p.lsn, lsn) }

// Clear empties the page and forgets its LSN. The memory is kept.
func (p *Page) Clear() { p.lsn, p.entries = 0, p.entries[:0] }

// Insert maps e, which must be valid and lie within the page. Where the page has a
// higher LSN, that stays; an equal or lower one is replaced.
func (p *Page) Insert(e Extent) { p.insert(&e, e.LSN, nil) }

// fill maps the sectors of e that the page does not map.
func (p *Page) fill(e Extent, a *arena) {
	p.lsn = max(p.lsn, e.LSN)
	p.overlay(p.entryOf(&e), a, func(*entry) bool { return true })
}

func (p *Page) entryOf(e *Extent) entry {
	from := e.Start & pageMask
	if e.Sectors == 0 || e.Sectors > PageSectors-from || e.Kind < Data || e.Kind > Same {
		panic(fmt.Sprintf("extent: %v extent %d+%d is not within one page", e.Kind, e.Start, e.Sectors))
	}
	return entry{
		ref: e.Loc.Ref, lsn: e.LSN, epoch: e.Loc.Epoch, sector: e.Loc.Sector, header: e.Loc.Header,
		block: e.Loc.Block, kind: e.Kind, start: uint16(from), n: uint16(e.Sectors),
	}
}

// insert maps e except where the page has an LSN above limit.
func (p *Page) insert(e *Extent, limit uint64, a *arena) {
	en := p.entryOf(e)
	p.lsn = max(p.lsn, e.LSN)
	end := en.end()
	for i := p.search(uint32(en.start)); i < len(p.entries) && uint32(p.entries[i].start) < end; i++ {
		if p.entries[i].lsn > limit {
			p.overlay(en, a, func(x *entry) bool { return x.lsn > limit })
			return
		}
	}
	p.put(en, a)
}

// overlay maps the parts of en that no entry for which keep is true covers.
func (p *Page) overlay(en entry, a *arena, keep func(*entry) bool) {
	pos, end := uint32(en.start), en.end()
	for pos < end {
		i := p.search(pos)
		for i < len(p.entries) && uint32(p.entries[i].start) < end && !keep(&p.entries[i]) {
			i++
		}
		to, next := end, end
		if i < len(p.entries) && uint32(p.entries[i].start) < end {
			to, next = max(pos, uint32(p.entries[i].start)), p.entries[i].end()
		}
		if to > pos {
			part := en
			part.trim(pos, to)
			p.put(part, a)
		}
		pos = next
	}
}

// search returns the first entry that ends behind sector s.
func (p *Page) search(s uint32) int {
	lo, hi := 0, len(p.entries)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if p.entries[mid].end() > s {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// put maps en and replaces whatever it overlaps.
func (p *Page) put(en entry, a *arena) {
	start, end := uint32(en.start), en.end()
	lo := p.search(start)
	hi := lo
	for hi < len(p.entries) && uint32(p.entries[hi].start) < end {
		hi++
	}
	// What takes the place of entries[lo:hi]: the entry before, what is left of
	// the first, the new one, what is left of the last, the entry behind.
	var with [5]entry
	k := 0
	add := func(x entry) {
		if k > 0 && x.continues(&with[k-1]) {
			with[k-1].n += x.n
			return
		}
		with[k] = x
		k++
	}
	i, j := lo, hi
	if lo > 0 && en.continues(&p.entries[lo-1]) {
		i--
		add(p.entries[i])
	}
	if lo < hi && uint32(p.entries[lo].start) < start {
		left := p.entries[lo]
		left.trim(uint32(left.start), start)
		add(left)
	}
	add(en)
	if lo < hi && p.entries[hi-1].end() > end {
		right := p.entries[hi-1]
		right.trim(end, right.end())
		add(right)
	}
	if hi < len(p.entries) && p.entries[hi].continues(&en) {
		add(p.entries[hi])
		j++
	}
	p.splice(i, j, with[:k], a)
}

// splice replaces entries[i:j] by with.
func (p *Page) splice(i, j int, with []entry, a *arena) {
	old := len(p.entries)
	size := old + len(with) - (j - i)
	if size > cap(p.entries) {
		p.resize(size, a)
	}
	tail := p.entries[j:old]
	p.entries = p.entries[:size]
	copy(p.entries[i+len(with):], tail)
	copy(p.entries[i:], with)
}

// resize moves the entries to an array with room for at least size.
func (p *Page) resize(size int, a *arena) {
	into := a.take(max(size, len(p.entries)))[:len(p.entries)]
	copy(into, p.entries)
	a.give(p.entries)
	p.entries = into
}

// shrink gives back memory when most of it is unused.
func (p *Page) shrink(a *arena) {
	if c := cap(p.entries); c > 8 && len(p.entries) <= c/4 {
		p.resize(len(p.entries), a)
	}
}

// RemoveUpTo unmaps the n sectors from start on, within the page, where their LSN
// is at most lsn.
func (p *Page) RemoveUpTo(start, n, lsn uint64) { p.removeUpTo(start, n, lsn, nil) }

func (p *Page) removeUpTo(start, n, lsn uint64, a *arena) {
	from := uint32(start & pageMask)
	to := from + uint32(n)
	i := p.search(from)
	if i == len(p.entries) || uint32(p.entries[i].start) >= to {
		return
	}
	if x := p.entries[i]; uint32(x.start) < from && x.end() > to { // a hole in one entry
		if x.lsn > lsn {
			return
		}
		left, right := x, x
		left.trim(uint32(x.start), from)
		right.trim(to, x.end())
		p.splice(i, i+1, []entry{left, right}, a)
		return
	}
	w := i
	for ; i < len(p.entries) && uint32(p.entries[i].start) < to; i++ {
		x := p.entries[i]
		switch {
		case x.lsn > lsn:
		case uint32(x.start) < from:
			x.trim(uint32(x.start), from)
		case x.end() > to:
			x.trim(to, x.end())
		default:
			continue
		}
		p.entries[w] = x
		w++
	}
	if w < i {
		p.entries = append(p.entries[:w], p.entries[i:]...)
		p.shrink(a)
	}
}

// DropZeros unmaps all extents of kind Zero, for a map in which nothing means zeros.
func (p *Page) DropZeros() {
	w := 0
	for i := range p.entries {
		if p.entries[i].kind != Zero {
			if w != i {
				p.entries[w] = p.entries[i]
			}
			w++
		}
	}
	if w < len(p.entries) {
		p.entries = p.entries[:w]
		p.shrink(nil)
	}
}

// Lookup appends to out what the page maps of the n sectors from start on, clipped
// and in order; gaps are left out.
func (p *Page) Lookup(start, n uint64, out []Extent) []Extent {
	base, from := start&^pageMask, uint32(start&pageMask)
	to := from + uint32(n)
	for i := p.search(from); i < len(p.entries) && uint32(p.entries[i].start) < to; i++ {
		x := &p.entries[i]
		e := x.extent(base)
		if uint32(x.start) < from || x.end() > to {
			s, t := max(from, uint32(x.start)), min(to, x.end())
			e = e.Part(base+uint64(s), uint64(t-s))
		}
		out = append(out, e)
	}
	return out
}

// arena hands out arrays of entries by size class and takes them back, so that the
// growth of pages leaves no garbage. A nil arena allocates and forgets.
type arena struct {
	free  [classes][][]entry
	bytes int64 // handed out and free
}

const (
	classes  = 14 // 1 to 8192 entries
	maxSpare = 64 // free arrays per class
)

func class(n int) int {
	c := 0
	for 1<<c < n {
		c++
	}
	return c
}

func (a *arena) take(n int) []entry {
	c := class(n)
	if a == nil {
		return make([]entry, 0, 1<<c)
	}
	if f := a.free[c]; len(f) > 0 {
		s := f[len(f)-1]
		a.free[c] = f[:len(f)-1]
		return s
	}
	a.bytes += entryBytes << c
	return make([]entry, 0, 1<<c)
}

func (a *arena) give(s []entry) {
	if a == nil || cap(s) == 0 {
		return
	}
	c := class(cap(s))
	if len(a.free[c]) >= maxSpare || cap(s) != 1<<c {
		a.bytes -= int64(cap(s)) * entryBytes
		return
	}
	a.free[c] = append(a.free[c], s[:0])
}
