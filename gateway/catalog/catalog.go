// Package catalog keeps what a node was told to serve: volumes, targets, LUN maps and
// who may log in. DESIGN.md in package gateway states its invariants.
package catalog

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/iser/iscsi"
)

// Limits of a catalogue.
const (
	MaxVolumes       = 4096
	MaxTargets       = 1024
	MaxACLsPerTarget = 1024
	MaxLUN           = 255
	MinVolumeBytes   = 1 << 20
	MaxVolumeBytes   = 64 << 40
	MinSecretBytes   = 12 // RFC 7143, 12.1.3 asks for 96 bits
	MaxSecretBytes   = 255
)

// Errors of a Store.
var (
	// ErrCorrupt: the catalogue on disk is not what was written. Nothing was changed.
	ErrCorrupt = errors.New("catalog: catalogue is damaged")
	// ErrVersion: the catalogue was written by a newer version of the program.
	ErrVersion = errors.New("catalog: catalogue has an unknown version")
	// ErrUncertain: a change failed at a point where it may or may not be on disk. The store
	// refuses further changes; the next start finds out.
	ErrUncertain = errors.New("catalog: outcome of the last change is unknown")
)

// State is the whole catalogue. It is a value: a Store hands out copies.
type State struct {
	Node     uuid.UUID `json:"node"`     // identity of this node for life
	Revision uint64    `json:"revision"` // grows by one with each change
	Volumes  []Volume  `json:"volumes"`
	Targets  []Target  `json:"targets"`
	Buckets  []Bucket  `json:"buckets"`
}

// Bucket is what is known of a bucket that was attached once, so that a restart
// during an outage of the store knows how to treat it.
type Bucket struct {
	URL string `json:"url"` // canonical form
	// Conditional is what the store does with conditional writes: honoured, ignored
	// or unsupported.
	Conditional string    `json:"conditional"`
	Examined    time.Time `json:"examined"`
}

// Volume is what a volume is opened with, and what was decided about it.
type Volume struct {
	ID           uuid.UUID    `json:"id"`
	Name         string       `json:"name"`
	SizeBytes    int64        `json:"size_bytes"`
	BlockSize    int32        `json:"block_size"`
	Policy       cache.Policy `json:"policy"`
	DirtyBudget  int64        `json:"dirty_budget_bytes"` // 0: the node's default
	WriteThrough bool         `json:"write_through"`      // an initiator switched the write cache off
	Bucket       string       `json:"bucket"`             // URL of the volume's home
	Created      time.Time    `json:"created"`
	// Deleting is set from the moment a deletion was decided until the node has let
	// go of the volume, so that a restart goes on with it.
	Deleting *Deletion `json:"deleting,omitempty"`
}

// Deletion of a volume that is under way.
type Deletion struct {
	Purge bool `json:"purge"` // its objects in the bucket go too
}

// Target is an iSCSI target: its LUNs, and who may log in.
type Target struct {
	Name string `json:"name"` // IQN, EUI or NAA name, in lower case
	LUNs []LUN  `json:"luns"`
	ACLs []ACL  `json:"acls"`
}

// LUN maps a logical unit number to a volume.
type LUN struct {
	Number uint16    `json:"number"`
	Volume uuid.UUID `json:"volume"`
}

// ACL lets one initiator in.
type ACL struct {
	Initiator string `json:"initiator"`
	CHAP      *CHAP  `json:"chap,omitempty"` // nil: no authentication is asked for
}

// CHAP are the credentials of one initiator. The mutual pair is empty for
// one-way authentication.
type CHAP struct {
	User         string `json:"user"`
	Secret       Secret `json:"secret"`
	MutualUser   string `json:"mutual_user,omitempty"`
	MutualSecret Secret `json:"mutual_secret,omitempty"`
}

// Secret is a CHAP secret. It prints and logs as a placeholder; only the
// catalogue's own encoding holds the bytes.
type Secret []byte

const redacted = "[secret]"

// String returns a placeholder.
func (Secret) String() string { return redacted }

// GoString returns a placeholder.
func (Secret) GoString() string { return redacted }

// Format prints a placeholder whatever the verb.
func (Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(redacted)) }

// LogValue implements slog.LogValuer with a placeholder.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// Store keeps the catalogue durably. Methods may be called concurrently.
type Store interface {
	// State returns a copy of the latest catalogue.
	State() State
	// Update runs change on a copy of the latest catalogue and, unless change fails, makes the result
	// the latest one. It returns what is then the latest. The change is durable when it returns without an error;
	// with ErrUncertain it may be. The error of change is returned as it is. An implementation may run change more than once.
	Update(change func(*State) error) (State, error)
	// Close releases the store.
	Close() error
}

// Clone returns a deep copy.
func (s State) Clone() State {
	s.Volumes = slices.Clone(s.Volumes)
	for i := range s.Volumes {
		if d := s.Volumes[i].Deleting; d != nil {
			deletion := *d
			s.Volumes[i].Deleting = &deletion
		}
	}
	s.Buckets = slices.Clone(s.Buckets)
	s.Targets = slices.Clone(s.Targets)
	for i := range s.Targets {
		s.Targets[i].LUNs = slices.Clone(s.Targets[i].LUNs)
		s.Targets[i].ACLs = slices.Clone(s.Targets[i].ACLs)
		for j := range s.Targets[i].ACLs {
			if c := s.Targets[i].ACLs[j].CHAP; c != nil {
				chap := *c
				chap.Secret = slices.Clone(c.Secret)
				chap.MutualSecret = slices.Clone(c.MutualSecret)
				s.Targets[i].ACLs[j].CHAP = &chap
			}
		}
	}
	return s
}

// Volume returns the volume of that name, or nil. The pointer is into s.
func (s *State) Volume(name string) *Volume {
	for i := range s.Volumes {
		if s.Volumes[i].Name == name {
			return &s.Volumes[i]
		}
	}
	return nil
}

// VolumeByID returns the volume with that identity, or nil. The pointer is into s.
func (s *State) VolumeByID(id uuid.UUID) *Volume {
	for i := range s.Volumes {
		if s.Volumes[i].ID == id {
			return &s.Volumes[i]
		}
	}
	return nil
}

// Bucket returns what is known of a bucket, or nil. The pointer is into s.
func (s *State) Bucket(url string) *Bucket {
	for i := range s.Buckets {
		if s.Buckets[i].URL == url {
			return &s.Buckets[i]
		}
	}
	return nil
}

// Target returns the target of that name, or nil. The pointer is into s.
func (s *State) Target(name string) *Target {
	for i := range s.Targets {
		if s.Targets[i].Name == name {
			return &s.Targets[i]
		}
	}
	return nil
}

// ACL returns the entry of that initiator, or nil. The pointer is into t.
func (t *Target) ACL(initiator string) *ACL {
	for i := range t.ACLs {
		if t.ACLs[i].Initiator == initiator {
			return &t.ACLs[i]
		}
	}
	return nil
}

// LUN returns the mapping with that number, or nil. The pointer is into t.
func (t *Target) LUN(number uint16) *LUN {
	for i := range t.LUNs {
		if t.LUNs[i].Number == number {
			return &t.LUNs[i]
		}
	}
	return nil
}

// FreeLUN returns the lowest number that is not in use, or false when all are.
func (t *Target) FreeLUN() (uint16, bool) {
	for n := uint16(0); n <= MaxLUN; n++ {
		if t.LUN(n) == nil {
			return n, true
		}
	}
	return 0, false
}

// MappedAt returns where a volume is mapped, as target name and LUN.
func (s *State) MappedAt(id uuid.UUID) (at []Mapping) {
	for i := range s.Targets {
		for _, lun := range s.Targets[i].LUNs {
			if lun.Volume == id {
				at = append(at, Mapping{s.Targets[i].Name, lun.Number})
			}
		}
	}
	return at
}

// Mapping is one place where a volume is mapped.
type Mapping struct {
	Target string
	LUN    uint16
}

var volumeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// CheckVolumeName says what is wrong with a volume's name.
func CheckVolumeName(name string) error {
	if !volumeName.MatchString(name) {
		return fmt.Errorf("%q is no volume name: use 1 to 64 letters, digits, dots, underscores and dashes, the first a letter or digit", name)
	}
	if _, err := uuid.Parse(name); err == nil {
		return fmt.Errorf("%q is no volume name: it reads as a UUID", name)
	}
	return nil
}

// CheckName returns an iSCSI name in the form in which names are compared (RFC 7143, 4.2.7: lower
// case), or what is wrong with it.
func CheckName(name string) (string, error) {
	name = strings.ToLower(name)
	if err := iscsi.CheckName(name); err != nil {
		return "", fmt.Errorf("%w; an example is iqn.2026-11.com.example:name", err)
	}
	return name, nil
}

// Check says what is wrong with credentials.
func (c CHAP) Check() error {
	var faults []string
	check := func(what, user string, secret Secret) {
		if user == "" || len(user) > 255 || strings.ContainsFunc(user, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			faults = append(faults, what+" user name must be 1 to 255 printable bytes without spaces")
		}
		if len(secret) < MinSecretBytes || len(secret) > MaxSecretBytes {
			faults = append(faults, fmt.Sprintf("%s secret must be %d to %d bytes long", what, MinSecretBytes, MaxSecretBytes))
		}
	}
	check("the CHAP", c.User, c.Secret)
	if c.MutualUser != "" || len(c.MutualSecret) > 0 {
		check("the mutual CHAP", c.MutualUser, c.MutualSecret)
		if string(c.Secret) == string(c.MutualSecret) {
			faults = append(faults, "the two secrets must differ: with equal ones an initiator could have its own challenge answered")
		}
	}
	if faults != nil {
		return errors.New(strings.Join(faults, "; "))
	}
	return nil
}

// Check returns every fault of the catalogue as a whole: limits, names, and
// references that lead nowhere.
func (s *State) Check() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	if s.Node == uuid.Nil {
		fault("the node has no identity")
	}
	if len(s.Volumes) > MaxVolumes {
		fault("more than %d volumes", MaxVolumes)
	}
	if len(s.Targets) > MaxTargets {
		fault("more than %d targets", MaxTargets)
	}
	names, ids := map[string]bool{}, map[uuid.UUID]bool{}
	for _, v := range s.Volumes {
		if names[v.Name] || ids[v.ID] || v.ID == uuid.Nil {
			fault("volume %s (%s) is there twice or has no identity", v.Name, v.ID)
		}
		names[v.Name], ids[v.ID] = true, true
		if err := v.check(); err != nil {
			fault("volume %s: %w", v.Name, err)
		}
	}
	targets := map[string]bool{}
	for i := range s.Targets {
		t := &s.Targets[i]
		if targets[t.Name] {
			fault("target %s is there twice", t.Name)
		}
		targets[t.Name] = true
		if err := t.check(ids); err != nil {
			fault("target %s: %w", t.Name, err)
		}
	}
	return errors.Join(faults...)
}

func (v *Volume) check() error {
	if err := CheckVolumeName(v.Name); err != nil {
		return err
	}
	switch {
	case v.BlockSize != 512 && v.BlockSize != 4096:
		return fmt.Errorf("block size %d is neither 512 nor 4096", v.BlockSize)
	case v.SizeBytes < MinVolumeBytes || v.SizeBytes > MaxVolumeBytes:
		return fmt.Errorf("size %d is outside 1 MiB to 64 TiB", v.SizeBytes)
	case v.SizeBytes%int64(v.BlockSize) != 0:
		return fmt.Errorf("size %d is not a multiple of the block size %d", v.SizeBytes, v.BlockSize)
	case v.DirtyBudget < 0:
		return fmt.Errorf("dirty budget %d is negative", v.DirtyBudget)
	case v.Bucket == "":
		return errors.New("no bucket")
	}
	// Whether a level can be had is the node's question; a catalogue may come from a cluster.
	return v.Policy.Validate(true)
}

func (t *Target) check(volumes map[uuid.UUID]bool) error {
	if name, err := CheckName(t.Name); err != nil || name != t.Name {
		return fmt.Errorf("%q is no iSCSI name in lower case", t.Name)
	}
	if len(t.ACLs) > MaxACLsPerTarget {
		return fmt.Errorf("more than %d ACL entries", MaxACLsPerTarget)
	}
	numbers := map[uint16]bool{}
	for _, lun := range t.LUNs {
		if lun.Number > MaxLUN || numbers[lun.Number] {
			return fmt.Errorf("LUN %d is there twice or above %d", lun.Number, MaxLUN)
		}
		numbers[lun.Number] = true
		if !volumes[lun.Volume] {
			return fmt.Errorf("LUN %d maps volume %s, which does not exist", lun.Number, lun.Volume)
		}
	}
	initiators := map[string]bool{}
	for _, acl := range t.ACLs {
		if name, err := CheckName(acl.Initiator); err != nil || name != acl.Initiator || initiators[name] {
			return fmt.Errorf("ACL entry %q is there twice or no iSCSI name in lower case", acl.Initiator)
		}
		initiators[acl.Initiator] = true
		if acl.CHAP != nil {
			if err := acl.CHAP.Check(); err != nil {
				return fmt.Errorf("ACL entry %s: %w", acl.Initiator, err)
			}
		}
	}
	return nil
}
