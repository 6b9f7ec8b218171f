package objectstore

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// RetryOptions of WithRetry. The zero value means the defaults.
type RetryOptions struct {
	// Budget is the time after which no further attempt is started. Default 30 s.
	Budget time.Duration
	// FirstWait is the longest wait before the second attempt; it doubles each time. Default
	// 100 ms.
	FirstWait time.Duration
	// MaxWait is the longest wait between two attempts. Default 5 s.
	MaxWait time.Duration
}

// EnsureDefaults fills in what is zero.
func (o *RetryOptions) EnsureDefaults() {
	if o.Budget <= 0 {
		o.Budget = 30 * time.Second
	}
	if o.FirstWait <= 0 {
		o.FirstWait = 100 * time.Millisecond
	}
	if o.MaxWait <= 0 {
		o.MaxWait = 5 * time.Second
	}
}

type retrying struct {
	next Bucket
	o    RetryOptions
}

// WithRetry returns b with ClassTransient errors retried until the budget is spent or ctx
// ends, with exponential waits of which a random half is cut off. ClassClockSkew is retried once at
// once, since the first refusal told the client the time. Nothing else is retried.
//
// A put whose outcome was unknown once and that later finds the key taken returns
// ErrExists: the object may be its own. Once an attempt's outcome was unknown, every error other than
// ErrExists Is ErrUnknown, also when a later attempt failed for another reason.
func WithRetry(b Bucket, o RetryOptions) Bucket {
	o.EnsureDefaults()
	return &retrying{b, o}
}

// do runs attempt until it succeeds or must not be repeated.
func (r *retrying) do(ctx context.Context, op Op, key string, attempt func() error) error {
	start := time.Now()
	unknown, skewed := false, false
	for wait := r.o.FirstWait; ; wait = min(2*wait, r.o.MaxWait) {
		err := attempt()
		if err == nil || errors.Is(err, ErrExists) {
			return err
		}
		unknown = unknown || errors.Is(err, ErrUnknown)
		if unknown && !errors.Is(err, ErrUnknown) {
			err = fail(op, key, ErrUnknown, err)
		}
		class := Classify(err)
		if class == ClassClockSkew && !skewed {
			skewed = true
			continue
		}
		pause := wait - rand.N(wait/2+1)
		if class != ClassTransient || ctx.Err() != nil || time.Since(start)+pause > r.o.Budget {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

func (r *retrying) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return r.do(ctx, OpPut, key, func() error { return r.next.PutIfAbsent(ctx, key, body) })
}

func (r *retrying) Get(ctx context.Context, key string, limit int64) (body []byte, err error) {
	err = r.do(ctx, OpGet, key, func() (err error) {
		body, err = r.next.Get(ctx, key, limit)
		return err
	})
	return body, err
}

func (r *retrying) GetRange(ctx context.Context, key string, off int64, into []byte) (n int, err error) {
	err = r.do(ctx, OpGetRange, key, func() (err error) {
		n, err = r.next.GetRange(ctx, key, off, into)
		return err
	})
	return n, err
}

func (r *retrying) Head(ctx context.Context, key string) (info Info, err error) {
	err = r.do(ctx, OpHead, key, func() (err error) {
		info, err = r.next.Head(ctx, key)
		return err
	})
	return info, err
}

func (r *retrying) List(ctx context.Context, prefix, startAfter string, max int) (page []Info, err error) {
	err = r.do(ctx, OpList, prefix, func() (err error) {
		page, err = r.next.List(ctx, prefix, startAfter, max)
		return err
	})
	return page, err
}

func (r *retrying) Delete(ctx context.Context, keys ...string) error {
	return r.do(ctx, OpDelete, "", func() error { return r.next.Delete(ctx, keys...) })
}

func (r *retrying) URL() string  { return r.next.URL() }
func (r *retrying) Close() error { return r.next.Close() }
