package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/internal/target"
	"github.com/isergate/isergate/iser/initiator/internal/tgtd"
	"github.com/isergate/isergate/iser/iscsi"
)

func TestHistogramQuantiles(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 4))
	var parts [3]Histogram
	var values []time.Duration
	for range 20000 {
		v := time.Duration(r.Uint64N(1 << (1 + r.IntN(40))))
		values = append(values, v)
		parts[r.IntN(3)].Record(v)
	}
	var h Histogram
	for i := range parts {
		h.Merge(&parts[i])
	}
	slices.Sort(values)
	if h.Count() != uint64(len(values)) {
		t.Errorf("%d values", h.Count())
	}
	for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.99, 0.999, 1} {
		rank := int(q*float64(len(values))+0.9999999) - 1
		want := values[max(0, min(rank, len(values)-1))]
		got := h.Quantile(q)
		if got < want || float64(got) > float64(want)*(1+1.0/subBuckets)+1 {
			t.Errorf("quantile %v: %d, want %d", q, got, want)
		}
	}
	if h.Quantile(1) != values[len(values)-1] || h.Quantile(0) != values[0] {
		t.Error("extremes are not exact")
	}
	if (&Histogram{}).Quantile(0.5) != 0 || (&Histogram{}).Mean() != 0 {
		t.Error("an empty histogram")
	}
}

func TestHistogramBuckets(t *testing.T) {
	for i := range buckets {
		if got := bucket(upper(i)); got != i {
			t.Fatalf("bucket of %d is %d, want %d", upper(i), got, i)
		}
		if i > 0 && bucket(upper(i-1)+1) != i {
			t.Fatalf("bucket %d does not begin after bucket %d", i, i-1)
		}
	}
	var h Histogram
	h.Record(-1)
	h.Record(1<<62 + 5)
	if h.Quantile(0) != 0 || h.Quantile(1) != 1<<42-1 && h.Quantile(1) != 1<<62+5 {
		t.Errorf("%v, %v", h.Quantile(0), h.Quantile(1))
	}
}

// fake is a unit that notes what is asked of it.
type fake struct {
	mu      sync.Mutex
	lbas    map[uint64]int
	sizes   map[int]int
	flushes int
	err     error
}

func (f *fake) note(lba uint64, p []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lbas[lba]++
	f.sizes[len(p)]++
	return f.err
}
func (f *fake) Read(_ context.Context, lba uint64, p []byte) error          { return f.note(lba, p) }
func (f *fake) Write(_ context.Context, lba uint64, p []byte, _ bool) error { return f.note(lba, p) }
func (f *fake) Flush(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flushes++
	return nil
}

func opened(f *fake) func(context.Context) (*Opened, error) {
	f.lbas, f.sizes = map[uint64]int{}, map[int]int{}
	return func(context.Context) (*Opened, error) {
		return &Opened{Unit: f, BlockSize: 512, Blocks: 1000, Close: func() {}}, nil
	}
}

func TestSequential(t *testing.T) {
	f := new(fake)
	res, err := Run(context.Background(), Options{Pattern: Write, Count: 60, Depth: 4, Sessions: 2, Offset: 5120, Size: 4096*30 + 100, FlushEvery: 5, Force: true, Open: opened(f)})
	if err != nil {
		t.Fatal(err)
	}
	if res.Operations != 60 || res.Bytes != 60*4096 || res.Errors != 0 || res.Histogram.Count() != 60 || res.Flushes != uint64(f.flushes) {
		t.Errorf("%+v", res)
	}
	for slot := range uint64(30) {
		if n := f.lbas[10+8*slot]; n != 2 {
			t.Errorf("slot %d was written %d times", slot, n)
		}
	}
	if len(f.lbas) != 30 || f.sizes[4096] != 60 {
		t.Errorf("%v, %v", f.lbas, f.sizes)
	}
	if _, err := json.Marshal(res); err != nil {
		t.Error(err)
	}
	_ = res.String()
}

func TestErrorsAreCounted(t *testing.T) {
	f := &fake{err: &initiator.StatusError{Status: initiator.Busy}}
	res, err := Run(context.Background(), Options{Pattern: RandRW, Count: 20, Force: true, Open: opened(f)})
	if err != nil || res.Errors != 20 || res.Operations != 0 || res.FirstError == "" {
		t.Errorf("%+v, %v", res, err)
	}
	f = &fake{err: initiator.ErrConnection}
	res, err = Run(context.Background(), Options{Pattern: RandRead, Depth: 3, Duration: time.Hour, Open: opened(f)})
	if err != nil || res.Errors != 3 {
		t.Errorf("%+v, %v", res, err)
	}
	gone := errors.New("gone")
	if _, err := Run(context.Background(), Options{Pattern: Read, Open: func(context.Context) (*Opened, error) { return nil, gone }}); !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
}

func TestBadOptions(t *testing.T) {
	for _, o := range []Options{
		{Pattern: "backwards"}, {Pattern: Read, BlockSize: 100}, {Pattern: Read, BlockSize: 1000}, {Pattern: Read, Depth: -1}, {Pattern: Read, Sessions: 1000},
		{Pattern: Read, Duration: -1}, {Pattern: Read, Offset: 100}, {Pattern: Read, Offset: 1 << 40}, {Pattern: Read, Offset: 512, Size: 512000},
		{Pattern: Read, Size: 512},
	} {
		o.Count = 1
		o.Open = opened(new(fake))
		if _, err := Run(context.Background(), o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := Run(context.Background(), Options{Pattern: Read}); !errors.Is(err, ErrOptions) {
		t.Errorf("nothing to open: %v", err)
	}
}

func TestTgtd(t *testing.T) {
	srv := tgtd.Start(t)
	open := OpenLUN(initiator.Options{Portal: srv.Portal, InitiatorName: "iqn.2026-01.com.example:bench", TargetName: tgtd.Target}, tgtd.LUN)
	for _, o := range []Options{
		{Pattern: RandWrite, Count: 3000}, {Pattern: RandRead, Count: 3000}, {Pattern: Write, BlockSize: 256 << 10, Count: 200, Depth: 4},
		{Pattern: Read, BlockSize: 256 << 10, Count: 200, Depth: 4}, {Pattern: RandRW, Count: 1000, Sessions: 2, FlushEvery: 100},
	} {
		o.Open, o.Force = open, true
		res, err := Run(context.Background(), o)
		if err != nil || res.Errors > 0 || res.Operations != o.Count {
			t.Fatalf("%+v, %v", res, err)
		}
		t.Log(res)
	}
}

func TestOwnTarget(t *testing.T) {
	srv := target.Start(t, iscsi.Options{}, nil, 64<<20/4096, 4096)
	open := OpenLUN(initiator.Options{Portal: srv.Portal, InitiatorName: "iqn.2026-01.com.example:bench", TargetName: target.Name}, target.LUN)
	for _, o := range []Options{
		{Pattern: RandWrite, Count: 3000}, {Pattern: RandRead, Count: 3000}, {Pattern: Write, BlockSize: 256 << 10, Count: 200, Depth: 4},
		{Pattern: Read, BlockSize: 256 << 10, Count: 200, Depth: 4}, {Pattern: RandRW, Count: 1000, Sessions: 2, FlushEvery: 100, FUA: true},
	} {
		o.Open, o.Force = open, true
		res, err := Run(context.Background(), o)
		if err != nil || res.Errors > 0 || res.Operations != o.Count {
			t.Fatalf("%+v, %v", res, err)
		}
		t.Log(res)
	}
}

// stuck is a unit whose operations end only with their context, after so many that succeed.
type stuck struct {
	memory
	left atomic.Int64
}

func (s *stuck) wait(ctx context.Context) error {
	if s.left.Add(-1) >= 0 {
		return nil
	}
	<-ctx.Done()
	return fmt.Errorf("given up: %w", ctx.Err())
}

func (s *stuck) Read(ctx context.Context, lba uint64, p []byte) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.memory.Read(ctx, lba, p)
}

func (s *stuck) Write(ctx context.Context, lba uint64, p []byte, fua bool) error {
	if err := s.wait(ctx); err != nil {
		return err
	}
	return s.memory.Write(ctx, lba, p, fua)
}

func newStuck(left int64) *stuck {
	s := &stuck{memory: memory{block: 512, data: make([]byte, 1<<20)}}
	s.left.Store(left)
	return s
}

func (s *stuck) open(context.Context) (*Opened, error) {
	return &Opened{Unit: s, BlockSize: 512, Blocks: 2048, Busy: func() uint64 { return 7 }, Close: func() {}}, nil
}

// A run ends although the target does not answer.
func TestEndsWithoutAnAnswer(t *testing.T) {
	for _, p := range Patterns {
		for _, left := range []int64{0, 5, 100} {
			res, err := Run(t.Context(), Options{Pattern: p, Depth: 3, Duration: time.Millisecond, Grace: time.Millisecond, Force: true, Open: newStuck(left).open})
			if err != nil {
				t.Fatal(err)
			}

			if left == 0 && res.Unfinished == 0 && !(p != Verify && res.Operations == 0) || res.Busy != 7 || res.Errors != 0 {
				t.Errorf("%s after %d: %+v", p, left, res)
			}
		}
	}
	o := Options{Pattern: Write, Duration: time.Hour, Prepare: time.Millisecond, Open: newStuck(2).open}
	if _, err := Run(t.Context(), o); !errors.Is(err, ErrOverdue) || err.Error() != "bench: the target did not answer in time: to read what the unit holds took longer than 1ms, with 7 answers BUSY" {
		t.Errorf("what the unit holds cannot be read: %v", err)
	}
	o.Open = func(ctx context.Context) (*Opened, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if _, err := Run(t.Context(), o); !errors.Is(err, ErrOverdue) {
		t.Errorf("the unit cannot be opened: %v", err)
	}
}

// What is refused again and again ends the run.
func TestPermanentErrorEndsTheRun(t *testing.T) {
	check := func(key initiator.SenseKey, asc uint8) *initiator.StatusError {
		return &initiator.StatusError{Status: initiator.CheckCondition, Sense: initiator.Sense{Key: key, ASC: asc}}
	}
	for name, refusal := range map[string]error{
		"no such unit": check(initiator.KeyIllegalRequest, 0x25), "not ready": check(initiator.KeyNotReady, 0x04),
		"aborted": check(initiator.KeyAbortedCommand, 0), "attentions without end": check(initiator.KeyUnitAttention, 0x3f),
		"reserved": &initiator.StatusError{Status: initiator.ReservationConflict},
	} {
		res, err := Run(t.Context(), Options{Pattern: RandRead, Depth: 2, Duration: time.Hour, Open: opened(&fake{err: refusal})})
		if err != nil || !errors.Is(res.Permanent, refusal) || res.Errors < PermanentErrors || res.Errors > 2*PermanentErrors {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
	}
}

// An operation is not larger than the unit takes.
func TestMaxTransfer(t *testing.T) {
	open := func(context.Context) (*Opened, error) {
		return &Opened{Unit: newMemory(2048, 512), BlockSize: 512, Blocks: 2048, MaxTransfer: 8192, Close: func() {}}, nil
	}
	for bytes, good := range map[int]bool{8192: true, 12288: false} {
		_, err := Run(t.Context(), Options{Pattern: Read, BlockSize: bytes, Count: 1, Open: open})
		if good != (err == nil) || !good && (!errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), "8192")) {
			t.Errorf("%d bytes: %v", bytes, err)
		}
	}
	srv := target.Start(t, iscsi.Options{}, nil, 64<<20/4096, 4096)
	u, err := OpenLUN(initiator.Options{Portal: srv.Portal, InitiatorName: "iqn.2026-01.com.example:bench", TargetName: target.Name}, target.LUN)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if u.MaxTransfer != 65536*4096 || u.Busy() != 0 {
		t.Errorf("most %d bytes, %d times busy", u.MaxTransfer, u.Busy())
	}
}
