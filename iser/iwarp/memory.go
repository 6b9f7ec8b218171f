package iwarp

import (
	"crypto/rand"
	"fmt"
	rnd "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/isergate/isergate/iser/rdma"
)

// addrOf is where b is.
func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// domain is a protection domain.
type domain struct {
	// regions are replaced as a whole, so that a look-up for each element of a work request takes no lock.
	regions atomic.Pointer[regionTable]

	mu         sync.Mutex // guards all below, and replacing regions
	generation uint32     // of keys
	windows    int
	closed     bool
}

// regionTable holds regions, each where the lower bits of its key say; nil where there is none.
type regionTable struct {
	at []*region
	n  int // regions
}

// regionBits are the lower bits of a key, which say where in the table a region is. Those above change with each region, so that a key
// that is used no more is not taken for the next one's for a long time.
const regionBits = 16

func newDomain() *domain {
	d := new(domain)
	d.regions.Store(&regionTable{at: []*region{nil}}) // nothing is at 0: no key is 0
	return d
}

// Register implements rdma.PD. The memory may also be on the Go heap: nothing but this process touches it.
func (d *domain) Register(buf []byte, access rdma.Access) (rdma.MR, error) {
	if len(buf) == 0 || access&^rdma.LocalWrite != 0 {
		return nil, fmt.Errorf("%w: region of %d bytes with access %#x", rdma.ErrInvalid, len(buf), access)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, rdma.ErrClosed
	}
	t := d.regions.Load().clone()
	i := slices.Index(t.at[1:], nil) + 1
	if i == 0 {
		if i = len(t.at); i == 1<<regionBits {
			return nil, fmt.Errorf("%w: %d regions in a protection domain", rdma.ErrInvalid, t.n)
		}
		t.at = append(t.at, nil)
	}
	d.generation++
	r := &region{pd: d, key: d.generation<<regionBits | uint32(i), buf: buf, access: access}
	t.at[i] = r
	t.n++
	d.regions.Store(t)
	return r, nil
}

func (t *regionTable) clone() *regionTable { return &regionTable{slices.Clone(t.at), t.n} }

// check reports whether an element lies in its region and the region allows what it is for.
func (d *domain) check(e *rdma.SGE, access rdma.Access) bool {
	at := d.regions.Load().at
	i := e.LKey & (1<<regionBits - 1)
	if int(i) >= len(at) {
		return false
	}
	r := at[i]
	return r != nil && r.key == e.LKey && r.access&access == access && r.contains(e.Buf)
}

// AllocWindow implements rdma.PD.
func (d *domain) AllocWindow() (rdma.Window, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, rdma.ErrClosed
	}
	d.windows++
	return &window{pd: d}, nil
}

// Close implements rdma.PD.
func (d *domain) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.regions.Load().n; d.windows > 0 || n > 0 {
		return fmt.Errorf("%w: protection domain with %d regions and %d windows", rdma.ErrBusy, n, d.windows)
	}
	d.closed = true
	return nil
}

// region is a memory region.
type region struct {
	pd     *domain
	key    uint32
	buf    []byte
	access rdma.Access

	bound atomic.Int64 // windows; far below 0 when it is gone
}

// regionGone is added to region.bound by Deregister.
const regionGone = -1 << 62

// LKey implements rdma.MR.
func (r *region) LKey() uint32 { return r.key }

// Bytes implements rdma.MR.
func (r *region) Bytes() []byte { return r.buf }

// Deregister implements rdma.MR.
func (r *region) Deregister() error {
	if !r.bound.CompareAndSwap(0, regionGone) {
		if n := r.bound.Load(); n > 0 {
			return fmt.Errorf("%w: region with %d windows", rdma.ErrBusy, n)
		}
		return nil
	}
	r.pd.mu.Lock()
	defer r.pd.mu.Unlock()
	t := r.pd.regions.Load().clone()
	t.at[r.key&(1<<regionBits-1)] = nil
	t.n--
	r.pd.regions.Store(t)
	return nil
}

func (r *region) contains(b []byte) bool {
	off := addrOf(b) - addrOf(r.buf)
	return off <= uintptr(len(r.buf)) && uintptr(len(b)) <= uintptr(len(r.buf))-off
}

// hold keeps the region registered for one more window.
func (r *region) hold() bool {
	if r.bound.Add(1) > 0 {
		return true
	}
	r.bound.Add(-1)
	return false
}

func (r *region) release() { r.bound.Add(-1) }

// window is a memory window of type 2B.
type window struct {
	pd *domain

	mu sync.Mutex // guards all below, and changes of key and base
	// table is where the last OpBind put it, nil if there was none; key and base are that binding's.
	table  *tagTable
	closed bool

	key  atomic.Uint32
	base atomic.Uint64
}

// RKey implements rdma.Window.
func (w *window) RKey() uint32 { return w.key.Load() }

// Addr implements rdma.Window.
func (w *window) Addr() uint64 { return w.base.Load() }

// Close implements rdma.Window.
func (w *window) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	if w.table != nil {
		w.table.drop(w)
	}
	w.pd.mu.Lock()
	defer w.pd.mu.Unlock()
	w.pd.windows--
	return nil
}

// binding is what an STag stands for.
type binding struct {
	key    uint32 // 0: there is none
	access rdma.Access
	live   bool // carried out; before, the STag is only reserved
	w      *window
	mr     *region
	buf    []byte
	base   uint64 // TO of the first byte; base+len(buf) does not wrap
}

// tagTable holds the STags of one connection. What it maps can be reached by the peer, and is touched under mu only: after drop returned nobody
// touches the memory any more (IWARP-63).
type tagTable struct {
	mu sync.Mutex // guards all below, and the content of the memory against invalidation
	// slots holds each binding where the lower bits of its STag say: of the STags that are drawn, one is taken whose place is free. It is at most
	// half full, and a power of two.
	slots []binding
	used  int
	// ended counts what takes access away.
	ended uint64
	gen   *rnd.ChaCha8 // STags and TOs that cannot be guessed from others
}

// minTags is how many slots a table begins with.
const minTags = 64

func newTagTable() *tagTable {
	var seed [32]byte
	rand.Read(seed[:]) // never fails
	return &tagTable{slots: make([]binding, minTags), gen: rnd.NewChaCha8(seed)}
}

// slotLocked is where a binding of that STag is, or would be.
func (t *tagTable) slotLocked(key uint32) *binding { return &t.slots[key&uint32(len(t.slots)-1)] }

// findLocked returns the binding of an STag, nil if there is none.
func (t *tagTable) findLocked(key uint32) *binding {
	if b := t.slotLocked(key); b.key == key && key != 0 {
		return b
	}
	return nil
}

// pick returns an STag for the sink of one RDMA Read, never 0. It is not in the table: only its Read Response may name it.
func (t *tagTable) pick() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		if key := uint32(t.gen.Uint64() >> 32); key != 0 && t.findLocked(key) == nil {
			return key
		}
	}
}

// addLocked draws an STag and returns its slot, which the caller fills.
func (t *tagTable) addLocked() *binding {
	if 2*t.used >= len(t.slots) {
		t.growLocked()
	}
	for {
		key := uint32(t.gen.Uint64() >> 32)
		if b := t.slotLocked(key); b.key == 0 && key != 0 {
			b.key = key
			t.used++
			return b
		}
	}
}

// growLocked doubles the table. What had places of its own still has.
func (t *tagTable) growLocked() {
	old := t.slots
	t.slots = make([]binding, 2*len(old))
	for i := range old {
		if key := old[i].key; key != 0 {
			*t.slotLocked(key) = old[i]
		}
	}
}

// removeLocked ends a binding that is in the table.
func (t *tagTable) removeLocked(b *binding) {
	*b = binding{}
	t.used--
}

// has reports whether a binding was carried out and not ended.
func (t *tagTable) has(key uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findLocked(key)
	return b != nil && b.live
}

// reserve gives a binding its STag and TO. It returns the STag, and the one that the window had in this table before. With now, the binding is
// carried out at once, as bind does it; bound reports whether that was possible.
func (t *tagTable) reserve(b *rdma.Bind, now bool) (key, previous uint32, bound bool, err error) {
	w, ok := b.Window.(*window)
	mr, ok2 := b.MR.(*region)
	if !ok || !ok2 || w.pd != mr.pd || len(b.Buf) == 0 || !mr.contains(b.Buf) || b.Access&^(rdma.RemoteRead|rdma.RemoteWrite) != 0 ||
		b.Access&rdma.RemoteWrite != 0 && mr.access&rdma.LocalWrite == 0 {
		return 0, 0, false, fmt.Errorf("%w: Bind", rdma.ErrInvalid)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return 0, 0, false, rdma.ErrClosed
	}
	if w.table == t {
		previous = w.key.Load()
	} else if w.table != nil && w.table.has(w.key.Load()) {
		return 0, 0, false, fmt.Errorf("%w: the window is bound to another queue pair", rdma.ErrInvalid)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	base := t.gen.Uint64() &^ 0xfff
	if base > -uint64(len(b.Buf))-1 {
		base -= uint64(len(b.Buf)+0xfff) &^ 0xfff
	}
	x := t.addLocked()
	x.w, x.mr, x.buf, x.base, x.access = w, mr, b.Buf, base, b.Access
	key = x.key
	w.table = t
	w.key.Store(key)
	w.base.Store(base)
	if now {
		bound = t.bindLocked(x, previous)
	}
	return key, previous, bound, nil
}

// bind carries out what reserve prepared. It fails if the window is still bound by another STag, or the region is gone. previous is that other STag, if any.
func (t *tagTable) bind(key, previous uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findLocked(key)
	return b != nil && t.bindLocked(b, previous) // else the window was closed meanwhile
}

func (t *tagTable) bindLocked(b *binding, previous uint32) bool {
	if p := t.findLocked(previous); p != nil && p.live && p.w == b.w || !b.mr.hold() {
		t.removeLocked(b)
		return false
	}
	b.live = true
	return true
}

// invalidate ends a binding. It reports whether the STag was one.
func (t *tagTable) invalidate(key uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.findLocked(key)
	if b == nil || !b.live {
		return false
	}
	t.endLocked(b)
	return true
}

// endLocked ends a binding, carried out or not.
func (t *tagTable) endLocked(b *binding) {
	if b.live {
		b.mr.release()
	}
	t.removeLocked(b)
	t.ended++
}

// drop ends all bindings of w, carried out or not.
func (t *tagTable) drop(w *window) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.slots {
		if b := &t.slots[i]; b.w == w {
			t.endLocked(b)
		}
	}
}

// clear ends all bindings.
func (t *tagTable) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.slots {
		if b := &t.slots[i]; b.key != 0 {
			t.endLocked(b)
		}
	}
	t.ended++
}

// access is the outcome of a look-up.
type access uint8

const (
	accessOK access = iota
	accessInvalid
	accessDenied
	accessBounds
	accessWrap
)

// reachLocked returns the n bytes, at least one, at to if the peer has that right there. They may be touched until mu is let go.
func (t *tagTable) reachLocked(key uint32, to uint64, n int, right rdma.Access) ([]byte, access) {
	b := t.findLocked(key)
	switch {
	case b == nil || !b.live:
		return nil, accessInvalid
	case b.access&right == 0:
		return nil, accessDenied
	case to+uint64(n) < to: // also ends at 2^64: no region does
		return nil, accessWrap
	case to < b.base || to-b.base > uint64(len(b.buf)) || uint64(n) > uint64(len(b.buf))-(to-b.base):
		return nil, accessBounds
	}
	off := to - b.base
	return b.buf[off : off+uint64(n) : off+uint64(n)], accessOK
}
