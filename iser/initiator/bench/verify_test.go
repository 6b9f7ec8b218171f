package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

func TestVerifyFindsNothing(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, block := range []uint32{512, 4096} {
		m := newMemory(8<<20/uint64(block), block)
		before := bytes.Clone(m.data)
		res, err := Run(t.Context(), Options{Pattern: Verify, BlockSize: 16 << 10, Depth: 4, Sessions: 2, Duration: 100 * time.Millisecond,
			Offset: 1 << 20, Size: 2 << 20, Seed: seed, Open: m.open})
		if err != nil {
			t.Fatal(err)
		}
		v := res.Verification
		if v == nil || v.Violations != 0 || !v.Complete || v.BlocksFilled != 512 || v.Writes == 0 || v.Reads == 0 || v.Checks == 0 || v.BlocksChecked != 512*v.Checks ||
			res.Errors != 0 || res.Operations != v.Writes+v.Reads || res.Histogram.Count() != res.Operations || res.Size != 2<<20 {
			t.Errorf("%+v, %+v", res, v)
		}
		if !bytes.Equal(before[:1<<20], m.data[:1<<20]) || !bytes.Equal(before[3<<20:], m.data[3<<20:]) {
			t.Error("verify wrote outside its range")
		}
		if text, err := json.Marshal(res); err != nil || !bytes.Contains(text, []byte(`"blocks_checked"`)) {
			t.Errorf("%s, %v", text, err)
		}
	}
}

func TestVerifyFindsFaults(t *testing.T) {
	lose := func(n int, lba uint64, p []byte) (uint64, []byte) {
		if n%50 == 0 {
			return 0, nil
		}
		return lba, p
	}
	flip := func(n int, lba uint64, p []byte) (uint64, []byte) {
		if n%50 == 0 {
			p = bytes.Clone(p)
			p[len(p)/2] ^= 4
		}
		return lba, p
	}
	misplace := func(n int, lba uint64, p []byte) (uint64, []byte) {
		if n%50 == 0 {
			lba ^= 8
		}
		return lba, p
	}
	for name, c := range map[string]struct {
		spoil func(int, uint64, []byte) (uint64, []byte)
		word  string
	}{"lost": {lose, "lost"}, "corrupt": {flip, "corrupt"}, "misplaced": {misplace, "misplaced"}} {
		t.Run(name, func(t *testing.T) {
			m := newMemory(1<<20/512, 512)
			m.spoil = c.spoil
			res, err := Run(t.Context(), Options{Pattern: Verify, Depth: 4, Duration: 200 * time.Millisecond, Seed: 1, Open: m.open})
			if err != nil {
				t.Fatal(err)
			}
			v := res.Verification
			if v.Violations == 0 || !strings.Contains(strings.Join(v.Details, "\n"), c.word) && name != "misplaced" {
				t.Errorf("%+v", v)
			}
		})
	}
}

func TestVerifyStopsAtAnError(t *testing.T) {
	for _, n := range []int{2, 100} { // in the fill, and after it
		m := newMemory(1<<20/512, 512)
		m.fail = func(k int) error {
			if k >= n {
				return initiator.ErrConnection
			}
			return nil
		}
		res, err := Run(t.Context(), Options{Pattern: Verify, Depth: 4, Duration: time.Minute, Open: m.open})
		if err != nil || res.Errors != 1 || !strings.Contains(res.FirstError, "connection") || res.Verification.Complete || res.Verification.Violations != 0 {
			t.Errorf("%+v, %+v, %v", res, res.Verification, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	m := newMemory(1<<20/512, 512)
	m.fail = func(k int) error {
		if k >= 100 {
			cancel()
			return ctx.Err()
		}
		return nil
	}
	res, err := Run(ctx, Options{Pattern: Verify, Duration: time.Minute, Open: m.open})
	if err != nil || res.Errors != 0 || res.Verification.Complete {
		t.Errorf("%+v, %+v, %v", res, res.Verification, err)
	}
}

func TestVerifyOptions(t *testing.T) {
	m := newMemory(1<<20/512, 512)
	for _, o := range []Options{{BlockSize: 512}, {BlockSize: 8 << 20}, {BlockSize: 4096, Count: 1}, {BlockSize: 4096, FlushEvery: 1}, {BlockSize: 4096, Offset: 512}, {BlockSize: 4096, Size: 2 << 20}} {
		o.Pattern, o.Open, o.Duration = Verify, m.open, time.Millisecond
		if _, err := Run(t.Context(), o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// A unit that holds something is written only by force.
func TestContent(t *testing.T) {
	const size = 2 << 20
	put := func(offset int, magic string) []byte {
		b := make([]byte, size)
		copy(b[offset:], magic)
		return b
	}
	mbr := make([]byte, size)
	copy(mbr[446:], []byte{0x80, 1, 1, 0, 0x83, 1, 1, 0, 1, 0, 0, 0, 1})
	mbr[510], mbr[511] = 0x55, 0xaa
	boot := make([]byte, size)
	boot[510], boot[511] = 0x55, 0xaa
	odd := slices.Clone(mbr)
	odd[446] = 0x12
	cases := []struct {
		data []byte
		want string
	}{
		{make([]byte, size), ""}, {boot, ""}, {odd, ""},
		{mbr, "an MBR partition table"}, {put(zfsLabel+5*zfsStep, "\x0c\xb1\xba\x00\x00\x00\x00\x00"), "a ZFS pool"},
		{put(zfsLabel, "\x00\x00\x00\x00\x00\xba\xb1\x0c"), "a ZFS pool"},
	}
	for _, s := range signatures {
		at := int(s.offset)
		if at < 0 {
			at += size
		}
		cases = append(cases, struct {
			data []byte
			want string
		}{put(at, s.magic), s.name})
	}
	for _, c := range cases {
		for _, block := range []uint32{512, 4096} {
			m := newMemory(size/uint64(block), block)
			m.data = bytes.Clone(c.data)
			for _, p := range []Pattern{Read, RandWrite, Verify} {
				o := Options{Pattern: p, Duration: time.Millisecond, Open: m.open}
				_, err := Run(t.Context(), o)
				switch {
				case c.want == "" || !p.Writes():
					if err != nil {
						t.Errorf("%s of %q: %v", p, c.want, err)
					}
					m.data = bytes.Clone(c.data)
				case !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), c.want) || m.writes > 0 && !bytes.Equal(m.data, c.data):
					t.Errorf("%s of %q, blocks of %d: %v", p, c.want, block, err)
				}
			}
			if c.want != "" {
				if _, err := Run(t.Context(), Options{Pattern: Write, Count: 1, Force: true, Open: m.open}); err != nil {
					t.Errorf("by force: %v", err)
				}
			}
		}
	}
	for _, size := range []int{512, 4096, 4608, 100 << 10} { // small units
		m := newMemory(uint64(size)/512, 512)
		if what, err := content(t.Context(), &Opened{Unit: m, BlockSize: 512, Blocks: uint64(size) / 512}); what != "" || err != nil {
			t.Errorf("a unit of %d zeros: %q, %v", size, what, err)
		}
	}
}
