// Package tcp is the datamover of iSCSI over TCP (RFC 7143): it frames PDUs, moves payload by Data-In, R2T and Data-Out, and
// computes digests. It implements iscsi.Datamover and knows nothing of sessions or logical units.
//
// DESIGN.md has the invariants, how often payload is copied, and the limits.
package tcp
