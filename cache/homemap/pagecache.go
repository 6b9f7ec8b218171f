package homemap

import (
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache/extent"
)

// CacheOptions configure a PageCache.
type CacheOptions struct {
	// Bytes is the budget for cached pages; 0 means 64 MiB, less than 1 MiB is 1 MiB.
	// Half of it may be dirty.
	Bytes int64
	// Registerer gets the metrics; nil means none.
	Registerer prometheus.Registerer
}

// PageCache is the memory for the pages of all maps of a node. Eviction is by CLOCK.
// All methods may be called concurrently.
type PageCache struct {
	limit int64
	used  atomic.Int64 // bytes of cached pages
	dirty atomic.Int64 // of these, dirty

	mu   sync.Mutex // guards what follows; taken after a Map's mu, never before
	ring []*page
	hand int
	maps map[*Map]struct{}

	hits, misses, evictions, spills prometheus.Counter
}

// page is a cached page. Its content is guarded by its map's mu.
type page struct {
	extent.Page
	m     *Map
	num   uint64
	size  int64 // what the cache counts for it
	gen   uint64
	ref   atomic.Bool
	dirty atomic.Bool // written under the map's mu
	slot  int         // in the ring, guarded by PageCache.mu
}

// pageOverhead is what a cached page takes beside its entries: itself, its share of
// the map's table and of the ring.
const pageOverhead = 160

// NewPageCache returns an empty cache.
func NewPageCache(o CacheOptions) *PageCache {
	if o.Bytes == 0 {
		o.Bytes = 64 << 20
	}
	c := &PageCache{limit: max(o.Bytes, 1<<20), maps: make(map[*Map]struct{})}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "isergate", Subsystem: "homemap", Name: name, Help: help})
	}
	c.hits = counter("page_hits_total", "Map pages found in memory.")
	c.misses = counter("page_misses_total", "Map pages read from the store.")
	c.evictions = counter("page_evictions_total", "Map pages dropped from memory to stay within the budget.")
	c.spills = counter("page_spills_total", "Map pages written between checkpoints because too many were dirty.")
	if o.Registerer != nil {
		gauge := func(name, help string, f func() float64) prometheus.Collector {
			return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "isergate", Subsystem: "homemap", Name: name, Help: help}, f)
		}
		o.Registerer.MustRegister(c.hits, c.misses, c.evictions, c.spills,
			gauge("page_cache_bytes", "Memory that cached map pages take.", func() float64 { return float64(c.used.Load()) }),
			gauge("page_cache_dirty_bytes", "Memory of map pages that the store does not have yet.", func() float64 { return float64(c.dirty.Load()) }),
			gauge("page_cache_limit_bytes", "Budget for cached map pages.", func() float64 { return float64(c.limit) }))
	}
	return c
}

// Bytes is the memory that cached pages take now.
func (c *PageCache) Bytes() int64 { return c.used.Load() }

// DirtyBytes is the part of Bytes that the stores do not have yet.
func (c *PageCache) DirtyBytes() int64 { return c.dirty.Load() }

func (c *PageCache) attach(m *Map) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.maps[m] = struct{}{}
}

func (c *PageCache) detach(m *Map) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.maps, m)
}

func (c *PageCache) add(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.slot = len(c.ring)
	c.ring = append(c.ring, p)
}

func (c *PageCache) remove(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := len(c.ring) - 1
	moved := c.ring[last]
	c.ring[p.slot], moved.slot = moved, p.slot
	c.ring[last] = nil
	c.ring = c.ring[:last]
}

// victim returns the next clean page that was not used since the hand passed it.
func (c *PageCache) victim() *page {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range 2 * len(c.ring) {
		if c.hand >= len(c.ring) {
			c.hand = 0
		}
		p := c.ring[c.hand]
		c.hand++
		if p.dirty.Load() || p.ref.Swap(false) {
			continue
		}
		return p
	}
	return nil
}

// evict drops clean pages until the budget is met. The caller holds no map's mu.
func (c *PageCache) evict() {
	for c.used.Load() > c.limit {
		p := c.victim()
		if p == nil {
			return // all are dirty, and these are bounded elsewhere
		}
		p.m.mu.Lock()
		if p.m.pages[p.num] == p && !p.dirty.Load() {
			p.m.dropPageLocked(p)
			c.evictions.Inc()
		}
		p.m.mu.Unlock()
	}
}

// spill writes dirty pages until at most half of what may be dirty is, the map that
// has most of them first.
func (c *PageCache) spill() error {
	for c.dirty.Load() > c.limit/4 {
		var most *Map
		c.mu.Lock()
		for m := range c.maps {
			if most == nil || m.dirtyBytes.Load() > most.dirtyBytes.Load() {
				most = m
			}
		}
		c.mu.Unlock()
		if most == nil || most.dirtyBytes.Load() == 0 {
			return nil
		}
		if err := most.spill(); err != nil {
			return err
		}
	}
	return nil
}
