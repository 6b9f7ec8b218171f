package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isergate/isergate/gateway/api"
)

// Every program of Debian that speaks iSCSI without the kernel, and what stands on one of them.
func TestEveryClient(t *testing.T) {
	t.Parallel()
	need(t, "iscsi-ls", "iscsi-inq", "iscsi-readcapacity16", "iscsi-swp", "iscsi-perf", "qemu-img", "qemu-io", "qemu-nbd", "nbdinfo", "nbdcopy", "nbdkit", "fio", "cmp")
	g := newGateway(t, "--open").start()
	for i, block := range []string{"512", "4096"} {
		g.run("volume", "create", "v"+block, "--size", "64MiB", "--block-size", block, "--target", target, "--lun", fmt.Sprint(i))
		t.Run(block, func(t *testing.T) { everyClient(t, g, i) })
	}
}

func everyClient(t *testing.T, g *gatewayProcess, lun int) {
	dir := t.TempDir()
	url := g.url(target, lun)
	raw := image(t, dir, 32)
	in := func(name string) string { return filepath.Join(dir, name) }

	// run wants a client to succeed, and its output to have all words, but those that begin with "!" .
	run := func(words []string, program string, args ...string) {
		t.Helper()
		out := must(t, program, args...)
		for _, w := range words {
			if unwanted, not := strings.CutPrefix(w, "!"); not == strings.Contains(out, unwanted) {
				t.Errorf("%s %q: expected %q in\n%s", program, args, w, out)
			}
		}
	}

	run([]string{"Target:" + target, fmt.Sprintf("Lun:%d ", lun)}, "iscsi-ls", "-s", "iscsi://"+g.portal)
	run([]string{"Peripheral Device Type:DIRECT_ACCESS"}, "iscsi-inq", url)
	for page, words := range map[string][]string{
		"0": {"0x83"}, "128": nil, "131": {"NAA"}, "176": {"maximum unmap lba count:4294967295"}, "177": {"Medium Rotation Rate:1RPM"}, "178": {"lbpu:1", "lbprz:1"},
	} {
		run(words, "iscsi-inq", "-e", "1", "-c", page, url)
	}
	run([]string{"Total size:67108864"}, "iscsi-readcapacity16", url)
	run([]string{"SWP:0"}, "iscsi-swp", url)
	run(nil, "iscsi-swp", "-s", "on", url)
	if r := execute(t, nil, "qemu-io", "-f", "raw", "-c", "write 0 4k", url); r.code == 0 || !strings.Contains(r.stderr, "write protected") {
		t.Errorf("a write under software write protection: %+v", r)
	}
	run(nil, "iscsi-swp", "-s", "off", url)
	run([]string{"iops average"}, "iscsi-perf", "-m", "32", "-b", "8", "-t", "1", "-r", url)

	run([]string{"64 MiB"}, "qemu-img", "info", "-f", "raw", url)
	run(nil, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", raw, url)
	run(nil, "qemu-img", "dd", "-f", "raw", "-O", "raw", "bs=1M", "count=32", "if="+url, "of="+in("back"))
	run(nil, "cmp", in("back"), raw)
	run(nil, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", url, in("q"))
	run([]string{"identical"}, "qemu-img", "compare", "-f", "qcow2", "-F", "raw", in("q"), url)
	var extents []struct {
		Start, Length int64
		Data, Zero    bool
	}
	if err := json.Unmarshal([]byte(must(t, "qemu-img", "map", "-f", "raw", "--output=json", url)), &extents); err != nil {
		t.Fatal(err)
	}
	if n := len(extents); n < 2 || !extents[0].Data || extents[n-1].Data || extents[n-1].Start > 33<<20 || extents[n-1].Start+extents[n-1].Length != 64<<20 {
		t.Errorf("qemu-img map (GET LBA STATUS): %+v", extents)
	}
	for _, more := range [][]string{nil, {"-w"}} {
		run([]string{"Run completed"}, "qemu-img", append(append([]string{"bench", "-f", "raw", "-c", "2000", "-d", "32", "-s", "4096", "-t", "none"}, more...), url)...)
	}
	for _, commands := range [][]string{
		{"write -P 0x5a 1M 3M", "flush", "read -P 0x5a 1M 3M"},
		{"write -z 1M 1M", "read -P 0 1M 1M", "read -P 0x5a 2M 2M"},
		{"discard 2M 1M", "read -P 0 2M 1M", "read -P 0x5a 3M 1M"},
		aio(),
	} {
		args := []string{"-f", "raw", "-d", "unmap"}
		for _, c := range commands {
			args = append(args, "-c", c)
		}
		run([]string{"!failed"}, "qemu-io", append(args, url)...)
	}
	run([]string{"!failed"}, "qemu-io", "-c", "read -P 63 252k 4k", "--image-opts", g.imageOptions(target, lun, ",header-digest=crc32c"))

	// qemu-nbd makes the LUN a network block device for programs that do not speak iSCSI; it
	// gets its socket from the client that starts it.
	bridge := []string{"--", "[", "qemu-nbd", "-f", "raw", "--cache=none", url, "]"}
	run([]string{"67108864"}, "nbdinfo", append([]string{"--size"}, bridge...)...)
	run(nil, "nbdcopy", slices.Insert(slices.Clone(bridge), 1, raw)...)
	run(nil, "nbdcopy", append(bridge, in("copied"))...)
	if copied, err := os.ReadFile(in("copied")); err != nil || len(copied) != 64<<20 {
		t.Errorf("nbdcopy made %d bytes, %v", len(copied), err)
	} else if want, err := os.ReadFile(raw); err != nil || !bytes.Equal(copied[:len(want)], want) {
		t.Errorf("nbdcopy does not read what it wrote (%v)", err)
	}
	socket := filepath.Join(g.dir, fmt.Sprintf("nbd%d", lun)) // a short path
	server := exec.CommandContext(t.Context(), "qemu-nbd", "-t", "-k", socket, "-f", "raw", "--cache=none", url)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	run([]string{"err= 0"}, "nbdkit", "-U", "-", "nbd", "socket="+socket, "retry=60", "--run",
		`fio --name=v --ioengine=nbd --uri="$uri" --rw=randwrite --bs=4k --iodepth=16 --size=16m --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0`)
}

// aio are commands of qemu-io with 64 writes in flight, and the check of each.
func aio() (commands []string) {
	for i := range 64 {
		commands = append(commands, fmt.Sprintf("aio_write -P %d %dk 4k", i, 4*i))
	}
	commands = append(commands, "aio_flush")
	for i := range 64 {
		commands = append(commands, fmt.Sprintf("read -P %d %dk 4k", i, 4*i))
	}
	return commands
}

// bootSector prints "ISERGATE BOOTS" on the serial line and turns the machine off through QEMU's isa-debug-exit device.
func bootSector(t *testing.T) []byte {
	t.Helper()
	const message = "ISERGATE BOOTS\r\n\x00"
	code, err := hex.DecodeString("" +
		"fa31c08ed8" + // cli; xor ax,ax; mov ds,ax
		"be1c7c" + // mov si,0x7c1c: the message, behind the code
		"ac84c07406" + // lodsb; test al,al; jz end
		"baf803eeebf5" + // mov dx,0x3f8; out dx,al; jmp lodsb
		"ba0105b010ee" + // end: mov dx,0x501; mov al,0x10; out dx,al
		"f4ebfd") // hlt; jmp hlt
	if err != nil || len(code) != 0x1c {
		t.Fatal(len(code), err)
	}
	sector := make([]byte, 512)
	copy(sector[copy(sector, code):], message)
	copy(sector[446:], []byte{0x80, 1, 1, 0, 0x83, 1, 1, 0, 1, 0, 0, 0, 1}) // an active partition
	sector[510], sector[511] = 0x55, 0xaa
	return sector
}

// A machine boots from a LUN: by QEMU's initiator below a virtual disk, and by iPXE's own initiator over a virtual network.
func TestBoot(t *testing.T) {
	t.Parallel()
	need(t, "qemu-io", "qemu-system-x86_64")
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	sector := filepath.Join(g.dir, "sector")
	if err := os.WriteFile(sector, bootSector(t), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := must(t, "qemu-io", "-f", "raw", "-c", "write -s "+sector+" 0 512", "-c", "flush", g.url(target, 0)); strings.Contains(out, "failed") {
		t.Fatal(out)
	}
	tftp := filepath.Join(g.dir, "tftp")
	if err := os.Mkdir(tftp, 0o755); err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(g.portal, ":")
	script := fmt.Sprintf("#!ipxe\ndhcp\nsanboot --drive 0x80 iscsi:10.0.2.2::%s:0:%s\n", port, target) // the host as seen by the machine
	if err := os.WriteFile(filepath.Join(tftp, "boot.ipxe"), []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, disk := range map[string][]string{
		"QEMU": {"-drive", "file=" + g.url(target, 0) + ",format=raw,if=virtio", "-net", "none"},
		"iPXE": {"-boot", "n", "-netdev", "user,id=n,tftp=" + tftp + ",bootfile=boot.ipxe", "-device", "virtio-net-pci,netdev=n"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "qemu-system-x86_64", append([]string{"-M", "pc", "-accel", "tcg", "-m", "64", "-nographic", "-monitor", "none",
				"-no-reboot", "-device", "isa-debug-exit,iobase=0x501,iosize=2"}, disk...)...)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 2*0x10+1 || !bytes.Contains(out, []byte("ISERGATE BOOTS")) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	var s []api.Session
	if g.json(&s, "session", "list"); len(s) > 1 {
		t.Errorf("%+v", s)
	}
}
