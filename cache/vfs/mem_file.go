package vfs

import (
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"syscall"
)

const (
	pageSize       = 4096
	sectorsPerPage = pageSize / SectorSize
)

// memNode is the content of a file. A page that is not there holds zeros, durably.
type memNode struct {
	pages       map[int64]*memPage
	dirty       map[int64]*memPage // the pages with unsynced sectors
	size        int64
	durableSize int64
	removed     bool // has no name any more; its bytes are not counted
}

type memPage struct {
	data  [pageSize]byte
	old   *[pageSize]byte // durable content; nil when it equals data
	dirty uint8           // bit per sector that differs, or may differ, from old
	lost  uint8           // sectors in dirty that the system takes for clean: no sync writes them
}

func newMemNode() *memNode {
	return &memNode{pages: map[int64]*memPage{}, dirty: map[int64]*memPage{}}
}

// page returns the page for writing, making it if needed.
func (n *memNode) page(i int64) *memPage {
	p := n.pages[i]
	if p == nil {
		p = &memPage{}
		n.pages[i] = p
	}
	return p
}

var zeroPage [pageSize]byte

func (n *memNode) write(b []byte, off int64) {
	for len(b) > 0 {
		i, at := off/pageSize, off%pageSize
		k := min(int64(len(b)), pageSize-at)
		n.writePage(i, at, b[:k])
		b, off = b[k:], off+k
	}
	n.size = max(n.size, off)
}

func (n *memNode) writePage(i, at int64, b []byte) {
	if n.pages[i] == nil && string(b) == string(zeroPage[:len(b)]) {
		return
	}
	p := n.page(i)
	if p.old == nil {
		c := p.data
		p.old = &c
	}
	copy(p.data[at:], b)
	for s := at / SectorSize; s <= (at+int64(len(b))-1)/SectorSize; s++ {
		p.dirty |= 1 << s
		p.lost &^= 1 << s
	}
	n.dirty[i] = p
}

func (n *memNode) truncate(size int64) {
	if size < n.size {
		// What is cut off reads as zeros if the file grows again.
		for _, i := range slices.Sorted(maps.Keys(n.pages)) {
			if from := max(0, size-i*pageSize); from < pageSize {
				n.writePage(i, from, zeroPage[from:])
			}
		}
	}
	n.size = size
}

func (n *memNode) sync() {
	for i, p := range n.dirty {
		for s := range sectorsPerPage {
			if (p.dirty&^p.lost)&(1<<s) != 0 {
				copy(p.old[s*SectorSize:(s+1)*SectorSize], p.data[s*SectorSize:])
			}
		}
		p.dirty &= p.lost
		if p.dirty != 0 {
			continue
		}
		p.old = nil
		delete(n.dirty, i)
		if p.data == zeroPage {
			delete(n.pages, i)
		}
	}
	n.durableSize = n.size
}

func (n *memNode) crashClone(rng *rand.Rand, keep func() bool, odds float64, whole bool) *memNode {
	c := newMemNode()
	c.size = n.durableSize
	if n.size != n.durableSize && odds > 0 {
		switch {
		case odds == 1 || keep():
			c.size = n.size
		case n.size > n.durableSize:
			c.size += rng.Int64N(n.size-n.durableSize) / SectorSize * SectorSize
		}
	}
	for _, i := range slices.Sorted(maps.Keys(n.pages)) {
		p := n.pages[i]
		q := &memPage{data: p.data}
		if p.old != nil {
			all := whole && keep()
			for s := range sectorsPerPage {
				if p.dirty&(1<<s) != 0 && (p.lost&(1<<s) != 0 || whole && !all || !whole && !keep()) {
					copy(q.data[s*SectorSize:(s+1)*SectorSize], p.old[s*SectorSize:])
				}
			}
		}
		if end := c.size - i*pageSize; end < pageSize {
			clear(q.data[max(0, end):])
		}
		if q.data != zeroPage {
			c.pages[i] = q
		}
	}
	c.durableSize = c.size
	return c
}

// memFile is an open handle.
type memFile struct {
	m                 *Mem
	n                 *memNode
	name              string
	canRead, canWrite bool
	closed            bool // guarded by m.mu
}

func (f *memFile) fault(op string, err error) error {
	return &fs.PathError{Op: op, Path: f.name, Err: err}
}

func (f *memFile) ReadAt(b []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	switch {
	case f.closed:
		return 0, f.fault("read", fs.ErrClosed)
	case !f.canRead:
		return 0, f.fault("read", syscall.EBADF)
	case off < 0:
		return 0, f.fault("read", fs.ErrInvalid)
	}
	done := 0
	for done < len(b) && off < f.n.size {
		i, at := off/pageSize, off%pageSize
		k := int(min(int64(len(b)-done), pageSize-at, f.n.size-off))
		if p := f.n.pages[i]; p != nil {
			copy(b[done:done+k], p.data[at:])
		} else {
			clear(b[done : done+k])
		}
		done, off = done+k, off+int64(k)
	}
	if done < len(b) {
		return done, io.EOF
	}
	return done, nil
}

func (f *memFile) ReadvAt(bufs [][]byte, off int64) (int, error) {
	total := 0
	for _, b := range bufs {
		n, err := f.ReadAt(b, off+int64(total))
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// growLocked accounts for a file that reaches to end, or fails with ENOSPC.
func (f *memFile) growLocked(end int64) error {
	grow := end - f.n.size
	if f.n.removed || grow <= 0 {
		return nil
	}
	if grow > f.m.capacity-f.m.used {
		return syscall.ENOSPC
	}
	f.m.used += grow
	return nil
}

func (f *memFile) writableLocked(op string, off int64) error {
	switch {
	case f.closed:
		return f.fault(op, fs.ErrClosed)
	case !f.canWrite:
		return f.fault(op, syscall.EBADF)
	case off < 0:
		return f.fault(op, fs.ErrInvalid)
	}
	return nil
}

func (f *memFile) WriteAt(b []byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.writableLocked("write", off); err != nil {
		return 0, err
	}
	return f.writeLocked(b, off)
}

func (f *memFile) writeLocked(b []byte, off int64) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if err := f.growLocked(off + int64(len(b))); err != nil {
		return 0, f.fault("write", err)
	}
	f.n.write(b, off)
	return len(b), nil
}

func (f *memFile) WritevAt(bufs [][]byte, off int64) (int, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.writableLocked("write", off); err != nil {
		return 0, err
	}
	total := 0
	for _, b := range bufs {
		n, err := f.writeLocked(b, off+int64(total))
		total += n
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

func (f *memFile) SyncData() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return f.fault("sync", fs.ErrClosed)
	}
	f.n.sync()
	return nil
}

func (f *memFile) Sync() error { return f.SyncData() }

func (f *memFile) Truncate(size int64) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if err := f.writableLocked("truncate", size); err != nil {
		return err
	}
	if size >= f.n.size {
		if err := f.growLocked(size); err != nil {
			return f.fault("truncate", err)
		}
	} else if !f.n.removed {
		f.m.used -= f.n.size - size
	}
	f.n.truncate(size)
	return nil
}

func (f *memFile) Size() (int64, error) {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return 0, f.fault("stat", fs.ErrClosed)
	}
	return f.n.size, nil
}

func (f *memFile) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return f.fault("close", fs.ErrClosed)
	}
	f.closed = true
	return nil
}
