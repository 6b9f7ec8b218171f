package initiator

import (
	"errors"
	"fmt"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

var (
	// ErrConnection means that the connection failed or was dropped while a command was outstanding. The command
	// may or may not have taken effect.
	ErrConnection = errors.New("initiator: connection lost")
	// ErrClosed means that the session was closed before the command was sent: it had no effect.
	ErrClosed = errors.New("initiator: session is closed")
	// ErrProtocol means that the target broke the protocol. The connection is dropped.
	ErrProtocol = errors.New("initiator: protocol violation by the target")
	// ErrDigest means that a received header or data digest is wrong. At error
	// recovery level 0 the connection is dropped.
	ErrDigest = errors.New("initiator: digest error")
	// ErrAborted means that a task management function ended the command. It may or may not have taken effect.
	ErrAborted = errors.New("initiator: task aborted")
	// ErrAuth means that the target failed to prove its identity, or asked for an
	// authentication that the options do not allow.
	ErrAuth = errors.New("initiator: authentication failed")
	// ErrNoISER means that the target does not agree to RDMAExtensions=Yes: it does not serve iSER there.
	ErrNoISER = errors.New("initiator: the target does not agree to iSER")
	// ErrShortTransfer means that a command ended with GOOD but moved fewer bytes than asked for.
	ErrShortTransfer = errors.New("initiator: short transfer")
	// ErrMiscompare means that COMPARE AND WRITE found other data and wrote nothing.
	ErrMiscompare = errors.New("initiator: miscompare")
)

// LoginError is a Login Response with a status other than success.
type LoginError struct {
	Status pdu.LoginStatus
	// TargetAddress is where to go, if the status is a redirection.
	TargetAddress string
}

func (e *LoginError) Error() string {
	return fmt.Sprintf("initiator: login refused: %v (%04x)", e.Status, uint16(e.Status))
}

// RejectError is a Reject PDU that names a request of ours.
type RejectError struct {
	Reason pdu.RejectReason
	Opcode pdu.Opcode // of the rejected PDU
}

func (e *RejectError) Error() string {
	return fmt.Sprintf("initiator: %v rejected: %v (%02x)", e.Opcode, e.Reason, uint8(e.Reason))
}

// TaskError is a task management response other than complete or succeeded.
type TaskError struct {
	Function pdu.TaskFunction
	Response pdu.TaskResult
}

func (e *TaskError) Error() string {
	return fmt.Sprintf("initiator: %v: %v", e.Function, e.Response)
}

// StatusError is a SCSI command that ended with a status other than GOOD or CONDITION MET.
type StatusError struct {
	Status Status
	Sense  Sense // valid with CheckCondition
}

func (e *StatusError) Error() string {
	if e.Status == CheckCondition {
		return fmt.Sprintf("initiator: %v: %v", e.Status, e.Sense)
	}
	return fmt.Sprintf("initiator: %v", e.Status)
}

// Is reports ErrMiscompare for sense key MISCOMPARE.
func (e *StatusError) Is(target error) bool {
	return target == ErrMiscompare && e.Status == CheckCondition && e.Sense.Key == KeyMiscompare
}

func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}
