package cache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// Destage brings a volume's journaled records to its bucket, in LSN order: it cuts the
// queue into objects, puts several at once, and lets the watermark follow in order.
// It is the only writer of the home map.

// pending is a record that is durable in the journal and not yet known to be in the bucket.
type pending struct {
	rec    journal.Record
	loc    journal.Location
	charge int64 // bytes of the dirty budget
	at     time.Time
	note   *note
}

// destager is the queue and its state. The queue holds consecutive LSNs.
type destager struct {
	mu     sync.Mutex
	queue  []pending // guarded by mu; [0:sent] is on its way
	sent   int       // guarded by mu
	urgent LSN       // guarded by mu: someone waits for this LSN
	hello  bool      // guarded by mu: open the epoch in the bucket even with nothing to send

	kick  chan struct{} // buffered: there may be something to do
	idle  chan struct{} // closed when the loop has ended, or never will begin
	ended sync.Once     // closes idle

	objectBytes atomic.Int64

	// What follows belongs to the loop and, after attach, to advance under apply.
	identity volumelog.Identity // of this epoch
	began    LSN                // the last one before this epoch: what the bucket has above it is not ours
	writer   *volumelog.Writer
	nextSeq  uint64
	size     int64 // of the volume, as of the last record that was cut

	checkpoint sync.Mutex // held while a checkpoint is written to the bucket

	apply   sync.Mutex // orders everything that changes the home map
	flights []*flight  // guarded by apply: in order of sequence number
	objects int        // guarded by apply: since the last checkpoint in the bucket
}

// flight is one object on its way.
type flight struct {
	seq    uint64
	recs   []pending
	sizeAt int64   // bytes of the volume, as of the last record
	layout *layout // set when the object was put
	bytes  int64   // of the object
	done   bool
}

// end notes that no loop is working, or ever will.
func (d *destager) end() { d.ended.Do(func() { close(d.idle) }) }

// add queues records; the journal's committer calls it in LSN order.
func (d *destager) add(run []*journal.Entry, now time.Time) {
	d.mu.Lock()
	for _, en := range run {
		if en.Record.Kind != journal.KindFence {
			o := en.User.(*op)
			d.queue = append(d.queue, pending{rec: en.Record, loc: en.Loc, charge: o.charge, at: now, note: o.note})
		}
	}
	d.mu.Unlock()
	d.wake()
}

func (d *destager) wake() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// urge asks for everything up to lsn to be sent now.
func (d *destager) urge(lsn LSN) {
	d.mu.Lock()
	d.urgent = max(d.urgent, lsn)
	d.mu.Unlock()
	d.wake()
}

// oldest is when the oldest record that is not at `object` became durable; zero if there is none.
func (d *destager) oldest() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.queue) == 0 {
		return time.Time{}
	}
	return d.queue[0].at
}

// cut takes the next object's records off the queue when it is time for an object: enough bytes, old
// enough, or waited for. Otherwise it says how long to wait (0: until kicked).
func (d *destager) cut(maxBytes int64, maxAge time.Duration, pressed bool) (recs []pending, wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	rest := d.queue[d.sent:]
	if len(rest) == 0 {
		return nil, 0
	}
	var bytes int64
	n := 0
	for n < len(rest) && n < maxObjectRecords {
		b := int64(rest[n].rec.PayloadBytes)
		if n > 0 && bytes+b > maxBytes {
			break
		}
		bytes += b
		n++
	}
	full := n < len(rest) || bytes >= maxBytes
	age := time.Since(rest[0].at)
	if !full && !pressed && age < maxAge && d.urgent < LSN(rest[0].rec.LSN) {
		return nil, maxAge - age
	}
	d.sent += n
	return rest[:n:n], 0
}

// maxObjectRecords bounds the header of an object.
const maxObjectRecords = 16384

// run is the volume's destage loop. It ends when ctx does or the volume is stopped.
func (v *Volume) run(ctx context.Context) {
	d := &v.destage
	defer d.end()
	var flying sync.WaitGroup
	defer flying.Wait()
	slots := make(chan struct{}, v.e.opt.DestageParallel)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for ctx.Err() == nil {
		if o := v.down.Load(); o != nil && o.state != StateOpening {
			return
		}
		d.mu.Lock()
		work := len(d.queue) > d.sent || d.hello
		d.mu.Unlock()
		var recs []pending
		var wait time.Duration
		if work {
			if d.writer == nil {
				if err := v.retry(ctx, v.attach); err != nil {
					return
				}
				d.mu.Lock()
				d.hello = false
				d.mu.Unlock()
				v.destageWorks()
				continue // the bucket may hold more than we knew
			}
			recs, wait = d.cut(v.e.opt.MaxObjectBytes, v.e.opt.MaxObjectAge, v.pressed())
		}
		if recs == nil {
			if wait == 0 {
				wait = time.Hour
			}
			timer.Reset(wait)
			select {
			case <-ctx.Done():
			case <-d.kick:
			case <-timer.C:
			}
			continue
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		for _, p := range recs {
			if p.note != nil {
				d.size = max(d.size, p.note.Size)
			}
		}
		f := &flight{seq: d.nextSeq, recs: recs, sizeAt: d.size}
		d.nextSeq++
		d.apply.Lock()
		d.flights = append(d.flights, f)
		d.apply.Unlock()
		flying.Add(1)
		go func() {
			defer flying.Done()
			defer func() { <-slots }()
			if err := v.retry(ctx, func(ctx context.Context) error { return v.put(ctx, f) }); err != nil {
				return
			}
			v.landed(ctx, f)
		}()
	}
}

// pressed: a writer waits for dirty budget, or the journal fills up, or the engine is draining.
func (v *Volume) pressed() bool {
	_, _, waiting := v.budget.usage()
	return waiting || v.e.pressed()
}

// put builds the object and puts it. The object is the same at every attempt.
func (v *Volume) put(ctx context.Context, f *flight) error {
	pool := v.e.pools.of(v.bucket().URL())
	b, err := pool.take(ctx)
	if err != nil {
		return err
	}
	defer func() { pool.give(b) }()
	body, layout, err := v.build(b, f)
	if err != nil {
		return err
	}
	if err := v.destage.writer.Put(ctx, f.seq, body); err != nil {
		return err
	}
	f.layout, f.bytes = layout, int64(len(body))
	return nil
}

// retry calls f until it succeeds. It gives up when ctx ends, and when trying again cannot help:
// then the volume is out of service.
func (v *Volume) retry(ctx context.Context, f func(context.Context) error) error {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 15*time.Second) {
		err := f(ctx)
		switch {
		case err == nil:
			v.destageWorks()
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, volumelog.ErrFenced), errors.Is(err, volumelog.ErrSuperseded), errors.Is(err, volumelog.ErrEpochTaken):
			err = fmt.Errorf("%w: %w: nothing more is acknowledged here; restore the volume to take it back", ErrFenced, err)
			v.stop(StateFenced, err)
			return err
		case errors.Is(err, homemap.ErrDamaged):
			return v.homeDamaged(err)
		case errors.Is(err, journal.ErrCorrupt), errors.Is(err, ErrDamaged), errors.Is(err, volumelog.ErrInvalid), errors.Is(err, volumelog.ErrConflict),
			errors.Is(err, volumelog.ErrVersion), errors.Is(err, volumelog.ErrUnsupported):
			err = fmt.Errorf("%w: %w: nothing more is destaged", ErrDamaged, err)
			v.stop(StateFailed, err)
			return err
		}
		v.mu.Lock()
		first := v.objectErr == ""
		v.objectErr = err.Error()
		v.mu.Unlock()
		if first {
			v.event("warning", "destage_failing", fmt.Sprintf("%v: %s", err, objectstore.Advice(err)))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait/2 + rand.N(wait)):
		}
	}
}

func (v *Volume) destageWorks() {
	v.mu.Lock()
	failed := v.objectErr != ""
	v.objectErr = ""
	v.mu.Unlock()
	if failed {
		v.event("info", "destage_works", "the object store answers again")
	}
}

// landed notes that an object is in the bucket, and moves the watermark over all that
// are there without a gap.
func (v *Volume) landed(ctx context.Context, f *flight) {
	d := &v.destage
	d.apply.Lock()
	f.done = true
	d.apply.Unlock()
	// The lock is not held over the waiting for a store that has no room: reclaim needs it.
	_ = v.retry(ctx, func(context.Context) error { return v.moveHome() })
}

// moveHome puts into the home map what has landed, in order.
func (v *Volume) moveHome() error {
	d := &v.destage
	d.apply.Lock()
	defer d.apply.Unlock()
	for len(d.flights) > 0 && d.flights[0].done {
		head := d.flights[0]
		if err := v.home.Insert(head.layout.extents...); err != nil {
			return err
		}
		last := head.recs[len(head.recs)-1]
		d.objectBytes.Add(head.bytes)
		v.passed(LSN(last.rec.LSN), time.Unix(0, last.rec.Time), volumelog.Position{Epoch: d.writer.Epoch(), Seq: head.seq + 1})
		d.flights = d.flights[1:]
		d.objects++
	}
	if d.objects >= v.e.opt.CheckpointObjects {
		d.objects = 0
		v.e.space.wantBucketCheckpoint(v)
	}
	return nil
}

// passed notes that the bucket holds everything up to lsn, all of it before pos, and that the home map holds it too. The caller holds apply.
func (v *Volume) passed(lsn LSN, at time.Time, pos volumelog.Position) {
	d := &v.destage
	d.mu.Lock()
	n := 0
	for n < len(d.queue) && LSN(d.queue[n].rec.LSN) <= lsn {
		n++
	}
	recs := d.queue[:n:n]
	d.queue = d.queue[n:]
	d.sent = max(0, d.sent-n)
	d.mu.Unlock()

	var charge int64
	v.mu.Lock()
	for _, p := range recs {
		charge += p.charge
		switch p.rec.Kind {
		case journal.KindData, journal.KindZero, journal.KindSame:
			v.dirty.RemoveUpTo(p.rec.Offset/sectorBytes, p.rec.Length/sectorBytes, uint64(lsn))
		}
		if p.note != nil {
			v.home.at.Size = max(v.home.at.Size, p.note.Size)
		}
	}
	v.home.at.Position, v.home.at.LSN, v.home.at.Time = pos, lsn, at
	v.mu.Unlock()
	v.object.advance(lsn, time.Now())
	v.budget.release(charge)
	v.contractReached()
	v.e.space.wake()
}
