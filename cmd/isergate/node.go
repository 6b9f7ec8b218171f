package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
	"github.com/isergate/isergate/gateway/units"
)

// version is set by the linker of a release.
var version = ""

// programVersion is the release, or the commit that was built.
func programVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision, modified := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "+"
		}
	}
	if revision == "" {
		return strings.Trim(info.Main.Version, "()")
	}
	return revision + modified
}

func (c *cli) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: c.does(func(context.Context, []string) error {
			v := struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}{programVersion(), runtime.Version()}
			return c.print(v, func(w io.Writer) { fmt.Fprintf(w, "isergate %s (%s)\n", v.Version, v.Go) })
		}),
	}
}

func (c *cli) status() *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "status", Short: "Show the gateway; exit 0 when it serves", Args: cobra.NoArgs,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			s, err := c.awaitServing(ctx, node, wait)
			if err != nil {
				return err
			}
			return c.print(s, func(w io.Writer) { printStatus(w, s) })
		}),
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait up to this long until the gateway serves")
	return cmd
}

// awaitServing asks until the node serves, up to wait.
func (c *cli) awaitServing(ctx context.Context, node *api.Client, wait time.Duration) (api.Status, error) {
	deadline := time.Now().Add(wait)
	for {
		s, err := node.Status(ctx)
		if err == nil && s.State != api.Serving {
			err = api.Errorf(api.CodeUnavailable, "the gateway is %s", s.State)
		}
		if err == nil || api.CodeOf(err) != api.CodeUnavailable || time.Now().After(deadline) {
			return s, err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return s, ctx.Err()
		}
	}
}

func printStatus(w io.Writer, s api.Status) {
	var addresses []string
	for _, p := range s.Portals {
		text := p.Listen
		if p.Advertise != "" {
			text += " (advertised as " + p.Advertise + ")"
		}
		if p.Transport != config.TransportAuto {
			text += " (" + p.Transport + " only)"
		}
		addresses = append(addresses, text)
	}
	conditional := "conditional writes " + s.Bucket.Conditional
	if s.Bucket.SingleWriter {
		conditional += ", single writer as configured"
	}
	var states []string
	total := 0
	for _, state := range slices.Sorted(maps.Keys(s.VolumeStates)) {
		states = append(states, fmt.Sprintf("%d %s", s.VolumeStates[state], state))
		total += s.VolumeStates[state]
	}
	contract := "met by every volume"
	if len(s.ContractUnmet) > 0 {
		contract = "NOT MET by " + strings.Join(s.ContractUnmet, ", ")
	}
	state := s.State
	if s.Bucket.Since != nil {
		state += "; the bucket does not answer since " + when(s.Bucket.Since)
	}
	row(w, "State", state)
	row(w, "Version", s.Version)
	row(w, "Node", s.Node)
	row(w, "Started", when(&s.Started))
	row(w, "Data directory", s.DataDir)
	row(w, "Bucket", fmt.Sprintf("%s (%s)", s.Bucket.URL, conditional))
	if s.Bucket.Error != "" {
		row(w, "Bucket error", s.Bucket.Error)
	}
	row(w, "Portals", list(addresses))
	access := "by ACL entry"
	if s.Open {
		access = "open to every initiator"
	} else if len(s.OpenTargets) > 0 {
		access += ", but open to every initiator: " + strings.Join(s.OpenTargets, ", ")
	}
	row(w, "Access", access)
	volumes := fmt.Sprintf("%d (%s)", total, list(states))
	if len(s.BucketUnreachable) > 0 {
		volumes += fmt.Sprintf("; the bucket does not answer of %s: reads that are not cached wait, the dirty backlog grows", strings.Join(s.BucketUnreachable, ", "))
	}
	row(w, "Volumes", volumes)
	row(w, "Contract", contract)
	row(w, "Dirty", size(s.DirtyBytes))
	row(w, "Sessions", s.Sessions)
	for i, e := range s.Events {
		head := ""
		if i == 0 {
			head = "Events"
		}
		row(w, head, fmt.Sprintf("%s %s %s %s %s", when(&e.Time), e.Severity, e.Type, e.Volume, e.Text))
	}
}

func (c *cli) session() *cobra.Command {
	return group("session", "Initiators that are logged in", &cobra.Command{
		Use: "list", Short: "List sessions", Args: cobra.NoArgs,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			sessions, err := node.Sessions(ctx)
			if err != nil {
				return err
			}
			return c.print(sessions, func(w io.Writer) {
				row(w, "TARGET", "INITIATOR", "ISID", "TSIH", "TRANSPORT", "COMMANDS", "FROM")
				for _, s := range sessions {
					target := s.Target
					if s.Discovery {
						target = "(discovery)"
					}
					row(w, target, s.Initiator, s.ISID, s.TSIH, s.Transport, s.Commands, list(s.Connections))
				}
			})
		}),
	})
}

func (c *cli) drain() *cobra.Command {
	return &cobra.Command{
		Use: "drain", Short: "Bring everything acknowledged to the bucket, and wait for it", Args: cobra.NoArgs,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			stop := c.progress(func() string {
				s, err := node.Status(ctx)
				if err != nil || s.DirtyBytes == 0 {
					return ""
				}
				text := fmt.Sprintf("drain: %s are not in the bucket yet", size(s.DirtyBytes))
				if s.Bucket.Error != "" {
					text += "; the bucket does not answer: see \"isergate status\""
				}
				return text
			})
			err := node.Drain(ctx)
			stop()
			if err != nil {
				return err
			}
			if s, err := node.Status(ctx); err == nil && (s.Bucket.Error != "" || len(s.BucketUnreachable) > 0) {
				c.warn("the bucket does not answer at present: see \"isergate status\"")
			}
			return c.print(struct {
				Drained bool `json:"drained"`
			}{true}, func(w io.Writer) { fmt.Fprintln(w, "Everything acknowledged is in the bucket.") })
		}),
	}
}

func (c *cli) bucket() *cobra.Command {
	var verify bool
	cmd := &cobra.Command{
		Use: "inspect URL", Short: "List the volumes of a bucket, without a gateway and without changing anything", Args: cobra.ExactArgs(1),
		RunE: c.does(func(ctx context.Context, args []string) error {
			var read gateway.ReadSoFar
			stop := c.progress(func() string { return inspected(&read) })
			volumes, err := gateway.InspectBucket(ctx, args[0], verify, &read)
			stop()
			if err != nil {
				return err
			}
			if err := c.print(volumes, func(w io.Writer) { printBucket(w, volumes) }); err != nil {
				return err
			}
			for _, v := range volumes {
				if v.Error != "" || len(v.Damaged) > 0 {
					return fmt.Errorf("volume %s (%s) is damaged: %s", v.Name, v.UUID, strings.Join(append(v.Damaged, v.Error), "; "))
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&verify, "verify", false, "read every object whole and check every checksum")
	return group("bucket", "Buckets", cmd)
}

// inspected says how far an inspection is.
func inspected(read *gateway.ReadSoFar) string {
	return fmt.Sprintf("inspect: %s from the bucket so far, %s", units.Count(read.Reads.Load(), "read"), size(read.Bytes.Load()))
}

func printBucket(w io.Writer, volumes []api.BucketVolume) {
	row(w, "NAME", "UUID", "SIZE", "BLOCK", "EPOCH", "GENERATION", "LSN", "TIME", "OBJECTS", "BYTES", "STATE")
	for _, v := range volumes {
		state := "ok"
		if v.Error != "" || len(v.Damaged) > 0 {
			state = "damaged"
		}
		row(w, dash(v.Name), v.UUID, size(v.SizeBytes), v.BlockSize, v.Epoch, v.Generation, v.LSN, when(v.Time), v.Objects, size(v.Bytes), state)
	}
}
