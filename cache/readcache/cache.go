// Package readcache keeps chunks of immutable objects close: in memory, and on local
// media behind it. Keys are never reused for other bytes, so there is nothing to
// invalidate. What is on the media is found through an index in memory only: after a
// restart the cache is cold. DESIGN.md states the invariants.
package readcache

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/cache/vfs"
)

// ChunkSize is the size of a chunk in bytes; the last one of an object may be shorter.
const ChunkSize = 64 << 10

// Errors.
var (
	// ErrClosed: the cache was closed.
	ErrClosed = errors.New("readcache: closed")
	// ErrTooLarge: a reservation is larger than all that can be reserved.
	ErrTooLarge = errors.New("readcache: reservation is larger than the cache's memory")
)

// Key names a chunk of an object.
type Key struct {
	Volume uuid.UUID
	Epoch  uint64
	Seq    uint64
	Chunk  uint32
	// Home numbers the store that the object is in. It is no part of the name: fetches from one store take at most half of MaxFetches, so that
	// one that hangs leaves the others the rest.
	Home uint32
}

// Ref is a chunk that stays in memory until it is released.
type Ref interface {
	// Bytes is the chunk. It must not be changed, nor used after Release.
	Bytes() []byte
	// Release gives the chunk back. It is called once.
	Release()
}

// Options configure a Cache.
type Options struct {
	// MemoryBytes is the budget for chunks in memory, those that are referenced or being
	// read included; 0 means 64 MiB, and 4 MiB is the least.
	MemoryBytes int64
	// Bytes of local media to use; 0 means none. The index takes about 140 bytes of
	// memory per chunk on media, beside MemoryBytes.
	Bytes int64
	// FS and Path name the file on the local media. It is truncated.
	FS   vfs.FS
	Path string
	// ReserveBytes of free space on the media's file system are never used: 0 means 1 GiB.
	ReserveBytes int64
	// MaxFetches is the number of fetches at a time; 0 means 128. It is at most a
	// quarter of the chunks in memory.
	MaxFetches int
	// FetchTimeout bounds one fetch; 0 means one minute.
	FetchTimeout time.Duration
	// OnMediaFailure is called once, from a goroutine of the cache, when the local media
	// failed and is not used any more. It may be nil.
	OnMediaFailure func(error)
	// Registerer gets the metrics; nil means none.
	Registerer prometheus.Registerer
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

// EnsureDefaults fills in what is zero.
func (o *Options) EnsureDefaults() {
	if o.MemoryBytes == 0 {
		o.MemoryBytes = 64 << 20
	}
	if o.ReserveBytes == 0 {
		o.ReserveBytes = 1 << 30
	}
	if o.MaxFetches == 0 {
		o.MaxFetches = 128
	}
	if o.FetchTimeout == 0 {
		o.FetchTimeout = time.Minute
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Validate reports every fault of the options.
func (o *Options) Validate() error {
	var errs []error
	if o.MemoryBytes < 4<<20 {
		errs = append(errs, fmt.Errorf("readcache: %d bytes of memory are less than 4 MiB", o.MemoryBytes))
	}
	if o.Bytes < 0 || o.Bytes/ChunkSize > 1<<31-1 {
		errs = append(errs, fmt.Errorf("readcache: %d bytes of media", o.Bytes))
	}
	if o.Bytes > 0 && (o.FS == nil || o.Path == "") {
		errs = append(errs, errors.New("readcache: media without file system and path"))
	}
	if o.MaxFetches < 1 {
		errs = append(errs, fmt.Errorf("readcache: %d fetches", o.MaxFetches))
	}
	return errors.Join(errs...)
}

// ckey is a Key with the volume's number in place of its UUID.
type ckey struct {
	epoch, seq uint64
	volume     uint32
	chunk      uint32
}

// frame is the memory of one chunk. All fields but buf are guarded by Cache.mu, and n
// does not change while there are references.
type frame struct {
	c    *Cache
	slot int32
	buf  []byte
	n    int
	key  ckey
	refs int
	kept bool // in the index
}

// Bytes implements Ref.
func (f *frame) Bytes() []byte { return f.buf[:f.n:f.n] }

// Release implements Ref.
func (f *frame) Release() { f.c.release(f) }

// flight is a chunk on its way into memory.
type flight struct {
	done       chan struct{}
	cancel     context.CancelFunc
	waiters    int  // guarded by Cache.mu
	background bool // it goes on without waiters
	f          *frame
	err        error
}

// Cache is the read cache of a node. All methods may be called concurrently.
type Cache struct {
	o       Options
	seed    maphash.Seed
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup
	fetches chan struct{}       // one element per fetch under way
	claims  *semaphore.Weighted // frames that may be reserved
	claim   int64
	media   *media // nil: none
	memory  []byte
	poison  bool // overwrite frames that become free (tests)

	mu      sync.Mutex // guards what follows, and the frames
	frames  []frame
	free    []int32
	index   map[ckey]int32
	policy  *policy
	flights map[ckey]*flight
	volumes map[uuid.UUID]uint32
	homes   map[uint32]chan struct{} // one element per fetch from that store that is under way or due
	// prefetches counts the flights that Prefetch began: those that have no turn yet are not in fetches.
	prefetches int
	freed      chan struct{} // closed when a frame may have become available
	waiting    int           // for freed
	pinned     int           // frames with references
	closed     bool

	stats stats
}

// Open returns an empty cache. Trouble with the local media is no error: the cache then
// works without.
func Open(o Options) (*Cache, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	n := int(o.MemoryBytes / ChunkSize)
	// Outside of the Go heap: the collector would let the heap grow by as much again.
	memory, err := unix.Mmap(-1, 0, n*ChunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("readcache: %d bytes of memory: %w", o.MemoryBytes, err)
	}
	fetches := min(o.MaxFetches, n/4)
	c := &Cache{
		o: o, seed: maphash.MakeSeed(), memory: memory,
		fetches: make(chan struct{}, fetches),
		frames:  make([]frame, n), index: make(map[ckey]int32, n), policy: newPolicy(n),
		flights: make(map[ckey]*flight), volumes: make(map[uuid.UUID]uint32), homes: make(map[uint32]chan struct{}), freed: make(chan struct{}),
	}
	c.ctx, c.stop = context.WithCancel(context.Background())
	// Fetches without a waiter, and chunks on their way to the media, need frames too.
	queue := 0
	if o.Bytes >= ChunkSize {
		queue = n / 8
	}
	c.claim = int64(n - fetches - queue - 1)
	c.claims = semaphore.NewWeighted(c.claim)
	for i := range c.frames {
		c.frames[i] = frame{c: c, slot: int32(i), buf: memory[i*ChunkSize : (i+1)*ChunkSize : (i+1)*ChunkSize]}
		c.free = append(c.free, int32(n-1-i))
	}
	c.stats.init(c, o.Registerer)
	if queue > 0 {
		m, err := openMedia(c, queue)
		if err != nil {
			c.mediaFailed(fmt.Errorf("open %s: %w", o.Path, err))
		} else {
			c.media = m
			c.running.Go(m.run)
		}
	}
	return c, nil
}

func (c *Cache) mediaFailed(err error) {
	c.o.Logger.Error("read cache works without its local media", "path", c.o.Path, "err", err)
	c.stats.mediaUp.Set(0)
	if c.o.OnMediaFailure != nil {
		c.running.Go(func() { c.o.OnMediaFailure(err) })
	}
}

func (c *Cache) hash(k ckey) uint64 { return maphash.Comparable(c.seed, k) | 1 }

// keyLocked is the short form of k.
func (c *Cache) keyLocked(k Key) ckey {
	v, ok := c.volumes[k.Volume]
	if !ok {
		v = uint32(len(c.volumes))
		c.volumes[k.Volume] = v
	}
	return ckey{epoch: k.Epoch, seq: k.Seq, volume: v, chunk: k.Chunk}
}

// homeLocked is where fetches from a store take their turn.
func (c *Cache) homeLocked(number uint32) chan struct{} {
	home := c.homes[number]
	if home == nil {
		home = make(chan struct{}, max(1, cap(c.fetches)/2))
		c.homes[number] = home
	}
	return home
}

// Reserve waits until n chunks may be referenced, and sets them aside until
// Unreserve. If all who hold references reserve as many as they hold, before the first,
// then no Get ever waits for another's Release, and none can wait for each other.
// More than MaxReserve is ErrTooLarge.
func (c *Cache) Reserve(ctx context.Context, n int) error {
	if int64(n) > c.claim {
		return fmt.Errorf("%w: %d chunks, %d can be reserved", ErrTooLarge, n, c.claim)
	}
	return c.claims.Acquire(ctx, int64(n))
}

// TryReserve is Reserve without the waiting: it returns false, and reserves nothing, where Reserve would wait or fail.
func (c *Cache) TryReserve(n int) bool { return c.claims.TryAcquire(int64(n)) }

// Unreserve gives back what Reserve or TryReserve set aside.
func (c *Cache) Unreserve(n int) { c.claims.Release(int64(n)) }

// Region returns all the memory that chunks are kept in, so that it can be registered with a device once. It
// stays mapped until Close, and after it until the last Ref is released.
func (c *Cache) Region() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.memory
}

// MaxReserve is the largest number of chunks that can be reserved at once.
func (c *Cache) MaxReserve() int { return int(c.claim) }

// Get returns a chunk, from memory, from the local media, or through fetch, which fills
// into (ChunkSize bytes) and returns the chunk's length. Concurrent calls for one key
// share a fetch, whichever comes first. It does not end with the context of one
// caller, but when all of them gave up, or after FetchTimeout; its context has the
// values of the first caller's.
func (c *Cache) Get(ctx context.Context, key Key, fetch func(ctx context.Context, into []byte) (int, error)) (Ref, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	k := c.keyLocked(key)
	if f := c.hitLocked(k); f != nil {
		c.mu.Unlock()
		c.stats.memoryHits.Inc()
		return f, nil
	}
	fl := c.flights[k]
	if fl == nil {
		fl = c.startLocked(ctx, k, c.homeLocked(key.Home), fetch, false)
	}
	fl.waiters++
	c.mu.Unlock()
	select {
	case <-fl.done:
	case <-ctx.Done():
		c.leave(k, fl)
		return nil, ctx.Err()
	}
	if fl.err != nil {
		return nil, fl.err
	}
	return fl.f, nil
}

// hitLocked returns the frame of k with a reference, nil if it is not in memory.
func (c *Cache) hitLocked(k ckey) *frame {
	s, ok := c.index[k]
	if !ok {
		return nil
	}
	f := &c.frames[s]
	c.pinLocked(f)
	if c.policy.hit(s) && c.media != nil {
		c.media.hitLocked(k)
	}
	return f
}

// Hit returns a chunk that is in memory, nil if it is not.
func (c *Cache) Hit(key Key) Ref {
	c.mu.Lock()
	f := c.hitLocked(c.keyLocked(key))
	c.mu.Unlock()
	if f == nil {
		return nil
	}
	c.stats.memoryHits.Inc()
	return f
}

// leave gives up waiting for fl.
func (c *Cache) leave(k ckey, fl *flight) {
	c.mu.Lock()
	select {
	case <-fl.done: // it came after all, with a reference for us
		c.mu.Unlock()
		if fl.err == nil {
			fl.f.Release()
		}
		return
	default:
	}
	fl.waiters--
	if fl.waiters == 0 && !fl.background {
		if c.flights[k] == fl {
			delete(c.flights, k) // whoever comes next starts anew
		}
		fl.cancel()
	}
	c.mu.Unlock()
}

// Contains reports whether the chunk is at hand, or on its way.
func (c *Cache) Contains(key Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.keyLocked(key)
	return c.indexedLocked(k) || c.flights[k] != nil || (c.media != nil && c.media.hasLocked(k))
}

// Prefetch starts to bring a chunk into the cache, as Get does, and does not wait. It
// returns false, and does nothing, if the chunk is there or on its way, or if as many
// fetches are under way as may be.
func (c *Cache) Prefetch(ctx context.Context, key Key, fetch func(ctx context.Context, into []byte) (int, error)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	k, home := c.keyLocked(key), c.homeLocked(key.Home)
	if c.closed || c.indexedLocked(k) || c.flights[k] != nil || len(c.fetches) == cap(c.fetches) || len(home) == cap(home) || c.prefetches == cap(c.fetches) ||
		(c.media != nil && c.media.hasLocked(k)) {
		return false
	}
	c.startLocked(ctx, k, home, fetch, true)
	return true
}

// Put adds a chunk that somebody read for another reason. It copies data, does not
// wait, and returns false if there is no room for it.
func (c *Cache) Put(key Key, data []byte) bool {
	if len(data) > ChunkSize {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.keyLocked(key)
	if c.closed || c.indexedLocked(k) || c.flights[k] != nil {
		return false
	}
	f := c.takeLocked()
	if f == nil {
		return false
	}
	f.n = copy(f.buf, data)
	c.keepLocked(f, k, 0)
	c.storeLocked(f)
	return true
}

// DropVolume forgets all chunks of a volume.
func (c *Cache) DropVolume(volume uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.volumes[volume]
	if !ok {
		return
	}
	for k, s := range c.index {
		if k.volume == v {
			c.dropLocked(&c.frames[s])
		}
	}
	for k, fl := range c.flights {
		if k.volume == v { // its result goes to its waiters only
			delete(c.flights, k)
			if fl.waiters == 0 {
				fl.cancel()
			}
		}
	}
	if c.media != nil {
		c.media.dropVolumeLocked(v)
	}
}

// Close ends all fetches and waits for them. Chunks that are referenced stay valid.
func (c *Cache) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.stop()
	for _, s := range c.index {
		c.dropLocked(&c.frames[s])
	}
	c.mu.Unlock()
	c.running.Wait()
	var err error
	if c.media != nil {
		err = c.media.close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unmapLocked()
	return err
}

// unmapLocked frees the memory once it is closed and the last reference is gone.
func (c *Cache) unmapLocked() {
	if c.closed && c.memory != nil && len(c.free) == len(c.frames) {
		unix.Munmap(c.memory)
		c.memory = nil
	}
}
