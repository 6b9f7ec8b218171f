package journal

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"github.com/isergate/isergate/cache/vfs"
)

// FuzzDecodeBatch: no bytes make the decoder panic, and what it accepts encodes to the same bytes.
func FuzzDecodeBatch(f *testing.F) {
	mem := vfs.NewMem()
	smallLog(f, mem, nil, nil)
	for _, b := range contents(f, mem) {
		for at := 0; at < len(b); at += BlockSize {
			if _, err := peekBatch(b[at:], 1); err == nil {
				f.Add(b[at:at+BlockSize], false)
			}
		}
	}
	f.Fuzz(func(t *testing.T, region []byte, fix bool) {
		if fix && len(region) >= BlockSize && len(region)%BlockSize == 0 {
			region = bytes.Clone(region)
			sealRegion(region) // get past the checksum
		}
		h, err := decodeBatch(region)
		if err != nil {
			if err != errNoBatch && err != errBadBatch && !errors.Is(err, ErrVersion) {
				t.Fatalf("unexpected error %v", err)
			}
			return
		}
		again := make([]byte, len(region))
		h.encodeFixed(again)
		for i := range h.records {
			r, block := h.record(region, i)
			encodeRecord(again, i, &r, block)
		}
		copy(h.sumTable(again), h.sumTable(region))
		sealRegion(again)
		back, err := decodeBatch(again)
		if err != nil {
			t.Fatalf("encoded again: %v", err)
		}
		back.crc = h.crc // reserved bytes may differ
		if back != h {
			t.Fatalf("got %+v, want %+v", back, h)
		}
	})
}

// FuzzReplay: whatever a segment file holds, Open returns records or an error, and so does reading what was replayed.
func FuzzReplay(f *testing.F) {
	mem := vfs.NewMem()
	smallLog(f, mem, nil, nil)
	good := contents(f, mem)
	f.Add(uint32(0), []byte{1}, false)
	f.Add(uint32(BlockSize+12), []byte{0xff, 0xff, 0xff, 0xff}, true)
	f.Add(uint32(BlockSize+68), []byte{0xff, 0xff, 0xff, 0x7f}, true)
	f.Add(uint32(40), []byte{0xff}, true)
	f.Fuzz(func(t *testing.T, at uint32, change []byte, fix bool) {
		files := map[string][]byte{}
		for slot := range 3 {
			name := filepath.Join(testDir, "00000"+string(rune('0'+slot)))
			b := bytes.Clone(good[name])
			if int(at/(64<<10))%3 == slot {
				copy(b[at%(64<<10):], change)
				if fix { // make all headers intact again
					le.PutUint32(b[segmentCRCAt:], castagnoliOf(b[:segmentCRCAt]))
					for block := 1; block < len(b)/BlockSize; block++ {
						rest := b[block*BlockSize:]
						if n, err := peekBatch(rest, uint32(len(rest)/BlockSize)); err == nil {
							sealRegion(rest[:n*BlockSize])
						}
					}
				}
			}
			files[name] = b
		}
		opts := testOptions(restore(t, files), newRecorder(0))
		opts.JournalBytes = 3 * opts.SegmentBytes
		var got []replayed
		j, err := Open(opts, collect(&got))
		if err != nil {
			return
		}
		for _, r := range got {
			_ = checkPayload(j, r)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
