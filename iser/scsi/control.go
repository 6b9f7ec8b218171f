package scsi

import (
	"context"
	"encoding/binary"
	"errors"
)

// testUnitReady is TEST UNIT READY (SPC-4, 6.47). Only a medium that cannot be used at
// all makes a unit not ready.
func testUnitReady(ctx context.Context, c *call) Result {
	_, _, err := c.medium().Mapped(ctx, 0, 1)
	if errors.Is(err, ErrNotReady) || errors.Is(err, ErrStarting) || ctx.Err() != nil {
		return c.failErr(ctx, err)
	}
	return Result{}
}

// requestSense is REQUEST SENSE (SPC-4, 6.39): the oldest unit attention, which it
// clears, or else the state of the medium.
func requestSense(ctx context.Context, c *call) Result {
	f := newFault(NoSense, 0, 0)
	u := c.unit
	u.mu.Lock()
	ua, ok := attention{}, false
	if st := u.nexuses[c.nexus]; st != nil {
		ua, ok = st.pop()
	}
	if ok {
		f = newFault(UnitAttention, ua.asc, ua.ascq)
	} else if u.ejected {
		f = faultNoMedium
	}
	u.mu.Unlock()
	return c.reply(ctx, f.encode(&c.cmd.sense, c.cdb[1]&1 != 0), int64(c.cdb[4]))
}

// reserve is RESERVE(6) and (10) without third parties and extents (SPC-2, 7.21): the
// unit is one nexus's until it releases it, is lost, or a reset comes. A conflict was
// found before.
func reserve(_ context.Context, c *call) Result {
	u := c.unit
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.nexuses[c.nexus] == nil {
		return c.fail(faultAborted) // lost meanwhile: nobody would release it
	}
	if u.reserved && u.holder != c.nexus {
		return Result{Status: ReservationConflict}
	}
	u.reserved, u.holder = true, c.nexus
	return Result{}
}

// release is RELEASE(6) and (10). From a nexus that holds no reservation it does nothing.
func release(_ context.Context, c *call) Result {
	u := c.unit
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reserved && u.holder == c.nexus {
		u.reserved, u.holder = false, Nexus{}
	}
	return Result{}
}

// startStopUnit is START STOP UNIT (SBC-3, 5.20). Stopping flushes and changes nothing
// else: other nexuses use the unit. A removable medium is ejected and loaded; it is
// flushed before it is out. Power conditions, reserved ones too, are accepted without
// effect.
func startStopUnit(ctx context.Context, c *call) Result {
	const (
		start   = 0x01
		loej    = 0x02
		noFlush = 0x04
	)
	b := c.cdb[4]
	if b>>4 != 0 {
		return Result{} // a power condition moves no medium
	}
	u := c.unit
	move := b&loej != 0 && u.opt.Removable
	if move {
		u.mu.Lock()
		prevented := u.preventedLocked()
		u.mu.Unlock()
		if prevented {
			return c.fail(faultRemovalPrevent)
		}
	}
	if b&start == 0 && (b&noFlush == 0 || move) {
		if err := c.medium().Flush(ctx); err != nil {
			return c.failErr(ctx, err)
		}
	}
	if !move {
		return Result{}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.preventedLocked() {
		return c.fail(faultRemovalPrevent)
	}
	eject := b&start == 0
	if u.ejected && !eject {
		u.raiseLocked(uaMediumChanged, &c.nexus)
	}
	u.ejected = eject
	return Result{}
}

func (u *LogicalUnit) preventedLocked() bool {
	for _, s := range u.nexuses {
		if s.prevents {
			return true
		}
	}
	return false
}

// preventAllow is PREVENT ALLOW MEDIUM REMOVAL (SBC-3, 5.12). The prevention of a nexus
// ends with the nexus or a reset.
func preventAllow(_ context.Context, c *call) Result {
	prevent := c.cdb[4] & 0x03
	if prevent > 1 {
		return c.fail(invalidCDB(4, 1))
	}
	u := c.unit
	u.mu.Lock()
	defer u.mu.Unlock()
	if s := u.nexuses[c.nexus]; s != nil {
		s.prevents = prevent == 1
	}
	return Result{}
}

// sendDiagnostic is SEND DIAGNOSTIC (SPC-4, 6.42): the default self-test, and the
// foreground ones, read the first block. Parameter lists and background tests are
// refused.
func sendDiagnostic(ctx context.Context, c *call) Result {
	const (
		selfTest                    = 0x04
		foregroundShort, foreground = 5, 6
	)
	if binary.BigEndian.Uint16(c.cdb[3:]) != 0 {
		return c.fail(invalidCDB(3, -1))
	}
	code := c.cdb[1] >> 5
	test := c.cdb[1]&selfTest != 0
	switch {
	case code == 0 && !test:
		return Result{}
	case code == 0, !test && (code == foregroundShort || code == foreground):
	default:
		return c.fail(invalidCDB(1, 7))
	}
	b, err := c.medium().Read(ctx, Extent{LBA: 0, Blocks: 1})
	if err != nil {
		if ctx.Err() != nil {
			return c.failErr(ctx, err)
		}
		return c.fail(faultSelfTest)
	}
	b.Release()
	return Result{}
}

// readDefectData10 is READ DEFECT DATA(10) (SBC-3, 5.17): the lists are empty.
func readDefectData10(ctx context.Context, c *call) Result {
	return c.reply(ctx, []byte{0, c.cdb[2] & 0x1F, 0, 0}, int64(binary.BigEndian.Uint16(c.cdb[7:])))
}

// readDefectData12 is READ DEFECT DATA(12) (SBC-3, 5.18): the lists are empty.
func readDefectData12(ctx context.Context, c *call) Result {
	return c.reply(ctx, []byte{0, c.cdb[1] & 0x1F, 0, 0, 0, 0, 0, 0}, int64(binary.BigEndian.Uint32(c.cdb[6:])))
}
