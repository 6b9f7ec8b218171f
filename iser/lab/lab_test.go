package lab_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isergate/isergate/iser/lab"
	"github.com/isergate/isergate/iser/lab/labtest"
)

// Guests that were made from other inputs do not pile up; nothing else is touched.
func TestBuildRemovesOldGuests(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir, err := lab.Dir()
	if err != nil {
		t.Fatal(err)
	}
	cache := filepath.Dir(dir)
	kept := []string{filepath.Base(dir), "lab-downloads", "lab-notes", "lab-0123456789abcdef", "other"}
	for _, name := range append([]string{"lab-0123456789ab", "lab-new-12345"}, kept...) {
		if err := os.MkdirAll(filepath.Join(cache, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(cache, name, "disk.img"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if got, err := lab.Build(t.Context(), io.Discard); err != nil || got != dir {
			t.Fatalf("%q, %v", got, err)
		}
	}
	var left []string
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			left = append(left, e.Name())
		}
	}
	slices.Sort(kept)
	if !slices.Equal(left, kept) {
		t.Errorf("left are %q, want %q", left, kept)
	}
}

// What scripts do is theirs; that they run, end and are ended is the lab's.
func TestGuest(t *testing.T) {
	g := labtest.Boot(t, lab.Options{})

	if out := g.Run("uname -s; echo to stderr >&2"); out != "Linux\nto stderr\n" {
		t.Errorf("%q", out)
	}
	var exit *lab.ExitError
	if _, err := g.Try("false; echo not reached"); !errors.As(err, &exit) || exit.Code != 1 || exit.Output != "" {
		t.Errorf("a script that fails: %v", err)
	}
	if _, err := g.Try("kill -TERM $$"); labtest.Exit(err) != 143 {
		t.Errorf("a script that is ended by a signal: %v", err)
	}
	// More than any buffer between here and there holds.
	if out := g.Run("seq 200000"); !strings.HasSuffix(out, "\n200000\n") || strings.Count(out, "\n") != 200000 {
		t.Errorf("%d bytes", len(out))
	}

	// Two at once, one of which waits for the other.
	first := g.Start("until_true 60 test -e /run/go; echo gone")
	g.Run("touch /run/go")
	if out := first.Wait(); out != "gone\n" {
		t.Errorf("%q", out)
	}

	// A script whose time is up is killed, with what it started.
	ctx, cancel := context.WithCancel(t.Context())
	long := g.Start("sleep 1000 & wait")
	cancel()
	if _, err := long.Command.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-long.Done()
	if out := g.Run("pgrep -x sleep || echo none"); out != "none\n" {
		t.Errorf("%q", out)
	}

	// The software RNIC and both of its modules.
	if out := g.Run("rnic; rdma link show; rnic mpa_version=1 rtr_type=64; cat /sys/module/siw/parameters/{mpa_version,rtr_type}"); !strings.Contains(out, "state ACTIVE") || !strings.HasSuffix(out, "\n1\n64\n") {
		t.Errorf("%q", out)
	}

	waiting := g.Start("sleep 1000")
	g.Close()
	if _, err := waiting.Command.Wait(t.Context()); !errors.Is(err, lab.ErrGone) {
		t.Errorf("a script of a guest that is gone: %v", err)
	}
	if _, err := g.Try("true"); !errors.Is(err, lab.ErrGone) {
		t.Errorf("a script for a guest that is gone: %v", err)
	}
}

// The kernel's initiator and target have each other in one guest: what fails here is the lab.
func TestKernelAlone(t *testing.T) {
	l := labtest.ServeLIO(t, labtest.LIOOptions{})
	out := l.Run(`
initiator
for how in iser:3260 tcp:3261; do
	transport=${how%:*} portal=10.0.2.15:${how#*:} target=` + l.Target + `
	node $transport $portal $target
	disk=$(login $transport $portal $target)
	head -c 1M /dev/urandom >/run/pattern
	dd if=/run/pattern of=$disk bs=64k oflag=direct status=none
	dd if=$disk bs=64k count=16 iflag=direct status=none | cmp - /run/pattern
	echo $transport $(state $transport $target)
	logout $transport $portal $target
done`)
	if out != "iser LOGGED_IN\ntcp LOGGED_IN\n" {
		t.Errorf("%s", out)
	}
}
