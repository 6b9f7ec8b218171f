// Command isergate is the gateway and its command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway/api"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run executes one command line and returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	// The first signal ends what is under way in good order, the second one the process.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		<-signals
		cancel()
		<-signals
		os.Exit(exitFailed)
	}()

	c := &cli{stdout: stdout, stderr: stderr}
	root := c.command()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var failed failure
	if !errors.As(err, &failed) { // cobra refused the command line
		called := root
		if found, _, err := root.Find(args); err == nil {
			called = found
		}
		c.complain(fmt.Errorf("%s: see \"%s --help\"", refusal(err), called.CommandPath()))
		return exitUsage
	}
	if errors.Is(failed, context.Canceled) && ctx.Err() != nil {
		c.complain(errors.New("interrupted"))
		return exitFailed
	}
	c.complain(failed.error)
	if api.CodeOf(failed.error) == api.CodeInvalid {
		return exitUsage
	}
	return exitFailed
}

var parseError = regexp.MustCompile(`strconv\.\w+: parsing ".*": `)

// refusal is what cobra says about a command line, on one line and without names of Go.
func refusal(err error) string {
	text, similar, found := strings.Cut(err.Error(), "\n\nDid you mean this?\n")
	if found {
		text += ": did you mean " + strings.Join(strings.Fields(similar), " or ") + "?"
	}
	return parseError.ReplaceAllString(text, "")
}

// failure marks an error of a command that was understood and did not succeed.
type failure struct{ error }

// Unwrap returns the error itself.
func (f failure) Unwrap() error { return f.error }

// cli is one run of the program.
type cli struct {
	stdout, stderr io.Writer

	api       string
	tokenFile string
	caFile    string
	output    string
}

// complain prints an error, each fault on one line.
func (c *cli) complain(err error) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintf(c.stderr, "isergate: %s\n", line)
	}
}

// warn prints what a person should know beside the result.
func (c *cli) warn(format string, args ...any) {
	c.complain(fmt.Errorf("warning: "+format, args...))
}

// does makes a command's function of f.
func (c *cli) does(f func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if c.output != "table" && c.output != "json" {
			return fmt.Errorf("--output %s: use table or json", c.output)
		}
		if err := f(cmd.Context(), args); err != nil {
			return failure{err}
		}
		return nil
	}
}

// asks makes a command's function of f, which talks to a node.
func (c *cli) asks(f func(ctx context.Context, node *api.Client, args []string) error) func(*cobra.Command, []string) error {
	return c.does(func(ctx context.Context, args []string) error {
		node, err := c.connect()
		if err != nil {
			return err
		}
		defer node.Close()
		return f(ctx, node, args)
	})
}

// connect makes the client that the flags and the environment describe.
func (c *cli) connect() (*api.Client, error) {
	token := os.Getenv("ISERGATE_TOKEN")
	if c.tokenFile != "" {
		text, err := os.ReadFile(c.tokenFile)
		if err != nil {
			return nil, api.Errorf(api.CodeInvalid, "--token-file: %w", err)
		}
		token = strings.TrimSpace(string(text))
	}
	return api.NewClient(c.api, api.ClientOptions{Token: token, CAFile: c.caFile})
}

// command is the whole command line.
func (c *cli) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "isergate",
		Short: "A storage gateway: iSCSI and iSER LUNs from a crash-safe write-back cache whose home is an S3 bucket",
		Long: `isergate serves volumes as iSCSI and iSER LUNs. Writes land in a crash-safe journal on local
disks and go on, in order, to an S3 bucket, from which a volume can be restored alone.

"isergate serve" is the gateway; the other commands talk to a running one.`,
		Version:       programVersion(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetVersionTemplate("isergate {{.Version}}\n")
	address := os.Getenv("ISERGATE_API")
	if address == "" {
		address = defaultAPI
	}
	flags := root.PersistentFlags()
	flags.StringVar(&c.api, "api", address, "address of the gateway's API: unix:PATH or https://HOST:PORT (environment: ISERGATE_API)")
	flags.StringVar(&c.tokenFile, "token-file", "", "file with the API's token, for https (environment: ISERGATE_TOKEN)")
	flags.StringVar(&c.caFile, "api-ca", "", "file with certificates to trust, for https")
	flags.StringVar(&c.output, "output", "table", "table or json")
	root.AddCommand(
		c.serve(), c.status(), c.volume(), c.target(), c.lun(), c.acl(), c.session(), c.bucket(), c.drain(), c.bench(), c.version(),
	)
	c.completions(root)
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args, cmd.RunE = nil, onlyGroup
		}
	}
	return root
}

// group is a command that only has commands below it.
func group(use, short string, commands ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{Use: use, Short: short, RunE: onlyGroup}
	g.AddCommand(commands...)
	return g
}

// onlyGroup refuses to run a command that only has commands below it.
func onlyGroup(cmd *cobra.Command, args []string) error {
	var names []string
	for _, sub := range cmd.Commands() {
		names = append(names, sub.Name())
	}
	if len(args) > 0 {
		return fmt.Errorf("unknown command %q: %s takes %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
	}
	return fmt.Errorf("%s takes one of %s", cmd.CommandPath(), strings.Join(names, ", "))
}
