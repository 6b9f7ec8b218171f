package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/objectstore"
)

// buckets attaches each bucket once and shares it among the volumes.
type buckets struct {
	config  config.Bucket
	main    string // canonical URL of the bucket of new volumes
	metrics *objectstore.Metrics
	catalog catalog.Store
	log     *slog.Logger
	openURL func(context.Context, string, objectstore.Options) (objectstore.Bucket, error)

	mu       sync.Mutex // guards attached
	attached map[string]*attachment
}

// attachment is one bucket. Its fields but ready, health and outage may be read once ready is closed.
type attachment struct {
	ready        chan struct{}
	bucket       objectstore.Bucket
	seen         objectstore.Bucket // the same without retries and limit
	conditional  string             // what the store does with conditional writes
	singleWriter bool               // it is used without them
	health       bucketHealth
	outage       outage
	err          error
}

// probeRetry bounds how long the examination of a bucket is tried. It is short: a known
// bucket may be down, and nothing is served meanwhile.
const probeRetry = 2 * time.Second

// newBuckets makes the set; nothing is attached yet.
func newBuckets(c config.Bucket, store catalog.Store, metrics *objectstore.Metrics, log *slog.Logger) (*buckets, error) {
	location, err := objectstore.ParseURL(c.URL)
	if err != nil {
		return nil, fmt.Errorf("bucket: %w", err)
	}
	return &buckets{
		config: c, main: location.String(), metrics: metrics, catalog: store, log: log, openURL: objectstore.Open,
		attached: map[string]*attachment{},
	}, nil
}

// open returns the bucket of a URL, examined and wrapped. A store that does not keep two
// writers apart is refused, unless the operator declared a single writer for it. A store that was
// examined before and does not answer now is taken as it was: an outage must not keep the node from serving.
func (b *buckets) open(ctx context.Context, url string) (objectstore.Bucket, error) {
	location, err := objectstore.ParseURL(url)
	if err != nil {
		return nil, err
	}
	key := location.String()
	b.mu.Lock()
	a, found := b.attached[key]
	if !found {
		a = &attachment{ready: make(chan struct{})}
		b.attached[key] = a
	}
	b.mu.Unlock()
	if !found {
		if err := b.attach(ctx, key, a); err != nil { // the next caller tries again
			a.err = fmt.Errorf("bucket %s cannot be used: %w", key, err)
			b.mu.Lock()
			delete(b.attached, key)
			b.mu.Unlock()
		}
		close(a.ready)
	}
	select {
	case <-a.ready:
		return a.bucket, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// attach opens and examines a bucket, decides whether it will do, and wraps it.
func (b *buckets) attach(ctx context.Context, url string, a *attachment) error {
	options := objectstore.Options{Logger: b.log, Connections: b.config.Requests}
	raw, err := b.openKnown(ctx, url, options)
	if err != nil {
		return advised(err)
	}
	probe := objectstore.RetryOptions{Budget: min(b.config.RetryFor, probeRetry)}
	conditional, err := b.examine(ctx, url, objectstore.WithRetry(watched{raw, &a.health}, probe))
	if err != nil {
		return errors.Join(err, raw.Close())
	}
	if conditional != objectstore.ConditionalHonoured.String() {
		if !b.config.SingleWriter || url != b.main {
			_ = raw.Close()
			return fmt.Errorf("%w (its answer to a conditional write: %s): use a store that honours If-None-Match, or set bucket.single_writer: true in the configuration if no other gateway can ever write to it", objectstore.ErrNoConditionalPut, conditional)
		}
		_ = raw.Close()
		options.SingleWriter = true
		if raw, err = b.openURL(ctx, url, options); err != nil {
			return advised(err)
		}
		a.singleWriter = true
		b.log.Warn("bucket is used without conditional writes, as configured; two gateways would destroy each other's data", "bucket", url)
	}
	a.conditional = conditional
	seen := watched{objectstore.WithMetrics(raw, b.metrics), &a.health}
	a.seen = seen
	a.bucket = objectstore.WithRetry(objectstore.WithLimit(seen, b.config.Requests), objectstore.RetryOptions{Budget: b.config.RetryFor})
	return nil
}

// openKnown opens a bucket, but makes none in the place of one that holds volumes.
func (b *buckets) openKnown(ctx context.Context, url string, options objectstore.Options) (objectstore.Bucket, error) {
	location, err := objectstore.ParseURL(url)
	if err != nil {
		return nil, err
	}
	inUse := slices.ContainsFunc(b.catalog.State().Volumes, func(v catalog.Volume) bool { return v.Bucket == url })
	if location.Scheme != "file" || !inUse || !isMissing(location.Dir) {
		return b.openURL(ctx, url, options)
	}
	return &missingDir{dir: location.Dir, url: url, open: func(ctx context.Context) (objectstore.Bucket, error) {
		return b.openURL(ctx, url, options)
	}}, nil
}

// examine finds out what the store does with conditional writes: by asking it, or, if it does
// not answer, from the catalogue.
func (b *buckets) examine(ctx context.Context, url string, bucket objectstore.Bucket) (conditional string, err error) {
	state := b.catalog.State()
	known := state.Bucket(url)
	limit := max(b.config.RetryFor, probeRetry)
	if known != nil {
		limit = 2 * probeRetry // one request that hangs is enough
	}
	probing, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found, err := objectstore.Probe(probing, bucket)
	unfit := errors.Is(err, objectstore.ErrCorrupt) || errors.Is(err, objectstore.ErrUnsupported) && !errors.Is(err, objectstore.ErrNoConditionalPut)
	switch {
	case err == nil, errors.Is(err, objectstore.ErrNoConditionalPut) && !unfit:
		conditional = found.ConditionalPut.String()
	case known == nil, ctx.Err() != nil:
		return "", advised(err)
	default:
		// Also if what it answered was unfit: then something is in its way now, and what is read is checked each time.
		b.log.Warn("object store does not answer and is taken as it was when it was examined", "bucket", url, "conditional", known.Conditional, "examined", known.Examined, "err", err)
		return known.Conditional, nil
	}
	if known != nil && known.Conditional == conditional {
		return conditional, nil
	}
	_, err = b.catalog.Update(func(s *catalog.State) error {
		entry := s.Bucket(url)
		if entry == nil {
			s.Buckets = append(s.Buckets, catalog.Bucket{URL: url})
			entry = &s.Buckets[len(s.Buckets)-1]
		}
		entry.Conditional, entry.Examined = conditional, time.Now().UTC()
		return nil
	})
	return conditional, err
}

// advised adds what a person can do about an error of a store that ends what was asked.
func advised(err error) error {
	if advice := strings.Replace(objectstore.Advice(err), "; the gateway keeps trying", "", 1); advice != "" {
		return fmt.Errorf("%w. %s", err, advice)
	}
	return err
}

// describe returns what is known of the bucket of new volumes.
func (b *buckets) describe() (conditional string, singleWriter bool) {
	b.mu.Lock()
	a := b.attached[b.main]
	b.mu.Unlock()
	if a == nil {
		return "", false
	}
	select {
	case <-a.ready:
		return a.conditional, a.singleWriter
	default:
		return "", false
	}
}

// trouble says why the bucket of a URL does not answer, and since when; it is nil when it does.
func (b *buckets) trouble(url string) *trouble {
	location, err := objectstore.ParseURL(url)
	if err != nil {
		return nil
	}
	b.mu.Lock()
	a := b.attached[location.String()]
	b.mu.Unlock()
	if a == nil {
		return nil
	}
	return a.health.now()
}

// ask asks an attached bucket for a little, so that trouble tells whether it answers now even if nothing else was asked of it.
func (b *buckets) ask(ctx context.Context, url string) {
	location, err := objectstore.ParseURL(url)
	if err != nil {
		return
	}
	a := b.all()[location.String()]
	if a == nil {
		return
	}
	select {
	case <-a.ready:
	default:
		return
	}
	if a.seen == nil {
		return
	}
	asking, cancel := context.WithTimeout(ctx, outageProbeTimeout)
	defer cancel()
	_, _ = a.seen.List(asking, "", "", 1) // seen notes the outcome
}

// all returns what is attached or about to be, by canonical URL.
func (b *buckets) all() map[string]*attachment {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.attached)
}

// close closes all of them. No open may be under way.
func (b *buckets) close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for key, a := range b.attached {
		<-a.ready
		if a.bucket != nil {
			errs = append(errs, a.bucket.Close())
		}
		delete(b.attached, key)
	}
	return errors.Join(errs...)
}
