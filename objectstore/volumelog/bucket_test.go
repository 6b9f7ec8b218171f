package volumelog

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/isergate/isergate/objectstore"
)

// memBucket is a linearizable bucket in memory. hook, if set, runs before each
// operation without the lock held and may fail it.
type memBucket struct {
	mu   sync.Mutex
	objs map[string][]byte
	hook func(op, key string) error
	ops  map[string]int

	total, failAt int // requests so far; the number of the one that fails
	failWith      error
}

// failNth fails the nth request from now on.
func (b *memBucket) failNth(n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.total, b.failAt, b.failWith = 0, n, err
}

// count returns how many operations of a kind were tried.
func (b *memBucket) count(op string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ops[op]
}

func newMemBucket() *memBucket {
	return &memBucket{objs: make(map[string][]byte), ops: make(map[string]int)}
}

func (b *memBucket) before(op, key string) error {
	b.mu.Lock()
	b.ops[op]++
	b.total++
	hook, err := b.hook, b.failWith
	if b.total != b.failAt {
		err = nil
	}
	b.mu.Unlock()
	if err != nil {
		return err
	}
	if hook != nil {
		return hook(op, key)
	}
	return nil
}

func (b *memBucket) put(key string, body []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.objs[key]; ok {
		return objectstore.ErrExists
	}
	b.objs[key] = slices.Clone(body)
	return nil
}

func (b *memBucket) PutIfAbsent(_ context.Context, key string, body []byte) error {
	if err := b.before("put", key); err != nil {
		return err
	}
	return b.put(key, body)
}

func (b *memBucket) Get(_ context.Context, key string, limit int64) ([]byte, error) {
	if err := b.before("get", key); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	body, ok := b.objs[key]
	if !ok {
		return nil, fmt.Errorf("%w: %s", objectstore.ErrNotFound, key)
	}
	if int64(len(body)) > limit {
		return nil, objectstore.ErrTooLarge
	}
	return slices.Clone(body), nil
}

func (b *memBucket) GetRange(_ context.Context, key string, off int64, into []byte) (int, error) {
	if err := b.before("get", key); err != nil {
		return 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	body, ok := b.objs[key]
	if !ok {
		return 0, fmt.Errorf("%w: %s", objectstore.ErrNotFound, key)
	}
	if off >= int64(len(body)) {
		return 0, nil
	}
	return copy(into, body[off:]), nil
}

func (b *memBucket) Head(_ context.Context, key string) (objectstore.Info, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	body, ok := b.objs[key]
	if !ok {
		return objectstore.Info{}, objectstore.ErrNotFound
	}
	return objectstore.Info{Key: key, Size: int64(len(body)), Modified: time.Unix(0, 0)}, nil
}

func (b *memBucket) List(_ context.Context, prefix, startAfter string, max int) ([]objectstore.Info, error) {
	if err := b.before("list", prefix); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var keys []string
	for k := range b.objs {
		if strings.HasPrefix(k, prefix) && k > startAfter {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	var infos []objectstore.Info
	for _, k := range keys[:min(len(keys), max)] {
		infos = append(infos, objectstore.Info{Key: k, Size: int64(len(b.objs[k]))})
	}
	return infos, nil
}

func (b *memBucket) Delete(_ context.Context, keys ...string) error {
	for _, k := range keys {
		if err := b.before("delete", k); err != nil {
			return err
		}
		b.mu.Lock()
		delete(b.objs, k)
		b.mu.Unlock()
	}
	return nil
}

func (b *memBucket) URL() string  { return "mem:" }
func (b *memBucket) Close() error { return nil }

// keys returns the keys that contain part, in order.
func (b *memBucket) keys(part string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var keys []string
	for k := range b.objs {
		if strings.Contains(k, part) {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	return keys
}

func (b *memBucket) body(key string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.objs[key])
}

func (b *memBucket) set(key string, body []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if body == nil {
		delete(b.objs, key)
		return
	}
	b.objs[key] = body
}
