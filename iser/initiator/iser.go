package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// Sizes of an iSER connection's queues.
const (
	sendSlots   = 128 // work requests that are posted and not known to be complete
	signalEvery = sendSlots / 4
	pollBatch   = 16
	sendSGEs    = 3 // header, data, padding

	// slotLen is a control PDU with the longest additional header segment of a CDB, and data that is copied.
	maxAHS  = 256
	maxHead = iserHeaderLen + pdu.HeaderLen + maxAHS
	slotLen = maxHead + copyLimit
)

// transfer is what an iSER mover keeps of a task.
type transfer struct {
	// Set by prepare, until finish. mem is where the data lies in registered memory: the caller's or that of
	// bounce; it is nil if all data goes with the command, copied.
	mem    []byte
	mr     rdma.MR
	bounce piece
	ahs    []byte
	// immediate is what goes with the command; exposed is where the part that the target reaches begins.
	immediate, exposed uint32

	win    rdma.Window
	base   uint64        // of the binding; belongs to who flushes
	key    atomic.Uint32 // of the live binding; 0 if there is none
	posted atomic.Bool   // the command was handed to the queue pair
	over   bool          // its last PDU is there: only references of the send queue are waited for; guarded by iserMover.mu
}

// item is a work request that is to be posted.
type item struct {
	op  itemOp
	t   *task    // what it is about, or nil
	ref *task    // whose reference is given up when it is complete, or nil
	out bool     // itemCommand: t's data is read until it is posted, under a reference
	msg *message // itemControl
	key uint32   // itemInvalidate
	seq uint64
	// itemDataOut
	offset, length uint32
	sn             pdu.Serial
	final          bool
}

type itemOp uint8

const (
	itemBind itemOp = iota
	itemCommand
	itemDataOut
	itemControl
	itemInvalidate
	itemNudge // an RDMA Write of nothing, which touches nothing
)

// message is a control PDU that waits, or a Hello, which is a header alone.
type message struct {
	header pdu.Header
	data   []byte
	hello  bool
}

// slot is one place of the send queue, with the memory of its header and of short data. A message that goes inline needs none.
type slot struct {
	buf []byte
	ref *task
}

// iserMover moves the data of one session over one RDMA connection (RFC 7145). Reads and solicited writes are the target's RDMA
// Writes and Reads of a window that is bound for the task and invalidated before the task ends (ISER-40).
type iserMover struct {
	pd     rdma.PD
	recvCQ rdma.CQ // of messages; whoever has the role of recv waits on it
	sendCQ rdma.CQ // is looked at now and then; only the sender goroutine waits on it, if it has to
	qp     rdma.QP
	mem    *memory

	p         *Parameters // nil during login
	expStatSN func() pdu.Serial
	wholeBase bool // the write base offset stands for the start of all data
	remoteInv bool // the target may invalidate
	maxRecv   int  // bytes of a data segment that we accept

	fixed   []piece // what recvs and slots are parts of
	recvs   []rdma.RecvWR
	slotMR  rdma.MR
	windows []rdma.Window
	table   []task // the session's; of them, only what a mover keeps

	// Owned by who has the role of recv.
	up       upcalls
	wcs      [pollBatch]rdma.WC
	reposted []rdma.RecvWR

	recv receiving

	kick chan struct{} // capacity 1: wakes the sender goroutine
	stop chan struct{} // closed when run ends

	tasks atomic.Int32 // outstanding commands

	mu       sync.Mutex // guards all below
	idle     sync.Cond  // flushing became false
	pending  []item     // from next on
	next     int
	messages []*message // for reuse
	flushing bool       // somebody posts, and owns the scratch below
	slots    []slot
	posted   uint64 // work requests reserved so far; slots are posted modulo their number
	retired  uint64 // those before are complete
	awaited  bool   // a task that is over waits for a completion
	done     [pollBatch]rdma.WC
	dead     bool
	cause    error // what the target broke

	// Owned by who set flushing.
	inline     int // QPAttr.MaxInline
	wrs        []rdma.SendWR
	sges       [sendSlots * sendSGEs]rdma.SGE
	heads      [][maxHead]byte // of messages that go inline; one for each of wrs
	unsignaled int
}

// message takes one completion of a receive.
func (m *iserMover) message(wc *rdma.WC) error {
	h, data, err := parseMessage(m.recvs[wc.ID].SGE[0].Buf[:wc.Bytes], m.maxRecv)
	if err != nil {
		return err
	}
	op := h.Opcode()
	if op == pdu.OpDataIn || op == pdu.OpR2T {
		return protocolError("%v in a message", op)
	}
	if wc.Invalidated {
		if err := m.invalidated(h, wc.InvalidatedKey); err != nil {
			return err
		}
	}
	return m.up.receive(h, data)
}

// invalidated checks a Send with Invalidate: the target must name the STag of the task that it ends (ISER-39, ISER-40). No two tasks have the same, so it does not matter
// here that the tag may be of an earlier task.
func (m *iserMover) invalidated(h *pdu.Header, key uint32) error {
	i := int(h.ITT() & tagMask)
	switch {
	case h.Opcode() != pdu.OpSCSIResponse:
		return protocolError("%v invalidates an STag", h.Opcode())
	case !m.remoteInv:
		return protocolError("Send with Invalidate, which was not agreed on")
	case i >= len(m.table):
		return protocolError("Send with Invalidate for an unknown task")
	case key == 0 || !m.table[i].move.key.CompareAndSwap(key, 0):
		return protocolError("the invalidated STag is not that of the task")
	}
	return nil
}

// prepare implements datamover.
func (m *iserMover) prepare(t *task) error {
	x := &t.move
	n := uint32(len(t.out))
	first := min(n, m.p.FirstBurst)
	x.immediate = 0
	if m.p.ImmediateData {
		x.immediate = min(first, m.p.MaxSend)
	}
	t.sent = x.immediate
	if !m.p.InitialR2T {
		t.sent = first
	}
	t.cmd.Final = t.sent == x.immediate
	data := t.in
	if n > 0 {
		if x.immediate == n && n <= copyLimit {
			return nil
		}
		data = t.out
	}
	if len(data) == 0 {
		return nil
	}
	if r := m.mem.find(data); r != nil {
		x.mem, x.mr = data, r.mr
	} else {
		p, err := m.mem.get(len(data))
		if err != nil {
			return err
		}
		x.bounce, x.mem, x.mr = p, p.buf[:len(data)], p.r.mr
		if n > 0 {
			copy(x.mem, t.out)
		} else {
			clear(x.mem) // what the target does not write must not look like data of an earlier command
		}
	}
	x.exposed = t.sent
	if m.wholeBase {
		x.exposed = 0
	}
	return nil
}

// solicited reports whether the target is to reach memory of the task.
func (t *task) solicited() bool { return len(t.in) > 0 || int(t.sent) < len(t.out) }

// command implements datamover.
func (m *iserMover) command(t *task, ahs []byte) {
	x := &t.move
	x.ahs = ahs
	m.tasks.Add(1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return // the session is failing, and its tasks with it
	}
	if t.solicited() {
		m.pending = append(m.pending, item{op: itemBind, t: t})
	}
	it := item{op: itemCommand, t: t}
	if x.immediate > copyLimit {
		it.ref = t
		t.refs.Add(1)
	} else if x.immediate > 0 {
		it.out = true
		t.refs.Add(1)
	}
	m.pending = append(m.pending, it)
	if t.sent == x.immediate {
		return
	}
	it = item{op: itemDataOut, t: t, offset: x.immediate}
	for it.offset < t.sent {
		it.length = min(t.sent-it.offset, m.p.MaxSend)
		if it.final = it.offset+it.length == t.sent; it.final {
			it.ref = t // for all of them
			t.refs.Add(1)
		}
		m.pending = append(m.pending, it)
		it.offset += it.length
		it.sn++
	}
}

// control implements datamover.
func (m *iserMover) control(h *pdu.Header, data []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return
	}
	msg := m.messageLocked()
	msg.header, msg.data, msg.hello = *h, append(msg.data[:0], data...), false
	m.pending = append(m.pending, item{op: itemControl, msg: msg})
}

func (m *iserMover) messageLocked() *message {
	if k := len(m.messages); k > 0 {
		msg := m.messages[k-1]
		m.messages = m.messages[:k-1]
		return msg
	}
	return new(message)
}

// maxControl implements datamover.
func (m *iserMover) maxControl() int { return copyLimit }

// end implements datamover.
func (m *iserMover) end(t *task) bool {
	x := &t.move
	if !x.posted.Load() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.dead {
			return true
		}
		if m.cause == nil {
			m.cause = protocolError("the end of a task that was not sent yet")
		}
		m.qp.Disconnect()
		return false
	}
	m.tasks.Add(-1)
	key := x.key.Swap(0)
	if key == 0 && t.refs.Load() == 1 {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return true
	}
	x.over, m.awaited = true, true
	if key != 0 {
		t.refs.Add(1)
		m.pending = append(m.pending, item{op: itemInvalidate, t: t, ref: t, key: key})
	}
	return true
}

// finish implements datamover.
func (m *iserMover) finish(t *task) {
	x := &t.move
	if x.bounce.buf != nil {
		if len(t.in) > 0 {
			copy(t.in[:t.rsp.Transferred], x.mem)
		}
		m.mem.put(x.bounce)
		x.bounce = piece{}
	}
	x.mem, x.mr, x.ahs = nil, nil, nil
	if x.key.Load() != 0 {
		x.key.Store(0)
	}
	x.posted.Store(false)
	x.over = false
}

func (m *iserMover) alloc(n int) ([]byte, error) { return m.mem.alloc(n) }

func (m *iserMover) free(b []byte) { m.mem.release(b) }

func (m *iserMover) close() {
	m.qp.Disconnect()
	m.rouse()
}

func (m *iserMover) workLocked() bool {
	return !m.dead && m.next < len(m.pending) && m.posted-m.retired < sendSlots
}

// flush implements datamover. Posting never waits for the peer. Who posts takes along what others add meanwhile, for a while.
func (m *iserMover) flush(bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.flushing {
		return
	}
	if m.posted-m.retired > sendSlots/2 {
		m.reapLocked()
	}
	m.flushing = true
	for n := 0; m.workLocked() && n < inlineBatches; n++ {
		m.postLocked()
	}
	m.flushing = false
	if m.awaited {
		m.reapLocked()
		m.awaited = m.awaitedLocked()
	}
	if m.dead {
		m.idle.Broadcast()
	} else if m.awaited || m.next < len(m.pending) {
		select {
		case m.kick <- struct{}{}:
		default:
		}
	}
}

// reapLocked takes the completions of the send queue that are there.
func (m *iserMover) reapLocked() {
	for {
		n, _ := m.sendCQ.Poll(m.done[:])
		for i := range m.done[:n] {
			m.retireLocked(&m.done[i])
		}
		if n < len(m.done) {
			return
		}
	}
}

// awaitedLocked reports whether a task that is over waits for a completion.
func (m *iserMover) awaitedLocked() bool {
	for i := m.next; i < len(m.pending); i++ {
		if t := m.pending[i].ref; t != nil && t.move.over {
			return true
		}
	}
	return m.awaitedInQueueLocked()
}

// awaitedInQueueLocked is awaitedLocked for what is posted.
func (m *iserMover) awaitedInQueueLocked() bool {
	for seq := m.retired; seq < m.posted; seq++ {
		if t := m.slots[seq%sendSlots].ref; t != nil && t.move.over {
			return true
		}
	}
	return false
}

// serve is the sender goroutine, for what others could not do without waiting. It ends when stop is closed.
func (m *iserMover) serve() {
	var wcs [pollBatch]rdma.WC
	for {
		select {
		case <-m.kick:
			m.flush(true)
		case <-m.stop:
			return
		}
		for m.starved() {
			n, err := m.sendCQ.Wait(context.Background(), wcs[:], false)
			if err != nil {
				break // the connection is over, or about to be
			}
			m.mu.Lock()
			for i := range wcs[:n] {
				m.retireLocked(&wcs[i])
			}
			m.mu.Unlock()
			m.flush(true)
		}
	}
}

// starved reports whether something waits for a completion that will come.
func (m *iserMover) starved() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.dead || m.flushing: // who flushes wakes us again
		return false
	case m.next < len(m.pending) && m.posted-m.retired == sendSlots:
		return true
	}
	return m.awaited && m.awaitedInQueueLocked()
}

// postLocked posts what fits in the send queue, and releases mu meanwhile. Bindings go first: a command names the STag.
func (m *iserMover) postLocked() {
	k := min(int(sendSlots-(m.posted-m.retired)), len(m.pending)-m.next)
	items := m.pending[m.next : m.next+k : m.next+k]
	first := m.posted
	for i := range items {
		if items[i].op == itemBind {
			first++
		}
	}
	bind, other := m.posted, first
	for i := range items {
		it := &items[i]
		seq := &other
		if it.op == itemBind {
			seq = &bind
		}
		it.seq = *seq
		m.slots[it.seq%sendSlots].ref = it.ref
		*seq++
	}
	m.posted += uint64(k)
	m.mu.Unlock()

	m.bind(items)
	m.wrs = m.wrs[:0]
	for i := range items {
		if it := &items[i]; it.op != itemBind {
			m.build(it)
		}
	}
	m.post()

	m.mu.Lock()
	for i := range items {
		if msg := items[i].msg; msg != nil {
			m.messages = append(m.messages, msg)
		}
		if items[i].out {
			items[i].t.unref()
		}
		items[i] = item{}
	}
	if m.next += k; m.next == len(m.pending) {
		m.pending, m.next = m.pending[:0], 0
	} else if m.next >= 1024 {
		n := copy(m.pending, m.pending[m.next:])
		clear(m.pending[n:])
		m.pending, m.next = m.pending[:n], 0
	}
}

// bind posts the bindings among items.
func (m *iserMover) bind(items []item) {
	m.wrs = m.wrs[:0]
	for i := range items {
		it := &items[i]
		if it.op != itemBind {
			continue
		}
		x := &it.t.move
		access := rdma.RemoteRead
		if len(it.t.in) > 0 {
			access = rdma.RemoteWrite
		}
		m.add(it.seq, rdma.OpBind, false).Bind = rdma.Bind{Window: x.win, MR: x.mr, Buf: x.mem[x.exposed:], Access: access}
	}
	if len(m.wrs) == 0 {
		return
	}
	m.post()
	for i := range items {
		if it := &items[i]; it.op == itemBind {
			x := &it.t.move
			x.base = x.win.Addr()
			x.key.Store(x.win.RKey())
		}
	}
}

// add appends an empty work request to wrs, of which there are sendSlots at most; signaled asks for its completion.
func (m *iserMover) add(id uint64, op rdma.Opcode, signaled bool) *rdma.SendWR {
	m.wrs = m.wrs[:len(m.wrs)+1]
	wr := &m.wrs[len(m.wrs)-1]
	*wr = rdma.SendWR{ID: id, Op: op}
	if m.unsignaled++; signaled || m.unsignaled == signalEvery {
		wr.Flags = rdma.Signaled
		m.unsignaled = 0
	}
	return wr
}

// build makes the work request of an item.
func (m *iserMover) build(it *item) {
	if it.op == itemInvalidate {
		m.add(it.seq, rdma.OpLocalInvalidate, true).RKey = it.key
		return
	}
	if it.op == itemNudge {
		m.add(it.seq, rdma.OpWrite, false)
		return
	}
	s := m.slots[it.seq%sendSlots].buf
	inline := m.inline == slotLen && it.ref == nil && it.op != itemDataOut
	if inline {
		s = m.heads[len(m.wrs)][:]
	}
	putControl(s)
	h := (*pdu.Header)(s[iserHeaderLen:])
	n := iserHeaderLen + pdu.HeaderLen
	var data []byte // of mr, or copied if that is nil
	var mr rdma.MR
	switch it.op {
	case itemCommand:
		x := &it.t.move
		it.t.cmd.Encode(h)
		if len(it.t.in) > 0 {
			putReadTag(s, x.key.Load(), x.base)
		} else if it.t.solicited() {
			putWriteTag(s, x.key.Load(), x.base)
		}
		h.SetAHSLength(len(x.ahs))
		n += copy(s[n:], x.ahs)
		data = it.t.out[:x.immediate]
		if x.immediate > copyLimit {
			data, mr = x.mem[:x.immediate], x.mr
		}
	case itemDataOut:
		x := &it.t.move
		p := pdu.DataOut{ITT: it.t.cmd.ITT, TTT: pdu.ReservedTag, ExpStatSN: m.expStatSN(), DataSN: it.sn, Offset: it.offset, Final: it.final}
		p.Encode(h)
		data, mr = x.mem[it.offset:it.offset+it.length], x.mr
	case itemControl:
		if it.msg.hello {
			copy(s, it.msg.header[:iserHeaderLen])
			n = iserHeaderLen
			break
		}
		*h = it.msg.header
		data = it.msg.data
	}
	if !it.isHello() {
		h.SetDataLength(len(data))
	}
	pad := pdu.Padding(len(data))
	at := len(m.wrs) * sendSGEs // of what add returns
	sge := m.sges[at : at : at+sendSGEs]
	key := m.slotMR.LKey()
	wr := m.add(it.seq, rdma.OpSend, it.ref != nil)
	if inline {
		wr.Flags |= rdma.Inline
		sge = append(sge, rdma.SGE{Buf: s[:n]})
		if len(data) > 0 {
			sge = append(sge, rdma.SGE{Buf: data})
		}
		if pad > 0 {
			sge = append(sge, rdma.SGE{Buf: padding[:pad]})
		}
	} else if mr == nil {
		n += copy(s[n:], data)
		clear(s[n : n+pad])
		sge = append(sge, rdma.SGE{Buf: s[:n+pad], LKey: key})
	} else {
		sge = append(sge, rdma.SGE{Buf: s[:n], LKey: key}, rdma.SGE{Buf: data, LKey: mr.LKey()})
		if pad > 0 {
			clear(s[n : n+pad])
			sge = append(sge, rdma.SGE{Buf: s[n : n+pad], LKey: key})
		}
	}
	wr.SGE = sge
	if it.op == itemCommand {
		it.t.move.posted.Store(true)
	}
}

func (it *item) isHello() bool { return it.op == itemControl && it.msg.hello }

// post posts wrs.
func (m *iserMover) post() {
	if len(m.wrs) == 0 {
		return
	}
	_, err := m.qp.PostSend(m.wrs)
	if err != nil && !errors.Is(err, rdma.ErrDisconnected) { // who disconnected knows why
		m.fail(fmt.Errorf("initiator: post: %w", err))
	}
}

// fail ends the connection for a reason of ours.
func (m *iserMover) fail(err error) {
	m.mu.Lock()
	if m.cause == nil {
		m.cause = err
	}
	m.mu.Unlock()
	m.close()
}

// retireLocked takes a completion: all work requests up to it are complete, and what they refer to is free.
func (m *iserMover) retireLocked(wc *rdma.WC) {
	if wc.Status != rdma.StatusSuccess {
		return // the connection is over, and abandon retires all
	}
	for m.retired <= wc.ID && m.retired < m.posted {
		s := &m.slots[m.retired%sendSlots]
		if s.ref != nil {
			s.ref.unref()
			s.ref = nil
		}
		m.retired++
	}
}

// run implements datamover.
func (m *iserMover) run(s upcalls) error {
	m.up = s
	served := make(chan struct{})
	go func() {
		m.serve()
		close(served)
	}()
	err := m.receive()
	m.recv.timer.Stop()
	m.abandon()
	close(m.stop)
	<-served
	return err
}

// abandon ends the connection and gives all memory back. When it returns, nobody touches a task or its buffers any more.
func (m *iserMover) abandon() {
	if m.qp != nil {
		m.qp.Close()
	}
	m.mu.Lock()
	m.dead = true
	for m.flushing {
		m.idle.Wait()
	}
	for ; m.retired < m.posted; m.retired++ {
		if s := &m.slots[m.retired%sendSlots]; s.ref != nil {
			s.ref.unref()
			s.ref = nil
		}
	}
	for i := m.next; i < len(m.pending); i++ {
		it := &m.pending[i]
		if it.ref != nil {
			it.ref.unref()
		}
		if it.out {
			it.t.unref()
		}
	}
	m.pending = nil
	m.mu.Unlock()
	for _, w := range m.windows {
		w.Close()
	}
	for _, cq := range []rdma.CQ{m.recvCQ, m.sendCQ} {
		if cq != nil {
			cq.Close()
		}
	}
	for _, p := range m.fixed {
		m.mem.put(p)
	}
	m.fixed = nil
	m.mem.close()
}

// reason is why the connection ended.
func (m *iserMover) reason(err error) error {
	m.mu.Lock()
	cause := m.cause
	m.mu.Unlock()
	if cause != nil {
		return cause
	}
	if e := m.qp.Err(); e != nil {
		err = e
	}
	if errors.Is(err, rdma.ErrAccess) {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return err
}

// nudgeAfter is how long the target may be silent before it is nudged.
const nudgeAfter = 250 * time.Millisecond

// nextMessage waits for the next message, before run. Linux's soft-iWARP, as the side that accepts, forgets to look at what arrives right behind
// its answer, until something else arrives: so a silent target is sent RDMA Writes of nothing.
func (m *iserMover) nextMessage(ctx context.Context) (*rdma.WC, error) {
	for {
		patience, cancel := context.WithTimeout(ctx, nudgeAfter)
		n, err := m.recvCQ.Wait(patience, m.wcs[:1], false)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			m.mu.Lock()
			m.pending = append(m.pending, item{op: itemNudge})
			m.mu.Unlock()
			m.flush(true)
			continue
		case err != nil:
			return nil, m.reason(err)
		case n == 0:
			continue
		}
		wc := &m.wcs[0]
		if wc.Status != rdma.StatusSuccess {
			return nil, m.reason(nil)
		}
		return wc, nil
	}
}

// repost gives a receive back to the queue pair.
func (m *iserMover) repost(id uint64) error {
	if _, err := m.qp.PostRecv(m.recvs[id : id+1]); err != nil {
		return m.reason(err)
	}
	return nil
}

// hello exchanges Hello and HelloReply (RFC 7145, 5.1.3), with the number of RDMA Reads that we serve at once.
func (m *iserMover) hello(ctx context.Context) error {
	ird, _ := m.qp.Depth()
	m.mu.Lock()
	msg := m.messageLocked()
	*msg = message{hello: true}
	b := msg.header[:iserHeaderLen]
	b[0], b[1] = iserHello, iserVersion<<4|iserVersion
	binary.BigEndian.PutUint16(b[2:], uint16(ird))
	m.pending = append(m.pending, item{op: itemControl, msg: msg})
	m.mu.Unlock()
	m.flush(true)
	wc, err := m.nextMessage(ctx)
	if err != nil {
		return err
	}
	r := m.recvs[wc.ID].SGE[0].Buf[:wc.Bytes]
	switch {
	case len(r) != iserHeaderLen || r[0]&iserOpcodeMask != iserHelloReply:
		return protocolError("no HelloReply: a message of %d bytes", len(r))
	case r[0]&iserHelloRejected != 0:
		return protocolError("the target rejects the Hello")
	case r[1]&0xf != iserVersion && r[1]&0xf != 1:
		return protocolError("HelloReply of version %d", r[1]&0xf)
	case int(binary.BigEndian.Uint16(r[2:])) > ird:
		return protocolError("HelloReply with iSER-ORD %d, ours is %d", binary.BigEndian.Uint16(r[2:]), ird)
	}
	return m.repost(wc.ID)
}
