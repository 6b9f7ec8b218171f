package tcp_test

import (
	"bytes"
	"log/slog"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Logins that fail, however many, are counted, and fill no disk with what is logged of them.
func TestLoginFloodInTheLog(t *testing.T) {
	var log lockedBuffer
	registry := prometheus.NewRegistry()
	r := newRig(t, func(_ *rig, o *iscsi.Options) {
		o.Logger, o.Registerer = slog.New(slog.NewTextHandler(&log, nil)), registry
	})
	const attempts = 300
	for range attempts {
		c := r.dial()
		if resp := c.tryLogin("TargetName=iqn.2001-01.com.example:nothing"); resp.Status != pdu.LoginNotFound {
			t.Fatal(resp.Status)
		}
		c.closed() // so that it is no login in progress any more
		c.c.Close()
	}
	await(t, "all logins are accounted for", func() bool {
		unlogged := 0.0
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() != "isergate_iscsi_unlogged_total" {
				continue
			}
			for _, m := range f.GetMetric() {
				if m.GetLabel()[0].GetValue() == "failed login" {
					unlogged = m.GetCounter().GetValue()
				}
			}
		}
		logged := log.count("login failed")
		return float64(logged)+unlogged == attempts && logged < attempts/2
	})
	// What matters still gets through: another kind of event.
	r.ready().c.Close()
	await(t, "a login that succeeds is logged", func() bool { return log.count("msg=login ") > 0 })
}

// lockedBuffer is a log that may be read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  []byte // guarded by mu
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.b = append(b.b, p...)
	return len(p), nil
}

func (b *lockedBuffer) count(s string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Count(b.b, []byte(s))
}
