package iwarp

import (
	"crypto/rand"
	"fmt"
	rnd "math/rand/v2"
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
	regions atomic.Pointer[map[uint32]*region]

	mu      sync.Mutex // guards all below, and replacing regions
	lastKey uint32
	windows int
	closed  bool
}

func newDomain() *domain {
	d := new(domain)
	d.regions.Store(new(map[uint32]*region))
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
	old := *d.regions.Load()
	for d.lastKey++; d.lastKey == 0 || old[d.lastKey] != nil; {
		d.lastKey++
	}
	r := &region{pd: d, key: d.lastKey, buf: buf, access: access}
	d.replaceLocked(func(m map[uint32]*region) { m[r.key] = r })
	return r, nil
}

func (d *domain) replaceLocked(change func(map[uint32]*region)) {
	old := *d.regions.Load()
	m := make(map[uint32]*region, len(old)+1)
	for k, r := range old {
		m[k] = r
	}
	change(m)
	d.regions.Store(&m)
}

// check reports whether an element lies in its region and the region allows what it is for.
func (d *domain) check(e *rdma.SGE, access rdma.Access) bool {
	r := (*d.regions.Load())[e.LKey]
	return r != nil && r.access&access == access && r.contains(e.Buf)
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
	if d.windows > 0 || len(*d.regions.Load()) > 0 {
		return fmt.Errorf("%w: protection domain with %d regions and %d windows", rdma.ErrBusy, len(*d.regions.Load()), d.windows)
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
	r.pd.replaceLocked(func(m map[uint32]*region) { delete(m, r.key) })
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
	w      *window
	mr     *region
	buf    []byte
	base   uint64 // TO of the first byte; base+len(buf) does not wrap
	access rdma.Access
	live   bool // carried out; before, the STag is only reserved
}

// tagTable holds the STags of one connection. What it maps can be reached by the peer, and is touched under mu only: after drop returned nobody
// touches the memory any more (IWARP-63).
type tagTable struct {
	mu   sync.Mutex // guards all below, and the content of the memory against invalidation
	tags map[uint32]binding
	// ended counts what takes access away.
	ended uint64
	gen   *rnd.ChaCha8 // STags and TOs that cannot be guessed from others
}

func newTagTable() *tagTable {
	var seed [32]byte
	rand.Read(seed[:]) // never fails
	return &tagTable{tags: make(map[uint32]binding), gen: rnd.NewChaCha8(seed)}
}

// pickLocked returns an STag that is not in use, never 0.
func (t *tagTable) pickLocked() uint32 {
	for {
		key := uint32(t.gen.Uint64() >> 32)
		if _, used := t.tags[key]; !used && key != 0 {
			return key
		}
	}
}

// pick returns an STag for the sink of one RDMA Read. It is not in the table: only its Read Response may name it.
func (t *tagTable) pick() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pickLocked()
}

// has reports whether a binding was carried out and not ended.
func (t *tagTable) has(key uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tags[key].live
}

// reserve gives a binding its STag and TO, before it is carried out. It returns the STag, and the one that the window had in this table before.
func (t *tagTable) reserve(b *rdma.Bind) (key, previous uint32, err error) {
	w, ok := b.Window.(*window)
	mr, ok2 := b.MR.(*region)
	if !ok || !ok2 || w.pd != mr.pd || len(b.Buf) == 0 || !mr.contains(b.Buf) || b.Access&^(rdma.RemoteRead|rdma.RemoteWrite) != 0 ||
		b.Access&rdma.RemoteWrite != 0 && mr.access&rdma.LocalWrite == 0 {
		return 0, 0, fmt.Errorf("%w: Bind", rdma.ErrInvalid)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return 0, 0, rdma.ErrClosed
	}
	if w.table == t {
		previous = w.key.Load()
	} else if w.table != nil && w.table.has(w.key.Load()) {
		return 0, 0, fmt.Errorf("%w: the window is bound to another queue pair", rdma.ErrInvalid)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key = t.pickLocked()
	base := t.gen.Uint64() &^ 0xfff
	if base > -uint64(len(b.Buf))-1 {
		base -= uint64(len(b.Buf)+0xfff) &^ 0xfff
	}
	t.tags[key] = binding{w: w, mr: mr, buf: b.Buf, base: base, access: b.Access}
	w.table = t
	w.key.Store(key)
	w.base.Store(base)
	return key, previous, nil
}

// bind carries out what reserve prepared. It fails if the window is still bound by another STag, or the region is gone. previous is that other STag, if any.
func (t *tagTable) bind(key, previous uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b, ok := t.tags[key]
	if !ok {
		return false // the window was closed meanwhile
	}
	if p, ok := t.tags[previous]; ok && p.live && p.w == b.w || !b.mr.hold() {
		delete(t.tags, key)
		return false
	}
	b.live = true
	t.tags[key] = b
	return true
}

// invalidate ends a binding. It reports whether the STag was one.
func (t *tagTable) invalidate(key uint32) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b, ok := t.tags[key]
	if !ok || !b.live {
		return false
	}
	delete(t.tags, key)
	t.ended++
	b.mr.release()
	return true
}

// drop ends all bindings of w, carried out or not.
func (t *tagTable) drop(w *window) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, b := range t.tags {
		if b.w != w {
			continue
		}
		delete(t.tags, key)
		t.ended++
		if b.live {
			b.mr.release()
		}
	}
}

// clear ends all bindings.
func (t *tagTable) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.tags {
		if b.live {
			b.mr.release()
		}
	}
	clear(t.tags)
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
	b, ok := t.tags[key]
	switch {
	case !ok || !b.live:
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
