package main

import "fmt"

// Carried sets one load over iSER against the same over iSCSI/TCP, and both against a bare TCP connection.
type Carried struct {
	Load  string `json:"load"`
	Depth int    `json:"depth"`
	Class string `json:"class"` // volume and CRC
	// The ratios are iSER divided by iSCSI/TCP, each the median of the ratios within one round: above 1 is good for Rate and bad for the
	// others. CPU is that of both processes together for each byte, TargetCPU that of the target's alone.
	Rate      float64 `json:"rate_ratio"`
	P50       float64 `json:"p50_ratio"`
	P99       float64 `json:"p99_ratio"`
	CPU       float64 `json:"cpu_ratio"`
	TargetCPU float64 `json:"target_cpu_ratio"`
	// Limit is iSER divided by the bare stream. 0: not measured.
	Limit float64 `json:"iser_to_stream_ratio"`

	ISER   Sample `json:"iser"` // medians
	TCP    Sample `json:"tcp"`
	Stream Sample `json:"stream"`
}

// bothCPU is the CPU of both processes for one operation.
func bothCPU(s *Sample) float64 { return s.CPUPerOp + s.ClientCPUPerOp }

// carried pairs the measurements of the transports.
func (r *Report) carried() []*Carried {
	var out []*Carried
	for _, iser := range r.Measurements {
		tcp := r.find(ID{iser.Load, iser.Depth, iser.Class, overTCP})
		if iser.Target != overISER || tcp == nil {
			continue
		}
		ratio := func(field func(*Sample) float64) float64 { return ratios(iser, tcp, field) }
		c := &Carried{Load: iser.Load, Depth: iser.Depth, Class: iser.Class, ISER: iser.Median, TCP: tcp.Median,
			Rate:      ratio(func(s *Sample) float64 { return s.PerSecond }),
			P50:       ratio(func(s *Sample) float64 { return s.P50 }),
			P99:       ratio(func(s *Sample) float64 { return s.P99 }),
			CPU:       ratio(bothCPU),
			TargetCPU: ratio(func(s *Sample) float64 { return s.CPUPerOp }),
		}
		if stream := r.find(ID{iser.Load, iser.Depth, classStream, rawStream}); stream != nil {
			c.Stream = stream.Median
			c.Limit = ratios(iser, stream, func(s *Sample) float64 { return s.PerSecond })
		}
		out = append(out, c)
	}
	return out
}

// transportTable arranges them.
func (r *Report) transportTable() table {
	t := table{title: "iSER over the software RNIC and iSCSI/TCP, isergate's initiator on both", rows: [][]string{{"load", "depth", "volume", "unit", "iSER", "TCP", "ratio",
		"iSER CPU", "TCP CPU", "CPU ratio", "target CPU ratio", "iSER p50", "TCP p50", "allocations iSER", "allocations TCP", "bare stream", "iSER / stream", "stream CPU"}}}
	for _, c := range r.Transports {
		wide := c.ISER.MBPerSecond > 0 && c.ISER.PerSecond > 0 && c.ISER.MBPerSecond/c.ISER.PerSecond > 0.1 // MB of an operation
		row := []string{c.Load, fmt.Sprint(c.Depth), c.Class}
		rate, cpu := func(s Sample) string { return number(s.PerSecond) }, func(s Sample) string { return number(bothCPU(&s)) }
		if wide {
			row = append(row, "MB/s, s/GB")
			rate = func(s Sample) string { return number(s.MBPerSecond) }
			cpu = func(s Sample) string {
				if s.MBPerSecond == 0 {
					return number(0)
				}
				return number(bothCPU(&s) * s.PerSecond / s.MBPerSecond / 1e3)
			}
		} else {
			row = append(row, "IOPS, µs/IO")
		}
		row = append(row, rate(c.ISER), rate(c.TCP), number(c.Rate), cpu(c.ISER), cpu(c.TCP), number(c.CPU), number(c.TargetCPU))
		for _, s := range []Sample{c.ISER, c.TCP} {
			row = append(row, micro(s.P50))
		}
		for _, s := range []Sample{c.ISER, c.TCP} {
			row = append(row, fmt.Sprintf("%.2f + %.2f", s.ClientAllocsPerOp, s.AllocsPerOp))
		}
		t.rows = append(t.rows, append(row, rate(c.Stream), number(c.Limit), cpu(c.Stream)))
	}
	return t
}

// aboutTransports says how the transports were measured.
func (r *Report) aboutTransports() []string {
	o := r.Options
	lines := append(r.where(),
		fmt.Sprintf("Medians of %d round(s), %v for each load. iSER, iSCSI/TCP and the bare stream are measured one after the other, in another order in each round; a ratio is iSER's figure divided by "+
			"the other's, the median of the ratios in each round.", o.Rounds, o.Time),
		"isergate's initiator on both, one session with one connection, over loopback. CPU is that of initiator and target together; allocations are those of initiator + target for each command.",
		"Null: a logical unit of isergate's that keeps nothing. Memory: a volume of 64 MiB with ack=memory in a gateway with its default configuration but for iser.no_crc, which destages while it is measured. "+
			"CRC on: header and data digests over TCP, the CRC of MPA frames over iSER.",
		"Bare stream: a TCP connection between two processes that carries a header of 48 bytes for each command and answer, and the data, with as many in flight; both ends move bytes and look at nothing.",
	)
	if o.Profile != "" {
		lines = append(lines, "Both were profiled in the first round.")
	}
	return lines
}
