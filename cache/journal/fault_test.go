package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// workload opens a journal, writes through several segments, and closes it. It stops at the first error, which it returns
// with the sink. opened is false if Open failed.
func workload(fs vfs.FS) (sink *recorder, opened bool, err error) {
	sink = newRecorder(0)
	opts := testOptions(fs, sink)
	opts.JournalBytes = 3 * opts.SegmentBytes
	j, err := Open(opts, func(Record, Location) error { return nil })
	if err != nil {
		return sink, false, err
	}
	for key := uint64(1); key <= 20; key++ {
		e := newEntry(KindData, key, 8000)
		if key%5 == 0 {
			e = newEntry(KindNote, key, 300)
		}
		if segs := j.Segments(); len(segs) > 1 {
			if err := j.Release(segs[0].Generation); err != nil {
				return sink, true, err
			}
		}
		if err = put(j, sink, e); err != nil {
			break
		}
		sink.wait()
	}
	if err != nil {
		// Final: nothing is accepted any more, and nothing waits for ever.
		for _, again := range []error{
			j.Submit(newEntry(KindFence, 0, 0)),
			j.Reserve(context.Background(), 512),
			j.Seal(context.Background()),
			j.Err(),
		} {
			if !errors.Is(again, ErrFailed) {
				sink.errs = append(sink.errs, fmt.Errorf("after a failure: %w", again))
			}
		}
	}
	if cerr := j.Close(); err == nil {
		err = cerr
	}
	return sink, true, err
}

// TestFaultAtEveryOperation lets each operation of a run fail in each way. What was reported as synced must be there
// after a power cut, whatever failed.
func TestFaultAtEveryOperation(t *testing.T) {
	count := 0
	var mu sync.Mutex
	counter := func(vfs.Op, string, int64, int) error {
		mu.Lock()
		defer mu.Unlock()
		count++
		return nil
	}
	if _, _, err := workload(vfs.Faulty(vfs.NewMem(), counter)); err != nil {
		t.Fatal(err)
	}
	if count < 60 {
		t.Fatalf("only %d operations", count)
	}
	faults := map[string]error{
		"EIO":           syscall.EIO,
		"ENOSPC":        syscall.ENOSPC,
		"short, EIO":    &vfs.Partial{N: 3 * vfs.SectorSize, Err: syscall.EIO},
		"short, ENOSPC": &vfs.Partial{N: BlockSize + 1, Err: syscall.ENOSPC},
		"done, EIO":     &vfs.Partial{N: 1 << 30, Err: syscall.EIO},
	}
	for name, fault := range faults {
		for at := range count {
			mem := vfs.NewMem()
			n, failedOp := 0, vfs.Op("")
			fs := vfs.Faulty(mem, func(op vfs.Op, _ string, _ int64, _ int) error {
				mu.Lock()
				defer mu.Unlock()
				if n++; n-1 == at && op != vfs.OpRead {
					failedOp = op
					return fault
				}
				return nil
			})
			sink, opened, err := workload(fs)
			what := fmt.Sprintf("%s at operation %d (%s)", name, at, failedOp)
			sink.check(t)
			if opened && (failedOp == vfs.OpWritev || failedOp == vfs.OpSyncData) && !errors.Is(err, ErrFailed) {
				t.Errorf("%s: run returned %v", what, err)
			}
			var got []replayed
			opts := testOptions(mem.CrashClone(nil, vfs.CrashOptions{Survive: vfs.SurviveNone}), newRecorder(0))
			opts.JournalBytes = 3 * opts.SegmentBytes
			j, err := Open(opts, collect(&got))
			if err != nil {
				t.Fatalf("%s: reopen: %v", what, err)
			}
			end := uint64(0)
			for i, r := range got {
				if i > 0 && r.rec.LSN != end+1 {
					t.Errorf("%s: LSN %d follows %d", what, r.rec.LSN, end)
				}
				end = r.rec.LSN
				if err := checkPayload(j, r); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			j.Close()
			if end < sink.syncedLSN() {
				t.Errorf("%s: replayed to %d, synced was %d", what, end, sink.syncedLSN())
			}
		}
	}
}

// TestShortWriteWithoutError: a write that claims fewer bytes and no error is a failure.
func TestShortWriteWithoutError(t *testing.T) {
	mem := vfs.NewMem()
	short := false
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(shortFS{mem, &short}, sink), nil)
	short = true
	if err := put(j, sink, newEntry(KindData, 1, 4096)); err != nil {
		t.Fatal(err)
	}
	sink.wait()
	if sink.failed != 1 || sink.synced != 0 {
		t.Errorf("failed %d, synced %d", sink.failed, sink.synced)
	}
	if err := j.Close(); !errors.Is(err, ErrFailed) {
		t.Errorf("Close returned %v", err)
	}
}

type shortFS struct {
	vfs.FS
	short *bool
}

func (s shortFS) OpenFile(name string, flag int, perm os.FileMode) (vfs.File, error) {
	f, err := s.FS.OpenFile(name, flag, perm)
	return shortFile{f, s.short}, err
}

type shortFile struct {
	vfs.File
	short *bool
}

func (f shortFile) WritevAt(bufs [][]byte, off int64) (int, error) {
	n, err := f.File.WritevAt(bufs, off)
	if *f.short {
		n--
	}
	return n, err
}

// TestStall: while the device hangs, nothing is reported, Submit returns, and Stalled grows.
func TestStall(t *testing.T) {
	mem := vfs.NewMem()
	entered, proceed := make(chan struct{}), make(chan struct{})
	stalling := false
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(vfs.Faulty(mem, func(op vfs.Op, _ string, _ int64, _ int) error {
		if op == vfs.OpSyncData && stalling {
			stalling = false
			close(entered)
			<-proceed
		}
		return nil
	}), sink), nil)
	if d := j.Stalled(); d != 0 {
		t.Errorf("idle journal is stalled for %v", d)
	}
	stalling = true
	if err := put(j, sink, newEntry(KindData, 1, 4096)); err != nil {
		t.Fatal(err)
	}
	<-entered
	first := j.Stalled()
	for key := uint64(2); key < 6; key++ {
		if err := put(j, sink, newEntry(KindData, key, 512)); err != nil {
			t.Fatal(err)
		}
	}
	if second := j.Stalled(); first <= 0 || second < first {
		t.Errorf("stalled for %v, then for %v", first, second)
	}
	if s := sink.syncedLSN(); s != 0 {
		t.Errorf("LSN %d reported as synced", s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := j.Seal(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Seal returned %v", err)
	}
	close(proceed)
	sink.wait()
	if s := sink.syncedLSN(); s != 5 {
		t.Errorf("synced to %d", s)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

// TestNoRoomForSegments: a device without room makes a smaller journal; Grow takes new room into use.
func TestNoRoomForSegments(t *testing.T) {
	mem := vfs.NewMem()
	mem.SetCapacity(64 << 10)
	opts := testOptions(mem, newRecorder(0))
	opts.JournalBytes = 6 * opts.SegmentBytes
	if _, err := Open(opts, func(Record, Location) error { return nil }); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Open with room for one segment returned %v", err)
	}
	mem.SetCapacity(3*opts.SegmentBytes + 4096)
	j := mustOpen(t, opts, nil)
	j.creating.Wait()
	_, small := j.Usage()
	if n := len(j.slots); n != 3 || j.Err() != nil {
		t.Fatalf("%d segments, error %v", n, j.Err())
	}
	// What is left to others stays free.
	mem.SetCapacity(5 * opts.SegmentBytes)
	j.opts.KeepFree = 2*opts.SegmentBytes + 4096
	j.Grow()
	j.creating.Wait()
	if n := len(j.slots); n != 3 {
		t.Errorf("%d segments", n)
	}
	mem.SetCapacity(100 * opts.SegmentBytes)
	j.Grow()
	j.creating.Wait()
	if used, large := j.Usage(); large != small+3*j.space.sure(j.space.usable) || used < 0 || len(j.slots) != 6 {
		t.Errorf("capacity went from %d to %d, %d segments", small, large, len(j.slots))
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	// A smaller JournalBytes gives room back.
	opts.JournalBytes = 3 * opts.SegmentBytes
	j = mustOpen(t, opts, nil)
	defer j.Close()
	if infos, _ := mem.ReadDir(testDir); len(infos) != 3 {
		t.Errorf("%d files", len(infos))
	}
}
