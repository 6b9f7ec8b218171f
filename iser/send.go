package iser

import (
	"runtime"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

const (
	// signalEvery is how many work requests nobody waits for share a completion, by which the send queue is counted.
	signalEvery = 64
	// gatherLimit is how many work requests are queued before nobody waits for more to post at once.
	gatherLimit = 32
	// maxBacklog is how many control PDUs other than SCSI Responses may be queued for a peer that does not take them.
	maxBacklog = 512
)

// sendQueue holds what is to be posted, in order. There is no goroutine for it: whoever queues posts what is queued, unless
// somebody is posting already, who then takes that along. All fields are guarded by Conn.mu, but
// for taken and batch, which belong to who set posting.
type sendQueue struct {
	items     []item
	taken     []item // being posted
	batch     []rdma.SendWR
	posting   bool
	attending bool
	stopped   bool  // what is queued fails
	controls  int   // control PDUs that end no task, in items
	free      *slot // for reuse

	posted    uint64 // work requests, ever; the number of each is its ID
	completed uint64 // those before are complete
	owners    [sendDepth]*op
	signaled  bool   // the last one posted
	drained   op     // Close waits for it
	target    uint64 // drained is complete when these are
}

// item is a work request that is queued.
type item struct {
	wr      rdma.SendWR
	slot    *slot  // holds its bytes until it is posted
	data    *small // likewise
	owner   *op    // is told when it is complete
	control bool
}

// slot holds a message that goes inline.
type slot struct {
	buf  [controlSize]byte
	sge  [1]rdma.SGE
	next *slot
}

// small holds the bytes of an RDMA Write that goes inline.
type small struct {
	buf [inlineWrite]byte
	sge [1]rdma.SGE
}

// fill takes a copy of what is in from, and returns the element for it.
func (s *small) fill(from []rdma.SGE) []rdma.SGE {
	n := 0
	for i := range from {
		n += copy(s.buf[n:], from[i].Buf)
	}
	s.sge[0] = rdma.SGE{Buf: s.buf[:n]}
	return s.sge[:]
}

func (q *sendQueue) slotLocked() *slot {
	s := q.free
	if s == nil {
		return new(slot)
	}
	q.free = s.next
	return s
}

// addLocked queues a work request.
func (q *sendQueue) addLocked(x item) {
	if q.stopped {
		if x.owner != nil {
			x.owner.failed = true
		}
		return
	}
	if x.owner != nil {
		x.owner.pending.Add(1)
	}
	if x.control {
		q.controls++
	}
	q.items = append(q.items, x)
}

// SendControl implements iscsi.Datamover. It never waits for the peer.
func (c *Conn) SendControl(p *iscsi.PDU) error {
	var tr *transfer
	if p.Task != nil {
		tr = p.Task.Transfer.(*transfer)
	}
	if len(p.Data) > maxControl {
		c.reap() // a buffer may be free
	}
	c.mu.Lock()
	if err := c.usableLocked(); err != nil {
		c.mu.Unlock()
		return err
	}
	if tr != nil && c.respondLocked(p, tr) {
		c.flushReplies()
		return nil
	}
	defer c.mu.Unlock()
	if tr == nil && c.q.controls >= maxBacklog {
		c.failLocked(errBacklog)
		return iscsi.ErrClosed
	}
	ours := c.q.claimLocked()
	err := c.sendLocked(p, tr, ours)
	if ours {
		if tr != nil {
			c.gatherLocked()
		}
		c.postLocked()
	}
	return err
}

// gatherLocked lets other tasks queue something, if there are any that may do so in a moment: one write to the connection then takes
// it all. The caller has claimed posting, so that they leave it to him. mu is held, and let go meanwhile.
func (c *Conn) gatherLocked() {
	if c.live > 1 && len(c.q.items) < gatherLimit {
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
}

// sendLocked queues a control PDU, and before it the RDMA Writes that waited for it. With ours, the caller posts it.
func (c *Conn) sendLocked(p *iscsi.PDU, tr *transfer, ours bool) error {
	final := p.Header.Opcode() == pdu.OpLoginResponse
	switch {
	case c.full && !final && len(p.Data) > int(c.params.ControlLimit()):
		return iscsi.ErrSegment
	case c.full && !c.u.admit(p):
		return nil // it is not generated at all (ISER-63)
	}
	x := item{wr: rdma.SendWR{Op: rdma.OpSend}, control: tr == nil}
	if tr != nil {
		if c.writeDeferredLocked(tr, ours) {
			x.owner = &tr.op // complete after the Writes
		}
		if key, ok := c.invalidates(tr); ok && p.Header.Opcode() == pdu.OpSCSIResponse {
			x.wr.Op, x.wr.RKey = rdma.OpSendInvalidate, key
		}
	}
	n := headerLen + pdu.HeaderLen + len(p.Data) + pdu.Padding(len(p.Data))
	var b []byte
	if n <= controlSize {
		x.slot = c.q.slotLocked()
		b = x.slot.buf[:n]
		x.slot.sge[0] = rdma.SGE{Buf: b}
		x.wr.SGE, x.wr.Flags = x.slot.sge[:], rdma.Inline
		if x.control {
			x.wr.Flags |= rdma.Signaled // the last one before a connection ends
		}
	} else {
		r := c.responseLocked()
		if r == nil || n > recvSize {
			return iscsi.ErrSegment
		}
		e := &c.buffers[r.buffer].sge[0]
		b = e.Buf[:n]
		r.sge[0] = rdma.SGE{Buf: b, LKey: e.LKey}
		x.wr.SGE, x.owner = r.sge[:], &r.op
	}
	if c.u.sent(c.encodeLocked(b, p)) {
		c.attentive.Store(true)
	}
	c.q.addLocked(x)
	return nil
}

// encodeLocked writes the message of a control PDU to b, which has its length, and stamps it.
func (c *Conn) encodeLocked(b []byte, p *iscsi.PDU) *pdu.Header {
	var h controlHeader
	h.encode((*[headerLen]byte)(b))
	hdr := (*pdu.Header)(b[headerLen:])
	*hdr = p.Header
	hdr.SetDataLength(len(p.Data))
	clear(b[headerLen+pdu.HeaderLen+copy(b[headerLen+pdu.HeaderLen:], p.Data):])
	c.numbers.Stamp(hdr)
	return hdr
}

// invalidates returns the tag that the response of a task may invalidate (ISER-R6).
func (c *Conn) invalidates(tr *transfer) (uint32, bool) {
	switch {
	case !c.invalidate || tr.read && tr.write:
		return 0, false
	case tr.wire.readValid:
		return tr.wire.readTag, tr.wire.readTag != 0
	}
	return tr.wire.writeTag, tr.wire.writeValid && tr.wire.writeTag != 0
}

// responseLocked returns a buffer for a long response that is not in use. Before full feature phase, and in discovery sessions, an initiator
// has one request in progress.
func (c *Conn) responseLocked() *response {
	for i := range c.responses {
		if r := &c.responses[i]; r.buffer != 0 && r.op.pending.Load() == 0 {
			return r
		}
	}
	return nil
}

// claimLocked makes the caller the one who posts, unless there is one. It has to call postLocked then.
func (q *sendQueue) claimLocked() bool {
	if q.posting {
		return false
	}
	q.posting = true
	return true
}

// flush posts receives that are free, and what is queued, and what is queued meanwhile, unless somebody else is doing that.
func (c *Conn) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.q.claimLocked() {
		c.postLocked()
	}
}

// flushTogetherLocked is flush that lets others queue something first.
func (c *Conn) flushTogetherLocked() {
	if c.q.claimLocked() {
		c.gatherLocked()
		c.postLocked()
	}
}

// postLocked is flush of who claimed it. mu is held, and let go while it posts.
func (c *Conn) postLocked() {
	q := &c.q
	for {
		recvs := c.takeReceivesLocked()
		n := min(len(q.items), sendDepth-int(q.posted-q.completed))
		if len(recvs) == 0 && n == 0 || q.stopped {
			break
		}
		q.numberLocked(n)
		c.mu.Unlock()
		_, err := c.qp.PostRecv(recvs)
		if n > 0 && err == nil {
			_, err = c.qp.PostSend(q.batch)
		}
		c.mu.Lock()
		c.postedLocked()
		if err != nil {
			c.breakLocked()
			break
		}
		if q.posted-q.completed > sendDepth/2 {
			c.mu.Unlock()
			c.reap()
			c.mu.Lock()
		}
	}
	q.posting = false
	if len(q.items) > 0 && !q.stopped && !q.attending {
		// The send queue is full. Its completions may be nobody's.
		q.attending = true
		go c.attend()
	}
}

// takeReceivesLocked returns work requests for the receives that are free.
func (c *Conn) takeReceivesLocked() []rdma.RecvWR {
	c.reposts = c.reposts[:0]
	for _, i := range c.freed {
		c.reposts = append(c.reposts, rdma.RecvWR{ID: uint64(i), SGE: c.buffers[i].sge[:]})
	}
	c.freed = c.freed[:0]
	return c.reposts
}

// numberLocked takes the first n items, to be posted.
func (q *sendQueue) numberLocked(n int) {
	q.batch = q.batch[:0]
	q.taken = append(q.taken[:0], q.items[:n]...)
	left := copy(q.items, q.items[n:])
	clear(q.items[left:])
	q.items = q.items[:left]
	for i := range q.taken {
		x := &q.taken[i]
		x.wr.ID = q.posted
		if x.owner != nil {
			q.owners[q.posted%sendDepth] = x.owner
			x.wr.Flags |= rdma.Signaled
		} else if q.posted%signalEvery == 0 {
			x.wr.Flags |= rdma.Signaled
		}
		q.signaled = x.wr.Flags&rdma.Signaled != 0
		q.batch = append(q.batch, x.wr)
		q.posted++
	}
}

// postedLocked ends what was taken: what goes inline needs its bytes no more.
func (c *Conn) postedLocked() {
	q := &c.q
	for i := range q.taken {
		x := &q.taken[i]
		if x.slot != nil {
			x.slot.next, q.free = q.free, x.slot
		}
		if x.data != nil {
			c.t.smalls.Put(x.data)
		}
		if x.control {
			q.controls--
		}
	}
	clear(q.taken)
	clear(q.batch)
}

// breakLocked ends the connection because the queue pair did not take all that was posted: it has ended, or is no use any more. Who waits for
// a completion is told by endLocked, and not before: what was taken may be on its way out of the memory that they would then use again. mu is held.
func (c *Conn) breakLocked() {
	c.q.stopped = true
	c.qp.Disconnect()
	if !c.ending {
		c.ending = true
		go c.teardown()
	}
}

// endLocked fails what is queued, and what was posted and has no completion, now that nothing is in flight any more.
func (q *sendQueue) endLocked() {
	q.stopped = true
	for i := range q.items {
		if o := q.items[i].owner; o != nil {
			o.finish(false)
		}
	}
	clear(q.items)
	q.items = q.items[:0]
	if q.drained.pending.Load() > 0 {
		q.drained.finish(false)
	}
	for i, o := range q.owners {
		if o != nil {
			o.finish(false)
			q.owners[i] = nil
		}
	}
}
