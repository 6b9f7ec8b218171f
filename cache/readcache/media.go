package readcache

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/zeebo/xxh3"

	"github.com/isergate/isergate/cache/vfs"
)

// sumOf is the checksum of a chunk on the media. It is no CRC: chunks that end with their own CRC32C would all have the same.
func sumOf(chunk []byte) uint32 { return uint32(xxh3.Hash(chunk)) }

// media is the part of the cache on local media: a file of slots of ChunkSize bytes,
// and the index of what they hold. Fields that change are guarded by Cache.mu.
type media struct {
	c     *Cache
	file  vfs.File
	dir   string
	queue chan *frame // to be written; each with a reference

	slots  []slot
	index  map[ckey]int32
	free   []int32
	next   int // the first slot that was never used
	limit  int // slots that may be used
	policy *policy
	failed bool
}

// slot is what the index knows of a slot.
type slot struct {
	key     ckey
	n       uint32
	sum     uint32
	readers uint16
	valid   bool // in the index
}

// growCheck is the number of new slots after which the free space is looked at.
const growCheck = 64

func openMedia(c *Cache, queue int) (*media, error) {
	dir := filepath.Dir(c.o.Path)
	if err := c.o.FS.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := c.o.FS.OpenFile(c.o.Path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, fs.FileMode(0o600))
	if err != nil {
		return nil, err
	}
	n := int(c.o.Bytes / ChunkSize) // the file grows as slots are used for the first time
	c.stats.mediaUp.Set(1)
	return &media{
		c: c, file: f, dir: dir, queue: make(chan *frame, queue), slots: make([]slot, n), index: make(map[ckey]int32),
		limit: n, policy: newPolicy(n),
	}, nil
}

func (m *media) hasLocked(k ckey) bool {
	_, ok := m.index[k]
	return ok && !m.failed
}

// hitLocked notes that a chunk that is here too was used in memory.
func (m *media) hitLocked(k ckey) {
	if s, ok := m.index[k]; ok {
		m.policy.hit(s)
	}
}

func (m *media) wantsLocked(k ckey) bool {
	_, ok := m.index[k]
	return !ok && !m.failed
}

// read reads a chunk into buf. ok is false if it is not there, or not as it was written.
func (m *media) read(k ckey, buf []byte) (n int, ok bool) {
	m.c.mu.Lock()
	s, ok := m.index[k]
	if !ok || m.failed || m.slots[s].readers == 1<<16-1 {
		m.c.mu.Unlock()
		return 0, false
	}
	sl := &m.slots[s]
	sl.readers++
	m.policy.hit(s)
	n, sum := int(sl.n), sl.sum
	m.c.mu.Unlock()

	got, err := m.file.ReadAt(buf[:n], int64(s)*ChunkSize)
	good := got == n && sumOf(buf[:n]) == sum

	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	sl.readers--
	if good {
		m.recycleLocked(s)
		return n, true
	}
	if got < n {
		m.c.stats.mediaErrors.Inc()
		m.c.o.Logger.Warn("read cache: local media cannot be read", "path", m.c.o.Path, "slot", s, "err", err)
	} else {
		m.c.stats.corrupt.Inc()
		m.c.o.Logger.Warn("read cache: checksum of a chunk on local media is wrong", "path", m.c.o.Path, "slot", s)
	}
	// The slot is not used again: the media is bad there.
	if sl.valid && sl.key == k {
		m.invalidateLocked(s)
	}
	return 0, false
}

func (m *media) invalidateLocked(s int32) {
	delete(m.index, m.slots[s].key)
	m.policy.remove(s)
	m.slots[s].valid = false
}

// recycleLocked frees a slot that was dropped while it was read.
func (m *media) recycleLocked(s int32) {
	if sl := &m.slots[s]; !sl.valid && sl.readers == 0 {
		m.free = append(m.free, s)
	}
}

func (m *media) dropVolumeLocked(volume uint32) {
	for k, s := range m.index {
		if k.volume == volume {
			m.invalidateLocked(s)
			m.recycleLocked(s)
		}
	}
}

// slotLocked returns a slot to write to.
func (m *media) slotLocked() (int32, bool) {
	if k := len(m.free); k > 0 {
		s := m.free[k-1]
		m.free = m.free[:k-1]
		return s, true
	}
	if m.next < m.limit {
		m.next++
		return int32(m.next - 1), true
	}
	s, ok := m.policy.evict(func(s int32) bool { return m.slots[s].readers == 0 })
	if ok {
		delete(m.index, m.slots[s].key)
		m.slots[s].valid = false
	}
	return s, ok
}

// run writes what is queued until the cache is closed.
func (m *media) run() {
	for {
		select {
		case f := <-m.queue:
			m.write(f)
			f.Release()
		case <-m.c.ctx.Done():
			for {
				select {
				case f := <-m.queue:
					f.Release()
				default:
					return
				}
			}
		}
	}
}

func (m *media) write(f *frame) {
	m.c.mu.Lock()
	if !f.kept || !m.wantsLocked(f.key) {
		m.c.mu.Unlock()
		return
	}
	grow := len(m.free) == 0 && m.next < m.limit && m.next%growCheck == 0
	m.c.mu.Unlock()
	if grow {
		free, err := m.c.o.FS.Free(m.dir)
		if err == nil && free < m.c.o.ReserveBytes+growCheck*ChunkSize {
			m.c.mu.Lock()
			m.limit = m.next
			m.c.mu.Unlock()
			m.c.o.Logger.Warn("read cache grows no further: its file system is nearly full", "path", m.c.o.Path, "bytes", int64(m.next)*ChunkSize)
		}
	}
	m.c.mu.Lock()
	s, ok := m.slotLocked()
	m.c.mu.Unlock()
	if !ok {
		return
	}
	data := f.Bytes()
	sum := sumOf(data)
	n, err := m.file.WriteAt(data, int64(s)*ChunkSize)
	if err == nil && n < len(data) {
		err = fmt.Errorf("short write of %d bytes", n)
	}
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if err != nil {
		m.failed = true
		m.c.mediaFailed(fmt.Errorf("write %s: %w", m.c.o.Path, err))
		clear(m.index)
		return
	}
	if !f.kept { // dropped meanwhile
		m.free = append(m.free, s)
		return
	}
	m.slots[s] = slot{key: f.key, n: uint32(len(data)), sum: sum, valid: true}
	m.index[f.key] = s
	m.policy.admit(s, m.c.hash(f.key))
}

func (m *media) close() error { return m.file.Close() }
