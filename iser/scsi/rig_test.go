package scsi_test

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// rig is a logical unit on a medium in memory, with two nexuses that have taken their
// first unit attention.
type rig struct {
	t    testing.TB
	m    *scsitest.Medium
	u    *scsi.LogicalUnit
	a, b scsi.Nexus
}

func nexus(name string) scsi.Nexus {
	return scsi.Nexus{InitiatorName: "iqn.2026-01.example:" + name, TargetName: "iqn.2026-01.example:target", PortalGroup: 1}
}

func newRig(t testing.TB, m *scsitest.Medium, change ...func(*scsi.Options)) *rig {
	t.Helper()
	opt := scsi.Options{Medium: m, Identity: scsi.Identity{UUID: [16]byte{1, 2, 3, 15: 9}}}
	for _, f := range change {
		f(&opt)
	}
	u, err := scsi.NewLogicalUnit(opt)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, m: m, u: u, a: nexus("a"), b: nexus("b")}
	for _, n := range []scsi.Nexus{r.a, r.b} {
		u.NexusEstablished(n)
		r.wantOn(n, tur, nil, 0, "06/29/00")
	}
	return r
}

var tur = make([]byte, 6)

func (r *rig) exec(n scsi.Nexus, cdb, out []byte, in int) (scsi.Result, *scsitest.Data) {
	d := scsitest.NewData(out, in)
	return r.u.Execute(context.Background(), n, &scsi.Command{CDB: cdb, Data: d}), d
}

// wantOn runs a command and checks how it ends; it returns the data-in.
func (r *rig) wantOn(n scsi.Nexus, cdb, out []byte, in int, want string) []byte {
	r.t.Helper()
	res, d := r.exec(n, cdb, out, in)
	if got := ending(res); got != want {
		r.t.Fatalf("CDB % x: %s, want %s", cdb, got, want)
	}
	return d.In[:d.Got]
}

func (r *rig) want(cdb, out []byte, in int, want string) []byte {
	r.t.Helper()
	return r.wantOn(r.a, cdb, out, in, want)
}

func (r *rig) good(cdb, out []byte, in int) []byte {
	r.t.Helper()
	return r.want(cdb, out, in, "good")
}

// ending is a result in words: "good", "conflict", "busy", "aborted", or key/ASC/ASCQ.
func ending(res scsi.Result) string {
	switch res.Status {
	case scsi.Good:
		return "good"
	case scsi.ReservationConflict:
		return "conflict"
	case scsi.Busy:
		return "busy"
	case scsi.TaskAborted:
		return "aborted"
	case scsi.CheckCondition:
		s := decodeSense(res.Sense)
		return fmt.Sprintf("%02X/%02X/%02X", s.key, s.asc, s.ascq)
	}
	return fmt.Sprintf("status %02X", uint8(res.Status))
}

type sense struct {
	descriptor     bool
	key, asc, ascq byte
	hasInfo        bool
	info           uint64
	sks            [3]byte
}

func decodeSense(b []byte) sense {
	var s sense
	if len(b) < 8 {
		return s
	}
	switch b[0] & 0x7F {
	case 0x70:
		s.key, s.asc, s.ascq = b[2], b[12], b[13]
		s.hasInfo = b[0]&0x80 != 0
		s.info = uint64(binary.BigEndian.Uint32(b[3:]))
		copy(s.sks[:], b[15:18])
	case 0x72:
		s.descriptor = true
		s.key, s.asc, s.ascq = b[1], b[2], b[3]
		for d := b[8:]; len(d) > 2; d = d[2+int(d[1]):] {
			switch d[0] {
			case 0:
				s.hasInfo, s.info = d[2]&0x80 != 0, binary.BigEndian.Uint64(d[4:])
			case 2:
				copy(s.sks[:], d[4:7])
			}
		}
	}
	return s
}

// cdb decodes hex with optional spaces.
func cdb(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// rw builds a CDB with address and length for any of the four sizes.
func rw(op, flags byte, lba uint64, blocks uint32) []byte {
	switch op >> 5 {
	case 0:
		return []byte{op, flags | byte(lba>>16)&0x1F, byte(lba >> 8), byte(lba), byte(blocks), 0}
	case 1, 2:
		c := make([]byte, 10)
		c[0], c[1] = op, flags
		binary.BigEndian.PutUint32(c[2:], uint32(lba))
		binary.BigEndian.PutUint16(c[7:], uint16(blocks))
		return c
	case 5:
		c := make([]byte, 12)
		c[0], c[1] = op, flags
		binary.BigEndian.PutUint32(c[2:], uint32(lba))
		binary.BigEndian.PutUint32(c[6:], blocks)
		return c
	default:
		c := make([]byte, 16)
		c[0], c[1] = op, flags
		binary.BigEndian.PutUint64(c[2:], lba)
		binary.BigEndian.PutUint32(c[10:], blocks)
		return c
	}
}

func fill(n int, v byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = v
	}
	return b
}

type unmapRange struct {
	lba    uint64
	blocks uint32
}

func unmapList(ranges ...unmapRange) []byte {
	b := make([]byte, 8)
	binary.BigEndian.PutUint16(b, uint16(6+16*len(ranges)))
	binary.BigEndian.PutUint16(b[2:], uint16(16*len(ranges)))
	for _, r := range ranges {
		b = binary.BigEndian.AppendUint64(b, r.lba)
		b = binary.BigEndian.AppendUint32(b, r.blocks)
		b = append(b, 0, 0, 0, 0)
	}
	return b
}

func unmapCDB(n int) []byte { return []byte{0x42, 0, 0, 0, 0, 0, 0, byte(n >> 8), byte(n), 0} }
