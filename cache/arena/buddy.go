package arena

import "math/bits"

// buddies is a buddy system over numbered pages, without pointers into the pages and
// without pointers at all. The zero value needs init.
type buddies struct {
	// state has one byte per page: the order of the piece that starts there, with bit 7 set while it is free; inside a piece
	// it is stale and never looked at, except that a stale byte must not look like a free head: it is cleared
	// to stateInside when a piece grows over it.
	state []uint8
	next  []int32             // of the free list of the piece's order; -1 ends it
	prev  []int32             // -1: first
	heads [maxOrder + 1]int32 // first free piece of each order; -1: none
	free  int                 // pages
}

const (
	stateFree   = 0x80
	stateInside = 0x7f
)

func (b *buddies) init(chunks int) {
	n := chunks * pagesPerChunk
	b.state = make([]uint8, n)
	b.next = make([]int32, n)
	b.prev = make([]int32, n)
	for i := range b.state {
		b.state[i] = stateInside
	}
	for o := range b.heads {
		b.heads[o] = -1
	}
	for c := chunks - 1; c >= 0; c-- {
		b.push(c*pagesPerChunk, maxOrder)
	}
	b.free = n
}

func (b *buddies) push(page, order int) {
	head := b.heads[order]
	b.state[page] = stateFree | uint8(order)
	b.next[page], b.prev[page] = head, -1
	if head >= 0 {
		b.prev[head] = int32(page)
	}
	b.heads[order] = int32(page)
}

func (b *buddies) unlink(page, order int) {
	next, prev := b.next[page], b.prev[page]
	if prev >= 0 {
		b.next[prev] = next
	} else {
		b.heads[order] = next
	}
	if next >= 0 {
		b.prev[next] = prev
	}
	b.state[page] = stateInside
}

// take allocates a piece of at most want pages, the largest power of two of that if there is
// one or a larger one can be split, else the largest there is. At least one page is free.
func (b *buddies) take(want int) (page, order int) {
	order = min(bits.Len(uint(want))-1, maxOrder)
	from := order
	for from <= maxOrder && b.heads[from] < 0 {
		from++
	}
	if from > maxOrder {
		for from = order - 1; b.heads[from] < 0; from-- {
		}
		order = from
	}
	page = int(b.heads[from])
	b.unlink(page, from)
	for from > order {
		from--
		b.push(page+1<<from, from)
	}
	b.state[page] = uint8(order)
	b.free -= 1 << order
	return page, order
}

// order returns the order of the allocated piece at page, or panics if there is none.
func (b *buddies) order(page int) int {
	s := b.state[page]
	if s > maxOrder {
		panic("arena: Free of a piece that is not allocated")
	}
	return int(s)
}

// give frees the allocated piece at page and joins it with its free buddies.
func (b *buddies) give(page, order int) {
	b.free += 1 << order
	b.state[page] = stateInside
	for order < maxOrder {
		buddy := page ^ 1<<order
		if b.state[buddy] != stateFree|uint8(order) {
			break
		}
		b.unlink(buddy, order)
		page &^= 1 << order
		order++
	}
	b.push(page, order)
}
