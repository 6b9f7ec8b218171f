package objectstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/zeebo/xxh3"
)

// A file of a directory bucket, little-endian:
//
//	payload        length bytes
//	table          4 bytes for each 64 KiB of payload, the last one maybe shorter:
//	               the low half of their XXH3
//	footer         32 bytes
//	  0  magic       4  "iGdo"
//	  4  version     2  2
//	  6  reserved    2  0
//	  8  length      8  bytes of payload
//	 16  key CRC     4  CRC32C of the object's key: a file under a wrong name is found
//	 20  table CRC   4  CRC32C of the table
//	 24  reserved    4  0
//	 28  footer CRC  4  CRC32C of the 28 bytes before
//
// The size of the file determines the length, so that a listing need not open it.
const (
	dirMagic      = "iGdo"
	dirVersion    = 2
	dirChunk      = 64 << 10
	dirFooterSize = 32
	// maxDirObject is the largest payload, as of S3's single put.
	maxDirObject = 5 << 30
)

// castagnoli is for table and footer. The payload has another checksum: what ends with its own CRC32C, as file systems and
// databases write it, has the CRC32C of all such data.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func dirSum(chunk []byte) uint32 { return uint32(xxh3.Hash(chunk)) }

func crc32c(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// dirFileSize returns the size of the file for a payload of length bytes.
func dirFileSize(length int64) int64 {
	return length + 4*dirChunks(length) + dirFooterSize
}

// dirChunks returns the number of table entries for a payload of length bytes.
func dirChunks(length int64) int64 { return (length + dirChunk - 1) / dirChunk }

// dirPayloadSize is the inverse of dirFileSize; ok is false when no payload gives a
// file of this size.
func dirPayloadSize(fileSize int64) (length int64, ok bool) {
	rest := fileSize - dirFooterSize
	if rest < 0 || rest > maxDirObject+4*dirChunks(maxDirObject) {
		return 0, false
	}
	length = rest - 4*((rest+dirChunk+3)/(dirChunk+4))
	return length, length >= 0 && dirFileSize(length) == fileSize
}

// encodeDirTrailer returns table and footer for the payload of key.
func encodeDirTrailer(key string, payload []byte) []byte {
	out := make([]byte, 0, 4*dirChunks(int64(len(payload)))+dirFooterSize)
	for rest := payload; len(rest) > 0; {
		n := min(len(rest), dirChunk)
		out = binary.LittleEndian.AppendUint32(out, dirSum(rest[:n]))
		rest = rest[n:]
	}
	table := out
	out = append(out, dirMagic...)
	out = binary.LittleEndian.AppendUint16(out, dirVersion)
	out = binary.LittleEndian.AppendUint16(out, 0)
	out = binary.LittleEndian.AppendUint64(out, uint64(len(payload)))
	out = binary.LittleEndian.AppendUint32(out, crc32c([]byte(key)))
	out = binary.LittleEndian.AppendUint32(out, crc32c(table))
	out = binary.LittleEndian.AppendUint32(out, 0)
	return binary.LittleEndian.AppendUint32(out, crc32c(out[len(table):]))
}

// errDirVersion: another version wrote the file.
var errDirVersion = errors.New("written in another version of the format")

// decodeDirTrailer checks table and footer of a file of fileSize bytes and returns
// the payload's length and the table. trailer starts at the payload's end, which
// dirPayloadSize gives.
func decodeDirTrailer(key string, fileSize int64, trailer []byte) (length int64, table []byte, err error) {
	length, ok := dirPayloadSize(fileSize)
	if !ok || int64(len(trailer)) != fileSize-length {
		return 0, nil, fmt.Errorf("%w: no object has a file of %d bytes", ErrCorrupt, fileSize)
	}
	table, footer := trailer[:len(trailer)-dirFooterSize], trailer[len(trailer)-dirFooterSize:]
	if string(footer[:4]) != dirMagic {
		return 0, nil, fmt.Errorf("%w: bad magic", ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(footer[4:]); v != dirVersion {
		return 0, nil, fmt.Errorf("%w: %w (%d, this one knows %d)", ErrUnsupported, errDirVersion, v, dirVersion)
	}
	switch {
	case binary.LittleEndian.Uint32(footer[28:]) != crc32c(footer[:28]):
		return 0, nil, fmt.Errorf("%w: footer checksum", ErrCorrupt)
	case binary.LittleEndian.Uint16(footer[6:]) != 0, binary.LittleEndian.Uint32(footer[24:]) != 0:
		return 0, nil, fmt.Errorf("%w: a reserved field is used: %w", ErrUnsupported, errDirVersion)
	case binary.LittleEndian.Uint64(footer[8:]) != uint64(length):
		return 0, nil, fmt.Errorf("%w: footer says %d bytes, the file holds %d", ErrCorrupt, binary.LittleEndian.Uint64(footer[8:]), length)
	case binary.LittleEndian.Uint32(footer[16:]) != crc32c([]byte(key)):
		return 0, nil, fmt.Errorf("%w: the file belongs to another key", ErrCorrupt)
	case binary.LittleEndian.Uint32(footer[20:]) != crc32c(table):
		return 0, nil, fmt.Errorf("%w: table checksum", ErrCorrupt)
	}
	return length, table, nil
}

// checkDirChunk compares one whole chunk with the table.
func checkDirChunk(table []byte, index int64, chunk []byte) error {
	if binary.LittleEndian.Uint32(table[4*index:]) != dirSum(chunk) {
		return fmt.Errorf("%w: checksum of bytes %d to %d", ErrCorrupt, index*dirChunk, index*dirChunk+int64(len(chunk)))
	}
	return nil
}
