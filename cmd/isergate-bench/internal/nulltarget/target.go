package nulltarget

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/portal"
	"github.com/isergate/isergate/iser/scsi"
)

// Arg makes a program call Main.
const Arg = "null-target"

// iserMemory is the bound of what iSER connections receive into, as it is by default in a gateway.
const iserMemory = 128 << 20

// Target is the name of the target; its unit is LUN 0.
const Target = "iqn.2026-11.com.example:null"

// Addresses are where a null target listens.
type Addresses struct {
	Portal string `json:"portal"` // iSCSI/TCP and iSER; CRCs and digests if the initiator wants them
	// Debug serves profiles, as the pprof of a gateway does, and at /allocations the number of allocations so far.
	Debug string `json:"debug"`
}

// Main is the main function of a process that is a null target. It writes its Addresses to out, in JSON, and serves until in ends.
func Main(in io.Reader, out io.Writer) error {
	m, err := newMedium()
	if err != nil {
		return err
	}
	unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: m, Identity: scsi.Identity{UUID: [16]byte{15: 1}}})
	if err != nil {
		return err
	}
	units := scsi.NewInventory()
	if err := units.Map(0, unit); err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	server, err := iscsi.NewServer(iscsi.Options{Backend: backend{units}, Logger: log, LogoutWait: time.Millisecond})
	if err != nil {
		return err
	}
	memory, err := arena.New(iserMemory)
	if err != nil {
		return err
	}
	iser, err := portal.NewISER(portal.ISEROptions{Regions: [][]byte{m.memory}, Memory: memory, NoCRC: true, Logger: log})
	if err != nil {
		return err
	}
	address, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	listener, err := portal.Serve(address, portal.Options{ISER: iser, Logger: log})
	if err != nil {
		return err
	}
	debug, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- server.Serve(listener, iscsi.Portal{}) }()
	go func() { ended <- http.Serve(debug, handler()) }()
	if err := json.NewEncoder(out).Encode(Addresses{Portal: address.Addr().String(), Debug: debug.Addr().String()}); err != nil {
		return err
	}
	over := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, in)
		over <- err
	}()
	select {
	case err := <-ended:
		return err
	case err := <-over:
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		return errors.Join(err, server.Shutdown(ctx))
	}
}

// backend lets everybody in.
type backend struct{ units *scsi.Inventory }

// Authorize implements iscsi.Backend.
func (b backend) Authorize(_ context.Context, _, target string) (iscsi.Access, error) {
	if target != "" && target != Target {
		return iscsi.Access{}, iscsi.ErrNotFound
	}
	return iscsi.Access{Units: b.units}, nil
}

// Targets implements iscsi.Backend.
func (b backend) Targets(context.Context, string) []string { return []string{Target} }

func handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /allocations", func(w http.ResponseWriter, _ *http.Request) {
		var s runtime.MemStats
		runtime.ReadMemStats(&s) // exact, other than runtime/metrics
		fmt.Fprint(w, s.Mallocs)
	})
	return mux
}
