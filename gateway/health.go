package gateway

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// watched is a bucket that remembers whether it answers. It goes below the retries, so that
// an outage is known before they give up.
type watched struct {
	objectstore.Bucket
	trouble *atomic.Pointer[trouble] // of the last request; nil when it was answered
}

// trouble is why a bucket does not answer, and since when.
type trouble struct {
	err   error     // of the last request
	since time.Time // of the first that failed since one was answered
	last  time.Time // of the last request
}

// note takes the outcome of a request in. That a key is there or is not there is an answer, and a request
// that its caller gave up says nothing.
func (w watched) note(err error) error {
	switch {
	case err == nil, errors.Is(err, objectstore.ErrNotFound), errors.Is(err, objectstore.ErrExists), errors.Is(err, objectstore.ErrTooLarge):
		if w.trouble.Load() != nil {
			w.trouble.Store(nil)
		}
	case !errors.Is(err, context.Canceled):
		at := time.Now()
		t := &trouble{err: err, since: at, last: at}
		if before := w.trouble.Load(); before != nil {
			t.since = before.since
		}
		w.trouble.Store(t)
	}
	return err
}

// PutIfAbsent implements objectstore.Bucket.
func (w watched) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return w.note(w.Bucket.PutIfAbsent(ctx, key, body))
}

// Get implements objectstore.Bucket.
func (w watched) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	b, err := w.Bucket.Get(ctx, key, limit)
	return b, w.note(err)
}

// GetRange implements objectstore.Bucket.
func (w watched) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	n, err := w.Bucket.GetRange(ctx, key, off, into)
	return n, w.note(err)
}

// Head implements objectstore.Bucket.
func (w watched) Head(ctx context.Context, key string) (objectstore.Info, error) {
	info, err := w.Bucket.Head(ctx, key)
	return info, w.note(err)
}

// List implements objectstore.Bucket.
func (w watched) List(ctx context.Context, prefix, startAfter string, max int) ([]objectstore.Info, error) {
	page, err := w.Bucket.List(ctx, prefix, startAfter, max)
	return page, w.note(err)
}

// Delete implements objectstore.Bucket.
func (w watched) Delete(ctx context.Context, keys ...string) error {
	return w.note(w.Bucket.Delete(ctx, keys...))
}

// An outage is announced when it has lasted for outageAfter, and its end when it is over for as long: a
// store that fails now and then, or comes and goes, fills neither the log nor the events.
const (
	outageAfter = 3 * time.Second
	outagePoll  = time.Second
	// Where nothing else is asked of a bucket that did not answer, it is asked so often.
	outageProbe        = 10 * time.Second
	outageProbeTimeout = 5 * time.Second
)

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
// would not learn that an outage is over. A listing says nothing of denied reads, so these are left.
func (n *Node) probeTroubled(ctx context.Context, now time.Time) {
	for _, a := range n.buckets.all() {
		t := a.trouble.Load()
		if t == nil || now.Sub(t.last) < outageProbe || objectstore.Classify(t.err) != objectstore.ClassTransient && !errors.Is(t.err, objectstore.ErrNoBucket) {
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
		_, _ = a.seen.List(probing, "", "", 1) // seen notes the outcome
		cancel()
	}
}

// announceOutages notes, once each, that a bucket does not answer and that it does again.
func (n *Node) announceOutages(now time.Time) {
	n.outages.Lock()
	defer n.outages.Unlock()
	for url, a := range n.buckets.all() {
		o, t := &a.outage, a.trouble.Load()
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
