// Package oracle decides whether a volume kept its promises over a crash: every acknowledged write at its level, and a prefix
// of the order in which writes took effect. DESIGN.md explains the algorithm.
package oracle

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
)

// BlockSize is the oracle's block in bytes.
const BlockSize = 4096

// anyBlock is the block number in the stamp of a write-same.
const anyBlock = ^uint64(0)

// stampHeader is the length of a stamp before its body.
const stampHeader = 56

var magic = [8]byte{'i', 's', 'g', 'o', 'r', 'c', 'l', '1'}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Volume identifies what is under test.
type Volume [16]byte

// stamp is the identity of a block's content.
type stamp struct {
	volume Volume
	block  uint64
	seq    uint64
	seed   uint64
}

// encode fills b, whose length is 4096 or a logical block of at least 512 bytes.
func (s stamp) encode(b []byte) {
	copy(b, magic[:])
	copy(b[8:], s.volume[:])
	le := binary.LittleEndian
	le.PutUint64(b[24:], s.block)
	le.PutUint64(b[32:], s.seq)
	le.PutUint64(b[40:], s.seed)
	le.PutUint64(b[48:], uint64(len(b)))
	x := s.seed ^ s.seq*0x9e3779b97f4a7c15 ^ s.block*0xbf58476d1ce4e5b9
	for i := stampHeader; i < len(b); i += 8 {
		x += 0x9e3779b97f4a7c15 // splitmix64
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		le.PutUint64(b[i:], z^z>>31)
	}
	le.PutUint32(b[len(b)-4:], crc32.Checksum(b[:len(b)-4], castagnoli))
}

// decode reads the stamp of a block of BlockSize bytes. It is false unless the block is a whole stamp, or equal copies of one.
func decode(b []byte) (s stamp, ok bool) {
	if len(b) != BlockSize || !bytes.Equal(b[:8], magic[:]) {
		return s, false
	}
	le := binary.LittleEndian
	n := le.Uint64(b[48:])
	if n != BlockSize && (n < 512 || n > BlockSize || n&(n-1) != 0) {
		return s, false
	}
	first := b[:n]
	if le.Uint32(first[n-4:]) != crc32.Checksum(first[:n-4], castagnoli) {
		return s, false
	}
	for rest := b[n:]; len(rest) > 0; rest = rest[n:] {
		if !bytes.Equal(rest[:n], first) {
			return s, false
		}
	}
	copy(s.volume[:], b[8:])
	s.block = le.Uint64(b[24:])
	s.seq = le.Uint64(b[32:])
	s.seed = le.Uint64(b[40:])
	return s, true
}

var zeroBlock [BlockSize]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeroBlock[:len(b)]) }
