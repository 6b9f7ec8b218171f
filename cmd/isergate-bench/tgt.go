package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/bench"
)

// errNoTgt: the peer cannot be measured on this machine.
var errNoTgt = errors.New("tgt is not measured")

// writeThrough is what tgt-admin makes of "write-cache off": a caching page without WCE. tgtd then calls fdatasync
// after each write. Its default is WCE, and writes stay in the page cache.
const writeThrough = "mode_page=8:0:18:0x10:0:0xff:0xff:0:0:0xff:0xff:0xff:0xff:0x80:0x14:0:0:0:0:0:0"

// sessionValues are what isergate declares, so that both move data in pieces of the same size; tgtd's own defaults
// are smaller.
var sessionValues = []struct{ name, value string }{
	{"MaxRecvDataSegmentLength", "262144"},
	{"MaxXmitDataSegmentLength", "262144"},
	{"MaxBurstLength", "1048576"},
	{"FirstBurstLength", "65536"},
	{"MaxOutstandingR2T", "8"},
	{"InitialR2T", "No"},
	{"ImmediateData", "Yes"},
}

// tgt is a tgtd with two LUNs, each a file.
type tgt struct {
	h       *harness
	control string // number of the control port
	portal  string
	process *process
}

// newTgt starts tgtd with files of size bytes; its process and its control socket are gone after close.
func (h *harness) newTgt(ctx context.Context, size int64) (*tgt, error) {
	for _, program := range []string{"tgtd", "tgtadm"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("%w: %w (Debian package tgt)", errNoTgt, err)
		}
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: tgtd runs as root only", errNoTgt)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	t := &tgt{h: h, control: strconv.Itoa(1000 + os.Getpid()%30000), portal: fmt.Sprintf("127.0.0.1:%d", port)}
	if t.process, err = h.launcher.start("tgtd", h.dir, exec.Command("tgtd", "-f", "-C", t.control, "--iscsi", "portal="+t.portal)); err != nil {
		return nil, err
	}
	if err := t.configure(ctx, size); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

func (t *tgt) configure(ctx context.Context, size int64) error {
	if err := poll(ctx, startPatience, func() (bool, error) {
		if err := t.process.ended(); err != nil {
			return false, err
		}
		return t.admin(ctx, "--op", "show", "--mode", "sys") == nil, nil
	}); err != nil {
		return err
	}
	steps := [][]string{{"--op", "new", "--mode", "target", "--tid", "1", "-T", targetName}}
	for _, v := range sessionValues {
		steps = append(steps, []string{"--op", "update", "--mode", "target", "--tid", "1", "--name", v.name, "--value", v.value})
	}
	for lun := 1; lun <= 2; lun++ {
		image := filepath.Join(t.h.dir, fmt.Sprintf("tgt-lun%d", lun))
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			return err
		}
		if err := os.Truncate(image, size); err != nil {
			return err
		}
		steps = append(steps, []string{"--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", strconv.Itoa(lun), "-b", image})
	}
	steps = append(steps,
		[]string{"--op", "update", "--mode", "logicalunit", "--tid", "1", "--lun", "2", "--params", writeThrough},
		[]string{"--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"})
	for _, step := range steps {
		if err := t.admin(ctx, step...); err != nil {
			return err
		}
	}
	return nil
}

func (t *tgt) admin(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "tgtadm", append([]string{"-C", t.control, "--lld", "iscsi"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("tgtadm %q: %w: %s", args, err, out)
	}
	return nil
}

// close ends tgtd, which takes no notice of SIGTERM while it has targets.
func (t *tgt) close() {
	t.process.kill()
	_ = os.Remove("/var/run/tgtd/socket." + t.control)
	_ = os.Remove("/var/run/tgtd/socket." + t.control + ".lock")
}

// unit returns a LUN as a target of measurements.
func (t *tgt) unit(lun uint16) *target {
	open := bench.OpenLUN(initiator.Options{Portal: t.portal, InitiatorName: initiatorName, TargetName: targetName}, lun)
	return &target{
		name: peerTgt, cpu: func() (time.Duration, error) { return cpu(t.process.cmd.Process.Pid) }, open: open,
		settle: func(ctx context.Context) error {
			u, err := open(ctx)
			if err != nil {
				return err
			}
			defer u.Close()
			return u.Unit.Flush(ctx)
		},
	}
}
