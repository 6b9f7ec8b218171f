package s3test

import (
	"context"
	"fmt"
	"os"
	"os/exec"

	"github.com/google/uuid"
)

// cephConf makes a cluster of one monitor and one OSD in memory. Without cephx radosgw does
// not come up.
const cephConf = `[global]
fsid = %[1]s
mon host = [v2:127.0.0.1:%[2]d,v1:127.0.0.1:%[3]d]
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = %[4]s/keyring
run dir = %[4]s
admin socket = %[4]s/$name.asok
log file = %[4]s/$name.log
pid file = %[4]s/$name.pid
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 8589934592
mon allow pool size one = true
mon data = %[4]s/mon
mon data avail crit = 1
mon data avail warn = 2
osd data = %[4]s/osd
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:%[5]d
rgw thread pool size = 64
`

var cephPrograms = []string{"ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool", "ceph"}

func (s *Server) startRadosgw(ctx context.Context) error {
	for _, p := range cephPrograms {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("%w: radosgw (run .ci/install): %w", ErrNotInstalled, err)
		}
	}
	var ports [3]int
	for i := range ports {
		port, err := freePort()
		if err != nil {
			return err
		}
		ports[i] = port
	}
	s.Endpoint = fmt.Sprintf("http://127.0.0.1:%d", ports[2])
	s.Region = "us-east-1"
	fsid := uuid.NewString()
	conf := s.path("ceph.conf")
	text := fmt.Sprintf(cephConf, fsid, ports[0], ports[1], s.dir, ports[2])
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return err
	}
	if err := os.Mkdir(s.path("osd"), 0o700); err != nil {
		return err
	}

	run := func(argv ...string) error {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Dir = s.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("s3test: %s: %w: %.1000s", argv[0], err, out)
		}
		return nil
	}
	background := func(argv ...string) (*process, error) {
		return startProcess(spec{log: s.path(argv[0] + ".out"), argv: argv})
	}
	daemon := func(argv ...string) error {
		p, err := background(argv...)
		if err == nil {
			s.back = append(s.back, p)
		}
		return err
	}
	keyring, monmap, osd := s.path("keyring"), s.path("monmap"), uuid.NewString()
	addrs := fmt.Sprintf("[v2:127.0.0.1:%d,v1:127.0.0.1:%d]", ports[0], ports[1])
	for _, step := range []struct {
		do   func(...string) error
		argv []string
	}{
		{run, []string{"ceph-authtool", "-C", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *"}},
		{run, []string{"ceph-authtool", keyring, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"}},
		{run, []string{"ceph-authtool", keyring, "--gen-key", "-n", "osd.0", "--cap", "mon", "allow profile osd", "--cap", "osd", "allow *", "--cap", "mgr", "allow profile osd"}},
		{run, []string{"ceph-authtool", keyring, "--gen-key", "-n", "client.rgw", "--cap", "mon", "allow rwx", "--cap", "osd", "allow rwx"}},
		{run, []string{"monmaptool", "--create", "--addv", "a", addrs, "--fsid", fsid, monmap}},
		{run, []string{"ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring}},
		{daemon, []string{"ceph-mon", "-f", "-c", conf, "-i", "a"}},
		{run, []string{"ceph", "-c", conf, "--connect-timeout", "60", "osd", "new", osd}},
		{run, []string{"ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", osd}},
		{daemon, []string{"ceph-osd", "-f", "-c", conf, "-i", "0"}},
	} {
		if err := step.do(step.argv...); err != nil {
			return err
		}
	}
	var err error
	if s.front, err = background("radosgw", "-f", "-c", conf, "-n", "client.rgw"); err != nil {
		return err
	}
	s.ready = func(ctx context.Context) error { return answers(ctx, s.Endpoint) }
	if err := s.waitReady(ctx); err != nil {
		return err
	}
	return run("radosgw-admin", "-c", conf, "-n", "client.rgw", "user", "create", "--uid", "test", "--display-name", "test",
		"--access-key", s.AccessKey, "--secret-key", s.SecretKey)
}
