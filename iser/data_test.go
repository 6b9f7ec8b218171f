package iser_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// heap makes the unit's memory lie where nothing is registered.
func heap(r *rig, _ *iscsi.Options, _ *iser.Options) { r.unit = r.medium }

// scattered is a medium whose landings and loans are many small pieces.
type scattered struct{ *lentMedium }

func (m *scattered) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	l, err := m.lentMedium.Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	x := l.(*lentLanding)
	return &scatteredLanding{x, cut(x.bufs)}, nil
}

type scatteredLanding struct {
	*lentLanding
	cut [][]byte
}

func (l *scatteredLanding) Buffers() [][]byte { return l.cut }

func (m *scattered) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	b, err := m.lentMedium.Read(ctx, e)
	if err != nil {
		return nil, err
	}
	return &scatteredLoan{b, cut(b.Buffers())}, nil
}

type scatteredLoan struct {
	scsi.Borrowed
	cut [][]byte
}

func (l *scatteredLoan) Buffers() [][]byte { return l.cut }

// cut makes pieces of 4096, 512 and 0 bytes, and one on the heap in between would be copied.
func cut(in [][]byte) (out [][]byte) {
	for _, b := range in {
		for i := 0; len(b) > 0; i++ {
			n := min(len(b), []int{512, 4096, 0, 1024}[i%4])
			out = append(out, b[:n])
			b = b[n:]
		}
	}
	return out
}

// mixed is a medium of which every other piece lies outside of registered memory.
type mixed struct{ *lentMedium }

func (m *mixed) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	l, err := m.lentMedium.Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	x := &mixedLanding{lentLanding: l.(*lentLanding)}
	for i, b := range cut(x.bufs) {
		if i%2 == 1 {
			b = make([]byte, len(b))
		}
		x.mix = append(x.mix, b)
	}
	return x, nil
}

type mixedLanding struct {
	*lentLanding
	mix [][]byte
}

func (l *mixedLanding) Buffers() [][]byte { return l.mix }

func (l *mixedLanding) Commit(ctx context.Context, fua bool) error {
	copyAll(l.bufs, l.mix)
	return l.lentLanding.Commit(ctx, fua)
}

func (m *mixed) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	b, err := m.lentMedium.Read(ctx, e)
	if err != nil {
		return nil, err
	}
	pieces := cut(b.Buffers())
	for i := range pieces {
		if i%2 == 1 {
			pieces[i] = bytes.Clone(pieces[i])
		}
	}
	return &scatteredLoan{b, pieces}, nil
}

var media = map[string]func(*rig, *iscsi.Options, *iser.Options){
	"registered": func(*rig, *iscsi.Options, *iser.Options) {},
	"heap":       heap,
	"scattered": func(r *rig, _ *iscsi.Options, _ *iser.Options) {
		r.unit = &scattered{r.unit.(*lentMedium)}
	},
	"mixed": func(r *rig, _ *iscsi.Options, _ *iser.Options) {
		r.unit = &mixed{r.unit.(*lentMedium)}
	},
}

// ISER-33 to 39: writes and reads of any size, to and from memory of any kind, with any share immediate.
func TestTransfers(t *testing.T) {
	for name, change := range media {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, change)
			c := r.ready(dialing{})
			for i, n := range []int{512, 1024, 4096, 4608, 8192, 8704, 16384, 65536, 66048, 131072, 262144, 524288 + 512, 1 << 20} {
				for _, immediate := range []int{0, 512, 1024, 8192} {
					want := pattern(n+immediate, n)
					res := c.finish(c.command(write16(i, n/512), 0, want, min(n, immediate)))
					if res.status != scsi.Good || res.residual != 0 {
						t.Fatalf("write of %d, %d immediate: status %#x, sense %x", n, immediate, res.status, res.sense)
					}
					if n > immediate != res.invalidated {
						t.Errorf("ISER-39: write of %d, %d immediate: invalidated %v", n, immediate, res.invalidated)
					}
					if immediate == 512 && !bytes.Equal(r.medium.Bytes()[i*512:][:n], want) {
						t.Fatalf("write of %d, %d immediate: something else was written", n, immediate)
					}
					got := c.good(read16(i, n/512), n, nil)
					if !bytes.Equal(got.data, want) {
						t.Fatalf("read of %d: something else", n)
					}
					if !got.invalidated {
						t.Errorf("ISER-39: read of %d: not invalidated", n)
					}
				}
			}
		})
	}
}

// ISER-39, R6: who cannot take Send with Invalidate does not get it; nor does anybody if it is turned off.
func TestNoSendWithInvalidate(t *testing.T) {
	for _, off := range []bool{false, true} {
		r := newRig(t, func(_ *rig, _ *iscsi.Options, o *iser.Options) { o.NoSendInvalidate = off })
		d := dialing{private: []byte{0xc0, 0, 0, 0}}
		if off {
			d.private[0] = 0x80
		}
		c := r.ready(d)
		if c.reply.PrivateData[0] != 0xc0 {
			t.Errorf("answered %x", c.reply.PrivateData)
		}
		want := pattern(1, 65536)
		if c.good(write16(0, 128), 0, want).invalidated || c.good(read16(0, 128), 65536, nil).invalidated {
			t.Error("ISER-R6: invalidated")
		}
	}
}

// ISER-R1: the write offset is that of the buffer, or of the first byte that is not sent.
func TestWriteBase(t *testing.T) {
	for _, c := range []struct {
		strict    bool
		key       string
		fromStart bool
	}{
		{false, "", false}, {true, "", true},
		{false, "TaggedBufferForSolicitedDataOnly=No", true}, {true, "TaggedBufferForSolicitedDataOnly=Yes", false},
	} {
		r := newRig(t, func(_ *rig, _ *iscsi.Options, o *iser.Options) { o.StrictWriteBase = c.strict })
		keys := normalKeys
		if c.key != "" {
			keys = append([]string{c.key}, keys...)
		}
		cl := r.ready(dialing{}, keys...)
		for _, immediate := range []int{0, 1024, 8192} {
			want := pattern(immediate, 65536)
			s := cl.command(write16(0, 128), 0, want, immediate, func(_ *pdu.SCSICommand, w *head) {
				if c.fromStart {
					w.writeBase -= uint64(immediate)
				}
			})
			if res := cl.finish(s); res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[:65536], want) {
				t.Errorf("ISER-R1: %+v, %d immediate: status %#x", c, immediate, res.status)
			}
		}
	}
}

// unsolicited sends data as unsolicited Data-Out of at most segment bytes each, from off to end.
func (c *client) unsolicited(itt pdu.TaskTag, data []byte, off, end, segment int, change ...func(i int, d *pdu.DataOut)) {
	c.t.Helper()
	for sn := 0; off < end; sn++ {
		n := min(segment, end-off)
		d := pdu.DataOut{Final: off+n == end, ITT: itt, TTT: pdu.ReservedTag, DataSN: pdu.Serial(sn), Offset: uint32(off), ExpStatSN: c.stat}
		for _, f := range change {
			f(sn, &d)
		}
		var h pdu.Header
		d.Encode(&h)
		c.write(head{}, &h, data[off:][:n])
		off += n
	}
}

func unsolicitedRig(t *testing.T, change ...func(*rig, *iscsi.Options, *iser.Options)) *rig {
	return newRig(t, append(change, func(_ *rig, o *iscsi.Options, i *iser.Options) {
		o.UnsolicitedData, o.QueueDepth, i.Receives = true, 16, 400
	})...)
}

// ISER-34, 61: unsolicited Data-Out, alone, with immediate data, and with the rest fetched.
func TestUnsolicitedData(t *testing.T) {
	r := unsolicitedRig(t)
	c := r.ready(dialing{})
	if v, _ := c.keys.Get("InitialR2T"); v != "No" {
		t.Fatalf("InitialR2T=%s", v)
	}
	for _, n := range []int{8192 + 512, 16384, 65536, 65536 + 512, 262144} {
		for _, immediate := range []int{0, 512, 8192} {
			for _, segment := range []int{8192, 8000} {
				want := pattern(n, n)
				upTo := min(n, 65536)
				if pieces := (upTo-immediate+segment-1)/segment + min(immediate, 1); pieces > 9 {
					continue // more PDUs than FirstBurstLength allows in segments of 8192
				}
				s := c.command(write16(0, n/512), 0, want, immediate, func(p *pdu.SCSICommand, w *head) {
					p.Final = false
					w.writeBase += uint64(upTo - immediate) // as Linux
				})
				c.unsolicited(s.itt, want, immediate, upTo, segment)
				if res := c.finish(s); res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[:n], want) {
					t.Fatalf("write of %d, %d immediate, segments of %d: status %#x, sense %x", n, immediate, segment, uint8(res.status), res.sense)
				}
			}
		}
	}
	// Commands as many as fit, each with all its Data-Out, before any answer.
	var cmds []sent
	for i := range 16 {
		want := pattern(i, 65536)
		s := c.command(write16(i*128, 128), 0, want, 8192, func(p *pdu.SCSICommand, _ *head) { p.Final = false })
		c.unsolicited(s.itt, want, 8192, 65536, 8192)
		cmds = append(cmds, s)
	}
	answers := map[pdu.TaskTag]incoming{}
	for range cmds {
		in := c.read()
		answers[in.h.ITT()] = in
	}
	for i, s := range cmds {
		if res := c.judge(s, answers[s.itt]); res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[i*65536:][:65536], pattern(i, 65536)) {
			t.Errorf("write %d: status %#x", i, res.status)
		}
	}
}

// Unsolicited data that was not negotiated, or is not what was announced, fails its command, and only that.
func TestUnsolicitedFaults(t *testing.T) {
	unexpected, amount := [3]byte{0xb, 0x0c, 0x0c}, [3]byte{0xb, 0x0c, 0x0d}
	t.Run("InitialR2T=Yes", func(t *testing.T) {
		r := newRig(t)
		c := r.ready(dialing{})
		out := pattern(1, 16384)
		s := c.command(write16(0, 32), 0, out, 8192, func(p *pdu.SCSICommand, _ *head) { p.Final = false })
		c.unsolicited(s.itt, out, 8192, 16384, 8192)
		if res := c.finish(s); res.key() != unexpected {
			t.Errorf("%x", res.sense)
		}
		c.ping()
	})
	t.Run("ImmediateData=No", func(t *testing.T) {
		r := newRig(t)
		c := r.ready(dialing{}, "RDMAExtensions=Yes", "ImmediateData=No")
		if res := c.run(write16(0, 16), 0, pattern(1, 8192)); res.key() != unexpected {
			t.Errorf("%x", res.sense)
		}
		want := pattern(2, 8192)
		if res := c.finish(c.command(write16(0, 16), 0, want, 0)); res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[:8192], want) {
			t.Errorf("%x", res.sense)
		}
	})
	r := unsolicitedRig(t)
	c := r.ready(dialing{})
	before := r.medium.Bytes()
	out := pattern(1, 65536)
	for _, f := range []struct {
		name   string
		change func(i int, d *pdu.DataOut)
	}{
		{"DataSN", func(i int, d *pdu.DataOut) { d.DataSN += 1 }},
		{"offset", func(i int, d *pdu.DataOut) { d.Offset += uint32(min(i, 1)) * 4 }},
		{"offset wraps", func(i int, d *pdu.DataOut) { d.Offset = 0xfffffe00 }},
		{"ends early", func(i int, d *pdu.DataOut) { d.Final = i == 3 || d.Final }},
	} {
		s := c.command(write16(0, 128), 0, out, 8192, func(p *pdu.SCSICommand, _ *head) { p.Final = false })
		c.unsolicited(s.itt, out, 8192, 65536, 8192, f.change)
		if res := c.finish(s); res.key() != amount {
			t.Errorf("%s: status %#x, sense %x", f.name, res.status, res.sense)
		}
	}
	// Many small ones: the receives that a command holds are bounded.
	s := c.command(write16(0, 128), 0, out, 0, func(p *pdu.SCSICommand, _ *head) { p.Final = false })
	c.unsolicited(s.itt, out, 0, 65536, 512)
	if res := c.finish(s); res.key() != amount {
		t.Errorf("small pieces: status %#x, sense %x", res.status, res.sense)
	}
	// More immediate data than FirstBurstLength or EDTL.
	s = c.command(write16(0, 1), 0, out[:1024], 1024, func(p *pdu.SCSICommand, _ *head) { p.EDTL = 512 })
	if res := c.finish(s); res.key() != amount {
		t.Errorf("more than EDTL: status %#x, sense %x", res.status, res.sense)
	}
	// Data of a read, or of nobody.
	s = c.command(read16(0, 1), 512, nil, 0, func(p *pdu.SCSICommand, _ *head) {})
	c.finish(s)
	c.unsolicited(0x777, out, 0, 8192, 8192)
	if !bytes.Equal(r.medium.Bytes(), before) {
		t.Error("something was written")
	}
	c.good(write16(0, 128), 0, out)
}

// ISER-R3, R5: what the initiator expects, offers and asks for may differ; nothing passes the end of what it offered.
func TestLiesAboutLength(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	data := pattern(3, 65536)
	c.good(write16(0, 128), 0, data)

	// Less is expected than the CDB reads: clipped, residual overflow.
	for _, n := range []int{512, 5000, 20000} {
		res := c.run(read16(0, 128), n, nil)
		if res.status != scsi.Good || !res.over || int(res.residual) != 65536-n || !bytes.Equal(res.data, data[:n]) {
			t.Errorf("ISER-R5: %d expected: %+v", n, res.residual)
		}
	}
	// More is expected: residual underflow, and the rest is not touched.
	res := c.run(read16(0, 16), 65536, nil)
	if res.status != scsi.Good || !res.under || res.residual != 65536-8192 || !bytes.Equal(res.data[:8192], data[:8192]) || !bytes.Equal(res.data[8192:], make([]byte, 65536-8192)) {
		t.Errorf("ISER-R5: underflow %+v", res.residual)
	}
	// A write of more than is offered: whole blocks of what is.
	res = c.finish(c.command(write16(0, 128), 0, pattern(4, 16384), 8192))
	if res.status != scsi.Good || !res.over || res.residual != 65536-16384 {
		t.Errorf("status %#x, residual %d", res.status, res.residual)
	}
	// A write of less.
	res = c.finish(c.command(write16(0, 16), 0, pattern(5, 65536), 8192))
	if res.status != scsi.Good || !res.under || res.residual != 65536-8192 {
		t.Errorf("status %#x, residual %d", res.status, res.residual)
	}
	// No STag where one is needed: no other memory is touched for it.
	for _, wsv := range []byte{0x10, 0x14} {
		s := c.command(write16(0, 32), 0, pattern(6, 16384), 8192, func(_ *pdu.SCSICommand, w *head) { w.first = wsv })
		if res := c.finish(s); res.status != scsi.CheckCondition || res.key() != [3]byte{0xb, 0x0c, 0x0d} {
			t.Errorf("ISER-R3: write: status %#x, sense %x", res.status, res.sense)
		}
		s = c.command(read16(0, 32), 16384, nil, 0, func(_ *pdu.SCSICommand, w *head) { w.first = 0x18 })
		if res := c.finish(s); res.status != scsi.CheckCondition || res.invalidated && wsv == 0x10 {
			t.Errorf("ISER-R3: read: status %#x, sense %x", res.status, res.sense)
		}
		s = c.command(read16(0, 1), 512, nil, 0, func(_ *pdu.SCSICommand, w *head) { w.first = 0x10 })
		if res := c.finish(s); res.status != scsi.CheckCondition {
			t.Errorf("ISER-R3: short read: status %#x, sense %x", res.status, res.sense)
		}
	}
	// WSV with an STag of 0, all data immediate: as libiscsi and Linux may send it.
	s := c.command(write16(0, 16), 0, pattern(7, 8192), 8192, func(_ *pdu.SCSICommand, w *head) { w.first = 0x18 })
	if res := c.finish(s); res.status != scsi.Good || res.invalidated {
		t.Errorf("status %#x", res.status)
	}
	// Offsets that wrap around.
	s = c.command(read16(0, 32), 16384, nil, 0, func(_ *pdu.SCSICommand, w *head) { w.readBase = ^uint64(0) - 100 })
	if res := c.finish(s); res.status != scsi.CheckCondition {
		t.Errorf("read: status %#x", res.status)
	}
	s = c.command(write16(0, 32), 0, pattern(8, 16384), 8192, func(_ *pdu.SCSICommand, w *head) { w.writeBase = ^uint64(0) - 100 })
	if res := c.finish(s); res.status != scsi.CheckCondition {
		t.Errorf("write: status %#x", res.status)
	}
	c.ping()
}

// An STag that the initiator's adapter does not accept costs its connection, and nothing else.
func TestInvalidSTag(t *testing.T) {
	r := newRig(t)
	other := r.ready(dialing{})
	for i, write := range []bool{false, true, false, true} {
		c := r.dial(dialing{})
		c.isid[5] = byte(10 + i)
		c.login()
		c.run(make([]byte, 6), 0, nil)
		n := []int{4096, 16384, 262144, 262144}[i]
		if write {
			c.command(write16(0, n/512), 0, pattern(1, n), 0, func(_ *pdu.SCSICommand, w *head) { w.writeTag ^= 0x5a5a5a })
		} else {
			c.command(read16(0, n/512), n, nil, 0, func(_ *pdu.SCSICommand, w *head) { w.readTag ^= 0x5a5a5a })
		}
		c.closed()
		other.ping()
	}
	await(t, "only the other session is left", func() bool { return len(r.srv.Sessions()) == 1 })
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 1 })
}

// ISER-19, R7: never more Reads outstanding than the initiator serves, however many writes there are.
func TestReadDepth(t *testing.T) {
	for _, ird := range []int{1, 2, 7} {
		t.Run(fmt.Sprint(ird), func(t *testing.T) {
			r := newRig(t, media["scattered"])
			c := r.ready(dialing{ird: ird, recvs: 100})
			var cmds []sent
			for i := range 24 {
				cmds = append(cmds, c.command(write16(i*128, 128), 0, pattern(i, 65536), 0))
			}
			answers := map[pdu.TaskTag]incoming{}
			for range cmds {
				in := c.read()
				answers[in.h.ITT()] = in
			}
			for i, s := range cmds {
				if res := c.judge(s, answers[s.itt]); res.status != scsi.Good || !bytes.Equal(r.medium.Bytes()[i*65536:][:65536], pattern(i, 65536)) {
					t.Errorf("write %d: status %#x, sense %x", i, res.status, res.sense)
				}
			}
		})
	}
}

// Reads and writes at once, with completions that belong to many.
func TestManyAtOnce(t *testing.T) {
	for name, change := range media {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, change)
			c := r.ready(dialing{recvs: 150})
			type one struct {
				s    sent
				want []byte
			}
			for round := range 6 {
				cmds := map[pdu.TaskTag]one{}
				before := r.medium.Bytes()
				for i := range 40 {
					n := []int{512, 4096, 12288, 65536}[(i+round)%4]
					at := i * 128
					if (i+round)%2 == 0 {
						want := pattern(i+round, n)
						s := c.command(write16(at, n/512), 0, want, min(n, 8192*(i%3)/2))
						cmds[s.itt] = one{s, nil}
					} else {
						s := c.command(read16(at, n/512), n, nil, 0)
						cmds[s.itt] = one{s, before[at*512:][:n]}
					}
				}
				for range 40 {
					in := c.read()
					o := cmds[in.h.ITT()]
					res := c.judge(o.s, in)
					if res.status != scsi.Good {
						t.Fatalf("status %#x, sense %x", res.status, res.sense)
					}
					if o.want != nil && !bytes.Equal(res.data, o.want) {
						t.Fatal("read something else")
					}
				}
			}
		})
	}
}
