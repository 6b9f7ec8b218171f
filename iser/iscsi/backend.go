package iscsi

import (
	"context"
	"errors"

	"github.com/isergate/isergate/iser/scsi"
)

// Errors that a Backend returns from Authorize, each with the login status that it becomes.
// Any other error becomes 0300, target error.
var (
	// ErrForbidden: no ACL entry lets the initiator in. Login status 0202.
	ErrForbidden = errors.New("iscsi: initiator is not authorized")
	// ErrNotFound: there is no such target here. Login status 0203.
	ErrNotFound = errors.New("iscsi: target not found")
	// ErrRemoved: the target was here and will not come back. Login status 0204.
	ErrRemoved = errors.New("iscsi: target was removed")
	// ErrUnavailable: the target is known and not served now; the initiator may try again. Login status 0301.
	ErrUnavailable = errors.New("iscsi: target is not available now")
)

// CHAP is what one initiator has to prove, and what it may ask the target to prove.
type CHAP struct {
	// User and Secret authenticate the initiator. Secret is the bytes themselves, at
	// least 12 of them (RFC 7143, 9.2.1).
	User   string
	Secret []byte
	// MutualUser and MutualSecret authenticate the target to an initiator that asks.
	// An empty secret refuses such an initiator. The two secrets must differ.
	MutualUser   string
	MutualSecret []byte
}

// Access is what a Backend grants.
type Access struct {
	// CHAP is nil if no authentication is required.
	CHAP *CHAP
	// Alias is sent as TargetAlias if it is not empty.
	Alias string
	// Units are the logical units that this initiator sees at this target. It is not
	// used for a discovery session.
	Units LogicalUnits
}

// Backend decides who gets in, and to what. Methods may be called concurrently. They
// are called before authentication and must not allocate anything for the caller.
type Backend interface {
	// Authorize looks up what initiator may do at target. An empty target asks about a discovery session.
	// The grant is used only after the initiator proved itself as Access.CHAP demands.
	Authorize(ctx context.Context, initiator, target string) (Access, error)
	// Targets lists the names of the targets that initiator may log in to.
	Targets(ctx context.Context, initiator string) []string
}

// LogicalUnits is the inventory of one initiator at one target; *scsi.Inventory is one. Methods may be called
// concurrently. A lun is the 8-byte LUN of SAM-5, as a big-endian integer.
type LogicalUnits interface {
	// Admit gives a command its place in the order of its unit. It is called in command order, does not
	// wait, and is followed by one Execute of the same command.
	Admit(nexus scsi.Nexus, lun uint64, cmd *scsi.Command)
	// Execute runs a command to its end. When ctx ends the command was aborted: Execute
	// returns as soon as the command has no more effect on the medium. It must not keep ctx or cmd.
	Execute(ctx context.Context, nexus scsi.Nexus, lun uint64, cmd *scsi.Command) scsi.Result

	// NexusEstablished begins an I_T nexus. It is called before the first command of a session.
	NexusEstablished(nexus scsi.Nexus)
	// NexusLost ends an I_T nexus, after the last command of its session returned.
	NexusLost(nexus scsi.Nexus, why scsi.LossReason)
	// CommandsCleared tells that commands of the nexus on the unit ended without a status because of a
	// protocol event: unit attention 47/7F, SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT.
	CommandsCleared(nexus scsi.Nexus, lun uint64)
	// UnitAttention returns the oldest pending unit attention of the nexus, and leaves it pending.
	UnitAttention(nexus scsi.Nexus, lun uint64) (key scsi.SenseKey, asc, ascq uint8, pending bool)

	// Exists reports whether the inventory has the unit.
	Exists(lun uint64) bool
	// ClearTaskSet aborts the commands of all other nexuses on the unit, and returns when they have ended.
	ClearTaskSet(ctx context.Context, nexus scsi.Nexus, lun uint64) error
	// Reset is LOGICAL UNIT RESET. It returns when the commands of all other nexuses on the unit have ended.
	Reset(ctx context.Context, nexus scsi.Nexus, lun uint64) error
	// ResetAll is Reset of all units: TARGET WARM RESET and TARGET COLD RESET.
	ResetAll(ctx context.Context, nexus scsi.Nexus) error
}

var _ LogicalUnits = (*scsi.Inventory)(nil)
