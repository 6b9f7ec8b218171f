package scsi_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

func newUnit(t testing.TB, id byte) *scsi.LogicalUnit {
	t.Helper()
	u, err := scsi.NewLogicalUnit(scsi.Options{Medium: scsitest.NewMedium(100, 512), Identity: scsi.Identity{UUID: [16]byte{id}}})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestLUNForms(t *testing.T) {
	for n := range uint16(scsi.MaxLUN + 1) {
		if got, ok := scsi.DecodeLUN(scsi.EncodeLUN(n)); !ok || got != n {
			t.Fatalf("LUN %d comes back as %d, %v", n, got, ok)
		}
	}
	for lun, want := range map[uint64]uint16{0x0000 << 48: 0, 0x00FF << 48: 255, 0x4001 << 48: 1, 0x7FFF << 48: 0x3FFF} {
		if got, ok := scsi.DecodeLUN(lun); !ok || got != want {
			t.Errorf("%016x: %d, %v", lun, got, ok)
		}
	}
	for _, lun := range []uint64{1, 1 << 47, 0x0100 << 48, 0x8000 << 48, 0xC101 << 48, 0xFFFFFFFFFFFFFFFF, 0x0001000200000000} {
		if n, ok := scsi.DecodeLUN(lun); ok {
			t.Errorf("%016x is LUN %d", lun, n)
		}
	}
}

// onLUN runs a command through an inventory.
func onLUN(v *scsi.Inventory, n scsi.Nexus, lun uint64, c []byte, in int) (string, []byte) {
	d := scsitest.NewData(nil, in)
	res := v.Execute(context.Background(), n, lun, &scsi.Command{CDB: c, Data: d})
	return ending(res), d.In[:d.Got]
}

func TestInventory(t *testing.T) {
	v := scsi.NewInventory()
	a := nexus("a")
	v.NexusEstablished(a)
	u0, u7 := newUnit(t, 1), newUnit(t, 2)
	if err := v.Map(0, u0); err != nil {
		t.Fatal(err)
	}
	if err := v.Map(300, u7); err != nil {
		t.Fatal(err)
	}
	for err, want := range map[error]error{
		v.Map(0, newUnit(t, 3)):                 scsi.ErrLUNInUse,
		v.Map(scsi.MaxLUN+1, newUnit(t, 3)):     scsi.ErrLUNRange,
		v.Map(5, u7):                            scsi.ErrUnitMapped,
		v.Unmap(5):                              scsi.ErrLUNAbsent,
		v.Reset(context.Background(), a, 5<<48): scsi.ErrLUNAbsent,
	} {
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	expect := func(lun uint64, c []byte, want string) []byte {
		t.Helper()
		got, b := onLUN(v, a, lun, c, 1024)
		if got != want {
			t.Fatalf("LUN %016x, CDB % x: %s, want %s", lun, c, got, want)
		}
		return b
	}
	luns := cdb("A0 00 00 000000 00000400 0000")
	l300 := scsi.EncodeLUN(300)

	expect(0, tur, "06/29/00")
	expect(0, tur, "06/3F/0E") // LUN 300 came later
	expect(0, tur, "good")
	if b := expect(0, luns, "good"); !bytes.Equal(b, cdb("00000010 00000000 0000000000000000 412C000000000000")) {
		t.Errorf("REPORT LUNS % x", b)
	}
	expect(l300, tur, "06/29/00")
	expect(l300, tur, "good") // REPORT LUNS took its 3F/0E
	if err := v.Unmap(300); err != nil {
		t.Fatal(err)
	}
	expect(0, luns, "good")
	expect(0, tur, "good")
	if err := v.Map(7, u7); err != nil {
		t.Fatal(err)
	}
	expect(0, tur, "06/3F/0E")
	v.CommandsCleared(a, 0)
	if key, asc, ascq, pending := v.UnitAttention(a, 0); !pending || key != 6 || asc != 0x47 || ascq != 0x7F {
		t.Errorf("pending attention %x %x %x %v", key, asc, ascq, pending)
	}
	expect(0, tur, "06/47/7F")
	if _, _, _, pending := v.UnitAttention(a, 0); pending {
		t.Error("an attention is pending still")
	}

	// No logical unit.
	for _, lun := range []uint64{l300, 1 << 63, 0xC101 << 48} {
		expect(lun, tur, "05/25/00")
		expect(lun, rw(0x28, 0, 0, 1), "05/25/00")
		expect(lun, nil, "05/25/00")
		if b := expect(lun, inq(-1, 96), "good"); len(b) != 36 || b[0] != 0x7F {
			t.Errorf("INQUIRY without unit % x", b)
		}
		if b := expect(lun, inq(0, 96), "good"); !bytes.Equal(b, []byte{0x7F, 0, 0, 1, 0}) {
			t.Errorf("VPD page 00 without unit % x", b)
		}
		expect(lun, inq(0x83, 96), "05/24/00")
		if b := expect(lun, luns, "good"); len(b) != 24 {
			t.Errorf("REPORT LUNS without unit % x", b)
		}
		if b := expect(lun, cdb("03 00 0000 FC 00"), "good"); !bytes.Equal(b[:3], []byte{0x70, 0, 5}) || b[12] != 0x25 {
			t.Errorf("REQUEST SENSE without unit % x", b)
		}
	}
	expect(0, cdb("A0 00 00 000000 0000000F 0000"), "05/24/00")
	expect(0, cdb("A0 00 10 000000 00000400 0000"), "05/24/00")
	if b := expect(0, cdb("A0 00 01 000000 00000400 0000"), "good"); len(b) != 8 {
		t.Errorf("well-known LUNs % x", b)
	}

	if err := v.ResetAll(context.Background(), a); err != nil {
		t.Fatal(err)
	}
	expect(0, tur, "06/29/03")
	expect(7<<48, tur, "06/29/03")
	v.NexusLost(a, scsi.SessionReinstated)
	v.NexusEstablished(a)
	expect(7<<48, tur, "06/29/07")
	v.NexusLost(a, scsi.SessionClosed)
	expect(0, tur, "0B/00/00")
	var numbers []uint16
	for _, l := range v.LUNs() {
		numbers = append(numbers, l.Number)
	}
	if !slices.Equal(numbers, []uint16{0, 7}) || !v.Exists(7<<48) || v.Exists(l300) {
		t.Errorf("LUNs %v", numbers)
	}
}

// A command that was admitted stays with its unit when the LUN goes away.
func TestUnmapAfterAdmit(t *testing.T) {
	v := scsi.NewInventory()
	a := nexus("a")
	u := newUnit(t, 1)
	if err := v.Map(0, u); err != nil {
		t.Fatal(err)
	}
	v.NexusEstablished(a)
	onLUN(v, a, 0, tur, 0)
	d := scsitest.NewData(nil, 512)
	cmd := &scsi.Command{CDB: rw(0x28, 0, 0, 1), Data: d}
	v.Admit(a, 0, cmd)
	if err := v.Unmap(0); err != nil {
		t.Fatal(err)
	}
	// The nexus with the unit is gone, and the command ends without effect.
	if got := ending(v.Execute(context.Background(), a, 0, cmd)); got != "0B/00/00" {
		t.Errorf("admitted command: %s", got)
	}
	if got, _ := onLUN(v, a, 0, tur, 0); got != "05/25/00" {
		t.Errorf("new command: %s", got)
	}
}

func TestOptionsReportEveryFault(t *testing.T) {
	_, err := scsi.NewLogicalUnit(scsi.Options{Vendor: "TOOLONGVENDOR", Product: "a\x01b", MaxTransfer: 17, Identity: scsi.Identity{Serial: string(fill(37, 'x'))}})
	for _, want := range []string{"vendor", "product", "serial", "UUID", "medium"} {
		if err == nil || !bytes.Contains([]byte(err.Error()), []byte(want)) {
			t.Errorf("the error does not mention %q: %v", want, err)
		}
	}
	bad := scsitest.NewMedium(8, 512)
	_, err = scsi.NewLogicalUnit(scsi.Options{Medium: oddMedium{bad}, Identity: scsi.Identity{UUID: [16]byte{1}}})
	if err == nil {
		t.Error("a block size of 520 was accepted")
	}
}

type oddMedium struct{ *scsitest.Medium }

func (o oddMedium) Geometry() scsi.Geometry { return scsi.Geometry{Blocks: 8, BlockSize: 520} }
