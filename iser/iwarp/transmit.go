package iwarp

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// There is one who writes at a time, and has set writing: whoever posts, if nobody does and the socket takes it at once; the goroutine write from where that would wait. So a
// lone message costs no wake-up, and a post never waits for the peer. What is small is encoded by who posts it, also while somebody writes; all else by who writes.

// inlineBytes is how much one call of PostSend, or the receiver when it answers Reads, writes before the goroutine takes over.
const inlineBytes = 1 << 20

// refreshBytes is how much is sent before the segment size of the path is looked at again.
const refreshBytes = 16 << 20

// buffers for batches; they are only held while there is something to write.
var outs = sync.Pool{New: func() any { return new([outBytes]byte) }}

func getOut() []byte { return outs.Get().(*[outBytes]byte)[:0] }

func putOut(b []byte) {
	if cap(b) == outBytes {
		outs.Put((*[outBytes]byte)(b[:outBytes]))
	}
}

// directLimit is the most payload, in bytes, of a work request that is encoded where it is posted.
const directLimit = 16 << 10

// directLocked reports whether what is posted may be encoded at once: nobody encodes, and nothing comes before it. What was encoded before may still be
// on its way.
func (q *queuePair) directLocked() bool {
	return !q.encoding && q.next == q.tail && q.state == stateConnected && !q.held && q.msg.done >= q.msg.size && q.q.resps.empty() && q.sock.raw != nil
}

// postDirectLocked encodes work requests as they are posted, up to the first one that is not small, and carries out those that send nothing. They are
// not copied to the queue, whose entries only tell what is to be completed. It returns how many; what they encoded is left to be written. err is about the first that was not posted, and
// broken is why the connection has to end.
func (q *queuePair) postDirectLocked(wrs []rdma.SendWR) (n int, err, broken error) {
	for ; n < len(wrs) && q.tail-q.head < uint64(len(q.ring)) && broken == nil; n++ {
		wr := &wrs[n]
		if wr.Op == rdma.OpRead || wr.Flags&rdma.Fence != 0 || !q.snd.room() {
			break
		}
		var size int
		if size, err = q.checkSend(wr); err != nil || size > directLimit {
			break
		}
		w := &q.ring[q.tail%uint64(len(q.ring))]
		w.id, w.op, w.flags, w.sge, w.status = wr.ID, wr.Op, wr.Flags, w.sge[:0], rdma.StatusSuccess
		switch wr.Op {
		case rdma.OpBind:
			var bound bool
			if _, _, bound, err = q.q.tags.reserve(&wr.Bind, true); err == nil && !bound {
				w.status = rdma.StatusBind
			}
		case rdma.OpLocalInvalidate:
			if !q.q.tags.invalidate(wr.RKey) {
				w.status = rdma.StatusProtection
			}
		default:
			if q.snd.out == nil {
				q.snd.out = getOut()
			}
			q.startMessage(wr.Op, wr.Flags, wr.RKey, wr.RemoteAddr, wr.SGE)
			q.snd.whole(&q.msg)
			q.msg.cur.sge = nil // it is the caller's
		}
		if err != nil {
			break
		}
		if w.status != rdma.StatusSuccess {
			broken = localError(wr.Op)
		}
		q.tail++
		q.next++
	}
	q.encoded = q.next
	return n, err, broken
}

// kick gets going what can be sent.
func (q *queuePair) kick() {
	q.mu.Lock()
	q.kickLocked()
}

// kickLocked lets mu go.
func (q *queuePair) kickLocked() {
	if q.writing {
		q.mu.Unlock()
		return
	}
	if q.snd.empty() {
		if err := q.localLocked(); err != nil {
			q.mu.Unlock()
			q.fail(err, noFault, nil)
			return
		}
		if !q.workLocked() {
			q.mu.Unlock()
			return
		}
	}
	q.writing = true
	if q.sock.raw == nil {
		q.mu.Unlock()
		q.signal()
		return
	}
	q.pumpLocked(true)
}

// localLocked carries out the work requests at the head of the queue that send nothing, and completes them. Nobody has writing, and nothing is to be written.
func (q *queuePair) localLocked() error {
	if q.state != stateConnected {
		return nil
	}
	var err error
	for err == nil {
		w := q.sendable(q.tail, q.held)
		if w == nil || w.op < rdma.OpBind {
			break
		}
		q.next++
		err = q.local(w)
		q.encoded = q.next
	}
	if q.sent == q.encoded {
		return nil
	}
	q.sent = q.encoded
	if !q.retireLocked() {
		return rdma.ErrOverrun
	}
	q.restart()
	return err
}

// local carries out a Bind or a Local Invalidate.
func (q *queuePair) local(w *sendWQE) error {
	ok := false
	if w.op == rdma.OpBind {
		if ok = q.q.tags.bind(w.key, w.previous); !ok {
			w.status = rdma.StatusBind
		}
	} else if ok = q.q.tags.invalidate(w.key); !ok {
		w.status = rdma.StatusProtection
	}
	if !ok {
		return localError(w.op)
	}
	return nil
}

func localError(op rdma.Opcode) error { return fmt.Errorf("%w: %v failed", rdma.ErrInvalid, op) }

// batch is what fill has to know of the fields that mu guards.
type batch struct {
	tail      uint64
	held      bool
	ending    bool
	terminate []byte
}

func (q *queuePair) batchLocked() batch {
	b := batch{tail: q.tail, held: q.held, ending: q.state != stateConnected}
	if b.ending {
		b.terminate, q.terminate = q.terminate, nil
	}
	return b
}

// signal hands writing to the goroutine.
func (q *queuePair) signal() { q.wake <- struct{}{} }

// write is the goroutine that waits for the peer to read.
func (q *queuePair) write(quit chan struct{}) {
	for {
		select {
		case <-q.wake:
			q.mu.Lock()
			q.pumpLocked(false)
		case <-quit:
			return
		}
	}
}

// pumpLocked encodes and writes until there is nothing to send, also what others encode while it writes. The caller has writing, and loses it. With inline, it gives it to the
// goroutine instead of waiting. It lets mu go.
func (q *queuePair) pumpLocked(inline bool) {
	for written := 0; ; {
		if len(q.out.vec) > 0 {
			q.mu.Unlock()
			n, err := q.writeOut(inline)
			if written += n; err != nil {
				q.stop(err)
				return
			}
			if len(q.out.pending()) > 0 || inline && written > inlineBytes {
				q.signal()
				return
			}
			q.mu.Lock()
			putOut(q.out.land())
			q.sent = q.upto
		}
		q.refresh()
		if q.workLocked() && q.snd.room() {
			b := q.batchLocked()
			q.encoding = true
			q.mu.Unlock()
			q.fill(&b) // after an error the batch ends, and goes before the Terminate that fail prepared
			q.mu.Lock()
			q.encoding = false
			q.spare = append(q.spare, q.used...)
			q.used = q.used[:0]
		}
		q.upto = q.encoded
		launched := q.snd.launch(&q.out)
		if !launched {
			q.sent = q.encoded // they have nothing to send
		}
		if !q.retireLocked() {
			q.mu.Unlock()
			q.stop(rdma.ErrOverrun)
			return
		}
		if !launched && !q.workLocked() {
			q.rest()
			q.mu.Unlock()
			return
		}
	}
}

// writeOut writes what is on its way, and returns how many bytes it wrote. With inline, it stops where it would wait.
func (q *queuePair) writeOut(inline bool) (written int, err error) {
	for len(q.out.pending()) > 0 {
		n, err := q.sock.write(&q.out, q.patience(inline))
		written += n
		q.sentBytes += n
		if err != nil && !errors.Is(err, errRevoked) {
			err = fmt.Errorf("%w: %w: %w", rdma.ErrTransport, errBroken, err)
		}
		if err != nil || inline {
			return written, err
		}
	}
	return written, nil
}

// patience is how long a write may wait.
func (q *queuePair) patience(inline bool) time.Duration {
	if inline {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.state == stateConnected {
		return q.opt.StallTimeout
	}
	return q.graceLocked()
}

// errRevoked ends a connection in the middle of a frame.
var errRevoked = fmt.Errorf("%w: %w: a window was invalidated while the peer read it", rdma.ErrAccess, errBroken)

// stop ends writing because of err, which becomes that of the connection. Nothing more is written.
func (q *queuePair) stop(err error) {
	q.fail(err, noFault, nil)
	q.mu.Lock()
	defer q.mu.Unlock()
	putOut(q.out.land())
	q.snd.launch(&q.out)
	putOut(q.out.land())
	q.terminate = nil
	q.rest()
}

// rest lets go of writing. mu is held, and nothing is to be written.
func (q *queuePair) rest() {
	putOut(q.snd.out)
	q.snd.out = nil
	q.restart()
	q.writing = false
	q.idle.Broadcast()
}

// restart begins again at the start of the ring if it is empty: there it is in the processor's cache. mu is held.
func (q *queuePair) restart() {
	if q.head == q.tail {
		q.head, q.sent, q.encoded, q.next, q.tail = 0, 0, 0, 0, 0
	}
}

// refresh follows the segment size of the path (IWARP-23). mu is held.
func (q *queuePair) refresh() {
	if q.sentBytes < refreshBytes || q.opt.MaxULPDU != 0 || q.msg.done < q.msg.size {
		return
	}
	q.sentBytes = 0
	q.snd.limit = mulpdu(q.sock.segmentSize(), q.snd.markers)
}

// workLocked reports whether something can be encoded now.
func (q *queuePair) workLocked() bool {
	switch {
	case q.state == stateEnding:
		return q.terminate != nil
	case q.state != stateConnected:
		return false
	}
	return q.msg.done < q.msg.size || !q.q.resps.empty() || q.sendable(q.tail, q.held) != nil
}

// sendable returns the next work request if it can be begun. tail and held are those of mu, or of a while ago. It is asked by who has
// writing, or under mu while nobody has.
func (q *queuePair) sendable(tail uint64, held bool) *sendWQE {
	if q.next == tail {
		return nil
	}
	w := &q.ring[q.next%uint64(len(q.ring))]
	if held && w.op < rdma.OpBind || w.flags&rdma.Fence != 0 && !q.q.reads.empty() || w.op == rdma.OpRead && q.q.reads.full() {
		return nil
	}
	return w
}

// fill encodes a batch. An error ends the connection, and was given to fail.
func (q *queuePair) fill(b *batch) error {
	s := &q.snd
	if s.out == nil {
		s.out = getOut()
	}
	if b.ending {
		q.msg.done, q.msg.size = 0, 0 // nothing of it follows
		if b.terminate != nil {
			s.segment(&segment{op: opTerminate, last: true, queue: queueTerminate, msn: 1}, b.terminate)
		}
		return nil
	}
	for s.room() {
		if q.msg.done == q.msg.size {
			q.msgIsResp = false
			began, err := q.begin(b.tail, b.held)
			if err != nil || !began {
				return err
			}
		}
		whole, err := q.proceed()
		if err != nil {
			return err
		}
		if whole {
			q.msg.done, q.msg.size = 0, 0
			if q.msgIsResp {
				q.q.resps.pop()
			} else {
				q.encoded = q.next
				w := &q.ring[(q.next-1)%uint64(len(q.ring))]
				if w.inline != nil { // it is copied
					q.used, w.inline = append(q.used, w.inline), nil
				}
			}
		}
	}
	return nil
}

// proceed encodes more of the current message.
func (q *queuePair) proceed() (whole bool, err error) {
	if q.msgIsResp {
		return q.respond()
	}
	return q.snd.encode(&q.msg), nil
}

// respond encodes more of the response to the oldest Read of the peer. Its source is copied under the lock that invalidation takes; that of a large one is
// written under it.
func (q *queuePair) respond() (whole bool, err error) {
	r := q.q.resps.oldest()
	s, m := &q.snd, &q.msg
	for s.room() {
		seg, n := s.next(m)
		if n == 0 {
			s.segment(&seg, nil)
			return true, nil
		}
		q.q.tags.mu.Lock()
		b, ok := q.q.tags.reachLocked(r.sourceTag, r.sourceTO+uint64(m.done-n), n, rdma.RemoteRead)
		switch {
		case ok != accessOK:
		case m.gather:
			s.refer(&seg, b, r.sourceTag, r.sourceTO+uint64(m.done-n))
		default:
			s.segment(&seg, b)
		}
		q.q.tags.mu.Unlock()
		if ok != accessOK {
			f := source(ok)
			err := &TerminateError{Layer: f.layer(), Type: f.etype(), Code: f.code()}
			m.done, m.size = 0, 0
			q.fail(err, f, &r.from)
			return false, err
		}
		if seg.last {
			return true, nil
		}
	}
	return false, nil
}

// begin starts the next message: responses and work requests in turn. It carries out
// the work requests that send nothing. It returns false if there is none.
func (q *queuePair) begin(tail uint64, held bool) (bool, error) {
	q.turn = !q.turn
	if q.turn {
		if r := q.q.resps.oldest(); r != nil {
			q.beginResponse(r)
			return true, nil
		}
	}
	for w := q.sendable(tail, held); w != nil; w = q.sendable(tail, held) {
		q.next++
		if w.op < rdma.OpBind {
			q.beginSend(w)
			return true, nil
		}
		err := q.local(w)
		q.encoded = q.next
		if err != nil {
			q.fail(err, noFault, nil)
			return false, err
		}
	}
	if r := q.q.resps.oldest(); r != nil {
		q.beginResponse(r)
		return true, nil
	}
	return false, nil
}

func (q *queuePair) beginResponse(r *response) {
	q.msgIsResp = true
	m := &q.msg
	m.cur = cursor{left: int(r.size)}
	q.snd.start(m, segment{op: opReadResponse, tagged: true, stag: r.sinkTag, to: r.sinkTO})
	m.gather = m.gather && q.sock.raw != nil // else a write waits, and no lock may be held
}

func (q *queuePair) beginSend(w *sendWQE) {
	if w.op == rdma.OpRead {
		q.beginRead(w)
		return
	}
	q.startMessage(w.op, w.flags, w.key, w.addr, w.sge)
}

// startMessage begins the message of a Send or an RDMA Write.
func (q *queuePair) startMessage(op rdma.Opcode, flags rdma.SendFlags, key uint32, addr uint64, sge []rdma.SGE) {
	var seg segment
	if op == rdma.OpWrite {
		seg = segment{op: opWrite, tagged: true, stag: key, to: addr}
	} else {
		seg = segment{op: opSend, queue: queueSend}
		if op == rdma.OpSendInvalidate {
			seg.op, seg.stag = opSendInvalidate, key
		}
		if flags&rdma.Solicited != 0 {
			seg.op += opSendSolicited - opSend
		}
	}
	q.msg.cur.reset(sge)
	q.snd.start(&q.msg, seg)
}

// beginRead makes a Read Request. Its sink has an STag of its own that only the response may name (IWARP-R10).
func (q *queuePair) beginRead(w *sendWQE) {
	m := &q.msg
	tag := q.q.tags.pick()
	r := readRequest{sinkTag: tag, sinkTO: uint64(tag) << 12, size: uint32(w.size), sourceTag: w.key, sourceTO: w.addr}
	r.encode(q.request[:]) // it is one FPDU, and in the batch before the next begins
	q.q.reads.push(tag, r.sinkTO, w)
	q.one[0] = rdma.SGE{Buf: q.request[:]}
	m.cur.reset(q.one[:])
	q.snd.start(m, segment{op: opReadRequest, queue: queueRead})
}
