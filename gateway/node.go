// Package gateway is one running node: it reads the configuration and the catalogue, opens
// the buckets and the volume engine, serves volumes as LUNs, and answers the admin API. DESIGN.md
// states what it guarantees.
package gateway

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/objectstore"
)

// stopTimeout bounds a stop: sessions end, within logoutTimeout or, if commands have to be aborted, at most 6 s later
// (iscsi.Server.Shutdown); and what was accepted is journaled.
const stopTimeout = 20 * time.Second

// Options of a Node.
type Options struct {
	Config  config.Config // complete and valid
	Version string
	Logger  *slog.Logger
}

// Node is one running gateway.
type Node struct {
	cfg     config.Config
	version string
	log     *slog.Logger
	started time.Time

	lock     *dirLock
	catalog  catalog.Store
	buckets  *buckets
	engine   *cache.Engine
	events   *eventLog
	registry *prometheus.Registry
	stats    *statsVecs
	front    *front
	servers  *servers
	super    supervisor

	served     bool // the start succeeded
	stopping   atomic.Bool
	background sync.WaitGroup     // work that ends with ctx, or by itself
	watching   sync.WaitGroup     // of watchBuckets, which ends with ctx
	ctx        context.Context    // of background work
	cancel     context.CancelFunc // ends it

	admin sync.Mutex // one change by an administrator at a time; guards reserved and deleting
	// reserved are names of volumes that are about to be; deleting are volumes that somebody is
	// letting go of.
	reserved map[string]bool
	deleting map[uuid.UUID]bool

	outages sync.Mutex // guards the outage of every attachment

	mu      sync.RWMutex // guards volumes
	volumes map[uuid.UUID]*volume
}

var _ api.Service = (*Node)(nil)

// Start brings a node up: when it returns, initiators and the API are served. ctx bounds the
// start only. On an error nothing is left running.
func Start(ctx context.Context, o Options) (_ *Node, err error) {
	n := &Node{
		cfg: o.Config, version: o.Version, log: o.Logger, started: time.Now(), events: newEventLog(),
		registry: prometheus.NewRegistry(), super: newSupervisor(os.Getenv),
		reserved: map[string]bool{}, deleting: map[uuid.UUID]bool{}, volumes: map[uuid.UUID]*volume{},
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			_ = n.Stop(context.WithoutCancel(ctx))
		}
	}()
	tcpAPI, err := readTCP(n.cfg.API)
	if err != nil {
		return nil, err
	}
	if err := checkPortals(n.cfg.DataDir, n.cfg.Portals); err != nil {
		return nil, err
	}
	if n.lock, err = lockDir(n.cfg.DataDir); err != nil {
		return nil, err
	}
	if n.catalog, err = catalog.OpenFile(n.cfg.DataDir); err != nil {
		return nil, err
	}
	n.registry.MustRegister(n.events.counter, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), &collector{n})
	n.stats = newStatsVecs(n.registry)
	if err := n.attachBucket(ctx); err != nil {
		return nil, err
	}
	if n.engine, err = cache.Open(ctx, n.engineOptions()); err != nil {
		return nil, err
	}
	if err := n.openVolumes(ctx); err != nil {
		return nil, err
	}
	if n.front, err = newFront(n); err != nil {
		return nil, err
	}
	if n.cfg.Demo {
		if err := n.ensureDemo(ctx); err != nil {
			return nil, err
		}
	}
	n.front.refresh(n.catalog.State())
	if err := n.front.listen(n.cfg.Portals); err != nil {
		return nil, err
	}
	if n.servers, err = startServers(n, tcpAPI); err != nil {
		return nil, err
	}
	n.resumeDeletes()
	n.served = true
	n.background.Go(func() { n.super.keepAlive(n.ctx, n.alive) })
	n.watching.Go(func() { n.watchBuckets(n.ctx) })
	if err := n.super.notify("READY=1"); err != nil {
		n.log.Warn("service manager was not told", "err", err)
	}
	n.log.Info("gateway serves", "node", n.catalog.State().Node, "version", n.version, "bucket", n.buckets.main,
		"portals", n.front.addresses(), "api", n.cfg.API.Socket, "volumes", len(n.all()))
	return n, nil
}

func (n *Node) attachBucket(ctx context.Context) error {
	metrics, err := objectstore.NewMetrics(n.registry)
	if err != nil {
		return err
	}
	if n.buckets, err = newBuckets(n.cfg.Bucket, n.catalog, metrics, n.log); err != nil {
		return err
	}
	_, err = n.buckets.open(ctx, n.cfg.Bucket.URL)
	return err
}

func (n *Node) engineOptions() cache.Options {
	c := n.cfg.Cache
	return cache.Options{
		Dir: n.cfg.DataDir, Node: n.catalog.State().Node,
		JournalBytes: int64(c.Journal), SegmentBytes: int64(c.Segment), ArenaBytes: int64(c.Arena),
		MapMemoryBytes: int64(c.MapMemory), ReadCacheBytes: int64(c.ReadCache), ReadCacheMemoryBytes: int64(c.ReadCacheMemory),
		DirtyBudget: int64(c.DirtyBudget), MaxObjectBytes: int64(c.Object), MaxObjectAge: c.ObjectAge,
		DestageParallel: c.DestageParallel, UnmetAfter: c.UnmetAfter, CommandWait: c.CommandWait,
		Events: n.onEvent, Registerer: n.registry, Logger: n.log,
	}
}

// openVolumes has the engine serve what the catalogue lists.
func (n *Node) openVolumes(ctx context.Context) error {
	for _, entry := range n.catalog.State().Volumes {
		v, err := n.openVolume(ctx, entry)
		if err != nil {
			return err
		}
		n.add(v)
	}
	for _, id := range n.engine.Orphans() {
		n.event("error", "unknown_volume_in_journal", id, "the journal holds writes of a volume that the catalogue does not list; they are kept, and take journal space")
	}
	return nil
}

// resumeDeletes goes on with deletions that a stop interrupted.
func (n *Node) resumeDeletes() {
	for _, entry := range n.catalog.State().Volumes {
		if entry.Deleting == nil {
			continue
		}
		n.background.Go(func() {
			err := n.DeleteVolume(n.ctx, entry.Name, api.DeleteVolume{})
			if err != nil && n.ctx.Err() == nil {
				n.log.Error("deletion of a volume did not finish", "volume", entry.Name, "err", err)
			}
		})
	}
}

// onEvent takes an event of the engine in, and tells initiators of a contract that changed.
func (n *Node) onEvent(e cache.Event) {
	if e.Type == "volume_fenced" {
		state := n.catalog.State()
		if entry := state.VolumeByID(e.Volume); entry != nil {
			e.Text += ": " + takeBack(&state, entry)
		}
	}
	n.events.add(e)
	switch e.Type {
	case "contract_degraded", "contract_met":
		if v := n.volume(e.Volume); v != nil {
			v.unit.RaiseUnitAttention(ascModeParameters, ascqModeParameters, nil)
		}
	}
}

// event notes something that happened in the gateway itself.
func (n *Node) event(severity, kind string, volume uuid.UUID, text string) {
	level := map[string]slog.Level{"info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError}[severity]
	n.log.Log(context.Background(), level, "gateway event", "type", kind, "text", text)
	n.events.add(cache.Event{Time: time.Now(), Severity: severity, Type: kind, Volume: volume, Text: text})
}

// alive reports whether the node makes progress, for the service manager's watchdog: a
// journal device that does not answer is no reason to live on.
func (n *Node) alive() bool { return n.engine.JournalStalled() < n.super.watchdog }

// open reports whether every initiator may log in to a target.
func (n *Node) open(target string) bool {
	return n.cfg.Open || n.cfg.Demo && target == DemoTarget
}

func (n *Node) volume(id uuid.UUID) *volume {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.volumes[id]
}

func (n *Node) all() []*volume {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return slices.Collect(maps.Values(n.volumes))
}

func (n *Node) add(v *volume) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.volumes[v.id] = v
}

func (n *Node) remove(v *volume) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.volumes, v.id)
}

// Status implements api.Service.
func (n *Node) Status(context.Context) (api.Status, error) {
	state := n.catalog.State()
	conditional, single := n.buckets.describe()
	out := api.Status{
		State: api.Serving, Version: n.version, Node: state.Node.String(), Started: n.started.UTC(), DataDir: n.cfg.DataDir,
		Bucket:  api.Bucket{URL: n.buckets.main, SingleWriter: single, Conditional: conditional},
		Portals: n.front.portals.list, Open: n.cfg.Open, OpenTargets: []string{}, VolumeStates: map[string]int{}, ContractUnmet: []string{}, BucketUnreachable: []string{},
		Sessions: n.front.sessionsOf(""), Events: []api.Event{},
	}
	if t := n.buckets.trouble(n.buckets.main); t != nil {
		out.Bucket.Error, out.Bucket.Since = t.err.Error(), utc(t.since)
	}
	for _, t := range state.Targets {
		if !n.cfg.Open && n.open(t.Name) {
			out.OpenTargets = append(out.OpenTargets, t.Name)
		}
	}
	if n.stopping.Load() {
		out.State = "stopping"
	}
	for _, v := range n.all() {
		s := n.describe(v, &state)
		out.VolumeStates[s.State]++
		out.DirtyBytes += s.DirtyBytes
		if !s.ContractMet {
			out.ContractUnmet = append(out.ContractUnmet, s.Name)
		}
		if s.BucketDownSince != nil {
			out.BucketUnreachable = append(out.BucketUnreachable, s.Name)
		}
	}
	slices.Sort(out.ContractUnmet)
	slices.Sort(out.BucketUnreachable)
	for _, e := range n.events.latest(20) {
		event := api.Event{Time: e.Time.UTC(), Severity: e.Severity, Type: e.Type, Text: e.Text}
		if entry := state.VolumeByID(e.Volume); entry != nil {
			event.Volume = entry.Name
		} else if e.Volume != uuid.Nil {
			event.Volume = e.Volume.String()
		}
		out.Events = append(out.Events, event)
	}
	return out, nil
}

// Sessions implements api.Service.
func (n *Node) Sessions(context.Context) ([]api.Session, error) { return n.front.sessions(), nil }

// Metrics serves the node's metrics.
func (n *Node) Metrics() http.Handler { return metricsHandler(n.registry) }

// Stop takes no more commands, journals everything that was accepted, and gives the data directory
// back. It destages nothing. It is bounded by ctx and by stopTimeout. It may be called after a failed start.
func (n *Node) Stop(ctx context.Context) error {
	if n.stopping.Swap(true) {
		return nil
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	_ = n.super.notify("STOPPING=1")
	var errs []error
	n.cancel()
	if n.front != nil {
		errs = append(errs, n.front.close(ctx))
	}
	if n.servers != nil {
		errs = append(errs, n.servers.close())
	}
	n.background.Wait()
	n.watching.Wait()
	if n.engine != nil {
		errs = append(errs, n.engine.Close(ctx))
	}
	if n.buckets != nil {
		errs = append(errs, n.buckets.close())
	}
	if n.catalog != nil {
		errs = append(errs, n.catalog.Close())
	}
	if n.lock != nil {
		errs = append(errs, n.lock.release())
	}
	err := errors.Join(errs...)
	took := time.Since(began).Round(time.Millisecond)
	switch {
	case err != nil:
		n.log.Error("gateway stopped", "took", took, "err", err)
	case n.served: // after a failed start its error says it all
		n.log.Info("gateway stopped", "took", took)
	}
	return err
}
