// Package extent holds the interval structures that say where each sector of a
// volume lives. They are free of pointers inside, so that millions of extents
// cost the garbage collector nothing. DESIGN.md states the invariants.
//
// The unit everywhere is the sector of 512 bytes.
package extent

import (
	"errors"
	"fmt"
)

// Units and limits.
const (
	SectorSize  = 512       // bytes
	MaxSectors  = 1 << 37   // the largest volume: 64 TiB
	PageShift   = 13        // a page covers 1<<PageShift sectors
	PageSectors = 1 << 13   // 8192 sectors, 4 MiB
	PageBytes   = 4 << 20   // of volume address space
	MaxPages    = 1 << 24   // of the largest volume
	pageMask    = 1<<13 - 1 // sector within its page
)

// Errors.
var (
	// ErrInvalid: an extent is outside of the limits of this package.
	ErrInvalid = errors.New("extent: invalid extent")
	// ErrCorrupt: bytes are not an encoded page, or not the page asked for.
	ErrCorrupt = errors.New("extent: page is corrupt")
	// ErrVersion: the page was encoded by a version that this one does not know.
	ErrVersion = errors.New("extent: page has an unknown version")
)

// Kind says what an extent holds. The values are durable.
type Kind uint8

// The kinds of extents.
const (
	Data Kind = 1 // bytes at Loc, one after the other
	Zero Kind = 2 // zeros: written as such, or deallocated
	Same Kind = 3 // the block at Loc, repeated
)

// String names the kind.
func (k Kind) String() string {
	switch k {
	case Data:
		return "data"
	case Zero:
		return "zero"
	case Same:
		return "same"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Location is where an extent's payload lies.
//
// In the journal: Ref is the segment's generation, Sector the offset of the data
// in the segment's payload space; Epoch and Header are 0. In the bucket: Ref is the
// object's sequence number, Epoch its epoch, Header the length of its header in
// 4-KiB blocks, and Sector the offset in its payload.
type Location struct {
	Ref    uint64
	Epoch  uint32
	Sector uint32 // unit: 512 bytes
	Header uint16 // unit: 4 KiB
	Block  uint8  // Same: sectors of the repeated block, 1 or 8; else 0
}

// Extent is a range of a volume with one origin.
type Extent struct {
	Start   uint64 // first sector
	Sectors uint64 // length, > 0
	LSN     uint64 // of the write that it comes from
	Loc     Location
	Kind    Kind
}

// End is the first sector behind e.
func (e Extent) End() uint64 { return e.Start + e.Sectors }

// Validate reports whether e may be inserted. Whoever decodes extents from disk or
// network calls it first: the structures of this package panic on invalid ones.
func (e Extent) Validate() error {
	switch {
	case e.Sectors == 0 || e.Sectors > MaxSectors || e.Start > MaxSectors-e.Sectors:
		return fmt.Errorf("%w: sectors %d+%d", ErrInvalid, e.Start, e.Sectors)
	case e.Kind == Data && (e.Loc.Block != 0 || e.Sectors > 1<<32-uint64(e.Loc.Sector)):
		return fmt.Errorf("%w: data of %d sectors at payload sector %d", ErrInvalid, e.Sectors, e.Loc.Sector)
	case e.Kind == Same && e.Loc.Block != 1 && e.Loc.Block != 8:
		return fmt.Errorf("%w: repeated block of %d sectors", ErrInvalid, e.Loc.Block)
	case e.Kind < Data || e.Kind > Same:
		return fmt.Errorf("%w: %v", ErrInvalid, e.Kind)
	}
	return nil
}

// Part is the part of e that covers the sectors from start on, n of them, which must
// lie within e. The location of Data moves on; that of Same does not, because its
// phase follows from the address: see Phase.
func (e Extent) Part(start, n uint64) Extent {
	if e.Kind == Data {
		e.Loc.Sector += uint32(start - e.Start)
	}
	e.Start, e.Sectors = start, n
	return e
}

// Phase is, for Same, the sector of the repeated block that stands at e.Start. The
// block repeats at the multiples of its length from the volume's start.
func (e Extent) Phase() uint64 {
	if e.Loc.Block == 0 {
		return 0
	}
	return e.Start % uint64(e.Loc.Block)
}

// joins reports whether b continues a: they touch, come from one write, and their
// payloads follow each other.
func joins(a, b *Extent) bool {
	if a.End() != b.Start || a.LSN != b.LSN || a.Kind != b.Kind {
		return false
	}
	loc := a.Loc
	if a.Kind == Data {
		if uint64(loc.Sector)+a.Sectors > 1<<32-1 {
			return false
		}
		loc.Sector += uint32(a.Sectors)
	}
	return loc == b.Loc
}

// Append appends e to list and joins it with the last element if it continues it,
// provided that element has at least index from.
func Append(list []Extent, from int, e Extent) []Extent {
	if n := len(list); n > from && joins(&list[n-1], &e) {
		list[n-1].Sectors += e.Sectors
		return list
	}
	return append(list, e)
}
