package objectstore

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the counters of one node's object store traffic; several buckets may share
// them.
type Metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	bytes    *prometheus.CounterVec
}

// NewMetrics registers with reg:
//
//	isergate_object_requests_total{op,class}          calls that ended, by Op and Class
//	isergate_object_request_duration_seconds{op}      how long they took
//	isergate_object_bytes_total{op}                   payload bytes that put stored, get and get_range brought
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_object_requests_total",
			Help: "Object store requests that ended, by operation and class of the result.",
		}, []string{"op", "class"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "isergate_object_request_duration_seconds",
			Help:    "Time from the start to the end of an object store request.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 17), // 1 ms to 65 s
		}, []string{"op"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_object_bytes_total",
			Help: "Payload bytes of successful object store requests.",
		}, []string{"op"}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.duration, m.bytes} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

type measured struct {
	next Bucket
	m    *Metrics
}

// WithMetrics returns b with each call counted in m. Put it below WithRetry to count
// attempts: WithRetry(WithLimit(WithMetrics(b, m), n), o).
func WithMetrics(b Bucket, m *Metrics) Bucket { return &measured{b, m} }

// record counts one call that started at start.
func (d *measured) record(op Op, start time.Time, bytes int, err error) {
	d.m.duration.WithLabelValues(string(op)).Observe(time.Since(start).Seconds())
	d.m.requests.WithLabelValues(string(op), Classify(err).String()).Inc()
	if err == nil && bytes > 0 {
		d.m.bytes.WithLabelValues(string(op)).Add(float64(bytes))
	}
}

func (d *measured) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	start := time.Now()
	err := d.next.PutIfAbsent(ctx, key, body)
	d.record(OpPut, start, len(body), err)
	return err
}

func (d *measured) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	start := time.Now()
	body, err := d.next.Get(ctx, key, limit)
	d.record(OpGet, start, len(body), err)
	return body, err
}

func (d *measured) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	start := time.Now()
	n, err := d.next.GetRange(ctx, key, off, into)
	d.record(OpGetRange, start, n, err)
	return n, err
}

func (d *measured) Head(ctx context.Context, key string) (Info, error) {
	start := time.Now()
	info, err := d.next.Head(ctx, key)
	d.record(OpHead, start, 0, err)
	return info, err
}

func (d *measured) List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error) {
	start := time.Now()
	page, err := d.next.List(ctx, prefix, startAfter, max)
	d.record(OpList, start, 0, err)
	return page, err
}

func (d *measured) Delete(ctx context.Context, keys ...string) error {
	start := time.Now()
	err := d.next.Delete(ctx, keys...)
	d.record(OpDelete, start, 0, err)
	return err
}

func (d *measured) URL() string  { return d.next.URL() }
func (d *measured) Close() error { return d.next.Close() }
