package iscsi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/scsi"
)

// ErrNoSession means that no session has the TSIH.
var ErrNoSession = errors.New("iscsi: no such session")

// Portal is one network portal.
type Portal struct {
	// Advertise is the host:port that SendTargets gives for this portal. Empty: the address the
	// portal listens on; where that is unspecified, the local address of the discovery session.
	Advertise string
	// Group is the target portal group tag. 0 means 1.
	Group uint16

	address string // of the listener
}

func (p *Portal) group() uint16 {
	if p.Group == 0 {
		return 1
	}
	return p.Group
}

// Server is an iSCSI target node: its portals and its sessions. All methods may be called concurrently.
type Server struct {
	opt     Options
	metrics *metrics
	workers *workers
	logs    *logs
	book    challenges
	// ctx ends when the server is closed for good.
	ctx    context.Context
	cancel context.CancelFunc

	mu sync.Mutex
	// The fields below are guarded by mu.
	portals   []*Portal
	listeners map[Listener]struct{}
	sessions  map[sessionKey]*session
	tsihs     map[uint16]*session
	lastTSIH  uint16
	staged    int64 // bytes reserved of StagingBytes
	discovery int   // discovery sessions
	conns     map[*conn]struct{}
	logins    map[*conn]string // connections that have not logged in, by address
	perAddr   map[string]int
	stopping  bool
}

// NewServer returns a Server. It names every fault of the options.
func NewServer(o Options) (*Server, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	s := &Server{
		opt: o, metrics: newMetrics(o.Registerer), workers: newWorkers(), logs: newLogs(o.Registerer),
		listeners: make(map[Listener]struct{}), sessions: make(map[sessionKey]*session), tsihs: make(map[uint16]*session),
		conns: make(map[*conn]struct{}), logins: make(map[*conn]string), perAddr: make(map[string]int),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// ErrServerClosed is returned by Serve after Shutdown or Close.
var ErrServerClosed = errors.New("iscsi: server is closed")

// Serve accepts connections on a portal until the listener fails or the server is shut down,
// which closes the listener. Each portal has a call of its own.
func (s *Server) Serve(l Listener, p Portal) error {
	p.address = addrString(l.Addr())
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		l.Close()
		return ErrServerClosed
	}
	s.listeners[l] = struct{}{}
	s.portals = append(s.portals, &p)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		for i := range s.portals {
			if s.portals[i] == &p {
				s.portals = append(s.portals[:i:i], s.portals[i+1:]...)
				break
			}
		}
		s.mu.Unlock()
		l.Close()
	}()
	var delay time.Duration
	for {
		dm, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			stopping := s.stopping
			s.mu.Unlock()
			if stopping {
				return ErrServerClosed
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// Out of descriptors, or a connection that died in the queue: it passes.
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			s.opt.Logger.Warn("accept failed", "portal", p.address, "err", err)
			select {
			case <-time.After(delay):
			case <-s.ctx.Done():
			}
			continue
		}
		delay = 0
		s.accept(dm, &p)
	}
}

// accept starts a connection, unless a limit forbids it (ISCSI-16).
func (s *Server) accept(dm Datamover, p *Portal) {
	remote := addrString(dm.RemoteAddr())
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		host = remote
	}
	c := &conn{srv: s, dm: dm, portal: p, stopped: make(chan struct{}), log: s.opt.Logger.With("remote", remote)}
	s.mu.Lock()
	limit := ""
	switch {
	case s.stopping:
		limit = "shutdown"
	case len(s.logins) >= s.opt.MaxLogins:
		limit = "logins"
	case s.perAddr[host] >= s.opt.MaxLoginsPerAddress:
		limit = "address"
	}
	if limit == "" {
		s.conns[c] = struct{}{}
		s.logins[c] = host
		s.perAddr[host]++
	}
	s.mu.Unlock()
	if limit != "" {
		s.metrics.refused.WithLabelValues(limit).Inc()
		dm.Close(false)
		return
	}
	s.metrics.connections.Inc()
	go c.run()
}

// loggedIn takes a connection out of the count of those that have not logged in.
func (s *Server) loggedIn(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loggedInLocked(c)
}

func (s *Server) loggedInLocked(c *conn) {
	host, pending := s.logins[c]
	if !pending {
		return
	}
	delete(s.logins, c)
	if s.perAddr[host]--; s.perAddr[host] == 0 {
		delete(s.perAddr, host)
	}
}

// forget ends the accounting of a connection.
func (s *Server) forget(c *conn) {
	c.close(false)
	s.metrics.connections.Dec()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loggedInLocked(c)
	delete(s.conns, c)
}

func (s *Server) offer(t Traits) offer {
	o := &s.opt
	return offer{
		maxRecv: uint32(o.MaxRecvDataSegmentLength), maxConns: uint16(o.MaxConnections), maxBurst: uint32(o.MaxBurstLength),
		firstBurst: uint32(o.FirstBurstLength), maxR2T: uint16(o.MaxOutstandingR2T), time2Retain: uint16(o.Time2Retain / time.Second),
		protocolLevel: 2, noDigests: o.NoDigests, rdma: t.RDMA, message: t.message(), required: t.RDMARequired, unsolicited: o.UnsolicitedData,
	}
}

func (s *Server) loginConfig(c *conn) loginConfig {
	return loginConfig{
		backend: s.opt.Backend, offer: s.offer(c.dm.Traits()), algorithms: s.opt.Algorithms, book: &s.book, group: c.portal.group(),
		session: func(k sessionKey, tsih uint16) (*session, bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			found := s.sessions[k]
			return found, found != nil && found.tsih == tsih && tsih != 0
		},
	}
}

// attach gives a connection that logged in its session: a new one, in the place of an old one if the nexus has one, or the one it
// joins (RFC 7143, 6.3.1). It waits until what the connection replaces has ended.
func (s *Server) attach(ctx context.Context, c *conn, m *loginMachine) (pdu.LoginStatus, string) {
	c.cid = m.first.CID
	c.params = m.n.p
	if m.joins != nil {
		return s.join(ctx, c, m.joins)
	}
	ses := &session{
		srv: s, key: m.key(), params: m.n.p, units: m.access.Units, chapUser: m.chapUser, traits: c.dm.Traits(),
		nexus:   scsi.Nexus{InitiatorName: m.initiator, ISID: m.first.ISID, TargetName: m.target, PortalGroup: m.cfg.group},
		started: time.Now(), conns: map[uint16]*conn{c.cid: c}, tasks: make(map[pdu.TaskTag]*Task),
		dying: make(chan struct{}), done: make(chan struct{}), running: 1,
	}
	if ses.params.RDMAExtensions {
		ses.traits.Transport = transportISER
	}
	c.s = ses
	if ses.key.discovery && ses.key.target == "" {
		ses.key.portal = c.portal.address
	}
	old, status, why := s.enter(ses, s.opt.QueueDepth)
	for status == pdu.LoginOutOfResources && s.evict(ctx) {
		old, status, why = s.enter(ses, s.opt.QueueDepth)
	}
	if status == pdu.LoginOutOfResources { // then with what there is
		old, status, why = s.enter(ses, 1)
	}
	if status != pdu.LoginSuccess {
		return status, why
	}
	c.params.CommandWindow = ses.depth
	ses.exp.Store(uint32(m.first.CmdSN))
	ses.max.Store(uint32(m.first.CmdSN.Add(int32(ses.depth - 1))))
	s.metrics.sessions.WithLabelValues(ses.key.target, ses.traits.Transport).Inc()

	// running is 1 on behalf of this function: the session cannot be gone before it returns.
	defer ses.leave()
	if old != nil {
		old.end(scsi.SessionReinstated, false)
		select {
		case <-old.done:
		case <-ctx.Done():
			return ses.abandon(old), "the session's predecessor has not ended"
		case <-ses.dying:
			return ses.abandon(old), "reinstated by another login"
		}
	}
	ses.mu.Lock()
	if ses.ended {
		ses.mu.Unlock()
		return pdu.LoginTargetError, "reinstated by another login"
	}
	ses.established = !ses.key.discovery
	ses.mu.Unlock()
	if ses.established {
		ses.units.NexusEstablished(ses.nexus)
	}
	return pdu.LoginSuccess, ""
}

// enter puts a session into the tables, with a command window of at least that many, and returns the one whose place it takes. It fails if there
// is no room.
func (s *Server) enter(ses *session, least int) (old *session, status pdu.LoginStatus, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return nil, pdu.LoginServiceUnavailable, "shutting down"
	}
	old = s.sessions[ses.key]
	if old == nil && len(s.sessions) >= s.opt.MaxSessions {
		return nil, pdu.LoginOutOfResources, "too many sessions"
	}
	if ses.key.discovery && s.discovery >= max(s.opt.MaxSessions/4, 1) {
		// They need no authorization: they must not take the place of those that do.
		return nil, pdu.LoginOutOfResources, "too many discovery sessions"
	}
	if !s.windowLocked(ses, least) {
		return nil, pdu.LoginOutOfResources, "no memory for unsolicited data"
	}
	for s.lastTSIH++; s.lastTSIH == 0 || s.tsihs[s.lastTSIH] != nil; {
		s.lastTSIH++
	}
	ses.tsih = s.lastTSIH
	if ses.key.discovery {
		s.discovery++
	}
	s.sessions[ses.key] = ses
	s.tsihs[ses.tsih] = ses
	return old, pdu.LoginSuccess, ""
}

// evict ends the session that has been without a connection for the longest time: what it waits for, within Time2Retain, is less than a login
// that has arrived. It returns when that session is gone, and false if there is none, or ctx ends.
func (s *Server) evict(ctx context.Context) bool {
	var oldest *session
	var since time.Time
	for _, ses := range s.all() {
		ses.mu.Lock()
		if !ses.ended && !ses.retained.IsZero() && (oldest == nil || ses.retained.Before(since)) {
			oldest, since = ses, ses.retained
		}
		ses.mu.Unlock()
	}
	if oldest == nil || !oldest.expire() {
		return false
	}
	s.logs.end.log(s.opt.Logger, slog.LevelInfo, "session without a connection ended early: its place is needed", "initiator", oldest.key.initiator, "target", oldest.key.target)
	select {
	case <-oldest.done:
		return true
	case <-ctx.Done():
		return false
	}
}

// expire ends a session if it has no connection. It reports whether that was so.
func (s *session) expire() bool {
	s.mu.Lock()
	waits := s.orphan != nil && len(s.conns) == 0
	s.mu.Unlock()
	if waits {
		s.end(scsi.SessionClosed, false)
	}
	return waits
}

// abandon ends a session that never began, but not before its predecessor has ended: nobody may take the
// place of either while the old one can still write.
func (s *session) abandon(old *session) pdu.LoginStatus {
	s.mu.Lock()
	s.running++
	clear(s.conns) // its only connection, which is still to be told
	s.mu.Unlock()
	s.end(scsi.SessionReinstated, false)
	go func() {
		<-old.done
		s.leave()
	}()
	return pdu.LoginServiceUnavailable
}

// windowLocked gives the session as many commands as the staging budget has room for, if that is at least so many.
func (s *Server) windowLocked(ses *session, least int) bool {
	ses.depth = s.opt.QueueDepth
	if ses.key.discovery {
		ses.depth = min(ses.depth, 8)
		return true
	}
	first := int64(ses.params.Unsolicited())
	if first == 0 || ses.params.RDMAExtensions { // then it stays in the receives of the Datamover, which provides for the window
		return true
	}
	// Immediate commands are outside of the window, and each connection may hold one command more that is about to be dropped.
	extra := int64(ses.params.MaxConnections) * (maxImmediate + 1)
	room := (s.opt.StagingBytes-s.staged)/first - extra
	if room < int64(least) {
		return false
	}
	ses.depth = int(min(int64(ses.depth), room))
	ses.staging = (int64(ses.depth) + extra) * first
	s.staged += ses.staging
	return true
}

// join adds a connection to a session, in the place of an old one if it has the same CID.
func (s *Server) join(ctx context.Context, c *conn, ses *session) (pdu.LoginStatus, string) {
	c.s = ses
	c.params.CommandWindow = ses.depth
	if !c.dm.Traits().joins(&ses.params) {
		return pdu.LoginCannotInclude, "another transport than the session's" // ISCSI-91
	}
	for {
		ses.mu.Lock()
		if ses.ended {
			ses.mu.Unlock()
			return pdu.LoginNoSession, "the session has ended"
		}
		old := ses.conns[c.cid]
		if old == nil {
			if len(ses.conns) >= int(ses.params.MaxConnections) {
				ses.mu.Unlock()
				return pdu.LoginTooManyConnections, "MaxConnections"
			}
			if ses.orphan != nil {
				ses.orphan.Stop()
				ses.orphan, ses.retained = nil, time.Time{}
			}
			ses.conns[c.cid] = c
			ses.mu.Unlock()
			return pdu.LoginSuccess, ""
		}
		// Connection reinstatement. The session must not end with its last connection meanwhile.
		old.replaced = true
		ses.mu.Unlock()
		old.close(false)
		select {
		case <-old.stopped:
		case <-ctx.Done():
			return pdu.LoginServiceUnavailable, "the connection's predecessor has not ended"
		}
	}
}

// remove takes a session out of the tables.
func (s *Server) remove(ses *session) {
	s.metrics.sessions.WithLabelValues(ses.key.target, ses.traits.Transport).Dec()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.staged -= ses.staging
	if ses.key.discovery {
		s.discovery--
	}
	delete(s.tsihs, ses.tsih)
	if s.sessions[ses.key] == ses {
		delete(s.sessions, ses.key)
	}
}

// all lists the sessions.
func (s *Server) all() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*session, 0, len(s.tsihs))
	for _, ses := range s.tsihs {
		out = append(out, ses)
	}
	return out
}

// connections lists the connections of a session.
func (s *session) connections() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		out = append(out, c)
	}
	return out
}

// drop ends a session and tells its initiator, which may log in again at once.
func (s *session) drop() {
	for _, c := range s.connections() {
		c.async(pdu.Async{Event: pdu.AsyncDropSession})
	}
	s.end(scsi.SessionClosed, true)
}

// Kick ends a session: its commands are aborted, its connections closed. It returns
// when the session is gone, or with ctx. The initiator may log in again.
func (s *Server) Kick(ctx context.Context, tsih uint16) error {
	s.mu.Lock()
	ses := s.tsihs[tsih]
	s.mu.Unlock()
	if ses == nil {
		return fmt.Errorf("%w: TSIH %d", ErrNoSession, tsih)
	}
	go ses.drop()
	select {
	case <-ses.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// DropTarget ends all sessions of a target, as Kick does, and returns when they are gone, or with ctx. Whoever
// takes access away calls it after the Backend refuses new logins.
func (s *Server) DropTarget(ctx context.Context, target string) error {
	return s.dropAll(ctx, func(k sessionKey) bool { return k.target == target && !k.discovery })
}

// DropInitiator ends all sessions that an initiator has with a target.
func (s *Server) DropInitiator(ctx context.Context, initiator, target string) error {
	return s.dropAll(ctx, func(k sessionKey) bool { return k.target == target && k.initiator == initiator && !k.discovery })
}

func (s *Server) dropAll(ctx context.Context, match func(sessionKey) bool) error {
	var dropped []*session
	for _, ses := range s.all() {
		if match(ses.key) {
			go ses.drop() // at once for all: one whose peer does not read takes a while
			dropped = append(dropped, ses)
		}
	}
	for _, ses := range dropped {
		select {
		case <-ses.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// resetTarget ends the sessions of a target after TARGET COLD RESET.
func (s *Server) resetTarget(target string) {
	for _, ses := range s.all() {
		if ses.key.target == target {
			go ses.end(scsi.SessionClosed, true)
		}
	}
}

// Shutdown stops the server: it closes the listeners, asks initiators to log out, stops taking commands after
// LogoutWait, waits for the commands in progress, and closes the connections. When ctx ends first, commands are aborted.
// It returns nil if every nexus is lost, no goroutine of the server uses a logical unit any more, and no command had to be
// aborted. A command that does not end although it was aborted holds it up for stuckWait at most. Initiators that do not read hold nothing up for
// longer than AbortWait.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	for l := range s.listeners {
		l.Close()
	}
	for c := range s.logins {
		c.close(false)
	}
	s.mu.Unlock()

	sessions := s.all()
	seconds := uint16((s.opt.LogoutWait + time.Second - 1) / time.Second)
	for _, ses := range sessions {
		for _, c := range ses.connections() {
			c.async(pdu.Async{Event: pdu.AsyncLogoutRequest, Param3: seconds})
		}
	}
	timer := time.NewTimer(s.opt.LogoutWait)
	defer timer.Stop()
	expired := false
	for _, ses := range sessions {
		if expired {
			break
		}
		select {
		case <-ses.done:
		case <-timer.C:
			expired = true
		case <-ctx.Done():
			expired = true
		}
	}

	var err error
	for _, ses := range s.all() {
		for _, c := range ses.connections() {
			c.draining.Store(true)
		}
		ses.hurry()
	}
	for _, ses := range s.all() {
		if !ses.waitIdle(ctx) {
			err = fmt.Errorf("iscsi: commands were aborted: %w", ctx.Err())
		}
	}
	closed := make(chan struct{})
	go func() {
		s.Close()
		close(closed)
	}()
	select {
	case <-closed:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(stuckWait)
	defer late.Stop()
	select {
	case <-closed:
		return err
	case <-late.C:
		return errors.Join(err, ErrStuck)
	}
}

// stuckWait is how long Shutdown waits for aborted commands to end after its context has: longer than a Datamover waits for a peer
// that does not read.
const stuckWait = 6 * time.Second

// ErrStuck means that an aborted command has not ended: its logical unit may still be in use.
var ErrStuck = errors.New("iscsi: an aborted command does not end")

// waitIdle waits until the session has no command in progress.
func (s *session) waitIdle(ctx context.Context) bool {
	for {
		s.mu.Lock()
		var left <-chan struct{}
		for _, t := range s.tasks {
			left = t.leftLocked()
			break
		}
		s.mu.Unlock()
		if left == nil {
			return true
		}
		select {
		case <-left:
		case <-ctx.Done():
			return false
		}
	}
}

// Close ends all sessions at once and aborts their commands. It returns when no
// goroutine of the server uses a logical unit any more.
func (s *Server) Close() error {
	s.mu.Lock()
	s.stopping = true
	for l := range s.listeners {
		l.Close()
	}
	for c := range s.logins {
		c.close(false)
	}
	var conns []*conn
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	sessions := s.all()
	for _, ses := range sessions {
		go ses.drop() // at once for all: one whose peer does not read takes a while
	}
	for _, ses := range sessions {
		<-ses.done
	}
	for _, c := range conns {
		<-c.stopped
	}
	s.cancel()
	s.workers.close()
	return nil
}

// SessionInfo describes one session.
type SessionInfo struct {
	Initiator, Target string
	Alias             string // InitiatorAlias, if the initiator sent one
	ISID              pdu.ISID
	TSIH              uint16
	PortalGroup       uint16
	Discovery         bool
	Transport         string
	Started           time.Time
	QueueDepth        int
	Running           int // commands in progress
	Commands          uint64
	Reads, Writes     uint64
	Connections       []ConnectionInfo
	Keys              map[string]string // negotiated values
}

// ConnectionInfo describes one connection.
type ConnectionInfo struct {
	CID           uint16
	Local, Remote string
	Received      uint64 // PDUs
}

// Sessions lists the sessions, in no order.
func (s *Server) Sessions() []SessionInfo {
	var out []SessionInfo
	for _, ses := range s.all() {
		info := SessionInfo{
			Initiator: ses.key.initiator, Target: ses.key.target, Alias: ses.params.initiatorAlias, ISID: ses.key.isid, TSIH: ses.tsih,
			PortalGroup: ses.key.group, Discovery: ses.key.discovery, Transport: ses.traits.Transport, Started: ses.started,
			QueueDepth: ses.depth, Commands: ses.commands.Load(), Reads: ses.reads.Load(), Writes: ses.writes.Load(), Keys: ses.params.Keys(),
		}
		ses.mu.Lock()
		info.Running = len(ses.tasks)
		for cid, c := range ses.conns {
			info.Connections = append(info.Connections, ConnectionInfo{CID: cid, Local: addrString(c.dm.LocalAddr()),
				Remote: addrString(c.dm.RemoteAddr()), Received: c.dm.Received()})
		}
		ses.mu.Unlock()
		out = append(out, info)
	}
	return out
}
