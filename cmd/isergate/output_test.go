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

// What the deletion of a fenced volume loses is named.
func TestDeletionTellsLoss(t *testing.T) {
	for _, c := range []struct {
		v     api.Volume
		purge bool
		text  string
	}{
		{api.Volume{State: "available"}, false, "Volume v deleted; the bucket keeps it."},
		{api.Volume{State: "available", DirtyBytes: 4096}, false, "Volume v deleted; the bucket keeps it."}, // they were brought there first
		{api.Volume{State: "fenced"}, false, "Volume v deleted; the bucket keeps it."},
		{api.Volume{State: "fenced", DirtyBytes: 4096}, false, "Volume v deleted here; the bucket keeps it as its newer owner has it. 4 KiB that only this node's journal held are lost."},
		{api.Volume{State: "fenced", DirtyBytes: 4096}, true, "Volume v deleted, its objects too."},
	} {
		if text := deleted("v", c.v, c.purge); text != c.text {
			t.Errorf("%q, want %q", text, c.text)
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
