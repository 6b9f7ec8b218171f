// Package api is the admin interface of a node: HTTP and JSON under /v1, a server over a
// Service and a client that is one.
package api

import (
	"context"
	"time"
)

// Service is what a node can be asked to do. The server calls it for
// authenticated requests; methods may be called concurrently. Errors are *Error, or they are
// internal.
type Service interface {
	Status(ctx context.Context) (Status, error)

	Volumes(ctx context.Context) ([]Volume, error)
	Volume(ctx context.Context, name string) (Volume, error)
	CreateVolume(ctx context.Context, r CreateVolume) (Volume, error)
	// ChangeVolume sets the fields that are not nil.
	ChangeVolume(ctx context.Context, name string, r ChangeVolume) (Volume, error)
	// DeleteVolume returns when the node has let go of the volume. Without purge everything acknowledged is in
	// the bucket then, and stays there.
	DeleteVolume(ctx context.Context, name string, r DeleteVolume) error
	// WaitVolume is the persistence barrier: it returns when everything that was acknowledged
	// before the call has reached the level, or with CodeTimeout. After CreateVolume and after a wait for the object level
	// BucketDownSince tells whether the bucket answers.
	WaitVolume(ctx context.Context, name string, r WaitVolume) (Volume, error)
	RestoreVolume(ctx context.Context, r RestoreVolume) (Restored, error)

	Targets(ctx context.Context) ([]Target, error)
	CreateTarget(ctx context.Context, r CreateTarget) (Target, error)
	DeleteTarget(ctx context.Context, target string) error
	MapLUN(ctx context.Context, target string, r MapLUN) (LUN, error)
	UnmapLUN(ctx context.Context, target string, number uint16) error
	AddACL(ctx context.Context, target string, r AddACL) (ACL, error)
	RemoveACL(ctx context.Context, target, initiator string) error

	Sessions(ctx context.Context) ([]Session, error)
	// Drain returns when everything acknowledged before the call is in the buckets.
	Drain(ctx context.Context) error
}

// Status describes a node.
type Status struct {
	State         string         `json:"state"` // starting, serving, stopping
	Version       string         `json:"version"`
	Node          string         `json:"node"` // UUID
	Started       time.Time      `json:"started"`
	DataDir       string         `json:"data_dir"`
	Bucket        Bucket         `json:"bucket"`
	Portals       []Portal       `json:"portals"`
	Open          bool           `json:"open"`          // every initiator may use every target
	OpenTargets   []string       `json:"open_targets"`  // those that every initiator may use though Open is false
	VolumeStates  map[string]int `json:"volume_states"` // number of volumes in each state
	ContractUnmet []string       `json:"contract_unmet"`
	// BucketUnreachable are the volumes whose bucket does not answer now.
	BucketUnreachable []string `json:"bucket_unreachable"`
	DirtyBytes        int64    `json:"dirty_bytes"`
	Sessions          int      `json:"sessions"`
	Events            []Event  `json:"events"` // the latest, newest last
}

// Serving is the State of a node that takes commands.
const Serving = "serving"

// Bucket describes the home of new volumes.
type Bucket struct {
	URL          string     `json:"url"`
	SingleWriter bool       `json:"single_writer"`        // the store was accepted without conditional writes
	Conditional  string     `json:"conditional"`          // what the probe found
	Error        string     `json:"error,omitempty"`      // why it does not answer now
	Since        *time.Time `json:"down_since,omitempty"` // since when it does not; nil: it answers
}

// Portal is one address at which initiators connect.
type Portal struct {
	Listen    string `json:"listen"` // the address it really listens on
	Advertise string `json:"advertise,omitempty"`
	Transport string `json:"transport"` // what is served there: auto, tcp or iser
}

// Event is something an operator wants to know of later.
type Event struct {
	Time     time.Time `json:"time"`
	Severity string    `json:"severity"`
	Type     string    `json:"type"`
	Volume   string    `json:"volume,omitempty"` // name, or UUID if it is gone
	Text     string    `json:"text"`
}

// Policy is a volume's persistence policy, by the names of the levels.
type Policy struct {
	Ack     string `json:"ack"`
	Flush   string `json:"flush"`
	OnUnmet string `json:"on_unmet"`
}

// Watermark is the LSN below which every write has reached a level.
type Watermark struct {
	LSN  uint64     `json:"lsn"`
	Time *time.Time `json:"time"` // when that LSN reached the level; null: none did yet
}

// Watermarks of a volume.
type Watermarks struct {
	Acked  Watermark `json:"acked"`
	Local  Watermark `json:"local"`
	Quorum Watermark `json:"quorum"`
	Object Watermark `json:"object"`
}

// Volume describes a volume.
type Volume struct {
	Name             string     `json:"name"`
	UUID             string     `json:"uuid"`
	SizeBytes        int64      `json:"size_bytes"`
	BlockSize        int32      `json:"block_size"`
	Policy           Policy     `json:"policy"`
	WriteThrough     bool       `json:"write_through"` // an initiator switched the write cache off
	Contract         string     `json:"contract"`
	ContractMet      bool       `json:"contract_met"`
	State            string     `json:"state"`
	Reason           string     `json:"reason,omitempty"`
	Epoch            uint64     `json:"epoch"`
	Generation       uint64     `json:"generation"`
	Watermarks       Watermarks `json:"watermarks"`
	DirtyBytes       int64      `json:"dirty_bytes"`
	DirtyBudgetBytes int64      `json:"dirty_budget_bytes"`
	OldestDirty      *time.Time `json:"oldest_dirty"`
	ObjectBytes      int64      `json:"object_bytes"`
	LastObjectError  string     `json:"last_object_error,omitempty"`
	BucketDownSince  *time.Time `json:"bucket_down_since,omitempty"` // since when its bucket does not answer; nil: it answers
	Bucket           string     `json:"bucket"`
	Created          time.Time  `json:"created"`
	Mappings         []Mapping  `json:"mappings"`
}

// Mapping is one place where a volume is mapped.
type Mapping struct {
	Target string `json:"target"`
	LUN    uint16 `json:"lun"`
}

// CreateVolume asks for a new volume.
type CreateVolume struct {
	Name             string `json:"name"`
	SizeBytes        int64  `json:"size_bytes"`
	BlockSize        int32  `json:"block_size"`         // 0: 512
	Ack              string `json:"ack"`                // empty: the default
	Flush            string `json:"flush"`              // empty: the default, or ack if that is higher
	OnUnmet          string `json:"on_unmet"`           // empty: block
	DirtyBudgetBytes int64  `json:"dirty_budget_bytes"` // 0: the node's default
	Target           string `json:"target"`             // map it there; the target is created if it is not there
	LUN              *int   `json:"lun"`                // nil: the lowest free number
}

// ChangeVolume changes what is not nil.
type ChangeVolume struct {
	SizeBytes        *int64  `json:"size_bytes"`
	Ack              *string `json:"ack"`
	Flush            *string `json:"flush"`
	OnUnmet          *string `json:"on_unmet"`
	DirtyBudgetBytes *int64  `json:"dirty_budget_bytes"`
}

// DeleteVolume says how a volume is deleted.
type DeleteVolume struct {
	Purge bool `json:"purge"` // its objects in the bucket go too
}

// WaitVolume asks for a persistence barrier.
type WaitVolume struct {
	Level          string  `json:"level"`
	TimeoutSeconds float64 `json:"timeout_seconds"`
}

// RestoreVolume asks to take a volume over from a bucket.
type RestoreVolume struct {
	From   string `json:"from"`   // bucket URL
	Volume string `json:"volume"` // UUID or name
	As     string `json:"as"`     // new name; empty: as it was
}

// Restored says what a restore reached.
type Restored struct {
	Volume     Volume    `json:"volume"`
	LSN        uint64    `json:"lsn"`
	Time       time.Time `json:"time"`
	Epoch      uint64    `json:"epoch"`
	Generation uint64    `json:"generation"`
	Objects    int       `json:"objects"`
	Gap        string    `json:"gap"`
}

// Target describes a target.
type Target struct {
	Name     string `json:"name"`
	LUNs     []LUN  `json:"luns"`
	ACLs     []ACL  `json:"acls"`
	Open     bool   `json:"open"` // every initiator may log in
	Sessions int    `json:"sessions"`
}

// LUN is a mapped volume.
type LUN struct {
	Number uint16 `json:"number"`
	Volume string `json:"volume"`
	UUID   string `json:"uuid"`
}

// ACL is an entry that lets an initiator in. Secrets are never part of it.
type ACL struct {
	Initiator  string `json:"initiator"`
	CHAPUser   string `json:"chap_user,omitempty"`
	MutualUser string `json:"mutual_user,omitempty"`
	// Replaced is the entry that AddACL replaced; nil: there was none.
	Replaced *ACL `json:"replaced,omitempty"`
}

// CreateTarget asks for a new target.
type CreateTarget struct {
	Name string `json:"name"`
}

// MapLUN asks to map a volume.
type MapLUN struct {
	Volume string `json:"volume"`
	LUN    *int   `json:"lun"` // nil: the lowest free number
}

// AddACL lets an initiator in, or replaces its entry.
type AddACL struct {
	Initiator    string `json:"initiator"`
	CHAPUser     string `json:"chap_user"` // empty: no authentication
	CHAPSecret   []byte `json:"chap_secret"`
	MutualUser   string `json:"mutual_user"`
	MutualSecret []byte `json:"mutual_secret"`
}

// Session is a session of an initiator.
type Session struct {
	Target      string    `json:"target"`
	Initiator   string    `json:"initiator"`
	ISID        string    `json:"isid"` // 12 hexadecimal digits
	TSIH        uint16    `json:"tsih"`
	Discovery   bool      `json:"discovery"`
	Transport   string    `json:"transport"`
	Started     time.Time `json:"started"`
	Running     int       `json:"running"`     // commands under way
	Commands    uint64    `json:"commands"`    // so far
	Connections []string  `json:"connections"` // addresses of the initiator
}

// BucketVolume is what a bucket alone tells of a volume.
type BucketVolume struct {
	Name        string     `json:"name"`
	UUID        string     `json:"uuid"`
	SizeBytes   int64      `json:"size_bytes"`
	BlockSize   int32      `json:"block_size"`
	Epoch       uint64     `json:"epoch"`
	Generation  uint64     `json:"generation"`
	LSN         uint64     `json:"lsn"`  // what a restore would reach now
	Time        *time.Time `json:"time"` // of that LSN
	Checkpoint  string     `json:"checkpoint,omitempty"`
	Objects     int        `json:"objects"`
	Bytes       int64      `json:"bytes"`
	Unreachable int        `json:"unreachable"` // objects that are not part of the log
	Damaged     []string   `json:"damaged"`
	Error       string     `json:"error,omitempty"` // why the log could not be read to its end
}
