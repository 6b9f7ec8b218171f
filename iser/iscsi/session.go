package iscsi

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// sessionKey names an I_T nexus (RFC 7143, 4.4.1): at most one session exists for each.
type sessionKey struct {
	initiator string
	isid      pdu.ISID
	target    string
	group     uint16
	discovery bool
	portal    string // of a discovery session that names no target
}

// session is one session. Lock order: order, then mu.
type session struct {
	srv      *Server
	key      sessionKey
	tsih     uint16
	params   Parameters // of the leading connection
	units    LogicalUnits
	nexus    scsi.Nexus
	chapUser string
	depth    int
	staging  int64 // reserved of the server's staging budget
	started  time.Time
	traits   Traits

	// exp and max are the command window [exp,max] (RFC 7143, 4.2.2.1). They are written
	// under order and mu respectively, and neither goes back.
	exp, max atomic.Uint32

	// order serializes the arrival of non-immediate commands, so that they are delivered in CmdSN order.
	order sync.Mutex
	// held are commands that arrived before a lower CmdSN on another connection; guarded by order.
	held map[pdu.Serial]arrival
	// expMoved is closed and replaced when exp moves and somebody waits; guarded by order.
	expMoved chan struct{}

	mu sync.Mutex
	// The fields below are guarded by mu.
	conns       map[uint16]*conn
	tasks       map[pdu.TaskTag]*Task
	free        *Task // for reuse, linked by next; at most as many as ran at the same time
	running     int   // commands not yet left, tasks and task management functions
	established bool
	ended       bool          // takes no more connections and commands
	orphan      *time.Timer   // ends it, when it has no connection
	retained    time.Time     // since when it has none, within Time2Retain; else zero
	quiet       chan struct{} // closed when running is 0 and ended; nil if nobody waits

	// dying is closed when the session begins to end.
	dying chan struct{}
	// done is closed when the session is gone: its nexus is lost, and it is out of the table.
	done chan struct{}

	commands, reads, writes atomic.Uint64
}

// arrival is a command on its way to delivery.
type arrival struct {
	c    *conn
	task *Task // a SCSI Command
	pdu  *PDU  // any other request
}

// disposition says what becomes of a request.
type disposition uint8

const (
	accepted disposition = iota
	dropped              // silently (ISCSI-40)
	inProgress
	surplus
)

// arrive takes one non-immediate request and delivers it and what waited for it, in CmdSN order.
func (s *session) arrive(sn pdu.Serial, a arrival) disposition {
	s.order.Lock()
	defer s.order.Unlock()
	if d := s.duplicate(a, sn); d != accepted {
		return d
	}
	exp := pdu.Serial(s.exp.Load())
	if !sn.InWindow(exp, pdu.Serial(s.max.Load())) {
		return dropped
	}
	if sn != exp {
		if _, twice := s.held[sn]; twice {
			return dropped
		}
		if a.pdu != nil {
			a.pdu = a.pdu.clone()
		}
		if s.held == nil {
			s.held = make(map[pdu.Serial]arrival)
		}
		s.held[sn] = a
		return accepted
	}
	s.exp.Store(uint32(exp.Next())) // before its answer can go out
	s.deliver(a)
	s.advance(exp.Next())
	return accepted
}

// advance moves exp to next, past what is held from there on. order is held.
func (s *session) advance(next pdu.Serial) {
	s.exp.Store(uint32(next))
	for len(s.held) > 0 {
		a, ok := s.held[next]
		if !ok {
			break
		}
		delete(s.held, next)
		next = next.Next()
		s.exp.Store(uint32(next))
		if a.c != nil {
			s.deliver(a)
		}
	}
	if s.expMoved != nil {
		close(s.expMoved)
		s.expMoved = nil
	}
}

// duplicate looks the task tag up before CmdSN is judged (ISCSI-43).
func (s *session) duplicate(a arrival, sn pdu.Serial) disposition {
	if a.task == nil {
		return accepted
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.tasks[a.task.ITT]
	switch {
	case old == nil || old.state == taskResponding:
		return accepted
	case old.CmdSN == sn && !old.immediate && !a.task.immediate:
		return dropped
	}
	return inProgress
}

// deliver starts a request. For non-immediate ones order is held.
func (s *session) deliver(a arrival) {
	if a.task == nil {
		a.c.request(a.pdu)
		return
	}
	t := a.task
	s.mu.Lock()
	if s.ended || a.c.gone {
		s.mu.Unlock()
		s.bumpMax(t)
		s.discard(t)
		return
	}
	s.tasks[t.ITT] = t
	s.running++
	s.mu.Unlock()
	s.commands.Add(1)
	switch {
	case t.Write:
		s.writes.Add(1)
	case t.Read:
		s.reads.Add(1)
	}
	s.units.Admit(s.nexus, uint64(t.LUN), &t.cmd)
	s.srv.workers.run(t)
}

// immediate delivers an immediate SCSI Command.
func (s *session) immediate(c *conn, t *Task) disposition {
	if d := s.duplicate(arrival{c: c, task: t}, t.CmdSN); d != accepted {
		return d
	}
	if !c.takeImmediate() {
		return surplus
	}
	s.deliver(arrival{c: c, task: t})
	return accepted
}

// discard ends a task that was never delivered.
func (s *session) discard(t *Task) {
	t.c.dm.Discard(t.Transfer)
	s.mu.Lock()
	s.recycleLocked(t)
	s.mu.Unlock()
}

// bumpMax opens the window for the successor of a command that ended.
func (s *session) bumpMax(t *Task) {
	if t.immediate {
		t.c.immediates.Add(-1)
		return
	}
	s.max.Add(1)
}

// complete sends the status of a task, unless the task was aborted, and lets it leave.
func (s *session) complete(t *Task, res *scsi.Result) {
	closed := pdu.Serial(s.max.Load()).Before(pdu.Serial(s.exp.Load()))
	s.mu.Lock()
	respond := t.state == taskRunning ||
		t.state == taskAbortedOther && (res.Status == scsi.TaskAborted || res.Status == scsi.Good || res.Status == scsi.ConditionMet)
	if respond {
		t.state = taskResponding
	}
	s.mu.Unlock()
	s.bumpMax(t)
	t.enterMover()
	if respond {
		t.c.dm.SendControl(t.prepare(res)) // an error ends the connection, and the reader sees it too
	}
	c := t.c
	c.dm.Release(t)
	t.leaveMover()
	if t.loan != nil {
		t.loan.Release()
		t.loan = nil
	}
	s.mu.Lock()
	if s.tasks[t.ITT] == t {
		delete(s.tasks, t.ITT)
	}
	for _, ch := range t.waiters {
		close(ch)
	}
	s.recycleLocked(t)
	s.leaveLocked()
	s.mu.Unlock()
	if !respond && closed {
		c.windowUpdate()
	}
}

// leaveLocked counts one command out.
func (s *session) leaveLocked() {
	s.running--
	if s.running == 0 && s.ended && s.quiet != nil {
		close(s.quiet)
		s.quiet = nil
	}
}

// enter counts a command in that is no Task. It is false if the session has ended.
func (s *session) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.running++
	return true
}

func (s *session) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveLocked()
}

// lose is called by a connection whose reader has ended. Its tasks end without status: at error recovery
// level 0 nothing could carry it (ISCSI-84).
func (s *session) lose(c *conn) {
	s.mu.Lock()
	c.gone = true
	if s.conns[c.cid] == c {
		delete(s.conns, c.cid)
	}
	cleared := make(map[uint64]bool)
	var left []<-chan struct{}
	for _, t := range s.tasks {
		if t.c == c && t.abortLocked() {
			cleared[uint64(t.LUN)] = true
			left = append(left, t.leftLocked())
		}
	}
	survives := !s.ended && len(s.conns) > 0
	retain := time.Duration(0)
	if !s.ended && len(s.conns) == 0 && !c.loggedOut.Load() {
		if s.params.DefaultTime2Retain > 0 && !s.key.discovery {
			retain = time.Duration(s.params.DefaultTime2Wait+s.params.DefaultTime2Retain) * time.Second
			s.retained = time.Now()
		}
		if c.replaced {
			// Its successor is in the middle of its login.
			retain = max(retain, s.srv.opt.LoginTimeout)
			s.retained = time.Time{}
		}
		if retain > 0 {
			s.orphan = time.AfterFunc(retain, func() { s.end(scsi.SessionClosed, false) })
		}
	}
	last := !s.ended && len(s.conns) == 0 && retain == 0
	s.mu.Unlock()

	// Commands of this connection that wait for a lower CmdSN are gone, but their numbers were received.
	s.order.Lock()
	for sn, a := range s.held {
		if a.c == c {
			if a.task != nil {
				c.dm.Discard(a.task.Transfer)
			}
			s.held[sn] = arrival{}
			s.max.Add(1)
		}
	}
	s.order.Unlock()

	for _, ch := range left {
		<-ch
	}
	if last {
		s.end(scsi.SessionClosed, false)
		return
	}
	if (survives || retain > 0) && !c.loggedOut.Load() {
		for lun := range cleared {
			s.units.CommandsCleared(s.nexus, lun)
		}
	}
}

// end terminates the session: it aborts its tasks, closes its connections, and reports the loss of the nexus when
// all of it has stopped. It does not wait; done tells.
func (s *session) end(why scsi.LossReason, graceful bool) {
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		return
	}
	s.ended = true
	close(s.dying)
	if s.orphan != nil {
		s.orphan.Stop()
	}
	for _, t := range s.tasks {
		t.abortLocked()
	}
	conns := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		conns = append(conns, c)
	}
	quiet := make(chan struct{})
	if s.running == 0 {
		close(quiet)
	} else {
		s.quiet = quiet
	}
	established := s.established
	s.mu.Unlock()
	for _, c := range conns {
		c.close(graceful)
	}
	go func() {
		<-quiet
		for _, c := range conns {
			<-c.stopped
		}
		if established {
			s.units.NexusLost(s.nexus, why)
		}
		s.srv.remove(s)
		close(s.done)
	}()
}

// clone copies a PDU that is to outlive the next Receive.
func (p *PDU) clone() *PDU {
	return &PDU{Header: p.Header, AHS: append([]byte(nil), p.AHS...), Data: append([]byte(nil), p.Data...), Fault: p.Fault}
}
