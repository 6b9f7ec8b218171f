package volumelog

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// VolumeInfo is what the bucket alone tells of a volume, without changing anything.
type VolumeInfo struct {
	ID uuid.UUID
	Attributes
	Epoch      uint64 // the newest that has an object
	Generation uint64
	LSN        uint64    // what a restore would reach now
	Time       time.Time // of LSN
	Checkpoint Position  // newest readable checkpoint; zero if there is none
	Objects    int       // objects of the log, without those that are unreachable
	Bytes      int64     // of everything under the volume's prefix
	// Unreachable counts objects of the log that are not part of it: put behind a fence, or
	// behind a missing number (under way, or left by a writer that stopped).
	Unreachable int
	// Damaged lists objects that are not what they should be, as far as they were read.
	Damaged []Damage
	// Err says why the log could not be read to its end; the numbers are those of what precedes.
	Err error
}

// Exists tells whether the bucket holds any object of the volume.
func Exists(ctx context.Context, b objectstore.Bucket, id uuid.UUID) (bool, error) {
	infos, err := b.List(ctx, volumePrefix(id), "", 1)
	if err != nil {
		return false, about("list", volumePrefix(id), err)
	}
	return len(infos) > 0, nil
}

// List describes every volume of the bucket, in order of UUID. With verify every object is
// read whole and every checksum checked. A damaged volume is described, not an error; an error is the store's.
func List(ctx context.Context, b objectstore.Bucket, verify bool) ([]VolumeInfo, error) {
	ids, err := listVolumes(ctx, b)
	if err != nil {
		return nil, err
	}
	var all []VolumeInfo
	for _, id := range ids {
		info, err := Inspect(ctx, b, id, verify)
		if errors.Is(err, ErrNoVolume) {
			continue // purged meanwhile
		}
		if err != nil {
			return nil, err
		}
		all = append(all, info)
	}
	return all, nil
}

// Find returns the volume that nameOrUUID names. ErrNoVolume if there is none,
// ErrAmbiguous if several have the name.
func Find(ctx context.Context, b objectstore.Bucket, nameOrUUID string) (VolumeInfo, error) {
	if id, err := uuid.Parse(nameOrUUID); err == nil {
		return Inspect(ctx, b, id, false)
	}
	all, err := List(ctx, b, false)
	if err != nil {
		return VolumeInfo{}, err
	}
	var found []VolumeInfo
	var ids []string
	for _, v := range all {
		if v.Name == nameOrUUID {
			found = append(found, v)
			ids = append(ids, v.ID.String())
		}
	}
	switch len(found) {
	case 0:
		return VolumeInfo{}, fmt.Errorf("%w: %q among %d volumes", ErrNoVolume, nameOrUUID, len(all))
	case 1:
		return found[0], nil
	}
	return VolumeInfo{}, fmt.Errorf("%w: %q is %s", ErrAmbiguous, nameOrUUID, strings.Join(ids, ", "))
}

func listVolumes(ctx context.Context, b objectstore.Bucket) ([]uuid.UUID, error) {
	const idLen = 36
	var ids []uuid.UUID
	after := ""
	for {
		infos, err := b.List(ctx, volumesPrefix, after, 1)
		if err != nil {
			return nil, about("list", volumesPrefix, err)
		}
		if len(infos) == 0 {
			return ids, nil
		}
		after = infos[0].Key
		rest := strings.TrimPrefix(after, volumesPrefix)
		if len(rest) <= idLen || rest[idLen] != '/' {
			continue
		}
		id, err := uuid.Parse(rest[:idLen])
		if err != nil || id.String() != rest[:idLen] {
			continue
		}
		ids = append(ids, id)
		after = volumesPrefix + rest[:idLen] + "0" // behind all keys of this volume: '0' follows '/'
	}
}

// Inspect describes one volume, ErrNoVolume if the bucket holds nothing of it. See List.
func Inspect(ctx context.Context, b objectstore.Bucket, id uuid.UUID, verify bool) (VolumeInfo, error) {
	v := VolumeInfo{ID: id}
	b = &steady{Bucket: b}
	w := &walker{b: b, id: id, maxEpoch: math.MaxUint64, maxGeneration: math.MaxUint64, skipEntries: !verify}
	fences := make(map[uint64]uint64)
	w.onFence = func(p Position) { fences[p.Epoch] = p.Seq }
	err := w.start(ctx, Position{}, 0)
	if err == nil {
		err = w.walk(ctx, math.MaxUint64, nil)
	}
	if err != nil {
		if !errors.Is(err, objectstore.ErrCorrupt) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrUnsupported) {
			return v, err
		}
		v.Err = err
	}
	v.Attributes, v.Generation, v.LSN, v.Time = w.attributes, w.generation, w.lsn, w.time
	v.Damaged = w.damaged
	if w.loaded != nil {
		v.Checkpoint = w.loaded.Position
	}
	if v.Epoch, err = w.highestEpoch(ctx); err != nil {
		return v, err
	}
	if err := v.count(ctx, b, fences, verify); err != nil {
		return v, err
	}
	return v, nil
}

// count lists all objects of the volume and, with verify, reads those of the log.
func (v *VolumeInfo) count(ctx context.Context, b objectstore.Bucket, fences map[uint64]uint64, verify bool) error {
	prefix, logs := volumePrefix(v.ID), logPrefix(v.ID)
	after := ""
	any := false
	var next Position // of the log, as far as keys tell
	for {
		infos, err := b.List(ctx, prefix, after, listMax)
		if err != nil {
			return about("list", prefix, err)
		}
		for _, info := range infos {
			after, any = info.Key, true
			v.Bytes += info.Size
			p, ok := parsePosition(strings.TrimPrefix(info.Key, logs))
			if !ok || !strings.HasPrefix(info.Key, logs) {
				continue
			}
			if p.Epoch != next.Epoch {
				next = Position{Epoch: p.Epoch}
			}
			fence, fenced := fences[p.Epoch]
			if p != next && !v.Checkpoint.IsZero() && p.Before(v.Checkpoint) {
				next = p // collected before it
			}
			if p != next || (fenced && p.Seq > fence) {
				v.Unreachable++
				continue
			}
			next.Seq++
			v.Objects++
			if !verify {
				continue
			}
			kind, err := verifyObject(ctx, b, v.ID, p)
			if err != nil {
				if !errors.Is(err, objectstore.ErrCorrupt) && !errors.Is(err, ErrVersion) && !errors.Is(err, ErrUnsupported) {
					return err
				}
				v.Damaged = append(v.Damaged, Damage{info.Key, err})
			}
			if kind == KindFence && !p.Before(v.Checkpoint) {
				fences[p.Epoch] = p.Seq
			}
		}
		if len(infos) < listMax {
			break
		}
	}
	if !any {
		return fmt.Errorf("%w: %v", ErrNoVolume, v.ID)
	}
	return nil
}

func verifyObject(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position) (k Kind, err error) {
	err = certain(func() error {
		k, err = verifyObjectOnce(ctx, b, id, p)
		return err
	})
	return k, err
}

func verifyObjectOnce(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position) (Kind, error) {
	key := LogKey(id, p)
	body, err := b.Get(ctx, key, MaxHeader+wireBytes(MaxPayload))
	switch {
	case errors.Is(err, objectstore.ErrTooLarge):
		return 0, corruptf("%s is larger than any object", key)
	case errors.Is(err, objectstore.ErrNotFound):
		return 0, nil // collected meanwhile
	case err != nil:
		return 0, about("read", key, err)
	}
	h, err := VerifyObject(body)
	if short, ok := err.(ErrShort); ok {
		err = corruptf("%s ends inside of its header of %d bytes", key, short.Need)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", key, err)
	}
	if h.Volume != id || h.Position() != p {
		return 0, corruptf("%s holds object %v of volume %v", key, h.Position(), h.Volume)
	}
	return h.Kind, nil
}

// Purge deletes every object of the volume and returns their number. The caller
// sees to it that nobody serves the volume: a put that is still under way may leave an object, which Exists shows
// and another Purge removes. A purge that was cut short is finished by calling it again; what it left does
// not read as a volume that is whole.
func Purge(ctx context.Context, b objectstore.Bucket, id uuid.UUID) (int, error) {
	n := 0
	// The log goes last and from its start: without a checkpoint, and with its first object
	// missing, no reader takes the rest for a volume.
	for _, prefix := range []string{checkpointPrefix(id), partPrefix(id), volumePrefix(id)} {
		for {
			infos, err := b.List(ctx, prefix, "", listMax)
			if err != nil {
				return n, about("list", prefix, err)
			}
			if len(infos) == 0 {
				break
			}
			keys := make([]string, len(infos))
			for i, info := range infos {
				keys[i] = info.Key
			}
			// The first one by itself: of many keys the store may delete any.
			if err := b.Delete(ctx, keys[0]); err != nil {
				return n, about("delete", keys[0], err)
			}
			n++
			if len(keys) > 1 {
				if err := b.Delete(ctx, keys[1:]...); err != nil {
					return n, fmt.Errorf("volumelog: delete below %s: %w", prefix, err)
				}
				n += len(keys) - 1
			}
		}
	}
	return n, nil
}
