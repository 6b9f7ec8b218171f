package volumelog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// listMax is the number of objects asked for in one list request.
const listMax = 1000

// Checkpoint is what a caller says of the checkpoint that it writes.
type Checkpoint struct {
	// Position is where the log goes on: in this writer's epoch, behind the open object and not
	// beyond Stored.
	Position Position
	LSN      uint64    // of the last write before Position
	Time     time.Time // of LSN
}

// WriteCheckpoint writes a checkpoint of the volume as it was at exactly c.LSN: entries in ascending order of
// offset, not overlapping, all of them from objects before c.Position. The manifest
// is put last, so that an unfinished checkpoint is not seen. A position beyond what
// is known to be stored is refused with ErrInvalid. After an error it may be written anew.
func (w *Writer) WriteCheckpoint(ctx context.Context, c Checkpoint, entries iter.Seq2[Entry, error]) (*Manifest, error) {
	if err := w.checkCheckpoint(c); err != nil {
		return nil, err
	}
	m := &Manifest{
		Volume: w.id, Position: c.Position, Generation: w.generation, Writer: w.writer,
		LSN: c.LSN, Time: c.Time, Attributes: w.Attributes(), Attempt: uuid.New(),
	}
	var part partBuilder
	part.reset()
	flush := func() error {
		if part.entries == 0 {
			return nil
		}
		n := len(m.Parts)
		if n == MaxParts {
			return invalidf("checkpoint of more than %d parts", MaxParts)
		}
		m.Parts = append(m.Parts, part.finish(m, n))
		m.Entries += uint64(part.entries)
		if err := putOnce(ctx, w.b, partKey(w.id, m.Position, m.Attempt, n), part.buf); err != nil {
			return fmt.Errorf("volumelog: put part %d of checkpoint %v: %w", n, m.Position, err)
		}
		part.reset()
		return nil
	}
	var end uint64
	for e, err := range entries {
		if err != nil {
			return nil, err
		}
		if err := m.validateEntry(&e, end); err != nil {
			return nil, err
		}
		end = e.Offset + e.Length
		part.add(&e)
		if part.entries == maxPartEntries {
			if err := flush(); err != nil {
				return nil, err
			}
		}
	}
	if err := flush(); err != nil {
		return nil, err
	}
	body, err := m.encode()
	if err != nil {
		return nil, err
	}
	if _, err := DecodeManifest(body); err != nil {
		return nil, fmt.Errorf("volumelog: manifest does not read back: %w", err)
	}
	key := checkpointKey(w.id, m.Position)
	if err = putOnce(ctx, w.b, key, body); !errors.Is(err, errTaken) {
		if err != nil {
			return nil, fmt.Errorf("volumelog: put checkpoint %v: %w", m.Position, err)
		}
		return m, nil
	}
	// An earlier attempt of this writer arrived: it holds the same volume at the same
	// LSN, so it serves as well. Nobody else checkpoints in this epoch.
	there, err := readManifest(ctx, w.b, w.id, m.Position)
	if errors.Is(err, objectstore.ErrNotFound) {
		// Deleted since, because newer ones came.
		return nil, fmt.Errorf("%w: checkpoint %v was there: %w", objectstore.ErrUnknown, m.Position, err)
	}
	if err != nil {
		return nil, err
	}
	if there.Writer != w.writer || there.LSN != m.LSN {
		return nil, w.fail(fmt.Errorf("%w: checkpoint %v is of %v at LSN %d", ErrConflict, m.Position, there.Writer, there.LSN))
	}
	return there, nil
}

// ReadCheckpoint yields the entries of m in ascending order of offset, each verified.
// Errors of yield are returned as they are. A part that is not there is
// objectstore.ErrNotFound: the checkpoint was deleted, because there are newer ones.
func ReadCheckpoint(ctx context.Context, b objectstore.Bucket, m *Manifest, yield func(Entry) error) error {
	var end uint64
	for n := range m.Parts {
		key := partKey(m.Volume, m.Position, m.Attempt, n)
		var body []byte
		err := certain(func() (err error) {
			body, err = b.Get(ctx, key, MaxPart)
			if errors.Is(err, objectstore.ErrTooLarge) {
				err = corruptf("%s is larger than %d bytes", key, MaxPart)
			}
			if err == nil {
				_, err = unsealWhole(body, magicPart, MaxPart)
			}
			if err != nil {
				err = about("read", key, err)
			}
			return err
		})
		if err != nil {
			return err
		}
		if end, err = decodePart(m, n, body, end, yield); err != nil {
			return err
		}
	}
	return nil
}

// NewestCheckpoint returns the manifest of the newest checkpoint of the volume, or
// nil if there is none. A damaged one is an error that Is objectstore.ErrCorrupt.
func NewestCheckpoint(ctx context.Context, b objectstore.Bucket, id uuid.UUID) (*Manifest, error) {
	for {
		all, err := listCheckpoints(ctx, b, id, Position{})
		if err != nil || len(all) == 0 {
			return nil, err
		}
		m, err := readManifest(ctx, b, id, all[len(all)-1])
		if errors.Is(err, objectstore.ErrNotFound) {
			newer, lerr := listCheckpoints(ctx, b, id, all[len(all)-1])
			if lerr == nil && len(newer) > 0 {
				continue // deleted between the two requests, because two newer ones came
			}
		}
		return m, err
	}
}

// CollectCheckpoints deletes all but the newest two checkpoints of the volume, and the
// parts of those and of unfinished ones before them. It returns the number of objects deleted.
func (w *Writer) CollectCheckpoints(ctx context.Context) (int, error) {
	all, err := listCheckpoints(ctx, w.b, w.id, Position{})
	if err != nil || len(all) < 2 {
		return 0, err
	}
	keep := all[len(all)-2]
	// The manifest goes first: what is seen is whole.
	var keys []string
	for _, p := range all[:len(all)-2] {
		keys = append(keys, checkpointKey(w.id, p))
	}
	deleted := 0
	remove := func() error {
		if len(keys) == 0 {
			return nil
		}
		if err := w.b.Delete(ctx, keys...); err != nil {
			return fmt.Errorf("volumelog: delete old checkpoints: %w", err)
		}
		deleted += len(keys)
		keys = keys[:0]
		return nil
	}
	if err := remove(); err != nil {
		return deleted, err
	}
	prefix, after := partPrefix(w.id), ""
	for {
		infos, err := w.b.List(ctx, prefix, after, listMax)
		if err != nil {
			return deleted, about("list", prefix, err)
		}
		for _, info := range infos {
			rest := strings.TrimPrefix(info.Key, prefix)
			p, ok := parsePosition(rest[:min(len(rest), 2*hexDigits+1)])
			if ok && !p.Before(keep) {
				return deleted, remove()
			}
			if ok {
				keys = append(keys, info.Key)
			}
			after = info.Key
		}
		if err := remove(); err != nil {
			return deleted, err
		}
		if len(infos) < listMax {
			return deleted, nil
		}
	}
}

// listCheckpoints returns the positions of the checkpoints that are newer than after, in ascending order. The newest of them is there.
func listCheckpoints(ctx context.Context, b objectstore.Bucket, id uuid.UUID, after Position) (all []Position, err error) {
	err = certain(func() error {
		if all, err = listCheckpointsOnce(ctx, b, id, after); err != nil || len(all) == 0 {
			return err
		}
		return confirm(ctx, b, checkpointKey(id, all[len(all)-1]))
	})
	return all, err
}

func listCheckpointsOnce(ctx context.Context, b objectstore.Bucket, id uuid.UUID, after Position) ([]Position, error) {
	prefix := checkpointPrefix(id)
	from := ""
	if !after.IsZero() {
		from = checkpointKey(id, after)
	}
	var all []Position
	for {
		infos, err := b.List(ctx, prefix, from, listMax)
		if err != nil {
			return nil, about("list", prefix, err)
		}
		for _, info := range infos {
			from = info.Key
			if p, ok := parsePosition(strings.TrimPrefix(info.Key, prefix)); ok {
				all = append(all, p)
			}
		}
		if len(infos) < listMax {
			return all, nil
		}
	}
}

func readManifest(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position) (m *Manifest, err error) {
	err = certain(func() error {
		m, err = readManifestOnce(ctx, b, id, p)
		return err
	})
	return m, err
}

func readManifestOnce(ctx context.Context, b objectstore.Bucket, id uuid.UUID, p Position) (*Manifest, error) {
	key := checkpointKey(id, p)
	body, err := b.Get(ctx, key, MaxHeader)
	if errors.Is(err, objectstore.ErrTooLarge) {
		err = corruptf("larger than %d bytes", MaxHeader)
	}
	if err != nil {
		return nil, about("read", key, err)
	}
	m, err := DecodeManifest(body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if m.Volume != id || m.Position != p {
		return nil, corruptf("%s is of volume %v, position %v", key, m.Volume, m.Position)
	}
	return m, nil
}
