package gateway

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// watched is a bucket that remembers whether it answers. It goes below the retries, so that
// an outage is known before they give up.
type watched struct {
	objectstore.Bucket
	health *bucketHealth
}

// trouble is why a bucket does not do what it is asked for, and since when.
type trouble struct {
	op    objectstore.Op // the kind of request; OpGet stands for all that read objects
	err   error          // of the last request
	since time.Time      // of the first that failed since one was answered
	last  time.Time      // of the last request
}

// bucketHealth is the trouble with each kind of request. They are kept apart because a store may refuse only some: puts to
// which a policy denies the right, or for which no space is left, while gets are answered.
type bucketHealth struct {
	mu sync.Mutex // guards by
	by map[objectstore.Op]trouble
}

// stands is how long a refusal of a kind of request counts while others are answered and it is not asked for again: longer than
// what is tried again pauses.
func (t *trouble) stands() time.Duration {
	if t.op == objectstore.OpPut {
		return 30 * time.Second
	}
	return 5 * time.Second
}

// now returns the trouble that has lasted longest, nil if there is none.
func (h *bucketHealth) now() *trouble {
	h.mu.Lock()
	defer h.mu.Unlock()
	var longest *trouble
	for _, t := range h.by {
		if longest == nil || t.since.Before(longest.since) {
			longest = &t
		}
	}
	return longest
}

// refused reports whether err is the store's own answer to a kind of request; other errors say that it is not reached.
func refused(err error) bool {
	return objectstore.Answered(err) || objectstore.Classify(err) != objectstore.ClassTransient && !errors.Is(err, objectstore.ErrNoBucket)
}

// note takes the outcome of a request in. That a key is there or is not there is an answer, and a request
// that its caller gave up says nothing.
func (h *bucketHealth) note(op objectstore.Op, err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := time.Now()
	switch {
	case err == nil, errors.Is(err, objectstore.ErrNotFound), errors.Is(err, objectstore.ErrExists), errors.Is(err, objectstore.ErrTooLarge):
		for of, t := range h.by {
			if of == op || !refused(t.err) || at.Sub(t.last) > t.stands() {
				delete(h.by, of)
			}
		}
	case !errors.Is(err, context.Canceled):
		t := trouble{op: op, err: err, since: at, last: at}
		if before, ok := h.by[op]; ok {
			t.since = before.since
		}
		if h.by == nil {
			h.by = map[objectstore.Op]trouble{}
		}
		h.by[op] = t
	}
	return err
}

// PutIfAbsent implements objectstore.Bucket.
func (w watched) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return w.health.note(objectstore.OpPut, w.Bucket.PutIfAbsent(ctx, key, body))
}

// Get implements objectstore.Bucket.
func (w watched) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	b, err := w.Bucket.Get(ctx, key, limit)
	return b, w.health.note(objectstore.OpGet, err)
}

// GetRange implements objectstore.Bucket.
func (w watched) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	n, err := w.Bucket.GetRange(ctx, key, off, into)
	return n, w.health.note(objectstore.OpGet, err)
}

// Head implements objectstore.Bucket.
func (w watched) Head(ctx context.Context, key string) (objectstore.Info, error) {
	info, err := w.Bucket.Head(ctx, key)
	return info, w.health.note(objectstore.OpGet, err)
}

// List implements objectstore.Bucket.
func (w watched) List(ctx context.Context, prefix, startAfter string, max int) ([]objectstore.Info, error) {
	page, err := w.Bucket.List(ctx, prefix, startAfter, max)
	return page, w.health.note(objectstore.OpList, err)
}

// Delete implements objectstore.Bucket.
func (w watched) Delete(ctx context.Context, keys ...string) error {
	return w.health.note(objectstore.OpDelete, w.Bucket.Delete(ctx, keys...))
}

// An outage is announced when it has lasted for outageAfter, and its end when it is over for as long: a
// store that fails now and then, or comes and goes, fills neither the log nor the events.
const (
	outageAfter = 3 * time.Second
	outagePoll  = time.Second
	// Where nothing else is asked of a bucket that did not answer, it is asked so often.
	outageProbe        = 5 * time.Second
	outageProbeTimeout = 5 * time.Second
)

// probeKey is a key that no bucket has.
const probeKey = "probe/none"

// outage is what was announced of a bucket; Node.outages guards it.
type outage struct {
	announced bool
	since     time.Time // that of the trouble that was announced
	answers   time.Time // when it was first found without trouble after that; zero: it was not
}

// watchBuckets announces outages until ctx ends.
func (n *Node) watchBuckets(ctx context.Context) {
	tick := time.NewTicker(outagePoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			n.probeTroubled(ctx, now)
			n.announceOutages(now)
		}
	}
}

// probeTroubled asks the buckets that did not answer and of which nobody asked anything since: an idle node
// would not learn that an outage is over.
func (n *Node) probeTroubled(ctx context.Context, now time.Time) {
	for _, a := range n.buckets.all() {
		t := a.health.now()
		if t == nil || now.Sub(t.last) < outageProbe {
			continue
		}
		select {
		case <-a.ready:
		default:
			continue
		}
		if a.seen == nil {
			continue
		}
		probing, cancel := context.WithTimeout(ctx, outageProbeTimeout)
		switch t.op { // seen notes the outcome
		case objectstore.OpGet:
			_, _ = a.seen.Get(probing, probeKey, 1)
		case objectstore.OpDelete:
			_ = a.seen.Delete(probing, probeKey)
		default: // what was refused to put is put again by whoever has it
			_, _ = a.seen.List(probing, "", "", 1)
		}
		cancel()
	}
}

// announceOutages notes, once each, that a bucket does not answer and that it does again.
func (n *Node) announceOutages(now time.Time) {
	n.outages.Lock()
	defer n.outages.Unlock()
	for url, a := range n.buckets.all() {
		o, t := &a.outage, a.health.now()
		switch {
		case t != nil && !o.announced && now.Sub(t.since) >= outageAfter:
			*o = outage{announced: true, since: t.since}
			names, id := n.volumesOf(url)
			n.event("warning", "bucket_unreachable", id, fmt.Sprintf("bucket %s does not answer since %s; volumes: %s; reads that are not cached wait and then fail with BUSY, and the dirty backlog grows: %v",
				url, t.since.UTC().Format(time.RFC3339), names, advised(t.err)))
		case t != nil:
			o.answers = time.Time{}
		case o.announced && o.answers.IsZero():
			o.answers = now
		case o.announced && now.Sub(o.answers) >= outageAfter:
			names, id := n.volumesOf(url)
			n.event("info", "bucket_reachable", id, fmt.Sprintf("bucket %s answers again; it did not for %s; volumes: %s", url, o.answers.Sub(o.since).Round(time.Second), names))
			*o = outage{}
		}
	}
}

// volumesOf names the volumes whose home is a bucket, and identifies the volume if it is one.
func (n *Node) volumesOf(url string) (names string, id uuid.UUID) {
	const named = 10
	var all []string
	for _, v := range n.catalog.State().Volumes {
		if v.Bucket != url {
			continue
		}
		all, id = append(all, v.Name), v.ID
	}
	switch {
	case len(all) == 0:
		return "none", uuid.Nil
	case len(all) == 1:
		return all[0], id
	case len(all) > named:
		return fmt.Sprintf("%s and %d more", strings.Join(all[:named], ", "), len(all)-named), uuid.Nil
	}
	return strings.Join(all, ", "), uuid.Nil
}
