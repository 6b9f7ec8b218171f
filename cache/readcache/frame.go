package readcache

import (
	"context"
	"fmt"
)

func (c *Cache) pinLocked(f *frame) {
	if f.refs == 0 {
		c.pinned++
	}
	f.refs++
}

func (c *Cache) release(f *frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.refs <= 0 {
		panic("readcache: chunk released twice")
	}
	f.refs--
	if f.refs > 0 {
		return
	}
	c.pinned--
	if f.kept {
		c.wakeLocked()
	} else {
		c.freeLocked(f)
	}
}

// wakeLocked tells those who wait for a frame that there may be one.
func (c *Cache) wakeLocked() {
	if c.waiting == 0 {
		return
	}
	close(c.freed)
	c.freed = make(chan struct{})
}

// freeLocked takes back a frame that is in no index and has no references.
func (c *Cache) freeLocked(f *frame) {
	if c.poison {
		for i := range f.buf {
			f.buf[i] = 0xdb
		}
	}
	c.free = append(c.free, f.slot)
	c.wakeLocked()
	c.unmapLocked()
}

// dropLocked takes a frame out of the index; its memory is free with its last reference.
func (c *Cache) dropLocked(f *frame) {
	delete(c.index, f.key)
	c.policy.remove(f.slot)
	f.kept = false
	if f.refs == 0 {
		c.freeLocked(f)
	}
}

// takeLocked returns a frame to fill, or nil if all are in use.
func (c *Cache) takeLocked() *frame {
	if len(c.free) == 0 {
		s, ok := c.policy.evict(func(s int32) bool { return c.frames[s].refs == 0 })
		if !ok {
			return nil
		}
		f := &c.frames[s]
		delete(c.index, f.key)
		f.kept = false
		c.freeLocked(f)
	}
	last := len(c.free) - 1
	f := &c.frames[c.free[last]]
	c.free = c.free[:last]
	return f
}

// take waits for a frame to fill.
func (c *Cache) take(ctx context.Context) (*frame, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if c.closed {
			return nil, ErrClosed // the memory may be gone: it goes when all frames are free
		}
		if f := c.takeLocked(); f != nil {
			return f, nil
		}
		freed := c.freed
		c.waiting++
		c.mu.Unlock()
		var err error
		select {
		case <-freed:
		case <-ctx.Done():
			err = ctx.Err()
		}
		c.mu.Lock()
		c.waiting--
		if err != nil {
			return nil, err
		}
	}
}

// keepLocked puts a filled frame into the index, with refs references.
func (c *Cache) keepLocked(f *frame, k ckey, refs int) {
	f.key, f.kept, f.refs = k, true, refs
	if refs > 0 {
		c.pinned++
	}
	c.index[k] = f.slot
	c.policy.admit(f.slot, c.hash(k))
}

// storeLocked hands a kept frame to the media's writer, with a reference, unless it is
// busy.
func (c *Cache) storeLocked(f *frame) {
	if c.media == nil || !c.media.wantsLocked(f.key) {
		return
	}
	c.pinLocked(f)
	select {
	case c.media.queue <- f:
	default:
		c.stats.mediaSkipped.Inc()
		if f.refs--; f.refs == 0 {
			c.pinned--
			c.wakeLocked()
		}
	}
}

// startLocked begins to bring k into memory.
func (c *Cache) startLocked(ctx context.Context, k ckey, home chan struct{}, fetch func(context.Context, []byte) (int, error), background bool) *flight {
	fl := &flight{done: make(chan struct{}), background: background}
	ctx, fl.cancel = context.WithTimeout(context.WithoutCancel(ctx), c.o.FetchTimeout)
	c.flights[k] = fl
	if background {
		c.prefetches++
	}
	c.running.Go(func() {
		unhook := context.AfterFunc(c.ctx, fl.cancel)
		defer unhook()
		defer fl.cancel()
		f, fetched, err := c.fill(ctx, k, home, fetch)
		c.mu.Lock()
		defer c.mu.Unlock()
		if background {
			c.prefetches--
		}
		mine := c.flights[k] == fl
		if mine {
			delete(c.flights, k)
		}
		fl.f, fl.err = f, err
		switch {
		case err != nil:
			if c.closed {
				fl.err = ErrClosed
			}
		case c.closed:
			c.freeLocked(f)
			fl.f, fl.err = nil, ErrClosed
		case mine && !c.indexedLocked(k):
			c.keepLocked(f, k, fl.waiters)
			if fetched {
				c.storeLocked(f)
			}
		case fl.waiters > 0: // given up by the cache, not by them
			f.key, f.kept, f.refs = k, false, fl.waiters
			c.pinned++
		default:
			c.freeLocked(f)
		}
		if mine && f != nil && fl.waiters == 0 {
			c.wakeLocked()
		}
		close(fl.done)
	})
	return fl
}

func (c *Cache) indexedLocked(k ckey) bool {
	_, ok := c.index[k]
	return ok
}

// fill returns a frame with the chunk, from the media or through fetch.
func (c *Cache) fill(ctx context.Context, k ckey, home chan struct{}, fetch func(context.Context, []byte) (int, error)) (f *frame, fetched bool, err error) {
	select {
	case home <- struct{}{}:
		defer func() { <-home }()
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
	select {
	case c.fetches <- struct{}{}:
		defer func() { <-c.fetches }()
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
	f, err = c.take(ctx)
	if err != nil {
		return nil, false, err
	}
	if c.media != nil {
		if n, ok := c.media.read(k, f.buf); ok {
			f.n = n
			c.stats.mediaHits.Inc()
			return f, false, nil
		}
	}
	c.stats.misses.Inc()
	n, err := fetch(ctx, f.buf)
	if err == nil && (n < 0 || n > len(f.buf)) {
		err = fmt.Errorf("readcache: a fetch returned %d bytes", n)
	}
	if err != nil {
		c.mu.Lock()
		c.freeLocked(f)
		c.mu.Unlock()
		return nil, false, err
	}
	f.n = n
	return f, true, nil
}

// SetMangle makes the cache overwrite frames that become free, so that late readers of them see garbage.
func (c *Cache) SetMangle(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.poison = on
}
