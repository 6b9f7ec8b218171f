package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/objectstore/s3test"
)

// binary is the isergate that the tests measure.
var binary string

func TestMain(m *testing.M) {
	helperMain() // the harness starts itself
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "isergate-bench-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "isergate")
	build := exec.Command("go", "build", "-o", binary, "../isergate")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		return 1
	}
	return m.Run()
}

// noneLeft fails the test if processes that it started run, or files that it wrote lie around.
func noneLeft(t *testing.T, dir string) {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range descendants(all, os.Getpid()) {
		if p.pid != os.Getpid() {
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
			t.Errorf("process %d is left: %s", p.pid, bytes.ReplaceAll(name, []byte{0}, []byte{' '}))
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		t.Errorf("%s is left", e.Name())
	}
}

// small is a run that proves that the harness works, and measures nothing worth knowing.
func small(t *testing.T) Options {
	return Options{Isergate: binary, Dir: t.TempDir(), Rounds: 1, Time: 50 * time.Millisecond, Size: 16 << 20, Journal: 256 << 20, Destage: 192 << 20, NoTgt: true}
}

// complete checks that all measurements are there, and make sense.
func complete(t *testing.T, r *Report, want int) {
	t.Helper()
	if len(r.Measurements) != want {
		t.Errorf("%d measurements, want %d", len(r.Measurements), want)
	}
	worked := 0
	for _, m := range r.Measurements {
		s := m.Median
		// On a device that stalls for the whole of a short round nothing is done: that is a figure, not a fault.
		if len(m.Samples) != r.Options.Rounds || s.PerSecond < 0 || s.MBPerSecond < 0 || s.CPUPerOp < 0 || s.P99 < s.P50 {
			t.Errorf("%s: %+v", m.ID, s)
		}
		if s.Operations > 0 && s.PerSecond > 0 && s.MBPerSecond > 0 {
			worked++
		}
		if m.Slowest > s.PerSecond || m.Fastest < s.PerSecond {
			t.Errorf("%s: median %v is outside %v to %v", m.ID, s.PerSecond, m.Slowest, m.Fastest)
		}
	}
	if worked < want/2 {
		t.Errorf("only %d of %d loads did anything", worked, want)
	}
}

func TestRun(t *testing.T) {
	o := small(t)
	o.Parts.Targets = true
	r, err := run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	noneLeft(t, o.Dir)
	complete(t, r, 4+4+4+1+3) // reads, durable and volatile writes, 256 in flight, raw journal
	if len(r.Comparisons) != 3 {
		t.Errorf("%d comparisons, want the 3 with the raw journal", len(r.Comparisons))
	}
	var text, encoded bytes.Buffer
	if err := errors.Join(r.text(&text), r.json(&encoded)); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(encoded.Bytes(), &back); err != nil || len(back.Measurements) != len(r.Measurements) {
		t.Errorf("JSON: %v", err)
	}
	if !strings.Contains(text.String(), rawJournal) || !strings.Contains(r.markdown(), "| 4 KiB random write |") {
		t.Errorf("%s\n%s", text.String(), r.markdown())
	}
}

// TestRunTransports measures iSER beside iSCSI/TCP.
func TestRunTransports(t *testing.T) {
	o := small(t)
	o.Parts.Transports = true
	r, err := run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	noneLeft(t, o.Dir)
	complete(t, r, 2*2*2*6+6) // units, CRC off and on, transports, loads; and the bare streams
	if len(r.Transports) != 2*2*6 {
		t.Errorf("%d comparisons of transports", len(r.Transports))
	}
	for _, c := range r.Transports {
		if c.ISER.Operations == 0 || c.TCP.Operations == 0 || c.Stream.Operations == 0 || c.Rate <= 0 || c.Limit <= 0 {
			t.Errorf("%+v", c)
		}
	}
	var text bytes.Buffer
	if err := r.text(&text); err != nil || !strings.Contains(text.String(), "null, CRC on") {
		t.Errorf("%v\n%s", err, text.String())
	}
}

// TestRunStore measures what needs an S3 server.
func TestRunStore(t *testing.T) {
	s3test.New(t, s3test.Versitygw).Stop() // skips the test, or fails it, when there is none
	o := small(t)
	o.Parts.Store = true
	t.Setenv("TMPDIR", os.TempDir()) // restored after the run, which sets it
	r, err := run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	noneLeft(t, o.Dir)
	complete(t, r, 5+2+4)
	if len(r.Comparisons) != 3 {
		t.Errorf("%d comparisons, want destaging and two of cold reads", len(r.Comparisons))
	}
}

// A run that is broken off leaves nothing behind.
func TestRunCancelled(t *testing.T) {
	o := small(t)
	o.Parts.Targets, o.Rounds = true, 100
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o.Progress = writerFunc(func(p []byte) (int, error) {
		if strings.Contains(string(p), "random write") {
			cancel()
		}
		return len(p), nil
	})
	if _, err := run(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want a cancellation", err)
	}
	noneLeft(t, o.Dir)
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"-rounds", "0"}, {"-time", "1ms"}, {"-size", "1MiB"}, {"-journal", "1MiB"}, {"-destage", "8MiB"}, {"-size", "many"}, {"surplus"}, {"-nonsense"}} {
		var problems bytes.Buffer
		if err := command(t.Context(), args, &problems, &problems); !errors.Is(err, errUsage) || problems.Len() == 0 {
			t.Errorf("%q: %v, %s", args, err, &problems)
		}
	}
	if err := command(t.Context(), []string{"-isergate", filepath.Join(t.TempDir(), "none")}, t.Output(), t.Output()); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("a missing binary: %v", err)
	}
}

func TestParseStat(t *testing.T) {
	s, err := parseStat([]byte("12 (a) b ) (c) S 7 1 1 0 -1 4194560 1 2 3 4 250 50 30 20 20 0 1 0 5 6 7"))
	want := stat{pid: 12, parent: 7, own: 3 * time.Second, waited: 500 * time.Millisecond}
	if err != nil || s != want {
		t.Errorf("%+v, %v, want %+v", s, err, want)
	}
	for _, bad := range []string{"", "12", "12 (a", "12 (a) S", "x (a) S 7 1 1 0 -1 4194560 1 2 3 4 250 50 30 20 20", "12 (a) S 7 1 1 0 -1 4194560 1 2 3 4 y 50 30 20 20"} {
		if _, err := parseStat([]byte(bad)); !errors.Is(err, errStat) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if used, err := cpu(os.Getpid()); err != nil || used < 0 {
		t.Errorf("own CPU: %v, %v", used, err)
	}
}

func TestMedianAndRatios(t *testing.T) {
	if m := median([]float64{5, 1, 3}); m != 3 {
		t.Errorf("median %v, want 3", m)
	}
	if m := median([]float64{1, 2, 3, 10}); m != 2.5 {
		t.Errorf("median %v, want 2.5", m)
	}
	var r Report
	for round := range 3 { // the machine slows down from round to round; the ratio stays
		slow := float64(int(1) << round)
		id := ID{Load: "4 KiB random write", Depth: 32, Class: classDurable, Target: peerTgt}
		r.add(id, Sample{Operations: 1, PerSecond: 100 / slow, MBPerSecond: 10 / slow, P50: 10 * slow, P99: 20 * slow, CPUPerGB: 5})
		id.Target = ours
		r.add(id, Sample{Operations: 1, PerSecond: 200 / slow, MBPerSecond: 20 / slow, P50: 5 * slow, P99: 20 * slow, CPUPerGB: 1})
	}
	r.complete()
	if len(r.Comparisons) != 1 {
		t.Fatalf("%d comparisons", len(r.Comparisons))
	}
	if c := r.Comparisons[0]; c.Rate != 2 || c.P50 != 0.5 || c.P99 != 1 || c.CPU != 0.2 || c.Isergate.PerSecond != 100 || c.Other.PerSecond != 50 {
		t.Errorf("%+v", c)
	}
}

func TestReplaceFigures(t *testing.T) {
	var r Report
	for _, target := range []string{overISER, overTCP} {
		r.add(ID{"4 KiB random read", 1, "null, CRC on", target}, Sample{Operations: 1, PerSecond: 100, MBPerSecond: 1, CPUPerOp: 5})
	}
	r.complete()
	const before, after = "a\n<!-- bench begin -->\nkept\n<!-- bench end -->\nb\n<!-- bench transports begin -->\n", "<!-- bench transports end -->\nc\n"
	got, err := r.replaceIn(before + "old\n" + after)
	if err != nil || !strings.HasPrefix(got, before) || !strings.HasSuffix(got, after) || strings.Contains(got, "old") || !strings.Contains(got, "| 4 KiB random read | 1 | null, CRC on |") {
		t.Errorf("%v, %s", err, got)
	}
	for _, bad := range []string{"", "<!-- bench begin -->\n<!-- bench end -->", "<!-- bench transports end --><!-- bench transports begin -->"} {
		if _, err := r.replaceIn(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if len(r.Transports) != 1 || r.Transports[0].Rate != 1 || r.Transports[0].CPU != 1 || r.Transports[0].Limit != 0 {
		t.Errorf("%+v", r.Transports)
	}
}
