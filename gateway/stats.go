package gateway

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser/scsi"
)

// op is a kind of work that a logical unit asks of a volume.
type op int

const (
	opRead op = iota
	opWrite
	opFlush
	opDeallocate
	opWriteSame
	ops
)

var opNames = [ops]string{"read", "write", "flush", "deallocate", "write_same"}

// result is how it ended, as metrics tell it.
type result int

const (
	resultOK    result = iota
	resultBusy         // back-pressure: the initiator tries again
	resultError        // everything else
	results
)

var resultNames = [results]string{"ok", "busy", "error"}

// statsVecs are the metrics of all volumes of a node.
type statsVecs struct {
	operations *prometheus.CounterVec
	bytes      *prometheus.CounterVec
	duration   *prometheus.HistogramVec
}

func newStatsVecs(r prometheus.Registerer) *statsVecs {
	s := &statsVecs{
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_volume_operations_total", Help: "Operations of logical units on volumes, by how they ended.",
		}, []string{"volume", "op", "result"}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_volume_bytes_total", Help: "Bytes of operations that ended well.",
		}, []string{"volume", "op"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "isergate_volume_operation_duration_seconds", Help: "Time of operations; of writes, from the reservation to the acknowledgement.",
			Buckets: []float64{.00005, .0001, .0002, .0005, .001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20},
		}, []string{"volume", "op"}),
	}
	r.MustRegister(s.operations, s.bytes, s.duration)
	return s
}

// forget drops the series of a volume.
func (s *statsVecs) forget(name string) {
	label := prometheus.Labels{"volume": name}
	s.operations.DeletePartialMatch(label)
	s.bytes.DeletePartialMatch(label)
	s.duration.DeletePartialMatch(label)
}

// volumeStats are the metrics of one volume, looked up once.
type volumeStats struct {
	operations [ops][results]prometheus.Counter
	bytes      [ops]prometheus.Counter
	duration   [ops]prometheus.Observer
}

func (s *statsVecs) of(name string) *volumeStats {
	v := &volumeStats{}
	for o, opName := range opNames {
		for r, resultName := range resultNames {
			v.operations[o][r] = s.operations.WithLabelValues(name, opName, resultName)
		}
		v.bytes[o] = s.bytes.WithLabelValues(name, opName)
		v.duration[o] = s.duration.WithLabelValues(name, opName)
	}
	return v
}

// done counts one operation.
func (s *volumeStats) done(o op, bytes int64, began time.Time, err error) {
	r := resultOK
	switch {
	case err == nil:
		s.bytes[o].Add(float64(bytes))
	case errors.Is(err, scsi.ErrBusy):
		r = resultBusy
	default:
		r = resultError
	}
	s.operations[o][r].Inc()
	s.duration[o].Observe(time.Since(began).Seconds())
}
