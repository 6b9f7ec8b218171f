package iwarp

import (
	"sync"
	"sync/atomic"

	"github.com/isergate/isergate/iser/rdma"
)

// cursor walks through the elements of a work request.
type cursor struct {
	sge  []rdma.SGE
	i    int
	off  int
	left int // bytes in all
}

func (c *cursor) reset(sge []rdma.SGE) {
	*c = cursor{sge: sge}
	for i := range sge {
		c.left += len(sge[i].Buf)
	}
}

// next returns the piece at the cursor, at most n bytes, and moves behind it. n is at most left.
func (c *cursor) next(n int) []byte {
	for c.off == len(c.sge[c.i].Buf) {
		c.i, c.off = c.i+1, 0
	}
	b := c.sge[c.i].Buf[c.off:]
	b = b[:min(len(b), n)]
	c.off += len(b)
	c.left -= len(b)
	return b
}

// recvWQE is a posted receive.
type recvWQE struct {
	id  uint64
	sge []rdma.SGE // its memory is reused
}

// recvQueue is a receive queue. The entry for the next message belongs to the receiver while it fills it. Who posts holds mu; who receives takes no lock.
type recvQueue struct {
	ring []recvWQE
	n    atomic.Int32 // entries in all
	head uint         // the receiver's

	// If any order will do, the receiver moves what is posted to a stack of its own, and takes what was posted last: it is in the processor's cache.
	stack []recvWQE
	depth int
	fresh atomic.Int32 // entries that are still in ring

	mu     sync.Mutex // guards all below
	tail   uint
	closed bool
}

func (q *recvQueue) init(size int, anyOrder bool) {
	q.ring = make([]recvWQE, size)
	if anyOrder {
		q.stack = make([]recvWQE, size)
	}
}

// post adds receives and returns how many.
func (q *recvQueue) post(wrs []rdma.RecvWR) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, rdma.ErrDisconnected
	}
	room := len(q.ring) - int(q.n.Load())
	n := min(room, len(wrs))
	for i := range wrs[:n] {
		w := &q.ring[q.tail]
		w.id, w.sge = wrs[i].ID, append(w.sge[:0], wrs[i].SGE...)
		q.tail = after(q.tail, len(q.ring))
	}
	q.n.Add(int32(n))
	if q.stack != nil {
		q.fresh.Add(int32(n))
	}
	if n < len(wrs) {
		return n, rdma.ErrQueueFull
	}
	return n, nil
}

// after is the next index in a ring.
func after(i uint, size int) uint {
	if i++; i == uint(size) {
		return 0
	}
	return i
}

// oldest returns the entry for the next message, nil if there is none; if any order will do, it is the youngest. It stays the same until pop, if it is not asked meanwhile.
func (q *recvQueue) oldest() *recvWQE {
	if q.stack == nil {
		if q.n.Load() == 0 {
			return nil
		}
		return &q.ring[q.head]
	}
	if k := q.fresh.Load(); k > 0 {
		for range k {
			from, to := &q.ring[q.head], &q.stack[q.depth]
			*from, *to = *to, *from
			q.head = after(q.head, len(q.ring))
			q.depth++
		}
		q.fresh.Add(-k)
	}
	if q.depth == 0 {
		return nil
	}
	return &q.stack[q.depth-1]
}

// pop removes the entry that oldest returned, and returns its ID.
func (q *recvQueue) pop() (id uint64) {
	if q.stack == nil {
		id = q.ring[q.head].id
		q.head = after(q.head, len(q.ring))
	} else {
		q.depth--
		id = q.stack[q.depth].id
	}
	q.n.Add(-1)
	return id
}

// drain ends the queue and yields the IDs of what is left.
func (q *recvQueue) drain(yield func(id uint64) bool) {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	for q.oldest() != nil {
		if !yield(q.pop()) {
			return
		}
	}
}

// sink is an RDMA Read of ours that is under way.
type sink struct {
	tag  uint32
	to   uint64 // of the first byte
	size uint32
	got  uint32
	cur  cursor // of the send queue's own elements
	wqe  *sendWQE
}

// readQueue holds our Reads in the order of their requests, which is that of the responses (IWARP-51). It is bounded by ORD. Who
// encodes pushes, who receives does all the rest; there is one of each, and no lock.
type readQueue struct {
	ring []sink
	n    atomic.Int32 // entries
	head uint         // the receiver's
	tail uint         // the encoder's
}

func (q *readQueue) init(ord int) { q.ring = make([]sink, ord) }

// full reports whether ORD are under way. It may be asked by anybody, as empty.
func (q *readQueue) full() bool { return int(q.n.Load()) == len(q.ring) }

func (q *readQueue) empty() bool { return q.n.Load() == 0 }

// push adds a Read; there is room. wqe is nil for the first frame of the peer-to-peer model.
func (q *readQueue) push(tag uint32, to uint64, wqe *sendWQE) {
	s := &q.ring[q.tail]
	*s = sink{tag: tag, to: to, wqe: wqe}
	if wqe != nil {
		s.cur.reset(wqe.sge)
		s.size = uint32(s.cur.left)
	}
	q.tail = after(q.tail, len(q.ring))
	q.n.Add(1)
}

// oldest returns the Read that the next response must belong to, nil if none is under way.
func (q *readQueue) oldest() *sink {
	if q.n.Load() == 0 {
		return nil
	}
	return &q.ring[q.head]
}

// later returns the Read that is i behind the oldest, nil if there is none.
func (q *readQueue) later(i int) *sink {
	if i >= int(q.n.Load()) {
		return nil
	}
	return &q.ring[(q.head+uint(i))%uint(len(q.ring))]
}

func (q *readQueue) pop() {
	q.ring[q.head] = sink{}
	q.head = after(q.head, len(q.ring))
	q.n.Add(-1)
}

// response is an RDMA Read of the peer that is to be answered.
type response struct {
	readRequest
	from culprit // for a Terminate
}

// responseQueue holds the peer's Reads, oldest first. It is bounded by IRD. Who receives pushes, who encodes takes; there is one of each, and no lock.
type responseQueue struct {
	ring []response
	n    atomic.Int32 // entries
	head uint         // the encoder's
	tail uint         // the receiver's
}

func (q *responseQueue) init(ird int) { q.ring = make([]response, ird) }

func (q *responseQueue) full() bool { return int(q.n.Load()) == len(q.ring) }

// empty may be asked by anybody.
func (q *responseQueue) empty() bool { return q.n.Load() == 0 }

// push adds a Read; there is room.
func (q *responseQueue) push(r *readRequest, c *culprit) {
	q.ring[q.tail] = response{readRequest: *r, from: *c}
	q.tail = after(q.tail, len(q.ring))
	q.n.Add(1)
}

// oldest returns the Read to answer next, nil if there is none.
func (q *responseQueue) oldest() *response {
	if q.n.Load() == 0 {
		return nil
	}
	return &q.ring[q.head]
}

func (q *responseQueue) pop() {
	q.head = after(q.head, len(q.ring))
	q.n.Add(-1)
}
