package cache

import "errors"

// Sentinel errors of volumes. Test with errors.Is.
var (
	// ErrBusy: back-pressure or an unreached level lasted longer than one command may
	// wait, under on-unmet=block. The command may be tried again; a write may have taken effect, at
	// a weaker level.
	ErrBusy = errors.New("cache: busy")
	// ErrBudget: the dirty budget is used up, under on-unmet=error. Reads and
	// overwriting go on once destage has made room.
	ErrBudget = errors.New("cache: dirty budget used up")
	// ErrUnmet: the level due was not reached in time, under on-unmet=error. The write
	// may take effect later.
	ErrUnmet = errors.New("cache: persistence level not reached")
	// ErrLostWrites: acknowledged writes were lost, and this is the first flush since.
	// It is reported once for each loss.
	ErrLostWrites = errors.New("cache: acknowledged writes were lost")
	// ErrUnreadable: the data is damaged or its object is gone. It will not come back by
	// trying again.
	ErrUnreadable = errors.New("cache: data unreadable")
	// ErrJournal: the journal device failed. It stays failed until the node is restarted.
	ErrJournal = errors.New("cache: journal failed")
	// ErrFenced: a newer owner has the volume's bucket. Nothing is acknowledged any more.
	ErrFenced = errors.New("cache: volume is fenced by a newer owner")
	// ErrOpening: the volume's maps are being rebuilt.
	ErrOpening = errors.New("cache: volume is being opened")
	// ErrDamaged: the journal and the home map of a volume do not fit together; it is not
	// served, because what it would serve is not what was written.
	ErrDamaged = errors.New("cache: volume is damaged")
	// ErrKept: what a drain brought to the object stores is in the journal still, which could not be emptied.
	ErrKept = errors.New("cache: journal not emptied")
	// ErrClosed: the volume or the engine was closed.
	ErrClosed = errors.New("cache: closed")
	// ErrRange: the range is not within the volume or not a multiple of its block size.
	ErrRange = errors.New("cache: range is outside the volume or not aligned to its blocks")
)
