package iwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// Every operation once, over TCP and over a pipe, with and without CRC, with small segments and large ones.
func TestOperations(t *testing.T) {
	for _, c := range []struct {
		name string
		conns
	}{{"tcp", overTCP}, {"pipe", overPipe}, {"cut", shaken(overTCP, 1, 1000)}} {
		for _, o := range []Options{{}, {NoCRC: true}, {MaxULPDU: minULPDU}, {MaxULPDU: 1442, Revision: 1}, {PeerToPeer: true}} {
			t.Run(fmt.Sprintf("%s/crc=%v,max=%d,rev=%d,p2p=%v", c.name, !o.NoCRC, o.MaxULPDU, o.Revision, o.PeerToPeer), func(t *testing.T) {
				i, r := pair(t, c.conns, o, Options{NoCRC: o.NoCRC, MaxULPDU: o.MaxULPDU})
				testOperations(t, i, r)
			})
		}
	}
}

func testOperations(t *testing.T, i, r *end) {
	const size = 300_000
	pattern(1, i.buf)
	// Send, with the receive in pieces; nothing of the buffer behind is touched.
	r.recv(rdma.RecvWR{ID: 7, SGE: []rdma.SGE{r.sge(0, 100), r.sge(200, 0), r.sge(300, 5000)}})
	i.send(rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.Signaled, SGE: []rdma.SGE{i.sge(0, 999), i.sge(999, 2001)}})
	if wc := i.good(1)[0]; wc.ID != 1 || wc.Op != rdma.OpSend || wc.QPNum != i.qp.Num() {
		t.Errorf("%+v", wc)
	}
	if wc := r.good(1)[0]; wc.ID != 7 || wc.Op != rdma.OpRecv || wc.Bytes != 3000 || wc.Invalidated || wc.QPNum != r.qp.Num() {
		t.Errorf("%+v", wc)
	}
	if !bytes.Equal(r.buf[:100], i.buf[:100]) || !bytes.Equal(r.buf[300:3200], i.buf[100:3000]) || !bytes.Equal(r.buf[3200:4096], make([]byte, 896)) {
		t.Error("Send: the bytes differ")
	}
	// A window, written to and read from in one batch with the Send behind; the Send invalidates it.
	w := r.bind(8192, size, rdma.RemoteRead|rdma.RemoteWrite)
	r.recv(rdma.RecvWR{ID: 8, SGE: []rdma.SGE{r.sge(0, 4096)}}, rdma.RecvWR{ID: 9})
	i.send(
		rdma.SendWR{ID: 2, Op: rdma.OpWrite, SGE: []rdma.SGE{i.sge(10_000, 123_457), i.sge(133_457, size-123_457)}, RKey: w.RKey(), RemoteAddr: w.Addr()},
		rdma.SendWR{ID: 3, Op: rdma.OpRead, SGE: []rdma.SGE{i.sge(500_000, 100_001), i.sge(700_000, 99_999)}, RKey: w.RKey(), RemoteAddr: w.Addr() + 1000, Flags: rdma.Signaled},
		rdma.SendWR{ID: 4, Op: rdma.OpSendInvalidate, SGE: []rdma.SGE{{Buf: []byte("some words")}}, RKey: w.RKey(), Flags: rdma.Inline | rdma.Fence | rdma.Solicited},
		rdma.SendWR{ID: 5, Op: rdma.OpSend, Flags: rdma.Signaled},
	)
	wcs := i.good(2)
	if wcs[0].ID != 3 || wcs[0].Bytes != 200_000 || wcs[1].ID != 5 {
		t.Errorf("%+v", wcs)
	}
	wcs = r.good(2)
	if wcs[0].ID != 8 || wcs[0].Bytes != 10 || !wcs[0].Invalidated || wcs[0].InvalidatedKey != w.RKey() || wcs[1].ID != 9 || wcs[1].Bytes != 0 || wcs[1].Invalidated {
		t.Errorf("%+v", wcs)
	}
	if !bytes.Equal(r.buf[8192:8192+size], i.buf[10_000:10_000+size]) || !bytes.Equal(r.buf[8192+size:8192+size+100], make([]byte, 100)) {
		t.Error("Write: the bytes differ")
	}
	if !bytes.Equal(i.buf[500_000:600_001], r.buf[9192:109_193]) || !bytes.Equal(i.buf[700_000:799_999], r.buf[109_193:209_192]) {
		t.Error("Read: the bytes differ")
	}
	// Empty ones touch and check nothing (IWARP-35, IWARP-52).
	i.send(rdma.SendWR{Op: rdma.OpWrite, RKey: 1, RemoteAddr: 2}, rdma.SendWR{ID: 6, Op: rdma.OpRead, RKey: 3, RemoteAddr: 4, Flags: rdma.Signaled})
	if wc := i.good(1)[0]; wc.ID != 6 || wc.Bytes != 0 {
		t.Errorf("%+v", wc)
	}
	// The responder may talk now. A window is bound again after it was invalidated, under another key.
	old := w.RKey()
	r.send(rdma.SendWR{Op: rdma.OpBind, Bind: rdma.Bind{Window: w, MR: r.arena.MR(), Buf: r.buf[:100], Access: rdma.RemoteRead}},
		rdma.SendWR{Op: rdma.OpLocalInvalidate, RKey: 0, Flags: 0}) // the latter fails
	if w.RKey() == old {
		t.Error("the key was used again")
	}
	if wc := r.wait(1)[0]; wc.Op != rdma.OpLocalInvalidate || wc.Status != rdma.StatusProtection {
		t.Errorf("%+v", wc)
	}
	if err := i.ended(); !errors.Is(err, rdma.ErrPeerClosed) {
		t.Errorf("ended by %v", err)
	}
	if err := r.ended(); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("ended by %v", err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// The whole way through a listener and Resolve, with private data, and rejection (IWARP-5).
func TestListenAndResolve(t *testing.T) {
	i, r := newEnd(t, Options{}), newEnd(t, Options{})
	ctx := context.Background()
	l, err := r.p.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	hello, welcome := bytes.Repeat([]byte{1}, 508), bytes.Repeat([]byte{2}, 508)
	go func() {
		for n := range 2 {
			req, err := l.Accept(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			if p := req.Peer(); !bytes.Equal(p.PrivateData, hello) || p.IRD != 3 || p.ORD != 5 || p.DepthUnknown {
				t.Errorf("%+v", p)
			}
			if n == 0 {
				if err := req.Reject([]byte("no")); err != nil {
					t.Error(err)
				}
				continue
			}
			r.create(req)
			r.recv(rdma.RecvWR{})
			if err := req.Accept(ctx, rdma.ConnParams{IRD: 4, ORD: 4, PrivateData: welcome}); err != nil {
				t.Error(err)
			}
		}
	}()
	for n := range 2 {
		d, err := i.p.Resolve(ctx, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if d.RemoteAddr().String() != l.Addr().String() {
			t.Errorf("connected to %v", d.RemoteAddr())
		}
		i.create(d)
		peer, err := d.Connect(ctx, rdma.ConnParams{IRD: 3, ORD: 5, PrivateData: hello})
		if n == 0 {
			var no *rdma.RejectedError
			if !errors.As(err, &no) || string(no.Peer.PrivateData) != "no" {
				t.Errorf("got %v", err)
			}
			if err := i.ended(); !errors.Is(err, rdma.ErrDisconnected) {
				t.Errorf("ended by %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(peer.PrivateData, welcome) || peer.IRD != 4 || peer.ORD != 3 {
			t.Errorf("%+v", peer)
		}
	}
	if ird, ord := i.qp.Depth(); ird != 3 || ord != 4 {
		t.Errorf("depths %d, %d", ird, ord)
	}
	i.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Signaled})
	i.good(1)
	i.qp.Disconnect()
	i.qp.Disconnect()
	if err := i.ended(); !errors.Is(err, rdma.ErrDisconnected) {
		t.Errorf("ended by %v", err)
	}
	if _, err := i.qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend}}); !errors.Is(err, rdma.ErrDisconnected) {
		t.Errorf("got %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := l.Accept(ctx); err == nil {
		t.Error("accepted after Close")
	}
}

// Reads of 256 KiB, several under way, once the size of the peer's segments is known: payload takes no way through a buffer of ours, whether the segments are
// large or those of an Ethernet, and however the sink is cut.
func TestReadsAreNotCopied(t *testing.T) {
	const size, depth, reads = 256 << 10, 3, 60
	for _, o := range []Options{{MaxULPDU: maxULPDU}, {MaxULPDU: 1442, NoCRC: true}, {MaxULPDU: 8942}} {
		i, r := pair(t, overTCP, o, o)
		w := r.bind(0, size, rdma.RemoteRead)
		pattern(1, r.buf)
		clear(i.buf)
		read := func(k int) {
			at := k % depth * (size + 1000)
			clear(i.buf[at : at+size+1000])
			i.send(rdma.SendWR{ID: uint64(k), Op: rdma.OpRead, Flags: rdma.Signaled, RKey: w.RKey(), RemoteAddr: w.Addr(),
				SGE: []rdma.SGE{i.sge(at+1, 100_000), i.sge(at+100_100, 4096), i.sge(at+104_500, size-104_096)}})
		}
		check := func(k int) {
			if wc := i.good(1)[0]; wc.ID != uint64(k) {
				t.Fatalf("%+v, want %d", wc, k)
			}
			b := i.buf[k%depth*(size+1000):]
			if !bytes.Equal(b[1:100_001], r.buf[:100_000]) || !bytes.Equal(b[100_100:104_196], r.buf[100_000:104_096]) ||
				!bytes.Equal(b[104_500:size+404], r.buf[104_096:size]) || b[0] != 0 || b[100_001] != 0 || b[104_196] != 0 || b[size+404] != 0 {
				t.Fatal("the bytes differ")
			}
		}
		for k := range 2 { // the sizes are learnt
			read(k)
			check(k)
		}
		q := i.qp.(*queuePair)
		before := q.rcv.copied // the receiving goroutine waits for the peer
		for k := range reads {
			read(k)
			if k >= depth-1 {
				check(k - depth + 1)
			}
		}
		for k := range depth - 1 {
			check(reads - depth + 1 + k)
		}
		i.qp.Close()
		// A read that had begun when nothing was under way takes what comes into the buffer: seldom.
		if n := q.rcv.copied - before; n > 3*plainBytes {
			t.Errorf("ULPDUs of %d: %d bytes of %d were copied", o.MaxULPDU, n, reads*size)
		} else {
			t.Logf("ULPDUs of %d: %d bytes of %d were copied", o.MaxULPDU, n, reads*size)
		}
		r.qp.Close()
		w.Close()
	}
}
