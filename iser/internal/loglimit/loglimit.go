// Package loglimit bounds how many lines an event may write to a log, so that whoever causes the event cannot fill a disk.
package loglimit

import (
	"sync"
	"time"
)

// Limit lets a burst of events through, and then one in each interval. The zero value lets all through. Its methods may be
// called concurrently.
type Limit struct {
	burst    int
	interval time.Duration

	mu   sync.Mutex // guards all below
	used int
	from time.Time // when the oldest of used is forgotten
	left uint64
}

// Init sets the limits: burst is at least 1. It is called before anything else.
func (l *Limit) Init(burst int, interval time.Duration) { l.burst, l.interval = burst, interval }

// Allow reports whether an event may be logged, and how many were not since the last one that was.
func (l *Limit) Allow() (left uint64, ok bool) {
	if l.interval <= 0 {
		return 0, true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if passed := int64(now.Sub(l.from) / l.interval); l.used > 0 && passed > 0 {
		forgotten := min(int64(l.used), passed)
		l.used -= int(forgotten)
		l.from = l.from.Add(time.Duration(forgotten) * l.interval)
	}
	if l.used == l.burst {
		l.left++
		return 0, false
	}
	if l.used == 0 {
		l.from = now
	}
	l.used++
	left, l.left = l.left, 0
	return left, true
}
