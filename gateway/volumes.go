package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/gateway/units"
	"github.com/isergate/isergate/objectstore"
)

// Sense of a unit attention that tells initiators to read what they know of the
// contract again (SPC-4, 7.5: mode parameters changed).
const ascModeParameters, ascqModeParameters = 0x2A, 0x01

// defaultWait bounds a persistence barrier that names no time.
const defaultWait = time.Minute

func invalid(format string, args ...any) error {
	return api.Errorf(api.CodeInvalid, format, args...)
}
func notFound(format string, args ...any) error {
	return api.Errorf(api.CodeNotFound, format, args...)
}
func conflict(format string, args ...any) error {
	return api.Errorf(api.CodeConflict, format, args...)
}

// find returns the entry of a volume by name, or by UUID.
func find(s *catalog.State, name string) (*catalog.Volume, error) {
	entry := s.Volume(name)
	if entry == nil {
		if id, err := uuid.Parse(name); err == nil {
			entry = s.VolumeByID(id)
		}
	}
	if entry == nil {
		return nil, notFound("there is no volume %q: see \"isergate volume list\"", name)
	}
	return entry, nil
}

// volumeByName returns a volume of this node that is not being deleted.
func (n *Node) volumeByName(name string) (*volume, *catalog.Volume, error) {
	state := n.catalog.State()
	entry, err := find(&state, name)
	if err != nil {
		return nil, nil, err
	}
	if entry.Deleting != nil {
		return nil, nil, conflict("volume %s is being deleted", entry.Name)
	}
	v := n.volume(entry.ID)
	if v == nil {
		return nil, nil, conflict("volume %s is not open yet", entry.Name)
	}
	return v, entry, nil
}

// served returns the engine's volume, or why there is none.
func (v *volume) served() (*cache.Volume, error) {
	if engine := v.engine.Load(); engine != nil {
		return engine, nil
	}
	return nil, api.Errorf(api.CodeUnavailable, "volume %s is not served: %s", v.name, v.status().Reason)
}

// Volumes implements api.Service.
func (n *Node) Volumes(context.Context) ([]api.Volume, error) {
	state := n.catalog.State()
	out := []api.Volume{}
	for _, v := range n.all() {
		out = append(out, n.describe(v, &state))
	}
	slices.SortFunc(out, func(a, b api.Volume) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Volume implements api.Service.
func (n *Node) Volume(_ context.Context, name string) (api.Volume, error) {
	state := n.catalog.State()
	entry, err := find(&state, name)
	if err != nil {
		return api.Volume{}, err
	}
	v := n.volume(entry.ID)
	if v == nil {
		return api.Volume{}, conflict("volume %s is not open yet", entry.Name)
	}
	return n.describe(v, &state), nil
}

// newEntry makes the catalogue entry that a request describes.
func (n *Node) newEntry(r api.CreateVolume) (catalog.Volume, error) {
	var faults []string
	fault := func(err error) {
		if err != nil {
			faults = append(faults, err.Error())
		}
	}
	fault(catalog.CheckVolumeName(r.Name))
	if r.BlockSize == 0 {
		r.BlockSize = 512
	}
	if r.BlockSize != 512 && r.BlockSize != 4096 {
		fault(fmt.Errorf("block size %d is neither 512 nor 4096", r.BlockSize))
		fault(checkSize(r.SizeBytes, 1))
	} else {
		fault(checkSize(r.SizeBytes, r.BlockSize))
	}
	policy := cache.DefaultPolicy
	fault(changePolicy(&policy, nonEmpty(r.Ack), nonEmpty(r.Flush), nonEmpty(r.OnUnmet)))
	fault(n.checkBudget(r.DirtyBudgetBytes))
	if r.Target != "" {
		_, err := catalog.CheckName(r.Target)
		fault(err)
	}
	if r.LUN != nil {
		fault(checkLUN(*r.LUN))
	}
	if faults != nil {
		return catalog.Volume{}, invalid("%s", strings.Join(faults, "; "))
	}
	return catalog.Volume{
		ID: uuid.New(), Name: r.Name, SizeBytes: r.SizeBytes, BlockSize: r.BlockSize, Policy: policy,
		DirtyBudget: r.DirtyBudgetBytes, Bucket: n.buckets.main, Created: time.Now().UTC(),
	}, nil
}

func nonEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func checkSize(size int64, block int32) error {
	if size < catalog.MinVolumeBytes || size > catalog.MaxVolumeBytes {
		return fmt.Errorf("size %s is outside 1MiB to 64TiB", units.Size(size))
	}
	if size%int64(block) != 0 {
		return fmt.Errorf("size %s is not a multiple of the block size %d", units.Size(size), block)
	}
	return nil
}

func (n *Node) checkBudget(bytes int64) error {
	if most := int64(n.cfg.Cache.Journal); bytes != 0 && (bytes < cache.MinDirtyBudget || bytes > most) {
		return fmt.Errorf("dirty budget %s is outside %s to the journal's %s", units.Size(bytes), units.Size(cache.MinDirtyBudget), units.Size(most))
	}
	return nil
}

// changePolicy sets what is given. A higher ack takes flush along if that is not given; nothing else
// follows by itself, and nothing is ever lowered unasked.
func changePolicy(p *cache.Policy, ack, flush, onUnmet *string) error {
	var errs []error
	set := func(text *string, level *cache.Level) {
		if text == nil {
			return
		}
		parsed, err := cache.ParseLevel(*text)
		if err != nil {
			errs = append(errs, err)
			return
		}
		*level = parsed
	}
	set(ack, &p.Ack)
	set(flush, &p.Flush)
	if onUnmet != nil {
		parsed, err := cache.ParseOnUnmet(*onUnmet)
		if err != nil {
			errs = append(errs, err)
		}
		p.OnUnmet = parsed
	}
	if errs != nil {
		return errors.Join(errs...)
	}
	if p.Flush < p.Ack && flush == nil {
		p.Flush = p.Ack
	}
	return p.Validate(false)
}

// CreateVolume implements api.Service.
func (n *Node) CreateVolume(ctx context.Context, r api.CreateVolume) (api.Volume, error) {
	entry, err := n.newEntry(r)
	if err != nil {
		return api.Volume{}, err
	}
	if r.Target != "" {
		if r.Target, err = catalog.CheckName(r.Target); err != nil {
			return api.Volume{}, invalid("%w", err)
		}
	}
	config, err := n.config(ctx, entry)
	if err != nil {
		return api.Volume{}, api.Errorf(api.CodeUnavailable, "%w", err)
	}
	n.buckets.ask(ctx, entry.Bucket) // nothing of the volume is put there yet
	n.admin.Lock()
	defer n.admin.Unlock()
	if err := n.checkFree(entry.Name, entry.ID); err != nil {
		return api.Volume{}, err
	}
	// What would keep the volume from being mapped is found before it is made.
	state := n.catalog.State()
	if err := addMapping(&state, entry, r.Target, r.LUN); err != nil {
		return api.Volume{}, err
	}
	v, err := n.newVolume(entry)
	if err != nil {
		return api.Volume{}, invalid("%w", err)
	}
	opened, err := n.engine.Create(ctx, config)
	if err != nil {
		return api.Volume{}, fmt.Errorf("volume %s was not created: %w", entry.Name, err)
	}
	v.serve(opened)
	state, err = n.catalog.Update(func(s *catalog.State) error { return addMapping(s, entry, r.Target, r.LUN) })
	if err != nil {
		return api.Volume{}, errors.Join(err, n.engine.Forget(context.WithoutCancel(ctx), entry.ID, config.Bucket, true))
	}
	n.add(v)
	n.front.refresh(state)
	n.event("info", "volume_created", entry.ID, fmt.Sprintf("volume %s of %s was created", entry.Name, units.Size(entry.SizeBytes)))
	return n.describe(v, &state), nil
}

// addMapping adds a volume to the catalogue and maps it at the target, if one is named.
func addMapping(s *catalog.State, entry catalog.Volume, target string, lun *int) error {
	if len(s.Volumes) >= catalog.MaxVolumes {
		return conflict("there are %d volumes already, which is the most", catalog.MaxVolumes)
	}
	s.Volumes = append(s.Volumes, entry)
	if target == "" {
		if lun != nil {
			return invalid("a LUN needs a target: name it with --target")
		}
		return nil
	}
	if s.Target(target) == nil {
		if err := addTarget(s, target); err != nil {
			return err
		}
	}
	_, err := mapLUN(s, target, entry.ID, lun)
	return err
}

// checkFree refuses a name or identity that is in use, or about to be.
func (n *Node) checkFree(name string, id uuid.UUID) error {
	state := n.catalog.State()
	if other := state.VolumeByID(id); other != nil {
		return conflict("volume %s is on this node already, as %q: unmap and delete it first", id, other.Name)
	}
	if other := state.Volume(name); other != nil || n.reserved[name] {
		return conflict("there is a volume %q already: choose another name", name)
	}
	return nil
}

// ChangeVolume implements api.Service.
func (n *Node) ChangeVolume(ctx context.Context, name string, r api.ChangeVolume) (api.Volume, error) {
	n.admin.Lock()
	defer n.admin.Unlock()
	v, entry, err := n.volumeByName(name)
	if err != nil {
		return api.Volume{}, err
	}
	engine, err := v.served()
	if err != nil {
		return api.Volume{}, err
	}
	if r.SizeBytes != nil {
		if err := n.resize(ctx, v, engine, *r.SizeBytes); err != nil {
			return api.Volume{}, err
		}
	}
	if r.Ack == nil && r.Flush == nil && r.OnUnmet == nil && r.DirtyBudgetBytes == nil {
		state := n.catalog.State()
		return n.describe(v, &state), nil
	}
	policy, budget := entry.Policy, entry.DirtyBudget
	if err := changePolicy(&policy, r.Ack, r.Flush, r.OnUnmet); err != nil {
		return api.Volume{}, invalid("%w", err)
	}
	if r.DirtyBudgetBytes != nil {
		budget = *r.DirtyBudgetBytes
		if err := n.checkBudget(budget); err != nil {
			return api.Volume{}, invalid("%w", err)
		}
	}
	changed := *entry
	changed.Policy, changed.DirtyBudget = policy, budget
	if err := n.putPolicy(engine, *entry, changed); err != nil {
		return api.Volume{}, err
	}
	state := n.catalog.State()
	if policy != entry.Policy {
		v.unit.RaiseUnitAttention(ascModeParameters, ascqModeParameters, nil)
		n.event("info", "policy_changed", v.id, fmt.Sprintf("volume %s: %s", v.name, policy.Sentence()))
	}
	return n.describe(v, &state), nil
}

// putPolicy makes a changed policy durable and brings it into force. Where acknowledged writes may be lost by an
// unclean stop, the catalogue must say so for as long as that can be: it learns of a weaker
// policy before the volume does, and of a stronger one after.
func (n *Node) putPolicy(engine *cache.Volume, old, changed catalog.Volume) error {
	record := func() error {
		_, err := n.catalog.Update(func(s *catalog.State) error {
			entry := s.VolumeByID(changed.ID)
			if entry == nil {
				return conflict("volume %s was deleted meanwhile", changed.Name)
			}
			entry.Policy, entry.DirtyBudget, entry.WriteThrough = changed.Policy, changed.DirtyBudget, changed.WriteThrough
			return nil
		})
		return err
	}
	apply := func() error { return engine.SetPolicy(changed.Policy, changed.DirtyBudget, changed.WriteThrough) }
	if changed.Policy.Effective(changed.WriteThrough).Ack < old.Policy.Effective(old.WriteThrough).Ack {
		if err := record(); err != nil {
			return err
		}
		if err := apply(); err != nil {
			return fmt.Errorf("volume %s: the policy is stored and not in force yet: %w", changed.Name, err)
		}
		return nil
	}
	if err := apply(); err != nil {
		return fmt.Errorf("volume %s: the policy is not stored: %w", changed.Name, err)
	}
	if err := record(); err != nil {
		return fmt.Errorf("volume %s: the policy is in force and not stored, a restart brings the old one back: %w", changed.Name, err)
	}
	return nil
}

// resize grows a volume: durable first, then visible.
func (n *Node) resize(ctx context.Context, v *volume, engine *cache.Volume, size int64) error {
	now := v.size.Load()
	if err := checkSize(size, v.blockSize); err != nil {
		return invalid("%w", err)
	}
	if size < now {
		return invalid("volume %s has %s: a volume only grows, because its end may hold data", v.name, units.Size(now))
	}
	if size == now {
		return nil
	}
	if err := engine.Resize(ctx, size); err != nil {
		return fmt.Errorf("volume %s keeps its size: %w", v.name, err)
	}
	if _, err := n.catalog.Update(func(s *catalog.State) error {
		s.VolumeByID(v.id).SizeBytes = size
		return nil
	}); err != nil {
		return err
	}
	v.size.Store(size)
	v.unit.CapacityChanged()
	n.event("info", "volume_resized", v.id, fmt.Sprintf("volume %s has %s now", v.name, units.Size(size)))
	return nil
}

// DeleteVolume implements api.Service. A deletion that failed half way can be asked for again.
func (n *Node) DeleteVolume(ctx context.Context, name string, r api.DeleteVolume) error {
	v, purge, err := n.beginDelete(name, r.Purge)
	if err != nil {
		return err
	}
	defer n.endDelete(v)
	forgetting, err := n.finishDelete(ctx, v, purge)
	if err == nil || forgetting {
		return err
	}
	// Nothing was touched: the volume stays as it was.
	_, undo := n.catalog.Update(func(s *catalog.State) error {
		s.VolumeByID(v.id).Deleting = nil
		return nil
	})
	return errors.Join(err, undo)
}

// beginDelete marks a volume for deletion, durably, if nothing uses it.
func (n *Node) beginDelete(name string, purge bool) (*volume, bool, error) {
	n.admin.Lock()
	defer n.admin.Unlock()
	state := n.catalog.State()
	entry, err := find(&state, name)
	if err != nil {
		return nil, false, err
	}
	v := n.volume(entry.ID)
	switch at := state.MappedAt(entry.ID); {
	case len(at) > 0:
		return nil, false, conflict("volume %s is mapped: isergate lun unmap %s %d", entry.Name, at[0].Target, at[0].LUN)
	case v == nil || n.deleting[entry.ID]:
		return nil, false, conflict("volume %s is being deleted", entry.Name)
	case entry.Deleting != nil:
		purge = purge || entry.Deleting.Purge
	}
	if _, err := n.catalog.Update(func(s *catalog.State) error {
		s.VolumeByID(entry.ID).Deleting = &catalog.Deletion{Purge: purge}
		return nil
	}); err != nil {
		return nil, false, err
	}
	n.deleting[entry.ID] = true
	return v, purge, nil
}

func (n *Node) endDelete(v *volume) {
	n.admin.Lock()
	defer n.admin.Unlock()
	delete(n.deleting, v.id)
}

// finishDelete lets go of a volume that is marked for it: destage what the bucket is to keep, forget, and
// take it off the catalogue. forgetting tells that there is no way back.
func (n *Node) finishDelete(ctx context.Context, v *volume, purge bool) (forgetting bool, err error) {
	if s := v.status(); !purge && s.State != cache.StateFenced && !v.forgetting.Load() {
		engine, err := v.served()
		if err == nil {
			err = engine.Wait(ctx, cache.Object)
		}
		if err != nil {
			return false, api.Errorf(api.CodeUnavailable, "volume %s was not deleted, because %s are not in its bucket: %w: try again when the bucket answers, or delete it with --purge", v.name, units.Size(s.DirtyBytes).Human(), err)
		}
	}
	bucket, err := n.bucketOf(ctx, v)
	if err != nil && purge {
		return false, api.Errorf(api.CodeUnavailable, "volume %s was not deleted: %w", v.name, err)
	}
	v.forgetting.Store(true)
	was := v.status()
	if err := n.engine.Forget(ctx, v.id, bucket, purge); err != nil {
		return true, fmt.Errorf("volume %s is not deleted yet: %w: delete it again", v.name, err)
	}
	v.engine.Store(nil)
	n.remove(v)
	if _, err := n.catalog.Update(func(s *catalog.State) error {
		s.Volumes = slices.DeleteFunc(s.Volumes, func(e catalog.Volume) bool { return e.ID == v.id })
		return nil
	}); err != nil {
		return true, err
	}
	n.stats.forget(v.name)
	kept := "its bucket keeps it"
	if purge {
		kept = "its objects are deleted from the bucket"
	} else if was.State == cache.StateFenced && was.DirtyBytes > 0 {
		kept = fmt.Sprintf("its bucket keeps what its newer owner has; %s that only this node's journal held are lost", units.Size(was.DirtyBytes).Human())
	}
	n.event("info", "volume_deleted", v.id, fmt.Sprintf("volume %s was deleted, %s", v.name, kept))
	return true, nil
}

// bucketOf returns the bucket that is a volume's home.
func (n *Node) bucketOf(ctx context.Context, v *volume) (objectstore.Bucket, error) {
	state := n.catalog.State()
	return n.buckets.open(ctx, state.VolumeByID(v.id).Bucket)
}

// WaitVolume implements api.Service.
func (n *Node) WaitVolume(ctx context.Context, name string, r api.WaitVolume) (api.Volume, error) {
	level, err := cache.ParseLevel(r.Level)
	if err != nil {
		return api.Volume{}, invalid("%w", err)
	}
	if level == cache.Quorum {
		return api.Volume{}, invalid("level quorum needs a cluster, and this node has none: use local or object")
	}
	timeout := defaultWait
	if r.TimeoutSeconds < 0 || r.TimeoutSeconds > 7*24*3600 {
		return api.Volume{}, invalid("a time of %g seconds is outside 0 to a week", r.TimeoutSeconds)
	} else if r.TimeoutSeconds > 0 {
		timeout = time.Duration(r.TimeoutSeconds * float64(time.Second))
	}
	v, entry, err := n.volumeByName(name)
	if err != nil {
		return api.Volume{}, err
	}
	engine, err := v.served()
	if err != nil {
		return api.Volume{}, err
	}
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = engine.Wait(waiting, level)
	if err == nil && level == cache.Object {
		n.buckets.ask(waiting, entry.Bucket) // if nothing was dirty, nobody asked it
	}
	state := n.catalog.State()
	if err == nil {
		return n.describe(v, &state), nil
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		d := n.describe(v, &state)
		why := ""
		if d.LastObjectError != "" {
			why = ": " + d.LastObjectError
		}
		return api.Volume{}, api.Errorf(api.CodeTimeout, "volume %s did not reach level %s in %s, %s are missing%s", v.name, level, timeout, units.Size(d.DirtyBytes).Human(), why)
	}
	return api.Volume{}, fmt.Errorf("volume %s: %w%s", v.name, err, v.fencedHint())
}

// fencedHint says where it is said how a volume that is fenced is taken back; it is empty for others.
func (v *volume) fencedHint() string {
	if v.status().State != cache.StateFenced {
		return ""
	}
	return fmt.Sprintf("; how to take volume %s back: isergate volume show %s", v.name, v.name)
}

// Drain implements api.Service.
func (n *Node) Drain(ctx context.Context) error {
	if err := n.engine.Drain(ctx); errors.Is(err, cache.ErrKept) {
		return api.Errorf(api.CodeUnavailable, "everything acknowledged is in the buckets, but the journal still holds it too: %w", err)
	} else if err != nil {
		hints := ""
		for _, v := range n.all() {
			hints += v.fencedHint()
		}
		return api.Errorf(api.CodeUnavailable, "not everything is in the buckets: %w%s", err, hints)
	}
	var asked sync.WaitGroup
	for url := range n.buckets.all() { // if nothing was dirty, nobody asked them
		asked.Go(func() { n.buckets.ask(ctx, url) })
	}
	asked.Wait()
	n.event("info", "drained", uuid.Nil, "everything acknowledged is in the buckets")
	return nil
}
