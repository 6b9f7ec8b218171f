package objectstore

import (
	"errors"
	"strings"
)

// Sentinel errors. Test with errors.Is; never on text. Each belongs to one Class.
var (
	// ErrNotFound: the key is not in the bucket, and the bucket was there to ask.
	ErrNotFound = errors.New("objectstore: no such object")
	// ErrExists: a conditional put found the key taken (412). After an attempt of
	// unknown outcome the object may be the caller's own: read it back and compare
	// the writer's identity before deciding.
	ErrExists = errors.New("objectstore: object exists")
	// ErrTransient: the store could not be reached or could not serve the request now.
	// Nothing was written by the call.
	ErrTransient = errors.New("objectstore: store unavailable")
	// ErrUnknown: the outcome of a write is not known (time-out, cut connection, 5xx).
	ErrUnknown = errors.New("objectstore: outcome unknown")
	// ErrTooLarge: the object is larger than the limit the caller gave, or than the
	// store takes.
	ErrTooLarge = errors.New("objectstore: object too large")
	// ErrCorrupt: bytes came back that are not what was written.
	ErrCorrupt = errors.New("objectstore: object is corrupt")
	// ErrDenied: the store refused the credentials or their rights, or there are none.
	ErrDenied = errors.New("objectstore: access denied")
	// ErrFull: no space or no quota is left.
	ErrFull = errors.New("objectstore: store is full")
	// ErrWrongRegion: the bucket lives in another region or under another endpoint.
	ErrWrongRegion = errors.New("objectstore: wrong region")
	// ErrClockSkew: the store refuses requests because the clocks differ too much.
	ErrClockSkew = errors.New("objectstore: clocks differ too much")
	// ErrUnsupported: the store does not implement the request.
	ErrUnsupported = errors.New("objectstore: store does not support this")
	// ErrNoConditionalPut: the store ignores or refuses If-None-Match, so it cannot
	// keep two writers apart. Returned by Probe.
	ErrNoConditionalPut = errors.New("objectstore: store has no conditional writes")
	// ErrNoBucket: the bucket itself does not exist. Never confused with ErrNotFound:
	// a missing bucket is not an empty one.
	ErrNoBucket = errors.New("objectstore: no such bucket")
	// ErrInvalid: the request can never succeed as it is (bad key, bad URL, bad argument).
	ErrInvalid = errors.New("objectstore: invalid request")
	// ErrClosed: the Bucket was closed.
	ErrClosed = errors.New("objectstore: bucket is closed")
)

// Op names a method of Bucket in errors, metrics and injected faults.
type Op string

// The operations, one per method of Bucket that reaches the store.
const (
	OpPut      Op = "put"
	OpGet      Op = "get"
	OpGetRange Op = "get_range"
	OpHead     Op = "head"
	OpList     Op = "list"
	OpDelete   Op = "delete"
)

// opError says which operation on which key failed, with one sentinel and the cause.
type opError struct {
	op       Op
	key      string
	sentinel error
	cause    error // may be nil
}

// fail builds an opError.
func fail(op Op, key string, sentinel, cause error) error {
	return &opError{op: op, key: key, sentinel: sentinel, cause: cause}
}

func (e *opError) Error() string {
	var b strings.Builder
	b.WriteString("objectstore: ")
	b.WriteString(string(e.op))
	if e.key != "" {
		b.WriteString(" ")
		b.WriteString(e.key)
	}
	b.WriteString(": ")
	b.WriteString(strings.TrimPrefix(e.sentinel.Error(), "objectstore: "))
	if e.cause != nil {
		b.WriteString(": ")
		b.WriteString(e.cause.Error())
	}
	return b.String()
}

func (e *opError) Unwrap() []error {
	if e.cause == nil {
		return []error{e.sentinel}
	}
	return []error{e.sentinel, e.cause}
}
