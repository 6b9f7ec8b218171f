// Package pdu encodes and decodes the protocol data units of iSCSI (RFC 7143).
//
// A PDU on the wire is
//
//	basic header segment (BHS)     48 bytes, Header
//	additional header segments     TotalAHSLength words of 4 bytes, AHS
//	header digest                  4 bytes, if CRC32C was negotiated
//	data segment                   DataSegmentLength bytes, padded with zeros to a multiple of 4
//	data digest                    4 bytes, if CRC32C was negotiated and the data segment is not empty
//
// and all integers are big-endian. The package owns the first two, the text keys that login and
// text PDUs carry in the data segment, and the digest arithmetic. It does no I/O, and the data
// segment is not part of the codec: a transport lets it land where it belongs.
//
// For each kind of PDU there is a struct whose Encode writes all 48 bytes of a Header and whose
// Decode reads them. Encode leaves TotalAHSLength and DataSegmentLength zero; the sender
// of the frame sets them with SetAHSLength and SetDataLength. Encode does not judge its fields, so that
// conformance tests can send nonsense. Decode ignores reserved bits and fields, as section 11.1 asks,
// and returns an error that Is ErrFormat where the RFC calls a combination of fields a format
// error. Neither allocates.
package pdu
