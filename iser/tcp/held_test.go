package tcp_test

import (
	"bytes"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// The last Data-In carries the status, however long it is, and what the medium lent is given back.
func TestStatusWithLargeData(t *testing.T) {
	for _, digest := range []string{"None", "CRC32C"} {
		r := newRig(t)
		c := r.ready("MaxRecvDataSegmentLength=262144", "MaxBurstLength=1048576", "DataDigest="+digest, "HeaderDigest="+digest)
		want := pattern(7, 3<<20)
		for off := 0; off < len(want); off += 256 << 10 {
			if res := c.run(write16(off/512, 512), 0, want[off:off+256<<10]); res.status != scsi.Good {
				t.Fatal(res.status)
			}
		}
		for _, test := range []struct{ blocks, declared, pdus int }{
			{512, 262144, 1},   // one PDU
			{2048, 1 << 20, 4}, // several
			{512, 200000, 1},   // clipped: residual overflow
			{384, 262144, 1},   // residual underflow: the status goes for itself
			{4096, 2 << 20, 8}, // two steps of the unit: only the last is held
		} {
			res := c.run(read16(0, test.blocks), test.declared, nil)
			n := min(test.blocks*512, test.declared)
			if res.status != scsi.Good || !bytes.Equal(res.data, want[:n]) {
				t.Errorf("%+v: status %v, %d bytes", test, res.status, len(res.data))
			}
			whole := test.blocks*512 >= test.declared // no more is expected, so that the datamover knows which PDU is the last
			if res.dataIn != test.pdus || res.collapsed != whole {
				t.Errorf("%+v: %d Data-In, status in the last: %t", test, res.dataIn, res.collapsed)
			}
			if over, under := test.blocks*512 > test.declared, test.blocks*512 < test.declared; res.over != over || res.under != under {
				t.Errorf("%+v: residual over %t, under %t", test, res.over, res.under)
			}
		}
		await(t, "loans are given back", func() bool { return r.medium.Open() == 0 })
	}
}

// Reads whose data nobody takes: loans are given back when the connection goes.
func TestHeldDataOfLostReads(t *testing.T) {
	r := newRig(t)
	c := r.ready("MaxRecvDataSegmentLength=262144", "MaxBurstLength=1048576", "DefaultTime2Wait=0", "DefaultTime2Retain=0")
	g := r.gate(scsitest.OpRead)
	const reads = 64 // far more than socket buffers take
	for range reads {
		c.command(read16(0, 2048), 1<<20, nil, 0)
	}
	for range reads {
		<-g.entered
	}
	close(g.open)
	await(t, "data is on its way", func() bool { return r.medium.Open() > 0 })
	c.c.Close()
	await(t, "loans are given back", func() bool { return r.medium.Open() == 0 })
	await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })
}
