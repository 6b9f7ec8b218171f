// Package scsi is a logical unit for a disk: command descriptor blocks in, block
// operations on a Medium out. It knows no transport; a transport hands each command to
// an Inventory, the LUNs that an initiator sees on one target.
//
// Standards: SAM-5, SPC-4, SBC-3. DESIGN.md has the commands, the layouts of the
// vendor-specific pages and the invariants.
package scsi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/iser/internal/loglimit"
)

// Limits that initiators are told in the block limits VPD page.
const (
	DefaultMaxTransfer = 65536      // blocks of one read or write
	maxCompareBlocks   = 255        // COMPARE AND WRITE
	maxWriteSame       = 0xFFFFFFFF // blocks of one WRITE SAME
	maxUnmapBlocks     = 0xFFFFFFFF // no limit
	maxUnmapDescs      = 1024
)

// MaxLanding is the most that a logical unit reserves of its medium at once, in bytes.
// Longer writes land and take effect in pieces of this size, in order, each whole.
const MaxLanding = 4 << 20

// stepBytes is how much of a long read or verify is in memory at a time.
const stepBytes = 1 << 20

// Options make a logical unit.
type Options struct {
	Medium   Medium
	Identity Identity

	Vendor   string // T10 vendor identification, at most 8 ASCII characters; default "ISERGATE"
	Product  string // at most 16 ASCII characters; default "VOLUME"
	Revision string // at most 4 ASCII characters; default "1"

	ReadOnly  bool // every write ends with WRITE PROTECTED
	Removable bool // START STOP UNIT ejects and loads, PREVENT ALLOW MEDIUM REMOVAL forbids it

	// PlainBlocks reports a physical block as large as the logical one (512n), for
	// initiators that cannot work with the real one.
	PlainBlocks bool

	// MaxTransfer is the most that one read or write may move, in blocks; 0 means
	// DefaultMaxTransfer.
	MaxTransfer uint32

	// PortDesignators returns the designators of target port and target device in VPD
	// page 83h, for one nexus. Default: ISCSIDesignators.
	PortDesignators func(Nexus) []Designator

	Logger *slog.Logger // nil: slog.Default
}

func (o *Options) ensureDefaults() {
	if o.Vendor == "" {
		o.Vendor = "ISERGATE"
	}
	if o.Product == "" {
		o.Product = "VOLUME"
	}
	if o.Revision == "" {
		o.Revision = "1"
	}
	if o.MaxTransfer == 0 {
		o.MaxTransfer = DefaultMaxTransfer
	}
	if o.Identity.Serial == "" {
		o.Identity.Serial = uuid.UUID(o.Identity.UUID).String()
	}
	if o.PortDesignators == nil {
		o.PortDesignators = ISCSIDesignators
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

func (o *Options) validate() error {
	var errs []error
	text := func(name, s string, most int) {
		if len(s) > most {
			errs = append(errs, fmt.Errorf("scsi: %s %q is longer than %d characters", name, s, most))
		}
		for i := range len(s) {
			if s[i] < 0x20 || s[i] > 0x7E {
				errs = append(errs, fmt.Errorf("scsi: %s %q is not printable ASCII", name, s))
				break
			}
		}
	}
	text("vendor", o.Vendor, 8)
	text("product", o.Product, 16)
	text("revision", o.Revision, 4)
	text("serial", o.Identity.Serial, 36)
	if o.Identity.UUID == [16]byte{} {
		errs = append(errs, errors.New("scsi: a logical unit needs a UUID"))
	}
	if o.Medium == nil {
		return errors.Join(append(errs, errors.New("scsi: a logical unit needs a medium"))...)
	}
	g := o.Medium.Geometry()
	if g.BlockSize != 512 && g.BlockSize != 4096 {
		errs = append(errs, fmt.Errorf("scsi: block size %d is neither 512 nor 4096", g.BlockSize))
	} else if g.PhysicalSize < g.BlockSize || g.PhysicalSize&(g.PhysicalSize-1) != 0 {
		errs = append(errs, fmt.Errorf("scsi: physical block size %d is not a power of two times the block size", g.PhysicalSize))
	}
	if o.MaxTransfer < maxCompareBlocks {
		errs = append(errs, fmt.Errorf("scsi: maximum transfer of %d blocks is below %d", o.MaxTransfer, maxCompareBlocks))
	}
	return errors.Join(errs...)
}

// LogicalUnit executes commands on a Medium. All methods may be called concurrently.
type LogicalUnit struct {
	opt   Options
	ops   *operations
	tasks taskSet
	locks rangeLocks
	calls sync.Pool // of *call
	// unknown bounds the log of errors that are none of this package's.
	unknown loglimit.Limit

	modeMu sync.Mutex // one MODE SELECT at a time

	mu sync.Mutex // guards all below
	// nexuses has each established nexus. Without an entry commands are refused.
	nexuses map[Nexus]*nexusState
	// latest is one entry of nexuses, that of the last command: comparing a nexus with itself is
	// cheap, hashing its names is not. nil: none.
	latest      *nexusState
	latestNexus Nexus
	reserved    bool  // by RESERVE(6) or (10)
	holder      Nexus // of the reservation
	ejected     bool  // removable medium is out
	dSense      bool  // D_SENSE of the control mode page
	swp         bool  // SWP of the control mode page
}

// NewLogicalUnit returns a unit without nexuses. The error names every fault of opt.
func NewLogicalUnit(opt Options) (*LogicalUnit, error) {
	opt.ensureDefaults()
	if err := opt.validate(); err != nil {
		return nil, err
	}
	u := &LogicalUnit{opt: opt, ops: newOperations(), nexuses: make(map[Nexus]*nexusState)}
	u.calls.New = func() any { return new(call) }
	u.unknown.Init(1, 10*time.Second)
	return u, nil
}

// Identity returns what names the unit for life.
func (u *LogicalUnit) Identity() Identity { return u.opt.Identity }

// Admit gives cmd its place in the task set, which is what ORDERED and HEAD OF QUEUE
// attributes refer to. A transport calls it in the order in which commands arrived and
// then, from any goroutine, Execute, exactly once for each admitted command. Without
// Admit a command's place is when Execute is called. It does not block.
func (u *LogicalUnit) Admit(n Nexus, cmd *Command) { u.admit(n, cmd, nil) }

func (u *LogicalUnit) admit(n Nexus, cmd *Command, inv *Inventory) *call {
	c := u.calls.Get().(*call)
	c.task = task{nexus: n, cmd: cmd, attr: cmd.Attribute}
	c.unit, c.cmd, c.inv = u, cmd, inv
	u.tasks.add(&c.task)
	cmd.call = c
	return c
}

// Execute runs one command to its end. The ctx is the task's: when it ends, Execute
// returns soon, with a status that only matters if somebody still waits for it.
// A nexus that is not established gets ABORTED COMMAND.
func (u *LogicalUnit) Execute(ctx context.Context, n Nexus, cmd *Command) Result {
	c := cmd.call
	if c == nil {
		c = u.admit(n, cmd, nil)
	}
	return c.execute(ctx)
}

// call is one command on its way through a logical unit.
type call struct {
	task
	unit *LogicalUnit
	inv  *Inventory // that the command came through, or nil
	op   *operation
	cdb  []byte

	descriptor bool // sense data format
	protected  bool // a write is refused
	softWP     bool // the reason is SWP
	lock       rangeLock
	geometry   Geometry

	one     [1][]byte // a vector of one
	extents []Extent  // of UNMAP, kept for reuse
}

func (c *call) execute(ctx context.Context) Result {
	u := c.unit
	var res Result
	if c.ready == nil {
		res = u.dispatch(ctx, c)
	} else {
		select {
		case <-c.ready:
			res = u.dispatch(ctx, c)
		case <-ctx.Done():
			res = Result{Status: TaskAborted}
		}
	}
	if u.tasks.remove(&c.task) {
		res = Result{Status: TaskAborted}
	}
	c.task.cmd.call = nil
	c.task, c.op, c.cdb, c.inv, c.one[0], c.extents = task{}, nil, nil, nil, nil, c.extents[:0]
	u.calls.Put(c)
	return res
}

// dispatch checks a command in the order of precedence (unit attention, opcode,
// reservation, CDB, medium) and runs it.
func (u *LogicalUnit) dispatch(ctx context.Context, c *call) Result {
	c.cdb = c.cmd.CDB
	op, bad := u.ops.find(c.cdb)
	c.op = op

	u.mu.Lock()
	c.descriptor = u.dSense
	c.protected, c.softWP = u.opt.ReadOnly || u.swp, !u.opt.ReadOnly
	st := u.nexusLocked(c.nexus)
	var ua attention
	pending := false
	if st != nil && (op == nil || !op.has(ignoresAttention)) {
		ua, pending = st.pop()
	}
	conflict := op != nil && u.reserved && u.holder != c.nexus && !op.allowsReserved(c.cdb)
	noMedium := u.ejected && op != nil && op.has(needsMedium)
	u.mu.Unlock()

	switch {
	case st == nil:
		return c.fail(faultAborted)
	case pending:
		return c.fail(newFault(UnitAttention, ua.asc, ua.ascq))
	case c.attr > HeadOfQueue:
		return c.fail(faultMessage)
	case op == nil:
		return c.fail(bad)
	case conflict:
		return Result{Status: ReservationConflict}
	}
	if f, ok := op.checkCDB(c.cdb); !ok {
		return c.fail(f)
	}
	if noMedium {
		return c.fail(faultNoMedium)
	}
	c.geometry = u.opt.Medium.Geometry()
	return op.run(ctx, c)
}

func (c *call) medium() Medium { return c.unit.opt.Medium }

// fail ends the command with f. The sense data is in the memory of the command.
func (c *call) fail(f fault) Result {
	return Result{Status: CheckCondition, Sense: f.encode(&c.cmd.sense, c.descriptor)}
}

// reply sends at most alloc bytes of data and ends the command.
func (c *call) reply(ctx context.Context, data []byte, alloc int64) Result {
	n := min(int64(len(data)), alloc)
	if n > 0 {
		c.one[0] = data[:n]
		if err := c.cmd.Data.Send(ctx, c.one[:], 0); err != nil {
			return c.failErr(ctx, err)
		}
	}
	return Result{DataIn: n}
}

// parameterList receives a parameter list of n bytes. If ok is false, res ends the
// command.
func (c *call) parameterList(ctx context.Context, n int) (list []byte, res Result, ok bool) {
	if c.cmd.Data.OutLength() < int64(n) {
		res = c.fail(faultListLength)
		res.DataOut = int64(n)
		return nil, res, false
	}
	list = make([]byte, n)
	if n > 0 {
		c.one[0] = list
		if err := c.cmd.Data.Receive(ctx, c.one[:], 0); err != nil {
			return nil, c.failErr(ctx, err), false
		}
	}
	return list, Result{}, true
}
