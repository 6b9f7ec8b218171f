package initiator

import (
	"context"
	"errors"
	"net"
	"strings"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Portal is where a target listens.
type Portal struct {
	Address     string // host:port
	PortalGroup int    // TargetPortalGroupTag; -1 if the target did not say
}

// Target is what discovery finds.
type Target struct {
	Name    string
	Portals []Portal
}

// Discover asks the portal for all targets that the initiator may use. TargetName of o is ignored.
func Discover(ctx context.Context, portal string, o Options) ([]Target, error) {
	o.Portal, o.TargetName = portal, ""
	s, err := dial(ctx, o)
	if err != nil {
		return nil, err
	}
	targets, err := s.SendTargets(ctx, "All")
	return targets, errors.Join(err, s.Close())
}

// SendTargets asks for targets: "All" in a discovery session, "" for the session's own target in
// a normal session, or a name. A target without a TargetAddress listens at the portal of the session.
func (s *Session) SendTargets(ctx context.Context, which string) ([]Target, error) {
	pairs, err := s.Text(ctx, pdu.Pairs{{Key: "SendTargets", Value: which}})
	if err != nil {
		return nil, err
	}
	var targets []Target
	for _, p := range pairs {
		switch p.Key {
		case "TargetName":
			targets = append(targets, Target{Name: p.Value})
		case "TargetAddress":
			if len(targets) == 0 {
				return nil, protocolError("TargetAddress before TargetName")
			}
			portal, err := parsePortal(p.Value)
			if err != nil {
				return nil, err
			}
			t := &targets[len(targets)-1]
			t.Portals = append(t.Portals, portal)
		case "SendTargets":
			return nil, protocolError("SendTargets=%q answered with %s", which, p.Value)
		}
	}
	for i := range targets {
		if len(targets[i].Portals) == 0 {
			targets[i].Portals = []Portal{{Address: s.o.address(), PortalGroup: -1}}
		}
	}
	return targets, nil
}

// parsePortal decodes host[:port][,tag].
func parsePortal(s string) (Portal, error) {
	p := Portal{PortalGroup: -1}
	address, tag, tagged := strings.Cut(s, ",")
	if tagged {
		n, err := pdu.ParseNumber(tag, 0, 65535)
		if err != nil {
			return p, protocolError("TargetAddress=%q", s)
		}
		p.PortalGroup = int(n)
	}
	p.Address = withPort(address)
	if host, _, err := net.SplitHostPort(p.Address); err != nil || host == "" {
		return p, protocolError("TargetAddress=%q", s)
	}
	return p, nil
}
