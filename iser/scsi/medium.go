package scsi

import (
	"context"
	"time"
)

// Extent is a range of logical blocks.
type Extent struct {
	LBA    uint64
	Blocks uint64
}

// Geometry is what a logical unit reports of its medium. It may grow while the
// unit is in use; it never shrinks.
type Geometry struct {
	Blocks        uint64 // capacity in logical blocks; at least 1
	BlockSize     uint32 // bytes: 512 or 4096; never changes
	PhysicalSize  uint32 // bytes of the unit that is written without a read: 4096
	OptimalBlocks uint32 // preferred transfer, in logical blocks; 0: none
}

// Identity names a logical unit for life: the same on every path and every node.
type Identity struct {
	UUID   [16]byte
	Serial string // at most 36 ASCII characters; empty: made from UUID
}

// Level is a persistence level, weakest first.
type Level uint8

// The persistence levels. Their numbers are part of the vendor-specific SCSI pages.
const (
	LevelMemory Level = 1
	LevelLocal  Level = 2
	LevelQuorum Level = 3
	LevelObject Level = 4
)

// Watermark is the highest LSN below which every write has reached a level, and when
// that LSN reached it (zero: never).
type Watermark struct {
	LSN  uint64
	Time time.Time
}

// Contract is all that SCSI reports about persistence. It is a snapshot.
type Contract struct {
	Ack, Flush Level // Flush >= Ack
	OnUnmet    uint8 // 0 block, 1 error, 2 degrade
	Met        bool  // false while the policy's levels are not reached (degraded or blocked)
	Epoch      uint64
	Generation uint64

	Acked, Local, Quorum, Object Watermark
}

// WriteCache reports WCE: a plain write may be acknowledged below the level that a
// flush reaches.
func (c Contract) WriteCache() bool { return c.Ack < c.Flush }

// Medium is what a logical unit stands on. Methods may be called concurrently.
// An error that Is one of this package's sentinels becomes the sense data that fits;
// any other error becomes ABORTED COMMAND, which initiators retry. Extents lie within
// the geometry and hold at least one block.
//
// Changes take effect in one order, the same for every reader. A method that makes a
// change returns only when later calls of Read and Mapped see it, or when it can no
// longer take effect: a cancelled ctx cuts short the wait for a persistence level,
// not that one. COMPARE AND WRITE relies on it.
type Medium interface {
	Geometry() Geometry
	Contract() Contract

	// Reserve waits until the write fits (back-pressure acts here, and only here)
	// and returns the memory in which the initiator's bytes are to land: at most
	// MaxLanding bytes.
	Reserve(ctx context.Context, e Extent) (Landing, error)

	// Read returns the blocks of e. The buffers stay valid until Release.
	Read(ctx context.Context, e Extent) (Borrowed, error)

	// Deallocate unmaps the extents: metadata only, any size. They read as zeros.
	// It returns when the level due is reached: ack, or flush if fua.
	Deallocate(ctx context.Context, e []Extent, fua bool) error

	// WriteSame writes block (one logical block, not kept) to every block of e:
	// metadata and one payload block only, any size. It returns when the level due
	// is reached.
	WriteSame(ctx context.Context, e Extent, block []byte, fua bool) error

	// Flush returns when everything acknowledged or readable before the call has
	// reached the flush level.
	Flush(ctx context.Context) error

	// Mapped reports whether the blocks from lba on are backed by data, and for how
	// many blocks (at least 1, at most max) that holds.
	Mapped(ctx context.Context, lba, max uint64) (mapped bool, blocks uint64, err error)

	// SetWriteCache is MODE SELECT of WCE: false raises ack to flush, durably; true
	// restores the configured ack.
	SetWriteCache(ctx context.Context, enabled bool) error
}

// Landing is the journal's own memory for one write. Exactly one of Commit and
// Abort ends it; after that the buffers must not be touched.
type Landing interface {
	// Buffers are page-aligned; together they are exactly the extent's bytes.
	Buffers() [][]byte
	// Commit returns when the level due is reached: ack, or flush if fua. A cancelled
	// ctx ends the wait for the level only: the write may have taken effect, and if
	// so it is visible to every Read that follows.
	Commit(ctx context.Context, fua bool) error
	// Abort gives the reservation back; nothing was written.
	Abort()
}

// Borrowed is memory lent to a reader.
type Borrowed interface {
	// Buffers are, together, exactly the extent's bytes. They are read-only.
	Buffers() [][]byte
	// Release ends the loan; the buffers must not be touched after it.
	Release()
}
