package iser

import (
	"context"
	"math"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// transfer is the data of one SCSI command. It is made when the command is received and lives until Release.
//
// Data-out has two regions: [0,unsolicited) comes in Sends, and stays in the receives that took it until it is wanted; the rest is
// fetched by RDMA Read. Of the first, [0,have) is here.
type transfer struct {
	op    // work requests that use memory of the task
	itt   pdu.TaskTag
	read  bool
	write bool
	wire  controlHeader // where the initiator's buffers are

	unsolicited int // bytes

	// The fields below are guarded by Conn.mu.
	have     int
	arriving bool    // unsolicited Data-Out has not had its F bit
	nextSN   uint32  // DataSN of the next
	pieces   []piece // receives that hold data, in order
	most     int     // how many they may be
	err      error
	next     *transfer // in Conn.idle

	// The fields below belong to the goroutine of the task.
	taken    int64 // the end of what GetData has delivered
	sges     []rdma.SGE
	kept     int             // elements of deferred, in sges
	deferred []deferredWrite // to be posted with the response
	direct   bool            // one of them uses memory of the task until it is complete
}

// piece is received data that was not taken.
type piece struct {
	buffer int
	at     int // where in the data-out
	data   []byte
}

// deferredWrite is an RDMA Write that waits for the response, to be posted with it.
type deferredWrite struct {
	wr   rdma.SendWR
	data *small // its bytes, if they were copied
}

// newTransferLocked returns an empty transfer, which holds a reference to the connection.
func (c *Conn) newTransferLocked() *transfer {
	tr := c.idle
	if tr != nil {
		c.idle, tr.next = tr.next, nil
	} else {
		tr = new(transfer)
		tr.op.init()
	}
	c.refs++
	c.live++
	return tr
}

// fail records what went wrong with the data first. mu is held.
func (tr *transfer) fail(err error) {
	if tr.err == nil {
		tr.err = err
	}
	tr.notify()
}

// errorLocked says why a transfer cannot go on. mu is held.
func (c *Conn) errorLocked(tr *transfer) error {
	if tr.err != nil {
		return tr.err
	}
	return c.usableLocked()
}

// wait waits until something of the transfer changes.
func (c *Conn) wait(ctx context.Context, tr *transfer) error {
	select {
	case <-tr.wake:
		return nil
	case <-ctx.Done():
		return iscsi.ErrAborted
	case <-c.qp.Done():
		return iscsi.ErrClosed
	}
}

// GetData implements iscsi.Datamover. A posted RDMA Read cannot be called back: when the task is aborted meanwhile, GetData waits for it all
// the same.
func (c *Conn) GetData(ctx context.Context, t *iscsi.Task, into [][]byte, off int64) error {
	tr := t.Transfer.(*transfer)
	in := cursor{v: into}
	end := off + in.left()
	if off < tr.taken || end > t.OutLength() {
		return iscsi.ErrRange
	}
	if ctx.Err() != nil {
		return iscsi.ErrAborted
	}
	if off < int64(tr.unsolicited) {
		if err := c.takeUnsolicited(ctx, tr, &in, int(off), int(min(end, int64(tr.unsolicited)))); err != nil {
			return err
		}
	}
	if from := max(off, int64(tr.unsolicited)); from < end {
		if err := c.fetch(ctx, tr, &in, from, end); err != nil {
			return err
		}
	}
	tr.taken = end
	return nil
}

// takeUnsolicited copies [off,end) of the data-out to in, as soon as it is there, and lets go of the receives.
func (c *Conn) takeUnsolicited(ctx context.Context, tr *transfer, in *cursor, off, end int) error {
	c.mu.Lock()
	for tr.have < end && tr.err == nil && tr.arriving {
		c.mu.Unlock()
		if err := c.wait(ctx, tr); err != nil {
			return err
		}
		c.mu.Lock()
	}
	if err := c.errorLocked(tr); err != nil || tr.have < end {
		if err == nil {
			err = iscsi.ErrDataAmount
			tr.fail(err)
		}
		c.mu.Unlock()
		return err
	}
	pieces := tr.pieces // what is in them changes no more
	c.mu.Unlock()
	n := 0
	for _, p := range pieces {
		to := p.at + len(p.data)
		if p.at < end && to > off {
			in.copyIn(p.data[max(off-p.at, 0):min(end-p.at, len(p.data))])
		}
		if to <= end {
			n++
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropLocked(tr, n)
	return nil
}

// dropLocked lets go of the first n receives that hold data of a transfer.
func (c *Conn) dropLocked(tr *transfer, n int) {
	for i := range tr.pieces[:n] {
		c.freed = append(c.freed, tr.pieces[i].buffer)
	}
	left := copy(tr.pieces, tr.pieces[n:])
	clear(tr.pieces[left:])
	tr.pieces = tr.pieces[:left]
}

// fetch fills in with [off,end) of the data-out by RDMA Reads.
func (c *Conn) fetch(ctx context.Context, tr *transfer, in *cursor, off, end int64) error {
	if !tr.wire.writeValid {
		return iscsi.ErrDataAmount // what the initiator did not send, it did not offer either (ISER-R3)
	}
	from := uint64(off)
	if c.relBase {
		from -= uint64(tr.unsolicited)
	}
	if tr.wire.writeBase > math.MaxUint64-from-uint64(end-off) {
		return iscsi.ErrRange
	}
	remote := tr.wire.writeBase + from
	for left := end - off; left > 0; {
		if b := in.peek(); !c.registered(b) {
			n, err := c.fetchOutside(ctx, tr, b, remote)
			if err != nil {
				return err
			}
			in.skip(n)
			remote, left = remote+uint64(n), left-int64(n)
			continue
		}
		n, err := c.postReads(ctx, tr, in, remote, left)
		if err != nil {
			return err
		}
		remote, left = remote+uint64(n), left-n
	}
	return c.fetched(ctx, tr)
}

// fetched waits for the RDMA Reads of a transfer.
func (c *Conn) fetched(ctx context.Context, tr *transfer) error {
	c.await(&tr.op)
	tr.sges = tr.sges[:tr.kept]
	switch {
	case tr.failed:
		return iscsi.ErrClosed
	case ctx.Err() != nil:
		return iscsi.ErrAborted
	}
	return nil
}

func (c *Conn) registered(b []byte) bool {
	_, ok := c.t.key(b)
	return ok
}

// postReads posts RDMA Reads for as much of the next n bytes of in as lies in regions and may be outstanding, at least one.
func (c *Conn) postReads(ctx context.Context, tr *transfer, in *cursor, remote uint64, left int64) (int64, error) {
	if err := c.takeRead(ctx, tr); err != nil {
		return 0, err
	}
	total := int64(0)
	c.mu.Lock()
	for {
		first := len(tr.sges)
		n := c.gather(tr, in, left)
		wr := rdma.SendWR{Op: rdma.OpRead, RKey: tr.wire.writeTag, RemoteAddr: remote, SGE: tr.sges[first:]}
		c.q.addLocked(item{wr: wr, owner: &tr.op})
		remote, left, total = remote+uint64(n), left-n, total+n
		if left == 0 || !c.registered(in.peek()) || !c.r.tryLocked() {
			break
		}
	}
	c.r.watchLocked(c)
	c.flushTogetherLocked()
	c.mu.Unlock()
	return total, nil
}

// gather appends elements for the next bytes of in to tr.sges: as many as one work request takes, at most n bytes, up to where memory is
// not in a region.
func (c *Conn) gather(tr *transfer, in *cursor, n int64) int64 {
	total := int64(0)
	for count := 0; count < maxSGE && total < n; count++ {
		b := in.peek()
		key, ok := c.t.key(b)
		if !ok {
			break
		}
		b = b[:min(int64(len(b)), n-total)]
		tr.sges = append(tr.sges, rdma.SGE{Buf: b, LKey: key})
		in.skip(len(b))
		total += int64(len(b))
	}
	return total
}

// fetchOutside fills part of b, which is not in a region, by way of a buffer that is.
func (c *Conn) fetchOutside(ctx context.Context, tr *transfer, b []byte, remote uint64) (int, error) {
	i, err := c.takeBounce(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { c.free <- i }()
	b = b[:min(len(b), bounceSize)]
	if err := c.takeRead(ctx, tr); err != nil {
		return 0, err
	}
	c.mu.Lock()
	first := len(tr.sges)
	tr.sges = append(tr.sges, c.memory.bounce.SGE(i, len(b)))
	c.q.addLocked(item{wr: rdma.SendWR{Op: rdma.OpRead, RKey: tr.wire.writeTag, RemoteAddr: remote, SGE: tr.sges[first:]}, owner: &tr.op})
	c.r.watchLocked(c)
	c.mu.Unlock()
	c.flush()
	if err := c.fetched(ctx, tr); err != nil {
		return 0, err
	}
	return copy(b, c.memory.bounce.Buf(i)), nil
}

// takeBounce waits for a bounce buffer. Whoever has one gives it back without waiting for another.
func (c *Conn) takeBounce(ctx context.Context) (int, error) {
	select {
	case i := <-c.free:
		return i, nil
	default:
	}
	select {
	case i := <-c.free:
		return i, nil
	case <-ctx.Done():
		return 0, iscsi.ErrAborted
	case <-c.qp.Done():
		return 0, iscsi.ErrClosed
	}
}

// PutData implements iscsi.Datamover. What is small is copied, and goes with the response; so does what the task holds until Release. For
// the rest PutData waits until it is sent.
func (c *Conn) PutData(ctx context.Context, t *iscsi.Task, from [][]byte, off int64) error {
	tr := t.Transfer.(*transfer)
	in := cursor{v: from}
	n := in.left()
	switch {
	case ctx.Err() != nil:
		return iscsi.ErrAborted
	case off < 0 || off+n > t.InLength(): // ISER-R5
		return iscsi.ErrRange
	case n == 0:
		return nil
	case !tr.wire.readValid: // ISER-R3
		return iscsi.ErrRange
	case tr.wire.readBase > math.MaxUint64-uint64(off)-uint64(n):
		return iscsi.ErrRange
	}
	remote := tr.wire.readBase + uint64(off)
	if n <= int64(c.inline) {
		c.deferSmall(tr, from, remote, t.Held)
		return nil
	}
	if t.Held && c.deferHeld(tr, &in, n, remote) {
		return nil
	}
	for left := n; left > 0; {
		var done int64
		var err error
		if c.registered(in.peek()) {
			done = c.writeFrom(tr, &in, left, remote)
		} else {
			done, err = c.writeOutside(ctx, tr, &in, left, remote)
		}
		if err != nil {
			return err
		}
		remote, left = remote+uint64(done), left-done
		if tr.failed {
			return iscsi.ErrClosed
		}
	}
	return nil
}

// deferSmall leaves an RDMA Write for the response whose bytes will be taken when it is posted.
func (c *Conn) deferSmall(tr *transfer, from [][]byte, remote uint64, held bool) {
	d := deferredWrite{wr: rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.Inline, RKey: tr.wire.readTag, RemoteAddr: remote}}
	first := len(tr.sges)
	for _, b := range from {
		tr.sges = append(tr.sges, rdma.SGE{Buf: b})
	}
	d.wr.SGE = tr.sges[first:]
	if held && len(from) <= maxSGE {
		tr.kept = len(tr.sges)
	} else {
		d.copyOf(c.t)
		tr.sges = tr.sges[:first]
	}
	tr.deferred = append(tr.deferred, d)
}

// copyOf takes a copy of the bytes.
func (d *deferredWrite) copyOf(t *Target) {
	d.data = t.smalls.Get().(*small)
	d.wr.SGE = d.data.fill(d.wr.SGE)
}

// deferHeld leaves RDMA Writes for the response. It does nothing, and reports false, if not all bytes lie in regions.
func (c *Conn) deferHeld(tr *transfer, in *cursor, n int64, remote uint64) bool {
	for _, b := range in.v {
		if len(b) > 0 && !c.registered(b) {
			return false
		}
	}
	for n > 0 {
		first := len(tr.sges)
		k := c.gather(tr, in, n)
		wr := rdma.SendWR{Op: rdma.OpWrite, RKey: tr.wire.readTag, RemoteAddr: remote, SGE: tr.sges[first:]}
		tr.deferred = append(tr.deferred, deferredWrite{wr: wr})
		remote, n = remote+uint64(k), n-k
	}
	tr.direct = true
	tr.kept = len(tr.sges)
	return true
}

// writeDeferredLocked queues the RDMA Writes that waited for the response. It reports whether memory of the task is used until
// the response is complete.
func (c *Conn) writeDeferredLocked(tr *transfer, ours bool) bool {
	// If we are the one who posts, and all fits, the bytes of what goes inline are taken before the task goes on.
	ours = ours && len(c.q.items) == 0 && int(c.q.posted-c.q.completed)+len(tr.deferred) < sendDepth
	for i := range tr.deferred {
		d := &tr.deferred[i]
		if d.wr.Flags&rdma.Inline != 0 && d.data == nil && !ours {
			d.copyOf(c.t)
		}
		c.q.addLocked(item{wr: d.wr, data: d.data})
	}
	clear(tr.deferred)
	tr.deferred = tr.deferred[:0]
	return tr.direct
}

// writeFrom sends the next n bytes of in, as far as they lie in regions, and waits until they are sent.
func (c *Conn) writeFrom(tr *transfer, in *cursor, n int64, remote uint64) int64 {
	total := int64(0)
	c.mu.Lock()
	for total < n && c.registered(in.peek()) {
		first := len(tr.sges)
		k := c.gather(tr, in, n-total)
		x := item{wr: rdma.SendWR{Op: rdma.OpWrite, RKey: tr.wire.readTag, RemoteAddr: remote + uint64(total), SGE: tr.sges[first:]}}
		total += k
		if total == n || !c.registered(in.peek()) {
			x.owner = &tr.op // complete after those before
		}
		c.q.addLocked(x)
	}
	c.flushTogetherLocked()
	c.mu.Unlock()
	c.await(&tr.op)
	tr.sges = tr.sges[:tr.kept]
	return total
}

// writeOutside sends part of the next n bytes of in, which do not lie in a region, by way of buffers that do.
func (c *Conn) writeOutside(ctx context.Context, tr *transfer, in *cursor, n int64, remote uint64) (int64, error) {
	var held [maxSGE]int
	count := 0
	i, err := c.takeBounce(ctx)
	if err != nil {
		return 0, err
	}
	total := int64(0)
	for {
		held[count] = i
		count++
		b := c.memory.bounce.Buf(i)
		b = b[:min(int64(len(b)), n-total)]
		in.copyOut(b)
		tr.sges = append(tr.sges, c.memory.bounce.SGE(i, len(b)))
		total += int64(len(b))
		if total == n || count == maxSGE {
			break
		}
		more := false
		select {
		case i = <-c.free: // if there is one: nobody waits for a second
			more = true
		default:
		}
		if !more {
			break
		}
	}
	c.mu.Lock()
	c.q.addLocked(item{wr: rdma.SendWR{Op: rdma.OpWrite, RKey: tr.wire.readTag, RemoteAddr: remote, SGE: tr.sges[tr.kept:]}, owner: &tr.op})
	c.mu.Unlock()
	c.flush()
	c.await(&tr.op)
	tr.sges = tr.sges[:tr.kept]
	for _, i := range held[:count] {
		c.free <- i
	}
	return total, nil
}

// Finish implements iscsi.Datamover.
func (c *Conn) Finish(ctx context.Context, t *iscsi.Task) error {
	tr := t.Transfer.(*transfer)
	c.mu.Lock()
	defer c.mu.Unlock()
	for tr.arriving && c.usableLocked() == nil {
		c.mu.Unlock()
		err := c.wait(ctx, tr)
		c.mu.Lock()
		if err != nil {
			return err
		}
	}
	c.dropLocked(tr, len(tr.pieces))
	return tr.err
}

// Release implements iscsi.Datamover.
func (c *Conn) Release(t *iscsi.Task) { c.release(t.Transfer.(*transfer)) }

// Discard implements iscsi.Datamover.
func (c *Conn) Discard(x any) {
	if tr, ok := x.(*transfer); ok {
		c.release(tr)
	}
}

func (c *Conn) release(tr *transfer) {
	c.await(&tr.op)
	for i := range tr.deferred {
		if d := tr.deferred[i].data; d != nil {
			c.t.smalls.Put(d)
		}
	}
	clear(tr.deferred)
	clear(tr.sges[:cap(tr.sges)])
	select {
	case <-tr.wake:
	default:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.transfers[tr.itt] == tr {
		delete(c.transfers, tr.itt) // late data finds nothing, and is thrown away
	}
	c.dropLocked(tr, len(tr.pieces))
	*tr = transfer{op: op{wake: tr.wake}, pieces: tr.pieces, sges: tr.sges[:0], deferred: tr.deferred[:0], next: c.idle}
	c.idle = tr
	c.live--
	c.unrefLocked()
}

// cursor walks through a vector of slices.
type cursor struct {
	v  [][]byte
	at int // in v[0]
}

// left is how many bytes follow.
func (c *cursor) left() (n int64) {
	for _, b := range c.v {
		n += int64(len(b))
	}
	return n - int64(c.at)
}

// peek returns the rest of the slice at the cursor; nil at the end.
func (c *cursor) peek() []byte {
	for len(c.v) > 0 {
		if c.at < len(c.v[0]) {
			return c.v[0][c.at:]
		}
		c.v, c.at = c.v[1:], 0
	}
	return nil
}

// skip goes n bytes forward, within the slice that peek returned.
func (c *cursor) skip(n int) { c.at += n }

// copyIn copies p to where the cursor is, and goes behind it.
func (c *cursor) copyIn(p []byte) {
	for len(p) > 0 {
		n := copy(c.peek(), p)
		c.skip(n)
		p = p[n:]
	}
}

// copyOut fills p from where the cursor is, and goes behind that.
func (c *cursor) copyOut(p []byte) {
	for len(p) > 0 {
		n := copy(p, c.peek())
		c.skip(n)
		p = p[n:]
	}
}
