package rdma

import "errors"

var (
	// ErrInvalid: a work request or an argument is malformed: too many elements, memory outside its region, a right that the
	// region does not have, a size out of range. Nothing was posted or changed. (EINVAL)
	ErrInvalid = errors.New("rdma: invalid argument")
	// ErrQueueFull: the queue has no room for the work request. (ENOMEM of ibv_post_send and ibv_post_recv)
	ErrQueueFull = errors.New("rdma: work queue is full")
	// ErrBusy: the object is still used by another one. (EBUSY)
	ErrBusy = errors.New("rdma: object is in use")
	// ErrNotConnected: the queue pair has no connection yet.
	ErrNotConnected = errors.New("rdma: not connected")
	// ErrDisconnected: the connection has ended. QP.Err is ErrDisconnected itself after a local Disconnect.
	ErrDisconnected = errors.New("rdma: disconnected")
	// ErrPeerClosed: the peer ended the connection. (RDMA_CM_EVENT_DISCONNECTED)
	ErrPeerClosed = errors.New("rdma: peer disconnected")
	// ErrTransport: the connection broke, or the peer sent what the protocol does not allow. (IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR)
	ErrTransport = errors.New("rdma: transport error")
	// ErrAccess: the peer tried to reach memory that it may not reach. (IBV_EVENT_QP_ACCESS_ERR)
	ErrAccess = errors.New("rdma: access violation by the peer")
	// ErrRemote: the peer reported an error of ours and ended the connection. (IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR)
	ErrRemote = errors.New("rdma: error reported by the peer")
	// ErrOverrun: a completion queue was too small for what was posted. It is lost. (IBV_EVENT_CQ_ERR)
	ErrOverrun = errors.New("rdma: completion queue overrun")
	// ErrClosed: the object is closed.
	ErrClosed = errors.New("rdma: closed")
)

// RejectedError is returned by Dialer.Connect when the peer said no. (RDMA_CM_EVENT_REJECTED)
type RejectedError struct {
	Peer ConnParams // what came with the answer, as far as the transport carries it
}

// Error implements error.
func (e *RejectedError) Error() string { return "rdma: connection was rejected by the peer" }
