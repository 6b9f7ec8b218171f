package scsi

import "fmt"

// String returns the name of the status in SAM-5.
func (s Status) String() string {
	switch s {
	case Good:
		return "GOOD"
	case CheckCondition:
		return "CHECK CONDITION"
	case ConditionMet:
		return "CONDITION MET"
	case Busy:
		return "BUSY"
	case ReservationConflict:
		return "RESERVATION CONFLICT"
	case TaskSetFull:
		return "TASK SET FULL"
	case ACAActive:
		return "ACA ACTIVE"
	case TaskAborted:
		return "TASK ABORTED"
	}
	return fmt.Sprintf("status %02Xh", uint8(s))
}

// String returns the name of the sense key in SPC-4.
func (k SenseKey) String() string {
	switch k {
	case NoSense:
		return "NO SENSE"
	case NotReady:
		return "NOT READY"
	case MediumError:
		return "MEDIUM ERROR"
	case HardwareError:
		return "HARDWARE ERROR"
	case IllegalRequest:
		return "ILLEGAL REQUEST"
	case UnitAttention:
		return "UNIT ATTENTION"
	case DataProtect:
		return "DATA PROTECT"
	case AbortedCommand:
		return "ABORTED COMMAND"
	case Miscompare:
		return "MISCOMPARE"
	}
	return fmt.Sprintf("sense key %Xh", uint8(k))
}

// String returns the name of the attribute in SAM-5.
func (a TaskAttribute) String() string {
	switch a {
	case Untagged:
		return "UNTAGGED"
	case Simple:
		return "SIMPLE"
	case Ordered:
		return "ORDERED"
	case HeadOfQueue:
		return "HEAD OF QUEUE"
	case ACA:
		return "ACA"
	}
	return fmt.Sprintf("task attribute %d", uint8(a))
}
