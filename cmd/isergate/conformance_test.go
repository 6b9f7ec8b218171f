package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
)

// libiscsi's conformance suite, iscsi-test-cu, as Debian 12 has it (1.19.0), against the running program: test by
// test, each in a process of its own, over several kinds of LUN. What does not pass is listed here with its reason, and
// the lists are kept true: a test that is listed and passes is a failure as well.

// outcome is how a test of the suite ended. The better one is the larger one.
type outcome int

const (
	failed outcome = iota // a failed assertion, no result in time, or a tool that died
	skipped
	passed
)

func (o outcome) String() string { return [...]string{"fail", "skip", "pass"}[o] }

// skippedSuites are the suites all of whose tests are skipped on every LUN, and why.
var skippedSuites = map[string]string{
	"ExtendedCopy":           "EXTENDED COPY is later",
	"ReceiveCopyResults":     "EXTENDED COPY is later",
	"PrinReadKeys":           "persistent reservations are later",
	"PrinServiceactionRange": "persistent reservations are later",
	"PrinReportCapabilities": "persistent reservations are later",
	"ProutRegister":          "persistent reservations are later",
	"ProutReserve":           "persistent reservations are later",
	"ProutClear":             "persistent reservations are later",
	"ProutPreempt":           "persistent reservations are later",
	"Sanitize":               "SANITIZE is not implemented",
	"WriteAtomic16":          "WRITE ATOMIC is not implemented",
	"NoMedia":                "volumes are not removable",
	"PreventAllow":           "volumes are not removable",
	"StartStopUnit":          "volumes are not removable",
	"ReadOnly":               "volumes are not write-protected",
}

// exception is a test that does not pass on a kind of LUN.
type exception struct {
	outcome outcome
	reason  string
}

// toolBugs fail on every target.
var toolBugs = map[string]exception{
	"iSCSITMF.LUNResetSimpleAsync": {failed, "the tool asserts the result of the reset before it has sent the request"},
}

// on512e are exceptions on 512-byte blocks, of which 8 make a physical block.
var on512e = map[string]exception{
	"GetLBAStatus.UnmapSingle": {failed, "the tool takes the exponent of blocks per physical block for an offset, and wants a descriptor of other blocks than it asked for"},
}

// on4Kn are exceptions on 4096-byte blocks.
var on4Kn = map[string]exception{
	"CompareAndWrite.InvalidDataOutSize": {skipped, "needs at least two blocks in a physical block"},
	"WriteSame10.UnmapUnaligned":         {skipped, "needs at least two blocks in a physical block"},
	"WriteSame10.InvalidDataOutSize":     {skipped, "needs at least two blocks in a physical block"},
	"WriteSame16.UnmapUnaligned":         {skipped, "needs at least two blocks in a physical block"},
	"WriteSame16.InvalidDataOutSize":     {skipped, "needs at least two blocks in a physical block"},
}

// The initiator names of the tool; the second one is used by tests with two nexuses, and for the second path.
const (
	toolName  = "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-test"
	toolName2 = toolName + "-2"
)

// lunKind is what the suite runs against: a volume, alone on its target.
type lunKind struct {
	name   string
	volume []string // flags of volume create
	acl    []string // flags of acl add
	env    []string
	suites string // only suites whose name begins so
	except []map[string]exception
}

// A LUN of 512 MiB has few enough blocks for READ(6) to reach beyond its end.
func lunKinds(dir string) []lunKind {
	chap := []string{"--chap-user", "u", "--chap-secret-file", filepath.Join(dir, "one")}
	mutual := append(slices.Clone(chap), "--mutual-user", "m", "--mutual-secret-file", filepath.Join(dir, "two"))
	env := []string{"LIBISCSI_CHAP_USERNAME=u", "LIBISCSI_CHAP_PASSWORD=forward-secret-1"}
	return []lunKind{
		{name: "512e", volume: []string{"--size", "512MiB", "--block-size", "512"}, except: []map[string]exception{on512e}},
		{name: "4Kn", volume: []string{"--size", "1GiB", "--block-size", "4096"}, except: []map[string]exception{on4Kn}},
		{name: "512e, write cache", volume: []string{"--size", "512MiB", "--ack", "memory", "--flush", "local"}, except: []map[string]exception{on512e}},
		{name: "CHAP", volume: []string{"--size", "512MiB"}, suites: "iSCSI", acl: chap, env: env},
		{name: "mutual CHAP", volume: []string{"--size", "512MiB"}, suites: "iSCSI", acl: mutual,
			env: append(slices.Clone(env), "LIBISCSI_CHAP_TARGET_USERNAME=m", "LIBISCSI_CHAP_TARGET_PASSWORD=reverse-secret-2")},
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	need(t, "iscsi-test-cu")
	families := suiteTests(t)
	all := families["ALL"]
	g := newGateway(t, "--portal", "127.0.0.2:0").start()
	var s api.Status
	g.json(&s, "status")
	for name, secret := range map[string]string{"one": "forward-secret-1", "two": "reverse-secret-2"} {
		if err := os.WriteFile(filepath.Join(g.dir, name), []byte(secret), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	kinds := lunKinds(g.dir)
	if testing.Short() { // the race detector makes the program several times slower: what runs concurrently, on one LUN
		kinds = kinds[:1]
		all = slices.DeleteFunc(slices.Clone(all), func(name string) bool {
			return !strings.HasPrefix(name, "iSCSI") && !strings.HasPrefix(name, "MultipathIO") && !strings.HasSuffix(name, "Async")
		})
	}
	var (
		mu      sync.Mutex
		columns = make([]map[string]outcome, len(kinds))
		began   = time.Now()
	)
	t.Run("LUN", func(t *testing.T) {
		for i, k := range kinds {
			iqn := fmt.Sprintf("%s-%d", target, i)
			g.run(append([]string{"volume", "create", fmt.Sprintf("v%d", i), "--target", iqn}, k.volume...)...)
			for _, name := range []string{toolName, toolName2} {
				g.run(append([]string{"acl", "add", iqn, name}, k.acl...)...)
			}
			urls := []string{fmt.Sprintf("iscsi://%s/%s/0", s.Portals[0].Listen, iqn), fmt.Sprintf("iscsi://%s/%s/0", s.Portals[1].Listen, iqn)}
			t.Run(k.name, func(t *testing.T) {
				t.Parallel()
				results := make(map[string]outcome)
				for _, name := range all {
					if strings.HasPrefix(name, k.suites) {
						var body string
						results[name], body = suiteTest(t.Context(), k.env, name, urls)
						k.judge(t, name, results[name], body)
					}
				}
				mu.Lock()
				columns[i] = results
				mu.Unlock()
			})
		}
	})
	t.Logf("%d tests on %d kinds of LUN in %s", len(all), len(kinds), time.Since(began).Round(time.Second))
	if testing.Short() || t.Failed() {
		return
	}

	// The table in the document is the one that was just measured.
	var table strings.Builder
	table.WriteString("| LUN | unique | ALL | SCSI | iSCSI | LINUX |\n|---|---|---|---|---|---|\n")
	best := make(map[string]outcome)
	row := func(name string, results map[string]outcome) {
		fmt.Fprintf(&table, "| %s | %s |", name, tally(slices.Collect(maps.Keys(results)), results))
		for _, family := range []string{"ALL", "SCSI", "iSCSI", "LINUX"} {
			fmt.Fprintf(&table, " %s |", tally(families[family], results))
		}
		table.WriteString("\n")
	}
	for i, k := range kinds {
		row(k.name, columns[i])
		for name, o := range columns[i] {
			best[name] = max(best[name], o)
		}
	}
	row("best of all", best)
	const document = "../../iser/CONFORMANCE.md"
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), table.String()) {
		t.Errorf("%s does not have the table of this run:\n%s", document, table.String())
	}
}

// tally counts the tests that were run: pass/fail/skip.
func tally(names []string, results map[string]outcome) string {
	var n [3]int
	for _, name := range names {
		if o, ok := results[name]; ok {
			n[o]++
		}
	}
	return fmt.Sprintf("%d/%d/%d", n[passed], n[failed], n[skipped])
}

// judge compares a result with what is listed for this kind of LUN.
func (k *lunKind) judge(t *testing.T, name string, got outcome, body string) {
	want := exception{outcome: passed}
	suite, _, _ := strings.Cut(name, ".")
	if reason, ok := skippedSuites[suite]; ok {
		want = exception{skipped, reason}
	}
	for _, list := range append(k.except, toolBugs) {
		if e, ok := list[name]; ok {
			want = e
		}
	}
	switch {
	case got == want.outcome:
	case got == passed:
		t.Errorf("%s passes, and is listed as %s (%s): take it off the list", name, want.outcome, want.reason)
	default:
		t.Errorf("%s: %s, want %s\n%s", name, got, want.outcome, body[max(0, len(body)-2000):])
	}
}

// suiteTests lists the tests of each family, in the tool's order.
func suiteTests(t *testing.T) map[string][]string {
	t.Helper()
	families := make(map[string][]string)
	for _, line := range strings.Fields(must(t, "iscsi-test-cu", "--list")) {
		if family, name, _ := strings.Cut(line, "."); strings.Contains(name, ".") {
			families[family] = append(families[family], name)
		}
	}
	if n := len(families["ALL"]); n != 230 {
		t.Fatalf("iscsi-test-cu has %d tests, and 1.19.0 has 230: the lists here are for that one", n)
	}
	return families
}

// Before and after the test the tool works for itself: it probes the device, clears reservations. Only what is
// between these two belongs to the test.
var suiteBody = regexp.MustCompile(`(?ms)^  Test: \S+ \.\.\.(.*?)(passed|FAILED)    Send PRIN`)

// suiteTest runs one test, and returns what it printed.
func suiteTest(ctx context.Context, env []string, name string, urls []string) (outcome, string) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	// With data loss, sanitize, verbose CUnit (whose words frame the test) and verbose SCSI (which shows silent skips).
	cmd := exec.CommandContext(ctx, "iscsi-test-cu", append([]string{"-d", "-S", "-v", "-V", "-t", "ALL." + name}, urls...)...)
	cmd.Env = append(os.Environ(), env...)
	text, err := cmd.CombinedOutput()
	m := suiteBody.FindStringSubmatch(string(text))
	switch {
	case err != nil || m == nil:
		return failed, fmt.Sprintf("%s%v", text, err)
	case m[2] == "FAILED":
		return failed, string(text)
	case strings.TrimSpace(m[1]) == "": // nothing was sent
		return skipped, "silent"
	}
	for line := range strings.Lines(m[1]) {
		if strings.Contains(line, "[SKIPPED]") && !strings.Contains(line, "Skipping assert") {
			return skipped, line
		}
	}
	return passed, ""
}
