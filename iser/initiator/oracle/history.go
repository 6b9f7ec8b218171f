package oracle

import (
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
)

// Kind is what an operation does to its blocks.
type Kind uint8

// Kinds. Zero and Unmap leave zeros.
const (
	Write Kind = 1
	Same  Kind = 2
	Zero  Kind = 3
	Unmap Kind = 4
)

// String returns the name of the kind.
func (k Kind) String() string {
	switch k {
	case Write:
		return "write"
	case Same:
		return "write-same"
	case Zero:
		return "zero"
	case Unmap:
		return "unmap"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

func (k Kind) zeros() bool { return k == Zero || k == Unmap }

// never is the end of an operation whose outcome is open.
const never = math.MaxUint64

// Op is one operation. Its fields are fixed once it is submitted, except those that
// the History guards.
type Op struct {
	Seq          uint64
	Kind         Kind
	First, Count uint64 // blocks, relative to the history's region
	FUA          bool

	submit uint64
	end    uint64 // never while open
	acked  bool
}

// String describes the operation for reports.
func (o *Op) String() string {
	state := "unacknowledged"
	if o.acked {
		state = fmt.Sprintf("acknowledged at %d", o.end)
	}
	return fmt.Sprintf("%v %d of blocks %d+%d, submitted at %d, %s", o.Kind, o.Seq, o.First, o.Count, o.submit, state)
}

// MaxBlocks bounds the region of a history: 64 GiB.
const MaxBlocks = 1 << 24

// ErrLog means that the log could not be written: the run must stop, because its operations could not be told any more.
var ErrLog = errors.New("oracle: the log cannot be written")

// History is what was done to a region of blocks. Methods may be called concurrently. It keeps about 8 bytes
// for each block of each operation, until Rebase.
type History struct {
	volume Volume
	seed   uint64

	mu        sync.Mutex // guards all below, and the open fields of ops
	clock     uint64
	nextSeq   uint64
	base      []uint64 // per block: sequence number of the initial value, 0 for zeros
	ops       [][]*Op  // per block, in order of submission
	open      map[uint64]*Op
	flushed   uint64 // the latest submission of an acknowledged flush
	writes    uint64
	acks      uint64
	log       io.Writer
	logErr    error
	flushOpen map[uint64]uint64 // submission tick of flushes by id
}

// NewHistory returns the history of a region of blocks, initially zeros.
func NewHistory(volume Volume, seed, blocks uint64) (*History, error) {
	if blocks == 0 || blocks > MaxBlocks {
		return nil, fmt.Errorf("oracle: a region of %d blocks is not between 1 and %d", blocks, MaxBlocks)
	}
	return &History{
		volume: volume, seed: seed, nextSeq: 1,
		base: make([]uint64, blocks), ops: make([][]*Op, blocks), open: make(map[uint64]*Op), flushOpen: make(map[uint64]uint64),
	}, nil
}

// Blocks returns the size of the region.
func (h *History) Blocks() uint64 { return uint64(len(h.base)) }

// Volume returns the volume that stamps name.
func (h *History) Volume() Volume { return h.volume }

// Counts returns how many operations were submitted and how many acknowledged.
func (h *History) Counts() (submitted, acknowledged uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.writes, h.acks
}

func (h *History) tickLocked() uint64 {
	h.clock++
	return h.clock
}

// Submit records an operation that is about to be sent. Its blocks must not be under an open operation: who
// drives the history holds them.
func (h *History) Submit(kind Kind, first, count uint64, fua bool) (*Op, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	op := &Op{Seq: h.nextSeq, Kind: kind, First: first, Count: count, FUA: fua, submit: h.tickLocked(), end: never}
	if err := h.submitLocked(op); err != nil {
		return nil, err
	}
	return op, h.logLocked("S %d %d %d %d %d %t\n", op.submit, op.Seq, kind, first, count, fua)
}

func (h *History) submitLocked(op *Op) error {
	n := h.Blocks()
	switch {
	case op.Kind < Write || op.Kind > Unmap:
		return fmt.Errorf("oracle: %v", op.Kind)
	case op.Count == 0 || op.First >= n || op.Count > n-op.First:
		return fmt.Errorf("oracle: blocks %d+%d in a region of %d", op.First, op.Count, n)
	case op.Seq < h.nextSeq:
		return fmt.Errorf("oracle: sequence number %d after %d", op.Seq, h.nextSeq-1)
	}
	h.nextSeq = op.Seq + 1
	h.writes++
	h.open[op.Seq] = op
	for b := op.First; b < op.First+op.Count; b++ {
		h.ops[b] = append(h.ops[b], op)
	}
	return nil
}

// Ack records that the operation ended with GOOD.
func (h *History) Ack(op *Op) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	tick := h.tickLocked()
	if err := h.ackLocked(op, tick); err != nil {
		return err
	}
	return h.logLocked("A %d %d\n", tick, op.Seq)
}

func (h *History) ackLocked(op *Op, tick uint64) error {
	if op == nil || h.open[op.Seq] != op {
		return errors.New("oracle: acknowledgement of an operation that is not open")
	}
	delete(h.open, op.Seq)
	op.acked, op.end = true, tick
	h.acks++
	return nil
}

// BeginFlush records a flush that is about to be sent; the result is for EndFlush.
func (h *History) BeginFlush() (id uint64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	tick := h.tickLocked()
	h.flushOpen[tick] = tick
	return tick, h.logLocked("F %d\n", tick)
}

// EndFlush records that the flush ended with GOOD: everything acknowledged before it was submitted is at the flush level.
// A flush that ended otherwise is simply forgotten.
func (h *History) EndFlush(id uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.endFlushLocked(id); err != nil {
		return err
	}
	return h.logLocked("E %d %d\n", h.tickLocked(), id)
}

func (h *History) endFlushLocked(id uint64) error {
	submit, ok := h.flushOpen[id]
	if !ok {
		return errors.New("oracle: end of a flush that is not open")
	}
	delete(h.flushOpen, id)
	h.flushed = max(h.flushed, submit)
	return nil
}

// Crash records that the target is dead: no open operation takes effect after this call. It must be
// called when that is certain (the process is gone), and before the next operation is submitted.
func (h *History) Crash() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	tick := h.tickLocked()
	h.crashLocked(tick)
	return h.logLocked("C %d\n", tick)
}

func (h *History) crashLocked(tick uint64) {
	for seq, op := range h.open {
		op.end = tick
		delete(h.open, seq)
	}
	clear(h.flushOpen)
}

// Fill encodes the content of block number i of the operation, counted from its first, into b of BlockSize bytes.
func (h *History) Fill(op *Op, i uint64, b []byte) {
	stamp{volume: h.volume, block: op.First + i, seq: op.Seq, seed: h.seed}.encode(b)
}

// FillSame encodes the one logical block, of len(b) bytes, of a Same operation.
func (h *History) FillSame(op *Op, b []byte) {
	stamp{volume: h.volume, block: anyBlock, seq: op.Seq, seed: h.seed}.encode(b)
}

// flushedLocked reports whether op is at the flush level.
func (h *History) flushedLocked(op *Op) bool {
	return op.acked && (op.FUA || op.end < h.flushed)
}

// Last returns the sequence numbers that block b may hold while the target runs: the last acknowledged value and
// those of unacknowledged operations after it; 0 stands for zeros.
func (h *History) Last(b uint64) []uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	values := []uint64{h.base[b]}
	for _, op := range h.ops[b] {
		v := op.Seq
		if op.Kind.zeros() {
			v = 0
		}
		if op.acked {
			values = values[:0]
		}
		values = append(values, v)
	}
	return values
}

// CheckRead checks the content of block b, read while nothing was outstanding on it and the target ran.
func (h *History) CheckRead(b uint64, content []byte) error {
	seq, err := h.identify(b, content)
	if err != nil {
		return err
	}
	for _, v := range h.Last(b) {
		if v == seq {
			return nil
		}
	}
	return &Violation{Kind: Lost, Block: b, Detail: fmt.Sprintf("a read returned the value of operation %d; possible are %v", seq, h.Last(b))}
}

// identify returns the sequence number of a block's content, 0 for zeros.
func (h *History) identify(b uint64, content []byte) (uint64, error) {
	if isZero(content) {
		return 0, nil
	}
	s, ok := decode(content)
	switch {
	case !ok:
		return 0, &Violation{Kind: Corrupt, Block: b, Detail: "neither zeros nor a whole stamp"}
	case s.volume != h.volume:
		return 0, &Violation{Kind: Foreign, Block: b, Detail: fmt.Sprintf("stamp of volume %x", s.volume)}
	case s.seed != h.seed:
		return 0, &Violation{Kind: Foreign, Block: b, Detail: fmt.Sprintf("stamp of another run, seed %d", s.seed)}
	case s.block != b && s.block != anyBlock:
		return 0, &Violation{Kind: Misplaced, Block: b, Detail: fmt.Sprintf("stamp of operation %d for block %d", s.seq, s.block)}
	}
	return s.seq, nil
}
