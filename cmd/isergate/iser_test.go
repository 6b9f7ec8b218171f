package main

import (
	"bytes"
	"context"
	wire "encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/iser/initiator"
)

// transport is how a test's initiator logs in.
type transport string

const (
	overTCP  transport = "tcp"
	overISER transport = "iser"        // login in messages, as Linux does
	onStream transport = "iser-stream" // login over TCP, then iSER (RFC 7145, 5.1.2)
)

// label is what session lists show.
func (tr transport) label() string {
	if tr == onStream {
		return "iser"
	}
	return string(tr)
}

// options are those of an initiator that logs in to a target of the gateway.
func (g *gatewayProcess) options(tr transport, name, target string) initiator.Options {
	o := initiator.Options{Portal: g.portal, InitiatorName: name, TargetName: target}
	switch tr {
	case overISER:
		o.ISER = &initiator.ISER{}
	case onStream:
		o.ISER = &initiator.ISER{Stream: true}
	}
	return o
}

// metric returns the value of a metric, with its labels as they are printed.
func (g *gatewayProcess) metric(name string) string {
	g.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(g.api(), "unix:"))
	}}}
	resp, err := client.Get("http://node/metrics")
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// TCP and iSER, in both forms of login, to one LUN at once: each reads what the others wrote, and the session list tells them apart.
func TestTransportsShareALUN(t *testing.T) {
	t.Parallel()
	g := newGateway(t, "--open", "--portal", "127.0.0.1:0,transport=tcp", "--portal", "127.0.0.1:0,transport=iser").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	var status api.Status
	g.json(&status, "status")
	if len(status.Portals) != 3 || status.Portals[0].Transport != "auto" || status.Portals[1].Transport != "tcp" || status.Portals[2].Transport != "iser" {
		t.Fatalf("portals %+v", status.Portals)
	}

	type client struct {
		transport
		lun *initiator.LUN
	}
	var clients []client
	for i, tr := range []transport{overTCP, overISER, onStream, overTCP, overISER, onStream} {
		o := g.options(tr, fmt.Sprintf("%s%d", host, i), target)
		if i >= 3 { // on the portals of one transport
			o.Portal = status.Portals[1].Listen
			if tr != overTCP {
				o.Portal = status.Portals[2].Listen
			}
		}
		s, err := initiator.Dial(t.Context(), o)
		if err != nil {
			t.Fatalf("%s: %v", tr, err)
		}
		t.Cleanup(func() { _ = s.Close() })
		l, err := s.OpenLUN(t.Context(), 0)
		if err != nil {
			t.Fatalf("%s: %v", tr, err)
		}
		clients = append(clients, client{tr, l})
	}

	var sessions []api.Session
	g.json(&sessions, "session", "list")
	var got, want []string
	for i, s := range sessions {
		got = append(got, s.Initiator+" "+s.Transport)
		want = append(want, fmt.Sprintf("%s%d %s", host, i, clients[i].label()))
	}
	if !slices.Equal(got, want) || len(got) != len(clients) {
		t.Errorf("session list: %q, want %q", got, want)
	}
	table := g.run("session", "list")
	if strings.Count(table, " iser ") != 4 || strings.Count(table, " tcp ") != 2 {
		t.Errorf("session list:\n%s", table)
	}
	for name, want := range map[string]string{
		`isergate_sessions{target="` + target + `",transport="iser"}`:           "4",
		`isergate_sessions{target="` + target + `",transport="tcp"}`:            "2",
		`isergate_iser_connections`:                                             "4",
		`isergate_iser_connections_total{login="message",result="established"}`: "2",
		`isergate_iser_connections_total{login="stream",result="established"}`:  "2",
		`isergate_portal_connections_total{first="mpa"}`:                        "2",
		`isergate_iser_memory_limit_bytes`:                                      "1.34217728e+08",
	} {
		if got := g.metric(name); got != want {
			t.Errorf("%s is %q, want %s", name, got, want)
		}
	}

	// All write at once, each where it is alone, and then read everything.
	const part = 4 << 20
	pattern := func(i int, block uint64) []byte {
		return bytes.Repeat(wire.BigEndian.AppendUint64(nil, uint64(i)<<32|block), 64<<10/8)
	}
	var wg sync.WaitGroup
	for i, c := range clients {
		for worker := range 4 {
			wg.Go(func() {
				for block := uint64(worker); block < part/(64<<10); block += 4 {
					lba := (uint64(i)*part + block*(64<<10)) / 512
					if err := c.lun.Write(t.Context(), lba, pattern(i, block), block%8 == 0); err != nil {
						t.Errorf("%s: %v", c.transport, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	for _, c := range clients {
		wg.Go(func() {
			read := make([]byte, 64<<10)
			for i := range clients {
				for block := range uint64(part / (64 << 10)) {
					if err := c.lun.Read(t.Context(), (uint64(i)*part+block*(64<<10))/512, read); err != nil {
						t.Errorf("%s: %v", c.transport, err)
						return
					}
					if !bytes.Equal(read, pattern(i, block)) {
						t.Errorf("%s does not read block %d as %s wrote it", c.transport, block, clients[i].transport)
						return
					}
				}
			}
		})
	}
	wg.Wait()

	// Discovery names each portal once, over each transport.
	for _, tr := range []transport{overTCP, overISER} {
		found, err := initiator.Discover(t.Context(), g.portal, g.options(tr, host, ""))
		if err != nil {
			t.Fatalf("discovery over %s: %v", tr, err)
		}
		var got, want []string
		for _, p := range status.Portals {
			want = append(want, p.Listen)
		}
		for _, target := range found {
			for _, p := range target.Portals {
				got = append(got, p.Address)
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("discovery over %s found %q, want %q", tr, got, want)
		}
	}
	// A stop with iSER sessions is as orderly as one without.
	if code := g.stop(); code != exitOK {
		t.Errorf("exit %d", code)
	}
}

// What a portal does not serve, it refuses, and the log of the gateway says what to do.
func TestPortalOfOneTransport(t *testing.T) {
	t.Parallel()
	for tr, refused := range map[string][]transport{"tcp": {overISER, onStream}, "iser": {overTCP}} {
		g := newGateway(t, "--open")
		i := slices.Index(g.args, "127.0.0.1:0")
		g.args[i] += ",transport=" + tr
		g.start()
		g.run("volume", "create", "v", "--size", "16MiB", "--target", target)
		for _, r := range refused {
			if s, err := initiator.Dial(t.Context(), g.options(r, host, target)); err == nil {
				_ = s.Close()
				t.Errorf("a portal with transport=%s takes a login over %s", tr, r)
			}
		}
		if text := g.run("status"); !strings.Contains(text, "("+tr+" only)") {
			t.Errorf("status:\n%s", text)
		}
		if code := g.stop(); code != exitOK {
			t.Errorf("exit %d", code)
		}
		log, err := os.ReadFile(g.dir + "/log")
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]string{"tcp": "transport=auto", "iser": "log in over iSER"}[tr]
		if !bytes.Contains(log, []byte(want)) {
			t.Errorf("the log of a portal with transport=%s does not say %q", tr, want)
		}
	}
}

// await polls until ok, for states that nothing announces.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("timed out: %s", what)
		}
	}
}

// sockets counts the sockets of a process.
func sockets(t *testing.T, pid int) (n int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd/", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(dir + e.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// 10,000 connections that stop after their MPA request: who is logged in is served, others get in, memory stays bounded, and when they are gone
// neither a descriptor, nor a goroutine, nor memory of theirs is left.
func TestManyMPARequests(t *testing.T) {
	t.Parallel()
	count := 10000
	if testing.Short() {
		count = 2000
	}
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	s, err := initiator.Dial(t.Context(), g.options(overISER, host, target))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, err := s.OpenLUN(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	stamp := func(l *initiator.LUN, lba uint64, n byte) {
		t.Helper()
		block := bytes.Repeat([]byte{n}, 64<<10)
		if err := l.Write(t.Context(), lba, block, false); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(block))
		if err := l.Read(t.Context(), lba, got); err != nil || !bytes.Equal(got, block) {
			t.Fatalf("does not read as written (%v)", err)
		}
	}
	pid := g.cmd.Process.Pid

	// storm makes connections, 200 at once from five addresses, and returns what the process holds at most.
	storm := func(count int) (resident int64) {
		for done := 0; done < count; {
			var batch []net.Conn
			for i := range min(200, count-done) {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 2, byte(1+i/40))}}
				c, err := d.DialContext(t.Context(), "tcp", g.portal)
				if err != nil {
					t.Fatal(err)
				}
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				if _, err := c.Write(mpaRequest()); err != nil {
					t.Fatal(err)
				}
				batch = append(batch, c)
			}
			for _, c := range batch { // each is answered, or refused by a limit
				reply := make([]byte, 16)
				if _, err := io.ReadFull(c, reply); errors.Is(err, os.ErrDeadlineExceeded) || err == nil && string(reply) != "MPA ID Rep Frame" {
					t.Fatalf("%q, %v", reply, err)
				}
			}
			resident = max(resident, residentBytes(t, pid))
			if done%2000 == 0 {
				stamp(l, 0, byte(done/200))
				for _, tr := range []transport{overTCP, overISER} {
					other, err := initiator.Dial(t.Context(), g.options(tr, host+".other", target))
					if err != nil {
						t.Fatalf("after %d requests, %s: %v", done, tr, err)
					}
					lun, err := other.OpenLUN(t.Context(), 0)
					if err != nil {
						t.Fatal(err)
					}
					stamp(lun, 1024, byte(done/200))
					_ = other.Close()
				}
			}
			for _, c := range batch {
				_ = c.(*net.TCPConn).SetLinger(0)
				_ = c.Close()
			}
			done += len(batch)
		}
		return resident
	}
	// settled waits until only the session that was there is left.
	settled := func() {
		t.Helper()
		await(t, "connections that were left end", func() bool {
			return g.metric("isergate_iser_connections") == "1" && g.metric("isergate_iscsi_connections") == "1"
		})
	}
	storm(400) // the program's memory for what is to come
	settled()
	before, open, goroutines := residentBytes(t, pid), sockets(t, pid), g.metric("go_goroutines")
	most := storm(count)
	settled()
	number := func(text string) (n int) {
		_, _ = fmt.Sscan(text, &n)
		return n
	}
	await(t, "sockets are closed", func() bool { return sockets(t, pid) <= open })
	await(t, "goroutines end", func() bool { return number(g.metric("go_goroutines")) <= number(goroutines)+4 })
	after := residentBytes(t, pid)
	t.Logf("%d requests: memory %d KiB before, %d at most, %d after; %s established", count, before>>10, most>>10, after>>10,
		g.metric(`isergate_iser_connections_total{login="message",result="established"}`))
	bound := int64(128 << 20) // 200 at a time, some 120 KiB each, and what the collector has not seen yet
	if raceEnabled {
		bound *= 8
	}
	if most-before > bound {
		t.Errorf("memory grew by %d KiB", (most-before)>>10)
	}
	stamp(l, 0, 99)
}
