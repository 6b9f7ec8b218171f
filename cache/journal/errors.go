package journal

import (
	"errors"
	"fmt"
)

var (
	// ErrFailed is returned for ever after the first failed write or sync of a segment. It wraps the cause. What was
	// not reported as synced may or may not be found at the next Open.
	ErrFailed = errors.New("journal: device failed")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("journal: closed")
	// ErrFull is returned when something that must not wait for space (Fence, Note, Seal) finds none.
	ErrFull = errors.New("journal: full")
	// ErrTooLarge is returned for a payload above Options.MaxEntryBytes.
	ErrTooLarge = errors.New("journal: entry too large")
	// ErrInvalid is returned for an entry or location that breaks the rules; nothing was done.
	ErrInvalid = errors.New("journal: invalid argument")
	// ErrReleased is returned for reads of a segment that was released and is not pinned.
	ErrReleased = errors.New("journal: segment was released")
	// ErrCorrupt marks damage on the device: bytes that were synced and are not what they were. Every
	// *CorruptError is one.
	ErrCorrupt = errors.New("journal: damaged")
	// ErrVersion is returned by Open for a journal that another version of the program wrote.
	ErrVersion = errors.New("journal: format of another version of the program")
	// ErrGeometry is returned by Open when the segments on the device have another size than Options.SegmentBytes.
	ErrGeometry = errors.New("journal: segment size differs")
	// ErrActive is returned by Release for the segment that is being written.
	ErrActive = errors.New("journal: segment is active")
)

// CorruptError names a damaged place. It Is ErrCorrupt.
type CorruptError struct {
	Path    string // of the segment file; the directory if no file can be named
	Segment uint64 // generation of the segment; 0 if unknown
	Block   uint32 // 4 KiB block within the file
	Detail  string
}

// Error says what is damaged.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("journal: damaged: %s, generation %d, block %d: %s", e.Path, e.Segment, e.Block, e.Detail)
}

// Is reports whether target is ErrCorrupt.
func (e *CorruptError) Is(target error) bool { return target == ErrCorrupt }

// advice ends the message of an Open that refuses.
const advice = "; nothing was changed: copy the directory, look for device errors in the system log, " +
	"and restore the file from a copy, or move the directory away and reopen the volumes from the bucket, " +
	"which loses what was acknowledged and not yet in it"
