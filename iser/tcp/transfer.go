package tcp

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// transfer is the data of one SCSI command: what has come, what may come, and where it is to land. It is
// made when the command is received and lives until Release.
//
// Data-out has two regions: [0,unsolicited) comes without an R2T, the rest is asked for by R2T. Of the
// first, [0,have) is here: in staged, or already in the buffers of the logical unit.
type transfer struct {
	itt  pdu.TaskTag
	lun  pdu.LUN
	bidi bool
	// shared is set if data-out comes, or may come, in a Data-Out. Without, only the goroutine of the task is in the transfer,
	// and needs no lock. It is set before Receive returns the command, or by the task.
	shared bool

	// The fields below are guarded by Conn.mu if the transfer is shared.
	unsolicited int // bytes that come without an R2T
	have        int
	landed      int    // bytes of the Data-Out that is being read
	arriving    bool   // unsolicited Data-Out has not had its F bit
	nextSN      uint32 // DataSN of the next unsolicited Data-Out
	staged      []byte // a pooled buffer; offset 0 is data-out offset 0
	dest        [][]byte
	destAt      int      // data-out offset of dest; dest is nil unless GetData waits for unsolicited data
	asked       []*burst // not answered completely
	err         error
	detached    bool // no buffer of the logical unit may be touched

	wake chan struct{} // capacity 1: something above changed

	// The fields below belong to the goroutine of the task.
	taken    int64 // the end of what GetData has delivered
	r2tSN    uint32
	dataSN   uint32
	sequence int  // bytes in the current Data-In sequence
	tailed   bool // the last Data-In is queued and waits for the status
	held     int  // bytes of the last Data-In, whose header and pieces wait for the status to be sent with it; 0: none
	header   pdu.Header
	pieces   [][]byte
	store    [][]byte // of dest
	vector   [][]byte // belongs to the reader while it lands data
	free     []*burst // for reuse
}

// burst is one R2T.
type burst struct {
	tr     *transfer
	ttt    pdu.TaskTag
	offset int // of the next byte expected
	end    int
	nextSN uint32
	dest   cursor
	dead   bool // its data is thrown away
}

var transfers = sync.Pool{New: func() any { return &transfer{wake: make(chan struct{}, 1)} }}

func (tr *transfer) notify() {
	select {
	case tr.wake <- struct{}{}:
	default:
	}
}

// nextDataSN numbers a Data-In. In a bidirectional command R2Ts share the sequence.
func (tr *transfer) nextDataSN() pdu.Serial {
	sn := tr.dataSN
	tr.dataSN++
	return pdu.Serial(sn)
}

func (tr *transfer) nextR2TSN() pdu.Serial {
	if tr.bidi {
		return tr.nextDataSN()
	}
	sn := tr.r2tSN
	tr.r2tSN++
	return pdu.Serial(sn)
}

// fail records what went wrong with the data first. mu is held.
func (tr *transfer) fail(err error) {
	if tr.err == nil {
		tr.err = err
	}
	tr.notify()
}

// PutData implements iscsi.Datamover.
func (c *Conn) PutData(ctx context.Context, t *iscsi.Task, from [][]byte, off int64) error {
	if ctx.Err() != nil {
		return iscsi.ErrAborted
	}
	length := int64(0)
	for _, p := range from {
		length += int64(len(p))
	}
	tr := t.Transfer.(*transfer)
	last := off+length == t.InLength()
	return c.w.putData(c.numbers, tr, from, off, length, last, last && t.Held && !tr.bidi)
}

// GetData implements iscsi.Datamover.
func (c *Conn) GetData(ctx context.Context, t *iscsi.Task, into [][]byte, off int64) error {
	tr := t.Transfer.(*transfer)
	end := off
	for _, p := range into {
		end += int64(len(p))
	}
	if off < tr.taken || end > t.OutLength() {
		return iscsi.ErrRange
	}
	var in cursor
	in.set(into)
	if err := c.getUnsolicited(ctx, tr, &in, int(off), int(end)); err != nil {
		return err
	}
	from := max(int(off), tr.unsolicited)
	if from < int(end) {
		if err := c.getSolicited(ctx, tr, &in, from, int(end)); err != nil {
			return err
		}
	}
	tr.taken = end
	return nil
}

// getUnsolicited fills in from what comes without an R2T of [off,end), and leaves it behind that. It copies what is
// staged, and has the rest land in place.
func (c *Conn) getUnsolicited(ctx context.Context, tr *transfer, in *cursor, off, end int) error {
	if !tr.shared {
		end = min(end, tr.unsolicited)
		if tr.err != nil || off >= end {
			return tr.err
		}
		copyIn(in, tr.staged[off:end]) // it came with the command
		return nil
	}
	c.mu.Lock()
	if err := c.stateOf(tr); err != nil {
		c.mu.Unlock()
		return err
	}
	end = min(end, tr.unsolicited)
	if off >= end {
		c.mu.Unlock()
		return nil
	}
	// What is being read now goes to staged. And if there is a gap, what lies before it is not asked for, but comes first.
	for (off > tr.have || c.landing == tr) && tr.err == nil {
		c.mu.Unlock()
		if err := c.wait(ctx, tr); err != nil {
			return err
		}
		c.mu.Lock()
	}
	here := min(end, tr.have)
	if here > off {
		copyIn(in, tr.staged[off:here])
	}
	if here == end || tr.err != nil {
		err := c.stateOf(tr)
		c.mu.Unlock()
		return err
	}
	// here == tr.have: the next byte to arrive is the next byte of in.
	rest := *in
	tr.dest, tr.destAt = rest.take(&tr.store, end-here), here
	for tr.have < end && tr.err == nil && (tr.arriving || c.landing == tr) {
		c.mu.Unlock()
		err := c.wait(ctx, tr)
		c.mu.Lock()
		if err != nil {
			c.detachLocked(tr)
			c.mu.Unlock()
			return err
		}
	}
	if tr.have < end || tr.err != nil {
		tr.fail(iscsi.ErrDataAmount)
		c.detachLocked(tr)
		err := c.stateOf(tr)
		c.mu.Unlock()
		return err
	}
	tr.dest = nil
	c.mu.Unlock()
	in.skip(end - here)
	return nil
}

// copyIn copies p to where in stands, and goes past it.
func copyIn(in *cursor, p []byte) {
	for len(p) > 0 {
		n := copy(in.v[0][in.at:], p)
		p = p[n:]
		in.skip(n)
		if n == 0 {
			in.v, in.at = in.v[1:], 0
		}
	}
}

// getSolicited asks for [off,end) by R2Ts, as many at a time as are allowed, and waits for the answers.
func (c *Conn) getSolicited(ctx context.Context, tr *transfer, in *cursor, off, end int) error {
	window := int(c.params.MaxOutstandingR2T)
	tr.shared = true
	c.mu.Lock()
	for {
		if err := c.stateOf(tr); err != nil {
			c.detachLocked(tr)
			c.mu.Unlock()
			return err
		}
		if off == end && len(tr.asked) == 0 {
			c.mu.Unlock()
			return nil
		}
		sent := false
		for off < end && len(tr.asked) < window {
			size := min(end-off, int(c.params.MaxBurstLength))
			b := c.newBurst(tr)
			b.offset, b.end, b.dest = off, off+size, *in
			r := pdu.R2T{LUN: tr.lun, ITT: tr.itt, TTT: b.ttt, R2TSN: tr.nextR2TSN(), Offset: uint32(off), Length: uint32(size)}
			r.Encode(&tr.header)
			if err := c.w.queue(c.numbers, &tr.header); err != nil {
				tr.fail(err)
				break
			}
			in.skip(size)
			off += size
			sent = true
		}
		c.mu.Unlock()
		if sent {
			c.w.flushTogether(c.live.Load() > 1)
		}
		err := c.wait(ctx, tr)
		c.mu.Lock()
		if err != nil {
			c.detachLocked(tr)
			c.mu.Unlock()
			return err
		}
	}
}

// newBurst returns a burst of tr with a fresh tag. mu is held.
func (c *Conn) newBurst(tr *transfer) *burst {
	var b *burst
	if n := len(tr.free); n > 0 {
		b, tr.free = tr.free[n-1], tr.free[:n-1]
		*b = burst{}
	} else {
		b = new(burst)
	}
	b.tr = tr
	c.bursts.add(b)
	tr.asked = append(tr.asked, b)
	return b
}

// endBurst takes an answered burst out. mu is held.
func (c *Conn) endBurst(b *burst) {
	tr := b.tr
	c.bursts.remove(b)
	last := len(tr.asked) - 1
	tr.asked[slices.Index(tr.asked, b)] = tr.asked[last]
	tr.asked = tr.asked[:last]
	tr.notify()
	*b = burst{}
	tr.free = append(tr.free, b)
}

// stateOf says why a transfer cannot go on. mu is held.
func (c *Conn) stateOf(tr *transfer) error {
	if tr.err != nil {
		return tr.err
	}
	if c.closed {
		return iscsi.ErrClosed
	}
	return nil
}

// wait waits until something of the transfer changes.
func (c *Conn) wait(ctx context.Context, tr *transfer) error {
	select {
	case <-tr.wake:
		return nil
	case <-ctx.Done():
		return iscsi.ErrAborted
	case <-c.done:
		return iscsi.ErrClosed
	}
}

// detachLocked takes the buffers of the logical unit away from the reader. When it returns, no byte lands in
// them any more; data that still comes is thrown away. mu is held, and let go while the reader leaves.
func (c *Conn) detachLocked(tr *transfer) {
	tr.detached = true
	tr.dest = nil
	for _, b := range tr.asked {
		b.dead = true
		b.dest = cursor{}
	}
	for c.landing == tr {
		if !c.closed {
			c.nc.SetReadDeadline(time.Unix(past, 0)) // wakes the reader; it puts the deadline back
		}
		c.mu.Unlock()
		<-tr.wake
		c.mu.Lock()
	}
}

// Finish implements iscsi.Datamover.
func (c *Conn) Finish(ctx context.Context, t *iscsi.Task) error {
	tr := t.Transfer.(*transfer)
	if !tr.shared {
		putBuffer(tr.staged)
		tr.staged = nil
		return tr.err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for (tr.arriving || len(tr.asked) > 0) && !c.closed {
		c.mu.Unlock()
		err := c.wait(ctx, tr)
		c.mu.Lock()
		if err != nil {
			return err
		}
	}
	c.detachLocked(tr)
	putBuffer(tr.staged)
	tr.staged = nil
	return tr.err
}

// Release implements iscsi.Datamover.
func (c *Conn) Release(t *iscsi.Task) { c.release(t.Transfer.(*transfer)) }

// Discard implements iscsi.Datamover.
func (c *Conn) Discard(transfer_ any) {
	if tr, ok := transfer_.(*transfer); ok {
		c.release(tr)
	}
}

func (c *Conn) release(tr *transfer) {
	c.live.Add(-1)
	if tr.tailed {
		c.w.forget(tr)
	}
	if tr.shared {
		c.retire(tr)
	}
	putBuffer(tr.staged)
	clear(tr.pieces[:cap(tr.pieces)])
	clear(tr.vector[:cap(tr.vector)])
	clear(tr.store[:cap(tr.store)])
	clear(tr.free[min(len(tr.free), maxFree):])
	*tr = transfer{
		wake: tr.wake, pieces: tr.pieces[:0], vector: tr.vector[:0], store: tr.store[:0], asked: tr.asked[:0], free: tr.free[:min(len(tr.free), maxFree)],
	}
	transfers.Put(tr)
}

// maxFree is how many bursts a transfer keeps for its next command.
const maxFree = 16

// retire has the reader forget a transfer.
func (c *Conn) retire(tr *transfer) {
	c.mu.Lock()
	if len(tr.asked) > 0 || tr.arriving || c.landing == tr {
		c.detachLocked(tr)
	}
	for len(tr.asked) > 0 {
		c.endBurst(tr.asked[0])
	}
	if c.transfers[tr.itt] == tr {
		delete(c.transfers, tr.itt)
	}
	c.mu.Unlock()
	select {
	case <-tr.wake:
	default:
	}
}
