package journal

import "fmt"

// BlockSize is the unit of the journal's layout and of its checksums, in bytes.
const BlockSize = 4096

// MaxNoteBytes is the largest payload of a Note.
const MaxNoteBytes = BlockSize

// Kind says what a record does. The values are part of the format.
type Kind uint8

// The kinds of records.
const (
	KindData  Kind = 1 // the payload is written at Offset; Length equals PayloadBytes
	KindZero  Kind = 2 // Length bytes at Offset read as zeros; no payload
	KindSame  Kind = 3 // the payload, one logical block, fills Length bytes at Offset
	KindFence Kind = 4 // a new epoch of the volume begins; no payload
	KindNote  Kind = 5 // small state of the engine's, opaque to the journal
)

// String names the kind.
func (k Kind) String() string {
	switch k {
	case KindData:
		return "data"
	case KindZero:
		return "zero"
	case KindSame:
		return "same"
	case KindFence:
		return "fence"
	case KindNote:
		return "note"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// reserved reports whether the kind draws on a reservation, as opposed to the private reserve.
func (k Kind) reserved() bool { return k == KindData || k == KindZero || k == KindSame }

// Record describes one change of one volume. The journal stores it and gives it no meaning beyond Kind.
type Record struct {
	Volume       [16]byte
	Epoch, LSN   uint64
	Kind         Kind
	Flags        uint8 // the engine's
	Offset       uint64
	Length       uint64 // bytes of the volume
	PayloadBytes uint32
	Time         int64 // Unix nanoseconds of the batch; set by the journal before Sink.Synced
	// Note is the payload of a Note, set on replay only and valid during the callback.
	Note []byte
}

func (r *Record) payloadBlocks() uint32 {
	return uint32((uint64(r.PayloadBytes) + BlockSize - 1) / BlockSize)
}

// validate checks what holds for every record that may be in a journal.
func (r *Record) validate() error {
	p := uint64(r.PayloadBytes)
	ok := true
	switch r.Kind {
	case KindData:
		ok = p > 0 && r.Length == p
	case KindZero, KindFence:
		ok = p == 0
	case KindSame:
		ok = p > 0 && r.Length >= p
	case KindNote:
		ok = p <= MaxNoteBytes
	default:
		return fmt.Errorf("%w: record of %v", ErrVersion, r.Kind)
	}
	if !ok {
		return fmt.Errorf("%w: %v record of length %d with %d bytes of payload", ErrInvalid, r.Kind, r.Length, p)
	}
	if r.Offset+r.Length < r.Offset {
		return fmt.Errorf("%w: %v record beyond the end of the address space", ErrInvalid, r.Kind)
	}
	return nil
}

// Location names the first block of a record's payload, for ever: generations are not used twice. For a
// record without payload it names the block at which the payload would be.
type Location struct {
	Segment uint64 // generation
	Block   uint32 // within the segment file
}

// Entry is a record on its way into the journal. It belongs to the journal from Submit until Sink.Synced or Sink.Failed has
// been called with it; the bytes of Payload may be read meanwhile, and do not change.
type Entry struct {
	Record
	// Payload is PayloadBytes bytes in all; every piece but the last is a multiple of BlockSize. The journal pads the
	// last block with zeros on the device; it never changes the buffers.
	Payload [][]byte
	// Loc is where the payload is; set before Sink.Synced.
	Loc Location
	// User is the caller's.
	User any

	cost int64 // reservation that it holds
}

func (e *Entry) validate() error {
	if err := e.Record.validate(); err != nil {
		return err
	}
	sum := uint64(0)
	for i, p := range e.Payload {
		sum += uint64(len(p))
		if i < len(e.Payload)-1 && len(p)%BlockSize != 0 {
			return fmt.Errorf("%w: piece %d of the payload has %d bytes", ErrInvalid, i, len(p))
		}
	}
	if sum != uint64(e.PayloadBytes) {
		return fmt.Errorf("%w: payload of %d bytes instead of %d", ErrInvalid, sum, e.PayloadBytes)
	}
	return nil
}
