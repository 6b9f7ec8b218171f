package gateway

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/iser/scsi"
)

// volume is one volume of this node: what the engine serves, and the logical unit on it.
type volume struct {
	node      *Node
	id        uuid.UUID
	name      string
	blockSize int32
	size      atomic.Int64                 // bytes; only grows
	engine    atomic.Pointer[cache.Volume] // nil while the engine does not have it
	unit      *scsi.LogicalUnit
	stats     *volumeStats
	// forgetting is set once the engine was told to drop the volume: what the bucket is to keep is there.
	forgetting atomic.Bool

	mu      sync.Mutex // guards openErr
	openErr error      // why engine is nil
}

// newVolume makes the shell of a volume and its logical unit.
func (n *Node) newVolume(entry catalog.Volume) (*volume, error) {
	v := &volume{node: n, id: entry.ID, name: entry.Name, blockSize: entry.BlockSize, stats: n.stats.of(entry.Name)}
	v.size.Store(entry.SizeBytes)
	var err error
	v.unit, err = scsi.NewLogicalUnit(scsi.Options{
		Medium:   medium{v},
		Identity: scsi.Identity{UUID: entry.ID, Serial: entry.ID.String()},
		Logger:   n.log.With("volume", entry.Name),
	})
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", entry.Name, err)
	}
	return v, nil
}

// config returns what the engine opens the volume with.
func (n *Node) config(ctx context.Context, entry catalog.Volume) (cache.VolumeConfig, error) {
	bucket, err := n.buckets.open(ctx, entry.Bucket)
	if err != nil {
		return cache.VolumeConfig{}, err
	}
	return cache.VolumeConfig{
		ID: entry.ID, Name: entry.Name, SizeBytes: entry.SizeBytes, BlockSize: entry.BlockSize,
		Policy: entry.Policy, DirtyBudget: entry.DirtyBudget, WriteThrough: entry.WriteThrough, Bucket: bucket,
	}, nil
}

// openVolume has the engine serve a volume of the catalogue. A volume that cannot be opened stays in the
// list with the reason; the others are served.
func (n *Node) openVolume(ctx context.Context, entry catalog.Volume) (*volume, error) {
	v, err := n.newVolume(entry)
	if err != nil {
		return nil, err
	}
	config, err := n.config(ctx, entry)
	if err == nil {
		var opened *cache.Volume
		opened, err = n.engine.Volume(ctx, config)
		if opened != nil {
			v.serve(opened)
		}
	}
	if err != nil {
		v.mu.Lock()
		v.openErr = err
		v.mu.Unlock()
		n.log.Error("volume is not served", "volume", entry.Name, "uuid", entry.ID, "err", err)
		n.event("error", "volume_not_opened", entry.ID, err.Error())
	}
	return v, nil
}

// serve connects the volume with the engine's.
func (v *volume) serve(opened *cache.Volume) {
	v.size.Store(opened.Status().Config.SizeBytes)
	v.engine.Store(opened)
}

// policy is the policy in force.
func (v *volume) policy() cache.Policy {
	s := v.node.catalog.State()
	if entry := s.VolumeByID(v.id); entry != nil {
		return entry.Policy.Effective(entry.WriteThrough)
	}
	return cache.DefaultPolicy
}

// setWriteCache is an initiator's MODE SELECT of WCE. It is durable when it returns.
func (v *volume) setWriteCache(enabled bool) error {
	v.node.admin.Lock()
	defer v.node.admin.Unlock()
	engine := v.engine.Load()
	if engine == nil {
		return scsi.ErrNotReady
	}
	state := v.node.catalog.State()
	entry := state.VolumeByID(v.id)
	if entry == nil {
		return scsi.ErrNotReady
	}
	changed := *entry
	changed.WriteThrough = !enabled
	if err := v.node.putPolicy(engine, *entry, changed); err != nil {
		return err
	}
	v.node.log.Info("write cache switched by initiator", "volume", v.name, "enabled", enabled)
	return nil
}

// status describes the volume for people and metrics.
func (v *volume) status() cache.Status {
	if engine := v.engine.Load(); engine != nil {
		return engine.Status()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	s := cache.Status{State: cache.StateFailed}
	if v.openErr != nil {
		s.Reason = v.openErr.Error()
	}
	return s
}

// describe is the API's view of a volume.
func (n *Node) describe(v *volume, state *catalog.State) api.Volume {
	entry, s := state.VolumeByID(v.id), v.status()
	if entry == nil { // it was deleted a moment ago
		entry = &catalog.Volume{ID: v.id, Name: v.name, BlockSize: v.blockSize}
	}
	out := api.Volume{
		Name: entry.Name, UUID: entry.ID.String(), SizeBytes: v.size.Load(), BlockSize: entry.BlockSize,
		Policy:       api.Policy{Ack: entry.Policy.Ack.String(), Flush: entry.Policy.Flush.String(), OnUnmet: entry.Policy.OnUnmet.String()},
		WriteThrough: entry.WriteThrough, Contract: entry.Policy.Effective(entry.WriteThrough).Sentence(),
		ContractMet: s.ContractMet, State: string(s.State), Reason: s.Reason, Epoch: s.Epoch, Generation: s.Generation,
		Watermarks: api.Watermarks{
			Acked: apiWatermark(s.Watermarks.Acked), Local: apiWatermark(s.Watermarks.Local),
			Quorum: apiWatermark(s.Watermarks.Quorum), Object: apiWatermark(s.Watermarks.Object),
		},
		DirtyBytes: s.DirtyBytes, DirtyBudgetBytes: s.DirtyBudgetBytes, ObjectBytes: s.ObjectBytes, LastObjectError: s.LastObjectError,
		Bucket: entry.Bucket, Created: entry.Created, Mappings: []api.Mapping{},
	}
	if t := n.buckets.trouble(entry.Bucket); t != nil { // newer than what destage gave up on
		out.LastObjectError, out.BucketDownSince = t.err.Error(), utc(t.since)
	}
	if !s.OldestDirty.IsZero() {
		out.OldestDirty = &s.OldestDirty
	}
	if s.State == cache.StateFenced {
		out.Reason += ": " + takeBack(state, entry)
	}
	if entry.Deleting != nil {
		out.State = stateDeleting
	}
	for _, m := range state.MappedAt(v.id) {
		out.Mappings = append(out.Mappings, api.Mapping{Target: m.Target, LUN: m.LUN})
	}
	return out
}

// takeBack says how a volume that is fenced here is taken back.
func takeBack(s *catalog.State, entry *catalog.Volume) string {
	var b strings.Builder
	b.WriteString("unmap and delete it here first")
	separator := " ("
	for _, m := range s.MappedAt(entry.ID) {
		fmt.Fprintf(&b, "%sisergate lun unmap %s %d", separator, m.Target, m.LUN)
		separator = "; "
	}
	fmt.Fprintf(&b, "%sisergate volume delete %s), which loses what only this node's journal holds, then: isergate volume restore --from '%s' --volume %s",
		separator, entry.Name, entry.Bucket, entry.ID)
	return b.String()
}

// stateDeleting is the state of a volume of which the node is letting go.
const stateDeleting = "deleting"

func apiWatermark(w cache.Watermark) api.Watermark {
	out := api.Watermark{LSN: uint64(w.LSN)}
	if !w.Time.IsZero() {
		out.Time = utc(w.Time)
	}
	return out
}

func utc(at time.Time) *time.Time {
	at = at.UTC()
	return &at
}
