package portal

import (
	"context"
	"log/slog"
	"net"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iwarp"
	"github.com/isergate/isergate/iser/rdma"
)

// ISEROptions are what NewISER needs.
type ISEROptions struct {
	// Regions is all the memory in which buffers of the logical units lie. It must stay until Close returns.
	Regions [][]byte
	// Memory is what connections receive commands and unsolicited data into. It bounds how many there can be.
	Memory rdma.Memory
	// NoCRC does not ask initiators for CRCs in MPA frames. They are used nevertheless if an initiator asks.
	NoCRC bool

	Registerer prometheus.Registerer // nil: no metrics
	Logger     *slog.Logger          // nil: slog.Default
}

// ISER is what the portals of a node share to serve iSER: one software RNIC, and the iSER target over it.
type ISER struct {
	provider *iwarp.Provider
	target   *iser.Target
}

// NewISER registers the memory, and serves nothing yet.
func NewISER(o ISEROptions) (*ISER, error) {
	provider, err := iwarp.New(iwarp.Options{NoCRC: o.NoCRC})
	if err != nil {
		return nil, err
	}
	target, err := iser.NewTarget(iser.Options{Provider: provider, Regions: o.Regions, Memory: o.Memory, Logger: o.Logger})
	if err != nil {
		return nil, err
	}
	if o.Registerer != nil {
		gauge := func(name, help string, value func(iser.Usage) int64) {
			o.Registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
				func() float64 { return float64(value(target.Usage())) }))
		}
		gauge("isergate_iser_memory_bytes", "Memory that iSER connections receive into, in use.", func(u iser.Usage) int64 { return u.UsedBytes })
		gauge("isergate_iser_memory_limit_bytes", "Memory that iSER connections receive into, at most.", func(u iser.Usage) int64 { return u.CapacityBytes })
	}
	return &ISER{provider: provider, target: target}, nil
}

// Close waits, as long as ctx allows, until all iSER connections, which the iscsi.Server closes before, have given back what they used. When it
// has returned nil, none of the memory is touched any more.
func (i *ISER) Close(ctx context.Context) error { return i.target.Close(ctx) }

// respond takes the MPA request of a connection of which a part was read. It owns nc unless it fails.
func (i *ISER) respond(ctx context.Context, nc net.Conn, read []byte) (*watched, error) {
	r, err := i.provider.Respond(ctx, nc, read)
	if err != nil {
		return nil, err
	}
	return &watched{Request: r}, nil
}

var _ iscsi.Datamover = (*iser.Conn)(nil)
