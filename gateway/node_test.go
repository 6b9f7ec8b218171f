package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/catalog"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/gateway/units"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/volumelog"
)

const (
	iqn       = "iqn.2026-11.com.example:t"
	initiator = "iqn.2026-11.com.example:i"
)

// testConfig is a small node in a directory of its own, on a free port.
func testConfig(t *testing.T) config.Config {
	t.Helper()
	dir := t.TempDir()
	c := config.Config{
		DataDir: filepath.Join(dir, "data"), Bucket: config.Bucket{URL: "file://" + dir + "/bucket", RetryFor: time.Second},
		Portals: []config.Portal{{Listen: "127.0.0.1:0"}}, API: config.API{Socket: filepath.Join(dir, "s")},
		Cache: config.Cache{Journal: 128 * units.MiB, Segment: 32 * units.MiB, Arena: 32 * units.MiB, MapMemory: 16 * units.MiB,
			ReadCache: 64 * units.MiB, ReadCacheMemory: 16 * units.MiB, ObjectAge: 50 * time.Millisecond},
	}
	if faults := c.Complete(); faults != nil {
		t.Fatal(faults)
	}
	return c
}

func tryNode(t *testing.T, c config.Config, log io.Writer) (*Node, error) {
	t.Helper()
	n, err := Start(t.Context(), Options{Config: c, Version: "test", Logger: slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	if err == nil {
		t.Cleanup(func() { _ = n.Stop(context.Background()) })
	}
	return n, err
}

func startNode(t *testing.T, c config.Config) *Node {
	t.Helper()
	n, err := tryNode(t, c, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func stopNode(t *testing.T, n *Node) {
	t.Helper()
	if err := n.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func createVolume(t *testing.T, n *Node, r api.CreateVolume) *volume {
	t.Helper()
	if _, err := n.CreateVolume(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	state := n.catalog.State()
	return n.volume(state.Volume(r.Name).ID)
}

func wantCode(t *testing.T, err error, code api.Code, text string) {
	t.Helper()
	if err == nil || api.CodeOf(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v (%s), want %s with %q", err, api.CodeOf(err), code, text)
	}
}

func pointer[T any](v T) *T { return &v }

// What an administrator does to a volume, through the socket, and that all of it is there after a restart.
func TestVolumeLifeThroughTheAPI(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	c, err := api.NewClient("unix:"+cfg.API.Socket, api.ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	v, err := c.CreateVolume(ctx, api.CreateVolume{Name: "db01", SizeBytes: 1 << 30, Ack: "object", OnUnmet: "error", DirtyBudgetBytes: 32 << 20, Target: iqn, LUN: pointer(7)})
	if err != nil {
		t.Fatal(err)
	}
	if v.Policy != (api.Policy{Ack: "object", Flush: "object", OnUnmet: "error"}) || v.State != "available" || !v.ContractMet || v.Epoch != 1 || v.Generation != 1 ||
		v.DirtyBudgetBytes != 32<<20 || len(v.Mappings) != 1 || v.Mappings[0] != (api.Mapping{Target: iqn, LUN: 7}) || !strings.Contains(v.Contract, "object store") {
		t.Fatalf("%+v", v)
	}
	if v, err = c.ChangeVolume(ctx, "db01", api.ChangeVolume{SizeBytes: pointer(int64(2 << 30)), Ack: pointer("local")}); err != nil || v.SizeBytes != 2<<30 || v.Policy.Ack != "local" || v.Policy.Flush != "object" {
		t.Fatalf("%+v, %v", v, err)
	}
	if v, err = c.WaitVolume(ctx, v.UUID, api.WaitVolume{Level: "object"}); err != nil || v.Watermarks.Object.LSN < v.Watermarks.Acked.LSN {
		t.Fatalf("%+v, %v", v, err)
	}
	stopNode(t, n)

	startNode(t, cfg)
	again, err := c.Volume(ctx, "db01")
	if err != nil {
		t.Fatal(err)
	}
	if again.UUID != v.UUID || again.SizeBytes != 2<<30 || again.Policy != v.Policy || again.Epoch != 2 || again.Generation != 1 || again.Mappings[0].LUN != 7 {
		t.Fatalf("%+v", again)
	}
	status, err := c.Status(ctx)
	if err != nil || status.State != api.Serving || status.Bucket.Conditional != "honoured" || status.VolumeStates["available"] != 1 || len(status.Portals) != 1 {
		t.Fatalf("%+v, %v", status, err)
	}
}

func TestRefusals(t *testing.T) {
	n := startNode(t, testConfig(t))
	ctx := t.Context()
	createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20, Target: iqn})
	createVolume(t, n, api.CreateVolume{Name: "w", SizeBytes: 8 << 20})
	create := func(r api.CreateVolume) error { _, err := n.CreateVolume(ctx, r); return err }
	change := func(r api.ChangeVolume) error { _, err := n.ChangeVolume(ctx, "v", r); return err }
	lun := func(r api.MapLUN) error { _, err := n.MapLUN(ctx, iqn, r); return err }
	for _, q := range []struct {
		err  error
		code api.Code
		text string
	}{
		{create(api.CreateVolume{Name: "v", SizeBytes: 1 << 20}), api.CodeConflict, "another name"},
		{create(api.CreateVolume{Name: "a/b", SizeBytes: 5, BlockSize: 7}), api.CodeInvalid, "no volume name"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1<<20 + 512, BlockSize: 4096}), api.CodeInvalid, "multiple"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 65 << 40}), api.CodeInvalid, "outside"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, Ack: "quorum"}), api.CodeInvalid, "needs a cluster"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, Ack: "disk"}), api.CodeInvalid, "no persistence level"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, Ack: "object", Flush: "local"}), api.CodeInvalid, "weaker"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, OnUnmet: "panic"}), api.CodeInvalid, "on-unmet"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, DirtyBudgetBytes: 1 << 40}), api.CodeInvalid, "dirty budget"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, LUN: pointer(1)}), api.CodeInvalid, "--target"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, Target: "nonsense"}), api.CodeInvalid, "iSCSI name"},
		{create(api.CreateVolume{Name: "x", SizeBytes: 1 << 20, Target: iqn, LUN: pointer(0)}), api.CodeConflict, "taken"},
		{change(api.ChangeVolume{SizeBytes: pointer(int64(4 << 20))}), api.CodeInvalid, "only grows"},
		{change(api.ChangeVolume{Flush: pointer("memory")}), api.CodeInvalid, "weaker"},
		{change(api.ChangeVolume{Ack: pointer("quorum")}), api.CodeInvalid, "needs a cluster"},
		{lun(api.MapLUN{Volume: "v"}), api.CodeConflict, "already"},
		{lun(api.MapLUN{Volume: "none"}), api.CodeNotFound, "no volume"},
		{lun(api.MapLUN{Volume: "w", LUN: pointer(256)}), api.CodeInvalid, "outside"},
		{n.UnmapLUN(ctx, iqn, 9), api.CodeNotFound, "no LUN 9"},
		{n.DeleteVolume(ctx, "v", api.DeleteVolume{}), api.CodeConflict, "lun unmap " + iqn + " 0"},
		{n.DeleteVolume(ctx, "none", api.DeleteVolume{}), api.CodeNotFound, "no volume"},
		{n.DeleteTarget(ctx, "iqn.2026-11.com.example:none"), api.CodeNotFound, "no target"},
		{n.RemoveACL(ctx, iqn, initiator), api.CodeNotFound, "no ACL entry"},
	} {
		wantCode(t, q.err, q.code, q.text)
	}
	_, err := n.WaitVolume(ctx, "v", api.WaitVolume{Level: "quorum"})
	wantCode(t, err, api.CodeInvalid, "cluster")
	if volumes, _ := n.Volumes(ctx); len(volumes) != 2 {
		t.Errorf("a refused request left a volume: %+v", volumes)
	}
}

// A deleted volume stays in the bucket and comes back from it with a new generation; a purged
// one is gone.
func TestDeleteRestorePurge(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	ctx := t.Context()
	v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20, BlockSize: 4096})
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	writeBlocks(t, medium{v}, 3, data)
	if err := n.DeleteVolume(ctx, "v", api.DeleteVolume{}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Volume(ctx, "v"); api.CodeOf(err) != api.CodeNotFound {
		t.Fatal(err)
	}
	var read ReadSoFar
	inspected, err := InspectBucket(ctx, cfg.Bucket.URL, true, &read)
	if err != nil || len(inspected) != 1 || inspected[0].Name != "v" || inspected[0].LSN != 1 || inspected[0].SizeBytes != 8<<20 || len(inspected[0].Damaged) != 0 {
		t.Fatalf("%+v, %v", inspected, err)
	}
	if read.Reads.Load() == 0 || read.Bytes.Load() < int64(len(data)) {
		t.Errorf("an inspection of %d bytes counts %d reads of %d", len(data), read.Reads.Load(), read.Bytes.Load())
	}
	_, err = n.RestoreVolume(ctx, api.RestoreVolume{From: cfg.Bucket.URL, Volume: "none"})
	wantCode(t, err, api.CodeNotFound, "bucket inspect")
	restored, err := n.RestoreVolume(ctx, api.RestoreVolume{From: cfg.Bucket.URL, Volume: "v", As: "w"})
	if err != nil {
		t.Fatal(err)
	}
	if restored.LSN != 1 || restored.Generation != volumelog.LineageStride || restored.Epoch <= 1 || restored.Volume.Name != "w" || restored.Volume.UUID != v.id.String() || restored.Volume.BlockSize != 4096 {
		t.Fatalf("%+v", restored)
	}
	_, err = n.RestoreVolume(ctx, api.RestoreVolume{From: cfg.Bucket.URL, Volume: v.id.String()})
	wantCode(t, err, api.CodeConflict, "already")
	stopNode(t, n)

	n = startNode(t, cfg)
	if got := readBlocks(t, medium{n.volume(v.id)}, 3, 16); !bytes.Equal(got, data) {
		t.Fatal("the restored volume does not hold what was written")
	}
	if err := n.DeleteVolume(ctx, "w", api.DeleteVolume{Purge: true}); err != nil {
		t.Fatal(err)
	}
	if inspected, err = InspectBucket(ctx, cfg.Bucket.URL, false, new(ReadSoFar)); err != nil || len(inspected) != 0 {
		t.Fatalf("%+v, %v", inspected, err)
	}
}

// A volume that another node took over: whoever asks is told its name, how to take it back, and what a deletion loses.
func TestFencedVolume(t *testing.T) {
	first, second := testConfig(t), testConfig(t)
	second.Bucket = first.Bucket
	n, other := startNode(t, first), startNode(t, second)
	ctx := t.Context()
	v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20, BlockSize: 4096, Target: iqn})
	data := make([]byte, 64<<10)
	writeBlocks(t, medium{v}, 0, data)
	if _, err := n.WaitVolume(ctx, "v", api.WaitVolume{Level: "object"}); err != nil {
		t.Fatal(err)
	}
	if _, err := other.RestoreVolume(ctx, api.RestoreVolume{From: first.Bucket.URL, Volume: "v"}); err != nil {
		t.Fatal(err)
	}
	writeBlocks(t, medium{v}, 16, data)
	err := n.Drain(ctx)
	wantCode(t, err, api.CodeUnavailable, "volume v: ")
	if strings.Contains(err.Error(), "volume "+v.id.String()+":") || !strings.Contains(err.Error(), "isergate volume show v") {
		t.Errorf("drain: %v", err)
	}
	_, err = n.WaitVolume(ctx, "v", api.WaitVolume{Level: "object"})
	if err == nil || !strings.Contains(err.Error(), "isergate volume show v") {
		t.Errorf("wait: %v", err)
	}
	steps := []string{"isergate lun unmap " + iqn + " 0; isergate volume delete v)", "loses what only this node's journal holds", "isergate volume restore --from '" + first.Bucket.URL + "' --volume " + v.id.String()}
	d, err := n.Volume(ctx, "v")
	if err != nil || d.State != "fenced" || d.DirtyBytes == 0 {
		t.Fatalf("%+v, %v", d, err)
	}
	events := func(kind string) string { // the event comes behind what it tells of
		for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			for _, e := range n.events.latest(20) {
				if e.Type == kind {
					return e.Text
				}
			}
		}
		return ""
	}
	for _, step := range steps {
		if !strings.Contains(d.Reason, step) {
			t.Errorf("reason: %s", d.Reason)
		}
		if !strings.Contains(events("volume_fenced"), step) {
			t.Errorf("event: %s", events("volume_fenced"))
		}
	}
	if err := n.UnmapLUN(ctx, iqn, 0); err != nil {
		t.Fatal(err)
	}
	if err := n.DeleteVolume(ctx, "v", api.DeleteVolume{}); err != nil {
		t.Fatal(err)
	}
	if text := events("volume_deleted"); !strings.Contains(text, "only this node's journal held are lost") {
		t.Errorf("event: %s", text)
	}
	if _, err := n.RestoreVolume(ctx, api.RestoreVolume{From: first.Bucket.URL, Volume: v.id.String()}); err != nil {
		t.Error(err)
	}
}

// A deletion that a crash interrupted is finished by the next start.
func TestDeletionIsResumed(t *testing.T) {
	for _, purge := range []bool{false, true} {
		cfg := testConfig(t)
		n := startNode(t, cfg)
		v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20})
		writeBlocks(t, medium{v}, 0, make([]byte, 4096))
		if _, err := n.catalog.Update(func(s *catalog.State) error {
			s.Volumes[0].Deleting = &catalog.Deletion{Purge: purge}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		stopNode(t, n)
		n = startNode(t, cfg)
		n.background.Wait()
		if s := n.catalog.State(); len(s.Volumes) != 0 {
			t.Fatalf("purge %v: %+v", purge, s.Volumes)
		}
		inspected, err := InspectBucket(t.Context(), cfg.Bucket.URL, false, new(ReadSoFar))
		if err != nil || (len(inspected) == 0) != purge {
			t.Fatalf("purge %v: %+v, %v", purge, inspected, err)
		}
		stopNode(t, n)
	}
}

func TestWhoGetsIn(t *testing.T) {
	cfg := testConfig(t)
	cfg.Demo = true
	n := startNode(t, cfg)
	ctx := t.Context()
	if _, err := n.CreateTarget(ctx, api.CreateTarget{Name: strings.ToUpper(iqn)}); err != nil {
		t.Fatal(err)
	}
	authorize := func(who, target string) (iscsi.Access, error) { return n.front.Authorize(ctx, who, target) }
	if _, err := authorize(initiator, iqn); !errors.Is(err, iscsi.ErrForbidden) {
		t.Errorf("without an ACL entry: %v", err)
	}
	if _, err := authorize(initiator, iqn+"x"); !errors.Is(err, iscsi.ErrNotFound) {
		t.Errorf("a target that is not there: %v", err)
	}
	if s, err := n.Status(ctx); err != nil || s.Open || len(s.OpenTargets) != 1 || s.OpenTargets[0] != DemoTarget {
		t.Errorf("status: %+v, %v", s, err)
	}
	if names := n.front.Targets(ctx, initiator); len(names) != 1 || names[0] != DemoTarget {
		t.Errorf("a stranger is told of %q", names)
	}
	if access, err := authorize(initiator, DemoTarget); err != nil || access.CHAP != nil || !access.Units.Exists(0) {
		t.Errorf("the demo: %+v, %v", access, err)
	}
	if _, err := n.AddACL(ctx, iqn, api.AddACL{Initiator: initiator, CHAPUser: "u", CHAPSecret: []byte("0123456789abc"), MutualUser: "m", MutualSecret: []byte("0123456789xyz")}); err != nil {
		t.Fatal(err)
	}
	access, err := authorize(initiator, iqn)
	if err != nil || access.CHAP == nil || access.CHAP.User != "u" || string(access.CHAP.Secret) != "0123456789abc" || access.CHAP.MutualUser != "m" || string(access.CHAP.MutualSecret) != "0123456789xyz" {
		t.Fatalf("%+v, %v", access, err)
	}
	if names := n.front.Targets(ctx, initiator); len(names) != 2 {
		t.Errorf("an initiator with an entry is told of %q", names)
	}
	for _, bad := range []api.AddACL{
		{Initiator: "x"}, {Initiator: initiator, CHAPUser: "u"}, {Initiator: initiator, CHAPUser: "u", CHAPSecret: []byte("short")},
		{Initiator: initiator, CHAPUser: "u", CHAPSecret: []byte("0123456789abc"), MutualUser: "m", MutualSecret: []byte("0123456789abc")},
	} {
		if _, err := n.AddACL(ctx, iqn, bad); api.CodeOf(err) != api.CodeInvalid {
			t.Errorf("%s: %v", bad.Initiator, err)
		}
	}
	if err := n.RemoveACL(ctx, iqn, initiator); err != nil {
		t.Fatal(err)
	}
	if _, err := authorize(initiator, iqn); !errors.Is(err, iscsi.ErrForbidden) {
		t.Errorf("after its entry was removed: %v", err)
	}
}

// Secrets are in the catalogue file and nowhere else.
func TestSecretsStayInTheCatalogue(t *testing.T) {
	cfg := testConfig(t)
	var log syncBuffer
	n, err := tryNode(t, cfg, &log)
	if err != nil {
		t.Fatal(err)
	}
	c, err := api.NewClient("unix:"+cfg.API.Socket, api.ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const secret = "moon-landing-1969"
	if _, err := c.CreateTarget(t.Context(), api.CreateTarget{Name: iqn}); err != nil {
		t.Fatal(err)
	}
	acl, err := c.AddACL(t.Context(), iqn, api.AddACL{Initiator: initiator, CHAPUser: "u", CHAPSecret: []byte(secret)})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.AddACL(t.Context(), iqn, api.AddACL{Initiator: initiator, CHAPUser: "u", CHAPSecret: []byte(secret), MutualUser: "m", MutualSecret: []byte(secret)})
	targets, _ := c.Targets(t.Context())
	status, _ := c.Status(t.Context())
	shown, _ := json.Marshal([]any{acl, targets, status, err.Error()})
	w := httptest.NewRecorder()
	n.Metrics().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	stopNode(t, n)
	for _, text := range []string{string(shown), w.Body.String(), log.String()} {
		if strings.Contains(text, secret) || strings.Contains(text, "bW9vbi1sYW5kaW5n") {
			t.Errorf("the secret is in %s", text)
		}
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestOneProcessPerDataDirectory(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	second := cfg
	second.API.Socket += "2"
	if _, err := tryNode(t, second, io.Discard); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), "--data-dir") {
		t.Fatal(err)
	}
	stopNode(t, n)
	startNode(t, second)
}

func TestBusyAddressesAreNamed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := testConfig(t)
	cfg.Portals = append(cfg.Portals, config.Portal{Listen: l.Addr().String(), Transport: config.TransportAuto})
	for _, there := range []bool{false, true} { // the data directory
		if there {
			if err := os.Mkdir(cfg.DataDir, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := tryNode(t, cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "--portal") {
			t.Fatal(err)
		}
		if _, err := os.Lstat(cfg.DataDir); !there && !errors.Is(err, fs.ErrNotExist) {
			t.Error("a data directory was made for a node that cannot serve")
		}
	}
	cfg.Portals = cfg.Portals[:1]
	cfg.API.Socket = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(cfg.API.Socket, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := tryNode(t, cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "something else") {
		t.Fatal(err)
	}
	// A socket that a crash left behind is replaced.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.API.Socket + "2", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	cfg.API.Socket += "2"
	startNode(t, cfg)
	if info, err := os.Stat(cfg.API.Socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
}

// The service manager hears of readiness, of life and of the stop.
func TestSupervisor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "3000")
	n := startNode(t, testConfig(t))
	heard := func() string {
		b := make([]byte, 64)
		size, err := c.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:size])
	}
	seen := map[string]bool{}
	for !seen["READY=1"] || !seen["WATCHDOG=1"] {
		seen[heard()] = true
	}
	stopped := make(chan error, 1)
	go func() { stopped <- n.Stop(context.Background()) }()
	for !seen["STOPPING=1"] {
		seen[heard()] = true
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if s := newSupervisor(func(k string) string {
		return map[string]string{"NOTIFY_SOCKET": "x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}[k]
	}); s.watchdog != 0 {
		t.Error("the watchdog of another process was taken")
	}
}

func TestMetrics(t *testing.T) {
	n := startNode(t, testConfig(t))
	v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 8 << 20})
	writeBlocks(t, medium{v}, 0, make([]byte, 4096))
	families, err := n.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			key := f.GetName()
			for _, l := range m.Label {
				key += " " + l.GetName() + "=" + l.GetValue()
			}
			values[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for key, want := range map[string]float64{
		"isergate_serving": 1,
		"isergate_volume_watermark_sequence stage=acked volume=v":      1,
		"isergate_volume_watermark_sequence stage=local volume=v":      1,
		"isergate_volume_contract_met volume=v":                        1,
		"isergate_volume_state state=available volume=v":               1,
		"isergate_volume_state state=failed volume=v":                  0,
		"isergate_volume_size_bytes volume=v":                          8 << 20,
		"isergate_volume_operations_total op=write result=ok volume=v": 1,
		"isergate_volume_bytes_total op=write volume=v":                4096,
		"isergate_events_total severity=info type=volume_created":      1,
	} {
		if got, there := values[key]; !there || got != want {
			t.Errorf("%s is %v (%v), want %v", key, got, there, want)
		}
	}
	if err := n.DeleteVolume(t.Context(), "v", api.DeleteVolume{Purge: true}); err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	n.Metrics().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if strings.Contains(w.Body.String(), `volume="v"`) || !strings.Contains(w.Body.String(), "isergate_build_info{") {
		t.Error("series of a deleted volume are left")
	}
}

// A node serves profiles where it is told to, and nothing of them elsewhere.
func TestPprof(t *testing.T) {
	c := testConfig(t)
	c.Debug.Pprof = "127.0.0.1:0"
	n := startNode(t, c)
	for path, want := range map[string]int{"/debug/pprof/goroutine?debug=1": http.StatusOK, "/debug/pprof/nonsense": http.StatusNotFound, "/metrics": http.StatusNotFound} {
		w := httptest.NewRecorder()
		pprofHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want {
			t.Errorf("%s: %d, want %d", path, w.Code, want)
		}
	}
	w := httptest.NewRecorder()
	api.Handler(api.Options{Service: n, Metrics: n.Metrics(), Logger: n.log}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/pprof/goroutine", nil))
	if w.Code == http.StatusOK {
		t.Error("the API serves profiles")
	}
}

// store is a bucket as a test wants it.
type store struct {
	objectstore.Bucket
	down, careless, garbling *bool
}

func (s store) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	body, err := s.Bucket.Get(ctx, key, limit)
	if *s.garbling && len(body) > 0 {
		body[0] ^= 1
	}
	return body, err
}

var errDown = errors.New("no route to host")

func (s store) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if *s.down {
		return errDown
	}
	if *s.careless {
		if err := s.Delete(ctx, key); err != nil {
			return err
		}
	}
	return s.Bucket.PutIfAbsent(ctx, key, body)
}

func (s store) Close() error { return nil } // several nodes of a test share it

// A store is examined before it is used, and one that was examined may be down later.
func TestAttachRules(t *testing.T) {
	var down, careless, garbling bool
	mem := objectstore.NewMem()
	catalogue, err := catalog.OpenFile(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	attach := func(single bool) (*buckets, error) {
		b, err := newBuckets(config.Bucket{URL: "s3://bucket/prefix", SingleWriter: single, Requests: 4, RetryFor: 20 * time.Millisecond},
			catalogue, mustMetrics(t), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		b.openURL = func(_ context.Context, _ string, o objectstore.Options) (objectstore.Bucket, error) {
			return store{mem, &down, &careless, &garbling}, nil
		}
		_, err = b.open(t.Context(), "s3://bucket/prefix")
		return b, err
	}
	down = true
	if _, err := attach(false); err == nil {
		t.Fatal("a store that was never examined was taken unseen")
	}
	down, garbling = false, true
	if _, err := attach(false); !errors.Is(err, objectstore.ErrCorrupt) {
		t.Fatal("a store that changes bytes was taken:", err)
	}
	garbling, careless = false, true
	if _, err := attach(false); !errors.Is(err, objectstore.ErrNoConditionalPut) || !strings.Contains(err.Error(), "single_writer") {
		t.Fatal(err)
	}
	b, err := attach(true)
	if conditional, single := b.describe(); err != nil || conditional != "ignored" || !single {
		t.Fatalf("%s, %v, %v", conditional, single, err)
	}
	down = true
	if _, err := attach(false); !errors.Is(err, objectstore.ErrNoConditionalPut) {
		t.Fatal("a store known to ignore conditions was taken because it was down:", err)
	}
	if b, err = attach(true); err != nil {
		t.Fatal(err)
	}
	if _, single := b.describe(); !single {
		t.Fatal("a store known to ignore conditions is used as if it honoured them")
	}
	down, careless = false, false
	if b, err = attach(true); err != nil {
		t.Fatal(err)
	}
	if conditional, single := b.describe(); conditional != "honoured" || single {
		t.Fatalf("%s, %v", conditional, single)
	}
	down = true
	if b, err = attach(false); err != nil {
		t.Fatal("an outage keeps a known store from being attached:", err)
	}
	down, garbling = false, true
	if _, err = attach(false); err != nil {
		t.Fatal("damage on the way keeps a known store from being attached:", err)
	}
	if conditional, _ := b.describe(); conditional != "honoured" {
		t.Fatal(conditional)
	}
}

// Volumes in the catalogue that cannot be opened do not keep the others from being served.
func TestAVolumeThatDoesNotOpen(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	createVolume(t, n, api.CreateVolume{Name: "good", SizeBytes: 8 << 20, Target: iqn})
	bad := createVolume(t, n, api.CreateVolume{Name: "bad", SizeBytes: 8 << 20, Target: iqn})
	if _, err := n.catalog.Update(func(s *catalog.State) error {
		s.VolumeByID(bad.id).Bucket = "file:///dev/null/nothing"
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	stopNode(t, n)
	n = startNode(t, cfg)
	v, err := n.Volume(t.Context(), "bad")
	if err != nil || v.State != string(cache.StateFailed) || v.Reason == "" || v.ContractMet {
		t.Fatalf("%+v, %v", v, err)
	}
	if v, err = n.Volume(t.Context(), "good"); err != nil || v.State != string(cache.StateAvailable) {
		t.Fatalf("%+v, %v", v, err)
	}
	_, err = n.WaitVolume(t.Context(), "bad", api.WaitVolume{Level: "local"})
	wantCode(t, err, api.CodeUnavailable, "not served")
	status, err := n.Status(t.Context())
	if err != nil || len(status.ContractUnmet) != 1 || status.ContractUnmet[0] != "bad" {
		t.Fatalf("%+v, %v", status, err)
	}
}

func mustMetrics(t *testing.T) *objectstore.Metrics {
	t.Helper()
	m, err := objectstore.NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return m
}
