package journal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

const testDir = "/data/journal"

// recorder is a Sink that numbers entries and remembers what became of them.
type recorder struct {
	mu      sync.Mutex
	cond    sync.Cond
	lsn     uint64         // last assigned
	synced  uint64         // highest LSN reported as synced
	failed  int            // entries reported as failed
	pending int            // submitted, neither synced nor failed
	bySeg   map[uint64]int // synced entries per generation
	onSync  func([]*Entry)
	errs    []error // broken promises of the journal
}

func newRecorder(lsn uint64) *recorder {
	r := &recorder{lsn: lsn, synced: lsn, bySeg: map[uint64]int{}}
	r.cond.L = &r.mu
	return r
}

func (r *recorder) Synced(entries []*Entry) {
	r.mu.Lock()
	for _, e := range entries {
		if e.LSN != r.synced+1 {
			r.errs = append(r.errs, fmt.Errorf("synced LSN %d after %d", e.LSN, r.synced))
		}
		r.synced = e.LSN
		r.bySeg[e.Loc.Segment]++
		r.pending--
	}
	r.cond.Broadcast()
	r.mu.Unlock()
	if r.onSync != nil {
		r.onSync(entries)
	}
}

func (r *recorder) Failed(entries []*Entry, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !errors.Is(err, ErrFailed) {
		r.errs = append(r.errs, fmt.Errorf("entries failed with %w", err))
	}
	r.failed += len(entries)
	r.pending -= len(entries)
	r.cond.Broadcast()
}

// number gives entries the next LSNs and expects to hear of them.
func (r *recorder) number(entries ...*Entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range entries {
		r.lsn++
		e.LSN, e.Epoch = r.lsn, 1
		r.pending++
	}
}

// wait returns once everything submitted was reported.
func (r *recorder) wait() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.pending > 0 {
		r.cond.Wait()
	}
}

func (r *recorder) syncedLSN() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.synced
}

func (r *recorder) check(t testing.TB) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, err := range r.errs {
		t.Error(err)
	}
}

// fill writes the payload that belongs to key into b. Each whole sector ends with the CRC32C of what is before, as databases and file
// systems do it: so all whole blocks, whatever they hold, have the same CRC32C. A check that is a CRC itself would be blind.
func fill(key uint64, b []byte) {
	rng := rand.NewPCG(key, 77)
	for rest := b; len(rest) > 0; {
		n := min(8, len(rest))
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], rng.Uint64())
		copy(rest, word[:n])
		rest = rest[n:]
	}
	for ; len(b) >= 512; b = b[512:] {
		binary.LittleEndian.PutUint32(b[508:], castagnoliOf(b[:508]))
	}
}

// newEntry makes an entry whose payload is derived from key, which travels in Offset.
func newEntry(kind Kind, key uint64, size int) *Entry {
	e := &Entry{Record: Record{Kind: kind, Offset: key, Length: uint64(size), PayloadBytes: uint32(size), Volume: [16]byte{1, 2, 3}}}
	if kind == KindZero {
		e.Length, e.PayloadBytes = 1<<20, 0
		return e
	}
	if kind == KindSame {
		e.Length = 1 << 30
	}
	b := make([]byte, size)
	fill(key, b)
	for len(b) > 2*BlockSize {
		e.Payload = append(e.Payload, b[:2*BlockSize])
		b = b[2*BlockSize:]
	}
	if len(b) > 0 {
		e.Payload = append(e.Payload, b)
	}
	return e
}

type replayed struct {
	rec  Record
	loc  Location
	note []byte
}

func collect(into *[]replayed) func(Record, Location) error {
	return func(r Record, l Location) error {
		note := append([]byte(nil), r.Note...)
		r.Note = nil
		*into = append(*into, replayed{r, l, note})
		return nil
	}
}

// checkPayload reads the payload of a replayed record back and compares it with what its key says.
func checkPayload(j *Journal, r replayed) error {
	if r.rec.PayloadBytes == 0 {
		return nil
	}
	want := make([]byte, r.rec.PayloadBytes)
	fill(r.rec.Offset, want)
	got := make([]byte, len(want))
	if err := j.ReadAt(r.loc, 0, got); err != nil {
		return err
	}
	if string(got) != string(want) {
		return fmt.Errorf("payload of LSN %d differs", r.rec.LSN)
	}
	if r.rec.Kind == KindNote && string(r.note) != string(want) {
		return fmt.Errorf("note of LSN %d differs", r.rec.LSN)
	}
	return nil
}

func testOptions(fs vfs.FS, sink Sink) Options {
	return Options{FS: fs, Dir: testDir, SegmentBytes: 64 << 10, JournalBytes: 4 * 64 << 10, Sink: sink, Logger: slog.New(slog.DiscardHandler)}
}

func mustOpen(t testing.TB, opts Options, replay func(Record, Location) error) *Journal {
	t.Helper()
	if replay == nil {
		replay = func(Record, Location) error { return nil }
	}
	j, err := Open(opts, replay)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// put reserves and submits.
func put(j *Journal, r *recorder, e *Entry) error {
	if e.Kind.reserved() {
		if err := j.Reserve(context.Background(), int64(e.PayloadBytes)); err != nil {
			return err
		}
	}
	return r.submit(j, e)
}

// submit numbers an entry and submits it.
func (r *recorder) submit(j *Journal, e *Entry) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.LSN, e.Epoch = r.lsn+1, 1
	if err := j.Submit(e); err != nil {
		return err
	}
	r.lsn++
	r.pending++
	return nil
}

func yieldCPU() { runtime.Gosched() }

func castagnoliOf(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }
