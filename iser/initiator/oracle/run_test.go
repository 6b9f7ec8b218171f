package oracle

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/internal/target"
	"github.com/isergate/isergate/iser/initiator/internal/tgtd"
	"github.com/isergate/isergate/iser/iscsi"
)

// A real target is killed in the middle of writes, again and again. A process crash loses
// nothing that is in the page cache, so every acknowledged write must be there. There is no write-same: tgtd
// carries it out by sectors of 512 bytes, and the kill may tear a block of 4 KiB, as SCSI allows.
func TestTgtdKill(t *testing.T) {
	srv := tgtd.Start(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	rng, seed := seeded(t)
	const first, blocks = 256, 2048
	open := func(ctx context.Context) (Unit, uint32, func(), error) {
		s, err := initiator.Dial(ctx, initiator.Options{Portal: srv.Portal, InitiatorName: "iqn.2026-01.com.example:oracle", TargetName: tgtd.Target})
		if err != nil {
			return nil, 0, nil, err
		}
		l, err := s.OpenLUN(ctx, tgtd.LUN)
		if err != nil {
			s.Close()
			return nil, 0, nil, err
		}
		return l, l.BlockSize, func() { s.Close() }, nil
	}
	h, err := NewHistory(testVolume, seed, blocks)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	if err := h.Log(&log); err != nil {
		t.Fatal(err)
	}
	if err := Initialize(ctx, open, h, first); err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		acks := 100 + rng.Uint64N(200)
		_, before := h.Counts()
		var once sync.Once
		killed := make(chan struct{})
		res, err := Run(ctx, open, Options{
			History: h, First: first, Workers: 16, Sessions: 2, MaxBlocks: 64, Seed: rand.Uint64(),
			UnmapShare: 80, FlushShare: 20, ReadShare: 100, FUAShare: 50,
			OnAck: func(n uint64) {
				if n-before >= acks {
					once.Do(func() {
						srv.Kill()
						close(killed)
					})
				}
			},
		})
		t.Logf("round %d: %+v, %v", round, res, err)
		if !errors.Is(err, initiator.ErrConnection) && !errors.Is(err, initiator.ErrClosed) {
			t.Fatalf("the run ended with %v", err)
		}
		<-killed
		if err := h.Crash(); err != nil {
			t.Fatal(err)
		}
		srv.Restart()
		u, logical, closeUnit, err := open(ctx)
		if err != nil {
			t.Fatal(err)
		}
		rep, err := h.Verify(ctx, UnitReader(u, first, logical), KeepAcked)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d stamped, %d acknowledged updates overwritten or lost, %d of unacknowledged operations", rep.Stamped, rep.LostAcked, rep.KeptMaybe)
		if err := rep.Err(); err != nil {
			t.Fatal(err)
		}
		loaded, err := Load(bytes.NewReader(log.Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		if again, err := loaded.Verify(ctx, UnitReader(u, first, logical), KeepAcked); err != nil || again.Err() != nil {
			t.Fatalf("by the log: %v, %v", again.Err(), err)
		}
		closeUnit()
		if err := h.Rebase(rep); err != nil {
			t.Fatal(err)
		}
	}
}

// memUnit is a unit in memory that can lose writes while it acknowledges them.
type memUnit struct {
	mu    sync.Mutex
	data  []byte
	lose  int // number of the first write that is lost, counted from 1, with all after it; 0: none
	count int
}

const memLogical = 512

func (m *memUnit) Read(_ context.Context, lba uint64, p []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(p, m.data[lba*memLogical:])
	return nil
}

func (m *memUnit) Write(_ context.Context, lba uint64, p []byte, _ bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.count++; m.lose == 0 || m.count < m.lose {
		copy(m.data[lba*memLogical:], p)
	}
	return nil
}

func (m *memUnit) Flush(context.Context) error { return nil }

func (m *memUnit) Unmap(_ context.Context, ranges ...initiator.Range) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range ranges {
		clear(m.data[r.LBA*memLogical : (r.LBA+uint64(r.Blocks))*memLogical])
	}
	return nil
}

func (m *memUnit) WriteSame(_ context.Context, lba uint64, count uint32, block []byte, _ bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range uint64(count) {
		copy(m.data[(lba+i)*memLogical:], block)
	}
	return nil
}

func TestRunDetectsLoss(t *testing.T) {
	_, seed := seeded(t)
	ctx := context.Background()
	for _, lose := range []int{0, 40} {
		u := &memUnit{data: make([]byte, 512*BlockSize), lose: lose}
		open := func(context.Context) (Unit, uint32, func(), error) { return u, memLogical, func() {}, nil }
		h, err := NewHistory(testVolume, seed, 500)
		if err != nil {
			t.Fatal(err)
		}
		o := Options{History: h, First: 12, Workers: 8, Operations: 60, Seed: seed, MaxBlocks: 4, SameShare: 50, ZeroShare: 50, UnmapShare: 50, FlushShare: 50}
		res, err := Run(ctx, open, o)
		if err != nil || res.Operations == 0 || res.Acknowledged != res.Operations {
			t.Fatalf("%+v, %v", res, err)
		}
		rep, err := h.Verify(ctx, UnitReader(u, 12, memLogical), KeepAcked)
		if err != nil {
			t.Fatal(err)
		}
		if (rep.Violated > 0) != (lose > 0) && u.count >= lose {
			t.Errorf("lost writes from %d on: %v", lose, rep.Err())
		}
		// A read of the driver would have noticed too.
		o.ReadShare, o.Operations, o.SameShare, o.ZeroShare, o.UnmapShare, o.FlushShare = 1000, 2000, 0, 0, 0, 0
		_, err = Run(ctx, open, o)
		var v *Violation
		if errors.As(err, &v) != (lose > 0 && u.count >= lose) {
			t.Errorf("lost writes from %d on: reads found %v", lose, err)
		}
	}
}

func TestRunOptions(t *testing.T) {
	h := newHistory(t, 1)
	for _, o := range []Options{{}, {History: h, ReadShare: 1001}, {History: h, ReadShare: -1}, {History: h, Sessions: 3, Workers: 2}, {History: h, MaxBlocks: 5000}} {
		if _, err := Run(context.Background(), nil, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// Sessions to our own target are cut in the middle of writes, while the target lives on: it may still carry out what it had. All that
// was acknowledged must be there, through new sessions.
func TestOwnTargetCut(t *testing.T) {
	const first, blocks, logical = 64, 1024, 4096
	srv := target.Start(t, iscsi.Options{}, nil, first+blocks, logical)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	rng, seed := seeded(t)
	var mu sync.Mutex
	var sessions []*initiator.Session
	open := func(ctx context.Context) (Unit, uint32, func(), error) {
		s, err := initiator.Dial(ctx, initiator.Options{Portal: srv.Portal, InitiatorName: "iqn.2026-01.com.example:oracle", TargetName: target.Name})
		if err != nil {
			return nil, 0, nil, err
		}
		l, err := s.OpenLUN(ctx, target.LUN)
		if err != nil {
			s.Close()
			return nil, 0, nil, err
		}
		mu.Lock()
		sessions = append(sessions, s)
		mu.Unlock()
		return l, l.BlockSize, func() { s.Close() }, nil
	}
	h, err := NewHistory(testVolume, seed, blocks)
	if err != nil {
		t.Fatal(err)
	}
	if err := Initialize(ctx, open, h, first); err != nil {
		t.Fatal(err)
	}
	for round := range 4 {
		acks := 200 + rng.Uint64N(300)
		_, before := h.Counts()
		var once sync.Once
		res, err := Run(ctx, open, Options{
			History: h, First: first, Workers: 24, Sessions: 3, MaxBlocks: 64, Seed: rng.Uint64(),
			ZeroShare: 40, UnmapShare: 40, SameShare: 40, FlushShare: 20, ReadShare: 100, FUAShare: 50,
			OnAck: func(n uint64) {
				if n-before >= acks {
					once.Do(func() {
						mu.Lock()
						defer mu.Unlock()
						for _, s := range sessions {
							s.Kill()
						}
						sessions = nil
					})
				}
			},
		})
		t.Logf("round %d: %+v, %v", round, res, err)
		if !errors.Is(err, initiator.ErrConnection) && !errors.Is(err, initiator.ErrClosed) {
			t.Fatalf("the run ended with %v", err)
		}
		// A target has no open task of a session that is gone, once it says so.
		for len(srv.Target.Sessions()) > 0 {
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				t.Fatal("the target keeps the sessions")
			}
		}
		if err := h.Crash(); err != nil {
			t.Fatal(err)
		}
		u, size, closeUnit, err := open(ctx)
		if err != nil {
			t.Fatal(err)
		}
		rep, err := h.Verify(ctx, UnitReader(u, first, size), KeepAcked)
		closeUnit()
		if err == nil {
			err = rep.Err()
		}
		if err == nil {
			err = h.Rebase(rep)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
