package pdu

import "encoding/binary"

// Limits of a CDB.
const (
	FixedCDBLength = 16  // bytes in the BHS
	MaxCDBLength   = 260 // longest CDB of SPC-4: 8 bytes and an ADDITIONAL CDB LENGTH of one byte, multiple of 4
)

// Types of additional header segments (RFC 7143, 11.2.2.1).
const (
	ahsExtendedCDB = 1
	ahsBidiRead    = 2
)

// AHS holds the additional header segments of a SCSI Command. Each is
//
//	0  2  AHSLength: bytes after AHSType, without padding
//	2  1  AHSType: 1 extended CDB, 2 bidirectional read length
//	3  1  reserved (counted by AHSLength)
//	4  n  the rest of the CDB after its first 16 bytes, or a 4-byte length; padded to 4
type AHS struct {
	// CDB is the part of the CDB after its first 16 bytes. After Decode it
	// refers to the decoded bytes. Nil: no such segment.
	CDB []byte
	// BidiReadLength is the Bidirectional Read Expected Data Transfer Length.
	BidiReadLength uint32
	HasBidiRead    bool
}

// Append appends the encoded segments to b. CDB must be at most MaxCDBLength-FixedCDBLength bytes.
func (a *AHS) Append(b []byte) []byte {
	if len(a.CDB) > 0 {
		b = binary.BigEndian.AppendUint16(b, uint16(len(a.CDB)+1))
		b = append(b, ahsExtendedCDB, 0)
		b = append(b, a.CDB...)
		b = append(b, zeros[:Padding(len(a.CDB))]...)
	}
	if a.HasBidiRead {
		b = append(b, 0, 5, ahsBidiRead, 0)
		b = binary.BigEndian.AppendUint32(b, a.BidiReadLength)
	}
	return b
}

// Decode reads all segments in b, whose length is TotalAHSLength in bytes. A segment that
// passes the end is ErrShort; an unknown, repeated or ill-sized one is a format error.
func (a *AHS) Decode(b []byte) error {
	*a = AHS{}
	for len(b) > 0 {
		if len(b) < 4 {
			return ErrShort
		}
		n := int(binary.BigEndian.Uint16(b))
		size := 3 + n
		size += Padding(size)
		if n < 1 {
			return &FormatError{OpSCSICommand, "AHSLength is 0"}
		}
		if size > len(b) {
			return ErrShort
		}
		body := b[4 : 3+n]
		switch b[2] {
		case ahsExtendedCDB:
			if a.CDB != nil || len(body) == 0 || len(body) > MaxCDBLength-FixedCDBLength {
				return &FormatError{OpSCSICommand, "extended CDB"}
			}
			a.CDB = body
		case ahsBidiRead:
			if a.HasBidiRead || len(body) != 4 {
				return &FormatError{OpSCSICommand, "bidirectional read length"}
			}
			a.BidiReadLength = binary.BigEndian.Uint32(body)
			a.HasBidiRead = true
		default:
			return &FormatError{OpSCSICommand, "unknown AHS type"}
		}
		b = b[size:]
	}
	return nil
}
