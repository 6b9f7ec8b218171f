package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/iser/lab"
	"github.com/isergate/isergate/iser/lab/labtest"
)

// The kernel's own initiator, in a guest, against the program: iscsi_tcp, and ib_iser over
// soft-iWARP. One guest and one gateway serve all checks, which follow one another. With
// ISERGATE_LONG=1 all of them run over both.

const (
	linuxTarget    = "iqn.2026-11.io.isergate:linux"
	linuxInitiator = "iqn.2004-10.com.example:guest" // lib.sh's
)

// linux is a guest and a gateway that it uses.
type linux struct {
	*labtest.Guest
	t       *testing.T
	gateway *gatewayProcess
}

// newLinux boots a guest and starts a gateway with two LUNs of 512 MiB for it.
func newLinux(t *testing.T) *linux {
	t.Helper()
	guest := labtest.Boot(t, lab.Options{}) // first: it may skip the test
	portal := freeAddress(t)
	g := newGateway(t, "--open")
	g.args[slices.Index(g.args, "--portal")+1] = portal + ",advertise=" + labtest.Portal(t, portal)
	g.start()
	for lun, volume := range []string{"one", "two"} {
		g.run("volume", "create", volume, "--size", "512MiB", "--target", linuxTarget, "--lun", fmt.Sprint(lun))
	}
	guest.Run("rnic; initiator")
	return &linux{guest, t, g}
}

// step runs f as a subtest over one transport; no session is left behind. The transport is
// essential, or it is left to long runs.
func (l *linux) step(name, transport string, essential bool, f func(l *linux, transport string)) {
	if !essential && !long() {
		return
	}
	l.t.Run(name+"/"+transport, func(t *testing.T) {
		outer := l.gateway.t
		l.gateway.t = t
		defer func() { l.gateway.t = outer }()
		defer func() {
			_, _ = l.Try("timeout 100 iscsiadm -m node -u || true; iscsiadm -m node -o delete || true")
		}()
		f(&linux{l.Guest.On(t), t, l.gateway}, transport)
	})
}

// script gives a script the names and functions that all of them use. The LUN of a
// transport is logged in to already if the script begins so.
func (l *linux) script(transport, script string) string {
	return fmt.Sprintf("transport=%s portal=%s target=%s\n", transport, labtest.Portal(l.t, l.gateway.portal), linuxTarget) + `
# verified DEVICE|DIRECTORY OPTION...: fio writes, reads back and compares.
verified() {
	local where=filename log
	[ ! -d "$1" ] || where=directory
	log=$(mktemp /run/fio.XXXXXX)
	fio --output=$log --clocksource=clock_gettime --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --$where=$1 "${@:2}" || { cat $log; return 1; }
	sed -n -E 's/^ +(read|write): (.*)/\1 \2/p' $log
}
# enter [SETTING=VALUE...]: a node record, and a session by it; prints the disk of LUN 0.
enter() {
	node $transport $portal $target "$@"
	login $transport $portal $target
}
` + script
}

// run runs a script and logs what it printed.
func (l *linux) run(transport, script string) string {
	l.t.Helper()
	start := time.Now()
	out := l.Guest.Run(l.script(transport, script))
	l.t.Logf("%v:\n%s", time.Since(start).Round(100*time.Millisecond), out)
	return out
}

// calm wants the kernel to have complained of nothing since the guest booted, but for what soft-iWARP does to itself: a CRC that comes in two
// pieces it puts together wrongly (iser/lab/DESIGN.md), which ends the connection.
func (l *linux) calm() {
	l.t.Helper()
	own := 0 // lines that such an end may still explain
	for line := range strings.Lines(l.Console()) {
		if own--; strings.Contains(line, "siw: crc error") {
			own = 4
		}
		if own > 0 && strings.Contains(line, "QP fatal") {
			l.t.Logf("soft-iWARP lost a CRC: %s", line)
			continue
		}
		for _, word := range []string{"I/O error", "conn error", "orruption", "timing out", "QP fatal", "BUG:"} {
			if strings.Contains(line, word) {
				l.t.Errorf("the kernel says: %s", line)
			}
		}
	}
}

func TestLinux(t *testing.T) {
	t.Parallel()
	l := newLinux(t)
	// What disturbs nothing comes first, and the kernel must not have noticed anything.
	l.step("file systems", "tcp", false, (*linux).fileSystems)
	l.step("file systems", "iser", true, (*linux).fileSystems)
	l.step("both at once", "both", true, (*linux).bothAtOnce)
	l.step("depth", "tcp", false, (*linux).depth)
	l.step("depth", "iser", true, (*linux).depth)
	l.step("switches", "iser", true, (*linux).switches)
	l.calm()
	l.step("CHAP", "tcp", false, (*linux).chap)
	l.step("CHAP", "iser", true, (*linux).chap)
	l.step("persistence", "tcp", false, (*linux).persistence)
	l.step("persistence", "iser", true, (*linux).persistence)
	l.step("reset", "tcp", false, (*linux).reset)
	l.step("reset", "iser", true, (*linux).reset)
	l.step("abort", "tcp", false, (*linux).abort)
	l.step("abort", "iser", true, (*linux).abort)
	l.step("kill", "tcp", false, (*linux).kill)
	l.step("kill", "iser", true, (*linux).kill)
}

// fileSystems finds the target, makes file systems on both LUNs, fills them, checks them,
// and finds at the next login what it left.
func (l *linux) fileSystems(transport string) {
	found := l.run(transport, "iscsiadm -m discovery -t sendtargets -p $portal -I $(interface $transport); iscsiadm -m node -o delete")
	if want := labtest.Portal(l.t, l.gateway.portal) + ",1 " + linuxTarget + "\n"; found != want {
		l.t.Errorf("discovery found %q, want %q", found, want)
	}
	l.run(transport, `
enter >/dev/null
until_true 60 disk $transport $target 1
mkfs.ext4 -q -F $(disk $transport $target 0)
mkfs.xfs -q -f $(disk $transport $target 1)
mkdir -p /mnt/ext4 /mnt/xfs
mount $(disk $transport $target 0) /mnt/ext4
mount $(disk $transport $target 1) /mnt/xfs
for d in /mnt/ext4 /mnt/xfs; do
	verified $d --rw=randrw --name=small --bs=4k --size=2m --iodepth=16 --numjobs=2 --name=large --bs=1m --size=6m --iodepth=4 --numjobs=2
	cp -r /usr/bin/ba* /etc $d
	(cd $d && find . -type f | sort | xargs -d'\n' sha256sum >/run/$(basename $d).sum)
	umount $d
done
e2fsck -f -n $(disk $transport $target 0)
xfs_repair -n $(disk $transport $target 1) 2>&1 | tail -1
`)
	var sessions []api.Session
	l.gateway.json(&sessions, "session", "list")
	if len(sessions) != 1 || sessions[0].Transport != transport || sessions[0].Initiator != linuxInitiator || sessions[0].Target != linuxTarget {
		l.t.Errorf("session list: %+v", sessions)
	}
	l.run(transport, `
logout $transport $portal $target
login $transport $portal $target >/dev/null
until_true 60 disk $transport $target 1
mount $(disk $transport $target 0) /mnt/ext4
mount $(disk $transport $target 1) /mnt/xfs
for d in /mnt/ext4 /mnt/xfs; do
	(cd $d && sha256sum --quiet -c /run/$(basename $d).sum)
	umount $d
done
wc -l </run/ext4.sum
logout $transport $portal $target
`)
}

// bothAtOnce has a session of each kind on one LUN: each reads what the other wrote, and
// both write at the same time.
func (l *linux) bothAtOnce(string) {
	l.run("both", `
for transport in tcp iser; do enter >/dev/null; done
tcp=$(disk tcp $target) iser=$(disk iser $target)
head -c 2M /dev/urandom >/run/a
head -c 2M /dev/urandom >/run/b
dd if=/run/a of=$tcp bs=256k oflag=direct status=none
dd if=/run/b of=$iser bs=4k seek=4k oflag=direct status=none
dd if=$iser bs=64k count=32 iflag=direct status=none | cmp - /run/a
dd if=$tcp bs=128k count=16 skip=128 iflag=direct status=none | cmp - /run/b
verified $tcp --rw=randrw --bs=4k --size=2m --offset=64m --iodepth=8 --name=tcp &
verified $iser --rw=randrw --bs=4k --size=2m --offset=128m --iodepth=8 --name=iser
wait $!
`)
	var sessions []api.Session
	l.gateway.json(&sessions, "session", "list")
	transports := make(map[string]int)
	for _, s := range sessions {
		transports[s.Transport]++
	}
	if len(sessions) != 2 || transports["tcp"] != 1 || transports["iser"] != 1 {
		l.t.Errorf("session list: %+v", sessions)
	}
}

// depth has 128 commands under way at once.
func (l *linux) depth(transport string) {
	out := l.run(transport, `
disk=$(enter node.session.cmds_max=256 node.session.queue_depth=128)
cat /sys/block/$(basename $disk)/device/queue_depth
verified $disk --rw=randrw --bs=4k --size=3m --iodepth=128 --iodepth_batch_submit=64 --name=deep
`)
	if !strings.HasPrefix(out, "128\n") {
		l.t.Errorf("the queue is not 128 deep: %s", out)
	}
}

// switches logs in with each thing that a peer's RNIC may do otherwise.
func (l *linux) switches(transport string) {
	cases := []struct {
		name, set string
		essential bool
	}{
		{"CRC required", "rnic mpa_crc_required=1 mpa_crc_strict=1", true},
		{"MPA revision 1", "rnic mpa_version=1", true},
		{"MPA revision 1 with CRC", "rnic mpa_version=1 mpa_crc_required=1", false},
		{"peer-to-peer", "rnic peer_to_peer=1", true},
		{"peer-to-peer, RTR is a Read", "rnic peer_to_peer=1 rtr_type=64", true},
		{"peer-to-peer, RTR is a Write", "rnic peer_to_peer=1 rtr_type=128", true},
		{"peer-to-peer with CRC", "rnic peer_to_peer=1 mpa_crc_required=1", false},
		{"GSO", "rnic try_gso=1", true},
		{"GSO with CRC", "rnic try_gso=1 mpa_crc_required=1", false},
		{"no zero copy", "rnic zcopy_tx=0", false},
		{"registers what it must only", "rmmod ib_iser; modprobe ib_iser always_register=0; rnic", true},
	}
	defer func() { _, _ = l.Try("rmmod ib_iser; modprobe ib_iser; rnic") }()
	for _, c := range cases {
		if !c.essential && !long() {
			continue
		}
		l.t.Run(c.name, func(t *testing.T) {
			(&linux{l.Guest.On(t), t, l.gateway}).run(transport, c.set+`
disk=$(enter)
dd if=/dev/urandom of=/run/pattern bs=64k count=17 status=none
dd if=/run/pattern of=$disk bs=1088k oflag=direct status=none
dd if=/run/pattern of=$disk bs=4k count=16 seek=512 oflag=direct status=none
dd if=$disk bs=1088k count=1 iflag=direct status=none | cmp - /run/pattern
dd if=$disk bs=4k count=16 skip=512 iflag=direct status=none | cmp -n 65536 - /run/pattern
verified $disk --rw=randrw --bs=4k --size=256k --iodepth=16 --name=small
logout $transport $portal $target
iscsiadm -m node -o delete
`)
		})
	}
}

// chap logs in by CHAP and by mutual CHAP, and not with a wrong secret on either side.
func (l *linux) chap(transport string) {
	const chapTarget = "iqn.2026-11.io.isergate:chap"
	if r := l.gateway.try("volume", "show", "chap"); r.code != exitOK {
		user, target := filepath.Join(l.gateway.dir, "user"), filepath.Join(l.gateway.dir, "target")
		for file, secret := range map[string]string{user: "forward-secret-1", target: "reverse-secret-2"} {
			if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
				l.t.Fatal(err)
			}
		}
		l.gateway.run("volume", "create", "chap", "--size", "16MiB", "--target", chapTarget)
		l.gateway.run("acl", "add", chapTarget, linuxInitiator, "--chap-user", "u", "--chap-secret-file", user, "--mutual-user", "m", "--mutual-secret-file", target)
	}
	const in, refused, refuses = 0, 24, 19 // iscsiadm's: the target refused, the initiator did
	for _, c := range []struct {
		auth string
		exit int
	}{
		{"", refused},
		{"username=u password=forward-secret-2", refused},
		{"username=u password=forward-secret-1", in},
		{"username=u password=forward-secret-1 username_in=m password_in=reverse-secret-3", refuses},
		{"username=u password=forward-secret-1 username_in=m password_in=reverse-secret-2", in},
	} {
		settings := "node.session.initial_login_retry_max=1"
		if c.auth != "" {
			settings += " node.session.auth.authmethod=CHAP"
		}
		for _, s := range strings.Fields(c.auth) {
			settings += " node.session.auth." + s
		}
		out, err := l.Try(l.script(transport, `
target=`+chapTarget+`
iscsiadm -m node -o delete >/dev/null 2>&1 || true
disk=$(enter `+settings+`)
dd if=/dev/zero of=$disk bs=4k count=1 oflag=direct status=none
logout $transport $portal $target
`))
		if got := labtest.Exit(err); err == nil && c.exit != in || err != nil && got != c.exit {
			l.t.Errorf("%q: %v, want status %d\n%s", c.auth, err, c.exit, out)
		}
	}
}
