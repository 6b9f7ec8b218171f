package volumelog

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// The simulation runs owners of one volume against one bucket. It alone decides which request is served
// next and what becomes of it: a put may be applied and answered, applied and its answer lost, arrive
// later, twice, or never, also after its sender died. Owners are deposed (and go on acting), crash and
// restart from their own place in the log, the volume is restored elsewhere while
// the first cluster goes on, checkpoints come late, and the log before the newest one is collected. After each
// change the bucket is read by a second, simple reader and checked:
//
//   - what it holds is a gapless prefix of one lineage, and what it held before is a prefix of it;
//   - it holds all that anyone has reported to be in the bucket;
//   - an owner that has attached has exactly what the bucket held.
var (
	simSeeds = flag.Int("sim.seeds", 2000, "number of seeds of the simulation")
	simSeed  = flag.Uint64("sim.seed", 0, "run only this seed, with a log of its steps")
)

var errDead = errors.New("the process died")

const simTagUnit = 1 << 10 // a record of writer g with LSN l is a sector at (l*simTagUnit + g) * 512

func simOffset(lsn uint64, tag int) uint64 { return (lsn*simTagUnit + uint64(tag)) * sector }

func simTag(off uint64) (lsn uint64, tag int) {
	off /= sector
	return off / simTagUnit, int(off % simTagUnit)
}

type sim struct {
	t   *testing.T
	r   *rand.Rand
	b   *memBucket
	id  uuid.UUID
	log []string

	mu      sync.Mutex
	pending []*simRequest

	flying   []simPut // puts that arrive later, or again
	owners   []*simOwner
	lineages []*simLineage
	ledger   []int // tags that the bucket held at the last look
	goals    map[string]bool
	failed   bool
}

// simLineage is one cluster: what it has committed and who is its newest owner.
type simLineage struct {
	generation uint64
	epoch      uint64 // highest that its nodes have used
	committed  []int  // tag per LSN, from LSN 1
	newest     *simOwner
}

type simRequest struct {
	owner *simOwner
	op    string
	key   string
	body  []byte
	serve func() error // everything but puts and steps
	done  chan error
}

type simPut struct {
	owner *simOwner
	key   string
	body  []byte
}

type simOwner struct {
	s       *sim
	n       int
	r       *rand.Rand
	lineage *simLineage
	want    Want
	restore bool
	from    *simOwner // whose place in the log it continues from
	holds   []int     // records it may destage; shared history of its lineage
	dead    bool
	ended   bool

	// what it knows of the bucket
	img    []int // tags up to lsn
	pos    Position
	lsn    uint64
	writer *Writer
}

// goal notes that something worth trying has happened.
func (s *sim) goal(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goals[what] = true
}

// sync orders what owners did before it, as the race detector sees it: one goroutine runs at a time.
func (s *sim) sync() {
	s.mu.Lock()
	defer s.mu.Unlock()
}

func (s *sim) logf(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

func (s *sim) fatalf(format string, args ...any) {
	if !s.failed {
		s.failed = true
		s.t.Errorf("%s\nsteps:\n%s", fmt.Sprintf(format, args...), strings.Join(s.log, "\n"))
	}
}

// simBucket is the bucket as one owner sees it.
type simBucket struct {
	*memBucket
	o *simOwner
}

func (b *simBucket) ask(op, key string, body []byte, serve func() error) error {
	req := &simRequest{owner: b.o, op: op, key: key, body: body, serve: serve, done: make(chan error)}
	b.o.s.mu.Lock()
	b.o.s.pending = append(b.o.s.pending, req)
	b.o.s.mu.Unlock()
	return <-req.done
}

func (b *simBucket) PutIfAbsent(_ context.Context, key string, body []byte) error {
	return b.ask("put", key, slices.Clone(body), nil)
}

func (b *simBucket) Get(ctx context.Context, key string, limit int64) (body []byte, err error) {
	err = b.ask("get", key, nil, func() (err error) { body, err = b.memBucket.Get(ctx, key, limit); return })
	return body, err
}

func (b *simBucket) GetRange(ctx context.Context, key string, off int64, into []byte) (n int, err error) {
	err = b.ask("get", key, nil, func() (err error) { n, err = b.memBucket.GetRange(ctx, key, off, into); return })
	return n, err
}

func (b *simBucket) List(ctx context.Context, prefix, after string, max int) (infos []objectstore.Info, err error) {
	err = b.ask("list", prefix+"|"+after, nil, func() (err error) { infos, err = b.memBucket.List(ctx, prefix, after, max); return })
	return infos, err
}

func (b *simBucket) Delete(ctx context.Context, keys ...string) error {
	return b.ask("delete", keys[0], nil, func() error { return b.memBucket.Delete(ctx, keys...) })
}

func runSim(t *testing.T, seed uint64, steps int) (goals map[string]bool) {
	synctest.Test(t, func(t *testing.T) {
		s := &sim{t: t, r: rand.New(rand.NewPCG(seed, 7)), b: newMemBucket(), goals: make(map[string]bool)}
		s.id = randomUUID(s.r)
		defer func() {
			if s.failed {
				t.Logf("seed %d", seed)
			}
			goals = s.goals
		}()
		first := &simLineage{generation: 1}
		s.lineages = append(s.lineages, first)
		s.takeover(first)
		for i := 0; i < steps && !s.failed; i++ {
			synctest.Wait()
			s.sync()
			s.step()
		}
		s.finish()
	})
	return goals
}

// step makes one thing happen.
func (s *sim) step() {
	switch n := s.r.IntN(100); {
	case n < 6 && len(s.flying) > 0:
		i := s.r.IntN(len(s.flying))
		p := s.flying[i]
		s.flying = slices.Delete(s.flying, i, i+1)
		s.arrive(p.owner, p.key, p.body, "late")
		if s.r.IntN(3) == 0 {
			s.flying = append(s.flying, p)
		}
	case n < 8 && len(s.owners) < 12:
		s.takeover(s.lineages[s.r.IntN(len(s.lineages))])
	case n < 9 && len(s.owners) < 12 && len(s.lineages) < 4:
		s.restoreElsewhere()
	case n < 10:
		if o := s.owners[s.r.IntN(len(s.owners))]; !o.dead {
			s.crash(o)
		}
	case n < 13:
		s.collect()
	default:
		if req := s.pick(); req != nil {
			s.serve(req)
		}
	}
}

// pick takes one of the requests that wait.
func (s *sim) pick() *simRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pending) == 0 {
		return nil
	}
	slices.SortStableFunc(s.pending, func(a, b *simRequest) int {
		return cmp.Or(cmp.Compare(a.owner.n, b.owner.n), cmp.Compare(a.op, b.op), cmp.Compare(a.key, b.key))
	})
	i := s.r.IntN(len(s.pending))
	req := s.pending[i]
	s.pending = slices.Delete(s.pending, i, i+1)
	return req
}

func (s *sim) serve(req *simRequest) {
	o := req.owner
	switch {
	case o.dead:
		if req.op == "put" && s.r.IntN(2) == 0 {
			s.flying = append(s.flying, simPut{o, req.key, req.body})
		}
		req.done <- errDead
	case req.op == "step":
		req.done <- nil
	case req.op != "put":
		if s.r.IntN(40) == 0 {
			req.done <- objectstore.ErrUnknown
			return
		}
		err := req.serve()
		if req.op == "delete" {
			s.check()
		}
		req.done <- err
	default:
		again := simPut{o, req.key, req.body}
		switch n := s.r.IntN(20); {
		case n == 0: // lost
			req.done <- objectstore.ErrUnknown
		case n < 3: // arrives later
			s.flying = append(s.flying, again)
			req.done <- objectstore.ErrUnknown
		case n < 5: // stored, the answer is lost
			_ = s.arrive(o, req.key, req.body, "unanswered")
			req.done <- objectstore.ErrUnknown
		default:
			if n == 5 {
				s.flying = append(s.flying, again)
			}
			req.done <- s.arrive(o, req.key, req.body, "")
		}
	}
}

func (s *sim) shortKey(key string) string {
	return strings.ReplaceAll(strings.TrimPrefix(key, volumePrefix(s.id)), "00000000000000", "")
}

func (s *sim) arrive(o *simOwner, key string, body []byte, how string) error {
	err := s.b.put(key, body)
	s.logf("put %s of owner %d %s: %v", s.shortKey(key), o.n, how, err)
	if err == nil {
		if how == "late" && o.dead {
			s.goal("put of a dead owner arrives")
		}
		s.check()
	}
	return err
}

// takeover makes a new owner in the cluster of l: the journal of its node holds all that was committed.
func (s *sim) takeover(l *simLineage) {
	if l.newest != nil && l.newest.writer == nil && l.newest.restore {
		return // the restore is still under way: its cluster serves nothing yet
	}
	l.epoch++
	if s.r.IntN(3) == 0 {
		l.generation++ // it lost something; the bucket learns of it if the owner gets there
		s.goal("a loss")
	}
	o := s.newOwner(l)
	o.want = Want{
		Epoch: l.epoch, Generation: l.generation, Writer: o.identity(), Holds: uint64(len(l.committed)),
		Attributes: Attributes{Name: "sim", SizeBytes: MaxSize, BlockSize: 512},
	}
	if p := l.newest; p != nil && p.writer != nil && s.r.IntN(2) == 0 {
		o.from, o.img = p, slices.Clone(p.img)
		o.want.From, o.want.FromLSN = p.pos, p.lsn
	}
	l.newest = o
	o.holds = slices.Clone(l.committed)
	s.logf("owner %d takes over in generation %d as epoch %d at LSN %d, from %v", o.n, l.generation, l.epoch, len(l.committed), o.want.From)
	go o.run()
}

func (s *sim) restoreElsewhere() {
	l := &simLineage{generation: ^uint64(0)}
	o := s.newOwner(l)
	o.restore = true
	l.newest = o
	s.lineages = append(s.lineages, l)
	s.logf("owner %d restores elsewhere", o.n)
	go o.run()
}

func (s *sim) newOwner(l *simLineage) *simOwner {
	o := &simOwner{s: s, n: len(s.owners) + 1, lineage: l, r: rand.New(rand.NewPCG(s.r.Uint64(), 3))}
	s.owners = append(s.owners, o)
	return o
}

func (o *simOwner) identity() Identity { return Identity{randomUUID(o.s.r), randomUUID(o.s.r)} }

func (s *sim) crash(o *simOwner) {
	s.logf("owner %d crashes", o.n)
	o.dead = true
}

// collect deletes any of the data objects before the newest checkpoint.
func (s *sim) collect() {
	keys := s.b.keys("/checkpoint/")
	if len(keys) == 0 {
		return
	}
	p, _ := parsePosition(strings.TrimPrefix(keys[len(keys)-1], checkpointPrefix(s.id)))
	odds := 1 + s.r.IntN(3)
	for _, k := range s.b.keys("/log/") {
		at, _ := parsePosition(strings.TrimPrefix(k, logPrefix(s.id)))
		if h, err := DecodeHeader(s.b.body(k)); err == nil && h.Kind == KindData && at.Before(p) && s.r.IntN(odds) == 0 {
			s.logf("collect %s", s.shortKey(k))
			s.b.set(k, nil)
		}
	}
	s.check()
}

// read is the second reader: one look at all of the bucket, by the simplest rules.
func (s *sim) read() (tags []int, last *Header) {
	at := Position{Epoch: 1}
	if keys := s.b.keys("/checkpoint/"); len(keys) > 0 {
		m, err := DecodeManifest(s.b.body(keys[len(keys)-1]))
		if err != nil {
			s.fatalf("newest checkpoint: %v", err)
			return
		}
		for n := range m.Parts {
			if _, err := decodePart(m, n, s.b.body(partKey(s.id, m.Position, m.Attempt, n)), 0, func(e Entry) error {
				lsn, tag := simTag(e.Offset)
				if lsn != uint64(len(tags))+1 {
					s.fatalf("checkpoint %v has LSN %d after %d", m.Position, lsn, len(tags))
				}
				tags = append(tags, tag)
				return nil
			}); err != nil {
				s.fatalf("newest checkpoint: %v", err)
			}
		}
		if uint64(len(tags)) != m.LSN {
			s.fatalf("checkpoint %v of LSN %d holds %d", m.Position, m.LSN, len(tags))
		}
		at = m.Position
	}
	for {
		body := s.b.body(LogKey(s.id, at))
		if body == nil {
			if at.Epoch++; at.Epoch > 100 || s.b.body(LogKey(s.id, Position{Epoch: at.Epoch})) == nil {
				return tags, last
			}
			at.Seq = 0
			continue
		}
		h, err := DecodeHeader(body)
		if err != nil {
			s.fatalf("%v: %v", at, err)
			return
		}
		if h.Kind == KindFence {
			at = Position{Epoch: at.Epoch + 1}
			continue
		}
		last = h
		if h.FirstLSN != uint64(len(tags))+1 {
			s.fatalf("object %v begins at LSN %d, the bucket has %d", at, h.FirstLSN, len(tags))
			return
		}
		for _, e := range h.Extents {
			lsn, tag := simTag(e.Offset)
			if lsn != uint64(len(tags))+1 {
				s.fatalf("object %v has LSN %d after %d", at, lsn, len(tags))
			}
			tags = append(tags, tag)
		}
		at.Seq++
	}
}

// check compares the bucket with what it held and with the lineage that goes on.
func (s *sim) check() {
	if s.failed {
		return
	}
	tags, last := s.read()
	if len(tags) < len(s.ledger) || !slices.Equal(tags[:len(s.ledger)], s.ledger) {
		s.fatalf("the bucket held %v, now %v", s.ledger, tags)
		return
	}
	s.ledger = tags
	if last == nil {
		return
	}
	for _, l := range s.lineages {
		if l.generation == last.Generation && (len(tags) > len(l.committed) || !slices.Equal(tags, l.committed[:len(tags)])) {
			s.fatalf("the bucket holds %v, generation %d committed %v", tags, l.generation, l.committed)
		}
	}
}

// claim checks what an owner reports to be in the bucket.
func (o *simOwner) claim(what string) {
	s := o.s
	if int(o.lsn) > len(s.ledger) || !slices.Equal(o.img, s.ledger[:o.lsn]) {
		s.fatalf("owner %d, %s: reports %v at LSN %d, the bucket holds %v", o.n, what, o.img, o.lsn, s.ledger)
	}
}

func (o *simOwner) replay() Replay {
	add := func(off uint64) error {
		lsn, tag := simTag(off)
		if lsn != uint64(len(o.img))+1 {
			return fmt.Errorf("replay has LSN %d after %d: %w", lsn, len(o.img), errReplay)
		}
		o.img = append(o.img, tag)
		return nil
	}
	return Replay{
		Reset: func(*Manifest) error { o.img = nil; return nil },
		Entry: func(e Entry) error { return add(e.Offset) },
		Apply: func(h *Header) error {
			for _, e := range h.Extents {
				if err := add(e.Offset); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

var errReplay = errors.New("replay does not join")

// step waits until the simulation lets the owner go on.
func (o *simOwner) step() bool {
	return (&simBucket{o.s.b, o}).ask("step", "", nil, nil) == nil
}

// run is the life of one owner.
func (o *simOwner) run() {
	defer func() {
		o.ended = true
		o.s.sync()
	}()
	b := &simBucket{o.s.b, o}
	if !o.attach(b) {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	next, sent := uint64(1), o.lsn
	objects := make(map[uint64]*Header)
	inFlight := 0
	var mu sync.Mutex
	for o.step() {
		// Take over what is known to be stored.
		pos, lsn, _ := o.writer.Stored()
		for ; o.pos.Before(pos); o.pos.Seq++ {
			for _, e := range objects[o.pos.Seq].Extents {
				_, tag := simTag(e.Offset)
				o.img = append(o.img, tag)
			}
		}
		if lsn != o.lsn {
			o.lsn = lsn
			o.claim("stored")
			o.s.goal(fmt.Sprintf("stored by owner of lineage %d", min(o.writer.Generation()/LineageStride, 2)))
			if o.lineage.newest != o {
				o.s.goal("stored by a deposed owner")
			}
		}
		if o.writer.Err() != nil {
			if !errors.Is(o.writer.Err(), ErrFenced) {
				o.s.fatalf("owner %d: %v", o.n, o.writer.Err())
			}
			o.s.goal("fenced")
			return
		}
		if o.lineage.newest == o && len(o.lineage.committed) < 60 && o.r.IntN(2) == 0 {
			o.lineage.committed = append(o.lineage.committed, o.n)
			o.holds = slices.Clone(o.lineage.committed)
		}
		mu.Lock()
		busy := inFlight
		mu.Unlock()
		switch n := o.r.IntN(10); {
		case n < 7 && busy < 3 && sent < uint64(len(o.holds)):
			h, body := o.object(next, sent+1, min(sent+1+uint64(o.r.IntN(3)), uint64(len(o.holds))))
			objects[next] = h
			seq := next
			next, sent = next+1, h.LastLSN
			mu.Lock()
			inFlight++
			mu.Unlock()
			wg.Go(func() {
				for {
					err := o.writer.Put(context.Background(), seq, body)
					if err == nil || errors.Is(err, errDead) || errors.Is(err, ErrFenced) || !o.step() {
						break
					}
					if errors.Is(err, ErrConflict) || errors.Is(err, ErrInvalid) || errors.Is(err, objectstore.ErrCorrupt) {
						o.s.fatalf("owner %d puts %d: %v", o.n, seq, err)
						break
					}
				}
				mu.Lock()
				inFlight--
				mu.Unlock()
			})
		case n == 8:
			o.checkpoint()
		case n == 9 && o.r.IntN(4) == 0:
			if _, err := o.writer.CollectCheckpoints(context.Background()); err == nil {
				o.s.goal("old checkpoints collected")
			}
		}
	}
}

func (o *simOwner) attach(b *simBucket) bool {
	s := o.s
	own := slices.Clone(o.img)
	identity := o.want.Writer
	for o.step() {
		o.img = slices.Clone(own)
		var state State
		var err error
		if o.restore {
			if identity == (Identity{}) {
				identity = Identity{randomUUID(o.r), randomUUID(o.r)}
			}
			o.writer, state, err = Restore(context.Background(), b, s.id, identity, o.replay())
			identity = Identity{}
		} else {
			o.writer, state, err = Attach(context.Background(), b, s.id, o.want, o.replay())
		}
		switch {
		case err == nil:
			o.lsn, o.pos = state.LSN, state.Position
			s.logf("owner %d has opened epoch %d at LSN %d", o.n, state.Epoch, state.LSN)
			if o.restore {
				o.lineage.generation, o.lineage.epoch = state.Generation, state.Epoch
				o.lineage.committed = slices.Clone(o.img)
				o.holds = slices.Clone(o.img)
				s.goal("restored")
			}
			if o.from != nil {
				s.goal("restarted from its own position")
			}
			if state.Checkpoint != nil {
				s.goal("built from a checkpoint")
			}
			o.claim("attached")
			if len(state.Damaged) > 0 && !slices.ContainsFunc(state.Damaged, func(d Damage) bool { return errors.Is(d.Err, objectstore.ErrNotFound) }) {
				s.fatalf("owner %d found damage: %v", o.n, state.Damaged)
			}
			return true
		case errors.Is(err, errDead):
			return false
		case errors.Is(err, errReplay) || errors.Is(err, objectstore.ErrCorrupt) || errors.Is(err, ErrAhead) || errors.Is(err, ErrInvalid):
			s.fatalf("owner %d: %v", o.n, err)
			return false
		case errors.Is(err, ErrNoVolume), errors.Is(err, objectstore.ErrUnknown), o.restore:
			continue
		case errors.Is(err, ErrSuperseded):
			s.goal("superseded")
			return false
		case errors.Is(err, ErrFenced), errors.Is(err, ErrEpochTaken):
			s.goal("came too late")
			return false
		default:
			s.fatalf("owner %d: %v", o.n, err)
			return false
		}
	}
	return false
}

func (o *simOwner) object(seq, first, last uint64) (*Header, []byte) {
	var b Builder
	_ = b.Reset(int(last-first+1), 0)
	for lsn := first; lsn <= last; lsn++ {
		_ = b.Zero(lsn, simOffset(lsn, o.holds[lsn-1]), sector)
	}
	h := o.writer.Header(seq)
	h.FirstLSN, h.LastLSN, h.Time = first, last, time.Unix(int64(last), 0)
	body, err := b.Finish(&h)
	if err != nil {
		o.s.fatalf("owner %d: %v", o.n, err)
	}
	return &h, slices.Clone(body)
}

func (o *simOwner) checkpoint() {
	img := slices.Clone(o.img)
	_, err := o.writer.WriteCheckpoint(context.Background(), Checkpoint{o.pos, o.lsn, time.Time{}}, func(yield func(Entry, error) bool) {
		for i, tag := range img {
			lsn := uint64(i + 1)
			if !yield(Entry{Kind: ExtentZero, LSN: lsn, Offset: simOffset(lsn, tag), Length: sector}, nil) {
				return
			}
		}
	})
	switch {
	case err == nil:
		o.s.goal("checkpoint")
	case errors.Is(err, errDead), errors.Is(err, objectstore.ErrUnknown), errors.Is(err, ErrFenced):
	default:
		o.s.fatalf("owner %d, checkpoint: %v", o.n, err)
	}
}

// finish ends every owner, lets what is under way arrive, and restores once more.
func (s *sim) finish() {
	drain := func(until func() bool) {
		for range 20000 {
			synctest.Wait()
			s.sync()
			if until() {
				return
			}
			if req := s.pick(); req != nil {
				if req.owner.dead {
					req.done <- errDead
				} else if req.op == "put" {
					req.done <- s.arrive(req.owner, req.key, req.body, "")
				} else if req.op == "step" {
					req.done <- nil
				} else {
					req.done <- req.serve()
				}
			}
		}
		s.fatalf("owners do not end")
	}
	for _, o := range s.owners {
		o.dead = true
	}
	drain(func() bool { return !slices.ContainsFunc(s.owners, func(o *simOwner) bool { return !o.ended }) })
	for _, p := range s.flying {
		_ = s.arrive(p.owner, p.key, p.body, "late")
	}
	if len(s.b.keys("/log/")) == 0 || s.failed {
		return
	}
	held := len(s.ledger)
	l := &simLineage{generation: ^uint64(0)}
	o := s.newOwner(l)
	_, state, err := Restore(context.Background(), s.b, s.id, o.identity(), o.replay())
	if errors.Is(err, ErrNoVolume) && held == 0 {
		return
	}
	if err != nil || int(state.LSN) != held || !slices.Equal(o.img, s.ledger[:held]) {
		s.fatalf("last restore: LSN %d of %d, %v, %v", state.LSN, held, o.img, err)
	}
	info, err := Inspect(context.Background(), s.b, s.id, true)
	if err != nil || info.Err != nil || int(info.LSN) != held || len(info.Damaged) != 0 {
		s.fatalf("inspect: %+v, %v", info, err)
	}
}

func TestSimulation(t *testing.T) {
	seeds := *simSeeds
	if testing.Short() {
		seeds = min(seeds, 200)
	}
	if *simSeed != 0 {
		runSim(t, *simSeed, 600)
		return
	}
	goals := make(map[string]int)
	for seed := uint64(1); seed <= uint64(seeds) && !t.Failed(); seed++ {
		for g := range runSim(t, seed, 600) {
			goals[g]++
		}
	}
	t.Logf("seeds 1 to %d", seeds)
	// Safety is not for want of trying.
	for _, g := range []string{
		"fenced", "superseded", "came too late", "restored", "checkpoint", "built from a checkpoint", "restarted from its own position",
		"stored by a deposed owner", "put of a dead owner arrives", "old checkpoints collected",
		"a loss", "stored by owner of lineage 0", "stored by owner of lineage 1", "stored by owner of lineage 2",
	} {
		if t.Logf("%-40s in %d seeds", g, goals[g]); goals[g] == 0 && !t.Failed() {
			t.Errorf("never happened: %s", g)
		}
	}
}
