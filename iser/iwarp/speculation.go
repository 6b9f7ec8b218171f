package iwarp

// While a Read of ours is under way, what comes next is most likely its response, in segments of the size of the last one. So the places of the next read
// are laid out for that: a slot for the header, then the part of the sink that its payload belongs to, a slot for the trailer and the next
// header, and so on. If it comes so, payload lies where it belongs without a copy, however small the segments. If not, what was read is gathered into the
// buffer from where the guess was wrong, and goes the ordinary way. A sink's content is nobody's until the Read is complete, so a wrong
// guess writes nothing that anybody sees, and never outside the sink.

const (
	// maxPieces bounds the places of one read.
	maxPieces = 64
	// minAhead is the least payload, in bytes, that is worth a guess.
	minAhead = 512
	// slotLen holds a trailer with its padding and a header.
	slotLen = 3 + crcLen + lengthLen + taggedLen
)

// piece of what was read ahead.
type piece struct {
	b    []byte
	sink bool // it is payload, if the guess was right; else a slot
	tail bool // the read buffer
}

// span is a range of addresses.
type span struct{ from, to uintptr }

// take extends the span by b; false, and nothing is changed, if b may overlap with what it took before: elements of work requests may lie in the same memory, but
// not the places of one read, because bytes of the stream would be lost.
func (s *span) take(b []byte) bool {
	from := addrOf(b)
	to := from + uintptr(len(b))
	switch {
	case s.to == 0:
		*s = span{from, to}
	case from >= s.to:
		s.to = to
	case to <= s.from:
		s.from = from
	default:
		return false
	}
	return true
}

// speculation is the state of reading ahead.
type speculation struct {
	taken   span // of the next read
	guess   int  // payload of a segment; 0: none was seen
	slots   [maxPieces][slotLen]byte
	plans   [maxPieces]piece
	planned int // pieces of the next read

	ahead  [maxPieces + 1]piece
	pieces []piece // what came, in order
	at     int     // pieces[at:] are not looked at
}

// learn adapts the guess to a segment of a response.
func (s *speculation) learn(n int, last bool) {
	if !last || n > s.guess {
		s.guess = n
	}
}

// came and tail take what was read, in the order of the plan.
func (s *speculation) came(b []byte) {
	s.pieces = append(s.pieces, piece{b: b, sink: s.plans[len(s.pieces)].sink})
}

func (s *speculation) tail(b []byte) {
	s.pieces = append(s.pieces, piece{b: b, tail: true})
}

// plan appends to iov the places for segments of the response to the oldest Read from c on, and of those behind. length is that of
// the ULPDU whose trailer comes before, -1 if there is none. It returns how much of the buffer may be used behind them; all that is planned and
// that fits into the buffer, should it have to be gathered.
func (r *receiver) plan(c cursor, length int) int {
	s := &r.spec
	if s.at == len(s.pieces) {
		s.pieces, s.at = s.ahead[:0], 0
	}
	total, room := 0, len(r.buf)-2*slotLen
	add := func(b []byte, sink bool) {
		s.plans[s.planned] = piece{b: b, sink: sink}
		s.planned++
		r.iov = append(r.iov, b)
		total += len(b)
	}
	trailer := func() int {
		if length < 0 {
			return 0
		}
		return padding(length) + crcLen
	}
	for later := 1; ; {
		if c.left == 0 {
			k := r.reads.later(later)
			if k == nil {
				break
			}
			c, later = k.cur, later+1
			continue
		}
		n := c.left
		if s.guess > 0 {
			n = min(n, s.guess)
		}
		if s.guess == 0 {
			n = min(n, room-total-slotLen)
		}
		// A segment may lie in several elements of the sink: leave places for some.
		if n < min(minAhead, c.left) || total+slotLen+n > room || len(r.iov)+8 > maxPieces {
			break
		}
		slot := s.slots[s.planned][:trailer()+lengthLen+taggedLen]
		add(slot, false)
		length = taggedLen + n
		for n > 0 && len(r.iov)+2 < maxPieces {
			b := c.next(n)
			if !s.taken.take(b) {
				break
			}
			add(b, true)
			n -= len(b)
		}
		if n > 0 {
			return 1
		}
	}
	if s.planned == 0 {
		return plainBytes
	}
	if c.left > 0 {
		return trailer() + lengthLen + taggedLen
	}
	return min(plainBytes, len(r.buf)-total)
}

// more makes more of what was read ahead visible; false if all of it is. Then what is left is in the buffer.
func (r *receiver) more() bool {
	s := &r.spec
	if len(s.pieces) == 0 {
		return false
	}
	if s.at == len(s.pieces) {
		r.gather()
		return false
	}
	p := &s.pieces[s.at]
	switch {
	case r.from < r.to:
		r.gather()
	case p.tail:
		r.view, r.from, r.to = r.buf, 0, len(p.b)
		s.pieces, s.at = s.ahead[:0], 0
	case !p.sink && r.phase != phasePayload && r.phase != phaseSkip: // else the segment is longer than was guessed
		r.view, r.from, r.to = p.b, 0, len(p.b)
		s.at++
	case r.phase == phasePayload && r.dest == destSink && r.isNext(p.b):
		b := p.b[:min(len(p.b), r.left)]
		if len(b) == len(p.b) {
			s.at++
		} else {
			p.b = p.b[len(b):] // the segment is shorter than was guessed
		}
		r.placed(b)
	default:
		r.gather()
	}
	return true
}

// isNext reports whether the payload that comes next belongs to where b is.
func (r *receiver) isNext(b []byte) bool {
	c := *r.cursor()
	if c.left == 0 {
		return false
	}
	return addrOf(c.next(1)) == addrOf(b)
}

// gather moves all that is not looked at into the buffer.
func (r *receiver) gather() {
	s := &r.spec
	rest := s.pieces[s.at:]
	total := r.to - r.from
	for i := range rest {
		total += len(rest[i].b)
	}
	if n := len(rest); n > 0 && rest[n-1].tail {
		b := rest[n-1].b // at the start of the buffer, and to its end
		copy(r.buf[total-len(b):], b)
		rest = rest[:n-1]
	}
	at := copy(r.buf, r.view[r.from:r.to])
	for i := range rest {
		at += copy(r.buf[at:], rest[i].b)
	}
	r.view, r.from, r.to = r.buf, 0, total
	s.pieces, s.at = s.ahead[:0], 0
}
