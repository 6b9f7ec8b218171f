package oracle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"
)

var testVolume = Volume{1, 2, 3, 15: 9}

func seeded(t testing.TB) (*rand.Rand, uint64) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 3)), seed
}

func newHistory(t testing.TB, blocks uint64) *History {
	t.Helper()
	h, err := NewHistory(testVolume, 77, blocks)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// image is a disk of whole blocks.
type image [][]byte

func newImage(n uint64) image {
	m := make(image, n)
	for i := range m {
		m[i] = make([]byte, BlockSize)
	}
	return m
}

func (m image) clone() image {
	c := make(image, len(m))
	for i := range m {
		c[i] = bytes.Clone(m[i])
	}
	return c
}

func (m image) read(_ context.Context, block uint64, p []byte) error {
	for i := uint64(0); i*BlockSize < uint64(len(p)); i++ {
		copy(p[i*BlockSize:], m[block+i])
	}
	return nil
}

func verify(t testing.TB, h *History, m image, keep Keep) *Report {
	t.Helper()
	r, err := h.Verify(context.Background(), m.read, keep)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// content is what an operation leaves in its i-th block.
func content(h *History, op *Op, i uint64) []byte {
	b := make([]byte, BlockSize)
	switch op.Kind {
	case Write:
		h.Fill(op, i, b)
	case Same:
		h.FillSame(op, b[:512])
		for at := 512; at < BlockSize; at += 512 {
			copy(b[at:], b[:512])
		}
	}
	return b
}

// update is the unit of the model: one block of one operation.
type update struct {
	op    *Op
	block uint64
	data  []byte
}

// disk is a correct volume: it applies updates one by one and remembers the order.
type disk struct {
	t     testing.TB
	h     *History
	r     *rand.Rand
	start image // before log
	log   []update

	flying  []*flight
	held    map[uint64]bool
	keep    int // updates in log that the policy requires
	ackedAt int // updates in log when the last acknowledged operation was complete
}

type flight struct {
	op   *Op
	left []update
}

// step does one random thing: submit, apply a block, acknowledge, flush.
func (d *disk) step(policy Keep) {
	n := d.h.Blocks()
	switch d.r.IntN(8) {
	case 0, 1:
		if len(d.flying) >= 6 {
			return
		}
		first := d.r.Uint64N(n)
		count := 1 + d.r.Uint64N(min(6, n-first))
		for b := first; b < first+count; b++ {
			if d.held[b] {
				return
			}
		}
		op, err := d.h.Submit(Kind(1+d.r.IntN(4)), first, count, d.r.IntN(8) == 0)
		if err != nil {
			d.t.Fatal(err)
		}
		f := &flight{op: op}
		for i := range count {
			d.held[first+i] = true
			f.left = append(f.left, update{op, first + i, content(d.h, op, i)})
		}
		d.r.Shuffle(len(f.left), func(i, j int) { f.left[i], f.left[j] = f.left[j], f.left[i] })
		d.flying = append(d.flying, f)
	case 2, 3, 4:
		if len(d.flying) > 0 {
			if f := d.flying[d.r.IntN(len(d.flying))]; len(f.left) > 0 {
				d.log = append(d.log, f.left[0])
				f.left = f.left[1:]
			}
		}
	case 5, 6:
		for i, f := range d.flying {
			if len(f.left) > 0 {
				continue
			}
			if err := d.h.Ack(f.op); err != nil {
				d.t.Fatal(err)
			}
			d.ackedAt = len(d.log)
			if policy == KeepAcked || policy == KeepFlushed && f.op.FUA {
				d.keep = len(d.log)
			}
			for b := f.op.First; b < f.op.First+f.op.Count; b++ {
				d.held[b] = false
			}
			d.flying = append(d.flying[:i], d.flying[i+1:]...)
			return
		}
	case 7:
		id, err := d.h.BeginFlush()
		if err == nil {
			err = d.h.EndFlush(id)
		}
		if err != nil {
			d.t.Fatal(err)
		}
		if policy == KeepFlushed {
			d.keep = d.ackedAt
		}
	}
}

// crash leaves a prefix of the log, at least what must be kept.
func (d *disk) crash() (prefix []update, m image) {
	if err := d.h.Crash(); err != nil {
		d.t.Fatal(err)
	}
	prefix = d.log[:d.keep+d.r.IntN(len(d.log)-d.keep+1)]
	return prefix, d.replay(prefix, nil)
}

func (d *disk) replay(us []update, without func(update) bool) image {
	m := d.start.clone()
	for _, u := range us {
		if without == nil || !without(u) {
			m[u.block] = u.data
		}
	}
	return m
}

func newDisk(t testing.TB, r *rand.Rand, h *History) *disk {
	return &disk{t: t, h: h, r: r, start: newImage(h.Blocks()), held: map[uint64]bool{}}
}

func (d *disk) run(steps int, policy Keep) {
	for range steps {
		d.step(policy)
	}
}

// A correct volume never raises an alarm, over several crashes (O1), and the log tells the same story (O2).
func TestNoFalseAlarm(t *testing.T) {
	r, _ := seeded(t)
	for _, policy := range []Keep{KeepAcked, KeepFlushed, KeepPrefix} {
		for range 25 {
			h := newHistory(t, 1+r.Uint64N(24))
			var log bytes.Buffer
			if err := h.Log(&log); err != nil {
				t.Fatal(err)
			}
			d := newDisk(t, r, h)
			for round := range 4 {
				d.run(200, policy)
				_, m := d.crash()
				rep := verify(t, h, m, policy)
				if err := rep.Err(); err != nil {
					t.Fatalf("policy %d, round %d: %v", policy, round, err)
				}
				loaded, err := Load(bytes.NewReader(log.Bytes()))
				if err != nil {
					t.Fatal(err)
				}
				again := verify(t, loaded, m, policy)
				if !reflect.DeepEqual(rep, again) {
					t.Fatalf("the log tells another story: %+v, %+v", rep, again)
				}
				if err := h.Rebase(rep); err != nil {
					t.Fatal(err)
				}
				*d = disk{t: t, h: h, r: r, start: m, held: map[uint64]bool{}}
			}
		}
	}
}

// A volume that loses one update in the middle is caught whenever the loss is visible and
// something acknowledged later survives.
func TestPlantedHole(t *testing.T) {
	r, _ := seeded(t)
	for _, policy := range []Keep{KeepAcked, KeepFlushed, KeepPrefix} {
		planted := 0
		for range 80 {
			h := newHistory(t, 16)
			d := newDisk(t, r, h)
			d.run(250, policy)
			prefix, m := d.crash()
			// The last update of each block is visible. Take away one of an acknowledged operation; it must be
			// noticed if the operation ended before the submission of one that is still visible. Zeros cannot
			// testify, and neither can a block that looks the same without the update.
			last := map[uint64]update{}
			for _, u := range prefix {
				last[u.block] = u
			}
			for _, u := range last {
				if !u.op.acked {
					continue
				}
				broken := d.replay(prefix, func(v update) bool { return v.op == u.op && v.block == u.block })
				if bytes.Equal(broken[u.block], m[u.block]) || isZero(broken[u.block]) {
					continue
				}
				h.mu.Lock()
				required := policy == KeepAcked || policy == KeepFlushed && h.flushedLocked(u.op)
				h.mu.Unlock()
				outlived := false
				for _, v := range last {
					outlived = outlived || v.block != u.block && !v.op.Kind.zeros() && v.op.submit > u.op.end
				}
				if !required && !outlived {
					continue
				}
				planted++
				rep := verify(t, h, broken, policy)
				if rep.Violated == 0 {
					t.Fatalf("policy %d: %v is missing at block %d and nobody noticed", policy, u.op, u.block)
				}
				for _, v := range rep.Violations {
					if required && v.Kind != Lost || !required && v.Kind != Order {
						t.Fatalf("policy %d: %v is missing: %v", policy, u.op, v)
					}
				}
			}
		}
		if planted < 20 {
			t.Errorf("policy %d: only %d holes were planted", policy, planted)
		}
	}
}

// script builds a small history by hand.
func script(t testing.TB, h *History, kind Kind, first, count uint64, ack bool) *Op {
	t.Helper()
	op, err := h.Submit(kind, first, count, false)
	if err == nil && ack {
		err = h.Ack(op)
	}
	if err != nil {
		t.Fatal(err)
	}
	return op
}

func TestPlantedValues(t *testing.T) {
	h := newHistory(t, 8)
	m := newImage(8)
	old := script(t, h, Write, 0, 4, true)
	op := script(t, h, Write, 0, 4, true)
	maybe := script(t, h, Write, 4, 2, false)
	if err := h.Crash(); err != nil {
		t.Fatal(err)
	}
	for i := range op.Count {
		m[i] = content(h, op, i)
	}
	m[5] = content(h, maybe, 1) // a torn, unacknowledged write
	if rep := verify(t, h, m, KeepAcked); rep.Err() != nil || rep.Stamped != 5 || rep.KeptMaybe != 1 || rep.LostAcked != 0 {
		t.Fatalf("%+v", rep)
	}
	other, err := NewHistory(testVolume, 78, 8)
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := NewHistory(Volume{7}, 77, 8)
	if err != nil {
		t.Fatal(err)
	}
	flip := bytes.Clone(m[1])
	flip[1000] ^= 1
	half := append(bytes.Clone(m[1][:2048]), content(h, old, 1)[2048:]...)
	for _, test := range []struct {
		name string
		at   uint64
		data []byte
		want ViolationKind
	}{
		{"flipped bit", 1, flip, Corrupt},
		{"torn block", 1, half, Corrupt},
		{"half zero", 1, append(bytes.Clone(m[1][:2048]), make([]byte, 2048)...), Corrupt},
		{"another block", 1, m[2], Misplaced},
		{"another run", 1, content(other, op, 1), Foreign},
		{"another volume", 1, content(stranger, op, 1), Foreign},
		{"never written", 1, content(h, &Op{Seq: 99, Kind: Write}, 1), Unknown},
		{"older value", 1, content(h, old, 1), Lost},
		{"zeros", 1, make([]byte, BlockSize), Lost},
		{"value of an operation elsewhere", 7, content(h, &Op{Seq: op.Seq, Kind: Write, First: 7}, 0), Unknown},
	} {
		t.Run(test.name, func(t *testing.T) {
			broken := m.clone()
			broken[test.at] = test.data
			rep := verify(t, h, broken, KeepAcked)
			if rep.Violated != 1 || rep.Violations[0].Kind != test.want || rep.Violations[0].Block != test.at {
				t.Errorf("%v", rep.Err())
			}
			if unidentified := test.want <= Misplaced; (h.Rebase(rep) == nil) == unidentified && unidentified {
				t.Error("a rebase on blocks that nobody knows")
			}
			// Put the history back as it was: Rebase took the broken image.
			h = newHistory(t, 8)
			old = script(t, h, Write, 0, 4, true)
			op = script(t, h, Write, 0, 4, true)
			script(t, h, Write, 4, 2, false)
			if err := h.Crash(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestPrefixRule(t *testing.T) {
	h := newHistory(t, 4)
	a := script(t, h, Write, 0, 1, true)
	b := script(t, h, Write, 1, 1, true)
	c, err := h.Submit(Write, 2, 1, false) // overlaps d in time
	if err != nil {
		t.Fatal(err)
	}
	d := script(t, h, Write, 3, 1, true)
	if err := errors.Join(h.Ack(c), h.Crash()); err != nil {
		t.Fatal(err)
	}
	at := func(ops ...*Op) image {
		m := newImage(4)
		for _, op := range ops {
			m[op.First] = content(h, op, 0)
		}
		return m
	}
	for _, good := range [][]*Op{{}, {a}, {a, b}, {a, b, c}, {a, b, d}, {a, b, c, d}} {
		if err := verify(t, h, at(good...), KeepPrefix).Err(); err != nil {
			t.Errorf("%v: %v", good, err)
		}
	}
	for _, bad := range [][]*Op{{b}, {a, c}, {d}, {b, c, d}} {
		rep := verify(t, h, at(bad...), KeepPrefix)
		if rep.Violated == 0 || rep.Violations[0].Kind != Order {
			t.Errorf("%v: %v", bad, rep.Err())
		}
	}
}

// Zeros may be the initial state or any operation that leaves zeros: the judgement must not depend on a guess.
func TestAmbiguousZeros(t *testing.T) {
	h := newHistory(t, 3)
	z1 := script(t, h, Zero, 0, 1, true)
	w := script(t, h, Write, 1, 1, true)
	x := script(t, h, Write, 0, 1, true)
	script(t, h, Unmap, 0, 1, true)
	y := script(t, h, Write, 2, 1, true)
	if err := h.Crash(); err != nil {
		t.Fatal(err)
	}
	_ = z1
	m := newImage(3)
	if err := verify(t, h, m, KeepPrefix).Err(); err != nil {
		t.Errorf("nothing survived: %v", err)
	}
	m[1] = content(h, w, 0) // block 0: z1 survived, x and the unmap did not
	if err := verify(t, h, m, KeepPrefix).Err(); err != nil {
		t.Errorf("up to w: %v", err)
	}
	m[2] = content(h, y, 0) // now block 0 must be the unmap's
	if err := verify(t, h, m, KeepAcked).Err(); err != nil {
		t.Errorf("everything survived: %v", err)
	}
	m[1] = make([]byte, BlockSize) // w is missing under y
	if rep := verify(t, h, m, KeepPrefix); rep.Violated != 1 || rep.Violations[0].Block != 1 {
		t.Errorf("w is missing: %v", rep.Err())
	}
	m[1], m[0] = content(h, w, 0), content(h, x, 0) // x survived, the unmap not, y did
	if rep := verify(t, h, m, KeepPrefix); rep.Violated != 1 || rep.Violations[0].Block != 0 {
		t.Errorf("the unmap is missing: %v", rep.Err())
	}
}

// A write that was lost and comes back after a rebase is an unknown value (O3).
func TestResurrection(t *testing.T) {
	h := newHistory(t, 2)
	op := script(t, h, Write, 0, 1, true)
	if err := h.Crash(); err != nil {
		t.Fatal(err)
	}
	m := newImage(2)
	rep := verify(t, h, m, KeepPrefix)
	if err := errors.Join(rep.Err(), h.Rebase(rep)); err != nil {
		t.Fatal(err)
	}
	m[0] = content(h, op, 0)
	if rep := verify(t, h, m, KeepPrefix); rep.Violated != 1 || rep.Violations[0].Kind != Unknown {
		t.Errorf("%v", rep.Err())
	}
}

func TestCheckRead(t *testing.T) {
	h := newHistory(t, 2)
	a := script(t, h, Write, 0, 1, true)
	b := script(t, h, Write, 0, 1, true)
	c := script(t, h, Write, 0, 1, false)
	for _, good := range []*Op{b, c} {
		if err := h.CheckRead(0, content(h, good, 0)); err != nil {
			t.Error(err)
		}
	}
	var v *Violation
	if err := h.CheckRead(0, content(h, a, 0)); !errors.As(err, &v) || v.Kind != Lost {
		t.Errorf("a stale read: %v", err)
	}
	if err := h.CheckRead(0, make([]byte, BlockSize)); !errors.As(err, &v) {
		t.Errorf("a read of zeros: %v", err)
	}
}

func TestMisuse(t *testing.T) {
	if _, err := NewHistory(testVolume, 1, 0); err == nil {
		t.Error("an empty region")
	}
	h := newHistory(t, 4)
	for _, bad := range [][2]uint64{{4, 1}, {0, 5}, {3, 2}, {0, 0}, {1 << 63, 1 << 63}} {
		if _, err := h.Submit(Write, bad[0], bad[1], false); err == nil {
			t.Errorf("submitted %v", bad)
		}
	}
	op := script(t, h, Write, 0, 1, true)
	if err := h.Ack(op); err == nil {
		t.Error("acknowledged twice")
	}
	if err := h.EndFlush(12345); err == nil {
		t.Error("ended a flush that never began")
	}
	script(t, h, Write, 0, 1, false)
	if err := h.Rebase(verify(t, h, newImage(4), KeepPrefix)); err == nil {
		t.Error("rebased with an open operation")
	}
	if err := h.Log(new(bytes.Buffer)); err == nil {
		t.Error("a log that begins in the middle")
	}
	failing := newHistory(t, 1)
	if err := failing.Log(failWriter{}); !errors.Is(err, ErrLog) {
		t.Errorf("a log that cannot be written: %v", err)
	}
}

type failWriter struct{}

func (failWriter) Write([]byte) (int, error) { return 0, errors.New("full") }

// Any prefix of a log is a log (the writer died there), and damage in the middle is an error.
func TestLogPrefixes(t *testing.T) {
	r, _ := seeded(t)
	h := newHistory(t, 8)
	var log bytes.Buffer
	if err := h.Log(&log); err != nil {
		t.Fatal(err)
	}
	d := newDisk(t, r, h)
	d.run(200, KeepAcked)
	_, m := d.crash()
	if err := h.Rebase(verify(t, h, m, KeepAcked)); err != nil {
		t.Fatal(err)
	}
	b := log.Bytes()
	head := bytes.IndexByte(b, '\n') + 1
	for n := range len(b) {
		_, err := Load(bytes.NewReader(b[:n]))
		if (err == nil) != (n >= head) {
			t.Fatalf("prefix of %d bytes of %d: %v", n, len(b), err)
		}
	}
	first := string(b[:head])
	for _, bad := range []string{"S 1 1 1 0 1\n", "S 1 1 9 0 1 true\n", "S 1 1 1 8 1 true\n", "S 0 1 1 0 1 true\n", "A 1 1\n", "E 2 1\n", "X\n", "\n",
		"B 0 1\n", "Z 1\n", "S 1 1 1 0 1 maybe\n", "R 1\nS 2 1 1 0 1 true\n", "R 1\nB 9 1\n", "F 1\nF 1\n", strings.Repeat("9", 300) + "\n"} {
		if _, err := Load(strings.NewReader(first + bad)); !errors.Is(err, ErrBadLog) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := Load(strings.NewReader("isergate-oracle 2 00 1 1\n")); !errors.Is(err, ErrBadLog) {
		t.Error("another version")
	}
}

func FuzzLoad(f *testing.F) {
	f.Add("isergate-oracle 1 0102030000000000000000000000000f 77 8\nS 1 1 1 0 4 false\nA 2 1\nF 3\nE 4 3\nC 5\nR 6\nB 0 1\nZ 7\n")
	f.Fuzz(func(t *testing.T, s string) {
		h, err := Load(strings.NewReader(s))
		if err != nil || h.Blocks() > 1024 {
			return
		}
		m := newImage(h.Blocks())
		if _, err := h.Verify(context.Background(), m.read, KeepFlushed); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzDecode(f *testing.F) {
	b := make([]byte, BlockSize)
	stamp{volume: testVolume, block: 1, seq: 2, seed: 3}.encode(b)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := decode(b)
		if !ok {
			return
		}
		again := make([]byte, BlockSize)
		s.encode(again)
		if got, ok := decode(again); !ok || got != s {
			t.Fatal(fmt.Errorf("%+v became %+v", s, got))
		}
	})
}

func BenchmarkFill(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(BlockSize)
	h := newHistory(b, 1)
	op := &Op{Seq: 1, Kind: Write}
	p := make([]byte, BlockSize)
	for b.Loop() {
		h.Fill(op, 0, p)
	}
}
