package pdu

import (
	"encoding/binary"
	"hash/crc32"
)

// DigestLen is the length in bytes of a header or data digest.
const DigestLen = 4

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest continues a CRC32C over p; start with crc 0. The header digest covers the BHS
// and all AHS, the data digest covers the data segment and its padding (RFC 7143, 11.2.3).
func Digest(crc uint32, p []byte) uint32 { return crc32.Update(crc, castagnoli, p) }

// HeaderDigest returns the digest over the BHS and the encoded AHS.
func HeaderDigest(h *Header, ahs []byte) uint32 {
	return Digest(Digest(0, h[:]), ahs)
}

var zeros [4]byte

// PadDigest continues a digest over the zero padding that follows a data segment of n bytes.
// A receiver digests the padding it received instead.
func PadDigest(crc uint32, n int) uint32 {
	if p := Padding(n); p > 0 {
		return Digest(crc, zeros[:p])
	}
	return crc
}

// Padding returns the number of bytes, 0 to 3, that pad n bytes to a multiple of 4.
func Padding(n int) int { return -n & 3 }

// AppendDigest appends a digest in wire order. The CRC's bit order on the wire makes
// it the one little-endian value of iSCSI (RFC 7143, 13.1).
func AppendDigest(b []byte, crc uint32) []byte { return binary.LittleEndian.AppendUint32(b, crc) }

// DigestAt reads a digest in wire order.
func DigestAt(b *[DigestLen]byte) uint32 { return binary.LittleEndian.Uint32(b[:]) }
