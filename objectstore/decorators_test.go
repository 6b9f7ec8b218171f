package objectstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/faulty"
)

func retrying() (objectstore.Bucket, *faulty.Bucket) {
	f := faulty.Wrap(objectstore.NewMem())
	return objectstore.WithRetry(f, objectstore.RetryOptions{}), f
}

// everyOp calls each operation once and returns the errors. "there" must exist.
func everyOp(ctx context.Context, b objectstore.Bucket) map[objectstore.Op]error {
	errs := make(map[objectstore.Op]error)
	errs[objectstore.OpPut] = b.PutIfAbsent(ctx, "new", []byte("new"))
	_, errs[objectstore.OpGet] = b.Get(ctx, "there", 10)
	_, errs[objectstore.OpGetRange] = b.GetRange(ctx, "there", 0, make([]byte, 2))
	_, errs[objectstore.OpHead] = b.Head(ctx, "there")
	_, errs[objectstore.OpList] = b.List(ctx, "there", "", 10)
	errs[objectstore.OpDelete] = b.Delete(ctx, "there")
	return errs
}

func TestRetryEndsOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := retrying()
		if err := b.PutIfAbsent(t.Context(), "there", []byte("there")); err != nil {
			t.Fatal(err)
		}
		f.Add(faulty.Fault{Op: objectstore.OpGet, Times: 3}, faulty.Fault{Op: objectstore.OpGetRange, Times: 3}, faulty.Fault{Op: objectstore.OpHead, Times: 3},
			faulty.Fault{Op: objectstore.OpList, Times: 3}, faulty.Fault{Op: objectstore.OpPut, Times: 3}, faulty.Fault{Op: objectstore.OpDelete, Times: 3})
		for op, err := range everyOp(t.Context(), b) {
			if err != nil {
				t.Errorf("%s: %v", op, err)
			}
			if n := f.Calls(op); n != 4 && op != objectstore.OpPut {
				t.Errorf("%s: %d calls", op, n)
			}
		}
	})
}

func TestRetryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := faulty.Wrap(objectstore.NewMem())
		b := objectstore.WithRetry(f, objectstore.RetryOptions{Budget: 10 * time.Second, FirstWait: time.Second, MaxWait: 2 * time.Second})
		f.Down(objectstore.ErrTransient)
		for op, want := range map[objectstore.Op]error{objectstore.OpGet: objectstore.ErrTransient, objectstore.OpPut: objectstore.ErrTransient} {
			start := time.Now()
			err := everyOp(t.Context(), b)[op]
			if !errors.Is(err, want) || errors.Is(err, objectstore.ErrUnknown) {
				t.Errorf("%s: %v", op, err)
			}
			// Six operations share the time.
			if d := time.Since(start); d < 6*8*time.Second || d > 6*10*time.Second {
				t.Errorf("%s: gave up after %v", op, d)
			}
		}
		if n := f.Calls(objectstore.OpGet); n < 2*5 || n > 2*12 {
			t.Errorf("%d attempts", n)
		}
		// The end of ctx ends the waiting, and the last error is told.
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		start := time.Now()
		if _, err := b.Get(ctx, "k", 1); !errors.Is(err, objectstore.ErrTransient) || time.Since(start) != 1500*time.Millisecond {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

func TestRetryLeavesAlone(t *testing.T) {
	for _, sentinel := range []error{
		objectstore.ErrNotFound, objectstore.ErrExists, objectstore.ErrDenied, objectstore.ErrCorrupt, objectstore.ErrFull, objectstore.ErrWrongRegion,
		objectstore.ErrUnsupported, objectstore.ErrInvalid, objectstore.ErrTooLarge, objectstore.ErrNoBucket, objectstore.ErrClosed,
	} {
		b, f := retrying()
		f.Down(fmt.Errorf("as told: %w", sentinel))
		for op, err := range everyOp(t.Context(), b) {
			if !errors.Is(err, sentinel) || errors.Is(err, objectstore.ErrUnknown) || f.Calls(op) != 1 {
				t.Errorf("%s: %d calls: %v", op, f.Calls(op), err)
			}
		}
	}
	b, f := retrying()
	f.Down(objectstore.ErrClockSkew)
	for op, err := range everyOp(t.Context(), b) {
		if !errors.Is(err, objectstore.ErrClockSkew) || f.Calls(op) != 2 {
			t.Errorf("clock skew, %s: %d calls: %v", op, f.Calls(op), err)
		}
	}
}

// TestRetryUnknownPut: what a put reports after an attempt of unknown outcome.
func TestRetryUnknownPut(t *testing.T) {
	for _, c := range []struct {
		name   string
		faults []faulty.Fault
		want   error // nil: success
		also   error
	}{
		{"it had won", []faulty.Fault{{Action: faulty.WinThenFail, Times: 1}}, objectstore.ErrExists, nil},
		{"it had not", []faulty.Fault{{Action: faulty.Fail, Times: 1}}, nil, nil},
		{"then denied", []faulty.Fault{{Action: faulty.WinThenFail, Times: 1}, {Nth: 2, Err: objectstore.ErrDenied}}, objectstore.ErrUnknown, objectstore.ErrDenied},
		{"then down", []faulty.Fault{{Action: faulty.WinThenFail, Times: 1}, {Nth: 2, Err: objectstore.ErrTransient}}, objectstore.ErrUnknown, objectstore.ErrTransient},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, f := retrying()
				for _, fault := range c.faults {
					fault.Op = objectstore.OpPut
					f.Add(fault)
				}
				err := b.PutIfAbsent(t.Context(), "k", []byte("k"))
				if c.want == nil && err != nil || c.want != nil && !errors.Is(err, c.want) || c.also != nil && !errors.Is(err, c.also) {
					t.Fatalf("got %v", err)
				}
			})
		})
	}
}

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := faulty.Wrap(objectstore.NewMem())
		b := objectstore.WithLimit(f, 3)
		gate := make(chan struct{})
		f.Add(faulty.Fault{Action: faulty.Delay, Gate: gate})
		var wg sync.WaitGroup
		var fine atomic.Int64
		for i := range 10 {
			wg.Go(func() {
				if b.PutIfAbsent(t.Context(), fmt.Sprint(i), nil) == nil {
					fine.Add(1)
				}
			})
		}
		synctest.Wait()
		if n := f.Calls(objectstore.OpPut); n != 3 {
			t.Errorf("%d calls under way", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := b.PutIfAbsent(ctx, "late", nil); !errors.Is(err, objectstore.ErrTransient) || !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, objectstore.ErrUnknown) {
			t.Errorf("a call that never got its turn: %v", err)
		}
		close(gate)
		wg.Wait()
		if fine.Load() != 10 {
			t.Errorf("%d of 10 calls succeeded", fine.Load())
		}
	})
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m, err := objectstore.NewMetrics(reg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := objectstore.NewMetrics(reg); err == nil {
		t.Error("registered twice")
	}
	f := faulty.Wrap(objectstore.NewMem())
	b := objectstore.WithMetrics(f, m)
	if err := b.PutIfAbsent(t.Context(), "there", []byte("there")); err != nil {
		t.Fatal(err)
	}
	for op, err := range everyOp(t.Context(), b) {
		if err != nil {
			t.Errorf("%s: %v", op, err)
		}
	}
	b.PutIfAbsent(t.Context(), "new", nil)
	f.Down(objectstore.ErrDenied)
	b.Get(t.Context(), "new", 10)
	const want = `isergate_object_bytes_total{op="get"} 5
isergate_object_bytes_total{op="get_range"} 2
isergate_object_bytes_total{op="put"} 8
isergate_object_request_duration_seconds{op="delete"} 1
isergate_object_request_duration_seconds{op="get"} 2
isergate_object_request_duration_seconds{op="get_range"} 1
isergate_object_request_duration_seconds{op="head"} 1
isergate_object_request_duration_seconds{op="list"} 1
isergate_object_request_duration_seconds{op="put"} 3
isergate_object_requests_total{class="denied",op="get"} 1
isergate_object_requests_total{class="fenced",op="put"} 1
isergate_object_requests_total{class="ok",op="delete"} 1
isergate_object_requests_total{class="ok",op="get"} 1
isergate_object_requests_total{class="ok",op="get_range"} 1
isergate_object_requests_total{class="ok",op="head"} 1
isergate_object_requests_total{class="ok",op="list"} 1
isergate_object_requests_total{class="ok",op="put"} 2
`
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			value := m.GetCounter().GetValue()
			if h := m.GetHistogram(); h != nil {
				value = float64(h.GetSampleCount())
			}
			fmt.Fprintf(&got, "%s{%s} %v\n", family.GetName(), strings.Join(labels, ","), value)
		}
	}
	if got.String() != want {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}

func TestFaulty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := faulty.Wrap(objectstore.NewMem())
		put := func(key string) error { return f.PutIfAbsent(t.Context(), key, []byte("body")) }
		there := func(key string) bool {
			_, err := f.Head(t.Context(), key)
			return err == nil
		}
		f.Add(faulty.Fault{Op: objectstore.OpPut, Prefix: "n/", Nth: 2, Times: 2, Err: objectstore.ErrFull})
		for i, want := range []error{nil, objectstore.ErrFull, objectstore.ErrFull, nil} {
			if err := put(fmt.Sprintf("n/%d", i)); !errors.Is(err, want) {
				t.Errorf("call %d: %v", i, err)
			}
		}
		f.Clear()

		f.Add(faulty.Fault{Op: objectstore.OpPut, Prefix: "drop", Action: faulty.Drop}, faulty.Fault{Op: objectstore.OpPut, Prefix: "win", Action: faulty.WinThenFail})
		if err := put("drop"); err != nil || there("drop") {
			t.Errorf("drop: %v, there %v", err, there("drop"))
		}
		if err := put("win"); !errors.Is(err, objectstore.ErrUnknown) || !there("win") {
			t.Errorf("win: %v, there %v", err, there("win"))
		}
		f.Add(faulty.Fault{Op: objectstore.OpGet, Action: faulty.Flip})
		if got, err := f.Get(t.Context(), "win", 10); err != nil || bytes.Equal(got, []byte("body")) {
			t.Errorf("flip: %q, %v", got, err)
		}

		for action, wantThere := range map[faulty.Action]bool{faulty.Hang: false, faulty.WinThenHang: true} {
			key := fmt.Sprintf("hang%d", action)
			began := make(chan struct{}, 1)
			f.Add(faulty.Fault{Op: objectstore.OpPut, Prefix: key, Action: action, Began: began})
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			start := time.Now()
			err := f.PutIfAbsent(ctx, key, nil)
			cancel()
			if !errors.Is(err, objectstore.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Hour || len(began) != 1 || there(key) != wantThere {
				t.Errorf("%s: after %v: %v, there %v", key, time.Since(start), err, there(key))
			}
		}
	})
}

// changed is a store with a deviation.
type changed struct {
	objectstore.Bucket
	put  func(ctx context.Context, key string, body []byte) error
	rng  func(ctx context.Context, key string, off int64, into []byte) (int, error)
	list func(ctx context.Context, prefix, after string, max int) ([]objectstore.Info, error)
}

func (c *changed) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if c.put == nil {
		return c.Bucket.PutIfAbsent(ctx, key, body)
	}
	return c.put(ctx, key, body)
}

func (c *changed) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if c.rng == nil {
		return c.Bucket.GetRange(ctx, key, off, into)
	}
	return c.rng(ctx, key, off, into)
}

func (c *changed) List(ctx context.Context, prefix, after string, max int) ([]objectstore.Info, error) {
	if c.list == nil {
		return c.Bucket.List(ctx, prefix, after, max)
	}
	return c.list(ctx, prefix, after, max)
}

func TestProbeFindsDeviations(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(c *changed, mem *objectstore.Mem)
		put    objectstore.ConditionalPut
		ranged bool
		listed bool
		want   error
	}{
		{"none", func(*changed, *objectstore.Mem) {}, objectstore.ConditionalHonoured, true, true, nil},
		{"overwrites", func(c *changed, mem *objectstore.Mem) {
			c.put = func(ctx context.Context, key string, body []byte) error {
				if err := mem.Delete(ctx, key); err != nil {
					return err
				}
				return mem.PutIfAbsent(ctx, key, body)
			}
		}, objectstore.ConditionalIgnored, true, true, objectstore.ErrNoConditionalPut},
		{"claims to have written", func(c *changed, mem *objectstore.Mem) {
			c.put = func(ctx context.Context, key string, body []byte) error {
				if err := mem.PutIfAbsent(ctx, key, body); !errors.Is(err, objectstore.ErrExists) {
					return err
				}
				return nil
			}
		}, objectstore.ConditionalIgnored, true, true, objectstore.ErrNoConditionalPut},
		{"refuses and overwrites", func(c *changed, mem *objectstore.Mem) {
			c.put = func(ctx context.Context, key string, body []byte) error {
				err := mem.PutIfAbsent(ctx, key, body)
				if errors.Is(err, objectstore.ErrExists) {
					mem.Delete(ctx, key)
					mem.PutIfAbsent(ctx, key, body)
				}
				return err
			}
		}, objectstore.ConditionalIgnored, true, true, objectstore.ErrNoConditionalPut},
		{"has no conditions", func(c *changed, mem *objectstore.Mem) {
			c.put = func(context.Context, string, []byte) error { return fmt.Errorf("501: %w", objectstore.ErrUnsupported) }
		}, objectstore.ConditionalUnsupported, false, false, objectstore.ErrNoConditionalPut},
		{"first reply lost", func(c *changed, mem *objectstore.Mem) {
			f := faulty.Wrap(mem)
			f.Add(faulty.Fault{Op: objectstore.OpPut, Action: faulty.WinThenFail, Times: 1})
			r := objectstore.WithRetry(f, objectstore.RetryOptions{FirstWait: 1})
			c.put = r.PutIfAbsent
		}, objectstore.ConditionalHonoured, true, true, nil},
		{"denied", func(c *changed, mem *objectstore.Mem) {
			c.put = func(context.Context, string, []byte) error { return objectstore.ErrDenied }
		}, objectstore.ConditionalUntested, false, false, objectstore.ErrDenied},
		{"ignores the range", func(c *changed, mem *objectstore.Mem) {
			c.rng = func(ctx context.Context, key string, _ int64, into []byte) (int, error) {
				return mem.GetRange(ctx, key, 0, into)
			}
		}, objectstore.ConditionalHonoured, false, false, objectstore.ErrUnsupported},
		{"ignores start-after", func(c *changed, mem *objectstore.Mem) {
			c.list = func(ctx context.Context, prefix, _ string, max int) ([]objectstore.Info, error) {
				return mem.List(ctx, prefix, "", max)
			}
		}, objectstore.ConditionalHonoured, true, false, objectstore.ErrUnsupported},
		{"lists backwards", func(c *changed, mem *objectstore.Mem) {
			c.list = func(ctx context.Context, prefix, after string, max int) ([]objectstore.Info, error) {
				page, err := mem.List(ctx, prefix, after, max)
				slices.Reverse(page)
				return page, err
			}
		}, objectstore.ConditionalHonoured, true, false, objectstore.ErrUnsupported},
		{"overwrites and lists backwards", func(c *changed, mem *objectstore.Mem) {
			c.put = func(ctx context.Context, key string, body []byte) error {
				if err := mem.Delete(ctx, key); err != nil {
					return err
				}
				return mem.PutIfAbsent(ctx, key, body)
			}
			c.list = func(ctx context.Context, prefix, after string, max int) ([]objectstore.Info, error) {
				page, err := mem.List(ctx, prefix, after, max)
				slices.Reverse(page)
				return page, err
			}
		}, objectstore.ConditionalIgnored, true, false, objectstore.ErrUnsupported},
		{"lists late", func(c *changed, mem *objectstore.Mem) {
			c.list = func(context.Context, string, string, int) ([]objectstore.Info, error) { return nil, nil }
		}, objectstore.ConditionalHonoured, true, false, objectstore.ErrUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := objectstore.NewMem()
			b := &changed{Bucket: mem}
			c.change(b, mem)
			caps, err := objectstore.Probe(t.Context(), b)
			if c.want == nil && err != nil || !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			if c.want == objectstore.ErrUnsupported && errors.Is(err, objectstore.ErrNoConditionalPut) {
				t.Errorf("an operator could overrule %v", err)
			}
			if caps.ConditionalPut != c.put || caps.RangedGet != c.ranged || caps.OrderedList != c.listed || !caps.Delete {
				t.Errorf("got %+v", caps)
			}
			if left, err := mem.List(t.Context(), "", "", 10); err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}
