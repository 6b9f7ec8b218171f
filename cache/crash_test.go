package cache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/cache/vfs"
)

// TestCrash cuts the power at random moments, several times over, and compares what is
// there afterwards with the history: exactly the writes up to some LSN, in order, among
// them all that were acknowledged at a level that survives (P1 to P4). At the end the volume is restored from the
// bucket alone, and must be such a prefix too (P2).
func TestCrash(t *testing.T) {
	from, to := seeds(t, 1000, 60)
	for seed := from; seed < to; seed++ {
		if !t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { crashRun(t, seed) }) {
			t.Fatalf("run it again with ISERGATE_SEED=%d", seed)
		}
	}
}

// histWrite is a write of the history. lsn is 0 until it was assigned.
type histWrite struct {
	kind   journal.Kind
	off, n int64
	data   []byte // for Same one block
	size   int64  // of the volume, for a Note
	lsn    LSN
	acked  Level // 0: never acknowledged
}

// history is what was written to one volume, whoever answered.
type history struct {
	cfg     VolumeConfig
	mu      sync.Mutex
	writes  []*histWrite
	claimed LSN // the highest object watermark that was ever reported

	atObject LSN  // the highest that was acknowledged at `object`
	degrades bool // on-unmet=degrade is in force, or was
}

func (h *history) note(w *histWrite) {
	h.mu.Lock()
	h.writes = append(h.writes, w)
	h.mu.Unlock()
}

// drop forgets a write that was never handed to the journal.
func (h *history) drop(w *histWrite) {
	h.mu.Lock()
	h.writes = slices.DeleteFunc(h.writes, func(x *histWrite) bool { return x == w })
	h.mu.Unlock()
}

// image is the volume's content as of lsn.
func (h *history) image(lsn LSN, size int64) []byte {
	slices.SortFunc(h.writes, func(a, b *histWrite) int { return int(a.lsn) - int(b.lsn) })
	img := make([]byte, size)
	for _, w := range h.writes {
		if w.lsn == 0 || w.lsn > lsn {
			continue
		}
		if w.kind == journal.KindNote {
			continue
		}
		part := img[w.off : w.off+w.n]
		switch w.kind {
		case journal.KindData:
			copy(part, w.data)
		case journal.KindZero:
			clear(part)
		case journal.KindSame:
			for i := 0; i < len(part); i += len(w.data) {
				copy(part[i:], w.data)
			}
		}
	}
	return img
}

// check compares a volume with the history as of its LSN, and forgets what was lost.
func (h *history) check(t *testing.T, v *Volume, survives Level) {
	t.Helper()
	if err := h.compare(t, v, survives); err != nil {
		t.Fatal(err)
	}
}

// compare is check, and returns the error of a read.
func (h *history) compare(t *testing.T, v *Volume, survives Level) error {
	t.Helper()
	lsn := max(v.acked.get().LSN, v.local.get().LSN)
	h.mu.Lock()
	defer h.mu.Unlock()
	var top LSN
	for _, w := range h.writes {
		if w.acked >= survives && w.lsn > lsn {
			t.Errorf("volume %s: LSN %d was acknowledged at %s, and the volume ends at LSN %d", h.cfg.Name, w.lsn, w.acked, lsn)
		}
		if w.lsn <= lsn {
			top = max(top, w.lsn)
		}
	}
	if top != lsn {
		t.Errorf("volume %s ends at LSN %d, which nobody wrote; the history has %d", h.cfg.Name, lsn, top)
	}
	size := h.sizeAt(lsn)
	if v.size.Load() != size {
		t.Errorf("volume %s at LSN %d has %d bytes, the history says %d", h.cfg.Name, lsn, v.size.Load(), size)
	}
	want := h.image(lsn, size)
	for off := int64(0); off < int64(len(want)); off += 256 << 10 {
		n := min(256<<10, int64(len(want))-off)
		b, err := v.Read(t.Context(), off, n)
		for try := 0; errors.Is(err, ErrBusy) && try < 20; try++ { // a fault of the bucket, which ends
			b, err = v.Read(t.Context(), off, n)
		}
		if err != nil {
			return fmt.Errorf("volume %s: read %d+%d: %w", h.cfg.Name, off, n, err)
		}
		got := bytes.Join(b.Buffers(), nil)
		b.Release()
		if w := want[off : off+n]; !bytes.Equal(got, w) {
			for i := 0; i < len(got); i += sectorBytes {
				if !bytes.Equal(got[i:i+sectorBytes], w[i:i+sectorBytes]) {
					return fmt.Errorf("volume %s at LSN %d, sector %d: has stamp %x, the history says %x", h.cfg.Name, lsn, (off+int64(i))/sectorBytes, got[i:i+8], w[i:i+8])
				}
			}
		}
	}
	h.writes = slices.DeleteFunc(h.writes, func(w *histWrite) bool { return w.lsn == 0 || w.lsn > lsn })
	return nil
}

// sizeAt is the size of the volume as of lsn.
func (h *history) sizeAt(lsn LSN) int64 {
	size := h.cfg.SizeBytes
	for _, w := range h.writes {
		if w.lsn != 0 && w.lsn <= lsn {
			size = max(size, w.size)
		}
	}
	return size
}

// stamp fills data with values that no other write has. Each sector ends with its own CRC32C, as file systems and databases write them: then all
// data of a length has the same CRC32C, and what is checked by a CRC alone cannot tell old from new.
func stamp(rng *rand.Rand, data []byte) {
	id := rng.Uint64() | 1
	for i := 0; i+8 <= len(data); i += 8 {
		binary.LittleEndian.PutUint64(data[i:], id+uint64(i))
	}
	for ; len(data) >= sectorBytes; data = data[sectorBytes:] {
		binary.LittleEndian.PutUint32(data[sectorBytes-4:], crc32.Checksum(data[:sectorBytes-4], castagnoli))
	}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// write does one random write and notes it.
func (h *history) write(ctx context.Context, v *Volume, rng *rand.Rand) error {
	bs := int64(h.cfg.BlockSize)
	blocks := v.size.Load() / bs
	place := func(most int64) (off, n int64) {
		n = 1 + rng.Int64N(most)
		if rng.IntN(3) == 0 {
			return rng.Int64N(min(64, blocks-n)+1) * bs, n * bs // a place that is written again and again
		}
		return rng.Int64N(blocks-n+1) * bs, n * bs
	}
	w := &histWrite{}
	fua := rng.IntN(8) == 0
	due := v.due(fua)
	var err error
	var o *op
	var lsn LSN
	switch rng.IntN(10) {
	case 0:
		w.kind = journal.KindZero
		w.off, w.n = place(blocks / 2)
		if o, err = v.reserve(ctx, 0); err == nil {
			h.note(w)
			lsn, err = o.submit(journal.Record{Kind: w.kind, Offset: uint64(w.off), Length: uint64(w.n)}, due)
		}
	case 1:
		w.kind = journal.KindSame
		w.off, w.n = place(blocks / 4)
		w.data = make([]byte, bs)
		stamp(rng, w.data)
		if o, err = v.reserve(ctx, bs); err == nil {
			copy(o.mem.bufs[0], w.data)
			h.note(w)
			lsn, err = o.submit(journal.Record{Kind: w.kind, Offset: uint64(w.off), Length: uint64(w.n), PayloadBytes: uint32(bs)}, due)
		}
	default:
		w.kind = journal.KindData
		w.off, w.n = place(32 << 10 / bs)
		w.data = make([]byte, w.n)
		stamp(rng, w.data)
		if o, err = v.reserve(ctx, w.n); err == nil {
			rest := w.data
			for _, b := range o.mem.bufs {
				rest = rest[copy(b, rest):]
			}
			h.note(w)
			lsn, err = o.submit(journal.Record{Kind: w.kind, Offset: uint64(w.off), Length: uint64(w.n), PayloadBytes: uint32(w.n)}, due)
		}
	}
	if err != nil {
		h.drop(w)
		return err
	}
	return h.finish(ctx, w, o, due, lsn)
}

// finish waits for the answer and notes it.
func (h *history) finish(ctx context.Context, w *histWrite, o *op, due Level, lsn LSN) error {
	h.mu.Lock()
	w.lsn = lsn
	h.mu.Unlock()
	if err := o.finish(ctx, due, lsn); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w.acked = due
	if h.degrades {
		w.acked = min(due, Local) // and that is announced
	}
	if w.acked == Object {
		h.atObject = max(h.atObject, w.lsn)
	}
	return nil
}

func crashRun(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := newWorld()
	levels := []Policy{{Ack: Local, Flush: Local}, {Ack: Object, Flush: Object}, {Ack: Memory, Flush: Local}, {Ack: Local, Flush: Object}}
	var hs []*history
	for i := range 1 + rng.IntN(3) {
		cfg := w.config(fmt.Sprint("v", i), byte(i+1))
		cfg.Policy = levels[rng.IntN(len(levels))]
		if rng.IntN(2) == 0 {
			cfg.BlockSize = 4096
		}
		hs = append(hs, &history{cfg: cfg})
	}
	for life := range 2 + rng.IntN(3) {
		w = oneLife(t, w, hs, rng, life == 0)
		if t.Failed() {
			return
		}
	}
	restoreAll(t, w, hs)
}

// oneLife opens an engine, checks what is there, writes, and ends by a power cut or a clean close.
func oneLife(t *testing.T, w *world, hs []*history, rng *rand.Rand, first bool) *world {
	if rng.IntN(8) == 0 {
		w.store = homemap.NewMem() // the home maps are gone; the bucket and the journal have it all
	}
	e := w.open(t)
	vs := make([]*Volume, len(hs))
	for i, h := range hs {
		h.cfg.Bucket = gateBucket{w.bucket, w}
		var err error
		if first {
			vs[i], err = e.Create(t.Context(), h.cfg)
		} else {
			vs[i], err = e.Volume(t.Context(), h.cfg)
		}
		if err != nil {
			t.Fatal(err)
		}
		for vs[i].Status().State == StateOpening {
			time.Sleep(time.Millisecond)
		}
		if err := vs[i].serving(); err != nil {
			t.Fatal(err)
		}
		h.check(t, vs[i], Local)
	}
	if t.Failed() {
		return w
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var next *world
	var mu sync.Mutex
	clean := rng.IntN(4) == 0
	ops, at := 0, 1+rng.IntN(400)
	crashRng := rand.New(rand.NewPCG(rng.Uint64(), 2))
	if !clean {
		w.setFault(func(string) error {
			mu.Lock()
			defer mu.Unlock()
			if ops++; ops == at {
				next = w.crash(crashRng)
				cancel()
			}
			return nil
		})
	}
	var wg sync.WaitGroup
	for i, h := range hs {
		for range 1 + rng.IntN(3) {
			rng := rand.New(rand.NewPCG(rng.Uint64(), 3))
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range 60 {
					if err := h.write(ctx, vs[i], rng); err != nil {
						return
					}
					var err error
					switch rng.IntN(20) {
					case 0:
						err = vs[i].Flush(ctx)
					case 1:
						err = vs[i].Wait(ctx, Object)
					}
					if err != nil && err != ErrLostWrites {
						return
					}
					h.mu.Lock()
					h.claimed = max(h.claimed, vs[i].object.get().LSN)
					h.mu.Unlock()
				}
			}()
		}
	}
	wg.Wait()
	if clean {
		for i, h := range hs {
			h.check(t, vs[i], Memory)
		}
		if err := e.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		return &world{disk: w.disk.CrashClone(rng, vfs.CrashOptions{}), store: w.store.CrashClone(), bucket: w.bucket}
	}
	mu.Lock()
	if next == nil {
		next = w.crash(crashRng)
	}
	mu.Unlock()
	_ = e.Close(t.Context()) // its device is gone
	return next
}

// restoreAll restores every volume from the bucket into a new, empty node.
func restoreAll(t *testing.T, w *world, hs []*history) {
	fresh := newWorld()
	fresh.bucket = w.bucket
	e := fresh.open(t)
	defer e.Close(t.Context())
	for _, h := range hs {
		cfg := VolumeConfig{ID: h.cfg.ID, Policy: DefaultPolicy, Bucket: gateBucket{w.bucket, fresh}}
		v, report, err := e.Restore(t.Context(), cfg)
		if err != nil {
			if len(h.writes) == 0 || h.claimed == 0 {
				continue // it never reached the bucket
			}
			t.Fatal(err)
		}
		if report.LSN < h.claimed {
			t.Errorf("volume %s: LSN %d was reported at object, the bucket holds %d", h.cfg.Name, h.claimed, report.LSN)
		}
		if report.Name != h.cfg.Name || report.SizeBytes != h.sizeAt(report.LSN) || report.BlockSize != h.cfg.BlockSize {
			t.Errorf("restored %+v, want %+v", report, h.cfg)
		}
		h.check(t, v, Object)
	}
}
