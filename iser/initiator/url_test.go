package initiator

import (
	"errors"
	"strings"
	"testing"
)

// A fault of a URL is named without a part of the secret, and with what to write instead.
func TestURLFaults(t *testing.T) {
	for _, c := range []struct {
		url, text string
		form      bool
	}{
		{"http://h/t", "neither iscsi nor iser", true},
		{"iscsi://h", "no target name", true},
		{"iscsi://h/t/x", "no logical unit number", true},
		{"iscsi://h:99999/t", "between 1 and 65535", false},
		{"iscsi://h:0/t", "between 1 and 65535", false},
		{"iscsi://h:x/t", "not a number", false},
		{"iser://h/t?foo=1", "initial-r2t", false},
		{"iser://h/t?digests=none", "peer-to-peer", false},
		{"iscsi://h/t?crc=on", "digests", false},
		{"iser://h/t?mpa=3", "neither 1 nor 2", false},
		{"iser://u@h/t", "a user without a secret", false},
		{"iser://u:HIDDEN/x@h/t", "%2F", false},
		{"iser://u:12/HIDDEN@h/t", "%2F", false},
		{"iser://u:x?HIDDEN@h/t", "%3F", false},
		{"iser://u:1#HIDDEN@h/t", "%23", false},
		{"iser://u:%zzHIDDEN@h/t", "percent-encoded", false},
		{"iser://u:HIDDEN<@h/t", "percent-encoded", false},
		{"iser://u:HIDDEN@h:x/t", "not a number", false},
		{"iser://u:HIDDEN@h/t?mpa=3", "neither 1 nor 2", false},
		{"iser://u:HIDDEN/t", "not a number", false},
	} {
		_, _, err := ParseURL(c.url)
		if err == nil || !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), "HIDDEN") || errors.Is(err, ErrURLForm) != c.form {
			t.Errorf("%s: %v", c.url, err)
		}
	}
	o, lun, err := ParseURL("iser://u:a%2Fb%40c@h:1/t/3?mpa=1")
	if err != nil || lun != 3 || o.CHAP.Secret != "a/b@c" || o.Portal != "h:1" || o.TargetName != "t" {
		t.Errorf("%+v, %d, %v", o, lun, err)
	}
}
