package cache

import (
	"sync/atomic"

	"github.com/isergate/isergate/cache/journal"
)

// op is one journal record on its way. Two hold it, and who lets go last recycles it: the command, until finish,
// settle or abandon, and the journal, from Submit until Synced or Failed.
type op struct {
	v       *Volume
	entry   journal.Entry
	mem     *payload   // nil: none
	charge  int64      // bytes of the dirty budget; 0: a note or a fence, nothing was reserved
	space   int64      // bytes of the journal
	ahead   int64      // bytes of Engine.ahead; 0: the write is answered after the sync
	early   bool       // readable since submit
	told    bool       // answered by submit: nobody waits on done
	note    *note      // of a Note record
	done    chan error // buffered
	wait    budgetWaiter
	holders atomic.Int32
	landing Landing
}

func (v *Volume) newOp() *op {
	o := v.e.ops.Get().(*op)
	o.v = v
	o.holders.Store(1)
	return o
}

// leave is called once by each holder; the op must not be touched afterwards.
func (o *op) leave() {
	if o.holders.Add(-1) > 0 {
		return
	}
	done, timer, e := o.done, o.wait.timer, o.v.e
	select {
	case <-done: // nobody waited
	default:
	}
	*o = op{done: done, wait: budgetWaiter{ch: done, timer: timer}}
	e.ops.Put(o)
}

// payload is the memory of one write: the initiator's bytes, which do not change any more. The
// journal holds it until Synced, and readers while they copy from it.
type payload struct {
	e       *Engine
	bufs    [][]byte // as allocated
	holders atomic.Int32
}

func (e *Engine) newPayload(bufs [][]byte) *payload {
	p := e.payloads.Get().(*payload)
	p.e, p.bufs = e, bufs
	p.holders.Store(1)
	return p
}

// hold keeps the memory for one more holder. The caller holds it, or knows that another does.
func (p *payload) hold() { p.holders.Add(1) }

// leave gives up one hold; the last one frees the memory.
func (p *payload) leave() {
	if p.holders.Add(-1) > 0 {
		return
	}
	e := p.e
	e.arena.Free(p.bufs)
	p.e, p.bufs = nil, nil
	e.payloads.Put(p)
}

// copyTo fills into with the bytes from off on.
func (p *payload) copyTo(into [][]byte, off int64) {
	i := 0
	for off >= int64(len(p.bufs[i])) {
		off -= int64(len(p.bufs[i]))
		i++
	}
	from := p.bufs[i][off:]
	for _, b := range into {
		for len(b) > 0 {
			if len(from) == 0 {
				i++
				from = p.bufs[i]
			}
			n := copy(b, from)
			b, from = b[n:], from[n:]
		}
	}
}

// unsynced has the payloads of a volume's writes that are readable and not yet in the journal, by LSN. LSNs come and
// go in order. The zero value is empty. Not safe for concurrent use.
type unsynced struct {
	ring  []*payload // of LSN l at l modulo the length, a power of two; nil: no payload, or not readable yet
	first LSN        // of the oldest
	n     int
}

func (u *unsynced) push(lsn LSN, p *payload) {
	if u.n == 0 {
		u.first = lsn
	}
	if u.n == len(u.ring) {
		ring := make([]*payload, max(16, 2*len(u.ring)))
		for l := u.first; l < u.first+LSN(u.n); l++ {
			ring[l%LSN(len(ring))] = u.ring[l%LSN(len(u.ring))]
		}
		u.ring = ring
	}
	u.ring[lsn%LSN(len(u.ring))] = p
	u.n++
}

// pop forgets the oldest, which is lsn.
func (u *unsynced) pop(lsn LSN) {
	if u.n == 0 || u.first != lsn {
		panic("cache: a record came out of order")
	}
	u.ring[lsn%LSN(len(u.ring))] = nil
	u.first++
	u.n--
}

// get returns the payload of a write, nil if it has none here.
func (u *unsynced) get(lsn LSN) *payload {
	if u.n == 0 || lsn < u.first || lsn-u.first >= LSN(u.n) {
		return nil
	}
	return u.ring[lsn%LSN(len(u.ring))]
}
