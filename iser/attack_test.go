package iser_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// nop is a valid message.
func (c *client) nop() []byte {
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	return message(head{}, &h, nil, nil)
}

// ISER-70 to 74, R4: messages that are no PDU, or none that may be there, end the connection and its session; the others go on, and nothing is
// lost. The receives are as long as the largest PDU that may come.
func TestAttacks(t *testing.T) {
	r := newRig(t)
	other := r.ready(dialing{})
	edit := func(at int, b ...byte) func(c *client) []byte {
		return func(c *client) []byte {
			m := c.nop()
			copy(m[at:], b)
			return m
		}
	}
	command := func(change func(p *pdu.SCSICommand, m []byte) []byte) func(c *client) []byte {
		return func(c *client) []byte {
			p := pdu.SCSICommand{Final: true, Attr: pdu.AttrSimple, ITT: c.tag(), CmdSN: c.sn(), ExpStatSN: c.stat, Write: true, EDTL: 512}
			copy(p.CDB[:], write16(0, 1))
			var h pdu.Header
			p.Encode(&h)
			return change(&p, message(head{}, &h, nil, make([]byte, 512)))
		}
	}
	dataOut := func(ttt pdu.TaskTag, w head) func(c *client) []byte {
		return func(c *client) []byte {
			d := pdu.DataOut{Final: true, ITT: 0x55, TTT: ttt, ExpStatSN: c.stat}
			var h pdu.Header
			d.Encode(&h)
			return message(w, &h, nil, make([]byte, 512))
		}
	}
	for _, a := range []struct {
		name string
		m    func(c *client) []byte
	}{
		{"empty", func(*client) []byte { return nil }},
		{"27 bytes", func(*client) []byte { return append([]byte{0x10}, make([]byte, 26)...) }},
		{"header only", func(*client) []byte { return append([]byte{0x10}, make([]byte, 27)...) }},
		{"75 bytes", func(c *client) []byte { return c.nop()[:75] }},
		{"opcode 0", edit(0, 0x00)}, {"opcode 4", edit(0, 0x40)}, {"opcode 15", edit(0, 0xff)},
		{"HelloReply", edit(0, 0x30)},
		{"STag in a NOP-Out", edit(0, 0x14)}, {"both STags in a NOP-Out", edit(0, 0x1c)},
		{"data that is not there", edit(28+5, 0, 0, 4)},
		{"AHS that is not there", edit(28+4, 1)},
		{"data longer than a segment", edit(28+5, 0, 0x20, 1)},
		{"data of 16 MiB", edit(28+5, 0xff, 0xff, 0xff)},
		{"bytes behind the PDU", func(c *client) []byte { return append(c.nop(), 0, 0, 0, 0) }},
		{"bytes behind the padding", command(func(_ *pdu.SCSICommand, m []byte) []byte { return append(m, 0) })},
		{"a short command", command(func(_ *pdu.SCSICommand, m []byte) []byte { return m[:len(m)-4] })},
		{"longer than the receive", func(c *client) []byte { return append(c.nop(), make([]byte, 9000)...) }},
		{"an AHS of an unknown type", func(c *client) []byte {
			p := pdu.SCSICommand{Final: true, ITT: c.tag(), CmdSN: c.sn(), ExpStatSN: c.stat}
			var h pdu.Header
			p.Encode(&h)
			return message(head{}, &h, []byte{0, 1, 99, 0}, nil)
		}},
		{"Data-In from an initiator", edit(28, 0x25)}, {"R2T from an initiator", edit(28, 0x31)}, {"SCSI Response from an initiator", edit(28, 0x21)},
		{"solicited Data-Out", dataOut(7, head{})}, {"Data-Out with an STag", dataOut(pdu.ReservedTag, head{first: 0x18})},
		{"Hello too late", func(*client) []byte { return append([]byte{0x20, 0xaa, 0, 8}, make([]byte, 24)...) }},
		{"long Hello", func(*client) []byte { return append([]byte{0x20, 0xaa, 0, 8}, make([]byte, 28)...) }},
	} {
		t.Run(a.name, func(t *testing.T) {
			c := r.dial(dialing{})
			c.t = t
			c.isid[5] = 0x77
			c.login()
			c.run(make([]byte, 6), 0, nil)
			c.raw(a.m(c))
			c.closed()
			other.ping()
			await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 1 })
		})
	}
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 1 })
}

// The same before login.
func TestAttacksBeforeLogin(t *testing.T) {
	r := newRig(t)
	other := r.ready(dialing{})
	for i, m := range [][]byte{
		nil, make([]byte, 28), make([]byte, 76), append([]byte{0x10}, make([]byte, 27)...), append([]byte{0x20, 0xaa, 0, 8}, make([]byte, 24)...),
		append([]byte{0x10}, make([]byte, 75)...), append([]byte{0x10}, bytes.Repeat([]byte{0xff}, 8000)...), append(append([]byte{0x10}, make([]byte, 27)...), append([]byte{0x43}, bytes.Repeat([]byte{0xff}, 47)...)...),
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			c := r.dial(dialing{})
			c.t = t
			c.raw(m)
			c.closed()
			other.ping()
		})
	}
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 1 })
}

// Wrong but harmless: SNACK, a Login Request in full feature phase (ISER-16, 42), reserved bits (ISER-30).
func TestRejects(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	for _, op := range []byte{0x10, 0x43} {
		m := c.nop()
		m[28] = op
		c.raw(m)
		in := c.read()
		var rej pdu.Reject
		if err := rej.Decode(&in.h); err != nil || rej.Reason != pdu.RejectProtocolError || !bytes.Equal(in.data, m[28:76]) {
			t.Errorf("ISER-16, 42: %v: %v", in.h.Opcode(), rej.Reason)
		}
	}
	m := c.nop()
	m[0] |= 0x03
	for i := 1; i < 28; i++ {
		m[i] = 0xee
	}
	c.raw(m)
	if in := c.read(); in.h.Opcode() != pdu.OpNopIn {
		t.Errorf("ISER-30: %v", in.h.Opcode())
	}
	// Ping data comes back as far as any initiator takes it (ISER-43, R2).
	p := pdu.NopOut{Immediate: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.cmdSN, ExpStatSN: c.stat}
	var h pdu.Header
	p.Encode(&h)
	data := pattern(1, 1000)
	c.write(head{}, &h, data)
	if in := c.read(); !bytes.Equal(in.data, data[:128]) {
		t.Errorf("ISER-R2: %d bytes come back", len(in.data))
	}
	// Text of any length comes in pieces.
	tr := pdu.TextRequest{Final: true, ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.sn(), ExpStatSN: c.stat}
	tr.Encode(&h)
	c.write(head{}, &h, []byte("SendTargets=All\x00"))
	if in := c.read(); in.h.Opcode() != pdu.OpTextResponse || len(in.data) > 128 {
		t.Errorf("ISER-R2: %v of %d bytes", in.h.Opcode(), len(in.data))
	}
}

// ISER-R11: the other kinds of Send are taken as Sends; to invalidate what is not ours ends the connection.
func TestKindsOfSend(t *testing.T) {
	r := newRig(t)
	c := r.ready(dialing{})
	n := copy(c.out[0], c.nop())
	post := func(wr rdma.SendWR) {
		wr.SGE = []rdma.SGE{c.arena.SGE(c.out[0][:n])}
		if _, err := c.qp.PostSend([]rdma.SendWR{wr}); err != nil {
			t.Fatal(err)
		}
	}
	post(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Solicited})
	if in := c.read(); in.h.Opcode() != pdu.OpNopIn {
		t.Errorf("%v", in.h.Opcode())
	}
	post(rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: 0x1234})
	c.closed()
}

// ISER-20 to 24, 71, 73: Hello where it is required, where it is not, and wrong ones.
func TestHelloOnTheWire(t *testing.T) {
	hello := func(first, versions byte, ird uint16) []byte {
		m := append([]byte{first, versions}, make([]byte, 26)...)
		binary.BigEndian.PutUint16(m[2:], ird)
		return m
	}
	for _, c := range []struct {
		name     string
		required bool
		m        []byte
		want     []byte // first 4 bytes of the reply; nil: none
		goesOn   bool
	}{
		{"not required", false, hello(0x20, 0xaa, 5), []byte{0x30, 0xaa, 0, 5}, true},
		{"required", true, hello(0x20, 0xa1, 500), []byte{0x30, 0xaa, 0, 16}, true},
		{"old version", true, hello(0x20, 0x11, 2), []byte{0x30, 0xa1, 0, 2}, true},
		{"reserved bits", true, hello(0x2f, 0xaa, 2), []byte{0x30, 0xaa, 0, 2}, true},
		{"no common version", true, hello(0x20, 0xff, 2), []byte{0x31, 0xaa, 0, 2}, false},
		{"IRD of 0", false, hello(0x20, 0xaa, 0), []byte{0x30, 0xaa, 0, 0}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			keys := normalKeys
			if c.required {
				keys = append([]string{"iSERHelloRequired=Yes"}, keys...)
			}
			cl := r.dial(dialing{}).login(keys...)
			if err := cl.raw(c.m); err != nil {
				t.Fatal(err)
			}
			b, _, err := cl.message()
			if err != nil {
				t.Fatal(err)
			}
			if len(b) != 28 || !bytes.Equal(b[:4], c.want) || !bytes.Equal(b[4:], make([]byte, 24)) {
				t.Errorf("ISER-22, 23: %x, want %x", b, c.want)
			}
			if !c.goesOn {
				cl.closed()
				return
			}
			cl.run(make([]byte, 6), 0, nil)
			cl.good(write16(0, 16), 0, pattern(1, 8192))
			if c.m[3] == 0 {
				cl.command(write16(0, 128), 0, pattern(1, 65536), 0) // ISER-37: nothing can be fetched
			} else {
				cl.good(write16(0, 128), 0, pattern(1, 65536))
				cl.raw(c.m) // ISER-21: once, and first
			}
			cl.closed()
		})
	}
	t.Run("missing", func(t *testing.T) { // ISER-71
		r := newRig(t)
		c := r.dial(dialing{}).login(append([]string{"iSERHelloRequired=Yes"}, normalKeys...)...)
		c.raw(c.nop())
		c.closed()
	})
	t.Run("length", func(t *testing.T) {
		r := newRig(t)
		c := r.dial(dialing{}).login(append([]string{"iSERHelloRequired=Yes"}, normalKeys...)...)
		c.raw(append(hello(0x20, 0xaa, 4), 0))
		c.closed()
	})
}

// More Sends than there are receives for end the connection that sends them, by the transport's own means.
func TestOverrun(t *testing.T) {
	r := newRig(t)
	other := r.ready(dialing{})
	c := r.dial(dialing{})
	c.isid[5] = 3
	c.login()
	// Commands outside of the window hold nothing.
	for i := range 2000 {
		p := pdu.SCSICommand{Final: true, Attr: pdu.AttrSimple, ITT: pdu.TaskTag(1000 + i), CmdSN: c.cmdSN.Add(int32(5000 + i)), ExpStatSN: c.stat, Write: true, EDTL: 512}
		var h pdu.Header
		p.Encode(&h)
		if err := c.raw(message(head{}, &h, nil, make([]byte, 512))); err != nil {
			break
		}
	}
	other.ping()
	c.qp.Close()
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 1 })
}
