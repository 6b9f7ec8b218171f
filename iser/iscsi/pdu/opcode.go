package pdu

import "fmt"

// Opcode is the operation code of a PDU, without the immediate bit (RFC 7143, 11.2.1.2).
type Opcode uint8

// Initiator opcodes.
const (
	OpNopOut        Opcode = 0x00
	OpSCSICommand   Opcode = 0x01
	OpTaskRequest   Opcode = 0x02
	OpLoginRequest  Opcode = 0x03
	OpTextRequest   Opcode = 0x04
	OpDataOut       Opcode = 0x05
	OpLogoutRequest Opcode = 0x06
	OpSnack         Opcode = 0x10
)

// Target opcodes.
const (
	OpNopIn          Opcode = 0x20
	OpSCSIResponse   Opcode = 0x21
	OpTaskResponse   Opcode = 0x22
	OpLoginResponse  Opcode = 0x23
	OpTextResponse   Opcode = 0x24
	OpDataIn         Opcode = 0x25
	OpLogoutResponse Opcode = 0x26
	OpR2T            Opcode = 0x31
	OpAsync          Opcode = 0x32
	OpReject         Opcode = 0x3f
)

// FromTarget reports whether the opcode is one that targets send.
func (o Opcode) FromTarget() bool { return o&0x20 != 0 }

// String returns the name of the PDU.
func (o Opcode) String() string {
	switch o {
	case OpNopOut:
		return "NOP-Out"
	case OpSCSICommand:
		return "SCSI Command"
	case OpTaskRequest:
		return "Task Management Function Request"
	case OpLoginRequest:
		return "Login Request"
	case OpTextRequest:
		return "Text Request"
	case OpDataOut:
		return "SCSI Data-Out"
	case OpLogoutRequest:
		return "Logout Request"
	case OpSnack:
		return "SNACK Request"
	case OpNopIn:
		return "NOP-In"
	case OpSCSIResponse:
		return "SCSI Response"
	case OpTaskResponse:
		return "Task Management Function Response"
	case OpLoginResponse:
		return "Login Response"
	case OpTextResponse:
		return "Text Response"
	case OpDataIn:
		return "SCSI Data-In"
	case OpLogoutResponse:
		return "Logout Response"
	case OpR2T:
		return "Ready To Transfer"
	case OpAsync:
		return "Asynchronous Message"
	case OpReject:
		return "Reject"
	}
	return fmt.Sprintf("opcode %#02x", uint8(o))
}

// TaskAttr is the task attribute of a SCSI Command PDU (RFC 7143, 11.3.1).
type TaskAttr uint8

// Task attributes.
const (
	AttrUntagged    TaskAttr = 0
	AttrSimple      TaskAttr = 1
	AttrOrdered     TaskAttr = 2
	AttrHeadOfQueue TaskAttr = 3
	AttrACA         TaskAttr = 4
)

// String returns the name of the attribute.
func (a TaskAttr) String() string {
	switch a {
	case AttrUntagged:
		return "untagged"
	case AttrSimple:
		return "simple"
	case AttrOrdered:
		return "ordered"
	case AttrHeadOfQueue:
		return "head of queue"
	case AttrACA:
		return "ACA"
	}
	return fmt.Sprintf("task attribute %d", uint8(a))
}

// ServiceResponse is the iSCSI service response of a SCSI Response PDU (RFC 7143, 11.4.3).
type ServiceResponse uint8

// Service responses. 0x80 to 0xff are vendor specific.
const (
	Completed     ServiceResponse = 0x00 // command completed at target; Status is valid
	TargetFailure ServiceResponse = 0x01
)

// String returns the name of the response.
func (r ServiceResponse) String() string {
	switch r {
	case Completed:
		return "command completed at target"
	case TargetFailure:
		return "target failure"
	}
	return fmt.Sprintf("service response %#02x", uint8(r))
}

// TaskFunction is a task management function (RFC 7143, 11.5.1 and RFC 7144, 6.1.1).
type TaskFunction uint8

// Task management functions. 9 to 12 need iSCSIProtocolLevel 2.
const (
	AbortTask        TaskFunction = 1
	AbortTaskSet     TaskFunction = 2
	ClearACA         TaskFunction = 3
	ClearTaskSet     TaskFunction = 4
	LogicalUnitReset TaskFunction = 5
	TargetWarmReset  TaskFunction = 6
	TargetColdReset  TaskFunction = 7
	TaskReassign     TaskFunction = 8
	QueryTask        TaskFunction = 9
	QueryTaskSet     TaskFunction = 10
	NexusReset       TaskFunction = 11
	QueryAsyncEvent  TaskFunction = 12
)

// String returns the name of the function.
func (f TaskFunction) String() string {
	names := [...]string{"", "ABORT TASK", "ABORT TASK SET", "CLEAR ACA", "CLEAR TASK SET", "LOGICAL UNIT RESET",
		"TARGET WARM RESET", "TARGET COLD RESET", "TASK REASSIGN", "QUERY TASK", "QUERY TASK SET",
		"I_T NEXUS RESET", "QUERY ASYNCHRONOUS EVENT"}
	if f >= 1 && int(f) < len(names) {
		return names[f]
	}
	return fmt.Sprintf("task management function %d", uint8(f))
}

// UsesLUN reports whether the LUN field of a request for f is valid.
func (f TaskFunction) UsesLUN() bool {
	return f >= AbortTask && f <= LogicalUnitReset || f == QueryTask || f == QueryTaskSet || f == QueryAsyncEvent
}

// TaskResult is the response of a Task Management Function Response (RFC 7143, 11.6.1).
type TaskResult uint8

// Task management responses. FunctionSucceeded needs iSCSIProtocolLevel 2.
const (
	FunctionComplete     TaskResult = 0
	TaskDoesNotExist     TaskResult = 1
	LUNDoesNotExist      TaskResult = 2
	TaskStillAllegiant   TaskResult = 3
	ReassignNotSupported TaskResult = 4
	FunctionNotSupported TaskResult = 5
	AuthorizationFailed  TaskResult = 6
	FunctionSucceeded    TaskResult = 7
	FunctionRejected     TaskResult = 255
)

// String returns the name of the response.
func (r TaskResult) String() string {
	switch r {
	case FunctionComplete:
		return "function complete"
	case TaskDoesNotExist:
		return "task does not exist"
	case LUNDoesNotExist:
		return "LUN does not exist"
	case TaskStillAllegiant:
		return "task still allegiant"
	case ReassignNotSupported:
		return "task allegiance reassignment not supported"
	case FunctionNotSupported:
		return "task management function not supported"
	case AuthorizationFailed:
		return "function authorization failed"
	case FunctionSucceeded:
		return "function succeeded"
	case FunctionRejected:
		return "function rejected"
	}
	return fmt.Sprintf("task management response %d", uint8(r))
}

// RejectReason is the reason of a Reject PDU (RFC 7143, 11.17.1).
type RejectReason uint8

// Reject reasons.
const (
	RejectDataDigest       RejectReason = 0x02
	RejectSnack            RejectReason = 0x03
	RejectProtocolError    RejectReason = 0x04
	RejectNotSupported     RejectReason = 0x05
	RejectTooManyImmediate RejectReason = 0x06
	RejectTaskInProgress   RejectReason = 0x07
	RejectInvalidDataAck   RejectReason = 0x08
	RejectInvalidField     RejectReason = 0x09
	RejectLongOperation    RejectReason = 0x0a // cannot generate Target Transfer Tag, out of resources
	RejectWaitingForLogout RejectReason = 0x0c
)

// String returns the name of the reason.
func (r RejectReason) String() string {
	switch r {
	case RejectDataDigest:
		return "data digest error"
	case RejectSnack:
		return "SNACK reject"
	case RejectProtocolError:
		return "protocol error"
	case RejectNotSupported:
		return "command not supported"
	case RejectTooManyImmediate:
		return "too many immediate commands"
	case RejectTaskInProgress:
		return "task in progress"
	case RejectInvalidDataAck:
		return "invalid data ack"
	case RejectInvalidField:
		return "invalid PDU field"
	case RejectLongOperation:
		return "long operation reject"
	case RejectWaitingForLogout:
		return "waiting for logout"
	}
	return fmt.Sprintf("reject reason %#02x", uint8(r))
}

// AsyncEvent is the event of an Asynchronous Message (RFC 7143, 11.9.1).
type AsyncEvent uint8

// Asynchronous events. 248 to 255 are vendor specific.
const (
	AsyncSCSI            AsyncEvent = 0 // sense data in the data segment
	AsyncLogoutRequest   AsyncEvent = 1 // Param3: seconds
	AsyncDropConnection  AsyncEvent = 2 // Param1: CID, Param2: Time2Wait, Param3: Time2Retain
	AsyncDropSession     AsyncEvent = 3 // Param2: Time2Wait, Param3: Time2Retain
	AsyncNegotiate       AsyncEvent = 4 // Param3: seconds
	AsyncTaskTermination AsyncEvent = 5 // FastAbort only
)

// String returns the name of the event.
func (e AsyncEvent) String() string {
	names := [...]string{"SCSI asynchronous event", "logout request", "connection dropped", "session dropped",
		"negotiation request", "task termination"}
	if int(e) < len(names) {
		return names[e]
	}
	return fmt.Sprintf("asynchronous event %d", uint8(e))
}

// LogoutReason is the reason of a Logout Request (RFC 7143, 11.14.1).
type LogoutReason uint8

// Logout reasons.
const (
	CloseSession      LogoutReason = 0
	CloseConnection   LogoutReason = 1
	RemoveForRecovery LogoutReason = 2
)

// String returns the name of the reason.
func (r LogoutReason) String() string {
	names := [...]string{"close the session", "close the connection", "remove the connection for recovery"}
	if int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("logout reason %d", uint8(r))
}

// LogoutResult is the response of a Logout Response (RFC 7143, 11.15.1).
type LogoutResult uint8

// Logout responses.
const (
	LogoutOK            LogoutResult = 0
	LogoutCIDNotFound   LogoutResult = 1
	LogoutNoRecovery    LogoutResult = 2
	LogoutCleanupFailed LogoutResult = 3
)

// String returns the name of the response.
func (r LogoutResult) String() string {
	names := [...]string{"closed", "CID not found", "connection recovery not supported", "cleanup failed"}
	if int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("logout response %d", uint8(r))
}

// SnackType is the type of a SNACK Request (RFC 7143, 11.16.1).
type SnackType uint8

// SNACK types.
const (
	SnackDataR2T SnackType = 0
	SnackStatus  SnackType = 1
	SnackDataAck SnackType = 2
	SnackRData   SnackType = 3
)

// String returns the name of the type.
func (t SnackType) String() string {
	names := [...]string{"Data/R2T SNACK", "Status SNACK", "DataACK", "R-Data SNACK"}
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("SNACK type %d", uint8(t))
}

// Stage is a login stage: CSG and NSG (RFC 7143, 11.12.3).
type Stage uint8

// Login stages. 2 does not exist.
const (
	StageSecurity    Stage = 0
	StageOperational Stage = 1
	StageFullFeature Stage = 3
)

// String returns the name of the stage.
func (s Stage) String() string {
	switch s {
	case StageSecurity:
		return "SecurityNegotiation"
	case StageOperational:
		return "LoginOperationalNegotiation"
	case StageFullFeature:
		return "FullFeaturePhase"
	}
	return fmt.Sprintf("stage %d", uint8(s))
}

// LoginStatus is class<<8 | detail of a Login Response (RFC 7143, 11.13.5).
type LoginStatus uint16

// Login statuses.
const (
	LoginSuccess            LoginStatus = 0x0000
	LoginMovedTemporarily   LoginStatus = 0x0101
	LoginMovedPermanently   LoginStatus = 0x0102
	LoginInitiatorError     LoginStatus = 0x0200
	LoginAuthFailure        LoginStatus = 0x0201
	LoginForbidden          LoginStatus = 0x0202 // authorization failure
	LoginNotFound           LoginStatus = 0x0203
	LoginRemoved            LoginStatus = 0x0204
	LoginUnsupportedVersion LoginStatus = 0x0205
	LoginTooManyConnections LoginStatus = 0x0206
	LoginMissingParameter   LoginStatus = 0x0207
	LoginCannotInclude      LoginStatus = 0x0208
	LoginUnsupportedType    LoginStatus = 0x0209
	LoginNoSession          LoginStatus = 0x020a
	LoginInvalidRequest     LoginStatus = 0x020b // invalid request type during login
	LoginTargetError        LoginStatus = 0x0300
	LoginServiceUnavailable LoginStatus = 0x0301
	LoginOutOfResources     LoginStatus = 0x0302
)

// Class returns the status class: 0 success, 1 redirection, 2 initiator error, 3 target error.
func (s LoginStatus) Class() uint8 { return uint8(s >> 8) }

// Detail returns the status detail.
func (s LoginStatus) Detail() uint8 { return uint8(s) }

// Retryable reports whether the class says that the same login may succeed later.
func (s LoginStatus) Retryable() bool { return s.Class() == 3 }

// Redirect reports whether TargetAddress says where to log in instead.
func (s LoginStatus) Redirect() bool { return s.Class() == 1 }

// String returns the name of the status.
func (s LoginStatus) String() string {
	switch s {
	case LoginSuccess:
		return "success"
	case LoginMovedTemporarily:
		return "target moved temporarily"
	case LoginMovedPermanently:
		return "target moved permanently"
	case LoginInitiatorError:
		return "initiator error"
	case LoginAuthFailure:
		return "authentication failure"
	case LoginForbidden:
		return "authorization failure"
	case LoginNotFound:
		return "target not found"
	case LoginRemoved:
		return "target removed"
	case LoginUnsupportedVersion:
		return "unsupported version"
	case LoginTooManyConnections:
		return "too many connections"
	case LoginMissingParameter:
		return "missing parameter"
	case LoginCannotInclude:
		return "cannot include in session"
	case LoginUnsupportedType:
		return "session type not supported"
	case LoginNoSession:
		return "session does not exist"
	case LoginInvalidRequest:
		return "invalid request during login"
	case LoginTargetError:
		return "target error"
	case LoginServiceUnavailable:
		return "service unavailable"
	case LoginOutOfResources:
		return "out of resources"
	}
	return fmt.Sprintf("login status %04x", uint16(s))
}
