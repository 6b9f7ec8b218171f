package iscsi

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// loginResults are the values of the label result that are there from the start, with 0.
func loginResults() []string {
	results := []string{"no login", "not a login", "timeout", "connection lost"}
	for _, s := range []pdu.LoginStatus{
		pdu.LoginSuccess, pdu.LoginInitiatorError, pdu.LoginAuthFailure, pdu.LoginForbidden, pdu.LoginNotFound, pdu.LoginUnsupportedVersion,
		pdu.LoginTooManyConnections, pdu.LoginMissingParameter, pdu.LoginUnsupportedType, pdu.LoginNoSession,
		pdu.LoginInvalidRequest, pdu.LoginTargetError, pdu.LoginServiceUnavailable, pdu.LoginOutOfResources,
	} {
		results = append(results, s.String())
	}
	return results
}

// metrics are the counters of one Server.
type metrics struct {
	sessions     *prometheus.GaugeVec
	connections  prometheus.Gauge
	logins       *prometheus.CounterVec
	rejects      *prometheus.CounterVec
	digestErrors *prometheus.CounterVec
	deadPeers    prometheus.Counter
	refused      *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		sessions: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "isergate_sessions", Help: "iSCSI sessions in full feature phase. Discovery sessions have an empty target."}, []string{"target", "transport"}),
		connections: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "isergate_iscsi_connections", Help: "iSCSI connections, logins in progress included."}),
		logins: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iscsi_logins_total", Help: "iSCSI logins by result: success, a login status, or what ended them."}, []string{"result"}),
		rejects: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iscsi_rejects_total", Help: "PDUs answered by Reject, by reason."}, []string{"reason"}),
		digestErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iscsi_digest_errors_total", Help: "Received PDUs whose digest did not match."}, []string{"digest"}),
		deadPeers: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isergate_iscsi_dead_peers_total", Help: "Connections closed because the initiator did not answer a ping."}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isergate_iscsi_connections_refused_total", Help: "Connections closed on arrival because of a limit."}, []string{"limit"}),
	}
	for _, result := range loginResults() {
		m.logins.WithLabelValues(result)
	}
	for _, digest := range []string{"header", "data"} {
		m.digestErrors.WithLabelValues(digest)
	}
	if r != nil {
		r.MustRegister(m.sessions, m.connections, m.logins, m.rejects, m.digestErrors, m.deadPeers, m.refused)
	}
	return m
}
