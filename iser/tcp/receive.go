package tcp

import (
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// Receive implements iscsi.Datamover.
func (c *Conn) Receive() (*iscsi.PDU, error) {
	c.settle()
	for {
		p := &c.pdu
		*p = iscsi.PDU{}
		h := &p.Header
		c.r.exact = c.expectsLarge()
		if err := c.r.full(h[:]); err != nil {
			return nil, err
		}
		p.AHS = c.ahs[:h.AHSLength()]
		if err := c.r.full(p.AHS); err != nil {
			return nil, err
		}
		if c.headerDigest {
			sum, err := c.readDigest()
			if err != nil {
				return nil, err
			}
			if sum != pdu.HeaderDigest(h, p.AHS) {
				return nil, iscsi.ErrHeaderDigest
			}
		}
		if h.DataLength() > c.limit {
			return nil, iscsi.ErrSegment
		}
		var err error
		deliver := true
		switch op := h.Opcode(); {
		case op == pdu.OpSCSICommand && c.fullFeature:
			err = c.command(p)
		case op == pdu.OpDataOut && c.fullFeature:
			deliver, err = c.dataOut(p)
		default:
			err = c.controlData(p)
		}
		if err != nil {
			return nil, err
		}
		c.received.Add(1)
		if deliver {
			return p, nil
		}
	}
}

// expectsLarge reports whether the next PDU is likely to be a large Data-Out that answers an R2T.
func (c *Conn) expectsLarge() bool {
	if c.smallOut {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bursts.open > 0
}

func (c *Conn) readDigest() (uint32, error) {
	if err := c.r.full(c.trailer[:]); err != nil {
		return 0, err
	}
	return pdu.DigestAt(&c.trailer), nil
}

// controlData reads the data segment of a control PDU.
func (c *Conn) controlData(p *iscsi.PDU) error {
	n := p.Header.DataLength()
	if cap(c.control) < n || cap(c.control) > keepControl && n <= keepControl {
		c.control = make([]byte, n)
	}
	p.Data = c.control[:n]
	c.vector[0] = p.Data
	ok, err := c.readData(c.vector[:], n)
	if !ok {
		p.Fault = pdu.RejectDataDigest
	}
	return err
}

// readData fills dest, n bytes in all, with the data segment, and reads its padding and digest. It is false if the digest is wrong.
// If the transfer is detached meanwhile, what is left is thrown away.
func (c *Conn) readData(dest [][]byte, n int) (ok bool, err error) {
	left := n
	crc := uint32(0)
	for _, p := range dest {
		for len(p) > 0 {
			var k int
			if c.r.from == c.r.to && len(p) < len(c.r.buf) && !c.r.exact {
				lands := c.lands()
				if err := c.r.fill(len(c.r.buf)); err != nil {
					return false, err
				}
				if lands && !c.lands() {
					return true, c.skip(left + pdu.Padding(n) + c.digestLength(n))
				}
			}
			if c.r.from < c.r.to {
				k = c.r.copy(p)
			} else if k, err = c.r.read(p, true); err == errDetached {
				return true, c.skip(left + pdu.Padding(n) + c.digestLength(n))
			} else if err != nil {
				return false, err
			}
			if c.dataDigest {
				crc = pdu.Digest(crc, p[:k])
			}
			p = p[k:]
			left -= k
		}
	}
	if n == 0 {
		return true, nil
	}
	pad := c.trailer[:pdu.Padding(n)]
	if err := c.r.full(pad); err != nil {
		return false, err
	}
	if !c.dataDigest {
		return true, nil
	}
	crc = pdu.Digest(crc, pad)
	sum, err := c.readDigest()
	return sum == crc, err
}

// lands reports whether the reader is in a transfer. Only the reader changes that, so that it needs no lock to see it.
func (c *Conn) lands() bool { return c.landing != nil }

func (c *Conn) digestLength(n int) int {
	if c.dataDigest && n > 0 {
		return pdu.DigestLen
	}
	return 0
}

// skip throws n bytes of the stream away.
func (c *Conn) skip(n int) error {
	for n > 0 {
		if c.r.from == c.r.to {
			if err := c.r.fill(len(c.r.buf)); err != nil {
				return err
			}
		}
		k := min(n, c.r.to-c.r.from)
		c.r.from += k
		n -= k
	}
	return nil
}

// skipData throws the data segment of a PDU away, digest unseen.
func (c *Conn) skipData(n int) error { return c.skip(n + pdu.Padding(n) + c.digestLength(n)) }

// command reads a SCSI Command: its immediate data is staged.
func (c *Conn) command(p *iscsi.PDU) error {
	h := &p.Header
	n := h.DataLength()
	read, write := h[1]&0x40 != 0, h[1]&0x20 != 0
	edtl := int(uint32(h[20])<<24 | uint32(h[21])<<16 | uint32(h[22])<<8 | uint32(h[23]))
	most := min(edtl, int(c.params.FirstBurstLength)) // without an R2T

	c.live.Add(1)
	tr := transfers.Get().(*transfer)
	tr.itt, tr.lun, tr.bidi = h.ITT(), h.LUN(), read && write
	p.Transfer = tr
	switch {
	case !write:
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
	tr.arriving = write && !h.Final()
	if tr.err != nil {
		if err := c.skipData(n); err != nil {
			return err
		}
	} else if tr.unsolicited > 0 {
		tr.staged = getBuffer(tr.unsolicited)
		if n > 0 {
			c.vector[0] = tr.staged[:n]
			ok, err := c.readData(c.vector[:], n)
			if err != nil {
				return err
			}
			if !ok {
				tr.err = iscsi.ErrDataDigest
				p.Fault = pdu.RejectDataDigest
			}
		}
		tr.have = n
	}
	if tr.arriving {
		tr.shared = true
		c.mu.Lock()
		if c.transfers[tr.itt] == nil {
			c.transfers[tr.itt] = tr
		} else {
			tr.arriving = false // a tag that is in use: its data belongs to the first
			tr.err = iscsi.ErrUnexpectedData
		}
		c.mu.Unlock()
	}
	return nil
}

// dataOut reads a Data-Out: solicited data right into the buffers it was asked for, unsolicited data into those that
// GetData left, or else to staging. It is true if the PDU has to be answered by Reject.
func (c *Conn) dataOut(p *iscsi.PDU) (reject bool, err error) {
	d := &c.out
	d.Decode(&p.Header)
	n := p.Header.DataLength()
	var at place
	c.mu.Lock()
	if d.TTT != pdu.ReservedTag {
		c.smallOut = n < largeOut
		at = c.placeSolicited(d, n)
	} else {
		at = c.placeUnsolicited(d, n)
	}
	c.mu.Unlock()
	p.Fault = at.fault

	ok := true
	if at.throw {
		err = c.skipData(n)
	} else {
		ok, err = c.readData(at.dest, n)
	}
	if !ok && err == nil {
		p.Fault = pdu.RejectDataDigest
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if tr := c.landing; tr != nil {
		switch {
		case err != nil:
			tr.fail(iscsi.ErrClosed) // the place was not filled
		case at.cause != nil:
			c.killBurst(d)
			tr.fail(at.cause)
		case !ok:
			c.killBurst(d)
			tr.fail(iscsi.ErrDataDigest)
		}
		if p.Fault == 0 || err != nil {
			c.leave()
		}
	}
	return p.Fault != 0, err
}

// settle lets the reader leave the transfer of a Data-Out with a fault. It waited until the next
// Receive, so that the Reject goes out before the status of the task can.
func (c *Conn) settle() {
	if !c.lands() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leave()
}

// leave ends the reader's part in a transfer, and counts its Data-Out as received. mu is held.
func (c *Conn) leave() {
	tr, d := c.landing, c.final
	c.landing, c.final = nil, nil
	if d.Final {
		if b := c.bursts.get(d.TTT); b != nil && d.TTT != pdu.ReservedTag {
			c.endBurst(b)
		} else if c.transfers[d.ITT] == tr {
			tr.arriving = false
			delete(c.transfers, d.ITT)
		}
	}
	tr.have += tr.landed
	tr.landed = 0
	tr.notify()
}

// killBurst has what still comes for an R2T thrown away. mu is held.
func (c *Conn) killBurst(d *pdu.DataOut) {
	if b := c.bursts.get(d.TTT); b != nil {
		b.dead = true
	}
}

// place is where the data of a Data-Out goes.
type place struct {
	dest  [][]byte
	throw bool             // nowhere
	fault pdu.RejectReason // how the PDU is answered
	cause error            // why its task fails
}

// placeUnsolicited finds the place of unsolicited Data-Out. Unless it belongs to nobody, the reader is in its transfer
// afterwards. mu is held.
func (c *Conn) placeUnsolicited(d *pdu.DataOut, n int) place {
	tr := c.transfers[d.ITT]
	if tr == nil {
		// Data of a command that was aborted, or dropped outside of the window.
		return place{throw: true}
	}
	c.landing, c.final = tr, d
	sn := tr.nextSN
	tr.nextSN++
	switch {
	case tr.err != nil:
		return place{throw: true}
	case uint32(d.DataSN) != sn || int64(d.Offset) != int64(tr.have):
		return place{throw: true, fault: pdu.RejectProtocolError, cause: iscsi.ErrDataDigest} // a PDU is missing
	case n > tr.unsolicited-tr.have || d.Final && tr.have+n != tr.unsolicited:
		return place{throw: true, cause: iscsi.ErrDataAmount}
	}
	tr.landed = n
	tr.vector = tr.vector[:0]
	at, left := tr.have, n
	if tr.dest != nil {
		var in cursor
		in.set(tr.dest)
		in.skip(at - tr.destAt)
		k := min(left, total(tr.dest)-(at-tr.destAt))
		in.take(&tr.vector, k)
		at, left = at+k, left-k
	}
	if left > 0 {
		tr.vector = append(tr.vector, tr.staged[at:at+left])
	}
	return place{dest: tr.vector}
}

// placeSolicited finds the place of Data-Out that answers an R2T. mu is held.
func (c *Conn) placeSolicited(d *pdu.DataOut, n int) place {
	b := c.bursts.get(d.TTT)
	if b == nil {
		p := place{throw: true}
		if !c.bursts.issued(d.TTT) {
			p.fault = pdu.RejectInvalidField // never issued
		}
		return p
	}
	tr := b.tr
	if d.ITT != tr.itt || d.LUN != tr.lun {
		// Not this task's (ISCSI-48): the task is not to suffer for it.
		return place{throw: true, fault: pdu.RejectInvalidField}
	}
	c.landing, c.final = tr, d
	sn := b.nextSN
	b.nextSN++
	switch {
	case b.dead:
		return place{throw: true}
	case uint32(d.DataSN) != sn || int64(d.Offset) != int64(b.offset):
		return place{throw: true, fault: pdu.RejectProtocolError, cause: iscsi.ErrDataDigest} // a PDU is missing
	case n > b.end-b.offset || d.Final != (b.offset+n == b.end):
		return place{throw: true, fault: pdu.RejectProtocolError, cause: iscsi.ErrDataAmount}
	}
	b.offset += n
	return place{dest: b.dest.take(&tr.vector, n)}
}

func total(v [][]byte) (n int) {
	for _, p := range v {
		n += len(p)
	}
	return n
}
