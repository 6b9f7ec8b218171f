package iser

import (
	"runtime"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// replies is what the responses of tasks are posted with, if nothing is queued before them: they go to the queue pair at once, which takes their bytes, but need not send them
// before somebody flushes. Guarded by Conn.mu.
type replies struct {
	buf       [controlSize]byte
	sge       [1]rdma.SGE
	wrs       []rdma.SendWR
	gathering bool // somebody has given others the time to post something, and then flushes
}

// respondLocked posts the response of a task, and before it the RDMA Writes that waited for it. It reports whether it did: not if something is queued or being
// posted, nor if the task has to wait for a completion. mu is held.
func (c *Conn) respondLocked(p *iscsi.PDU, tr *transfer) bool {
	q, r := &c.q, &c.replies
	n := headerLen + pdu.HeaderLen + len(p.Data) + pdu.Padding(len(p.Data))
	if q.posting || q.stopped || len(q.items) > 0 || !c.full || tr.direct || p.Header.Opcode() != pdu.OpSCSIResponse || n > controlSize ||
		len(p.Data) > int(c.params.ControlLimit()) || int(q.posted-q.completed)+len(tr.deferred) >= sendDepth {
		return false
	}
	c.encodeLocked(r.buf[:n], p)
	r.sge[0] = rdma.SGE{Buf: r.buf[:n]}
	reply := rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Inline | rdma.More, SGE: r.sge[:]}
	if key, ok := c.invalidates(tr); ok {
		reply.Op, reply.RKey = rdma.OpSendInvalidate, key
	}
	r.wrs = r.wrs[:0]
	for i := range tr.deferred {
		r.wrs = append(r.wrs, tr.deferred[i].wr)
	}
	r.wrs = append(r.wrs, reply)
	for i := range r.wrs {
		w := &r.wrs[i]
		w.ID = q.posted
		if q.posted%signalEvery == 0 {
			w.Flags |= rdma.Signaled
		}
		q.signaled = w.Flags&rdma.Signaled != 0
		q.posted++
	}
	var err error
	if len(c.freed) > 0 {
		_, err = c.qp.PostRecv(c.takeReceivesLocked())
	}
	if err == nil {
		_, err = c.qp.PostSend(r.wrs)
	}
	if err != nil {
		c.breakLocked()
	}
	for i := range tr.deferred {
		if d := tr.deferred[i].data; d != nil {
			c.t.smalls.Put(d)
		}
	}
	clear(tr.deferred)
	tr.deferred = tr.deferred[:0]
	return true
}

// flushReplies has what respondLocked posted sent, unless somebody else is about to. If there are other tasks, it lets them post something
// first: one write to the connection then takes it all. mu is held, and let go.
func (c *Conn) flushReplies() {
	r := &c.replies
	if r.gathering {
		c.mu.Unlock()
		return
	}
	if c.live > 1 {
		r.gathering = true
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
		r.gathering = false
	}
	reap := c.q.posted-c.q.completed > sendDepth/2
	c.mu.Unlock()
	c.qp.PostSend(nil) // who receives finds out if the connection has ended
	if reap {
		c.reap()
	}
}
