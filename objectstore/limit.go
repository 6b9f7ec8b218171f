package objectstore

import "context"

type limited struct {
	next  Bucket
	slots chan struct{}
}

// WithLimit returns b with at most n (at least 1) calls under way at once. A call waits for
// its turn until its ctx ends; it fails with ErrTransient then, and nothing was sent.
func WithLimit(b Bucket, n int) Bucket {
	return &limited{b, make(chan struct{}, max(n, 1))}
}

func (l *limited) enter(ctx context.Context, op Op, key string) error {
	if err := ended(ctx, op, key); err != nil {
		return err
	}
	select {
	case l.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ended(ctx, op, key)
	}
}

func (l *limited) leave() { <-l.slots }

func (l *limited) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if err := l.enter(ctx, OpPut, key); err != nil {
		return err
	}
	defer l.leave()
	return l.next.PutIfAbsent(ctx, key, body)
}

func (l *limited) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	if err := l.enter(ctx, OpGet, key); err != nil {
		return nil, err
	}
	defer l.leave()
	return l.next.Get(ctx, key, limit)
}

func (l *limited) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if err := l.enter(ctx, OpGetRange, key); err != nil {
		return 0, err
	}
	defer l.leave()
	return l.next.GetRange(ctx, key, off, into)
}

func (l *limited) Head(ctx context.Context, key string) (Info, error) {
	if err := l.enter(ctx, OpHead, key); err != nil {
		return Info{}, err
	}
	defer l.leave()
	return l.next.Head(ctx, key)
}

func (l *limited) List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error) {
	if err := l.enter(ctx, OpList, prefix); err != nil {
		return nil, err
	}
	defer l.leave()
	return l.next.List(ctx, prefix, startAfter, max)
}

func (l *limited) Delete(ctx context.Context, keys ...string) error {
	if err := l.enter(ctx, OpDelete, ""); err != nil {
		return err
	}
	defer l.leave()
	return l.next.Delete(ctx, keys...)
}

func (l *limited) URL() string  { return l.next.URL() }
func (l *limited) Close() error { return l.next.Close() }
