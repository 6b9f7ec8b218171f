package volumelog

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/objectstore"
)

// steady is the bucket of one walk over the log. A store that has answered and then refuses one request of thousands (stores in trouble
// answer 403 to some) is asked again a few times: the walk would have to begin anew, and of a long log it would never see the end.
type steady struct {
	objectstore.Bucket
	answered atomic.Bool
}

// Pauses before a refused request is repeated.
const (
	steadyAttempts = 5
	steadyPause    = 50 * time.Millisecond // doubled each time
)

func (s *steady) do(ctx context.Context, try func() error) error {
	pause := steadyPause
	for n := 1; ; n++ {
		err := try()
		switch objectstore.Classify(err) {
		case objectstore.ClassDenied, objectstore.ClassWrongRegion, objectstore.ClassClockSkew:
		case objectstore.ClassOK, objectstore.ClassNotFound, objectstore.ClassFenced:
			s.answered.Store(true)
			return err
		default:
			return err
		}
		if n == steadyAttempts || !s.answered.Load() {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
			pause *= 2
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// PutIfAbsent implements objectstore.Bucket.
func (s *steady) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	return s.do(ctx, func() error { return s.Bucket.PutIfAbsent(ctx, key, body) })
}

// Get implements objectstore.Bucket.
func (s *steady) Get(ctx context.Context, key string, limit int64) (body []byte, err error) {
	err = s.do(ctx, func() (err error) {
		body, err = s.Bucket.Get(ctx, key, limit)
		return err
	})
	return body, err
}

// GetRange implements objectstore.Bucket.
func (s *steady) GetRange(ctx context.Context, key string, off int64, into []byte) (n int, err error) {
	err = s.do(ctx, func() (err error) {
		n, err = s.Bucket.GetRange(ctx, key, off, into)
		return err
	})
	return n, err
}

// Head implements objectstore.Bucket.
func (s *steady) Head(ctx context.Context, key string) (info objectstore.Info, err error) {
	err = s.do(ctx, func() (err error) {
		info, err = s.Bucket.Head(ctx, key)
		return err
	})
	return info, err
}

// List implements objectstore.Bucket.
func (s *steady) List(ctx context.Context, prefix, startAfter string, max int) (page []objectstore.Info, err error) {
	err = s.do(ctx, func() (err error) {
		page, err = s.Bucket.List(ctx, prefix, startAfter, max)
		return err
	})
	return page, err
}
