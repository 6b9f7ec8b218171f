package portal_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/portal"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

const (
	host     = "iqn.2001-04.com.example:host"
	disk     = "iqn.2026-11.io.isergate:disk"
	patience = 30 * time.Second // after which a test has hung
)

// rig is a node in small: a target with one LUN in memory behind one portal.
type rig struct {
	t      testing.TB
	addr   string
	server *iscsi.Server
	portal *portal.Listener
	memory *arena.Arena
	log    *logBook
	units  *scsi.Inventory
	chap   *iscsi.CHAP
}

// settings of a rig.
type settings struct {
	portal portal.Options
	server iscsi.Options
	noCRC  bool
	memory int64 // bytes; default 64 MiB
	chap   *iscsi.CHAP
}

func (r *rig) Authorize(_ context.Context, _, target string) (iscsi.Access, error) {
	switch target {
	case "":
		return iscsi.Access{}, nil
	case disk:
		return iscsi.Access{Units: r.units, CHAP: r.chap}, nil
	}
	return iscsi.Access{}, iscsi.ErrNotFound
}

func (r *rig) Targets(context.Context, string) []string { return []string{disk} }

// logBook keeps what was logged.
type logBook struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newRig starts a node. When the test has ended, everything it lent must have come back.
func newRig(t testing.TB, s settings) *rig {
	t.Helper()
	r := &rig{t: t, units: scsi.NewInventory(), log: new(logBook), chap: s.chap}
	medium := scsitest.NewMedium(32768, 512)
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: medium, Identity: scsi.Identity{UUID: [16]byte{1}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.units.Map(0, unit); err != nil {
		t.Fatal(err)
	}
	logger := slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if s.memory == 0 {
		s.memory = 64 << 20
	}
	if r.memory, err = arena.New(s.memory); err != nil {
		t.Fatal(err)
	}
	r.memory.SetMangle(true)
	shared, err := portal.NewISER(portal.ISEROptions{Memory: r.memory, Logger: logger, NoCRC: s.noCRC})
	if err != nil {
		t.Fatal(err)
	}
	base := r.memory.Usage().UsedBytes
	s.server.Backend, s.server.Logger = r, logger
	if s.server.LogoutWait == 0 {
		s.server.LogoutWait = time.Millisecond
	}
	if r.server, err = iscsi.NewServer(s.server); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	s.portal.ISER, s.portal.Logger = shared, logger
	if r.portal, err = portal.Serve(l, s.portal); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(r.portal, iscsi.Portal{}) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := r.server.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			t.Errorf("Serve: %v", err)
		}
		await(t, "memory of connections comes back", func() bool { return r.memory.Usage().UsedBytes == base })
		if err := shared.Close(ctx); err != nil {
			t.Errorf("ISER.Close: %v", err)
		}
		if n := r.memory.Usage().UsedBytes; n != 0 {
			t.Errorf("%d bytes of the connections' memory were not given back", n)
		}
		if err := r.memory.Close(); err != nil {
			t.Error(err)
		}
		if n := medium.Open(); n != 0 {
			t.Errorf("%d landings or loans were not given back", n)
		}
		if t.Failed() {
			t.Logf("log:\n%s", r.log)
		}
	})
	return r
}

// await polls until ok, for states that nothing announces.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("timed out: %s", what)
		}
	}
}

// how an initiator logs in.
type how string

const (
	overTCP   how = "tcp"            // RFC 7143
	inSends   how = "iser, messages" // login in Sends, as Linux does
	onStream  how = "iser, stream"   // RFC 7145, 5.1.2
	discovery     = "iqn.1993-08.org.debian:discovery"
)

func (r *rig) options(h how) initiator.Options {
	o := initiator.Options{Portal: r.addr, InitiatorName: host, TargetName: disk}
	switch h {
	case inSends:
		o.ISER = &initiator.ISER{}
	case onStream:
		o.ISER = &initiator.ISER{Stream: true}
	}
	return o
}

func (r *rig) context() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	r.t.Cleanup(cancel)
	return ctx
}

// login logs in, which has to work.
func (r *rig) login(h how) (*initiator.Session, *initiator.LUN) {
	r.t.Helper()
	s, err := initiator.Dial(r.context(), r.options(h))
	if err != nil {
		r.t.Fatalf("login by %s: %v", h, err)
	}
	r.t.Cleanup(func() { s.Kill() })
	l, err := s.OpenLUN(r.context(), 0)
	if err != nil {
		r.t.Fatalf("LUN by %s: %v", h, err)
	}
	return s, l
}

// transports lists the normal sessions' transports.
func (r *rig) transports() map[string]int {
	out := map[string]int{}
	for _, s := range r.server.Sessions() {
		if !s.Discovery {
			out[s.Transport]++
		}
	}
	return out
}
