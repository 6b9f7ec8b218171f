package readcache

// policy decides which of n slots to reuse: S3-FIFO (Yang et al., SOSP 2023). New
// keys enter a small queue; what was used again there, or comes back soon after it
// left, moves to the main queue, where use buys another round. A scan passes through
// the small queue only.
//
// Accesses close to each other count once: the reads of a sequential stream of small
// blocks hit the same chunk many times, and that is not reuse. Not safe for concurrent use.
type policy struct {
	nodes  []node
	small  queue
	main   queue
	target int32  // of the small queue
	gap    uint32 // accesses closer than this count once
	clock  uint32 // accesses, those of one slot in a row as one
	last   int32  // the slot of the last access
	ghosts ghosts
}

type node struct {
	prev, next int32
	stamp      uint32 // of the last access that counted
	freq       uint8
	in         uint8 // inNone, inSmall, inMain
	hash       uint64
}

const (
	inNone  = 0
	inSmall = 1
	inMain  = 2
	maxFreq = 3
	none    = int32(-1)
)

// queue is a list through the nodes; old is the next to leave.
type queue struct {
	young, old int32
	n          int32
}

func newPolicy(n int) *policy {
	p := &policy{
		nodes: make([]node, n), target: int32(max(1, n/10)), gap: uint32(max(64, n/8)), last: none,
		small: queue{young: none, old: none}, main: queue{young: none, old: none},
	}
	p.ghosts.init(n)
	return p
}

func (p *policy) push(q *queue, s int32, in uint8) {
	nd := &p.nodes[s]
	nd.in, nd.prev, nd.next = in, none, q.young
	if q.young != none {
		p.nodes[q.young].prev = s
	} else {
		q.old = s
	}
	q.young = s
	q.n++
}

func (p *policy) unlink(q *queue, s int32) {
	nd := &p.nodes[s]
	if nd.prev != none {
		p.nodes[nd.prev].next = nd.next
	} else {
		q.young = nd.next
	}
	if nd.next != none {
		p.nodes[nd.next].prev = nd.prev
	} else {
		q.old = nd.prev
	}
	nd.in = inNone
	q.n--
}

// admit notes that slot s now holds the key with this hash.
func (p *policy) admit(s int32, hash uint64) {
	p.clock++
	p.last = s
	nd := &p.nodes[s]
	nd.hash, nd.freq, nd.stamp = hash, 0, p.clock
	if p.ghosts.take(hash) {
		p.push(&p.main, s, inMain)
	} else {
		p.push(&p.small, s, inSmall)
	}
}

// hit notes an access to slot s and reports whether it counts.
func (p *policy) hit(s int32) bool {
	if s != p.last {
		p.clock++
		p.last = s
	}
	nd := &p.nodes[s]
	if p.clock-nd.stamp < p.gap {
		return false
	}
	nd.stamp = p.clock
	nd.freq = min(nd.freq+1, maxFreq)
	return true
}

// remove forgets slot s.
func (p *policy) remove(s int32) {
	switch p.nodes[s].in {
	case inSmall:
		p.unlink(&p.small, s)
	case inMain:
		p.unlink(&p.main, s)
	}
}

// evict removes and returns a slot for which free is true. ok is false if there is
// none.
func (p *policy) evict(free func(int32) bool) (slot int32, ok bool) {
	skip := int32(0) // elements of the small queue that are in use
	for limit := (maxFreq + 2) * (len(p.nodes) + 1); limit > 0; limit-- {
		if p.small.n > skip && (p.small.n >= p.target || p.main.n == 0) {
			s := p.small.old
			nd := &p.nodes[s]
			p.unlink(&p.small, s)
			switch {
			case nd.freq > 0:
				nd.freq = 0
				p.push(&p.main, s, inMain)
			case !free(s):
				skip++
				p.push(&p.small, s, inSmall)
			default:
				p.ghosts.add(nd.hash)
				return s, true
			}
			continue
		}
		if p.main.n == 0 {
			return none, false
		}
		s := p.main.old
		nd := &p.nodes[s]
		p.unlink(&p.main, s)
		switch {
		case nd.freq > 0:
			nd.freq--
			p.push(&p.main, s, inMain)
		case !free(s):
			p.push(&p.main, s, inMain)
		default:
			return s, true
		}
	}
	return none, false
}

// ghosts remembers the hashes of the last n keys that left the small queue.
type ghosts struct {
	ring []uint64
	at   map[uint64]uint32 // hash → position in the ring
	next uint32
}

func (g *ghosts) init(n int) {
	g.ring = make([]uint64, max(n, 1))
	g.at = make(map[uint64]uint32)
}

func (g *ghosts) add(hash uint64) {
	if old := g.ring[g.next]; old != 0 {
		if i, ok := g.at[old]; ok && i == g.next {
			delete(g.at, old)
		}
	}
	g.ring[g.next] = hash
	g.at[hash] = g.next
	g.next = (g.next + 1) % uint32(len(g.ring))
}

func (g *ghosts) take(hash uint64) bool {
	_, ok := g.at[hash]
	delete(g.at, hash)
	return ok
}
