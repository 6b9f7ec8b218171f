package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/isergate/isergate/iser/initiator/bench"
)

// Names of targets.
const (
	ours       = "isergate"
	peerTgt    = "tgt"
	rawJournal = "append+fdatasync"
	rawPut     = "SDK PUT"
	rawGet     = "SDK ranged GET"
)

// ID names a measurement.
type ID struct {
	Load   string `json:"load"`
	Depth  int    `json:"depth"` // operations in flight
	Class  string `json:"class"`
	Target string `json:"target"`
}

func (id ID) String() string {
	return fmt.Sprintf("%s depth=%d %s %s", id.Load, id.Depth, id.Class, id.Target)
}

// Sample is one measurement. MB and GB are 10^6 and 10^9 bytes.
type Sample struct {
	Operations  uint64  `json:"operations"`
	PerSecond   float64 `json:"per_second"`
	MBPerSecond float64 `json:"mb_per_second"`
	P50         float64 `json:"p50_us"` // 0: not measured
	P99         float64 `json:"p99_us"`
	// CPU of the target's process while the load was on.
	CPUPerOp float64 `json:"cpu_us_per_operation"`
	CPUPerGB float64 `json:"cpu_s_per_gb"`
	// CPUPerOpSettled is what a write has cost in the end: until it is destaged to the bucket (isergate), or flushed (tgt). 0 for reads.
	CPUPerOpSettled float64 `json:"cpu_us_per_operation_settled,omitempty"`
	// ClientCPUPerOp is the CPU of the load generator.
	ClientCPUPerOp float64 `json:"client_cpu_us_per_operation,omitempty"`
	// Allocations on the heap of the target's process, and of the load generator; measured with the transports only.
	AllocsPerOp       float64 `json:"allocations_per_operation,omitempty"`
	ClientAllocsPerOp float64 `json:"client_allocations_per_operation,omitempty"`
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func rawSample(r rawResult) Sample {
	s := Sample{Operations: r.Operations, P50: micros(r.P50), P99: micros(r.P99)}
	if seconds := r.Elapsed.Seconds(); seconds > 0 {
		s.PerSecond, s.MBPerSecond = float64(r.Operations)/seconds, float64(r.Bytes)/seconds/1e6
	}
	if r.Operations > 0 && r.Bytes > 0 {
		s.CPUPerOp, s.CPUPerGB = micros(r.CPU)/float64(r.Operations), r.CPU.Seconds()/float64(r.Bytes)*1e9
	}
	return s
}

func benchSample(r *bench.Result, cpu time.Duration) Sample {
	s := rawSample(rawResult{Operations: r.Operations, Bytes: r.Bytes, Elapsed: r.Elapsed, CPU: cpu, P50: r.Latency.P50, P99: r.Latency.P99})
	if r.Operations > 0 {
		s.ClientCPUPerOp = micros(r.CPU) / float64(r.Operations)
	}
	return s
}

// Series is all measurements of one ID, one for each round.
type Series struct {
	ID
	Samples []Sample `json:"samples"`
	Median  Sample   `json:"median"` // of each field by itself
	// Slowest and Fastest are the extremes of PerSecond.
	Slowest float64 `json:"slowest_per_second"`
	Fastest float64 `json:"fastest_per_second"`
}

// Comparison sets isergate against something else under the same load.
type Comparison struct {
	Load  string `json:"load"`
	Depth int    `json:"depth"`
	Class string `json:"class"`
	Peer  string `json:"peer"`
	// The ratios are isergate divided by peer, each the median of the ratios within one round: above 1 is good for Rate and bad for
	// the others. 0: not measured.
	Rate     float64 `json:"rate_ratio"`
	P50      float64 `json:"p50_ratio"`
	P99      float64 `json:"p99_ratio"`
	CPU      float64 `json:"cpu_ratio"`
	Isergate Sample  `json:"isergate"` // medians
	Other    Sample  `json:"other"`
}

// Report is the result of a run.
type Report struct {
	Machine      Machine       `json:"machine"`
	Options      Options       `json:"options"`
	Notes        []string      `json:"notes"`
	Measurements []*Series     `json:"measurements"`
	Comparisons  []*Comparison `json:"comparisons"`
	Transports   []*Carried    `json:"transports"`
}

func (r *Report) find(id ID) *Series {
	for _, s := range r.Measurements {
		if s.ID == id {
			return s
		}
	}
	return nil
}

func (r *Report) add(id ID, s Sample) {
	series := r.find(id)
	if series == nil {
		series = &Series{ID: id}
		r.Measurements = append(r.Measurements, series)
	}
	series.Samples = append(series.Samples, s)
}

// median returns the middle value; of an even number, the mean of the middle two.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Clone(v)
	slices.Sort(v)
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}

// complete computes medians and ratios.
func (r *Report) complete() {
	for _, s := range r.Measurements {
		of := func(field func(*Sample) float64) float64 {
			v := make([]float64, len(s.Samples))
			for i := range s.Samples {
				v[i] = field(&s.Samples[i])
			}
			return median(v)
		}
		s.Median = Sample{
			Operations:      uint64(of(func(s *Sample) float64 { return float64(s.Operations) })),
			PerSecond:       of(func(s *Sample) float64 { return s.PerSecond }),
			MBPerSecond:     of(func(s *Sample) float64 { return s.MBPerSecond }),
			P50:             of(func(s *Sample) float64 { return s.P50 }),
			P99:             of(func(s *Sample) float64 { return s.P99 }),
			CPUPerOp:        of(func(s *Sample) float64 { return s.CPUPerOp }),
			CPUPerGB:        of(func(s *Sample) float64 { return s.CPUPerGB }),
			CPUPerOpSettled: of(func(s *Sample) float64 { return s.CPUPerOpSettled }),
			ClientCPUPerOp:  of(func(s *Sample) float64 { return s.ClientCPUPerOp }),

			AllocsPerOp:       of(func(s *Sample) float64 { return s.AllocsPerOp }),
			ClientAllocsPerOp: of(func(s *Sample) float64 { return s.ClientAllocsPerOp }),
		}
		s.Slowest, s.Fastest = s.Samples[0].PerSecond, s.Samples[0].PerSecond
		for _, x := range s.Samples {
			s.Slowest, s.Fastest = min(s.Slowest, x.PerSecond), max(s.Fastest, x.PerSecond)
		}
	}
	r.Transports = r.carried()
	r.Comparisons = nil
	for _, other := range r.Measurements {
		if other.Target == ours {
			continue
		}
		classes := []string{other.Class}
		if other.Class == classDurable {
			classes = append(classes, classHeld)
		}
		for _, class := range classes {
			if s := r.find(ID{other.Load, other.Depth, class, ours}); s != nil {
				r.Comparisons = append(r.Comparisons, compare(s, other))
			}
		}
	}
	var order []string
	for _, l := range loads() {
		order = append(order, l.name)
	}
	slices.SortStableFunc(r.Comparisons, func(a, b *Comparison) int {
		return cmp.Or(cmp.Compare(slices.Index(peers, a.Peer), slices.Index(peers, b.Peer)),
			cmp.Compare(slices.Index(order, a.Load), slices.Index(order, b.Load)), cmp.Compare(a.Depth, b.Depth), cmp.Compare(a.Class, b.Class))
	})
}

// peers is the order of the comparisons.
var peers = []string{peerTgt, rawJournal, rawPut, rawGet}

// compare sets isergate's series against another.
func compare(ours, other *Series) *Comparison {
	ratio := func(field func(*Sample) float64) float64 { return ratios(ours, other, field) }
	c := &Comparison{Load: ours.Load, Depth: ours.Depth, Class: ours.Class, Peer: other.Target, Isergate: ours.Median, Other: other.Median,
		Rate: ratio(func(s *Sample) float64 { return s.MBPerSecond }),
		P50:  ratio(func(s *Sample) float64 { return s.P50 }),
		P99:  ratio(func(s *Sample) float64 { return s.P99 }),
		CPU:  ratio(func(s *Sample) float64 { return s.CPUPerGB }),
	}
	if c.Peer == rawGet { // a cold read gets more than it was asked for: operations are what compares
		c.Rate, c.CPU = ratio(func(s *Sample) float64 { return s.PerSecond }), ratio(func(s *Sample) float64 { return s.CPUPerOp })
	}
	return c
}

// ratios returns the median of the ratios of a and b within one round; 0: none.
func ratios(a, b *Series, field func(*Sample) float64) float64 {
	var v []float64
	for i := range min(len(a.Samples), len(b.Samples)) {
		if x, y := field(&a.Samples[i]), field(&b.Samples[i]); x > 0 && y > 0 {
			v = append(v, x/y)
		}
	}
	return median(v)
}

// json writes the report for programs.
func (r *Report) json(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// table is what people read.
type table struct {
	title string
	rows  [][]string // the first is the head
}

// number formats v with about three digits.
func number(v float64) string {
	switch {
	case v == 0:
		return "-"
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	digits := fmt.Sprintf("%.0f", v)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

func micro(us float64) string {
	if us >= 1000 {
		return number(us/1000) + " ms"
	}
	if us == 0 {
		return "-"
	}
	return number(us) + " µs"
}

// tables arranges the comparisons.
func (r *Report) tables() []table {
	var out []table
	for _, kind := range []struct {
		title string
		peers []string
		// wide loads are compared by bytes, the others by operations
		head []string
	}{
		{"isergate and tgt over iSCSI", []string{peerTgt},
			[]string{"load", "depth", "written is", "unit", "isergate", "tgt", "ratio", "isergate p50 / p99", "tgt p50 / p99", "isergate CPU", "tgt CPU", "CPU ratio", "CPU once destaged"}},
		{"isergate over iSCSI and the raw limits", []string{rawJournal, rawPut, rawGet},
			[]string{"load", "depth", "limit", "unit", "isergate", "limit", "ratio", "isergate p50 / p99", "limit p50 / p99", "isergate CPU", "limit CPU", "CPU ratio", "CPU once destaged"}},
	} {
		t := table{title: kind.title, rows: [][]string{kind.head}}
		for _, c := range r.Comparisons {
			if !slices.Contains(kind.peers, c.Peer) {
				continue
			}
			load, third := c.Load, c.Class
			switch c.Class {
			case classRead:
				third = "-"
			case classCold:
				load = "cold " + load
			case classDestage:
				load = "destage " + load
			}
			if c.Peer != peerTgt {
				if third = c.Peer; c.Class == classHeld {
					load += ", nothing destaged"
				}
			}
			byBytes := c.Class == classDestage || strings.HasPrefix(c.Load, "256 KiB")
			row := []string{load, fmt.Sprint(c.Depth), third}
			if byBytes {
				row = append(row, "MB/s, s/GB", number(c.Isergate.MBPerSecond), number(c.Other.MBPerSecond))
			} else {
				row = append(row, "IOPS, µs/IO", number(c.Isergate.PerSecond), number(c.Other.PerSecond))
			}
			latency := func(s Sample) string {
				if s.P50 == 0 {
					return "-"
				}
				return micro(s.P50) + " / " + micro(s.P99)
			}
			row = append(row, number(c.Rate), latency(c.Isergate), latency(c.Other))
			settled := c.Isergate.CPUPerOpSettled
			if byBytes {
				row = append(row, number(c.Isergate.CPUPerGB), number(c.Other.CPUPerGB), number(c.CPU))
				settled *= c.Isergate.CPUPerGB / max(c.Isergate.CPUPerOp, 1e-9)
			} else {
				row = append(row, number(c.Isergate.CPUPerOp), number(c.Other.CPUPerOp), number(c.CPU))
			}
			t.rows = append(t.rows, append(row, number(settled)))
		}
		if len(t.rows) > 1 {
			out = append(out, t)
		}
	}
	return out
}

// where says where the figures come from.
func (r *Report) where() []string {
	m := r.Machine
	return []string{
		fmt.Sprintf("%s. %d cores (%s), %d GiB, Linux %s, %s, %s, %s.", m.Time.Format(time.DateOnly), m.Cores, m.CPU, (m.MemoryMiB+512)>>10, m.Kernel, m.FileSystem, m.Go, m.Isergate),
		fmt.Sprintf("Load average %s before, %s after, niceness %d: what else runs on the machine is in the figures; the ratios compare within one round.", m.LoadBefore, m.LoadAfter, m.Nice),
	}
}

// about says what was measured, and how.
func (r *Report) about() []string {
	m, o := r.Machine, r.Options
	lines := append(r.where(),
		fmt.Sprintf("Medians of %d round(s), %v for each load, all targets in turn in each round; client and targets share the machine, over loopback. "+
			"A ratio is isergate's figure divided by the other's: the median of the ratios in each round, which on a busy machine is not the ratio of the medians. "+
			"CPU is that of the target's process. LUNs of %d MiB: tgt has them in the page cache, isergate what is read in its read cache, 128 MiB of it in memory and the rest in a file.", o.Rounds, o.Time, o.Size>>20),
		"isergate: default configuration, bucket in a directory on the same disk; it destages while it is measured. "+
			"Volatile is ack=memory, durable ack=local. \"CPU once destaged\" includes all of the destaging. "+
			"\"Nothing destaged\" is ack=local while the object store does not answer.",
	)
	if m.Tgt != "" {
		lines = append(lines, fmt.Sprintf("tgt %s: a file as LUN, session parameters as isergate's. Volatile is its default, the page cache (WCE=1); durable is write-cache off (WCE=0, fdatasync after each write).", m.Tgt))
	}
	lines = append(lines, rawJournal+": 4 KiB blocks to a pre-zeroed file, one write and one fdatasync for all that wait; no network, no checksum, no index.")
	if m.Store != "" {
		lines = append(lines, fmt.Sprintf("%s: objects of the same sizes and number in flight, to the same server (%s, loopback). %s: cold sequential reads against ranges of 256 KiB, cold random ones against ranges of 64 KiB, "+
			"the smallest piece of an object that can be verified.", rawPut, m.Store, rawGet))
	}
	if o.Profile != "" {
		lines = append(lines, "isergate was profiled in the first round.")
	}
	return append(lines, r.Notes...)
}

// section is a part of the report with a place of its own in the README, between two marks.
type section struct {
	begin, end string
	tables     []table
	about      []string
}

// sections returns what was measured.
func (r *Report) sections() []section {
	var out []section
	if t := r.tables(); len(t) > 0 || len(r.Transports) == 0 {
		out = append(out, section{"<!-- bench begin -->", "<!-- bench end -->", t, r.about()})
	}
	if len(r.Transports) > 0 {
		out = append(out, section{"<!-- bench transports begin -->", "<!-- bench transports end -->", []table{r.transportTable()}, r.aboutTransports()})
	}
	return out
}

// text writes the report for people.
func (r *Report) text(w io.Writer) error {
	for _, s := range r.sections() {
		for _, t := range s.tables {
			fmt.Fprintf(w, "%s\n", t.title)
			columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
			for _, row := range t.rows {
				fmt.Fprintln(columns, strings.Join(row, "\t"))
			}
			if err := columns.Flush(); err != nil {
				return err
			}
			fmt.Fprintln(w)
		}
		for _, line := range s.about {
			fmt.Fprintln(w, line)
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	return nil
}

// markdown returns the section for the README, marks included.
func (s section) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", s.begin)
	for _, t := range s.tables {
		fmt.Fprintf(&b, "%s:\n\n", t.title)
		for i, row := range t.rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", len(row)))
			}
		}
		b.WriteString("\n")
	}
	for _, line := range s.about {
		fmt.Fprintf(&b, "- %s\n", line)
	}
	fmt.Fprintf(&b, "%s\n", s.end)
	return b.String()
}

// markdown returns the report for the README.
func (r *Report) markdown() string {
	var b strings.Builder
	for _, s := range r.sections() {
		b.WriteString(s.markdown())
	}
	return b.String()
}

// replaceIn returns text with what is between the marks of each section replaced by it.
func (r *Report) replaceIn(text string) (string, error) {
	for _, s := range r.sections() {
		before, rest, found := strings.Cut(text, s.begin)
		_, after, closed := strings.Cut(rest, s.end)
		if !found || !closed {
			return "", fmt.Errorf("no %s and %s", s.begin, s.end)
		}
		text = before + strings.TrimSuffix(s.markdown(), "\n") + after
	}
	return text, nil
}
