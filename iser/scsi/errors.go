package scsi

import (
	"errors"
	"fmt"
)

// Errors that a Medium returns, each with the sense data it becomes. Wrapped errors
// count; with several in one chain the first of this list decides, and before those but
// ErrBusy a *SenseError.
var (
	// ErrBusy: back-pressure lasted longer than a command may wait. Status BUSY; the
	// initiator tries again.
	ErrBusy = errors.New("scsi: medium is busy")
	// ErrSpace: the dirty budget is used up and the policy says error. DATA PROTECT,
	// SPACE ALLOCATION FAILED WRITE PROTECT (07/27/07).
	ErrSpace = errors.New("scsi: no space for writes")
	// ErrUnmet: the persistence level is not reached and the policy says error.
	// MEDIUM ERROR, WRITE ERROR - AUTO REALLOCATION FAILED (03/0C/02).
	ErrUnmet = errors.New("scsi: persistence level not reached")
	// ErrLostWrites: acknowledged writes were lost since the last flush (the
	// generation grew). MEDIUM ERROR, WRITE ERROR - AUTO REALLOCATION FAILED
	// (03/0C/02). A medium returns it from one Flush (or FUA command) for each such
	// event.
	ErrLostWrites = errors.New("scsi: acknowledged writes were lost")
	// ErrUnreadable: the data is damaged or its object is missing. MEDIUM ERROR,
	// UNRECOVERED READ ERROR (03/11/00).
	ErrUnreadable = errors.New("scsi: unreadable data")
	// ErrWrite: a definite failure of the medium to write. MEDIUM ERROR, WRITE ERROR
	// (03/0C/00).
	ErrWrite = errors.New("scsi: write failed")
	// ErrNotReady: the volume is not being served here. NOT READY, TARGET PORT IN
	// UNAVAILABLE STATE (02/04/0C).
	ErrNotReady = errors.New("scsi: not ready")
	// ErrStarting: the volume is being opened. NOT READY, IN PROCESS OF BECOMING READY
	// (02/04/01).
	ErrStarting = errors.New("scsi: becoming ready")
)

// BlockError names the logical block at which an operation failed. A medium wraps its
// error in one where it knows the block; the block then stands in the INFORMATION
// field of the sense data.
type BlockError struct {
	LBA uint64
	Err error
}

func (e *BlockError) Error() string { return fmt.Sprintf("%v (LBA %d)", e.Err, e.LBA) }

// Unwrap returns the cause.
func (e *BlockError) Unwrap() error { return e.Err }

// SenseError is an error that knows its sense data. A transport returns one from Data
// for a failure with a code of its own (0B/0C/0D, not enough unsolicited data).
type SenseError struct {
	Key       SenseKey
	ASC, ASCQ uint8
	Err       error // the cause, for logs; may be nil
}

func (e *SenseError) Error() string {
	s := fmt.Sprintf("scsi: sense %02X/%02X/%02X", uint8(e.Key), e.ASC, e.ASCQ)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the cause.
func (e *SenseError) Unwrap() error { return e.Err }
