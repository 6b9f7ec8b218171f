package scsi

import (
	"context"
	"errors"
)

// failErr maps an error of a Medium or of Data to the end of a command. DESIGN.md has
// the table and the reasons. No error of a flush becomes ASC 20h, 3Ah or 74h, which
// Linux takes for the success of a SYNCHRONIZE CACHE.
func (c *call) failErr(ctx context.Context, err error) Result {
	if ctx.Err() != nil {
		// Aborted by task management or with its session: the outcome is unknown, and
		// the transport decides what, if anything, is sent.
		return Result{Status: TaskAborted}
	}
	if errors.Is(err, ErrBusy) {
		return Result{Status: Busy}
	}
	f, known := faultOf(err)
	if !known && c.unit != nil {
		c.unit.reportUnknown(c.op, err)
	}
	if b, ok := errors.AsType[*BlockError](err); ok {
		f = f.withInfo(b.LBA)
	}
	return c.fail(f)
}

// faultOf finds the fault for an error. An error that is not known becomes ABORTED COMMAND.
func faultOf(err error) (f fault, known bool) {
	if s, ok := errors.AsType[*SenseError](err); ok {
		return newFault(s.Key, s.ASC, s.ASCQ), true
	}
	switch {
	case errors.Is(err, ErrSpace):
		return newFault(DataProtect, 0x27, 0x07), true
	case errors.Is(err, ErrUnmet), errors.Is(err, ErrLostWrites):
		return newFault(MediumError, 0x0C, 0x02), true
	case errors.Is(err, ErrUnreadable):
		return newFault(MediumError, 0x11, 0x00), true
	case errors.Is(err, ErrWrite):
		return newFault(MediumError, 0x0C, 0x00), true
	case errors.Is(err, ErrNotReady):
		return newFault(NotReady, 0x04, 0x0C), true
	case errors.Is(err, ErrStarting):
		return newFault(NotReady, 0x04, 0x01), true
	}
	return faultAborted, false
}

// reportUnknown logs an error of the medium that says nothing to an initiator: the
// operator is to see what lies behind an ABORTED COMMAND.
func (u *LogicalUnit) reportUnknown(op *operation, err error) {
	left, ok := u.unknown.Allow()
	if !ok {
		return
	}
	u.opt.Logger.Error("medium failed with an unknown error: the command ends with ABORTED COMMAND",
		"unit", u.opt.Identity.Serial, "command", op.name, "err", err, "unlogged", left)
}
