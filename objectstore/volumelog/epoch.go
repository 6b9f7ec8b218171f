package volumelog

import (
	"context"
	"math"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// Newest returns the header of the object that opened, or closed unopened, the highest epoch of
// which the bucket holds anything; nil if it holds nothing of the volume.
func Newest(ctx context.Context, b objectstore.Bucket, id uuid.UUID) (*Header, error) {
	w := &walker{b: b, id: id, maxGeneration: math.MaxUint64 - 1}
	highest, err := w.highestEpoch(ctx)
	if err != nil || highest == 0 {
		return nil, err
	}
	return ReadHeader(ctx, b, id, Position{Epoch: highest})
}
