package readcache

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// TestDamagedMedia: a chunk that the media returns otherwise than it was written, be it a bit or the chunk that was there before, is
// fetched again, and its slot is not used any more.
func TestDamagedMedia(t *testing.T) {
	r := rand.New(rand.NewPCG(newSeed(t), 0))
	o, mem := withMedia(Options{MemoryBytes: 4 << 20}, 32<<20)
	c := open(t, o)
	var b backend
	const n = 300
	b.hitRate(t, c, 0, n)
	flipped := 0
	c.mu.Lock()
	for k, s := range c.media.index {
		if _, ok := c.index[k]; ok || c.media.slots[s].n == 0 || r.IntN(2) == 0 {
			continue
		}
		n := int64(c.media.slots[s].n)
		off, mask := int64(s)*ChunkSize+r.Int64N(n), []byte{1 << r.IntN(8)}
		if n == ChunkSize && r.IntN(2) == 0 { // a write that was lost: sectors of another chunk
			for mask = nil; len(mask) < ChunkSize; {
				mask = content(Key{Volume: vol, Epoch: 9, Seq: r.Uint64()})
			}
			off = int64(s) * ChunkSize
			for i, x := range content(Key{Volume: vol, Epoch: k.epoch, Seq: k.seq, Chunk: k.chunk}) {
				mask[i] ^= x
			}
		}
		if err := mem.Corrupt(o.Path, off, mask); err != nil {
			t.Fatal(err)
		}
		flipped++
	}
	c.mu.Unlock()
	before := b.fetches.Load()
	b.hitRate(t, c, 0, n) // compares the bytes
	if got := b.fetches.Load() - before; got < int64(flipped) || flipped < 50 {
		t.Fatalf("%d fetches for %d damaged chunks", got, flipped)
	}
	if got := value(c.stats.corrupt); got != float64(flipped) {
		t.Fatalf("%v corrupt chunks counted, %d were", got, flipped)
	}
	c.mu.Lock()
	free, used := len(c.media.free), len(c.media.index)
	c.mu.Unlock()
	if free != 0 || used > 512-flipped {
		t.Fatalf("%d slots are free, %d used", free, used)
	}
}

// TestMediaFails: a failed write ends the use of the media, with one call of the hook,
// and the readers do not notice. So does media that cannot be opened.
func TestMediaFails(t *testing.T) {
	broken := errors.New("broken disk")
	for _, op := range []vfs.Op{vfs.OpWrite, vfs.OpCreate} {
		o, mem := withMedia(Options{MemoryBytes: 4 << 20}, 32<<20)
		var calls atomic.Int64
		o.FS = vfs.Faulty(mem, func(got vfs.Op, _ string, off int64, _ int) error {
			if got == op && (op != vfs.OpWrite || off > 50*ChunkSize) {
				return broken
			}
			return nil
		})
		told := make(chan error, 10)
		o.OnMediaFailure = func(err error) { calls.Add(1); told <- err }
		c := open(t, o)
		var b backend
		b.hitRate(t, c, 0, 200)
		b.hitRate(t, c, 0, 200)
		if err := <-told; !errors.Is(err, broken) || calls.Load() != 1 {
			t.Fatalf("%s: told %v, %d calls", op, err, calls.Load())
		}
		if up := value(c.stats.mediaUp); up != 0 {
			t.Fatalf("%s: media_up is %v", op, up)
		}
	}
}

// TestMediaReadError: a slot that cannot be read is a miss.
func TestMediaReadError(t *testing.T) {
	o, mem := withMedia(Options{MemoryBytes: 4 << 20}, 32<<20)
	o.FS = vfs.Faulty(mem, func(op vfs.Op, _ string, off int64, _ int) error {
		if op == vfs.OpRead && off/ChunkSize%2 == 0 {
			return errors.New("bad sector")
		}
		return nil
	})
	c := open(t, o)
	var b backend
	b.hitRate(t, c, 0, 300)
	b.hitRate(t, c, 0, 300)
	if n := value(c.stats.mediaErrors); n < 50 {
		t.Fatalf("%v read errors counted", n)
	}
	if n := value(c.stats.mediaHits); n < 50 {
		t.Fatalf("%v hits on media", n)
	}
}

// TestMediaReserve: the cache does not fill the file system.
func TestMediaReserve(t *testing.T) {
	o, mem := withMedia(Options{MemoryBytes: 4 << 20}, 64<<20)
	mem.SetCapacity(32 << 20)
	o.ReserveBytes = 8 << 20
	o.OnMediaFailure = func(err error) { t.Error(err) }
	c := open(t, o)
	var b backend
	b.hitRate(t, c, 0, 1000)
	c.mu.Lock()
	used := c.media.next
	c.mu.Unlock()
	free, err := mem.Free("/cache")
	if err != nil || free < o.ReserveBytes || used == 0 {
		t.Fatalf("%d bytes free, %d slots used, %v", free, used, err)
	}
	if rate := b.hitRate(t, c, 990, 10); rate < 1 {
		t.Fatalf("hit rate %v", rate)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{
		{MemoryBytes: 1}, {Bytes: -1}, {Bytes: 1 << 30}, {Bytes: 1 << 62, FS: vfs.NewMem(), Path: "/x"}, {MaxFetches: -1},
	} {
		if _, err := Open(o); err == nil {
			t.Errorf("%+v is valid", o)
		}
	}
}
