package iscsi

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Options configure a Server. The zero value of a field means its default. Sizes are bytes.
type Options struct {
	Backend Backend // required

	// QueueDepth is the command window of a session: how many commands an initiator may have in progress. Default 128, at most 4096.
	QueueDepth int
	// StagingBytes bounds the memory for unsolicited data of all sessions. A session whose FirstBurstLength times queue depth does not
	// fit gets a smaller window. Default 256 MiB.
	StagingBytes int64
	// MaxConnections is offered for a session. Default 4.
	MaxConnections int
	// MaxSessions bounds the sessions; a quarter of them may be discovery sessions. Those without a connection (Time2Retain) give way to a login
	// that finds no room, or too little of StagingBytes. Default 1024.
	MaxSessions int

	MaxRecvDataSegmentLength int // declared; default 262144
	MaxBurstLength           int // default 1048576
	FirstBurstLength         int // default 65536
	MaxOutstandingR2T        int // default 8
	// Time2Retain is how long a session outlives its last connection. Default 0: its end is the end of the session.
	Time2Retain time.Duration
	NoDigests   bool // offer HeaderDigest and DataDigest None only
	// UnsolicitedData lets initiators send unsolicited Data-Out over iSER. Default: InitialR2T=Yes, what is not immediate is fetched.
	UnsolicitedData bool

	// Algorithms are the CHAP algorithms that are accepted. Default: SHA-256 and MD5; the initiator's order decides.
	Algorithms []CHAPAlgorithm

	// LoginTimeout bounds the login phase. Default 15 s.
	LoginTimeout time.Duration
	// MaxLogins bounds the connections that have not logged in, and MaxLoginsPerAddress those of one IP address. Defaults 256 and 64.
	MaxLogins           int
	MaxLoginsPerAddress int

	// PingInterval is how long a connection may be silent before it is pinged; PingTimeout how long it may
	// then be silent before it is closed. Defaults 10 s and 20 s; a negative PingInterval turns pings off.
	PingInterval time.Duration
	PingTimeout  time.Duration
	// AbortWait is how long a command that was aborted may wait for its initiator to read, or to answer. Then the initiator's connection is
	// closed: a reset of the unit, and PREEMPT AND ABORT, wait until the memory of that command is nobody's. Default 5 s.
	AbortWait time.Duration
	// LogoutWait is how long initiators get to log out by themselves at Shutdown, and, up to a second, to close a connection that they
	// have logged out. Default 2 s.
	LogoutWait time.Duration

	Registerer prometheus.Registerer // nil: no metrics
	Logger     *slog.Logger          // nil: slog.Default
}

func (o *Options) ensureDefaults() {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	dur := func(p *time.Duration, v time.Duration) {
		if *p == 0 {
			*p = v
		}
	}
	def(&o.QueueDepth, 128)
	def(&o.MaxConnections, 4)
	def(&o.MaxSessions, 1024)
	def(&o.MaxRecvDataSegmentLength, 262144)
	def(&o.MaxBurstLength, 1<<20)
	def(&o.FirstBurstLength, 65536)
	def(&o.MaxOutstandingR2T, 8)
	def(&o.MaxLogins, 256)
	def(&o.MaxLoginsPerAddress, 64)
	if o.StagingBytes == 0 {
		o.StagingBytes = 256 << 20
	}
	if o.Algorithms == nil {
		o.Algorithms = []CHAPAlgorithm{CHAPSHA256, CHAPMD5}
	}
	dur(&o.LoginTimeout, 15*time.Second)
	dur(&o.PingInterval, 10*time.Second)
	dur(&o.PingTimeout, 20*time.Second)
	dur(&o.AbortWait, 5*time.Second)
	dur(&o.LogoutWait, 2*time.Second)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Validate returns every fault of the options, after their defaults.
func (o Options) Validate() error {
	o.ensureDefaults()
	var errs []error
	within := func(name string, v, low, high int) {
		if v < low || v > high {
			errs = append(errs, fmt.Errorf("iscsi: %s is %d, not %d to %d", name, v, low, high))
		}
	}
	if o.Backend == nil {
		errs = append(errs, errors.New("iscsi: Backend is required"))
	}
	within("QueueDepth", o.QueueDepth, 1, 4096)
	within("MaxConnections", o.MaxConnections, 1, 65535)
	within("MaxSessions", o.MaxSessions, 1, 65535)
	within("MaxRecvDataSegmentLength", o.MaxRecvDataSegmentLength, 8192, maxLength)
	within("MaxBurstLength", o.MaxBurstLength, 512, maxLength)
	within("FirstBurstLength", o.FirstBurstLength, 512, o.MaxBurstLength)
	within("MaxOutstandingR2T", o.MaxOutstandingR2T, 1, 65535)
	within("MaxLogins", o.MaxLogins, 1, 1<<20)
	within("MaxLoginsPerAddress", o.MaxLoginsPerAddress, 1, 1<<20)
	within("Time2Retain in seconds", int(o.Time2Retain/time.Second), 0, 3600)
	if o.StagingBytes < 1<<20 {
		errs = append(errs, fmt.Errorf("iscsi: StagingBytes is %d, less than 1 MiB", o.StagingBytes))
	}
	if o.LoginTimeout < 0 || o.PingTimeout < 0 || o.AbortWait < 0 || o.LogoutWait < 0 {
		errs = append(errs, errors.New("iscsi: a timeout is negative"))
	}
	for _, a := range o.Algorithms {
		if a.size() == 0 {
			errs = append(errs, fmt.Errorf("iscsi: CHAP algorithm %d is not implemented", a))
		}
	}
	return errors.Join(errs...)
}
