package scsi

import "context"

// TaskAttribute is the SAM task attribute of a command.
type TaskAttribute uint8

// Task attributes, numbered as in the iSCSI SCSI Command PDU (RFC 7143, 11.3.1).
const (
	Untagged    TaskAttribute = 0 // treated as Simple
	Simple      TaskAttribute = 1
	Ordered     TaskAttribute = 2
	HeadOfQueue TaskAttribute = 3
	ACA         TaskAttribute = 4 // refused: no auto contingent allegiance
)

// Status is a SCSI status code (SAM-5, 5.3.1).
type Status uint8

// Status codes.
const (
	Good                Status = 0x00
	CheckCondition      Status = 0x02
	ConditionMet        Status = 0x04
	Busy                Status = 0x08
	ReservationConflict Status = 0x18
	TaskSetFull         Status = 0x28
	ACAActive           Status = 0x30
	TaskAborted         Status = 0x40
)

// Data moves the bytes of one command's data phases. The transport implements it;
// a logical unit never learns whether PDUs or RDMA carried them. Offsets are bytes from
// the start of the command's data-out or data-in. The transport clips at what the
// initiator expects (EDTL) and accounts for residuals itself from Result.
//
// A logical unit calls the methods of one Data from one goroutine at a time.
type Data interface {
	// OutLength and InLength are what the initiator declared to send and to
	// receive, in bytes.
	OutLength() int64
	InLength() int64

	// Receive fills into with data-out from offset off, and returns when all of it
	// is there. It is never asked for bytes past OutLength; within one command the
	// offsets ascend without gaps. An error that is a *SenseError ends the command
	// with that sense.
	Receive(ctx context.Context, into [][]byte, off int64) error

	// Send moves from to data-in offset off. The slices may be reused when it
	// returns. Bytes past InLength are dropped (and counted as overflow by the
	// transport). Within one command the offsets ascend without gaps.
	Send(ctx context.Context, from [][]byte, off int64) error
}

// Holder is a Data that can keep what a medium lent while the bytes are on their way, so
// that they and the status can leave together.
type Holder interface {
	Data
	// SendLoan is Send of all of the loan's buffers. They are the last of the command's
	// data-in. It takes the loan over, also if it fails: the transport releases it when
	// it needs the bytes no more, which may be after Execute returned, but is before the
	// nexus is lost.
	SendLoan(ctx context.Context, loan Borrowed, off int64) error
}

// Command is one SCSI command as a transport hands it over. It must not be copied after
// Admit or Execute saw it. When Execute has returned, its memory may be used for another
// command: see Abort.
type Command struct {
	CDB       []byte // 6 to 260 bytes; unused bytes of a fixed 16-byte field are zero
	Attribute TaskAttribute
	Data      Data

	// Abort, if not nil, ends the ctx that Execute was given. The logical unit calls
	// it when another nexus's task management function ends the command (CLEAR TASK
	// SET, a reset). It must not block, and may be called after Execute returned: it is
	// given the Serial that the command had when it was admitted. A transport that uses
	// the memory again tells by it whether the command is over, and then does nothing.
	Abort  func(serial uint64)
	Serial uint64

	call  *call // set by Admit
	sense [maxSense]byte
}

// Result ends a command.
type Result struct {
	Status Status
	// Sense is present exactly with CheckCondition. It has at most 126 bytes, in the
	// memory of the Command: it is valid until that is used again.
	Sense []byte
	// DataIn and DataOut are the lengths, in bytes, that the command asked to move
	// (SPDTL): the transport computes residuals from them. They are zero where a
	// command failed before it asked for data.
	DataIn, DataOut int64
}

// Nexus identifies an I_T nexus for unit attentions and reservations. Two
// sessions with equal Nexus are the same nexus in sequence.
type Nexus struct {
	InitiatorName string // iSCSI name
	ISID          [6]byte
	TargetName    string
	PortalGroup   uint16
}
