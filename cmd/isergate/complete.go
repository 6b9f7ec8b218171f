package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
)

// completionTimeout bounds how long a press of the tab key asks the gateway.
const completionTimeout = time.Second

// flagWords are the values of flags that take one of a few words.
var flagWords = map[string][]string{
	"ack":        {"memory", "local", "object"},
	"flush":      {"memory", "local", "object"},
	"level":      {"local", "object"},
	"on-unmet":   {"block", "error", "degrade"},
	"block-size": {"512", "4096"},
	"output":     {"table", "json"},
	"log-level":  {"debug", "info", "warn", "error"},
	"log-format": {"text", "json"},
}

// completions has the shell complete words, and the names of volumes and targets that the usage of a
// command asks for, instead of files.
func (c *cli) completions(cmd *cobra.Command) {
	for name, words := range flagWords {
		if cmd.Flags().Lookup(name) != nil || cmd.PersistentFlags().Lookup(name) != nil {
			_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
		}
	}
	for _, sub := range cmd.Commands() {
		c.completions(sub)
	}
	if cmd.HasSubCommands() {
		return
	}
	takes := strings.Fields(cmd.Use)[1:]
	creates := cmd.Name() == "create"
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if creates || len(args) >= len(takes) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return c.names(cmd.Context(), strings.Trim(takes[len(args)], "[]")), cobra.ShellCompDirectiveNoFileComp
	}
}

// names asks the gateway for what an argument may be. Without an answer there is nothing to complete.
func (c *cli) names(ctx context.Context, argument string) (names []string) {
	node, err := c.connect()
	if err != nil {
		return nil
	}
	defer node.Close()
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	switch argument {
	case "NAME", "VOLUME":
		var volumes []api.Volume
		if volumes, err = node.Volumes(ctx); err == nil {
			for _, v := range volumes {
				names = append(names, v.Name)
			}
		}
	case "IQN":
		var targets []api.Target
		if targets, err = node.Targets(ctx); err == nil {
			for _, t := range targets {
				names = append(names, t.Name)
			}
		}
	case "URL":
		var status api.Status
		if status, err = node.Status(ctx); err != nil || len(status.Portals) == 0 {
			return nil
		}
		var targets []api.Target
		if targets, err = node.Targets(ctx); err == nil {
			for _, t := range targets {
				for _, l := range t.LUNs {
					lun := fmt.Sprintf("://%s/%s/%d", status.Portals[0].Listen, t.Name, l.Number)
					if status.Portals[0].Transport != config.TransportISER {
						names = append(names, "iscsi"+lun)
					}
					if status.Portals[0].Transport != config.TransportTCP {
						names = append(names, "iser"+lun)
					}
				}
			}
		}
	}
	return names
}
