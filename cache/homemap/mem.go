package homemap

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"sync"

	"github.com/google/uuid"
)

// Mem is a Store in memory for tests. What Apply returned from is what a crash
// leaves: see CrashClone.
type Mem struct {
	mu      sync.RWMutex
	records map[string][]byte // never changed in place, so that views may share values
	closed  bool

	// Fault, if set, is called before and after each change takes effect; an error
	// makes the call fail, after which only Get, Scan and CrashClone make sense. Set it
	// before use.
	Fault func(op string, applied bool) error
}

// NewMem returns an empty store.
func NewMem() *Mem { return &Mem{records: make(map[string][]byte)} }

// CrashClone is the store as a crash at this moment leaves it.
func (s *Mem) CrashClone() *Mem {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return &Mem{records: maps.Clone(s.records)}
}

const keyLen = 1 + 16 + 8

func appendKey(dst []byte, volume uuid.UUID, t Table, key uint64) []byte {
	dst = append(dst, byte(t))
	dst = append(dst, volume[:]...)
	return binary.BigEndian.AppendUint64(dst, key)
}

// Get implements Reader.
func (s *Mem) Get(volume uuid.UUID, t Table, key uint64, dst []byte) ([]byte, bool, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return dst, false, ErrClosed
	}
	v, ok := s.records[string(appendKey(nil, volume, t, key))]
	return append(dst, v...), ok, nil
}

// Scan implements Reader.
func (s *Mem) Scan(volume uuid.UUID, t Table, from uint64, keysOnly bool, fn func(uint64, []byte) (bool, error)) error {
	prefix := appendKey(nil, volume, t, 0)[:keyLen-8]
	first := string(appendKey(nil, volume, t, from))
	s.mu.RLock()
	var keys []string
	for k := range s.records {
		if bytes.HasPrefix([]byte(k), prefix) && k >= first {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	values := make([][]byte, len(keys))
	for i, k := range keys {
		values[i] = s.records[k]
	}
	closed := s.closed
	s.mu.RUnlock()
	if closed {
		return ErrClosed
	}
	for i, k := range keys {
		v := values[i]
		if keysOnly {
			v = nil
		}
		if more, err := fn(binary.BigEndian.Uint64([]byte(k[keyLen-8:])), v); !more || err != nil {
			return err
		}
	}
	return nil
}

func (s *Mem) fault(op string, applied bool) error {
	if s.Fault == nil {
		return nil
	}
	return s.Fault(op, applied)
}

// Apply implements Store.
func (s *Mem) Apply(volume uuid.UUID, b *Batch) error {
	if err := s.fault("apply", false); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	for _, r := range b.Records {
		k := string(appendKey(nil, volume, r.Table, r.Key))
		if r.Value == nil {
			delete(s.records, k)
		} else {
			s.records[k] = bytes.Clone(r.Value)
		}
	}
	s.mu.Unlock()
	return s.fault("apply", true)
}

// Drop implements Store.
func (s *Mem) Drop(volume uuid.UUID) error {
	for _, t := range []Table{Meta, Presence, Pages} {
		if err := s.fault("drop", false); err != nil {
			return err
		}
		prefix := string(appendKey(nil, volume, t, 0)[:keyLen-8])
		s.mu.Lock()
		maps.DeleteFunc(s.records, func(k string, _ []byte) bool { return k[:keyLen-8] == prefix })
		s.mu.Unlock()
		if err := s.fault("drop", true); err != nil {
			return err
		}
	}
	return nil
}

// Volumes implements Store.
func (s *Mem) Volumes() ([]uuid.UUID, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []uuid.UUID
	for k := range s.records {
		if Table(k[0]) == Meta {
			out = append(out, uuid.UUID([]byte(k[1:17])))
		}
	}
	return out, nil
}

type memView struct{ *Mem }

func (memView) Close() {}

// View implements Store.
func (s *Mem) View() (View, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return nil, ErrClosed
	}
	return memView{&Mem{records: maps.Clone(s.records)}}, nil
}

// Close implements Store.
func (s *Mem) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}
