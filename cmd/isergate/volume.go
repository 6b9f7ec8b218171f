package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/units"
)

func (c *cli) volume() *cobra.Command {
	return group("volume", "Volumes", c.volumeCreate(), c.volumeList(), c.volumeShow(), c.volumeResize(), c.volumeDelete(),
		c.volumeSet(), c.volumeWait(), c.volumeRestore())
}

// policyFlags are the flags of a persistence policy.
type policyFlags struct {
	ack, flush, onUnmet string
	budget              sizeFlag
}

// add adds them to a command that makes a volume, or changes one: what is not given stays as it is there.
func (p *policyFlags) add(cmd *cobra.Command, changes bool) {
	usual := func(text string) string {
		if changes {
			return ""
		}
		return " (default " + text + ")"
	}
	flags := cmd.Flags()
	flags.StringVar(&p.ack, "ack", "", "level at which a write is acknowledged: memory, local, quorum or object"+usual("local"))
	flags.StringVar(&p.flush, "flush", "", "level that a flush or FUA write reaches, not below ack"+usual("local, or ack if that is above"))
	flags.StringVar(&p.onUnmet, "on-unmet", "", "while a level is out of reach: block, error or degrade"+usual("block"))
	flags.Var(&p.budget, "dirty-budget", "most bytes that may be acknowledged and not in the bucket; 0: as the configuration says, else a quarter of the journal")
}

// sizeFlag is a size on the command line, with no default to print.
type sizeFlag struct{ units.Size }

// String implements the flag value interface.
func (s *sizeFlag) String() string {
	if s.Size == 0 {
		return ""
	}
	return s.Size.String()
}

func (c *cli) volumeCreate() *cobra.Command {
	var (
		policy policyFlags
		bytes  sizeFlag
		block  int32
		target string
	)
	cmd := &cobra.Command{Use: "create NAME --size SIZE", Short: "Create a volume", Args: cobra.ExactArgs(1)}
	cmd.Flags().Var(&bytes, "size", "1MiB to 64TiB, thin; for example 10GiB")
	cmd.Flags().Int32Var(&block, "block-size", 512, "logical block size, 512 or 4096")
	cmd.Flags().StringVar(&target, "target", "", "map it at this target, which is created if it is not there")
	policy.add(cmd, false)
	number := lunFlag(cmd)
	if err := cmd.MarkFlagRequired("size"); err != nil {
		panic(err) // the flag is defined above
	}
	cmd.RunE = c.asks(func(ctx context.Context, node *api.Client, args []string) error {
		v, err := node.CreateVolume(ctx, api.CreateVolume{
			Name: args[0], SizeBytes: int64(bytes.Size), BlockSize: block, Ack: policy.ack, Flush: policy.flush, OnUnmet: policy.onUnmet,
			DirtyBudgetBytes: int64(policy.budget.Size), Target: target, LUN: number(),
		})
		if err != nil {
			return err
		}
		if v.BucketDownSince != nil {
			c.warn("the bucket of volume %s does not answer at present, and what is written stays in this node's journal until it does: see \"isergate status\"", v.Name)
		}
		return c.print(v, func(w io.Writer) {
			fmt.Fprintf(w, "Volume %s (%s) of %s created", v.Name, v.UUID, size(v.SizeBytes))
			for _, m := range v.Mappings {
				fmt.Fprintf(w, ", LUN %d of %s", m.LUN, m.Target)
			}
			fmt.Fprintf(w, ".\n%s\n", v.Contract)
		})
	})
	return cmd
}

func (c *cli) volumeList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List volumes", Args: cobra.NoArgs,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			volumes, err := node.Volumes(ctx)
			if err != nil {
				return err
			}
			return c.print(volumes, func(w io.Writer) {
				row(w, "NAME", "SIZE", "ACK", "FLUSH", "ON-UNMET", "STATE", "CONTRACT", "DIRTY", "MAPPED AT")
				for _, v := range volumes {
					contract := "met"
					if !v.ContractMet {
						contract = "NOT MET"
					}
					row(w, v.Name, size(v.SizeBytes), v.Policy.Ack, v.Policy.Flush, v.Policy.OnUnmet, stateWord(v), contract, size(v.DirtyBytes), mappings(v))
				}
			})
		}),
	}
}

func mappings(v api.Volume) string {
	var at []string
	for _, m := range v.Mappings {
		at = append(at, fmt.Sprintf("%s/%d", m.Target, m.LUN))
	}
	return list(at)
}

func (c *cli) volumeShow() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show a volume: its contract, and how far each level is", Args: cobra.ExactArgs(1),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			v, err := node.Volume(ctx, args[0])
			if err != nil {
				return err
			}
			return c.print(v, func(w io.Writer) { printVolume(w, v) })
		}),
	}
}

// stateWord is the state, told apart from the policy of the same name: only with that are writes
// acknowledged below what was asked for.
func stateWord(v api.Volume) string {
	if v.State == "degraded" && v.Policy.OnUnmet != "degrade" {
		return "unmet"
	}
	return v.State
}

func policyOf(v api.Volume) string {
	return fmt.Sprintf("ack=%s flush=%s on-unmet=%s", v.Policy.Ack, v.Policy.Flush, v.Policy.OnUnmet)
}

func printVolume(w io.Writer, v api.Volume) {
	row(w, "Name", v.Name)
	row(w, "UUID", v.UUID)
	row(w, "Size", fmt.Sprintf("%s, blocks of %d bytes", size(v.SizeBytes), v.BlockSize))
	state := stateWord(v)
	if v.Reason != "" {
		state += ": " + v.Reason
	}
	if v.BucketDownSince != nil {
		state += "; its bucket does not answer since " + when(v.BucketDownSince) + ": reads that are not cached wait, the dirty backlog grows"
	}
	row(w, "State", state)
	policy := policyOf(v)
	if v.WriteThrough {
		policy += ", write cache switched off by an initiator"
	}
	row(w, "Policy", policy)
	row(w, "Contract", v.Contract)
	row(w, "Contract met", yes(v.ContractMet))
	row(w, "Epoch, generation", fmt.Sprintf("%d, %d", v.Epoch, v.Generation))
	for _, l := range []struct {
		name string
		at   api.Watermark
	}{{"acked", v.Watermarks.Acked}, {"local", v.Watermarks.Local}, {"quorum", v.Watermarks.Quorum}, {"object", v.Watermarks.Object}} {
		row(w, "Watermark "+l.name, fmt.Sprintf("LSN %d, %s", l.at.LSN, when(l.at.Time)))
	}
	row(w, "Dirty", fmt.Sprintf("%s of %s, oldest %s", size(v.DirtyBytes), size(v.DirtyBudgetBytes), when(v.OldestDirty)))
	row(w, "In the bucket", fmt.Sprintf("%s, %s", size(v.ObjectBytes), v.Bucket))
	if v.LastObjectError != "" && !strings.Contains(v.Reason, v.LastObjectError) {
		row(w, "Last bucket error", v.LastObjectError)
	}
	row(w, "Mapped at", mappings(v))
}

func (c *cli) volumeResize() *cobra.Command {
	return &cobra.Command{
		Use: "resize NAME SIZE", Short: "Grow a volume while it is used", Args: cobra.ExactArgs(2),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			bytes, err := units.ParseSize(args[1])
			if err != nil {
				return api.Errorf(api.CodeInvalid, "%w", err)
			}
			n := int64(bytes)
			v, err := node.ChangeVolume(ctx, args[0], api.ChangeVolume{SizeBytes: &n})
			if err != nil {
				return err
			}
			return c.print(v, func(w io.Writer) { fmt.Fprintf(w, "Volume %s has %s.\n", v.Name, size(v.SizeBytes)) })
		}),
	}
}

func (c *cli) volumeDelete() *cobra.Command {
	var purge bool
	cmd := &cobra.Command{
		Use: "delete NAME", Short: "Delete a volume from the gateway; the bucket keeps it unless --purge", Args: cobra.ExactArgs(1),
		Long: `Delete a volume from the gateway. It must not be mapped. Without --purge everything acknowledged is
brought to the bucket first, and the bucket keeps the volume: "isergate volume restore" brings it back. Of a volume
that is fenced, what is not in the bucket ("dirty" in volume show) is lost: the bucket belongs to a newer owner.`,
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			v, err := node.Volume(ctx, args[0])
			if err != nil && api.CodeOf(err) != api.CodeConflict { // with that one the deletion itself says more
				return err
			}
			stop := c.volumeProgress(ctx, node, "delete", args[0])
			err = node.DeleteVolume(ctx, args[0], api.DeleteVolume{Purge: purge})
			stop()
			if err != nil {
				return err
			}
			return c.done("%s", deleted(args[0], v, purge))
		}),
	}
	cmd.Flags().BoolVar(&purge, "purge", false, "delete its objects in the bucket too")
	return cmd
}

// deleted says what became of a volume that was v before.
func deleted(name string, v api.Volume, purge bool) string {
	switch {
	case purge:
		return fmt.Sprintf("Volume %s deleted, its objects too.", name)
	case v.State == "fenced" && v.DirtyBytes > 0:
		return fmt.Sprintf("Volume %s deleted here; the bucket keeps it as its newer owner has it. %s that only this node's journal held are lost.", name, size(v.DirtyBytes))
	}
	return fmt.Sprintf("Volume %s deleted; the bucket keeps it.", name)
}

// volumeProgress prints how far a volume is from the bucket while something waits for it.
func (c *cli) volumeProgress(ctx context.Context, node *api.Client, what, name string) (stop func()) {
	return c.progress(func() string {
		v, err := node.Volume(ctx, name)
		if err != nil || v.DirtyBytes == 0 {
			return ""
		}
		return fmt.Sprintf("%s: %s of %s are not in the bucket yet (LSN %d of %d)", what, size(v.DirtyBytes), v.Name, v.Watermarks.Object.LSN, v.Watermarks.Acked.LSN)
	})
}

func (c *cli) volumeSet() *cobra.Command {
	var policy policyFlags
	cmd := &cobra.Command{
		Use: "set NAME", Short: "Change a volume's persistence policy while it is used", Args: cobra.ExactArgs(1),
		Long: `Change a volume's persistence policy while it is used. What is not given stays as it is, except that a higher
--ack takes flush along. Initiators learn of it by a unit attention.`,
	}
	policy.add(cmd, true)
	cmd.MarkFlagsOneRequired("ack", "flush", "on-unmet", "dirty-budget")
	cmd.RunE = c.asks(func(ctx context.Context, node *api.Client, args []string) error {
		given := func(name string, value *string) *string {
			if cmd.Flags().Changed(name) {
				return value
			}
			return nil
		}
		r := api.ChangeVolume{Ack: given("ack", &policy.ack), Flush: given("flush", &policy.flush), OnUnmet: given("on-unmet", &policy.onUnmet)}
		if cmd.Flags().Changed("dirty-budget") {
			n := int64(policy.budget.Size)
			r.DirtyBudgetBytes = &n
		}
		v, err := node.ChangeVolume(ctx, args[0], r)
		if err != nil {
			return err
		}
		return c.print(v, func(w io.Writer) {
			fmt.Fprintf(w, "Volume %s has %s, and a dirty budget of %s.\n%s\n", v.Name, policyOf(v), size(v.DirtyBudgetBytes), v.Contract)
		})
	})
	return cmd
}

func (c *cli) volumeWait() *cobra.Command {
	var level string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "wait NAME --level LEVEL", Short: "Wait until everything acknowledged so far is at a level (the persistence barrier)", Args: cobra.ExactArgs(1),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			if timeout <= 0 {
				return api.Errorf(api.CodeInvalid, "--timeout %s: use a time above zero", timeout)
			}
			stop := func() {}
			if level == "object" {
				stop = c.volumeProgress(ctx, node, "wait", args[0])
			}
			v, err := node.WaitVolume(ctx, args[0], api.WaitVolume{Level: level, TimeoutSeconds: timeout.Seconds()})
			stop()
			if err != nil {
				return err
			}
			if level == "object" && v.BucketDownSince != nil {
				c.warn("the bucket of volume %s does not answer at present: see \"isergate status\"", v.Name)
			}
			return c.print(v, func(w io.Writer) {
				fmt.Fprintf(w, "Everything that volume %s acknowledged before the call is at level %s.\n", v.Name, level)
			})
		}),
	}
	cmd.Flags().StringVar(&level, "level", "", "local, quorum or object")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "give up after this long, with exit code 1")
	if err := cmd.MarkFlagRequired("level"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

func (c *cli) volumeRestore() *cobra.Command {
	var r api.RestoreVolume
	cmd := &cobra.Command{
		Use: "restore --from URL --volume UUID|NAME", Short: "Take a volume over from its bucket alone", Args: cobra.NoArgs,
		Long: `Take a volume over from its bucket alone. Whoever served it before is fenced off. The volume has the default
persistence policy and is not mapped; the report says up to which write it is whole.`,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			began := time.Now()
			stop := c.progress(func() string {
				if passed := time.Since(began).Round(5 * time.Second); passed >= 5*time.Second {
					return fmt.Sprintf("restore: reading the log of %s, for %s", r.Volume, passed)
				}
				return "restore: reading the log of " + r.Volume
			})
			restored, err := node.RestoreVolume(ctx, r)
			stop()
			if err != nil {
				return err
			}
			return c.print(restored, func(w io.Writer) { printRestored(w, restored) })
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&r.From, "from", "", "bucket URL")
	flags.StringVar(&r.Volume, "volume", "", "UUID or name of the volume")
	flags.StringVar(&r.As, "as", "", "new name (default: as it was)")
	for _, name := range []string{"from", "volume"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flags are defined above
		}
	}
	return cmd
}

func printRestored(w io.Writer, r api.Restored) {
	row(w, "Volume", fmt.Sprintf("%s (%s), %s", r.Volume.Name, r.Volume.UUID, size(r.Volume.SizeBytes)))
	row(w, "Restored to", fmt.Sprintf("LSN %d, %s", r.LSN, strings.TrimSuffix(when(&r.Time), "-")))
	row(w, "Epoch, generation", fmt.Sprintf("%d, %d", r.Epoch, r.Generation))
	row(w, "Objects read", r.Objects)
	row(w, "Gap", dash(r.Gap))
	row(w, "Contract", r.Volume.Contract)
}
