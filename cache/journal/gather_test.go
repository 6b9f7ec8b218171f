package journal

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// TestGather reads random parts of random records at once, into buffers cut at random places, and finds what ReadAt
// finds; and it finds every damage.
func TestGather(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 5))
		mem := vfs.NewMem()
		var reads atomic.Int64
		sink := newRecorder(0)
		opts := testOptions(vfs.Faulty(mem, func(op vfs.Op, _ string, _ int64, _ int) error {
			if op == vfs.OpRead {
				reads.Add(1)
			}
			return nil
		}), sink)
		opts.JournalBytes = 16 * opts.SegmentBytes // nothing is released: each record may be a batch of its own
		j := mustOpen(t, opts, nil)
		var recs []*Entry
		for key := range uint64(24) {
			e := newEntry(KindData, key, (1+rng.IntN(16))*512)
			if rng.IntN(3) > 0 {
				e = newEntry(KindData, key, BlockSize)
			}
			if err := put(j, sink, e); err != nil {
				t.Fatal(err)
			}
			if rng.IntN(4) == 0 {
				sink.wait()
			}
			recs = append(recs, e)
		}
		sink.wait()
		var g Gatherer
		var pieces []Piece
		var want [][]byte
		whole := 0
		for _, e := range recs {
			if rng.IntN(5) == 0 {
				continue
			}
			all := make([]byte, e.PayloadBytes)
			fill(e.Offset, all)
			from, to := 0, len(all)
			if rng.IntN(4) == 0 {
				from = rng.IntN(len(all)/512) * 512
				to = from + (1+rng.IntN((len(all)-from)/512))*512
			}
			if from%BlockSize == 0 && (to-from)%BlockSize == 0 {
				whole++
			}
			p := Piece{Loc: e.Loc, Off: int64(from)}
			for left := to - from; left > 0; {
				n := min(left, (1+rng.IntN(12))*512)
				p.Into, left = append(p.Into, make([]byte, n)), left-n
			}
			pieces, want = append(pieces, p), append(want, all[from:to])
		}
		order := map[*byte][]byte{} // Read reorders
		for i := range pieces {
			order[&pieces[i].Into[0][0]] = want[i]
		}
		rng.Shuffle(len(pieces), func(a, b int) { pieces[a], pieces[b] = pieces[b], pieces[a] })
		reads.Store(0)
		if err := g.Read(j, pieces); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for _, p := range pieces {
			if !bytes.Equal(bytes.Join(p.Into, nil), order[&p.Into[0][0]]) {
				t.Fatalf("seed %d: piece at %+v + %d differs", seed, p.Loc, p.Off)
			}
		}
		if most := int64(len(pieces)-whole)*4 + int64(whole)/2 + 8; reads.Load() > most { // in parts of two blocks, between
			t.Errorf("seed %d: %d reads for %d pieces, %d of them of whole blocks", seed, reads.Load(), len(pieces), whole)
		}

		p := pieces[rng.IntN(len(pieces))]
		flip(t, j, p.Loc, p.Off+int64(rng.IntN(len(p.Into[0]))))
		var damage *CorruptError
		if err := g.Read(j, pieces); !errors.As(err, &damage) {
			t.Fatalf("seed %d: a flipped bit is read as %v", seed, err)
		}
		if block := p.Loc.Block + uint32(p.Off/BlockSize); damage.Segment != p.Loc.Segment || damage.Block < block || damage.Block > block+4 {
			t.Fatalf("seed %d: damage in block %d of %d is reported as %v", seed, block, p.Loc.Segment, damage)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		sink.check(t)
	}
}

// flip inverts a bit of a payload's byte on the device.
func flip(t *testing.T, j *Journal, loc Location, off int64) {
	t.Helper()
	j.mu.Lock()
	f := j.byGen[loc.Segment].file
	j.mu.Unlock()
	var b [1]byte
	at := int64(loc.Block)*BlockSize + off
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}
