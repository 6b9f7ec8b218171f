package iser_test

import (
	"encoding/binary"
	"testing"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// fuzzMessage takes a message of the script: a byte that says how much of it is given, its length, and its bytes.
func fuzzMessage(c *client, in []byte, x *buffer) (m, rest []byte) {
	kind, n := in[0], int(binary.BigEndian.Uint16(in[1:]))%8700
	in = in[3:]
	body := make([]byte, n)
	in = in[copy(body, in):]
	w := head{first: 0x10 | kind&0x0c, writeTag: x.w.RKey(), writeBase: x.w.Addr(), readTag: x.w.RKey(), readBase: x.w.Addr()}
	switch kind >> 6 {
	case 0: // anything
		return body, in
	case 1: // a good iSER header
		return append(w.bytes(), body...), in
	case 2: // a PDU whose lengths are right
		var h pdu.Header
		data := body[min(copy(h[:], body), len(body)):]
		h.SetDataLength(len(data))
		h[4] = 0
		return append(append(append(w.bytes(), h[:]...), data...), make([]byte, pdu.Padding(len(data)))...), in
	default: // a command that is taken, with any CDB, length and flags
		p := pdu.SCSICommand{ITT: c.tag(), CmdSN: c.sn(), ExpStatSN: c.stat, EDTL: 0}
		data := body[min(copy(p.CDB[:], body), len(body)):]
		var h pdu.Header
		p.Encode(&h)
		h[1] = kind<<2 | 1
		binary.BigEndian.PutUint32(h[20:], uint32(kind)*uint32(n)%300_000)
		return message(w, &h, nil, data), in
	}
}

// FuzzConnection sends any messages, before and after login, to a whole target: whatever they are, it lives on, other sessions are served, and everything is
// given back.
func FuzzConnection(f *testing.F) {
	nop := pdu.NopOut{Immediate: true, ITT: 5, TTT: pdu.ReservedTag}
	var h pdu.Header
	nop.Encode(&h)
	script := func(first byte, messages ...[]byte) []byte {
		out := []byte{first}
		for _, m := range messages {
			out = append(out, m[0], byte((len(m)-1)>>8), byte(len(m)-1))
			out = append(out, m[1:]...)
		}
		return out
	}
	f.Add(script(1, append([]byte{0}, message(head{}, &h, nil, nil)...)))
	f.Add(script(0, append([]byte{0x80}, h[:]...)))
	f.Add(script(1, append([]byte{0xcc + 0x10}, read16(0, 128)...), append([]byte{0xec}, append(write16(0, 1), make([]byte, 512)...)...)))
	f.Add(script(3, append([]byte{0}, append([]byte{0x20, 0xaa, 0, 4}, make([]byte, 24)...)...), append([]byte{0xdc}, read16(0, 8)...)))
	f.Add(script(1, append([]byte{0xe8}, write16(0, 256)...), append([]byte{0x80}, h[:]...)))
	f.Add([]byte{1, 0x40, 0, 48})
	r := newRig(f, func(_ *rig, o *iscsi.Options, i *iser.Options) {
		o.UnsolicitedData, o.QueueDepth, i.Receives = true, 8, 400
	})
	other := r.ready(dialing{recvs: 4})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 {
			return
		}
		mine := *r
		mine.t = t
		c := mine.dial(dialing{recvs: 64})
		c.isid[5] = 0x55
		flags := in[0]
		in = in[1:]
		if flags&1 != 0 {
			keys := normalKeys
			if flags&2 != 0 {
				keys = append([]string{"iSERHelloRequired=Yes"}, keys...)
			}
			c.login(keys...)
		}
		x := c.expose(300_000, nil, rdma.RemoteRead|rdma.RemoteWrite)
		for len(in) >= 3 {
			var m []byte
			if m, in = fuzzMessage(c, in, x); c.raw(m) != nil {
				break
			}
		}
		c.qp.Close()
		x.free()
		other.t = t
		other.ping()
		await(t, "everything is given back", func() bool {
			return r.target.Usage().Connections == 1 && len(r.srv.Sessions()) == 1 && r.medium.Open() == 0
		})
	})
}
