package cache

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// benchVolume opens an engine on the disk, in BENCH_DIR if that is set, with a bucket in memory. On a file system in memory (BENCH_DIR=/dev/shm) it
// shows what the engine itself takes.
func benchVolume(b *testing.B, ack Level, size int64, bucket objectstore.Bucket, tune func(*Options)) *Volume {
	dir, err := os.MkdirTemp(os.Getenv("BENCH_DIR"), "cache")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	opt := Options{Dir: dir, Node: testNode, JournalBytes: 512 << 20, SegmentBytes: 32 << 20, ReadCacheBytes: -1, Logger: slog.New(slog.DiscardHandler)}
	if tune != nil {
		tune(&opt)
	}
	e, err := Open(b.Context(), opt)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			b.Error(err)
		}
	})
	for made := 0; made < 16; time.Sleep(10 * time.Millisecond) { // all segments are there
		files, err := os.ReadDir(filepath.Join(dir, "journal"))
		if err != nil {
			b.Fatal(err)
		}
		made = 0
		for _, f := range files {
			if len(f.Name()) == 6 {
				made++
			}
		}
	}
	v, err := e.Create(b.Context(), VolumeConfig{
		ID: uuid.New(), Name: "bench", SizeBytes: size, BlockSize: 4096,
		Policy: Policy{Ack: ack, Flush: Local}, Bucket: bucket,
	})
	if err != nil {
		b.Fatal(err)
	}
	return v
}

// shallow keeps no more of an object than its name, so that a long run fits into memory.
type shallow struct{ objectstore.Bucket }

func (s shallow) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if len(body) >= 64<<10 {
		body = nil
	}
	return s.Bucket.PutIfAbsent(ctx, key, body)
}

// inParallel runs f b.N times on depth goroutines.
func inParallel(b *testing.B, depth int, f func(rng *rand.Rand) error) {
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(b.N))
	b.ReportAllocs()
	began := cpuTime()
	b.ResetTimer()
	for i := range depth {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for left.Add(-1) >= 0 {
				if err := f(rng); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-began)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what the process has used so far: on a busy machine it says more than the clock.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchWrite(v *Volume, b *testing.B, rng *rand.Rand, n int64) error {
	l, err := v.Reserve(b.Context(), rng.Int64N(v.size.Load()/n)*n, n)
	if err != nil {
		return err
	}
	for _, p := range l.Buffers() {
		for i := 0; i < len(p); i += 4096 {
			p[i]++
		}
	}
	return l.Commit(b.Context(), false)
}

// BenchmarkWrite: commands of one size at one level, so many at once. Destage to a bucket in memory runs beside.
func BenchmarkWrite(b *testing.B) {
	for _, ack := range []Level{Memory, Local} {
		for _, c := range []struct {
			n     int64
			depth int
		}{{4096, 1}, {4096, 32}, {256 << 10, 8}} {
			b.Run(fmt.Sprintf("%s/%dKiB/depth=%d", ack, c.n>>10, c.depth), func(b *testing.B) {
				v := benchVolume(b, ack, 256<<20, shallow{objectstore.NewMem()}, nil)
				b.SetBytes(c.n)
				inParallel(b, c.depth, func(rng *rand.Rand) error { return benchWrite(v, b, rng, c.n) })
			})
		}
	}
}

// BenchmarkRead: commands of one size, by where the data is.
func BenchmarkRead(b *testing.B) {
	const size = 64 << 20
	for _, where := range []string{"zeros", "journal", "cache"} {
		v := benchVolume(b, Memory, size, objectstore.NewMem(), func(o *Options) {
			if where == "journal" {
				o.MaxObjectBytes, o.MaxObjectAge = 256<<20, 1<<40
			}
		})
		if where != "zeros" {
			for off := int64(0); off < size; off += 128 << 10 {
				l, err := v.Reserve(b.Context(), off, 128<<10)
				if err == nil {
					err = l.Commit(b.Context(), false)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		if err := v.Flush(b.Context()); err != nil {
			b.Fatal(err)
		}
		if where == "cache" {
			if err := v.Wait(b.Context(), Object); err != nil {
				b.Fatal(err)
			}
		}
		for _, c := range []struct {
			n     int64
			depth int
		}{{4096, 1}, {4096, 32}, {256 << 10, 8}} {
			b.Run(fmt.Sprintf("%s/%dKiB/depth=%d", where, c.n>>10, c.depth), func(b *testing.B) {
				b.SetBytes(c.n)
				inParallel(b, c.depth, func(rng *rand.Rand) error {
					l, err := v.Read(b.Context(), rng.Int64N(size/c.n)*c.n, c.n)
					if err == nil {
						l.Release()
					}
					return err
				})
			})
		}
	}
}
