package iwarp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/isergate/isergate/iser/rdma"
)

// With More, what is posted waits for the next call; order, also of completions, is that of the calls.
func TestMore(t *testing.T) {
	i, r := pair(t, overTCP, Options{}, Options{})
	for k := range 4 {
		r.recv(rdma.RecvWR{ID: uint64(k), SGE: []rdma.SGE{r.sge(k*8192, 8192)}})
	}
	w, err := i.pd.AllocWindow()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	pattern(3, i.buf[:8192])
	i.send(rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.Signaled | rdma.More, SGE: []rdma.SGE{i.sge(0, 100)}})
	i.send(rdma.SendWR{ID: 2, Op: rdma.OpBind, Flags: rdma.Signaled, Bind: rdma.Bind{Window: w, MR: i.arena.MR(), Buf: i.buf[:100], Access: rdma.RemoteRead}},
		rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.Signaled | rdma.Inline | rdma.More, SGE: []rdma.SGE{i.sge(100, 200)}})
	clear(i.buf[100:300]) // it was taken
	i.send()
	for k, wc := range i.good(3) {
		if wc.ID != uint64(k+1) {
			t.Errorf("completion %d is %+v", k, wc)
		}
	}
	// A message that is not small does not wait.
	i.send(rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.Signaled | rdma.More, SGE: []rdma.SGE{i.sge(300, 500)}},
		rdma.SendWR{ID: 5, Op: rdma.OpRead, RKey: 1, Flags: rdma.Signaled})
	if wc := i.good(2); wc[0].ID != 4 || wc[1].ID != 5 {
		t.Errorf("%+v", wc)
	}
	want := pattern(3, make([]byte, 8192))
	for k, part := range [][]byte{want[:100], want[100:300], want[300:800]} {
		wc := r.good(1)[0]
		if wc.ID != uint64(k) || wc.Bytes != len(part) || !bytes.Equal(r.buf[k*8192:][:wc.Bytes], part) {
			t.Errorf("message %d: %+v", k, wc)
		}
	}
	// What still waits when the connection ends is flushed.
	i.send(rdma.SendWR{ID: 6, Op: rdma.OpSend, Flags: rdma.More, SGE: []rdma.SGE{i.sge(0, 100)}})
	i.qp.Close()
	if wc := i.wait(1)[0]; wc.ID != 6 || wc.Status != rdma.StatusFlushed {
		t.Errorf("%+v", wc)
	}
	if wc := r.wait(1)[0]; wc.ID != 3 || wc.Status != rdma.StatusFlushed {
		t.Errorf("%+v", wc)
	}
}

// With RecvAnyOrder a message takes the receive that was posted last, each takes one, and those that are left are flushed.
func TestReceivesInAnyOrder(t *testing.T) {
	i, r := newEnd(t, Options{}), newEnd(t, Options{})
	r.anyOrder = true
	connect(t, overTCP, i, r, rdma.ConnParams{}, rdma.ConnParams{})
	post := func(id int) {
		r.recv(rdma.RecvWR{ID: uint64(id), SGE: []rdma.SGE{r.sge(id*4096, 4096)}})
	}
	const receives = 64 // as many as the queue takes
	for id := range receives {
		post(id)
	}
	if _, err := r.qp.PostRecv([]rdma.RecvWR{{}}); err == nil {
		t.Error("a full queue took another receive")
	}
	pattern(5, i.buf[:receives*100])
	message := func(k int) []byte { return i.buf[k*100 : k*100+k+1] }
	sent := 0
	take := func(n int) (ids []uint64) {
		for range n {
			i.send(rdma.SendWR{Op: rdma.OpSend, SGE: []rdma.SGE{i.sge(sent*100, sent+1)}})
			wc := r.good(1)[0]
			if got := r.buf[wc.ID*4096:][:wc.Bytes]; !bytes.Equal(got, message(sent)) {
				t.Fatalf("message %d differs", sent)
			}
			sent++
			ids = append(ids, wc.ID)
		}
		return ids
	}
	last := take(1)[0]
	for range 5 { // the same memory again and again
		post(int(last))
		if id := take(1)[0]; id != last {
			t.Errorf("took receive %d instead of %d", id, last)
		}
	}
	left := make(map[uint64]bool)
	for id := range uint64(receives) {
		left[id] = id != last
	}
	for _, id := range take(10) {
		if !left[id] {
			t.Errorf("receive %d was taken twice", id)
		}
		left[id] = false
	}
	i.qp.Close()
	for _, wc := range r.wait(receives - 11) {
		if wc.Status != rdma.StatusFlushed || !left[wc.ID] {
			t.Errorf("%+v", wc)
		}
		left[wc.ID] = false
	}
}

// The table of STags grows with what is bound, and each has its own place.
func TestManyWindows(t *testing.T) {
	const windows = 10 * minTags
	mem := make([]byte, windows*16)
	d := newDomain()
	mr, err := d.Register(mem, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	tags := newTagTable()
	var all []rdma.Window
	for k := range windows {
		w, err := d.AllocWindow()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, w)
		if _, _, bound, err := tags.reserve(&rdma.Bind{Window: w, MR: mr, Buf: mem[k*16 : (k+1)*16], Access: rdma.RemoteRead}, true); err != nil || !bound {
			t.Fatal(bound, err)
		}
	}
	reach := func(k int) bool {
		tags.mu.Lock()
		defer tags.mu.Unlock()
		b, ok := tags.reachLocked(all[k].RKey(), all[k].Addr(), 16, rdma.RemoteRead)
		if ok == accessOK && addrOf(b) != addrOf(mem[k*16:]) {
			t.Errorf("window %d reaches other memory", k)
		}
		return ok == accessOK
	}
	for k := range all {
		if !reach(k) {
			t.Fatalf("window %d is lost", k)
		}
	}
	for k := 0; k < windows; k += 2 {
		if k%4 == 0 {
			all[k].Close()
		} else if !tags.invalidate(all[k].RKey()) {
			t.Errorf("window %d was not bound", k)
		}
	}
	for k := range all {
		if reach(k) != (k%2 == 1) {
			t.Errorf("window %d: reached %v", k, k%2 == 0)
		}
	}
	tags.clear()
	for k := range all {
		if reach(k) {
			t.Errorf("window %d outlives the connection", k)
		}
	}
	if tags.used != 0 || mr.Deregister() != nil {
		t.Errorf("%d bindings are left", tags.used)
	}
}

// What is posted and flushed while the connection ends is not sent from memory that went back: nobody writes once the queue pair has begun to clean up.
func TestPostAtTheEnd(t *testing.T) {
	for range 60 {
		i, r := pair(t, overTCP, Options{}, Options{})
		posted := make(chan error)
		go func() {
			for {
				if _, err := i.qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.Inline | rdma.More, SGE: []rdma.SGE{i.sge(0, 64)}}}); err != nil && !errors.Is(err, rdma.ErrQueueFull) {
					posted <- err
					return
				}
				i.qp.PostSend(nil)
			}
		}()
		i.qp.Disconnect()
		if err := <-posted; !errors.Is(err, rdma.ErrDisconnected) {
			t.Fatal(err)
		}
		for range 100 {
			i.qp.PostSend(nil)
		}
		i.qp.Close()
		r.qp.Close()
	}
}
