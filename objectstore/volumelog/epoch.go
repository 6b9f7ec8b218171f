package volumelog

import (
	"context"
	"math"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// HighestEpoch returns the highest epoch of which the bucket holds anything, 0 if it
// holds nothing of the volume.
func HighestEpoch(ctx context.Context, b objectstore.Bucket, id uuid.UUID) (uint64, error) {
	w := &walker{b: b, id: id, maxGeneration: math.MaxUint64 - 1}
	return w.highestEpoch(ctx)
}
