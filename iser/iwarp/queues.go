package iwarp

import (
	"sync"

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
	id   uint64
	sge  []rdma.SGE // its memory is reused
	size int
}

// recvQueue is a receive queue. The oldest entry belongs to the receiver while it fills it.
type recvQueue struct {
	mu     sync.Mutex // guards all below
	ring   []recvWQE
	head   uint
	n      int
	closed bool
}

func (q *recvQueue) init(size int) { q.ring = make([]recvWQE, size) }

// post adds a receive.
func (q *recvQueue) post(wr *rdma.RecvWR) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return rdma.ErrDisconnected
	}
	if q.n == len(q.ring) {
		return rdma.ErrQueueFull
	}
	w := &q.ring[(q.head+uint(q.n))%uint(len(q.ring))]
	w.id, w.sge, w.size = wr.ID, append(w.sge[:0], wr.SGE...), 0
	for i := range wr.SGE {
		w.size += len(wr.SGE[i].Buf)
	}
	q.n++
	return nil
}

// oldest returns the entry for the next message, nil if there is none.
func (q *recvQueue) oldest() *recvWQE {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n == 0 {
		return nil
	}
	return &q.ring[q.head%uint(len(q.ring))]
}

// pop removes the oldest entry and returns its ID.
func (q *recvQueue) pop() (id uint64, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n == 0 {
		return 0, false
	}
	w := &q.ring[q.head%uint(len(q.ring))]
	id = w.id
	clear(w.sge) // let go of the memory
	q.head++
	q.n--
	return id, true
}

// drain ends the queue and yields the IDs of what is left.
func (q *recvQueue) drain(yield func(id uint64) bool) {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	for {
		id, ok := q.pop()
		if !ok || !yield(id) {
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

// readQueue holds our Reads in the order of their requests, which is that of the responses (IWARP-51). It is bounded by ORD.
type readQueue struct {
	mu   sync.Mutex // guards all below
	ring []sink
	head uint
	n    int
}

func (q *readQueue) init(ord int) { q.ring = make([]sink, ord) }

// full reports whether ORD are under way.
func (q *readQueue) full() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n == len(q.ring)
}

func (q *readQueue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n == 0
}

// push adds a Read. wqe is nil for the first frame of the peer-to-peer model.
func (q *readQueue) push(tag uint32, to uint64, wqe *sendWQE) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := &q.ring[(q.head+uint(q.n))%uint(len(q.ring))]
	*s = sink{tag: tag, to: to, wqe: wqe}
	if wqe != nil {
		s.cur.reset(wqe.sge)
		s.size = uint32(s.cur.left)
	}
	q.n++
}

// oldest returns the Read that the next response must belong to, nil if none is under way. It belongs to the receiver.
func (q *readQueue) oldest() *sink {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n == 0 {
		return nil
	}
	return &q.ring[q.head%uint(len(q.ring))]
}

// later returns the Read that is i behind the oldest, nil if there is none.
func (q *readQueue) later(i int) *sink {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i >= q.n {
		return nil
	}
	return &q.ring[(q.head+uint(i))%uint(len(q.ring))]
}

func (q *readQueue) pop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ring[q.head%uint(len(q.ring))] = sink{}
	q.head++
	q.n--
}

// response is an RDMA Read of the peer that is to be answered.
type response struct {
	readRequest
	from culprit // for a Terminate
}

// responseQueue holds the peer's Reads, oldest first. It is bounded by IRD.
type responseQueue struct {
	mu   sync.Mutex // guards all below
	ring []response
	head uint
	n    int
}

func (q *responseQueue) init(ird int) { q.ring = make([]response, ird) }

func (q *responseQueue) full() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n == len(q.ring)
}

// push adds a Read; the receiver checked that there is room.
func (q *responseQueue) push(r *readRequest, c *culprit) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ring[(q.head+uint(q.n))%uint(len(q.ring))] = response{readRequest: *r, from: *c}
	q.n++
}

// oldest belongs to who encodes.
func (q *responseQueue) oldest() *response {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n == 0 {
		return nil
	}
	return &q.ring[q.head%uint(len(q.ring))]
}

func (q *responseQueue) pop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.head++
	q.n--
}
