package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/bench"
)

const (
	initiatorName = "iqn.2026-11.com.example:bench"
	targetName    = "iqn.2026-11.com.example:target"

	startPatience = 2 * time.Minute
	stopPatience  = time.Minute
	waitPatience  = 5 * time.Minute // for everything to be in the bucket
)

// gateway is one isergate process with a directory of its own.
type gateway struct {
	h       *harness
	name    string
	dir     string
	bucket  string
	env     []string
	journal int64  // bytes
	pprof   string // address, empty if nothing is profiled

	process *process
	client  *api.Client
	portal  string
}

// newGateway makes a configuration and starts isergate with it. What is not in the configuration has the default; more is YAML that is added to it.
func (h *harness) newGateway(ctx context.Context, name, bucket string, journal int64, more string, env []string) (*gateway, error) {
	g := &gateway{h: h, name: name, dir: filepath.Join(h.dir, name), bucket: bucket, env: env, journal: journal}
	if err := os.Mkdir(g.dir, 0o700); err != nil {
		return nil, err
	}
	if g.bucket == "" {
		g.bucket = "file://" + filepath.Join(g.dir, "bucket")
	}
	settings := fmt.Sprintf("cache:\n  journal: %d\n%s", journal, more)
	if h.o.Profile != "" {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		g.pprof = fmt.Sprintf("127.0.0.1:%d", port)
		settings += fmt.Sprintf("debug:\n  pprof: %s\n", g.pprof)
	}
	if err := os.WriteFile(filepath.Join(g.dir, "isergate.yaml"), []byte(settings), 0o600); err != nil {
		return nil, err
	}
	return g, g.start(ctx)
}

// start runs the process and waits until it serves.
func (g *gateway) start(ctx context.Context) error {
	data := filepath.Join(g.dir, "data")
	cmd := exec.Command(g.h.o.Isergate, "serve", "--config", filepath.Join(g.dir, "isergate.yaml"), "--data-dir", data,
		"--bucket", g.bucket, "--portal", "127.0.0.1:0", "--open", "--log-level", "warn")
	cmd.Env = append(os.Environ(), g.env...)
	var err error
	if g.process, err = g.h.launcher.start(g.name, g.h.dir, cmd); err != nil {
		return err
	}
	if g.client, err = api.NewClient("unix:"+filepath.Join(data, "api.sock"), api.ClientOptions{}); err != nil {
		return err
	}
	return poll(ctx, startPatience, func() (bool, error) {
		if err := g.process.ended(); err != nil {
			return false, err
		}
		s, err := g.client.Status(ctx)
		if err != nil || s.State != api.Serving {
			return false, nil
		}
		g.portal = s.Portals[0].Listen
		return true, nil
	})
}

// restart stops the process in good order and starts it again. Its read cache is empty then.
func (g *gateway) restart(ctx context.Context) error {
	g.client.Close()
	if err := g.process.stop(stopPatience); err != nil {
		return err
	}
	return g.start(ctx)
}

// prepared waits until the journal has its size, which it gets in the background.
func (g *gateway) prepared(ctx context.Context) error {
	return poll(ctx, waitPatience, func() (bool, error) {
		if err := g.process.ended(); err != nil {
			return false, err
		}
		n, err := allocated(filepath.Join(g.dir, "data", "journal"))
		return n >= g.journal, err
	})
}

// allocated returns the bytes that the files of a directory occupy.
func allocated(dir string) (int64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			sum += s.Blocks * 512
		}
	}
	return sum, nil
}

// create makes a volume and returns it as a target of measurements. A budget of 0 is the default, a quarter of the journal.
func (g *gateway) create(ctx context.Context, name string, size int64, ack string, budget int64) (*target, error) {
	v, err := g.client.CreateVolume(ctx, api.CreateVolume{Name: name, SizeBytes: size, Ack: ack, Flush: "local", Target: targetName, DirtyBudgetBytes: budget})
	if err != nil {
		return nil, err
	}
	return &target{
		name: ours, cpu: func() (time.Duration, error) { return cpu(g.process.cmd.Process.Pid) },
		open: func(ctx context.Context) (*bench.Opened, error) {
			return bench.OpenLUN(initiator.Options{Portal: g.portal, InitiatorName: initiatorName, TargetName: targetName}, v.Mappings[0].LUN)(ctx)
		},
		settle:  func(ctx context.Context) error { return g.drained(ctx, name) },
		profile: g.profile,
	}, nil
}

// drained returns when everything written to the volume is in the bucket.
func (g *gateway) drained(ctx context.Context, volume string) error {
	_, err := g.client.WaitVolume(ctx, volume, api.WaitVolume{Level: "object", TimeoutSeconds: waitPatience.Seconds()})
	return err
}

// putBytes returns the bytes of all objects that the gateway has put so far.
func (g *gateway) putBytes(ctx context.Context) (int64, error) {
	n, err := g.metric(ctx, `isergate_object_bytes_total{op="put"}`)
	return int64(n), err
}

// metric returns the value of one metric, which is a whole number.
func (g *gateway) metric(ctx context.Context, name string) (uint64, error) {
	socket := filepath.Join(g.dir, "data", "api.sock")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	text, err := get(ctx, client, "http://node/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return uint64(n), err
		}
	}
	return 0, fmt.Errorf("the gateway has no metric %s", name)
}

// profile records for about the duration where CPU time goes, and at both ends what has been allocated so far, into files
// with that name: "go tool pprof -sample_index=alloc_objects -base NAME.before NAME.after".
func (g *gateway) profile(ctx context.Context, name string, d time.Duration) error {
	if g.pprof == "" {
		return nil
	}
	return g.h.takeProfile(ctx, g.pprof, name, d)
}

// takeProfile is profile of the process that serves profiles at address.
func (h *harness) takeProfile(ctx context.Context, address, name string, d time.Duration) error {
	seconds := int(max(d, time.Second).Round(time.Second) / time.Second)
	for _, p := range []struct{ query, suffix string }{
		{"heap?gc=1", "before"}, {fmt.Sprintf("profile?seconds=%d", seconds), "cpu"}, {"heap?gc=1", "after"},
	} {
		if err := fetch(ctx, fmt.Sprintf("http://%s/debug/pprof/%s", address, p.query), filepath.Join(h.o.Profile, name+"."+p.suffix)); err != nil {
			return err
		}
	}
	return nil
}

// fetch gets a URL into a file.
func fetch(ctx context.Context, url, file string) error {
	body, err := get(ctx, http.DefaultClient, url)
	if err != nil {
		return err
	}
	return os.WriteFile(file, body, 0o600)
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, response.Status)
	}
	return body, err
}

// poll calls f until it says true or fails.
func poll(ctx context.Context, patience time.Duration, f func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if done, err := f(); done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// freePort returns a port of loopback that was free a moment ago.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
