package scsi

import "encoding/binary"

// SenseKey is the class of a sense data record (SPC-4, 4.5.6).
type SenseKey uint8

// Sense keys.
const (
	NoSense        SenseKey = 0x0
	NotReady       SenseKey = 0x2
	MediumError    SenseKey = 0x3
	HardwareError  SenseKey = 0x4
	IllegalRequest SenseKey = 0x5
	UnitAttention  SenseKey = 0x6
	DataProtect    SenseKey = 0x7
	AbortedCommand SenseKey = 0xB
	Miscompare     SenseKey = 0xE
)

// fault is sense data before it has a format.
type fault struct {
	key       SenseKey
	asc, ascq uint8

	hasInfo bool
	info    uint64 // INFORMATION: an LBA, or the offset of a miscompare

	// The field pointer (SPC-4, 4.5.2.4.2), present if hasField.
	hasField bool
	inCDB    bool   // the field lies in the CDB, else in the parameter list
	bit      int8   // most significant bit of the field, or -1 for whole bytes
	field    uint16 // byte offset
}

func newFault(key SenseKey, asc, ascq uint8) fault {
	return fault{key: key, asc: asc, ascq: ascq}
}

// withInfo puts v into the INFORMATION field.
func (f fault) withInfo(v uint64) fault {
	f.hasInfo, f.info = true, v
	return f
}

var (
	faultInvalidOpcode   = newFault(IllegalRequest, 0x20, 0x00)
	faultLBARange        = newFault(IllegalRequest, 0x21, 0x00)
	faultNoLogicalUnit   = newFault(IllegalRequest, 0x25, 0x00)
	faultListLength      = newFault(IllegalRequest, 0x1A, 0x00)
	faultSavingPages     = newFault(IllegalRequest, 0x39, 0x00)
	faultMessage         = newFault(IllegalRequest, 0x49, 0x00)
	faultRemovalPrevent  = newFault(IllegalRequest, 0x53, 0x02)
	faultInformationUnit = newFault(IllegalRequest, 0x0E, 0x03)
	faultWriteProtected  = newFault(DataProtect, 0x27, 0x00)
	faultSoftwareWP      = newFault(DataProtect, 0x27, 0x02)
	faultNoMedium        = newFault(NotReady, 0x3A, 0x00)
	faultAborted         = newFault(AbortedCommand, 0x00, 0x00)
	faultMiscompare      = newFault(Miscompare, 0x1D, 0x00)
	faultSelfTest        = newFault(HardwareError, 0x3E, 0x03)
)

// invalidCDB is INVALID FIELD IN CDB at a byte, and at a bit of it unless bit is -1.
func invalidCDB(field int, bit int8) fault {
	return fault{key: IllegalRequest, asc: 0x24, hasField: true, inCDB: true, field: uint16(field), bit: bit}
}

// invalidParameter is INVALID FIELD IN PARAMETER LIST at a byte of the list.
func invalidParameter(field int, bit int8) fault {
	return fault{key: IllegalRequest, asc: 0x26, hasField: true, field: uint16(field), bit: bit}
}

// Sizes of sense data.
const (
	fixedSenseLen   = 18
	infoDescLen     = 12
	fieldDescLen    = 8
	senseHeaderLen  = 8
	maxSense        = 126 // fits the iSER receive buffer of every initiator
	responseFixed   = 0x70
	responseDesc    = 0x72
	senseValid      = 0x80
	fieldSKSV       = 0x80
	fieldCommand    = 0x40
	fieldBitPointer = 0x08
)

// encode renders f as current sense data in descriptor or fixed format (SPC-4, 4.5.2
// and 4.5.3), in the memory of into. In fixed format an INFORMATION value beyond 32 bits
// is left out.
func (f fault) encode(into *[maxSense]byte, descriptor bool) []byte {
	*into = [maxSense]byte{}
	if !descriptor {
		b := into[:fixedSenseLen:fixedSenseLen]
		b[0] = responseFixed
		b[2] = byte(f.key)
		b[7] = fixedSenseLen - 8
		b[12], b[13] = f.asc, f.ascq
		if f.hasInfo && f.info>>32 == 0 {
			b[0] |= senseValid
			binary.BigEndian.PutUint32(b[3:], uint32(f.info))
		}
		f.putField(b[15:18])
		return b
	}
	b := into[:senseHeaderLen]
	b[0] = responseDesc
	b[1], b[2], b[3] = byte(f.key), f.asc, f.ascq
	if f.hasInfo {
		var d [infoDescLen]byte
		d[0], d[1], d[2] = 0x00, infoDescLen-2, senseValid
		binary.BigEndian.PutUint64(d[4:], f.info)
		b = append(b, d[:]...)
	}
	if f.hasField {
		var d [fieldDescLen]byte
		d[0], d[1] = 0x02, fieldDescLen-2
		f.putField(d[4:7])
		b = append(b, d[:]...)
	}
	b[7] = byte(len(b) - senseHeaderLen)
	return b
}

// putField fills the three sense-key specific bytes of a field pointer.
func (f fault) putField(b []byte) {
	if !f.hasField {
		return
	}
	b[0] = fieldSKSV
	if f.inCDB {
		b[0] |= fieldCommand
	}
	if f.bit >= 0 {
		b[0] |= fieldBitPointer | byte(f.bit)&7
	}
	binary.BigEndian.PutUint16(b[1:], f.field)
}
