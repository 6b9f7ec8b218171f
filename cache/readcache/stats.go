package readcache

import "github.com/prometheus/client_golang/prometheus"

// stats are the cache's metrics.
type stats struct {
	memoryHits, mediaHits, misses, corrupt, mediaErrors, mediaSkipped prometheus.Counter
	mediaUp                                                           prometheus.Gauge
}

func (s *stats) init(c *Cache, r prometheus.Registerer) {
	const ns, sub = "isergate", "readcache"
	hits := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: "hits_total", Help: "Chunks found in the read cache."}, []string{"tier"})
	s.memoryHits, s.mediaHits = hits.WithLabelValues("memory"), hits.WithLabelValues("media")
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help})
	}
	s.misses = counter("misses_total", "Chunks that had to be fetched from the object store.")
	s.corrupt = counter("media_corrupt_total", "Chunks on local media whose checksum was wrong.")
	s.mediaErrors = counter("media_read_errors_total", "Chunks that could not be read from local media.")
	s.mediaSkipped = counter("media_skipped_total", "Chunks not written to local media because it was busy.")
	s.mediaUp = prometheus.NewGauge(prometheus.GaugeOpts{Namespace: ns, Subsystem: sub, Name: "media_up", Help: "1 while the local media is used."})
	if r == nil {
		return
	}
	gauge := func(name, help string, f func() int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help}, func() float64 {
			c.mu.Lock()
			defer c.mu.Unlock()
			return float64(f())
		})
	}
	r.MustRegister(hits, s.misses, s.corrupt, s.mediaErrors, s.mediaSkipped, s.mediaUp,
		gauge("memory_bytes", "Memory of the chunks in the cache.", func() int64 { return int64(len(c.frames)-len(c.free)) * ChunkSize }),
		gauge("pinned_bytes", "Memory of chunks that are referenced.", func() int64 { return int64(c.pinned) * ChunkSize }),
		gauge("media_bytes", "Local media that holds chunks.", func() int64 {
			if c.media == nil {
				return 0
			}
			return int64(len(c.media.index)) * ChunkSize
		}))
}
