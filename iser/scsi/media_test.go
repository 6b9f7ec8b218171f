package scsi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// mediaCase is one command on a unit of 300 blocks of 'a'.
type mediaCase struct {
	name    string
	cdb     []byte
	out     []byte
	in      int
	want    string
	dataIn  int64
	dataOut int64
	changes string // what blocks 0 to 3 begin with afterwards; "" means aaaa
}

const capacity = 300

func TestMediaCommands(t *testing.T) {
	for _, size := range []int{512, 4096} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			for _, c := range mediaCases(size) {
				t.Run(c.name, func(t *testing.T) { runMediaCase(t, size, c) })
			}
		})
	}
}

func runMediaCase(t *testing.T, size int, c mediaCase) {
	m := scsitest.NewMedium(capacity, uint32(size))
	r := newRig(t, m)
	for lba := uint64(0); lba < capacity; lba += 100 {
		r.good(rw(0x2A, 0, lba, 100), fill(100*size, 'a'), 0)
	}
	res, d := r.exec(r.a, c.cdb, c.out, c.in)
	if got := ending(res); got != c.want {
		t.Fatalf("CDB % x: %s, want %s", c.cdb, got, c.want)
	}
	if res.DataIn != c.dataIn || res.DataOut != c.dataOut {
		t.Errorf("asked for %d in, %d out; want %d, %d", res.DataIn, res.DataOut, c.dataIn, c.dataOut)
	}
	if (res.Sense != nil) != (res.Status == scsi.CheckCondition) {
		t.Errorf("status %v with sense % x", res.Status, res.Sense)
	}
	if want := min(int(c.dataIn), c.in); d.Got != want {
		t.Errorf("%d bytes of data-in, want %d", d.Got, want)
	}
	if n := m.Open(); n != 0 {
		t.Errorf("%d landings or loans were not ended", n)
	}
	if c.changes == "" {
		c.changes = "aaaa"
	}
	all := m.Bytes()
	for i := range c.changes {
		block := all[i*size : (i+1)*size]
		want := c.changes[i]
		if want == '0' {
			want = 0
		}
		if !bytes.Equal(block, fill(size, want)) {
			t.Errorf("block %d begins with % x, want %q throughout", i, block[:4], c.changes[i])
		}
	}
	for i := len(c.changes) * size; i < len(all); i++ {
		if all[i] != 'a' && c.want != "good" {
			t.Fatalf("byte %d changed to %x", i, all[i])
		}
	}
}

func mediaCases(size int) []mediaCase {
	bs := int64(size)
	var cases []mediaCase
	add := func(c mediaCase) { cases = append(cases, c) }
	blocks := func(n int, v byte) []byte { return fill(n*size, v) }

	// Reads and writes in four sizes.
	for _, op := range []struct {
		read, write byte
		flags       []byte
	}{{0x08, 0x0A, []byte{0}}, {0x28, 0x2A, []byte{0, 0x08, 0x10, 0x18}}, {0xA8, 0xAA, []byte{0, 0x18}}, {0x88, 0x8A, []byte{0, 0x18}}} {
		name := fmt.Sprintf("%02X", op.read)
		for _, f := range op.flags {
			add(mediaCase{name: fmt.Sprintf("read %s flags %02x", name, f), cdb: rw(op.read, f, 1, 2), in: 2 * size, want: "good", dataIn: 2 * bs})
			add(mediaCase{name: fmt.Sprintf("write %s flags %02x", name, f), cdb: rw(op.write, f, 1, 2), out: blocks(2, 'b'), want: "good", dataOut: 2 * bs, changes: "abba"})
		}
		add(mediaCase{name: "read last " + name, cdb: rw(op.read, 0, capacity-1, 1), in: size, want: "good", dataIn: bs})
		add(mediaCase{name: "read past end " + name, cdb: rw(op.read, 0, capacity-1, 2), in: 2 * size, want: "05/21/00"})
		add(mediaCase{name: "read underflow " + name, cdb: rw(op.read, 0, 0, 1), in: 3*size + 7, want: "good", dataIn: bs})
		add(mediaCase{name: "read overflow " + name, cdb: rw(op.read, 0, 0, 3), in: size + 200, want: "good", dataIn: 3 * bs})
		add(mediaCase{name: "read without data-in " + name, cdb: rw(op.read, 0, 0, 1), want: "good", dataIn: bs})
		add(mediaCase{name: "write past end " + name, cdb: rw(op.write, 0, capacity-1, 2), out: blocks(2, 'b'), want: "05/21/00"})
		add(mediaCase{name: "write underflow " + name, cdb: rw(op.write, 0, 1, 1), out: blocks(3, 'b'), want: "good", dataOut: bs, changes: "abaa"})
		add(mediaCase{name: "write of whole blocks sent " + name, cdb: rw(op.write, 0, 0, 2), out: blocks(1, 'b'), want: "good", dataOut: 2 * bs, changes: "baaa"})
		add(mediaCase{name: "write short and torn " + name, cdb: rw(op.write, 0, 0, 3), out: fill(size+1, 'b'), want: "05/0E/03", dataOut: 3 * bs})
		add(mediaCase{name: "write torn " + name, cdb: rw(op.write, 0, 0, 1), out: fill(200, 'b'), want: "05/0E/03", dataOut: bs})
		add(mediaCase{name: "write without data " + name, cdb: rw(op.write, 0, 0, 1), want: "good", dataOut: bs})
		if op.read == 0x08 {
			add(mediaCase{name: "read6 of 0", cdb: rw(0x08, 0, 0, 0), in: 256 * size, want: "good", dataIn: 256 * bs})
			add(mediaCase{name: "write6 of 0 is 256", cdb: rw(0x0A, 0, 4, 0), out: blocks(255, 'b'), want: "good", dataOut: 256 * bs})
			continue
		}
		add(mediaCase{name: "read none " + name, cdb: rw(op.read, 0, 5, 0), want: "good"})
		add(mediaCase{name: "read none at end " + name, cdb: rw(op.read, 0, capacity, 0), want: "good"})
		add(mediaCase{name: "read none past end " + name, cdb: rw(op.read, 0, capacity+1, 0), want: "05/21/00"})
		add(mediaCase{name: "write none past end " + name, cdb: rw(op.write, 0, capacity+1, 0), want: "05/21/00"})
		add(mediaCase{name: "read protect " + name, cdb: rw(op.read, 0x20, 0, 1), in: size, want: "05/24/00"})
		add(mediaCase{name: "write protect " + name, cdb: rw(op.write, 0x20, 0, 1), out: blocks(1, 'b'), want: "05/24/00"})
		add(mediaCase{name: "far " + name, cdb: rw(op.read, 0, 1<<31, 1), in: size, want: "05/21/00"})
	}
	for _, lba := range []uint64{1 << 63, 1<<64 - 1, capacity + 1} {
		add(mediaCase{name: fmt.Sprintf("read16 at %x", lba), cdb: rw(0x88, 0, lba, 1), in: size, want: "05/21/00"})
		add(mediaCase{name: fmt.Sprintf("lba status at %x", lba), cdb: rw(0x9E, 0x12, lba, 24), in: 24, want: "05/21/00"})
		add(mediaCase{name: fmt.Sprintf("write same to end at %x", lba), cdb: rw(0x93, 0, lba, 0), out: blocks(1, 'b'), want: "05/21/00"})
	}
	add(mediaCase{name: "read16 beyond capacity and limit", cdb: rw(0x88, 0, 0, 0xFFFFFFFF), in: size, want: "05/21/00"})

	// VERIFY.
	for _, op := range []byte{0x2F, 0xAF, 0x8F} {
		name := fmt.Sprintf("verify %02X ", op)
		add(mediaCase{name: name + "medium only", cdb: rw(op, 0, 0, capacity), want: "good"})
		add(mediaCase{name: name + "ignores data", cdb: rw(op, 0, 0, 2), out: blocks(2, 'x'), want: "good"})
		add(mediaCase{name: name + "same", cdb: rw(op, 0x02, 1, 3), out: blocks(3, 'a'), want: "good", dataOut: 3 * bs})
		add(mediaCase{name: name + "differs", cdb: rw(op, 0x02, 1, 3), out: append(blocks(2, 'a'), blocks(1, 'b')...), want: "0E/1D/00", dataOut: 3 * bs})
		add(mediaCase{name: name + "one block", cdb: rw(op, 0x06, 1, 99), out: blocks(1, 'a'), want: "good", dataOut: bs})
		add(mediaCase{name: name + "one block differs", cdb: rw(op, 0x06, 1, 99), out: blocks(1, 'b'), want: "0E/1D/00", dataOut: bs})
		add(mediaCase{name: name + "reserved BYTCHK", cdb: rw(op, 0x04, 1, 9), want: "05/24/00"})
		add(mediaCase{name: name + "short", cdb: rw(op, 0x02, 1, 3), out: blocks(2, 'a'), want: "05/0E/03", dataOut: 3 * bs})
		add(mediaCase{name: name + "protect", cdb: rw(op, 0x22, 0, 1), out: blocks(1, 'a'), want: "05/24/00"})
		add(mediaCase{name: name + "past end", cdb: rw(op, 0x02, capacity+1, 0), want: "05/21/00"})
		add(mediaCase{name: name + "DPO", cdb: rw(op, 0x12, 0, 1), out: blocks(1, 'a'), want: "good", dataOut: bs})
	}

	// WRITE AND VERIFY.
	for _, op := range []byte{0x2E, 0xAE, 0x8E} {
		name := fmt.Sprintf("write and verify %02X ", op)
		add(mediaCase{name: name + "plain", cdb: rw(op, 0x10, 1, 2), out: blocks(2, 'b'), want: "good", dataOut: 2 * bs, changes: "abba"})
		add(mediaCase{name: name + "compare", cdb: rw(op, 0x02, 1, 2), out: blocks(2, 'b'), want: "good", dataOut: 2 * bs, changes: "abba"})
		add(mediaCase{name: name + "none sent", cdb: rw(op, 0x02, 0, 1), want: "good", dataOut: bs})
		add(mediaCase{name: name + "whole blocks sent", cdb: rw(op, 0x02, 0, 2), out: blocks(1, 'b'), want: "good", dataOut: 2 * bs, changes: "baaa"})
		add(mediaCase{name: name + "torn", cdb: rw(op, 0x02, 0, 2), out: fill(size+200, 'b'), want: "05/0E/03", dataOut: 2 * bs})
		add(mediaCase{name: name + "more sent", cdb: rw(op, 0x02, 0, 1), out: blocks(2, 'b'), want: "good", dataOut: bs, changes: "baaa"})
		add(mediaCase{name: name + "reserved BYTCHK", cdb: rw(op, 0x06, 0, 1), out: blocks(1, 'b'), want: "05/24/00"})
		add(mediaCase{name: name + "past end", cdb: rw(op, 0, capacity+1, 0), want: "05/21/00"})
		add(mediaCase{name: name + "protect", cdb: rw(op, 0x42, 0, 1), out: blocks(1, 'b'), want: "05/24/00"})
	}

	// COMPARE AND WRITE.
	caw := func(flags byte, lba uint64, n byte) []byte {
		c := rw(0x89, flags, lba, 0)
		c[13] = n
		return c
	}
	both := func(cmp, wr []byte) []byte { return append(append([]byte(nil), cmp...), wr...) }
	add(mediaCase{name: "caw", cdb: caw(0, 1, 2), out: both(blocks(2, 'a'), blocks(2, 'b')), want: "good", dataOut: 4 * bs, changes: "abba"})
	add(mediaCase{name: "caw dpo fua", cdb: caw(0x18, 1, 1), out: both(blocks(1, 'a'), blocks(1, 'b')), want: "good", dataOut: 2 * bs, changes: "abaa"})
	add(mediaCase{name: "caw 255 blocks", cdb: caw(0, 4, 255), out: both(blocks(255, 'a'), blocks(255, 'a')), want: "good", dataOut: 510 * bs})
	add(mediaCase{name: "caw differs", cdb: caw(0, 1, 2), out: both(blocks(2, 'x'), blocks(2, 'b')), want: "0E/1D/00", dataOut: 4 * bs})
	add(mediaCase{name: "caw none", cdb: caw(0, 1, 0), want: "good"})
	add(mediaCase{name: "caw too little", cdb: caw(0, 0, 3), out: blocks(4, 'a'), want: "05/24/00", dataOut: 6 * bs})
	add(mediaCase{name: "caw too much", cdb: caw(0, 0, 1), out: blocks(4, 'a'), want: "05/24/00", dataOut: 2 * bs})
	add(mediaCase{name: "caw none with data", cdb: caw(0, 0, 0), out: blocks(4, 'a'), want: "05/24/00"})
	add(mediaCase{name: "caw past end", cdb: caw(0, capacity-1, 2), out: blocks(4, 'a'), want: "05/21/00"})
	add(mediaCase{name: "caw protect", cdb: caw(0x20, 0, 1), out: blocks(2, 'a'), want: "05/24/00"})

	// ORWRITE: 'a' | 'b' = 'c'.
	add(mediaCase{name: "orwrite", cdb: rw(0x8B, 0x18, 1, 2), out: blocks(2, 'b'), want: "good", dataOut: 2 * bs, changes: "acca"})
	add(mediaCase{name: "orwrite none", cdb: rw(0x8B, 0, 1, 0), want: "good"})
	add(mediaCase{name: "orwrite past end", cdb: rw(0x8B, 0, capacity+1, 0), want: "05/21/00"})
	add(mediaCase{name: "orwrite protect", cdb: rw(0x8B, 0x20, 0, 1), out: blocks(1, 'b'), want: "05/24/00"})
	add(mediaCase{name: "orwrite torn", cdb: rw(0x8B, 0, 0, 2), out: fill(size+1, 'b'), want: "05/0E/03", dataOut: 2 * bs})

	// WRITE SAME.
	for _, op := range []byte{0x41, 0x93} {
		name := fmt.Sprintf("write same %02X ", op)
		add(mediaCase{name: name + "pattern", cdb: rw(op, 0, 1, 2), out: blocks(1, 'b'), want: "good", dataOut: bs, changes: "abba"})
		add(mediaCase{name: name + "zeros", cdb: rw(op, 0, 1, 2), out: blocks(1, 0), want: "good", dataOut: bs, changes: "a00a"})
		add(mediaCase{name: name + "unmap", cdb: rw(op, 0x08, 1, 2), out: blocks(1, 0), want: "good", dataOut: bs, changes: "a00a"})
		add(mediaCase{name: name + "unmap with pattern", cdb: rw(op, 0x08, 1, 2), out: blocks(1, 'b'), want: "good", dataOut: bs, changes: "a00a"})
		add(mediaCase{name: name + "to the end", cdb: rw(op, 0, 2, 0), out: blocks(1, 'b'), want: "good", dataOut: bs, changes: "aabb"})
		add(mediaCase{name: name + "half a block", cdb: rw(op, 0x08, 0, 1), out: fill(size/2, 'b'), want: "05/0E/03", dataOut: bs})
		add(mediaCase{name: name + "two blocks", cdb: rw(op, 0x08, 0, 1), out: blocks(2, 'b'), want: "05/0E/03", dataOut: bs})
		add(mediaCase{name: name + "anchor", cdb: rw(op, 0x18, 0, 1), out: blocks(1, 0), want: "05/24/00"})
		add(mediaCase{name: name + "protect", cdb: rw(op, 0x20, 0, 1), out: blocks(1, 0), want: "05/24/00"})
		add(mediaCase{name: name + "past end", cdb: rw(op, 0, capacity-1, 2), out: blocks(1, 0), want: "05/21/00"})
	}
	add(mediaCase{name: "write same ndob", cdb: rw(0x93, 0x01, 1, 2), want: "good", changes: "a00a"})
	add(mediaCase{name: "write same ndob unmap", cdb: rw(0x93, 0x09, 1, 2), want: "good", changes: "a00a"})
	add(mediaCase{name: "write same 10 has no ndob", cdb: rw(0x41, 0x01, 1, 2), want: "05/24/00"})

	// UNMAP.
	um := func(list []byte) mediaCase {
		return mediaCase{cdb: unmapCDB(len(list)), out: list, dataOut: int64(len(list))}
	}
	one := um(unmapList(unmapRange{1, 2}))
	one.name, one.want, one.changes = "unmap", "good", "a00a"
	add(one)
	two := um(unmapList(unmapRange{0, 1}, unmapRange{3, 1}))
	two.name, two.want, two.changes = "unmap two", "good", "0aa0"
	add(two)
	bad := um(unmapList(unmapRange{0, 1}, unmapRange{capacity - 1, 2}))
	bad.name, bad.want = "unmap with one bad range", "05/21/00"
	add(bad)
	zero := um(unmapList(unmapRange{capacity, 0}, unmapRange{1 << 60, 0}))
	zero.name, zero.want = "unmap of nothing", "good"
	add(zero)
	add(mediaCase{name: "unmap without list", cdb: unmapCDB(0), want: "good"})
	add(mediaCase{name: "unmap list of 7", cdb: unmapCDB(7), out: fill(7, 0), want: "05/1A/00", dataOut: 7})
	add(mediaCase{name: "unmap list not sent", cdb: unmapCDB(24), out: fill(10, 0), want: "05/1A/00", dataOut: 24})
	long := unmapList(unmapRange{0, 1})
	long[3] = 32
	add(mediaCase{name: "unmap list lies", cdb: unmapCDB(24), out: long, want: "05/1A/00", dataOut: 24})
	many := um(unmapList(make([]unmapRange, 1025)...))
	many.name, many.want = "unmap too many", "05/26/00"
	add(many)
	anchor := unmapCDB(0)
	anchor[1] = 1
	add(mediaCase{name: "unmap anchor", cdb: anchor, want: "05/24/00"})

	// Caches.
	for _, op := range []byte{0x35, 0x91} {
		name := fmt.Sprintf("synchronize cache %02X ", op)
		add(mediaCase{name: name + "all", cdb: rw(op, 0, 0, 0), want: "good"})
		add(mediaCase{name: name + "range, immed", cdb: rw(op, 0x02, 3, 4), want: "good"})
		add(mediaCase{name: name + "past end", cdb: rw(op, 0, capacity, 1), want: "05/21/00"})
	}
	for _, op := range []byte{0x34, 0x90} {
		name := fmt.Sprintf("prefetch %02X ", op)
		add(mediaCase{name: name + "one", cdb: rw(op, 0, 0, 1), want: "good"})
		add(mediaCase{name: name + "to the end", cdb: rw(op, 0, 0, 0), want: "good"})
		add(mediaCase{name: name + "immed", cdb: rw(op, 2, 0, 0), want: "good"})
		add(mediaCase{name: name + "past end", cdb: rw(op, 0, capacity+1, 0), want: "05/21/00"})
	}
	return cases
}

func TestMaximumTransfer(t *testing.T) {
	m := scsitest.NewMedium(8192, 512)
	r := newRig(t, m, func(o *scsi.Options) { o.MaxTransfer = 2048 })
	r.good(rw(0x88, 0, 0, 2048), nil, 2048*512)
	r.want(rw(0x88, 0, 0, 2049), nil, 2049*512, "05/24/00")
	r.want(rw(0x8A, 0, 0, 2049), fill(2049*512, 1), 0, "05/24/00")
	r.want(rw(0x8F, 0x02, 0, 2049), fill(2049*512, 1), 0, "05/24/00")
	limits := r.good(cdb("12 01 B0 00FF 00"), nil, 255)
	if got := binary.BigEndian.Uint32(limits[8:]); got != 2048 {
		t.Errorf("maximum transfer length %d", got)
	}
}

// The field pointer names the byte and bit at fault, and INFORMATION the first byte that
// differs, in both sense formats.
func TestSenseDetails(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	check := func(descriptor bool) {
		t.Helper()
		res, _ := r.exec(r.a, rw(0x28, 0x20, 0, 1), nil, 512)
		s := decodeSense(res.Sense)
		if s.descriptor != descriptor || s.sks != [3]byte{0x80 | 0x40 | 0x08 | 5, 0, 1} {
			t.Errorf("read protect: %+v", s)
		}
		r.good(rw(0x2A, 0, 0, 2), fill(1024, 'a'), 0)
		out := fill(1024, 'a')
		out[777] = 'b'
		res, _ = r.exec(r.a, rw(0x2F, 0x02, 0, 2), out, 0)
		s = decodeSense(res.Sense)
		if s.descriptor != descriptor || s.key != 0x0E || !s.hasInfo || s.info != 777 {
			t.Errorf("miscompare: %+v", s)
		}
		if len(res.Sense) > 126 || int(res.Sense[7]) != len(res.Sense)-8 {
			t.Errorf("sense length: % x", res.Sense)
		}
	}
	check(false)
	r.good(cdb("15 10 0000 10 00"), append(cdb("00000000"), cdb("0A0A 06 10 00 40 00000000 0000")...), 0)
	check(true)
}

// Every error of a medium becomes the sense data that its comment says, for every
// command, and no failed flush looks like success to an initiator.
func TestMediumErrors(t *testing.T) {
	for err, want := range map[error]string{
		scsi.ErrBusy:                        "busy",
		scsi.ErrSpace:                       "07/27/07",
		scsi.ErrUnmet:                       "03/0C/02",
		scsi.ErrLostWrites:                  "03/0C/02",
		scsi.ErrUnreadable:                  "03/11/00",
		scsi.ErrWrite:                       "03/0C/00",
		scsi.ErrNotReady:                    "02/04/0C",
		scsi.ErrStarting:                    "02/04/01",
		errors.New("something else"):        "0B/00/00",
		&scsi.SenseError{Key: 4, ASC: 0x44}: "04/44/00",
	} {
		m := scsitest.NewMedium(100, 512)
		r := newRig(t, m)
		m.Before = func(_ context.Context, _ scsitest.Op, e scsi.Extent) error {
			return fmt.Errorf("wrapped: %w", &scsi.BlockError{LBA: e.LBA, Err: err})
		}
		caw := rw(0x89, 0, 3, 0)
		caw[13] = 1
		for _, c := range []struct {
			cdb, out []byte
			in       int
		}{
			{rw(0x28, 0, 3, 1), nil, 512},
			{rw(0x28, 0x08, 3, 1), nil, 512},
			{rw(0x2A, 0, 3, 1), fill(512, 1), 0},
			{rw(0x2E, 0, 3, 1), fill(512, 1), 0},
			{rw(0x2F, 0, 3, 1), nil, 0},
			{rw(0x8B, 0, 3, 1), fill(512, 1), 0},
			{rw(0x41, 0, 3, 1), fill(512, 1), 0},
			{rw(0x93, 1, 3, 1), nil, 0},
			{unmapCDB(24), unmapList(unmapRange{3, 1}), 0},
			{caw, fill(1024, 0), 0},
			{rw(0x35, 0, 0, 0), nil, 0},
			{rw(0x91, 0, 0, 0), nil, 0},
			{rw(0x9E, 0x12, 3, 24), nil, 24},
			{rw(0x34, 0, 3, 1), nil, 0},
			{cdb("1B 00 0000 00 00"), nil, 0},
		} {
			res, _ := r.exec(r.a, c.cdb, c.out, c.in)
			if got := ending(res); got != want {
				t.Errorf("%v: CDB % x: %s, want %s", err, c.cdb, got, want)
			}
			if want != "busy" && c.cdb[0] == 0x28 && c.cdb[1] == 0 {
				if s := decodeSense(res.Sense); !s.hasInfo || s.info != 3 {
					t.Errorf("%v: sense %+v does not name LBA 3", err, s)
				}
			}
			if s := decodeSense(res.Sense); s.asc == 0x20 || s.asc == 0x3A || s.asc == 0x74 {
				t.Errorf("%v: ASC %02X reads as success of a flush", err, s.asc)
			}
		}
		// TEST UNIT READY tells only that the medium is not there.
		tell := "good"
		if errors.Is(err, scsi.ErrNotReady) || errors.Is(err, scsi.ErrStarting) {
			tell = want
		}
		r.want(tur, nil, 0, tell)
		if n := m.Open(); n != 0 {
			t.Errorf("%v: %d landings or loans were not ended", err, n)
		}
	}
}

// A commit that fails after data arrived, and data that does not arrive, end the landing.
func TestFailuresOnTheWay(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	fail := scsitest.Op("")
	m.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
		if op == fail {
			return scsi.ErrWrite
		}
		return nil
	}
	r := newRig(t, m)
	caw := rw(0x89, 0, 3, 0)
	caw[13] = 1
	for _, c := range [][]byte{rw(0x2A, 0, 3, 1), rw(0x2E, 0x02, 3, 1), rw(0x8B, 0, 3, 1), caw} {
		out := fill(512, 0)
		if c[0] == 0x89 {
			out = fill(1024, 0)
		}
		fail = scsitest.OpCommit
		r.want(c, out, 0, "03/0C/00")
		fail = ""
		d := scsitest.NewData(out, 0)
		d.Err = &scsi.SenseError{Key: scsi.AbortedCommand, ASC: 0x0C, ASCQ: 0x0D}
		res := r.u.Execute(context.Background(), r.a, &scsi.Command{CDB: c, Data: d})
		if got := ending(res); got != "0B/0C/0D" {
			t.Errorf("CDB % x without data: %s", c, got)
		}
	}
	if n := m.Open(); n != 0 {
		t.Errorf("%d landings were not ended", n)
	}
	if !bytes.Equal(m.Bytes(), make([]byte, 100*512)) {
		t.Error("something was written")
	}
}

// FUA and the verifying commands ask for the flush level; FUA reads flush.
func TestForceUnitAccess(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	caw := rw(0x89, 0x08, 0, 0)
	caw[13] = 1
	for i, c := range []struct {
		cdb, out []byte
		in       int
	}{
		{rw(0x2A, 0x08, 0, 1), fill(512, 0), 0},
		{rw(0x8A, 0x08, 0, 1), fill(512, 0), 0},
		{rw(0x2E, 0, 0, 1), fill(512, 0), 0},
		{caw, fill(1024, 0), 0},
		{rw(0x8B, 0x08, 0, 1), fill(512, 0), 0},
	} {
		r.good(c.cdb, c.out, c.in)
		if _, fua := m.Flushes(); fua != i+1 {
			t.Errorf("CDB % x did not ask for the flush level", c.cdb)
		}
	}
	r.good(rw(0x2A, 0, 0, 1), fill(512, 0), 0)
	if flushes, fua := m.Flushes(); fua != 5 || flushes != 0 {
		t.Errorf("a plain write: %d flushes, %d FUA", flushes, fua)
	}
	r.good(rw(0x28, 0x08, 0, 1), nil, 512)
	r.good(rw(0x35, 0x02, 0, 0), nil, 0)
	if flushes, _ := m.Flushes(); flushes != 2 {
		t.Errorf("%d flushes after a FUA read and SYNCHRONIZE CACHE", flushes)
	}
}

func TestGetLBAStatus(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	r.good(rw(0x2A, 0, 10, 5), fill(5*512, 1), 0)
	type desc struct {
		lba    uint64
		blocks uint32
		status byte
	}
	for _, c := range []struct {
		lba   uint64
		alloc int
		want  []desc
	}{
		{0, 24, []desc{{0, 10, 1}}},
		{3, 24, []desc{{3, 7, 1}}},
		{12, 200, []desc{{12, 3, 0}, {15, 85, 1}}},
		{0, 200, []desc{{0, 10, 1}, {10, 5, 0}, {15, 85, 1}}},
		{99, 24, []desc{{99, 1, 1}}},
	} {
		b := r.good(rw(0x9E, 0x12, c.lba, uint32(c.alloc)), nil, c.alloc)
		var got []desc
		for d := b[8:]; len(d) >= 16; d = d[16:] {
			got = append(got, desc{binary.BigEndian.Uint64(d), binary.BigEndian.Uint32(d[8:]), d[12] & 0x0F})
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) || int(binary.BigEndian.Uint32(b)) != 4+16*len(got) {
			t.Errorf("at %d: %v (length %d), want %v", c.lba, got, binary.BigEndian.Uint32(b), c.want)
		}
	}
	// Zeros by WRITE SAME are no data; other blocks are, with UNMAP too.
	r.good(rw(0x93, 0, 10, 2), make([]byte, 512), 0)
	r.good(rw(0x93, 0, 20, 2), fill(512, 1), 0)
	r.good(rw(0x93, 8, 11, 1), fill(512, 1), 0)
	for lba, status := range map[uint64]byte{10: 1, 12: 0, 20: 0} {
		if b := r.good(rw(0x9E, 0x12, lba, 24), nil, 24); b[8+12] != status {
			t.Errorf("block %d has status %d", lba, b[8+12])
		}
	}
	if b := r.good(rw(0x9E, 0x12, 0, 4), nil, 4); len(b) != 4 {
		t.Errorf("allocation length 4 gave %d bytes", len(b))
	}
}

// liar is a medium that changes a byte of what it stores.
type liar struct{ *scsitest.Medium }

func (m liar) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	b, err := m.Medium.Read(ctx, e)
	if err == nil {
		b.Buffers()[1][0] ^= 1 // the loan is a copy
	}
	return b, err
}

func TestWriteAndVerifyNoticesDamage(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m, func(o *scsi.Options) { o.Medium = liar{m} })
	r.want(rw(0x2E, 0x02, 0, 8), fill(8*512, 1), 0, "0E/1D/00")
	r.good(rw(0x2E, 0, 0, 8), fill(8*512, 1), 0)
}

// Long writes land in pieces, each as large as a medium has to take, and in order.
func TestLongWrites(t *testing.T) {
	const size = 4096
	blocks := uint32(2*scsi.MaxLanding/size + 3)
	for op, flags := range map[byte]byte{0x8A: 0, 0x8E: 0x02, 0x8B: 0} {
		m := scsitest.NewMedium(uint64(blocks)+2, size)
		var landed []scsi.Extent
		m.Before = func(_ context.Context, o scsitest.Op, e scsi.Extent) error {
			if o == scsitest.OpReserve {
				landed = append(landed, e)
			}
			return nil
		}
		r := newRig(t, m)
		out := fill(int(blocks)*size, 0)
		for i := range out {
			out[i] = byte(i / size * 7)
		}
		res, _ := r.exec(r.a, rw(op, flags, 1, blocks), out, 0)
		if ending(res) != "good" || res.DataOut != int64(len(out)) {
			t.Errorf("%02x: %s, %d bytes", op, ending(res), res.DataOut)
		}
		if got := m.Bytes()[size : size+len(out)]; !bytes.Equal(got, out) {
			t.Errorf("%02x: the medium differs", op)
		}
		if want := []scsi.Extent{{LBA: 1, Blocks: 1024}, {LBA: 1025, Blocks: 1024}, {LBA: 2049, Blocks: 3}}; !slices.Equal(landed, want) {
			t.Errorf("%02x landed as %v, want %v", op, landed, want)
		}
		// A failure on the way reports what was taken.
		landed = nil
		m.Before = func(_ context.Context, o scsitest.Op, e scsi.Extent) error {
			if o == scsitest.OpCommit && e.LBA > 2000 {
				return scsi.ErrWrite
			}
			return nil
		}
		res, _ = r.exec(r.a, rw(op, 0, 1, blocks), out, 0)
		if ending(res) != "03/0C/00" || m.Open() != 0 {
			t.Errorf("%02x: %s, %d landings open", op, ending(res), m.Open())
		}
	}
}
