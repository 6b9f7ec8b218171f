package tcp_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// virtual runs f against a target whose clock moves only while everybody waits. change adapts it.
func virtual(t *testing.T, change func(*rig, *iscsi.Options), f func(r *rig, dial func(isid byte) *client)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, medium: scsitest.NewMedium(8192, 512), units: scsi.NewInventory(), hidden: map[string]bool{}}
		unit, err := scsi.NewLogicalUnit(scsi.Options{Medium: r.medium, Identity: scsi.Identity{UUID: [16]byte{1}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.units.Map(0, unit); err != nil {
			t.Fatal(err)
		}
		opt := iscsi.Options{Backend: r, Logger: slog.New(slog.DiscardHandler), PingInterval: -1}
		if change != nil {
			change(r, &opt)
		}
		if r.srv, err = iscsi.NewServer(opt); err != nil {
			t.Fatal(err)
		}
		l := pipeListener(t)
		served := make(chan error, 1)
		go func() { served <- r.srv.Serve(l, iscsi.Portal{}) }()
		var clients []*client
		f(r, func(isid byte) *client {
			c := &client{t: t, c: l.dial(t), isid: pdu.ISID{0x40, 0, 0, 0, 0, isid}, cmdSN: 1, itt: 1}
			clients = append(clients, c)
			return c
		})
		for _, c := range clients {
			c.c.Close() // whoever waits for a lock does not let the clock go on: nobody may wait for them
		}
		if err := r.srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, iscsi.ErrServerClosed) {
			t.Error(err)
		}
		if n := r.medium.Open(); n != 0 {
			t.Errorf("%d landings or loans were not given back", n)
		}
	})
}

// ISER-53: behind a Logout Response the connection stays open until the initiator closes it, or a second later; nothing is sent on
// it, whatever happens meanwhile.
func TestLogoutLingers(t *testing.T) {
	for _, reason := range []pdu.LogoutReason{pdu.CloseSession, pdu.CloseConnection} {
		virtual(t, nil, func(r *rig, dial func(byte) *client) {
			c := dial(1)
			c.login()
			c.logout(reason, 0)
			began := time.Now()
			if b, err := io.ReadAll(c.c); len(b) > 0 || err != nil {
				t.Errorf("%v: behind the Logout Response: %d bytes, %v", reason, len(b), err)
			}
			if waited := time.Since(began); waited != time.Second {
				t.Errorf("%v: the target closed after %v", reason, waited)
			}

			c = dial(2)
			c.login()
			c.logout(reason, 0)
			began = time.Now()
			c.c.Close()
			await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 0 })
			if waited := time.Since(began); waited >= time.Second/2 {
				t.Errorf("%v: the session ended %v after its connection", reason, waited)
			}

			c = dial(3)
			c.login()
			c.logout(reason, 0)
			go r.srv.DropTarget(r.t.Context(), targetName) // with an Asynchronous Message, were the session not logged out
			if b, err := io.ReadAll(c.c); len(b) > 0 || err != nil {
				t.Errorf("%v: behind the Logout Response: %d bytes, %v", reason, len(b), err)
			}
		})
	}
}

// dropsAtLogin ends the sessions of the target while one of them logs in.
type dropsAtLogin struct {
	*scsi.Inventory
	drop func()
}

func (u *dropsAtLogin) NexusEstablished(n scsi.Nexus) {
	u.Inventory.NexusEstablished(n)
	u.drop()
}

// An Asynchronous Message belongs to full feature phase (RFC 7143, 11.9): a session that is ended before its final Login Response was sent gets none.
func TestNoAsyncBeforeTheFinalLoginResponse(t *testing.T) {
	for name, drop := range map[string]func(*rig){
		"drop":     func(r *rig) { r.srv.DropTarget(r.t.Context(), targetName) },
		"shutdown": func(r *rig) { r.srv.Shutdown(r.t.Context()) },
		"close":    func(r *rig) { r.srv.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(r *rig, _ *iscsi.Options) {
				r.access = &dropsAtLogin{r.units, func() {
					go drop(r)
					time.Sleep(time.Millisecond) // of the virtual clock: until that goroutine waits
				}}
			}, func(_ *rig, dial func(byte) *client) {
				c := dial(1)
				text := "InitiatorName=" + initiatorName + "\x00TargetName=" + targetName + "\x00"
				var h pdu.Header
				req := pdu.LoginRequest{Transit: true, CSG: pdu.StageOperational, NSG: pdu.StageFullFeature, ISID: c.isid, ITT: 7, CmdSN: c.cmdSN}
				req.Encode(&h)
				c.write(&h, []byte(text))
				for {
					h, _, err := c.tryRead()
					if err != nil {
						break
					}
					if h.Opcode() != pdu.OpLoginResponse {
						t.Errorf("%v during login", h.Opcode())
					}
				}
			})
		})
	}
}

// An initiator that does not read what it asked for does not hold up a reset by another one for longer than AbortWait: its connection is closed.
// Commands of one that reads in time are aborted, and it stays.
func TestResetDoesNotWaitForReaders(t *testing.T) {
	virtual(t, nil, func(r *rig, dial func(byte) *client) {
		deaf, other := dial(1), dial(2)
		deaf.login("DefaultTime2Retain=0")
		deaf.tur()
		other.login()
		other.tur()
		deaf.command(read16(0, 4096), 2<<20, nil, 0)
		synctest.Wait() // the target waits for it to read
		began := time.Now()
		if res := other.managed(other.manage(pdu.LogicalUnitReset, pdu.ReservedTag)); res.Response != pdu.FunctionComplete {
			t.Error(res.Response)
		}
		if waited := time.Since(began); waited != 5*time.Second {
			t.Errorf("the reset took %v", waited)
		}
		await(t, "the session ends", func() bool { return len(r.srv.Sessions()) == 1 })

		slow := dial(3)
		slow.login()
		slow.tur()
		itt := slow.command(read16(0, 4096), 2<<20, nil, 0)
		synctest.Wait()
		itt2 := other.manage(pdu.LogicalUnitReset, pdu.ReservedTag)
		time.Sleep(4 * time.Second) // of the virtual clock
		if res := slow.finish(itt, nil); res.status != scsi.TaskAborted {
			t.Errorf("status %#x", res.status)
		}
		if res := other.managed(itt2); res.Response != pdu.FunctionComplete {
			t.Error(res.Response)
		}
		time.Sleep(time.Minute)
		slow.ping()
	})
}

// Nor does it hold up a stop, which ends without an error: nothing that was acknowledged is lost by it.
func TestShutdownDoesNotWaitForReaders(t *testing.T) {
	virtual(t, nil, func(r *rig, dial func(byte) *client) {
		deaf := dial(1)
		deaf.login()
		deaf.tur()
		for i := range 4 {
			deaf.command(read16(i, 4096), 2<<20, nil, 0)
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		if err := r.srv.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
}
