package iser

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// closeTimeout bounds what a graceful Close waits for what is queued to be sent.
const closeTimeout = 2 * time.Second

// Conn is one iSCSI connection over RDMA. It implements iscsi.Datamover.
type Conn struct {
	t             *Target
	local, remote net.Addr
	qp            rdma.QP
	recvCQ        rdma.CQ // Receive waits on it
	sendCQ        rdma.CQ // whoever leads, see complete.go
	inline        int     // QPAttr.MaxInline
	invalidate    bool    // Send with Invalidate may be used
	numbers       iscsi.Numbers
	received      atomic.Uint64
	alive         ended           // ends with the connection
	life          context.Context // ends when the queue pair is closed
	kill          context.CancelFunc

	// The fields below belong to the goroutine that calls Receive.
	wcs     [32]rdma.WC
	wcNext  int
	wcCount int
	pdu     iscsi.PDU
	ahs     [pdu.MaxAHSLength]byte
	control []byte
	wire    controlHeader
	surplus bool // see surplusLocked
	passed  bool // Receive has no reference any more

	// attentive: requests are looked at for what they acknowledge, and for what comes first.
	attentive atomic.Bool

	// The fields below change under mu, in the goroutine that calls Receive, and are constant in full feature phase.
	full    bool
	params  iscsi.Parameters
	limit   int  // bytes of a received data segment
	relBase bool // the Write Base Offset is that of the first byte that comes by RDMA Read

	lead chan struct{} // holds a token while somebody waits on sendCQ
	done []rdma.WC     // belongs to who leads
	free chan int      // bounce buffers
	gone chan struct{} // closed when nothing is in flight any more, and will be

	mu sync.Mutex
	// The fields below are guarded by mu.
	closed    bool  // takes no more
	why       error // the reason, if the end is ours
	ending    bool  // teardown was started
	over      bool  // teardown has ended
	live      int   // transfers
	refs      int   // transfers, the goroutine in Receive, and one until teardown has ended
	bytes     int64
	login     *rdma.Slab
	memory    phaseMemory
	buffers   []buffer
	freed     []int         // receives that are to be posted again
	reposts   []rdma.RecvWR // for takeReceivesLocked
	transfers map[pdu.TaskTag]*transfer
	idle      *transfer // for reuse
	responses [loginBuffers - 1]response
	hello     bool // the next message may be a Hello
	q         sendQueue
	replies   replies
	r         readSlots
	u         unexpected

	loginBytes int64 // of the login share of the Target; guarded by mu
}

// buffer is one for a message.
type buffer struct {
	sge [1]rdma.SGE
}

// response is a buffer for a login response, or one in a discovery session.
type response struct {
	buffer int
	sge    [1]rdma.SGE
	op     op
}

// ended is a context that ends with a connection.
type ended struct{ qp rdma.QP }

// Deadline implements context.Context.
func (e *ended) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (e *ended) Done() <-chan struct{} { return e.qp.Done() }

// Err implements context.Context.
func (e *ended) Err() error { return e.qp.Err() }

// Value implements context.Context.
func (e *ended) Value(any) any { return nil }

func newConn(t *Target, e rdma.Endpoint) *Conn {
	c := &Conn{
		t: t, local: e.LocalAddr(), remote: e.RemoteAddr(),
		limit: recvSegment, control: make([]byte, recvSegment), refs: 1,
		lead: make(chan struct{}, 1), done: make([]rdma.WC, 32), gone: make(chan struct{}),
		transfers: make(map[pdu.TaskTag]*transfer),
	}
	c.life, c.kill = context.WithCancel(context.Background())
	for i := range c.responses {
		c.responses[i].op.init()
	}
	c.q.drained.init()
	return c
}

// addBuffer gives a buffer its number.
func (c *Conn) addBuffer(e rdma.SGE) int {
	c.buffers = append(c.buffers, buffer{sge: [1]rdma.SGE{e}})
	return len(c.buffers) - 1
}

// Traits implements iscsi.Datamover.
func (c *Conn) Traits() iscsi.Traits { return iscsi.Traits{Transport: "iser", RDMA: true} }

// LocalAddr implements iscsi.Datamover.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements iscsi.Datamover.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Received implements iscsi.Datamover.
func (c *Conn) Received() uint64 { return c.received.Load() }

// Start implements iscsi.Datamover.
func (c *Conn) Start(n iscsi.Numbers) { c.numbers = n }

// NoticeKeyValues implements iscsi.Datamover. No key that can change in full feature phase means something here.
func (c *Conn) NoticeKeyValues(*iscsi.Parameters) {}

// Enable implements iscsi.Datamover. All receives of full feature phase are posted before the response is (ISER-10, R8).
func (c *Conn) Enable(p *iscsi.Parameters, final *iscsi.PDU) error {
	n, err := c.t.count(p)
	if err != nil {
		return err
	}
	bytes := phaseBytes(p, n)
	if err := c.t.promise(bytes); err != nil {
		return err
	}
	m, err := c.t.phase(c.life, p, n)
	if err != nil {
		c.t.giveBack(bytes)
		return err
	}
	c.fullFeature(p)
	c.mu.Lock()
	c.hold(m)
	c.bytes += bytes
	if c.loginBytes > 0 {
		c.t.loggedIn(c.loginBytes)
		c.loginBytes = 0
	}
	for i := range n {
		c.freed = append(c.freed, c.addBuffer(m.recvs.SGE(i, recvSize)))
	}
	c.mu.Unlock()
	return c.SendControl(final)
}

// hold takes the memory of full feature phase, before there is a task.
func (c *Conn) hold(m phaseMemory) {
	c.memory = m
	if m.bounce == nil {
		return
	}
	c.free = make(chan int, bounceCount)
	for i := range bounceCount {
		c.free <- i
	}
}

// fullFeature takes the parameters.
func (c *Conn) fullFeature(p *iscsi.Parameters) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.full = true
	c.params = *p
	if p.RDMAExtensions {
		c.limit = int(p.TargetRecvDataSegmentLength)
		c.relBase = !c.t.opt.StrictWriteBase
		if p.TaggedBufferDeclared {
			c.relBase = p.TaggedBufferForSolicitedOnly
		}
	}
	c.hello = p.RDMAExtensions
	c.u.init(p)
	c.attentive.Store(p.RDMAExtensions)
}

// usableLocked is the error of a connection that takes no more. mu is held.
func (c *Conn) usableLocked() error {
	if c.closed || c.ending {
		return iscsi.ErrClosed
	}
	return nil
}

// Close implements iscsi.Datamover.
func (c *Conn) Close(graceful bool) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	if graceful {
		c.drain()
	}
	c.qp.Disconnect()
	c.t.closing()
	c.end()
	return nil
}

// Why a connection is ended on this side.
var (
	errBacklog   = errors.New("iser: the initiator does not take what it is sent")
	errStalled   = errors.New("iser: the initiator does not answer RDMA Reads")
	errNoReads   = errors.New("iser: the initiator serves no RDMA Reads, and a write needs one")
	errSendQueue = errors.New("iser: completion queue lost")
)

// failLocked ends the connection because of what the peer did, or did not do. Receive tells the iSCSI layer why. mu is held.
func (c *Conn) failLocked(why error) {
	if c.why == nil {
		c.why = why
	}
	c.qp.Disconnect()
}

// end starts the teardown: it closes the queue pair, which waits, and gives back what the connection holds.
func (c *Conn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ending {
		return
	}
	c.ending = true
	go c.teardown()
}

func (c *Conn) teardown() {
	c.qp.Close() // every work request has its completion now
	c.kill()
	c.lead <- struct{}{} // for ever
	for {
		n, err := c.sendCQ.Poll(c.done)
		if n == 0 || err != nil {
			break
		}
		c.settle(c.done[:n])
	}
	c.mu.Lock()
	c.over = true
	c.q.endLocked()
	c.r.stopLocked()
	close(c.gone)
	c.unrefLocked()
	c.mu.Unlock()
}

// abandon gives up a connection that was never established.
func (c *Conn) abandon() {
	c.mu.Lock()
	c.closed, c.ending = true, true
	c.mu.Unlock()
	c.t.closing()
	if c.qp != nil {
		c.teardown()
		return
	}
	c.kill()
	c.mu.Lock()
	c.over = true
	close(c.gone)
	c.unrefLocked()
	c.mu.Unlock()
}

// unrefLocked gives back all memory when nobody uses it any more. mu is held.
func (c *Conn) unrefLocked() {
	c.refs--
	if c.refs > 0 {
		return
	}
	for _, cq := range []rdma.CQ{c.sendCQ, c.recvCQ} {
		if cq != nil {
			cq.Close()
		}
	}
	if c.login != nil {
		c.login.Close()
	}
	c.memory.close()
	c.buffers = nil
	if c.loginBytes > 0 {
		c.t.loggedIn(c.loginBytes)
	}
	c.t.leave(c.bytes)
}

// endReason is why Receive cannot go on.
func (c *Conn) endReason() error {
	c.mu.Lock()
	closed, why := c.closed, c.why
	c.mu.Unlock()
	switch {
	case closed:
		return iscsi.ErrClosed
	case why != nil:
		return why
	}
	err := c.qp.Err()
	if err == nil || errors.Is(err, rdma.ErrDisconnected) {
		return iscsi.ErrClosed
	}
	return fmt.Errorf("iser: %w", err)
}
