package cache

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/vfs"
	"github.com/isergate/isergate/objectstore"
)

// world is everything outside of the engine that a power cut leaves behind: a disk, a key-value store and a
// bucket. crash stops the time of the running engine and makes the next world.
type world struct {
	disk   *vfs.Mem
	store  *homemap.Mem
	bucket *objectstore.Mem

	gate  sync.RWMutex // held for reading by each operation, so that a crash falls between operations
	dead  bool         // guarded by gate
	fault atomic.Pointer[func(op string) error]
}

var errPower = errors.New("power is off")

func newWorld() *world {
	return &world{disk: vfs.NewMem(), store: homemap.NewMem(), bucket: objectstore.NewMem()}
}

// setFault has f called before each operation from now on; its error is the operation's.
func (w *world) setFault(f func(op string) error) {
	if f == nil {
		w.fault.Store(nil)
		return
	}
	w.fault.Store(&f)
}

// do runs one operation unless the power is off.
func (w *world) do(op string, f func() error) error {
	if fault := w.fault.Load(); fault != nil {
		if err := (*fault)(op); err != nil {
			return err
		}
	}
	w.gate.RLock()
	defer w.gate.RUnlock()
	if w.dead {
		return errPower
	}
	return f()
}

// crash cuts the power. What was not synced survives as rng says.
func (w *world) crash(rng *rand.Rand) *world {
	w.gate.Lock()
	defer w.gate.Unlock()
	w.dead = true
	return &world{disk: w.disk.CrashClone(rng, vfs.CrashOptions{}), store: w.store.CrashClone(), bucket: w.bucket}
}

type gateFS struct {
	vfs.FS
	w *world
}

func (g gateFS) OpenFile(name string, flag int, perm fs.FileMode) (f vfs.File, err error) {
	err = g.w.do("open", func() error { f, err = g.FS.OpenFile(name, flag, perm); return err })
	return gateFile{f, g.w}, err
}
func (g gateFS) Remove(name string) error {
	return g.w.do("remove", func() error { return g.FS.Remove(name) })
}
func (g gateFS) Rename(a, b string) error {
	return g.w.do("rename", func() error { return g.FS.Rename(a, b) })
}
func (g gateFS) MkdirAll(dir string, perm fs.FileMode) error {
	return g.w.do("mkdir", func() error { return g.FS.MkdirAll(dir, perm) })
}
func (g gateFS) SyncDir(dir string) error {
	return g.w.do("syncdir", func() error { return g.FS.SyncDir(dir) })
}

type gateFile struct {
	vfs.File
	w *world
}

func (g gateFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = g.w.do("write", func() error { n, err = g.File.WriteAt(p, off); return err })
	return n, err
}
func (g gateFile) WritevAt(p [][]byte, off int64) (n int, err error) {
	err = g.w.do("writev", func() error { n, err = g.File.WritevAt(p, off); return err })
	return n, err
}
func (g gateFile) SyncData() error { return g.w.do("syncdata", g.File.SyncData) }
func (g gateFile) Sync() error     { return g.w.do("sync", g.File.Sync) }
func (g gateFile) Truncate(n int64) error {
	return g.w.do("truncate", func() error { return g.File.Truncate(n) })
}

type gateStore struct {
	*homemap.Mem
	w *world
}

func (g gateStore) Apply(id uuid.UUID, b *homemap.Batch) error {
	return g.w.do("apply", func() error { return g.Mem.Apply(id, b) })
}
func (g gateStore) Drop(id uuid.UUID) error {
	return g.w.do("drop", func() error { return g.Mem.Drop(id) })
}

// gateBucket also loses replies: a put may have happened and be reported as unknown.
type gateBucket struct {
	*objectstore.Mem
	w *world
}

func (g gateBucket) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return g.w.do("put", func() error { return g.Mem.PutIfAbsent(ctx, key, body) })
}
func (g gateBucket) Get(ctx context.Context, key string, limit int64) (b []byte, err error) {
	err = g.w.do("get", func() error { b, err = g.Mem.Get(ctx, key, limit); return err })
	return b, err
}
func (g gateBucket) GetRange(ctx context.Context, key string, off int64, into []byte) (n int, err error) {
	err = g.w.do("getrange", func() error { n, err = g.Mem.GetRange(ctx, key, off, into); return err })
	return n, err
}
func (g gateBucket) List(ctx context.Context, prefix, after string, limit int) (l []objectstore.Info, err error) {
	err = g.w.do("list", func() error { l, err = g.Mem.List(ctx, prefix, after, limit); return err })
	return l, err
}
func (g gateBucket) Delete(ctx context.Context, keys ...string) error {
	return g.w.do("delete", func() error { return g.Mem.Delete(ctx, keys...) })
}

var testNode = uuid.MustParse("00000000-0000-4000-8000-000000000001")

// options of a small engine on w.
func (w *world) options(t *testing.T) Options {
	level := slog.LevelError + 1
	if testing.Verbose() {
		level = slog.LevelInfo
	}
	return Options{
		Dir: "/cache", FS: gateFS{w.disk, w}, HomeStore: gateStore{w.store, w}, Node: testNode,
		SegmentBytes: 1 << 20, JournalBytes: 8 << 20, ArenaBytes: 4 << 20, MapMemoryBytes: 1 << 20,
		ReadCacheBytes: -1, ReadCacheMemoryBytes: 4 << 20, DirtyBudget: 4 << 20,
		MaxObjectBytes: 64 << 10, MaxObjectAge: time.Millisecond, DestageParallel: 3, CheckpointObjects: 5,
		UnmetAfter: 5 * time.Second, CommandWait: 10 * time.Second,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: level})),
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	os.Stderr.Write(b)
	return len(b), nil
}

func (w *world) open(t *testing.T) *Engine {
	t.Helper()
	e, err := Open(t.Context(), w.options(t))
	if err == nil {
		e.arena.SetMangle(true)
		e.readArena.SetMangle(true)
		e.reads.SetMangle(true)
	}
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func (w *world) config(name string, id byte) VolumeConfig {
	u := uuid.UUID{0: id, 6: 0x40, 8: 0x80, 15: id}
	return VolumeConfig{ID: u, Name: name, SizeBytes: 4 << 20, BlockSize: 512, Policy: DefaultPolicy, Bucket: gateBucket{w.bucket, w}}
}

// seeds returns the seeds of a randomized test: ISERGATE_SEED, or as many as ISERGATE_SEEDS says, or
// full, or few with -short.
func seeds(t *testing.T, full, few int) (from, to uint64) {
	n := full
	if testing.Short() {
		n = few
	}
	get := func(name string) (uint64, bool) {
		s := os.Getenv(name)
		if s == "" {
			return 0, false
		}
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return v, true
	}
	if s, ok := get("ISERGATE_SEED"); ok {
		return s, s + 1
	}
	if s, ok := get("ISERGATE_SEEDS"); ok {
		return 1, s + 1
	}
	return 1, uint64(n) + 1
}
