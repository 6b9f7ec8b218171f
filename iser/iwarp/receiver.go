package iwarp

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/isergate/isergate/iser/rdma"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Framing of MPA (RFC 5044, 4): length (2), ULPDU, zeroes up to a multiple of 4, CRC32C of all that, least significant byte first.
const (
	lengthLen = 2
	crcLen    = 4
	// scratchLen holds a Read Request or a Terminate after its header.
	scratchLen = 64
	// bigPayload: of what remains of such a segment, nothing takes the way through the read buffer.
	bigPayload = 4 << 10
)

// padding is the number of bytes between a ULPDU of n bytes and its CRC.
func padding(n int) int { return -(lengthLen + n) & 3 }

// kind is a kind of event.
type kind uint8

const (
	eventReceived   kind = iota + 1 // a Send is complete in the oldest receive
	eventRequest                    // a Read Request is in the response queue
	eventRead                       // the oldest Read is complete
	eventTerminated                 // a Terminate came; no further FPDU is delivered
	eventFault                      // the peer made a mistake; no further FPDU is delivered
	eventOpen                       // the first FPDU was valid
)

// event is what the receiver found. Its fields depend on kind.
type event struct {
	kind kind
	wc   rdma.WC // eventReceived: all but QPNum
	sse  bool    // eventReceived: solicited
	wqe  *sendWQE

	fault      fault   // eventFault
	culprit    culprit // eventFault
	terminated *TerminateError
}

type phase uint8

const (
	phaseHeader  phase = iota
	phasePayload       // of the segment in seg
	phaseSkip          // payload of a segment that is at fault: only its CRC matters
	phaseTrailer
	phaseDead
)

// dest is where payload goes.
type dest uint8

const (
	destScratch dest = iota
	destReceive
	destSink
	destWindow
)

// receiver is the receive side of one connection, from the byte stream after the MPA frames to events. It does no I/O: its user gets places for
// the next bytes from places, says how many came by filled, and calls step until it wants more. One goroutine uses it.
//
// Payload is placed in its buffer before the CRC behind it was checked; nothing is delivered before. A
// header is acted on at once if it is valid, so a wrong CRC can have made a valid header
// out of another: what it can reach is no more than what the peer may write anyway.
type receiver struct {
	crc    bool
	rtr    RTR // the forms one of which the first FPDU must have; 0: any
	recvs  *recvQueue
	reads  *readQueue
	resps  *responseQueue
	tags   *tagTable
	buf    []byte // read buffer
	view   []byte // what is looked at: buf, or a piece of spec
	from   int    // view[from:to] is read and not looked at
	to     int
	opened bool

	phase   phase
	length  int // of the ULPDU
	hdr     [lengthLen + maxHeaderLen]byte
	seg     segment
	sum     uint32
	left    int // payload that is not placed
	dest    dest
	sink    *sink  // destSink: the oldest Read
	at      uint64 // destWindow: TO of the next byte
	pending fault  // phaseSkip
	scratch [scratchLen]byte
	scratN  int

	msn   [3]uint32 // of the message that is expected, by queue
	recv  recvState // the Send that is being received
	iov   [][]byte
	aimed int // how many of iov are payload of the current segment

	spec   speculation
	copied int // bytes of payload that went through buf
}

// recvState is the progress of a message on queue 0.
type recvState struct {
	active bool
	cur    cursor
	got    int
	op     opcode
	tag    uint32
}

func (r *receiver) init(crc bool, rtr RTR, q *queues) {
	r.crc, r.rtr = crc, rtr
	r.recvs, r.reads, r.resps, r.tags = &q.recvs, &q.reads, &q.resps, q.tags
	r.msn = [3]uint32{1, 1, 1} // IWARP-32
}

// queues are what a connection's two directions share.
type queues struct {
	recvs recvQueue
	reads readQueue
	resps responseQueue
	tags  *tagTable
}

// buffered reports whether bytes are read and not looked at.
func (r *receiver) buffered() bool { return r.to > r.from || r.spec.at < len(r.spec.pieces) }

// direct reports whether the next bytes go to a place outside the buffer, and whether that is
// a window: then tags.mu must be held from places to filled.
func (r *receiver) direct() (direct, window bool) {
	return r.phase == phasePayload && !r.buffered() && r.left > 0, r.dest == destWindow
}

// places returns where the next bytes go: payload first, then what may be read ahead, then the buffer, which must be there. It is
// asked after step returned false.
func (r *receiver) places() [][]byte {
	r.iov, r.aimed, r.spec.planned, r.spec.taken = r.iov[:0], 0, 0, span{}
	limit := plainBytes
	direct, _ := r.direct()
	switch {
	case direct && r.dest == destScratch:
		r.iov = append(r.iov, r.scratch[r.scratN:r.scratN+r.left])
	case direct && r.dest == destWindow:
		if b, ok := r.tags.reachLocked(r.seg.stag, r.at, r.left, rdma.RemoteWrite); ok == accessOK {
			r.iov = append(r.iov, b)
		} // else it was invalidated, and take finds out
	case direct:
		c := *r.cursor()
		n := r.left
		for n > 0 && len(r.iov) < maxPieces {
			b := c.next(n)
			if !r.spec.taken.take(b) {
				break
			}
			r.iov = append(r.iov, b)
			n -= len(b)
		}
		if r.aimed = len(r.iov); n > 0 {
			return r.iov
		}
		if r.dest == destSink {
			limit = r.plan(c, r.length)
		}
	case r.phase == phaseHeader && !r.buffered():
		if k := r.reads.oldest(); k != nil && k.size-k.got >= minAhead {
			limit = r.plan(k.cur, -1)
		}
	}
	if r.spec.planned == 0 {
		r.aimed = len(r.iov)
		if direct && !r.seg.last && r.length >= bigPayload {
			// More of the kind follows: take just its header along, so that its payload comes directly too.
			limit = padding(r.length) + crcLen + lengthLen + untaggedLen
			if r.seg.tagged {
				limit += taggedLen - untaggedLen
			}
		}
	}
	r.iov = append(r.iov, r.space(limit))
	return r.iov
}

// space returns free buffer for at most limit bytes.
func (r *receiver) space(limit int) []byte {
	if r.from == r.to {
		r.from, r.to = 0, 0
	} else if r.from > 0 && len(r.buf)-r.to < len(r.buf)/2 {
		r.to = copy(r.buf, r.buf[r.from:r.to])
		r.from = 0
	}
	return r.buf[r.to:min(len(r.buf), r.to+limit)]
}

// filled says that n bytes are in the places. In a window, under tags.mu, this is where its payload is summed up.
func (r *receiver) filled(n int) {
	planned := r.spec.planned
	for i := 0; n > 0; i++ {
		b := r.iov[i][:min(n, len(r.iov[i]))]
		n -= len(b)
		switch {
		case i < r.aimed:
			r.placed(b)
		case i < r.aimed+planned:
			r.spec.came(b)
		case planned > 0:
			r.spec.tail(b)
		default:
			r.to += len(b)
		}
	}
}

// cursor is where payload goes for destReceive and destSink.
func (r *receiver) cursor() *cursor {
	if r.dest == destSink {
		return &r.sink.cur
	}
	return &r.recv.cur
}

// placed accounts for payload that lies in its place.
func (r *receiver) placed(b []byte) {
	if r.crc {
		r.sum = crc32.Update(r.sum, castagnoli, b)
	}
	n := len(b)
	r.left -= n
	switch r.dest {
	case destScratch:
		r.scratN += n
	case destWindow:
		r.at += uint64(n)
	default:
		for c := r.cursor(); n > 0; {
			n -= len(c.next(n))
		}
	}
}

// take moves what is buffered of the payload to its place.
func (r *receiver) take() {
	if r.dest == destWindow {
		r.tags.mu.Lock()
		defer r.tags.mu.Unlock()
	}
	for r.left > 0 && r.from < r.to {
		b := r.view[r.from:min(r.to, r.from+r.left)]
		var to []byte
		switch r.dest {
		case destScratch:
			to = r.scratch[r.scratN : r.scratN+len(b)]
		case destWindow:
			var ok access
			if to, ok = r.tags.reachLocked(r.seg.stag, r.at, len(b), rdma.RemoteWrite); ok != accessOK {
				r.skip(tagged(ok)) // invalidated after the first bytes
				return
			}
		default:
			c := r.cursor()
			save := *c
			to = c.next(len(b))
			*c = save
		}
		n := copy(to, b)
		r.from += n
		if r.dest != destScratch {
			r.copied += n
		}
		r.placed(to[:n])
	}
}

// step looks at what was read. It returns true with an event, or false when it needs more bytes.
func (r *receiver) step(e *event) bool {
	for {
		switch r.phase {
		case phaseHeader:
			if handled, done := r.frame(e); handled {
				if done {
					return true
				}
				continue
			}
			if !r.header() && !r.more() {
				return false
			}
		case phasePayload:
			r.take()
			if r.phase != phasePayload {
				continue
			}
			if r.left > 0 {
				if r.more() {
					continue
				}
				return false
			}
			r.phase = phaseTrailer
		case phaseSkip:
			if !r.crc {
				return r.fail(e, r.pending)
			}
			n := min(r.to-r.from, r.left)
			r.sum = crc32.Update(r.sum, castagnoli, r.view[r.from:r.from+n])
			r.from += n
			if r.left -= n; r.left > 0 {
				if r.more() {
					continue
				}
				return false
			}
			r.phase = phaseTrailer
		case phaseTrailer:
			n := padding(r.length) + crcLen
			if r.to-r.from < n {
				if r.more() {
					continue
				}
				return false
			}
			b := r.view[r.from : r.from+n]
			r.from += n
			r.phase = phaseHeader
			if r.crc && crc32.Update(r.sum, castagnoli, b[:n-crcLen]) != binary.LittleEndian.Uint32(b[n-crcLen:]) {
				return r.fail(e, faultOf(layerMPA, 0, mpaCRC)) // IWARP-22
			}
			if r.pending != noFault {
				return r.fail(e, r.pending)
			}
			if r.complete(e) {
				return true
			}
		case phaseDead:
			return false
		}
	}
}

// fail ends the receiver with a fault.
func (r *receiver) fail(e *event, f fault) bool {
	r.phase = phaseDead
	*e = event{kind: eventFault, fault: f}
	r.blame(&e.culprit)
	return true
}

// blame describes the current segment.
func (r *receiver) blame(c *culprit) {
	c.length = r.length
	copy(c.header[:], r.hdr[lengthLen:])
	if r.seg.op == opReadRequest && !r.seg.tagged && r.scratN >= readRequestLen {
		copy(c.header[untaggedLen:], r.scratch[:readRequestLen])
		c.request = true
	}
}

// skip gives up the current segment: the fault is reported when its CRC was found right.
func (r *receiver) skip(f fault) { r.phase, r.pending = phaseSkip, f }

// frame takes an FPDU of an RDMA Write or a Send that lies in the view as a whole, which is what most small ones do, in one go: one look at its CRC, before anything is
// placed, and one look-up. What is wrong with one is found, and reported, by the steps that it would take otherwise: handled is false then, and nothing has changed. done
// reports an event.
func (r *receiver) frame(e *event) (handled, done bool) {
	b := r.view[r.from:r.to]
	if len(b) < lengthLen+untaggedLen || !r.opened {
		return false, false
	}
	length := int(binary.BigEndian.Uint16(b))
	ulpdu := lengthLen + length
	total := ulpdu + padding(length) + crcLen
	if len(b) < total || length < untaggedLen { // one of a tagged segment without payload goes the other way too
		return false, false
	}
	var seg segment
	if seg.decode(b[lengthLen:]) != noFault {
		return false, false
	}
	head := lengthLen + seg.headerLen()
	if r.crc && crc32.Update(0, castagnoli, b[:total-crcLen]) != binary.LittleEndian.Uint32(b[total-crcLen:total]) {
		return false, false
	}
	payload := b[head:ulpdu]
	switch {
	case seg.op == opWrite:
		if len(payload) == 0 || !r.write(&seg, payload) {
			return false, false
		}
		r.copied += len(payload)
		r.from += total
		return true, false
	case !seg.op.isSend() || seg.msn != r.msn[queueSend]:
		return false, false
	}
	r.seg, r.left, r.length = seg, len(payload), length
	if r.admitSend() != noFault {
		return false, false
	}
	for left := payload; len(left) > 0; {
		left = left[copy(r.recv.cur.next(len(left)), left):]
	}
	r.copied += len(payload)
	r.from += total
	r.left, r.pending, r.scratN = 0, noFault, 0
	copy(r.hdr[:], b[:head])
	return true, r.complete(e)
}

// write places the payload of an RDMA Write, if it may.
func (r *receiver) write(s *segment, payload []byte) bool {
	r.tags.mu.Lock()
	defer r.tags.mu.Unlock()
	to, ok := r.tags.reachLocked(s.stag, s.to, len(payload), rdma.RemoteWrite)
	copy(to, payload)
	return ok == accessOK
}

// header reads the length and the DDP header; false if they are not complete.
func (r *receiver) header() bool {
	b := r.view[r.from:r.to]
	if len(b) < lengthLen {
		return false
	}
	r.length = int(binary.BigEndian.Uint16(b))
	n := min(r.length, taggedLen)
	if len(b) < lengthLen+n {
		return false
	}
	if n > 0 && b[lengthLen]&ctrlTagged == 0 {
		n = min(r.length, untaggedLen)
		if len(b) < lengthLen+n {
			return false
		}
	}
	b = b[:lengthLen+n]
	r.hdr = [len(r.hdr)]byte{}
	copy(r.hdr[:], b)
	r.from += len(b)
	if r.crc {
		r.sum = crc32.Update(0, castagnoli, b)
	}
	r.left, r.pending, r.scratN, r.phase = r.length-n, noFault, 0, phasePayload
	r.seg = segment{}
	if n < taggedLen || b[lengthLen]&ctrlTagged == 0 && n < untaggedLen {
		r.skip(faultOf(layerMPA, 0, mpaFraming))
		return true
	}
	f := r.seg.decode(b[lengthLen:])
	if f == noFault {
		f = r.admit()
	}
	if f != noFault {
		r.skip(f)
	}
	return true
}

// tagged is the fault of a refused placement (IWARP-36). DDP has no code for a missing right.
func tagged(a access) fault {
	switch a {
	case accessBounds:
		return faultOf(layerDDP, ddpTagged, ddpBounds)
	case accessWrap:
		return faultOf(layerDDP, ddpTagged, ddpWrap)
	}
	return faultOf(layerDDP, ddpTagged, ddpInvalidTag)
}

// admit decides where the payload of the segment goes, before any of it is placed.
func (r *receiver) admit() fault {
	s := &r.seg
	if !r.opened && r.rtr != 0 && !r.isRTR() {
		return faultOf(layerMPA, 0, mpaNoRTR) // IWARP-16
	}
	switch s.op {
	case opWrite:
		r.dest, r.at = destWindow, s.to
		if r.left == 0 {
			return noFault // IWARP-35: nothing is checked
		}
		r.tags.mu.Lock()
		_, ok := r.tags.reachLocked(s.stag, s.to, r.left, rdma.RemoteWrite)
		r.tags.mu.Unlock()
		if ok != accessOK {
			return tagged(ok)
		}
		return noFault
	case opReadResponse:
		return r.admitResponse()
	}
	if s.msn != r.msn[s.queue] {
		return faultOf(layerDDP, ddpUntagged, ddpMSNRange)
	}
	if s.op.isSend() {
		return r.admitSend()
	}
	r.dest = destScratch
	want := readRequestLen
	if s.op == opTerminate {
		want = scratchLen
	}
	switch {
	case s.mo != 0:
		return faultOf(layerDDP, ddpUntagged, ddpInvalidOffset)
	case r.left > want || !s.last:
		return faultOf(layerDDP, ddpUntagged, ddpTooLong)
	case s.op == opReadRequest && r.left < want, s.op == opTerminate && r.left < termFixed:
		return faultOf(layerMPA, 0, mpaFraming)
	case s.op == opReadRequest && r.resps.full():
		return faultOf(layerDDP, ddpUntagged, ddpNoBuffer) // IWARP-54
	}
	return noFault
}

// isRTR reports whether the segment is one of the agreed forms of the first frame.
func (r *receiver) isRTR() bool {
	s := &r.seg
	switch {
	case s.op == opWrite:
		return r.rtr&RTRWrite != 0 && r.left == 0 && s.last
	case s.op == opSend:
		return r.rtr&RTRSend != 0 && r.left == 0 && s.last && s.mo == 0
	}
	return s.op == opReadRequest && r.rtr&RTRRead != 0
}

// admitResponse takes a Read Response if it is the next part of the oldest Read (IWARP-R11).
func (r *receiver) admitResponse() fault {
	s, k := &r.seg, r.reads.oldest()
	r.dest, r.sink = destSink, k
	switch {
	case k == nil:
		return faultOf(layerDDP, ddpTagged, ddpInvalidTag)
	case k.size == 0 && r.left == 0 && s.last:
		return noFault
	case s.stag != k.tag:
		return faultOf(layerDDP, ddpTagged, ddpInvalidTag)
	case s.to != k.to+uint64(k.got), uint32(r.left) > k.size-k.got, s.last != (uint32(r.left) == k.size-k.got), r.left == 0:
		return faultOf(layerDDP, ddpTagged, ddpBounds)
	}
	return noFault
}

// admitSend finds the place of a segment of a Send in the oldest receive.
func (r *receiver) admitSend() fault {
	s, m := &r.seg, &r.recv
	r.dest = destReceive
	if !r.opened && r.rtr != 0 {
		return noFault // it is the first frame, and takes no receive (IWARP-17)
	}
	if !m.active {
		w := r.recvs.oldest()
		switch {
		case s.mo != 0:
			return faultOf(layerDDP, ddpUntagged, ddpInvalidOffset)
		case w == nil:
			return faultOf(layerDDP, ddpUntagged, ddpNoBuffer) // IWARP-55
		}
		*m = recvState{active: true, op: s.op, tag: s.stag}
		m.cur.reset(w.sge)
	}
	switch {
	case int(s.mo) != m.got:
		return faultOf(layerDDP, ddpUntagged, ddpInvalidOffset) // IWARP-38
	case s.op != m.op || m.op.invalidates() && s.stag != m.tag:
		return faultOf(layerRDMAP, rdmapOperation, rdmapUnexpected) // IWARP-31
	case r.left > m.cur.left:
		return faultOf(layerDDP, ddpUntagged, ddpTooLong) // IWARP-55
	}
	return noFault
}

// complete acts on a segment that is placed and whose CRC is right. It returns true with an event.
func (r *receiver) complete(e *event) bool {
	first := !r.opened
	r.opened = true
	s := &r.seg
	switch s.op {
	case opWrite:
	case opReadRequest:
		return r.completeRequest(e)
	case opReadResponse:
		k := r.sink
		k.got += uint32(r.length - taggedLen)
		r.spec.learn(r.length-taggedLen, s.last)
		if s.last {
			e.kind, e.wqe = eventRead, k.wqe
			return true
		}
	case opTerminate:
		r.phase = phaseDead
		t, _ := decodeTerminate(r.scratch[:r.scratN])
		e.kind, e.terminated = eventTerminated, t
		return true
	default:
		if first && r.rtr != 0 {
			r.msn[queueSend]++
			break
		}
		m := &r.recv
		m.got += r.length - untaggedLen
		if !s.last {
			break
		}
		r.msn[queueSend]++
		m.active = false
		e.wc = rdma.WC{Op: rdma.OpRecv, Bytes: m.got}
		if m.op.invalidates() {
			if !r.tags.invalidate(m.tag) { // IWARP-59
				return r.fail(e, faultOf(layerRDMAP, rdmapProtection, rdmapCannotInvalidate))
			}
			e.wc.Invalidated, e.wc.InvalidatedKey = true, m.tag
		}
		e.kind, e.sse = eventReceived, m.op.solicited()
		return true
	}
	if first {
		e.kind = eventOpen
		return true
	}
	return false
}

// completeRequest checks the source of a Read and queues the response (IWARP-52).
func (r *receiver) completeRequest(e *event) bool {
	r.msn[queueRead]++
	var q readRequest
	q.decode(r.scratch[:])
	if q.size > 0 {
		r.tags.mu.Lock()
		_, ok := r.tags.reachLocked(q.sourceTag, q.sourceTO, int(q.size), rdma.RemoteRead)
		r.tags.mu.Unlock()
		if ok != accessOK {
			return r.fail(e, source(ok))
		}
	}
	var c culprit
	r.blame(&c)
	r.resps.push(&q, &c)
	e.kind = eventRequest
	return true
}

// source is the fault of a Read that is refused.
func source(a access) fault {
	switch a {
	case accessDenied:
		return faultOf(layerRDMAP, rdmapProtection, rdmapAccess)
	case accessBounds:
		return faultOf(layerRDMAP, rdmapProtection, rdmapBounds)
	case accessWrap:
		return faultOf(layerRDMAP, rdmapProtection, rdmapWrap)
	}
	return faultOf(layerRDMAP, rdmapProtection, rdmapInvalidTag)
}
