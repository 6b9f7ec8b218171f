package iwarp

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// Times and sizes of a queue pair's end.
const (
	finishTimeout = 5 * time.Second // for what is being written when the connection ends
	leaveTimeout  = time.Second     // the same, if it ends because we want it: memory is waited for, and nothing is owed to the peer
	lingerTimeout = 2 * time.Second // for the peer to close, so that no reset destroys what it has not read
	lingerBytes   = 1 << 20

	maxSGE       = 256
	maxInline    = 16 << 10
	maxWorkQueue = 1 << 16
)

// sendWQE is a posted work request of the send queue.
type sendWQE struct {
	id       uint64
	op       rdma.Opcode
	flags    rdma.SendFlags
	sge      []rdma.SGE // its memory is reused
	inline   []byte     // one of queuePair.spare, until it is encoded
	size     int
	addr     uint64
	key      uint32 // of the remote window, or of the own one that is bound or invalidated
	previous uint32 // OpBind: see tagTable.bind
	read     bool   // OpRead: the response is there
	status   rdma.Status
}

// queuePair implements rdma.QP.
type queuePair struct {
	num            uint32
	pd             *domain
	attr           rdma.QPAttr
	sendCQ, recvCQ *completionQueue
	opt            *Options
	q              queues

	sock *sock
	rcv  receiver // belongs to who has the role of prog
	open bool     // likewise: the peer has talked
	prog progress
	wake chan struct{}

	// The fields below belong to who set encoding, or who holds mu while nobody has.
	snd       sender
	encoded   uint64 // those before are in a batch
	next      uint64 // oldest that was not begun
	used      [][]byte
	request   [readRequestLen]byte
	one       [1]rdma.SGE
	msg       message
	msgIsResp bool
	turn      bool // responses are next

	// The fields below belong to who set writing.
	out       flight
	upto      uint64 // of the work requests, those before are written when out is
	sentBytes int    // since the segment size was looked at; also of who holds mu while nobody writes

	done    chan struct{} // closed when the connection has ended
	flushed chan struct{} // closed when every work request has its completion

	mu   sync.Mutex
	idle sync.Cond // writing became false
	// The fields below are guarded by mu.
	state     state
	err       error
	ring      []sendWQE
	head      uint64 // oldest that is not complete; the counters never wrap
	sent      uint64 // those before are written
	tail      uint64
	writing   bool // somebody writes, and encodes
	encoding  bool // he encodes
	held      bool // responder: the peer has not talked yet (IWARP-6)
	ird, ord  int
	terminate []byte // payload of the Terminate that is to be sent
	recvFault rdma.Status
	// spare are buffers for inline payload. The one that was used last is the next: it is in the processor's cache.
	spare [][]byte
}

type state uint8

const (
	stateNew state = iota
	stateConnected
	stateEnding // nothing is begun any more
	stateEnded  // everything is flushed
)

func newQueuePair(num uint32, opt *Options, pd rdma.PD, attr rdma.QPAttr) (*queuePair, error) {
	d, ok := pd.(*domain)
	scq, ok2 := attr.SendCQ.(*completionQueue)
	rcq, ok3 := attr.RecvCQ.(*completionQueue)
	attr.MaxSendSGE, attr.MaxRecvSGE = max(1, attr.MaxSendSGE), max(1, attr.MaxRecvSGE)
	if !ok || !ok2 || !ok3 || attr.MaxSend < 1 || attr.MaxSend > maxWorkQueue || attr.MaxRecv < 1 || attr.MaxRecv > maxWorkQueue ||
		attr.MaxSendSGE > maxSGE || attr.MaxRecvSGE > maxSGE || attr.MaxInline < 0 || attr.MaxInline > maxInline {
		return nil, fmt.Errorf("%w: queue pair %+v", rdma.ErrInvalid, attr)
	}
	q := &queuePair{
		num: num, pd: d, attr: attr, sendCQ: scq, recvCQ: rcq, opt: opt,
		wake: make(chan struct{}, 1), done: make(chan struct{}), flushed: make(chan struct{}),
		ring: make([]sendWQE, attr.MaxSend),
	}
	q.idle.L = &q.mu
	q.prog.takeover = make(chan struct{}, 1)
	q.prog.timer = time.AfterFunc(time.Hour, q.watch)
	q.prog.timer.Stop()
	q.q.recvs.init(attr.MaxRecv, attr.RecvAnyOrder)
	q.q.tags = newTagTable()
	return q, nil
}

// Num implements rdma.QP.
func (q *queuePair) Num() uint32 { return q.num }

// Depth implements rdma.QP.
func (q *queuePair) Depth() (ird, ord int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ird, q.ord
}

// Done implements rdma.QP.
func (q *queuePair) Done() <-chan struct{} { return q.done }

// Err implements rdma.QP.
func (q *queuePair) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// PostRecv implements rdma.QP.
func (q *queuePair) PostRecv(wrs []rdma.RecvWR) (int, error) {
	for i := range wrs {
		if err := q.checkRecv(&wrs[i]); err != nil {
			n, full := q.q.recvs.post(wrs[:i])
			if full != nil {
				err = full
			}
			return n, err
		}
	}
	return q.q.recvs.post(wrs)
}

func (q *queuePair) checkRecv(w *rdma.RecvWR) error {
	if len(w.SGE) > q.attr.MaxRecvSGE {
		return fmt.Errorf("%w: receive of %d elements", rdma.ErrInvalid, len(w.SGE))
	}
	for j := range w.SGE {
		if !q.pd.check(&w.SGE[j], rdma.LocalWrite) {
			return fmt.Errorf("%w: element %d of a receive is not in a region to write to", rdma.ErrInvalid, j)
		}
	}
	return nil
}

// PostSend implements rdma.QP.
func (q *queuePair) PostSend(wrs []rdma.SendWR) (int, error) {
	q.mu.Lock()
	n := 0
	var broken error
	err := q.usableLocked()
	if err == nil && q.directLocked() {
		n, err, broken = q.postDirectLocked(wrs)
	}
	direct := n
	for err == nil && n < len(wrs) {
		if err = q.postLocked(&wrs[n]); err == nil {
			n++
		}
	}
	switch {
	case broken != nil:
		pump := !q.writing // what was carried out before is complete
		q.writing = true
		q.mu.Unlock()
		q.fail(broken, noFault, nil)
		if pump {
			q.mu.Lock()
			q.pumpLocked(true)
		}
	case direct == n && n > 0 && err == nil && wrs[n-1].Flags&rdma.More != 0:
		q.mu.Unlock()
	default:
		q.kickLocked()
	}
	return n, err
}

func (q *queuePair) usableLocked() error {
	switch q.state {
	case stateNew:
		return rdma.ErrNotConnected
	case stateConnected:
		return nil
	}
	return rdma.ErrDisconnected
}

// postLocked checks one work request and queues it.
func (q *queuePair) postLocked(wr *rdma.SendWR) error {
	if q.tail-q.head == uint64(len(q.ring)) {
		return rdma.ErrQueueFull
	}
	w := &q.ring[q.tail%uint64(len(q.ring))]
	size, err := q.checkSend(wr)
	if err != nil {
		return err
	}
	*w = sendWQE{id: wr.ID, op: wr.Op, flags: wr.Flags, sge: w.sge[:0], size: size, addr: wr.RemoteAddr, key: wr.RKey}
	switch {
	case wr.Op == rdma.OpBind:
		if w.key, w.previous, _, err = q.q.tags.reserve(&wr.Bind, false); err != nil {
			return err
		}
	case wr.Flags&rdma.Inline != 0:
		if n := len(q.spare); n > 0 {
			w.inline, q.spare = q.spare[n-1][:0], q.spare[:n-1]
		} else {
			w.inline = make([]byte, 0, q.attr.MaxInline)
		}
		for i := range wr.SGE {
			w.inline = append(w.inline, wr.SGE[i].Buf...)
		}
		w.sge = append(w.sge, rdma.SGE{Buf: w.inline})
	default:
		w.sge = append(w.sge, wr.SGE...)
	}
	q.tail++
	return nil
}

// checkSend returns the size of the payload.
func (q *queuePair) checkSend(wr *rdma.SendWR) (int, error) {
	if wr.Op < rdma.OpSend || wr.Op > rdma.OpLocalInvalidate || len(wr.SGE) > q.attr.MaxSendSGE {
		return 0, fmt.Errorf("%w: %v of %d elements", rdma.ErrInvalid, wr.Op, len(wr.SGE))
	}
	size := 0
	inline := wr.Flags&rdma.Inline != 0
	var right rdma.Access
	if wr.Op == rdma.OpRead {
		right = rdma.LocalWrite
	}
	for i := range wr.SGE {
		size += len(wr.SGE[i].Buf)
		if !inline && !q.pd.check(&wr.SGE[i], right) {
			return 0, fmt.Errorf("%w: element %d of a %v is not in a region with the right for it", rdma.ErrInvalid, i, wr.Op)
		}
	}
	switch {
	case size > math.MaxUint32:
		return 0, fmt.Errorf("%w: %v of %d bytes", rdma.ErrInvalid, wr.Op, size)
	case inline && (size > q.attr.MaxInline || wr.Op > rdma.OpWrite):
		return 0, fmt.Errorf("%w: inline %v of %d bytes", rdma.ErrInvalid, wr.Op, size)
	case wr.Op == rdma.OpRead && q.ord == 0:
		return 0, fmt.Errorf("%w: the peer serves no RDMA Reads", rdma.ErrInvalid)
	case wr.Op >= rdma.OpBind && len(wr.SGE) > 0:
		return 0, fmt.Errorf("%w: %v with elements", rdma.ErrInvalid, wr.Op)
	}
	return size, nil
}

// start connects the queue pair. a.rtr is the form of our first frame, or the forms of the peer's.
func (q *queuePair) start(s *sock, a agreed, initiator bool) error {
	limit := q.opt.MaxULPDU
	if limit == 0 {
		limit = mulpdu(s.segmentSize(), a.markers)
	}
	q.mu.Lock()
	if q.state != stateNew {
		q.mu.Unlock()
		return rdma.ErrClosed
	}
	q.sock = s
	q.q.reads.init(a.ord)
	q.q.resps.init(a.ird)
	q.snd.init(a.crc, a.markers, limit)
	q.snd.tags = q.q.tags
	rtr := a.rtr
	if initiator {
		rtr = 0
	}
	q.rcv.init(a.crc, rtr, &q.q)
	q.ird, q.ord = a.ird, a.ord
	q.state = stateConnected
	q.held = !initiator
	if initiator && a.rtr != 0 {
		q.first(a.rtr)
		q.writing = true // the goroutine begins with it
	}
	q.mu.Unlock()
	q.attach()
	quit := make(chan struct{})
	go q.write(quit)
	go q.run(quit)
	if initiator && a.rtr != 0 {
		q.signal()
	}
	return nil
}

// first encodes the first frame of the peer-to-peer model (RFC 6581, 9.2).
func (q *queuePair) first(form RTR) {
	s := &q.snd
	s.out = getOut()
	switch form {
	case RTRWrite:
		s.segment(&segment{op: opWrite, tagged: true, last: true, stag: 1}, nil) // as siw does; nothing is at STag 1
	case RTRRead:
		s.segment(&segment{op: opReadRequest, last: true, queue: queueRead, msn: s.msn[queueRead]}, make([]byte, readRequestLen))
		s.msn[queueRead]++
		q.q.reads.push(0, 0, nil)
	case RTRSend:
		s.segment(&segment{op: opSend, last: true, queue: queueSend, msn: s.msn[queueSend]}, nil)
		s.msn[queueSend]++
	}
}

// run receives until the connection ends, and then ends the queue pair.
func (q *queuePair) run(quit chan struct{}) {
	err := q.attend()
	q.fail(err, noFault, nil)
	q.mu.Lock()
	q.sock.nc.SetWriteDeadline(time.Now().Add(q.graceLocked()))
	for q.writing {
		q.idle.Wait()
	}
	q.writing = true // for ever: what is to be written goes away
	err = q.err
	silent := q.held // then nothing was sent that could be destroyed
	q.mu.Unlock()
	close(quit)
	q.finish()
	close(q.flushed)
	if !silent && !errors.Is(err, rdma.ErrPeerClosed) && !errors.Is(err, errBroken) {
		q.sock.linger()
	}
	q.sock.nc.Close()
}

// graceLocked is how long what is being written may take when the connection has ended.
func (q *queuePair) graceLocked() time.Duration {
	if q.err == rdma.ErrDisconnected {
		return leaveTimeout
	}
	return finishTimeout
}

// errBroken is part of the reason when the TCP connection itself is gone.
var errBroken = errors.New("iwarp: connection is broken")

// handle acts on an event. An error ends the connection.
func (q *queuePair) handle(e *event) error {
	if !q.open && e.kind != eventFault {
		q.open = true
		if q.heldUntilNow() {
			q.kick()
		}
	}
	switch e.kind {
	case eventReceived:
		e.wc.ID = q.q.recvs.pop()
		e.wc.QPNum = q.num
		if n := len(q.prog.into); n < cap(q.prog.into) {
			q.prog.into = append(q.prog.into, e.wc)
		} else if !q.recvCQ.push(e.wc, e.sse) {
			return rdma.ErrOverrun
		}
	case eventRequest:
		q.kick()
	case eventRead:
		wqe := e.wqe
		q.q.reads.pop()
		q.mu.Lock()
		ok := true
		if wqe != nil {
			wqe.read = true
			ok = q.retireLocked()
		}
		q.mu.Unlock()
		if !ok {
			return rdma.ErrOverrun
		}
		q.kick() // a Read may have waited for ORD, or a fence
	case eventTerminated:
		return e.terminated
	case eventFault:
		err := &TerminateError{Layer: e.fault.layer(), Type: e.fault.etype(), Code: e.fault.code()}
		q.fail(err, e.fault, &e.culprit)
		return err
	}
	return nil
}

// heldUntilNow lets the responder talk. It reports whether it was held.
func (q *queuePair) heldUntilNow() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	was := q.held
	q.held = false
	return was
}

// fail ends the connection: the first reason counts. A fault is told to the peer, unless the peer has not talked yet (IWARP-6, IWARP-61, IWARP-62).
func (q *queuePair) fail(err error, f fault, c *culprit) {
	q.mu.Lock()
	if q.state != stateConnected {
		q.mu.Unlock()
		return
	}
	q.state, q.err = stateEnding, err
	if f != noFault && !q.held {
		q.terminate = appendTerminate(nil, f, c)
	}
	if f == faultOf(layerDDP, ddpUntagged, ddpTooLong) {
		q.recvFault = rdma.StatusLength
	}
	close(q.done)
	q.mu.Unlock()
	q.interrupt()
	q.call()
	if f != noFault {
		q.kick()
	}
}

// Disconnect implements rdma.QP.
func (q *queuePair) Disconnect() {
	q.mu.Lock()
	if q.state == stateNew {
		q.state, q.err = stateEnded, rdma.ErrDisconnected
		close(q.done)
		q.mu.Unlock()
		q.finish()
		close(q.flushed)
		return
	}
	q.mu.Unlock()
	q.fail(rdma.ErrDisconnected, noFault, nil)
}

// Close implements rdma.QP.
func (q *queuePair) Close() error {
	q.Disconnect()
	<-q.flushed
	return nil
}

// finish flushes both queues. Nobody reads or writes any more.
func (q *queuePair) finish() {
	q.q.tags.clear()
	putOut(q.out.land())
	putOut(q.snd.out)
	q.snd.out = nil
	q.sock.release(&q.rcv)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.state = stateEnded
	for ; q.head < q.tail; q.head++ {
		w := &q.ring[q.head%uint64(len(q.ring))]
		done := q.head < q.sent && (w.op != rdma.OpRead || w.read)
		if !done && w.status == rdma.StatusSuccess {
			w.status = rdma.StatusFlushed
		}
		q.completeLocked(w)
	}
	status := q.recvFault
	if status == rdma.StatusSuccess {
		status = rdma.StatusFlushed
	}
	for id := range q.q.recvs.drain {
		q.recvCQ.push(rdma.WC{ID: id, QPNum: q.num, Op: rdma.OpRecv, Status: status}, true)
		status = rdma.StatusFlushed
	}
	q.detach()
}

// completeLocked ends a work request of the send queue.
func (q *queuePair) completeLocked(w *sendWQE) bool {
	ok := true
	if w.flags&rdma.Signaled != 0 || w.status != rdma.StatusSuccess {
		wc := rdma.WC{ID: w.id, QPNum: q.num, Op: w.op, Status: w.status}
		if w.op == rdma.OpRead {
			wc.Bytes = w.size
		}
		ok = q.sendCQ.push(wc, false)
	}
	clear(w.sge)
	return ok
}

// retireLocked completes what is written, in order (IWARP-56). It reports whether the completion queue is sound.
func (q *queuePair) retireLocked() bool {
	for q.head < q.sent {
		w := &q.ring[q.head%uint64(len(q.ring))]
		if w.op == rdma.OpRead && !w.read && w.status == rdma.StatusSuccess {
			break
		}
		q.head++
		if !q.completeLocked(w) {
			return false
		}
	}
	return true
}
