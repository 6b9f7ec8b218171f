package initiator

import (
	"context"

	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// tcpMover moves the data of one session over one TCP connection.
type tcpMover struct {
	c         *Conn
	p         *Parameters
	expStatSN func() pdu.Serial
	q         sendQueue
	stop      chan struct{} // closed when run ends
	scratch   []byte        // data segments of control PDUs
	in        pdu.DataIn    // scratch of dataIn
}

func newTCPMover(c *Conn, p *Parameters, expStatSN func() pdu.Serial, failed func(error)) *tcpMover {
	return &tcpMover{
		c: c, p: p, expStatSN: expStatSN,
		q: sendQueue{
			c: c, headerDigest: p.HeaderDigest, dataDigest: p.DataDigest, failed: failed,
			pending: new(batch), spare: new(batch), kick: make(chan struct{}, 1),
		},
		stop: make(chan struct{}),
	}
}

func (m *tcpMover) close() { m.c.Close() }

func (m *tcpMover) prepare(*task) error { return nil }

func (m *tcpMover) end(*task) bool { return true }

func (m *tcpMover) attend(context.Context, *task) {}

func (m *tcpMover) rouse() {}

func (m *tcpMover) finish(*task) {}

func (m *tcpMover) alloc(n int) ([]byte, error) { return make([]byte, n), nil }

func (m *tcpMover) free([]byte) {}

func (m *tcpMover) maxControl() int { return pdu.MaxDataLength }

func (m *tcpMover) flush(inline bool) { m.q.flush(inline) }

func (m *tcpMover) control(h *pdu.Header, data []byte) {
	m.q.mu.Lock()
	m.q.addLocked(h, nil, data, nil)
	m.q.mu.Unlock()
}

// command sends immediate data up to FirstBurst, and the rest of FirstBurst as unsolicited Data-Out
// if InitialR2T=No; a command that has unsolicited Data-Out sends exactly min(FirstBurst, EDTL) bytes
// unsolicited (RFC 7143, 4.2.5.2).
func (m *tcpMover) command(t *task, ahs []byte) {
	first := min(uint32(len(t.out)), m.p.FirstBurst)
	var immediate uint32
	if m.p.ImmediateData {
		immediate = min(first, m.p.MaxSend)
	}
	unsolicited := uint32(0)
	if !m.p.InitialR2T {
		unsolicited = first - immediate
	}
	t.cmd.Final = unsolicited == 0
	t.sent = immediate + unsolicited
	m.q.mu.Lock()
	t.cmd.Encode(&m.q.h)
	m.q.addLocked(&m.q.h, ahs, t.out[:immediate], t)
	if unsolicited > 0 {
		m.dataOutLocked(t, pdu.ReservedTag, immediate, unsolicited)
	}
	m.q.mu.Unlock()
}

// dataOutLocked queues one sequence of Data-Out PDUs.
func (m *tcpMover) dataOutLocked(t *task, ttt pdu.TaskTag, offset, length uint32) {
	p := pdu.DataOut{LUN: t.cmd.LUN, ITT: t.cmd.ITT, TTT: ttt, ExpStatSN: m.expStatSN(), Offset: offset}
	if ttt == pdu.ReservedTag {
		p.LUN = 0
	}
	for length > 0 {
		n := min(length, m.p.MaxSend)
		p.Final = n == length
		p.Encode(&m.q.h)
		m.q.addLocked(&m.q.h, nil, t.out[p.Offset:p.Offset+n], t)
		p.Offset += n
		p.DataSN++
		length -= n
	}
}

func (m *tcpMover) run(s upcalls) (err error) {
	served := make(chan struct{})
	go func() {
		m.q.serve(m.stop)
		close(served)
	}()
	defer func() {
		m.c.Close()
		m.q.abandon(err)
		close(m.stop)
		<-served
	}()
	var h pdu.Header
	for {
		if _, err := m.c.readHeader(&h); err != nil {
			return err
		}
		n := h.DataLength()
		if n > m.c.maxRecv {
			return protocolError("%v with a data segment of %d bytes, %d declared", h.Opcode(), n, m.c.maxRecv)
		}
		switch h.Opcode() {
		case pdu.OpDataIn:
			err = m.dataIn(s, &h, n)
		case pdu.OpR2T:
			err = m.r2t(s, &h, n)
		default:
			var data []byte
			if n > 0 {
				if cap(m.scratch) < n {
					m.scratch = make([]byte, max(n, 4096))
				}
				data = m.scratch[:n]
				crc := uint32(0)
				if err = m.c.readPart(data, &crc); err == nil {
					err = m.c.endData(n, crc)
				}
			}
			if err == nil {
				err = s.receive(&h, data)
			}
		}
		if err != nil {
			return err
		}
	}
}

// dataIn lands one Data-In in the task's buffer. We agreed to DataPDUInOrder and DataSequenceInOrder, so
// each PDU continues where the one before ended.
func (m *tcpMover) dataIn(s upcalls, h *pdu.Header, n int) error {
	p := &m.in
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	t := s.task(p.ITT)
	switch {
	case t == nil:
		return protocolError("Data-In for an unknown task %08x", uint32(p.ITT))
	case p.DataSN != t.dataSN:
		return protocolError("Data-In with DataSN %d, expected %d", p.DataSN, t.dataSN)
	case n > 0 && p.Offset != t.received:
		return protocolError("Data-In at offset %d, expected %d", p.Offset, t.received)
	case uint64(t.received)+uint64(n) > uint64(len(t.in)):
		return protocolError("Data-In passes the expected length of %d bytes", len(t.in))
	}
	crc := uint32(0)
	if err := m.c.readPart(t.in[t.received:int(t.received)+n], &crc); err != nil {
		return err
	}
	if err := m.c.endData(n, crc); err != nil {
		return err
	}
	t.received += uint32(n)
	t.dataSN++
	if p.HasStatus {
		return s.status(t, p)
	}
	s.window(p.ExpCmdSN, p.MaxCmdSN)
	return nil
}

// r2t queues the Data-Out that the target asks for.
func (m *tcpMover) r2t(s upcalls, h *pdu.Header, n int) error {
	var p pdu.R2T
	if err := p.Decode(h); err != nil {
		return protocolError("%v", err)
	}
	t := s.task(p.ITT)
	switch {
	case n > 0:
		return protocolError("R2T with a data segment")
	case t == nil:
		return protocolError("R2T for an unknown task %08x", uint32(p.ITT))
	case p.R2TSN != t.r2tSN:
		return protocolError("R2T with R2TSN %d, expected %d", p.R2TSN, t.r2tSN)
	case p.Length > m.p.MaxBurst:
		return protocolError("R2T for %d bytes, MaxBurstLength is %d", p.Length, m.p.MaxBurst)
	case p.Offset != t.sent:
		return protocolError("R2T at offset %d, expected %d", p.Offset, t.sent)
	case uint64(p.Offset)+uint64(p.Length) > uint64(len(t.out)):
		return protocolError("R2T passes the expected length of %d bytes", len(t.out))
	}
	s.window(p.ExpCmdSN, p.MaxCmdSN)
	t.r2tSN++
	t.sent += p.Length
	m.q.mu.Lock()
	m.dataOutLocked(t, p.TTT, p.Offset, p.Length)
	m.q.mu.Unlock()
	m.q.flush(false)
	return nil
}
