package volumelog

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

func newRand(t testing.TB, seed uint64) *rand.Rand {
	t.Helper()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func randomUUID(r *rand.Rand) uuid.UUID {
	var u uuid.UUID
	for i := range u {
		u[i] = byte(r.Uint32())
	}
	u[0] |= 1
	return u
}

func randomBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

type testExtent struct {
	e    Extent
	data []byte
}

// randomObject builds a data object and returns its header, what it should hold, and its bytes.
func randomObject(t testing.TB, r *rand.Rand, extents int) (*Header, []testExtent, []byte) {
	t.Helper()
	h := &Header{
		Kind: KindData, Volume: randomUUID(r), Epoch: 1 + r.Uint64N(1000), Seq: 1 + r.Uint64N(1000), Generation: 1 + r.Uint64N(9),
		Writer:   Identity{randomUUID(r), randomUUID(r)},
		FirstLSN: 1 + r.Uint64N(1<<40),
		Time:     time.Unix(0, 1+r.Int64N(1<<62)).UTC(),
		Attributes: Attributes{
			Name: strings.Repeat("é", r.IntN(129)), SizeBytes: (1 + r.Uint64N(1<<20)) << 26, BlockSize: []uint32{512, 4096}[r.IntN(2)],
		},
	}
	h.LastLSN = h.FirstLSN + uint64(max(extents, 1)-1)
	var want []testExtent
	payload := 0
	off := uint64(0)
	for i := range extents {
		off += r.Uint64N(8) * 512
		e := Extent{LSN: h.FirstLSN + uint64(i), Offset: off}
		var data []byte
		switch r.IntN(4) {
		case 0:
			e.Kind, e.Length = ExtentZero, 512*(1+r.Uint64N(1000))
		case 1:
			e.Kind, e.BlockLength = ExtentSame, uint32(512<<r.IntN(8))
			e.Length = uint64(e.BlockLength) * (1 + r.Uint64N(100))
			data = randomBytes(r, int(e.BlockLength))
		default:
			e.Kind, e.Length = ExtentData, 512*(1+r.Uint64N(200))
			data = randomBytes(r, int(e.Length))
		}
		if off+e.Length > h.SizeBytes {
			break
		}
		if data != nil {
			e.Payload = uint64(payload)
			payload += len(data)
		}
		off += e.Length
		want = append(want, testExtent{e, data})
	}
	var b Builder
	if err := b.Reset(len(want), payload); err != nil {
		t.Fatal(err)
	}
	for _, w := range want {
		var err error
		switch w.e.Kind {
		case ExtentZero:
			err = b.Zero(w.e.LSN, w.e.Offset, w.e.Length)
		case ExtentSame:
			err = b.Same(w.e.LSN, w.e.Offset, w.e.Length, w.data)
		default:
			err = b.AppendData(w.e.LSN, w.e.Offset, w.data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	body, err := b.Finish(h)
	if err != nil {
		t.Fatal(err)
	}
	return h, want, bytes.Clone(body)
}

func TestObjectRoundTrip(t *testing.T) {
	r := newRand(t, 1)
	ctx := context.Background()
	for range 200 {
		h, want, body := randomObject(t, r, r.IntN(40))
		got, err := DecodeHeader(body)
		if err != nil {
			t.Fatal(err)
		}
		if len(want) == 0 {
			h.Extents = nil
		}
		if !reflect.DeepEqual(got, h) {
			t.Fatalf("got  %+v\nwant %+v", got, h)
		}
		for i, w := range want {
			if got.Extents[i] != w.e {
				t.Fatalf("extent %d: got %+v, want %+v", i, got.Extents[i], w.e)
			}
		}
		if h2, err := VerifyObject(bytes.Clone(body)); err != nil || h2.FramesCRC != h.FramesCRC {
			t.Fatal(err)
		}
		b := newMemBucket()
		b.set(LogKey(h.Volume, h.Position()), body)
		for i, w := range want {
			if w.data == nil {
				continue
			}
			loc := h.Location(h.Extents[i])
			first, off := loc.Frame()
			n := (off + len(w.data) + FramePayload - 1) / FramePayload
			got, err := ReadFrames(ctx, b, h.Volume, loc, first, n, make([]byte, n*FrameBytes))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got[off:off+len(w.data)], w.data) {
				t.Fatalf("extent %d differs", i)
			}
		}
	}
}

func TestHeaderDamage(t *testing.T) {
	r := newRand(t, 2)
	h, _, body := randomObject(t, r, 140) // more than one block
	header := body[:int(h.HeaderBlocks)*HeaderBlock]
	if len(header) < 2*HeaderBlock {
		t.Fatalf("header of %d bytes", len(header))
	}
	for n := range header {
		_, err := DecodeHeader(header[:n])
		short, ok := err.(ErrShort)
		if !ok || short.Need <= n || short.Need > len(header) {
			t.Fatalf("prefix of %d bytes: %v", n, err)
		}
	}
	for i := range header {
		for _, flip := range []byte{1, 0x80, 0xff} {
			bad := bytes.Clone(header)
			bad[i] ^= flip
			_, err := DecodeHeader(bad)
			var short ErrShort
			// A longer length asks for bytes that the object does not have; see readHeader.
			if !errors.Is(err, objectstore.ErrCorrupt) && !(errors.As(err, &short) && i >= 12 && i < 16) {
				t.Fatalf("byte %d flipped by %#x: %v", i, flip, err)
			}
		}
	}
	b := newMemBucket()
	key := LogKey(h.Volume, h.Position())
	for i := 12; i < 16; i++ {
		bad := bytes.Clone(body)
		bad[i] ^= 0x40
		b.set(key, bad)
		if _, err := ReadHeader(context.Background(), b, h.Volume, h.Position()); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Fatalf("length byte %d flipped: %v", i, err)
		}
	}
}

// reseal changes a header and makes its checksum right again.
func reseal(body []byte, change func(header []byte)) []byte {
	b := bytes.Clone(body)
	header := b[:le.Uint32(b[12:])]
	change(header)
	seal(header)
	return b
}

func TestHeaderVersionAndLimits(t *testing.T) {
	r := newRand(t, 3)
	h, _, body := randomObject(t, r, 12)
	for _, c := range []struct {
		name   string
		change func(b []byte)
		want   error
	}{
		{"version", func(b []byte) { le.PutUint32(b[8:], version+1) }, ErrVersion},
		{"compression", func(b []byte) { le.PutUint16(b[22:], 1) }, ErrUnsupported},
		{"key", func(b []byte) { le.PutUint32(b[148:], 1) }, ErrUnsupported},
		{"kind", func(b []byte) { le.PutUint16(b[20:], 4) }, objectstore.ErrCorrupt},
		{"no volume", func(b []byte) { clear(b[24:40]) }, objectstore.ErrCorrupt},
		{"epoch 0", func(b []byte) { le.PutUint64(b[40:], 0) }, objectstore.ErrCorrupt},
		{"last epoch", func(b []byte) { le.PutUint64(b[40:], ^uint64(0)) }, objectstore.ErrCorrupt},
		{"seq 0", func(b []byte) { le.PutUint64(b[48:], 0) }, objectstore.ErrCorrupt},
		{"generation 0", func(b []byte) { le.PutUint64(b[56:], 0) }, objectstore.ErrCorrupt},
		{"first LSN 0", func(b []byte) { le.PutUint64(b[96:], 0) }, objectstore.ErrCorrupt},
		{"LSNs backwards", func(b []byte) { le.PutUint64(b[104:], h.FirstLSN-2) }, objectstore.ErrCorrupt},
		{"size 0", func(b []byte) { le.PutUint64(b[120:], 0) }, objectstore.ErrCorrupt},
		{"size huge", func(b []byte) { le.PutUint64(b[120:], 1<<63) }, objectstore.ErrCorrupt},
		{"block size", func(b []byte) { le.PutUint32(b[128:], 1024) }, objectstore.ErrCorrupt},
		{"extents", func(b []byte) { le.PutUint32(b[132:], ^uint32(0)) }, objectstore.ErrCorrupt},
		{"extents past header", func(b []byte) { le.PutUint32(b[132:], 200) }, objectstore.ErrCorrupt},
		{"payload huge", func(b []byte) { le.PutUint64(b[136:], MaxPayload+512) }, objectstore.ErrCorrupt},
		{"payload odd", func(b []byte) { le.PutUint64(b[136:], 513) }, objectstore.ErrCorrupt},
		{"payload too short", func(b []byte) { le.PutUint64(b[136:], 0) }, objectstore.ErrCorrupt},
		{"name length", func(b []byte) { le.PutUint16(b[158:], 300) }, objectstore.ErrCorrupt},
		{"name bytes", func(b []byte) { le.PutUint16(b[158:], 1); b[160] = 0xff; clear(b[161:416]) }, objectstore.ErrCorrupt},
		{"reserved", func(b []byte) { b[155] = 1 }, objectstore.ErrCorrupt},
		{"padding", func(b []byte) { b[len(b)-1] = 1 }, objectstore.ErrCorrupt},
		{"extent LSN 0", func(b []byte) { le.PutUint64(b[416:], 0) }, objectstore.ErrCorrupt},
		{"extent LSN above", func(b []byte) { le.PutUint64(b[416:], h.LastLSN+1) }, objectstore.ErrCorrupt},
		{"extent offset odd", func(b []byte) { le.PutUint64(b[424:], 1) }, objectstore.ErrCorrupt},
		{"extent offset wraps", func(b []byte) { le.PutUint64(b[424:], ^uint64(511)) }, objectstore.ErrCorrupt},
		{"extent length 0", func(b []byte) { le.PutUint64(b[432:], 0) }, objectstore.ErrCorrupt},
		{"extent length wraps", func(b []byte) { le.PutUint64(b[432:], ^uint64(511)) }, objectstore.ErrCorrupt},
		{"extent payload", func(b []byte) { le.PutUint32(b[440:], ^uint32(0)) }, objectstore.ErrCorrupt},
		{"extent kind", func(b []byte) { b[446] = 9 }, objectstore.ErrCorrupt},
		{"extent reserved", func(b []byte) { b[447] = 1 }, objectstore.ErrCorrupt},
		{"same block 0", func(b []byte) { b[446] = 3; le.PutUint16(b[444:], 0) }, objectstore.ErrCorrupt},
		{"same block huge", func(b []byte) { b[446] = 3; le.PutUint16(b[444:], ^uint16(0)) }, objectstore.ErrCorrupt},
	} {
		bad := reseal(body, c.change)
		if _, err := DecodeHeader(bad); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// A newer version that is damaged is damaged.
	bad := reseal(body, func(b []byte) { le.PutUint32(b[8:], version+1) })
	bad[100] ^= 1
	if _, err := DecodeHeader(bad); !errors.Is(err, objectstore.ErrCorrupt) {
		t.Errorf("damaged newer version: %v", err)
	}
}

func TestFramesDamage(t *testing.T) {
	r := newRand(t, 4)
	h, _, body := randomObject(t, r, 12)
	wire := body[int(h.HeaderBlocks)*HeaderBlock:]
	loc := Location{Epoch: h.Epoch, Seq: h.Seq, HeaderBlocks: h.HeaderBlocks}
	if _, err := VerifyFrames(h.Volume, loc, 0, bytes.Clone(wire)); err != nil || len(wire) < 2*FrameBytes {
		t.Fatalf("%d bytes: %v", len(wire), err)
	}
	flip := func(i int) {
		bad := bytes.Clone(wire)
		bad[i] ^= 1 << r.IntN(8)
		if _, err := VerifyFrames(h.Volume, loc, 0, bad); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Fatalf("byte %d flipped: %v", i, err)
		}
	}
	for range 500 {
		flip(r.IntN(len(wire)))
	}
	for i := range FrameTrailer {
		flip(FramePayload + i)
		flip(len(wire) - 1 - i)
	}
	misdirected := func(name string, id uuid.UUID, l Location, first int, w []byte) {
		if _, err := VerifyFrames(id, l, first, bytes.Clone(w)); !errors.Is(err, objectstore.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := loc
	other.Epoch++
	misdirected("epoch", h.Volume, other, 0, wire)
	other = loc
	other.Seq++
	misdirected("seq", h.Volume, other, 0, wire)
	misdirected("volume", randomUUID(r), loc, 0, wire)
	misdirected("frame", h.Volume, loc, 1, wire)
	swapped := append(bytes.Clone(wire[FrameBytes:2*FrameBytes]), wire[:FrameBytes]...)
	misdirected("frames swapped", h.Volume, loc, 0, swapped)
	for _, cut := range []int{1, 7, 8, 9, 512, 520, FrameBytes - 1} {
		misdirected("cut", h.Volume, loc, 0, wire[:FrameBytes+cut])
	}
	short := bytes.Clone(body)
	if _, err := VerifyObject(short[:len(short)-FrameBytes]); !errors.Is(err, objectstore.ErrCorrupt) {
		t.Errorf("object without its last frame: %v", err)
	}
	if _, err := VerifyObject(append(bytes.Clone(body), 0)); !errors.Is(err, objectstore.ErrCorrupt) {
		t.Errorf("object with a byte too many: %v", err)
	}
}

// Data that ends with its own CRC32C has the same CRC32C whatever it holds: an old block in the place of a new one is found all the same.
func TestFramesOfSelfCheckedData(t *testing.T) {
	r := newRand(t, 5)
	block := func() []byte {
		b := make([]byte, 4096)
		for i := range b[:4092] {
			b[i] = byte(r.Uint32())
		}
		le.PutUint32(b[4092:], crc32.Checksum(b[:4092], castagnoli))
		return b
	}
	old, now := block(), block()
	if crc32.Checksum(old, castagnoli) != crc32.Checksum(now, castagnoli) {
		t.Fatal("the blocks' CRCs differ")
	}
	b := new(Builder)
	if err := b.Reset(1, 3*4096); err != nil {
		t.Fatal(err)
	}
	if err := b.AppendData(1, 0, slices.Concat(block(), now, block())); err != nil {
		t.Fatal(err)
	}
	h := Header{Volume: randomUUID(r), Epoch: 1, Seq: 1, Kind: KindData, Writer: NewIdentity(randomUUID(r)),
		Attributes: Attributes{Name: "v", BlockSize: 512, SizeBytes: 1 << 20}, Generation: 1, FirstLSN: 1, LastLSN: 1}
	body, err := b.Finish(&h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := VerifyObject(bytes.Clone(body)); err != nil {
		t.Fatal(err)
	}
	copy(body[int(h.HeaderBlocks)*HeaderBlock+4096:], old)
	if _, err := VerifyObject(body); !errors.Is(err, objectstore.ErrCorrupt) {
		t.Fatalf("an old block in the place of a new one: %v", err)
	}
}

func TestReadFramesArguments(t *testing.T) {
	b := newMemBucket()
	ctx := context.Background()
	loc := Location{Epoch: 1, Seq: 1, HeaderBlocks: 1}
	for _, c := range []struct{ first, n, buf int }{{-1, 1, FrameBytes}, {0, 0, FrameBytes}, {0, 2, FrameBytes}, {maxFrames, 1, FrameBytes}, {1 << 62, 1 << 62, 0}} {
		if _, err := ReadFrames(ctx, b, uuid.New(), loc, c.first, c.n, make([]byte, c.buf)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := ReadFrames(ctx, b, uuid.New(), loc, 0, 1, make([]byte, FrameBytes)); !errors.Is(err, objectstore.ErrNotFound) {
		t.Error(err)
	}
}

func TestBuilderRefuses(t *testing.T) {
	var b Builder
	h := func() *Header {
		return &Header{
			Kind: KindData, Volume: uuid.New(), Epoch: 1, Seq: 1, Generation: 1, FirstLSN: 1, LastLSN: 9,
			Attributes: Attributes{SizeBytes: 1 << 20, BlockSize: 512},
		}
	}
	reset := func() {
		if err := b.Reset(2, 1024); err != nil {
			t.Fatal(err)
		}
	}
	reset()
	if _, err := b.Data(1, 0, 1536); !errors.Is(err, ErrInvalid) {
		t.Errorf("payload beyond room: %v", err)
	}
	if _, err := b.Data(1, 0, 100); !errors.Is(err, ErrInvalid) {
		t.Errorf("odd length: %v", err)
	}
	if _, err := b.Data(1, 0, -512); !errors.Is(err, ErrInvalid) {
		t.Errorf("negative length: %v", err)
	}
	_ = b.AppendData(1, 512, make([]byte, 1024))
	_ = b.Zero(2, 0, 1024)
	if _, err := b.Finish(h()); !errors.Is(err, ErrInvalid) {
		t.Errorf("overlap: %v", err)
	}
	reset()
	_ = b.Zero(2, 1<<20, 512)
	if _, err := b.Finish(h()); !errors.Is(err, ErrInvalid) {
		t.Errorf("behind the end of the volume: %v", err)
	}
	reset()
	for i := range uint64(115) { // as many as one header block holds
		if err := b.Zero(1, i*512, 512); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Zero(1, 115*512, 512); !errors.Is(err, ErrInvalid) {
		t.Errorf("more extents than reserved: %v", err)
	}
	if body, err := b.Finish(h()); err != nil {
		t.Error(err)
	} else if _, err := VerifyObject(body); err != nil {
		t.Error(err)
	}
	if err := b.Reset(MaxExtents+1, 0); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	if err := b.Reset(MaxExtents, 0); err != nil {
		t.Error(err)
	}
	if err := b.Reset(0, MaxPayload+1); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

func BenchmarkBuilder(b *testing.B) {
	const size = 8 << 20
	for _, extent := range []int{4 << 10, 256 << 10} {
		b.Run(map[int]string{4 << 10: "4KiB", 256 << 10: "256KiB"}[extent], func(b *testing.B) {
			data := randomBytes(rand.New(rand.NewPCG(1, 1)), extent)
			var bld Builder
			h := Header{
				Kind: KindData, Volume: uuid.New(), Epoch: 1, Seq: 1, Generation: 1, Writer: NewIdentity(uuid.New()),
				FirstLSN: 1, LastLSN: size, Attributes: Attributes{SizeBytes: 1 << 40, BlockSize: 512},
			}
			b.SetBytes(size)
			b.ReportAllocs()
			for b.Loop() {
				if err := bld.Reset(size/extent, size); err != nil {
					b.Fatal(err)
				}
				for i := range size / extent {
					if err := bld.AppendData(uint64(i+1), uint64(2*i*extent), data); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := bld.Finish(&h); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDecodeHeader(b *testing.B) {
	var bld Builder
	if err := bld.Reset(2048, 0); err != nil {
		b.Fatal(err)
	}
	for i := range uint64(2048) {
		_ = bld.Zero(i+1, i*8192, 4096)
	}
	body, err := bld.Finish(&Header{
		Kind: KindData, Volume: uuid.New(), Epoch: 1, Seq: 1, Generation: 1, FirstLSN: 1, LastLSN: 2048,
		Attributes: Attributes{SizeBytes: 1 << 40, BlockSize: 512},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeHeader(body); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerifyFrames(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	h, _, body := randomObject(b, r, 12)
	wire := body[int(h.HeaderBlocks)*HeaderBlock:][:FrameBytes]
	loc := Location{Epoch: h.Epoch, Seq: h.Seq, HeaderBlocks: h.HeaderBlocks}
	b.SetBytes(FramePayload)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := VerifyFrames(h.Volume, loc, 0, wire); err != nil {
			b.Fatal(err)
		}
	}
}
