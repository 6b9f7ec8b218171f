package iscsi

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// Task is one SCSI command in progress. A Datamover reads the exported fields, which do not change until its Release
// returns. Then the Task is used for another command of the session: nobody may keep it.
type Task struct {
	ITT   pdu.TaskTag
	LUN   pdu.LUN
	CmdSN pdu.Serial
	Read  bool
	Write bool
	// EDTL is the Expected Data Transfer Length: of the write part if the command is bidirectional.
	EDTL uint32
	// BidiRead is the expected length of the read part of a bidirectional command.
	BidiRead uint32
	// Transfer is what the Datamover put into PDU.Transfer of the command.
	Transfer any
	// Held says that memory given to PutData is not reused before Release returned.
	Held bool

	s         *session // for life
	c         *conn
	immediate bool
	faulted   bool // the data of the command PDU itself was lost
	cmd       scsi.Command
	cdb       [pdu.FixedCDBLength]byte
	response  PDU
	sense     [2 + maxSense]byte // the data segment of response
	clipped   [][]byte           // scratch of Send
	loan      scsi.Borrowed      // to be released after the Datamover's Release; nil: none
	moves     atomic.Uint32      // odd: in a call of the Datamover

	// The fields below are guarded by s.mu.
	state taskState
	// serial counts the commands that the Task was. One that is over has another serial, by which an abort that comes late
	// finds out.
	serial uint64
	// waiters are closed when the task has left.
	waiters []chan struct{}
	hurried time.Time // since when its end is watched; zero: it is not
	moved   uint32    // moves at that time
	next    *Task     // in s.free

	ctx taskContext
}

// maxSense is how much sense data a logical unit returns.
const maxSense = 126

type taskState uint8

const (
	taskRunning      taskState = iota
	taskAborted                // by the session itself: no status is sent
	taskAbortedOther           // by another nexus: the logical unit's result decides
	taskResponding             // its response is on the way; too late for an abort
)

// OutLength returns how many bytes the initiator declared to send.
func (t *Task) OutLength() int64 {
	if t.Write {
		return int64(t.EDTL)
	}
	return 0
}

// InLength returns how many bytes the initiator declared to receive.
func (t *Task) InLength() int64 {
	switch {
	case t.Read && t.Write:
		return int64(t.BidiRead)
	case t.Read:
		return int64(t.EDTL)
	}
	return 0
}

// Receive implements scsi.Data.
func (t *Task) Receive(ctx context.Context, into [][]byte, off int64) error {
	n := total(into)
	if n == 0 {
		return nil
	}
	if off < 0 || off+n > t.OutLength() {
		return transferSense(ErrRange)
	}
	t.enterMover()
	defer t.leaveMover()
	return dataError(t.c.dm.GetData(ctx, t, into, off))
}

// Send implements scsi.Data.
func (t *Task) Send(ctx context.Context, from [][]byte, off int64) error {
	n := total(from)
	if off < 0 {
		return ErrRange
	}
	if room := t.InLength() - off; n > room {
		if room <= 0 {
			return nil
		}
		t.clipped = clipTo(t.clipped[:0], from, room)
		from, n = t.clipped, room
	}
	if n == 0 {
		return nil
	}
	t.enterMover()
	defer t.leaveMover()
	return dataError(t.c.dm.PutData(ctx, t, from, off))
}

// SendLoan implements scsi.Holder.
func (t *Task) SendLoan(ctx context.Context, loan scsi.Borrowed, off int64) error {
	t.loan, t.Held = loan, true
	return t.Send(ctx, loan.Buffers(), off)
}

func total(b [][]byte) (n int64) {
	for i := range b {
		n += int64(len(b[i]))
	}
	return n
}

// clipTo appends the first n bytes of b to out.
func clipTo(out, b [][]byte, n int64) [][]byte {
	for _, p := range b {
		if int64(len(p)) >= n {
			return append(out, p[:n])
		}
		out = append(out, p)
		n -= int64(len(p))
	}
	return out
}

// dataError gives any error of a Datamover sense data: what befalls a transfer is no error of the medium.
func dataError(err error) error {
	if err == nil {
		return nil
	}
	err = transferSense(err)
	if _, ok := errors.AsType[*scsi.SenseError](err); !ok {
		err = &scsi.SenseError{Key: scsi.AbortedCommand, Err: err}
	}
	return err
}

// transferSense gives an error of a Datamover the sense data of RFC 7143, 11.4.7.2.
func transferSense(err error) error {
	var asc, ascq uint8
	switch {
	case errors.Is(err, ErrDataDigest):
		asc, ascq = 0x47, 0x05 // PROTOCOL SERVICE CRC ERROR
	case errors.Is(err, ErrUnexpectedData):
		asc, ascq = 0x0c, 0x0c // WRITE ERROR - UNEXPECTED UNSOLICITED DATA
	case errors.Is(err, ErrDataAmount):
		asc, ascq = 0x0c, 0x0d // WRITE ERROR - NOT ENOUGH UNSOLICITED DATA
	default:
		return err
	}
	return &scsi.SenseError{Key: scsi.AbortedCommand, ASC: asc, ASCQ: ascq, Err: err}
}

// newTask prepares the task of a SCSI Command, in memory that was one before if there is some.
func newTask(c *conn, cmd *pdu.SCSICommand, p *PDU, ahs *pdu.AHS) *Task {
	s := c.s
	s.mu.Lock()
	t := s.free
	if t != nil {
		s.free, t.next = t.next, nil
	} else {
		t = &Task{s: s}
		t.cmd.Data, t.cmd.Abort = t, t.abortedByUnit
	}
	t.state = taskRunning
	t.cmd.Serial = t.serial
	s.mu.Unlock()
	t.ITT, t.LUN, t.CmdSN, t.Read, t.Write = cmd.ITT, cmd.LUN, cmd.CmdSN, cmd.Read, cmd.Write
	t.EDTL, t.BidiRead, t.Transfer = cmd.EDTL, ahs.BidiReadLength, p.Transfer
	t.c, t.immediate, t.faulted, t.cdb = c, cmd.Immediate, p.Fault != 0, cmd.CDB
	t.cmd.CDB, t.cmd.Attribute = t.cdb[:], scsi.TaskAttribute(cmd.Attr)
	if len(ahs.CDB) > 0 {
		t.cmd.CDB = append(append(make([]byte, 0, len(t.cdb)+len(ahs.CDB)), t.cdb[:]...), ahs.CDB...)
	}
	return t
}

// recycleLocked ends the use of t's memory for its command: nobody else touches it any more, but for an abort that
// comes late.
func (s *session) recycleLocked(t *Task) {
	t.serial++
	t.ctx.reset()
	t.c, t.Transfer, t.Held, t.waiters, t.hurried, t.response = nil, nil, false, nil, time.Time{}, PDU{}
	clear(t.clipped[:cap(t.clipped)])
	t.next, s.free = s.free, t
}

// abortedByUnit is called by the logical unit when another nexus ended the command that had this serial.
func (t *Task) abortedByUnit(serial uint64) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.serial == serial && t.state == taskRunning {
		t.state = taskAbortedOther
		t.ctx.cancel()
		t.hurryLocked()
	}
}

// abortLocked ends the task without a status. It reports false if the task's response is already on its way.
func (t *Task) abortLocked() bool {
	t.hurryLocked()
	switch t.state {
	case taskResponding:
		return false
	case taskRunning, taskAbortedOther:
		t.state = taskAborted
		t.ctx.cancel()
	}
	return true
}

// leftLocked returns a channel that is closed when the task has left.
func (t *Task) leftLocked() <-chan struct{} {
	ch := make(chan struct{})
	t.waiters = append(t.waiters, ch)
	return ch
}

// run executes the task and sends its status. It is the worker's whole job.
func (t *Task) run() {
	res := t.s.units.Execute(&t.ctx, t.s.nexus, uint64(t.LUN), &t.cmd)
	t.enterMover()
	err := t.c.dm.Finish(&t.ctx, t)
	t.leaveMover()
	if t.faulted && err == nil {
		err = ErrDataDigest
	}
	if err != nil {
		if fault, ok := errors.AsType[*scsi.SenseError](transferSense(err)); ok {
			res = scsi.Result{Status: scsi.CheckCondition, Sense: fixedSense(byte(fault.Key), fault.ASC, fault.ASCQ)}
		}
	}
	t.s.complete(t, &res)
}

// fixedSense is sense data in fixed format (SPC-4, 4.5.3).
func fixedSense(key, asc, ascq byte) []byte {
	b := make([]byte, 18)
	b[0], b[2], b[7], b[12], b[13] = 0x70, key, 10, asc, ascq
	return b
}

// prepare fills the SCSI Response for a result.
func (t *Task) prepare(res *scsi.Result) *PDU {
	r := pdu.SCSIResponse{Response: pdu.Completed, Status: uint8(res.Status), ITT: t.ITT, SnackTag: pdu.ReservedTag}
	switch {
	case t.Read && t.Write:
		r.Overflow, r.Underflow, r.Residual = residual(res.DataOut, t.OutLength())
		r.BidiOverflow, r.BidiUnderflow, r.BidiResidual = residual(res.DataIn, t.InLength())
	case t.Write:
		r.Overflow, r.Underflow, r.Residual = residual(res.DataOut, t.OutLength())
	case t.Read:
		r.Overflow, r.Underflow, r.Residual = residual(res.DataIn, t.InLength())
	default:
		r.Overflow, _, r.Residual = residual(max(res.DataIn, res.DataOut), 0)
	}
	r.Encode(&t.response.Header)
	if n := min(len(res.Sense), maxSense); n > 0 {
		t.sense[0], t.sense[1] = 0, byte(n)
		copy(t.sense[2:], res.Sense[:n])
		t.response.Data = t.sense[:2+n]
	}
	t.response.Task = t
	return &t.response
}

// residual compares what the command asked to move with what the initiator expected (RFC 7143, 11.4.5).
func residual(asked, expected int64) (over, under bool, count uint32) {
	switch {
	case asked > expected:
		return true, false, uint32(min(asked-expected, 1<<32-1))
	case asked < expected:
		return false, true, uint32(expected - asked)
	}
	return false, false, 0
}

// taskContext is the context of one task: it ends when the task is aborted. It costs nothing until somebody waits for it, and
// is used again with the Task.
type taskContext struct {
	ended atomic.Bool // changed under mu
	mu    sync.Mutex
	done  chan struct{} // made when asked for, closed when ended; guarded by mu
}

func (c *taskContext) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended.Swap(true) {
		return
	}
	if c.done != nil {
		close(c.done)
	}
}

// reset begins the context of the next command.
func (c *taskContext) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended.Swap(false) {
		c.done = nil
	}
}

// Deadline implements context.Context.
func (c *taskContext) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (c *taskContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.ended.Load() {
			close(c.done)
		}
	}
	return c.done
}

// Err implements context.Context.
func (c *taskContext) Err() error {
	if c.ended.Load() {
		return context.Canceled
	}
	return nil
}

// Value implements context.Context.
func (c *taskContext) Value(any) any { return nil }
