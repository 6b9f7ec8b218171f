package tcp_test

import (
	"strings"
	"testing"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
)

// The table of task management functions: RFC 7143, 11.5 and RFC 7144, 6; ISCSI-60 to ISCSI-66.
func TestTaskManagement(t *testing.T) {
	const level2 = "iSCSIProtocolLevel=2"
	hold := func(r *rig, c *client) pdu.TaskTag {
		g := r.gate(scsitest.OpRead)
		itt := c.command(read16(0, 1), 512, nil, 0)
		<-g.entered
		return itt
	}
	tests := []struct {
		name string
		keys []string
		run  func(r *rig, c *client) pdu.TaskTag // returns the tag of the function
		want pdu.TaskResult
		gone bool // the session ends
	}{
		{name: "ABORT TASK of a task", run: func(r *rig, c *client) pdu.TaskTag {
			return c.manage(pdu.AbortTask, hold(r, c))
		}, want: pdu.FunctionComplete},
		{name: "ABORT TASK of a task that ended", run: func(r *rig, c *client) pdu.TaskTag {
			c.good(read16(0, 1), 512, nil)
			return c.manage(pdu.AbortTask, pdu.TaskTag(c.itt), func(p *pdu.TaskRequest) { p.RefCmdSN = c.cmdSN - 1 })
		}, want: pdu.TaskDoesNotExist},
		{name: "ABORT TASK of a command that did not come", run: func(r *rig, c *client) pdu.TaskTag {
			c.cmdSN++
			return c.manage(pdu.AbortTask, 0x999, func(p *pdu.TaskRequest) { p.RefCmdSN = c.cmdSN - 1 })
		}, want: pdu.FunctionComplete},
		{name: "ABORT TASK out of the window", run: func(r *rig, c *client) pdu.TaskTag {
			return c.manage(pdu.AbortTask, 0x999, func(p *pdu.TaskRequest) { p.RefCmdSN = c.cmdSN + 1000 })
		}, want: pdu.TaskDoesNotExist},
		{name: "ABORT TASK SET", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.AbortTaskSet, pdu.ReservedTag)
		}, want: pdu.FunctionComplete},
		{name: "ABORT TASK SET, not immediate", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.AbortTaskSet, pdu.ReservedTag, func(p *pdu.TaskRequest) { p.Immediate = false })
		}, want: pdu.FunctionComplete},
		{name: "CLEAR ACA", run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.ClearACA, pdu.ReservedTag) }, want: pdu.FunctionNotSupported},
		{name: "CLEAR TASK SET", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.ClearTaskSet, pdu.ReservedTag)
		}, want: pdu.FunctionComplete},
		{name: "LOGICAL UNIT RESET", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.LogicalUnitReset, pdu.ReservedTag)
		}, want: pdu.FunctionComplete},
		{name: "LUN that is not there", run: func(r *rig, c *client) pdu.TaskTag {
			return c.manage(pdu.LogicalUnitReset, pdu.ReservedTag, func(p *pdu.TaskRequest) { p.LUN = pdu.LUNOf(9) })
		}, want: pdu.LUNDoesNotExist},
		{name: "TARGET WARM RESET", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.TargetWarmReset, pdu.ReservedTag)
		}, want: pdu.FunctionComplete},
		{name: "TARGET COLD RESET", run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.TargetColdReset, pdu.ReservedTag)
		}, want: pdu.FunctionComplete, gone: true},
		{name: "TASK REASSIGN", run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.TaskReassign, 5) }, want: pdu.ReassignNotSupported},
		{name: "function 13", run: func(r *rig, c *client) pdu.TaskTag { return c.manage(13, 5) }, want: pdu.FunctionNotSupported},
		{name: "ISCSI-66 QUERY TASK at level 1", run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.QueryTask, 5) }, want: pdu.FunctionNotSupported},
		{name: "QUERY TASK, present", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.QueryTask, hold(r, c)) }, want: pdu.FunctionSucceeded},
		{name: "QUERY TASK, absent", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.QueryTask, 5) }, want: pdu.FunctionComplete},
		{name: "QUERY TASK SET, present", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.QueryTaskSet, pdu.ReservedTag)
		}, want: pdu.FunctionSucceeded},
		{name: "QUERY TASK SET, empty", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.QueryTaskSet, pdu.ReservedTag) }, want: pdu.FunctionComplete},
		{name: "I_T NEXUS RESET", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag {
			hold(r, c)
			return c.manage(pdu.NexusReset, pdu.ReservedTag)
		}, want: pdu.FunctionComplete, gone: true},
		{name: "QUERY ASYNC EVENT, nothing", keys: []string{level2}, run: func(r *rig, c *client) pdu.TaskTag { return c.manage(pdu.QueryAsyncEvent, pdu.ReservedTag) }, want: pdu.FunctionComplete},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			c := r.ready(tt.keys...)
			// The response is the next PDU: no aborted task has a status, before or after it (ISCSI-60).
			if res := c.managed(tt.run(r, c)); res.Response != tt.want {
				t.Errorf("response %v, want %v", res.Response, tt.want)
			}
			if tt.gone {
				c.closed()
				await(t, "the session is gone", func() bool { return len(r.srv.Sessions()) == 0 })
				return
			}
			c.ping()
		})
	}
	t.Run("QUERY ASYNC EVENT, a unit attention", func(t *testing.T) {
		c := newRig(t).login(level2)
		res := c.managed(c.manage(pdu.QueryAsyncEvent, pdu.ReservedTag))
		if res.Response != pdu.FunctionSucceeded || res.Additional[0] != 0x16 || res.Additional[1] != 0x29 {
			t.Errorf("%+v", res)
		}
	})
}

// A reset ends the commands of other initiators too: they see TASK ABORTED and then the unit attention.
func TestResetOfOthers(t *testing.T) {
	for _, f := range []pdu.TaskFunction{pdu.LogicalUnitReset, pdu.ClearTaskSet} {
		t.Run(f.String(), func(t *testing.T) {
			r := newRig(t)
			g := r.gate(scsitest.OpRead)
			a := r.ready()
			b := r.dial()
			b.isid[5] = 2
			b.login()
			b.tur()
			itt := a.command(read16(0, 1), 512, nil, 0)
			<-g.entered
			if res := b.managed(b.manage(f, pdu.ReservedTag)); res.Response != pdu.FunctionComplete {
				t.Fatal(res.Response)
			}
			if res := a.finish(itt, nil); res.status != scsi.TaskAborted {
				t.Errorf("status %#x", res.status)
			}
			a.ping()
		})
	}
}

// ISCSI-72, ISCSI-73, ISCSI-74.
func TestText(t *testing.T) {
	first := func(c *client) pdu.TextRequest {
		return pdu.TextRequest{Immediate: true, Final: true, ITT: c.tag(), TTT: pdu.ReservedTag}
	}
	both := func(addr string) string {
		return "TargetName=" + targetName + "\x00TargetAddress=" + addr + ",1\x00TargetName=" + secondTarget + "\x00TargetAddress=" + addr + ",1\x00"
	}
	t.Run("discovery", func(t *testing.T) {
		r := newRig(t)
		c := r.login("SessionType=Discovery")
		resp, text := c.text(first(c), "SendTargets=All\x00")
		if !resp.Final || resp.TTT != pdu.ReservedTag || text != both(r.addr) {
			t.Errorf("%+v %q", resp, text)
		}
		if _, text := c.text(first(c), "SendTargets="+secondTarget+"\x00"); strings.Contains(text, targetName) || !strings.Contains(text, secondTarget) {
			t.Errorf("%q", text)
		}
		if _, text := c.text(first(c), "SendTargets=iqn.2001-01.com.example:nothing\x00"); text != "" {
			t.Errorf("%q", text)
		}
		// Nothing but Text and Logout belongs here.
		var h pdu.Header
		(&pdu.NopOut{Immediate: true, ITT: 1, TTT: pdu.ReservedTag}).Encode(&h)
		c.write(&h, nil)
		c.reject(pdu.RejectProtocolError)
		c.command(make([]byte, 6), 0, nil, 0)
		c.reject(pdu.RejectProtocolError)
		c.logout(pdu.CloseSession, 0)
		c.closed()
	})
	t.Run("only what the initiator may see", func(t *testing.T) {
		r := newRig(t)
		r.hidden[targetName] = true
		c := r.login("SessionType=Discovery")
		if _, text := c.text(first(c), "SendTargets=All\x00"); strings.Contains(text, targetName) {
			t.Errorf("%q", text)
		}
	})
	t.Run("in a normal session", func(t *testing.T) {
		r := newRig(t)
		c := r.ready()
		own := "TargetName=" + targetName + "\x00TargetAddress=" + r.addr + ",1\x00"
		for _, v := range []string{"", "All", targetName} {
			if _, text := c.text(first(c), "SendTargets="+v+"\x00"); text != own {
				t.Errorf("SendTargets=%s: %q", v, text)
			}
		}
		for _, v := range []string{"A", "Alle", "all", secondTarget} {
			if _, text := c.text(first(c), "SendTargets="+v+"\x00"); text != "SendTargets=Reject\x00" {
				t.Errorf("SendTargets=%s: %q", v, text)
			}
		}
		if _, text := c.text(first(c), "sendtargets=All\x00X-key=1\x00"); text != "sendtargets=NotUnderstood\x00X-key=NotUnderstood\x00" {
			t.Errorf("%q", text)
		}
		c.ping()
	})
	t.Run("long answers come in pieces", func(t *testing.T) {
		r := newRig(t)
		c := r.login("SessionType=Discovery", "MaxRecvDataSegmentLength=512")
		var text string
		req := first(c)
		keys := "SendTargets=All\x00"
		for i := range 20 {
			keys += "X-" + string(rune('a'+i)) + strings.Repeat("x", 40) + "=1\x00"
		}
		resp, piece := c.text(req, keys)
		pieces := 1
		for text = piece; !resp.Final; pieces++ {
			if len(piece) > 512 || !resp.Continue || resp.TTT == pdu.ReservedTag {
				t.Fatalf("%+v with %d bytes", resp, len(piece))
			}
			next := req
			next.TTT = resp.TTT
			resp, piece = c.text(next, "")
			text += piece
		}
		if pieces < 2 || !strings.HasPrefix(text, both(r.addr)) || strings.Count(text, "Irrelevant") != 20 {
			t.Errorf("%d pieces: %q", pieces, text)
		}
	})
	t.Run("a request in pieces, F=0, and a stale tag", func(t *testing.T) {
		r := newRig(t)
		c := r.ready()
		req := first(c)
		req.Final, req.Continue = false, true
		resp, text := c.text(req, "SendTar")
		if resp.Final || resp.TTT == pdu.ReservedTag || text != "" {
			t.Fatalf("%+v %q", resp, text)
		}
		req.TTT, req.Continue = resp.TTT, false
		resp, text = c.text(req, "gets=\x00")
		if resp.Final || !strings.Contains(text, targetName) { // F=1 may not answer F=0
			t.Fatalf("%+v %q", resp, text)
		}
		stale := req
		stale.TTT += 100
		c.sendText(stale, "")
		c.reject(pdu.RejectInvalidField)
		req.TTT, req.Final = resp.TTT, true
		if resp, text = c.text(req, ""); !resp.Final || text != "" {
			t.Fatalf("%+v %q", resp, text)
		}
		c.sendText(req, "")
		c.reject(pdu.RejectInvalidField)
	})
	t.Run("errors", func(t *testing.T) {
		r := newRig(t)
		c := r.ready()
		for _, text := range []string{"SendTargets=\x00SendTargets=\x00", "nonsense\x00", "SendTargets=", "AuthMethod=None\x00"} {
			c.sendText(first(c), text)
			c.reject(pdu.RejectProtocolError)
		}
		c.sendText(first(c), strings.Repeat("\x00", 20000))
		c.reject(pdu.RejectLongOperation)
		if _, text := c.text(first(c), "MaxBurstLength=512\x00"); text != "MaxBurstLength=Reject\x00" {
			t.Errorf("%q", text)
		}
	})
	t.Run("MaxRecvDataSegmentLength in full feature phase", func(t *testing.T) {
		r := newRig(t)
		c := r.ready()
		if _, text := c.text(first(c), "MaxRecvDataSegmentLength=512\x00"); text != "" {
			t.Errorf("%q", text)
		}
		if res := c.good(read16(0, 4), 2048, nil); res.dataIn != 4 {
			t.Errorf("%d Data-In", res.dataIn)
		}
	})
}

// Advertised addresses replace those of the listener.
func TestAdvertise(t *testing.T) {
	r := newRig(t)
	l := pipeListener(t)
	served := make(chan error, 1)
	go func() { served <- r.srv.Serve(l, iscsi.Portal{Advertise: "gateway.example:3260", Group: 1}) }()
	c := &client{t: t, c: l.dial(t), isid: pdu.ISID{0x40}, itt: 1}
	c.login("SessionType=Discovery")
	_, text := c.text(pdu.TextRequest{Immediate: true, Final: true, ITT: c.tag(), TTT: pdu.ReservedTag}, "SendTargets="+targetName+"\x00")
	if want := "TargetName=" + targetName + "\x00TargetAddress=gateway.example:3260,1\x00TargetAddress=" + r.addr + ",1\x00"; text != want {
		t.Errorf("%q", text)
	}
	l.Close()
	<-served
}

// ISCSI-70.
func TestNop(t *testing.T) {
	c := newRig(t).ready("MaxRecvDataSegmentLength=512")
	c.ping()
	p := pdu.NopOut{ITT: c.tag(), TTT: pdu.ReservedTag, CmdSN: c.sn()}
	var h pdu.Header
	p.Encode(&h)
	c.write(&h, pattern(1, 1000))
	rh, data := c.read()
	if rh.ITT() != p.ITT || len(data) != 512 || rh.ExpCmdSN() != c.cmdSN {
		t.Errorf("%v with %d bytes", rh.String(), len(data))
	}
	// Without a tag it asks for no answer.
	p = pdu.NopOut{Immediate: true, ITT: pdu.ReservedTag, TTT: pdu.ReservedTag}
	p.Encode(&h)
	c.write(&h, nil)
	c.ping()
}
