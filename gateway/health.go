package gateway

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/isergate/isergate/objectstore"
)

// watched is a bucket that remembers whether it answers. It goes below the retries, so that
// an outage is known before they give up.
type watched struct {
	objectstore.Bucket
	trouble *atomic.Pointer[error] // of the last request; nil when it was answered
}

// note takes the outcome of a request in. That a key is there or is not there is an answer, and a request
// that its caller gave up says nothing.
func (w watched) note(err error) error {
	switch {
	case err == nil, errors.Is(err, objectstore.ErrNotFound), errors.Is(err, objectstore.ErrExists), errors.Is(err, objectstore.ErrTooLarge):
		if w.trouble.Load() != nil {
			w.trouble.Store(nil)
		}
	case !errors.Is(err, context.Canceled):
		w.trouble.Store(&err)
	}
	return err
}

// PutIfAbsent implements objectstore.Bucket.
func (w watched) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return w.note(w.Bucket.PutIfAbsent(ctx, key, body))
}

// Get implements objectstore.Bucket.
func (w watched) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	b, err := w.Bucket.Get(ctx, key, limit)
	return b, w.note(err)
}

// GetRange implements objectstore.Bucket.
func (w watched) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	n, err := w.Bucket.GetRange(ctx, key, off, into)
	return n, w.note(err)
}

// Head implements objectstore.Bucket.
func (w watched) Head(ctx context.Context, key string) (objectstore.Info, error) {
	info, err := w.Bucket.Head(ctx, key)
	return info, w.note(err)
}

// List implements objectstore.Bucket.
func (w watched) List(ctx context.Context, prefix, startAfter string, max int) ([]objectstore.Info, error) {
	page, err := w.Bucket.List(ctx, prefix, startAfter, max)
	return page, w.note(err)
}

// Delete implements objectstore.Bucket.
func (w watched) Delete(ctx context.Context, keys ...string) error {
	return w.note(w.Bucket.Delete(ctx, keys...))
}
