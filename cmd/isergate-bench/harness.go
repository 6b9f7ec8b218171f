package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/iser/initiator/bench"
)

// Options say what is measured, and how long. Sizes are bytes.
type Options struct {
	Isergate string        `json:"-"` // the binary
	Dir      string        `json:"-"` // where the data of all targets goes, in a directory that is removed again
	Rounds   int           `json:"rounds"`
	Time     time.Duration `json:"time_ns"`       // of one measurement, after a quarter of it to warm up
	Size     int64         `json:"size_bytes"`    // of each LUN of the first part
	Journal  int64         `json:"journal_bytes"` // of a gateway
	Destage  int64         `json:"destage_bytes"` // written, destaged and read cold in each round; at least 16 objects
	NoTgt    bool          `json:"-"`             // leave the peer out
	Parts    Parts         `json:"parts"`
	Profile  string        `json:"profile,omitempty"`
	Cases    string        `json:"cases,omitempty"` // regular expression; empty: all
	Progress io.Writer     `json:"-"`
}

// Parts are what a run consists of. No part means all of them.
type Parts struct {
	Targets    bool `json:"targets"`    // isergate, tgt and the bare append and fdatasync loop
	Store      bool `json:"store"`      // destaging and cold reads
	Transports bool `json:"transports"` // iSER and iSCSI/TCP
}

// Classes of a measurement: what a write that is answered survives.
const (
	classRead     = "read"
	classDurable  = "durable"  // on the disk, synced
	classVolatile = "volatile" // in memory
	classHeld     = "durable, nothing destaged"
	classDestage  = "destage"
	classCold     = "cold"
)

// load is one kind of load.
type load struct {
	name    string
	pattern bench.Pattern
	block   int
	depth   int
}

func (l load) writes() bool { return l.pattern == bench.RandWrite || l.pattern == bench.Write }

// loads of the first part, in order.
func loads() []load {
	var all []load
	for _, l := range []load{
		{"4 KiB random read", bench.RandRead, 4 << 10, 0}, {"256 KiB sequential read", bench.Read, 256 << 10, 0},
		{"4 KiB random write", bench.RandWrite, 4 << 10, 0}, {"256 KiB sequential write", bench.Write, 256 << 10, 0},
	} {
		for _, depth := range []int{1, 32} {
			l.depth = depth
			all = append(all, l)
		}
	}
	return append(all, load{"4 KiB random write", bench.RandWrite, 4 << 10, deepest})
}

const (
	// deepest is measured against the raw limit of the disk only.
	deepest = 256
	// sessionDepth is the command window of an isergate session; more is spread over sessions.
	sessionDepth = 128
	// fillBlock is what files and volumes are filled and warmed with.
	fillBlock = 256 << 10
	fillDepth = 16
	// destageParallel and objectBytes are isergate's defaults: puts under way for a volume, and payload of an object.
	destageParallel = 8
	objectBytes     = 8 << 20
	// frameBytes is the smallest piece of an object that can be verified, and so what a cold read of 4 KiB gets.
	frameBytes = 64 << 10
	coldDepth  = 32
)

// target is something that is measured. cpu is the CPU time that its process has used; settle returns when nothing of what
// was written is left to do.
type target struct {
	name    string
	cpu     func() (time.Duration, error)
	open    func(ctx context.Context) (*bench.Opened, error)
	settle  func(ctx context.Context) error
	most    int64                                                         // bytes that may be written before settle; 0: any
	profile func(ctx context.Context, name string, d time.Duration) error // nil: cannot
}

// harness is one run.
type harness struct {
	o        Options
	dir      string
	cases    *regexp.Regexp
	launcher *launcher
	report   *Report

	gateway  *gateway
	tgt      *tgt               // nil: not measured
	rawFile  string             // pre-zeroed
	readable *target            // of gateway: filled, in the bucket, and in the read cache
	durable  *target            // of gateway: ack=local
	volatile *target            // of gateway: ack=memory
	peer     map[string]*target // by class
}

// run measures everything. Nothing that it started runs, and nothing that it wrote is left, when it returns.
func run(ctx context.Context, o Options) (_ *Report, err error) {
	cases, err := regexp.Compile(o.Cases)
	if err != nil {
		return nil, err
	}
	if o.Isergate, err = filepath.Abs(o.Isergate); err != nil {
		return nil, err
	}
	if _, err := os.Stat(o.Isergate); err != nil {
		return nil, fmt.Errorf("the isergate binary: %w: build it with \"make build\", or name it with -isergate", err)
	}
	if o.Profile != "" {
		if err := os.MkdirAll(o.Profile, 0o755); err != nil {
			return nil, err
		}
	}
	// The path of the API's socket must be short.
	dir, err := os.MkdirTemp(o.Dir, "isb-")
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	h := &harness{o: o, dir: dir, cases: cases, launcher: newLauncher(), report: &Report{Machine: machine(dir), Options: o}}
	defer func() {
		if h.tgt != nil {
			h.tgt.close()
		}
		h.launcher.close()
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	h.report.Machine.Isergate = output(o.Isergate, "version")
	if o.Parts == (Parts{}) {
		o.Parts = Parts{Targets: true, Store: true, Transports: true}
	}
	var store *store
	var transports *transports
	if o.Parts.Transports {
		if transports, err = h.newTransports(ctx); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, transports.close()) }()
	}
	if o.Parts.Targets {
		if err := h.prepare(ctx); err != nil {
			return nil, err
		}
	}
	if o.Parts.Store {
		if store, err = h.newStore(ctx); err != nil {
			return nil, err
		}
	}
	if store != nil {
		defer store.close()
	}
	for round := range o.Rounds {
		h.say("round %d of %d, load average %s", round+1, o.Rounds, loadAverage())
		if transports != nil {
			if err := transports.round(ctx, round); err != nil {
				return nil, err
			}
		}
		if o.Parts.Targets {
			if err := h.round(ctx, round); err != nil {
				return nil, err
			}
		}
		if store != nil {
			if err := store.round(ctx, round); err != nil {
				return nil, err
			}
		}
	}
	h.report.Machine.LoadAfter = loadAverage()
	h.report.complete()
	return h.report, nil
}

func (h *harness) say(format string, args ...any) {
	if h.o.Progress != nil {
		fmt.Fprintf(h.o.Progress, format+"\n", args...)
	}
}

// prepare starts isergate and tgt and fills their LUNs.
func (h *harness) prepare(ctx context.Context) (err error) {
	h.say("preparing: two journals of %d MiB are written once", h.o.Journal>>20)
	if h.gateway, err = h.newGateway(ctx, "isergate", "", h.o.Journal, "", nil); err != nil {
		return err
	}
	for _, v := range []struct {
		name, ack string
		to        **target
	}{{"read", "local", &h.readable}, {"durable", "local", &h.durable}, {"volatile", "memory", &h.volatile}} {
		if *v.to, err = h.gateway.create(ctx, v.name, h.o.Size, v.ack, 0); err != nil {
			return err
		}
		if err := h.fill(ctx, *v.to, h.o.Size); err != nil {
			return err
		}
	}
	if err := h.pass(ctx, h.readable, bench.Read, h.o.Size); err != nil { // into the read cache
		return err
	}
	h.peer = map[string]*target{}
	if !h.o.NoTgt {
		h.tgt, err = h.newTgt(ctx, h.o.Size)
		switch {
		case errors.Is(err, errNoTgt):
			h.report.Notes = append(h.report.Notes, err.Error()+".")
			h.say("%v", err)
		case err != nil:
			return err
		default:
			h.report.Machine.Tgt = output("tgtd", "--version")
			h.peer[classVolatile], h.peer[classDurable] = h.tgt.unit(1), h.tgt.unit(2)
			h.peer[classRead] = h.peer[classVolatile]
			for _, t := range []*target{h.peer[classVolatile], h.peer[classDurable]} {
				if err := h.fill(ctx, t, h.o.Size); err != nil {
					return err
				}
			}
		}
	}
	h.rawFile = filepath.Join(h.dir, "raw")
	if err := zeroFile(h.rawFile, h.o.Size); err != nil {
		return err
	}
	if err := h.gateway.prepared(ctx); err != nil {
		return err
	}
	return syncFS(h.dir)
}

// fill writes all of a target once and waits until it has come to rest.
func (h *harness) fill(ctx context.Context, t *target, size int64) error {
	if err := h.pass(ctx, t, bench.Write, size); err != nil {
		return err
	}
	return t.settle(ctx)
}

// pass reads or writes size bytes once.
func (h *harness) pass(ctx context.Context, t *target, pattern bench.Pattern, size int64) error {
	_, err := h.bench(ctx, t, bench.Options{Pattern: pattern, BlockSize: fillBlock, Depth: fillDepth, Count: uint64(size / fillBlock), Size: uint64(size)})
	return err
}

// bench is bench.Run where an operation that failed is an error.
func (h *harness) bench(ctx context.Context, t *target, o bench.Options) (*bench.Result, error) {
	o.Open, o.Force = t.open, true // all that is measured is ours
	r, err := bench.Run(ctx, o)
	if err == nil {
		err = ctx.Err()
	}
	if err == nil && r.Errors > 0 {
		err = fmt.Errorf("%d of %d operations failed, the first with: %s", r.Errors, r.Operations+r.Errors, r.FirstError)
	}
	if err != nil {
		return nil, fmt.Errorf("%s, %s of %d bytes at depth %d: %w", t.name, o.Pattern, o.BlockSize, o.Depth, err)
	}
	return r, nil
}

// zeroFile makes a file of zeros that are really written.
func zeroFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	zeros := make([]byte, 1<<20)
	for left := size; left > 0; left -= int64(len(zeros)) {
		if _, err := f.Write(zeros[:min(left, int64(len(zeros)))]); err != nil {
			return err
		}
	}
	return f.Sync()
}

// syncFS writes back what the file system of dir holds in memory, so that no measurement pays for the one before.
func syncFS(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// round measures all loads on all targets once. What goes first changes from round to round.
func (h *harness) round(ctx context.Context, round int) error {
	for _, l := range loads() {
		type step struct {
			class, target string
			measure       func() (Sample, error)
		}
		var steps []step
		add := func(class string, t *target) {
			if t != nil {
				steps = append(steps, step{class, t.name, func() (Sample, error) { return h.measure(ctx, t, l, class, round) }})
			}
		}
		switch {
		case !l.writes():
			add(classRead, h.readable)
			add(classRead, h.peer[classRead])
		case l.depth == deepest:
			add(classDurable, h.durable)
		default:
			add(classDurable, h.durable)
			add(classDurable, h.peer[classDurable])
			add(classVolatile, h.volatile)
			add(classVolatile, h.peer[classVolatile])
		}
		if l.pattern == bench.RandWrite {
			steps = append(steps, step{classDurable, rawJournal, func() (Sample, error) {
				r, err := h.rawLimit(ctx, task{Kind: "journal", Path: h.rawFile, Depth: l.depth, Duration: h.o.Time}, nil)
				return rawSample(r), err
			}})
		}
		for i := range steps {
			s := steps[(i+round)%len(steps)]
			id := ID{Load: l.name, Depth: l.depth, Class: s.class, Target: s.target}
			if !h.cases.MatchString(id.String()) {
				continue
			}
			sample, err := s.measure()
			if err != nil {
				return err
			}
			h.record(round, id, sample)
		}
	}
	return nil
}

func (h *harness) record(round int, id ID, s Sample) {
	h.report.add(id, s)
	h.say("%d  %-62s %9.0f/s %8.1f MB/s  p50 %8.0f µs  p99 %8.0f µs  CPU %7.1f µs/op", round+1, id, s.PerSecond, s.MBPerSecond, s.P50, s.P99, s.CPUPerOp)
}

// measure puts a load on a target.
func (h *harness) measure(ctx context.Context, t *target, l load, class string, round int) (Sample, error) {
	sessions := max(1, l.depth/sessionDepth)
	o := bench.Options{Pattern: l.pattern, BlockSize: l.block, Depth: l.depth / sessions, Sessions: sessions, Size: uint64(h.o.Size),
		Seed: uint64(round + 1), Duration: h.o.Time / 4, Count: uint64(t.most/4) / uint64(l.block)}
	first, err := t.cpu()
	if err != nil {
		return Sample{}, err
	}
	warm, err := h.bench(ctx, t, o)
	if err != nil {
		return Sample{}, err
	}
	var profile sync.WaitGroup
	var profileErr error
	if t.profile != nil && round == 0 {
		profile.Go(func() {
			profileErr = t.profile(ctx, profileName(l.name, l.depth, class), h.o.Time)
		})
	}
	o.Duration, o.Count, o.Seed = h.o.Time, 3*o.Count, o.Seed+1<<32
	before, err := t.cpu()
	if err != nil {
		return Sample{}, err
	}
	r, err := h.bench(ctx, t, o)
	if err != nil {
		return Sample{}, err
	}
	after, err := t.cpu()
	if err != nil {
		return Sample{}, err
	}
	profile.Wait()
	if profileErr != nil {
		return Sample{}, profileErr
	}
	s := benchSample(r, after-before)
	if l.writes() {
		if err := t.settle(ctx); err != nil {
			return Sample{}, err
		}
		last, err := t.cpu()
		if err != nil {
			return Sample{}, err
		}
		s.CPUPerOpSettled = micros(last-first) / float64(warm.Operations+r.Operations)
		if err := syncFS(h.dir); err != nil {
			return Sample{}, err
		}
	}
	return s, nil
}

func profileName(load string, depth int, class string) string {
	return strings.NewReplacer(" ", "-", "/", "-", ",", "").Replace(fmt.Sprintf("%s-d%d-%s", load, depth, class))
}
