package vfs

import (
	"errors"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
)

// Mem is a file system in memory that models a disk behind a volatile write cache: it
// remembers what is durable and what is not, and CrashClone returns what a power failure would
// leave. Memory is used for non-zero 4 KiB pages only, so large pre-zeroed files are cheap.
//
// A sector written more than once since the last sync survives in its oldest or its newest
// version; versions in between are not modelled.
type Mem struct {
	mu       sync.Mutex // guards everything below, and the content of all files
	dirs     map[string]bool
	names    map[string]*memNode // what the running system sees
	durable  map[string]*memNode // what a power failure leaves for certain
	pending  []nameOp            // changes of names that are not durable, oldest first
	capacity int64
	used     int64 // sum of the sizes of all named files
}

// nameOp is one change of one directory.
type nameOp struct {
	dir      string
	name     string   // gets node; removed if node is nil
	node     *memNode //
	vanished string   // if not empty, another name that goes away with the same change
}

func (op nameOp) apply(names map[string]*memNode) {
	if op.vanished != "" {
		delete(names, op.vanished)
	}
	if op.node == nil {
		delete(names, op.name)
	} else {
		names[op.name] = op.node
	}
}

// NewMem returns an empty file system without a limit on its size.
func NewMem() *Mem {
	return &Mem{
		dirs:     map[string]bool{"/": true, ".": true},
		names:    map[string]*memNode{},
		durable:  map[string]*memNode{},
		capacity: math.MaxInt64,
	}
}

// SetCapacity limits the sum of the file sizes: what would exceed it fails with ENOSPC.
func (m *Mem) SetCapacity(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = bytes
}

// Survival says what becomes of changes that were not synced.
type Survival int

// The ways in which unsynced changes survive a power failure.
const (
	SurviveRandom Survival = iota // each sector and each directory by chance, with odds drawn anew for each clone
	SurviveNone
	SurviveAll
)

// CrashOptions shapes a CrashClone. The zero value means random survival.
type CrashOptions struct {
	Survive Survival
	// Whole blocks of 4 KiB survive or not, instead of sectors: what file systems on a device take for granted.
	Whole bool
}

// CrashClone returns the image that a power failure at this moment could leave: everything durable, and
// of the rest what the options and rng choose, sector by sector and, for names, a prefix of the
// changes of each directory. The receiver is unchanged and goes on. rng is not used
// unless survival is random.
func (m *Mem) CrashClone(rng *rand.Rand, opts CrashOptions) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	odds := 0.0
	switch opts.Survive {
	case SurviveAll:
		odds = 1
	case SurviveRandom:
		odds = []float64{0, 0.1, 0.5, 0.9, 1}[rng.IntN(5)]
	}
	keep := func() bool { return odds == 1 || odds > 0 && rng.Float64() < odds }

	names := maps.Clone(m.durable)
	broken := map[string]bool{} // directories in which a change was lost: all later ones are, too
	for _, op := range m.pending {
		if broken[op.dir] || !keep() {
			broken[op.dir] = true
			continue
		}
		op.apply(names)
	}

	c := NewMem()
	c.dirs = maps.Clone(m.dirs)
	c.capacity = m.capacity
	for _, name := range slices.Sorted(maps.Keys(names)) { // sorted: rng is used in the same order each time
		n := names[name].crashClone(rng, keep, odds, opts.Whole)
		c.names[name] = n
		c.used += n.size
	}
	c.durable = maps.Clone(c.names)
	return c
}

// Corrupt changes bytes of a file on the medium itself, durable at once, as rot would:
// each byte from off on is XORed with the byte of mask. The range lies within the file.
func (m *Mem) Corrupt(name string, off int64, mask []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.names[filepath.Clean(name)]
	if n == nil {
		return &fs.PathError{Op: "corrupt", Path: name, Err: fs.ErrNotExist}
	}
	if off < 0 || off+int64(len(mask)) > n.size {
		return &fs.PathError{Op: "corrupt", Path: name, Err: fs.ErrInvalid}
	}
	for i, x := range mask {
		p := n.page((off + int64(i)) / pageSize)
		at := (off + int64(i)) % pageSize
		p.data[at] ^= x
		if p.old != nil {
			p.old[at] ^= x
		}
	}
	return nil
}

// LoseUnsynced does to a file what a failed sync does on Linux: its unsynced sectors stay readable but count as
// clean, so that no later sync makes them durable unless they are written again. Call it from a Hook
// that fails the sync.
func (m *Mem) LoseUnsynced(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.names[filepath.Clean(name)]; n != nil {
		for _, p := range n.dirty {
			p.lost = p.dirty
		}
	}
}

// OpenFile implements FS.
func (m *Mem) OpenFile(name string, flag int, _ fs.FileMode) (File, error) {
	name = filepath.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	fault := func(err error) (File, error) { return nil, &fs.PathError{Op: "open", Path: name, Err: err} }
	if flag&^(os.O_RDONLY|os.O_WRONLY|os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_TRUNC) != 0 {
		return fault(errors.ErrUnsupported)
	}
	if m.dirs[name] {
		return fault(syscall.EISDIR)
	}
	if !m.dirs[filepath.Dir(name)] {
		return fault(fs.ErrNotExist)
	}
	n := m.names[name]
	switch {
	case n == nil && flag&os.O_CREATE == 0:
		return fault(fs.ErrNotExist)
	case n != nil && flag&os.O_CREATE != 0 && flag&os.O_EXCL != 0:
		return fault(fs.ErrExist)
	case n == nil:
		n = newMemNode()
		m.changeLocked(nameOp{dir: filepath.Dir(name), name: name, node: n})
	}
	access := flag & (os.O_WRONLY | os.O_RDWR)
	if flag&os.O_TRUNC != 0 && access != os.O_RDONLY {
		m.used -= n.size
		n.truncate(0)
	}
	return &memFile{m: m, n: n, name: name, canRead: access != os.O_WRONLY, canWrite: access != os.O_RDONLY}, nil
}

func (m *Mem) changeLocked(op nameOp) {
	op.apply(m.names)
	m.pending = append(m.pending, op)
}

// Remove implements FS. The removal of a directory is durable at once.
func (m *Mem) Remove(name string) error {
	name = filepath.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.names[name]; n != nil {
		m.used -= n.size
		n.removed = true
		m.changeLocked(nameOp{dir: filepath.Dir(name), name: name})
		return nil
	}
	if !m.dirs[name] || filepath.Dir(name) == name {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	for other := range m.names {
		if filepath.Dir(other) == name {
			return &fs.PathError{Op: "remove", Path: name, Err: syscall.ENOTEMPTY}
		}
	}
	for other := range m.dirs {
		if other != name && filepath.Dir(other) == name {
			return &fs.PathError{Op: "remove", Path: name, Err: syscall.ENOTEMPTY}
		}
	}
	delete(m.dirs, name)
	m.pending = slices.DeleteFunc(m.pending, func(op nameOp) bool { return op.dir == name })
	maps.DeleteFunc(m.durable, func(other string, _ *memNode) bool { return filepath.Dir(other) == name })
	return nil
}

// Rename implements FS.
func (m *Mem) Rename(oldName, newName string) error {
	oldName, newName = filepath.Clean(oldName), filepath.Clean(newName)
	m.mu.Lock()
	defer m.mu.Unlock()
	fault := func(err error) error { return &os.LinkError{Op: "rename", Old: oldName, New: newName, Err: err} }
	n := m.names[oldName]
	switch {
	case n == nil:
		return fault(fs.ErrNotExist)
	case filepath.Dir(oldName) != filepath.Dir(newName):
		return fault(syscall.EXDEV)
	case m.dirs[newName]:
		return fault(syscall.EISDIR)
	case oldName == newName:
		return nil
	}
	if over := m.names[newName]; over != nil {
		m.used -= over.size
		over.removed = true
	}
	m.changeLocked(nameOp{dir: filepath.Dir(newName), name: newName, node: n, vanished: oldName})
	return nil
}

// ReadDir implements FS.
func (m *Mem) ReadDir(dir string) ([]Info, error) {
	dir = filepath.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.dirs[dir] {
		return nil, &fs.PathError{Op: "readdir", Path: dir, Err: fs.ErrNotExist}
	}
	var infos []Info
	for name, n := range m.names {
		if filepath.Dir(name) == dir {
			infos = append(infos, Info{Name: filepath.Base(name), Size: n.size})
		}
	}
	for name := range m.dirs {
		if name != dir && filepath.Dir(name) == dir {
			infos = append(infos, Info{Name: filepath.Base(name), Dir: true})
		}
	}
	slices.SortFunc(infos, func(a, b Info) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return infos, nil
}

// MkdirAll implements FS.
func (m *Mem) MkdirAll(dir string, _ fs.FileMode) error {
	dir = filepath.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	for d := dir; ; d = filepath.Dir(d) {
		if m.names[d] != nil {
			return &fs.PathError{Op: "mkdir", Path: d, Err: syscall.ENOTDIR}
		}
		if d == filepath.Dir(d) {
			break
		}
	}
	for d := dir; !m.dirs[d]; d = filepath.Dir(d) {
		m.dirs[d] = true
	}
	return nil
}

// SyncDir implements FS.
func (m *Mem) SyncDir(dir string) error {
	dir = filepath.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.dirs[dir] {
		return &fs.PathError{Op: "syncdir", Path: dir, Err: fs.ErrNotExist}
	}
	m.pending = slices.DeleteFunc(m.pending, func(op nameOp) bool {
		if op.dir != dir {
			return false
		}
		op.apply(m.durable)
		return true
	})
	return nil
}

// Stat implements FS.
func (m *Mem) Stat(name string) (Info, error) {
	name = filepath.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.names[name]; n != nil {
		return Info{Name: filepath.Base(name), Size: n.size}, nil
	}
	if m.dirs[name] {
		return Info{Name: filepath.Base(name), Dir: true}, nil
	}
	return Info{}, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
}

// Free implements FS.
func (m *Mem) Free(string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return max(0, m.capacity-m.used), nil
}
