// Package buckettest is the conformance suite of objectstore.Bucket. Every backend, every
// decorator and every real server runs it.
package buckettest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/isergate/isergate/objectstore"
)

// Limits are known limits of a store that the suite must not step over.
type Limits struct {
	// NoKeyBelowKey: "a" and "a/b" cannot both exist, as with stores on a file system. The
	// gateway never needs that.
	NoKeyBelowKey bool
}

// Run runs the suite. open returns an empty bucket, which the suite closes.
func Run(t *testing.T, open func(t *testing.T) objectstore.Bucket) {
	RunWithin(t, Limits{}, open)
}

// RunWithin is Run for a store with limits.
func RunWithin(t *testing.T, limits Limits, open func(t *testing.T) objectstore.Bucket) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s *suite)
	}{
		{"put and get", putAndGet},
		{"put twice", putTwice},
		{"race", race},
		{"get limit", getLimit},
		{"ranges", ranges},
		{"head", head},
		{"missing", missing},
		{"list pages", listPages},
		{"list order", listOrder},
		{"delete", deleteMany},
		{"empty object", emptyObject},
		{"large objects", largeObjects},
		{"odd keys", oddKeys},
		{"bad arguments", badArguments},
		{"cancelled", cancelled},
		{"body is not kept", bodyNotKept},
		{"probe", probe},
		{"close", closed},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := open(t)
			t.Cleanup(func() { b.Close() })
			test.run(t, &suite{Bucket: b, ctx: t.Context(), rng: rand.New(rand.NewPCG(seed, 1)), limits: limits})
		})
	}
}

type suite struct {
	objectstore.Bucket
	ctx    context.Context
	rng    *rand.Rand
	limits Limits
}

func (s *suite) random(n int) []byte {
	out := make([]byte, 0, n+8)
	for len(out) < n {
		out = binary.LittleEndian.AppendUint64(out, s.rng.Uint64())
	}
	return out[:n:n]
}

func (s *suite) put(t *testing.T, key string, body []byte) {
	t.Helper()
	if err := s.PutIfAbsent(s.ctx, key, body); err != nil {
		t.Fatalf("put %q: %v", key, err)
	}
}

func (s *suite) want(t *testing.T, key string, body []byte) {
	t.Helper()
	got, err := s.Get(s.ctx, key, int64(len(body)))
	if err != nil {
		t.Fatalf("get %q: %v", key, err)
	}
	if !bytes.Equal(got, body) {
		t.Fatalf("get %q: %d bytes that differ from the %d written", key, len(got), len(body))
	}
}

func wantErr(t *testing.T, err, sentinel error, class objectstore.Class) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Fatalf("got error %v, want one that is %v", err, sentinel)
	}
	if got := objectstore.Classify(err); got != class {
		t.Fatalf("error %v has class %v, want %v", err, got, class)
	}
	if objectstore.Advice(err) == "" {
		t.Fatalf("error %v has no advice", err)
	}
}

func putAndGet(t *testing.T, s *suite) {
	for _, n := range []int{1, 511, 4096, 65535, 65536, 65537, 200_000} {
		key := fmt.Sprintf("volumes/v/log/1/%d", n)
		body := s.random(n)
		s.put(t, key, body)
		s.want(t, key, body)
	}
}

func putTwice(t *testing.T, s *suite) {
	s.put(t, "k", []byte("first"))
	for _, body := range []string{"second", "first", ""} {
		wantErr(t, s.PutIfAbsent(s.ctx, "k", []byte(body)), objectstore.ErrExists, objectstore.ClassFenced)
	}
	s.want(t, "k", []byte("first"))
	if err := s.Delete(s.ctx, "k"); err != nil {
		t.Fatal(err)
	}
	s.put(t, "k", []byte("third"))
	s.want(t, "k", []byte("third"))
}

// race lets 32 writers put the same key: one wins, and its bytes are there.
func race(t *testing.T, s *suite) {
	for round := range 4 {
		key := fmt.Sprintf("race/%d", round)
		bodies := make([][]byte, 32)
		errs := make([]error, len(bodies))
		for i := range bodies {
			bodies[i] = append([]byte(fmt.Sprintf("writer %2d ", i)), s.random(20_000)...)
		}
		start := make(chan struct{})
		var wg sync.WaitGroup
		for i := range bodies {
			wg.Go(func() {
				<-start
				errs[i] = s.PutIfAbsent(s.ctx, key, bodies[i])
			})
		}
		close(start)
		wg.Wait()
		got, err := s.Get(s.ctx, key, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		winners := 0
		for i, err := range errs {
			isThere := bytes.Equal(got, bodies[i])
			switch {
			case err == nil:
				winners++
				if !isThere {
					t.Errorf("round %d: writer %d was told that it won, another's bytes are there", round, i)
				}
			case errors.Is(err, objectstore.ErrExists):
				if isThere {
					t.Errorf("round %d: writer %d was told that it lost, its bytes are there", round, i)
				}
			default:
				t.Errorf("round %d: writer %d: %v", round, i, err)
			}
		}
		if winners != 1 {
			t.Errorf("round %d: %d winners", round, winners)
		}
	}
}

func getLimit(t *testing.T, s *suite) {
	body := s.random(1000)
	s.put(t, "k", body)
	for _, limit := range []int64{1000, 1001, 1 << 40} {
		if got, err := s.Get(s.ctx, "k", limit); err != nil || !bytes.Equal(got, body) {
			t.Fatalf("limit %d: %v", limit, err)
		}
	}
	for _, limit := range []int64{0, 1, 999} {
		_, err := s.Get(s.ctx, "k", limit)
		wantErr(t, err, objectstore.ErrTooLarge, objectstore.ClassInvalid)
	}
}

func ranges(t *testing.T, s *suite) {
	const size = 3*65536 + 1234
	body := s.random(size)
	s.put(t, "k", body)
	check := func(off, n int) {
		t.Helper()
		into := bytes.Repeat([]byte{0xa5}, n+8)
		got, err := s.GetRange(s.ctx, "k", int64(off), into[:n])
		if err != nil {
			t.Fatalf("range %d+%d: %v", off, n, err)
		}
		want := body[min(off, size):min(off+n, size)]
		if !bytes.Equal(into[:got], want) {
			t.Fatalf("range %d+%d: %d bytes, want %d, or they differ", off, n, got, len(want))
		}
		if !bytes.Equal(into[n:], bytes.Repeat([]byte{0xa5}, 8)) {
			t.Fatalf("range %d+%d: wrote behind the buffer", off, n)
		}
	}
	for _, r := range [][2]int{
		{0, 1}, {0, 65536}, {0, size}, {0, size + 1}, {1, 65536}, {65535, 2}, {65536, 65536}, {65536, 131072},
		{size - 1, 1}, {size - 1, 2}, {size - 1234, 1234}, {size, 1}, {size + 1, 1}, {size + 1<<30, 10}, {5, 0}, {size, 0},
	} {
		check(r[0], r[1])
	}
	for range 30 {
		check(s.rng.IntN(size+10), 1+s.rng.IntN(size))
	}
	_, err := s.GetRange(s.ctx, "missing", 0, make([]byte, 10))
	wantErr(t, err, objectstore.ErrNotFound, objectstore.ClassNotFound)
	_, err = s.GetRange(s.ctx, "missing", 0, nil)
	wantErr(t, err, objectstore.ErrNotFound, objectstore.ClassNotFound)
}

func head(t *testing.T, s *suite) {
	s.put(t, "a/b", s.random(70_000))
	info, err := s.Head(s.ctx, "a/b")
	if err != nil {
		t.Fatal(err)
	}
	if info.Key != "a/b" || info.Size != 70_000 || info.Modified.IsZero() {
		t.Fatalf("got %+v", info)
	}
}

func missing(t *testing.T, s *suite) {
	s.put(t, "a/b/c", []byte("x"))
	for _, key := range []string{"k", "a", "a/b", "a/b/cd", "a/b/c.d", "a/b/d", "a/x/c", "A/b/c"} {
		_, err := s.Head(s.ctx, key)
		wantErr(t, err, objectstore.ErrNotFound, objectstore.ClassNotFound)
		_, err = s.Get(s.ctx, key, 10)
		wantErr(t, err, objectstore.ErrNotFound, objectstore.ClassNotFound)
	}
}

// keysWithin leaves out keys that the store's limits do not allow.
func (s *suite) keysWithin(keys []string) []string {
	if !s.limits.NoKeyBelowKey {
		return keys
	}
	return slices.DeleteFunc(slices.Clone(keys), func(k string) bool {
		return slices.ContainsFunc(keys, func(other string) bool { return strings.HasPrefix(other, k+"/") })
	})
}

// fill puts small objects in parallel.
func (s *suite) fill(t *testing.T, keys []string) {
	t.Helper()
	g, ctx := errgroup.WithContext(s.ctx)
	g.SetLimit(32)
	for _, key := range keys {
		g.Go(func() error { return s.PutIfAbsent(ctx, key, []byte(key)) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// collect pages through a listing.
func (s *suite) collect(t *testing.T, prefix, after string, max int) []string {
	t.Helper()
	var keys []string
	for {
		page, err := s.List(s.ctx, prefix, after, max)
		if err != nil {
			t.Fatalf("list %q after %q: %v", prefix, after, err)
		}
		if len(page) > max {
			t.Fatalf("list %q after %q: %d entries, asked for %d", prefix, after, len(page), max)
		}
		for _, info := range page {
			if info.Size != int64(len(info.Key)) {
				t.Fatalf("%q has size %d, want %d", info.Key, info.Size, len(info.Key))
			}
			keys = append(keys, info.Key)
			after = info.Key
		}
		if len(page) < max {
			return keys
		}
	}
}

func (s *suite) wantList(t *testing.T, all []string, prefix, after string, max int) {
	t.Helper()
	var want []string
	for _, k := range all {
		if strings.HasPrefix(k, prefix) && k > after {
			want = append(want, k)
		}
	}
	slices.Sort(want)
	if got := s.collect(t, prefix, after, max); !slices.Equal(got, want) {
		t.Fatalf("list %q after %q by %d: %d keys, want %d; first difference at %d", prefix, after, max, len(got), len(want), firstDifference(got, want))
	}
}

func firstDifference(a, b []string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func listPages(t *testing.T, s *suite) {
	if got := s.collect(t, "", "", 1000); len(got) != 0 {
		t.Fatalf("an empty bucket lists %q", got)
	}
	var keys []string
	for i := range 1230 {
		keys = append(keys, fmt.Sprintf("volumes/v/log/%020d/%020d", 1+i/700, i))
	}
	keys = s.keysWithin(append(keys, "volumes/w/x", "volumez", "volumes"))
	s.fill(t, keys)
	for _, max := range []int{1000, 615, 123} {
		s.wantList(t, keys, "volumes/v/", "", max)
	}
	s.wantList(t, keys, "", "", 1000)
	s.wantList(t, keys, "volumes/v/log/00000000000000000001/", keys[650], 20)
	s.wantList(t, keys, "volumes/v/log/00000000000000000002/", keys[650], 600)
	s.wantList(t, keys, "volumes/v/log/0000000000000000000", keys[699], 1000)
	s.wantList(t, keys, "volumes/v/", keys[1229], 1)
	s.wantList(t, keys, "nothing/", "", 10)
	page, err := s.List(s.ctx, "volumes/v/", "", 1)
	if err != nil || len(page) != 1 || page[0].Key != keys[0] {
		t.Fatalf("first of many: %v %v", page, err)
	}
}

// listOrder has keys whose order as paths differs from their byte order.
func listOrder(t *testing.T, s *suite) {
	keys := []string{"a-b", "a.b", "a0", "aB", "a/b", "a/b/c", "a/b-c", "a/B", "ab/c", "b", "B/x", "Z", "z/0", "z/1/0", "z/1/00", "z/10", "a/ä", "a/z", "ä", "a b/c", "a!b", "a/c/d/e"}
	keys = s.keysWithin(keys)
	s.fill(t, keys)
	afters := append([]string{"", "a", "a/", "a/b/", "a/b0", "zz", "z/1", "~"}, keys...)
	for _, prefix := range []string{"", "a", "a/", "a/b", "a/b/", "z/1", "B", "ä", "q"} {
		for range 6 {
			s.wantList(t, keys, prefix, afters[s.rng.IntN(len(afters))], 3+s.rng.IntN(9))
		}
		s.wantList(t, keys, prefix, "", 1)
	}
}

func deleteMany(t *testing.T, s *suite) {
	var keys []string
	for i := range 1050 {
		keys = append(keys, fmt.Sprintf("d/%d", i))
	}
	s.fill(t, keys)
	s.put(t, "keep", []byte("keep"))
	for _, some := range [][]string{nil, {"d/0"}, {"d/0"}, {"missing", "d/1", "d/x/y", "d/1"}} {
		if err := s.Delete(s.ctx, some...); err != nil {
			t.Fatalf("delete %q: %v", some, err)
		}
	}
	s.wantList(t, append([]string{"keep"}, keys[2:]...), "", "", 1000)
	if err := s.Delete(s.ctx, append([]string{"never was"}, keys...)...); err != nil {
		t.Fatal(err)
	}
	s.wantList(t, []string{"keep"}, "", "", 1000)
}

func emptyObject(t *testing.T, s *suite) {
	s.put(t, "e", nil)
	got, err := s.Get(s.ctx, "e", 0)
	if err != nil || len(got) != 0 {
		t.Fatalf("get: %d bytes, %v", len(got), err)
	}
	if n, err := s.GetRange(s.ctx, "e", 0, make([]byte, 10)); n != 0 || err != nil {
		t.Fatalf("range: %d, %v", n, err)
	}
	if info, err := s.Head(s.ctx, "e"); err != nil || info.Size != 0 {
		t.Fatalf("head: %+v, %v", info, err)
	}
	wantErr(t, s.PutIfAbsent(s.ctx, "e", []byte("x")), objectstore.ErrExists, objectstore.ClassFenced)
}

func largeObjects(t *testing.T, s *suite) {
	body := s.random(8 << 20)
	g, ctx := errgroup.WithContext(s.ctx)
	for i := range 4 {
		g.Go(func() error { return s.PutIfAbsent(ctx, fmt.Sprintf("large/%d", i), body) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	s.want(t, "large/2", body)
	into := make([]byte, 1<<20)
	if n, err := s.GetRange(s.ctx, "large/3", 7<<20+5, into); err != nil || !bytes.Equal(into[:n], body[7<<20+5:]) {
		t.Fatalf("range: %d bytes, %v", n, err)
	}
}

func oddKeys(t *testing.T, s *suite) {
	keys := []string{
		"UPPER", "upper", "Upper", "with space", " lead", "trail ", "plus+plus", "per%cent", "per%25cent", "eq=ual", "a=", "q?x=1&y=2", "hash#", "semi;colon",
		"quo\"te'", "back\\slash", "<xml>&amp;", "..a", "a..", ".hidden", "...", "~", "ünïcödé", "日本語/キー", "con", "aux.txt", "a:b", "a*b|c", "%2e%2e/x", strings.Repeat("K", objectstore.MaxKeyComponent),
		strings.TrimSuffix(strings.Repeat(strings.Repeat("p", 63)+"/", 8), "/"),
	}
	for _, key := range keys {
		s.put(t, key, []byte(key))
		s.want(t, key, []byte(key))
		if info, err := s.Head(s.ctx, key); err != nil || info.Key != key {
			t.Fatalf("head %q: %+v, %v", key, info, err)
		}
	}
	s.wantList(t, keys, "", "", 1000)
	s.wantList(t, keys, "", "", 1)
	if err := s.Delete(s.ctx, keys...); err != nil {
		t.Fatal(err)
	}
	s.wantList(t, nil, "", "", 1000)
}

func badArguments(t *testing.T, s *suite) {
	long := strings.Repeat("x", objectstore.MaxKeyComponent+1)
	for _, key := range []string{"", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\x00b", "a\nb", "\xff", long, strings.Repeat("abc/", 200) + "d"} {
		wantErr(t, s.PutIfAbsent(s.ctx, key, nil), objectstore.ErrInvalid, objectstore.ClassInvalid)
		_, err := s.Get(s.ctx, key, 1)
		wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
		_, err = s.GetRange(s.ctx, key, 0, make([]byte, 1))
		wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
		_, err = s.Head(s.ctx, key)
		wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
		wantErr(t, s.Delete(s.ctx, "fine", key), objectstore.ErrInvalid, objectstore.ClassInvalid)
	}
	for _, max := range []int{-1, 0, 1001} {
		_, err := s.List(s.ctx, "", "", max)
		wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
	}
	_, err := s.List(s.ctx, "/", "", 1)
	wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
	_, err = s.GetRange(s.ctx, "k", -1, make([]byte, 1))
	wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
	_, err = s.Get(s.ctx, "k", -1)
	wantErr(t, err, objectstore.ErrInvalid, objectstore.ClassInvalid)
}

func cancelled(t *testing.T, s *suite) {
	s.put(t, "there", []byte("there"))
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	err := s.PutIfAbsent(ctx, "k", []byte("x"))
	wantErr(t, err, context.Canceled, objectstore.ClassTransient)
	_, err = s.Get(ctx, "there", 10)
	wantErr(t, err, context.Canceled, objectstore.ClassTransient)
	_, err = s.GetRange(ctx, "there", 0, make([]byte, 1))
	wantErr(t, err, context.Canceled, objectstore.ClassTransient)
	_, err = s.Head(ctx, "there")
	wantErr(t, err, context.Canceled, objectstore.ClassTransient)
	_, err = s.List(ctx, "", "", 10)
	wantErr(t, err, context.Canceled, objectstore.ClassTransient)
	wantErr(t, s.Delete(ctx, "there"), context.Canceled, objectstore.ClassTransient)
	s.wantList(t, []string{"there"}, "", "", 10)
}

func bodyNotKept(t *testing.T, s *suite) {
	body := []byte("as it was")
	s.put(t, "k", body)
	copy(body, "XXXXXXXXX")
	s.want(t, "k", []byte("as it was"))
	got, err := s.Get(s.ctx, "k", 100)
	if err != nil {
		t.Fatal(err)
	}
	copy(got, "YYYYYYYYY")
	s.want(t, "k", []byte("as it was"))
}

func probe(t *testing.T, s *suite) {
	caps, err := objectstore.Probe(s.ctx, s.Bucket)
	if err != nil {
		t.Fatal(err)
	}
	if caps.ConditionalPut != objectstore.ConditionalHonoured || !caps.RangedGet || !caps.OrderedList || !caps.Delete {
		t.Fatalf("got %+v", caps)
	}
	s.wantList(t, nil, "", "", 10)
}

func closed(t *testing.T, s *suite) {
	s.put(t, "k", []byte("k"))
	if s.URL() == "" {
		t.Fatal("no URL")
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.Get(s.ctx, "k", 10)
	wantErr(t, err, objectstore.ErrClosed, objectstore.ClassInvalid)
	wantErr(t, s.PutIfAbsent(s.ctx, "l", nil), objectstore.ErrClosed, objectstore.ClassInvalid)
}
