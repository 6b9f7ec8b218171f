package cache

import (
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// VolumeConfig is what a volume is opened with. The caller keeps it durably and
// hands it in at each start.
type VolumeConfig struct {
	ID          uuid.UUID
	Name        string
	SizeBytes   int64 // 1 MiB to 64 TiB, a multiple of BlockSize
	BlockSize   int32 // 512 or 4096
	Policy      Policy
	DirtyBudget int64              // bytes acknowledged and not yet in the object store; 0: the engine's default
	Bucket      objectstore.Bucket // the volume's home
	// WriteThrough: an initiator switched the write cache off (MODE SELECT WCE=0), which
	// raises ack to flush until it is switched on again.
	WriteThrough bool
}

// State of a volume.
type State string

// The states of a volume.
const (
	StateOpening   State = "opening"   // maps are being rebuilt; not served yet
	StateAvailable State = "available" // served, contract met
	StateDegraded  State = "degraded"  // served, contract not met
	StateFenced    State = "fenced"    // a newer owner has the bucket; not served
	StateFailed    State = "failed"    // the journal device failed or data is damaged; not served
	StateClosed    State = "closed"
)

// Status is a snapshot of a volume.
type Status struct {
	Config           VolumeConfig
	State            State
	Reason           string // why State is not available, or soon will not be; empty otherwise
	ContractMet      bool
	Epoch            uint64
	Generation       uint64
	Watermarks       Watermarks
	DirtyBytes       int64
	DirtyBudgetBytes int64
	ObjectBytes      int64 // bytes put to the bucket that the home map refers to
	OldestDirty      time.Time
	LastObjectError  string // the last failure of destage, empty once it works again
}

// Event is something an operator wants to know of later.
type Event struct {
	Time     time.Time
	Severity string // info, warning, error
	Type     string // constant word, e.g. contract_degraded, writes_lost, fenced
	Volume   uuid.UUID
	Text     string
}
