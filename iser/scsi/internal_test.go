package scsi

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
)

// Whatever comes and goes, exactly the tasks are enabled that the rules of SAM-5 enable,
// and none is disabled again.
func TestTaskSetAgainstRules(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 500 {
		var s taskSet
		var tasks []*task // oldest first
		for range 60 {
			if len(tasks) == 0 || rng.IntN(5) < 3 {
				x := &task{attr: TaskAttribute(rng.IntN(4)), cmd: new(Command)}
				s.add(x)
				tasks = append(tasks, x)
			} else {
				i := rng.IntN(len(tasks)) // waiting tasks go too: aborts
				s.remove(tasks[i])
				tasks = slices.Delete(tasks, i, i+1)
			}
			for i, x := range tasks {
				if x.ready == nil && !x.enabled {
					t.Fatal("a task waits without a channel")
				}
				if x.ready != nil {
					select {
					case <-x.ready:
						if !x.enabled {
							t.Fatal("a task was let go but is not enabled")
						}
					default:
						if x.enabled {
							t.Fatal("a task is enabled but was not let go")
						}
					}
				}
				// Enabled tasks need no check against arrivals: a HEAD OF QUEUE task does
				// not stop what has started.
				if !x.enabled && allowed(tasks, i) {
					t.Fatalf("task %d of %d (attribute %d) waits for nothing", i, len(tasks), x.attr)
				}
				if i == len(tasks)-1 && x.enabled && !allowed(tasks, i) {
					t.Fatalf("task %d (attribute %d) started too early", i, x.attr)
				}
			}
		}
		for _, x := range tasks {
			s.remove(x)
		}
		if s.head != nil || s.tail != nil || s.ordered != 0 || s.heads != 0 || s.waiting != 0 {
			t.Fatalf("an empty set holds %+v", &s)
		}
	}
}

// allowed is the rule, spelled out.
func allowed(tasks []*task, i int) bool {
	if tasks[i].attr == HeadOfQueue {
		return true
	}
	heads := slices.ContainsFunc(tasks, func(o *task) bool { return o.attr == HeadOfQueue })
	if tasks[i].attr == Ordered {
		return !heads && i == 0
	}
	older := slices.ContainsFunc(tasks[:i], func(o *task) bool { return o.attr == Ordered })
	return !heads && !older
}

// Of claims that conflict, granted ones never do, and the first in line is granted.
func TestRangeLocksAgainstRules(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var r rangeLocks
		type claim struct {
			l       rangeLock
			granted bool
			cancel  context.CancelFunc
		}
		var claims []*claim // oldest first
		check := func() {
			synctest.Wait()
			for i, c := range claims {
				free := true
				for _, o := range claims[:i] {
					if o.l.conflicts(&c.l) {
						free = false
					}
				}
				if c.granted != free {
					t.Fatalf("claim %d of %d: granted %v, want %v", i, len(claims), c.granted, free)
				}
			}
		}
		for range 2000 {
			if len(claims) < 12 && rng.IntN(2) == 0 {
				ctx, cancel := context.WithCancel(context.Background())
				c := &claim{cancel: cancel}
				first := uint64(rng.IntN(20))
				exclusive := rng.IntN(3) == 0
				claims = append(claims, c)
				go func() {
					c.granted = r.acquire(ctx, &c.l, first, first+1+uint64(rng.IntN(8)), exclusive) == nil
				}()
			} else if len(claims) > 0 {
				i := rng.IntN(len(claims))
				c := claims[i]
				claims = slices.Delete(claims, i, i+1)
				if c.granted {
					r.release(&c.l)
				}
				c.cancel() // one that waits gives up
			}
			check()
		}
		for _, c := range claims {
			c.cancel()
			if c.granted {
				r.release(&c.l)
			}
			synctest.Wait()
		}
		if r.head != nil || r.exclusive != 0 || r.waiting != 0 {
			t.Fatal("claims are left")
		}
	})
}

func TestSenseFormats(t *testing.T) {
	for _, f := range []fault{faultNoMedium, invalidCDB(13, 7), invalidParameter(300, -1), faultLBARange.withInfo(1 << 40), faultMiscompare.withInfo(5)} {
		for _, descriptor := range []bool{false, true} {
			b := f.encode(new([maxSense]byte), descriptor)
			if len(b) > maxSense || int(b[7]) != len(b)-8 {
				t.Errorf("%+v: % x", f, b)
			}
			if !descriptor && (b[0]&senseValid != 0) != (f.hasInfo && f.info < 1<<32) {
				t.Errorf("%+v: VALID of % x", f, b)
			}
		}
	}
}
