package journal

import (
	"errors"
	"sync"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

func TestRoundTrip(t *testing.T) {
	mem := vfs.NewMem()
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(mem, sink), nil)
	entries := []*Entry{
		newEntry(KindFence, 0, 0),
		newEntry(KindData, 1, 4096),
		newEntry(KindData, 2, 512),
		newEntry(KindData, 3, 8192),
		newEntry(KindData, 4, 4096+512),
		newEntry(KindZero, 5, 0),
		newEntry(KindSame, 6, 512),
		newEntry(KindNote, 7, 100),
		newEntry(KindNote, 8, 0),
		newEntry(KindNote, 9, MaxNoteBytes),
	}
	want := make([]Record, len(entries))
	for i, e := range entries {
		if err := put(j, sink, e); err != nil {
			t.Fatal(err)
		}
		sink.wait()
		want[i] = e.Record
	}
	incarnation := j.Incarnation()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	sink.check(t)
	for range 3 {
		var got []replayed
		j = mustOpen(t, testOptions(mem, sink), collect(&got))
		if len(got) != len(want) {
			t.Fatalf("replayed %d records, want %d", len(got), len(want))
		}
		for i, r := range got {
			w := want[i]
			if r.rec.Volume != w.Volume || r.rec.LSN != w.LSN || r.rec.Kind != w.Kind || r.rec.Offset != w.Offset ||
				r.rec.Length != w.Length || r.rec.PayloadBytes != w.PayloadBytes || r.rec.Time != w.Time || r.loc != entries[i].Loc {
				t.Errorf("record %d: got %+v at %v, want %+v at %v", i, r.rec, r.loc, w, entries[i].Loc)
			}
			if err := checkPayload(j, r); err != nil {
				t.Error(err)
			}
		}
		if j.Incarnation() != incarnation {
			t.Error("incarnation changed")
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadersAndRecycling lets readers pin and read on the real file system while segments are released and
// overwritten: a pinned segment reads as it was written, one that cannot be pinned is not read.
func TestReadersAndRecycling(t *testing.T) {
	sink := newRecorder(0)
	opts := testOptions(vfs.OS(), sink)
	opts.Dir = t.TempDir()
	j := mustOpen(t, opts, nil)

	var mu sync.Mutex
	var recent []Entry // synced lately, perhaps released since
	sink.onSync = func(entries []*Entry) {
		mu.Lock()
		defer mu.Unlock()
		for _, e := range entries {
			recent = append(recent, Entry{Record: e.Record, Loc: e.Loc})
		}
		if n := len(recent) - 40; n > 0 {
			recent = append(recent[:0], recent[n:]...)
		}
	}
	stop := make(chan struct{})
	var readers, writers sync.WaitGroup
	reads := make([]int, 3)
	for r := range reads {
		readers.Go(func() {
			for i := r; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				if len(recent) == 0 {
					mu.Unlock()
					yieldCPU()
					continue
				}
				e := recent[i%len(recent)]
				mu.Unlock()
				if i%2 == 0 {
					if !j.Pin(e.Loc.Segment) {
						continue
					}
					if err := checkPayload(j, replayed{rec: e.Record, loc: e.Loc}); err != nil {
						t.Errorf("pinned: %v", err)
					}
					j.Unpin(e.Loc.Segment)
					reads[r]++
				} else if err := checkPayload(j, replayed{rec: e.Record, loc: e.Loc}); err != nil && !errors.Is(err, ErrReleased) {
					t.Errorf("not pinned: %v", err)
				}
			}
		})
	}
	for w := range 4 {
		writers.Go(func() {
			for i := range 100 {
				if err := put(j, sink, newEntry(KindData, uint64(w*1000+i), 1+(w*977+i*331)%8192)); err != nil {
					t.Error(err)
					return
				}
				segs := j.Segments()
				for _, s := range segs[:max(0, len(segs)-2)] {
					if err := j.Release(s.Generation); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	writers.Wait()
	sink.wait()
	close(stop)
	readers.Wait()
	if reads[0]+reads[1]+reads[2] == 0 {
		t.Error("nothing was read")
	}
	want := sink.syncedLSN()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	sink.check(t)
	var got []replayed
	opts.Sink = newRecorder(0)
	j = mustOpen(t, opts, collect(&got))
	defer j.Close()
	if n := len(got); n == 0 || got[n-1].rec.LSN != want || want != 400 {
		t.Fatalf("replayed %d records, synced to %d", n, want)
	}
	for _, r := range got {
		if err := checkPayload(j, r); err != nil {
			t.Error(err)
		}
	}
}
