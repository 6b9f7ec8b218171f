package iscsi

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// Task is one SCSI command in progress. A Datamover reads the exported fields, which do not change.
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

	s         *session
	c         *conn
	immediate bool
	faulted   bool // the data of the command PDU itself was lost
	cmd       scsi.Command
	cdb       [pdu.FixedCDBLength]byte
	response  PDU

	// state is guarded by s.mu.
	state taskState
	// waiters are closed when the task has left; guarded by s.mu.
	waiters []chan struct{}

	ctx taskContext
}

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
	return transferSense(t.c.dm.GetData(ctx, t, into, off))
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
		from, n = clipTo(from, room), room
	}
	if n == 0 {
		return nil
	}
	return t.c.dm.PutData(ctx, t, from, off)
}

func total(b [][]byte) (n int64) {
	for i := range b {
		n += int64(len(b[i]))
	}
	return n
}

// clipTo returns the first n bytes of b.
func clipTo(b [][]byte, n int64) [][]byte {
	out := make([][]byte, 0, len(b))
	for _, p := range b {
		if int64(len(p)) >= n {
			return append(out, p[:n])
		}
		out = append(out, p)
		n -= int64(len(p))
	}
	return out
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

// newTask prepares the task of a SCSI Command.
func newTask(c *conn, cmd *pdu.SCSICommand, p *PDU, ahs *pdu.AHS) *Task {
	t := &Task{
		ITT: cmd.ITT, LUN: cmd.LUN, CmdSN: cmd.CmdSN, Read: cmd.Read, Write: cmd.Write,
		EDTL: cmd.EDTL, BidiRead: ahs.BidiReadLength, Transfer: p.Transfer,
		s: c.s, c: c, immediate: cmd.Immediate, faulted: p.Fault != 0, cdb: cmd.CDB,
	}
	t.cmd = scsi.Command{CDB: t.cdb[:], Attribute: scsi.TaskAttribute(cmd.Attr), Data: t, Abort: t.abortedByUnit}
	if len(ahs.CDB) > 0 {
		t.cmd.CDB = append(append(make([]byte, 0, len(t.cdb)+len(ahs.CDB)), t.cdb[:]...), ahs.CDB...)
	}
	return t
}

// abortedByUnit is called by the logical unit when another nexus ended the task.
func (t *Task) abortedByUnit() {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.state == taskRunning {
		t.state = taskAbortedOther
		t.ctx.cancel()
	}
}

// abortLocked ends the task without a status. It reports false if the task's response is already on its way.
func (t *Task) abortLocked() bool {
	switch t.state {
	case taskResponding:
		return false
	case taskRunning, taskAbortedOther:
		t.state = taskAborted
		t.ctx.cancel()
	}
	return true
}

// left returns a channel that is closed when the task has left.
func (t *Task) leftLocked() <-chan struct{} {
	ch := make(chan struct{})
	t.waiters = append(t.waiters, ch)
	return ch
}

// run executes the task and sends its status. It is the worker's whole job.
func (t *Task) run() {
	res := t.s.units.Execute(&t.ctx, t.s.nexus, uint64(t.LUN), &t.cmd)
	err := t.c.dm.Finish(&t.ctx, t)
	if t.faulted && err == nil {
		err = ErrDataDigest
	}
	var fault *scsi.SenseError
	if errors.As(transferSense(err), &fault) {
		res = scsi.Result{Status: scsi.CheckCondition, Sense: fixedSense(byte(fault.Key), fault.ASC, fault.ASCQ)}
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
	if len(res.Sense) > 0 {
		data := make([]byte, 2, 2+len(res.Sense))
		data[0], data[1] = byte(len(res.Sense)>>8), byte(len(res.Sense))
		t.response.Data = append(data, res.Sense...)
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

// taskContext is the context of one task: it ends when the task is aborted. It costs nothing until somebody waits for it.
type taskContext struct {
	mu   sync.Mutex
	done chan struct{} // made when asked for; guarded by mu
	err  error         // guarded by mu
}

func (c *taskContext) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = context.Canceled
	if c.done != nil {
		close(c.done)
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
		if c.err != nil {
			close(c.done)
		}
	}
	return c.done
}

// Err implements context.Context.
func (c *taskContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Value implements context.Context.
func (c *taskContext) Value(any) any { return nil }
