// Package target runs our own iSCSI target on a unit in memory, for tests of the initiator.
package target

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/portal"
	"github.com/isergate/isergate/iser/rdma"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

// Names of what Start sets up.
const (
	Name      = "iqn.2026-01.com.example:own"
	OtherName = "iqn.2026-01.com.example:own-chap"
	LUN       = 0
)

// Server is a running target. Name is open, OtherName wants CHAP. Both have the same unit.
type Server struct {
	Portal string
	Medium *scsitest.Medium
	Target *iscsi.Server

	units *scsi.Inventory
	chap  *iscsi.CHAP
	gate  atomic.Pointer[Gate]
}

// Gate holds operations of the medium until it is opened.
type Gate struct {
	op      scsitest.Op
	Entered chan struct{} // one value for each operation that arrived
	open    chan struct{}
}

// Open lets all operations go on.
func (g *Gate) Open() { close(g.open) }

// Hold makes operations of the medium wait at the gate that it returns.
func (s *Server) Hold(op scsitest.Op) *Gate {
	g := &Gate{op: op, Entered: make(chan struct{}, 4096), open: make(chan struct{})}
	s.gate.Store(g)
	return g
}

func (s *Server) before(ctx context.Context, op scsitest.Op, _ scsi.Extent) error {
	g := s.gate.Load()
	if g == nil || g.op != op {
		return nil
	}
	g.Entered <- struct{}{}
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Authorize implements iscsi.Backend.
func (s *Server) Authorize(_ context.Context, _, target string) (iscsi.Access, error) {
	switch target {
	case "":
		return iscsi.Access{}, nil
	case Name:
		return iscsi.Access{Units: s.units}, nil
	case OtherName:
		return iscsi.Access{Units: s.units, CHAP: s.chap}, nil
	}
	return iscsi.Access{}, iscsi.ErrNotFound
}

// Targets implements iscsi.Backend.
func (s *Server) Targets(context.Context, string) []string { return []string{Name, OtherName} }

// Start runs a target over TCP with blocks of blockSize bytes until the test ends.
func Start(t testing.TB, o iscsi.Options, chap *iscsi.CHAP, blocks uint64, blockSize uint32) *Server {
	t.Helper()
	return start(t, o, nil, chap, blocks, blockSize)
}

// StartBoth is Start on a portal that speaks TCP, and iSER with memory m, and with CRC if the initiator asks for it.
func StartBoth(t testing.TB, o iscsi.Options, m rdma.Memory, chap *iscsi.CHAP, blocks uint64, blockSize uint32) *Server {
	t.Helper()
	i, err := portal.NewISER(portal.ISEROptions{Memory: m, NoCRC: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return start(t, o, i, chap, blocks, blockSize)
}

func start(t testing.TB, o iscsi.Options, i *portal.ISER, chap *iscsi.CHAP, blocks uint64, blockSize uint32) *Server {
	t.Helper()
	s := &Server{Medium: scsitest.NewMedium(blocks, blockSize), units: scsi.NewInventory(), chap: chap}
	s.Medium.Before = s.before
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: s.Medium, Identity: scsi.Identity{UUID: [16]byte{1}}})
	if err == nil {
		err = s.units.Map(LUN, unit)
	}
	if err != nil {
		t.Fatal(err)
	}
	o.Backend = s
	o.LogoutWait = time.Millisecond
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if s.Target, err = iscsi.NewServer(o); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Portal = l.Addr().String()
	var listener iscsi.Listener = tcp.NewListener(l)
	if i != nil {
		if listener, err = portal.Serve(l, portal.Options{ISER: i, Logger: o.Logger}); err != nil {
			t.Fatal(err)
		}
	}
	served := make(chan error, 1)
	go func() { served <- s.Target.Serve(listener, iscsi.Portal{}) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Target.Shutdown(ctx); err != nil {
			t.Errorf("shutdown of the target: %v", err)
		}
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) {
			t.Errorf("the target ended with %v", err)
		}
		if i != nil {
			if err := i.Close(ctx); err != nil {
				t.Errorf("the iSER target: %v", err)
			}
		}
		if n := s.Medium.Open(); n != 0 {
			t.Errorf("the target still holds %d buffers", n)
		}
	})
	return s
}
