package iwarp

import (
	"errors"
	"fmt"
	"time"
)

// Defaults and bounds of Options.
const (
	DefaultIRD            = 32
	DefaultORD            = 32
	MaxDepth              = 1024 // largest IRD and ORD, and less than what means "not negotiated"
	DefaultStartupTimeout = 10 * time.Second
	DefaultStallTimeout   = 40 * time.Second
	DefaultMaxPending     = 256
)

// Options of a Provider. The zero value means the defaults.
type Options struct {
	// NoCRC does not ask for CRCs. They are used nevertheless if the peer asks (IWARP-9).
	NoCRC bool
	// Revision of MPA when we ask for a connection: 1, or 2, the default. Peers that ask choose theirs.
	Revision int
	// PeerToPeer asks for the peer-to-peer model when we ask for a connection: our first frame is an empty
	// one, so that the peer can talk at once. RTR are the forms that are offered, all by default. It needs revision 2.
	PeerToPeer bool
	RTR        RTR
	// Markers in what we receive are never asked for; what we send has them if the peer does.

	// MaxULPDU bounds the size of what we send in one FPDU, 128 to 64768 bytes. The default is what fits one TCP segment.
	MaxULPDU int
	// StartupTimeout bounds the exchange of MPA frames.
	StartupTimeout time.Duration
	// StallTimeout ends a connection whose peer does not read.
	StallTimeout time.Duration
	// MaxPending is how many connections a listener keeps that did not complete their request.
	MaxPending int
}

// EnsureDefaults replaces zero values.
func (o *Options) EnsureDefaults() {
	if o.Revision == 0 {
		o.Revision = 2
	}
	if o.RTR == 0 {
		o.RTR = RTRWrite | RTRRead | RTRSend
	}
	if o.StartupTimeout == 0 {
		o.StartupTimeout = DefaultStartupTimeout
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = DefaultStallTimeout
	}
	if o.MaxPending == 0 {
		o.MaxPending = DefaultMaxPending
	}
}

// Validate returns everything that is wrong.
func (o *Options) Validate() error {
	var errs []error
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("iwarp: "+format, args...))
		}
	}
	bad(o.Revision < 1 || o.Revision > 2, "MPA revision %d is not 1 or 2", o.Revision)
	bad(o.PeerToPeer && o.Revision < 2, "the peer-to-peer model needs MPA revision 2")
	bad(o.RTR&^(RTRWrite|RTRRead|RTRSend) != 0, "unknown RTR form in %#x", o.RTR)
	bad(o.MaxULPDU != 0 && (o.MaxULPDU < minULPDU || o.MaxULPDU > maxULPDU), "MaxULPDU %d is not within %d and %d", o.MaxULPDU, minULPDU, maxULPDU)
	bad(o.StartupTimeout < 0, "StartupTimeout %v is negative", o.StartupTimeout)
	bad(o.StallTimeout < 0, "StallTimeout %v is negative", o.StallTimeout)
	bad(o.MaxPending < 0, "MaxPending %d is negative", o.MaxPending)
	return errors.Join(errs...)
}
