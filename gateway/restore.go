package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// RestoreVolume implements api.Service: it takes a volume over from its bucket, with a
// new epoch above all that the bucket knows and a new generation.
func (n *Node) RestoreVolume(ctx context.Context, r api.RestoreVolume) (api.Restored, error) {
	location, err := objectstore.ParseURL(r.From)
	if err != nil {
		return api.Restored{}, invalid("--from: %w", err)
	}
	if err := bucketThere(location); err != nil {
		return api.Restored{}, err
	}
	bucket, err := n.buckets.open(ctx, r.From)
	if err != nil {
		return api.Restored{}, api.Errorf(api.CodeUnavailable, "%w", err)
	}
	found, err := findInBucket(ctx, bucket, r.Volume)
	if err != nil {
		return api.Restored{}, err
	}
	name := r.As
	if name == "" {
		name = found.Name
	}
	if err := catalog.CheckVolumeName(name); err != nil {
		return api.Restored{}, invalid("%w: choose one with --as", err)
	}
	if err := n.reserve(name, found.ID); err != nil {
		return api.Restored{}, err
	}
	defer n.unreserve(name)

	opened, report, err := n.engine.Restore(ctx, cache.VolumeConfig{
		ID: found.ID, Name: name, Policy: cache.DefaultPolicy, Bucket: bucket,
	})
	if err != nil {
		return api.Restored{}, fmt.Errorf("volume %s was not restored: %w", name, err)
	}
	entry := catalog.Volume{
		ID: found.ID, Name: name, SizeBytes: report.SizeBytes, BlockSize: report.BlockSize, Policy: cache.DefaultPolicy,
		Bucket: location.String(), Created: time.Now().UTC(),
	}
	v, err := n.newVolume(entry)
	if err == nil {
		n.admin.Lock()
		if _, err = n.catalog.Update(func(s *catalog.State) error { return addMapping(s, entry, "", nil) }); err == nil {
			v.serve(opened) // before anybody can map it: a LUN of a volume that is not there yet would stay away
			n.add(v)
		}
		n.admin.Unlock()
	}
	if err != nil { // the bucket keeps everything
		return api.Restored{}, errors.Join(err, n.engine.Forget(context.WithoutCancel(ctx), entry.ID, bucket, false))
	}
	text := fmt.Sprintf("volume %s was restored at LSN %d of %s, generation %d", name, report.LSN, report.Time.UTC().Format(time.RFC3339), report.Generation)
	if report.Gap != "" {
		text += ": " + report.Gap
	}
	n.event("warning", "volume_restored", entry.ID, text)
	state := n.catalog.State()
	return api.Restored{
		Volume: n.describe(v, &state), LSN: uint64(report.LSN), Time: report.Time.UTC(), Epoch: report.Epoch,
		Generation: report.Generation, Objects: report.Objects, Gap: report.Gap,
	}, nil
}

// reserve keeps a name for a volume that is about to be.
func (n *Node) reserve(name string, id uuid.UUID) error {
	n.admin.Lock()
	defer n.admin.Unlock()
	if err := n.checkFree(name, id); err != nil {
		return err
	}
	n.reserved[name] = true
	return nil
}

func (n *Node) unreserve(name string) {
	n.admin.Lock()
	defer n.admin.Unlock()
	delete(n.reserved, name)
}

// findInBucket returns the one volume of a bucket that has that name or UUID.
func findInBucket(ctx context.Context, bucket objectstore.Bucket, name string) (volumelog.VolumeInfo, error) {
	found, err := volumelog.Find(ctx, bucket, name)
	switch {
	case err == nil:
		return found, nil
	case errors.Is(err, volumelog.ErrNoVolume):
		return found, notFound("there is no volume %q in %s: see \"isergate bucket inspect %s\"", name, bucket.URL(), bucket.URL())
	case errors.Is(err, volumelog.ErrAmbiguous):
		return found, conflict("%w: name it by its UUID", err)
	}
	return found, api.Errorf(api.CodeUnavailable, "%w", advised(err))
}

// bucketThere refuses a directory in which opening a bucket would make a new one.
func bucketThere(location objectstore.Location) error {
	if location.Scheme == "file" && isMissing(location.Dir) {
		return notFound("there is no bucket at %s: the directory is missing or empty", location)
	}
	return nil
}

// ReadSoFar counts what was read of a bucket.
type ReadSoFar struct {
	Reads, Bytes atomic.Int64
}

// counted is a bucket that counts what is read of it.
type counted struct {
	objectstore.Bucket
	read *ReadSoFar
}

// Get implements objectstore.Bucket.
func (c counted) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	body, err := c.Bucket.Get(ctx, key, limit)
	c.add(len(body), err)
	return body, err
}

// GetRange implements objectstore.Bucket.
func (c counted) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	n, err := c.Bucket.GetRange(ctx, key, off, into)
	c.add(n, err)
	return n, err
}

func (c counted) add(n int, err error) {
	if err == nil {
		c.read.Reads.Add(1)
		c.read.Bytes.Add(int64(n))
	}
}

// InspectBucket describes the volumes of a bucket from what is in it, and changes nothing. With
// verify it reads every object whole and checks every checksum. What it reads is counted in read as it goes.
func InspectBucket(ctx context.Context, url string, verify bool, read *ReadSoFar) ([]api.BucketVolume, error) {
	location, err := objectstore.ParseURL(url)
	if err != nil {
		return nil, invalid("%w", err)
	}
	if err := bucketThere(location); err != nil {
		return nil, err
	}
	raw, err := objectstore.Open(ctx, url, objectstore.Options{})
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "bucket %s cannot be used: %w", location, advised(err))
	}
	defer raw.Close()
	list, err := volumelog.List(ctx, counted{objectstore.WithRetry(raw, objectstore.RetryOptions{}), read}, verify)
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "%w", advised(err))
	}
	out := []api.BucketVolume{}
	for _, v := range list {
		b := api.BucketVolume{
			Name: v.Name, UUID: v.ID.String(), SizeBytes: int64(v.SizeBytes), BlockSize: int32(v.BlockSize), Epoch: v.Epoch,
			Generation: v.Generation, LSN: v.LSN, Objects: v.Objects, Bytes: v.Bytes, Unreachable: v.Unreachable, Damaged: []string{},
		}
		if !v.Time.IsZero() {
			at := v.Time.UTC()
			b.Time = &at
		}
		if !v.Checkpoint.IsZero() {
			b.Checkpoint = v.Checkpoint.String()
		}
		for _, d := range v.Damaged {
			b.Damaged = append(b.Damaged, fmt.Sprintf("%s: %v", d.Key, d.Err))
		}
		if v.Err != nil {
			b.Error = v.Err.Error()
		}
		out = append(out, b)
	}
	return out, nil
}
