package volumelog

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/s3test"
	"github.com/isergate/isergate/objectstore/s3test/faultproxy"
)

// s3Faults is a volume whose owners reach a real S3 server through a proxy that spoils requests.
type s3Faults struct {
	t     *testing.T
	rng   *rand.Rand
	proxy *faultproxy.Proxy
	b     objectstore.Bucket
	plain objectstore.Bucket // the same without proxy and short time-outs
	id    uuid.UUID

	epoch       uint64
	acked, sent uint64 // LSNs: known to be stored; tried
	img         *image
	from        Position // where img stands
}

// faultSeeds are the seeds of a run: ISERGATE_SEED, or 1 to ISERGATE_SEEDS.
func faultSeeds(t *testing.T, full, few uint64) (from, to uint64) {
	if testing.Short() {
		full = few
	}
	for name, set := range map[string]func(n uint64){
		"ISERGATE_SEEDS": func(n uint64) { from, to = 1, n+1 },
		"ISERGATE_SEED":  func(n uint64) { from, to = n, n+1 },
	} {
		if s := os.Getenv(name); s != "" && to-from != 1 {
			n, err := strconv.ParseUint(s, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			set(n)
		}
	}
	if to == 0 {
		return 1, full + 1
	}
	return from, to
}

func newS3Faults(t *testing.T, server *s3test.Server, seed uint64) *s3Faults {
	t.Helper()
	p, err := faultproxy.Start(server.Endpoint, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	through := *server
	through.Endpoint = p.Endpoint()
	raw, err := objectstore.Open(ctx, through.URL("faults", "p"), objectstore.Options{
		Credentials: server.Credentials(), StallTimeout: 300 * time.Millisecond, ResponseHeaderTimeout: 200 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	plain, err := server.Open(ctx, "faults", "p")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { plain.Close() })
	b := objectstore.WithRetry(objectstore.WithLimit(raw, 8), objectstore.RetryOptions{
		Budget: 300 * time.Millisecond, FirstWait: 5 * time.Millisecond, MaxWait: 50 * time.Millisecond,
	})
	t.Cleanup(func() { b.Close() })
	f := &s3Faults{t: t, rng: rand.New(rand.NewPCG(seed, 0)), proxy: p, b: b, plain: plain, id: uuid.New()}
	f.img = newImage(t, b, f.id)
	return f
}

// until repeats what fails for a reason that passes, as a caller does. A final error, or one that lasts, fails the test.
func (f *s3Faults) until(what string, try func() error) {
	f.t.Helper()
	for n := 0; ; n++ {
		err := try()
		if err == nil {
			return
		}
		for _, final := range []error{ErrFenced, ErrEpochTaken, ErrSuperseded, ErrAhead, ErrConflict, ErrVersion, ErrUnsupported, ErrInvalid, ErrNoVolume} {
			if errors.Is(err, final) {
				f.t.Fatalf("%s: a fault of the store alone ends it: %v", what, err)
			}
		}
		if n == 200 {
			f.t.Fatalf("%s: for ever %v", what, err)
		}
		time.Sleep(time.Duration(1+n/10) * time.Millisecond) // as a caller does
	}
}

// own is one epoch of an owner: it attaches, puts, reads, checkpoints, and dies.
func (f *s3Faults) own() {
	f.t.Helper()
	f.epoch++
	w := want(f.epoch, 1, f.sent)
	if f.rng.IntN(2) == 0 && !f.from.IsZero() {
		w.From, w.FromLSN = f.from, f.img.lsn
	} else {
		f.img = newImage(f.t, f.b, f.id)
	}
	var o *owner
	var state State
	f.until("attach", func() error {
		wr, s, err := Attach(ctx, f.b, f.id, w, f.img.replay())
		if err != nil {
			if !w.From.IsZero() && len(f.img.applied) > 0 { // what was applied stays; go on from there as a caller does
				last := f.img.applied[len(f.img.applied)-1]
				w.From, w.FromLSN = Position{last.Epoch, last.Seq + 1}, f.img.lsn
			}
			return err
		}
		o, state = &owner{wr, f.img, "x"}, s
		return nil
	})
	if state.LSN < f.acked || state.LSN > f.sent {
		f.t.Fatalf("epoch %d begins at LSN %d, stored was %d of %d", f.epoch, state.LSN, f.acked, f.sent)
	}
	if f.img.lsn != state.LSN {
		f.t.Fatalf("the replay ends at LSN %d, the state says %d", f.img.lsn, state.LSN)
	}
	f.acked, f.from = state.LSN, state.Position
	for range 1 + f.rng.IntN(3) {
		f.put(o)
		f.read(o)
		if f.rng.IntN(3) == 0 {
			f.checkpoint(o)
		}
	}
	if f.rng.IntN(2) == 0 { // dies with puts under way
		dying, die := context.WithTimeout(ctx, time.Duration(f.rng.IntN(20))*time.Millisecond)
		defer die()
		p, lsn, _ := o.Stored()
		_, body := o.object(p.Seq, lsn+1, lsn+2)
		_ = o.Put(dying, p.Seq, body)
		f.sent = max(f.sent, lsn+2)
	}
	if p, lsn, _ := o.Stored(); lsn > f.acked {
		f.acked, f.from = lsn, Position{} // stored, and the image does not have it
		_ = p
	}
}

// put stores some objects, several at once.
func (f *s3Faults) put(o *owner) {
	f.t.Helper()
	p, lsn, _ := o.Stored()
	var wg sync.WaitGroup
	var headers []*Header
	for n := range 1 + f.rng.IntN(4) {
		seq, first := p.Seq+uint64(n), lsn+1
		lsn += 1 + f.rng.Uint64N(3)
		h, body := o.object(seq, first, lsn)
		headers = append(headers, h)
		f.sent = max(f.sent, lsn)
		wg.Go(func() { f.until("put", func() error { return o.Put(ctx, seq, body) }) })
	}
	wg.Wait()
	for _, h := range headers {
		_ = f.img.replay().Apply(h)
	}
	var reached uint64
	if f.from, reached, _ = o.Stored(); reached != lsn {
		f.t.Fatalf("all was stored up to LSN %d, the watermark is %d", lsn, reached)
	}
	f.acked = reached
}

// read looks at some of what is stored.
func (f *s3Faults) read(o *owner) {
	f.t.Helper()
	for range 4 {
		lsn := 1 + f.rng.Uint64N(f.img.lsn)
		e, ok := f.img.entries[lsn]
		if !ok {
			f.t.Fatalf("LSN %d of %d is missing", lsn, f.img.lsn)
		}
		first, off := e.Location.Frame()
		f.until("read", func() error {
			data, err := ReadFrames(ctx, f.b, f.id, e.Location, first, 1, make([]byte, FrameBytes))
			switch {
			case err != nil:
				return err
			case len(data) < off+sector:
				f.t.Fatalf("the frame of LSN %d ends at %d", lsn, len(data))
			case string(data[off:off+sector]) != string(stamp(lsn, o.tag)):
				f.t.Fatalf("LSN %d holds %q", lsn, data[off:off+16])
			}
			return nil
		})
	}
}

func (f *s3Faults) checkpoint(o *owner) {
	f.t.Helper()
	p, lsn, at := o.Stored()
	f.until("checkpoint", func() error {
		if _, err := o.WriteCheckpoint(ctx, Checkpoint{p, lsn, at}, f.img.sorted()); err != nil {
			return err
		}
		_, err := o.CollectCheckpoints(ctx)
		return err
	})
}

// finish has all faults end and looks at the bucket as a restore sees it.
func (f *s3Faults) finish() {
	f.t.Helper()
	f.proxy.Set()
	info, err := Inspect(ctx, f.plain, f.id, true)
	if err != nil || info.Err != nil || len(info.Damaged) > 0 || info.LSN < f.acked || info.LSN > f.sent {
		f.t.Fatalf("stored was up to LSN %d of %d, the bucket has: %+v, %v", f.acked, f.sent, info, err)
	}
	o, state := restore(f.t, f.plain, f.id, "x")
	if state.LSN < f.acked || state.LSN > f.sent {
		f.t.Fatalf("stored was up to LSN %d of %d, restored is %d", f.acked, f.sent, state.LSN)
	}
	if tags := o.img.tags(); uint64(len(tags)) != state.LSN {
		f.t.Fatalf("%q at LSN %d", tags, state.LSN)
	}
}

// A volume's owners come and go while requests to a real S3 server meet with every kind of fault: none of them is stopped by
// the store's faults alone, and what was stored is there, in order.
func TestS3Faults(t *testing.T) {
	server := s3test.New(t, s3test.Versitygw)
	if err := server.CreateBucket(ctx, "faults"); err != nil {
		t.Fatal(err)
	}
	from, to := faultSeeds(t, 16, 5)
	total := map[faultproxy.Fault]int{}
	var mu sync.Mutex
	t.Run("seeds", func(t *testing.T) {
		for seed := from; seed < to; seed++ {
			t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
				t.Parallel()
				f := newS3Faults(t, server, seed)
				t.Cleanup(func() {
					if t.Failed() {
						t.Logf("run it again with ISERGATE_SEED=%d; injected: %v", seed, f.proxy.Counts())
					}
				})
				for range 3 {
					rule := faultproxy.Rule{PerMille: 50 + f.rng.IntN(350), Hold: time.Duration(f.rng.IntN(400)) * time.Millisecond, Age: time.Second}
					if f.rng.IntN(2) == 0 { // much of a few
						for range 3 {
							rule.Faults = append(rule.Faults, faultproxy.Faults[f.rng.IntN(len(faultproxy.Faults))])
						}
					}
					f.proxy.Set(rule)
					f.own()
				}
				f.finish()
				mu.Lock()
				defer mu.Unlock()
				for fault := range f.proxy.Counts() {
					total[fault] += f.proxy.Injected(fault)
				}
			})
		}
	})
	t.Logf("%d seeds; injected: %v", to-from, total)
	for _, fault := range faultproxy.Faults {
		if to-from > 5 && total[fault] == 0 {
			t.Errorf("%q never happened", fault)
		}
	}
}
