// Package iwarp is an RDMA provider in user space over ordinary TCP: MPA (RFC 5044, 6581), DDP (RFC 5041) and RDMAP (RFC 5040). It needs no
// adapter and no kernel module, and talks to Linux's soft-iWARP and to iWARP adapters. It implements package rdma.
//
// DESIGN.md has its invariants and the list of requirements with their tests. The codecs and state
// machines (mpa.go, negotiate.go, segment.go, terminate.go, receiver.go, sender.go) do no I/O;
// qp.go, transmit.go and sock*.go drive them.
package iwarp
