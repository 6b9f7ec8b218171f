package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway/api"
)

func (c *cli) target() *cobra.Command {
	create := &cobra.Command{
		Use: "create IQN", Short: "Create a target", Args: cobra.ExactArgs(1),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			t, err := node.CreateTarget(ctx, api.CreateTarget{Name: args[0]})
			if err != nil {
				return err
			}
			return c.print(t, func(w io.Writer) { fmt.Fprintf(w, "Target %s created.\n", t.Name) })
		}),
	}
	list := &cobra.Command{
		Use: "list", Short: "List targets with their LUNs", Args: cobra.NoArgs,
		RunE: c.asks(func(ctx context.Context, node *api.Client, _ []string) error {
			targets, err := node.Targets(ctx)
			if err != nil {
				return err
			}
			return c.print(targets, func(w io.Writer) { printTargets(w, targets) })
		}),
	}
	remove := &cobra.Command{
		Use: "delete IQN", Short: "Delete a target, its LUN map and its ACL; volumes stay", Args: cobra.ExactArgs(1),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			if err := node.DeleteTarget(ctx, args[0]); err != nil {
				return err
			}
			return c.done("Target %s deleted.", args[0])
		}),
	}
	return group("target", "Targets, which initiators reach over iSCSI and iSER", create, list, remove)
}

func printTargets(w io.Writer, targets []api.Target) {
	row(w, "TARGET", "LUN", "VOLUME", "ACCESS", "SESSIONS")
	for _, t := range targets {
		access := fmt.Sprintf("%d ACL entries", len(t.ACLs))
		if len(t.ACLs) == 1 {
			access = "1 ACL entry"
		}
		if t.Open {
			access = "open"
		}
		if len(t.LUNs) == 0 {
			row(w, t.Name, "-", "-", access, t.Sessions)
		}
		for _, l := range t.LUNs {
			row(w, t.Name, l.Number, l.Volume, access, t.Sessions)
		}
	}
}

// done prints what was done, as a sentence or as JSON.
func (c *cli) done(format string, args ...any) error {
	return c.print(struct {
		Done bool `json:"done"`
	}{true}, func(w io.Writer) { fmt.Fprintf(w, format+"\n", args...) })
}

// lunFlag is --lun, which has no default.
func lunFlag(cmd *cobra.Command) func() *int {
	number := cmd.Flags().Int("lun", 0, "logical unit number (default: the lowest that is free)")
	return func() *int {
		if cmd.Flags().Changed("lun") {
			return number
		}
		return nil
	}
}

func (c *cli) lun() *cobra.Command {
	mapping := &cobra.Command{Use: "map IQN VOLUME", Short: "Map a volume at a target", Args: cobra.ExactArgs(2)}
	number := lunFlag(mapping)
	mapping.RunE = c.asks(func(ctx context.Context, node *api.Client, args []string) error {
		l, err := node.MapLUN(ctx, args[0], api.MapLUN{Volume: args[1], LUN: number()})
		if err != nil {
			return err
		}
		return c.print(l, func(w io.Writer) { fmt.Fprintf(w, "Volume %s is LUN %d of %s.\n", l.Volume, l.Number, args[0]) })
	})
	unmap := &cobra.Command{
		Use: "unmap IQN LUN", Short: "Take a LUN away; its volume stays", Args: cobra.ExactArgs(2),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			number, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil {
				return api.Errorf(api.CodeInvalid, "%q is no LUN: use a number from 0 to 255", args[1])
			}
			if err := node.UnmapLUN(ctx, args[0], uint16(number)); err != nil {
				return err
			}
			return c.done("LUN %d of %s is unmapped.", number, args[0])
		}),
	}
	return group("lun", "LUN maps", mapping, unmap)
}

func (c *cli) acl() *cobra.Command {
	var user, secretFile, mutualUser, mutualSecretFile string
	add := &cobra.Command{
		Use: "add IQN INITIATOR", Short: "Let an initiator in, or replace its entry", Args: cobra.ExactArgs(2),
		Long: `Let an initiator in, or replace its entry. With --chap-user it has to authenticate by CHAP; with
--mutual-user the target authenticates too. Secrets are at least 12 bytes and differ from each other.`,
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			if mutualUser != "" && user == "" {
				return api.Errorf(api.CodeInvalid, "--mutual-user needs --chap-user and --chap-secret-file too: only an initiator that authenticates can ask the target to")
			}
			r := api.AddACL{Initiator: args[1], CHAPUser: user, MutualUser: mutualUser}
			var err error
			if r.CHAPSecret, err = readSecret("--chap-secret-file", secretFile); err != nil {
				return err
			}
			if r.MutualSecret, err = readSecret("--mutual-secret-file", mutualSecretFile); err != nil {
				return err
			}
			entry, err := node.AddACL(ctx, args[0], r)
			if err != nil {
				return err
			}
			return c.print(entry, func(w io.Writer) { fmt.Fprintln(w, added(entry, args[0])) })
		}),
	}
	flags := add.Flags()
	flags.StringVar(&user, "chap-user", "", "CHAP user name of the initiator")
	flags.StringVar(&secretFile, "chap-secret-file", "", "file with its secret")
	flags.StringVar(&mutualUser, "mutual-user", "", "CHAP user name of the target")
	flags.StringVar(&mutualSecretFile, "mutual-secret-file", "", "file with its secret")
	add.MarkFlagsRequiredTogether("chap-user", "chap-secret-file")
	add.MarkFlagsRequiredTogether("mutual-user", "mutual-secret-file")

	list := &cobra.Command{
		Use: "list [IQN]", Short: "List who may log in", Args: cobra.MaximumNArgs(1),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			targets, err := node.Targets(ctx)
			if err != nil {
				return err
			}
			return c.printACLs(targets, args)
		}),
	}
	remove := &cobra.Command{
		Use: "remove IQN INITIATOR", Short: "Shut an initiator out, and end its sessions", Args: cobra.ExactArgs(2),
		RunE: c.asks(func(ctx context.Context, node *api.Client, args []string) error {
			if err := node.RemoveACL(ctx, args[0], args[1]); err != nil {
				return err
			}
			return c.done("%s may not log in to %s any more.", args[1], args[0])
		}),
	}
	return group("acl", "Which initiators may log in", add, list, remove)
}

func (c *cli) printACLs(targets []api.Target, only []string) error {
	type entry struct {
		Target string `json:"target"`
		api.ACL
	}
	entries, found := []entry{}, len(only) == 0
	for _, t := range targets {
		if len(only) > 0 && t.Name != only[0] {
			continue
		}
		found = true
		for _, a := range t.ACLs {
			entries = append(entries, entry{t.Name, a})
		}
	}
	if !found {
		return api.Errorf(api.CodeNotFound, "there is no target %q: see \"isergate target list\"", only[0])
	}
	return c.print(entries, func(w io.Writer) {
		row(w, "TARGET", "INITIATOR", "CHAP USER", "MUTUAL USER")
		for _, e := range entries {
			row(w, e.Target, e.Initiator, dash(e.CHAPUser), dash(e.MutualUser))
		}
	})
}

// added says what an entry that was added lets its initiator do, and what it changed.
func added(a api.ACL, target string) string {
	text := fmt.Sprintf("%s may log in to %s%s", a.Initiator, target, proof(a))
	switch old := a.Replaced; {
	case old == nil:
	case old.CHAPUser != "" && a.CHAPUser == "":
		text += "; this replaced its entry" + proof(*old) + ": it now needs no authentication"
	default:
		text += "; this replaced its entry" + proof(*old)
	}
	return text + "."
}

func proof(a api.ACL) string {
	switch {
	case a.MutualUser != "":
		return " with mutual CHAP"
	case a.CHAPUser != "":
		return " with CHAP"
	}
	return " without authentication"
}

// readSecret reads a secret from a file, less one line end.
func readSecret(flag, path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, api.Errorf(api.CodeInvalid, "%s: %w", flag, err)
	}
	text = bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
	if bytes.ContainsAny(text, "\r\n\x00") {
		return nil, api.Errorf(api.CodeInvalid, "%s: %s is not one line of text", flag, path)
	}
	return text, nil
}
