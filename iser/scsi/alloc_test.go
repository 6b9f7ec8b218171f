//go:build !race

// The race detector has sync.Pool forget at random.

package scsi_test

import (
	"context"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// What initiators send all the time allocates nothing, nor does a command that fails.
func TestCommandsDoNotAllocate(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(1024, 512))
	v := scsi.NewInventory()
	if err := v.Map(0, r.u); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	for _, test := range []struct {
		name string
		cdb  []byte
		out  []byte
		in   int
		want string
	}{
		{"read", rw(0x88, 0, 64, 8), nil, 4096, "good"},
		{"read with FUA", rw(0x88, 0x08, 64, 8), nil, 4096, "good"},
		{"write", rw(0x8A, 0, 64, 8), fill(4096, 1), 0, "good"},
		{"write with FUA", rw(0x8A, 0x08, 64, 8), fill(4096, 1), 0, "good"},
		{"flush", rw(0x91, 0, 0, 0), nil, 0, "good"},
		{"ready", tur, nil, 0, "good"},
		{"out of range", rw(0x88, 0, 1024, 8), nil, 4096, "05/21/00"},
		{"unknown", []byte{0xFF, 0, 0, 0, 0, 0}, nil, 0, "05/20/00"},
	} {
		d := scsitest.NewData(test.out, test.in)
		cmd := &scsi.Command{CDB: test.cdb, Attribute: scsi.Simple, Data: d}
		var res scsi.Result
		n := testing.AllocsPerRun(500, func() {
			d.Reset()
			v.Admit(r.a, 0, cmd)
			res = v.Execute(ctx, r.a, 0, cmd)
		})
		if got := ending(res); got != test.want {
			t.Errorf("%s: %s", test.name, got)
		}
		if n > 0 {
			t.Errorf("%s: %v allocations", test.name, n)
		}
	}
}
