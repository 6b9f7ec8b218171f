package iser_test

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"unsafe"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
	"github.com/isergate/isergate/iser/scsi"
)

// spy is a provider that notes the memory of the work requests that are posted, and has the bytes of Reads counted as they
// are found complete.
type spy struct {
	rdma.Provider
	mu    sync.Mutex
	sinks [][]byte // of RDMA Reads
	sent  [][]byte // of RDMA Writes that are not inline
	small int      // RDMA Writes that are
}

func (s *spy) Listen(ctx context.Context, address string) (rdma.Listener, error) {
	l, err := s.Provider.Listen(ctx, address)
	return &spyListener{l, s}, err
}

type spyListener struct {
	rdma.Listener
	s *spy
}

func (l *spyListener) Accept(ctx context.Context) (rdma.Request, error) {
	r, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &spyRequest{r, l.s}, nil
}

type spyRequest struct {
	rdma.Request
	s *spy
}

func (r *spyRequest) CreateQP(pd rdma.PD, attr rdma.QPAttr) (rdma.QP, error) {
	qp, err := r.Request.CreateQP(pd, attr)
	if err != nil {
		return nil, err
	}
	return &spyQP{qp, r.s}, nil
}

type spyQP struct {
	rdma.QP
	s *spy
}

func (q *spyQP) PostSend(wrs []rdma.SendWR) (int, error) {
	q.s.mu.Lock()
	for i := range wrs {
		for _, e := range wrs[i].SGE {
			switch {
			case wrs[i].Op == rdma.OpRead:
				q.s.sinks = append(q.s.sinks, e.Buf)
			case wrs[i].Op == rdma.OpWrite && wrs[i].Flags&rdma.Inline == 0:
				q.s.sent = append(q.s.sent, e.Buf)
			case wrs[i].Op == rdma.OpWrite:
				q.s.small++
			}
		}
	}
	q.s.mu.Unlock()
	return q.QP.PostSend(wrs)
}

// watched is a medium that notes its landings, and fills them with garbage before the data comes.
type watched struct {
	*lentMedium
	mu       sync.Mutex
	landings [][]byte
	lent     [][]byte
	content  []byte // of the last landing when it was committed
}

func (m *watched) Reserve(ctx context.Context, e scsi.Extent) (scsi.Landing, error) {
	l, err := m.lentMedium.Reserve(ctx, e)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range l.Buffers() {
		for i := range b {
			b[i] = 0xaa
		}
		m.landings = append(m.landings, b)
	}
	return &watchedLanding{l, m}, nil
}

type watchedLanding struct {
	scsi.Landing
	m *watched
}

func (l *watchedLanding) Commit(ctx context.Context, fua bool) error {
	l.m.mu.Lock()
	l.m.content = bytes.Join(l.Buffers(), nil)
	l.m.mu.Unlock()
	return l.Landing.Commit(ctx, fua)
}

func (m *watched) Read(ctx context.Context, e scsi.Extent) (scsi.Borrowed, error) {
	b, err := m.lentMedium.Read(ctx, e)
	if err == nil {
		m.mu.Lock()
		m.lent = append(m.lent, b.Buffers()...)
		m.mu.Unlock()
	}
	return b, err
}

// bytesIn counts how many bytes of a lie in the slices of b.
func bytesIn(a, b [][]byte) (n int) {
	for _, x := range a {
		at := uintptr(unsafe.Pointer(unsafe.SliceData(x)))
		for _, y := range b {
			from := uintptr(unsafe.Pointer(unsafe.SliceData(y)))
			if at >= from && at+uintptr(len(x)) <= from+uintptr(len(y)) {
				n += len(x)
			}
		}
	}
	return n
}

func size(v [][]byte) (n int) {
	for _, b := range v {
		n += len(b)
	}
	return n
}

// A write of 256 KiB, solicited: the sinks of the RDMA Reads are the landing itself, all of it, and when the write is committed the landing holds the
// initiator's bytes. Between the provider and the medium lies nothing but this package and iser/iscsi; that the provider lets the socket's bytes
// fall right into a sink is shown by iwarp.TestReadsAreNotCopied. Immediate data is copied once, from its receive.
func TestSolicitedDataIsNotCopied(t *testing.T) {
	p, err := iwarp.New(iwarp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := &spy{Provider: p}
	var m *watched
	r := newRig(t, func(r *rig, _ *iscsi.Options, o *iser.Options) {
		o.Provider = s
		m = &watched{lentMedium: r.unit.(*lentMedium)}
		r.unit = m
	})
	c := r.ready(dialing{})
	for _, immediate := range []int{0, 8192} {
		s.mu.Lock()
		s.sinks = nil
		s.mu.Unlock()
		m.mu.Lock()
		m.landings = nil
		m.mu.Unlock()
		want := pattern(immediate, 256<<10)
		if res := c.finish(c.command(write16(0, 512), 0, want, immediate)); res.status != scsi.Good {
			t.Fatalf("status %#x", res.status)
		}
		s.mu.Lock()
		m.mu.Lock()
		if n := bytesIn(s.sinks, m.landings); n != 256<<10-immediate || n != size(s.sinks) || size(m.landings) != 256<<10 {
			t.Errorf("%d immediate: %d of %d bytes fetched lie in the landing of %d bytes", immediate, n, size(s.sinks), size(m.landings))
		}
		if !bytes.Equal(m.content, want) {
			t.Error("something else is written")
		}
		m.mu.Unlock()
		s.mu.Unlock()
	}
	// And back: what is sent is what the medium lends.
	m.mu.Lock()
	m.lent = nil
	m.mu.Unlock()
	c.good(read16(0, 512), 256<<10, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := bytesIn(s.sent, m.lent); n != 256<<10 || size(s.sent) != n {
		t.Errorf("%d of %d bytes sent lie in what was lent", n, size(s.sent))
	}
}
