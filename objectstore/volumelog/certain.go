package volumelog

import (
	"context"
	"errors"

	"github.com/isergate/isergate/objectstore"
)

// readAttempts is how often bytes are read before they count as damaged.
const readAttempts = 4

// certain repeats a read that finds damage. Bytes change on their way too, and what a caller does about a damaged object, to report it, to
// pass over it or to go without it, is not done on the word of one answer.
func certain(read func() error) (err error) {
	for range readAttempts {
		if err = read(); !errors.Is(err, objectstore.ErrCorrupt) {
			return err
		}
	}
	return err
}

// confirm returns an error that Is ErrCorrupt if a key that a listing named is not there. Listings have no checksum: one inverted bit in
// them must not make a newer owner, nor an epoch that nobody had.
func confirm(ctx context.Context, b objectstore.Bucket, key string) error {
	_, err := b.Head(ctx, key)
	if errors.Is(err, objectstore.ErrNotFound) {
		return corruptf("a listing names %s, which is not there", key)
	}
	if err != nil {
		return about("head", key, err)
	}
	return nil
}
