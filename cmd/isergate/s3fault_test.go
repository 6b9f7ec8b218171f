package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/iser/initiator/oracle"
	"github.com/isergate/isergate/objectstore/s3test"
	"github.com/isergate/isergate/objectstore/s3test/faultproxy"
)

// The campaign between gateway and object store: the running program, a real S3 server, and between them a proxy that spoils
// requests, while a writer with an oracle works and the program is killed. ISERGATE_FAULT_ROUNDS is the number of rounds of each
// gateway, ISERGATE_SEED repeats the choices of one.

// newFaultyGateway prepares a gateway whose bucket is behind a proxy of its own.
func newFaultyGateway(t *testing.T, server *s3test.Server, prefix string, seed uint64) (*gatewayProcess, *faultproxy.Proxy) {
	t.Helper()
	p, err := faultproxy.Start(server.Endpoint, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	through := *server
	through.Endpoint = p.Endpoint()
	g := newGatewayOn(t, through.URL("isergate", prefix), smallCache, "--open")
	g.env = server.Env()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("injected: %v", p.Counts())
		}
	})
	return g, p
}

// damaging faults change bytes in an answer: a reader believes in damage when it meets them four times in a row.
var damaging = []faultproxy.Fault{faultproxy.CorruptGet, faultproxy.ShortAnswer}

// storeRules are the faults of one round: much of some, and a little of all.
func storeRules(rng *rand.Rand, much []faultproxy.Fault) []faultproxy.Rule {
	hold, share := time.Duration(50+rng.IntN(500))*time.Millisecond, 250
	if os.Getenv("ISERGATE_LONG") == "1" && rng.IntN(10) == 0 {
		hold, share = time.Duration(1+rng.IntN(100))*time.Second, 1 // beyond the gateway's own time-outs, and therefore few
	}
	var rules []faultproxy.Rule
	for _, f := range much {
		r := faultproxy.Rule{Faults: []faultproxy.Fault{f}, PerMille: share/3 + 10 + rng.IntN(share), Hold: hold, Age: 10 * time.Second}
		switch {
		case slices.Contains(damaging, f):
			r.PerMille = 40
		case f == faultproxy.StaleList:
			r.PerMille = 700 // lists are few
		}
		rules = append(rules, r)
	}
	return append(rules, faultproxy.Rule{PerMille: 5 + rng.IntN(1+share/6), Hold: hold, Age: 10 * time.Second})
}

// retried runs a command until it succeeds: what a person does while a store is in trouble. It returns what the command said in vain.
func (g *gatewayProcess) retried(args ...string) (stdout string, vain []string) {
	g.t.Helper()
	for range 30 {
		r := g.try(args...)
		if r.code == exitOK {
			return r.stdout, vain
		}
		vain = append(vain, strings.TrimSpace(r.stderr))
	}
	g.t.Fatalf("isergate %q fails for ever:\n%s", args, strings.Join(vain, "\n"))
	return "", nil
}

// stateOf fails the test if a volume is out of service: no fault of a store alone does that.
func (g *gatewayProcess) stateOf(volume string) api.Volume {
	g.t.Helper()
	v := g.show(volume)
	if v.State == "failed" || v.State == "fenced" || v.Generation != 1 {
		g.t.Fatalf("the store's faults made: state %s, generation %d: %s", v.State, v.Generation, v.Reason)
	}
	return v
}

// peakMemory is the most memory that the gateway had, in MiB.
func (g *gatewayProcess) peakMemory() int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.cmd.Process.Pid))
	if err != nil {
		g.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		g.t.Fatal(err)
	}
	return kib >> 10
}

// faultTally adds up what the campaign did.
type faultTally struct {
	mu       sync.Mutex // guards the rest
	injected map[faultproxy.Fault]int
	acked    uint64
	rounds   int
	outages  int
	peak     int
	slowest  time.Duration // from the end of faults to everything at object
}

// kill -9 at random moments, restarts, loss of home maps and read cache, and total outages, while requests to the object store meet with
// every kind of fault: nothing acknowledged is lost, no volume goes out of service, and when the faults end everything reaches the bucket by
// itself, which alone then brings it back.
func TestStoreFaults(t *testing.T) {
	t.Parallel()
	server := s3test.New(t, s3test.Versitygw)
	if err := server.CreateBucket(t.Context(), "isergate"); err != nil {
		t.Fatal(err)
	}
	_, rng := crashRounds(t, 1)
	faults := slices.Clone(faultproxy.Faults)
	rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	const gateways, together = 4, 2 // faults of which there is much in one round
	rounds := (len(faults) + gateways*together - 1) / (gateways * together)
	if testing.Short() {
		rounds = 1
	}
	if s := os.Getenv("ISERGATE_FAULT_ROUNDS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("ISERGATE_FAULT_ROUNDS: %v", err)
		}
		rounds = n
	} else if os.Getenv("ISERGATE_LONG") == "1" {
		rounds = 50
	}
	tally := &faultTally{injected: map[faultproxy.Fault]int{}}
	t.Run("gateways", func(t *testing.T) {
		for n := range gateways {
			level := []string{"local", "object"}[n%2]
			seed := rng.Uint64()
			t.Run(fmt.Sprintf("%d %s", n, level), func(t *testing.T) {
				t.Parallel()
				c := &faultCampaign{level: level, rng: rand.New(rand.NewPCG(seed, 1)), tally: tally}
				c.g, c.p = newFaultyGateway(t, server, fmt.Sprint(n), seed)
				c.run(t, rounds, func(round int) (much []faultproxy.Fault) {
					for i := range together {
						much = append(much, faults[((round*gateways+n)*together+i)%len(faults)])
					}
					return much
				})
			})
		}
	})
	var text []string
	for _, f := range slices.Sorted(maps.Keys(tally.injected)) {
		text = append(text, fmt.Sprintf("%s %d", f, tally.injected[f]))
	}
	t.Logf("%d rounds of kill -9, %d of them with a total outage; %d acknowledged operations checked, 0 lost; at most %d MiB of memory, at most %s from the end of the faults until everything was in the bucket; injected: %s",
		tally.rounds, tally.outages, tally.acked, tally.peak, tally.slowest.Round(100*time.Millisecond), strings.Join(text, ", "))
	for _, f := range faultproxy.Faults {
		if rounds*gateways*together >= len(faults) && tally.injected[f] == 0 {
			t.Errorf("%q never happened", f)
		}
	}
}

// faultCampaign is one gateway of it.
type faultCampaign struct {
	g     *gatewayProcess
	p     *faultproxy.Proxy
	level string
	rng   *rand.Rand
	tally *faultTally

	acked   uint64
	outages int
	peak    int // MiB
}

func (c *faultCampaign) run(t *testing.T, rounds int, much func(round int) []faultproxy.Fault) {
	g, p, rng := c.g, c.p, c.rng
	g.start()
	g.run("volume", "create", "crash", "--size", "16MiB", "--ack", c.level, "--flush", c.level, "--target", crashTarget)
	h := newHistory(t, rng)
	for round := range rounds {
		c.round(h, much(round), storeRules(rng, much(round)))
	}
	for round := range rounds { // what had no occasion, with certainty
		for _, f := range much(round) {
			if p.Injected(f) == 0 {
				c.round(h, []faultproxy.Fault{f}, []faultproxy.Rule{{Faults: []faultproxy.Fault{f}, Times: 3, Age: time.Hour}})
				rounds++
			}
		}
	}
	// The bucket catches up with no hand moved.
	p.Set()
	began := time.Now()
	g.run("volume", "wait", "crash", "--level", "object", "--timeout", "110s")
	caughtUp := time.Since(began)
	if v := g.stateOf("crash"); v.State != "available" || !v.ContractMet || v.LastObjectError != "" {
		t.Errorf("after the faults: %+v", v)
	}
	c.peak = max(c.peak, g.peakMemory())
	g.verify(h, 0, oracle.KeepAcked)
	g.kill()

	// The bucket alone, with some faults again.
	p.Set(faultproxy.Rule{PerMille: 50, Hold: 100 * time.Millisecond})
	if err := os.RemoveAll(g.data()); err != nil {
		t.Fatal(err)
	}
	p.Set()
	g.start()
	p.Set(faultproxy.Rule{PerMille: 50, Hold: 100 * time.Millisecond})
	if _, vain := g.retried("volume", "restore", "--from", g.bucket(), "--volume", "crash"); len(vain) > 0 {
		t.Logf("restore, in vain: %q", vain)
	}
	g.run("volume", "set", "crash", "--ack", c.level, "--flush", c.level)
	g.run("target", "create", crashTarget)
	g.run("lun", "map", crashTarget, "crash", "--lun", "0")
	g.verify(h, 0, oracle.KeepAcked)
	p.Set()
	var found []api.BucketVolume
	g.json(&found, "bucket", "inspect", g.bucket(), "--verify")
	if len(found) != 1 || found[0].Error != "" || len(found[0].Damaged) != 0 {
		t.Errorf("the bucket: %+v", found)
	}
	c.tally.mu.Lock()
	defer c.tally.mu.Unlock()
	c.tally.acked += c.acked
	c.tally.rounds += rounds
	c.tally.outages += c.outages
	c.tally.peak = max(c.tally.peak, c.peak)
	c.tally.slowest = max(c.tally.slowest, caughtUp)
	for f := range p.Counts() {
		c.tally.injected[f] += p.Injected(f)
	}
}

// onPut faults happen to puts.
func onPut(f faultproxy.Fault) bool { return f.Applies(faultproxy.Put) }

// write runs the writer and kills the gateway at a random moment, but not before faults that happen to puts have happened, nor later than
// is good for a test.
func (c *faultCampaign) write(h *oracle.History, faults []faultproxy.Fault) oracle.Result {
	g, t := c.g, c.g.t
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	within, atMost := time.Duration(c.rng.IntN(1500))*time.Millisecond, 2500*time.Millisecond
	before := map[faultproxy.Fault]int{}
	for _, f := range faults {
		before[f] = c.p.Injected(f)
	}
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		began := time.Now()
		waits := func(f faultproxy.Fault) bool { return onPut(f) && c.p.Injected(f) == before[f] }
		for ran := time.Duration(0); ran < within || ran < atMost && slices.ContainsFunc(faults, waits); ran = time.Since(began) {
			time.Sleep(5 * time.Millisecond) // the moment is random
		}
		g.kill()
		cancel()
	}()
	res, err := oracle.Run(ctx, g.opener(crashTarget, 0), oracle.Options{
		History: h, Workers: 16, Sessions: 2, Seed: c.rng.Uint64(),
		ZeroShare: 30, UnmapShare: 50, SameShare: 30, FlushShare: 30, ReadShare: 100, FUAShare: 50,
	})
	<-killed
	if v := (*oracle.Violation)(nil); errors.As(err, &v) {
		t.Fatal(err)
	}
	if err := h.Crash(); err != nil {
		t.Fatal(err)
	}
	return res
}

// round writes under faults, kills, starts and verifies.
func (c *faultCampaign) round(h *oracle.History, faults []faultproxy.Fault, rules []faultproxy.Rule) {
	g, p, rng, t := c.g, c.p, c.rng, c.g.t
	t.Helper()
	p.Set(rules...)
	ended := c.outage()
	began := time.Now()
	res := c.write(h, faults)
	written := time.Now()
	c.acked += res.Acknowledged
	// Both are caches of the bucket. Without the first the verification reads from there.
	for name, gone := range map[string]bool{"readcache": rng.IntN(2) == 0 || !slices.ContainsFunc(faults, onPut), "maps": rng.IntN(5) == 0} {
		if gone {
			if err := os.RemoveAll(filepath.Join(g.data(), "cache", name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	g.start()
	served := time.Now()
	<-ended
	r := g.verify(h, 0, oracle.KeepAcked)
	if err := h.Rebase(r); err != nil {
		t.Fatal(err)
	}
	v := g.stateOf("crash")
	c.peak = max(c.peak, g.peakMemory())
	tenths := func(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }
	t.Logf("%s: much of %q: %d acknowledged in %s, served after %s, verified after %s; %d requests so far, object watermark %d of %d", c.level, faults,
		res.Acknowledged, tenths(written.Sub(began)), tenths(served.Sub(written)), tenths(time.Since(served)), p.Total(), v.Watermarks.Object.LSN, v.Watermarks.Acked.LSN)
}

// outage begins a total outage in one round of four, at a random moment, which ends by itself. The channel is closed then.
func (c *faultCampaign) outage() (ended chan struct{}) {
	ended = make(chan struct{})
	if c.rng.IntN(4) > 0 {
		close(ended)
		return ended
	}
	c.outages++
	after, lasts := time.Duration(c.rng.IntN(800))*time.Millisecond, time.Duration(500+c.rng.IntN(2500))*time.Millisecond
	time.AfterFunc(after, func() {
		c.p.Down(true)
		time.AfterFunc(lasts, func() {
			c.p.Down(false)
			close(ended)
		})
	})
	return ended
}

// While the store refuses, `status` says what is wrong and what to do about it; requests are few; and destaging goes on by itself, soon, when it
// no longer does.
func TestStoreRefusals(t *testing.T) {
	t.Parallel()
	server := s3test.New(t, s3test.Versitygw)
	if err := server.CreateBucket(t.Context(), "isergate"); err != nil {
		t.Fatal(err)
	}
	all := func(f faultproxy.Fault) []faultproxy.Rule { return []faultproxy.Rule{{Faults: []faultproxy.Fault{f}}} }
	for _, c := range []struct {
		name         string
		rules        []faultproxy.Rule // none: an outage
		text, advice string
		restart      bool // in the middle of it
		long         bool // only in long runs
	}{
		{"denied", all(faultproxy.Denied), "access denied: 403 AccessDenied", "check the AWS credential chain", true, false},
		{"puts denied", []faultproxy.Rule{{Faults: []faultproxy.Fault{faultproxy.Denied}, Ops: []faultproxy.Op{faultproxy.Put}}}, "access denied: 403 AccessDenied", "PutObject", false, false},
		{"wrong region", all(faultproxy.WrongRegion), "the bucket is in region mars-1", "set region=", false, false},
		{"skew", all(faultproxy.Skewed), "RequestTimeTooSkewed", "start a time service", true, false},
		{"slow down", all(faultproxy.SlowDown), "503 SlowDown", "check the endpoint, the network and the store", false, true},
		{"outage", nil, "", "check the endpoint, the network and the store", false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.long && os.Getenv("ISERGATE_LONG") != "1" {
				t.Skip("only with ISERGATE_LONG=1")
			}
			t.Parallel()
			g, p := newFaultyGateway(t, server, c.name[:4]+strconv.Itoa(len(c.name)), 1)
			g.start()
			for i, name := range []string{"v", "w"} {
				g.run("volume", "create", name, "--size", "16MiB", "--target", crashTarget, "--lun", strconv.Itoa(i))
				g.run("volume", "wait", name, "--level", "object")
			}
			p.Set(c.rules...)
			p.Down(c.rules == nil)
			rng := rand.New(rand.NewPCG(1, 1))
			for lun := range uint16(2) {
				res, err := oracle.Run(t.Context(), g.opener(crashTarget, lun), oracle.Options{History: newHistory(t, rng), Operations: 50, Seed: 1})
				if err != nil || res.Acknowledged != 50 {
					t.Fatalf("at local the refusals of a store do not matter: %+v, %v", res, err)
				}
			}
			g.until("the status tells of it", func() error {
				s := g.status()
				if !strings.Contains(s.Bucket.Error, c.text) || s.Bucket.Since == nil || len(s.BucketUnreachable) != 2 {
					return fmt.Errorf("%+v, unreachable: %v", s.Bucket, s.BucketUnreachable)
				}
				if v := g.show("v"); !strings.Contains(v.LastObjectError, c.text) || v.State != "available" || v.BucketDownSince == nil {
					return fmt.Errorf("%+v", v)
				}
				return nil
			})
			// A refusal that comes before the body of a put was read shows as a connection that is reset, so any of the events may have it.
			g.until("events say that the bucket is unreachable, and what to do", func() error {
				s, announced, advised := g.status(), false, false
				for _, e := range s.Events {
					announced = announced || e.Type == "bucket_unreachable"
					advised = advised || strings.Contains(e.Text, c.text) && strings.Contains(e.Text, c.advice)
				}
				if !announced || !advised {
					return fmt.Errorf("%+v", s.Events)
				}
				return nil
			})
			if text := g.run("status"); !strings.Contains(text, c.text) {
				t.Errorf("%s", text)
			}
			before, began, lasts := p.Total(), time.Now(), 2*time.Second
			if os.Getenv("ISERGATE_LONG") == "1" {
				lasts = 2 * time.Minute // pauses are as long as they become
			}
			for time.Since(began) < lasts {
				time.Sleep(50 * time.Millisecond) // what is counted is what happens meanwhile
			}
			rate := float64(p.Total()-before) / time.Since(began).Seconds()
			if rate > 2*8*4 { // two volumes with eight puts each, each of which is repeated and read back
				t.Errorf("%.1f requests/s while the store refuses", rate)
			}
			if c.restart {
				g.kill()
				g.start()
			}
			p.Set()
			p.Down(false)
			began = time.Now()
			for _, v := range []string{"v", "w"} {
				g.run("volume", "wait", v, "--level", "object", "--timeout", "110s")
			}
			caughtUp := time.Since(began)
			g.until("the status is as before", func() error {
				if s := g.status(); s.Bucket.Error != "" || len(s.BucketUnreachable) > 0 {
					return fmt.Errorf("%+v", s)
				}
				return nil
			})
			g.stateOf("v")
			t.Logf("%.1f requests/s while it lasted, destaged %s after it, at most %d MiB", rate, caughtUp.Round(10*time.Millisecond), g.peakMemory())
		})
	}
}

// status is what `isergate status` says.
func (g *gatewayProcess) status() (s api.Status) {
	g.t.Helper()
	g.json(&s, "status")
	return s
}

// until waits for a check to succeed.
func (g *gatewayProcess) until(what string, check func() error) {
	g.t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			g.t.Fatalf("%s: %v", what, errors.Join(errors.New("not within 90 s"), err))
		}
		time.Sleep(50 * time.Millisecond)
	}
}
