package extent

import "slices"

// Coarse maps whole pages to Zero or Same, as a sorted list of ranges that are
// multiples of a page. It is what makes an unmap of a whole volume one element. The
// zero value is empty. Not safe for concurrent use.
type Coarse struct {
	list    []Extent
	scratch []Extent
}

// MinCoarse is the number of whole pages from which on a range of Zero or Same is
// worth an element of a Coarse; below it, each page gets an entry of its own.
const MinCoarse = 64

// Split cuts e, if it is Zero or Same and covers at least atLeast (> 0) whole pages,
// into these, and what lies before and behind them. Otherwise all of e is in head,
// and mid is empty (Sectors 0).
func Split(e Extent, atLeast uint64) (head, mid, tail Extent) {
	from := (e.Start + pageMask) &^ pageMask
	to := e.End() &^ pageMask
	if e.Kind == Data || to < from || to-from < atLeast*PageSectors {
		return e, Extent{}, Extent{}
	}
	if from > e.Start {
		head = e.Part(e.Start, from-e.Start)
	}
	if e.End() > to {
		tail = e.Part(to, e.End()-to)
	}
	return head, e.Part(from, to-from), tail
}

// Len is the number of elements.
func (c *Coarse) Len() int { return len(c.list) }

// Bytes is the memory that the list takes.
func (c *Coarse) Bytes() int64 { return int64(cap(c.list)+cap(c.scratch)) * extentBytes }

const extentBytes = 56

// All returns the elements, in order. The slice is valid until the next change and
// must not be changed.
func (c *Coarse) All() []Extent { return c.list }

// Clone is a copy that shares nothing.
func (c *Coarse) Clone() Coarse { return Coarse{list: slices.Clone(c.list)} }

// search returns the first element that ends behind sector s.
func (c *Coarse) search(s uint64) int {
	lo, hi := 0, len(c.list)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if c.list[mid].End() > s {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// At returns the element that covers page, if there is one.
func (c *Coarse) At(page uint64) (Extent, bool) {
	s := page << PageShift
	if i := c.search(s); i < len(c.list) && c.list[i].Start <= s {
		return c.list[i], true
	}
	return Extent{}, false
}

// Append appends to out the parts of the elements within [start, end), joined to
// elements of out from index from on.
func (c *Coarse) Append(start, end uint64, out []Extent, from int) []Extent {
	if start >= end {
		return out
	}
	for i := c.search(start); i < len(c.list) && c.list[i].Start < end; i++ {
		e := &c.list[i]
		s, t := max(start, e.Start), min(end, e.End())
		out = Append(out, from, e.Part(s, t-s))
	}
	return out
}

// Insert maps e, whole pages of Zero or Same. Where the list has a higher LSN, that
// stays; an equal or lower one is replaced.
func (c *Coarse) Insert(e Extent) {
	if (e.Start|e.Sectors)&pageMask != 0 || e.Kind == Data {
		panic("extent: not whole pages of zero or same")
	}
	c.replace(e.Start, e.End(), func(out []Extent, over []Extent) []Extent {
		pos := e.Start
		for i := range over {
			o := &over[i]
			if o.LSN <= e.LSN {
				continue
			}
			s, t := max(o.Start, e.Start), min(o.End(), e.End())
			if s > pos {
				out = Append(out, 0, e.Part(pos, s-pos))
			}
			out = Append(out, 0, o.Part(s, t-s))
			pos = t
		}
		if pos < e.End() {
			out = Append(out, 0, e.Part(pos, e.End()-pos))
		}
		return out
	})
}

// RemoveUpTo unmaps the n sectors from start on, whole pages, where their LSN is at
// most lsn.
func (c *Coarse) RemoveUpTo(start, n, lsn uint64) {
	if (start|n)&pageMask != 0 {
		panic("extent: not whole pages")
	}
	if n == 0 {
		return
	}
	c.replace(start, start+n, func(out []Extent, over []Extent) []Extent {
		for i := range over {
			if o := &over[i]; o.LSN > lsn {
				s, t := max(o.Start, start), min(o.End(), start+n)
				out = Append(out, 0, o.Part(s, t-s))
			}
		}
		return out
	})
}

// replace puts what within returns in the place of [start, end). within gets the
// elements that overlap it.
func (c *Coarse) replace(start, end uint64, within func(out, over []Extent) []Extent) {
	i := c.search(start)
	j := i
	for j < len(c.list) && c.list[j].Start < end {
		j++
	}
	over := c.list[i:j]
	out := c.scratch[:0]
	if i > 0 { // it may join
		i--
		out = append(out, c.list[i])
	}
	if len(over) > 0 && over[0].Start < start {
		out = Append(out, 0, over[0].Part(over[0].Start, start-over[0].Start))
	}
	out = within(out, over)
	if len(over) > 0 {
		if last := over[len(over)-1]; last.End() > end {
			out = Append(out, 0, last.Part(end, last.End()-end))
		}
	}
	if j < len(c.list) {
		out = Append(out, 0, c.list[j])
		j++
	}
	c.list = slices.Replace(c.list, i, j, out...)
	c.scratch = out[:0]
	if cap(c.scratch) > 1024 {
		c.scratch = nil
	}
}
