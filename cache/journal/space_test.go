package journal

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache/vfs"
)

// TestPromiseIsKept: whatever was reserved can be written, in any order and size, with nothing released meanwhile.
func TestPromiseIsKept(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 3))
		sink := newRecorder(0)
		opts := testOptions(vfs.NewMem(), sink)
		opts.JournalBytes = int64(2+rng.IntN(4)) * opts.SegmentBytes
		j := mustOpen(t, opts, nil)
		j.creating.Wait()
		var sizes []int64
		for {
			size := rng.Int64N(j.MaxEntryBytes() + 1)
			if used, capacity := j.Usage(); capacity-used < entryCost(size) {
				break
			}
			if err := j.Reserve(context.Background(), size); err != nil {
				t.Fatal(err)
			}
			sizes = append(sizes, size)
		}
		rng.Shuffle(len(sizes), func(a, b int) { sizes[a], sizes[b] = sizes[b], sizes[a] })
		for i, size := range sizes {
			kind := KindData
			if size == 0 {
				kind = KindZero
			}
			if err := sink.submit(j, newEntry(kind, uint64(i), int(size))); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if rng.IntN(3) == 0 {
				sink.wait()
			}
		}
		sink.wait()
		// Full for data, and yet fences and notes get through.
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		for range 2 {
			if err := put(j, sink, newEntry(KindFence, 0, 0)); err != nil {
				t.Fatalf("seed %d: fence in a full journal: %v", seed, err)
			}
			sink.wait()
		}
		for j.Reserve(ctx, j.MaxEntryBytes()) == nil {
			// Batches take less than was reserved for them one by one.
		}
		for {
			err := put(j, sink, newEntry(KindNote, 0, 10))
			if errors.Is(err, ErrFull) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			sink.wait()
		}
		if err := j.Close(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if sink.failed != 0 {
			t.Errorf("seed %d: %d entries failed", seed, sink.failed)
		}
		sink.check(t)
	}
}

// TestBackPressure: writers that outrun the release of segments wait, in order, and go on when there is room.
func TestBackPressure(t *testing.T) {
	sink := newRecorder(0)
	opts := testOptions(vfs.NewMem(), sink)
	opts.JournalBytes = 2 * opts.SegmentBytes
	registry := prometheus.NewRegistry()
	opts.Registerer = registry
	j := mustOpen(t, opts, nil)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 40 {
				if err := put(j, sink, newEntry(KindData, uint64(w*1000+i), 1+(w*977+i*331)%8192)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	// Release what can be released whenever something was synced.
	seen := uint64(0)
	sink.mu.Lock()
	for sink.synced < 8*40 {
		for sink.synced == seen {
			sink.cond.Wait()
		}
		seen = sink.synced
		sink.mu.Unlock()
		segs := j.Segments()
		for _, s := range segs[:len(segs)-1] {
			if err := j.Release(s.Generation); err != nil {
				t.Error(err)
			}
		}
		sink.mu.Lock()
	}
	sink.mu.Unlock()
	<-done
	if _, err := registry.Gather(); err != nil {
		t.Error(err)
	}
	if j.space.promised() != 0 {
		t.Errorf("%d bytes are still promised", j.space.promised())
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	sink.check(t)
	if families, _ := registry.Gather(); len(families) != 0 {
		t.Errorf("%d metrics are still registered", len(families))
	}
}

func TestReserve(t *testing.T) {
	sink := newRecorder(0)
	opts := testOptions(vfs.NewMem(), sink)
	opts.JournalBytes = 2 * opts.SegmentBytes
	j := mustOpen(t, opts, nil)
	big := j.MaxEntryBytes()
	if err := j.Reserve(context.Background(), big+1); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if err := j.Submit(newEntry(KindData, 1, 512)); !errors.Is(err, ErrInvalid) {
		t.Errorf("Submit without Reserve returned %v", err)
	}
	fillUp := func() {
		for used, capacity := j.Usage(); capacity-used >= entryCost(big); used, capacity = j.Usage() {
			if err := j.Reserve(context.Background(), big); err != nil {
				t.Fatal(err)
			}
		}
	}
	fillUp()
	// The first waits, the second, though small, stands behind it.
	waiting := func() int {
		j.mu.Lock()
		defer j.mu.Unlock()
		k := 0
		for w := j.space.head; w != nil; w = w.next {
			k++
		}
		return k
	}
	ctx, cancel := context.WithCancel(context.Background())
	first, second := make(chan error), make(chan error)
	go func() { first <- j.Reserve(ctx, big) }()
	for waiting() < 1 {
		yieldCPU()
	}
	go func() { second <- j.Reserve(context.Background(), 0) }()
	for waiting() < 2 {
		yieldCPU()
	}
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	j.Unreserve(big)
	if err := <-second; err != nil {
		t.Errorf("got %v", err)
	}
	fillUp()
	go func() { first <- j.Reserve(context.Background(), big) }()
	for waiting() < 1 {
		yieldCPU()
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-first; !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := j.Submit(newEntry(KindFence, 1, 0)); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := j.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestReleaseAndPin(t *testing.T) {
	sink := newRecorder(0)
	mem := vfs.NewMem()
	j := mustOpen(t, testOptions(mem, sink), nil)
	j.creating.Wait()
	var entries []*Entry
	for key := uint64(1); key <= 4; key++ {
		e := newEntry(KindData, key, 5000)
		entries = append(entries, e)
		if err := put(j, sink, e); err != nil {
			t.Fatal(err)
		}
		sink.wait()
		if err := j.Seal(context.Background()); key < 4 && err != nil {
			t.Fatal(err)
		} else if key == 4 && !errors.Is(err, ErrFull) {
			t.Fatalf("Seal without a free segment returned %v", err)
		}
	}
	gen := func(i int) uint64 { return entries[i].Loc.Segment }
	if err := j.Release(gen(3)); !errors.Is(err, ErrActive) {
		t.Errorf("got %v", err)
	}
	read := func(i int) error {
		b := make([]byte, 5000)
		err := j.ReadAt(entries[i].Loc, 0, b)
		want := make([]byte, 5000)
		fill(uint64(i+1), want)
		if err == nil && string(b) != string(want) {
			t.Errorf("entry %d reads differently", i)
		}
		return err
	}
	// Out of order: nothing happens until the oldest goes.
	if err := j.Release(gen(1)); err != nil {
		t.Fatal(err)
	}
	if segs := j.Segments(); len(segs) != 4 || !segs[1].Released || read(1) != nil {
		t.Errorf("segments %+v", segs)
	}
	if !j.Pin(gen(1)) {
		t.Error("not pinned")
	}
	if err := j.Release(gen(0)); err != nil {
		t.Fatal(err)
	}
	if segs := j.Segments(); len(segs) != 2 || segs[0].Generation != gen(2) {
		t.Errorf("segments %+v", segs)
	}
	if err := read(0); !errors.Is(err, ErrReleased) {
		t.Errorf("got %v", err)
	}
	if j.Pin(gen(0)) || j.Pin(gen(1)) {
		t.Error("a released segment was pinned")
	}
	if err := read(1); err != nil {
		t.Errorf("pinned: %v", err)
	}
	j.mu.Lock()
	free := len(j.free)
	j.mu.Unlock()
	if free != 1 {
		t.Errorf("%d free segments, want 1", free)
	}
	j.Unpin(gen(1))
	if err := read(1); !errors.Is(err, ErrReleased) {
		t.Errorf("got %v", err)
	}
	for _, bad := range []struct {
		loc    Location
		off, n int64
	}{
		{Location{gen(3), 0}, 0, 1},
		{Location{gen(3), 1 << 31}, 0, 1},
		{entries[3].Loc, -1, 1},
		{entries[3].Loc, 1 << 40, 1},
		{entries[3].Loc, 0, 64 << 10},
	} {
		if err := j.ReadAt(bad.loc, bad.off, make([]byte, bad.n)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: got %v", bad, err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := read(3); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	// Released segments need not come back, the others must.
	var got []replayed
	j = mustOpen(t, testOptions(mem, newRecorder(0)), collect(&got))
	defer j.Close()
	if n := len(got); n < 2 || got[n-2].loc != entries[2].Loc || got[n-1].loc != entries[3].Loc {
		t.Errorf("replayed %+v", got)
	}
}

// TestReadRanges reads every kind of range of one payload.
func TestReadRanges(t *testing.T) {
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(vfs.NewMem(), sink), nil)
	defer j.Close()
	const size = 8000
	e := newEntry(KindData, 42, size)
	if err := put(j, sink, e); err != nil {
		t.Fatal(err)
	}
	sink.wait()
	want := make([]byte, size)
	fill(42, want)
	edges := []int64{0, 1, 511, 512, 4095, 4096, 4097, 4608, 7999, 8000}
	for _, from := range edges {
		for _, to := range edges {
			if to < from {
				continue
			}
			b := make([]byte, to-from)
			if err := j.ReadAt(e.Loc, from, b); err != nil || string(b) != string(want[from:to]) {
				t.Errorf("%d to %d: %v", from, to, err)
			}
			clear(b)
			k := len(b) / 3
			if err := j.ReadvAt(e.Loc, from, [][]byte{b[:k], b[k:]}); err != nil || string(b) != string(want[from:to]) {
				t.Errorf("%d to %d in two: %v", from, to, err)
			}
		}
	}
}

func TestSubmitRefuses(t *testing.T) {
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(vfs.NewMem(), sink), nil)
	defer j.Close()
	block := make([]byte, BlockSize)
	for name, e := range map[string]*Entry{
		"unknown kind":       {Record: Record{Kind: 99}},
		"no kind":            {},
		"data, no payload":   {Record: Record{Kind: KindData, Length: 512}},
		"data, lengths":      {Record: Record{Kind: KindData, Length: 512, PayloadBytes: 4096}, Payload: [][]byte{block}},
		"zero with payload":  {Record: Record{Kind: KindZero, Length: 4096, PayloadBytes: 4096}, Payload: [][]byte{block}},
		"sum":                {Record: Record{Kind: KindData, Length: 4096, PayloadBytes: 4096}, Payload: [][]byte{block[:512]}},
		"odd piece":          {Record: Record{Kind: KindData, Length: 1024, PayloadBytes: 1024}, Payload: [][]byte{block[:512], block[:512]}},
		"long note":          {Record: Record{Kind: KindNote, PayloadBytes: 4097}, Payload: [][]byte{block, block[:1]}},
		"same above length":  {Record: Record{Kind: KindSame, Length: 512, PayloadBytes: 4096}, Payload: [][]byte{block}},
		"end of address":     {Record: Record{Kind: KindZero, Offset: 1 << 63, Length: 1 << 63}},
		"fence with payload": {Record: Record{Kind: KindFence, PayloadBytes: 1}, Payload: [][]byte{block[:1]}},
	} {
		if err := j.Submit(e); !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrVersion) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := j.Submit(newEntry(KindData, 1, int(j.MaxEntryBytes())+1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
}

func TestOptions(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"dir":            func(o *Options) { o.Dir = "" },
		"sink":           func(o *Options) { o.Sink = nil },
		"segment odd":    func(o *Options) { o.SegmentBytes++ },
		"segment small":  func(o *Options) { o.SegmentBytes = 4096 },
		"one segment":    func(o *Options) { o.JournalBytes = o.SegmentBytes },
		"entry too big":  func(o *Options) { o.MaxEntryBytes = o.SegmentBytes },
		"negative batch": func(o *Options) { o.MaxBatchBytes = -1 },
	} {
		o := testOptions(vfs.NewMem(), newRecorder(0))
		change(&o)
		if _, err := Open(o, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	// Another segment size than that on the device.
	mem := vfs.NewMem()
	mustOpen(t, testOptions(mem, newRecorder(0)), nil).Close()
	o := testOptions(mem, newRecorder(0))
	o.SegmentBytes *= 2
	o.JournalBytes *= 2
	if _, err := Open(o, nil); !errors.Is(err, ErrGeometry) {
		t.Errorf("got %v", err)
	}
}
