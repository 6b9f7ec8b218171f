package cache

import (
	"testing"
	"unsafe"
)

// inRegions reports whether b lies within one of the regions.
func inRegions(regions [][]byte, b []byte) bool {
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for _, r := range regions {
		base := uintptr(unsafe.Pointer(unsafe.SliceData(r)))
		if at >= base && at-base < uintptr(len(r)) && len(b) <= len(r)-int(at-base) {
			return true
		}
	}
	return false
}

// TestRegions: what is lent lies in registered memory, whatever the bytes come from.
func TestRegions(t *testing.T) {
	w := newWorld()
	e := w.open(t)
	defer closeEngine(t, e)
	v := create(t, e, w.config("a", 1))
	regions := e.Regions()
	for _, r := range regions {
		if uintptr(unsafe.Pointer(unsafe.SliceData(r)))%blockBytes != 0 || len(r) == 0 || len(r)%blockBytes != 0 {
			t.Fatalf("a region of %d bytes at %p", len(r), unsafe.SliceData(r))
		}
	}
	read := func(what string, off, n int64) {
		t.Helper()
		b, err := v.Read(t.Context(), off, n)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Release()
		for _, p := range b.Buffers() {
			if !inRegions(regions, p) {
				t.Fatalf("%s: %d bytes at %p are in no region", what, len(p), unsafe.SliceData(p))
			}
		}
	}
	write := func(off, n int64) {
		t.Helper()
		l, err := v.Reserve(t.Context(), off, n)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range l.Buffers() {
			if !inRegions(regions, p) {
				t.Fatalf("a landing at %p is in no region", unsafe.SliceData(p))
			}
			for i := range p {
				p[i] = byte(off>>9) + 1
			}
		}
		if err := l.Commit(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
	read("unwritten", 0, 1<<20)
	write(0, 512)
	write(64<<10, 128<<10)
	write(192<<10, 128<<10)
	if err := v.WriteSame(t.Context(), Range{1 << 20, 1 << 20}, make([]byte, 512), false); err != nil {
		t.Fatal(err)
	}
	read("journal", 0, 1<<20)
	read("repeated", 1<<20, 64<<10)
	if err := v.Wait(t.Context(), Object); err != nil {
		t.Fatal(err)
	}
	read("small extent of an object", 0, 512)
	read("frames of an object", 64<<10, 256<<10)
	read("repeated block of an object", 1<<20, 64<<10)
	read("all kinds", 512<<10, 1<<20)
	for _, x := range regions[len(regions)-1] {
		if x != 0 {
			t.Fatal("the zeros were written to")
		}
	}
}
