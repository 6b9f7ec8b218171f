package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/tcp"
)

// logoutTimeout bounds the end of all sessions at a stop: commands that wait for a level
// longer than this are aborted, unacknowledged.
const logoutTimeout = 10 * time.Second

// portals are the listeners of a front.
type portals struct {
	running sync.WaitGroup
	list    []api.Portal // in the order of the configuration
}

// newFront makes the iSCSI side. It listens nowhere yet.
func newFront(n *Node) (*front, error) {
	f := &front{n: n, targets: map[string]*target{}}
	var err error
	f.server, err = iscsi.NewServer(iscsi.Options{Backend: f, Registerer: n.registry, Logger: n.log})
	return f, err
}

// listen serves the portals. Either all of them are served, or none and an error.
func (f *front) listen(list []config.Portal) error {
	var listeners []iscsi.Listener
	for _, p := range list {
		l, err := net.Listen("tcp", p.Listen)
		if err != nil {
			for _, l := range listeners {
				_ = l.Close()
			}
			advice := "choose another address with --portal"
			if errors.Is(err, syscall.EADDRINUSE) {
				advice = "stop what listens there (another iSCSI target?), or " + advice
			}
			return fmt.Errorf("portal %s: %w: %s", p.Listen, err, advice)
		}
		listeners = append(listeners, tcp.NewListener(l))
		f.portals.list = append(f.portals.list, api.Portal{Listen: l.Addr().String(), Advertise: p.Advertise})
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

// close takes no more commands and returns when those under way have ended.
func (f *front) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, logoutTimeout)
	defer cancel()
	err := f.server.Shutdown(ctx)
	f.portals.running.Wait()
	return err
}
