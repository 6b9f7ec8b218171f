package gateway

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/objectstore"
)

// An outage of a bucket under a node that only reads: metric, status, one event and one line at its begin and
// at its end; the contract, which is about writes, is met all the time.
func TestBucketOutageIsAnnounced(t *testing.T) {
	cfg := testConfig(t)
	dir := strings.TrimPrefix(cfg.Bucket.URL, "file://")
	var log syncBuffer
	n, err := tryNode(t, cfg, &log)
	if err != nil {
		t.Fatal(err)
	}
	createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20, BlockSize: 4096})
	bucket, err := n.buckets.open(t.Context(), cfg.Bucket.URL)
	if err != nil {
		t.Fatal(err)
	}
	check := func(down bool, unreachable, reachable int) {
		t.Helper()
		s, err := n.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		v, err := n.Volume(t.Context(), "v")
		if err != nil {
			t.Fatal(err)
		}
		if (s.Bucket.Since != nil) != down || (s.Bucket.Error != "") != down || (len(s.BucketUnreachable) == 1) != down ||
			(v.BucketDownSince != nil) != down || v.State != "available" || !v.ContractMet {
			t.Errorf("status %+v\nvolume %+v", s, v)
		}
		seen := map[string]int{}
		for _, e := range s.Events {
			if strings.HasPrefix(e.Type, "bucket_") {
				seen[e.Type]++
				if e.Volume != "v" || !strings.Contains(e.Text, dir) || !strings.Contains(e.Text, "volumes: v") {
					t.Errorf("event %+v", e)
				}
			}
		}
		if seen["bucket_unreachable"] != unreachable || seen["bucket_reachable"] != reachable {
			t.Errorf("events %v, want %d and %d", seen, unreachable, reachable)
		}
		if lines := strings.Count(log.String(), `"level":"WARN","msg":"gateway event","type":"bucket_unreachable"`); lines != unreachable {
			t.Errorf("%d lines about the outage, want %d", lines, unreachable)
		}
	}
	later := time.Now().Add(time.Hour)
	n.announceOutages(later)
	check(false, 0, 0)

	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.Get(t.Context(), "x", 1); err == nil {
		t.Fatal("a bucket that is gone answers")
	}
	n.announceOutages(later)
	n.announceOutages(later.Add(time.Minute))
	check(true, 1, 0)

	n.probeTroubled(t.Context(), later) // it is still away
	n.announceOutages(later.Add(2 * time.Minute))
	check(true, 1, 0)

	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	n.probeTroubled(t.Context(), later)
	n.announceOutages(later.Add(3 * time.Minute))
	n.announceOutages(later.Add(4 * time.Minute))
	n.announceOutages(later.Add(5 * time.Minute))
	check(false, 1, 1)
}

// A store that refuses puts and answers gets is in trouble, and one that was unreachable is not any more once it answers anything.
func TestTroubleOfOneKindOfRequest(t *testing.T) {
	var h bucketHealth
	full, gone := fmt.Errorf("put: %w", objectstore.ErrFull), fmt.Errorf("dial: %w", objectstore.ErrTransient)
	check := func(want error) {
		t.Helper()
		if got := h.now(); (got == nil) != (want == nil) || got != nil && got.err != want {
			t.Errorf("%+v, want %v", got, want)
		}
	}
	check(nil)
	_ = h.note(objectstore.OpPut, full)
	_ = h.note(objectstore.OpGet, objectstore.ErrNotFound)
	check(full)
	_ = h.note(objectstore.OpGet, gone)
	_ = h.note(objectstore.OpList, context.Canceled)
	check(full) // it has lasted longer
	_ = h.note(objectstore.OpPut, nil)
	check(nil)
	_ = h.note(objectstore.OpPut, full)
	_ = h.note(objectstore.OpGet, nil)
	h.by[objectstore.OpPut] = trouble{op: objectstore.OpPut, err: full, since: time.Now().Add(-time.Hour), last: time.Now().Add(-time.Minute)}
	_ = h.note(objectstore.OpGet, nil)
	check(nil) // nobody puts any more
}
