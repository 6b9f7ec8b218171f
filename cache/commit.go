package cache

import (
	"fmt"
	"time"

	"github.com/isergate/isergate/cache/journal"
)

// The journal's committer calls these two, from one goroutine, batch after batch.

// Synced is called when the batch is durable: it becomes readable, destage may have it, and who
// waits for `local` is answered.
func (e *Engine) Synced(batch []*journal.Entry) {
	now := time.Now()
	for len(batch) > 0 {
		o, ok := batch[0].User.(*op)
		if !ok {
			batch[0].User.(ownNote) <- nil
			batch = batch[1:]
			continue
		}
		n := 1
		for n < len(batch) && isOf(o.v, batch[n]) {
			n++
		}
		o.v.synced(batch[:n], now)
		batch = batch[n:]
	}
}

func isOf(v *Volume, en *journal.Entry) bool {
	o, ok := en.User.(*op)
	return ok && o.v == v
}

// synced takes records that follow each other in the journal.
func (v *Volume) synced(run []*journal.Entry, now time.Time) {
	last := LSN(0)
	v.mu.Lock()
	for _, en := range run {
		o, rec := en.User.(*op), &en.Record
		if rec.Kind == journal.KindFence {
			continue // not a write
		}
		last = LSN(rec.LSN)
		v.unsynced.pop(last)
		switch {
		case rec.Kind == journal.KindNote:
			if o.note.Size > 0 {
				v.grow(o.note.Size)
			}
		case rec.Kind != journal.KindZero || !o.early: // in the place of what is in memory only, as far as nothing newer is there
			v.dirty.Insert(v.extentOf(*rec, en.Loc, v.cfg.BlockSize))
		}
	}
	if last > 0 {
		v.local.advance(last, now) // who hears of it finds it readable: the lock is still held
	}
	v.mu.Unlock()
	v.segs.add(run)
	v.destage.add(run, now)
	if last > 0 {
		v.contractReached()
	}
	var ahead int64
	for _, en := range run {
		o := en.User.(*op)
		if o.mem != nil {
			o.mem.leave()
		}
		ahead += o.ahead
		if !o.told {
			o.done <- nil
		}
		o.leave()
	}
	if ahead > 0 {
		v.e.ahead.release(ahead)
	}
}

// Failed is called when the device refused the batch: nothing of it is acknowledged, and the
// node serves none of its volumes any more. Whether the records are there after a restart is unknown.
func (e *Engine) Failed(batch []*journal.Entry, cause error) {
	err := fmt.Errorf("%w: %w: replace the device or free it of errors, then restart", ErrJournal, cause)
	for _, v := range e.all() {
		v.stop(StateFailed, err)
	}
	for _, en := range batch {
		o, ok := en.User.(*op)
		if !ok {
			en.User.(ownNote) <- err
			continue
		}
		if en.Record.Kind != journal.KindFence {
			o.v.mu.Lock()
			o.v.unsynced.pop(LSN(en.Record.LSN))
			o.v.mu.Unlock()
		}
		if o.mem != nil {
			o.mem.leave()
		}
		e.ahead.release(o.ahead)
		if !o.told {
			o.done <- err
		}
		o.leave()
	}
}

// grow publishes a new size.
func (v *Volume) grow(size int64) {
	for {
		now := v.size.Load()
		if size <= now || v.size.CompareAndSwap(now, size) {
			return
		}
	}
}

func (v *Volume) epochNow() uint64 {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.epoch
}
