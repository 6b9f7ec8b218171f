package scsi_test

import (
	"context"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

func benchmark(b *testing.B, cdb []byte, out []byte, in int) {
	r := newRig(b, scsitest.NewMedium(1024, 512))
	v := scsi.NewInventory()
	if err := v.Map(0, r.u); err != nil {
		b.Fatal(err)
	}
	d := scsitest.NewData(out, in)
	cmd := &scsi.Command{CDB: cdb, Attribute: scsi.Simple, Data: d}
	ctx := context.Background()
	b.ReportAllocs()
	b.SetBytes(int64(len(out) + in))
	for b.Loop() {
		d.Reset()
		v.Admit(r.a, 0, cmd)
		if res := v.Execute(ctx, r.a, 0, cmd); res.Status != scsi.Good {
			b.Fatal(ending(res))
		}
	}
}

func BenchmarkRead4K(b *testing.B)        { benchmark(b, rw(0x88, 0, 64, 8), nil, 4096) }
func BenchmarkWrite4K(b *testing.B)       { benchmark(b, rw(0x8A, 0, 64, 8), fill(4096, 1), 0) }
func BenchmarkTestUnitReady(b *testing.B) { benchmark(b, tur, nil, 0) }
