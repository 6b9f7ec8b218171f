// Package bench generates load on a logical unit and measures it: a library for the benchmark command. With the pattern
// Verify it also judges what it reads back, by the block oracle.
package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/oracle"
	"github.com/isergate/isergate/iser/iwarp"
)

// Pattern is an access pattern.
type Pattern string

// Patterns. The sequential ones are one stream, shared by all that is in flight, which starts over at the end of the range.
// Verify writes and reads at random places, see Verification.
const (
	RandRead  Pattern = "randread"
	RandWrite Pattern = "randwrite"
	RandRW    Pattern = "randrw" // 70 % reads
	Read      Pattern = "read"
	Write     Pattern = "write"
	Verify    Pattern = "verify"
)

// Patterns lists all patterns.
var Patterns = []Pattern{Read, Write, RandRead, RandWrite, RandRW, Verify}

// Writes reports whether the pattern changes what is on the unit.
func (p Pattern) Writes() bool { return p != Read && p != RandRead }

const readShare = 70 // percent, of RandRW

// Unit is what load is put on; *initiator.LUN is one.
type Unit interface {
	Read(ctx context.Context, lba uint64, p []byte) error
	Write(ctx context.Context, lba uint64, p []byte, fua bool) error
	Flush(ctx context.Context) error
}

// Opened is a unit with its geometry.
type Opened struct {
	Unit      Unit
	BlockSize uint32 // logical block, bytes
	Blocks    uint64
	// Buffer returns memory for operations of the unit, which is valid until Close. Nil: any memory does.
	Buffer func(bytes int) ([]byte, error)
	// MaxTransfer is the most bytes of one operation, 0 if no limit is known.
	MaxTransfer uint64
	// Busy returns how often the target said BUSY or TASK SET FULL so far. Nil: nobody counts.
	Busy  func() uint64
	Close func()
}

func (u *Opened) buffer(n int) ([]byte, error) {
	if u.Buffer == nil {
		return make([]byte, n), nil
	}
	return u.Buffer(n)
}

// Options configure Run. The zero value of each field has the default that its comment names.
type Options struct {
	Pattern   Pattern       // required
	BlockSize int           // bytes of an operation, a multiple of the logical block; with Verify the most, and a multiple of 4096; default 4096
	Depth     int           // operations in flight on each session; default 16
	Sessions  int           // default 1
	Duration  time.Duration // default 10 s, unless Count is set
	Count     uint64        // operations; default no limit; not with Verify
	Offset    uint64        // first byte of the range; default 0
	Size      uint64        // bytes of the range; default to the end of the unit; with Verify at most VerifyRange of them
	FUA       bool          // writes with FUA
	// FlushEvery sends a flush after so many writes of each of the Depth streams; default never; not with Verify.
	FlushEvery int
	Seed       uint64 // of offsets and data
	// Force allows to write to a unit that has a partition table, a file system or something of that kind.
	Force bool

	// Grace is how much longer than Duration operations may take to end; what did not is given up, and counted as Unfinished. With
	// Verify, which may take longer than Duration, that holds for each operation begun later. Default DefaultGrace.
	Grace time.Duration
	// Prepare is how long Open may take, and the look at what the unit holds. Default DefaultPrepare.
	Prepare time.Duration

	// Open opens one session.
	Open func(ctx context.Context) (*Opened, error)
	// Progress, if set, is called about once a second.
	Progress func(Progress)
}

// Progress is what was done so far.
type Progress struct {
	Phase      string // what goes on
	Elapsed    time.Duration
	Operations uint64
	Bytes      uint64
	Errors     uint64
	Busy       uint64 // answers BUSY and TASK SET FULL
}

// Defaults of Options.
const (
	DefaultGrace   = 10 * time.Second
	DefaultPrepare = 30 * time.Second
)

// Latency summarizes a histogram. A quantile is at most 1.6 % above the truth.
type Latency struct {
	Min  time.Duration `json:"min_ns"`
	Mean time.Duration `json:"mean_ns"`
	P50  time.Duration `json:"p50_ns"`
	P90  time.Duration `json:"p90_ns"`
	P99  time.Duration `json:"p99_ns"`
	P999 time.Duration `json:"p999_ns"`
	Max  time.Duration `json:"max_ns"`
}

// Result is what was measured.
type Result struct {
	Pattern    Pattern       `json:"rw"`
	BlockSize  int           `json:"block_size"`
	Depth      int           `json:"depth"`
	Sessions   int           `json:"sessions"`
	Offset     uint64        `json:"offset"` // bytes
	Size       uint64        `json:"size"`   // bytes of the range
	Seed       uint64        `json:"seed"`
	Operations uint64        `json:"operations"` // reads and writes that succeeded
	Bytes      uint64        `json:"bytes"`
	Flushes    uint64        `json:"flushes"`
	Errors     uint64        `json:"errors"`
	FirstError string        `json:"first_error,omitempty"`
	Unfinished uint64        `json:"unfinished"` // operations given up because they did not end in time, or had waited for a second at an interrupt
	Busy       uint64        `json:"busy"`       // answers BUSY and TASK SET FULL, after which a command was repeated
	Elapsed    time.Duration `json:"elapsed_ns"`
	IOPS       float64       `json:"iops"`
	MBps       float64       `json:"mb_per_s"` // 10^6 bytes
	Latency    Latency       `json:"latency"`
	// CPU is what this process used, user and system; CPUPerOp is that divided by Operations, 0 if there were none.
	CPU      time.Duration `json:"cpu_ns"`
	CPUPerOp float64       `json:"cpu_ns_per_op"`
	// Verification is what Verify found, nil with other patterns.
	Verification *Verification `json:"verify,omitempty"`

	// Permanent is the error that ended the run early because it comes again and again, nil if there was none.
	Permanent error `json:"-"`
	// Allocations counts the objects that this process put on the heap.
	Allocations uint64     `json:"-"`
	Histogram   *Histogram `json:"-"`
}

// String returns the result in one line.
func (r *Result) String() string {
	return fmt.Sprintf("%-9s bs=%d depth=%dx%d  %.0f IOPS  %.1f MB/s  p50 %v  p99 %v  p99.9 %v  max %v  errors %d  own CPU %v",
		r.Pattern, r.BlockSize, r.Depth, r.Sessions, r.IOPS, r.MBps, r.Latency.P50, r.Latency.P99, r.Latency.P999, r.Latency.Max,
		r.Errors, r.CPU.Round(time.Millisecond))
}

// ErrOverdue means that something did not end in time.
var ErrOverdue = errors.New("bench: the target did not answer in time")

// ErrOptions means that options are wrong by themselves, or do not fit the unit.
var ErrOptions = errors.New("bench")

func badOption(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
}

func (o *Options) ensureDefaults() error {
	if o.BlockSize == 0 {
		o.BlockSize = 4096
	}
	if o.Depth == 0 {
		o.Depth = 16
	}
	if o.Sessions == 0 {
		o.Sessions = 1
	}
	if o.Duration == 0 && o.Count == 0 {
		o.Duration = 10 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	if o.Prepare == 0 {
		o.Prepare = DefaultPrepare
	}
	var errs []error
	if !slices.Contains(Patterns, o.Pattern) {
		errs = append(errs, badOption("pattern %q is not one of %v", o.Pattern, Patterns))
	}
	if o.BlockSize < 512 || o.BlockSize > 64<<20 {
		errs = append(errs, badOption("a block size of %d bytes is not between 512 B and 64 MiB", o.BlockSize))
	}
	if o.Depth < 1 || o.Depth > 4096 || o.Sessions < 1 || o.Sessions > 256 {
		errs = append(errs, badOption("%d sessions of depth %d: at most 256 of depth 4096", o.Sessions, o.Depth))
	}
	if o.Duration < 0 || o.FlushEvery < 0 || o.Grace < 0 || o.Prepare < 0 {
		errs = append(errs, badOption("negative duration or flush interval"))
	}
	if o.Pattern == Verify && (o.BlockSize%oracle.BlockSize != 0 || o.BlockSize > maxVerifyBytes) {
		errs = append(errs, badOption("verify takes block sizes that are multiples of %d bytes, up to %d MiB", oracle.BlockSize, maxVerifyBytes>>20))
	}
	if o.Pattern == Verify && (o.Count > 0 || o.FlushEvery > 0) {
		errs = append(errs, badOption("verify takes neither a number of operations nor a flush interval"))
	}
	if o.Open == nil {
		errs = append(errs, badOption("nothing to open"))
	}
	return errors.Join(errs...)
}

// OpenLUN returns an Open for Options: each call logs in to a session of its own. Buffers are memory that the session has registered.
func OpenLUN(o initiator.Options, lun uint16) func(ctx context.Context) (*Opened, error) {
	return func(ctx context.Context) (*Opened, error) {
		s, err := initiator.Dial(ctx, o)
		if err != nil {
			return nil, err
		}
		l, err := s.OpenLUN(ctx, lun)
		if err != nil {
			s.Close()
			return nil, err
		}
		most, err := l.MaxTransfer(ctx)
		if err != nil {
			s.Close()
			return nil, err
		}
		var mu sync.Mutex
		var buffers [][]byte // guarded by mu
		return &Opened{
			Unit: l, BlockSize: l.BlockSize, Blocks: l.Blocks, MaxTransfer: uint64(most) * uint64(l.BlockSize), Busy: l.BusyAnswers,
			Buffer: func(n int) ([]byte, error) {
				b, err := s.Alloc(n)
				if err == nil {
					mu.Lock()
					buffers = append(buffers, b)
					mu.Unlock()
				}
				return b, err
			},
			Close: func() {
				s.Close()
				mu.Lock()
				defer mu.Unlock()
				for _, b := range buffers {
					s.Free(b)
				}
				buffers = nil
			},
		}, nil
	}
}

// Transport is what carries a session.
type Transport string

// Transports.
const (
	TCP  Transport = "tcp"
	ISER Transport = "iser"
)

// Carry makes o a session over t, with a CRC32C over all that is sent, or without: over TCP by header and data digests, over iSER by
// the CRC of MPA frames. A target that insists on the opposite refuses the session, or with MPA has its way.
func Carry(o *initiator.Options, t Transport, crc bool) error {
	if t == TCP {
		o.ISER, o.HeaderDigest, o.DataDigest = nil, initiator.DigestNone, initiator.DigestNone
		if crc {
			o.HeaderDigest, o.DataDigest = initiator.DigestRequired, initiator.DigestRequired
		}
		return nil
	}
	p, err := iwarp.New(iwarp.Options{NoCRC: !crc})
	if err != nil {
		return err
	}
	o.ISER = &initiator.ISER{Provider: p}
	return nil
}
