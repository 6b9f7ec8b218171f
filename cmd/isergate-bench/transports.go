package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/cmd/isergate-bench/internal/nulltarget"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/bench"
)

// Names of targets of the comparison of transports.
const (
	overISER  = "iSER"
	overTCP   = "iSCSI/TCP"
	rawStream = "TCP stream"
)

// classStream is the class of a bare stream, which has neither a volume nor a CRC.
const classStream = "-"

// memoryBytes is the size of the volume in memory: it fits in the read cache's memory.
const memoryBytes = 64 << 20

// transportLoads are measured over both transports.
func transportLoads() []load {
	var all []load
	for _, l := range []load{{"4 KiB random", "", 4 << 10, 1}, {"4 KiB random", "", 4 << 10, 32}, {"256 KiB sequential", "", 256 << 10, 8}} {
		read, write := l, l
		read.name, write.name = l.name+" read", l.name+" write"
		read.pattern, write.pattern = bench.RandRead, bench.RandWrite
		if l.block > 4<<10 {
			read.pattern, write.pattern = bench.Read, bench.Write
		}
		all = append(all, read, write)
	}
	return all
}

// transports compares iSER with iSCSI over TCP: the same initiator against the same target, one after the other, and a bare TCP
// connection that moves as much.
type transports struct {
	h       *harness
	stream  *helper
	address string // of stream
	null    *helper
	units   []*transportUnit
}

// transportUnit is a unit that both transports reach.
type transportUnit struct {
	class       string
	pid         int
	portal, iqn string
	lun         uint16
	warm        func(ctx context.Context) error // before reads: what was written meanwhile is not in the read cache
	settle      func(ctx context.Context) error
	allocations func(ctx context.Context) (uint64, error)
	profile     func(ctx context.Context, name string, d time.Duration) error
}

// helper is this program in another role, in a process of its own that ends with its standard input.
type helper struct {
	process *process
	stdin   io.Closer
}

func (h *harness) newHelper(name, arg string, into any) (*helper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, arg)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	p, err := h.launcher.start(name, h.dir, cmd)
	if err != nil {
		return nil, err
	}
	if err := json.NewDecoder(bufio.NewReader(stdout)).Decode(into); err != nil {
		p.kill()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &helper{p, stdin}, nil
}

// close ends the process in good order.
func (p *helper) close() error {
	_ = p.stdin.Close()
	timer := time.AfterFunc(stopPatience, func() { _ = p.process.cmd.Process.Kill() })
	defer timer.Stop()
	<-p.process.done
	if p.process.err != nil {
		return fmt.Errorf("%s: %w", p.process.name, p.process.err)
	}
	return nil
}

// newTransports starts what is measured.
func (h *harness) newTransports(ctx context.Context) (_ *transports, err error) {
	t := &transports{h: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if t.stream, err = h.newHelper("bare TCP stream", streamArg, &t.address); err != nil {
		return nil, err
	}
	var null nulltarget.Addresses
	if t.null, err = h.newHelper("null target", nulltarget.Arg, &null); err != nil {
		return nil, err
	}
	t.units = append(t.units, &transportUnit{
		class: "null", pid: t.null.process.cmd.Process.Pid, portal: null.Portal, iqn: nulltarget.Target,
		warm:   func(context.Context) error { return nil },
		settle: func(context.Context) error { return nil },
		allocations: func(ctx context.Context) (uint64, error) {
			text, err := get(ctx, http.DefaultClient, "http://"+null.Debug+"/allocations")
			if err != nil {
				return 0, err
			}
			return strconv.ParseUint(string(text), 10, 64)
		},
		profile: func(ctx context.Context, name string, d time.Duration) error {
			return h.takeProfile(ctx, null.Debug, name, d)
		},
	})
	const volume = "memory"
	if !t.wanted(volume) {
		return t, nil
	}
	h.say("preparing: a journal of %d MiB is written once", h.o.Journal>>20)
	// CRCs are for the initiator to decide.
	g, err := h.newGateway(ctx, "isergate-transports", "", h.o.Journal, "iser:\n  no_crc: true\n", nil)
	if err != nil {
		return nil, err
	}
	v, err := g.create(ctx, volume, memoryBytes, "memory", h.o.Journal*3/4)
	if err != nil {
		return nil, err
	}
	if err := h.fill(ctx, v, memoryBytes); err != nil {
		return nil, err
	}
	if err := g.prepared(ctx); err != nil {
		return nil, err
	}
	t.units = append(t.units, &transportUnit{
		class: volume, warm: func(ctx context.Context) error { return h.pass(ctx, v, bench.Read, memoryBytes) }, pid: g.process.cmd.Process.Pid, portal: g.portal, iqn: targetName, settle: v.settle, profile: g.profile,
		allocations: func(ctx context.Context) (uint64, error) { return g.metric(ctx, "go_memstats_mallocs_total") },
	})
	return t, syncFS(h.dir)
}

// close ends what was started and has no other end.
func (t *transports) close() error {
	var errs []error
	for _, p := range []*helper{t.null, t.stream} {
		if p != nil {
			errs = append(errs, p.close())
		}
	}
	return errors.Join(errs...)
}

// className names a class: volume and CRC.
func className(volume string, crc bool) string {
	if crc {
		return volume + ", CRC on"
	}
	return volume + ", CRC off"
}

// wanted reports whether anything is to be measured on the volume.
func (t *transports) wanted(volume string) bool {
	for _, l := range transportLoads() {
		for _, target := range []string{overISER, overTCP} {
			for _, crc := range []bool{false, true} {
				if t.h.cases.MatchString(ID{l.name, l.depth, className(volume, crc), target}.String()) {
					return true
				}
			}
		}
	}
	return false
}

// round measures everything once. What goes first changes from round to round.
func (t *transports) round(ctx context.Context, round int) error {
	for _, u := range t.units {
		for _, crc := range []bool{false, true} {
			for _, l := range transportLoads() {
				type step struct {
					id      ID
					measure func() (Sample, error)
				}
				var steps []step
				for name, transport := range map[string]bench.Transport{overISER: bench.ISER, overTCP: bench.TCP} {
					id := ID{Load: l.name, Depth: l.depth, Class: className(u.class, crc), Target: name}
					steps = append(steps, step{id, func() (Sample, error) { return t.measure(ctx, u, id, l, transport, crc, round) }})
				}
				if u == t.units[0] && !crc {
					steps = append(steps, step{ID{Load: l.name, Depth: l.depth, Class: classStream, Target: rawStream}, func() (Sample, error) { return t.bare(ctx, l) }})
				}
				slices.SortFunc(steps, func(a, b step) int { return cmp.Compare(a.id.Target, b.id.Target) })
				for i := range steps {
					s := steps[(i+round)%len(steps)]
					if !t.h.cases.MatchString(s.id.String()) {
						continue
					}
					sample, err := s.measure()
					if err != nil {
						return err
					}
					t.h.record(round, s.id, sample)
				}
			}
		}
	}
	return nil
}

// measure puts a load on a unit over a transport.
func (t *transports) measure(ctx context.Context, u *transportUnit, id ID, l load, transport bench.Transport, crc bool, round int) (_ Sample, err error) {
	o := initiator.Options{Portal: u.portal, InitiatorName: initiatorName, TargetName: u.iqn}
	if err := bench.Carry(&o, transport, crc); err != nil {
		return Sample{}, err
	}
	b := bench.Options{Pattern: l.pattern, BlockSize: l.block, Depth: l.depth, Size: memoryBytes, Seed: uint64(round + 1), Duration: t.h.o.Time / 4}
	unit := &target{name: id.String(), open: bench.OpenLUN(o, u.lun)}
	if !l.writes() {
		if err := u.warm(ctx); err != nil {
			return Sample{}, err
		}
	}
	if _, err := t.h.bench(ctx, unit, b); err != nil { // to warm up
		return Sample{}, err
	}
	var profile sync.WaitGroup
	var profileErr error
	profiled := t.h.o.Profile != "" && round == 0
	if profiled {
		name := profileName(l.name, l.depth, id.Class+"-"+id.Target)
		own, err := ownProfile(filepath.Join(t.h.o.Profile, name+".client"))
		if err != nil {
			return Sample{}, err
		}
		defer func() { err = errors.Join(err, own()) }()
		profile.Go(func() { profileErr = u.profile(ctx, name, t.h.o.Time) })
	}
	used, err := processCPU(u.pid)
	if err != nil {
		return Sample{}, err
	}
	b.Duration, b.Seed = t.h.o.Time, b.Seed+1<<32
	var count sync.WaitGroup
	var rate float64
	var countErr error
	count.Go(func() { rate, countErr = u.allocationRate(ctx, t.h.o.Time) })
	r, err := t.h.bench(ctx, unit, b)
	count.Wait()
	err = errors.Join(err, countErr)
	if err != nil {
		return Sample{}, err
	}
	usedAfter, err := processCPU(u.pid)
	if err != nil {
		return Sample{}, err
	}
	profile.Wait()
	if profileErr != nil {
		return Sample{}, profileErr
	}
	s := benchSample(r, usedAfter-used)
	if r.Operations > 0 && !profiled {
		s.AllocsPerOp = rate * r.Elapsed.Seconds() / float64(r.Operations)
		s.ClientAllocsPerOp = float64(r.Allocations) / float64(r.Operations)
	}
	if l.writes() {
		return s, errors.Join(u.settle(ctx), syncFS(t.h.dir))
	}
	return s, nil
}

// allocationRate returns the allocations of the target in a second, in the middle of a load of that duration: the login is over then. What
// asking costs is not counted.
func (u *transportUnit) allocationRate(ctx context.Context, d time.Duration) (float64, error) {
	wait := func(d time.Duration) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := wait(d / 4); err != nil {
		return 0, err
	}
	first, err := u.allocations(ctx)
	if err != nil {
		return 0, err
	}
	asked := time.Now()
	second, err := u.allocations(ctx)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := wait(d / 2); err != nil {
		return 0, err
	}
	last, err := u.allocations(ctx)
	if err != nil {
		return 0, err
	}
	// first to second is asking once, and the load for as long as that took.
	long, short := time.Since(begin).Seconds(), begin.Sub(asked).Seconds()
	return max(0, float64(last-second)-float64(second-first)) / max(long-short, 1e-3), nil
}

// ownProfile records what harness.takeProfile records, of this process, until stop is called.
func ownProfile(name string) (stop func() error, err error) {
	allocations := func(suffix string) error {
		f, err := os.Create(name + suffix)
		if err != nil {
			return err
		}
		runtime.GC() // the profile is as of the last collection
		return errors.Join(pprof.Lookup("allocs").WriteTo(f, 0), f.Close())
	}
	if err := allocations(".before"); err != nil {
		return nil, err
	}
	f, err := os.Create(name + ".cpu")
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return errors.Join(f.Close(), allocations(".after"))
	}, nil
}

// bare measures the bare stream that moves what the load moves.
func (t *transports) bare(ctx context.Context, l load) (Sample, error) {
	shape := shape{Request: headerBytes, Answer: headerBytes + l.block}
	if l.writes() {
		shape.Request, shape.Answer = shape.Answer, shape.Request
	}
	if _, err := stream(ctx, t.address, shape, l.depth, l.block, t.h.o.Time/4); err != nil {
		return Sample{}, err
	}
	pid := t.stream.process.cmd.Process.Pid
	used, err := processCPU(pid)
	if err != nil {
		return Sample{}, err
	}
	r, err := stream(ctx, t.address, shape, l.depth, l.block, t.h.o.Time)
	if err != nil {
		return Sample{}, err
	}
	after, err := processCPU(pid)
	if err != nil {
		return Sample{}, err
	}
	client := r.CPU
	r.CPU = after - used
	s := rawSample(r)
	s.ClientCPUPerOp = micros(client) / float64(r.Operations)
	return s, nil
}

// processCPU returns the CPU time of a process without its children, to the nanosecond (clock_getcpuclockid(3)).
func processCPU(pid int) (time.Duration, error) {
	const sched = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &ts); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}
