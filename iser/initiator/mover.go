package initiator

import (
	"context"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// datamover is the initiator's side of the datamover architecture (RFC 5047): what moves PDUs and
// payload for a session. Over TCP that is Data-In, R2T and Data-Out; over iSER it is windows that the target reads and
// writes; the session knows none of them.
type datamover interface {
	// prepare makes the buffers of t ready, before it is known when the command is sent. From then on until finish, t.in
	// and t.out belong to the datamover.
	prepare(t *task) error
	// command queues the SCSI Command t.cmd, with as much of t.out as may go unsolicited. The
	// session calls it in CmdSN order and not concurrently. ahs is not changed any more.
	command(t *task, ahs []byte)
	// control queues any other PDU; h and data may be reused when it returns. It takes what maxControl says.
	control(h *pdu.Header, data []byte)
	// maxControl is the longest data segment of a control PDU, in bytes.
	maxControl() int
	// flush sends what is queued: inline, the caller may be the one who sends, and waits for
	// the peer; otherwise it never blocks.
	flush(inline bool)
	// run receives until the connection fails or is closed, and returns why. It fills t.in and
	// feeds s. When it has returned, it touches no task.
	run(s upcalls) error
	// attend is called by who waits for the end of t: it may receive meanwhile, until t or ctx has ended.
	attend(ctx context.Context, t *task)
	// rouse makes sure that somebody receives though nobody attends.
	rouse()
	// end takes the peer's access to the buffers of t, whose last PDU is there: t's references count what that has to wait for. It is false if the peer ended
	// what it cannot know of; then t goes on, and the connection fails. Who receives calls it, and run's caller once more for each task after run has returned.
	end(t *task) bool
	// finish gives t.in and t.out back. It is called by who owns the slot, for each task that was prepared, when all
	// references are gone.
	finish(t *task)
	// alloc returns n bytes that commands use without a copy; free takes them back.
	alloc(n int) ([]byte, error)
	free(b []byte)
	// close makes run return. It may be called more than once.
	close()
}

// upcalls is what a datamover tells a session, from run or attend, one call at a time.
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
