package portal

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser/rdma"
)

// Metrics are the counters of the portals of one node.
type Metrics struct {
	first    *prometheus.CounterVec
	requests *prometheus.CounterVec
	ends     *prometheus.CounterVec
	open     prometheus.Gauge
}

// What the first bytes of a connection were.
const (
	firstISCSI   = "iscsi"
	firstMPA     = "mpa"
	firstNothing = "nothing" // too few before the connection ended or the time was over
	firstRefused = "refused" // not read: a limit
)

// How an iSER connection began.
const (
	byMessage = "message" // MPA from the first byte
	byStream  = "stream"  // RDMAExtensions=Yes over TCP
)

// What became of it.
const (
	established = "established"
	noMemory    = "no resources"
	noRequest   = "no MPA request" // or none that is valid
	notServed   = "not served"     // by this portal
	failed      = "failed"
)

// NewMetrics returns counters that are registered with r; nil means that nobody reads them.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		first: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_portal_connections_total", Help: "TCP connections by their first bytes: iscsi, mpa, nothing, or refused because of a limit."}, []string{"first"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iser_connections_total", Help: "Attempts to make an iSER connection, by the form of login and by result."}, []string{"login", "result"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iser_disconnects_total", Help: "iSER connections that ended, by reason."}, []string{"reason"}),
		open: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "isergate_iser_connections", Help: "iSER connections, logins in progress included."}),
	}
	// Every series is there from the start, with 0: a rate over the first event is seen.
	for _, first := range []string{firstISCSI, firstMPA, firstNothing, firstRefused} {
		m.first.WithLabelValues(first)
	}
	for _, result := range []string{established, noMemory, noRequest, failed} {
		m.requests.WithLabelValues(byMessage, result)
		m.requests.WithLabelValues(byStream, result)
	}
	m.requests.WithLabelValues(byMessage, notServed)
	for _, why := range []string{"closed", "closed by the initiator", "terminated by the initiator", "access violation", "transport error", "other"} {
		m.ends.WithLabelValues(why)
	}
	if r != nil {
		r.MustRegister(m.first, m.requests, m.ends, m.open)
	}
	return m
}

// reason is the label of the first error of a queue pair.
func reason(err error) string {
	switch {
	case errors.Is(err, rdma.ErrDisconnected):
		return "closed"
	case errors.Is(err, rdma.ErrPeerClosed):
		return "closed by the initiator"
	case errors.Is(err, rdma.ErrRemote):
		return "terminated by the initiator"
	case errors.Is(err, rdma.ErrAccess):
		return "access violation"
	case errors.Is(err, rdma.ErrTransport):
		return "transport error"
	}
	return "other"
}

// watched is a request whose queue pair is counted until it ends.
type watched struct {
	rdma.Request
	qp rdma.QP
}

// CreateQP implements rdma.Endpoint.
func (w *watched) CreateQP(pd rdma.PD, attr rdma.QPAttr) (rdma.QP, error) {
	qp, err := w.Request.CreateQP(pd, attr)
	if err == nil {
		w.qp = qp
	}
	return qp, err
}

// watch counts the connection of w, which is established.
func (m *Metrics) watch(w *watched) {
	m.open.Inc()
	go func() {
		<-w.qp.Done()
		m.open.Dec()
		m.ends.WithLabelValues(reason(w.qp.Err())).Inc()
	}()
}
