package iwarp

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/isergate/isergate/iser/rdma"
)

// Sizes of ULPDUs and batches.
const (
	minULPDU = 128
	maxULPDU = 64768 // RFC 5044, 4.1

	// copyLimit: the payload of messages up to this size is copied behind its headers, so that a batch is one piece; larger
	// messages are gathered by writev. One copy of what is hot costs less than gathering.
	copyLimit = 128 << 10
	// batchBytes is where a batch ends.
	batchBytes = 128 << 10
	// gatherBytes and gatherPieces are where a batch of a large message ends.
	gatherBytes  = 512 << 10
	gatherPieces = 900
	// outBytes is the room for a batch: its limit, one FPDU more and its markers.
	outBytes = batchBytes + 2*(64<<10)

	markerEvery = 512
	markerLen   = 4
)

// mulpdu is the largest ULPDU that fits one TCP segment with its frame (RFC 5044, 4.1 and IWARP-23).
func mulpdu(mss int, markers bool) int {
	n := mss - 6 - mss%4
	if markers {
		n -= markerLen * ((mss + markerEvery - 1) / markerEvery)
	}
	return max(minULPDU, min(maxULPDU, n))
}

// sender is the send side of one connection, from messages to bytes. It does no I/O. One goroutine uses it at a time.
type sender struct {
	crc     bool
	markers bool
	limit   int       // of a ULPDU
	pos     int       // of the stream since the first marker, modulo markerEvery
	msn     [3]uint32 // next, by queue

	out     []byte   // headers, trailers, and copied payload of the batch
	mark    int      // out[mark:] is not in vec
	vec     [][]byte // the batch
	payload int      // gathered bytes
	plain   []byte   // markers only: the FPDU before they are inserted
	tags    *tagTable
	refs    []ref  // pieces of the batch that lie in windows
	ended   uint64 // tags.ended when the first was added
}

// flight is a batch that is being written.
type flight struct {
	vec  [][]byte
	head int    // vec[:head] is written
	out  []byte // what some of vec are parts of

	// Pieces that lie in windows may be written only while these are bound, under the lock of tags.
	tags  *tagTable
	refs  []ref
	ended uint64
}

// ref is a piece of a window.
type ref struct {
	at  int // in vec
	tag uint32
	end uint64 // TO behind it
}

// sound reports whether what is not written of the pieces in windows may still be. tags.mu is held.
func (f *flight) sound() bool {
	if f.ended == f.tags.ended {
		return true
	}
	for i := range f.refs {
		r := &f.refs[i]
		if r.at < f.head {
			continue
		}
		left := f.vec[r.at]
		if b, ok := f.tags.reachLocked(r.tag, r.end-uint64(len(left)), len(left), rdma.RemoteRead); ok != accessOK || addrOf(b) != addrOf(left) {
			return false
		}
	}
	return true
}

func (s *sender) init(crc, markers bool, limit int) {
	s.crc, s.markers, s.limit = crc, markers, limit
	s.msn = [3]uint32{1, 1, 1}
}

// room reports whether the batch takes another FPDU.
func (s *sender) room() bool {
	return len(s.out) < batchBytes && s.payload < gatherBytes && len(s.vec) < gatherPieces
}

// message is one on its way into FPDUs.
type message struct {
	seg    segment // of the first segment
	size   int
	done   int
	cur    cursor
	gather bool
}

// start begins a message on an untagged queue, or a tagged one.
func (s *sender) start(m *message, seg segment) {
	m.seg, m.done, m.size = seg, 0, m.cur.left
	m.gather = m.size > copyLimit && !s.markers
	if !seg.tagged {
		m.seg.msn = s.msn[seg.queue]
		s.msn[seg.queue]++
	}
}

// next returns the segment that follows and its payload's length.
func (s *sender) next(m *message) (segment, int) {
	seg, n := m.seg, s.limit-untaggedLen
	if seg.tagged {
		n = s.limit - taggedLen
	}
	n = min(n, m.size-m.done)
	seg.to += uint64(m.done)
	seg.mo = uint32(m.done)
	m.done += n
	seg.last = m.done == m.size
	return seg, n
}

// encode adds FPDUs of m until it, or the batch, is complete. It reports the first.
func (s *sender) encode(m *message) bool {
	for s.room() {
		if s.one(m) {
			return true
		}
	}
	return false
}

// whole adds all FPDUs of m, of at most directLimit bytes, to a batch that has room.
func (s *sender) whole(m *message) {
	for !s.one(m) {
	}
}

// one adds the next FPDU of m. It reports whether that was the last.
func (s *sender) one(m *message) bool {
	seg, n := s.next(m)
	start := s.open(&seg, n)
	if m.gather {
		sum := s.sum(0, s.out[start:])
		for left := n; left > 0; {
			b := m.cur.next(left)
			left -= len(b)
			sum = s.gather(sum, b)
		}
		s.end(sum, seg.headerLen()+n)
	} else {
		for left := n; left > 0; {
			b := m.cur.next(left)
			left -= len(b)
			s.append(b)
		}
		s.close(start, seg.headerLen()+n)
	}
	return seg.last
}

// segment adds one FPDU whose payload is b.
func (s *sender) segment(seg *segment, b []byte) {
	start := s.open(seg, len(b))
	s.append(b)
	s.close(start, seg.headerLen()+len(b))
}

// refer adds one FPDU whose payload is b in a window, and is not copied. tags.mu is held.
func (s *sender) refer(seg *segment, b []byte, tag uint32, to uint64) {
	start := s.open(seg, len(b))
	sum := s.sum(0, s.out[start:])
	s.flush()
	if len(s.refs) == 0 {
		s.ended = s.tags.ended
	}
	s.refs = append(s.refs, ref{at: len(s.vec), tag: tag, end: to + uint64(len(b))})
	s.end(s.gather(sum, b), seg.headerLen()+len(b))
}

// sum continues a CRC, if there is one.
func (s *sender) sum(sum uint32, b []byte) uint32 {
	if !s.crc {
		return 0
	}
	return crc32.Update(sum, castagnoli, b)
}

// gather adds a piece of payload that is not copied.
func (s *sender) gather(sum uint32, b []byte) uint32 {
	s.flush()
	s.vec = append(s.vec, b)
	s.payload += len(b)
	return s.sum(sum, b)
}

// end adds what follows gathered payload.
func (s *sender) end(sum uint32, ulpdu int) {
	at := len(s.out)
	s.out = append(s.out, zero[:padding(ulpdu)]...)
	s.trailer(s.sum(sum, s.out[at:]))
}

func (s *segment) headerLen() int {
	if s.tagged {
		return taggedLen
	}
	return untaggedLen
}

var zero [4]byte

// open begins an FPDU and returns where.
func (s *sender) open(seg *segment, n int) int {
	var h [lengthLen + maxHeaderLen]byte
	k := seg.encode(h[lengthLen:])
	binary.BigEndian.PutUint16(h[:], uint16(k+n))
	if s.markers {
		s.plain = append(s.plain[:0], h[:lengthLen+k]...)
		return 0
	}
	start := len(s.out)
	s.out = append(s.out, h[:lengthLen+k]...)
	return start
}

func (s *sender) append(b []byte) {
	if s.markers {
		s.plain = append(s.plain, b...)
	} else {
		s.out = append(s.out, b...)
	}
}

// close ends an FPDU of copied payload.
func (s *sender) close(start, ulpdu int) {
	s.append(zero[:padding(ulpdu)])
	if s.markers {
		s.insert()
		return
	}
	sum := uint32(0)
	if s.crc {
		sum = crc32.Update(0, castagnoli, s.out[start:])
	}
	s.trailer(sum)
}

// trailer adds the CRC field, which is there in any case (IWARP-9).
func (s *sender) trailer(sum uint32) {
	s.out = binary.LittleEndian.AppendUint32(s.out, sum)
}

// insert moves the FPDU in plain to out with markers in it (RFC 5044, 4.3): every 512 bytes of the stream, markers included, pointing back to
// the length field; one right before it belongs to it. The CRC covers them.
func (s *sender) insert() {
	start := len(s.out)
	field := start // of the length
	emit := func(b []byte) {
		for len(b) > 0 {
			if s.pos == 0 {
				back := len(s.out) - field
				s.out = append(s.out, 0, 0, byte(back>>8), byte(back))
				if back == 0 {
					field = len(s.out)
				}
				s.pos = markerLen
			}
			n := min(len(b), markerEvery-s.pos)
			s.out = append(s.out, b[:n]...)
			s.pos = (s.pos + n) % markerEvery
			b = b[n:]
		}
	}
	emit(s.plain)
	sum := uint32(0)
	if s.pos == 0 { // a marker before the CRC is covered by it
		back := len(s.out) - field
		s.out = append(s.out, 0, 0, byte(back>>8), byte(back))
		s.pos = markerLen
	}
	if s.crc {
		sum = crc32.Update(0, castagnoli, s.out[start:])
	}
	s.trailer(sum)
	s.pos = (s.pos + crcLen) % markerEvery
}

// flush moves what is in out behind vec.
func (s *sender) flush() {
	if s.mark < len(s.out) {
		s.vec = append(s.vec, s.out[s.mark:len(s.out):len(s.out)])
		s.mark = len(s.out)
	}
}

// empty reports whether there is nothing in the batch.
func (s *sender) empty() bool { return len(s.out) == 0 }

// launch moves the batch to f, which is empty, and begins the next one. It reports whether there was something in it.
func (s *sender) launch(f *flight) bool {
	if s.empty() {
		return false
	}
	s.flush()
	f.vec, s.vec = s.vec, f.vec[:0]
	f.refs, s.refs = s.refs, f.refs[:0]
	f.out, s.out = s.out, nil
	f.head, f.tags, f.ended, s.mark, s.payload = 0, s.tags, s.ended, 0, 0
	return true
}

// land empties f. It returns the memory of the batch.
func (f *flight) land() []byte {
	out := f.out
	clear(f.vec)
	f.vec, f.refs, f.head, f.out = f.vec[:0], f.refs[:0], 0, nil
	return out
}

// pending is what is not written.
func (f *flight) pending() [][]byte { return f.vec[f.head:] }

// wrote says that n more bytes are written.
func (f *flight) wrote(n int) {
	for n > 0 {
		if k := len(f.vec[f.head]); n < k {
			f.vec[f.head] = f.vec[f.head][n:]
			return
		} else {
			n -= k
			f.head++
		}
	}
}
