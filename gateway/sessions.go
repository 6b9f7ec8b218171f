package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/portal"
)

// logoutTimeout bounds the end of all sessions at a stop: commands that wait for a level
// longer than this are aborted, unacknowledged.
const logoutTimeout = 10 * time.Second

// portals are the listeners of a front.
type portals struct {
	running sync.WaitGroup
	list    []api.Portal // in the order of the configuration
	metrics *portal.Metrics

	// What iSER stands on; nil if no portal serves it.
	iser   *portal.ISER
	memory *arena.Arena
}

// newFront makes the iSCSI side. It listens nowhere yet.
func newFront(n *Node) (*front, error) {
	f := &front{n: n, targets: map[string]*target{}}
	var err error
	if f.server, err = iscsi.NewServer(iscsi.Options{Backend: f, Registerer: n.registry, Logger: n.log}); err != nil {
		return f, err
	}
	f.portals.metrics = portal.NewMetrics(n.registry)
	if !slices.ContainsFunc(n.cfg.Portals, func(p config.Portal) bool { return p.Transport != config.TransportTCP }) {
		return f, nil
	}
	if f.portals.memory, err = arena.New(int64(n.cfg.ISER.Memory)); err != nil {
		return f, fmt.Errorf("iser.memory: %w", err)
	}
	f.portals.iser, err = portal.NewISER(portal.ISEROptions{
		Regions: n.engine.Regions(), Memory: f.portals.memory, NoCRC: n.cfg.ISER.NoCRC, Registerer: n.registry, Logger: n.log,
	})
	return f, err
}

// listen serves the portals. Either all of them are served, or none and an error.
func (f *front) listen(list []config.Portal) (err error) {
	var listeners []iscsi.Listener
	defer func() {
		if err != nil {
			for _, l := range listeners {
				_ = l.Close()
			}
		}
	}()
	for _, p := range list {
		transport, err := portal.ParseTransport(p.Transport)
		if err != nil {
			return fmt.Errorf("portal %s: %w", p.Listen, err)
		}
		nl, err := listenPortal(p)
		if err != nil {
			return err
		}
		l, err := portal.Serve(nl, portal.Options{Transport: transport, ISER: f.portals.iser, Metrics: f.portals.metrics, Logger: f.n.log})
		if err != nil {
			_ = nl.Close()
			return fmt.Errorf("portal %s: %w", p.Listen, err)
		}
		listeners = append(listeners, l)
		f.portals.list = append(f.portals.list, api.Portal{Listen: l.Addr().String(), Advertise: p.Advertise, Transport: p.Transport})
	}
	for i, l := range listeners {
		f.portals.running.Go(func() {
			if err := f.server.Serve(l, iscsi.Portal{Advertise: list[i].Advertise, Group: 1}); err != nil && !f.n.stopping.Load() {
				f.n.log.Error("a portal failed", "portal", list[i].Listen, "err", err)
			}
		})
	}
	return nil
}

// listenPortal listens at the address of a portal.
func listenPortal(p config.Portal) (net.Listener, error) {
	l, err := net.Listen("tcp", p.Listen)
	if err == nil {
		return l, nil
	}
	advice := "choose another address with --portal"
	if errors.Is(err, syscall.EADDRINUSE) {
		advice = "stop what listens there (another iSCSI target?), or " + advice
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err // the rest of it names the address once more
	}
	return nil, fmt.Errorf("portal %s: %w: %s", p.Listen, err, advice)
}

// checkPortals finds out whether all portals can be listened on. For a node that has no data directory yet: it is to make
// none, and no journal, if it then could not serve. Where there is one, who holds it is the better thing to say.
func checkPortals(dir string, list []config.Portal) error {
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var errs []error
	for _, p := range list {
		l, err := listenPortal(p)
		if err == nil {
			err = l.Close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// addresses are where initiators can connect to, as they are advertised.
func (f *front) addresses() []string {
	var out []string
	for _, p := range f.portals.list {
		if p.Advertise != "" {
			out = append(out, p.Advertise)
		} else {
			out = append(out, p.Listen)
		}
	}
	return out
}

// sessions describes all sessions.
func (f *front) sessions() []api.Session {
	out := []api.Session{}
	for _, s := range f.server.Sessions() {
		session := api.Session{
			Target: s.Target, Initiator: s.Initiator, ISID: fmt.Sprintf("%x", s.ISID[:]), TSIH: s.TSIH, Discovery: s.Discovery,
			Transport: s.Transport, Started: s.Started.UTC(), Running: s.Running, Commands: s.Commands, Connections: []string{},
		}
		for _, c := range s.Connections {
			session.Connections = append(session.Connections, c.Remote)
		}
		out = append(out, session)
	}
	slices.SortFunc(out, func(a, b api.Session) int {
		if c := strings.Compare(a.Target, b.Target); c != 0 {
			return c
		}
		return strings.Compare(a.Initiator+a.ISID, b.Initiator+b.ISID)
	})
	return out
}

// sessionsOf counts the normal sessions of a target; of all targets if target is empty.
func (f *front) sessionsOf(target string) (count int) {
	for _, s := range f.server.Sessions() {
		if !s.Discovery && (target == "" || s.Target == target) {
			count++
		}
	}
	return count
}

// drop ends the sessions of an initiator whose access changed; it may log in
// again as far as it still may.
func (f *front) drop(ctx context.Context, initiator, target string) error {
	ctx, cancel := context.WithTimeout(ctx, logoutTimeout)
	defer cancel()
	return f.server.DropInitiator(ctx, initiator, target)
}

// close takes no more commands and returns when those under way have ended, or with ctx: then it fails. Unless it failed no connection touches
// memory of the engine any more; what one still has is not given back to the system (arena.Close).
func (f *front) close(ctx context.Context) error {
	var errs []error
	if f.server != nil {
		logout, cancel := context.WithTimeout(ctx, logoutTimeout)
		defer cancel()
		errs = append(errs, f.server.Shutdown(logout))
	}
	f.portals.running.Wait()
	if f.portals.iser != nil {
		errs = append(errs, f.portals.iser.Close(ctx))
	}
	if f.portals.memory != nil {
		errs = append(errs, f.portals.memory.Close())
	}
	return errors.Join(errs...)
}
