package initiator

import (
	"encoding/binary"
	"fmt"
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

// String returns the name of the status.
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
	return fmt.Sprintf("status %02x", uint8(s))
}

// SenseKey is a SCSI sense key (SPC-4, 4.5.6).
type SenseKey uint8

// Sense keys.
const (
	KeyNoSense        SenseKey = 0x0
	KeyRecoveredError SenseKey = 0x1
	KeyNotReady       SenseKey = 0x2
	KeyMediumError    SenseKey = 0x3
	KeyHardwareError  SenseKey = 0x4
	KeyIllegalRequest SenseKey = 0x5
	KeyUnitAttention  SenseKey = 0x6
	KeyDataProtect    SenseKey = 0x7
	KeyBlankCheck     SenseKey = 0x8
	KeyVendor         SenseKey = 0x9
	KeyCopyAborted    SenseKey = 0xa
	KeyAbortedCommand SenseKey = 0xb
	KeyVolumeOverflow SenseKey = 0xd
	KeyMiscompare     SenseKey = 0xe
	KeyCompleted      SenseKey = 0xf
)

// String returns the name of the key.
func (k SenseKey) String() string {
	names := [...]string{"NO SENSE", "RECOVERED ERROR", "NOT READY", "MEDIUM ERROR", "HARDWARE ERROR", "ILLEGAL REQUEST",
		"UNIT ATTENTION", "DATA PROTECT", "BLANK CHECK", "VENDOR SPECIFIC", "COPY ABORTED", "ABORTED COMMAND", "sense key c",
		"VOLUME OVERFLOW", "MISCOMPARE", "COMPLETED"}
	return names[k&0xf]
}

// Sense is decoded sense data (SPC-4, 4.5).
type Sense struct {
	Key       SenseKey
	ASC, ASCQ uint8
	Deferred  bool // the sense data is about an earlier command
	// Information is the INFORMATION field; HasInformation is its VALID bit.
	Information    uint64
	HasInformation bool
	// Pointer is the sense-key specific field, 3 bytes; zero if there is none.
	Pointer [3]byte
}

// String describes the sense data: key, and ASC/ASCQ in hexadecimal.
func (s Sense) String() string {
	d := ""
	if s.Deferred {
		d = " (deferred)"
	}
	return fmt.Sprintf("%v %02x/%02x%s", s.Key, s.ASC, s.ASCQ, d)
}

// Is reports whether key, ASC and ASCQ are the given ones.
func (s Sense) Is(key SenseKey, asc, ascq uint8) bool {
	return s.Key == key && s.ASC == asc && s.ASCQ == ascq
}

// DecodeSense decodes fixed or descriptor format sense data. It is false if b is neither,
// or too short to hold a sense key.
func DecodeSense(b []byte) (s Sense, ok bool) {
	if len(b) < 3 {
		return s, false
	}
	at := func(i int) byte {
		if i < len(b) {
			return b[i]
		}
		return 0
	}
	switch b[0] & 0x7f {
	case 0x70, 0x71:
		s.Deferred = b[0]&0x7f == 0x71
		s.Key = SenseKey(b[2] & 0xf)
		if b[0]&0x80 != 0 && len(b) >= 7 {
			s.HasInformation, s.Information = true, uint64(binary.BigEndian.Uint32(b[3:]))
		}
		s.ASC, s.ASCQ = at(12), at(13)
		s.Pointer = [3]byte{at(15), at(16), at(17)}
		return s, true
	case 0x72, 0x73:
		s.Deferred = b[0]&0x7f == 0x73
		s.Key = SenseKey(b[1] & 0xf)
		s.ASC, s.ASCQ = at(2), at(3)
		if len(b) < 8 {
			return s, true
		}
		rest := b[8:]
		rest = rest[:min(len(rest), int(b[7]))]
		for len(rest) >= 2 {
			n := 2 + int(rest[1])
			if n > len(rest) {
				break
			}
			d := rest[:n]
			switch {
			case d[0] == 0x00 && n >= 12 && d[2]&0x80 != 0:
				s.HasInformation, s.Information = true, binary.BigEndian.Uint64(d[4:])
			case d[0] == 0x02 && n >= 7:
				s.Pointer = [3]byte{d[4], d[5], d[6]}
			}
			rest = rest[n:]
		}
		return s, true
	}
	return s, false
}
