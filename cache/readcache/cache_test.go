package readcache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/isergate/isergate/cache/vfs"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the randomized tests; 0: a new one")

func newSeed(t testing.TB) uint64 {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	return seed
}

var (
	ctx   = context.Background()
	quiet = slog.New(slog.NewTextHandler(io.Discard, nil))
	vol   = uuid.UUID{15: 1}
)

func open(t testing.TB, o Options) *Cache {
	t.Helper()
	if o.Logger == nil {
		o.Logger = quiet
	}
	o.Registerer = prometheus.NewPedanticRegistry()
	c, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	c.poison = true
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.free) != len(c.frames) || c.pinned != 0 || c.memory != nil || len(c.flights) != 0 {
			t.Errorf("after Close %d of %d frames are free, %d pinned", len(c.free), len(c.frames), c.pinned)
		}
	})
	return c
}

// value reads a counter or gauge.
func value(m prometheus.Metric) float64 {
	var d dto.Metric
	if err := m.Write(&d); err != nil {
		panic(err)
	}
	return d.GetCounter().GetValue() + d.GetGauge().GetValue()
}

func withMedia(o Options, bytes int64) (Options, *vfs.Mem) {
	fs := vfs.NewMem()
	o.FS, o.Path, o.Bytes, o.ReserveBytes = fs, "/cache/chunks", bytes, 1
	return o, fs
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// content is what the object store has for a key.
func content(k Key) []byte {
	var seed [32]byte
	copy(seed[:], k.Volume[:])
	binary.LittleEndian.PutUint64(seed[16:], k.Seq)
	binary.LittleEndian.PutUint32(seed[24:], k.Chunk)
	binary.LittleEndian.PutUint32(seed[28:], uint32(k.Epoch))
	src := rand.NewChaCha8(seed)
	n := ChunkSize
	if src.Uint64()%8 == 0 {
		n = int(src.Uint64() % ChunkSize)
	}
	b := make([]byte, n)
	for i := 0; i+512 < n; i += 512 { // a little of each sector
		binary.LittleEndian.PutUint64(b[i:], src.Uint64())
		// As file systems and databases do it: then all chunks of a length have the same CRC32C.
		binary.LittleEndian.PutUint32(b[i+508:], crc32.Checksum(b[i:i+508], castagnoli))
	}
	return b
}

// backend counts fetches.
type backend struct{ fetches atomic.Int64 }

func (b *backend) fetch(k Key) func(context.Context, []byte) (int, error) {
	return func(_ context.Context, into []byte) (int, error) {
		b.fetches.Add(1)
		return copy(into, content(k)), nil
	}
}

func (b *backend) get(t testing.TB, c *Cache, k Key) {
	t.Helper()
	r, err := c.Get(ctx, k, b.fetch(k))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(r.Bytes(), content(k)) {
		t.Fatalf("%+v has other bytes", k)
	}
	r.Release()
}

// settle waits until nothing is under way.
func settle(c *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.flights) > 0 || c.pinned > 0 || (c.media != nil && len(c.media.queue) > 0) {
		freed := c.freed
		c.waiting++
		c.mu.Unlock()
		<-freed
		c.mu.Lock()
		c.waiting--
	}
}

func key(i int) Key { return Key{Volume: vol, Epoch: 3, Seq: uint64(i / 128), Chunk: uint32(i % 128)} }

func TestGet(t *testing.T) {
	o, _ := withMedia(Options{MemoryBytes: 4 << 20}, 64<<20)
	c := open(t, o)
	var b backend
	for round := range 3 {
		for i := range 500 { // more than memory, less than media
			b.get(t, c, key(i))
			settle(c)
			if !c.Contains(key(i)) {
				t.Fatalf("round %d: chunk %d is not contained", round, i)
			}
		}
	}
	if n := b.fetches.Load(); n != 500 {
		t.Fatalf("%d fetches", n)
	}
	if h := value(c.stats.mediaHits); h < 800 {
		t.Fatalf("%v hits on media", h)
	}
	other := Key{Volume: uuid.UUID{1}, Epoch: 3}
	if c.Contains(other) || len(key(0).Volume) != 16 {
		t.Fatal("contains another volume's chunk")
	}
	b.get(t, c, other)
	settle(c)
	c.DropVolume(vol)
	for i := range 500 {
		if c.Contains(key(i)) {
			t.Fatalf("chunk %d is left", i)
		}
	}
	if !c.Contains(other) {
		t.Fatal("the other volume's chunk is gone")
	}
	b.get(t, c, key(1))
	if n := b.fetches.Load(); n != 502 {
		t.Fatalf("%d fetches", n)
	}
}

func TestFetchErrors(t *testing.T) {
	c := open(t, Options{})
	broken := errors.New("broken")
	for range 200 {
		if _, err := c.Get(ctx, key(0), func(context.Context, []byte) (int, error) { return 10, broken }); err != broken {
			t.Fatal(err)
		}
		if _, err := c.Get(ctx, key(0), func(context.Context, []byte) (int, error) { return ChunkSize + 1, nil }); err == nil {
			t.Fatal("a chunk that is too long")
		}
	}
	if c.Contains(key(0)) {
		t.Fatal("it is contained")
	}
}

// TestShared: one fetch for all who wait; it goes on when the first gives up, and ends
// when all have.
func TestShared(t *testing.T) {
	c := open(t, Options{})
	type tag struct{}
	started, finish := make(chan context.Context), make(chan struct{})
	fetch := func(ctx context.Context, into []byte) (int, error) {
		started <- ctx
		select {
		case <-finish:
			return copy(into, "hello"), nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	never := func(context.Context, []byte) (int, error) { t.Error("a second fetch"); return 0, nil }
	waiters := func(k Key, n int) {
		for {
			c.mu.Lock()
			fl := c.flights[c.keyLocked(k)]
			ok := fl != nil && fl.waiters == n
			c.mu.Unlock()
			if ok {
				return
			}
		}
	}
	first, cancel := context.WithCancel(context.WithValue(ctx, tag{}, "value"))
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := c.Get(first, key(0), fetch); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	if got := <-started; got.Value(tag{}) != "value" {
		t.Fatal("the fetch does not see the caller's values")
	}
	for range 5 {
		wg.Go(func() {
			r, err := c.Get(ctx, key(0), never)
			if err != nil {
				t.Error(err)
				return
			}
			if string(r.Bytes()) != "hello" {
				t.Errorf("got %q", r.Bytes())
			}
			r.Release()
		})
	}
	waiters(key(0), 6)
	cancel()
	waiters(key(0), 5)
	close(finish)
	wg.Wait()

	// All give up.
	finish = make(chan struct{})
	first, cancel = context.WithCancel(ctx)
	for range 3 {
		wg.Go(func() {
			if _, err := c.Get(first, key(1), fetch); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	ended := <-started
	waiters(key(1), 3)
	cancel()
	<-ended.Done()
	wg.Wait()
	// Whoever comes next does not inherit the end.
	wg.Go(func() { <-started; close(finish) })
	r, err := c.Get(ctx, key(1), fetch)
	if err != nil {
		t.Fatal(err)
	}
	r.Release()
	wg.Wait()
}

// TestReserve: with reservations nobody waits for anybody's Release; without, Get waits
// until its context ends.
func TestReserve(t *testing.T) {
	c := open(t, Options{MemoryBytes: 4 << 20})
	var b backend
	most := c.MaxReserve()
	if err := c.Reserve(ctx, most+1); !errors.Is(err, ErrTooLarge) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 30 {
				n := most/2 + 1
				if !c.TryReserve(n) {
					if err := c.Reserve(ctx, n); err != nil {
						t.Error(err)
						return
					}
				}
				var refs []Ref
				for j := range n {
					k := key(w*10000 + i*100 + j)
					r, err := c.Get(ctx, k, b.fetch(k))
					if err != nil {
						t.Error(err)
						return
					}
					refs = append(refs, r)
				}
				for _, r := range refs {
					r.Release()
				}
				c.Unreserve(n)
			}
		})
	}
	wg.Wait()
	var refs []Ref
	for i := range len(c.frames) {
		k := key(i)
		r, err := c.Get(ctx, k, b.fetch(k))
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, r)
	}
	if c.Put(key(5000), []byte("x")) {
		t.Fatal("put without room")
	}
	short, cancel := context.WithCancel(ctx)
	res := make(chan error)
	go func() {
		_, err := c.Get(short, key(5001), b.fetch(key(5001)))
		res <- err
	}()
	cancel()
	if err := <-res; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	go func() {
		r, err := c.Get(ctx, key(5002), b.fetch(key(5002)))
		if err == nil {
			r.Release()
		}
		res <- err
	}()
	for i, r := range refs {
		if !bytes.Equal(r.Bytes(), content(key(i))) {
			t.Fatalf("chunk %d changed while it was referenced", i)
		}
		r.Release()
	}
	if err := <-res; err != nil {
		t.Fatal(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("a second Release was not noticed")
		}
	}()
	refs[0].(*frame).c.release(&frame{c: c})
}

func TestPutAndPrefetch(t *testing.T) {
	o, _ := withMedia(Options{MemoryBytes: 4 << 20}, 16<<20)
	c := open(t, o)
	var b backend
	if !c.Put(key(0), content(key(0))) || c.Put(key(0), content(key(0))) || c.Put(key(1), make([]byte, ChunkSize+1)) {
		t.Fatal("put")
	}
	if !c.Prefetch(ctx, key(1), b.fetch(key(1))) {
		t.Fatal("prefetch")
	}
	b.get(t, c, key(1))
	b.get(t, c, key(0))
	settle(c)
	if c.Prefetch(ctx, key(1), b.fetch(key(1))) {
		t.Fatal("prefetch of what is there")
	}
	if n := b.fetches.Load(); n != 1 {
		t.Fatalf("%d fetches", n)
	}
	// As many as may be.
	block := make(chan struct{})
	n := 0
	for i := 100; c.Prefetch(ctx, key(i), func(context.Context, []byte) (int, error) { <-block; return 0, nil }); i++ {
		if n++; n > cap(c.fetches) {
			t.Fatal("prefetches are not bounded")
		}
	}
	close(block)
	settle(c)
}

func TestClosed(t *testing.T) {
	c := open(t, Options{})
	var b backend
	r, err := c.Get(ctx, key(0), b.fetch(key(0)))
	if err != nil {
		t.Fatal(err)
	}
	res := make(chan error)
	started := make(chan struct{})
	go func() {
		_, err := c.Get(ctx, key(1), func(ctx context.Context, _ []byte) (int, error) {
			close(started)
			<-ctx.Done()
			return 0, ctx.Err()
		})
		res <- err
	}()
	<-started
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-res; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := c.Get(ctx, key(0), b.fetch(key(0))); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if c.Put(key(2), nil) || c.Prefetch(ctx, key(2), b.fetch(key(2))) {
		t.Fatal("it takes chunks after Close")
	}
	if !bytes.Equal(r.Bytes(), content(key(0))) {
		t.Fatal("a referenced chunk changed")
	}
	r.Release()
}

// TestConcurrent compares everything that concurrent readers get with the store, with
// frames overwritten as soon as they are free, volumes dropped and media that lies.
func TestConcurrent(t *testing.T) {
	seed := newSeed(t)
	o, mem := withMedia(Options{MemoryBytes: 4 << 20}, 8<<20)
	var flip atomic.Int64
	o.FS = vfs.Faulty(mem, func(op vfs.Op, _ string, off int64, n int) error {
		if op == vfs.OpRead && flip.Add(1)%7 == 0 {
			return &vfs.Flip{Bit: off + int64(n)}
		}
		return nil
	})
	c := open(t, o)
	var b backend
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			var held []Ref
			var keys []Key
			for range 1500 {
				k := key(int(r.ExpFloat64() * 60))
				k.Volume[0] = byte(r.IntN(2))
				c2, cancel := context.WithCancel(ctx)
				if r.IntN(20) == 0 {
					cancel()
				}
				ref, err := c.Get(c2, k, b.fetch(k))
				cancel()
				if err == nil {
					held, keys = append(held, ref), append(keys, k)
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				switch r.IntN(200) {
				case 0:
					c.DropVolume(k.Volume)
				case 1:
					c.Put(k, content(k))
				case 2:
					c.Prefetch(ctx, k, b.fetch(k))
				}
				for len(held) > 3 || len(held) > 0 && r.IntN(2) == 0 {
					i := r.IntN(len(held))
					if !bytes.Equal(held[i].Bytes(), content(keys[i])) {
						t.Errorf("%+v has other bytes", keys[i])
					}
					held[i].Release()
					held[i], keys[i] = held[len(held)-1], keys[len(keys)-1]
					held, keys = held[:len(held)-1], keys[:len(keys)-1]
				}
			}
			for _, r := range held {
				r.Release()
			}
		})
	}
	wg.Wait()
	settle(c)
	t.Logf("%d fetches, %v from media, %v corrupt", b.fetches.Load(), value(c.stats.mediaHits), value(c.stats.corrupt))
	if value(c.stats.mediaHits) == 0 || value(c.stats.corrupt) == 0 {
		t.Fatal("the media was not used")
	}
}

// hitRate reads n chunks and returns the share that needed no fetch.
func (b *backend) hitRate(t testing.TB, c *Cache, from, n int) float64 {
	before := b.fetches.Load()
	for i := range n {
		b.get(t, c, key(from+i))
		settle(c)
	}
	return 1 - float64(b.fetches.Load()-before)/float64(n)
}

// TestScan: the hot set survives a scan of four times the cache, whether the scan reads
// whole chunks or small blocks in a row, in memory and on media.
func TestScan(t *testing.T) {
	for _, reads := range []int{1, 16} {
		for _, media := range []int64{0, 16 << 20} {
			o := Options{MemoryBytes: 4 << 20}
			size := 64 // chunks
			if media > 0 {
				o, _ = withMedia(o, media)
				size = int(media / ChunkSize)
			}
			c := open(t, o)
			var b backend
			hot := size / 2
			for range 4 {
				b.hitRate(t, c, 0, hot)
			}
			if rate := b.hitRate(t, c, 0, hot); rate < 1 {
				t.Fatalf("media %d: the hot set does not fit: %v", media, rate)
			}
			for i := range 4 * size {
				for range reads {
					b.get(t, c, key(100000+i))
				}
				settle(c)
			}
			rate := b.hitRate(t, c, 0, hot)
			t.Logf("scan with %d reads per chunk, media %d: %.0f %% of the hot set left", reads, media, 100*rate)
			if rate < 0.9 {
				t.Errorf("only %.0f %% of the hot set left", 100*rate)
			}
		}
	}
}

// TestNewHotSet: what becomes hot later gets in.
func TestNewHotSet(t *testing.T) {
	c := open(t, Options{MemoryBytes: 4 << 20})
	var b backend
	for range 10 {
		b.hitRate(t, c, 0, 50)
	}
	for range 10 {
		b.hitRate(t, c, 1000, 50)
	}
	if rate := b.hitRate(t, c, 1000, 50); rate < 0.9 {
		t.Fatalf("%.0f %% of the new hot set", 100*rate)
	}
}

func benchmarkGet(b *testing.B, o Options, chunks int) {
	c := open(b, o)
	c.poison = false
	for i := range chunks {
		k := key(i)
		r, err := c.Get(ctx, k, func(_ context.Context, into []byte) (int, error) { return len(into), nil })
		if err != nil {
			b.Fatal(err)
		}
		r.Release()
		settle(c)
	}
	never := func(context.Context, []byte) (int, error) { return 0, errors.New("fetched") }
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		r := rand.New(rand.NewPCG(rand.Uint64(), 1))
		for pb.Next() {
			r, err := c.Get(ctx, key(r.IntN(chunks)), never)
			if err != nil {
				b.Fatal(err)
			}
			r.Release()
		}
	})
}

func BenchmarkGetMemory(b *testing.B) { benchmarkGet(b, Options{MemoryBytes: 128 << 20}, 1000) }

func BenchmarkGetMedia(b *testing.B) {
	benchmarkGet(b, Options{MemoryBytes: 8 << 20, Bytes: 512 << 20, FS: vfs.OS(), Path: b.TempDir() + "/chunks"}, 5000)
}

// A fetch that comes to its turn after Close gets no frame: the memory is gone.
func TestCloseBeforeFetch(t *testing.T) {
	for range 200 {
		c, err := Open(Options{MemoryBytes: 4 << 20})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 64 {
			c.Prefetch(t.Context(), Key{Seq: uint64(i)}, func(_ context.Context, into []byte) (int, error) {
				for j := range into {
					into[j] = 1
				}
				return len(into), nil
			})
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHomes: fetches from a store that hangs leave half of the fetches to the other stores.
func TestHomes(t *testing.T) {
	c := open(t, Options{MemoryBytes: 4 << 20, MaxFetches: 4})
	hung, stop := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	begun := make(chan struct{}, 16)
	for i := range 8 {
		ended.Go(func() {
			_, err := c.Get(hung, Key{Seq: uint64(i), Home: 1}, func(ctx context.Context, _ []byte) (int, error) {
				begun <- struct{}{}
				<-ctx.Done()
				return 0, ctx.Err()
			})
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	<-begun
	<-begun
	for i := range 8 {
		r, err := c.Get(t.Context(), Key{Seq: uint64(100 + i), Home: 2}, func(_ context.Context, into []byte) (int, error) { return copy(into, "x"), nil })
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
	}
	if n := len(begun); n > 0 {
		t.Errorf("%d fetches from the store that hangs, of 4 in all", 2+n)
	}
	stop()
	ended.Wait()
}
