package oracle

import (
	"context"
	"errors"
	"fmt"
	"sort"
)

// Keep says which acknowledged operations must survive a crash.
type Keep uint8

// Policies: what the ack and flush levels of a volume survive decides which one applies to a fault.
const (
	KeepAcked   Keep = 0 // every acknowledged operation
	KeepFlushed Keep = 1 // those that a flush or FUA covered
	KeepPrefix  Keep = 2 // none, but what is there is a prefix
)

// ViolationKind classifies a violation.
type ViolationKind uint8

// Kinds of violations, as in DESIGN.md.
const (
	Corrupt   ViolationKind = 1 // rule 1: no stamp
	Foreign   ViolationKind = 2 // rule 1: another volume or run
	Misplaced ViolationKind = 3 // rule 1: another block's stamp
	Unknown   ViolationKind = 4 // rule 1: no operation on this block has this value
	Lost      ViolationKind = 5 // rule 2
	Order     ViolationKind = 6 // rule 3
)

// String returns the name of the kind.
func (k ViolationKind) String() string {
	names := [...]string{"", "corrupt block", "foreign block", "misplaced block", "unknown value", "lost write", "not a prefix"}
	if int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("violation %d", uint8(k))
}

// Violation is a block that no correct volume could have left. It is an error.
type Violation struct {
	Kind   ViolationKind
	Block  uint64
	Detail string
}

func (v *Violation) Error() string {
	return fmt.Sprintf("oracle: block %d: %v: %s", v.Block, v.Kind, v.Detail)
}

// maxReported is how many violations a report lists.
const maxReported = 100

// Report is the outcome of a verification.
type Report struct {
	Blocks       uint64
	Stamped      uint64 // blocks that hold a stamp
	LostAcked    uint64 // acknowledged block updates that did not survive
	KeptMaybe    uint64 // blocks that hold the value of an unacknowledged operation
	Violated     uint64 // all violations
	Violations   []*Violation
	values       []uint64
	unidentified bool
}

// Err returns nil if there is no violation, and otherwise all that are listed.
func (r *Report) Err() error {
	if r.Violated == 0 {
		return nil
	}
	errs := make([]error, 0, len(r.Violations)+1)
	errs = append(errs, fmt.Errorf("oracle: %d violations in %d blocks", r.Violated, r.Blocks))
	for _, v := range r.Violations {
		errs = append(errs, v)
	}
	return errors.Join(errs...)
}

func (r *Report) add(v *Violation) {
	r.Violated++
	if len(r.Violations) < maxReported {
		r.Violations = append(r.Violations, v)
	}
}

// Reader reads whole blocks of the region from block on into p.
type Reader func(ctx context.Context, block uint64, p []byte) error

// scanBlocks is how many blocks Verify reads at a time.
const scanBlocks = 64

// unreadable marks a block that violates rule 1.
const unreadable = never

// Verify reads the whole region and judges it. Nothing may be submitted meanwhile. The error
// is the reader's; violations are in the report.
func (h *History) Verify(ctx context.Context, read Reader, keep Keep) (*Report, error) {
	n := h.Blocks()
	r := &Report{Blocks: n, values: make([]uint64, n)}
	buf := make([]byte, scanBlocks*BlockSize)
	for b := uint64(0); b < n; b += scanBlocks {
		p := buf[:min(scanBlocks, n-b)*BlockSize]
		if err := read(ctx, b, p); err != nil {
			return nil, fmt.Errorf("oracle: block %d: %w", b, err)
		}
		for i := uint64(0); i*BlockSize < uint64(len(p)); i++ {
			seq, err := h.identify(b+i, p[i*BlockSize:(i+1)*BlockSize])
			if v := (*Violation)(nil); errors.As(err, &v) {
				r.add(v)
				r.unidentified = true
				seq = unreadable
			} else if seq != 0 {
				r.Stamped++
			}
			r.values[b+i] = seq
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.judgeLocked(r, keep)
	return r, nil
}

// initial stands for the state before the first operation on a block.
var initial = &Op{acked: true}

// candidatesLocked returns the operations whose value block b holds, earliest first.
func (h *History) candidatesLocked(b, seq uint64) []*Op {
	var c []*Op
	if h.base[b] == seq {
		c = append(c, initial)
	}
	for _, op := range h.ops[b] {
		if op.Kind.zeros() && seq == 0 || !op.Kind.zeros() && op.Seq == seq {
			c = append(c, op)
		}
	}
	sort.SliceStable(c, func(i, j int) bool { return c[i].submit < c[j].submit })
	return c
}

// contradictionLocked returns an acknowledged operation on b that candidate c excludes though it must be there,
// and whether that is by rule 2 (required) or by rule 3 with horizon m.
func (h *History) contradictionLocked(b uint64, c *Op, m uint64, keep Keep) (w *Op, required bool) {
	m = max(m, c.submit)
	for _, w := range h.ops[b] {
		if !w.acked || w.submit <= c.end {
			continue
		}
		if keep == KeepAcked || keep == KeepFlushed && h.flushedLocked(w) {
			return w, true
		}
		if w.end < m {
			return w, false
		}
	}
	return nil, false
}

func (h *History) judgeLocked(r *Report, keep Keep) {
	type ambiguous struct {
		block uint64
		cands []*Op
	}
	var (
		m       uint64 // the latest submission among visible operations
		witness *Op
		at      uint64
		several []ambiguous
		chosen  = make([]*Op, len(r.values))
	)
	raise := func(op *Op, b uint64) bool {
		if op.submit <= m {
			return false
		}
		m, witness, at = op.submit, op, b
		return true
	}
	for b, seq := range r.values {
		if seq == unreadable {
			continue
		}
		b := uint64(b)
		switch c := h.candidatesLocked(b, seq); len(c) {
		case 0:
			detail := fmt.Sprintf("it holds the value of operation %d, which no operation on it wrote", seq)
			if seq == 0 {
				detail = "it holds zeros, which no operation left"
			}
			if n := len(h.ops[b]); n > 0 {
				detail += fmt.Sprintf("; the last one was %v", h.ops[b][n-1])
			}
			r.add(&Violation{Unknown, b, detail})
		case 1:
			chosen[b] = c[0]
			raise(c[0], b)
		default:
			several = append(several, ambiguous{b, c})
		}
	}
	for again := true; again; {
		again = false
		for _, a := range several {
			chosen[a.block] = a.cands[len(a.cands)-1]
			for _, c := range a.cands {
				if w, _ := h.contradictionLocked(a.block, c, m, keep); w == nil {
					chosen[a.block] = c
					again = raise(c, a.block) || again
					break
				}
			}
		}
	}
	for b, c := range chosen {
		if c == nil {
			continue
		}
		b := uint64(b)
		if !c.acked {
			r.KeptMaybe++
		}
		for _, w := range h.ops[b] {
			if w.acked && w.submit > c.end {
				r.LostAcked++
			}
		}
		w, required := h.contradictionLocked(b, c, m, keep)
		holds := c.String()
		if c == initial {
			holds = "its initial value"
		}
		switch {
		case w == nil:
		case required:
			r.add(&Violation{Lost, b, fmt.Sprintf("it holds %s; %v must have survived", holds, w)})
		default:
			r.add(&Violation{Order, b, fmt.Sprintf("it holds %s; %v was acknowledged before %v was submitted, which survives at block %d", holds, w, witness, at)})
		}
	}
}

// Rebase makes what a verification saw the initial state, after a crash was recorded. It fails if
// operations are open, or if the report has blocks that could not be identified.
func (h *History) Rebase(r *Report) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.open) > 0 {
		return fmt.Errorf("oracle: %d operations are open: record the crash first", len(h.open))
	}
	if r.unidentified || uint64(len(r.values)) != h.Blocks() {
		return errors.New("oracle: the report does not say what every block holds")
	}
	if err := h.logLocked("R %d\n", h.tickLocked()); err != nil {
		return err
	}
	for b, v := range r.values {
		if err := h.rebaseLocked(uint64(b), v); err != nil {
			return err
		}
	}
	return h.logLocked("Z %d\n", h.tickLocked())
}

// rebaseLocked sets the initial value of one block and logs it if it is not the old one.
func (h *History) rebaseLocked(b, seq uint64) error {
	h.ops[b] = nil
	if h.base[b] == seq {
		return nil
	}
	h.base[b] = seq
	return h.logLocked("B %d %d\n", b, seq)
}
