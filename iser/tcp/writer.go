package tcp

import (
	"encoding/binary"
	"errors"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Limits of the send side.
const (
	copyLimit  = 128 << 10 // payload up to this is copied behind its header; above, it is gathered by writev
	highWater  = 256 << 10 // payload waits while so much is queued
	keepBuffer = 16 << 10  // a connection that has nothing to write keeps so much memory for it
	// gatherLimit is how much is queued before nobody waits for more to write at once.
	gatherLimit = 64 << 10
	maxBacklog  = 1 << 20 // a peer that lets this much pile up does not read

	// stallTimeout is what one write, of at most a few hundred KiB, may take.
	stallTimeout = 40 * time.Second
)

// errBacklog: the peer does not read what it is sent.
var errBacklog = errors.New("tcp: the peer does not read")

// writer sends PDUs in the order in which they are queued. There is no goroutine for it: whoever queues writes what is queued, unless
// somebody is writing already, who then takes that along. This is what batches small PDUs.
type writer struct {
	nc net.Conn

	mu   sync.Mutex
	cond sync.Cond // queue shrank, or writing ended
	// The fields below are guarded by mu.
	buf          []byte // queued
	writing      bool   // somebody is in Write
	closing      bool   // takes no more
	err          error  // the first failed write; final
	headerDigest bool
	dataDigest   bool
	segment      int // bytes of a data segment that the initiator takes
	burst        int // MaxBurstLength

	// tail is the transfer whose last Data-In is the last PDU in buf, at tailAt. Its
	// status can still go into that PDU.
	tail   *transfer
	tailAt int

	// gathering: somebody has given others the time to queue something, and then writes.
	gathering bool

	deadline time.Time               // of writes
	vector   net.Buffers             // belongs to the one who is writing
	trailer  [3 + pdu.DigestLen]byte // the same
	failed   func()                  // called once, when a write failed
}

// extend keeps the deadline of writes ahead. mu is held.
func (w *writer) extend() {
	if w.closing {
		return // Close has set one
	}
	if now := time.Now(); w.deadline.Sub(now) < stallTimeout {
		w.deadline = now.Add(stallTimeout + stallTimeout/4)
		w.nc.SetWriteDeadline(w.deadline)
	}
}

// fail makes the first failed write final. mu is held.
func (w *writer) fail(err error) {
	if err != nil && w.err == nil {
		w.err = err
		go w.failed()
	}
}

func (w *writer) init(nc net.Conn) {
	w.nc = nc
	w.cond.L = &w.mu
	w.segment = loginSegment
}

// usable is the error of a writer that takes no more. mu is held.
func (w *writer) usable() error {
	if w.err != nil {
		return w.err
	}
	if w.closing {
		return iscsi.ErrClosed
	}
	return nil
}

// grow makes room for n more bytes in buf. mu is held.
func (w *writer) grow(n int) {
	need := len(w.buf) + n
	if need <= cap(w.buf) {
		return
	}
	b := getBuffer(max(need, 2*len(w.buf)))
	copy(b[:cap(b)], w.buf)
	putBuffer(w.buf)
	w.buf = b[:len(w.buf)]
}

// put queues one PDU whose data is small. mu is held.
func (w *writer) put(n iscsi.Numbers, h *pdu.Header, data ...[]byte) {
	length := 0
	for _, d := range data {
		length += len(d)
	}
	h.SetDataLength(length)
	w.grow(pdu.HeaderLen + 2*pdu.DigestLen + length + 3)
	n.Stamp(h)
	w.tail = nil
	w.buf = append(w.buf, h[:]...)
	if w.headerDigest {
		w.buf = pdu.AppendDigest(w.buf, pdu.HeaderDigest(h, nil))
	}
	if length == 0 {
		return
	}
	at := len(w.buf)
	for _, d := range data {
		w.buf = append(w.buf, d...)
	}
	w.buf = append(w.buf, padding[:pdu.Padding(length)]...)
	if w.dataDigest {
		w.buf = pdu.AppendDigest(w.buf, pdu.Digest(0, w.buf[at:]))
	}
}

var padding [3]byte

// control queues a control PDU.
func (w *writer) control(n iscsi.Numbers, p *iscsi.PDU) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.usable(); err != nil {
		return err
	}
	if len(w.buf) > maxBacklog {
		return errBacklog
	}
	h := p.Header
	w.put(n, &h, p.Data)
	return nil
}

// queue queues a PDU without data. Somebody has to flush.
func (w *writer) queue(n iscsi.Numbers, h *pdu.Header) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.usable(); err != nil {
		return err
	}
	w.put(n, h)
	return nil
}

// forget writes what is queued if it ends with a Data-In of tr, whose status will not come.
func (w *writer) forget(tr *transfer) {
	w.mu.Lock()
	mine := w.tail == tr
	if mine {
		w.tail = nil
	}
	w.mu.Unlock()
	if mine {
		w.flush()
	}
}

// enable queues the final Login Response, and makes what follows full feature phase.
func (w *writer) enable(n iscsi.Numbers, final *iscsi.PDU, p *iscsi.Parameters) error {
	w.mu.Lock()
	if err := w.usable(); err != nil {
		w.mu.Unlock()
		return err
	}
	h := final.Header
	w.put(n, &h, final.Data)
	w.headerDigest, w.dataDigest = p.HeaderDigest, p.DataDigest
	w.segment, w.burst = int(p.InitiatorMaxRecvDataSegmentLength), int(p.MaxBurstLength)
	w.mu.Unlock()
	go w.flush()
	return nil
}

// flush writes what is queued, and what is queued meanwhile, unless somebody else is doing that.
func (w *writer) flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.writing {
		return w.err
	}
	w.writing = true
	w.drain()
	return w.err
}

// flushTogether is flush that lets others queue something first.
func (w *writer) flushTogether(others bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flushLocked(others)
}

// drain writes until nothing is queued, and ends writing. mu is held, and let go during a write.
func (w *writer) drain() {
	for len(w.buf) > 0 && w.err == nil {
		b := w.buf
		w.buf, w.tail = nil, nil
		w.cond.Broadcast()
		w.extend()
		w.mu.Unlock()
		_, err := w.nc.Write(b)
		w.mu.Lock()
		if w.buf == nil {
			w.buf = b[:0]
		} else {
			putBuffer(b)
		}
		w.fail(err)
	}
	if len(w.buf) == 0 && cap(w.buf) > keepBuffer {
		putBuffer(w.buf)
		w.buf = nil
	}
	w.writing = false
	w.cond.Broadcast()
}

// gather writes one PDU with large data without copying it, after what is queued. The data may be reused when it returns.
func (w *writer) gather(n iscsi.Numbers, h *pdu.Header, data [][]byte, length int) error {
	h.SetDataLength(length)
	w.mu.Lock()
	defer w.mu.Unlock()
	crc := uint32(0)
	if w.dataDigest {
		w.mu.Unlock()
		for _, d := range data {
			crc = pdu.Digest(crc, d)
		}
		crc = pdu.PadDigest(crc, length)
		w.mu.Lock()
	}
	for w.writing && w.usable() == nil {
		w.cond.Wait()
	}
	if err := w.usable(); err != nil {
		return err
	}
	w.writing = true
	w.grow(pdu.HeaderLen + pdu.DigestLen)
	n.Stamp(h)
	w.buf = append(w.buf, h[:]...)
	if w.headerDigest {
		w.buf = pdu.AppendDigest(w.buf, pdu.HeaderDigest(h, nil))
	}
	w.trailer = [len(w.trailer)]byte{}
	end := w.trailer[:pdu.Padding(length)]
	if w.dataDigest {
		end = pdu.AppendDigest(end, crc)
	}
	queued := w.buf
	w.buf, w.tail = nil, nil
	w.vector = append(append(append(w.vector[:0], queued), data...), end)
	whole := w.vector
	w.extend()
	w.mu.Unlock()
	_, err := w.vector.WriteTo(w.nc)
	w.mu.Lock()
	clear(whole)
	w.vector = whole[:0]
	putBuffer(queued)
	w.fail(err)
	w.drain()
	return w.err
}

// abort makes everybody who waits give up.
func (w *writer) abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closing = true
	if w.err == nil {
		w.err = iscsi.ErrClosed
	}
	w.cond.Broadcast()
}

// finish takes no more, and returns when all that is queued is written or has failed, by the deadline.
func (w *writer) finish(deadline time.Time) {
	w.mu.Lock()
	w.closing = true
	w.nc.SetWriteDeadline(deadline)
	w.cond.Broadcast()
	for w.writing {
		w.cond.Wait()
	}
	w.mu.Unlock()
	w.flush()
}

// putData queues from as Data-In of a transfer, in sequences of at most MaxBurstLength whose last PDU has F. last says that no more
// is expected, so that the status may go along: the last PDU then stays queued until it comes, or, if it is not copied and the data is
// held, with the transfer.
func (w *writer) putData(n iscsi.Numbers, tr *transfer, from [][]byte, off, length int64, last, held bool) error {
	var in cursor
	in.set(from)
	for length > 0 {
		w.mu.Lock()
		for len(w.buf) > highWater && w.usable() == nil {
			if !w.writing {
				w.writing = true
				w.drain()
				continue
			}
			w.cond.Wait()
		}
		if err := w.usable(); err != nil {
			w.mu.Unlock()
			return err
		}
		size := min(length, int64(w.segment), int64(w.burst-tr.sequence))
		tr.sequence += int(size)
		final := length == size || tr.sequence == w.burst
		if final {
			tr.sequence = 0
		}
		d := pdu.DataIn{Final: final, ITT: tr.itt, TTT: pdu.ReservedTag, DataSN: tr.nextDataSN(), Offset: uint32(off)}
		d.Encode(&tr.header)
		data := in.take(&tr.pieces, int(size))
		if size > copyLimit && held && length == size {
			w.mu.Unlock()
			tr.held = int(size)
		} else if size > copyLimit {
			w.mu.Unlock()
			if err := w.gather(n, &tr.header, data, int(size)); err != nil {
				return err
			}
		} else {
			at := len(w.buf)
			w.put(n, &tr.header, data...)
			if last && length == size {
				w.tail, w.tailAt = tr, at
				tr.tailed = true
			}
			w.mu.Unlock()
		}
		off += size
		length -= size
	}
	if last {
		return nil // the status follows at once and flushes
	}
	return w.flush()
}

// sendStatus queues a SCSI Response and writes it. If the last Data-In of the task is still queued, the
// status goes into that PDU instead (RFC 7143, 11.7.3).
func (c *Conn) sendStatus(p *iscsi.PDU) error {
	w := &c.w
	tr := p.Task.Transfer.(*transfer)
	fits := p.Header[2] == 0 && p.Header[3] == 0 && len(p.Data) == 0 && !tr.bidi // into a Data-In
	if size := tr.held; size > 0 {
		tr.held = 0
		if fits {
			addStatus(&tr.header, p)
		}
		if err := w.gather(c.numbers, &tr.header, tr.pieces, size); err != nil || fits {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.usable(); err != nil {
		return err
	}
	tr.tailed = false
	if w.tail == tr && fits {
		h := (*pdu.Header)(w.buf[w.tailAt:])
		addStatus(h, p)
		c.numbers.Stamp(h)
		if w.headerDigest {
			binary.LittleEndian.PutUint32(w.buf[w.tailAt+pdu.HeaderLen:], pdu.HeaderDigest(h, nil))
		}
		w.tail = nil
	} else {
		h := &tr.header
		*h = p.Header
		binary.BigEndian.PutUint32(h[36:], tr.dataSN)
		w.put(c.numbers, h, p.Data)
	}
	w.flushLocked(c.live.Load() > 1)
	return w.err
}

// flushLocked is flush for a caller that holds mu. If others are likely to queue something in a moment, it lets them, so that one
// write takes it all; who comes meanwhile leaves its own to that write.
func (w *writer) flushLocked(others bool) {
	if w.writing || w.gathering {
		return
	}
	if others && len(w.buf) < gatherLimit {
		w.gathering = true
		w.mu.Unlock()
		runtime.Gosched()
		w.mu.Lock()
		w.gathering = false
		if w.writing {
			return
		}
	}
	w.writing = true
	w.drain()
}

// addStatus puts the status of a SCSI Response into the header of the last Data-In.
func addStatus(h *pdu.Header, p *iscsi.PDU) {
	h[1] |= 0x01 | p.Header[1]&0x06
	h[3] = p.Header[3]
	copy(h[44:48], p.Header[44:48])
}

// cursor walks through a vector of slices.
type cursor struct {
	v  [][]byte
	at int // in v[0]
}

func (c *cursor) set(v [][]byte) { c.v, c.at = v, 0 }

// skip goes n bytes forward.
func (c *cursor) skip(n int) {
	for n > 0 {
		left := len(c.v[0]) - c.at
		if n < left {
			c.at += n
			return
		}
		n -= left
		c.v, c.at = c.v[1:], 0
	}
}

// take returns the next n bytes as slices, in the memory of store, and goes past them.
func (c *cursor) take(store *[][]byte, n int) [][]byte {
	out := (*store)[:0]
	for n > 0 {
		p := c.v[0][c.at:]
		if len(p) > n {
			p = p[:n]
		}
		if len(p) > 0 {
			out = append(out, p)
		}
		c.skip(len(p))
		if len(p) == 0 {
			c.v, c.at = c.v[1:], 0
		}
		n -= len(p)
	}
	*store = out
	return out
}
