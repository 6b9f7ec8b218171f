// Command memtarget serves logical units in memory over iSCSI, for runs of other people's initiators
// and conformance suites against this package. It keeps nothing, and authenticates only as its flags say.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	_ "net/http/pprof"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/scsi"
	"github.com/isergate/isergate/iser/scsi/scsitest"
	"github.com/isergate/isergate/iser/tcp"
)

type backend struct {
	target string
	units  *scsi.Inventory
	chap   *iscsi.CHAP
}

func (b *backend) Authorize(_ context.Context, initiator, target string) (iscsi.Access, error) {
	if target != "" && target != b.target {
		return iscsi.Access{}, iscsi.ErrNotFound
	}
	a := iscsi.Access{Units: b.units, Alias: "memory"}
	if target != "" {
		a.CHAP = b.chap
	}
	return a, nil
}

func (b *backend) Targets(context.Context, string) []string { return []string{b.target} }

func main() {
	listen := flag.String("listen", "127.0.0.1:3260", "comma-separated portals")
	target := flag.String("target", "iqn.2024-01.net.isergate:mem", "target name")
	size := flag.Uint64("size", 128<<20, "bytes of each logical unit")
	block := flag.Uint("block", 512, "block size")
	plain := flag.Bool("plain", false, "report physical blocks as large as logical ones")
	readonly := flag.Bool("readonly", false, "write-protect")
	removable := flag.Bool("removable", false, "removable medium")
	chap := flag.String("chap", "", "user:secret[:mutual-user:mutual-secret]")
	pprof := flag.String("pprof", "", "address of the profiler")
	verbose := flag.Bool("v", false, "log everything")
	flag.Parse()
	if err := run(*listen, *target, *size, uint32(*block), *plain, *readonly, *removable, *chap, *pprof, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "memtarget:", err)
		os.Exit(1)
	}
}

func run(listen, target string, size uint64, block uint32, plain, readonly, removable bool, chap, pprof string, verbose bool) error {
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	if pprof != "" {
		go http.ListenAndServe(pprof, nil)
	}
	b := &backend{target: target, units: scsi.NewInventory()}
	unit, err := scsi.NewLogicalUnit(scsi.Options{
		Medium: scsitest.NewMedium(size/uint64(block), block), Identity: scsi.Identity{UUID: [16]byte{1, 2, 3, 4}},
		PlainBlocks: plain, ReadOnly: readonly, Removable: removable,
	})
	if err != nil {
		return err
	}
	if err := b.units.Map(0, unit); err != nil {
		return err
	}
	if f := strings.Split(chap, ":"); len(f) >= 2 {
		b.chap = &iscsi.CHAP{User: f[0], Secret: []byte(f[1])}
		if len(f) == 4 {
			b.chap.MutualUser, b.chap.MutualSecret = f[2], []byte(f[3])
		}
	}
	srv, err := iscsi.NewServer(iscsi.Options{Backend: b, Logger: log, LogoutWait: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	for _, address := range strings.Split(listen, ",") {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		go func() { failed <- srv.Serve(tcp.NewListener(l), iscsi.Portal{}) }()
	}
	stop, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	select {
	case err := <-failed:
		return err
	case <-stop.Done():
	}
	ctx, done := context.WithTimeout(context.Background(), 5*time.Second)
	defer done()
	return srv.Shutdown(ctx)
}
