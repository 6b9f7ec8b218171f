package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/isergate/isergate/gateway/units"
)

// print writes a result: as JSON if that was asked for, else by table.
func (c *cli) print(result any, table func(w io.Writer)) error {
	if c.output == "json" {
		encoder := json.NewEncoder(c.stdout)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(result)
	}
	w := tabwriter.NewWriter(c.stdout, 0, 8, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// row writes one line of a table.
func row(w io.Writer, cells ...any) {
	for i, cell := range cells {
		if i > 0 {
			fmt.Fprint(w, "\t")
		}
		fmt.Fprint(w, cell)
	}
	fmt.Fprintln(w)
}

func size(bytes int64) string { return units.Size(bytes).Human() }

// when prints a time, or a dash for none.
func when(at *time.Time) string {
	if at == nil || at.IsZero() {
		return "-"
	}
	return at.Local().Format("2006-01-02 15:04:05")
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// dash prints text, or a dash for none.
func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func list(items []string) string { return dash(strings.Join(items, ", ")) }

// progress calls line now and then until stop is called, and prints what it returns
// when that is news. An empty line prints nothing.
func (c *cli) progress(line func() string) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		last := ""
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				if now := line(); now != "" && now != last {
					fmt.Fprintln(c.stderr, now)
					last = now
				}
			}
		}
	}()
	return func() {
		close(done)
		<-ended
	}
}
