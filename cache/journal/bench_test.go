package journal

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// waker is a Sink that wakes one writer per entry.
type waker struct {
	j   atomic.Pointer[Journal]
	gen uint64
}

func (w *waker) Synced(entries []*Entry) {
	for _, e := range entries {
		if e.Loc.Segment != w.gen {
			if w.gen != 0 {
				_ = w.j.Load().Release(w.gen)
			}
			w.gen = e.Loc.Segment
		}
		e.User.(chan error) <- nil
	}
}
func (w *waker) Failed(entries []*Entry, err error) {
	for _, e := range entries {
		e.User.(chan error) <- err
	}
}

// BenchmarkWrite measures durable 4 KiB writes of concurrent writers: the journal, and beside it the least that a
// log can do, a loop of one pwrite and one fdatasync per write on a pre-zeroed file. BENCH_DIR chooses the device.
func BenchmarkWrite(b *testing.B) {
	dir := os.Getenv("BENCH_DIR")
	if dir == "" {
		dir = b.TempDir()
	}
	b.Run("bare", func(b *testing.B) {
		const size = 64 << 20
		name := filepath.Join(dir, "bare")
		f, err := vfs.OS().OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			b.Fatal(err)
		}
		defer os.Remove(name)
		defer f.Close()
		if err := vfs.ZeroFill(f, 0, size, nil); err != nil {
			b.Fatal(err)
		}
		block := make([]byte, 2*BlockSize) // what a batch of one takes
		b.SetBytes(BlockSize)
		for i := 0; b.Loop(); i++ {
			if _, err := f.WriteAt(block, int64(i*len(block)%size)); err != nil {
				b.Fatal(err)
			}
			if err := f.SyncData(); err != nil {
				b.Fatal(err)
			}
		}
	})
	for _, writers := range []int{1, 32, 256} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			benchWriters(b, Options{Dir: filepath.Join(dir, "journal"), SegmentBytes: 64 << 20, JournalBytes: 4 * 64 << 20}, writers)
			os.RemoveAll(filepath.Join(dir, "journal"))
		})
	}
}

// BenchmarkCommit is the same without a device: the cost of the journal's own work.
func BenchmarkCommit(b *testing.B) {
	for _, writers := range []int{1, 32} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			benchWriters(b, Options{FS: nullFS{vfs.NewMem()}, Dir: "/j", SegmentBytes: 4 << 20, JournalBytes: 16 << 20}, writers)
		})
	}
}

func benchWriters(b *testing.B, opts Options, writers int) {
	sink := &waker{}
	opts.Sink = sink
	j, err := Open(opts, func(Record, Location) error { return nil })
	if err != nil {
		b.Fatal(err)
	}
	j.creating.Wait()
	sink.j.Store(j)
	var left atomic.Int64
	left.Store(int64(b.N))
	b.SetBytes(BlockSize)
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			e := &Entry{User: make(chan error, 1), Payload: [][]byte{make([]byte, BlockSize)}}
			e.Kind, e.Length, e.PayloadBytes = KindData, BlockSize, BlockSize
			for left.Add(-1) >= 0 {
				if err := j.Reserve(context.Background(), BlockSize); err != nil {
					b.Error(err)
					return
				}
				if err := j.Submit(e); err != nil {
					b.Error(err)
					return
				}
				if err := <-e.User.(chan error); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	if err := j.Close(); err != nil {
		b.Fatal(err)
	}
}

// nullFS writes and syncs nothing.
type nullFS struct{ vfs.FS }

func (s nullFS) OpenFile(name string, flag int, perm os.FileMode) (vfs.File, error) {
	f, err := s.FS.OpenFile(name, flag, perm)
	return nullFile{f}, err
}

type nullFile struct{ vfs.File }

func (nullFile) WritevAt(bufs [][]byte, _ int64) (int, error) {
	n := 0
	for _, b := range bufs {
		n += len(b)
	}
	return n, nil
}
func (nullFile) SyncData() error { return nil }
