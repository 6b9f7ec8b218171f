package homemap

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/isergate/isergate/cache/extent"
)

// flushed is a page that is being written.
type flushed struct {
	p   *page
	gen uint64
}

// flushSome writes up to one batch of dirty pages and reports whether there were any.
// The caller holds flushMu.
func (m *Map) flushSome() (bool, error) {
	m.batch.reset()
	var list []flushed
	m.mu.Lock()
	if m.closed != nil {
		defer m.mu.Unlock()
		return false, m.closed
	}
	some := len(m.dirty) > 0
	for num, p := range m.dirty {
		p.DropZeros() // nothing means zeros
		m.resizedLocked(p)
		if p.Len() == 0 {
			if _, ok := m.coarse.At(num); !ok {
				m.present.clear(num, num+1)
				m.addStaleLocked(pageRange{num, num + 1})
				m.dropPageLocked(p)
				continue
			}
		}
		if !m.batch.Fits(p.EncodedLen()) {
			break
		}
		m.batch.put(Pages, num, func(b []byte) []byte {
			return p.AppendEncode(b, extent.PageID{Volume: m.volume, Number: num})
		})
		list = append(list, flushed{p, p.gen})
	}
	m.mu.Unlock()
	if len(list) == 0 {
		return some, nil
	}
	if err := m.store.Apply(m.volume, &m.batch); err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range list {
		if m.pages[f.p.num] == f.p && f.p.gen == f.gen {
			m.cleanLocked(f.p)
		}
	}
	return true, nil
}

// spill writes one batch of dirty pages, on behalf of whoever needs the memory.
func (m *Map) spill() error {
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	_, err := m.flushSome()
	if errors.Is(err, ErrClosed) {
		return nil // it has no dirty pages any more
	}
	m.cache.spills.Add(float64(len(m.batch.Records)))
	return err
}

// Checkpoint makes the map durable together with c, which says how far in the object
// log the map is: nothing that was inserted may lie behind it being missing, so c is
// that of the last Insert or an earlier one. The context is looked at between steps;
// what was written until then stays, and does no harm.
func (m *Map) Checkpoint(ctx context.Context, c Checkpoint) error {
	if len(c.Blob) > MaxBlob {
		return fmt.Errorf("homemap: blob of %d bytes, at most %d", len(c.Blob), MaxBlob)
	}
	// Most of the work while Inserts go on, the rest while they wait.
	m.mu.RLock()
	rounds := len(m.dirty)/1024 + 1
	m.mu.RUnlock()
	for range rounds {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.flushMu.Lock()
		more, err := m.flushSome()
		m.flushMu.Unlock()
		if err != nil {
			return err
		}
		if !more {
			break
		}
	}
	m.insertMu.Lock()
	defer m.insertMu.Unlock()
	if err := m.settle(); err != nil { // an Insert may have failed to
		return err
	}
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	for more := true; more; {
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		if more, err = m.flushSome(); err != nil {
			return err
		}
	}
	if err := m.writeMeta(c); err != nil {
		return err
	}
	return m.clean()
}

// writeMeta writes presence and meta in one batch. The caller holds insertMu and
// flushMu, and nothing is dirty.
func (m *Map) writeMeta(c Checkpoint) error {
	c.Blob = slices.Clone(c.Blob)
	m.batch.reset()
	m.mu.RLock()
	d := meta{Checkpoint: c, coarse: m.coarse.Clone(), stale: slices.Clone(m.stale)}
	var rec []byte
	written := m.present.dirty
	for i := range m.present.chunks {
		if m.present.empty(i) {
			if written[i] {
				m.batch.delete(Presence, uint64(i))
			}
			continue
		}
		rec = m.present.appendChunk(rec[:0], m.volume, i)
		d.digest.add(rec)
		if written[i] {
			m.batch.put(Presence, uint64(i), func(b []byte) []byte { return append(b, rec...) })
		}
	}
	m.mu.RUnlock()
	m.batch.put(Meta, 0, func(b []byte) []byte { return d.appendTo(b, m.volume) })
	if err := m.store.Apply(m.volume, &m.batch); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, w := range written {
		if w {
			m.present.dirty[i] = false
			if m.present.empty(i) {
				m.present.chunks[i] = nil
			}
		}
	}
	m.last, m.hasLast, m.changed = c, true, false
	return nil
}

// cleanPerCheckpoint bounds the keys that a checkpoint visits to remove pages that are
// not present.
const cleanPerCheckpoint = 16384

// clean removes pages from the store that are not present according to the checkpoint
// that has just become durable. The caller holds insertMu and flushMu.
func (m *Map) clean() error {
	m.mu.RLock()
	stale := slices.Clone(m.stale)
	m.mu.RUnlock()
	m.batch.reset()
	budget := cleanPerCheckpoint
	var rest []pageRange
	for i, r := range stale {
		if budget == 0 {
			rest = append(rest, stale[i:]...)
			break
		}
		done := r.to
		err := m.store.Scan(m.volume, Pages, r.from, true, func(num uint64, _ []byte) (bool, error) {
			if num >= r.to {
				return false, nil
			}
			if budget == 0 || !m.batch.Fits(0) {
				budget, done = 0, num
				return false, nil
			}
			budget--
			if !m.present.has(num) { // nobody changes it while insertMu is held
				m.batch.delete(Pages, num)
			}
			return true, nil
		})
		if err != nil {
			return err
		}
		if done < r.to {
			rest = append(rest, pageRange{done, r.to})
		}
	}
	if len(m.batch.Records) > 0 {
		if err := m.store.Apply(m.volume, &m.batch); err != nil {
			return err
		}
	}
	m.mu.Lock()
	m.stale = rest
	m.mu.Unlock()
	return nil
}

// Snapshot is the state of a map at a checkpoint. It is read by one goroutine, and
// closed, because the store keeps old versions for it.
type Snapshot struct {
	Checkpoint
	m       *Map
	view    View
	present *presence
	coarse  extent.Coarse
}

// Snapshot returns the state at the last checkpoint. Nothing may have been inserted
// since (ErrNotCheckpointed): call it right after Checkpoint.
func (m *Map) Snapshot() (*Snapshot, error) {
	m.insertMu.Lock()
	defer m.insertMu.Unlock()
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case m.closed != nil:
		return nil, m.closed
	case m.changed || !m.hasLast:
		return nil, ErrNotCheckpointed
	}
	v, err := m.store.View()
	if err != nil {
		return nil, err
	}
	return &Snapshot{Checkpoint: m.last, m: m, view: v, present: m.present.clone(), coarse: m.coarse.Clone()}, nil
}

// Walk calls yield for everything that the map has in the bucket, in order, extents
// that continue each other joined, without zeros. It stops at yield's first error and
// returns it.
func (s *Snapshot) Walk(yield func(extent.Extent) error) error {
	var buf, part []extent.Extent
	give := func(keep int) error {
		for len(buf) > keep {
			if err := yield(buf[0]); err != nil {
				return err
			}
			buf = buf[1:]
		}
		return nil
	}
	var pos uint64
	var p extent.Page
	want, more := s.present.next(0)
	err := s.view.Scan(s.m.volume, Pages, want, false, func(num uint64, rec []byte) (bool, error) {
		if more && num < want {
			return true, nil // a page that is not present any more
		}
		if !more || num > want {
			return false, nil
		}
		if err := p.Decode(rec, extent.PageID{Volume: s.m.volume, Number: num}); err != nil {
			return false, fmt.Errorf("%w: volume %s page %d: %w", ErrDamaged, s.m.volume, num, err)
		}
		base := num << extent.PageShift
		buf = s.coarse.Append(pos, base, slices.Clone(buf), 0)
		part = p.Lookup(base, extent.PageSectors, part[:0])
		for _, e := range part {
			if e.Kind != extent.Zero {
				buf = extent.Append(buf, 0, e)
			}
		}
		pos = base + extent.PageSectors
		want, more = s.present.next(num + 1)
		return true, give(1)
	})
	if err != nil {
		return err
	}
	if more {
		return fmt.Errorf("%w: volume %s page %d is missing", ErrDamaged, s.m.volume, want)
	}
	buf = s.coarse.Append(pos, extent.MaxSectors, slices.Clone(buf), 0)
	return give(0)
}

// Close ends the snapshot.
func (s *Snapshot) Close() { s.view.Close() }

// Reset empties the map, in memory and in the store.
func (m *Map) Reset() error {
	m.insertMu.Lock()
	defer m.insertMu.Unlock()
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed != nil {
		return m.closed
	}
	m.emptyLocked()
	return m.store.Drop(m.volume)
}

func (m *Map) emptyLocked() {
	for _, p := range m.pages {
		m.dropPageLocked(p)
	}
	m.clear()
}

// Drop removes the volume from the store and closes the map.
func (m *Map) Drop() error {
	if err := m.Reset(); err != nil {
		return err
	}
	return m.Close()
}

// Close frees the map's memory. What was not checkpointed is gone. It may be called
// more than once.
func (m *Map) Close() error {
	m.insertMu.Lock()
	defer m.insertMu.Unlock()
	m.flushMu.Lock()
	defer m.flushMu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed == nil {
		m.emptyLocked()
		m.closed = ErrClosed
		m.cache.detach(m)
	}
	return nil
}
