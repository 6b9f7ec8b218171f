package cache

import (
	"context"
	"sync"
	"time"
)

// mark is one watermark and those who wait for it. Safe for concurrent use.
type mark struct {
	mu      sync.Mutex
	wm      Watermark // guarded by mu
	err     error     // final: the mark will not move any more
	waiters []markWaiter
}

type markWaiter struct {
	lsn LSN
	ch  chan error // buffered; receives once
}

// get returns the watermark.
func (m *mark) get() Watermark {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.wm
}

// advance moves the watermark up to lsn and wakes who waited for it. A lower lsn
// changes nothing.
func (m *mark) advance(lsn LSN, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if lsn <= m.wm.LSN {
		return
	}
	m.wm = Watermark{LSN: lsn, Time: now}
	kept := m.waiters[:0]
	for _, w := range m.waiters {
		if w.lsn <= lsn {
			w.ch <- nil
		} else {
			kept = append(kept, w)
		}
	}
	clear(m.waiters[len(kept):])
	m.waiters = kept
}

// fail ends all waiting, now and later, with err.
func (m *mark) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return
	}
	m.err = err
	for _, w := range m.waiters {
		w.ch <- err
	}
	m.waiters = nil
}

// wait returns nil once the watermark is at lsn or above, the error that ended the
// mark, or ctx's. A mark that reached lsn before it failed answers nil.
func (m *mark) wait(ctx context.Context, lsn LSN) error {
	m.mu.Lock()
	if m.wm.LSN >= lsn {
		m.mu.Unlock()
		return nil
	}
	if m.err != nil {
		defer m.mu.Unlock()
		return m.err
	}
	ch := make(chan error, 1)
	m.waiters = append(m.waiters, markWaiter{lsn, ch})
	m.mu.Unlock()
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, w := range m.waiters {
		if w.ch == ch {
			m.waiters = append(m.waiters[:i], m.waiters[i+1:]...)
			return ctx.Err()
		}
	}
	return <-ch // it was answered while we gave up
}
