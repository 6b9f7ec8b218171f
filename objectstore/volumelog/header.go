package volumelog

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Limits of the format.
const (
	// HeaderBlock is the unit of a header's length in bytes.
	HeaderBlock = 4096
	// MaxHeader is the longest header in bytes.
	MaxHeader = 16 << 20
	// MaxExtents is the largest number of extents of one object.
	MaxExtents = (MaxHeader - headerFixed) / extentBytes
	// MaxPayload is the longest payload of one object in bytes.
	MaxPayload = 256 << 20
	// MaxName is the longest name of a volume in bytes.
	MaxName = 256
	// MaxSize is the largest size of a volume in bytes. It bounds what a reader
	// believes; what a volume may have is its creator's to say.
	MaxSize = 1 << 50
	// MaxSameBlock is the longest block of a same extent in bytes.
	MaxSameBlock = 64 << 10

	sector      = 512
	headerFixed = 416
	extentBytes = 32
	version     = 2

	magicLog      = "ISERGLOG"
	magicManifest = "ISERGCKP"
	magicPart     = "ISERGCKE"
)

var le = binary.LittleEndian

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Kind is what a log object is.
type Kind uint16

// The kinds of log objects.
const (
	KindOpen  Kind = 1 // first object of an epoch: who writes it and from which LSN
	KindData  Kind = 2 // extents
	KindFence Kind = 3 // end of an epoch, put by a newer owner
)

func (k Kind) String() string {
	switch k {
	case KindOpen:
		return "open"
	case KindData:
		return "data"
	case KindFence:
		return "fence"
	}
	return fmt.Sprintf("kind(%d)", uint16(k))
}

// ExtentKind is what an extent does to its range.
type ExtentKind uint8

// The kinds of extents.
const (
	ExtentData ExtentKind = 1 // the range holds payload
	ExtentZero ExtentKind = 2 // the range reads as zeros (zeroed or trimmed)
	ExtentSame ExtentKind = 3 // the range holds one block, repeated
)

func (k ExtentKind) String() string {
	switch k {
	case ExtentData:
		return "data"
	case ExtentZero:
		return "zero"
	case ExtentSame:
		return "same"
	}
	return fmt.Sprintf("extent(%d)", uint8(k))
}

// Extent is one range of the volume that an object sets. Extents of one object
// do not overlap. All numbers but LSN are bytes and multiples of 512.
type Extent struct {
	Kind        ExtentKind
	LSN         uint64
	Offset      uint64
	Length      uint64
	Payload     uint64 // place of its data in the payload (trailers not counted); 0 for zero
	BlockLength uint32 // length of the repeated block, for same only; Length is a multiple of it
}

// Identity names one start of one writer. No two epochs are opened with the same one.
type Identity struct {
	Node  uuid.UUID
	Nonce uuid.UUID
}

// NewIdentity returns an identity of node that was never used before.
func NewIdentity(node uuid.UUID) Identity { return Identity{Node: node, Nonce: uuid.New()} }

func (w Identity) String() string { return w.Node.String() + "#" + w.Nonce.String()[:8] }

// Attributes of a volume travel in every object, so that the bucket alone tells
// what the volume is.
type Attributes struct {
	Name      string // UTF-8, at most MaxName bytes
	SizeBytes uint64 // a multiple of BlockSize, at most MaxSize
	BlockSize uint32 // 512 or 4096
}

// Validate reports the first attribute that is out of range.
func (a Attributes) Validate() error {
	switch {
	case a.BlockSize != 512 && a.BlockSize != 4096:
		return invalidf("block size %d is not 512 or 4096", a.BlockSize)
	case a.SizeBytes == 0 || a.SizeBytes > MaxSize || a.SizeBytes%uint64(a.BlockSize) != 0:
		return invalidf("volume size %d is not a multiple of %d up to %d", a.SizeBytes, a.BlockSize, uint64(MaxSize))
	}
	return validateName(a.Name)
}

func validateName(name string) error {
	if len(name) > MaxName || !utf8.ValidString(name) {
		return invalidf("volume name is not UTF-8 of at most %d bytes", MaxName)
	}
	for i := range len(name) {
		if name[i] == 0 {
			return invalidf("volume name has a zero byte")
		}
	}
	return nil
}

// Header describes one log object.
type Header struct {
	Kind       Kind
	Volume     uuid.UUID
	Epoch      uint64 // from 1
	Seq        uint64 // 0 for the open object
	Generation uint64
	Writer     Identity
	// FirstLSN and LastLSN are the range of writes that the object completes.
	// Objects of the log join: FirstLSN is one above the LastLSN before. Of an object without
	// writes (open, fence, data that only carries attributes) LastLSN is FirstLSN-1.
	FirstLSN uint64
	LastLSN  uint64
	Time     time.Time // of LastLSN
	Attributes
	Extents      []Extent
	PayloadBytes uint64
	// FramesCRC is the CRC32C of the frames' checksums: with the header's own it makes two
	// headers equal only if the objects are.
	FramesCRC    uint32
	HeaderBlocks uint16 // length of the encoded header in units of HeaderBlock
}

// Position returns the place of the object in the log.
func (h *Header) Position() Position { return Position{h.Epoch, h.Seq} }

// ObjectBytes returns the length of the whole object.
func (h *Header) ObjectBytes() int64 {
	return int64(h.HeaderBlocks)*HeaderBlock + wireBytes(int64(h.PayloadBytes))
}

// Location returns where the data of one of the header's extents is. For a zero extent it is the
// zero Location.
func (h *Header) Location(e Extent) Location {
	if e.Kind == ExtentZero {
		return Location{}
	}
	return Location{Epoch: h.Epoch, Seq: h.Seq, HeaderBlocks: h.HeaderBlocks, Sector: uint32(e.Payload / sector)}
}

// headerBytes is the length of a header with n extents.
func headerBytes(n int) int {
	return (headerFixed + n*extentBytes + HeaderBlock - 1) / HeaderBlock * HeaderBlock
}

// validate checks everything that an encoder must not write and a decoder must not believe.
func (h *Header) validate() error {
	switch {
	case h.Volume == uuid.Nil:
		return invalidf("no volume UUID")
	case h.Epoch == 0 || h.Epoch == ^uint64(0):
		return invalidf("epoch %d", h.Epoch)
	case h.Seq == ^uint64(0):
		return invalidf("seq %d", h.Seq)
	case h.Generation == 0:
		return invalidf("generation 0")
	case h.FirstLSN == 0 || h.LastLSN < h.FirstLSN-1 || h.LastLSN == ^uint64(0):
		return invalidf("LSN range %d to %d", h.FirstLSN, h.LastLSN)
	case h.PayloadBytes > MaxPayload || h.PayloadBytes%sector != 0:
		return invalidf("payload of %d bytes", h.PayloadBytes)
	case len(h.Extents) > MaxExtents:
		return invalidf("%d extents", len(h.Extents))
	}
	hasWrites := h.LastLSN >= h.FirstLSN
	switch h.Kind {
	case KindOpen:
		if h.Seq != 0 || hasWrites || h.PayloadBytes != 0 || len(h.Extents) != 0 {
			return invalidf("open object with seq %d, LSN %d to %d, %d extents", h.Seq, h.FirstLSN, h.LastLSN, len(h.Extents))
		}
	case KindData:
		if h.Seq == 0 || (!hasWrites && (len(h.Extents) != 0 || h.PayloadBytes != 0)) {
			return invalidf("data object with seq %d, LSN %d to %d, %d extents", h.Seq, h.FirstLSN, h.LastLSN, len(h.Extents))
		}
	case KindFence:
		if hasWrites || h.PayloadBytes != 0 || len(h.Extents) != 0 {
			return invalidf("fence with LSN %d to %d, %d extents", h.FirstLSN, h.LastLSN, len(h.Extents))
		}
		if h.Attributes == (Attributes{}) {
			return nil // the first fence of a volume may be put by who does not know it yet
		}
	default:
		return invalidf("object of %v", h.Kind)
	}
	if err := h.Attributes.Validate(); err != nil {
		return err
	}
	for i := range h.Extents {
		if err := h.validateExtent(&h.Extents[i]); err != nil {
			return fmt.Errorf("extent %d: %w", i, err)
		}
	}
	return nil
}

func (h *Header) validateExtent(e *Extent) error {
	if e.LSN == 0 || e.LSN > h.LastLSN {
		return invalidf("LSN %d outside of 1 to %d", e.LSN, h.LastLSN)
	}
	if err := validateRange(e.Kind, e.Offset, e.Length, e.BlockLength, h.SizeBytes); err != nil {
		return err
	}
	need := e.Length
	switch e.Kind {
	case ExtentSame:
		need = uint64(e.BlockLength)
	case ExtentZero:
		need = 0
	}
	if e.Payload%sector != 0 || e.Payload > h.PayloadBytes || need > h.PayloadBytes-e.Payload || (need == 0 && e.Payload != 0) {
		return invalidf("data at %d, %d bytes, of a payload of %d", e.Payload, need, h.PayloadBytes)
	}
	return nil
}

// validateRange checks what an extent and a checkpoint's entry have in common.
func validateRange(kind ExtentKind, off, length uint64, block uint32, size uint64) error {
	if off%sector != 0 || length%sector != 0 || length == 0 || length > size || off > size-length {
		return invalidf("range at %d, %d bytes, of a volume of %d", off, length, size)
	}
	switch kind {
	case ExtentData, ExtentZero:
		if block != 0 {
			return invalidf("%v with a block of %d bytes", kind, block)
		}
	case ExtentSame:
		if block == 0 || block%sector != 0 || block > MaxSameBlock || length%uint64(block) != 0 {
			return invalidf("%d bytes of repeated blocks of %d", length, block)
		}
	default:
		return invalidf("extent of %v", kind)
	}
	return nil
}

// encodeHeader writes h into dst, whose length is the header's length. h is valid.
func encodeHeader(dst []byte, h *Header) {
	clear(dst[:headerFixed])
	copy(dst, magicLog)
	le.PutUint32(dst[8:], version)
	le.PutUint32(dst[12:], uint32(len(dst)))
	le.PutUint16(dst[20:], uint16(h.Kind))
	copy(dst[24:], h.Volume[:])
	le.PutUint64(dst[40:], h.Epoch)
	le.PutUint64(dst[48:], h.Seq)
	le.PutUint64(dst[56:], h.Generation)
	copy(dst[64:], h.Writer.Node[:])
	copy(dst[80:], h.Writer.Nonce[:])
	le.PutUint64(dst[96:], h.FirstLSN)
	le.PutUint64(dst[104:], h.LastLSN)
	le.PutUint64(dst[112:], encodeTime(h.Time))
	le.PutUint64(dst[120:], h.SizeBytes)
	le.PutUint32(dst[128:], h.BlockSize)
	le.PutUint32(dst[132:], uint32(len(h.Extents)))
	le.PutUint64(dst[136:], h.PayloadBytes)
	le.PutUint32(dst[144:], h.FramesCRC)
	le.PutUint16(dst[158:], uint16(len(h.Name)))
	copy(dst[160:], h.Name)
	at := dst[headerFixed:]
	for i := range h.Extents {
		e := &h.Extents[i]
		le.PutUint64(at[0:], e.LSN)
		le.PutUint64(at[8:], e.Offset)
		le.PutUint64(at[16:], e.Length)
		le.PutUint32(at[24:], uint32(e.Payload/sector))
		le.PutUint16(at[28:], uint16(e.BlockLength/sector))
		at[30], at[31] = byte(e.Kind), 0
		at = at[extentBytes:]
	}
	clear(at)
	seal(dst)
}

// DecodeHeader decodes the header at the start of b, which may hold more or less than the header.
// It returns ErrShort if b holds less, ErrVersion for a version and ErrUnsupported for compression or
// encryption that this program does not know, and otherwise an error that Is objectstore.ErrCorrupt.
// The result does not refer to b. Who fetched the header by its key compares identity with the key.
func DecodeHeader(b []byte) (*Header, error) {
	b, err := unseal(b, magicLog, MaxHeader)
	if err != nil {
		return nil, err
	}
	h, n, err := decodeFixed(b)
	if err != nil {
		return nil, err
	}
	end := headerFixed + n*extentBytes
	if !isZero(b[end:]) {
		return nil, corruptf("padding of the header is not zero")
	}
	if n > 0 {
		h.Extents = make([]Extent, n)
	}
	at := b[headerFixed:end]
	for i := range h.Extents {
		if at[31] != 0 {
			return nil, corruptf("reserved byte of extent %d is not zero", i)
		}
		h.Extents[i] = Extent{
			LSN:         le.Uint64(at[0:]),
			Offset:      le.Uint64(at[8:]),
			Length:      le.Uint64(at[16:]),
			Payload:     uint64(le.Uint32(at[24:])) * sector,
			BlockLength: uint32(le.Uint16(at[28:])) * sector,
			Kind:        ExtentKind(at[30]),
		}
		at = at[extentBytes:]
	}
	if err := h.validate(); err != nil {
		return nil, corruptf("header: %v", err)
	}
	return h, nil
}

// decodeFixed decodes the fixed part of an unsealed header and returns the number
// of extents, which are inside of b.
func decodeFixed(b []byte) (*Header, int, error) {
	if len(b)%HeaderBlock != 0 {
		return nil, 0, corruptf("header of %d bytes", len(b))
	}
	h := &Header{
		Kind:         Kind(le.Uint16(b[20:])),
		Volume:       uuid.UUID(b[24:40]),
		Epoch:        le.Uint64(b[40:]),
		Seq:          le.Uint64(b[48:]),
		Generation:   le.Uint64(b[56:]),
		Writer:       Identity{Node: uuid.UUID(b[64:80]), Nonce: uuid.UUID(b[80:96])},
		FirstLSN:     le.Uint64(b[96:]),
		LastLSN:      le.Uint64(b[104:]),
		Time:         decodeTime(le.Uint64(b[112:])),
		PayloadBytes: le.Uint64(b[136:]),
		FramesCRC:    le.Uint32(b[144:]),
		HeaderBlocks: uint16(len(b) / HeaderBlock),
	}
	if c, k := le.Uint16(b[22:]), le.Uint32(b[148:]); c != 0 || k != 0 {
		return nil, 0, fmt.Errorf("%w: compression %d, key %d", ErrUnsupported, c, k)
	}
	name := int(le.Uint16(b[158:]))
	if name > MaxName || !isZero(b[160+name:headerFixed]) || !isZero(b[152:158]) {
		return nil, 0, corruptf("reserved bytes of the header, or a name of %d bytes", name)
	}
	h.Attributes = Attributes{Name: string(b[160 : 160+name]), SizeBytes: le.Uint64(b[120:]), BlockSize: le.Uint32(b[128:])}
	n := le.Uint32(b[132:])
	if n > MaxExtents || headerFixed+int(n)*extentBytes > len(b) {
		return nil, 0, corruptf("%d extents in a header of %d bytes", n, len(b))
	}
	return h, int(n), nil
}

// encodeTime keeps the zero time, which UnixNano does not.
func encodeTime(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(t.UnixNano())
}

func decodeTime(n uint64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(n)).UTC()
}

// seal sets the checksum of a header, manifest or part that fills b.
func seal(b []byte) { le.PutUint32(b[16:], sealCRC(b)) }

func sealCRC(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:16], castagnoli), castagnoli, b[20:])
}

// unseal checks magic, length, checksum and version, in the order in which each can be
// believed, and returns the bytes that the checksum covers.
func unseal(b []byte, magic string, limit int) ([]byte, error) {
	if len(b) < 20 {
		return nil, ErrShort{Need: min(HeaderBlock, limit)}
	}
	if string(b[:8]) != magic {
		return nil, corruptf("magic %q instead of %q", b[:8], magic)
	}
	n := le.Uint32(b[12:])
	if n < headerFixedOf(magic) || int64(n) > int64(limit) {
		return nil, corruptf("length %d in the header", n)
	}
	if int(n) > len(b) {
		return nil, ErrShort{Need: int(n)}
	}
	b = b[:n]
	if got, want := sealCRC(b), le.Uint32(b[16:]); got != want {
		return nil, corruptf("checksum %08x instead of %08x", got, want)
	}
	if v := le.Uint32(b[8:]); v != version {
		return nil, fmt.Errorf("%w: version %d, known is %d", ErrVersion, v, version)
	}
	return b, nil
}

func headerFixedOf(magic string) uint32 {
	if magic == magicPart {
		return partFixed
	}
	return headerFixed
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
