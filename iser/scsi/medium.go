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
	Blocks        uint64 // capacity in logical blocks
	BlockSize     uint32 // bytes: 512 or 4096
	PhysicalSize  uint32 // bytes of the unit that is written without a read: 4096
	OptimalBlocks uint32 // preferred transfer, in logical blocks
}

// Identity names a logical unit for life: the same on every path and every node.
type Identity struct {
	UUID   [16]byte
	Serial string // at most 36 ASCII characters
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
// An error that Is one of the sentinels below becomes the sense data that fits; any other error
// becomes ABORTED COMMAND, which initiators retry.
type Medium interface {
	Geometry() Geometry
	Contract() Contract

	// Reserve waits until the write fits (back-pressure acts here, and only here)
	// and returns the memory in which the initiator's bytes are to land. The extent
	// lies within the geometry and holds at least one block.
	Reserve(ctx context.Context, e Extent) (Landing, error)

	// Read returns the blocks of e. The buffers stay valid until Release.
	Read(ctx context.Context, e Extent) (Borrowed, error)

	// Deallocate unmaps the extents: metadata only, any size. They read as zeros.
	// It returns when the ack level (flush level if fua) is reached.
	Deallocate(ctx context.Context, e []Extent, fua bool) error

	// WriteSame writes block (one logical block) to every block of e: metadata
	// and one payload block only, any size.
	WriteSame(ctx context.Context, e Extent, block []byte, fua bool) error

	// Flush returns when everything acknowledged before the call has reached the flush level.
	Flush(ctx context.Context) error

	// Mapped reports whether the blocks from lba on are backed by data, and for how many
	// blocks (at least 1, at most max) that holds.
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
	// Commit returns when the level due is reached: ack, or flush if fua. A cancelled ctx ends the
	// waiting only: the write may still take effect.
	Commit(ctx context.Context, fua bool) error
	// Abort gives the reservation back; nothing was written.
	Abort()
}

// Borrowed is memory lent to a reader.
type Borrowed interface {
	Buffers() [][]byte
	Release()
}
