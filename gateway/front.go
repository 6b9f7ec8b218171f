package gateway

import (
	"context"
	"slices"
	"sync"

	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/scsi"
)

// front is the iSCSI side of a node: who may log in where, and what LUNs are there.
type front struct {
	n       *Node
	server  *iscsi.Server
	portals portals

	mu      sync.RWMutex // guards targets
	targets map[string]*target
}

// target is a target that is in force.
type target struct {
	entry     catalog.Target
	inventory *scsi.Inventory
}

var _ iscsi.Backend = (*front)(nil)

// Authorize implements iscsi.Backend.
func (f *front) Authorize(_ context.Context, initiator, name string) (iscsi.Access, error) {
	if f.n.stopping.Load() {
		return iscsi.Access{}, iscsi.ErrUnavailable
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if name == "" { // discovery: what it lists is what the initiator may use
		return iscsi.Access{}, nil
	}
	t := f.targets[name]
	if t == nil {
		return iscsi.Access{}, iscsi.ErrNotFound
	}
	access := iscsi.Access{Units: t.inventory}
	acl := t.entry.ACL(initiator)
	switch {
	case acl != nil && acl.CHAP != nil:
		access.CHAP = &iscsi.CHAP{
			User: acl.CHAP.User, Secret: acl.CHAP.Secret,
			MutualUser: acl.CHAP.MutualUser, MutualSecret: acl.CHAP.MutualSecret,
		}
	case acl == nil && !f.n.open(name):
		return iscsi.Access{}, iscsi.ErrForbidden
	}
	return access, nil
}

// Targets implements iscsi.Backend.
func (f *front) Targets(_ context.Context, initiator string) []string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var names []string
	for name, t := range f.targets {
		if t.entry.ACL(initiator) != nil || f.n.open(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// refresh brings the targets of the catalogue into force. Changes of a LUN map reach initiators that are
// logged in as unit attentions. It is called under the node's admin lock, or before anything is served.
func (f *front) refresh(state catalog.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.targets {
		if state.Target(name) == nil {
			f.remapLocked(f.targets[name], nil)
			delete(f.targets, name)
		}
	}
	for _, entry := range state.Targets {
		t := f.targets[entry.Name]
		if t == nil {
			t = &target{inventory: scsi.NewInventory()}
			f.targets[entry.Name] = t
		}
		t.entry = entry
		f.remapLocked(t, entry.LUNs)
	}
}

// remapLocked makes an inventory hold exactly the given LUNs.
func (f *front) remapLocked(t *target, want []catalog.LUN) {
	units := map[uint16]*scsi.LogicalUnit{}
	for _, lun := range want {
		if v := f.n.volume(lun.Volume); v != nil {
			units[lun.Number] = v.unit
		}
	}
	for _, lun := range t.inventory.LUNs() {
		if units[lun.Number] == lun.Unit {
			delete(units, lun.Number)
			continue
		}
		if err := t.inventory.Unmap(lun.Number); err != nil {
			f.n.log.Error("LUN was not unmapped", "target", t.entry.Name, "lun", lun.Number, "err", err)
		}
	}
	for number, unit := range units {
		if err := t.inventory.Map(number, unit); err != nil {
			f.n.log.Error("LUN was not mapped", "target", t.entry.Name, "lun", number, "err", err)
		}
	}
}
