package iser_test

import (
	"bytes"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
)

func TestSession(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	for _, n := range []int{512, 4096, 8192, 8704, 65536, 262144, 1 << 20} {
		want := pattern(n, n)
		c.good(write16(8, n/512), 0, want)
		if got := c.good(read16(8, n/512), n, nil); !bytes.Equal(got.data, want) {
			t.Errorf("%d bytes: read something else than was written", n)
		}
	}
	if res := c.run(read16(1<<20, 1), 512, nil); res.status != scsi.CheckCondition {
		t.Errorf("status %#x past the end", res.status)
	}
	c.ping()
	c.logout()
	c.closed()
}
