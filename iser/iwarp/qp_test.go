package iwarp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// What is wrong with work requests and arguments is told when they are posted, and posts nothing.
func TestInvalidWork(t *testing.T) {
	i, r := pair(t, overTCP, Options{}, Options{})
	heap := make([]byte, 100)
	readOnly, err := i.pd.Register(heap, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Deregister()
	foreign, _ := r.pd.AllocWindow()
	w, _ := i.pd.AllocWindow()
	defer foreign.Close()
	defer w.Close()
	mr := i.arena.MR()
	five := []rdma.SGE{i.sge(0, 1), i.sge(0, 1), i.sge(0, 1), i.sge(0, 1), i.sge(0, 1)}
	for name, wr := range map[string]rdma.SendWR{
		"no opcode":               {},
		"receive":                 {Op: rdma.OpRecv},
		"too many elements":       {Op: rdma.OpSend, SGE: five},
		"wrong key":               {Op: rdma.OpSend, SGE: []rdma.SGE{{Buf: i.buf[:1], LKey: 999}}},
		"outside its region":      {Op: rdma.OpSend, SGE: []rdma.SGE{{Buf: heap, LKey: mr.LKey()}}},
		"Read without the right":  {Op: rdma.OpRead, SGE: []rdma.SGE{{Buf: heap, LKey: readOnly.LKey()}}},
		"inline is too long":      {Op: rdma.OpSend, Flags: rdma.Inline, SGE: []rdma.SGE{{Buf: make([]byte, 257)}}},
		"inline Read":             {Op: rdma.OpRead, Flags: rdma.Inline, SGE: []rdma.SGE{{Buf: heap}}},
		"invalidate with payload": {Op: rdma.OpLocalInvalidate, SGE: []rdma.SGE{i.sge(0, 1)}},
		"bind nothing":            {Op: rdma.OpBind},
		"bind no bytes":           {Op: rdma.OpBind, Bind: rdma.Bind{Window: w, MR: mr}},
		"bind of another domain":  {Op: rdma.OpBind, Bind: rdma.Bind{Window: foreign, MR: mr, Buf: i.buf[:1], Access: rdma.RemoteRead}},
		"bind outside the region": {Op: rdma.OpBind, Bind: rdma.Bind{Window: w, MR: mr, Buf: heap, Access: rdma.RemoteRead}},
		"bind for local write":    {Op: rdma.OpBind, Bind: rdma.Bind{Window: w, MR: mr, Buf: i.buf[:1], Access: rdma.LocalWrite}},
		"bind what may not be written": {Op: rdma.OpBind,
			Bind: rdma.Bind{Window: w, MR: readOnly, Buf: heap, Access: rdma.RemoteWrite}},
	} {
		if n, err := i.qp.PostSend([]rdma.SendWR{{Op: rdma.OpWrite}, wr, {Op: rdma.OpWrite}}); n != 1 || !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: posted %d, %v", name, n, err)
		}
	}
	for name, wr := range map[string]rdma.RecvWR{
		"too many elements": {SGE: five},
		"without the right": {SGE: []rdma.SGE{{Buf: heap, LKey: readOnly.LKey()}}},
	} {
		if n, err := i.qp.PostRecv([]rdma.RecvWR{wr}); n != 0 || !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: posted %d, %v", name, n, err)
		}
	}
	if n, err := i.qp.PostRecv(make([]rdma.RecvWR, 70)); n != 64 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Errorf("posted %d, %v", n, err)
	}
	for _, a := range []rdma.QPAttr{{}, {SendCQ: i.cq, RecvCQ: i.cq}, {SendCQ: i.cq, RecvCQ: i.cq, MaxSend: 1, MaxRecv: 1, MaxSendSGE: 1000}} {
		if _, err := newQueuePair(1, &i.p.opt, i.pd, a); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
	for _, n := range []int{0, 1 << 30} {
		if _, err := i.p.CreateCQ(n); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
	if _, err := i.cq.Wait(context.Background(), nil, false); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	for _, o := range []Options{{Revision: 3}, {Revision: 1, PeerToPeer: true}, {RTR: 8}, {MaxULPDU: 127}, {MaxULPDU: 64769}, {StartupTimeout: -1}, {StallTimeout: -1}, {MaxPending: -1}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is valid", o)
		}
	}
	for _, p := range []rdma.ConnParams{{IRD: -1}, {ORD: MaxDepth + 1}, {PrivateData: make([]byte, 509)}} {
		a, b := net.Pipe()
		d := i.p.Initiate(a, nil)
		q, err := d.CreateQP(i.pd, i.attr())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := q.PostSend([]rdma.SendWR{{Op: rdma.OpSend}}); !errors.Is(err, rdma.ErrNotConnected) {
			t.Errorf("got %v", err)
		}
		if _, err := d.Connect(context.Background(), p); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%+v: %v", p, err)
		}
		q.Close()
		b.Close()
	}
}

// ORD bounds the Reads that are under way, and those that wait are issued as others complete (IWARP-54); a peer that serves none refuses them.
func TestDepths(t *testing.T) {
	i, r := newEnd(t, Options{}), newEnd(t, Options{})
	connect(t, overTCP, i, r, rdma.ConnParams{IRD: 0, ORD: 5}, rdma.ConnParams{IRD: 2, ORD: 5})
	if ird, ord := i.qp.Depth(); ird != 0 || ord != 2 {
		t.Errorf("initiator: %d, %d", ird, ord)
	}
	if ird, ord := r.qp.Depth(); ird != 2 || ord != 0 {
		t.Errorf("responder: %d, %d", ird, ord)
	}
	if _, err := r.qp.PostSend([]rdma.SendWR{{Op: rdma.OpRead, SGE: []rdma.SGE{r.sge(0, 1)}}}); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	w := r.bind(0, 100_000, rdma.RemoteRead)
	pattern(1, r.buf[:100_000])
	var wrs []rdma.SendWR
	for k := range 60 {
		wrs = append(wrs, rdma.SendWR{ID: uint64(k), Op: rdma.OpRead, Flags: rdma.Signaled, SGE: []rdma.SGE{i.sge(k*1000, 1000)}, RKey: w.RKey(), RemoteAddr: w.Addr() + uint64(k)*1000})
	}
	i.send(wrs...)
	for k, wc := range i.good(60) {
		if wc.ID != uint64(k) {
			t.Errorf("completion %d is of %d", k, wc.ID)
		}
	}
	if !bytes.Equal(i.buf[:60_000], r.buf[:60_000]) {
		t.Error("the bytes differ")
	}
	if err := r.arena.Close(); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("deregistered under a window: %v", err)
	}
	// The end of the connection frees the window.
	r.qp.Close()
	if _, err := w.RKey(), r.arena.Close(); err != nil {
		t.Error(err)
	}
}

// A completion queue that is too small is lost, and its queue pair with it.
func TestOverrun(t *testing.T) {
	i, r := newEnd(t, Options{}), newEnd(t, Options{})
	var err error
	if r.separate, err = r.p.CreateCQ(2); err != nil {
		t.Fatal(err)
	}
	connect(t, overTCP, i, r, rdma.ConnParams{}, rdma.ConnParams{})
	r.recv(make([]rdma.RecvWR, 3)...)
	i.send(rdma.SendWR{Op: rdma.OpSend}, rdma.SendWR{Op: rdma.OpSend}, rdma.SendWR{Op: rdma.OpSend})
	if err := r.ended(); !errors.Is(err, rdma.ErrOverrun) {
		t.Errorf("ended by %v", err)
	}
	var wc [4]rdma.WC
	if n, err := r.separate.Poll(wc[:]); n != 2 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := r.separate.Wait(context.Background(), wc[:], true); !errors.Is(err, rdma.ErrOverrun) {
		t.Errorf("got %v", err)
	}
	r.separate.Close()
	if _, err := r.separate.Poll(wc[:]); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

// A solicited Wait sleeps through what is not solicited.
func TestSolicited(t *testing.T) {
	i, r := pair(t, overTCP, Options{}, Options{})
	r.recv(make([]rdma.RecvWR, 3)...)
	i.send(rdma.SendWR{Op: rdma.OpSend}, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Solicited}, rdma.SendWR{ID: 1, Op: rdma.OpSend})
	var wc [8]rdma.WC
	n, err := r.cq.Wait(context.Background(), wc[:], true)
	if err != nil || n < 2 {
		t.Fatalf("%d completions, %v", n, err)
	}
	r.good(3 - n)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := r.cq.Wait(ctx, wc[:], true); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A peer that does not read blocks neither PostSend nor the receive side, and ends the connection after StallTimeout.
func TestStall(t *testing.T) {
	e := newEnd(t, Options{StallTimeout: 100 * time.Millisecond})
	nc, ours := overTCP(t)
	defer nc.Close()
	peer := &raw{t, nc}
	peer.write((&frame{revision: 1}).append(nil, requestKey))
	req, err := e.p.Respond(context.Background(), ours, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.create(req)
	e.recv(rdma.RecvWR{})
	if err := req.Accept(context.Background(), rdma.ConnParams{}); err != nil {
		t.Fatal(err)
	}
	peer.write(fpdu(true, segment{op: opSend, msn: 1, last: true}, nil))
	e.good(1)
	for err = nil; err == nil; {
		_, err = e.qp.PostSend([]rdma.SendWR{{Op: rdma.OpWrite, SGE: []rdma.SGE{e.sge(0, endBytes)}, RKey: 1}})
	}
	if !errors.Is(err, rdma.ErrQueueFull) && !errors.Is(err, rdma.ErrDisconnected) {
		t.Fatal(err)
	}
	if err := e.ended(); !errors.Is(err, rdma.ErrTransport) {
		t.Errorf("ended by %v", err)
	}
	e.qp.Close()
}

// Every way to end leaves no goroutine, no memory in use and no work request without its completion.
func TestEnds(t *testing.T) {
	before := runtime.NumGoroutine()
	for name, end := range map[string]func(i, r *end){
		"Disconnect here":  func(i, r *end) { i.qp.Disconnect() },
		"Disconnect there": func(i, r *end) { r.qp.Disconnect() },
		"Close here":       func(i, r *end) { i.qp.Close() },
		"both":             func(i, r *end) { go r.qp.Close(); i.qp.Close() },
		"cable": func(i, r *end) {
			i.qp.(*queuePair).sock.nc.(*net.TCPConn).SetLinger(0)
			i.qp.(*queuePair).sock.nc.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			i, r := pair(t, overTCP, Options{}, Options{})
			var load sync.WaitGroup
			w := r.bind(0, 300_000, rdma.RemoteRead|rdma.RemoteWrite)
			r.recv(make([]rdma.RecvWR, 10)...)
			i.recv(make([]rdma.RecvWR, 10)...)
			load.Add(1)
			posted := 0
			go func() {
				defer load.Done()
				for {
					n, err := i.qp.PostSend([]rdma.SendWR{
						{Op: rdma.OpWrite, Flags: rdma.Signaled, SGE: []rdma.SGE{i.sge(0, 300_000)}, RKey: w.RKey(), RemoteAddr: w.Addr()},
						{Op: rdma.OpRead, Flags: rdma.Signaled, SGE: []rdma.SGE{i.sge(400_000, 300_000)}, RKey: w.RKey(), RemoteAddr: w.Addr()},
					})
					posted += n
					if errors.Is(err, rdma.ErrDisconnected) {
						return
					}
				}
			}()
			var wc [64]rdma.WC
			got := 0
			for got < 20 {
				n, err := i.cq.Wait(context.Background(), wc[:], false)
				if err != nil {
					t.Fatal(err)
				}
				got += n
			}
			end(i, r)
			drained := make(chan int)
			go func() { // the load goes on until it notices
				n := 0
				var wc [64]rdma.WC
				for {
					k, err := i.cq.Wait(context.Background(), wc[:], false)
					if err != nil {
						drained <- n
						return
					}
					n += k
				}
			}()
			i.ended()
			r.ended()
			load.Wait()
			i.qp.Close()
			r.qp.Close()
			c := i.cq.(*completionQueue)
			for left := 1; left > 0; runtime.Gosched() {
				c.mu.Lock()
				left = c.n
				c.mu.Unlock()
			}
			i.cq.Close()
			if got += <-drained; got != posted+10 {
				t.Errorf("%d completions of %d work requests", got, posted+10)
			}
			var rest [64]rdma.WC
			n, err := r.cq.Poll(rest[:])
			if err != nil || n != 10 {
				t.Errorf("%d completions, %v", n, err)
			}
			for _, c := range rest[:n] {
				if c.Status != rdma.StatusFlushed {
					t.Errorf("%+v", c)
				}
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			if _, err := r.qp.PostRecv([]rdma.RecvWR{{}}); !errors.Is(err, rdma.ErrDisconnected) {
				t.Errorf("got %v", err)
			}
		})
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines are left of %d\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
		runtime.Gosched()
	}
}

// What was completed before Disconnect arrives, though the peer reads it late.
func TestDisconnectKeepsWhatIsComplete(t *testing.T) {
	e := newEnd(t, Options{NoCRC: true})
	a, b := overTCP(t)
	defer b.Close()
	d := e.p.Initiate(a, nil)
	e.create(d)
	(&raw{t, b}).write((&frame{revision: 2, enhanced: true}).append(nil, replyKey))
	if _, err := d.Connect(context.Background(), rdma.ConnParams{}); err != nil {
		t.Fatal(err)
	}
	pattern(1, e.buf[:50_000])
	e.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.Signaled, SGE: []rdma.SGE{e.sge(0, 50_000)}})
	e.good(1)
	(&raw{t, b}).write([]byte{1, 2, 3}) // unread bytes must not turn the end into a reset
	e.qp.Close()
	got, err := io.ReadAll(b)
	if err != nil || len(got) < 50_000 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}
