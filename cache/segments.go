package cache

import (
	"sync"

	"github.com/isergate/isergate/cache/journal"
)

// segments knows, for one volume, which journal segments hold records of it and up to
// which LSN. Safe for concurrent use.
type segments struct {
	mu   sync.Mutex
	list []segmentMark // ascending
}

type segmentMark struct {
	gen  uint64
	last LSN // the highest LSN of the volume in the segment
}

// add notes records. They come in journal order.
func (s *segments) add(run []*journal.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, en := range run {
		gen, lsn := en.Loc.Segment, LSN(en.Record.LSN)
		if n := len(s.list); n > 0 && s.list[n-1].gen == gen {
			s.list[n-1].last = max(s.list[n-1].last, lsn)
		} else {
			s.list = append(s.list, segmentMark{gen, lsn})
		}
	}
}

// upTo returns the highest LSN in the segments up to gen, and false if the volume has nothing there.
func (s *segments) upTo(gen uint64) (lsn LSN, any bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.list {
		if m.gen > gen {
			break
		}
		lsn, any = max(lsn, m.last), true
	}
	return lsn, any
}

// beyond reports whether the volume has something in a segment after gen.
func (s *segments) beyond(gen uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.list)
	return n > 0 && s.list[n-1].gen > gen
}

// drop forgets the segments up to gen.
func (s *segments) drop(gen uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := 0
	for i < len(s.list) && s.list[i].gen <= gen {
		i++
	}
	s.list = append(s.list[:0], s.list[i:]...)
}
