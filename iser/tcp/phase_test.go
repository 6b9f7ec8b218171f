package tcp_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// virtual runs f against a target whose clock moves only while everybody waits. change adapts it. No SCSI command may be sent: what the Datamover
// keeps for the next one would get out of the bubble.
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

// deaf logs in and asks for more than TCP keeps, without reading it.
func (r *rig) deaf() *client {
	r.t.Helper()
	const commands = 16
	c := r.dial()
	c.isid[5] = 0xdf
	c.c.(*net.TCPConn).SetReadBuffer(64 << 10)
	c.login("DefaultTime2Retain=0")
	c.tur()
	for i := range commands {
		c.command(read16(i, 4096), 2<<20, nil, 0)
	}
	still, running := 0, 0 // polls since the last change
	await(r.t, "the connection is full", func() bool {
		for _, s := range r.srv.Sessions() {
			if s.ISID == c.isid {
				if s.Commands != commands+1 || s.Running != running {
					still, running = 0, s.Running
				}
				still++
			}
		}
		return still > 200
	})
	return c
}

// An initiator that does not read what it asked for does not hold up a reset by another one for longer than AbortWait: its connection is closed.
func TestResetDoesNotWaitForReaders(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) { o.AbortWait, o.PingInterval = 50*time.Millisecond, -1 })
	other := r.ready()
	r.deaf()
	if res := other.managed(other.manage(pdu.LogicalUnitReset, pdu.ReservedTag)); res.Response != pdu.FunctionComplete {
		t.Error(res.Response)
	}
	other.tur() // unit attention
	other.good(read16(0, 1), 512, nil)
}

// One that reads at last stays, and learns what became of its command.
func TestResetWaitsForWhoReads(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) { o.AbortWait, o.PingInterval = time.Hour, -1 })
	other := r.ready()
	slow := r.deaf()
	itt := other.manage(pdu.LogicalUnitReset, pdu.ReservedTag)
	aborted := 0
	for range 16 {
		for {
			h, _ := slow.read()
			if h.Opcode() == pdu.OpSCSIResponse && h[3] == byte(scsi.TaskAborted) {
				aborted++
			}
			if h.Opcode() == pdu.OpSCSIResponse || h.Opcode() == pdu.OpDataIn && h[1]&1 != 0 {
				break
			}
		}
	}
	if aborted == 0 {
		t.Error("no command was aborted")
	}
	if res := other.managed(itt); res.Response != pdu.FunctionComplete {
		t.Error(res.Response)
	}
	slow.ping()
}

// Nor does it hold up a stop, which ends without an error: nothing that was acknowledged is lost by it.
func TestShutdownDoesNotWaitForReaders(t *testing.T) {
	r := newRig(t, func(_ *rig, o *iscsi.Options) { o.AbortWait = 50 * time.Millisecond })
	r.deaf()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.srv.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// Sessions that wait for a connection, within Time2Retain, do not lock out who has one: neither by their number nor by the memory that is reserved
// for their unsolicited data.
func TestSessionsWithoutConnectionGiveWay(t *testing.T) {
	const most, window = 4, 16
	for name, staging := range map[string]int64{"number": 0, "memory": 2 * (window + 4*17) * 65536} {
		t.Run(name, func(t *testing.T) {
			virtual(t, func(_ *rig, o *iscsi.Options) {
				o.MaxSessions, o.QueueDepth, o.StagingBytes = most, window, staging
			}, func(r *rig, dial func(byte) *client) {
				stays := dial(100)
				stays.login()
				for i := range byte(20) {
					c := dial(i)
					if resp := c.tryLogin(); resp.Status != pdu.LoginSuccess {
						t.Fatalf("login %d: %v", i, resp.Status)
					}
					if got := int(c.max - c.cmdSN + 1); got != window {
						t.Fatalf("login %d has a window of %d", i, got)
					}
					c.c.Close()
					synctest.Wait()
				}
				stays.ping()
				if n := len(r.srv.Sessions()); n < 2 || n > most {
					t.Errorf("%d sessions", n)
				}
				// Those that have a connection do not give way.
				for i := range byte(most - 1) {
					c := dial(50 + i)
					if resp := c.tryLogin("InitialR2T=Yes", "ImmediateData=No"); resp.Status != pdu.LoginSuccess {
						t.Fatalf("login %d: %v", i, resp.Status)
					}
				}
				if resp := dial(60).tryLogin(); resp.Status != pdu.LoginOutOfResources {
					t.Error(resp.Status)
				}
				stays.ping()
			})
		})
	}
}
