package iser

import (
	"fmt"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// repostAt is how many free receives wait for being posted together. A response that opens the command window posts
// them before, however few they are.
const repostAt = 8

// Receive implements iscsi.Datamover.
func (c *Conn) Receive() (*iscsi.PDU, error) {
	c.mu.Lock()
	if c.over || c.closed {
		c.mu.Unlock()
		return nil, iscsi.ErrClosed
	}
	c.refs++ // for the receives' memory
	c.surplus = c.surplusLocked()
	c.mu.Unlock()
	p, err := c.receive()
	if c.passed {
		c.passed = false
		return p, err
	}
	c.mu.Lock()
	c.unrefLocked()
	c.mu.Unlock()
	return p, err
}

// surplusLocked reports whether so many receives are free that they are posted before Receive waits.
func (c *Conn) surplusLocked() bool {
	return len(c.freed) >= repostAt || !c.full && len(c.freed) > 0
}

func (c *Conn) receive() (*iscsi.PDU, error) {
	for {
		if c.wcNext == c.wcCount {
			if err := c.more(); err != nil {
				return nil, err
			}
		}
		wc := &c.wcs[c.wcNext]
		c.wcNext++
		if wc.Status != rdma.StatusSuccess {
			return nil, c.endReason()
		}
		deliver, err := c.message(int(wc.ID), wc.Bytes)
		if err != nil {
			return nil, err
		}
		if deliver {
			return &c.pdu, nil
		}
		c.mu.Lock()
		c.surplus = c.surplusLocked()
		c.mu.Unlock()
	}
}

// more waits for messages.
func (c *Conn) more() error {
	if c.surplus {
		c.flush()
	}
	n, err := c.recvCQ.Wait(&c.alive, c.wcs[:], false)
	if err != nil {
		return c.endReason()
	}
	c.wcNext, c.wcCount = 0, n
	return nil
}

func formatError(format string, args ...any) error {
	return fmt.Errorf("%w: iSER: "+format, append([]any{iscsi.ErrFormat}, args...)...)
}

// message takes what came in a receive. It reports whether it is a PDU for the iSCSI layer.
func (c *Conn) message(id, n int) (deliver bool, err error) {
	b := c.buffers[id].sge[0].Buf[:n]
	if n < headerLen {
		return false, formatError("message of %d bytes", n)
	}
	head := (*[headerLen]byte)(b)
	switch op := opcodeOf(head); op {
	case opControl:
	case opHello:
		var m hello
		m.decode(head)
		c.recycle(id)
		return false, c.helloReceived(&m, n)
	default:
		return false, formatError("opcode %d", op)
	}
	if n < headerLen+pdu.HeaderLen {
		return false, formatError("message of %d bytes", n)
	}
	p := &c.pdu
	*p = iscsi.PDU{}
	c.wire.decode(head)
	copy(p.Header[:], b[headerLen:])
	h := &p.Header
	// The length of the message is the only frame (ISER-R4).
	at := headerLen + pdu.HeaderLen + h.AHSLength()
	size := h.DataLength()
	switch {
	case size > c.limit:
		return false, fmt.Errorf("%w: %d bytes", iscsi.ErrSegment, size) // ISER-72
	case at+size > n || at+size+pdu.Padding(size) < n:
		return false, formatError("message of %d bytes with a PDU of %d", n, at+size-headerLen)
	}
	p.AHS = c.ahs[:copy(c.ahs[:], b[headerLen+pdu.HeaderLen:at])]
	if c.attentive.Load() {
		if err := c.spoken(h); err != nil {
			return false, err
		}
	}
	c.received.Add(1)
	switch op := h.Opcode(); {
	case op == pdu.OpSCSICommand && c.full:
		return true, c.command(p, id, b[at:at+size])
	case op == pdu.OpDataOut && c.full:
		return false, c.dataOut(h, id, b[at:at+size])
	case (c.wire.readValid || c.wire.writeValid) && op != pdu.OpTaskRequest: // ISER-48
		return false, formatError("an STag in the header of a %v", op)
	}
	p.Data = c.control[:copy(c.control, b[at:at+size])]
	c.recycle(id)
	return true, nil
}

// spoken notes that the initiator has sent a PDU in full feature phase.
func (c *Conn) spoken(h *pdu.Header) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hello && c.params.HelloRequired {
		return formatError("%v where a Hello is required", h.Opcode()) // ISER-71
	}
	c.hello = false
	c.u.heard(h)
	c.attentive.Store(len(c.u.out) > 0)
	return nil
}

// recycle has a receive posted again.
func (c *Conn) recycle(id int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.freed = append(c.freed, id)
}

// helloReceived answers a Hello if it comes first, whatever was negotiated (ISER-20 to 23).
func (c *Conn) helloReceived(m *hello, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case n != headerLen:
		return formatError("Hello of %d bytes", n)
	case !c.hello:
		return formatError("Hello where none may be")
	}
	c.hello = false
	c.u.spoken = true
	reply := m.answer(c.r.ord)
	c.r.ord = int(reply.ord)
	s := c.q.slotLocked()
	reply.encode((*[headerLen]byte)(s.buf[:]))
	s.sge[0] = rdma.SGE{Buf: s.buf[:headerLen]}
	c.q.addLocked(item{wr: rdma.SendWR{Op: rdma.OpSend, SGE: s.sge[:], Flags: rdma.Inline | rdma.Signaled}, slot: s, control: true})
	if c.q.claimLocked() {
		c.postLocked()
	}
	if reply.reject {
		c.mu.Unlock()
		c.drain()
		c.mu.Lock()
		return formatError("Hello with versions %d to %d and IRD %d", m.minVer, m.maxVer, m.ird) // ISER-73
	}
	return nil
}

// command takes a SCSI Command. Its immediate data stays in the receive until it is wanted.
func (c *Conn) command(p *iscsi.PDU, id int, data []byte) error {
	h := &p.Header
	n := len(data)
	c.mu.Lock()
	defer c.mu.Unlock()
	tr := c.newTransferLocked()
	c.refs--
	c.passed = true // Receive's reference to the connection, to the transfer
	p.Transfer = tr
	tr.itt, tr.wire = h.ITT(), c.wire
	tr.read, tr.write = h[1]&0x40 != 0, h[1]&0x20 != 0
	edtl := int(uint32(h[20])<<24 | uint32(h[21])<<16 | uint32(h[22])<<8 | uint32(h[23]))
	most := min(edtl, int(c.params.FirstBurstLength)) // in Sends
	switch {
	case !tr.write:
		if n > 0 {
			tr.err = iscsi.ErrUnexpectedData
		}
	case n > 0 && !c.params.ImmediateData:
		tr.err = iscsi.ErrUnexpectedData
	case n > most:
		tr.err = iscsi.ErrDataAmount
	case h.Final():
		tr.unsolicited = n
	case c.params.InitialR2T:
		tr.err = iscsi.ErrUnexpectedData
	default:
		// Unsolicited Data-Out follows, up to the most that is allowed (RFC 7143, 11.3.4).
		tr.unsolicited = most
	}
	tr.arriving = tr.write && !h.Final()
	tr.most = perCommand(&c.params)
	if tr.err == nil && n > 0 {
		tr.pieces = append(tr.pieces, piece{buffer: id, data: data})
		tr.have = n
	} else {
		c.freed = append(c.freed, id)
	}
	if tr.arriving {
		if c.transfers[tr.itt] == nil {
			c.transfers[tr.itt] = tr
		} else {
			tr.arriving = false // a tag that is in use: its data belongs to the first
			tr.err = iscsi.ErrUnexpectedData
		}
	}
	return nil
}

// dataOut takes unsolicited data. What is solicited does not come in PDUs (ISER-31).
func (c *Conn) dataOut(h *pdu.Header, id int, data []byte) error {
	var d pdu.DataOut
	if err := d.Decode(h); err != nil {
		return formatError("%w", err)
	}
	if d.TTT != pdu.ReservedTag {
		return formatError("Data-Out with a target transfer tag")
	}
	if c.wire.readValid || c.wire.writeValid {
		return formatError("an STag in the header of a Data-Out")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	tr := c.transfers[d.ITT]
	if tr == nil || tr.err != nil {
		// Of a command that was aborted, or dropped outside of the window, or has failed.
		c.freed = append(c.freed, id)
	} else {
		c.landLocked(tr, &d, id, data)
	}
	if tr != nil && d.Final {
		tr.arriving = false
		delete(c.transfers, d.ITT)
		tr.notify()
	}
	return nil
}

// landLocked adds unsolicited data to its transfer.
func (c *Conn) landLocked(tr *transfer, d *pdu.DataOut, id int, data []byte) {
	n := len(data)
	sn := tr.nextSN
	tr.nextSN++
	if uint32(d.DataSN) != sn || int64(d.Offset) != int64(tr.have) || n > tr.unsolicited-tr.have ||
		d.Final && tr.have+n != tr.unsolicited || len(tr.pieces) >= tr.most {
		c.freed = append(c.freed, id)
		tr.fail(iscsi.ErrDataAmount)
		return
	}
	if n == 0 {
		c.freed = append(c.freed, id)
		return
	}
	tr.pieces = append(tr.pieces, piece{buffer: id, at: tr.have, data: data})
	tr.have += n
	tr.notify()
}
