package volumelog

import (
	"cmp"
	"slices"
)

// Builder lays out one data object in a single buffer: the payload is copied
// (or read) once, to where it is sent from. Not for concurrent use.
type Builder struct {
	buf     []byte   // header, then frames
	header  int      // length of the header
	room    int      // payload bytes that fit
	used    int      // payload bytes so far
	extents []Extent // so far
	pieces  [][]byte
	order   []int32
}

// Reset begins an object of up to extents extents and payload bytes of payload. It
// reuses the buffer of the object before if that is large enough: that object must not be in use
// any more. The header's length, and so what locations say, follows from extents.
func (b *Builder) Reset(extents, payload int) error {
	if extents < 0 || extents > MaxExtents || payload < 0 || payload > MaxPayload {
		return invalidf("object of %d extents, %d bytes", extents, payload)
	}
	b.header, b.room, b.used = headerBytes(extents), payload, 0
	if n := b.header + int(wireBytes(int64(payload))); n > cap(b.buf) {
		b.buf = make([]byte, n)
	} else {
		b.buf = b.buf[:n]
	}
	b.extents = slices.Grow(b.extents[:0], extents)
	return nil
}

// Extents returns the number of extents so far, Payload that of payload bytes.
func (b *Builder) Extents() int { return len(b.extents) }

// Payload returns the number of payload bytes so far.
func (b *Builder) Payload() int { return b.used }

// Data appends a data extent and returns the pieces of the object that hold its
// bytes: the caller fills them before Finish. The slice of pieces is valid until the next call.
// The bytes are undefined at first.
func (b *Builder) Data(lsn, offset uint64, length int) ([][]byte, error) {
	e := Extent{Kind: ExtentData, LSN: lsn, Offset: offset, Length: uint64(length)}
	return b.append(e, length)
}

// Same appends an extent of length bytes that holds block again and again.
func (b *Builder) Same(lsn, offset, length uint64, block []byte) error {
	e := Extent{Kind: ExtentSame, LSN: lsn, Offset: offset, Length: length, BlockLength: uint32(len(block))}
	pieces, err := b.append(e, len(block))
	if err != nil {
		return err
	}
	fill(pieces, block)
	return nil
}

// Zero appends an extent that reads as zeros.
func (b *Builder) Zero(lsn, offset, length uint64) error {
	_, err := b.append(Extent{Kind: ExtentZero, LSN: lsn, Offset: offset, Length: length}, 0)
	return err
}

// AppendData appends a data extent with a copy of data.
func (b *Builder) AppendData(lsn, offset uint64, data []byte) error {
	pieces, err := b.Data(lsn, offset, len(data))
	if err != nil {
		return err
	}
	fill(pieces, data)
	return nil
}

func fill(pieces [][]byte, data []byte) {
	for _, p := range pieces {
		data = data[copy(p, data):]
	}
}

func (b *Builder) append(e Extent, bytes int) ([][]byte, error) {
	if bytes < 0 || bytes%sector != 0 || bytes > b.room-b.used {
		return nil, invalidf("%d bytes more in an object of %d with room for %d", bytes, b.used, b.room)
	}
	if headerFixed+(len(b.extents)+1)*extentBytes > b.header {
		return nil, invalidf("more than %d extents", len(b.extents))
	}
	if bytes > 0 {
		e.Payload = uint64(b.used)
	}
	b.extents = append(b.extents, e)
	b.pieces = b.pieces[:0]
	for bytes > 0 {
		frame, off := b.used/FramePayload, b.used%FramePayload
		n := min(bytes, FramePayload-off)
		at := b.header + frame*FrameBytes + off
		b.pieces = append(b.pieces, b.buf[at:at+n:at+n])
		b.used += n
		bytes -= n
	}
	return b.pieces, nil
}

// Finish completes the object: it sets the fields of h that describe the extents and
// the payload, writes checksums and header, and returns the object. h.Extents and the object are
// valid until the next Reset. The caller has set the rest of h: usually from
// Writer.Header, and FirstLSN, LastLSN and Time. Extents that overlap are refused.
func (b *Builder) Finish(h *Header) ([]byte, error) {
	h.Extents = b.extents
	h.PayloadBytes = uint64(b.used)
	h.HeaderBlocks = uint16(b.header / HeaderBlock)
	if err := h.validate(); err != nil {
		return nil, err
	}
	if err := b.checkOverlap(); err != nil {
		return nil, err
	}
	b.buf = b.buf[:b.header+int(wireBytes(int64(b.used)))]
	wire := b.buf[b.header:]
	sum := newFrameSum(h.Volume, h.Position())
	for i := 0; i*FrameBytes < len(wire); i++ {
		frame := wire[i*FrameBytes : min((i+1)*FrameBytes, len(wire))]
		n := len(frame) - FrameTrailer
		le.PutUint64(frame[n:], sum.of(i, frame[:n]))
	}
	h.FramesCRC = framesCRC(wire)
	encodeHeader(b.buf[:b.header], h)
	return b.buf, nil
}

// checkOverlap refuses extents that overlap: within one object the order of extents means nothing.
func (b *Builder) checkOverlap() error {
	b.order = b.order[:0]
	for i := range b.extents {
		b.order = append(b.order, int32(i))
	}
	byOffset := func(i, j int32) int { return cmp.Compare(b.extents[i].Offset, b.extents[j].Offset) }
	if !slices.IsSortedFunc(b.order, byOffset) {
		slices.SortFunc(b.order, byOffset)
	}
	for i := 1; i < len(b.order); i++ {
		x, y := b.extents[b.order[i-1]], b.extents[b.order[i]]
		if x.Offset+x.Length > y.Offset {
			return invalidf("extents at %d and %d overlap", x.Offset, y.Offset)
		}
	}
	return nil
}

// encodeMark encodes an object that is only a header: open, fence.
func encodeMark(h *Header) ([]byte, error) {
	h.HeaderBlocks = 1
	if err := h.validate(); err != nil {
		return nil, err
	}
	b := make([]byte, headerBytes(0))
	encodeHeader(b, h)
	return b, nil
}
