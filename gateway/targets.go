package gateway

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/gateway/units"
)

// findTarget returns the entry of a target.
func findTarget(s *catalog.State, name string) (*catalog.Target, error) {
	if t := s.Target(strings.ToLower(name)); t != nil {
		return t, nil
	}
	return nil, notFound("there is no target %q: see \"isergate target list\", or make it with \"isergate target create\"", name)
}

// addTarget adds a target to the catalogue.
func addTarget(s *catalog.State, name string) error {
	if s.Target(name) != nil {
		return conflict("there is a target %s already", name)
	}
	if len(s.Targets) >= catalog.MaxTargets {
		return conflict("there are %d targets already, which is the most", catalog.MaxTargets)
	}
	s.Targets = append(s.Targets, catalog.Target{Name: name})
	return nil
}

func checkLUN(number int) error {
	if number < 0 || number > catalog.MaxLUN {
		return fmt.Errorf("LUN %d is outside 0 to %d", number, catalog.MaxLUN)
	}
	return nil
}

// mapLUN maps a volume at a target of the catalogue, at the lowest free number if none is given.
func mapLUN(s *catalog.State, target string, id uuid.UUID, number *int) (catalog.LUN, error) {
	t, err := findTarget(s, target)
	if err != nil {
		return catalog.LUN{}, err
	}
	lun := catalog.LUN{Volume: id}
	if number == nil {
		free, ok := t.FreeLUN()
		if !ok {
			return catalog.LUN{}, conflict("target %s has no free LUN: use another target", t.Name)
		}
		lun.Number = free
	} else {
		if err := checkLUN(*number); err != nil {
			return catalog.LUN{}, invalid("%w", err)
		}
		lun.Number = uint16(*number)
	}
	if taken := t.LUN(lun.Number); taken != nil {
		return catalog.LUN{}, conflict("LUN %d of target %s is taken: choose another, or leave --lun out", lun.Number, t.Name)
	}
	for _, other := range t.LUNs {
		if other.Volume == id {
			return catalog.LUN{}, conflict("the volume is mapped at target %s already, as LUN %d", t.Name, other.Number)
		}
	}
	t.LUNs = append(t.LUNs, lun)
	slices.SortFunc(t.LUNs, func(a, b catalog.LUN) int { return int(a.Number) - int(b.Number) })
	return lun, nil
}

// describeTarget is the API's view of a target.
func (n *Node) describeTarget(s *catalog.State, t *catalog.Target) api.Target {
	out := api.Target{Name: t.Name, LUNs: []api.LUN{}, ACLs: []api.ACL{}, Open: n.open(t.Name), Sessions: n.front.sessionsOf(t.Name)}
	for _, lun := range t.LUNs {
		out.LUNs = append(out.LUNs, describeLUN(s, lun))
	}
	for _, acl := range t.ACLs {
		out.ACLs = append(out.ACLs, describeACL(acl))
	}
	return out
}

func describeLUN(s *catalog.State, lun catalog.LUN) api.LUN {
	out := api.LUN{Number: lun.Number, UUID: lun.Volume.String()}
	if v := s.VolumeByID(lun.Volume); v != nil {
		out.Volume = v.Name
	}
	return out
}

func describeACL(acl catalog.ACL) api.ACL {
	out := api.ACL{Initiator: acl.Initiator}
	if acl.CHAP != nil {
		out.CHAPUser, out.MutualUser = acl.CHAP.User, acl.CHAP.MutualUser
	}
	return out
}

// Targets implements api.Service.
func (n *Node) Targets(context.Context) ([]api.Target, error) {
	state := n.catalog.State()
	out := []api.Target{}
	for i := range state.Targets {
		out = append(out, n.describeTarget(&state, &state.Targets[i]))
	}
	slices.SortFunc(out, func(a, b api.Target) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// change runs an administrator's change of the catalogue and brings it into force.
func (n *Node) change(f func(*catalog.State) error) (catalog.State, error) {
	n.admin.Lock()
	defer n.admin.Unlock()
	state, err := n.catalog.Update(f)
	if err != nil {
		return state, err
	}
	n.front.refresh(state)
	return state, nil
}

// CreateTarget implements api.Service.
func (n *Node) CreateTarget(_ context.Context, r api.CreateTarget) (api.Target, error) {
	name, err := catalog.CheckName(r.Name)
	if err != nil {
		return api.Target{}, invalid("%w", err)
	}
	state, err := n.change(func(s *catalog.State) error { return addTarget(s, name) })
	if err != nil {
		return api.Target{}, err
	}
	return n.describeTarget(&state, state.Target(name)), nil
}

// DeleteTarget implements api.Service.
func (n *Node) DeleteTarget(_ context.Context, target string) error {
	_, err := n.change(func(s *catalog.State) error {
		t, err := findTarget(s, target)
		if err != nil {
			return err
		}
		if used := n.front.sessionsOf(t.Name); used > 0 {
			return conflict("target %s has %s: log the initiators out first, see \"isergate session list\"", t.Name, units.Count(used, "session"))
		}
		name := t.Name
		s.Targets = slices.DeleteFunc(s.Targets, func(t catalog.Target) bool { return t.Name == name })
		return nil
	})
	return err
}

// MapLUN implements api.Service.
func (n *Node) MapLUN(_ context.Context, target string, r api.MapLUN) (api.LUN, error) {
	var lun catalog.LUN
	state, err := n.change(func(s *catalog.State) error {
		entry, err := find(s, r.Volume)
		if err != nil {
			return err
		}
		if entry.Deleting != nil {
			return conflict("volume %s is being deleted", entry.Name)
		}
		lun, err = mapLUN(s, target, entry.ID, r.LUN)
		return err
	})
	if err != nil {
		return api.LUN{}, err
	}
	return describeLUN(&state, lun), nil
}

// UnmapLUN implements api.Service.
func (n *Node) UnmapLUN(_ context.Context, target string, number uint16) error {
	_, err := n.change(func(s *catalog.State) error {
		t, err := findTarget(s, target)
		if err != nil {
			return err
		}
		if t.LUN(number) == nil {
			return notFound("target %s has no LUN %d: see \"isergate target list\"", t.Name, number)
		}
		t.LUNs = slices.DeleteFunc(t.LUNs, func(l catalog.LUN) bool { return l.Number == number })
		return nil
	})
	return err
}

// AddACL implements api.Service.
func (n *Node) AddACL(ctx context.Context, target string, r api.AddACL) (api.ACL, error) {
	initiator, err := catalog.CheckName(r.Initiator)
	if err != nil {
		return api.ACL{}, invalid("%w", err)
	}
	acl := catalog.ACL{Initiator: initiator}
	if r.CHAPUser != "" || len(r.CHAPSecret) > 0 || r.MutualUser != "" || len(r.MutualSecret) > 0 {
		acl.CHAP = &catalog.CHAP{User: r.CHAPUser, Secret: r.CHAPSecret, MutualUser: r.MutualUser, MutualSecret: r.MutualSecret}
		if err := acl.CHAP.Check(); err != nil {
			return api.ACL{}, invalid("%w", err)
		}
	}
	added := describeACL(acl)
	_, err = n.change(func(s *catalog.State) error {
		t, err := findTarget(s, target)
		if err != nil {
			return err
		}
		if old := t.ACL(initiator); old != nil {
			was := describeACL(*old)
			*old, added.Replaced = acl, &was
			return nil
		}
		if len(t.ACLs) >= catalog.MaxACLsPerTarget {
			return conflict("target %s has %d ACL entries already, which is the most", t.Name, catalog.MaxACLsPerTarget)
		}
		t.ACLs = append(t.ACLs, acl)
		return nil
	})
	if err != nil {
		return api.ACL{}, err
	}
	if added.Replaced != nil { // whoever is logged in proves itself anew
		if err := n.front.drop(ctx, initiator, strings.ToLower(target)); err != nil {
			return api.ACL{}, fmt.Errorf("the entry is in force, but sessions from before have not ended: %w", err)
		}
	}
	return added, nil
}

// RemoveACL implements api.Service.
func (n *Node) RemoveACL(ctx context.Context, target, initiator string) error {
	initiator = strings.ToLower(initiator)
	_, err := n.change(func(s *catalog.State) error {
		t, err := findTarget(s, target)
		if err != nil {
			return err
		}
		if t.ACL(initiator) == nil {
			return notFound("target %s has no ACL entry for %s", t.Name, initiator)
		}
		t.ACLs = slices.DeleteFunc(t.ACLs, func(a catalog.ACL) bool { return a.Initiator == initiator })
		return nil
	})
	if err != nil || n.open(strings.ToLower(target)) {
		return err
	}
	if err := n.front.drop(ctx, initiator, strings.ToLower(target)); err != nil {
		return fmt.Errorf("the entry is removed, but sessions from before have not ended: %w", err)
	}
	return nil
}
