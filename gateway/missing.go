package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"github.com/isergate/isergate/objectstore"
)

// missingDir is a directory bucket that holds volumes and is not there now: a file system that is not
// mounted, most likely. Opening it would make a second bucket in its place, in which writes would be
// acknowledged and then hidden by the mount. It is a bucket that does not answer until the directory is back.
type missingDir struct {
	dir, url string
	open     func(context.Context) (objectstore.Bucket, error)

	mu     sync.Mutex // guards bucket
	bucket objectstore.Bucket
}

var _ objectstore.Bucket = (*missingDir)(nil)

// isMissing reports whether a directory is missing or empty, so that opening a bucket there would make it.
func isMissing(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, e := range entries {
		if e.Name() != "lost+found" {
			return false
		}
	}
	return true
}

// find returns the bucket once its directory is there.
func (m *missingDir) find(ctx context.Context) (objectstore.Bucket, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bucket != nil {
		return m.bucket, nil
	}
	if isMissing(m.dir) {
		return nil, fmt.Errorf("%w: the directory %s, which holds volumes, is missing or empty: mount or restore it", objectstore.ErrTransient, m.dir)
	}
	var err error
	m.bucket, err = m.open(ctx)
	return m.bucket, err
}

// PutIfAbsent implements objectstore.Bucket.
func (m *missingDir) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	b, err := m.find(ctx)
	if err != nil {
		return err
	}
	return b.PutIfAbsent(ctx, key, body)
}

// Get implements objectstore.Bucket.
func (m *missingDir) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	b, err := m.find(ctx)
	if err != nil {
		return nil, err
	}
	return b.Get(ctx, key, limit)
}

// GetRange implements objectstore.Bucket.
func (m *missingDir) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	b, err := m.find(ctx)
	if err != nil {
		return 0, err
	}
	return b.GetRange(ctx, key, off, into)
}

// Head implements objectstore.Bucket.
func (m *missingDir) Head(ctx context.Context, key string) (objectstore.Info, error) {
	b, err := m.find(ctx)
	if err != nil {
		return objectstore.Info{}, err
	}
	return b.Head(ctx, key)
}

// List implements objectstore.Bucket.
func (m *missingDir) List(ctx context.Context, prefix, startAfter string, max int) ([]objectstore.Info, error) {
	b, err := m.find(ctx)
	if err != nil {
		return nil, err
	}
	return b.List(ctx, prefix, startAfter, max)
}

// Delete implements objectstore.Bucket.
func (m *missingDir) Delete(ctx context.Context, keys ...string) error {
	b, err := m.find(ctx)
	if err != nil {
		return err
	}
	return b.Delete(ctx, keys...)
}

// URL implements objectstore.Bucket.
func (m *missingDir) URL() string { return m.url }

// Close implements objectstore.Bucket.
func (m *missingDir) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bucket == nil {
		return nil
	}
	return m.bucket.Close()
}
