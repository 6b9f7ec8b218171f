package scsi

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// MaxLUN is the largest logical unit number: the flat space addressing method has 14
// bits.
const MaxLUN = 1<<14 - 1

// EncodeLUN returns the eight-byte form of a logical unit number (SAM-5, 4.7), as a
// big-endian integer: peripheral device addressing below 256, flat space above.
func EncodeLUN(number uint16) uint64 {
	if number < 256 {
		return uint64(number) << 48
	}
	return uint64(number|0x4000) << 48
}

// DecodeLUN returns the logical unit number that an eight-byte LUN addresses, by
// peripheral device or flat space addressing. ok is false for every other LUN: further
// levels, buses, extended and well-known ones.
func DecodeLUN(lun uint64) (number uint16, ok bool) {
	if lun<<16 != 0 {
		return 0, false
	}
	first := uint16(lun >> 48)
	switch first >> 14 {
	case 0:
		return first, first < 256 // bits 8 to 13 are a bus
	case 1:
		return first & MaxLUN, true
	}
	return 0, false
}

// LUN is one entry of an Inventory.
type LUN struct {
	Number uint16
	Unit   *LogicalUnit
}

// Inventory is the LUNs that initiators see on one target (all of them, or those of one
// access control group). The map may change while commands run. All methods may be
// called concurrently.
type Inventory struct {
	ops  *operations
	luns atomic.Pointer[map[uint16]*LogicalUnit] // the map itself never changes

	mu      sync.Mutex // guards changes of luns, and nexuses
	nexuses map[Nexus]struct{}
}

// NewInventory returns one without LUNs.
func NewInventory() *Inventory {
	v := &Inventory{ops: newOperations(), nexuses: make(map[Nexus]struct{})}
	v.luns.Store(&map[uint16]*LogicalUnit{})
	return v
}

// Errors of Map and Unmap.
var (
	ErrLUNRange  = errors.New("scsi: LUN out of range")
	ErrLUNInUse  = errors.New("scsi: LUN is in use")
	ErrLUNAbsent = errors.New("scsi: no such LUN")
	// ErrUnitMapped: the logical unit has a LUN in this inventory already.
	ErrUnitMapped = errors.New("scsi: logical unit is mapped already")
)

// Map gives u a LUN. Initiators that are logged in learn of it by the unit attention
// REPORTED LUNS DATA HAS CHANGED on all their LUNs.
func (v *Inventory) Map(number uint16, u *LogicalUnit) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := *v.luns.Load()
	if number > MaxLUN {
		return fmt.Errorf("%w: %d is above %d", ErrLUNRange, number, MaxLUN)
	}
	if old[number] != nil {
		return fmt.Errorf("%w: %d", ErrLUNInUse, number)
	}
	for n, o := range old {
		if o == u {
			return fmt.Errorf("%w: at LUN %d", ErrUnitMapped, n)
		}
	}
	luns := maps.Clone(old)
	luns[number] = u
	for n := range v.nexuses {
		u.NexusEstablished(n)
	}
	v.luns.Store(&luns)
	v.changedLocked(luns)
	return nil
}

// Unmap takes a LUN away. Commands that run on it go on; new ones find no logical unit.
// For the initiators of this inventory it is the loss of their nexus with it.
func (v *Inventory) Unmap(number uint16) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := *v.luns.Load()
	u := old[number]
	if u == nil {
		return fmt.Errorf("%w: %d", ErrLUNAbsent, number)
	}
	luns := maps.Clone(old)
	delete(luns, number)
	v.luns.Store(&luns)
	for n := range v.nexuses {
		u.NexusLost(n, SessionClosed)
	}
	v.changedLocked(luns)
	return nil
}

func (v *Inventory) changedLocked(luns map[uint16]*LogicalUnit) {
	for _, u := range luns {
		for n := range v.nexuses {
			u.raiseFor(n, uaLUNsChanged)
		}
	}
}

// LUNs returns all entries by ascending number.
func (v *Inventory) LUNs() []LUN {
	luns := *v.luns.Load()
	out := make([]LUN, 0, len(luns))
	for _, n := range slices.Sorted(maps.Keys(luns)) {
		out = append(out, LUN{Number: n, Unit: luns[n]})
	}
	return out
}

// Unit returns the logical unit that an eight-byte LUN addresses, or nil.
func (v *Inventory) Unit(lun uint64) *LogicalUnit {
	number, ok := DecodeLUN(lun)
	if !ok {
		return nil
	}
	return (*v.luns.Load())[number]
}

// Exists reports whether there is a logical unit at lun.
func (v *Inventory) Exists(lun uint64) bool { return v.Unit(lun) != nil }

// NexusEstablished begins a nexus with every logical unit, present and to come. A
// transport calls it once a login is complete, before the first command.
func (v *Inventory) NexusEstablished(n Nexus) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.nexuses[n] = struct{}{}
	for _, u := range *v.luns.Load() {
		u.NexusEstablished(n)
	}
}

// NexusLost ends a nexus with every logical unit: see LogicalUnit.NexusLost. With
// SessionReinstated the nexus stays established.
func (v *Inventory) NexusLost(n Nexus, why LossReason) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if why != SessionReinstated {
		delete(v.nexuses, n)
	}
	for _, u := range *v.luns.Load() {
		u.NexusLost(n, why)
	}
}

// Admit gives cmd its place in the task set of its logical unit; see LogicalUnit.Admit.
// A command that was admitted stays with that unit, whatever happens to the LUN.
func (v *Inventory) Admit(n Nexus, lun uint64, cmd *Command) {
	if u := v.Unit(lun); u != nil {
		u.admit(n, cmd, v)
	}
}

// Execute runs one command to its end; see LogicalUnit.Execute. Without a logical unit
// at lun, INQUIRY, REPORT LUNS and REQUEST SENSE are answered as SPC-4 has it, and all
// else ends with LOGICAL UNIT NOT SUPPORTED.
func (v *Inventory) Execute(ctx context.Context, n Nexus, lun uint64, cmd *Command) Result {
	c := cmd.call
	if c == nil {
		u := v.Unit(lun)
		if u == nil {
			return v.executeAbsent(ctx, n, cmd)
		}
		c = u.admit(n, cmd, v)
	}
	return c.execute(ctx)
}

// Reset is LOGICAL UNIT RESET of lun; see LogicalUnit.Reset. ErrLUNAbsent means that
// there is no logical unit.
func (v *Inventory) Reset(ctx context.Context, issuer Nexus, lun uint64) error {
	u := v.Unit(lun)
	if u == nil {
		return ErrLUNAbsent
	}
	return u.Reset(ctx, issuer)
}

// ResetAll is TARGET WARM RESET and TARGET COLD RESET: every logical unit is reset.
func (v *Inventory) ResetAll(ctx context.Context, issuer Nexus) error {
	var errs []error
	for _, l := range v.LUNs() {
		errs = append(errs, l.Unit.Reset(ctx, issuer))
	}
	return errors.Join(errs...)
}

// ClearTaskSet is CLEAR TASK SET of lun; see LogicalUnit.ClearTaskSet.
func (v *Inventory) ClearTaskSet(ctx context.Context, issuer Nexus, lun uint64) error {
	u := v.Unit(lun)
	if u == nil {
		return ErrLUNAbsent
	}
	return u.ClearTaskSet(ctx, issuer)
}

// CommandsCleared tells the nexus that commands of its own ended without a status: unit
// attention SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT (RFC 7143, 11.5.1).
func (v *Inventory) CommandsCleared(n Nexus, lun uint64) {
	if u := v.Unit(lun); u != nil {
		u.raiseFor(n, uaCleared)
	}
}

// UnitAttention returns the oldest unit attention that is pending for the nexus on the
// unit at lun, and leaves it pending (QUERY ASYNCHRONOUS EVENT, SAM-5, 7.10).
func (v *Inventory) UnitAttention(n Nexus, lun uint64) (key SenseKey, asc, ascq uint8, pending bool) {
	u := v.Unit(lun)
	if u == nil {
		return NoSense, 0, 0, false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.nexuses[n]
	if s == nil || len(s.attentions) == 0 {
		return NoSense, 0, 0, false
	}
	return UnitAttention, s.attentions[0].asc, s.attentions[0].ascq, true
}

// executeAbsent answers a command to a LUN without a logical unit.
func (v *Inventory) executeAbsent(ctx context.Context, n Nexus, cmd *Command) Result {
	c := &call{task: task{nexus: n, cmd: cmd}, inv: v, cdb: cmd.CDB}
	op, _ := v.ops.find(c.cdb)
	if op == nil || !op.has(ignoresAttention) { // INQUIRY, REPORT LUNS, REQUEST SENSE
		return c.fail(faultNoLogicalUnit)
	}
	if f, ok := op.checkCDB(c.cdb); !ok {
		return c.fail(f)
	}
	switch op.opcode {
	case 0x03:
		return c.reply(ctx, faultNoLogicalUnit.encode(&cmd.sense, c.cdb[1]&1 != 0), int64(c.cdb[4]))
	case 0xA0:
		return reportLUNs(ctx, c)
	}
	// INQUIRY: peripheral qualifier 3, device type 1Fh: no logical unit can be here.
	const nobody = 0x7F
	alloc := int64(binary.BigEndian.Uint16(c.cdb[3:]))
	if c.cdb[1]&1 != 0 {
		if c.cdb[2] != vpdSupported {
			return c.fail(invalidCDB(2, -1))
		}
		return c.reply(ctx, []byte{nobody, vpdSupported, 0, 1, vpdSupported}, alloc)
	}
	if c.cdb[2] != 0 {
		return c.fail(invalidCDB(2, -1))
	}
	b := make([]byte, 36)
	b[0], b[2], b[3], b[4], b[7] = nobody, 0x06, 0x12, 31, 0x02
	putText(b[8:16], "")
	putText(b[16:32], "")
	putText(b[32:36], "")
	return c.reply(ctx, b, alloc)
}

// reportLUNs is REPORT LUNS (SPC-4, 6.33). It answers on every LUN and clears the unit
// attention that the list has changed.
func reportLUNs(ctx context.Context, c *call) Result {
	const (
		selectAddressed = 0x00
		selectWellKnown = 0x01
		selectAll       = 0x02
	)
	alloc := int64(binary.BigEndian.Uint32(c.cdb[6:]))
	if alloc < 16 {
		return c.fail(invalidCDB(6, -1))
	}
	luns := []LUN{{Number: 0, Unit: c.unit}}
	if c.inv != nil {
		luns = c.inv.LUNs()
	}
	for _, l := range luns {
		l.Unit.forget(c.nexus, uaLUNsChanged)
	}
	switch c.cdb[2] {
	case selectAddressed, selectAll:
	case selectWellKnown:
		luns = nil // there are none
	default:
		return c.fail(invalidCDB(2, -1))
	}
	out := make([]byte, 8, 8+8*len(luns))
	binary.BigEndian.PutUint32(out, uint32(8*len(luns)))
	for _, l := range luns {
		out = binary.BigEndian.AppendUint64(out, EncodeLUN(l.Number))
	}
	return c.reply(ctx, out, alloc)
}
