package scsi

import (
	"context"
	"errors"
)

// resultOf maps an error of a Medium or of Data to the end of a command. DESIGN.md has
// the table and the reasons. No error of a flush becomes ASC 20h, 3Ah or 74h, which
// Linux takes for the success of a SYNCHRONIZE CACHE.
func resultOf(ctx context.Context, err error, descriptor bool) Result {
	if ctx.Err() != nil {
		// Aborted by task management or with its session: the outcome is unknown, and
		// the transport decides what, if anything, is sent.
		return Result{Status: TaskAborted}
	}
	if errors.Is(err, ErrBusy) {
		return Result{Status: Busy}
	}
	f := faultOf(err)
	if b, ok := errors.AsType[*BlockError](err); ok {
		f = f.withInfo(b.LBA)
	}
	return f.result(descriptor)
}

func faultOf(err error) fault {
	if s, ok := errors.AsType[*SenseError](err); ok {
		return newFault(s.Key, s.ASC, s.ASCQ)
	}
	switch {
	case errors.Is(err, ErrSpace):
		return newFault(DataProtect, 0x27, 0x07)
	case errors.Is(err, ErrUnmet), errors.Is(err, ErrLostWrites):
		return newFault(MediumError, 0x0C, 0x02)
	case errors.Is(err, ErrUnreadable):
		return newFault(MediumError, 0x11, 0x00)
	case errors.Is(err, ErrWrite):
		return newFault(MediumError, 0x0C, 0x00)
	case errors.Is(err, ErrNotReady):
		return newFault(NotReady, 0x04, 0x0C)
	case errors.Is(err, ErrStarting):
		return newFault(NotReady, 0x04, 0x01)
	}
	return faultAborted
}
