package scsi

import (
	"encoding/binary"
	"time"
)

// The persistence contract in SCSI form: VPD page C0h (one snapshot) and log page 36h
// (the same as log parameters). DESIGN.md draws both byte by byte.

const (
	persistenceVersion = 1
	persistenceLen     = 92 // VPD page C0h without its header
)

// Flags of the persistence pages.
const (
	persistenceMet        = 0x01 // the policy's levels are reached
	persistenceWriteCache = 0x02 // WCE
)

// milliseconds is t as milliseconds since 1970-01-01 UTC, and 0 for the zero time.
func milliseconds(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 0))
}

func persistenceFlags(c Contract) byte {
	var f byte
	if c.Met {
		f |= persistenceMet
	}
	if cachingFacts(c).writeCache {
		f |= persistenceWriteCache
	}
	return f
}

func appendWatermark(b []byte, w Watermark) []byte {
	b = binary.BigEndian.AppendUint64(b, w.LSN)
	return binary.BigEndian.AppendUint64(b, milliseconds(w.Time))
}

// persistencePage is VPD page C0h without its header.
func persistencePage(c Contract) []byte {
	b := make([]byte, 0, persistenceLen)
	b = append(b, persistenceVersion, byte(c.Ack), byte(c.Flush), c.OnUnmet, persistenceFlags(c))
	b = append(b, make([]byte, 7)...)
	b = binary.BigEndian.AppendUint64(b, c.Epoch)
	b = binary.BigEndian.AppendUint64(b, c.Generation)
	for _, w := range []Watermark{c.Acked, c.Local, c.Quorum, c.Object} {
		b = appendWatermark(b, w)
	}
	return b
}

// Codes of the log parameters of page 36h.
const (
	logPolicy     = 0x0000
	logEpoch      = 0x0001
	logGeneration = 0x0002
	logAcked      = 0x0010
	logLocal      = 0x0011
	logQuorum     = 0x0012
	logObject     = 0x0013
)

// logParameter is one parameter of a log page, value only.
type logParameter struct {
	code  uint16
	value []byte
}

func persistenceLog(c Contract) []logParameter {
	u64 := func(v uint64) []byte { return binary.BigEndian.AppendUint64(nil, v) }
	mark := func(w Watermark) []byte { return appendWatermark(nil, w) }
	return []logParameter{
		{logPolicy, []byte{byte(c.Ack), byte(c.Flush), c.OnUnmet, persistenceFlags(c)}},
		{logEpoch, u64(c.Epoch)},
		{logGeneration, u64(c.Generation)},
		{logAcked, mark(c.Acked)},
		{logLocal, mark(c.Local)},
		{logQuorum, mark(c.Quorum)},
		{logObject, mark(c.Object)},
	}
}
