package initiator

import "github.com/isergate/isergate/iser/iscsi/pdu"

// datamover is the initiator's side of the datamover architecture (RFC 5047): what moves PDUs and
// payload for a session. Over TCP that is Data-In, R2T and Data-Out; the session knows none of them.
type datamover interface {
	// command queues the SCSI Command t.cmd, with as much of t.out as may go unsolicited. The
	// session calls it in CmdSN order and not concurrently. From then on until finish, t.in
	// and t.out belong to the datamover.
	command(t *task, ahs []byte)
	// control queues any other PDU; h and data may be reused when it returns.
	control(h *pdu.Header, data []byte)
	// flush sends what is queued: inline, the caller may be the one who sends, and waits for
	// the peer; otherwise it never blocks.
	flush(inline bool)
	// run receives until the connection fails or is closed, and returns why. It fills t.in and
	// feeds s. When it has returned, it touches no task.
	run(s upcalls) error
	// close makes run return. It may be called more than once.
	close()
}

// upcalls is what a datamover tells a session, from the goroutine of run.
type upcalls interface {
	// task returns the active SCSI task with the tag, or nil.
	task(tag pdu.TaskTag) *task
	// window takes ExpCmdSN and MaxCmdSN of a PDU that carries no status.
	window(exp, max pdu.Serial)
	// status ends t with the status that its last Data-In carries.
	status(t *task, p *pdu.DataIn) error
	// receive takes any other PDU; data is valid until it returns.
	receive(h *pdu.Header, data []byte) error
}
