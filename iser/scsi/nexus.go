package scsi

import (
	"context"
	"slices"
)

// attention is the additional sense code of a unit attention.
type attention struct{ asc, ascq uint8 }

// Unit attentions (SPC-4, annex D).
var (
	uaMediumChanged = attention{0x28, 0x00} // not ready to ready change
	uaPowerOn       = attention{0x29, 0x00} // power on, reset, or bus device reset
	uaReset         = attention{0x29, 0x03} // bus device reset function occurred
	uaNexusLoss     = attention{0x29, 0x07}
	uaModeChanged   = attention{0x2A, 0x01}
	uaCapacity      = attention{0x2A, 0x09}
	uaCleared       = attention{0x47, 0x7F} // some commands cleared by iSCSI protocol event
	uaLUNsChanged   = attention{0x3F, 0x0E}
)

// maxAttentions bounds the queue of one nexus; beyond it everything becomes one
// power-on attention, which tells the initiator to look at the unit afresh.
const maxAttentions = 16

// nexusState is what a logical unit keeps for one nexus.
type nexusState struct {
	attentions []attention // oldest first, no duplicates
	prevents   bool        // forbids removal of the medium
}

func (s *nexusState) raise(a attention) {
	if a.asc == 0x29 {
		// Power on and reset take precedence over all that came before (SAM-5, 5.14).
		s.attentions = s.attentions[:0]
	} else if slices.Contains(s.attentions, a) {
		return
	} else if len(s.attentions) == maxAttentions {
		s.attentions, a = s.attentions[:0], uaPowerOn
	}
	s.attentions = append(s.attentions, a)
}

func (s *nexusState) pop() (attention, bool) {
	if len(s.attentions) == 0 {
		return attention{}, false
	}
	a := s.attentions[0]
	s.attentions = slices.Delete(s.attentions, 0, 1)
	return a, true
}

func (s *nexusState) clear(a attention) {
	if i := slices.Index(s.attentions, a); i >= 0 {
		s.attentions = slices.Delete(s.attentions, i, i+1)
	}
}

// LossReason says how a nexus ended.
type LossReason uint8

// Loss reasons.
const (
	// SessionClosed: logout, or the connection is gone.
	SessionClosed LossReason = iota
	// SessionReinstated: a new session of the same nexus took over. The nexus stays
	// established, with the unit attention I_T NEXUS LOSS OCCURRED.
	SessionReinstated
)

// NexusEstablished begins a nexus. Its first command ends with the unit attention POWER
// ON, RESET, OR BUS DEVICE RESET OCCURRED (29h, 00h: iscsi-ls knows no other). For a nexus
// that is established already it does nothing.
func (u *LogicalUnit) NexusEstablished(n Nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.nexuses[n] == nil {
		s := new(nexusState)
		s.raise(uaPowerOn)
		u.nexuses[n] = s
	}
}

// nexusLocked returns the state of a nexus, or nil if it is not established.
func (u *LogicalUnit) nexusLocked(n Nexus) *nexusState {
	if u.latest != nil && u.latestNexus == n {
		return u.latest
	}
	s := u.nexuses[n]
	if s != nil {
		u.latest, u.latestNexus = s, n
	}
	return s
}

// NexusLost ends a nexus: its reservation is released, its prevention of removal is
// over. Ending its commands is up to the transport, by their ctx.
func (u *LogicalUnit) NexusLost(n Nexus, why LossReason) {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.nexuses[n]
	if s == nil {
		return
	}
	if u.reserved && u.holder == n {
		u.reserved, u.holder = false, Nexus{}
	}
	if why == SessionReinstated {
		s.prevents = false
		s.raise(uaNexusLoss)
		return
	}
	delete(u.nexuses, n)
	u.latest, u.latestNexus = nil, Nexus{}
}

// RaiseUnitAttention queues a unit attention for every nexus but except (which may be
// nil): capacity changed (2Ah, 09h), mode parameters changed (2Ah, 01h) and so on.
func (u *LogicalUnit) RaiseUnitAttention(asc, ascq uint8, except *Nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.raiseLocked(attention{asc, ascq}, except)
}

// CapacityChanged tells every nexus that the medium has grown. The medium must report
// the new geometry already.
func (u *LogicalUnit) CapacityChanged() { u.RaiseUnitAttention(uaCapacity.asc, uaCapacity.ascq, nil) }

func (u *LogicalUnit) raiseLocked(a attention, except *Nexus) {
	for n, s := range u.nexuses {
		if except == nil || n != *except {
			s.raise(a)
		}
	}
}

// raiseFor queues a unit attention for one nexus.
func (u *LogicalUnit) raiseFor(n Nexus, a attention) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s := u.nexuses[n]; s != nil {
		s.raise(a)
	}
}

// forget drops a pending unit attention of one nexus.
func (u *LogicalUnit) forget(n Nexus, a attention) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s := u.nexuses[n]; s != nil {
		s.clear(a)
	}
}

// Reset is LOGICAL UNIT RESET: commands of other nexuses are aborted (TASK ABORTED, as
// TAS is set), reservations and preventions end, and every nexus, the issuer too, gets
// the unit attention BUS DEVICE RESET FUNCTION OCCURRED. It returns when the aborted
// commands have ended, or with ctx. The issuer's own commands are the transport's to
// abort.
func (u *LogicalUnit) Reset(ctx context.Context, issuer Nexus) error {
	gone := u.abortOthers(issuer)
	u.mu.Lock()
	u.reserved, u.holder = false, Nexus{}
	for _, s := range u.nexuses {
		s.prevents = false
		s.raise(uaReset)
	}
	u.mu.Unlock()
	return waitAll(ctx, gone)
}

// ClearTaskSet aborts the commands of all nexuses but the issuer (TASK ABORTED, as TAS
// is set) and returns when they have ended, or with ctx. The issuer's own commands are
// the transport's to abort.
func (u *LogicalUnit) ClearTaskSet(ctx context.Context, issuer Nexus) error {
	return waitAll(ctx, u.abortOthers(issuer))
}

func (u *LogicalUnit) abortOthers(issuer Nexus) []<-chan struct{} {
	aborts, gone := u.tasks.abort(func(t *task) bool { return t.nexus != issuer })
	for _, a := range aborts {
		a.abort(a.serial)
	}
	return gone
}

func waitAll(ctx context.Context, gone []<-chan struct{}) error {
	for _, g := range gone {
		select {
		case <-g:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
