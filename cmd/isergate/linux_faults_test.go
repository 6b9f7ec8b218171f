package main

import (
	bigendian "encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/lab/labtest"
)

// load logs in and writes for as long as two or three faults take; then it reads back every block, each of
// which was acknowledged.
func (l *linux) load(transport string) *labtest.Running {
	l.t.Helper()
	l.run(transport, "enter")
	return l.Start(l.script(transport, `
verified $(disk $transport $target) --rw=randwrite --bs=4k --size=20m --iodepth=16 --rate_iops=800 --name=load`))
}

// written waits until the volume has got that many writes more from the load.
func (l *linux) written(volume string, more uint64, load *labtest.Running) {
	l.t.Helper()
	from := l.gateway.show(volume).Watermarks.Acked.LSN
	deadline := time.After(labtest.Limit)
	for l.gateway.show(volume).Watermarks.Acked.LSN < from+more {
		select {
		case <-load.Done():
			l.t.Fatalf("the load has ended too early:\n%s", load.Wait())
		case <-deadline:
			l.t.Fatalf("%s gets no writes:\n%s", volume, load.Output())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// verified waits for a load's end.
func (l *linux) verified(load *labtest.Running) {
	l.t.Helper()
	l.t.Logf("every block is as it was acknowledged:\n%s", load.Wait())
}

// reset resets the LUN under a load.
func (l *linux) reset(transport string) {
	load := l.load(transport)
	for range 3 {
		l.written("one", 200, load)
		l.run(transport, "sg_reset -d $(disk $transport $target)")
	}
	l.verified(load)
}

// abort makes commands wait until the initiator gives them up: nothing is acknowledged at
// object while the bucket is away.
func (l *linux) abort(transport string) {
	l.run(transport, `
disk=$(enter)
echo 3 >/sys/block/$(basename $disk)/device/timeout`)
	bucket := filepath.Join(l.gateway.dir, "bucket")
	back := func() {
		if err := os.Rename(bucket+".away", bucket); err != nil && !errors.Is(err, os.ErrNotExist) {
			l.t.Error(err)
		}
	}
	l.gateway.run("volume", "set", "one", "--ack", "object", "--flush", "object")
	defer l.gateway.run("volume", "set", "one", "--ack", "local", "--flush", "local")
	if err := os.Rename(bucket, bucket+".away"); err != nil {
		l.t.Fatal(err)
	}
	defer back()
	load := l.Start(l.script(transport, `
verified $(disk $transport $target) --rw=randwrite --bs=64k --size=1m --iodepth=8 --name=stalled`))
	l.run(transport, `
session=$(sessions $transport $target)
until_true 120 eval 'iscsiadm -m session -r ${session#session} -s | grep "tmfcmd_pdus: [1-9]"'
iscsiadm -m session -r ${session#session} -s | grep tmf`)
	back()
	l.verified(load)
}

// kill kills the gateway under a load, and starts it again: the session recovers, and all
// that was acknowledged is there.
func (l *linux) kill(transport string) {
	load := l.load(transport)
	for range 2 {
		l.written("one", 300, load)
		l.gateway.kill()
		l.gateway.start()
	}
	l.written("one", 100, load) // by the same session, which has recovered
	l.verified(load)
	if out := l.run(transport, "state $transport $target"); out != "LOGGED_IN\n" {
		l.t.Errorf("the session is %s", out)
	}
}

// persistence reads what SCSI says of it, as a person would at this initiator, kills the
// gateway behind a file system's flush, and switches the write cache off and on.
func (l *linux) persistence(transport string) {
	l.gateway.run("volume", "set", "one", "--ack", "memory", "--flush", "local")
	defer l.gateway.run("volume", "set", "one", "--ack", "local", "--flush", "local")
	out := l.run(transport, `
disk=$(enter)
cat /sys/block/$(basename $disk)/device/scsi_disk/*/cache_type
sg_modes --page=8 $disk | grep ' 08 12 '
sg_vpd --page=0xc0 --raw $disk | wc -c
dd if=/dev/urandom of=$disk bs=4k count=64 seek=100 oflag=direct status=none
sg_sync $disk
sg_logs --page=0x36 --raw $disk | od -An -v -tx1 | tr -d ' \n'`)
	if !strings.HasPrefix(out, "write back\n") || !strings.Contains(out, " 08 12 04 ") || !strings.Contains(out, "\n96\n") {
		l.t.Errorf("what the initiator reads of a volume with a write cache:\n%s", out)
	}
	marks := watermarks(l.t, out[strings.LastIndex(out, "\n")+1:])
	if w := l.gateway.show("one").Watermarks; marks[0x10] != w.Acked.LSN || marks[0x11] != w.Local.LSN || marks[0x10] != marks[0x11] {
		l.t.Errorf("watermarks after a flush: the log page has %v, the gateway %+v", marks, w)
	}
	l.run(transport, `
disk=$(disk $transport $target)
mkfs.ext4 -q -F $disk
mkdir -p /mnt/sync
mount $disk /mnt/sync
dd if=/dev/urandom of=/mnt/sync/file bs=64k count=20 conv=fsync status=none
sha256sum /mnt/sync/file >/run/synced.sum`)
	l.gateway.kill()
	l.gateway.start()
	out = l.run(transport, `
disk=$(disk $transport $target)
until_true 120 dd if=$disk of=/dev/null bs=4k count=1 iflag=direct
echo 3 >/proc/sys/vm/drop_caches
sha256sum -c /run/synced.sum
umount /mnt/sync
e2fsck -f -n $disk
# By MODE SELECT:
echo write through >/sys/block/$(basename $disk)/device/scsi_disk/*/cache_type
sg_modes --page=8 $disk | grep ' 08 12 '`)
	if v := l.gateway.show("one"); !v.WriteThrough || !strings.Contains(out, " 08 12 00 ") {
		l.t.Errorf("the write cache is not off: %+v\n%s", v, out)
	}
	out = l.run(transport, `
disk=$(disk $transport $target)
echo write back >/sys/block/$(basename $disk)/device/scsi_disk/*/cache_type
sg_modes --page=8 $disk | grep ' 08 12 '`)
	if v := l.gateway.show("one"); v.WriteThrough || !strings.Contains(out, " 08 12 04 ") {
		l.t.Errorf("the write cache is not on again: %+v\n%s", v, out)
	}
}

// watermarks decodes the log page of the volume, in hexadecimal: its LSNs, by parameter.
func watermarks(t *testing.T, text string) map[uint16]uint64 {
	t.Helper()
	page, err := hex.DecodeString(strings.TrimSpace(text))
	if err != nil || len(page) < 4 {
		t.Fatalf("a log page: %q, %v", text, err)
	}
	lsn := make(map[uint16]uint64)
	for rest := page[4:]; len(rest) >= 4; {
		code, size := bigendian.BigEndian.Uint16(rest), int(rest[3])
		if len(rest) < 4+size {
			t.Fatalf("a log page that is cut off: %s", text)
		}
		if size >= 8 {
			lsn[code] = bigendian.BigEndian.Uint64(rest[4:])
		}
		rest = rest[4+size:]
	}
	return lsn
}
