package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/units"
)

// The demo's names and size.
const (
	DemoTarget = "iqn.2026-11.io.isergate:demo"
	DemoVolume = "demo"
	DemoBytes  = units.GiB
)

// ensureDemo makes the demo's volume and target, unless they are there from the last time.
func (n *Node) ensureDemo(ctx context.Context) error {
	state := n.catalog.State()
	if target := state.Target(DemoTarget); target != nil && len(target.LUNs) > 0 {
		return nil
	}
	if state.Volume(DemoVolume) != nil {
		_, err := n.MapLUN(ctx, DemoTarget, api.MapLUN{Volume: DemoVolume})
		if api.CodeOf(err) == api.CodeNotFound {
			if _, err = n.CreateTarget(ctx, api.CreateTarget{Name: DemoTarget}); err == nil {
				_, err = n.MapLUN(ctx, DemoTarget, api.MapLUN{Volume: DemoVolume})
			}
		}
		return err
	}
	_, err := n.CreateVolume(ctx, api.CreateVolume{Name: DemoVolume, SizeBytes: int64(DemoBytes), Target: DemoTarget})
	return err
}

// PrintDemo writes the commands with which a person can use the demo's LUN, with the
// addresses that are really served. self is how this program is called, and client its
// flags to reach this node.
func (n *Node) PrintDemo(w io.Writer, self, client string) error {
	portal := n.front.addresses()[0]
	host, port, err := net.SplitHostPort(portal)
	if err != nil {
		return err
	}
	lun := uint16(0)
	state := n.catalog.State()
	volume := DemoVolume
	if t := state.Target(DemoTarget); t != nil && len(t.LUNs) > 0 {
		lun = t.LUNs[0].Number
		if v := state.VolumeByID(t.LUNs[0].Volume); v != nil {
			volume = v.Name
		}
	}
	cli := strings.TrimSpace(self + " " + client)
	url := fmt.Sprintf("iscsi://%s/%s/%d", portal, DemoTarget, lun)
	_, err = fmt.Fprintf(w, `
isergate serves LUN %[6]d of %[1]s at %[2]s, open to every process of this machine.
Commands to paste, from another terminal:

  # libiscsi (Debian: libiscsi-bin)
  iscsi-ls -s iscsi://%[2]s
  iscsi-inq %[3]s
  iscsi-readcapacity16 %[3]s

  # QEMU (Debian: qemu-utils and qemu-block-extra)
  qemu-io -f raw -c "write -P 0xa5 0 1M" -c "flush" -c "read -P 0xa5 0 1M" %[3]s
  qemu-img create -q -f raw image.raw 64M
  qemu-img convert -n -f raw -O raw image.raw %[3]s
  qemu-img info %[3]s

  # the kernel's initiator (Debian: open-iscsi), as root; start iscsid if it does not run
  systemctl start iscsid || iscsid
  iscsiadm -m discovery -t sendtargets -p %[4]s:%[5]s
  iscsiadm -m node -T %[1]s -p %[4]s:%[5]s --login
  lsblk -S
  iscsiadm -m node -T %[1]s -p %[4]s:%[5]s --logout
  # the same over iSER: with -I iser, through an iWARP adapter or the software one (siw); the README says how

  # iSER and iSCSI without any of that, by this program's own initiator
  %[10]s bench iser://%[2]s/%[1]s/%[6]d --rw randread --depth 32 --time 5s
  %[10]s bench %[3]s --rw randread --depth 32 --time 5s

  # what is promised of this volume, and how far the bucket is
  %[7]s volume show %[8]s
  %[7]s volume wait %[8]s --level object

Ctrl-C stops it; what was written stays in %[9]s.
`, DemoTarget, portal, url, bracketed(host), port, lun, cli, volume, n.cfg.DataDir, self)
	return err
}

func bracketed(host string) string {
	if strings.Contains(host, ":") {
		return "[" + host + "]"
	}
	return host
}
