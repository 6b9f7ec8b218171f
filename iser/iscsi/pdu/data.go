package pdu

// DataOut is SCSI Data-Out, RFC 7143 section 11.7. The data segment is payload.
type DataOut struct {
	Final     bool
	LUN       LUN     // meaningful if TTT is valid
	ITT, TTT  TaskTag // TTT is ReservedTag in unsolicited data
	ExpStatSN Serial
	DataSN    Serial
	Offset    uint32 // Buffer Offset in bytes
}

// Encode writes the PDU to h.
func (p *DataOut) Encode(h *Header) {
	h.start(OpDataOut, false, bit(p.Final, flagFinal))
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.SetExpStatSN(p.ExpStatSN)
	h.put32(36, uint32(p.DataSN))
	h.put32(40, p.Offset)
}

// Decode reads the PDU from h.
func (p *DataOut) Decode(h *Header) error {
	if err := h.is(OpDataOut); err != nil {
		return err
	}
	p.Final = h.Final()
	p.LUN = h.LUN()
	p.ITT = h.ITT()
	p.TTT = h.TTT()
	p.ExpStatSN = h.ExpStatSN()
	p.DataSN = Serial(h.u32(36))
	p.Offset = h.u32(40)
	return nil
}

// DataIn is SCSI Data-In, RFC 7143 section 11.7. The data segment is payload.
type DataIn struct {
	Final               bool
	Ack                 bool // asks for a DataACK SNACK; error recovery level 1 and above
	Overflow, Underflow bool // meaningful with HasStatus
	HasStatus           bool // the S bit: Status, StatSN and Residual are valid, no SCSI Response follows
	Status              uint8
	LUN                 LUN // meaningful if TTT is valid
	ITT, TTT            TaskTag
	StatSN              Serial
	ExpCmdSN, MaxCmdSN  Serial
	DataSN              Serial
	Offset              uint32 // Buffer Offset in bytes
	Residual            uint32
}

// Encode writes the PDU to h.
func (p *DataIn) Encode(h *Header) {
	h.start(OpDataIn, false, bit(p.Final, flagFinal)|bit(p.Ack, flagAck)|bit(p.Overflow, flagOver)|
		bit(p.Underflow, flagUnder)|bit(p.HasStatus, flagStatus))
	h[3] = p.Status
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put32(36, uint32(p.DataSN))
	h.put32(40, p.Offset)
	h.put32(44, p.Residual)
}

// Decode reads the PDU from h.
func (p *DataIn) Decode(h *Header) error {
	if err := h.is(OpDataIn); err != nil {
		return err
	}
	p.Final = h.Final()
	p.Ack = h[1]&flagAck != 0
	p.Overflow = h[1]&flagOver != 0
	p.Underflow = h[1]&flagUnder != 0
	p.HasStatus = h[1]&flagStatus != 0
	p.Status = h[3]
	p.LUN = h.LUN()
	p.ITT = h.ITT()
	p.TTT = h.TTT()
	p.StatSN = h.StatSN()
	p.ExpCmdSN = h.ExpCmdSN()
	p.MaxCmdSN = h.MaxCmdSN()
	p.DataSN = Serial(h.u32(36))
	p.Offset = h.u32(40)
	p.Residual = h.u32(44)
	switch {
	case p.HasStatus && !p.Final:
		return &FormatError{OpDataIn, "S without F"}
	case p.HasStatus && p.Overflow && p.Underflow:
		return &FormatError{OpDataIn, "overflow and underflow are both 1"}
	}
	return nil
}

// R2T is Ready To Transfer, RFC 7143 section 11.8.
type R2T struct {
	LUN                LUN
	ITT, TTT           TaskTag
	StatSN             Serial // the next StatSN; an R2T does not advance it
	ExpCmdSN, MaxCmdSN Serial
	R2TSN              Serial
	Offset             uint32 // Buffer Offset in bytes
	Length             uint32 // Desired Data Transfer Length in bytes
}

// Encode writes the PDU to h.
func (p *R2T) Encode(h *Header) {
	h.start(OpR2T, false, flagFinal)
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put32(36, uint32(p.R2TSN))
	h.put32(40, p.Offset)
	h.put32(44, p.Length)
}

// Decode reads the PDU from h.
func (p *R2T) Decode(h *Header) error {
	if err := h.is(OpR2T); err != nil {
		return err
	}
	*p = R2T{
		LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(), StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
		R2TSN: Serial(h.u32(36)), Offset: h.u32(40), Length: h.u32(44),
	}
	switch {
	case p.TTT == ReservedTag:
		return &FormatError{OpR2T, "reserved Target Transfer Tag"}
	case p.Length == 0:
		return &FormatError{OpR2T, "Desired Data Transfer Length is 0"}
	case uint64(p.Offset)+uint64(p.Length) > 1<<32:
		return &FormatError{OpR2T, "transfer passes the end of the buffer"}
	}
	return nil
}
