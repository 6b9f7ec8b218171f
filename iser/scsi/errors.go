package scsi

import "errors"

// Errors that a Medium returns, each with the sense data it becomes.
var (
	// ErrBusy: back-pressure lasted longer than a command may wait. Status BUSY; the initiator tries again.
	ErrBusy = errors.New("scsi: medium is busy")
	// ErrSpace: the dirty budget is used up and policy says error. DATA PROTECT, SPACE ALLOCATION FAILED WRITE PROTECT (07/27/07).
	ErrSpace = errors.New("scsi: no space for writes")
	// ErrUnmet: the persistence level is not reached and policy says error. MEDIUM ERROR, WRITE ERROR - AUTO REALLOCATION FAILED (03/0C/02).
	ErrUnmet = errors.New("scsi: persistence level not reached")
	// ErrLostWrites: acknowledged writes were lost since the last flush (the generation grew). MEDIUM ERROR (03/0C/02), once per nexus... per event.
	ErrLostWrites = errors.New("scsi: acknowledged writes were lost")
	// ErrUnreadable: the data is damaged or its object is missing. MEDIUM ERROR, UNRECOVERED READ ERROR (03/11/00).
	ErrUnreadable = errors.New("scsi: unreadable data")
	// ErrWrite: a definite failure of the medium to write. MEDIUM ERROR (03/0C/00).
	ErrWrite = errors.New("scsi: write failed")
	// ErrNotReady: the volume is not being served here. NOT READY (02/04/0C).
	ErrNotReady = errors.New("scsi: not ready")
	// ErrStarting: the volume is being opened. NOT READY, BECOMING READY (02/04/01).
	ErrStarting = errors.New("scsi: becoming ready")
)
