package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/units"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/bench"
)

// benchInitiator is the name that bench logs in with.
const benchInitiator = "iqn.2026-11.io.isergate:bench"

const benchHelp = `Put load on a logical unit of any iSCSI or iSER target and measure it. URL is one of
  iscsi://[USER:SECRET@]HOST[:PORT]/TARGET[/LUN][?OPTION=VALUE&...]   iSCSI over TCP
  iser://[USER:SECRET@]HOST[:PORT]/TARGET[/LUN][?OPTION=VALUE&...]    iSER over a software RNIC (iWARP on TCP)
with port 3260 and LUN 0 unless they are given. Options of both are initial-r2t and immediate-data (yes or no), first-burst
and max-burst (bytes); of iscsi digests (none, prefer, required); of iser crc (on, off), mpa (1, 2), peer-to-peer and
hello (yes, no), login (message, stream) and delay (such as 500ms, before the first message).

--rw is one of
  read, write          one sequential stream, shared by all that is in flight
  randread, randwrite  random places
  randrw               random places, 70 % reads
  verify               fills the range with blocks that name themselves, then writes and reads random
                       runs of up to --bs bytes and judges each read, then reads and judges the whole
                       range (--size, 256MiB if it is not given): a block that is lost, wrong or in the
                       wrong place ends the run with exit code 1

A unit that has a partition table, a file system or something like it is not written to without --force.

CHAP credentials are in the URL, where other users of the machine may see them, or in environment variables, those of
libiscsi: LIBISCSI_CHAP_USERNAME, LIBISCSI_CHAP_PASSWORD and, for the target to prove itself, LIBISCSI_CHAP_TARGET_USERNAME,
LIBISCSI_CHAP_TARGET_PASSWORD.

What the target answers with BUSY is repeated. An operation that has not ended 10 s after --time is given up; the
login and the look at what the unit holds may take 30 s each. What the target refuses 100 times in a row, with a
check condition or any other status but BUSY, ends the run.

Exit code 0: the run is over, and no operation failed. 1: one did or was given up, none ended, a block is lost or wrong,
the run was interrupted, or it could not begin (no connection, the login refused, no such LUN, a file system on it).
2: the command line or the URL is wrong, or asks for what the unit does not have. The result is printed with 0, and with 1
if the run had begun.

With --output json the result is one object. Times are nanoseconds, sizes bytes, MB 10^6 bytes; fields may be
added, but none goes or changes:
  url, transport (tcp or iser), crc (true if CRCs were asked for), rw, block_size, depth, sessions, offset, size, seed
  operations, bytes, flushes, errors, first_error (only if there was one), unfinished (given up), busy (answers BUSY)
  elapsed_ns, iops, mb_per_s, latency {min_ns, mean_ns, p50_ns, p90_ns, p99_ns, p999_ns, max_ns}
  cpu_ns, cpu_ns_per_op: of this process, user and system
  verify (only with verify) {blocks_filled, writes, reads, checks, blocks_checked, complete, violations,
    details (only if there are violations)}`

// benchFlags are the flags of bench.
type benchFlags struct {
	rw             string
	block          units.Size
	depth          int
	sessions       int
	length         time.Duration
	offset, extent sizeFlag
	seed           uint64
	fua, force     bool
	crc            string
	initiator      string
}

func (c *cli) bench() *cobra.Command {
	f := benchFlags{block: 4 * units.KiB}
	cmd := &cobra.Command{
		Use: "bench URL", Short: "Measure a logical unit over iSCSI or iSER, or verify what it keeps", Long: benchHelp, Args: cobra.ExactArgs(1),
		Example: `  isergate bench iscsi://127.0.0.1:3260/iqn.2026-11.io.isergate:demo/0 --rw randread --bs 4KiB --depth 32
  isergate bench iser://127.0.0.1:3260/iqn.2026-11.io.isergate:demo/0 --rw verify --time 1m --output json`,
	}
	var patterns []string
	for _, p := range bench.Patterns {
		patterns = append(patterns, string(p))
	}
	flags := cmd.Flags()
	flags.StringVar(&f.rw, "rw", string(bench.RandRead), "read, write, randread, randwrite, randrw or verify")
	flags.Var(&f.block, "bs", "bytes of an operation; with verify the most")
	flags.IntVar(&f.depth, "depth", 16, "operations in flight in each session")
	flags.IntVar(&f.sessions, "sessions", 1, "sessions, each with a connection of its own")
	flags.DurationVar(&f.length, "time", 10*time.Second, "length of the run")
	flags.Var(&f.offset, "offset", "where the range begins (default 0)")
	flags.Var(&f.extent, "size", "length of the range (default: to the end; with verify at most 256MiB)")
	flags.Uint64Var(&f.seed, "seed", 0, "seed of places and data (default: a random one, which is printed)")
	flags.BoolVar(&f.fua, "fua", false, "writes with FUA: they end at the volume's flush level")
	flags.BoolVar(&f.force, "force", false, "write even over a partition table or a file system")
	flags.StringVar(&f.crc, "crc", "", "on or off: CRC32C of all that is sent; header and data digests with iscsi (default off), MPA CRC with iser (default on; a target that asks for it gets it)")
	flags.StringVar(&f.initiator, "initiator", benchInitiator, "initiator name to log in with")
	for name, words := range map[string][]string{"rw": patterns, "crc": {"on", "off"}} {
		if err := cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the flags are defined above
		}
	}
	cmd.RunE = c.does(func(ctx context.Context, args []string) error {
		if !flags.Changed("seed") {
			f.seed = rand.Uint64() >> 11 // programs read JSON numbers as floating point
		}
		if !slices.Contains(patterns, f.rw) {
			return api.Errorf(api.CodeInvalid, "--rw %s: use one of %v", f.rw, patterns)
		}
		if f.depth < 1 || f.sessions < 1 {
			return api.Errorf(api.CodeInvalid, "--depth %d --sessions %d: both are at least 1", f.depth, f.sessions)
		}
		if f.block <= 0 {
			return api.Errorf(api.CodeInvalid, "--bs %v: use a size above 0", f.block)
		}
		if f.fua && !bench.Pattern(f.rw).Writes() {
			return api.Errorf(api.CodeInvalid, "--fua with --rw %s: it is for writes", f.rw)
		}
		if f.length <= 0 {
			return api.Errorf(api.CodeInvalid, "--time %v: use a time above 0", f.length)
		}
		return c.runBench(ctx, args[0], f)
	})
	return cmd
}

// benchResult is what bench prints.
type benchResult struct {
	URL       string `json:"url"`
	Transport string `json:"transport"`
	CRC       bool   `json:"crc"`
	*bench.Result
}

func (c *cli) runBench(ctx context.Context, address string, f benchFlags) error {
	o, lun, crc, err := benchTarget(address, f)
	if err != nil {
		return api.Errorf(api.CodeInvalid, "%w", err)
	}
	result := benchResult{URL: fmt.Sprintf("iscsi://%s/%s/%d", o.Portal, o.TargetName, lun), Transport: string(bench.TCP), CRC: crc}
	if o.ISER != nil {
		result.URL, result.Transport = fmt.Sprintf("iser://%s/%s/%d", o.Portal, o.TargetName, lun), string(bench.ISER)
	}
	if _, query, ok := strings.Cut(address, "?"); ok && query != "" {
		result.URL += "?" + query // options, of which none is secret
	}
	line := progressLine(c.stderr)
	result.Result, err = bench.Run(ctx, bench.Options{
		Pattern: bench.Pattern(f.rw), BlockSize: int(f.block), Depth: f.depth, Sessions: f.sessions, Duration: f.length,
		Offset: uint64(f.offset.Size), Size: uint64(f.extent.Size), FUA: f.fua, Seed: f.seed, Force: f.force,
		Open: bench.OpenLUN(o, lun), Progress: line.show,
	})
	line.clear()
	if err != nil {
		if ctx.Err() != nil && isBusy(err) {
			return fmt.Errorf("%s: interrupted while the target answered BUSY", result.URL)
		}
		return benchError(result.URL, lun, f, err)
	}
	if err := c.print(result, func(w io.Writer) { printBench(w, result) }); err != nil {
		return err
	}
	return verdict(ctx, result.Result, lun)
}

// benchTarget returns what to log in to, its unit, and whether CRCs are asked for.
func benchTarget(address string, f benchFlags) (o initiator.Options, lun uint16, crc bool, err error) {
	isISER := strings.HasPrefix(address, "iser:")
	switch f.crc {
	case "":
	case "on", "off":
		option := "crc=" + f.crc
		if !isISER {
			option = map[string]string{"on": "digests=required", "off": "digests=none"}[f.crc]
		}
		name, _, _ := strings.Cut(option, "=")
		if u, err := url.Parse(address); err == nil && u.Query().Has(name) {
			return o, 0, false, fmt.Errorf("--crc %s and %s=%s in the URL: use one of them", f.crc, name, u.Query().Get(name))
		}
		separator := "?"
		if strings.Contains(address, "?") {
			separator = "&"
		}
		address += separator + option
	default:
		return o, 0, false, fmt.Errorf("--crc %s: use on or off", f.crc)
	}
	if o, lun, err = initiator.ParseURL(address); err != nil {
		return o, 0, false, err
	}
	crc = o.DataDigest != initiator.DigestNone
	if isISER {
		u, err := url.Parse(address)
		crc = err == nil && u.Query().Get("crc") != "off"
	}
	chap, err := benchCHAP(o.CHAP)
	if err != nil {
		return o, 0, false, err
	}
	o.InitiatorName, o.QueueDepth, o.CHAP = f.initiator, f.depth, chap
	checked := o // not with the defaults of one session: each has an ISID of its own
	checked.EnsureDefaults()
	return o, lun, crc, checked.Validate()
}

// benchCHAP returns the credentials of the URL and the environment, nil if there are none.
func benchCHAP(given *initiator.CHAP) (*initiator.CHAP, error) {
	chap := &initiator.CHAP{
		User: os.Getenv("LIBISCSI_CHAP_USERNAME"), Secret: os.Getenv("LIBISCSI_CHAP_PASSWORD"),
		TargetUser: os.Getenv("LIBISCSI_CHAP_TARGET_USERNAME"), TargetSecret: os.Getenv("LIBISCSI_CHAP_TARGET_PASSWORD"),
	}
	if given != nil {
		chap.User, chap.Secret = given.User, given.Secret
	}
	if (chap.User == "") != (chap.Secret == "") {
		return nil, errors.New("set both LIBISCSI_CHAP_USERNAME and LIBISCSI_CHAP_PASSWORD, or neither")
	}
	if (chap.TargetUser == "") != (chap.TargetSecret == "") {
		return nil, errors.New("set both LIBISCSI_CHAP_TARGET_USERNAME and LIBISCSI_CHAP_TARGET_PASSWORD, or neither")
	}
	if chap.User == "" {
		return nil, nil
	}
	return chap, nil
}

// Login statuses (RFC 7143, 11.13.5) that a person can do something about.
const (
	loginInitiatorError   = 0x0200
	loginNotAuthenticated = 0x0201
	loginForbidden        = 0x0202
	loginNotFound         = 0x0203
	loginOutOfResources   = 0x0302
)

// noUnit is the additional sense code of LOGICAL UNIT NOT SUPPORTED.
const noUnit = 0x25

// benchError says what to do about an error of a run that measured nothing.
func benchError(address string, lun uint16, f benchFlags, err error) error {
	if errors.Is(err, bench.ErrOptions) {
		return api.Errorf(api.CodeInvalid, "%w", err)
	}
	if errors.Is(err, bench.ErrOverdue) {
		return fmt.Errorf("%s: %s", address, strings.TrimPrefix(err.Error(), "bench: "))
	}
	if errors.Is(err, bench.ErrInUse) {
		return fmt.Errorf("%s: %w: --force writes over it", address, err)
	}
	var refused *initiator.LoginError
	if errors.As(err, &refused) {
		switch uint16(refused.Status) {
		case loginInitiatorError:
			return fmt.Errorf("%s: %w: is the initiator's name right, and does the portal serve more than iSER (else use iser://)? The target's log has the reason", address, err)
		case loginOutOfResources:
			return fmt.Errorf("%s: %w: the target has no room for the session: end others, use less --depth or --sessions, or give it more memory (isergate: iser.memory)", address, err)
		case loginNotAuthenticated:
			return fmt.Errorf("%s: %w: the target asks for CHAP credentials, or they are not the right ones", address, err)
		case loginForbidden:
			return fmt.Errorf(`%s: %w: initiator %s may not log in: see "isergate acl add", or use --initiator`, address, err, f.initiator)
		case loginNotFound:
			return fmt.Errorf(`%s: %w: see "isergate target list" and "isergate acl list"`, address, err)
		}
	}
	if strings.HasPrefix(address, "iser:") && (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)) && !errors.Is(err, initiator.ErrConnection) {
		return fmt.Errorf("%s: %w: the portal may serve iSCSI over TCP only: use iscsi://", address, err)
	}
	return fmt.Errorf("%s: %w%s", address, err, unitHint(lun, err))
}

// unitHint says what to do about the sense data of a unit that is missing or not ready.
func unitHint(lun uint16, err error) string {
	var status *initiator.StatusError
	switch {
	case !errors.As(err, &status) || status.Status != initiator.CheckCondition:
	case status.Sense.Is(initiator.KeyIllegalRequest, noUnit, 0):
		return fmt.Sprintf(`: the target has no LUN %d: see "isergate target list"`, lun)
	case status.Sense.Key == initiator.KeyNotReady:
		return fmt.Sprintf(`: LUN %d is not ready: see "isergate volume list"`, lun)
	}
	return ""
}

func isBusy(err error) bool {
	var status *initiator.StatusError
	return errors.As(err, &status) && (status.Status == initiator.Busy || status.Status == initiator.TaskSetFull)
}

// verdict is the error of a run whose result was printed.
func verdict(ctx context.Context, r *bench.Result, lun uint16) error {
	if v := r.Verification; v != nil && v.Violations > 0 {
		errs := []error{fmt.Errorf("lost or wrong: %s", units.Count(v.Violations, "block"))}
		for _, d := range v.Details {
			errs = append(errs, errors.New(d))
		}
		return errors.Join(errs...)
	}
	busy := ""
	if r.Busy > 0 {
		busy = fmt.Sprintf("; the target answered BUSY %s", units.Count(r.Busy, "time"))
	}
	switch {
	case r.Permanent != nil:
		return fmt.Errorf("the run ended early, because the target refused %d operations in a row: %d of %s failed, the last with: %w%s", bench.PermanentErrors, r.Errors, units.Count(r.Operations+r.Errors, "operation"), r.Permanent, unitHint(lun, r.Permanent))
	case r.Errors > 0:
		return fmt.Errorf("%d of %s failed, the first with: %s%s", r.Errors, units.Count(r.Operations+r.Errors, "operation"), r.FirstError, busy)
	case ctx.Err() != nil:
		return ctx.Err()
	case r.Unfinished > 0:
		return fmt.Errorf("%s did not end within %v after --time%s", units.Count(r.Unfinished, "operation"), bench.DefaultGrace, busy)
	case r.Operations == 0:
		return fmt.Errorf("no operation was done: --time is too short%s", busy)
	}
	return nil
}

func printBench(w io.Writer, r benchResult) {
	crc := "off"
	if r.CRC {
		crc = "on"
	}
	row(w, "TARGET", r.URL)
	sessions := ""
	if r.Sessions > 1 {
		sessions = fmt.Sprintf(" in each of %d sessions", r.Sessions)
	}
	row(w, "LOAD", fmt.Sprintf("%s of %s, %d in flight%s, %s from %s on", r.Pattern, size(int64(r.BlockSize)), r.Depth, sessions, size(int64(r.Size)), size(int64(r.Offset))))
	row(w, "RUN", fmt.Sprintf("%.1f s over %s, CRC %s, seed %d", r.Elapsed.Seconds(), r.Transport, crc, r.Seed))
	row(w, "IOPS", fmt.Sprintf("%.0f", r.IOPS))
	row(w, "THROUGHPUT", fmt.Sprintf("%.1f MB/s", r.MBps))
	l := r.Latency
	row(w, "LATENCY", fmt.Sprintf("p50 %v  p90 %v  p99 %v  p99.9 %v  max %v", brief(l.P50), brief(l.P90), brief(l.P99), brief(l.P999), brief(l.Max)))
	row(w, "CPU", fmt.Sprintf("%v per operation, of this process", brief(time.Duration(r.CPUPerOp))))
	row(w, "ERRORS", r.Errors)
	if r.Unfinished > 0 {
		row(w, "UNFINISHED", units.Count(r.Unfinished, "operation")+", given up")
	}
	if r.Busy > 0 {
		row(w, "BUSY", "the target answered BUSY "+units.Count(r.Busy, "time"))
	}
	if v := r.Verification; v != nil {
		row(w, "VERIFIED", fmt.Sprintf("%s filled, %s, %s judged, whole range judged %s", units.Count(v.BlocksFilled, "block"), units.Count(v.Writes, "write"), units.Count(v.Reads, "read"), units.Count(v.Checks, "time")))
		found := units.Count(v.Violations, "block") + " lost or wrong"
		if !v.Complete && v.Violations == 0 {
			found += "; not finished"
		}
		row(w, "FOUND", found)
	}
}

// brief rounds a duration to three digits.
func brief(d time.Duration) time.Duration {
	unit := time.Duration(1)
	for d/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit)
}

// liveLine is one line on a terminal that is written again and again. Elsewhere it writes nothing.
type liveLine struct {
	terminal *os.File // nil: none
	last     bench.Progress
	shown    bool
}

func progressLine(w io.Writer) *liveLine {
	l := &liveLine{}
	if f, ok := w.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			l.terminal = f
		}
	}
	return l
}

// show writes the rates since it was last called.
func (l *liveLine) show(p bench.Progress) {
	if l.terminal == nil {
		return
	}
	seconds := (p.Elapsed - l.last.Elapsed).Seconds()
	if seconds <= 0 {
		return
	}
	busy := ""
	if p.Busy > 0 {
		busy = "  BUSY " + units.Count(p.Busy, "time")
	}
	fmt.Fprintf(l.terminal, "\r\x1b[K%3.0f s  %s  %.0f IOPS  %.1f MB/s  %s%s", p.Elapsed.Seconds(), p.Phase,
		float64(p.Operations-l.last.Operations)/seconds, float64(p.Bytes-l.last.Bytes)/seconds/1e6, units.Count(p.Errors, "error"), busy)
	l.last, l.shown = p, true
}

// clear takes the line away. Nothing is shown any more.
func (l *liveLine) clear() {
	if l.shown {
		fmt.Fprint(l.terminal, "\r\x1b[K")
	}
}
