package gateway

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache"
)

// keptEvents is how many events a node remembers.
const keptEvents = 256

// eventLog remembers the latest events and counts all of them.
type eventLog struct {
	counter *prometheus.CounterVec

	mu   sync.Mutex // guards ring and next
	ring []cache.Event
	next int
}

func newEventLog() *eventLog {
	l := &eventLog{counter: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isergate_events_total", Help: "Events, by severity and type.",
	}, []string{"severity", "type"})}
	for severity, types := range eventTypes {
		for _, t := range types {
			l.counter.WithLabelValues(severity, t)
		}
	}
	return l
}

// eventTypes are those that are counted from the start, with 0: a rate over the first one is seen.
var eventTypes = map[string][]string{
	"error": {
		"contract_degraded", "contract_unmet", "home_map_rebuilt", "unknown_volume_in_journal", "unreadable",
		"volume_failed", "volume_fenced", "volume_not_opened", "writes_lost",
	},
	"warning": {
		"bucket_unreachable", "destage_failing", "home_map_old", "home_map_rebuild", "lost_writes_reported",
		"read_cache_media_failed", "volume_restored",
	},
	"info": {
		"bucket_reachable", "contract_met", "destage_works", "drained", "home_map_rebuilt", "policy_changed",
		"volume_created", "volume_deleted", "volume_resized",
	},
}

// add takes an event in. It does not block.
func (l *eventLog) add(e cache.Event) {
	l.counter.WithLabelValues(e.Severity, e.Type).Inc()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ring) < keptEvents {
		l.ring = append(l.ring, e)
		return
	}
	l.ring[l.next] = e
	l.next = (l.next + 1) % keptEvents
}

// latest returns up to n events, newest last.
func (l *eventLog) latest(n int) []cache.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	events := make([]cache.Event, 0, len(l.ring))
	events = append(events, l.ring[l.next:]...)
	events = append(events, l.ring[:l.next]...)
	return events[max(0, len(events)-n):]
}
