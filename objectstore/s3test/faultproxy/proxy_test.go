package faultproxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// origin is a store of one bucket, as far as these tests need one.
type origin struct {
	mu   sync.Mutex // guards what follows
	body map[string][]byte
	keys []string
}

func (o *origin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := strings.TrimPrefix(r.URL.Path, "/b/")
	switch r.Method {
	case http.MethodPut:
		body, err := io.ReadAll(r.Body)
		switch {
		case err != nil:
			w.WriteHeader(http.StatusBadRequest)
		case o.body[key] != nil:
			w.WriteHeader(http.StatusPreconditionFailed)
		default:
			o.body[key] = body
			o.keys = append(o.keys, key)
		}
	case http.MethodGet:
		if r.URL.Query().Has("list-type") {
			io.WriteString(w, "<ListBucketResult>")
			for _, k := range o.keys {
				fmt.Fprintf(w, "<Contents><Key>%s</Key></Contents>", k)
			}
			io.WriteString(w, "</ListBucketResult>")
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(o.body[key])-1, len(o.body[key])))
		w.Write(o.body[key])
	}
}

func (o *origin) get(key string) []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.body[key]
}

func start(t *testing.T, seed uint64) (*Proxy, *origin) {
	t.Helper()
	o := &origin{body: map[string][]byte{}}
	server := httptest.NewServer(o)
	t.Cleanup(server.Close)
	p, err := Start(server.URL, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p, o
}

var payload = bytes.Repeat([]byte("0123456789abcdef"), 4096)

func send(t *testing.T, p *Proxy, method, path string, body []byte) (status int, got []byte, err error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, p.Endpoint()+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	got, err = io.ReadAll(resp.Body)
	return resp.StatusCode, got, err
}

// Each fault shows to the client and to the server as it should, and is counted.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		fault  Fault
		op     Op
		status int  // 0: an error
		done   bool // a put reached the server
		same   bool // the body is as it was
	}{
		{SlowDown, Put, 503, false, false}, {InternalError, Get, 500, true, false}, {TooMany, List, 429, true, false}, {Denied, Put, 403, false, false},
		{Skewed, Put, 400, false, false}, {WrongRegion, Put, 301, false, false}, {Hang, Put, 0, false, false}, {HangConn, Put, 0, false, false},
		{ResetEarly, Put, 0, false, false}, {ResetUpload, Put, 0, false, false}, {CorruptPut, Put, 200, true, false}, {Trickle, Get, 200, true, true},
		{LostAnswer, Put, 0, true, false}, {HangAfter, Put, 0, true, false}, {Repeat, Put, 412, true, true}, {ResetAnswer, Get, 0, true, false},
		{CutAnswer, Get, 0, true, false}, {ShortAnswer, Get, 200, true, false}, {CorruptGet, Get, 200, true, false}, {StaleList, List, 200, true, false},
	} {
		t.Run(string(c.fault), func(t *testing.T) {
			p, o := start(t, 7)
			method, path := http.MethodPut, "/b/k"
			if c.op != Put {
				if status, _, err := send(t, p, http.MethodPut, path, payload); status != 200 {
					t.Fatal(status, err)
				}
				method = http.MethodGet
			}
			if c.op == List {
				path = "/b?list-type=2&prefix="
			}
			p.Set(Rule{Faults: []Fault{c.fault}, Times: 1, Hold: 100 * time.Millisecond, Age: time.Hour})
			body := payload
			if c.op != Put {
				body = nil
			}
			status, got, err := send(t, p, method, path, body)
			if (c.status == 0) != (err != nil) || err == nil && status != c.status {
				t.Errorf("status %d, %v", status, err)
			}
			if c.op == Put {
				got = o.get("k")
			}
			if (o.get("k") != nil) != c.done || c.done && c.status == 200 && c.op != List && bytes.Equal(got, payload) != c.same {
				t.Errorf("done: %v, %d bytes", o.get("k") != nil, len(got))
			}
			if c.op == List && c.status == 200 && strings.Contains(string(got), "<Key>k<") {
				t.Errorf("a young key is listed: %s", got)
			}
			if p.Injected(c.fault) != 1 || p.Counts()[c.fault][c.op] != 1 {
				t.Errorf("counted: %v", p.Counts())
			}
			if status, _, err := send(t, p, http.MethodGet, "/b/k", nil); status != 200 || err != nil {
				t.Errorf("afterwards: %d, %v", status, err)
			}
		})
	}
}

func TestLatePut(t *testing.T) {
	p, o := start(t, 1)
	p.Set(Rule{Faults: []Fault{Late}, Hold: time.Millisecond})
	if status, _, err := send(t, p, http.MethodPut, "/b/k", payload); err == nil {
		t.Fatalf("answered with %d", status)
	}
	for !bytes.Equal(o.get("k"), payload) {
		select {
		case <-t.Context().Done():
			t.Fatal("the put did not arrive")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestDown(t *testing.T) {
	p, _ := start(t, 1)
	p.Down(true)
	if status, _, err := send(t, p, http.MethodGet, "/b/k", nil); err == nil {
		t.Fatalf("answered with %d", status)
	}
	if p.Total() == 0 || p.Requests(Get) != 0 {
		t.Errorf("%d requests, %d of them gets", p.Total(), p.Requests(Get))
	}
	p.Down(false)
	if _, _, err := send(t, p, http.MethodGet, "/b/k", nil); err != nil {
		t.Error(err)
	}
}

// What happens depends on seed and request, not on the order in which requests come, nor on identifiers that are random in each run.
func TestDecisions(t *testing.T) {
	r := Rule{PerMille: 300}
	r.ensureDefaults()
	ask := func(seed uint64, key string, nth int) string {
		req := httptest.NewRequest(http.MethodPut, key, nil)
		q := describe(req)
		f, dice, hit := r.choose(seed, &q, nth)
		return fmt.Sprint(f, dice, hit)
	}
	hits, kinds := 0, map[string]bool{}
	for n := range 1000 {
		a := ask(1, "/b/volumes/0b2f6c0e-5df8-4f9e-8a53-0d1f9c3c1a11/log/1/2", n)
		if b := ask(1, "/b/volumes/ffffffff-5df8-4f9e-8a53-0d1f9c3c1a11/log/1/2", n); a != b {
			t.Fatalf("%s and %s", a, b)
		}
		if strings.HasSuffix(a, "true") {
			hits++
			kinds[strings.SplitN(a, " ", 2)[0]] = true
		}
	}
	if hits < 250 || hits > 350 || len(kinds) < 10 {
		t.Errorf("%d of 1000 were hit, by %d faults", hits, len(kinds))
	}
	if ask(1, "/b/k", 0) == ask(2, "/b/k", 0) && ask(1, "/b/k", 1) == ask(2, "/b/k", 1) && ask(1, "/b/k", 2) == ask(2, "/b/k", 2) {
		t.Error("the seed does not matter")
	}
}

func TestCloseEndsWhatHangs(t *testing.T) {
	p, _ := start(t, 1)
	p.Set(Rule{Faults: []Fault{Hang}, Hold: time.Hour})
	done := make(chan error, 1)
	go func() {
		_, _, err := send(t, p, http.MethodPut, "/b/k", payload)
		done <- err
	}()
	for p.Injected(Hang) == 0 {
		time.Sleep(time.Millisecond)
	}
	p.Close()
	p.Close()
	if err := <-done; err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}
