package journal

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache/vfs"
)

// Limits of the options, in bytes.
const (
	MinSegmentBytes = 64 << 10
	MaxSegmentBytes = 16 << 30
	// MaxSegments bounds JournalBytes / SegmentBytes.
	MaxSegments = 100_000

	defaultSegmentBytes  = 64 << 20
	defaultSegments      = 16
	defaultMaxBatchBytes = 4 << 20
)

// Options configure a journal. The zero value of a field means its default.
type Options struct {
	FS  vfs.FS // default: the machine's
	Dir string // required; made if missing; nothing else may write in it

	// SegmentBytes is the size of a segment file: a multiple of 4 KiB, 64 KiB to 16 GiB, default 64 MiB. It
	// cannot change while segments exist.
	SegmentBytes int64
	// JournalBytes is the size on the device, rounded down to whole segments, at least 2. Default 16 segments. The first
	// two are made by Open, the others in the background. With less room on the device the journal is smaller.
	JournalBytes int64
	// KeepFree is how many bytes of the file system are left to others when segments are made; default 0.
	KeepFree int64
	// MaxEntryBytes is the largest payload of one entry. Default and maximum: an eighth of SegmentBytes, rounded
	// down to 4 KiB. The larger it is, the more room a segment may lose at its end.
	MaxEntryBytes int64
	// MaxBatchBytes bounds what is written before one sync, except that one entry always fits. Default 4 MiB.
	MaxBatchBytes int64

	Sink   Sink // required
	Logger *slog.Logger
	// Registerer gets the metrics; nil: none. They are unregistered by Close.
	Registerer prometheus.Registerer
	// Now is the clock of Record.Time.
	Now func() time.Time
}

// EnsureDefaults fills in the defaults.
func (o *Options) EnsureDefaults() {
	if o.FS == nil {
		o.FS = vfs.OS()
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = defaultSegmentBytes
	}
	if o.JournalBytes == 0 {
		o.JournalBytes = defaultSegments * o.SegmentBytes
	}
	if o.MaxEntryBytes == 0 {
		o.MaxEntryBytes = o.SegmentBytes / 8 / BlockSize * BlockSize
	}
	if o.MaxBatchBytes == 0 {
		o.MaxBatchBytes = defaultMaxBatchBytes
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// Validate reports every fault of the options.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("journal: "+format, args...)) }
	if o.Dir == "" {
		bad("Dir is empty")
	}
	if o.Sink == nil {
		bad("Sink is missing")
	}
	if o.SegmentBytes < MinSegmentBytes || o.SegmentBytes > MaxSegmentBytes || o.SegmentBytes%BlockSize != 0 {
		bad("SegmentBytes %d is not a multiple of %d from %d to %d", o.SegmentBytes, BlockSize, MinSegmentBytes, int64(MaxSegmentBytes))
	} else {
		if n := o.JournalBytes / o.SegmentBytes; n < 2 || n > MaxSegments {
			bad("JournalBytes %d is not 2 to %d segments of %d", o.JournalBytes, MaxSegments, o.SegmentBytes)
		}
		if o.MaxEntryBytes < BlockSize || o.MaxEntryBytes > o.SegmentBytes/8 {
			bad("MaxEntryBytes %d is not %d to an eighth of SegmentBytes %d", o.MaxEntryBytes, BlockSize, o.SegmentBytes)
		}
	}
	if o.MaxBatchBytes < BlockSize {
		bad("MaxBatchBytes %d is less than %d", o.MaxBatchBytes, BlockSize)
	}
	return errors.Join(errs...)
}

// Sink is what the journal tells about entries. All calls come from one goroutine, in order, with no lock held; the
// slice is valid during the call only. A Sink may call Submit, Pin, Unpin and Release; it must not call what waits
// (Reserve, Seal, Close).
type Sink interface {
	// Synced is called when the entries, and all before them, are durable. The journal forgets them.
	Synced(entries []*Entry)
	// Failed is called when the entries will never be reported as synced. They may still be found at the next
	// Open. The journal forgets them. It is called once more, perhaps without entries, when the journal ends by a failure.
	Failed(entries []*Entry, err error)
}
