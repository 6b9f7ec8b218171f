// Command isergate-bench measures isergate beside a peer and beside what disk and object store can do at most, all in one
// run on one machine. It is a developer's program; "make bench" runs it.
//
// Four kinds of figures, each with the ratio to isergate in the same round:
//   - Debian's tgt with a file as LUN, over loopback iSCSI with the same client: small random and large sequential operations, one
//     and 32 in flight, writes both durable and not;
//   - a bare append and fdatasync loop with as many writers;
//   - iSER over the software RNIC beside iSCSI/TCP, with isergate's own initiator, a unit that keeps nothing or a volume in memory,
//     and a bare TCP connection that moves as much;
//   - bare PUTs and ranged GETs of the same objects at the same S3 server, against destaging and cold reads.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/isergate/isergate/cmd/isergate-bench/internal/nulltarget"
	"github.com/isergate/isergate/gateway/units"
)

func main() {
	helperMain()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "isergate-bench:", err)
		os.Exit(1)
	}
}

// helperMain does not return in a process that the harness started for something beside itself.
func helperMain() {
	if len(os.Args) != 2 {
		return
	}
	role, known := map[string]func(io.Reader, io.Writer) error{workerArg: worker, nulltarget.Arg: nulltarget.Main, streamArg: streamTarget}[os.Args[1]]
	if !known {
		return
	}
	if err := role(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// errUsage: the command line is wrong, which was said.
var errUsage = errors.New("wrong command line")

// command is the program behind its flags.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := Options{Progress: stderr}
	size, journal, destage := 256*units.MiB, 4*units.GiB, 512*units.MiB
	var quick bool
	var parts string
	var jsonFile, markdownFile string
	flags := flag.NewFlagSet("isergate-bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.Isergate, "isergate", "bin/isergate", "the `binary` to measure")
	flags.StringVar(&o.Dir, "dir", "", "`directory` for the data of all targets, several GiB (default $TMPDIR)")
	flags.IntVar(&o.Rounds, "rounds", 3, "rounds; figures are medians of them")
	flags.DurationVar(&o.Time, "time", 1500*time.Millisecond, "length of one measurement")
	flags.TextVar(&size, "size", size, "`bytes` of a LUN")
	flags.TextVar(&journal, "journal", journal, "`bytes` of isergate's journal")
	flags.TextVar(&destage, "destage", destage, "`bytes` that are destaged and read cold in each round")
	flags.BoolVar(&quick, "quick", false, "a run of less than a minute, to see whether anything broke")
	flags.StringVar(&o.Cases, "cases", "", "measure only what matches this regular `expression`, such as \"random read depth=32\"")
	flags.StringVar(&parts, "parts", "targets,store,transports", "`parts` of the run: targets (isergate, tgt, the append loop), store (destaging and cold reads), transports (iSER and iSCSI/TCP)")
	flags.StringVar(&o.Profile, "profile", "", "write CPU and allocation profiles of isergate to this `directory`, one for each load")
	flags.StringVar(&jsonFile, "json", "", "write the report as JSON to this `file`, - for standard output")
	flags.StringVar(&markdownFile, "markdown", "", "write the report for the README to this `file`, - for standard output; in a file that exists, what is between \"<!-- bench begin -->\" and \"<!-- bench end -->\", and between \"<!-- bench transports begin -->\" and \"<!-- bench transports end -->\", is replaced")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	if quick {
		given := map[string]bool{}
		flags.Visit(func(f *flag.Flag) { given[f.Name] = true })
		for _, f := range []struct {
			name  string
			apply func()
		}{
			{"rounds", func() { o.Rounds = 1 }}, {"time", func() { o.Time = 300 * time.Millisecond }}, {"size", func() { size = 64 * units.MiB }},
			{"journal", func() { journal = 512 * units.MiB }}, {"destage", func() { destage = 192 * units.MiB }},
		} {
			if !given[f.name] {
				f.apply()
			}
		}
	}
	o.Size, o.Journal, o.Destage = int64(size), int64(journal), int64(destage)
	if err := errors.Join(o.validate(), o.Parts.parse(parts), extra(flags.Args())); err != nil {
		fmt.Fprintln(stderr, err)
		return errUsage
	}
	report, err := run(ctx, o)
	if err != nil {
		return err
	}
	if jsonFile != "-" && markdownFile != "-" {
		if err := report.text(stdout); err != nil {
			return err
		}
	}
	if jsonFile != "" {
		var b strings.Builder
		if err := report.json(&b); err != nil {
			return err
		}
		if err := write(jsonFile, b.String(), stdout); err != nil {
			return err
		}
	}
	if markdownFile != "" {
		figures := report.markdown()
		if text, err := os.ReadFile(markdownFile); err == nil && markdownFile != "-" {
			if figures, err = report.replaceIn(string(text)); err != nil {
				return fmt.Errorf("%s: %w", markdownFile, err)
			}
		}
		return write(markdownFile, figures, stdout)
	}
	return nil
}

// parse reads names of parts, separated by commas.
func (p *Parts) parse(text string) error {
	for name := range strings.SplitSeq(text, ",") {
		switch name {
		case "targets":
			p.Targets = true
		case "store":
			p.Store = true
		case "transports":
			p.Transports = true
		default:
			return fmt.Errorf("-parts %s: %q is none of targets, store and transports", text, name)
		}
	}
	return nil
}

func extra(args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("no arguments are expected: %q", args)
}

// write writes text to a file, or to stdout for -.
func write(file, text string, stdout io.Writer) error {
	if file == "-" {
		_, err := io.WriteString(stdout, text)
		return err
	}
	return os.WriteFile(file, []byte(text), 0o644)
}

// validate reports every fault of the options at once.
func (o *Options) validate() error {
	var errs []error
	if o.Rounds < 1 || o.Rounds > 100 {
		errs = append(errs, fmt.Errorf("-rounds %d is outside 1 to 100", o.Rounds))
	}
	if o.Time < 50*time.Millisecond || o.Time > time.Hour {
		errs = append(errs, fmt.Errorf("-time %v is outside 50ms to 1h", o.Time))
	}
	if o.Size < 16<<20 || o.Size%fillBlock != 0 {
		errs = append(errs, fmt.Errorf("-size must be a multiple of %d KiB, at least 16 MiB", fillBlock>>10))
	}
	if o.Journal < 256<<20 {
		errs = append(errs, errors.New("-journal is less than 256 MiB"))
	}
	if o.Destage < 3*destageParallel*objectBytes || o.Destage%fillBlock != 0 {
		errs = append(errs, fmt.Errorf("-destage must be a multiple of %d KiB, at least %d MiB", fillBlock>>10, 3*destageParallel*objectBytes>>20))
	}
	return errors.Join(errs...)
}
