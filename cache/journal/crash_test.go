package journal

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/vfs"
)

var (
	seedFlag  = flag.Uint64("journal.seed", 0, "run the power-cut test with this seed only")
	seedsFlag = flag.Int("journal.seeds", 1000, "number of seeds of the power-cut test")
)

var errCut = errors.New("power is off")

// A life is one opening of the journal: it does random work until the power fails at a random operation, and
// returns what is left.
type life struct {
	rng    *rand.Rand
	mem    *vfs.Mem
	oldest uint64 // LSN up to which records were released in any life
	lsn    uint64 // highest LSN that this life, or the ones before, replayed
	key    map[uint64]uint64
}

// run works on l.mem until the power fails and returns the image, the highest LSN reported as synced before that, and
// the keys of all submitted entries by LSN.
func (l *life) run(seed uint64) (image *vfs.Mem, synced uint64, err error) {
	cutAt := l.rng.IntN(60)
	after := l.rng.IntN(2) == 0
	kill := l.rng.IntN(4) == 0 // the process dies, the machine does not: what was written is there, though not durable
	cutRng := rand.New(rand.NewPCG(seed, l.rng.Uint64()))
	var sink *recorder
	ops := 0
	cut := make(chan struct{})
	doCut := func() {
		synced = 0
		if sink != nil {
			synced = sink.syncedLSN()
		}
		image = l.mem
		if !kill {
			image = l.mem.CrashClone(cutRng, vfs.CrashOptions{})
		}
		close(cut)
	}
	isCut := func() bool {
		select {
		case <-cut:
			return true
		default:
			return false
		}
	}
	hookMu := make(chan struct{}, 1)
	fs := vfs.Faulty(l.mem, func(op vfs.Op, name string, off int64, n int) error {
		if op == vfs.OpRead || op == vfs.OpOpen || op == vfs.OpClose {
			return nil
		}
		hookMu <- struct{}{}
		defer func() { <-hookMu }()
		if isCut() {
			return errCut // whatever happens after the cut did not happen
		}
		ops++
		if ops > cutAt {
			if after && (op == vfs.OpWrite || op == vfs.OpWritev) {
				// The power fails while the write is in flight: let it through, unsynced.
				after = false
				ops--
				return nil
			}
			doCut()
			return errCut
		}
		return nil
	})

	opts := testOptions(fs, nil)
	// The sink must exist before Open, but continue at the LSN that Open finds.
	sink = newRecorder(0)
	opts.Sink = sink
	var got []replayed
	j, err := Open(opts, collect(&got))
	if errors.Is(err, errCut) {
		return image, l.lsn, nil
	}
	if err != nil {
		return nil, 0, err
	}
	if err := l.checkReplay(j, got); err != nil {
		j.Close()
		return nil, 0, err
	}
	sink.mu.Lock()
	sink.lsn, sink.synced = l.lsn, l.lsn
	sink.mu.Unlock()

	bySeg := map[uint64]uint64{} // highest synced LSN of each segment
	for _, r := range got {
		bySeg[r.loc.Segment] = r.rec.LSN
	}
	sink.onSync = func(entries []*Entry) {
		sink.mu.Lock()
		defer sink.mu.Unlock()
		for _, e := range entries {
			bySeg[e.Loc.Segment] = e.LSN
		}
	}
	key := l.lsn
	for step := 0; !isCut() && step < 400; step++ {
		for range 1 + l.rng.IntN(4) {
			key++
			e := l.entry(key)
			if e.Kind.reserved() {
				ctx, cancel := context.WithCancel(context.Background())
				used, capacity := j.Usage()
				if capacity-used < entryCost(int64(e.PayloadBytes)) {
					cancel() // the journal may be full: do not wait
				}
				err := j.Reserve(ctx, int64(e.PayloadBytes))
				cancel()
				if err != nil {
					key--
					continue // full, or dead
				}
			}
			if err := sink.submit(j, e); err == ErrFull || errors.Is(err, errCut) {
				key--
			} else if err != nil {
				return nil, 0, err
			}
		}
		if l.rng.IntN(3) == 0 {
			sink.wait()
		}
		if l.rng.IntN(8) == 0 {
			if err := j.Seal(context.Background()); err != nil && err != ErrFull && !errors.Is(err, errCut) {
				return nil, 0, err
			}
		}
		if l.rng.IntN(4) == 0 || key%7 == 0 {
			sink.wait()
			segs := j.Segments()
			for _, s := range segs[:len(segs)-1] {
				if l.rng.IntN(3) != 0 {
					continue
				}
				pinned := l.rng.IntN(4) == 0 && j.Pin(s.Generation)
				if err := j.Release(s.Generation); err != nil {
					return nil, 0, err
				}
				if pinned {
					j.Unpin(s.Generation)
				}
			}
			live := j.Segments()
			for _, s := range segs {
				if s.Generation == live[0].Generation {
					break
				}
				sink.mu.Lock()
				l.oldest = max(l.oldest, bySeg[s.Generation])
				sink.mu.Unlock()
			}
		}
	}
	sink.wait()
	if !isCut() {
		hookMu <- struct{}{}
		doCut()
		<-hookMu
	}
	j.Close()
	sink.mu.Lock()
	defer sink.mu.Unlock()
	for _, e := range sink.errs {
		return nil, 0, e
	}
	return image, max(synced, l.lsn), nil
}

// entry makes a random entry. Its key equals the LSN that it gets, because entries are committed as submitted.
func (l *life) entry(key uint64) *Entry {
	size := 1 + l.rng.IntN(8192)
	if l.rng.IntN(2) == 0 {
		size = 512
	}
	var e *Entry
	switch l.rng.IntN(10) {
	case 0:
		e = newEntry(KindZero, key, 0)
	case 1:
		e = newEntry(KindSame, key, 512)
	case 2:
		e = newEntry(KindFence, key, 0)
	case 3:
		e = newEntry(KindNote, key, l.rng.IntN(MaxNoteBytes))
	default:
		e = newEntry(KindData, key, size)
	}
	// Lives differ: an entry of a life that was cut off must not pass for one of a later life.
	e.Flags = byte(l.lsn)
	return e
}

// checkReplay checks that what is replayed is contiguous, complete, and what was submitted.
func (l *life) checkReplay(j *Journal, got []replayed) error {
	last := l.oldest
	for i, r := range got {
		if i == 0 {
			if r.rec.LSN > l.oldest+1 {
				return fmt.Errorf("replay begins at LSN %d, released is %d", r.rec.LSN, l.oldest)
			}
		} else if r.rec.LSN != got[i-1].rec.LSN+1 {
			return fmt.Errorf("LSN %d follows LSN %d", r.rec.LSN, got[i-1].rec.LSN)
		}
		if r.rec.Offset != r.rec.LSN {
			return fmt.Errorf("LSN %d has the content of %d", r.rec.LSN, r.rec.Offset)
		}
		if err := checkPayload(j, r); err != nil {
			return fmt.Errorf("LSN %d: %w", r.rec.LSN, err)
		}
		last = max(last, r.rec.LSN)
	}
	if last < l.lsn {
		return fmt.Errorf("replay ends at LSN %d, %d was synced", last, l.lsn)
	}
	if len(got) > 0 && l.key != nil {
		for _, r := range got {
			if want, ok := l.key[r.rec.LSN]; ok && want != uint64(r.rec.Flags) {
				return fmt.Errorf("LSN %d comes from another life (%d, was %d)", r.rec.LSN, r.rec.Flags, want)
			}
		}
	}
	for _, r := range got {
		l.key[r.rec.LSN] = uint64(r.rec.Flags)
	}
	l.lsn = last
	return nil
}

// TestPowerCut cuts the power at random moments of several lives in a row: everything reported as synced is replayed,
// in order and unchanged, and nothing that a recovery dropped ever comes back.
func TestPowerCut(t *testing.T) {
	first, n := uint64(time.Now().UnixNano()), *seedsFlag
	if *seedFlag != 0 {
		first, n = *seedFlag, 1
	}
	if testing.Short() {
		n = min(n, 200)
	}
	records := uint64(0)
	for seed := first; seed < first+uint64(n); seed++ {
		l := &life{rng: rand.New(rand.NewPCG(seed, 1)), mem: vfs.NewMem(), key: map[uint64]uint64{}}
		for life := range 4 {
			image, synced, err := l.run(seed)
			if err != nil {
				t.Fatalf("-journal.seed=%d, life %d: %v", seed, life, err)
			}
			l.mem, l.lsn = image, synced
		}
		records += l.lsn
	}
	t.Logf("seeds %d to %d, %d records", first, first+uint64(n)-1, records)
}
