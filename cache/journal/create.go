package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/isergate/isergate/cache/vfs"
)

const tmpSuffix = ".tmp"

func (j *Journal) slotPath(slot int) string {
	return filepath.Join(j.opts.Dir, fmt.Sprintf("%06d", slot))
}

// createSlot makes segment file number slot: zeros that are really written and durable before the file
// gets its name, so that a file with a segment's name has its full size and no unwritten extents.
func (j *Journal) createSlot(slot int) (*segment, error) {
	free, err := j.opts.FS.Free(j.opts.Dir)
	if err != nil {
		return nil, err
	}
	if short := j.opts.SegmentBytes + j.opts.KeepFree - free; short > 0 {
		return nil, fmt.Errorf("journal: %w: %d MiB are free in %s, a segment has %d MiB, and %d MiB are left to others: free at least %d MiB more",
			syscall.ENOSPC, free>>20, j.opts.Dir, j.opts.SegmentBytes>>20, j.opts.KeepFree>>20, (short+1<<20-1)>>20)
	}
	path := j.slotPath(slot)
	f, err := j.opts.FS.OpenFile(path+tmpSuffix, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	err = vfs.ZeroFill(f, 0, j.opts.SegmentBytes, j.stop)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = j.opts.FS.Rename(path+tmpSuffix, path)
	}
	if err != nil {
		// The room is needed; a leftover does no harm otherwise: it is overwritten by the next attempt.
		_ = j.opts.FS.Remove(path + tmpSuffix)
		return nil, err
	}
	if err := j.opts.FS.SyncDir(j.opts.Dir); err != nil {
		return nil, err
	}
	f, err = j.opts.FS.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return &segment{slot: slot, path: path, file: f, blocks: uint32(j.opts.SegmentBytes / BlockSize)}, nil
}

func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// Grow tries again to make the segments that the device had no room for. It returns at once.
func (j *Journal) Grow() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.making || j.stopped || len(j.slots) >= j.target {
		return
	}
	j.making, j.full = true, false
	j.creating.Go(j.makeSegments)
}

// makeSegments makes segments, one after the other, until there are enough, or no room, or no more
// need. No room is a smaller journal; any other failure is one of the device.
func (j *Journal) makeSegments() {
	for {
		j.mu.Lock()
		slot := len(j.slots)
		if slot >= j.target || j.stopped {
			j.making = false
			j.mu.Unlock()
			return
		}
		j.mu.Unlock()

		s, err := j.createSlot(slot)
		j.mu.Lock()
		if err == nil {
			j.slots = append(j.slots, s)
			j.freeLocked(s)
			j.space.serve()
			j.mu.Unlock()
			continue
		}
		j.making, j.full = false, true
		j.mu.Unlock()
		switch {
		case errors.Is(err, vfs.ErrStopped):
		case isNoSpace(err):
			j.opts.Logger.Warn("no room for another journal segment; the journal stays smaller",
				"segments", slot, "wanted", j.target, "err", err)
		default:
			j.fail(fmt.Errorf("make segment: %w", err))
		}
		return
	}
}
