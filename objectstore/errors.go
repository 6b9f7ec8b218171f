package objectstore

import "errors"

// Sentinel errors. Test with errors.Is; never on text.
var (
	// ErrNotFound: the key is not in the bucket.
	ErrNotFound = errors.New("objectstore: no such object")
	// ErrExists: a conditional put found the key taken (412). After an attempt of
	// unknown outcome the object may be the caller's own: read it back and compare
	// the writer's identity before deciding.
	ErrExists = errors.New("objectstore: object exists")
	// ErrUnknown: the outcome of a write is not known (time-out, cut connection).
	ErrUnknown = errors.New("objectstore: outcome unknown")
	// ErrTooLarge: the object is larger than the limit the caller gave.
	ErrTooLarge = errors.New("objectstore: object too large")
	// ErrCorrupt: bytes came back that are not what was written.
	ErrCorrupt = errors.New("objectstore: object is corrupt")
)
