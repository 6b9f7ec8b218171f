// Package rdma is the seam between iSER and whatever moves its bytes: an interface shaped like verbs (libibverbs and
// librdmacm), so that software iWARP and hardware adapters are the same to the code above.
//
// What each name is in verbs:
//
//	Provider.Resolve             rdma_create_id, rdma_resolve_addr, rdma_resolve_route
//	Provider.Listen              rdma_bind_addr, rdma_listen
//	Listener.Accept              RDMA_CM_EVENT_CONNECT_REQUEST
//	Endpoint.CreateQP            rdma_create_qp
//	Request.Accept, Reject       rdma_accept until RDMA_CM_EVENT_ESTABLISHED, rdma_reject
//	Dialer.Connect               rdma_connect until RDMA_CM_EVENT_ESTABLISHED or REJECTED
//	QP.Disconnect, Close         rdma_disconnect, rdma_destroy_qp
//	QP.Done, QP.Err              RDMA_CM_EVENT_DISCONNECTED and the asynchronous events of a queue pair
//	QP.PostSend, PostRecv        ibv_post_send, ibv_post_recv, a list of work requests each
//	CQ.Poll                      ibv_poll_cq
//	CQ.Wait                      ibv_req_notify_cq, ibv_get_cq_event, ibv_poll_cq
//	PD.Register, MR.Deregister   ibv_reg_mr, ibv_dereg_mr
//	PD.AllocWindow               ibv_alloc_mw with IBV_MW_TYPE_2
//	OpBind, OpLocalInvalidate    IBV_WR_BIND_MW, IBV_WR_LOCAL_INV
//
// Remote access is given by memory windows only, never by a region itself: a window of type 2B belongs to one queue
// pair, covers one range with one set of rights, and is revoked by invalidation, by the owner or by the peer. An adapter without
// such windows registers a region for each OpBind instead.
package rdma
