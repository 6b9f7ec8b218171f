package iscsi

import (
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

func TestLUNInTheLog(t *testing.T) {
	for lun, want := range map[pdu.LUN]string{
		0: "0", 844424930131968: "3", pdu.LUNOf(255): "255", pdu.LUNOf(300): "300",
		0xc101000000000000: "0xc101000000000000", 0x0001000200000000: "0x0001000200000000",
	} {
		if got := lunText(lun); got != want {
			t.Errorf("%#x is %q, want %q", uint64(lun), got, want)
		}
	}
}
