package cache

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache/homemap"
	"github.com/isergate/isergate/cache/vfs"
)

// Options configures an Engine. A zero value means the default. Sizes are bytes.
type Options struct {
	Dir  string    // the engine's directory; it is made if missing. The caller holds a lock on it
	FS   vfs.FS    // default: the operating system's
	Node uuid.UUID // the writer identity that objects carry; required

	JournalBytes         int64 // default 4 GiB; at least four segments
	SegmentBytes         int64 // default 64 MiB
	ArenaBytes           int64 // landing and read buffers; default 256 MiB
	MapMemoryBytes       int64 // home map pages of all volumes; default 256 MiB
	ReadCacheBytes       int64 // on local media; default 4 GiB, negative: none
	ReadCacheMemoryBytes int64 // default 128 MiB

	DirtyBudget       int64         // per volume that names none; default a quarter of the journal
	MaxObjectBytes    int64         // payload that closes an object; default 8 MiB
	MaxObjectAge      time.Duration // age that closes an object; default 5 s
	DestageParallel   int           // PUTs in flight per volume; default 8
	CheckpointObjects int           // objects between two checkpoints in the bucket; default 256

	UnmetAfter  time.Duration // how long a level may be out of reach before the contract counts as unmet; default 10 s
	CommandWait time.Duration // how long one command may wait; default 20 s, below the 30 s of Linux's SCSI timer

	// HomeStore replaces the embedded key-value store of the home maps; tests use it.
	HomeStore homemap.Store

	Events     func(Event)           // called without locks held; must not block; default: none
	Registerer prometheus.Registerer // default: none
	Logger     *slog.Logger          // default: slog.Default()
}

// MinDirtyBudget is the smallest dirty budget of a volume: it holds the largest command.
const MinDirtyBudget = 16 << 20

// journalKeepsFree is what the journal leaves of the file system in bytes: the home maps stop at their reserve (512 MiB), and grow until then.
const journalKeepsFree = 768 << 20

const (
	minVolumeBytes = 1 << 20
	maxVolumeBytes = 64 << 40
	sectorBytes    = 512
	blockBytes     = 4096 // of the journal
)

// EnsureDefaults fills in what is zero.
func (o *Options) EnsureDefaults() {
	def := func(p *int64, v int64) {
		if *p == 0 {
			*p = v
		}
	}
	def(&o.JournalBytes, 4<<30)
	def(&o.SegmentBytes, 64<<20)
	def(&o.ArenaBytes, 256<<20)
	def(&o.MapMemoryBytes, 256<<20)
	def(&o.ReadCacheBytes, 4<<30)
	def(&o.ReadCacheMemoryBytes, 128<<20)
	def(&o.DirtyBudget, o.JournalBytes/4)
	def(&o.MaxObjectBytes, 8<<20)
	if o.MaxObjectAge == 0 {
		o.MaxObjectAge = 5 * time.Second
	}
	if o.DestageParallel == 0 {
		o.DestageParallel = 8
	}
	if o.CheckpointObjects == 0 {
		o.CheckpointObjects = 256
	}
	if o.UnmetAfter == 0 {
		o.UnmetAfter = 10 * time.Second
	}
	if o.CommandWait == 0 {
		o.CommandWait = 20 * time.Second
	}
	if o.FS == nil {
		o.FS = vfs.OS()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Events == nil {
		o.Events = func(Event) {}
	}
}

// Validate reports every fault at once. Call it after EnsureDefaults.
func (o *Options) Validate() error {
	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	fault(o.Dir == "", "no directory for the cache")
	fault(o.Node == uuid.Nil, "no node identity")
	fault(o.SegmentBytes < 1<<20 || o.SegmentBytes%blockBytes != 0, "journal segment size %d: at least 1 MiB and a multiple of 4 KiB", o.SegmentBytes)
	fault(o.JournalBytes < 4*o.SegmentBytes, "journal size %d: at least four segments of %d bytes", o.JournalBytes, o.SegmentBytes)
	fault(o.ArenaBytes < 64<<10, "arena size %d: at least 64 KiB", o.ArenaBytes)
	fault(o.MapMemoryBytes < 1<<20, "map memory %d: at least 1 MiB", o.MapMemoryBytes)
	fault(o.DirtyBudget < 0, "dirty budget %d is negative", o.DirtyBudget)
	fault(o.MaxObjectBytes < 64<<10 || o.MaxObjectBytes > 256<<20, "object size %d: 64 KiB to 256 MiB", o.MaxObjectBytes)
	fault(o.MaxObjectAge < 0 || o.UnmetAfter < 0 || o.CommandWait < 0, "a duration is negative")
	fault(o.DestageParallel < 1 || o.DestageParallel > 256, "%d parallel PUTs: 1 to 256", o.DestageParallel)
	fault(o.CheckpointObjects < 1, "checkpoint every %d objects: at least 1", o.CheckpointObjects)
	return errors.Join(faults...)
}

// Validate reports every fault of the configuration of a volume.
func (c VolumeConfig) Validate() error {
	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	fault(c.ID == uuid.Nil, "volume without a UUID")
	fault(c.BlockSize != 512 && c.BlockSize != 4096, "block size %d: use 512 or 4096", c.BlockSize)
	fault(c.SizeBytes < minVolumeBytes || c.SizeBytes > maxVolumeBytes, "volume size %d: 1 MiB to 64 TiB", c.SizeBytes)
	fault(c.BlockSize > 0 && c.SizeBytes%int64(c.BlockSize) != 0, "volume size %d is not a multiple of the block size %d", c.SizeBytes, c.BlockSize)
	fault(c.Bucket == nil, "volume without a bucket")
	fault(c.DirtyBudget < 0 || (c.DirtyBudget > 0 && c.DirtyBudget < MinDirtyBudget), "dirty budget %d: at least 16 MiB", c.DirtyBudget)
	if err := c.Policy.Validate(false); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}
