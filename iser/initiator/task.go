package initiator

import (
	"sync/atomic"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Response is how a SCSI command ended.
type Response struct {
	Status Status
	Sense  []byte // with CheckCondition: raw sense data
	// Service is the iSCSI service response; other than Completed, Status means nothing.
	Service pdu.ServiceResponse
	// Transferred is the number of bytes of data-in that arrived, from the start of the buffer on.
	Transferred int
	// Residual counts the bytes by which the command's transfer length missed the expected
	// length: too many with Overflow, too few with Underflow.
	Residual            uint32
	Overflow, Underflow bool
	CmdSN               pdu.Serial
}

// Err returns nil if the command ended with GOOD or CONDITION MET, and otherwise a StatusError or,
// for a target failure, an error that Is ErrProtocol.
func (r *Response) Err() error {
	if r.Service != pdu.Completed {
		return protocolError("the command ended with %v", r.Service)
	}
	switch r.Status {
	case Good, ConditionMet:
		return nil
	case CheckCondition:
		s, ok := DecodeSense(r.Sense)
		if !ok {
			return protocolError("sense data %x is malformed", r.Sense)
		}
		return &StatusError{Status: r.Status, Sense: s}
	}
	return &StatusError{Status: r.Status}
}

// taskKind says what a slot of the task table holds.
type taskKind uint8

const (
	scsiTask taskKind = iota
	controlTask
)

// task is a slot of the task table. While it is active, the goroutine that reads the connection
// owns the fields below its comment; before and after, the goroutine that acquired the slot does.
type task struct {
	index uint32
	gen   uint32
	kind  taskKind
	done  chan struct{} // capacity 1: one value when refs falls to 0

	tag    pdu.TaskTag // guarded by Session.mu
	active bool        // guarded by Session.mu
	orphan bool        // nobody waits: the reader releases the slot; guarded by Session.mu

	cmd     pdu.SCSICommand
	out, in []byte

	// refs is 1 for the response that is due, and 1 for each batch in the
	// send queue that refers to out.
	refs atomic.Int32

	// Owned by the reader.
	received uint32     // bytes of data-in
	dataSN   pdu.Serial // of the next Data-In
	r2tSN    pdu.Serial // of the next R2T
	sent     uint32     // bytes of data-out sent or queued

	rsp Response
	err error

	move transfer // belongs to an iSER mover

	// Control tasks.
	tmf   pdu.TaskRequest // the request, if it is one
	reply pdu.Header
	data  []byte
}

// tagBits is how much of an Initiator Task Tag is the slot's index; the rest is a
// generation, so that a late PDU does not meet the slot's next user.
const (
	tagBits = 13
	tagMask = 1<<tagBits - 1
	genMask = 1<<(31-tagBits) - 1
)

// renew makes the slot ready for its next use.
func (t *task) renew() pdu.TaskTag {
	t.gen = (t.gen + 1) & genMask
	t.received, t.dataSN, t.r2tSN, t.sent = 0, 0, 0, 0
	t.rsp = Response{}
	t.err = nil
	t.data = nil
	t.tmf = pdu.TaskRequest{}
	t.refs.Store(1)
	return pdu.TaskTag(t.gen<<tagBits | t.index)
}

// unref gives up a reference. At the last one the waiter is woken.
func (t *task) unref() {
	if t.refs.Add(-1) == 0 {
		t.done <- struct{}{}
	}
}
