package journal

import (
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

func TestRoundTrip(t *testing.T) {
	mem := vfs.NewMem()
	sink := newRecorder(0)
	j := mustOpen(t, testOptions(mem, sink), nil)
	entries := []*Entry{
		newEntry(KindFence, 0, 0),
		newEntry(KindData, 1, 4096),
		newEntry(KindData, 2, 512),
		newEntry(KindData, 3, 8192),
		newEntry(KindData, 4, 4096+512),
		newEntry(KindZero, 5, 0),
		newEntry(KindSame, 6, 512),
		newEntry(KindNote, 7, 100),
		newEntry(KindNote, 8, 0),
		newEntry(KindNote, 9, MaxNoteBytes),
	}
	want := make([]Record, len(entries))
	for i, e := range entries {
		if err := put(j, sink, e); err != nil {
			t.Fatal(err)
		}
		sink.wait()
		want[i] = e.Record
	}
	incarnation := j.Incarnation()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	sink.check(t)
	for range 3 {
		var got []replayed
		j = mustOpen(t, testOptions(mem, sink), collect(&got))
		if len(got) != len(want) {
			t.Fatalf("replayed %d records, want %d", len(got), len(want))
		}
		for i, r := range got {
			w := want[i]
			if r.rec.Volume != w.Volume || r.rec.LSN != w.LSN || r.rec.Kind != w.Kind || r.rec.Offset != w.Offset ||
				r.rec.Length != w.Length || r.rec.PayloadBytes != w.PayloadBytes || r.rec.Time != w.Time || r.loc != entries[i].Loc {
				t.Errorf("record %d: got %+v at %v, want %+v at %v", i, r.rec, r.loc, w, entries[i].Loc)
			}
			if err := checkPayload(j, r); err != nil {
				t.Error(err)
			}
		}
		if j.Incarnation() != incarnation {
			t.Error("incarnation changed")
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
