package journal

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	registerer prometheus.Registerer
	registered []prometheus.Collector

	syncDuration prometheus.Histogram
	batchBytes   prometheus.Histogram
	batchEntries prometheus.Histogram
	waits        prometheus.Counter
	corrupt      prometheus.Counter
}

func newMetrics(j *Journal) *metrics {
	return &metrics{
		registerer: j.opts.Registerer,
		syncDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "isergate_journal_sync_duration_seconds",
			Help:    "Duration of the sync of one batch.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 18),
		}),
		batchBytes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "isergate_journal_batch_bytes",
			Help:    "Bytes written per batch, header included; the sum is all that was written.",
			Buckets: prometheus.ExponentialBuckets(4096, 2, 14),
		}),
		batchEntries: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "isergate_journal_batch_entries",
			Help:    "Entries per batch, made durable by one sync.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 12),
		}),
		waits: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isergate_journal_reserve_waits_total",
			Help: "Reservations that had to wait for room.",
		}),
		corrupt: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isergate_journal_corrupt_reads_total",
			Help: "Reads whose checksum was wrong.",
		}),
	}
}

func (m *metrics) register(j *Journal) error {
	if m.registerer == nil {
		return nil
	}
	gauge := func(name, help string, get func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "isergate_journal_" + name, Help: help}, get)
	}
	for _, c := range []prometheus.Collector{
		m.syncDuration, m.batchBytes, m.batchEntries, m.waits, m.corrupt,
		gauge("used_bytes", "Bytes written and still needed, or reserved.", func() float64 {
			used, _ := j.Usage()
			return float64(used)
		}),
		gauge("capacity_bytes", "Bytes that the journal can hold.", func() float64 {
			_, capacity := j.Usage()
			return float64(capacity)
		}),
		gauge("segments", "Segment files that exist.", func() float64 {
			j.mu.Lock()
			defer j.mu.Unlock()
			return float64(len(j.slots))
		}),
		gauge("stalled_seconds", "How long the write or sync in progress has taken so far.", func() float64 {
			return j.Stalled().Seconds()
		}),
		gauge("failed", "1 once the device failed.", func() float64 {
			if j.Err() != nil {
				return 1
			}
			return 0
		}),
	} {
		if err := m.registerer.Register(c); err != nil {
			m.unregister()
			return err
		}
		m.registered = append(m.registered, c)
	}
	return nil
}

func (m *metrics) unregister() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
	m.registered = nil
}

func (m *metrics) committed(took time.Duration, bytes int64, entries int) {
	m.syncDuration.Observe(took.Seconds())
	m.batchBytes.Observe(float64(bytes))
	m.batchEntries.Observe(float64(entries))
}
