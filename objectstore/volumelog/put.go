package volumelog

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/isergate/isergate/objectstore"
)

// errTaken: the key holds an object that is not the one that was put.
var errTaken = errors.New("volumelog: the key holds another object")

// putOnce makes key hold exactly body, or says why not: errTaken, or the error of the store when
// it cannot be told. Whenever the store does not answer with success the object is read back: a
// 412 after a retry may be our own write, and so may one of unknown outcome. The first
// bytes decide, because a checksum over all of the object is among them. A store that says that the object is not there answers
// again, after an outage maybe: the put is tried once more.
func putOnce(ctx context.Context, b objectstore.Bucket, key string, body []byte) error {
	want := body[:min(len(body), HeaderBlock)]
	got := make([]byte, len(want))
	for again := false; ; again = true {
		err := b.PutIfAbsent(ctx, key, body)
		if err == nil {
			return nil
		}
		n, rerr := b.GetRange(ctx, key, 0, got)
		switch {
		case rerr == nil && bytes.Equal(got[:n], want):
			return nil
		case rerr == nil:
			return errTaken
		case errors.Is(err, objectstore.ErrExists):
			// Never ErrExists: whose object it is remains unknown.
			return fmt.Errorf("%w: the key is taken, and reading it back: %w", objectstore.ErrUnknown, rerr)
		case again || !errors.Is(rerr, objectstore.ErrNotFound) || objectstore.Classify(err) != objectstore.ClassTransient:
			return err
		}
	}
}
