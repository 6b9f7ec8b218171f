package volumelog

import (
	"context"
	"hash/crc32"

	"github.com/google/uuid"
	"github.com/zeebo/xxh3"

	"github.com/isergate/isergate/objectstore"
)

// Sizes of frames in bytes.
const (
	FramePayload = 64 << 10 // payload of every frame but the last of an object
	FrameTrailer = 8
	FrameBytes   = FramePayload + FrameTrailer

	maxFrames = MaxPayload / FramePayload
)

// Location says where data is in the log: enough to fetch and verify it by one
// ranged read of whole frames without having seen the object's header.
type Location struct {
	Epoch        uint64
	Seq          uint64
	HeaderBlocks uint16 // length of the object's header in units of HeaderBlock
	Sector       uint32 // place in the payload (trailers not counted) in units of 512 bytes
}

// Position returns the object that holds the data.
func (l Location) Position() Position { return Position{l.Epoch, l.Seq} }

// Frame returns the frame in which the data begins and the offset in that frame's payload in bytes.
func (l Location) Frame() (index, offset int) {
	return int(l.Sector / (FramePayload / sector)), int(l.Sector%(FramePayload/sector)) * sector
}

// Add returns the location n bytes further in the same payload; n is a multiple of 512.
func (l Location) Add(n uint64) Location {
	l.Sector += uint32(n / sector)
	return l
}

func (l Location) validate() error {
	if l.Epoch == 0 || l.Seq == 0 || l.HeaderBlocks == 0 || l.HeaderBlocks > MaxHeader/HeaderBlock || l.Sector >= MaxPayload/sector {
		return invalidf("location %d/%d, header of %d blocks, sector %d", l.Epoch, l.Seq, l.HeaderBlocks, l.Sector)
	}
	return nil
}

// FrameSpan returns the byte range of n frames from first on in the object of loc.
// The last frame of an object may be shorter, so that the range may reach over its end.
func FrameSpan(loc Location, first, n int) (off int64, length int) {
	return int64(loc.HeaderBlocks)*HeaderBlock + int64(first)*FrameBytes, n * FrameBytes
}

// wireBytes is the length of a payload of n bytes in frames with trailers.
func wireBytes(n int64) int64 {
	return n + (n+FramePayload-1)/FramePayload*FrameTrailer
}

// frameSum is the checksum of one frame. It is no CRC: payload that ends with its own CRC32C, as file systems and databases write it, has
// the CRC32C of all such payload of its length.
type frameSum struct {
	id [40]byte // volume, epoch, seq, index, length
}

func newFrameSum(id uuid.UUID, p Position) *frameSum {
	f := new(frameSum)
	copy(f.id[:], id[:])
	le.PutUint64(f.id[16:], p.Epoch)
	le.PutUint64(f.id[24:], p.Seq)
	return f
}

func (f *frameSum) of(index int, payload []byte) uint64 {
	le.PutUint32(f.id[32:], uint32(index))
	le.PutUint32(f.id[36:], uint32(len(payload)))
	return xxh3.HashSeed(payload, xxh3.Hash(f.id[:]))
}

// VerifyFrames checks wire, which holds whole frames of the object of loc from
// frame first on, and moves their payloads together at the start of wire. It returns
// the payload, which is a part of wire. All but the last frame of wire are full; a
// shorter last one is the last of the object, if the object was read to its end.
// An error Is objectstore.ErrCorrupt, and wire is then undefined.
func VerifyFrames(id uuid.UUID, loc Location, first int, wire []byte) ([]byte, error) {
	if first < 0 || first >= maxFrames || len(wire) > MaxPayload+maxFrames*FrameTrailer {
		return nil, invalidf("%d bytes of frames from %d on", len(wire), first)
	}
	sum := newFrameSum(id, loc.Position())
	at := 0
	for i, rest := first, wire; len(rest) > 0; i++ {
		n := min(len(rest), FrameBytes) - FrameTrailer
		if n <= 0 || n%sector != 0 {
			return nil, corruptf("frame %d of %s is cut at %d bytes", i, LogKey(id, loc.Position()), len(rest))
		}
		payload, trailer := rest[:n], rest[n:n+FrameTrailer]
		if got, want := sum.of(i, payload), le.Uint64(trailer); got != want {
			return nil, corruptf("frame %d of %s has checksum %016x instead of %016x", i, LogKey(id, loc.Position()), got, want)
		}
		rest = rest[n+FrameTrailer:]
		copy(wire[at:], payload)
		at += n
	}
	return wire[:at], nil
}

// ReadFrames reads n frames of the object of loc from frame first on with one
// request and verifies them. into has at least n*FrameBytes; the result is a part of it. It is
// shorter than n*FramePayload only at the end of the object: the caller compares with what it
// needs. Damage Is objectstore.ErrCorrupt; a missing object is objectstore.ErrNotFound.
func ReadFrames(ctx context.Context, b objectstore.Bucket, id uuid.UUID, loc Location, first, n int, into []byte) (payload []byte, err error) {
	if first < 0 || n <= 0 || first > maxFrames-n {
		return nil, invalidf("frames %d to %d", first, first+n)
	}
	off, length := FrameSpan(loc, first, n)
	if len(into) < length {
		return nil, invalidf("buffer of %d bytes for %d frames", len(into), n)
	}
	key := LogKey(id, loc.Position())
	err = certain(func() error {
		got, err := b.GetRange(ctx, key, off, into[:length])
		if err != nil {
			return about("read", key, err)
		}
		payload, err = VerifyFrames(id, loc, first, into[:got])
		return err
	})
	if err != nil {
		return nil, err
	}
	return payload, nil
}

// VerifyObject checks a whole object: header, every frame, and that nothing is
// missing or left over. body is undefined afterwards.
func VerifyObject(body []byte) (*Header, error) {
	h, err := DecodeHeader(body)
	if err != nil {
		return nil, err
	}
	key := LogKey(h.Volume, h.Position())
	if int64(len(body)) != h.ObjectBytes() {
		return nil, corruptf("%s has %d bytes instead of %d", key, len(body), h.ObjectBytes())
	}
	wire := body[int(h.HeaderBlocks)*HeaderBlock:]
	if got := framesCRC(wire); got != h.FramesCRC {
		return nil, corruptf("%s: checksum of frames %08x instead of %08x", key, got, h.FramesCRC)
	}
	loc := Location{Epoch: h.Epoch, Seq: h.Seq, HeaderBlocks: h.HeaderBlocks}
	if _, err := VerifyFrames(h.Volume, loc, 0, wire); err != nil {
		return nil, err
	}
	return h, nil
}

// framesCRC is the checksum over the trailers' checksums of all frames in wire.
func framesCRC(wire []byte) uint32 {
	var sum uint32
	for len(wire) >= FrameTrailer {
		n := min(len(wire), FrameBytes)
		sum = crc32.Update(sum, castagnoli, wire[n-FrameTrailer:n])
		wire = wire[n:]
	}
	return sum
}
