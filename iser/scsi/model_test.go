package scsi_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests; 0 picks one")

// command is a random command and what it does to an array of bytes.
type command struct {
	cdb, out []byte
	in       int
	apply    func(disk []byte) (ending string, in []byte) // nil: no effect on data, ending not predicted
}

// randomCommand makes a command for a medium of blocks, mostly valid.
func randomCommand(rng *rand.Rand, blocks, size int) command {
	lba := rng.IntN(blocks + 4)
	n := rng.IntN(12)
	at := func(disk []byte) []byte { return disk[lba*size : (lba+n)*size] }
	data := func(n int) []byte {
		b := make([]byte, n)
		if rng.IntN(4) > 0 {
			v := byte(rng.IntN(256))
			for i := range b {
				b[i] = v + byte(i/size)
			}
		}
		return b
	}
	ranged := func(f func(disk []byte) (string, []byte)) func([]byte) (string, []byte) {
		return func(disk []byte) (string, []byte) {
			if lba+n > blocks {
				return "05/21/00", nil
			}
			return f(disk)
		}
	}
	pick := func(ops ...byte) byte { return ops[rng.IntN(len(ops))] }
	fua := byte(rng.IntN(2) * 8)
	switch rng.IntN(12) {
	case 0, 1:
		in := n*size + rng.IntN(3)*size/2 - size/2
		in = max(in, 0)
		return command{cdb: rw(pick(0x28, 0xA8, 0x88), fua, uint64(lba), uint32(n)), in: in, apply: ranged(func(disk []byte) (string, []byte) {
			return "good", slices.Clone(at(disk))[:min(in, n*size)]
		})}
	case 2, 3:
		out := data(n*size + rng.IntN(3)*size/2)
		return command{cdb: rw(pick(0x2A, 0xAA, 0x8A), fua, uint64(lba), uint32(n)), out: out, apply: ranged(func(disk []byte) (string, []byte) {
			copy(at(disk), out)
			return "good", nil
		})}
	case 4:
		sent := rng.IntN(n+1) * size
		if rng.IntN(2) == 0 {
			sent = rng.IntN(n*size + 1)
		}
		out := data(sent)
		return command{cdb: rw(pick(0x2A, 0xAA, 0x8A), 0, uint64(lba), uint32(n)), out: out, apply: ranged(func(disk []byte) (string, []byte) {
			if sent%size != 0 {
				return "05/0E/03", nil
			}
			copy(at(disk), out)
			return "good", nil
		})}
	case 5:
		sent := rng.IntN(n+1) * size
		out := data(sent)
		return command{cdb: rw(pick(0x2E, 0xAE, 0x8E), pick(0, 2), uint64(lba), uint32(n)), out: out, apply: ranged(func(disk []byte) (string, []byte) {
			copy(at(disk), out)
			return "good", nil
		})}
	case 6:
		out := data(n * size)
		return command{cdb: rw(pick(0x2F, 0xAF, 0x8F), 2, uint64(lba), uint32(n)), out: out, apply: ranged(func(disk []byte) (string, []byte) {
			if !bytes.Equal(at(disk), out) {
				return "0E/1D/00", nil
			}
			return "good", nil
		})}
	case 7:
		n = 1 + rng.IntN(4)
		cmp, wr := data(n*size), data(n*size)
		match := rng.IntN(2) == 0
		c := rw(0x89, fua, uint64(lba), 0)
		c[13] = byte(n)
		out := append(slices.Clone(cmp), wr...)
		return command{cdb: c, out: out, apply: ranged(func(disk []byte) (string, []byte) {
			if match {
				copy(out, at(disk)) // the test's Data holds the same array
			}
			if !bytes.Equal(at(disk), out[:n*size]) {
				return "0E/1D/00", nil
			}
			copy(at(disk), wr)
			return "good", nil
		})}
	case 8:
		out := data(n * size)
		return command{cdb: rw(0x8B, fua, uint64(lba), uint32(n)), out: out, apply: ranged(func(disk []byte) (string, []byte) {
			for i, b := range out {
				at(disk)[i] |= b
			}
			return "good", nil
		})}
	case 9:
		out := data(size)
		flags := pick(0, 8)
		return command{cdb: rw(pick(0x41, 0x93), flags, uint64(lba), uint32(n)), out: out, apply: func(disk []byte) (string, []byte) {
			m := n
			if n == 0 {
				m = blocks - lba
			}
			if m <= 0 || lba+m > blocks {
				return "05/21/00", nil
			}
			block := out
			if flags == 8 {
				block = make([]byte, size)
			}
			for i := range m {
				copy(disk[(lba+i)*size:], block)
			}
			return "good", nil
		}}
	case 10:
		lba2, n2 := rng.IntN(blocks+4), rng.IntN(5)
		list := unmapList(unmapRange{uint64(lba), uint32(n)}, unmapRange{uint64(lba2), uint32(n2)})
		return command{cdb: unmapCDB(len(list)), out: list, apply: func(disk []byte) (string, []byte) {
			if n > 0 && lba+n > blocks || n2 > 0 && lba2+n2 > blocks {
				return "05/21/00", nil
			}
			if n > 0 {
				clear(at(disk))
			}
			if n2 > 0 {
				clear(disk[lba2*size : (lba2+n2)*size])
			}
			return "good", nil
		}}
	default:
		return command{cdb: rw(pick(0x35, 0x91, 0x34, 0x90), 0, uint64(lba), uint32(n)), apply: ranged(func([]byte) (string, []byte) { return "good", nil })}
	}
}

// Random commands do to a medium exactly what they do to an array of bytes.
func TestAgainstByteArray(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, size := range []int{512, 4096} {
		const blocks = 64
		disk := make([]byte, blocks*size)
		m := scsitest.NewMedium(blocks, uint32(size))
		r := newRig(t, m)
		for i := range 4000 {
			c := randomCommand(rng, blocks, size)
			want, in := c.apply(disk)
			d := scsitest.NewData(c.out, c.in)
			res := r.u.Execute(context.Background(), r.a, &scsi.Command{CDB: c.cdb, Data: d})
			if got := ending(res); got != want {
				t.Fatalf("step %d: CDB % x: %s, want %s", i, c.cdb, got, want)
			}
			if !bytes.Equal(d.In[:d.Got], in) {
				t.Fatalf("step %d: CDB % x: data-in differs", i, c.cdb)
			}
		}
		if !bytes.Equal(m.Bytes(), disk) {
			t.Fatal("the medium differs from the array")
		}
	}
}

// execute runs anything, and checks what holds for any command.
func executeAnything(t *testing.T, r *rig, cdb, out []byte, in int, attr scsi.TaskAttribute) scsi.Result {
	d := scsitest.NewData(out, in)
	res := r.u.Execute(context.Background(), r.a, &scsi.Command{CDB: cdb, Attribute: attr, Data: d})
	if (res.Status == scsi.CheckCondition) != (len(res.Sense) > 0) || len(res.Sense) > 126 {
		t.Fatalf("CDB % x: status %v, sense % x", cdb, res.Status, res.Sense)
	}
	if res.DataIn < 0 || res.DataOut < 0 || res.Status == scsi.Good && d.Sent < min(res.DataIn, int64(in)) {
		t.Fatalf("CDB % x: %+v, but %d bytes sent", cdb, res, d.Sent)
	}
	if n := r.m.Open(); n != 0 {
		t.Fatalf("CDB % x: %d landings or loans were not ended", cdb, n)
	}
	return res
}

// Every command with every truncated CDB and truncated data ends in good order.
func TestTruncations(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	r := newRig(t, scsitest.NewMedium(64, 512), func(o *scsi.Options) { o.Removable = true })
	all := r.good(cdb("A3 0C 00 00 0000 00008000 0000"), nil, 1<<15)
	for d := all[4:]; len(d) >= 8; d = d[8:] {
		base := make([]byte, d[7])
		base[0], base[1] = d[0], byte(binary.BigEndian.Uint16(d[2:]))
		for n := 1; n < len(base); n++ {
			if res := executeAnything(t, r, base[:n], nil, 64, 0); res.Status != scsi.CheckCondition {
				t.Errorf("CDB % x: %s", base[:n], ending(res))
			}
		}
		for length := range 70 {
			c := slices.Clone(base)
			for _, at := range []int{4, 8, 9, 13} {
				if at < len(c)-1 {
					c[at] = byte(length)
				}
			}
			for sent := range length + 2 {
				out := make([]byte, sent)
				for i := range out {
					out[i] = byte(rng.Uint32() & rng.Uint32()) // more zero bits than one bits
				}
				executeAnything(t, r, c, out, sent, 0)
			}
		}
	}
}

func FuzzExecute(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 60 {
		c := randomCommand(rng, 64, 512)
		f.Add(c.cdb, c.out, uint16(c.in), byte(rng.IntN(6)))
	}
	f.Add(cdb("1A 08 3F FF FF 00"), []byte{}, uint16(255), byte(0))
	f.Add(cdb("A3 0C 80 00 0000 00000400 0000"), []byte{}, uint16(1024), byte(0))
	f.Add(cdb("12 01 83 00FF 00"), []byte{}, uint16(255), byte(1))
	f.Add(cdb("4D 00 76 00 00 0000 0400 00"), []byte{}, uint16(255), byte(2))
	r := newRig(f, scsitest.NewMedium(64, 512), func(o *scsi.Options) { o.Removable = true })
	f.Fuzz(func(t *testing.T, cdb, out []byte, in uint16, attr byte) {
		executeAnything(t, r, cdb, out, int(in), scsi.TaskAttribute(attr))
	})
}

func FuzzUnmapList(f *testing.F) {
	f.Add(unmapList())
	f.Add(unmapList(unmapRange{0, 1}, unmapRange{5, 0}, unmapRange{1 << 63, 7}))
	f.Fuzz(func(t *testing.T, list []byte) {
		if len(list) > 0xFFFF {
			return
		}
		m := scsitest.NewMedium(64, 512)
		r := newRig(t, m)
		r.good(rw(0x2A, 0, 0, 64), fill(64*512, 1), 0)
		res := executeAnything(t, r, unmapCDB(len(list)), list, 0, 0)
		if res.Status != scsi.Good && !bytes.Equal(m.Bytes(), fill(64*512, 1)) {
			t.Fatalf("%s, but blocks changed", ending(res))
		}
	})
}

func FuzzModeSelect(f *testing.F) {
	f.Add(append(cdb("00000000"), cdb("0A0A 06 10 08 40 00000000 0000")...), false)
	f.Add(append(cdb("0000000000000008 00000040 00000200"), cdb("0812 04")...), true)
	f.Fuzz(func(t *testing.T, list []byte, ten bool) {
		m := scsitest.NewMedium(64, 512)
		m.SetContract(scsi.Contract{Ack: scsi.LevelLocal, Flush: scsi.LevelObject})
		r := newRig(t, m)
		c := []byte{0x15, 0x10, 0, 0, byte(len(list)), 0}
		if ten {
			c = []byte{0x55, 0x10, 0, 0, 0, 0, 0, byte(len(list) >> 8), byte(len(list)), 0}
		} else if len(list) > 255 {
			return
		}
		if len(list) > 0xFFFF {
			return
		}
		before := r.good(cdb("1A 08 3F 00 FF 00"), nil, 255)
		res := executeAnything(t, r, c, list, 0, 0)
		after := r.good(cdb("1A 08 3F 00 FF 00"), nil, 255)
		if res.Status != scsi.Good && !bytes.Equal(before, after) {
			t.Fatalf("%s, but mode pages changed", ending(res))
		}
	})
}
