package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
)

// defaultAPI is the socket of a gateway that was started without configuration in
// the same directory.
const defaultAPI = "unix:" + config.DefaultDataDir + "/" + config.SocketName

func (c *cli) serve() *cobra.Command {
	var (
		file, dataDir, bucket, logFormat, logLevel string
		portals                                    []string
		demo, open                                 bool
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the gateway",
		Long: `Run the gateway until SIGINT or SIGTERM.

Without a configuration it keeps its data and an embedded bucket in ./isergate-data and
listens on 127.0.0.1:3260. Flags override the configuration file. The first signal stops it in good
order: everything acknowledged is in the journal or the bucket. The second one stops it at once.

A portal serves iSCSI over TCP and iSER over iWARP at the same port; the initiator chooses (with the
kernel's: iscsiadm -I iser). transport=tcp or transport=iser keeps a portal to one of them.`,
		Args: cobra.NoArgs,
	}
	flags := cmd.Flags()
	flags.StringVar(&file, "config", "", "configuration file, YAML")
	flags.StringVar(&dataDir, "data-dir", "", "directory of journal, maps, catalogue and API socket (default ./"+config.DefaultDataDir+")")
	flags.StringVar(&bucket, "bucket", "", "home of new volumes: s3://bucket/prefix?endpoint=…&region=…, file:///directory or mem: (default file://DATA-DIR/bucket)")
	flags.StringArrayVar(&portals, "portal", nil, "where initiators connect, by iSCSI over TCP and by iSER: "+config.PortalSyntax+", may be repeated (default 127.0.0.1:3260)")
	flags.BoolVar(&demo, "demo", false, "serve a 1 GiB LUN, open to this machine, and print commands to paste")
	flags.BoolVar(&open, "open", false, "let every initiator use every target; without it an initiator needs an ACL entry")
	flags.StringVar(&logFormat, "log-format", "", "text or json (default text)")
	flags.StringVar(&logLevel, "log-level", "", "debug, info, warn or error (default info)")
	cmd.RunE = c.does(func(ctx context.Context, _ []string) error {
		given := func(name string, value *string) *string {
			if flags.Changed(name) {
				return value
			}
			return nil
		}
		f := config.Flags{
			DataDir: given("data-dir", &dataDir), Bucket: given("bucket", &bucket), Portals: portals,
			LogFormat: given("log-format", &logFormat), LogLevel: given("log-level", &logLevel),
		}
		if flags.Changed("demo") {
			f.Demo = &demo
		}
		if flags.Changed("open") {
			f.Open = &open
		}
		settings, err := config.Load(file, f)
		if err != nil {
			return api.Errorf(api.CodeInvalid, "%w", err)
		}
		return c.serveNode(ctx, settings)
	})
	return cmd
}

// serveNode runs a node until ctx ends.
func (c *cli) serveNode(ctx context.Context, settings config.Config) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(settings.Log.Level)); err != nil {
		return err
	}
	options := &slog.HandlerOptions{Level: level}
	log := slog.New(slog.NewTextHandler(c.stderr, options))
	if settings.Log.Format == "json" {
		log = slog.New(slog.NewJSONHandler(c.stderr, options))
	}
	node, err := gateway.Start(ctx, gateway.Options{Config: settings, Version: programVersion(), Logger: log})
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return nil // stopped while it was starting
	}
	if err != nil {
		return err
	}
	if settings.Demo {
		if err := node.PrintDemo(c.stdout, self(), clientFlags(settings.API.Socket)); err != nil {
			log.Warn("the demo's commands could not be printed", "err", err)
		}
	}
	<-ctx.Done()
	return node.Stop(context.Background())
}

// self is how a person calls this program.
func self() string {
	if strings.Contains(os.Args[0], "/go-build") {
		return "go run ./cmd/isergate"
	}
	return os.Args[0]
}

// clientFlags are what a command in the same directory needs to reach the socket.
func clientFlags(socket string) string {
	if usual, err := filepath.Abs(strings.TrimPrefix(defaultAPI, "unix:")); err == nil && usual == socket {
		return ""
	}
	return fmt.Sprintf("--api unix:%s", socket)
}
