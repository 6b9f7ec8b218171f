package cache

import (
	"fmt"
	"time"

	"github.com/isergate/isergate/cache/journal"
)

// The journal's committer calls these three, from one goroutine, batch after batch.

// Assign gives each record its place in its volume's order of writes.
func (e *Engine) Assign(batch []*journal.Entry) {
	for _, en := range batch {
		o, ok := en.User.(*op)
		if !ok {
			continue // the engine's own notes have no place in the order of writes
		}
		en.Record.Epoch = o.v.epochNow()
		if en.Record.Kind == journal.KindFence {
			en.Record.LSN = uint64(o.v.next) // it takes no LSN: it continues from the last
			continue
		}
		o.v.next++
		en.Record.LSN = uint64(o.v.next)
	}
}

// Written is called when the batch is handed to the device and not yet synced: under
// ack=memory that is enough.
func (e *Engine) Written(batch []*journal.Entry) {
	e.publish(batch, true)
}

// Synced is called when the batch is durable: it becomes readable, destage may have it, and who
// waits for `local` is answered.
func (e *Engine) Synced(batch []*journal.Entry) {
	now := time.Now()
	e.publish(batch, false)
	for i, en := range batch {
		o, ok := en.User.(*op)
		if !ok {
			en.User.(ownNote) <- nil
			continue
		}
		v := o.v
		if o.bufs != nil {
			e.arena.Free(o.bufs)
			o.bufs = nil
		}
		v.segs.add(en.Loc.Segment, LSN(en.Record.LSN))
		if o.note != nil && o.note.Size > 0 {
			v.grow(o.note.Size)
		}
		if en.Record.Kind != journal.KindFence {
			v.destage.add(pending{rec: en.Record, loc: en.Loc, charge: o.charge, at: now, note: o.note})
			// One advance per run of a volume's records: waiters are few, but the lock is not free.
			if !sameVolume(batch, i+1, v) {
				v.local.advance(LSN(en.Record.LSN), now)
				v.contractReached()
			}
		}
		if !o.early {
			o.done <- nil
		}
	}
}

func sameVolume(batch []*journal.Entry, i int, v *Volume) bool {
	if i >= len(batch) {
		return false
	}
	o, ok := batch[i].User.(*op)
	return ok && o.v == v && batch[i].Record.Kind != journal.KindFence
}

// publish makes the batch's records readable: the early ones before the sync, the others after.
func (e *Engine) publish(batch []*journal.Entry, early bool) {
	for i := 0; i < len(batch); {
		o, ok := batch[i].User.(*op)
		if !ok {
			i++
			continue
		}
		v := o.v
		v.mu.Lock()
		bs := v.cfg.BlockSize
		for ; i < len(batch); i++ {
			next, ok := batch[i].User.(*op)
			if !ok || next.v != v {
				break
			}
			if next.early != early {
				continue
			}
			switch rec := batch[i].Record; rec.Kind {
			case journal.KindData, journal.KindZero, journal.KindSame:
				v.dirty.Insert(v.extentOf(rec, batch[i].Loc, bs))
			}
			if early {
				next.done <- nil
			}
		}
		v.mu.Unlock()
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
		if o.bufs != nil {
			e.arena.Free(o.bufs)
			o.bufs = nil
		}
		select {
		case o.done <- err:
		default: // it is answered already: ack=memory, and the batch was written
		}
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
