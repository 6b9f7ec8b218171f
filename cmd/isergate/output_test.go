package main

import (
	"strings"
	"testing"

	"github.com/isergate/isergate/gateway"
	"github.com/isergate/isergate/gateway/api"
)

// Who gets in is told as it is, the demo's target included.
func TestStatusTellsAccess(t *testing.T) {
	for _, c := range []struct {
		s    api.Status
		text string
	}{
		{api.Status{}, "Access by ACL entry\n"},
		{api.Status{Open: true}, "Access open to every initiator\n"},
		{api.Status{OpenTargets: []string{gateway.DemoTarget}}, "Access by ACL entry, but open to every initiator: " + gateway.DemoTarget + "\n"},
	} {
		var out strings.Builder
		printStatus(&out, c.s)
		if text := strings.ReplaceAll(out.String(), "\t", " "); !strings.Contains(text, c.text) {
			t.Errorf("missing %q in\n%s", c.text, text)
		}
	}
}

// An inspection that takes long says how far it is.
func TestInspectionTellsProgress(t *testing.T) {
	var read gateway.ReadSoFar
	read.Reads.Store(1)
	read.Bytes.Store(3 << 20)
	if text := inspected(&read); text != "inspect: 1 read from the bucket so far, 3 MiB" {
		t.Error(text)
	}
}
