// Package labtest gives tests a guest of package lab, and ends it with them.
package labtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/lab"
)

// Limit is how long a script of a test may take: many times what it needs on a machine
// that does nothing else.
const Limit = 5 * time.Minute

// consoleLimit is how much of a console is logged.
const consoleLimit = 12000

// Guest is a guest that ends with its test. A test that failed logs its console.
type Guest struct {
	*lab.Guest
	t testing.TB
}

// Boot starts a guest. On a machine that has not what it takes the test is skipped, or
// fails if ISERGATE_REQUIRE_ALL=1; under -short it is skipped.
func Boot(t testing.TB, o lab.Options) *Guest {
	t.Helper()
	if testing.Short() {
		t.Skip("a guest takes long")
	}
	if _, err := lab.Find(); err != nil {
		if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
			t.Fatalf("ISERGATE_REQUIRE_ALL=1 asks for the guest: %v", err)
		}
		t.Skip(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), Limit)
	defer cancel()
	start := time.Now()
	guest, err := lab.Boot(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		guest.Close()
		if t.Failed() {
			console := guest.Console()
			if cut := len(console) - consoleLimit; cut > 0 {
				_, console, _ = strings.Cut(console[cut:], "\n") // whole lines
			}
			t.Logf("the end of the guest's console:\n%s", console)
		}
	})
	t.Logf("the guest is up after %v", time.Since(start).Round(100*time.Millisecond))
	return &Guest{guest, t}
}

// On returns the same guest for a subtest.
func (g *Guest) On(t testing.TB) *Guest { return &Guest{g.Guest, t} }

// Try runs a script and returns what it printed.
func (g *Guest) Try(script string) (string, error) {
	ctx, cancel := context.WithTimeout(g.t.Context(), Limit)
	defer cancel()
	return g.Guest.Run(ctx, script)
}

// Run runs a script that has to succeed.
func (g *Guest) Run(script string) string {
	g.t.Helper()
	out, err := g.Try(script)
	if err != nil {
		g.t.Fatalf("%v\nthe script:\n%s\nwhat it printed:\n%s", err, script, out)
	}
	return out
}

// Running is a script that was started.
type Running struct {
	*lab.Command
	guest  *Guest
	script string
}

// Start starts a script.
func (g *Guest) Start(script string) *Running {
	g.t.Helper()
	c, err := g.Guest.Start(script)
	if err != nil {
		g.t.Fatal(err)
	}
	return &Running{c, g, script}
}

// Wait waits for a script that has to succeed, and returns what it printed.
func (r *Running) Wait() string {
	r.guest.t.Helper()
	ctx, cancel := context.WithTimeout(r.guest.t.Context(), Limit)
	defer cancel()
	out, err := r.Command.Wait(ctx)
	if err != nil {
		r.guest.t.Fatalf("%v\nthe script:\n%s\nwhat it printed:\n%s", err, r.script, out)
	}
	return out
}

// LIOOptions say how LIO serves. The zero value is LIO's defaults.
type LIOOptions struct {
	RNIC       []string // switches of soft-iWARP, as lib.sh's rnic takes them
	Parameters []string // login parameters, as InitialR2T=No
}

// LIO is the kernel's target in a guest: over soft-iWARP on ISER, over TCP on TCP, both
// addresses of this machine. Two targets are on both.
type LIO struct {
	*Guest
	ISER, TCP string

	Target string // open to all; LUN 0 is a RAM disk of 64 MiB

	// The second target lets Initiator in, by mutual CHAP; LUN 0 has 16 MiB.
	CHAPTarget, Initiator    string
	User, Secret             string
	TargetUser, TargetSecret string
}

// ServeLIO boots a guest whose kernel is a target, until the test ends. (LIO over
// soft-iWARP may lose a first Send that follows the MPA reply at once; the kernel's
// initiator never sends so early. Wait half a second, or try again.)
func ServeLIO(t testing.TB, o LIOOptions) *LIO {
	t.Helper()
	const iser, tcp = 3260, 3261
	l := &LIO{
		Guest:      Boot(t, lab.Options{Forward: []int{iser, tcp}}),
		Target:     "iqn.2003-01.org.linux-iscsi:lab",
		CHAPTarget: "iqn.2003-01.org.linux-iscsi:lab.chap",
		Initiator:  "iqn.2026-01.com.example:initiator",
		User:       "user", Secret: "the user's secret",
		TargetUser: "target", TargetSecret: "the target's secret",
	}
	l.ISER, l.TCP = l.Forwarded(iser), l.Forwarded(tcp)
	l.Run(fmt.Sprintf("open=%s chap=%s address=%s iser=%d tcp=%d\n", l.Target, l.CHAPTarget, lab.Address, iser, tcp) +
		fmt.Sprintf("rnic %s\n", strings.Join(o.RNIC, " ")) +
		fmt.Sprintf("lio $open 64 %[1]s\nlio $chap 16 %[1]s\n", strings.Join(o.Parameters, " ")) +
		fmt.Sprintf("lio_chap $chap %s %s %q %s %q\n", l.Initiator, l.User, l.Secret, l.TargetUser, l.TargetSecret) + `
for target in $open $chap; do
	lio_portal iser $address:$iser $target
	lio_portal tcp $address:$tcp $target
done`)
	return l
}

// Portal is the address at which a guest reaches what listens on an address of this
// machine's loopback.
func Portal(t testing.TB, listen string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(listen)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort(lab.Host, port)
}

// Exit returns the exit status of a script that failed, and -1 for other errors.
func Exit(err error) int {
	var exit *lab.ExitError
	if errors.As(err, &exit) {
		return exit.Code
	}
	return -1
}
