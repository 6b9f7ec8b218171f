package gateway

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache"
)

// collector reads the state of a node when it is asked to.
type collector struct{ n *Node }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("isergate_"+name, help, labels, nil)
}

var (
	descBuild      = desc("build_info", "Version of the program; always 1.", "version", "goversion")
	descUp         = desc("serving", "1 while the node takes commands.")
	descBucketUp   = desc("object_store_up", "1 while the bucket of new volumes answers.")
	descWatermark  = desc("volume_watermark_sequence", "LSN below which every write has reached a stage.", "volume", "stage")
	descObjectAge  = desc("object_watermark_age_seconds", "Age of the oldest acknowledged write that is not in the bucket; 0 when all are.", "volume")
	descMet        = desc("volume_contract_met", "1 while the persistence contract holds.", "volume")
	descState      = desc("volume_state", "1 for the state that a volume is in, 0 for the others.", "volume", "state")
	descSize       = desc("volume_size_bytes", "Size of a volume.", "volume")
	descObject     = desc("volume_object_bytes", "Bytes in the bucket that a volume refers to.", "volume")
	descDirty      = desc("cache_dirty_bytes", "Bytes acknowledged and not in the bucket.", "volume")
	descDirtyLimit = desc("cache_dirty_limit_bytes", "Dirty budget.", "volume")
	descEpoch      = desc("volume_epoch", "The owner's term on a volume.", "volume")
	descGeneration = desc("volume_generation", "Lineage; it grows when acknowledged writes were lost.", "volume")
)

var volumeStates = []string{
	string(cache.StateOpening), string(cache.StateAvailable), string(cache.StateDegraded), string(cache.StateFenced),
	string(cache.StateFailed), string(cache.StateClosed), stateDeleting,
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descBuild, descUp, descBucketUp, descWatermark, descObjectAge, descMet, descState, descSize, descObject,
		descDirty, descDirtyLimit, descEpoch, descGeneration,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(descBuild, 1, c.n.version, runtime.Version())
	if c.n.engine == nil || c.n.front == nil {
		gauge(descUp, 0)
		return
	}
	gauge(descUp, boolean(!c.n.stopping.Load()))
	gauge(descBucketUp, boolean(c.n.buckets.trouble(c.n.buckets.main) == nil))
	state := c.n.catalog.State()
	for _, v := range c.n.all() {
		s := c.n.describe(v, &state)
		for _, w := range []struct {
			stage string
			lsn   uint64
		}{
			{"acked", s.Watermarks.Acked.LSN}, {"local", s.Watermarks.Local.LSN},
			{"quorum", s.Watermarks.Quorum.LSN}, {"object", s.Watermarks.Object.LSN},
		} {
			gauge(descWatermark, float64(w.lsn), s.Name, w.stage)
		}
		age := 0.0
		if s.OldestDirty != nil {
			age = max(0, time.Since(*s.OldestDirty).Seconds())
		}
		gauge(descObjectAge, age, s.Name)
		gauge(descMet, boolean(s.ContractMet), s.Name)
		for _, state := range volumeStates {
			gauge(descState, boolean(s.State == state), s.Name, state)
		}
		gauge(descSize, float64(s.SizeBytes), s.Name)
		gauge(descObject, float64(s.ObjectBytes), s.Name)
		gauge(descDirty, float64(s.DirtyBytes), s.Name)
		gauge(descDirtyLimit, float64(s.DirtyBudgetBytes), s.Name)
		gauge(descEpoch, float64(s.Epoch), s.Name)
		gauge(descGeneration, float64(s.Generation), s.Name)
	}
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
