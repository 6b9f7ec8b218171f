package tcp_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
)

// client runs another project's initiator. The tools are in Debian's libiscsi-bin and qemu-utils.
func runClient(t *testing.T, name string, args ...string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("ISERGATE_REQUIRE_ALL") == "1" {
			t.Fatalf("%v, and ISERGATE_REQUIRE_ALL=1 asks for it", err)
		}
		t.Skipf("%v (Debian: libiscsi-bin, qemu-utils, qemu-block-extra)", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestLibiscsiTools(t *testing.T) {
	r := newRig(t)
	if out := runClient(t, "iscsi-ls", "-s", "iscsi://"+r.addr+"/"); !strings.Contains(out, "Target:"+targetName+" Portal:"+r.addr+",1") {
		t.Errorf("iscsi-ls:\n%s", out)
	}
	url := "iscsi://" + r.addr + "/" + targetName + "/0"
	if out := runClient(t, "iscsi-inq", url); !strings.Contains(out, "Peripheral Device Type:DIRECT_ACCESS") {
		t.Errorf("iscsi-inq:\n%s", out)
	}
	if out := runClient(t, "iscsi-readcapacity16", url); !strings.Contains(out, "Total size:4194304") {
		t.Errorf("iscsi-readcapacity16:\n%s", out)
	}
}

// QEMU's initiator writes, reads, flushes and discards, with and without digests and CHAP.
func TestQEMU(t *testing.T) {
	for _, tt := range []struct {
		name string
		chap *iscsi.CHAP
		opts []string
	}{
		{"plain", nil, nil},
		{"header digest", nil, []string{"--image-opts", "driver=iscsi,transport=tcp,portal=%P,target=%T,lun=0,header-digest=crc32c"}},
		{"CHAP", &iscsi.CHAP{User: "joe", Secret: []byte("a secret of joe")}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, func(r *rig, _ *iscsi.Options) { r.chap = tt.chap })
			var target []string
			switch {
			case tt.opts != nil:
				target = []string{tt.opts[0], strings.NewReplacer("%P", r.addr, "%T", targetName).Replace(tt.opts[1])}
			case tt.chap != nil:
				target = []string{"-f", "raw", "iscsi://joe%a secret of joe@" + r.addr + "/" + targetName + "/0"}
			default:
				target = []string{"-f", "raw", "iscsi://" + r.addr + "/" + targetName + "/0"}
			}
			out := runClient(t, "qemu-io", append([]string{"-c", "write -P 0x5a 0 1M", "-c", "write -P 0xa5 1M 2M", "-c", "flush", "-c", "read -P 0x5a 0 1M",
				"-c", "read -P 0xa5 1M 2M", "-c", "discard 1M 1M", "-c", "aio_write -P 7 3M 64k", "-c", "aio_write -P 8 3200k 4k", "-c", "aio_flush", "-c", "read -P 7 3M 64k"}, target...)...)
			if strings.Contains(out, "failed") {
				t.Error(out)
			}
			if b := r.medium.Bytes(); !bytes.Equal(b[:1<<20], bytes.Repeat([]byte{0x5a}, 1<<20)) || !bytes.Equal(b[2<<20:3<<20], bytes.Repeat([]byte{0xa5}, 1<<20)) {
				t.Error("the medium differs")
			}
		})
	}
}

// An image goes to the target and comes back.
func TestQEMUConvert(t *testing.T) {
	r := newRig(t)
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, pattern(9, len(r.medium.Bytes())), 0o600); err != nil {
		t.Fatal(err)
	}
	url := "iscsi://" + r.addr + "/" + targetName + "/0"
	runClient(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", image, url)
	if out := runClient(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", image, url); !strings.Contains(out, "identical") {
		t.Error(out)
	}
}

// libiscsi's conformance suite, the tests of this layer. iSCSITMF.LUNResetSimpleAsync is not among them: it asserts the
// result before the request is sent, in every version.
func TestConformance(t *testing.T) {
	passed := regexp.MustCompile(`tests\s+1\s+1\s+1\s+0\s+0`)
	for _, name := range []string{
		"iSCSIcmdsn.iSCSICmdSnTooHigh", "iSCSIcmdsn.iSCSICmdSnTooLow", "iSCSIdatasn.iSCSIDataSnInvalid",
		"iSCSIResiduals.Read10Invalid", "iSCSIResiduals.Read10Residuals", "iSCSIResiduals.Read12Residuals", "iSCSIResiduals.Read16Residuals",
		"iSCSITMF.AbortTaskSimpleAsync", "Read10.Async", "Write10.Async", "MultipathIO.Simple", "MultipathIO.Reset",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			url := "iscsi://" + r.addr + "/" + targetName + "/0"
			args := []string{"-d", "-n", "-t", "ALL." + name, url}
			if strings.HasPrefix(name, "Multipath") {
				args = append(args, url)
			}
			if out := runClient(t, "iscsi-test-cu", args...); !passed.MatchString(out) {
				t.Error(out)
			}
		})
	}
}
