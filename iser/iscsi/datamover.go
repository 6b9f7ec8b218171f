package iscsi

import (
	"context"
	"errors"
	"net"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Errors by which a Datamover tells what went wrong with a connection or a transfer.
var (
	// ErrHeaderDigest: a header digest did not match. The byte stream is lost; the connection must end.
	ErrHeaderDigest = errors.New("iscsi: header digest error")
	// ErrSegment: a data segment is longer than what was declared as MaxRecvDataSegmentLength.
	ErrSegment = errors.New("iscsi: data segment is too long")
	// ErrFormat: the peer sent what RFC 7143, 7.7 calls a format error, or RFC 7145 one of iSER. The session ends.
	ErrFormat = errors.New("iscsi: format error")
	// ErrResources: there is no memory for full feature phase. Login status 0302.
	ErrResources = errors.New("iscsi: out of resources")
	// ErrClosed: the connection is closed.
	ErrClosed = errors.New("iscsi: connection is closed")
	// ErrAborted: the task was aborted while its data moved.
	ErrAborted = errors.New("iscsi: task was aborted")
	// ErrDataDigest: data of the task was lost to a digest error or a gap in DataSN. Sense 0B/47/05.
	ErrDataDigest = errors.New("iscsi: data digest error")
	// ErrUnexpectedData: unsolicited data that the negotiation excludes. Sense 0B/0C/0C.
	ErrUnexpectedData = errors.New("iscsi: unexpected unsolicited data")
	// ErrDataAmount: more or less data than was asked for. Sense 0B/0C/0D.
	ErrDataAmount = errors.New("iscsi: incorrect amount of data")
	// ErrRange: a logical unit asked for data outside what the initiator declared, or out of order.
	ErrRange = errors.New("iscsi: data range is not available")
)

// PDU is a control PDU on its way through a Datamover. It never holds SCSI payload.
type PDU struct {
	Header pdu.Header
	AHS    []byte // encoded additional header segments; receive only
	Data   []byte // data segment without padding: text, ping data, sense data

	// Task is set in a SCSI Response that is sent: the task that it ends.
	Task *Task
	// Transfer is set by the Datamover in a SCSI Command that is received: its state of the data of
	// this command. It goes into Task.Transfer, or back through Datamover.Discard.
	Transfer any
	// Fault is set by the Datamover in a PDU that is received and must be
	// answered by Reject; 0 means none. A SCSI Command with a fault still starts a task, whose transfer fails; any
	// other PDU with a fault is to be dropped after the Reject.
	Fault pdu.RejectReason
}

// Numbers stamps outgoing headers with StatSN, ExpCmdSN and MaxCmdSN.
type Numbers interface {
	// Stamp sets the sequence numbers, and advances StatSN if the PDU is a
	// response. A Datamover calls it for each PDU once, in the order of sending: under the lock that decides that order.
	Stamp(h *pdu.Header)
}

// Traits are what a Datamover cannot negotiate about.
type Traits struct {
	// Transport is "tcp", or "iser" for a connection whose login already runs in messages of an RDMA transport: it can
	// run RDMAExtensions=Yes only. The label of metrics and session lists is "iser" for sessions with RDMAExtensions.
	Transport string
	// RDMA: the connection can run RDMAExtensions=Yes. Digests are then None.
	RDMA bool
	// RDMARequired: a normal session without RDMAExtensions=Yes is refused, although the connection could carry it.
	RDMARequired bool
}

// message reports whether login runs in messages: there is no other mode to fall back to (RFC 7145, 5.1).
func (t Traits) message() bool { return t.Transport == transportISER }

// joins reports whether a connection can be one of a session with p (ISER-5, ISCSI-91).
func (t Traits) joins(p *Parameters) bool {
	if p.RDMAExtensions {
		return t.RDMA
	}
	return !t.message()
}

const transportISER = "iser"

// Datamover carries one connection, in the division of RFC 5047: control PDUs, and the payload
// of tasks. Receive is called by one goroutine; all other methods may be called concurrently.
//
// Memory is bounded by the Datamover: what one connection buffers of received payload stays within
// FirstBurstLength for each task that was received and not released.
type Datamover interface {
	Traits() Traits
	LocalAddr() net.Addr
	RemoteAddr() net.Addr

	// Start connects the Datamover with the numbers of its connection. It is called once, before anything else.
	Start(n Numbers)

	// Receive waits for the next control PDU. The PDU and what it refers to are valid until the next call.
	// Data-Out PDUs are consumed inside, unless they have a Fault. An error ends the connection.
	Receive() (*PDU, error)

	// Received counts the complete PDUs of any kind that were received.
	Received() uint64

	// SendControl queues a control PDU (Send_Control). It copies p and its data and does not wait for the peer, unless p ends
	// a task. The data segment must be within what the initiator can receive.
	SendControl(p *PDU) error

	// Enable sends the final Login Response and puts the connection into full feature phase with
	// these parameters (Enable_Datamover). The two are one step: no byte of the peer is read in between. What full feature phase
	// needs is allocated first: an error that is ErrResources means that nothing was sent.
	Enable(p *Parameters, final *PDU) error

	// NoticeKeyValues tells of parameters that changed in full feature phase (Notice_Key_Values).
	NoticeKeyValues(p *Parameters)

	// PutData sends from to the task's data-in at offset off (Put_Data). The caller clipped it at
	// Task.InLength. The slices may be reused when it returns; if Task.Held is set, when Release has returned.
	PutData(ctx context.Context, t *Task, from [][]byte, off int64) error

	// GetData fills into with the task's data-out from offset off (Get_Data), by what was sent unsolicited and by
	// asking for the rest, and returns when all of it is there. Offsets must increase from call to call.
	GetData(ctx context.Context, t *Task, into [][]byte, off int64) error

	// Finish waits until the initiator owes no data of the task that it announced or was asked for,
	// and returns what went wrong with the data: ErrDataDigest, ErrUnexpectedData, ErrDataAmount, or nil. It is called before a
	// SCSI Response is sent: a status must not overtake data that is on its way (ISCSI-54).
	Finish(ctx context.Context, t *Task) error

	// Release ends the Datamover's part in a task (Deallocate_Task_Resources). When it returns, nothing of the task is in
	// flight: no buffer given to GetData or PutData is touched any more. Late data of the task is thrown away.
	Release(t *Task)

	// Discard is Release for a command that never became a task.
	Discard(transfer any)

	// Close ends the connection: at once, or after what was queued is sent (bounded by a
	// few seconds). All other methods then return ErrClosed. It may be called more than once.
	Close(graceful bool) error
}

// Listener accepts connections of one transport.
type Listener interface {
	// Accept waits for the next connection. An error that says net.ErrClosed is final.
	Accept() (Datamover, error)
	Addr() net.Addr
	Close() error
}
