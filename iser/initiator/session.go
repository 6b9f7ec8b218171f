package initiator

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// gatherFrom is with how many active commands others are likely to send one in a moment. Who sends first lets them, so that one write takes all.
const gatherFrom = 3

// controlSlots is how many tasks besides SCSI commands may be outstanding.
const controlSlots = 16

// logoutPatience is how long a target may take to end the connection after a logout. Some leave it to the initiator at first.
const logoutPatience = 200 * time.Millisecond

// Session is a logged-in session with one connection. All methods may be called concurrently.
type Session struct {
	o     Options
	login Login
	mover datamover

	tasks   []task      // SCSI slots, then control slots
	free    chan uint32 // free SCSI slots
	control chan uint32 // free control slots

	expStatSN atomic.Uint32 // written by the reader
	received  atomic.Uint64 // PDUs; liveness

	mu       sync.Mutex // guards all below
	cmdSN    pdu.Serial // of the next command
	maxCmdSN pdu.Serial
	waiters  []chan struct{} // commands that wait for the window to open
	err      error           // why the session ends; nil while it is usable
	parting  error           // what err becomes with the answer to a logout
	leaving  bool            // the target asked for a logout: no new commands
	busy     int             // active SCSI tasks
	// gathering: somebody lets others add commands, and then sends all of them.
	gathering bool
	idle      chan struct{} // closed when leaving and busy is 0; nil otherwise
	rejected  map[pdu.TaskTag]bool

	immediate []pdu.Serial // CmdSN of the immediate PDUs that count against the target's limit, oldest first
	retiring  bool         // a ping that ends them is under way
	owed      []pdu.NopIn  // pings that are to be answered when the limit allows it

	seenMax pdu.Serial // the reader's copy of maxCmdSN

	closing sync.Once
	done    chan struct{} // closed when every task has ended
	wg      sync.WaitGroup
}

// Dial connects and logs in to a normal session with o.TargetName. It follows redirections.
func Dial(ctx context.Context, o Options) (*Session, error) {
	if o.TargetName == "" {
		return nil, errors.New("initiator: no target name")
	}
	return dial(ctx, o)
}

func dial(ctx context.Context, o Options) (*Session, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	for hop := 0; ; hop++ {
		s, err := open(ctx, o)
		if err == nil {
			return s, nil
		}
		var refused *LoginError
		if hop < maxRedirects && errors.As(err, &refused) && refused.Status.Redirect() && refused.TargetAddress != "" {
			o.Portal = refused.TargetAddress
			continue
		}
		return nil, err
	}
}

// open makes one connection and logs in.
func open(ctx context.Context, o Options) (*Session, error) {
	if o.ISER != nil && (!o.ISER.Stream || o.TargetName != "") {
		m, l, err := dialISER(ctx, &o)
		if err != nil {
			return nil, err
		}
		s := prepareSession(o, l)
		m.attach(s)
		s.start(m)
		return s, nil
	}
	c, err := DialConn(ctx, o)
	if err != nil {
		return nil, err
	}
	l, err := c.Login(ctx, o)
	if err != nil {
		c.Close()
		return nil, err
	}
	return newSession(c, o, l), nil
}

// newSession takes over a logged-in connection.
func newSession(c *Conn, o Options, l *Login) *Session {
	s := prepareSession(o, l)
	s.start(newTCPMover(c, &s.login.Parameters, s.ack, s.fail))
	return s
}

// prepareSession makes a session that has no connection yet.
func prepareSession(o Options, l *Login) *Session {
	s := &Session{
		o: o, login: *l,
		tasks: make([]task, o.QueueDepth+controlSlots),
		free:  make(chan uint32, o.QueueDepth), control: make(chan uint32, controlSlots),
		cmdSN: l.CmdSN, maxCmdSN: l.MaxCmdSN, seenMax: l.MaxCmdSN,
		rejected: make(map[pdu.TaskTag]bool),
		done:     make(chan struct{}),
	}
	for i := range s.tasks {
		t := &s.tasks[i]
		t.index = uint32(i)
		t.done = make(chan struct{}, 1)
		if i < o.QueueDepth {
			s.free <- t.index
		} else {
			t.kind = controlTask
			s.control <- t.index
		}
	}
	s.expStatSN.Store(uint32(l.ExpStatSN))
	return s
}

// start begins the full feature phase.
func (s *Session) start(m datamover) {
	s.mover = m
	s.wg.Go(s.read)
	if s.o.PingInterval > 0 {
		s.wg.Go(s.keepAlive)
	}
}

// Alloc returns n bytes of memory that commands use without a copy of their own: registered, page-aligned and outside the Go heap
// if the session speaks iSER. Its content is undefined. It belongs to the caller until Free, also when the session is over by then. Any other
// memory will do for a command, too.
func (s *Session) Alloc(n int) ([]byte, error) { return s.mover.alloc(n) }

// Free takes back what Alloc returned, from its first byte on. No command may use it any more.
func (s *Session) Free(b []byte) { s.mover.free(b) }

// Parameters returns what the login agreed on.
func (s *Session) Parameters() Parameters { return s.login.Parameters }

// TSIH returns the target's session identifying handle.
func (s *Session) TSIH() uint16 { return s.login.TSIH }

// ISID returns the initiator's part of the session's identity.
func (s *Session) ISID() pdu.ISID { return s.login.ISID }

// Done is closed when the session has ended and no command is outstanding any more.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err returns why the session ended, or nil while it is usable.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close logs out if the connection still works, and ends the session. Commands outstanding
// end with ErrConnection. It is bounded by TaskTimeout and may be called more than once.
func (s *Session) Close() error {
	s.closing.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.o.TaskTimeout)
		defer cancel()
		s.part(ErrClosed, s.logout(ctx, ErrClosed) == nil) // best effort: the connection may be gone
	})
	s.wg.Wait()
	return nil
}

// Kill closes the connection without a logout, as a crash of the initiator would.
func (s *Session) Kill() {
	s.closing.Do(func() { s.fail(ErrClosed) })
	s.wg.Wait()
}

func (s *Session) ack() pdu.Serial { return pdu.Serial(s.expStatSN.Load()) }

// fail ends the session with err, unless it is ending already.
func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.mover.close()
}

// part ends the session with err. After a logout over iSER it is the target that ends the connection (RFC 7145, 5.2.1).
func (s *Session) part(err error, loggedOut bool) {
	if _, ok := s.mover.(*iserMover); ok && loggedOut {
		timer := time.NewTimer(logoutPatience)
		defer timer.Stop()
		s.mover.rouse()
		select {
		case <-s.done:
		case <-timer.C:
		}
	}
	s.fail(err)
}

// read runs the datamover, and ends all tasks when it returns: nobody else touches their buffers then.
func (s *Session) read() {
	cause := s.mover.run(s)
	s.mu.Lock()
	if s.err == nil {
		s.err = fmt.Errorf("%w: %w", ErrConnection, cause)
		s.o.Logger.Debug("iSCSI session ended", "target", s.o.TargetName, "portal", s.o.Portal, "err", cause)
	} else {
		cause = s.err
	}
	lost := cause
	if !errors.Is(lost, ErrConnection) {
		lost = fmt.Errorf("%w: %w", ErrConnection, cause)
	}
	s.wakeLocked()
	for i := range s.tasks {
		if t := &s.tasks[i]; t.active {
			s.finishLocked(t, lost)
		}
	}
	s.mu.Unlock()
	close(s.done)
}

// keepAlive pings a silent target.
func (s *Session) keepAlive() {
	tick := time.NewTicker(s.o.PingInterval)
	defer tick.Stop()
	last := s.received.Load()
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
		}
		if n := s.received.Load(); n != last {
			last = n
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.o.PingTimeout)
		_, err := s.Ping(ctx, nil)
		cancel()
		if err != nil {
			s.fail(fmt.Errorf("%w: the target does not answer: %w", ErrConnection, err))
			return
		}
		last = s.received.Load()
	}
}

// Execute runs a SCSI command: out is sent, in is filled. At most one of them may be
// non-empty. The error is about the transport: a status other than GOOD is in the response.
//
// When ctx ends, the task is aborted, and Execute returns once the target has confirmed it: then the error Is ErrAborted
// and wraps ctx's. The buffers are not touched any more when Execute returns.
func (s *Session) Execute(ctx context.Context, lun uint16, cdb, out, in []byte) (Response, error) {
	t, err := s.send(ctx, pdu.LUNOf(lun), pdu.AttrSimple, cdb, out, in)
	if err != nil {
		return Response{}, err
	}
	return s.wait(ctx, t)
}

// Command is a SCSI command in flight.
type Command struct {
	s *Session
	t *task
	// Tag and CmdSN are what task management refers to.
	Tag   pdu.TaskTag
	CmdSN pdu.Serial
	lun   pdu.LUN
}

// Submit sends a SCSI command and does not wait for its end. Wait must be called exactly once, and the buffers belong
// to the command until it returns.
func (s *Session) Submit(ctx context.Context, lun uint16, attr pdu.TaskAttr, cdb, out, in []byte) (*Command, error) {
	t, err := s.send(ctx, pdu.LUNOf(lun), attr, cdb, out, in)
	if err != nil {
		return nil, err
	}
	s.mover.rouse()
	return &Command{s: s, t: t, Tag: t.cmd.ITT, CmdSN: t.cmd.CmdSN, lun: t.cmd.LUN}, nil
}

// Wait returns how the command ended, as Execute does.
func (c *Command) Wait(ctx context.Context) (Response, error) { return c.s.wait(ctx, c.t) }

// send acquires a slot and a CmdSN, and sends the command.
func (s *Session) send(ctx context.Context, lun pdu.LUN, attr pdu.TaskAttr, cdb, out, in []byte) (*task, error) {
	switch {
	case len(cdb) == 0 || len(cdb) > pdu.MaxCDBLength:
		return nil, fmt.Errorf("initiator: a CDB of %d bytes", len(cdb))
	case len(out) > 0 && len(in) > 0:
		return nil, errors.New("initiator: bidirectional commands are not supported")
	case uint64(len(out)) > 1<<32-1 || uint64(len(in)) > 1<<32-1:
		return nil, errors.New("initiator: a transfer of 4 GiB or more")
	}
	var ahs []byte
	if len(cdb) > pdu.FixedCDBLength {
		ahs = (&pdu.AHS{CDB: cdb[pdu.FixedCDBLength:]}).Append(nil)
		if most := s.login.TargetMaxAHS; most > 0 && len(ahs) > int(most) {
			return nil, fmt.Errorf("initiator: a CDB of %d bytes, the target takes %d bytes of additional header", len(cdb), most)
		}
	}
	t, err := s.acquire(ctx, s.free)
	if err != nil {
		return nil, err
	}
	t.out, t.in = out, in
	t.cmd = pdu.SCSICommand{
		Read: len(in) > 0, Write: len(out) > 0, Attr: attr, LUN: lun, EDTL: uint32(len(out) + len(in)),
	}
	copy(t.cmd.CDB[:], cdb)
	tag := t.renew()
	if err := s.mover.prepare(t); err != nil {
		s.release(t)
		return nil, err
	}

	s.mu.Lock()
	for s.err == nil && !s.leaving && s.cmdSN.After(s.maxCmdSN) {
		if err := s.waitWindowLocked(ctx); err != nil {
			s.mu.Unlock()
			s.release(t)
			return nil, err
		}
	}
	if s.err != nil || s.leaving {
		err := s.closedLocked()
		s.mu.Unlock()
		s.release(t)
		return nil, err
	}
	t.tag, t.active = tag, true
	s.busy++
	t.cmd.ITT = tag
	t.cmd.CmdSN = s.cmdSN
	t.cmd.ExpStatSN = s.ack()
	s.cmdSN++
	s.mover.command(t, ahs)
	if s.gathering {
		s.mu.Unlock()
		return t, nil // it goes with what is gathered
	}
	if s.busy < gatherFrom {
		s.mu.Unlock()
		s.mover.flush(true)
		return t, nil
	}
	s.gathering = true
	s.mu.Unlock()
	runtime.Gosched()
	s.mu.Lock()
	s.gathering = false
	s.mu.Unlock()
	s.mover.flush(true)
	return t, nil
}

// closedLocked is the error of a request that was not sent.
func (s *Session) closedLocked() error {
	if s.err != nil && !errors.Is(s.err, ErrClosed) {
		return fmt.Errorf("%w: %w", ErrClosed, s.err)
	}
	return ErrClosed
}

// waitWindowLocked waits until the command window may have opened. It releases mu meanwhile.
func (s *Session) waitWindowLocked(ctx context.Context) error {
	w := make(chan struct{}, 1)
	s.waiters = append(s.waiters, w)
	s.mu.Unlock()
	defer s.mu.Lock()
	s.mover.rouse()
	select {
	case <-w:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// wakeLocked wakes who waits for the window.
func (s *Session) wakeLocked() {
	for _, w := range s.waiters {
		w <- struct{}{}
	}
	s.waiters = nil
}

// acquire takes a slot.
func (s *Session) acquire(ctx context.Context, from chan uint32) (*task, error) {
	select {
	case i := <-from:
		return &s.tasks[i], nil
	default:
	}
	select {
	case i := <-from:
		return &s.tasks[i], nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.done:
		s.mu.Lock()
		defer s.mu.Unlock()
		return nil, s.closedLocked()
	}
}

// release gives a slot back.
func (s *Session) release(t *task) {
	if t.kind == scsiTask {
		s.mover.finish(t)
		t.out, t.in = nil, nil
		s.free <- t.index
	} else {
		s.control <- t.index
	}
}

// wait waits for the end of a SCSI task and releases it.
func (s *Session) wait(ctx context.Context, t *task) (Response, error) {
	s.mover.attend(ctx, t)
	select {
	case <-t.done:
	case <-ctx.Done():
		s.abandon(t)
	}
	rsp, err := t.rsp, t.err
	s.release(t)
	if errors.Is(err, ErrAborted) && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, ctx.Err())
	}
	return rsp, err
}

// abandon aborts a task that nobody wants any more, and waits for its end. A target that does not know the task may still
// be about to answer it. If neither an answer nor the abort comes, the session ends: only so
// can the buffers be given back.
func (s *Session) abandon(t *task) {
	ctx, cancel := context.WithTimeout(context.Background(), s.o.TaskTimeout)
	defer cancel()
	r, err := s.manage(ctx, pdu.TaskRequest{Function: pdu.AbortTask, LUN: t.cmd.LUN, Referenced: t.cmd.ITT, RefCmdSN: t.cmd.CmdSN})
	if err == nil {
		select {
		case <-t.done:
			return
		case <-ctx.Done():
			err = &TaskError{Function: pdu.AbortTask, Response: r}
		}
	}
	s.fail(fmt.Errorf("%w: a task could not be aborted: %w", ErrConnection, err))
	<-t.done
}

// finishLocked ends an active task. Only who receives calls it.
func (s *Session) finishLocked(t *task, err error) {
	if t.kind == scsiTask && !s.mover.end(t) {
		return // the connection is failing, and the task with it
	}
	t.active = false
	t.err = err
	if t.kind == scsiTask {
		s.busy--
		if s.busy == 0 && s.idle != nil {
			close(s.idle)
			s.idle = nil
		}
	}
	if t.orphan {
		t.orphan = false
		s.release(t)
		return
	}
	t.unref()
}
