package rdma

import "strconv"

// SGE is an element of a work request (struct ibv_sge): memory of the region whose key is LKey.
type SGE struct {
	Buf  []byte
	LKey uint32
}

// Opcode is what a send work request does (enum ibv_wr_opcode).
type Opcode uint8

// Opcodes.
const (
	OpSend            Opcode = iota + 1 // a message for the peer's next receive (IBV_WR_SEND)
	OpSendInvalidate                    // the same; the peer's window with RKey is invalidated first (IBV_WR_SEND_WITH_INV)
	OpWrite                             // to RemoteAddr in the peer's window with RKey (IBV_WR_RDMA_WRITE)
	OpRead                              // from there into SGE (IBV_WR_RDMA_READ)
	OpBind                              // binds a window (IBV_WR_BIND_MW)
	OpLocalInvalidate                   // invalidates the own window with RKey (IBV_WR_LOCAL_INV)
	OpRecv                              // completions only (IBV_WC_RECV)
)

// String implements fmt.Stringer.
func (o Opcode) String() string {
	return name(uint8(o), "", "Send", "Send with Invalidate", "RDMA Write", "RDMA Read", "Bind", "Local Invalidate", "Receive")
}

func name(i uint8, names ...string) string {
	if int(i) < len(names) && names[i] != "" {
		return names[i]
	}
	return "unknown (" + strconv.Itoa(int(i)) + ")"
}

// SendFlags of a work request (enum ibv_send_flags).
type SendFlags uint8

// Flags.
const (
	// Signaled asks for a completion (IBV_SEND_SIGNALED). A failed work request has one in any case.
	Signaled SendFlags = 1 << iota
	// Solicited marks a Send that the peer's CQ.Wait waits for (IBV_SEND_SOLICITED).
	Solicited
	// Fence: not before all earlier Reads of this queue are complete (IBV_SEND_FENCE).
	Fence
	// Inline takes the bytes when it is posted: SGE may be any memory, and be reused at once (IBV_SEND_INLINE).
	// Of Sends and Writes, up to QPAttr.MaxInline.
	Inline
	// More on the last one of a list: another call of PostSend follows in a moment, if only with an empty list, and nothing of this one needs to be sent before. (What
	// ibv_wr_start and ibv_wr_complete are around)
	More
)

// SendWR is a work request of the send queue (struct ibv_send_wr). They are carried out in order, and complete in order. Later
// ones may overtake what an OpRead fetches at the peer, see Fence.
type SendWR struct {
	ID    uint64 // comes back in WC.ID
	Op    Opcode
	Flags SendFlags
	// SGE is the payload, or where it goes. Together 2^32-1 bytes at most.
	SGE        []SGE
	RemoteAddr uint64 // OpWrite, OpRead
	RKey       uint32 // OpWrite, OpRead, OpSendInvalidate, OpLocalInvalidate
	Bind       Bind   // OpBind
}

// Bind is the argument of OpBind (struct ibv_mw_bind_info). The window must be free when it is carried out. Its RKey and Addr are those of this binding when
// PostSend returns; a later work request of the same queue may tell the peer.
type Bind struct {
	Window Window
	MR     MR
	Buf    []byte // part of MR
	Access Access // RemoteRead, RemoteWrite
}

// RecvWR is a work request of the receive queue (struct ibv_recv_wr). One receive takes one Send of the peer.
type RecvWR struct {
	ID  uint64
	SGE []SGE
}

// Status is the outcome of a work request (enum ibv_wc_status).
type Status uint8

// Statuses. All but StatusSuccess end the connection, or come from its end.
const (
	StatusSuccess    Status = iota // IBV_WC_SUCCESS
	StatusLength                   // a receive was smaller than the message (IBV_WC_LOC_LEN_ERR)
	StatusProtection               // a key that may not be invalidated (IBV_WC_LOC_PROT_ERR)
	StatusBind                     // the window was not free, or the region is gone (IBV_WC_MW_BIND_ERR)
	StatusFlushed                  // the connection ended before, or while, it was carried out (IBV_WC_WR_FLUSH_ERR)
)

// String implements fmt.Stringer.
func (s Status) String() string {
	return name(uint8(s), "success", "message too long", "protection error", "bind error", "flushed")
}

// WC is a completion (struct ibv_wc). Unless Status is StatusSuccess, only ID, QPNum and Op are meaningful besides.
type WC struct {
	ID     uint64
	QPNum  uint32
	Op     Opcode
	Status Status
	// Invalidated: the Send that was received invalidated the window with InvalidatedKey (IBV_WC_WITH_INV).
	Invalidated    bool
	InvalidatedKey uint32
	Bytes          int // of a receive or a Read (byte_len)
}
