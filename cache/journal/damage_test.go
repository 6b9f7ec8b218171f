package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// contents reads all segment files.
func contents(t testing.TB, fs vfs.FS) map[string][]byte {
	t.Helper()
	infos, err := fs.ReadDir(testDir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, i := range infos {
		if strings.HasSuffix(i.Name, tmpSuffix) {
			continue
		}
		name := filepath.Join(testDir, i.Name)
		b, err := vfs.ReadFile(fs, name, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = b
	}
	return files
}

// restore stores bytes as they are.
func restore(t testing.TB, files map[string][]byte) *vfs.Mem {
	t.Helper()
	mem := vfs.NewMem()
	if err := mem.MkdirAll(testDir, 0); err != nil {
		t.Fatal(err)
	}
	for name, b := range files {
		f, err := mem.OpenFile(name, os.O_CREATE|os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if err := mem.SyncDir(testDir); err != nil {
		t.Fatal(err)
	}
	return mem
}

// smallLog writes a log that spans segments, has batches of several entries, and recycled slots. hook sees each operation of
// the device once work has begun; step is called between batches.
func smallLog(t testing.TB, mem *vfs.Mem, hook vfs.Hook, step func(sink *recorder)) {
	t.Helper()
	sink := newRecorder(0)
	running := false
	opts := testOptions(vfs.Faulty(mem, func(op vfs.Op, name string, off int64, n int) error {
		if !running || hook == nil {
			return nil
		}
		return hook(op, name, off, n)
	}), sink)
	opts.JournalBytes = 3 * opts.SegmentBytes
	j := mustOpen(t, opts, nil)
	j.creating.Wait()
	running = true
	key := uint64(0)
	sizes := []int{512, 4096, 5000, 8192, 0, 100}
	for batch := range 26 {
		// Several entries in one batch: the committer sleeps until the last is queued.
		n := 1 + batch%3
		var entries []*Entry
		for range n {
			key++
			size := sizes[key%uint64(len(sizes))]
			kind := KindData
			switch {
			case size == 0:
				kind = KindZero
			case size == 100:
				kind = KindNote
			}
			entries = append(entries, newEntry(kind, key, size))
		}
		j.mu.Lock()
		for _, e := range entries {
			e.cost = entryCost(int64(e.PayloadBytes))
			j.space.queued += e.cost
		}
		sink.number(entries...)
		j.queue = append(j.queue, entries...)
		j.wake.Signal()
		j.mu.Unlock()
		sink.wait()
		if step != nil {
			step(sink)
		}
		if segs := j.Segments(); len(segs) > 2 {
			if err := j.Release(segs[0].Generation); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	sink.check(t)
}

// TestTear cuts the power at every sync and tries the tears of everything that was in flight: every subset
// of its sectors when they are few, else every prefix, every single sector and every single gap.
func TestTear(t *testing.T) {
	mem := vfs.NewMem()
	type moment struct {
		before, after map[string][]byte
		synced        uint64
	}
	var moments []moment
	var current *recorder
	last := uint64(0)
	smallLog(t, mem, func(op vfs.Op, _ string, _ int64, _ int) error {
		if op == vfs.OpSyncData {
			if current != nil {
				last = current.syncedLSN()
			}
			moments = append(moments, moment{
				before: contents(t, mem.CrashClone(nil, vfs.CrashOptions{Survive: vfs.SurviveNone})),
				after:  contents(t, mem.CrashClone(nil, vfs.CrashOptions{Survive: vfs.SurviveAll})),
				synced: last,
			})
		}
		return nil
	}, func(s *recorder) { current = s })

	type sector struct {
		name string
		off  int
	}
	images := 0
	for m, mo := range moments {
		var torn []sector
		for name, after := range mo.after {
			before := mo.before[name]
			for off := 0; off < len(after); off += vfs.SectorSize {
				if !bytes.Equal(after[off:off+vfs.SectorSize], before[off:off+vfs.SectorSize]) {
					torn = append(torn, sector{name, off})
				}
			}
		}
		if len(torn) == 0 {
			t.Fatalf("moment %d: nothing in flight", m)
		}
		try := func(keep func(i int) bool) {
			files := map[string][]byte{}
			for name, b := range mo.before {
				files[name] = bytes.Clone(b)
			}
			all := true
			for i, s := range torn {
				if keep(i) {
					copy(files[s.name][s.off:s.off+vfs.SectorSize], mo.after[s.name][s.off:])
				} else {
					all = false
				}
			}
			images++
			image := restore(t, files)
			var got []replayed
			sink := newRecorder(0)
			opts := testOptions(image, sink)
			opts.JournalBytes = 3 * opts.SegmentBytes
			j, err := Open(opts, collect(&got))
			if err != nil {
				t.Fatalf("moment %d, %d sectors: %v", m, len(torn), err)
			}
			defer j.Close()
			end := uint64(0)
			for i, r := range got {
				if i > 0 && r.rec.LSN != end+1 || r.rec.LSN != r.rec.Offset && r.rec.Kind != KindFence {
					t.Fatalf("moment %d: LSN %d follows %d", m, r.rec.LSN, end)
				}
				end = r.rec.LSN
				if err := checkPayload(j, r); err != nil {
					t.Fatalf("moment %d: %v", m, err)
				}
			}
			if end < mo.synced {
				t.Fatalf("moment %d: replayed to %d, synced was %d", m, end, mo.synced)
			}
			if !all && end > mo.synced+3 {
				t.Fatalf("moment %d: replayed to %d, synced was %d", m, end, mo.synced)
			}
		}
		if len(torn) <= 6 {
			for set := range 1 << len(torn) {
				try(func(i int) bool { return set>>i&1 != 0 })
			}
			continue
		}
		for k := range torn {
			try(func(i int) bool { return i < k })
			try(func(i int) bool { return i == k })
			try(func(i int) bool { return i != k })
		}
	}
	t.Logf("%d moments, %d images", len(moments), images)
}

// TestRot damages every part of a log. Whatever was durable must be replayed and readable, or be refused; only the
// last batch, which cannot be told from a torn one, may be dropped.
func TestRot(t *testing.T) {
	mem := vfs.NewMem()
	lastSynced, beforeLast := uint64(0), uint64(0)
	smallLog(t, mem, nil, func(s *recorder) { beforeLast, lastSynced = lastSynced, s.syncedLSN() })
	good := contents(t, mem)
	oldest := uint64(0)

	open := func(files map[string][]byte) ([]replayed, *Journal, error) {
		var got []replayed
		opts := testOptions(restore(t, files), newRecorder(0))
		opts.JournalBytes = 3 * opts.SegmentBytes
		j, err := Open(opts, collect(&got))
		return got, j, err
	}
	got, j, err := open(good)
	if err != nil {
		t.Fatal(err)
	}
	j.Close()
	oldest = got[0].rec.LSN
	if end := got[len(got)-1].rec.LSN; end != lastSynced || len(got) < 5 {
		t.Fatalf("replayed %d records to %d, synced %d", len(got), end, lastSynced)
	}

	refused, unreadable, dropped, unharmed := 0, 0, 0, 0
	check := func(what string, files map[string][]byte) {
		t.Helper()
		copies := map[string][]byte{}
		for name, b := range files {
			copies[name] = b
		}
		got, j, err := open(copies)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
				t.Fatalf("%s: %v", what, err)
			}
			refused++
			return
		}
		defer j.Close()
		if len(got) == 0 || got[0].rec.LSN > oldest {
			t.Fatalf("%s: the beginning is missing", what)
		}
		bad := false
		for i, r := range got {
			if r.rec.LSN != got[0].rec.LSN+uint64(i) {
				t.Fatalf("%s: LSN %d is missing", what, got[0].rec.LSN+uint64(i))
			}
			if err := checkPayload(j, r); errors.Is(err, ErrCorrupt) {
				bad = true
			} else if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		end := got[len(got)-1].rec.LSN
		switch {
		case end < beforeLast:
			t.Fatalf("%s: replay ends at %d, %d was synced long before", what, end, beforeLast)
		case end < lastSynced:
			dropped++
		case bad:
			unreadable++
		default:
			unharmed++
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for name, b := range good {
		trial := func(what string, change func(b []byte)) {
			c := bytes.Clone(b)
			change(c)
			files := map[string][]byte{}
			for n, b := range good {
				files[n] = b
			}
			files[name] = c
			check(fmt.Sprintf("%s: %s", name, what), files)
		}
		for block := 0; block < len(b)/BlockSize; block++ {
			at := block * BlockSize
			if isZero(b[at : at+BlockSize]) {
				continue
			}
			step, fine := 41, 1
			if testing.Short() {
				step, fine = 331, 9
			}
			for i := 0; i < BlockSize; i += step {
				bit := rng.IntN(8)
				trial(fmt.Sprintf("block %d, byte %d, bit %d", block, i, bit), func(b []byte) { b[at+i] ^= 1 << bit })
			}
			for i := 0; i < batchFixedBytes; i += fine {
				trial(fmt.Sprintf("block %d, byte %d", block, i), func(b []byte) { b[at+i] ^= 1 << rng.IntN(8) })
			}
			trial(fmt.Sprintf("block %d zeroed", block), func(b []byte) { clear(b[at : at+BlockSize]) })
			trial(fmt.Sprintf("block %d random", block), func(b []byte) { fill(uint64(block), b[at:at+BlockSize]) })
			other := rng.IntN(len(b)/BlockSize) * BlockSize
			trial(fmt.Sprintf("block %d misplaced", other), func(b []byte) { copy(b[other:other+BlockSize], b[at:]) })
			for s := 0; s < BlockSize; s += vfs.SectorSize {
				trial(fmt.Sprintf("block %d, sector at %d zeroed", block, s), func(b []byte) { clear(b[at+s:][:vfs.SectorSize]) })
			}
		}
		for _, size := range []int{0, 1, BlockSize, len(b) / 2, len(b) - 1} {
			files := map[string][]byte{}
			for n, b := range good {
				files[n] = b
			}
			files[name] = b[:size]
			check(fmt.Sprintf("%s cut to %d bytes", name, size), files)
		}
		files := map[string][]byte{}
		for n, b := range good {
			if n != name {
				files[n] = b
			}
		}
		if name != filepath.Join(testDir, "000002") {
			check(name+" gone", files)
		}
	}
	if refused == 0 || unreadable == 0 || dropped == 0 || unharmed == 0 {
		t.Errorf("refused %d, unreadable %d, dropped %d, unharmed %d: each must occur", refused, unreadable, dropped, unharmed)
	}
	t.Logf("refused %d, replayed with unreadable payload %d, last batch dropped %d, unharmed %d", refused, unreadable, dropped, unharmed)
}

// TestCorruptErrorChangesNothing: an Open that refuses leaves every byte as it was.
func TestCorruptErrorChangesNothing(t *testing.T) {
	mem := vfs.NewMem()
	smallLog(t, mem, nil, nil)
	files := contents(t, mem)
	for name, b := range files {
		if b[0] == 0 {
			continue
		}
		b[40] ^= 1 // segment header
		_ = name
	}
	bad := restore(t, files)
	opts := testOptions(bad, newRecorder(0))
	opts.JournalBytes = 3 * opts.SegmentBytes
	_, err := Open(opts, func(Record, Location) error { return nil })
	var ce *CorruptError
	if !errors.As(err, &ce) || !errors.Is(err, ErrCorrupt) {
		t.Fatalf("got %v", err)
	}
	for name, b := range contents(t, bad) {
		if !bytes.Equal(b, files[name]) {
			t.Errorf("%s was changed", name)
		}
	}
}

// TestFailedSyncLies: after a sync failed, Linux shows what was written and takes it for clean. A restarted process that
// replays it must make it durable before it says so.
func TestFailedSyncLies(t *testing.T) {
	for target := range 12 { // the sync that fails
		mem := vfs.NewMem()
		syncs := 0
		fs := vfs.Faulty(mem, func(op vfs.Op, name string, _ int64, _ int) error {
			if op == vfs.OpSyncData {
				if syncs++; syncs == target+2 {
					mem.LoseUnsynced(name)
					return io.ErrUnexpectedEOF
				}
			}
			return nil
		})
		sink := newRecorder(0)
		opts := testOptions(fs, sink)
		opts.JournalBytes = 2 * opts.SegmentBytes
		j := mustOpen(t, opts, nil)
		for key := uint64(1); key < 20; key++ {
			if err := put(j, sink, newEntry(KindNote, key, 4096)); err != nil {
				break
			}
			sink.wait()
		}
		if err := j.Close(); !errors.Is(err, ErrFailed) {
			t.Fatalf("sync %d: Close returned %v", target, err)
		}
		sink.check(t)

		opts = testOptions(mem, newRecorder(0))
		opts.JournalBytes = 2 * opts.SegmentBytes
		var first, second []replayed
		j = mustOpen(t, opts, collect(&first))
		again := opts.Sink.(*recorder)
		again.lsn, again.synced = uint64(len(first)), uint64(len(first))
		for range 2 {
			if err := put(j, again, newEntry(KindNote, 100, 10)); err != nil {
				t.Fatal(err)
			}
			again.wait()
		}
		opts.FS = mem.CrashClone(nil, vfs.CrashOptions{Survive: vfs.SurviveNone})
		j.Close()
		mustOpen(t, opts, collect(&second)).Close()
		if len(first)+2 != len(second) || uint64(len(first)) < sink.syncedLSN() {
			t.Errorf("sync %d: %d records replayed after the restart, %d after the power cut, %d synced", target, len(first), len(second), sink.syncedLSN())
		}
	}
}

// lastBatches writes three batches of one entry and returns the image without the last, the whole image, and where the
// payloads are.
func lastBatches(t *testing.T) (two, three map[string][]byte, locs []Location) {
	t.Helper()
	mem := vfs.NewMem()
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(mem, sink), nil)
	for key := uint64(1); key <= 3; key++ {
		two = contents(t, mem)
		e := newEntry(KindData, key, 5000)
		if err := put(j, sink, e); err != nil {
			t.Fatal(err)
		}
		sink.wait()
		locs = append(locs, e.Loc)
	}
	j.Close()
	return two, contents(t, mem), locs
}

// TestDroppedBatchIsWiped: a batch whose header landed and whose payload did not is gone for ever once Open returned.
func TestDroppedBatchIsWiped(t *testing.T) {
	_, files, locs := lastBatches(t)
	name := filepath.Join(testDir, "000000")
	payload := int(locs[2].Block) * BlockSize
	landed := bytes.Clone(files[name][payload : payload+2*BlockSize])
	clear(files[name][payload : payload+BlockSize])
	mem := restore(t, files)
	var got []replayed
	mustOpen(t, testOptions(mem, newRecorder(0)), collect(&got)).Close()
	if len(got) != 2 {
		t.Fatalf("replayed %d records, want 2", len(got))
	}
	// The same payload, sent again, lands in the same place without its header.
	files = contents(t, mem)
	copy(files[name][payload:], landed)
	got = nil
	mustOpen(t, testOptions(restore(t, files), newRecorder(0)), collect(&got)).Close()
	if len(got) != 2 {
		t.Errorf("a dropped batch came back")
	}
}

// TestRotBeforeTear: a damaged payload is no tear if the batch after it was begun.
func TestRotBeforeTear(t *testing.T) {
	files, three, locs := lastBatches(t)
	name := filepath.Join(testDir, "000000")
	header := int(locs[2].Block-1) * BlockSize
	copy(files[name][header:header+vfs.SectorSize], three[name][header:]) // the third batch is torn after one sector
	files[name][header+200] ^= 1
	files[name][int(locs[1].Block)*BlockSize+100] ^= 1
	var got []replayed
	j := mustOpen(t, testOptions(restore(t, files), newRecorder(0)), collect(&got))
	defer j.Close()
	if len(got) != 2 {
		t.Fatalf("replayed %d records, want 2", len(got))
	}
	if err := checkPayload(j, got[0]); err != nil {
		t.Error(err)
	}
	var ce *CorruptError
	if err := checkPayload(j, got[1]); !errors.As(err, &ce) || ce.Segment != locs[1].Segment || ce.Block != locs[1].Block {
		t.Errorf("reading the damaged payload returned %v", err)
	}
	// What is whole can still be read.
	b := make([]byte, 5000-BlockSize)
	if err := j.ReadAt(got[1].loc, BlockSize, b); err != nil {
		t.Error(err)
	}
}

// TestOpenRefuses: what cannot be this journal's intact state, or is not understood, is refused by name.
func TestOpenRefuses(t *testing.T) {
	mem := vfs.NewMem()
	smallLog(t, mem, nil, nil)
	good := contents(t, mem)
	other := vfs.NewMem()
	smallLog(t, other, nil, nil)
	foreign := contents(t, other)
	slot := func(i int) string { return filepath.Join(testDir, fmt.Sprintf("%06d", i)) }
	fixSegment := func(b []byte) { le.PutUint32(b[segmentCRCAt:], castagnoliOf(b[:segmentCRCAt])) }
	fixBatch := func(b []byte) {
		n, err := peekBatch(b, 16)
		if err != nil {
			t.Fatal(err)
		}
		sealRegion(b[:n*BlockSize])
	}
	// The newest segment.
	newest := 0
	for i := range 3 {
		if le.Uint64(good[slot(i)][32:]) > le.Uint64(good[slot(newest)][32:]) {
			newest = i
		}
	}
	for name, c := range map[string]struct {
		change func(files map[string][]byte)
		want   error
	}{
		"same generation twice": {func(f map[string][]byte) { copy(f[slot(0)], f[slot(1)]) }, ErrCorrupt},
		"another journal's":     {func(f map[string][]byte) { copy(f[slot(1)], foreign[slot(1)]) }, ErrCorrupt},
		"segment version": {func(f map[string][]byte) {
			f[slot(0)][8] = byte(segmentVersion) + 1
			fixSegment(f[slot(0)])
		}, ErrVersion},
		"batch version": {func(f map[string][]byte) {
			b := f[slot(newest)][BlockSize:]
			b[8] = byte(batchVersion) + 1
			fixBatch(b)
		}, ErrVersion},
		"batch flag": {func(f map[string][]byte) {
			b := f[slot(newest)][BlockSize:]
			b[10] |= 0x80
			fixBatch(b)
		}, ErrVersion},
		"kind": {func(f map[string][]byte) {
			b := f[slot(newest)][BlockSize:]
			b[batchFixedBytes+32] = 77
			fixBatch(b)
		}, ErrVersion},
		"chain": {func(f map[string][]byte) {
			b := f[slot(newest)][BlockSize:]
			b[76] ^= 1
			fixBatch(b)
		}, ErrCorrupt},
		"number": {func(f map[string][]byte) {
			b := f[slot(newest)][BlockSize:]
			b[40] += 5
			fixBatch(b)
		}, ErrCorrupt},
	} {
		files := map[string][]byte{}
		for n, b := range good {
			files[n] = bytes.Clone(b)
		}
		c.change(files)
		opts := testOptions(restore(t, files), newRecorder(0))
		opts.JournalBytes = 3 * opts.SegmentBytes
		j, err := Open(opts, func(Record, Location) error { return nil })
		if !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
		if err == nil {
			j.Close()
		}
	}
	// An error of the engine's ends Open.
	opts := testOptions(restore(t, good), newRecorder(0))
	opts.JournalBytes = 3 * opts.SegmentBytes
	if _, err := Open(opts, func(Record, Location) error { return io.ErrNoProgress }); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("got %v", err)
	}
}
