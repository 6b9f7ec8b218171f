package objectstore

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// Mem is a bucket in memory, for tests and trials. It is linearizable: each call
// takes effect at one moment between its start and its return.
type Mem struct {
	mu      sync.RWMutex // guards all below
	objects map[string]memObject
	keys    []string // sorted
	closed  bool
}

type memObject struct {
	body     []byte
	modified time.Time
}

// NewMem returns an empty bucket.
func NewMem() *Mem {
	return &Mem{objects: make(map[string]memObject)}
}

// PutIfAbsent is Bucket's.
func (m *Mem) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if err := checkKey(OpPut, key); err != nil {
		return err
	}
	copied := bytes.Clone(body)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usableLocked(ctx, OpPut, key); err != nil {
		return err
	}
	if _, there := m.objects[key]; there {
		return fail(OpPut, key, ErrExists, nil)
	}
	m.objects[key] = memObject{copied, time.Now()}
	i, _ := slices.BinarySearch(m.keys, key)
	m.keys = slices.Insert(m.keys, i, key)
	return nil
}

// Get is Bucket's.
func (m *Mem) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	if err := checkGet(key, limit); err != nil {
		return nil, err
	}
	o, err := m.find(ctx, OpGet, key)
	if err != nil {
		return nil, err
	}
	if int64(len(o.body)) > limit {
		return nil, tooLarge(key, int64(len(o.body)), limit)
	}
	return append([]byte{}, o.body...), nil
}

// GetRange is Bucket's.
func (m *Mem) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if err := checkRange(key, off); err != nil {
		return 0, err
	}
	o, err := m.find(ctx, OpGetRange, key)
	if err != nil {
		return 0, err
	}
	if off >= int64(len(o.body)) {
		return 0, nil
	}
	return copy(into, o.body[off:]), nil
}

// Head is Bucket's.
func (m *Mem) Head(ctx context.Context, key string) (Info, error) {
	if err := checkKey(OpHead, key); err != nil {
		return Info{}, err
	}
	o, err := m.find(ctx, OpHead, key)
	if err != nil {
		return Info{}, err
	}
	return Info{Key: key, Size: int64(len(o.body)), Modified: o.modified}, nil
}

// List is Bucket's.
func (m *Mem) List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error) {
	if err := checkList(prefix, startAfter, max); err != nil {
		return nil, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.usableLocked(ctx, OpList, prefix); err != nil {
		return nil, err
	}
	i, found := slices.BinarySearch(m.keys, startAfter)
	if found {
		i++
	}
	if j, _ := slices.BinarySearch(m.keys, prefix); j > i {
		i = j
	}
	var out []Info
	for ; i < len(m.keys) && len(out) < max; i++ {
		key := m.keys[i]
		if !strings.HasPrefix(key, prefix) {
			break // at or behind prefix in order, so behind all that have it
		}
		o := m.objects[key]
		out = append(out, Info{Key: key, Size: int64(len(o.body)), Modified: o.modified})
	}
	return out, nil
}

// Delete is Bucket's.
func (m *Mem) Delete(ctx context.Context, keys ...string) error {
	if err := checkDelete(keys); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usableLocked(ctx, OpDelete, ""); err != nil {
		return err
	}
	for _, key := range keys {
		if _, there := m.objects[key]; !there {
			continue
		}
		delete(m.objects, key)
		i, _ := slices.BinarySearch(m.keys, key)
		m.keys = slices.Delete(m.keys, i, i+1)
	}
	return nil
}

// URL is Bucket's.
func (m *Mem) URL() string { return "mem:" }

// Close is Bucket's.
func (m *Mem) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

// find returns the object; its body is never changed.
func (m *Mem) find(ctx context.Context, op Op, key string) (memObject, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if err := m.usableLocked(ctx, op, key); err != nil {
		return memObject{}, err
	}
	o, there := m.objects[key]
	if !there {
		return memObject{}, fail(op, key, ErrNotFound, nil)
	}
	return o, nil
}

func (m *Mem) usableLocked(ctx context.Context, op Op, key string) error {
	if m.closed {
		return fail(op, key, ErrClosed, nil)
	}
	return ended(ctx, op, key)
}

// ended returns an error when ctx has ended before anything was sent.
func ended(ctx context.Context, op Op, key string) error {
	if ctx.Err() != nil {
		return fail(op, key, ErrTransient, ctx.Err())
	}
	return nil
}

func tooLarge(key string, size, limit int64) error {
	return fail(OpGet, key, ErrTooLarge, fmt.Errorf("%d bytes, limit %d", size, limit))
}
