package initiator

import (
	"errors"
	"net"
	"sync"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Sizes of the send queue.
const (
	arenaSize = 64 << 10
	// copyLimit is the longest payload that is copied behind its header instead of sent by reference: below it a
	// copy is cheaper than one more element of the vector and one more reference to wait for.
	copyLimit = 8 << 10
	// inlineBatches is how many batches a caller sends for others before the sender goroutine takes over.
	inlineBatches = 4
)

// batch is a run of encoded PDUs: headers and short payloads in the arena, long payloads by reference.
type batch struct {
	vec   net.Buffers
	work  net.Buffers // what WriteTo consumes
	arena []byte
	start int // of the part of the arena that is not in vec yet
	refs  []*task
}

func (b *batch) empty() bool { return len(b.vec) == 0 && b.start == len(b.arena) }

// copy appends p to the arena.
func (b *batch) copy(p []byte) {
	if len(b.arena)+len(p) > cap(b.arena) {
		b.cut()
		b.arena = make([]byte, 0, max(arenaSize, len(p)))
		b.start = 0
	}
	b.arena = append(b.arena, p...)
}

// cut moves what the arena holds to the vector.
func (b *batch) cut() {
	if b.start < len(b.arena) {
		b.vec = append(b.vec, b.arena[b.start:])
		b.start = len(b.arena)
	}
}

// refer appends p of task t by reference.
func (b *batch) refer(p []byte, t *task) {
	b.cut()
	b.vec = append(b.vec, p)
	t.refs.Add(1)
	b.refs = append(b.refs, t)
}

// write sends the batch.
func (b *batch) write(c net.Conn) error {
	b.cut()
	if len(b.vec) == 1 {
		_, err := c.Write(b.vec[0])
		return err
	}
	b.work = b.vec
	_, err := b.work.WriteTo(c)
	return err
}

// release gives up the references and empties the batch.
func (b *batch) release() {
	for i, t := range b.refs {
		t.unref()
		b.refs[i] = nil
	}
	clear(b.vec[:cap(b.vec)])
	b.vec, b.refs, b.arena, b.start = b.vec[:0], b.refs[:0], b.arena[:0], 0
}

// sendQueue collects PDUs and sends them in order. Whoever flushes while nobody sends becomes the sender, and sends
// what others add meanwhile: under load many PDUs leave with one system call, and an idle session
// has no goroutine switch.
type sendQueue struct {
	c                        *Conn
	headerDigest, dataDigest bool
	failed                   func(error) // called without mu

	mu      sync.Mutex // guards all below
	pending *batch
	spare   *batch
	sending bool
	err     error
	h       pdu.Header // scratch of those who queue

	kick chan struct{} // capacity 1: wakes the sender goroutine
}

// addLocked queues one PDU. Payload longer than copyLimit is referred to and belongs to t.
func (q *sendQueue) addLocked(h *pdu.Header, ahs, data []byte, t *task) {
	if q.err != nil {
		return // the session is failing, and its tasks with it
	}
	h.SetAHSLength(len(ahs))
	h.SetDataLength(len(data))
	b := q.pending
	b.copy(h[:])
	if len(ahs) > 0 {
		b.copy(ahs)
	}
	var dig [pdu.DigestLen]byte
	if q.headerDigest {
		b.copy(pdu.AppendDigest(dig[:0], pdu.HeaderDigest(h, ahs)))
	}
	if len(data) == 0 {
		return
	}
	if t == nil || len(data) <= copyLimit {
		b.copy(data)
	} else {
		b.refer(data, t)
	}
	if n := pdu.Padding(len(data)); n > 0 {
		b.copy(padding[:n])
	}
	if q.dataDigest {
		b.copy(pdu.AppendDigest(dig[:0], pdu.PadDigest(pdu.Digest(0, data), len(data))))
	}
}

// flush sends what is queued, or leaves it to whoever is sending.
func (q *sendQueue) flush(inline bool) {
	q.mu.Lock()
	if q.sending || q.pending.empty() {
		q.mu.Unlock()
		return
	}
	if !inline {
		q.mu.Unlock()
		q.wake()
		return
	}
	q.sending = true
	q.sendLocked(inlineBatches)
	again := !q.pending.empty()
	q.mu.Unlock()
	if again {
		q.wake()
	}
}

func (q *sendQueue) wake() {
	select {
	case q.kick <- struct{}{}:
	default:
	}
}

// sendLocked sends up to limit batches, releasing mu while it writes, and ends sending.
func (q *sendQueue) sendLocked(limit int) {
	failed := false
	for i := 0; i < limit && !q.pending.empty(); i++ {
		b := q.pending
		q.pending, q.spare = q.spare, nil
		err := q.err
		q.mu.Unlock()
		if err == nil {
			err = b.write(q.c.net)
		}
		b.release()
		q.mu.Lock()
		q.spare = b
		if err != nil && q.err == nil {
			q.err = err
			failed = true
		}
	}
	q.sending = false
	if failed && !errors.Is(q.err, net.ErrClosed) { // who closed it knows why
		err := q.err
		q.mu.Unlock()
		q.failed(err)
		q.mu.Lock()
	}
}

// serve is the sender goroutine. It ends when stop is closed.
func (q *sendQueue) serve(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-q.kick:
		}
		q.mu.Lock()
		for !q.sending && !q.pending.empty() {
			q.sending = true
			q.sendLocked(inlineBatches)
		}
		q.mu.Unlock()
	}
}

// abandon gives up what is queued and refuses what comes.
func (q *sendQueue) abandon(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
	}
	if !q.sending {
		q.pending.release()
	} // else the sender meets q.err and releases
}
