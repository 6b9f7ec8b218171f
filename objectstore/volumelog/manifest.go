package volumelog

import (
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// Limits of checkpoints.
const (
	// MaxPart is the longest checkpoint part in bytes.
	MaxPart = 4 << 20
	// MaxParts is the largest number of parts of one checkpoint.
	MaxParts = (MaxHeader - headerFixed) / partEntryBytes

	partEntryBytes = 16 // a part in the manifest
	partFixed      = 80
	entryBytes     = 48
	maxPartEntries = (MaxPart - partFixed) / entryBytes
)

// Entry is one range of the volume in a checkpoint. Ranges without an entry read as zeros.
type Entry struct {
	Kind        ExtentKind
	LSN         uint64 // of the write, at most the checkpoint's; 0 if not known
	Offset      uint64 // bytes, a multiple of 512
	Length      uint64 // bytes, a multiple of 512
	BlockLength uint32 // as of Extent
	Location    Location
}

// Manifest describes one complete checkpoint.
type Manifest struct {
	Volume uuid.UUID
	// Position is the key at which the log goes on: the checkpoint holds all objects before it.
	Position
	Generation uint64
	Writer     Identity
	LSN        uint64    // the checkpoint holds all writes up to it and nothing above
	Time       time.Time // of LSN
	Attributes
	Attempt uuid.UUID // names the parts
	Entries uint64    // in all parts
	Parts   []Part
}

// Part is one object with entries of a checkpoint.
type Part struct {
	Bytes   uint32
	CRC     uint32
	Entries uint32
}

func (m *Manifest) validate() error {
	switch {
	case m.Volume == uuid.Nil:
		return invalidf("no volume UUID")
	case m.Epoch == 0 || m.Epoch == math.MaxUint64 || m.Seq == 0 || m.Seq == math.MaxUint64:
		return invalidf("checkpoint at %v", m.Position)
	case m.Generation == 0:
		return invalidf("generation 0")
	case m.LSN >= math.MaxUint64-1:
		return invalidf("LSN %d", m.LSN)
	case len(m.Parts) > MaxParts:
		return invalidf("%d parts", len(m.Parts))
	}
	var sum uint64
	for i, p := range m.Parts {
		if p.Entries == 0 || p.Entries > maxPartEntries || p.Bytes != partFixed+p.Entries*entryBytes {
			return invalidf("part %d has %d entries in %d bytes", i, p.Entries, p.Bytes)
		}
		sum += uint64(p.Entries)
	}
	if sum != m.Entries {
		return invalidf("%d entries, parts have %d", m.Entries, sum)
	}
	return m.Attributes.Validate()
}

func (m *Manifest) encode() ([]byte, error) {
	if err := m.validate(); err != nil {
		return nil, err
	}
	b := make([]byte, headerFixed+len(m.Parts)*partEntryBytes)
	copy(b, magicManifest)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], uint32(len(b)))
	le.PutUint32(b[20:], uint32(len(m.Parts)))
	copy(b[24:], m.Volume[:])
	le.PutUint64(b[40:], m.Epoch)
	le.PutUint64(b[48:], m.Seq)
	le.PutUint64(b[56:], m.Generation)
	copy(b[64:], m.Writer.Node[:])
	copy(b[80:], m.Writer.Nonce[:])
	le.PutUint64(b[96:], m.LSN)
	le.PutUint64(b[104:], encodeTime(m.Time))
	le.PutUint64(b[112:], m.SizeBytes)
	le.PutUint32(b[120:], m.BlockSize)
	le.PutUint16(b[124:], uint16(len(m.Name)))
	copy(b[128:], m.Attempt[:])
	le.PutUint64(b[144:], m.Entries)
	copy(b[160:], m.Name)
	for i, p := range m.Parts {
		at := b[headerFixed+i*partEntryBytes:]
		le.PutUint32(at[0:], p.Bytes)
		le.PutUint32(at[4:], p.CRC)
		le.PutUint32(at[8:], p.Entries)
	}
	seal(b)
	return b, nil
}

// DecodeManifest decodes a whole manifest. Errors are those of DecodeHeader, with
// objectstore.ErrCorrupt instead of ErrShort.
func DecodeManifest(b []byte) (*Manifest, error) {
	b, err := unsealWhole(b, magicManifest, MaxHeader)
	if err != nil {
		return nil, err
	}
	m := &Manifest{
		Volume:     uuid.UUID(b[24:40]),
		Position:   Position{le.Uint64(b[40:]), le.Uint64(b[48:])},
		Generation: le.Uint64(b[56:]),
		Writer:     Identity{Node: uuid.UUID(b[64:80]), Nonce: uuid.UUID(b[80:96])},
		LSN:        le.Uint64(b[96:]),
		Time:       decodeTime(le.Uint64(b[104:])),
		Attempt:    uuid.UUID(b[128:144]),
		Entries:    le.Uint64(b[144:]),
	}
	n := int(le.Uint16(b[124:]))
	if n > MaxName || !isZero(b[160+n:headerFixed]) || !isZero(b[126:128]) || !isZero(b[152:160]) {
		return nil, corruptf("manifest: reserved bytes or a name of %d bytes", n)
	}
	m.Attributes = Attributes{Name: string(b[160 : 160+n]), SizeBytes: le.Uint64(b[112:]), BlockSize: le.Uint32(b[120:])}
	parts := le.Uint32(b[20:])
	if parts > MaxParts || headerFixed+int(parts)*partEntryBytes != len(b) {
		return nil, corruptf("manifest: %d parts in %d bytes", parts, len(b))
	}
	if parts > 0 {
		m.Parts = make([]Part, parts)
	}
	for i := range m.Parts {
		at := b[headerFixed+i*partEntryBytes:]
		m.Parts[i] = Part{Bytes: le.Uint32(at[0:]), CRC: le.Uint32(at[4:]), Entries: le.Uint32(at[8:])}
		if le.Uint32(at[12:]) != 0 {
			return nil, corruptf("manifest: reserved bytes of part %d", i)
		}
	}
	if err := m.validate(); err != nil {
		return nil, corruptf("manifest: %v", err)
	}
	return m, nil
}

// unsealWhole is unseal for an object that was read whole.
func unsealWhole(b []byte, magic string, limit int) ([]byte, error) {
	got, err := unseal(b, magic, limit)
	if short, ok := err.(ErrShort); ok {
		return nil, corruptf("object of %d bytes instead of %d", len(b), short.Need)
	}
	if err == nil && len(got) != len(b) {
		return nil, corruptf("object of %d bytes instead of %d", len(b), len(got))
	}
	return got, err
}

// validateEntry checks e against the checkpoint, and that it lies behind end, where the entry before it ended.
func (m *Manifest) validateEntry(e *Entry, end uint64) error {
	if err := validateRange(e.Kind, e.Offset, e.Length, e.BlockLength, m.SizeBytes); err != nil {
		return err
	}
	if e.Offset < end {
		return invalidf("entry at %d begins before %d", e.Offset, end)
	}
	if e.LSN > m.LSN {
		return invalidf("entry at %d has LSN %d, the checkpoint ends at %d", e.Offset, e.LSN, m.LSN)
	}
	if e.Kind == ExtentZero {
		if e.Location != (Location{}) {
			return invalidf("entry at %d is zero and has a location", e.Offset)
		}
		return nil
	}
	if err := e.Location.validate(); err != nil {
		return fmt.Errorf("entry at %d: %w", e.Offset, err)
	}
	if !e.Location.Position().Before(m.Position) {
		return invalidf("entry at %d is in object %v, the checkpoint ends before %v", e.Offset, e.Location.Position(), m.Position)
	}
	need := e.Length
	if e.Kind == ExtentSame {
		need = uint64(e.BlockLength)
	}
	if need > MaxPayload || uint64(e.Location.Sector)*sector+need > MaxPayload {
		return invalidf("entry at %d has %d bytes at sector %d", e.Offset, need, e.Location.Sector)
	}
	return nil
}

// part lays out one part of a checkpoint.
type partBuilder struct {
	buf     []byte
	entries uint32
}

func (p *partBuilder) reset() {
	p.buf = append(p.buf[:0], make([]byte, partFixed)...)
	p.entries = 0
}

func (p *partBuilder) add(e *Entry) {
	n := len(p.buf)
	p.buf = append(p.buf, make([]byte, entryBytes)...)
	at := p.buf[n:]
	le.PutUint64(at[0:], e.LSN)
	le.PutUint64(at[8:], e.Offset)
	le.PutUint64(at[16:], e.Length)
	le.PutUint64(at[24:], e.Location.Epoch)
	le.PutUint64(at[32:], e.Location.Seq)
	le.PutUint32(at[40:], e.Location.Sector)
	le.PutUint16(at[44:], e.Location.HeaderBlocks)
	at[46] = byte(e.Kind)
	at[47] = byte(e.BlockLength / sector)
	p.entries++
}

// finish seals part number n of m and returns its description.
func (p *partBuilder) finish(m *Manifest, n int) Part {
	b := p.buf
	copy(b, magicPart)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], uint32(len(b)))
	le.PutUint32(b[20:], p.entries)
	copy(b[24:], m.Volume[:])
	le.PutUint64(b[40:], m.Epoch)
	le.PutUint64(b[48:], m.Seq)
	copy(b[56:], m.Attempt[:])
	le.PutUint32(b[72:], uint32(n))
	seal(b)
	return Part{Bytes: uint32(len(b)), CRC: le.Uint32(b[16:]), Entries: p.entries}
}

// decodePart checks part n of m and yields its entries, which begin at or behind end. It returns
// where the last one ends. Errors of yield are returned as they are.
func decodePart(m *Manifest, n int, b []byte, end uint64, yield func(Entry) error) (uint64, error) {
	b, err := unsealWhole(b, magicPart, MaxPart)
	if err != nil {
		return 0, err
	}
	want := m.Parts[n]
	switch {
	case uuid.UUID(b[24:40]) != m.Volume || le.Uint64(b[40:]) != m.Epoch || le.Uint64(b[48:]) != m.Seq ||
		uuid.UUID(b[56:72]) != m.Attempt || le.Uint32(b[72:]) != uint32(n):
		return 0, corruptf("part %d of checkpoint %v: belongs elsewhere", n, m.Position)
	case uint32(len(b)) != want.Bytes || le.Uint32(b[16:]) != want.CRC || le.Uint32(b[20:]) != want.Entries || le.Uint32(b[76:]) != 0:
		return 0, corruptf("part %d of checkpoint %v: is not the one in the manifest", n, m.Position)
	case uint64(len(b)) != partFixed+uint64(want.Entries)*entryBytes:
		return 0, corruptf("part %d of checkpoint %v: %d entries in %d bytes", n, m.Position, want.Entries, len(b))
	}
	for at := b[partFixed:]; len(at) > 0; at = at[entryBytes:] {
		e := Entry{
			LSN:    le.Uint64(at[0:]),
			Offset: le.Uint64(at[8:]),
			Length: le.Uint64(at[16:]),
			Location: Location{
				Epoch:        le.Uint64(at[24:]),
				Seq:          le.Uint64(at[32:]),
				Sector:       le.Uint32(at[40:]),
				HeaderBlocks: le.Uint16(at[44:]),
			},
			Kind:        ExtentKind(at[46]),
			BlockLength: uint32(at[47]) * sector,
		}
		if err := m.validateEntry(&e, end); err != nil {
			return 0, corruptf("part %d of checkpoint %v: %v", n, m.Position, err)
		}
		end = e.Offset + e.Length
		if err := yield(e); err != nil {
			return 0, err
		}
	}
	return end, nil
}
