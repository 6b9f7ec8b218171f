package scsi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

func inq(page int, alloc int) []byte {
	c := []byte{0x12, 0, 0, byte(alloc >> 8), byte(alloc), 0}
	if page >= 0 {
		c[1], c[2] = 1, byte(page)
	}
	return c
}

func TestInquiry(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512))
	b := r.good(inq(-1, 260), nil, 260)
	if len(b) != 96 || int(b[4])+5 != len(b) {
		t.Fatalf("%d bytes, additional length %d", len(b), b[4])
	}
	if b[0] != 0 || b[1] != 0 || b[2] != 6 || b[3]&0x0F != 2 || b[7]&0x02 == 0 {
		t.Errorf("header % x", b[:8])
	}
	if got := string(b[8:36]); got != "ISERGATEVOLUME          1   " {
		t.Errorf("texts %q", got)
	}
	for i, v := range []uint16{0x00A0, 0x0960, 0x0460, 0x04C0, 0} {
		if got := binary.BigEndian.Uint16(b[58+2*i:]); got != v {
			t.Errorf("version descriptor %d is %04x", i, got)
		}
	}
	for alloc := range 100 {
		if got := r.good(inq(-1, alloc), nil, 260); len(got) != min(alloc, 96) {
			t.Fatalf("allocation length %d gave %d bytes", alloc, len(got))
		}
	}
	r.want([]byte{0x12, 0, 1, 0, 255, 0}, nil, 255, "05/24/00")
	r.want([]byte{0x12, 2, 0, 0, 255, 0}, nil, 255, "05/24/00") // CMDDT
	r.want(inq(0xB9, 255), nil, 255, "05/24/00")
}

func TestVitalProductData(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	pages := r.good(inq(0, 255), nil, 255)[4:]
	if !slices.IsSorted(pages) || !slices.Contains(pages, 0x83) {
		t.Errorf("pages % x", pages)
	}
	for _, p := range pages {
		b := r.good(inq(int(p), 1024), nil, 1024)
		if b[1] != p || int(binary.BigEndian.Uint16(b[2:])) != len(b)-4 {
			t.Errorf("page %02x: header % x, %d bytes", p, b[:4], len(b))
		}
	}
	if got := string(r.good(inq(0x80, 255), nil, 255)[4:]); got != "01020300-0000-0000-0000-000000000009" {
		t.Errorf("serial %q", got)
	}

	naa := scsi.Identity{UUID: [16]byte{1, 2, 3, 15: 9}}.NAA()
	found := map[string][]byte{}
	for d := r.good(inq(0x83, 1024), nil, 1024)[4:]; len(d) > 4; d = d[4+int(d[3]):] {
		found[fmt.Sprintf("assoc %d type %d", d[1]>>4&3, d[1]&15)] = d[4 : 4+int(d[3])]
	}
	if !bytes.Equal(found["assoc 0 type 3"], naa[:]) || naa[0]>>4 != 6 {
		t.Errorf("NAA % x", found["assoc 0 type 3"])
	}
	if got := string(found["assoc 0 type 1"]); got != "ISERGATE01020300-0000-0000-0000-000000000009" {
		t.Errorf("T10 identifier %q", got)
	}
	if got := string(found["assoc 1 type 8"]); got != "iqn.2026-01.example:target,t,0x0001\x00" {
		t.Errorf("port name %q", got)
	}
	if got := found["assoc 1 type 4"]; !bytes.Equal(got, []byte{0, 0, 0, 1}) {
		t.Errorf("relative port % x", got)
	}
	if got := string(found["assoc 2 type 8"]); got != "iqn.2026-01.example:target\x00\x00" {
		t.Errorf("device name %q", got)
	}

	b := r.good(inq(0xB0, 255), nil, 255)
	if len(b) != 64 || b[5] != 255 || binary.BigEndian.Uint32(b[20:]) == 0 || binary.BigEndian.Uint32(b[24:]) == 0 ||
		binary.BigEndian.Uint32(b[28:]) != 8 || binary.BigEndian.Uint32(b[32:]) != 1<<31 || binary.BigEndian.Uint64(b[36:]) != 0xFFFFFFFF {
		t.Errorf("block limits % x", b)
	}
	if b := r.good(inq(0xB1, 255), nil, 255); len(b) != 64 || binary.BigEndian.Uint16(b[4:]) != 1 {
		t.Errorf("characteristics % x", b)
	}
	if b := r.good(inq(0xB2, 255), nil, 255); !bytes.Equal(b, []byte{0, 0xB2, 0, 4, 0, 0xE4, 2, 0}) {
		t.Errorf("provisioning % x", b)
	}
}

// What initiators are told about caching follows from the contract, in every place.
func TestCachingFollowsContract(t *testing.T) {
	for _, c := range []struct {
		ack, flush       scsi.Level
		wce, vSup, nvSup bool
	}{
		{scsi.LevelMemory, scsi.LevelMemory, false, true, false},
		{scsi.LevelMemory, scsi.LevelLocal, true, true, false},
		{scsi.LevelLocal, scsi.LevelLocal, false, false, true},
		{scsi.LevelLocal, scsi.LevelObject, true, true, false},
		{scsi.LevelQuorum, scsi.LevelQuorum, false, false, true},
		{scsi.LevelObject, scsi.LevelObject, false, false, false},
	} {
		m := scsitest.NewMedium(100, 512)
		m.SetContract(scsi.Contract{Ack: c.ack, Flush: c.flush})
		r := newRig(t, m)
		ext := r.good(inq(0x86, 255), nil, 255)
		page := r.good(cdb("1A 08 08 00 FF 00"), nil, 255)
		persist := r.good(inq(0xC0, 255), nil, 255)
		if got := [...]bool{page[4+2]&4 != 0, ext[6]&1 != 0, ext[6]&2 != 0, persist[8]&2 != 0}; got != [...]bool{c.wce, c.vSup, c.nvSup, c.wce} {
			t.Errorf("ack %d flush %d: WCE, V_SUP, NV_SUP, WCE of page C0 are %v", c.ack, c.flush, got)
		}
		if page[2]&0x10 == 0 {
			t.Error("DPOFUA is not set")
		}
	}
}

func TestPersistencePages(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	at := time.UnixMilli(1_800_000_000_123)
	m.SetContract(scsi.Contract{
		Ack: scsi.LevelLocal, Flush: scsi.LevelObject, OnUnmet: 2, Met: true, Epoch: 7, Generation: 3,
		Acked: scsi.Watermark{LSN: 100, Time: at}, Local: scsi.Watermark{LSN: 99, Time: at}, Object: scsi.Watermark{LSN: 50, Time: at.Add(-time.Second)},
	})
	r := newRig(t, m)
	b := r.good(inq(0xC0, 255), nil, 255)
	want := slices.Concat(cdb("00C0005C 01020402 03 00000000000000"), cdb("0000000000000007 0000000000000003"),
		cdb("0000000000000064 000001A3185C507B"), cdb("0000000000000063 000001A3185C507B"), make([]byte, 16), cdb("0000000000000032 000001A3185C4C93"))
	if !bytes.Equal(b, want) {
		t.Errorf("VPD page C0:\n% x, want\n% x", b, want)
	}
	log := r.good(cdb("4D 00 76 00 00 0000 0400 00"), nil, 1024)
	if log[0] != 0x36 || int(binary.BigEndian.Uint16(log[2:])) != len(log)-4 {
		t.Errorf("log page header % x", log[:4])
	}
	got := map[uint16][]byte{}
	for p := log[4:]; len(p) >= 4; p = p[4+int(p[3]):] {
		if p[2] != 0x03 {
			t.Errorf("control byte %02x", p[2])
		}
		got[binary.BigEndian.Uint16(p)] = p[4 : 4+int(p[3])]
	}
	for code, v := range map[uint16][]byte{0: want[5:9], 1: want[16:24], 2: want[24:32], 0x10: want[32:48], 0x11: want[48:64], 0x12: want[64:80], 0x13: want[80:96]} {
		if !bytes.Equal(got[code], v) {
			t.Errorf("log parameter %04x is % x, want % x", code, got[code], v)
		}
	}
	from := r.good(cdb("4D 00 76 00 00 0011 0400 00"), nil, 1024)
	if binary.BigEndian.Uint16(from[4:]) != 0x11 {
		t.Errorf("parameter pointer 11h: % x", from)
	}
	if b := r.good(cdb("4D 00 40 00 00 0000 00FF 00"), nil, 255); !bytes.Equal(b, cdb("00000003 002F36")) {
		t.Errorf("supported log pages % x", b)
	}
	r.good(cdb("4D 00 6F 00 00 0000 00FF 00"), nil, 255)
	r.want(cdb("4D 00 76 00 00 0014 00FF 00"), nil, 255, "05/24/00")
	r.want(cdb("4D 00 4D 00 00 0000 00FF 00"), nil, 255, "05/24/00")
	r.want(cdb("4D 00 76 01 00 0000 00FF 00"), nil, 255, "05/24/00")
	r.want(cdb("4D 01 76 00 00 0000 00FF 00"), nil, 255, "05/24/00")
}

func TestCapacity(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	if b := r.good(cdb("25 00 00000000 0000 00 00"), nil, 8); !bytes.Equal(b, cdb("00000063 00000200")) {
		t.Errorf("READ CAPACITY(10) % x", b)
	}
	rc16 := cdb("9E 10 0000000000000000 00000020 00 00")
	b := r.good(rc16, nil, 32)
	if !bytes.Equal(b[:16], cdb("0000000000000063 00000200 00 03 C0 00")) {
		t.Errorf("READ CAPACITY(16) % x", b)
	}
	m.Grow(200)
	r.u.CapacityChanged()
	r.want(rc16, nil, 32, "06/2A/09")
	if b := r.good(rc16, nil, 32); b[7] != 199 {
		t.Errorf("READ CAPACITY(16) after growth % x", b)
	}
	r.wantOn(r.b, tur, nil, 0, "06/2A/09")
	r.good(rw(0x28, 0, 199, 1), nil, 512)
	for alloc := range 40 {
		c := slices.Clone(rc16)
		c[13] = byte(alloc)
		if b := r.good(c, nil, 40); len(b) != min(alloc, 32) {
			t.Errorf("allocation length %d gave %d bytes", alloc, len(b))
		}
	}
	r.want(cdb("9E 11 0000000000000000 00000020 00 00"), nil, 32, "05/24/00")

	plain := newRig(t, scsitest.NewMedium(100, 512), func(o *scsi.Options) { o.PlainBlocks = true })
	if b := plain.good(rc16, nil, 32); b[13] != 0 {
		t.Errorf("exponent %d with plain blocks", b[13])
	}
	large := newRig(t, scsitest.NewMedium(100, 4096))
	if b := large.good(inq(0xB0, 255), nil, 255); binary.BigEndian.Uint64(b[28:]) != 0 {
		t.Errorf("4096-byte blocks: unmap granularity and alignment % x", b[28:36])
	}
	if b := large.good(rc16, nil, 32); b[13] != 0 || b[10] != 0x10 {
		t.Errorf("4096-byte blocks: % x", b)
	}
}

// hugeMedium reports a capacity beyond 32-bit addresses.
type hugeMedium struct{ *scsitest.Medium }

func (h hugeMedium) Geometry() scsi.Geometry {
	g := h.Medium.Geometry()
	g.Blocks = 1 << 37 // 64 TiB
	return g
}

func (h hugeMedium) Deallocate(context.Context, []scsi.Extent, bool) error { return nil }

func TestHugeCapacity(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(8, 512), func(o *scsi.Options) { o.Medium = hugeMedium{o.Medium.(*scsitest.Medium)} })
	if b := r.good(cdb("25 00 00000000 0000 00 00"), nil, 8); binary.BigEndian.Uint32(b) != 0xFFFFFFFF {
		t.Errorf("READ CAPACITY(10) % x", b)
	}
	// WRITE SAME to the end: more than the limit is refused, less is metadata.
	r.want(rw(0x93, 1, 0, 0), nil, 0, "05/24/00")
	r.good(rw(0x93, 1, 1<<37-0xFFFFFFFF, 0), nil, 0)
	r.good(unmapCDB(24), unmapList(unmapRange{0, 0xFFFFFFFF}), 0)
	r.want(rw(0x88, 0, 1<<37, 1), nil, 512, "05/21/00")
	if b := r.good(cdb("1A 00 08 00 FF 00"), nil, 255); binary.BigEndian.Uint32(b[4:]) != 0xFFFFFFFF {
		t.Errorf("block descriptor % x", b[4:12])
	}
}

func TestModeSense(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512))
	all := r.good(cdb("1A 00 3F 00 FF 00"), nil, 255)
	if int(all[0])+1 != len(all) || all[2] != 0x10 || all[3] != 8 || !bytes.Equal(all[4:12], cdb("00000064 00000200")) {
		t.Errorf("header % x", all[:12])
	}
	var codes []byte
	for p := all[12:]; len(p) > 2; p = p[2+int(p[1]):] {
		codes = append(codes, p[0])
	}
	if !bytes.Equal(codes, []byte{0x01, 0x08, 0x0A, 0x1C}) {
		t.Errorf("pages % x", codes)
	}
	if b := r.good(cdb("1A 08 3F FF FF 00"), nil, 255); len(b) != len(all)-8 {
		t.Errorf("%d bytes without descriptor, %d with", len(b), len(all))
	}
	long := r.good(cdb("5A 10 08 00 000000 00FF 00"), nil, 255)
	if int(binary.BigEndian.Uint16(long))+2 != len(long) || long[4] != 1 || long[7] != 16 || !bytes.Equal(long[8:24], cdb("0000000000000064 00000000 00000200")) {
		t.Errorf("MODE SENSE(10) with long descriptor % x", long)
	}
	if b := r.good(cdb("1A 00 3F 00 04 00"), nil, 255); len(b) != 4 {
		t.Errorf("allocation length 4 gave %d bytes", len(b))
	}
	mask := r.good(cdb("1A 08 7F 00 FF 00"), nil, 255)[4:]
	want := slices.Concat(cdb("010A"), make([]byte, 10), cdb("0812 04"), make([]byte, 17), cdb("0A0A 04 00 08"), make([]byte, 7), cdb("1C0A"), make([]byte, 10))
	if !bytes.Equal(mask, want) {
		t.Errorf("changeable % x\nwant       % x", mask, want)
	}
	r.want(cdb("1A 00 FF 00 FF 00"), nil, 255, "05/39/00") // saved values
	r.want(cdb("1A 00 02 00 FF 00"), nil, 255, "05/24/00")
	r.want(cdb("1A 00 0A 01 FF 00"), nil, 255, "05/24/00")
}

func TestModeSelect(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	m.SetContract(scsi.Contract{Ack: scsi.LevelLocal, Flush: scsi.LevelObject})
	r := newRig(t, m)
	page := func(code byte) []byte { return r.good([]byte{0x1A, 8, code, 0, 255, 0}, nil, 255)[4:] }
	sel6 := func(list []byte) []byte { return []byte{0x15, 0x10, 0, 0, byte(len(list)), 0} }
	set := func(p []byte, want string) {
		t.Helper()
		list := append(make([]byte, 4), p...)
		r.want(sel6(list), list, 0, want)
	}

	p := page(0x08)
	p[2] &^= 4
	set(p, "good")
	if m.Contract().Ack != scsi.LevelObject || page(0x08)[2]&4 != 0 {
		t.Error("WCE=0 did not raise the ack level")
	}
	r.wantOn(r.b, tur, nil, 0, "06/2A/01")
	r.good(tur, nil, 0)
	p[2] |= 4
	set(p, "good")
	if m.Contract().Ack != scsi.LevelLocal {
		t.Error("WCE=1 did not restore the ack level")
	}
	r.wantOn(r.b, tur, nil, 0, "06/2A/01")
	set(page(0x08), "good") // no change, no attention
	r.wantOn(r.b, tur, nil, 0, "good")

	ctl := page(0x0A)
	ctl[4] |= 8 // SWP
	set(ctl, "good")
	for _, c := range [][]byte{rw(0x2A, 0, 0, 1), rw(0x8A, 0, 0, 1), rw(0x2E, 2, 0, 1), rw(0x41, 0, 0, 1), rw(0x93, 8, 0, 1), rw(0x8B, 0, 0, 1)} {
		r.want(c, fill(512, 1), 0, "07/27/02")
	}
	r.want(unmapCDB(24), unmapList(unmapRange{0, 1}), 0, "07/27/02")
	r.good(rw(0x28, 0, 0, 1), nil, 512)
	if b := r.good(cdb("1A 08 0A 00 FF 00"), nil, 255); b[2]&0x80 == 0 {
		t.Error("WP is not set")
	}
	ctl[4] &^= 8
	ctl[2] |= 4 // D_SENSE
	list := append(cdb("0000 00 00 00 00 0008 00000064 00000200"), ctl...)
	r.good([]byte{0x55, 0x10, 0, 0, 0, 0, 0, 0, byte(len(list)), 0}, list, 0)
	r.good(rw(0x2A, 0, 0, 1), fill(512, 1), 0)
	res, _ := r.exec(r.a, rw(0x28, 0, 100, 1), nil, 512)
	if !decodeSense(res.Sense).descriptor {
		t.Error("D_SENSE=1 gives fixed format")
	}
	ctl[2] &^= 4
	set(ctl, "good")

	bad := page(0x0A)
	bad[5] ^= 0x40 // TAS is not changeable
	set(bad, "05/26/00")
	bad = page(0x08)
	bad[2] ^= 1 // RCD
	set(bad, "05/26/00")
	set([]byte{0x02, 2, 0, 0}, "05/26/00")
	bad = page(0x08)
	bad[1]--
	set(bad, "05/26/00")
	set(page(0x08)[:19], "05/1A/00")
	set([]byte{0x08}, "05/1A/00")
	r.want(sel6(make([]byte, 3)), make([]byte, 3), 0, "05/1A/00")
	r.want(sel6(make([]byte, 30)), make([]byte, 20), 0, "05/1A/00")
	r.good(sel6(nil), nil, 0)
	list = append(cdb("000000 08 00000065 00000200"), ctl...)
	r.want(sel6(list), list, 0, "05/26/00") // another capacity
	list = append(cdb("000000 08 00000000 00001000"), ctl...)
	r.want(sel6(list), list, 0, "05/26/00") // another block size
	list = append(cdb("000000 07 00000000 000010"), ctl...)
	r.want(sel6(list), list, 0, "05/26/00")
	r.want([]byte{0x15, 0x11, 0, 0, 4, 0}, make([]byte, 4), 0, "05/24/00") // SP

	// Without a write cache in the policy, WCE cannot be set.
	plain := newRig(t, scsitest.NewMedium(100, 512))
	p = plain.good(cdb("1A 08 08 00 FF 00"), nil, 255)
	p[0], p[2], p[4+2] = 0, 0, p[4+2]|4
	plain.want(sel6(p), p, 0, "05/26/02")
}

func TestReadOnly(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512), func(o *scsi.Options) { o.ReadOnly = true })
	r.want(rw(0x2A, 0, 0, 1), fill(512, 1), 0, "07/27/00")
	r.want(rw(0x93, 8, 0, 1), nil, 0, "07/27/00")
	caw := rw(0x89, 0, 0, 0)
	caw[13] = 1
	r.want(caw, fill(1024, 0), 0, "07/27/00")
	if b := r.good(cdb("1A 08 0A 00 FF 00"), nil, 255); b[2]&0x80 == 0 {
		t.Error("WP is not set")
	}
}

func TestSupportedOpcodes(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512))
	ask := func(opt, op byte, sa uint16) []byte {
		return []byte{0xA3, 0x0C, opt, op, byte(sa >> 8), byte(sa), 0, 0, 0xFF, 0xFF, 0, 0}
	}
	all := r.good(ask(0, 0, 0), nil, 65535)
	timed := r.good(ask(0x80, 0, 0), nil, 65535)
	if int(binary.BigEndian.Uint32(all)) != len(all)-4 || int(binary.BigEndian.Uint32(timed)) != len(timed)-4 {
		t.Fatal("command data length")
	}
	count := 0
	for d, td := all[4:], timed[4:]; len(d) >= 8; d, td = d[8:], td[20:] {
		count++
		op, sa, flags, length := d[0], binary.BigEndian.Uint16(d[2:]), d[5], d[7]
		if td[0] != op || td[5]&2 == 0 || td[9] != 10 || flags&2 != 0 {
			t.Errorf("%02x: timeouts % x", op, td[:20])
		}
		hasSA := flags&1 != 0
		if !hasSA && sa != 0 {
			t.Errorf("%02x: service action %d without SERVACTV", op, sa)
		}
		good, bad := byte(1), byte(2)
		if hasSA {
			good, bad = 2, 1
		}
		r.want(ask(bad, op, sa), nil, 255, "05/24/00")
		for _, opt := range []byte{good, 3} {
			one := r.good(ask(opt, op, sa), nil, 255)
			if one[1] != 3 || one[3] != length || len(one) != 4+int(length) || one[4] != op {
				t.Errorf("%02x/%02x: % x", op, sa, one)
			}
		}
		// What is listed is executed: never INVALID COMMAND OPERATION CODE.
		c := make([]byte, length)
		c[0], c[1] = op, byte(sa)
		if res, _ := r.exec(r.a, c, nil, 0); ending(res) == "05/20/00" {
			t.Errorf("%02x/%02x is listed and not executed", op, sa)
		}
	}
	if count < 45 {
		t.Errorf("only %d commands", count)
	}
	for op := range 256 {
		one := r.good(ask(3, byte(op), 0x1F), nil, 255)
		if one[1] != 1 {
			t.Errorf("%02x/1f is supported", op)
		}
		if res, _ := r.exec(r.a, append([]byte{byte(op)}, make([]byte, 15)...), nil, 0); ending(res) == "05/20/00" {
			if one := r.good(ask(1, byte(op), 0), nil, 255); one[1] != 1 {
				t.Errorf("%02x is not executed but supported", op)
			}
		}
	}
	r.want(ask(4, 0x28, 0), nil, 255, "05/24/00")
	if b := r.good(cdb("A3 0D 00 000000 00000010 0000"), nil, 16); !bytes.Equal(b, []byte{0xDE, 7, 0, 0}) {
		t.Errorf("task management functions % x", b)
	}
	if b := r.good(cdb("A3 0D 80 000000 00000010 0000"), nil, 16); len(b) != 16 || b[3] != 12 {
		t.Errorf("extended task management functions % x", b)
	}
}

func TestRefused(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512))
	for _, op := range []byte{0x04, 0x48, 0x5E, 0x5F, 0x83, 0x84, 0xA4, 0x9C, 0x7F, 0xC1} {
		r.want(append([]byte{op}, make([]byte, 15)...), nil, 255, "05/20/00")
	}
	r.want(cdb("A3 0A 0000 0000 000000FF 00 00"), nil, 255, "05/24/00") // REPORT TARGET PORT GROUPS
	r.want(nil, nil, 0, "05/20/00")
	r.want(cdb("28 00 0000"), nil, 0, "05/24/00")       // short CDB
	r.want(cdb("00 00 0000 00 04"), nil, 0, "05/24/00") // NACA
	r.want(cdb("00 01 0000 00 00"), nil, 0, "05/24/00")
	res := r.u.Execute(context.Background(), r.a, &scsi.Command{CDB: tur, Attribute: scsi.ACA, Data: scsitest.NewData(nil, 0)})
	if got := ending(res); got != "05/49/00" {
		t.Errorf("ACA: %s", got)
	}
	r.wantOn(nexus("stranger"), tur, nil, 0, "0B/00/00")
}

func TestSmallCommands(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	if b := r.good(cdb("03 00 0000 FC 00"), nil, 252); len(b) != 18 || b[0] != 0x70 || b[2] != 0 {
		t.Errorf("REQUEST SENSE % x", b)
	}
	r.u.RaiseUnitAttention(0x2A, 0x09, &r.b)
	if b := r.good(cdb("03 01 0000 FC 00"), nil, 252); !bytes.Equal(b, cdb("72 06 2A 09 00000000")) {
		t.Errorf("REQUEST SENSE with attention % x", b)
	}
	r.good(tur, nil, 0)
	r.wantOn(r.b, tur, nil, 0, "good")
	if b := r.good(cdb("37 00 18 00000000 0020 00"), nil, 32); !bytes.Equal(b, cdb("00180000")) {
		t.Errorf("READ DEFECT DATA(10) % x", b)
	}
	if b := r.good(cdb("B7 18 00000000 00000020 0000"), nil, 32); !bytes.Equal(b, cdb("00180000 00000000")) {
		t.Errorf("READ DEFECT DATA(12) % x", b)
	}
	r.good(cdb("1D 04 0000 00 00"), nil, 0)
	r.good(cdb("1D A0 0000 00 00"), nil, 0)
	r.want(cdb("1D 20 0000 00 00"), nil, 0, "05/24/00")
	r.want(cdb("1D 00 0000 08 00"), make([]byte, 8), 0, "05/24/00")
	m.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
		if op == scsitest.OpRead {
			return scsi.ErrUnreadable
		}
		return nil
	}
	r.want(cdb("1D 04 0000 00 00"), nil, 0, "04/3E/03")
	// Stopping flushes, and does not stop the unit for others.
	r.good(cdb("1B 00 0000 00 00"), nil, 0)
	if flushes, _ := m.Flushes(); flushes != 1 {
		t.Errorf("%d flushes after STOP", flushes)
	}
	r.good(cdb("1B 00 0000 02 00"), nil, 0) // LOEJ of a fixed medium
	r.good(tur, nil, 0)
}

func TestRemovable(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m, func(o *scsi.Options) { o.Removable = true })
	if b := r.good(inq(-1, 96), nil, 96); b[1]&0x80 == 0 {
		t.Error("RMB is not set")
	}
	eject, load, prevent, allow := cdb("1B 00 0000 02 00"), cdb("1B 00 0000 03 00"), cdb("1E 00 0000 01 00"), cdb("1E 00 0000 00 00")
	r.good(prevent, nil, 0)
	r.wantOn(r.b, eject, nil, 0, "05/53/02")
	r.good(tur, nil, 0)
	r.good(allow, nil, 0)
	r.good(eject, nil, 0)
	if flushes, _ := m.Flushes(); flushes != 1 {
		t.Errorf("%d flushes before eject", flushes)
	}
	for _, c := range [][]byte{tur, rw(0x28, 0, 0, 1), rw(0x2A, 0, 0, 1), rw(0x35, 0, 0, 1), cdb("25 00 00000000 0000 00 00"), unmapCDB(0), rw(0x9E, 0x12, 0, 24)} {
		r.want(c, fill(512, 1), 512, "02/3A/00")
	}
	r.good(inq(-1, 96), nil, 96)
	r.good(cdb("1A 08 3F 00 FF 00"), nil, 255)
	r.good(prevent, nil, 0)
	r.want(load, nil, 0, "05/53/02")
	r.u.NexusLost(r.a, scsi.SessionClosed) // its prevention ends with it
	r.wantOn(r.b, load, nil, 0, "good")
	r.wantOn(r.b, tur, nil, 0, "good")
	r.u.NexusEstablished(r.a)
	r.want(tur, nil, 0, "06/29/00")
	r.good(eject, nil, 0)
	r.wantOn(r.b, load, nil, 0, "good")
	r.want(tur, nil, 0, "06/28/00")
	for condition := byte(1); condition < 16; condition++ {
		r.good([]byte{0x1B, 0, 0, 0, condition<<4 | 2, 0}, nil, 0) // moves nothing
		r.good(tur, nil, 0)
	}
	// An eject whose flush fails leaves the medium where it is.
	m.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
		if op == scsitest.OpFlush {
			return scsi.ErrUnmet
		}
		return nil
	}
	r.want(eject, nil, 0, "03/0C/02")
	r.good(tur, nil, 0)
}

func TestReservations(t *testing.T) {
	m := scsitest.NewMedium(100, 512)
	r := newRig(t, m)
	reserve6, release6 := cdb("16 00 0000 00 00"), cdb("17 00 0000 00 00")
	reserve10, release10 := cdb("56 00 00000000 0000 00 00"), cdb("57 00 00000000 0000 00 00")
	caw := rw(0x89, 0, 0, 0)
	caw[13] = 1
	for _, how := range []func(){
		func() { r.good(release6, nil, 0) },
		func() { r.good(release10, nil, 0) },
		func() {
			if err := r.u.Reset(context.Background(), r.a); err != nil {
				t.Fatal(err)
			}
			r.want(tur, nil, 0, "06/29/03")
			r.wantOn(r.b, tur, nil, 0, "06/29/03")
		},
		func() {
			r.u.NexusLost(r.a, scsi.SessionReinstated)
			r.u.NexusEstablished(r.a)
			r.want(tur, nil, 0, "06/29/07")
		},
		func() {
			r.u.NexusLost(r.a, scsi.SessionClosed)
			r.u.NexusEstablished(r.a)
			r.want(tur, nil, 0, "06/29/00")
		},
	} {
		r.good(reserve6, nil, 0)
		r.good(reserve10, nil, 0) // again
		for _, c := range [][]byte{reserve6, reserve10, tur, rw(0x28, 0, 0, 1), rw(0x2A, 0, 0, 1), rw(0x35, 0, 0, 0), unmapCDB(0), caw,
			cdb("1A 08 3F 00 FF 00"), cdb("15 10 0000 00 00"), cdb("1E 00 0000 01 00"), cdb("1B 00 0000 00 00"), cdb("1D 04 0000 00 00"), rw(0x9E, 0x12, 0, 24)} {
			r.wantOn(r.b, c, fill(512, 1), 512, "conflict")
		}
		for _, c := range [][]byte{inq(-1, 96), cdb("03 00 0000 FC 00"), cdb("A0 00 00 000000 00000100 0000"), release6, release10,
			cdb("25 00 00000000 0000 00 00"), cdb("4D 00 40 00 00 0000 00FF 00"), cdb("1E 00 0000 00 00"), cdb("1B 00 0000 01 00"), cdb("A3 0C 00 00 0000 00000400 0000")} {
			r.wantOn(r.b, c, nil, 1024, "good")
		}
		r.good(rw(0x2A, 0, 0, 1), fill(512, 1), 0)
		how()
		r.wantOn(r.b, tur, nil, 0, "good")
		r.wantOn(r.b, reserve6, nil, 0, "good")
		r.wantOn(r.b, release6, nil, 0, "good")
	}
}

func TestUnitAttentions(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(100, 512))
	r.u.RaiseUnitAttention(0x2A, 0x01, nil)
	r.u.RaiseUnitAttention(0x2A, 0x09, nil)
	r.u.RaiseUnitAttention(0x2A, 0x01, nil) // pending already
	r.good(inq(-1, 96), nil, 96)            // not in the way of INQUIRY
	r.want(tur, nil, 0, "06/2A/01")
	r.want(cdb("FF 00 0000 00 00"), nil, 0, "06/2A/09")
	r.good(tur, nil, 0)
	if err := r.u.Reset(context.Background(), r.a); err != nil {
		t.Fatal(err)
	}
	r.wantOn(r.b, tur, nil, 0, "06/29/03") // and nothing older
	r.wantOn(r.b, tur, nil, 0, "good")
	for i := range byte(40) {
		r.u.RaiseUnitAttention(0x3F, i, nil)
	}
	r.wantOn(r.b, tur, nil, 0, "06/29/00") // too many to list
}
