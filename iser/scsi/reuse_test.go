package scsi_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// reused is the memory of one command after the other.
type reused struct {
	cmd scsi.Command

	mu      sync.Mutex
	cancel  context.CancelFunc
	called  map[uint64]bool // serials that Abort was called with
	aborted map[uint64]bool // serials that ended with TASK ABORTED
}

// The memory of a command is used again while another nexus clears the task set all the time: an abort names the serial
// of a command that the unit did abort, however late it comes.
func TestCommandMemoryIsUsedAgain(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	medium := scsitest.NewMedium(64, 512)
	medium.Before = func(context.Context, scsitest.Op, scsi.Extent) error {
		runtime.Gosched() // clears come while commands run
		return nil
	}
	r := newRig(t, medium)
	var commands, clears sync.WaitGroup
	stop := make(chan struct{})
	memory := make([]reused, 4)
	for i := range memory {
		m := &memory[i]
		m.called, m.aborted = map[uint64]bool{}, map[uint64]bool{}
		m.cmd.Abort = func(serial uint64) {
			for range 8 {
				runtime.Gosched() // the next abort of the same clearing comes late
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			m.called[serial] = true
			if m.cmd.Serial == serial && m.cancel != nil {
				m.cancel()
			}
		}
		commands.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for range 1500 {
				ctx, cancel := context.WithCancel(context.Background())
				m.mu.Lock()
				m.cmd.Serial++
				m.cancel = cancel
				m.mu.Unlock()
				m.cmd.CDB, m.cmd.Data = rw(0x28, 0, rng.Uint64N(64), 1), scsitest.NewData(nil, 512)
				r.u.Admit(r.a, &m.cmd)
				res := r.u.Execute(ctx, r.a, &m.cmd)
				cancel()
				switch res.Status {
				case scsi.TaskAborted:
					m.aborted[m.cmd.Serial] = true
				case scsi.Good:
				default:
					t.Errorf("%v % x", res.Status, res.Sense)
				}
			}
		})
	}
	for range 2 {
		clears.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := r.u.ClearTaskSet(context.Background(), r.b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	commands.Wait()
	close(stop)
	clears.Wait()
	total := 0
	for i := range memory {
		m := &memory[i]
		for serial := range m.called {
			if !m.aborted[serial] {
				t.Errorf("Abort was called for command %d of memory %d, which was not aborted", serial, i)
			}
		}
		for serial := range m.aborted {
			if !m.called[serial] {
				t.Errorf("command %d of memory %d was aborted without a call of Abort", serial, i)
			}
		}
		total += len(m.called)
	}
	t.Logf("%d commands aborted", total)
	if total == 0 {
		t.Error("no command was aborted")
	}
}

// Sense data lasts until the command's memory is used again, and no longer claims to.
func TestSenseDataIsOfItsCommand(t *testing.T) {
	r := newRig(t, scsitest.NewMedium(64, 512))
	var one, two scsi.Command
	one.CDB, one.Data = rw(0x28, 0, 64, 1), scsitest.NewData(nil, 512)
	two.CDB, two.Data = []byte{0xFF, 0, 0, 0, 0, 0}, scsitest.NewData(nil, 0)
	ctx := context.Background()
	first := r.u.Execute(ctx, r.a, &one)
	second := r.u.Execute(ctx, r.a, &two)
	if ending(first) != "05/21/00" || ending(second) != "05/20/00" {
		t.Errorf("%s, %s", ending(first), ending(second))
	}
	one.CDB, one.Data = rw(0x28, 0, 0, 1), scsitest.NewData(nil, 512)
	if res := r.u.Execute(ctx, r.a, &one); res.Status != scsi.Good || res.Sense != nil {
		t.Errorf("a command on the memory of one that failed: %+v", res)
	}
}

// An error of the medium that is none of the sentinels is logged, but not by every command that meets it; those that an
// initiator can understand, and errors of the transfer, are not.
func TestUnknownErrorsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		m := scsitest.NewMedium(64, 512)
		var fail error
		m.Before = func(context.Context, scsitest.Op, scsi.Extent) error { return fail }
		r := newRig(t, m, func(o *scsi.Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		lines := func() int { return strings.Count(log.String(), "\n") }
		read := func() { r.exec(r.a, rw(0x28, 0, 0, 1), nil, 512) }
		for _, known := range []error{scsi.ErrBusy, scsi.ErrSpace, scsi.ErrUnmet, scsi.ErrLostWrites, scsi.ErrUnreadable, scsi.ErrWrite, scsi.ErrNotReady,
			scsi.ErrStarting, &scsi.SenseError{Key: scsi.MediumError}, fmt.Errorf("more: %w", scsi.ErrBusy), &scsi.BlockError{LBA: 1, Err: scsi.ErrUnreadable}} {
			fail = known
			read()
		}
		if lines() != 0 {
			t.Fatalf("known errors are logged: %s", log.String())
		}
		fail = errors.New("the cat walked over the disk")
		for range 100 {
			read()
		}
		if s := log.String(); lines() != 1 || !strings.Contains(s, "the cat walked") || !strings.Contains(s, "READ(10)") {
			t.Fatalf("100 commands failed: %s", s)
		}
		time.Sleep(time.Minute) // of the bubble
		read()
		if s := log.String(); lines() != 2 || !strings.Contains(s, "unlogged=99") {
			t.Errorf("a minute later: %s", s)
		}
		// An abort is none of the medium's business.
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		time.Sleep(time.Minute)
		r.u.Execute(ctx, r.a, &scsi.Command{CDB: rw(0x28, 0, 0, 1), Data: scsitest.NewData(nil, 512)})
		if lines() != 2 {
			t.Errorf("an abort is logged: %s", log.String())
		}
	})
}
