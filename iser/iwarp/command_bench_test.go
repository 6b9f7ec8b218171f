package iwarp

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// BenchmarkCommand is what iSER does for SCSI commands, without SCSI: the initiator binds a window and sends a message of 76 bytes; for a read the target writes to the window and answers
// by a Send that invalidates it; for a write the data comes with the message (4 KiB) or is read from the window. The figures are of both ends together. "tcp" moves the same bytes
// over bare TCP, all answers that are due in one write.
func BenchmarkCommand(b *testing.B) {
	for _, c := range []struct {
		size, depth int
	}{{4 << 10, 1}, {4 << 10, 32}, {256 << 10, 8}} {
		for _, write := range []bool{false, true} {
			name := map[bool]string{false: "read", true: "write"}[write]
			b.Run(fmt.Sprintf("%s=%dk,depth=%d/tcp", name, c.size>>10, c.depth), func(b *testing.B) { commandsTCP(b, c.size, c.depth, write) })
			for _, o := range []Options{{NoCRC: true}, {}} {
				b.Run(fmt.Sprintf("%s=%dk,depth=%d/crc=%v", name, c.size>>10, c.depth, !o.NoCRC), func(b *testing.B) { commands(b, o, c.size, c.depth, write) })
			}
		}
	}
}

const commandLen = 76

func commandsTCP(b *testing.B, size, depth int, write bool) {
	x, y := overTCP(b)
	defer x.Close()
	defer y.Close()
	there, back := commandLen, commandLen
	if write {
		there += size
	} else {
		back += size
	}
	// answer reads whole messages of n bytes and returns how many came at once.
	answer := func(nc net.Conn, n int, buf []byte, have *int) (int, error) {
		for {
			k, err := nc.Read(buf[*have:])
			if err != nil {
				return 0, err
			}
			if *have += k; *have >= n {
				got := *have / n
				*have -= got * n
				return got, nil
			}
		}
	}
	go func() {
		buf, out, have := make([]byte, max(64<<10, there)), make([]byte, depth*back), 0
		for {
			n, err := answer(y, there, buf, &have)
			if err != nil {
				return
			}
			if _, err := y.Write(out[:n*back]); err != nil {
				return
			}
		}
	}()
	buf, out, have := make([]byte, max(64<<10, back)), make([]byte, depth*there), 0
	measured(b, size, func() {
		sent, done := 0, 0
		for done < b.N {
			if n := min(b.N-sent, depth-(sent-done)); n > 0 {
				x.Write(out[:n*there])
				sent += n
			}
			n, err := answer(x, back, buf, &have)
			if err != nil && err != io.EOF {
				b.Fatal(err)
			}
			done += n
		}
	})
}

func commands(b *testing.B, o Options, size, depth int, write bool) {
	i, r := newEnd(b, o), newEnd(b, o)
	for _, e := range []*end{i, r} {
		cq, err := e.p.CreateCQ(1024)
		if err != nil {
			b.Fatal(err)
		}
		e.separate = cq
	}
	connect(b, overTCP, i, r, rdma.ConnParams{IRD: 32, ORD: 32}, rdma.ConnParams{IRD: 32, ORD: 32})
	inCapsule := write && size <= 8192
	room := commandLen
	if inCapsule {
		room += size
	}
	recvs := func(e *end, room int) []rdma.RecvWR {
		all := make([]rdma.RecvWR, depth)
		for k := range all {
			all[k] = rdma.RecvWR{ID: uint64(k), SGE: []rdma.SGE{e.sge(k*8192%(512<<10), room)}}
		}
		if _, err := e.qp.PostRecv(all); err != nil {
			b.Fatal(err)
		}
		return all
	}
	targetRecvs, initiatorRecvs := recvs(r, room), recvs(i, commandLen)
	const data = 640 << 10
	reply, whole := []rdma.SGE{r.sge(576<<10, commandLen)}, []rdma.SGE{r.sge(data, size)}
	go func() { // the target
		var wcs [64]rdma.WC
		wrs := make([]rdma.SendWR, 0, 128)
		again := make([]rdma.RecvWR, 0, 64)
		for {
			n, err := r.separate.Wait(b.Context(), wcs[:], false)
			if err != nil || wcs[0].Status != rdma.StatusSuccess {
				return
			}
			wrs, again = wrs[:0], again[:0]
			for _, wc := range wcs[:n] {
				m := r.buf[wc.ID*8192%(512<<10):]
				key, addr := binary.BigEndian.Uint32(m), binary.BigEndian.Uint64(m[4:])
				switch {
				case inCapsule:
					wrs = append(wrs, rdma.SendWR{Op: rdma.OpSend, SGE: reply})
				case write:
					wrs = append(wrs, rdma.SendWR{ID: uint64(key), Op: rdma.OpRead, Flags: rdma.Signaled, RKey: key, RemoteAddr: addr, SGE: whole})
				default:
					wrs = append(wrs, rdma.SendWR{Op: rdma.OpWrite, RKey: key, RemoteAddr: addr, SGE: whole},
						rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: key, SGE: reply})
				}
				again = append(again, targetRecvs[wc.ID])
			}
			r.qp.PostRecv(again)
			r.qp.PostSend(wrs)
		}
	}()
	if write && !inCapsule {
		go func() { // what waits for RDMA Reads
			var wcs [64]rdma.WC
			answers := make([]rdma.SendWR, 0, 64)
			for {
				n, err := r.cq.Wait(b.Context(), wcs[:], false)
				if err != nil || wcs[0].Status != rdma.StatusSuccess {
					return
				}
				answers = answers[:0]
				for _, wc := range wcs[:n] {
					answers = append(answers, rdma.SendWR{Op: rdma.OpSendInvalidate, RKey: uint32(wc.ID), SGE: reply})
				}
				r.qp.PostSend(answers)
			}
		}()
	}
	windows := make([]rdma.Window, depth)
	commands := make([][]rdma.SGE, depth)
	free := make([]int, 0, depth)
	order := make([]int, depth) // of the commands: their answers come in it
	for k := range windows {
		w, err := i.pd.AllocWindow()
		if err != nil {
			b.Fatal(err)
		}
		windows[k] = w
		commands[k] = []rdma.SGE{i.sge(512<<10+k*128, commandLen), i.sge(data, size)}
		if !inCapsule {
			commands[k] = commands[k][:1]
		}
		free = append(free, k)
	}
	access := rdma.RemoteWrite
	if write {
		access = rdma.RemoteRead
	}
	binds, sends := make([]rdma.SendWR, 0, depth), make([]rdma.SendWR, 0, depth)
	again := make([]rdma.RecvWR, 0, 64)
	measured(b, size, func() {
		var wcs [64]rdma.WC
		for sent, done := 0, 0; done < b.N; {
			binds, sends = binds[:0], sends[:0]
			first := len(free)
			for sent < b.N && len(free) > 0 {
				k := free[len(free)-1]
				free = free[:len(free)-1]
				order[sent%depth] = k
				sent++
				if !inCapsule {
					binds = append(binds, rdma.SendWR{Op: rdma.OpBind, Bind: rdma.Bind{Window: windows[k], MR: i.arena.MR(), Buf: i.buf[data : data+size], Access: access}})
				}
				sends = append(sends, rdma.SendWR{Op: rdma.OpSend, SGE: commands[k]})
			}
			if len(sends) > 0 {
				if len(binds) > 0 {
					i.qp.PostSend(binds)
					for n := range binds {
						k := free[:first][first-1-n]
						m := i.buf[512<<10+k*128:]
						binary.BigEndian.PutUint32(m, windows[k].RKey())
						binary.BigEndian.PutUint64(m[4:], windows[k].Addr())
					}
				}
				i.qp.PostSend(sends)
			}
			n, err := i.separate.Wait(b.Context(), wcs[:], false)
			if err != nil {
				b.Fatal(err)
			}
			again = again[:0]
			for _, wc := range wcs[:n] {
				if wc.Status != rdma.StatusSuccess {
					b.Fatalf("%+v: %v, target: %v", wc, i.qp.Err(), r.qp.Err())
				}
				k := order[done%depth]
				if wc.Invalidated && wc.InvalidatedKey != windows[k].RKey() {
					b.Fatalf("command %d: STag %#x was invalidated instead of %#x", done, wc.InvalidatedKey, windows[k].RKey())
				}
				free = append(free, k)
				again = append(again, initiatorRecvs[wc.ID])
				done++
			}
			i.qp.PostRecv(again)
		}
	})
	i.qp.Close()
	r.qp.Close()
	for _, w := range windows {
		w.Close()
	}
}
