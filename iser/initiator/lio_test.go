package initiator_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/oracle"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/lab/labtest"
)

// way is a way to log in to LIO. Soft-iWARP that receives from a connection with CRC finds errors in frames that have none when several
// commands are under way (their CRCs were recorded and checked): such sessions have one worker.
type way struct {
	name    string
	wire    iwarp.Options
	iser    *initiator.ISER // nil: TCP
	workers int
	// fetches says that the target can issue RDMA Reads. Soft-iWARP that accepts takes ORD 0 from a request of MPA revision 1, and cannot.
	fetches bool
	// long: only with ISERGATE_LONG=1. Soft-iWARP's errors end a part of the sessions with CRC, whatever we do.
	long bool
}

func (w way) options(t testing.TB, l *labtest.LIO) initiator.Options {
	o := initiator.Options{Portal: l.TCP, InitiatorName: l.Initiator, TargetName: l.Target, LoginTimeout: time.Minute, PingTimeout: time.Minute, TaskTimeout: time.Minute}
	if w.iser != nil {
		p, err := iwarp.New(w.wire)
		if err != nil {
			t.Fatal(err)
		}
		i := *w.iser
		i.Provider = p
		o.Portal, o.ISER = l.ISER, &i
	}
	return o
}

// The kernel's target over the kernel's soft-iWARP in a guest: discovery, login, I/O with the block oracle, task management, logout.
// ISERGATE_LONG=1 adds CRC, which LIO's side does not always survive, a cut, and a second guest.
func TestLIO(t *testing.T) {
	iser := &initiator.ISER{LaxStatSN: true}
	for _, boot := range []struct {
		name string
		lio  labtest.LIOOptions
		ways []way
	}{
		{"defaults", labtest.LIOOptions{}, []way{
			{"CRC", iwarp.Options{}, iser, 1, true, true},
			{"no CRC", iwarp.Options{NoCRC: true}, iser, 8, true, false},
			{"peer to peer", iwarp.Options{PeerToPeer: true}, iser, 1, true, true},
			{"RTR Read", iwarp.Options{PeerToPeer: true, RTR: iwarp.RTRRead, NoCRC: true}, iser, 4, true, false},
			{"revision 1", iwarp.Options{Revision: 1, NoCRC: true}, iser, 4, false, true},
			{"Ethernet's FPDUs", iwarp.Options{MaxULPDU: 1442, NoCRC: true}, iser, 4, true, false},
			{"no invalidation", iwarp.Options{NoCRC: true}, &initiator.ISER{NoInvalidate: true, LaxStatSN: true}, 4, true, true},
			{"delay", iwarp.Options{}, &initiator.ISER{StartDelay: time.Second}, 1, true, true},
			{"TCP", iwarp.Options{}, nil, 4, true, false},
		}},
		{"unsolicited data", labtest.LIOOptions{RNIC: []string{"peer_to_peer=1"}, Parameters: []string{"InitialR2T=No"}}, []way{
			{"no CRC", iwarp.Options{NoCRC: true}, iser, 4, true, true},
			{"peer to peer", iwarp.Options{PeerToPeer: true, NoCRC: true}, iser, 1, true, true},
		}},
	} {
		long := os.Getenv("ISERGATE_LONG") == "1"
		if boot.name != "defaults" && !long {
			continue
		}
		t.Run(boot.name, func(t *testing.T) {
			l := labtest.ServeLIO(t, boot.lio)
			for i, w := range boot.ways {
				if w.long && !long {
					continue
				}
				t.Run(w.name, func(t *testing.T) { lioSession(t, l, w, uint64(i)) })
			}
			if len(boot.lio.Parameters) == 0 {
				t.Run("CHAP", func(t *testing.T) { lioCHAP(t, l) })
				if long {
					t.Run("cut", func(t *testing.T) { lioCut(t, l) })
				}
			}
		})
	}
}

func lioContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), labtest.Limit)
	t.Cleanup(cancel)
	return ctx
}

func lioSeed(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 7))
}

// lioUnits opens logical unit 0 of the open target.
func lioUnits(o initiator.Options) oracle.Factory {
	return func(ctx context.Context) (oracle.Unit, uint32, func(), error) {
		s, err := initiator.Dial(ctx, o)
		if err != nil {
			return nil, 0, nil, err
		}
		u, err := s.OpenLUN(ctx, 0)
		if err != nil {
			return nil, 0, nil, errors.Join(err, s.Close())
		}
		return u, u.BlockSize, func() { s.Close() }, nil
	}
}

func lioSession(t *testing.T, l *labtest.LIO, w way, n uint64) {
	ctx, rng, o := lioContext(t), lioSeed(t), w.options(t, l)
	found, err := initiator.Discover(ctx, o.Portal, o)
	if err != nil {
		t.Fatal(err)
	}
	names := fmt.Sprint(found)
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Kill()
	t.Logf("%s\n%+v", names, s.Parameters())
	if s.Parameters().ISER != (w.iser != nil) {
		t.Errorf("iSER is %v", s.Parameters().ISER)
	}
	u, err := s.OpenLUN(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	// The oracle's region is that of this way, in blocks of 4096 bytes. LIO takes no longer WRITE SAME.
	const blocks = 512
	first := n * blocks
	longest := 64
	if !w.fetches {
		longest = 2 // goes as immediate data
	}
	h, err := oracle.NewHistory(oracle.Volume{1, byte(n)}, rng.Uint64(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	open := lioUnits(o)
	if w.fetches {
		if err := oracle.Initialize(ctx, open, h, first); err != nil {
			t.Fatal(err)
		}
	} else if err := oracle.Initialize(ctx, lioUnits(way{}.options(t, l)), h, first); err != nil { // over TCP
		t.Fatal(err)
	}
	res, err := oracle.Run(ctx, open, oracle.Options{
		History: h, First: first, Workers: w.workers, Operations: 100, MaxBlocks: longest, Seed: rng.Uint64(), ReadShare: 400, FlushShare: 20,
	})
	if err != nil {
		t.Fatalf("%+v, %v", res, err)
	}
	rep, err := h.Verify(ctx, oracle.UnitReader(u, first, u.BlockSize), oracle.KeepAcked)
	if err == nil {
		err = rep.Err()
	}
	if err != nil {
		t.Error(err)
	}
	if _, err := s.Ping(ctx, nil); err != nil {
		t.Error(err)
	}
	var status *initiator.StatusError
	if err := u.Read(ctx, u.Blocks, make([]byte, u.BlockSize)); !errors.As(err, &status) || status.Sense.Key != initiator.KeyIllegalRequest {
		t.Errorf("a read past the end: %v", err)
	}
	if luns, err := s.ReportLUNs(ctx); err != nil || len(luns) != 1 {
		t.Errorf("%x, %v", luns, err)
	}
	if err := s.LUNReset(ctx, 0); err != nil {
		t.Error(err)
	}
	if err := u.TestUnitReady(ctx); err != nil { // past the unit attention
		t.Error(err)
	}
	if err := s.Logout(ctx); err != nil {
		t.Error(err)
	}
}

func lioCHAP(t *testing.T, l *labtest.LIO) {
	ctx := lioContext(t)
	o := way{iser: new(initiator.ISER)}.options(t, l)
	o.TargetName = l.CHAPTarget
	o.CHAP = &initiator.CHAP{User: l.User, Secret: l.Secret, TargetUser: l.TargetUser, TargetSecret: l.TargetSecret, Algorithms: []initiator.CHAPAlgorithm{initiator.CHAPMD5}}
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.OpenLUN(ctx, 0); err != nil {
		t.Error(err)
	}
	if err := s.Logout(ctx); err != nil {
		t.Error(err)
	}
	o.CHAP.Secret = "another secret"
	// LIO closes the connection behind its answer, which may be lost with it.
	var refused *initiator.LoginError
	_, err = initiator.Dial(ctx, o)
	if errors.As(err, &refused) && refused.Status != pdu.LoginAuthFailure || refused == nil && !errors.Is(err, initiator.ErrConnection) {
		t.Errorf("a wrong secret: %v", err)
	}
}

// Sessions over iSER and TCP at once write to one unit, those over iSER are cut, and what was acknowledged is there in a new one.
func lioCut(t *testing.T, l *labtest.LIO) {
	ctx, rng := lioContext(t), lioSeed(t)
	iser, tcp := way{iser: &initiator.ISER{LaxStatSN: true}, wire: iwarp.Options{NoCRC: true}}.options(t, l), way{}.options(t, l)
	s, err := initiator.Dial(ctx, iser)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Kill()
	u, err := s.OpenLUN(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	const blocks = 512
	h, err := oracle.NewHistory(oracle.Volume{2}, rng.Uint64(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	if err := oracle.Initialize(ctx, lioUnits(tcp), h, 0); err != nil {
		t.Fatal(err)
	}
	turn := 0
	open := func(ctx context.Context) (oracle.Unit, uint32, func(), error) {
		if turn++; turn%2 == 0 {
			return lioUnits(tcp)(ctx)
		}
		return u, u.BlockSize, func() {}, nil
	}
	_, before := h.Counts()
	res, err := oracle.Run(ctx, open, oracle.Options{
		History: h, Workers: 8, Sessions: 2, MaxBlocks: 32, Seed: rng.Uint64(), ReadShare: 200,
		OnAck: func(n uint64) {
			if n == before+100 {
				s.Kill()
			}
		},
	})
	if !errors.Is(err, initiator.ErrConnection) && !errors.Is(err, initiator.ErrClosed) {
		t.Fatalf("%+v, %v", res, err)
	}
	if err := h.Crash(); err != nil {
		t.Fatal(err)
	}
	again, size, closeUnit, err := lioUnits(iser)(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer closeUnit()
	rep, err := h.Verify(ctx, oracle.UnitReader(again, 0, size), oracle.KeepAcked)
	if err == nil {
		err = rep.Err()
	}
	if err != nil {
		t.Error(err)
	}
}
