package volumelog

import (
	"errors"
	"fmt"
	"strings"

	"github.com/isergate/isergate/objectstore"
)

// Sentinel errors. Test with errors.Is. Damage found in the bucket always Is
// objectstore.ErrCorrupt; a transient failure of the store is passed on as it came.
var (
	// ErrFenced: a newer owner has closed this epoch, or the volume is already at this epoch or a
	// newer one. Final: nothing that this writer puts from here on is in the log.
	ErrFenced = errors.New("volumelog: a newer owner has fenced this epoch")
	// ErrEpochTaken: another writer has opened the epoch first. The caller may take
	// the next one, with a new identity.
	ErrEpochTaken = errors.New("volumelog: another writer has opened this epoch")
	// ErrSuperseded: the log goes on in a higher generation: the volume was restored
	// elsewhere or has given writes up. Final for this generation; nothing was fenced in the other one.
	ErrSuperseded = errors.New("volumelog: the volume goes on in a newer generation")
	// ErrAhead: the bucket holds writes that the caller does not have (its journal is
	// older than the bucket). The epoch was not opened; restore from the bucket instead.
	ErrAhead = errors.New("volumelog: the bucket holds writes that this node does not have")
	// ErrGap: objects are missing in the middle of the log. It Is objectstore.ErrCorrupt.
	ErrGap = fmt.Errorf("volumelog: the log has a gap: %w", objectstore.ErrCorrupt)
	// ErrConflict: this writer has put two different objects under one sequence
	// number, or LSNs that do not join. A fault of the caller; final.
	ErrConflict = errors.New("volumelog: objects of this writer contradict each other")
	// ErrVersion: the object is whole, of a version that this program does not know.
	ErrVersion = errors.New("volumelog: written by another version of the program")
	// ErrUnsupported: the object is whole and uses compression or encryption that
	// this program does not have.
	ErrUnsupported = errors.New("volumelog: compression or encryption not supported")
	// ErrNoVolume: the bucket has no such volume.
	ErrNoVolume = errors.New("volumelog: no such volume in the bucket")
	// ErrAmbiguous: several volumes in the bucket have the name.
	ErrAmbiguous = errors.New("volumelog: the name is not unique in the bucket")
	// ErrInvalid: an argument is out of range.
	ErrInvalid = errors.New("volumelog: invalid argument")
)

// ErrShort says that a header is longer than the bytes that were given.
type ErrShort struct {
	Need int // bytes from the start of the object that must be given, at most MaxHeader
}

func (e ErrShort) Error() string { return fmt.Sprintf("volumelog: header needs %d bytes", e.Need) }

// about says what was being done with a key when an error occurred, unless the error says so already: those of a Bucket name operation and key.
func about(what, key string, err error) error {
	text := err.Error()
	switch {
	case !strings.Contains(text, key):
		return fmt.Errorf("volumelog: %s %s: %w", what, key, err)
	case strings.HasPrefix(text, "volumelog: "):
		return err
	}
	return fmt.Errorf("volumelog: %w", err)
}

func corruptf(format string, args ...any) error {
	return fmt.Errorf("volumelog: "+format+": %w", append(args, objectstore.ErrCorrupt)...)
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
