package readcache

// Readahead finds sequential readers among the reads of one volume and says what to
// bring into the cache before they ask for it. It does no I/O and keeps no clock. Not
// safe for concurrent use.
type Readahead struct {
	// Max is the most bytes to be ahead of a reader; 0 means 4 MiB.
	Max int64

	streams [readaheadStreams]stream
	uses    uint64
}

const (
	readaheadStreams = 16        // readers that are told apart
	readaheadStart   = 256 << 10 // bytes ahead of a reader when it is first believed
	readaheadSlack   = 256 << 10 // how far reads of one reader may be out of order
	readaheadProof   = 2         // reads in a row that make a reader
)

// stream is one reader.
type stream struct {
	next   int64 // where it is expected
	ahead  int64 // up to where prefetching was asked for
	window int64
	hits   int
	used   uint64 // for replacement; 0: free
}

// Access notes a read of n bytes (> 0) at off, and returns the range to prefetch: n bytes
// from off on, 0 if none. The caller clips it to the volume.
func (r *Readahead) Access(off, n int64) (from, count int64) {
	limit := r.Max
	if limit <= 0 {
		limit = 4 << 20
	}
	r.uses++
	end := off + n
	var s *stream
	oldest := &r.streams[0]
	for i := range r.streams {
		t := &r.streams[i]
		if t.used != 0 && off >= t.next-readaheadSlack && off <= t.next+readaheadSlack && (t.hits >= readaheadProof || off == t.next) {
			s = t
			break
		}
		if t.used < oldest.used {
			oldest = t
		}
	}
	if s == nil {
		*oldest = stream{next: end, ahead: end, used: r.uses}
		return 0, 0
	}
	s.used = r.uses
	if end <= s.next {
		return 0, 0 // late, or again
	}
	s.next = end
	s.hits++
	if s.hits < readaheadProof {
		return 0, 0
	}
	s.ahead = max(s.ahead, end)
	if s.window == 0 {
		s.window = min(max(readaheadStart, 2*n), limit)
	} else if s.ahead-end > s.window/2 {
		return 0, 0
	} else {
		s.window = min(2*s.window, limit)
	}
	from, to := s.ahead, end+s.window
	if to <= from {
		return 0, 0
	}
	s.ahead = to
	return from, to - from
}
