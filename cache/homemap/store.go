// Package homemap is a volume's map of what is in the bucket: which object holds
// each range of the volume, at exactly the object watermark. Its pages are cached in
// memory under a budget that all volumes share, and lie in a Store behind it. The
// store holds nothing that the bucket does not hold too. DESIGN.md states the
// invariants.
package homemap

import (
	"errors"

	"github.com/google/uuid"
)

// Errors.
var (
	// ErrDamaged: the store, or a record in it, is not what was written. The caller
	// wipes the store and rebuilds the maps from the bucket.
	ErrDamaged = errors.New("homemap: store is damaged")
	// ErrLocked: another process uses the store.
	ErrLocked = errors.New("homemap: store is in use by another process")
	// ErrNoSpace: the file system has less free space than the reserve. Nothing was
	// written; the call may be repeated.
	ErrNoSpace = errors.New("homemap: file system is below its reserve of free space")
	// ErrClosed: the map or the store was closed.
	ErrClosed = errors.New("homemap: closed")
	// ErrNotCheckpointed: a snapshot was asked for, and the map has changed since its
	// last checkpoint.
	ErrNotCheckpointed = errors.New("homemap: map has changed since its last checkpoint")
)

// Table names the records of a volume.
type Table byte

// The tables. Keys are numbers within the table.
const (
	Pages    Table = 'p' // one page each
	Presence Table = 'b' // which pages are valid, 32768 each
	Meta     Table = 'm' // record 0: position, blob, coarse ranges
)

// Record is one change of a Batch. A nil Value deletes the key.
type Record struct {
	Table Table
	Key   uint64
	Value []byte
}

// Limits of a Batch.
const (
	MaxBatchBytes   = 4 << 20 // as Batch.Bytes counts
	MaxBatchRecords = 16384
	maxValueBytes   = 1<<20 - 1024
	recordOverhead  = 96
)

// Batch is a set of changes of one volume that become durable together.
type Batch struct {
	Records []Record
	buf     []byte
	bytes   int
}

// Bytes is the size that counts against MaxBatchBytes.
func (b *Batch) Bytes() int { return b.bytes }

// Fits reports whether a value of n bytes still fits.
func (b *Batch) Fits(n int) bool {
	return len(b.Records) < MaxBatchRecords && b.bytes+n+recordOverhead <= MaxBatchBytes
}

func (b *Batch) reset() { b.Records, b.buf, b.bytes = b.Records[:0], b.buf[:0], 0 }

// put adds a record whose value encode appends to the buffer that it gets.
func (b *Batch) put(t Table, key uint64, encode func([]byte) []byte) {
	at := len(b.buf)
	b.buf = encode(b.buf)
	v := b.buf[at:len(b.buf):len(b.buf)]
	b.Records = append(b.Records, Record{t, key, v})
	b.bytes += len(v) + recordOverhead
}

func (b *Batch) delete(t Table, key uint64) {
	b.Records = append(b.Records, Record{t, key, nil})
	b.bytes += recordOverhead
}

// Reader reads the records of volumes. Concurrent calls are allowed.
type Reader interface {
	// Get appends the value of a record to dst. ok is false if there is none.
	Get(volume uuid.UUID, t Table, key uint64, dst []byte) (value []byte, ok bool, err error)

	// Scan calls fn for the records of a table with a key of at least from, in
	// ascending order, until fn returns false or an error. value is valid during the
	// call, and nil if keysOnly.
	Scan(volume uuid.UUID, t Table, from uint64, keysOnly bool, fn func(key uint64, value []byte) (bool, error)) error
}

// View is a Reader of the state at one moment, for as long as it is not closed.
type View interface {
	Reader
	Close()
}

// Store keeps records durably. Concurrent calls are allowed. Errors are ErrDamaged,
// ErrNoSpace, ErrClosed, or of the operating system; a failed write (other than
// ErrNoSpace) is final: each later one fails.
type Store interface {
	Reader

	// Apply makes the batch durable, all of it or nothing, and returns then. Batches
	// become durable in the order of the calls: what a crash leaves is a prefix of
	// them. The batch is not kept.
	Apply(volume uuid.UUID, b *Batch) error

	// Drop removes the volume's records. If it is interrupted, no meta record is left.
	Drop(volume uuid.UUID) error

	// Volumes lists the volumes that have a meta record.
	Volumes() ([]uuid.UUID, error)

	// View opens a view.
	View() (View, error)

	// Close releases the store.
	Close() error
}
