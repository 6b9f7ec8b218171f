package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// admission is what a logical unit keeps of a command to abort it.
type admission struct {
	cmd    *scsi.Command
	abort  func(uint64)
	serial uint64
}

// watched records how each command could be aborted, as a logical unit does, and moves those that are over to past.
type watched struct {
	*scsi.Inventory
	mu   sync.Mutex
	live map[*scsi.Command]admission
	past []admission
}

func watch(r *rig) *watched {
	w := &watched{Inventory: r.units, live: make(map[*scsi.Command]admission)}
	r.access = w
	return w
}

func (w *watched) Admit(n scsi.Nexus, lun uint64, cmd *scsi.Command) {
	w.mu.Lock()
	w.live[cmd] = admission{cmd, cmd.Abort, cmd.Serial}
	w.mu.Unlock()
	w.Inventory.Admit(n, lun, cmd)
}

func (w *watched) Execute(ctx context.Context, n scsi.Nexus, lun uint64, cmd *scsi.Command) scsi.Result {
	res := w.Inventory.Execute(ctx, n, lun, cmd)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.past = append(w.past, w.live[cmd])
	delete(w.live, cmd)
	return res
}

// running returns the only command in progress.
func (w *watched) running(t *testing.T) admission {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.live) != 1 {
		t.Fatalf("%d commands in progress", len(w.live))
	}
	for _, a := range w.live {
		return a
	}
	return admission{}
}

// late calls every abort that comes too late, and returns how many were for the memory of cmd.
func (w *watched) late(cmd *scsi.Command) (same int) {
	w.mu.Lock()
	past := w.past
	w.mu.Unlock()
	for _, a := range past {
		a.abort(a.serial)
		if a.cmd == cmd {
			same++
		}
	}
	return same
}

// An abort that comes when its command is over does nothing: not to the command that has its memory, and not to memory that waits
// for the next one.
func TestLateAbort(t *testing.T) {
	r := newRig(t)
	w := watch(r)
	g := r.gate(scsitest.OpRead)
	hold, aborted := r.medium.Before, make(chan struct{}, 8)
	r.medium.Before = func(ctx context.Context, op scsitest.Op, e scsi.Extent) error {
		err := hold(ctx, op, e)
		if err != nil {
			aborted <- struct{}{}
		}
		return err
	}
	goOn := func() {
		t.Helper()
		select {
		case g.open <- struct{}{}:
		case <-aborted:
			t.Fatal("the abort of a command that was over hit the next one")
		}
	}
	c := r.ready()
	// A task is used again a moment after its status was sent.
	idle := func() {
		await(t, "the task has left", func() bool { return r.srv.Sessions()[0].Running == 0 })
	}
	idle()
	itt := c.command(read16(0, 1), 512, nil, 0)
	<-g.entered
	now := w.running(t)
	if w.late(now.cmd) == 0 {
		t.Fatal("the memory of the first command is not used again")
	}
	goOn()
	if res := c.finish(itt, nil); res.status != scsi.Good {
		t.Fatalf("aborted late, by a command before: status %v", res.status)
	}
	idle()
	w.late(nil)
	itt = c.command(read16(0, 1), 512, nil, 0)
	<-g.entered
	again := w.running(t)
	if again.cmd != now.cmd {
		t.Fatal("the memory of the second command is not used again")
	}
	again.abort(again.serial)
	<-aborted
	if res := c.finish(itt, nil); res.status != scsi.TaskAborted {
		t.Errorf("aborted in time: status %v", res.status)
	}
	idle()
	itt = c.command(read16(0, 1), 512, nil, 0)
	<-g.entered
	if w.late(again.cmd) < 3 {
		t.Error("the memory is not used again after an abort")
	}
	goOn()
	if res := c.finish(itt, nil); res.status != scsi.Good {
		t.Errorf("after an abort: status %v", res.status)
	}
}

// Commands of several sessions, on memory that is used again all the time, while late aborts of all of them come from
// everywhere: each command ends well, and with its own data.
func TestLateAbortsUnderLoad(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := newRig(t)
	w := watch(r)
	r.medium.Before = func(ctx context.Context, _ scsitest.Op, _ scsi.Extent) error {
		for range 4 {
			runtime.Gosched() // aborts come while commands run
		}
		return ctx.Err()
	}
	ctx := context.Background()
	var load, late sync.WaitGroup
	stop := make(chan struct{})
	for i := range 2 {
		s, err := initiator.Dial(ctx, initiator.Options{Portal: r.addr, InitiatorName: initiatorName, TargetName: targetName, ISID: [6]byte{0x40, 0, 0, 9, 9, byte(i)}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		lun, err := s.OpenLUN(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		for j := range 6 {
			load.Go(func() {
				rnd := rand.New(rand.NewPCG(seed, uint64(6*i+j)))
				base := uint64(6*i+j) * 256
				for range 40 {
					n := (1 + rnd.IntN(256)) * 512
					data, got := pattern(rnd.IntN(1<<30), n), make([]byte, n)
					lba := base + rnd.Uint64N(257-uint64(n)/512)
					if err := errors.Join(lun.Write(ctx, lba, data, false), lun.Read(ctx, lba, got)); err != nil {
						t.Error(err)
						return
					}
					if !bytes.Equal(data, got) {
						t.Error("a read differs")
						return
					}
				}
			})
		}
	}
	for i := range 2 {
		late.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(100+i)))
			for {
				select {
				case <-stop:
					return
				default:
				}
				w.mu.Lock()
				var some [8]admission
				for k := range some {
					if n := len(w.past); n > 0 {
						some[k] = w.past[max(0, n-1-rnd.IntN(64))]
					}
				}
				w.mu.Unlock()
				for _, a := range some {
					if a.abort != nil {
						a.abort(a.serial)
					}
				}
				runtime.Gosched()
			}
		})
	}
	load.Wait()
	close(stop)
	late.Wait()
	memory := make(map[*scsi.Command]bool)
	for _, a := range w.past {
		memory[a.cmd] = true
	}
	t.Logf("%d commands in the memory of %d", len(w.past), len(memory))
	if len(memory) > len(w.past)/10 {
		t.Error("memory is not used again")
	}
}

// Late data of an aborted write finds neither its R2T nor the command that has its memory (T7).
func TestLateDataOfAnAbortedWrite(t *testing.T) {
	r := newRig(t)
	c := r.ready("InitialR2T=Yes", "ImmediateData=No", "MaxBurstLength=32768", "MaxOutstandingR2T=2")
	wrong, want := pattern(1, 65536), pattern(2, 65536)
	for range 8 { // as often as the memory of the transfer may take to come round
		first := c.command(write16(0, 128), 0, wrong, 0)
		old := c.r2ts(first, 2)
		if resp := c.managed(c.manage(pdu.AbortTask, first)); resp.Response != pdu.FunctionComplete {
			t.Fatal(resp.Response)
		}
		second := c.command(write16(0, 128), 0, want, 0)
		now := c.r2ts(second, 2)
		for _, ask := range old {
			c.dataOut(first, ask.TTT, int(ask.Offset), wrong[ask.Offset:ask.Offset+ask.Length], 8192)
		}
		for _, ask := range now {
			c.dataOut(second, ask.TTT, int(ask.Offset), want[ask.Offset:ask.Offset+ask.Length], 8192)
		}
		if res := c.finish(second, want); res.status != scsi.Good {
			t.Fatalf("status %v, sense % x", res.status, res.sense)
		}
		if !bytes.Equal(r.medium.Bytes()[:len(want)], want) {
			t.Fatal("the data of an aborted write was written")
		}
	}
}

// r2ts takes n R2Ts of a command.
func (c *client) r2ts(itt pdu.TaskTag, n int) []pdu.R2T {
	c.t.Helper()
	out := make([]pdu.R2T, n)
	for i := range out {
		h, _ := c.read()
		if err := out[i].Decode(&h); err != nil || h.ITT() != itt {
			c.t.Fatalf("%v for %#x: %v", h.Opcode(), h.ITT(), err)
		}
	}
	return out
}
