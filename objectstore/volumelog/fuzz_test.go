package volumelog

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// checkError fails unless err is of a class that a decoder may return.
func checkError(t *testing.T, err error) {
	t.Helper()
	var short ErrShort
	if err != nil && !errors.Is(err, objectstore.ErrCorrupt) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrUnsupported) &&
		!errors.Is(err, ErrInvalid) && !errors.As(err, &short) {
		t.Fatalf("unclassified error: %v", err)
	}
}

// resealed lets the fuzzer reach behind the checksum.
func resealed(b []byte) []byte {
	b = bytes.Clone(b)
	if len(b) >= 20 {
		if n := le.Uint32(b[12:]); n >= 20 && int64(n) <= int64(len(b)) {
			seal(b[:n])
		}
	}
	return b
}

func FuzzDecodeHeader(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{0, 1, 5} {
		h, _, body := randomObject(f, r, n)
		f.Add(body[:int(h.HeaderBlocks)*HeaderBlock])
	}
	mark, err := encodeMark(&Header{Kind: KindFence, Volume: uuid.New(), Epoch: 1, Generation: 1, FirstLSN: 1})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(mark)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, resealed(b)} {
			h, err := DecodeHeader(b)
			checkError(t, err)
			if err != nil {
				var short ErrShort
				if errors.As(err, &short) && (short.Need <= len(b) || short.Need > MaxHeader) {
					t.Fatalf("%d bytes: %v", len(b), err)
				}
				continue
			}
			again := make([]byte, int(h.HeaderBlocks)*HeaderBlock)
			encodeHeader(again, h)
			if !bytes.Equal(again, b[:len(again)]) {
				t.Fatal("a header does not encode to what it was decoded from")
			}
			for _, e := range h.Extents {
				if e.Kind != ExtentZero {
					if err := h.Location(e).validate(); err != nil && h.Seq != 0 {
						t.Fatal(err)
					}
				}
			}
		}
	})
}

func FuzzVerifyFrames(f *testing.F) {
	r := rand.New(rand.NewPCG(2, 1))
	h, _, body := randomObject(f, r, 3)
	wire := body[int(h.HeaderBlocks)*HeaderBlock:]
	f.Add(wire[:min(len(wire), FrameBytes)], 0)
	f.Add(wire, 1<<40)
	f.Add([]byte{}, -1)
	f.Fuzz(func(t *testing.T, wire []byte, first int) {
		loc := Location{Epoch: h.Epoch, Seq: h.Seq, HeaderBlocks: h.HeaderBlocks}
		n := len(wire)
		payload, err := VerifyFrames(h.Volume, loc, first, bytes.Clone(wire))
		checkError(t, err)
		if err == nil && wireBytes(int64(len(payload))) != int64(n) {
			t.Fatalf("%d bytes of payload from %d", len(payload), n)
		}
		_, err = VerifyObject(append(bytes.Clone(body[:int(h.HeaderBlocks)*HeaderBlock]), wire...))
		checkError(t, err)
	})
}

func fuzzManifest() (*Manifest, []byte, []byte) {
	r := rand.New(rand.NewPCG(3, 1))
	m := &Manifest{
		Volume: randomUUID(r), Position: Position{3, 9}, Generation: 2, LSN: 77, Time: time.Unix(5, 6),
		Attributes: Attributes{"name", MaxSize, 4096}, Attempt: randomUUID(r), Entries: 9,
	}
	var part partBuilder
	part.reset()
	for _, e := range randomEntries(r, 9, 77) {
		part.add(&e)
	}
	m.Parts = []Part{part.finish(m, 0)}
	body, err := m.encode()
	if err != nil {
		panic(err)
	}
	return m, body, part.buf
}

func FuzzManifest(f *testing.F) {
	_, body, _ := fuzzManifest()
	f.Add(body)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, resealed(b)} {
			m, err := DecodeManifest(b)
			checkError(t, err)
			if err != nil {
				continue
			}
			if again, err := m.encode(); err != nil || !bytes.Equal(again, b) {
				t.Fatalf("a manifest does not encode to what it was decoded from: %v", err)
			}
		}
	})
}

func FuzzCheckpointPart(f *testing.F) {
	m, _, part := fuzzManifest()
	f.Add(part, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, end uint64) {
		for _, b := range [][]byte{b, resealed(b)} {
			m := *m
			if len(b) >= partFixed { // a manifest that names just this part
				m.Parts = []Part{{uint32(len(b)), le.Uint32(b[16:]), le.Uint32(b[20:])}}
			}
			last := end
			_, err := decodePart(&m, 0, b, end, func(e Entry) error {
				if e.Offset < last || e.Length == 0 || e.Offset+e.Length > m.SizeBytes || e.LSN > m.LSN {
					t.Fatalf("entry %+v behind %d", e, last)
				}
				last = e.Offset + e.Length
				return nil
			})
			checkError(t, err)
		}
	})
}
