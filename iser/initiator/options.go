package initiator

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// DefaultPort is the iSCSI port.
const DefaultPort = "3260"

// DigestPolicy says what is offered for a header or data digest.
type DigestPolicy uint8

// Digest policies.
const (
	DigestNone     DigestPolicy = 0 // None
	DigestPrefer   DigestPolicy = 1 // CRC32C,None
	DigestRequired DigestPolicy = 2 // CRC32C
)

func (d DigestPolicy) offer() string {
	switch d {
	case DigestPrefer:
		return "CRC32C,None"
	case DigestRequired:
		return "CRC32C"
	}
	return "None"
}

// Options configure a session. The zero value of each field has the default that its comment names.
type Options struct {
	Portal         string // host or host:port; default port 3260
	InitiatorName  string // required
	InitiatorAlias string
	TargetName     string   // required for a normal session
	ISID           pdu.ISID // default: random
	CHAP           *CHAP    // default: no authentication

	HeaderDigest DigestPolicy // default None
	DataDigest   DigestPolicy // default None

	// ISER, if set, makes the session speak iSER. Digests and MaxRecvDataSegmentLength then have no meaning.
	ISER *ISER

	// NoImmediateData offers ImmediateData=No; InitialR2T offers InitialR2T=Yes.
	NoImmediateData bool
	InitialR2T      bool

	MaxRecvDataSegmentLength uint32 // bytes; default 262144
	MaxBurstLength           uint32 // bytes; default 1048576
	FirstBurstLength         uint32 // bytes; default 262144
	MaxOutstandingR2T        uint16 // default 8
	ProtocolLevel            uint8  // iSCSIProtocolLevel; offered if above 1

	QueueDepth int // commands outstanding at most, 1 to 4096; default 128

	LoginTimeout time.Duration // for the connection and the login; default 15 s
	PingInterval time.Duration // idle time after which the target is pinged; default 5 s; negative: never
	PingTimeout  time.Duration // silence after a ping that ends the connection; default 5 s
	TaskTimeout  time.Duration // for task management and logout; default 15 s

	// OnAsync is called for each asynchronous message, from the goroutine that
	// reads the connection: it must not block, nor call the session.
	OnAsync func(AsyncMessage)
	// DialContext opens the connection. Default: TCP.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	Logger      *slog.Logger // default: discards
}

// AsyncMessage is an Asynchronous Message of the target.
type AsyncMessage struct {
	pdu.Async
	Data []byte // with AsyncSCSI: sense length, sense data and event data
}

// EnsureDefaults replaces zero values by their defaults.
func (o *Options) EnsureDefaults() {
	def32 := func(v *uint32, d uint32) {
		if *v == 0 {
			*v = d
		}
	}
	defTime := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def32(&o.MaxRecvDataSegmentLength, 262144)
	def32(&o.MaxBurstLength, 1<<20)
	def32(&o.FirstBurstLength, 262144)
	o.FirstBurstLength = min(o.FirstBurstLength, o.MaxBurstLength)
	if o.MaxOutstandingR2T == 0 {
		o.MaxOutstandingR2T = 8
	}
	if o.QueueDepth == 0 {
		o.QueueDepth = 128
	}
	defTime(&o.LoginTimeout, 15*time.Second)
	defTime(&o.PingInterval, 5*time.Second)
	defTime(&o.PingTimeout, 5*time.Second)
	defTime(&o.TaskTimeout, 15*time.Second)
	if o.ISID == (pdu.ISID{}) {
		rand.Read(o.ISID[:])
		o.ISID[0] = 0x80 // type 10b: random
	}
	if o.DialContext == nil {
		o.DialContext = new(net.Dialer).DialContext
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.CHAP != nil && len(o.CHAP.Algorithms) == 0 {
		c := *o.CHAP
		c.Algorithms = []CHAPAlgorithm{CHAPSHA256, CHAPMD5}
		o.CHAP = &c
	}
}

// Validate reports every fault of the options at once. Call it after EnsureDefaults.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("initiator: "+format, args...)) }
	if o.Portal == "" {
		bad("no portal")
	}
	name := func(what, s string) {
		if len(s) > 223 || strings.ContainsRune(s, 0) {
			bad("%s is not an iSCSI name", what)
		}
	}
	if o.InitiatorName == "" {
		bad("no initiator name")
	}
	name("initiator name", o.InitiatorName)
	name("target name", o.TargetName)
	length := func(what string, v uint32) {
		if v < 512 || v > pdu.MaxDataLength {
			bad("%s %d is not between 512 and 16777215", what, v)
		}
	}
	length("MaxRecvDataSegmentLength", o.MaxRecvDataSegmentLength)
	length("MaxBurstLength", o.MaxBurstLength)
	length("FirstBurstLength", o.FirstBurstLength)
	if o.QueueDepth < 1 || o.QueueDepth > 4096 {
		bad("queue depth %d is not between 1 and 4096", o.QueueDepth)
	}
	if o.ProtocolLevel > 31 {
		bad("iSCSIProtocolLevel %d is above 31", o.ProtocolLevel)
	}
	if o.ISER != nil {
		o.ISER.validate(bad)
	}
	if o.CHAP != nil {
		errs = append(errs, o.CHAP.validate())
	}
	return errors.Join(errs...)
}

// address returns the portal with a port.
func (o *Options) address() string { return withPort(o.Portal) }

func withPort(portal string) string {
	if _, _, err := net.SplitHostPort(portal); err == nil {
		return portal
	}
	return net.JoinHostPort(strings.Trim(portal, "[]"), DefaultPort)
}
