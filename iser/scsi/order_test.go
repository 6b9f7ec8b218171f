package scsi_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// gated is a unit whose reads and writes stop in the medium until they are let go.
type gated struct {
	*rig
	mu      sync.Mutex
	started []uint64 // LBAs of operations that reached the medium
	let     map[uint64]chan struct{}
	ended   map[uint64]scsi.Result
}

func newGated(t *testing.T) *gated {
	m := scsitest.NewMedium(100, 512)
	g := &gated{let: map[uint64]chan struct{}{}, ended: map[uint64]scsi.Result{}}
	m.Before = func(ctx context.Context, op scsitest.Op, e scsi.Extent) error {
		if op != scsitest.OpRead {
			return nil
		}
		g.mu.Lock()
		ch := make(chan struct{})
		g.started = append(g.started, e.LBA)
		g.let[e.LBA] = ch
		g.mu.Unlock()
		select {
		case <-ch:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	g.rig = newRig(t, m)
	return g
}

// read admits a read of one block, and executes it in the background.
func (g *gated) read(n scsi.Nexus, lba uint64, attr scsi.TaskAttribute) (cancel func()) {
	ctx, stop := context.WithCancel(context.Background())
	cmd := &scsi.Command{CDB: rw(0x28, 0, lba, 1), Attribute: attr, Data: scsitest.NewData(nil, 512), Abort: func(uint64) { stop() }}
	g.u.Admit(n, cmd)
	go func() {
		res := g.u.Execute(ctx, n, cmd)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.ended[lba] = res
	}()
	return stop
}

func (g *gated) expectStarted(want ...uint64) {
	g.t.Helper()
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	got := slices.Clone(g.started)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		g.t.Fatalf("started %v, want %v", got, want)
	}
}

func (g *gated) finish(lba uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.let[lba])
}

func TestTaskAttributes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t)
		g.read(g.a, 1, scsi.Simple)
		g.read(g.a, 2, scsi.Untagged)
		g.read(g.b, 3, scsi.Ordered)
		g.read(g.a, 4, scsi.Simple)
		g.expectStarted(1, 2)
		g.read(g.b, 5, scsi.HeadOfQueue)
		g.expectStarted(1, 2, 5)
		g.finish(1)
		g.finish(2)
		g.expectStarted(1, 2, 5) // the ordered one waits for the head of queue too
		g.finish(5)
		g.expectStarted(1, 2, 3, 5)
		g.read(g.a, 6, scsi.Ordered)
		g.finish(3)
		g.expectStarted(1, 2, 3, 4, 5)
		g.finish(4)
		g.expectStarted(1, 2, 3, 4, 5, 6)
		g.finish(6)
		synctest.Wait()
		for lba, res := range g.ended {
			if res.Status != scsi.Good {
				t.Errorf("read of %d: %s", lba, ending(res))
			}
		}
	})
}

// An abort lets a waiting task go, and those that waited for it.
func TestAbortWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGated(t)
		g.read(g.a, 1, scsi.Simple)
		cancel := g.read(g.a, 2, scsi.Ordered)
		g.read(g.a, 3, scsi.Simple)
		g.expectStarted(1)
		cancel()
		g.expectStarted(1, 3)
		g.finish(1)
		g.finish(3)
		synctest.Wait()
		if got := ending(g.ended[2]); got != "aborted" {
			t.Errorf("aborted task: %s", got)
		}
	})
}

// CLEAR TASK SET and LOGICAL UNIT RESET end the commands of others with TASK ABORTED, and
// return when they have ended.
func TestAbortedByOther(t *testing.T) {
	for _, reset := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			g := newGated(t)
			g.read(g.a, 1, scsi.Simple)
			g.read(g.b, 2, scsi.Simple)
			g.read(g.a, 3, scsi.Ordered)
			g.expectStarted(1, 2)
			f := g.u.ClearTaskSet
			if reset {
				f = g.u.Reset
			}
			if err := f(context.Background(), g.b); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			for lba, want := range map[uint64]string{1: "aborted", 3: "aborted"} {
				if got := ending(g.ended[lba]); got != want {
					t.Errorf("read of %d: %s, want %s", lba, got, want)
				}
			}
			if _, ended := g.ended[2]; ended {
				t.Error("the issuer's own task was ended")
			}
			g.finish(2)
			synctest.Wait()
			for _, n := range []scsi.Nexus{g.a, g.b} {
				want := "good"
				if reset {
					want = "06/29/03"
				}
				g.wantOn(n, tur, nil, 0, want)
			}
		})
	}
}

// Many nexuses count in one block with COMPARE AND WRITE, set bits with ORWRITE in
// another, and disturb the blocks beside them. No change may be lost.
func TestAtomicity(t *testing.T) {
	const workers, rounds = 8, 60
	m := scsitest.NewMedium(64, 512)
	r := newRig(t, m)
	var wins atomic.Uint64
	var wg sync.WaitGroup
	for w := range workers {
		n := nexus(fmt.Sprint("worker", w))
		r.u.NexusEstablished(n)
		r.wantOn(n, tur, nil, 0, "06/29/00")
		wg.Go(func() {
			read := make([]byte, 2*512)
			for i := range rounds {
				for won := false; !won; {
					d := &scsitest.Data{In: read}
					r.u.Execute(context.Background(), n, &scsi.Command{CDB: rw(0x28, 0, 10, 2), Data: d})
					next := fill(2*512, 0)
					count := binary.BigEndian.Uint64(read[508:]) + 1
					binary.BigEndian.PutUint64(next[508:], count)
					c := rw(0x89, 0, 10, 0)
					c[13] = 2
					res := r.u.Execute(context.Background(), n, &scsi.Command{CDB: c, Data: scsitest.NewData(append(slices.Clone(read), next...), 0)})
					switch got := ending(res); got {
					case "good":
						won = true
						wins.Add(1)
					case "0E/1D/00":
					default:
						t.Errorf("COMPARE AND WRITE: %s", got)
						return
					}
				}
				bits := make([]byte, 512)
				bit := w*rounds + i
				bits[bit/8] = 1 << (bit % 8)
				r.wantOn(n, rw(0x8B, 0, 20, 1), bits, 0, "good")
				r.wantOn(n, rw(0x2A, 0, 12, 1), fill(512, byte(i)), 0, "good")
				r.wantOn(n, rw(0x2E, 0x02, 30, 4), fill(4*512, byte(bit)), 0, "good")
				r.wantOn(n, unmapCDB(24), unmapList(unmapRange{21, 2}), 0, "good")
			}
		})
	}
	wg.Wait()
	all := m.Bytes()
	if got := binary.BigEndian.Uint64(all[10*512+508:]); got != wins.Load() || got != workers*rounds {
		t.Errorf("counted to %d in %d successes", got, wins.Load())
	}
	for bit := range workers * rounds {
		if all[20*512+bit/8]&(1<<(bit%8)) == 0 {
			t.Fatalf("bit %d was lost", bit)
		}
	}
}

// A plain write that arrives between the reading and the writing of a compare-and-change
// command must not slip in: the command either sees it or precedes it.
func TestPlainWritesWaitForAtomicCommands(t *testing.T) {
	caw := rw(0x89, 0, 3, 0)
	caw[13] = 1
	for _, c := range []struct{ cdb, out []byte }{
		{caw, append(fill(512, 0), fill(512, 'c')...)},
		{rw(0x8B, 0, 3, 1), fill(512, 'c')},
		{rw(0x8E, 0x02, 3, 1), fill(512, 'c')},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := scsitest.NewMedium(64, 512)
			reading, goOn := make(chan struct{}), make(chan struct{})
			m.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
				if op == scsitest.OpRead {
					close(reading)
					<-goOn
				}
				return nil
			}
			r := newRig(t, m)
			var mu sync.Mutex
			var order []string
			start := func(name string, n scsi.Nexus, cdb, out []byte) {
				go func() {
					res, _ := r.exec(n, cdb, out, 0)
					mu.Lock()
					defer mu.Unlock()
					order = append(order, name+" "+ending(res))
				}()
			}
			start("atomic", r.a, c.cdb, c.out)
			<-reading
			start("write", r.b, rw(0x2A, 0, 2, 3), fill(3*512, 'w'))
			start("unmap", r.b, unmapCDB(24), unmapList(unmapRange{3, 1}))
			start("same", r.b, rw(0x41, 0, 3, 1), fill(512, 's'))
			start("elsewhere", r.b, rw(0x2A, 0, 5, 1), fill(512, 'x'))
			synctest.Wait()
			mu.Lock()
			if !slices.Equal(order, []string{"elsewhere good"}) {
				t.Errorf("CDB % x: ended while it was reading: %v", c.cdb, order)
			}
			mu.Unlock()
			close(goOn)
			synctest.Wait()
			slices.Sort(order)
			if !slices.Equal(order, []string{"atomic good", "elsewhere good", "same good", "unmap good", "write good"}) {
				t.Errorf("CDB % x: %v", c.cdb, order)
			}
			if m.Bytes()[3*512] == 'c' {
				t.Errorf("CDB % x: later changes were lost", c.cdb)
			}
		})
	}
}

// A command that another nexus aborted ends with TASK ABORTED, even if it was past
// stopping.
func TestAbortedThoughDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := scsitest.NewMedium(64, 512)
		flushing, goOn := make(chan struct{}), make(chan struct{})
		m.Before = func(_ context.Context, op scsitest.Op, _ scsi.Extent) error {
			if op == scsitest.OpFlush {
				close(flushing)
				<-goOn // whatever the context says
			}
			return nil
		}
		r := newRig(t, m)
		cmd := &scsi.Command{CDB: rw(0x35, 0, 0, 0), Data: scsitest.NewData(nil, 0), Abort: func(uint64) {}}
		var res scsi.Result
		go func() { res = r.u.Execute(context.Background(), r.a, cmd) }()
		<-flushing
		cleared := make(chan error, 1)
		go func() { cleared <- r.u.ClearTaskSet(context.Background(), r.b) }()
		synctest.Wait()
		select {
		case <-cleared:
			t.Error("CLEAR TASK SET is complete while a command runs")
		default:
		}
		close(goOn)
		if err := <-cleared; err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if got := ending(res); got != "aborted" {
			t.Errorf("aborted command: %s", got)
		}
	})
}

// Commands, aborts, resets, nexuses and LUN changes at once; for the race detector.
func TestEverythingAtOnce(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	v := scsi.NewInventory()
	m := scsitest.NewMedium(256, 512)
	u, err := scsi.NewLogicalUnit(scsi.Options{Medium: m, Identity: scsi.Identity{UUID: [16]byte{7}}, Removable: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Map(0, u); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			n := nexus(fmt.Sprint("w", w%4))
			v.NexusEstablished(n)
			for range 300 {
				switch rng.IntN(40) {
				case 0:
					v.NexusLost(n, scsi.LossReason(rng.IntN(2)))
					v.NexusEstablished(n)
				case 1:
					if err := v.Reset(context.Background(), n, 0); err != nil {
						t.Error(err)
					}
				case 2:
					if err := v.ClearTaskSet(context.Background(), n, 0); err != nil {
						t.Error(err)
					}
				case 3:
					u.RaiseUnitAttention(0x2A, 0x09, &n)
				default:
					c := randomCommand(rng, 256, 512)
					ctx, cancel := context.WithCancel(context.Background())
					cmd := &scsi.Command{CDB: c.cdb, Attribute: scsi.TaskAttribute(rng.IntN(4)), Data: scsitest.NewData(c.out, c.in), Abort: func(uint64) { cancel() }}
					if rng.IntN(2) == 0 {
						v.Admit(n, 0, cmd)
					}
					if rng.IntN(8) == 0 {
						cancel()
					}
					res := v.Execute(ctx, n, 0, cmd)
					cancel()
					if (res.Status == scsi.CheckCondition) != (res.Sense != nil) {
						t.Errorf("CDB % x: %+v", c.cdb, res)
					}
				}
			}
		})
	}
	wg.Wait()
	if n := m.Open(); n != 0 {
		t.Errorf("%d landings or loans were not ended", n)
	}
}
