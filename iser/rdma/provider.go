package rdma

import (
	"context"
	"net"
)

// Provider is one way to do RDMA: an adapter, or software. Methods may be called concurrently.
type Provider interface {
	// Name is the label of metrics and session lists: "iwarp", "verbs".
	Name() string

	// AllocPD returns a new protection domain (ibv_alloc_pd). Regions, windows and queue pairs of
	// different domains have nothing to do with each other.
	AllocPD() (PD, error)

	// CreateCQ returns a completion queue for depth completions that were not polled (ibv_create_cq). The user makes it large enough for every work
	// request that can be outstanding on the queue pairs that use it; if not, ErrOverrun ends the queue and those queue pairs.
	CreateCQ(depth int) (CQ, error)

	// Listen starts to listen on address, host:port (rdma_listen).
	Listen(ctx context.Context, address string) (Listener, error)

	// Resolve prepares a connection to address, host:port (rdma_resolve_addr and rdma_resolve_route).
	Resolve(ctx context.Context, address string) (Dialer, error)
}

// Listener hands out connections that peers ask for.
type Listener interface {
	// Accept waits for the next connection request (RDMA_CM_EVENT_CONNECT_REQUEST). An error that is net.ErrClosed is final.
	Accept(ctx context.Context) (Request, error)
	Addr() net.Addr
	// Close ends listening. Requests that were handed out are not touched. It is idempotent.
	Close() error
}

// ConnParams travel in both directions while a connection is made (struct rdma_conn_param).
type ConnParams struct {
	// PrivateData is for the user of the connection. How much fits is the transport's: 508 bytes at least in
	// either direction for iWARP, 56 for RoCE; Linux's soft-iWARP takes 252.
	PrivateData []byte
	// IRD is how many RDMA Reads by the other side the sender of these parameters can serve at once (responder_resources).
	IRD int
	// ORD is how many RDMA Reads the sender of these parameters wants to have outstanding (initiator_depth).
	ORD int
	// DepthUnknown is set in received parameters if the transport carried neither IRD nor ORD.
	DepthUnknown bool
}

// Endpoint is a connection before it is established (struct rdma_cm_id).
type Endpoint interface {
	LocalAddr() net.Addr
	RemoteAddr() net.Addr
	// CreateQP makes the queue pair of this connection (rdma_create_qp), once. Receives can be posted to it at once: those which the first
	// messages of the peer need must be, before Accept or Connect.
	CreateQP(pd PD, attr QPAttr) (QP, error)
}

// Request is a connection that a peer asks for. It ends with Accept or Reject, one of which must be called. It is used by one goroutine.
type Request interface {
	Endpoint
	// Peer is what the peer asked with. Its IRD bounds our ORD.
	Peer() ConnParams
	// Accept answers, and returns when the queue pair can be used (rdma_accept until RDMA_CM_EVENT_ESTABLISHED). The depths in
	// p are the most we want; what was agreed is QP.Depth. What is posted before the peer's first message may
	// stay queued until that comes: the side that asked for the connection talks first. An error ends the connection.
	Accept(ctx context.Context, p ConnParams) error
	// Reject says no (rdma_reject) and ends the connection.
	Reject(privateData []byte) error
}

// Dialer is a connection that we ask for. It ends with Connect, or with Close. It is used by one goroutine.
type Dialer interface {
	Endpoint
	// Connect asks, and returns the peer's parameters when the queue pair can be used (rdma_connect until
	// RDMA_CM_EVENT_ESTABLISHED). It fails with *RejectedError if the peer said no. An error ends the connection.
	Connect(ctx context.Context, p ConnParams) (ConnParams, error)
	// Close gives the connection up if Connect was not called.
	Close() error
}

// QPAttr sizes a queue pair (struct ibv_qp_init_attr). Its type is always reliable connected.
type QPAttr struct {
	SendCQ, RecvCQ CQ  // of the same provider; both may be the same
	MaxSend        int // work requests posted and not completed, at least 1
	MaxRecv        int // the same of the receive queue
	MaxSendSGE     int // elements of one work request; 0 means 1
	MaxRecvSGE     int // the same of the receive queue
	MaxInline      int // bytes of a work request with Inline
	// RecvAnyOrder: a message may take any receive that is posted, as from a shared receive queue (ibv_srq), instead of the oldest; WC.ID says which. It lets a
	// provider in software use memory again that is in the processor's cache. Providers may ignore it.
	RecvAnyOrder bool
}

// QP is a queue pair with its connection. Methods may be called concurrently; order is the order of calls that do not overlap.
type QP interface {
	// Num is a number that no other queue pair of the provider has at the same time (qp_num).
	Num() uint32

	// PostSend queues work requests, in order (ibv_post_send with a list). It never waits for the peer. It returns how many were
	// posted; if that is less than all, the error is about the first that was not (bad_wr). The slice may be reused, the memory it refers to belongs to the queue
	// pair until the completion; except for Inline. After the connection ended it fails with ErrDisconnected, or what was posted completes with StatusFlushed.
	PostSend(wrs []SendWR) (int, error)

	// PostRecv queues receives, in order (ibv_post_recv with a list). A message of the peer that finds no receive, or one
	// that is too small, ends the connection. As PostSend otherwise.
	PostRecv(wrs []RecvWR) (int, error)

	// Depth returns what was agreed: RDMA Reads that we serve at once (max_dest_rd_atomic) and those that we may have
	// outstanding (max_rd_atomic). A Read beyond waits in the send queue. Both are 0 before the connection is established.
	Depth() (ird, ord int)

	// Done is closed when the connection has ended for whatever reason, or could not be made (RDMA_CM_EVENT_DISCONNECTED, asynchronous events).
	Done() <-chan struct{}
	// Err is nil before Done is closed, then the first reason; it is one of the errors of this package.
	Err() error

	// Disconnect ends the connection in order (rdma_disconnect): what is completed was sent, everything else is flushed. It does not wait. It is
	// idempotent. To have a last message delivered, wait for its completion first.
	Disconnect()

	// Close is Disconnect, and waits (ibv_destroy_qp): when it returns, every work request has its completion, no memory of the
	// user is touched any more, and the windows bound to the queue pair are free. It is bounded by a few seconds, and idempotent.
	Close() error
}

// CQ is a completion queue (struct ibv_cq).
type CQ interface {
	// Poll moves completions to wc and returns how many (ibv_poll_cq). It does not wait. After the last completion of a queue that is lost
	// it fails with ErrOverrun, of a closed one with ErrClosed.
	Poll(wc []WC) (int, error)
	// Wait is Poll that waits for the first completion (ibv_req_notify_cq and ibv_get_cq_event before ibv_poll_cq). It fails with ctx.Err() if ctx ends before.
	// With solicited it is woken only by a completion with an error, or of a receive whose Send was Solicited (solicited_only); it
	// returns what else is queued by then as well.
	Wait(ctx context.Context, wc []WC, solicited bool) (int, error)
	// Close wakes those who wait. Queue pairs that use the queue should be closed before; their later completions are dropped.
	Close() error
}

// PD is a protection domain (struct ibv_pd).
type PD interface {
	// Register makes buf usable for work requests on queue pairs of this domain (ibv_reg_mr). It must stay mapped, at
	// its place, until Deregister: memory outside the Go heap. Without LocalWrite nothing of it is ever written.
	Register(buf []byte, access Access) (MR, error)
	// AllocWindow returns a window that is bound to nothing (ibv_alloc_mw, IBV_MW_TYPE_2).
	AllocWindow() (Window, error)
	// Close fails with ErrBusy while the domain has regions or windows (ibv_dealloc_pd).
	Close() error
}

// MR is a memory region (struct ibv_mr).
type MR interface {
	// LKey is for the elements of work requests.
	LKey() uint32
	// Bytes is what was registered.
	Bytes() []byte
	// Deregister fails with ErrBusy while a window is bound to the region (ibv_dereg_mr). No work request may refer to it any more.
	Deregister() error
}

// Window gives the peer of one connection access to a part of a region, for a time (struct ibv_mw). It is free, or bound to a queue pair by
// OpBind, until OpLocalInvalidate, or a Send of the peer that invalidates it, or the end of the connection.
type Window interface {
	// RKey is the key of the last OpBind that was posted; the peer can use it once that was carried out. Each OpBind gives a new
	// one, which cannot be guessed from others where the transport allows it.
	RKey() uint32
	// Addr is the address by which the peer reaches the first byte.
	Addr() uint64
	// Close invalidates, if it is bound, and ends the window (ibv_dealloc_mw). When it returns, the peer reaches nothing through it.
	Close() error
}

// Access is a set of rights (enum ibv_access_flags).
type Access uint8

// Rights. LocalWrite is of regions, the others are of windows. A window with RemoteWrite needs a region with LocalWrite.
const (
	LocalWrite  Access = 1 << iota // work requests may write: receives, and what RDMA Reads fetch (IBV_ACCESS_LOCAL_WRITE)
	RemoteRead                     // the peer may read (IBV_ACCESS_REMOTE_READ)
	RemoteWrite                    // the peer may write (IBV_ACCESS_REMOTE_WRITE)
)
