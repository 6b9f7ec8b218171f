// Package objectstore is the way to an S3-compatible store: one small Bucket
// interface, its backends (s3, dir, mem), and decorators over it.
//
// It is the only package that imports the AWS SDK. It knows keys and bytes; what
// the objects of a volume mean is package volumelog's.
package objectstore

import (
	"context"
	"time"
)

// Info describes one object.
type Info struct {
	Key      string
	Size     int64     // bytes
	Modified time.Time // by the store's clock; for people, never for decisions
}

// Bucket is a flat namespace of immutable objects. Keys are UTF-8 without a
// leading slash, relative to the prefix that the URL named.
//
// All methods may be called concurrently. Errors are classified by Classify; a
// method returns an error that Is one of the sentinels of this package whenever the
// class is known. No method retries by itself unless the bucket was wrapped to.
type Bucket interface {
	// PutIfAbsent creates key with body and returns once the store has it durably.
	// It returns ErrExists if the key is there, and ErrUnknown (or another transient error)
	// when it cannot tell: the object may or may not have been created, by
	// this call or an earlier attempt of it. body is not kept.
	PutIfAbsent(ctx context.Context, key string, body []byte) error

	// Get returns the whole object, or ErrNotFound. limit bounds its size in bytes;
	// a larger object is ErrTooLarge.
	Get(ctx context.Context, key string, limit int64) ([]byte, error)

	// GetRange fills into from byte off of the object and returns the number of
	// bytes read, less than len(into) only at the end of the object. An off at or
	// behind the end reads 0 bytes without error. A missing key is ErrNotFound.
	GetRange(ctx context.Context, key string, off int64, into []byte) (int, error)

	// Head returns the object's description or ErrNotFound.
	Head(ctx context.Context, key string) (Info, error)

	// List returns up to max (1 to 1000) objects whose key starts with prefix and
	// is greater than startAfter, in ascending byte order of the key. Fewer than max
	// means that there are no more.
	List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error)

	// Delete removes the keys; a key that is not there is no error. On an error any
	// subset may have been removed.
	Delete(ctx context.Context, keys ...string) error

	// URL names the bucket and prefix, without credentials.
	URL() string

	// Close releases connections. Calls that are under way fail.
	Close() error
}
