package iwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/rdma"
)

// The memory of each side: windows that the peer writes to and reads from, what is sent, receives, and sinks.
const (
	propPart    = 256 << 10
	propWindows = 8
	propWindow  = propPart / propWindows
	propSource  = propPart
	propRecv    = 2 * propPart
	propRecvs   = 16
	propRecvLen = propPart / propRecvs
	propSink    = 3 * propPart
	propSinks   = 8
	propOps     = 400
)

// propOp is one operation of a side.
type propOp struct {
	kind     rdma.Opcode
	window   int
	off, n   int // in the window
	source   int // offset in the source part
	flags    rdma.SendFlags
	expected []byte // of a Read
}

// propSide is a side with its plan, and the model of what the peer's plan does to its memory.
type propSide struct {
	*end
	rcq     rdma.CQ
	plan    []propOp
	windows []rdma.Window
	model   []byte
	credit  chan struct{} // receives that are posted here
	peer    *propSide
}

// makePlan draws the operations of s, and applies them to the model of its peer.
func (s *propSide) makePlan(rnd *rand.Rand) {
	size := func(max int) int {
		switch rnd.IntN(4) {
		case 0:
			return rnd.IntN(5)
		case 1:
			return rnd.IntN(max + 1)
		}
		return rnd.IntN(min(max, 3000))
	}
	live := rnd.Perm(propWindows)
	afterRead := false
	for i := range propOps {
		op := propOp{kind: []rdma.Opcode{rdma.OpSend, rdma.OpSend, rdma.OpWrite, rdma.OpWrite, rdma.OpRead, rdma.OpSendInvalidate}[rnd.IntN(6)]}
		if op.kind == rdma.OpSendInvalidate && (len(live) == 1 || rnd.IntN(8) > 0) {
			op.kind = rdma.OpSend
		}
		if i == propOps-1 {
			op.kind = rdma.OpRead // its response tells that everything before is placed (IWARP-53)
		}
		op.window = live[rnd.IntN(len(live))]
		if rnd.IntN(3) == 0 || i%8 == 0 || i == propOps-1 {
			op.flags |= rdma.Signaled
		}
		if rnd.IntN(10) == 0 {
			op.flags |= rdma.Fence
		}
		switch op.kind {
		case rdma.OpSend, rdma.OpSendInvalidate:
			op.n = size(propRecvLen)
			if rnd.IntN(4) == 0 {
				op.flags |= rdma.Solicited
			}
			if op.kind == rdma.OpSendInvalidate {
				op.flags |= rdma.Fence // a Read of the window may be under way
				live = append([]int(nil), live...)
				for j, w := range live {
					if w == op.window {
						live = append(live[:j], live[j+1:]...)
						break
					}
				}
			}
		case rdma.OpWrite:
			op.n = size(propWindow)
			if afterRead {
				op.flags |= rdma.Fence // or it could overtake the Read (IWARP-58)
			}
		case rdma.OpRead:
			op.n = size(propWindow)
			op.flags |= rdma.Signaled
			afterRead = true
		}
		op.off = rnd.IntN(propWindow - min(op.n, propWindow-1))
		op.source = rnd.IntN(propPart - op.n)
		at := s.peer.model[op.window*propWindow+op.off:][:op.n]
		if op.kind == rdma.OpWrite {
			copy(at, s.model[propSource+op.source:][:op.n])
		} else if op.kind == rdma.OpRead {
			op.expected = bytes.Clone(at)
		}
		s.plan = append(s.plan, op)
	}
}

// issue carries out the plan, and checks the completions.
func (s *propSide) issue(rnd *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), propPatience)
	defer cancel()
	var free []int
	for i := range propSinks {
		free = append(free, i)
	}
	sinks := make(map[uint64]int)
	var expect []uint64                    // signaled operations, in order
	flush := func() { s.qp.PostSend(nil) } // what was posted with More; an error is found where it matters
	reap := func() error {
		flush()
		var wc [8]rdma.WC
		n, err := s.cq.Wait(ctx, wc[:1+rnd.IntN(8)], false)
		if err != nil {
			return fmt.Errorf("%w; %w", err, s.qp.Err())
		}
		for _, c := range wc[:n] {
			if c.Status != rdma.StatusSuccess || len(expect) == 0 || c.ID != expect[0] {
				return fmt.Errorf("completion %+v, expected %v; %w", c, expect, s.qp.Err())
			}
			expect = expect[1:]
			op := &s.plan[c.ID]
			if op.kind != c.Op {
				return fmt.Errorf("completion %+v of %+v", c, op)
			}
			if op.kind == rdma.OpRead {
				k := sinks[c.ID]
				got := s.buf[propSink+k*propWindow:][:op.n]
				if c.Bytes != op.n || !bytes.Equal(got, op.expected) {
					return fmt.Errorf("operation %d: the Read of %d bytes differs", c.ID, op.n)
				}
				clear(got)
				free = append(free, k)
			}
		}
		return nil
	}
	cut := func(from, n int) []rdma.SGE {
		a, b := rnd.IntN(n+1), rnd.IntN(n+1)
		a, b = min(a, b), max(a, b)
		return []rdma.SGE{s.sge(from, a), s.sge(from+a, b-a), s.sge(from+b, n-b)}
	}
	for i := 0; i < len(s.plan); {
		var batch []rdma.SendWR
		for want := 1 + rnd.IntN(6); i < len(s.plan) && len(batch) < want; i++ {
			op := &s.plan[i]
			wr := rdma.SendWR{ID: uint64(i), Op: op.kind, Flags: op.flags}
			w := s.peer.windows[op.window]
			switch op.kind {
			case rdma.OpWrite:
				wr.RKey, wr.RemoteAddr, wr.SGE = w.RKey(), w.Addr()+uint64(op.off), cut(propSource+op.source, op.n)
			case rdma.OpRead:
				if len(free) == 0 {
					want = 0
					break
				}
				k := free[0]
				free = free[1:]
				sinks[wr.ID] = k
				wr.RKey, wr.RemoteAddr, wr.SGE = w.RKey(), w.Addr()+uint64(op.off), cut(propSink+k*propWindow, op.n)
			default:
				wr.RKey, wr.SGE = w.RKey(), cut(propSource+op.source, op.n)
				select {
				case <-s.peer.credit:
				default:
					flush()
					select {
					case <-s.peer.credit:
					case <-ctx.Done():
						return fmt.Errorf("no receive was posted: %w", s.qp.Err())
					}
				}
				if op.n <= 256 && rnd.IntN(2) == 0 {
					wr.Flags |= rdma.Inline
				}
			}
			if want == 0 {
				break
			}
			batch = append(batch, wr)
			if wr.Flags&rdma.Signaled != 0 {
				expect = append(expect, wr.ID)
			}
		}
		if len(batch) > 0 && rnd.IntN(3) == 0 {
			batch[len(batch)-1].Flags |= rdma.More
		}
		for rest := batch; len(rest) > 0; {
			n, err := s.qp.PostSend(rest)
			rest = rest[n:]
			if err != nil && !errors.Is(err, rdma.ErrQueueFull) {
				return fmt.Errorf("%w; %w", err, s.qp.Err())
			}
			if err != nil {
				if err := reap(); err != nil {
					return err
				}
			}
		}
		for len(batch) == 0 && len(free) == 0 {
			if err := reap(); err != nil {
				return err
			}
		}
	}
	for len(expect) > 0 {
		if err := reap(); err != nil {
			return err
		}
	}
	flush()
	return nil
}

func (s *propSide) post(slot int, rnd *rand.Rand) error {
	a := rnd.IntN(propRecvLen + 1)
	at := propRecv + slot*propRecvLen
	_, err := s.qp.PostRecv([]rdma.RecvWR{{ID: uint64(slot), SGE: []rdma.SGE{s.sge(at, a), s.sge(at+a, propRecvLen-a)}}})
	if err == nil {
		s.credit <- struct{}{}
	}
	return err
}

// propPatience is for a machine that does much else, under the race detector.
const propPatience = 2 * time.Minute

// receive checks what the peer's plan sends.
func (s *propSide) receive(rnd *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), propPatience)
	defer cancel()
	for i := range s.peer.plan {
		op := &s.peer.plan[i]
		if op.kind != rdma.OpSend && op.kind != rdma.OpSendInvalidate {
			continue
		}
		var wc [1]rdma.WC
		if _, err := s.rcq.Wait(ctx, wc[:], false); err != nil {
			return fmt.Errorf("%w; %w", err, s.qp.Err())
		}
		c := wc[0]
		at := propRecv + int(c.ID)*propRecvLen
		inv := op.kind == rdma.OpSendInvalidate
		if c.Status != rdma.StatusSuccess || c.Op != rdma.OpRecv || c.Bytes != op.n || c.Invalidated != inv || inv && c.InvalidatedKey != s.windows[op.window].RKey() {
			return fmt.Errorf("operation %d: received %+v, want %+v; %w", i, c, op, s.qp.Err())
		}
		if !bytes.Equal(s.buf[at:at+op.n], s.peer.model[propSource+op.source:][:op.n]) {
			return fmt.Errorf("operation %d: the Send of %d bytes differs", i, op.n)
		}
		clear(s.buf[at : at+propRecvLen])
		if err := s.post(int(c.ID), rnd); err != nil {
			return err
		}
	}
	return nil
}

// Random operations in both directions at once, by every kind of connection and segmentation: every byte of memory is what a model says.
func TestRandomOperations(t *testing.T) {
	seed := rand.Uint64()
	if v := os.Getenv("ISERGATE_SEED"); v != "" {
		fmt.Sscan(v, &seed)
	}
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	for round := range rounds {
		under := []conns{overTCP, overPipe}[rnd.IntN(2)]
		how := "whole"
		if max := []int{0, 31, 300, 5000}[rnd.IntN(4)]; max > 0 {
			under, how = shaken(under, rnd.Uint64(), max), fmt.Sprint("cut ", max)
		}
		opt := func() Options {
			return Options{NoCRC: rnd.IntN(2) == 0, MaxULPDU: []int{0, minULPDU, 131, 500, 1442, 8000, maxULPDU}[rnd.IntN(7)]}
		}
		oi, or := opt(), opt()
		oi.PeerToPeer = rnd.IntN(2) == 0
		oi.RTR = RTR(1 + rnd.IntN(7))
		if !oi.PeerToPeer {
			oi.Revision = 1 + rnd.IntN(2)
		}
		depth := rdma.ConnParams{IRD: 1 + rnd.IntN(4), ORD: 1 + rnd.IntN(4)}
		t.Run(fmt.Sprintf("%d %s, %+v, %+v, %+v", round, how, oi, or, depth), func(t *testing.T) {
			i, r := &propSide{end: newEnd(t, oi)}, &propSide{end: newEnd(t, or)}
			i.peer, r.peer = r, i
			i.anyOrder, r.anyOrder = rnd.IntN(2) == 0, rnd.IntN(2) == 0
			propRun(t, under, i, r, depth, rnd)
		})
		if t.Failed() {
			return
		}
	}
}

func propRun(t *testing.T, under conns, i, r *propSide, depth rdma.ConnParams, rnd *rand.Rand) {
	sides := []*propSide{i, r}
	for k, s := range sides {
		s.credit = make(chan struct{}, propOps+propRecvs)
		var err error
		if s.rcq, err = s.p.CreateCQ(1024); err != nil {
			t.Fatal(err)
		}
		s.separate = s.rcq
		pattern(rnd.Uint64()+uint64(k), s.buf[propSource:propSource+propPart])
		s.model = bytes.Clone(s.buf)
	}
	// Both serve as many Reads as the other issues, or revision 1 would not agree.
	deep := rdma.ConnParams{IRD: max(depth.IRD, depth.ORD), ORD: min(depth.IRD, depth.ORD)}
	connect(t, under, i.end, r.end, deep, deep)
	var each sync.WaitGroup
	errs := make(chan error, 4)
	for _, s := range sides {
		for k := range propRecvs {
			if err := s.post(k, rnd); err != nil {
				t.Fatal(err)
			}
		}
		for k := range propWindows {
			s.windows = append(s.windows, s.bind(k*propWindow, propWindow, rdma.RemoteRead|rdma.RemoteWrite))
		}
	}
	for _, s := range sides {
		s.makePlan(rnd)
	}
	for _, s := range sides {
		for k, f := range []func(*rand.Rand) error{s.issue, s.receive} {
			own := rand.New(rand.NewPCG(rnd.Uint64(), uint64(k)))
			each.Add(1)
			go func() {
				defer each.Done()
				if err := f(own); err != nil {
					errs <- err
					s.qp.Disconnect()
				}
			}()
		}
	}
	each.Wait()
	select {
	case err := <-errs:
		t.Fatal(err)
	default:
	}
	i.qp.Close()
	r.qp.Close()
	for _, s := range sides {
		for _, w := range s.windows {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		}
		if !bytes.Equal(s.buf, s.model) {
			t.Error("memory differs from the model")
		}
	}
}
