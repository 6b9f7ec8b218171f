package faultproxy

import (
	"hash/fnv"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Fault is one thing that happens to a request.
type Fault string

// The faults. Those before the work keep the request from the server; those after it let the server do what
// was asked for.
const (
	// Answers of the store, or of something in front of it, before the work.
	SlowDown      Fault = "503 SlowDown"
	InternalError Fault = "500 InternalError"
	TooMany       Fault = "429 TooManyRequests"
	Denied        Fault = "403 AccessDenied"
	Skewed        Fault = "400 RequestTimeTooSkewed"
	WrongRegion   Fault = "301 PermanentRedirect"

	// Before the work, on the connection.
	Hang        Fault = "no answer"             // the request is read; the connection is reset when Hold is over
	HangConn    Fault = "hung connection"       // nothing is read and nothing said until Hold is over
	ResetEarly  Fault = "reset before the body" // as soon as the header was read
	ResetUpload Fault = "reset in the body"     // half of a put's body was read
	Late        Fault = "put that arrives late" // the connection is reset, and the put goes to the server when Hold is over
	CorruptPut  Fault = "corrupted put"         // one bit of a put's body is inverted
	Trickle     Fault = "slow trickle"          // a few bytes at a time in both directions until Hold is over
	LostAnswer  Fault = "reset after the work"  // the server's answer is not passed on
	HangAfter   Fault = "no answer after work"  // nor is the connection closed until Hold is over
	Repeat      Fault = "412 after a won put"   // the put is sent twice, and the second answer is passed on
	ResetAnswer Fault = "reset in the answer"   // half of the body is passed on
	CutAnswer   Fault = "cut answer"            // likewise, and the connection ends in good order
	ShortAnswer Fault = "short answer"          // half of the body, with the length of that half
	CorruptGet  Fault = "corrupted answer"      // one bit of the body is inverted
	StaleList   Fault = "stale list"            // keys that are younger than Age are left out
)

// Faults are all faults.
var Faults = []Fault{
	SlowDown, InternalError, TooMany, Denied, Skewed, WrongRegion, Hang, HangConn, ResetEarly, ResetUpload, Late, CorruptPut,
	Trickle, LostAnswer, HangAfter, Repeat, ResetAnswer, CutAnswer, ShortAnswer, CorruptGet, StaleList,
}

// Op is the kind of a request.
type Op string

// The kinds that are told apart.
const (
	Put    Op = "put"
	Get    Op = "get"
	List   Op = "list"
	Head   Op = "head"
	Delete Op = "delete"
)

// Applies reports whether the fault can happen to requests of a kind.
func (f Fault) Applies(op Op) bool {
	switch f {
	case ResetUpload, Late, CorruptPut, Repeat:
		return op == Put
	case ResetAnswer, CutAnswer, ShortAnswer, CorruptGet:
		return op == Get || op == List
	case StaleList:
		return op == List
	}
	return true
}

// Rule says which requests meet with which faults.
type Rule struct {
	Faults   []Fault       // one of them that applies; nil: of all
	Ops      []Op          // nil: all
	Key      string        // a part of the key, for a list of its prefix; empty: all
	PerMille int           // of the requests that match, out of 1000; 0: each
	Times    int           // the rule ends when it has changed so many requests; 0: never
	Hold     time.Duration // how long what hangs, trickles or is late does so; default 500 ms
	Age      time.Duration // how much older than the truth a list is; default 2 s
}

func (r *Rule) ensureDefaults() {
	if r.Faults == nil {
		r.Faults = Faults
	}
	if r.PerMille == 0 {
		r.PerMille = 1000
	}
	if r.Hold == 0 {
		r.Hold = 500 * time.Millisecond
	}
	if r.Age == 0 {
		r.Age = 2 * time.Second
	}
}

// request is what a rule decides by.
type request struct {
	op   Op
	key  string // with the bucket in front; of a list its prefix
	what string // the same without what is random in each run
}

var random = regexp.MustCompile(`[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}`)

func describe(r *http.Request) request {
	q := request{key: strings.TrimPrefix(r.URL.Path, "/")}
	query := r.URL.Query()
	switch {
	case r.Method == http.MethodPut:
		q.op = Put
	case r.Method == http.MethodHead:
		q.op = Head
	case r.Method == http.MethodDelete, query.Has("delete"):
		q.op = Delete
	case query.Has("list-type"):
		q.op = List
		q.key += "/" + query.Get("prefix")
	default:
		q.op = Get
	}
	q.what = random.ReplaceAllString(string(q.op)+" "+q.key+"?"+keepOf(query), "*")
	return q
}

// keepOf is what of a query tells requests for one key apart.
func keepOf(query url.Values) string { return query.Get("start-after") }

// choose says what happens to the nth request that is like q: always the same for the same seed.
func (r *Rule) choose(seed uint64, q *request, nth int) (f Fault, dice uint64, hit bool) {
	if r.Ops != nil && !slices.Contains(r.Ops, q.op) || !strings.Contains(q.key, r.Key) {
		return "", 0, false
	}
	h := fnv.New64a()
	for _, n := range []uint64{seed, uint64(nth)} {
		var b [8]byte
		for i := range b {
			b[i] = byte(n >> (8 * i))
		}
		h.Write(b[:])
	}
	h.Write([]byte(q.what))
	dice = mix(h.Sum64())
	if int(dice%1000) >= r.PerMille {
		return "", 0, false
	}
	var fit []Fault
	for _, f := range r.Faults {
		if f.Applies(q.op) {
			fit = append(fit, f)
		}
	}
	if len(fit) == 0 {
		return "", 0, false
	}
	return fit[dice/1000%uint64(len(fit))], mix(dice), true
}

// mix spreads what few bits differ in over all bits (the finalizer of SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
