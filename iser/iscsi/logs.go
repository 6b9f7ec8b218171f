package iscsi

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser/internal/loglimit"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Of what anybody who reaches a portal can cause, logBurst lines are logged, and then one for each logInterval.
const (
	logBurst    = 20
	logInterval = time.Second
)

// logs bound the lines that initiators cause, each kind for itself.
type logs struct{ begin, failed, end, manage boundedLog }

func newLogs(r prometheus.Registerer) *logs {
	unlogged := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "isergate_iscsi_unlogged_total", Help: "Events that were not logged because there were too many of their kind."}, []string{"event"})
	if r != nil {
		r.MustRegister(unlogged)
	}
	l := new(logs)
	l.begin.init(unlogged, "login")
	l.failed.init(unlogged, "failed login")
	l.end.init(unlogged, "connection end")
	l.manage.init(unlogged, "task management")
	return l
}

type boundedLog struct {
	limit    loglimit.Limit
	unlogged prometheus.Counter
}

func (b *boundedLog) init(unlogged *prometheus.CounterVec, event string) {
	b.limit.Init(logBurst, logInterval)
	b.unlogged = unlogged.WithLabelValues(event)
}

// log writes a line, or counts it. The next line says how many came before it that were only counted.
func (b *boundedLog) log(to *slog.Logger, level slog.Level, msg string, attrs ...any) {
	left, ok := b.limit.Allow()
	if !ok {
		b.unlogged.Inc()
		return
	}
	if left > 0 {
		attrs = append(attrs, "unlogged", left)
	}
	to.Log(context.Background(), level, msg, attrs...)
}

// lunText is a LUN as administrators know it, or its eight bytes if it is none of ours.
func lunText(l pdu.LUN) string {
	if n, ok := l.Number(); ok {
		return strconv.Itoa(int(n))
	}
	return fmt.Sprintf("0x%016x", uint64(l))
}
