package pdu

// Flags of byte 1 that several PDUs share.
const (
	flagFinal     = 0x80
	flagContinue  = 0x40
	flagRead      = 0x40
	flagWrite     = 0x20
	flagBidiOver  = 0x10
	flagBidiUnder = 0x08
	flagOver      = 0x04
	flagUnder     = 0x02
	flagStatus    = 0x01
	flagAck       = 0x40
	flagTransit   = 0x80
)

// NopOut is NOP-Out, RFC 7143 section 11.18: a ping of the initiator, or its answer to a ping.
type NopOut struct {
	Immediate bool
	LUN       LUN
	ITT, TTT  TaskTag
	CmdSN     Serial
	ExpStatSN Serial
}

// Encode writes the PDU to h.
func (p *NopOut) Encode(h *Header) {
	h.start(OpNopOut, p.Immediate, flagFinal)
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.request(p.CmdSN, p.ExpStatSN)
}

// Decode reads the PDU from h.
func (p *NopOut) Decode(h *Header) error {
	if err := h.is(OpNopOut); err != nil {
		return err
	}
	*p = NopOut{Immediate: h.Immediate(), LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(), CmdSN: h.CmdSN(), ExpStatSN: h.ExpStatSN()}
	if p.ITT == ReservedTag && !p.Immediate {
		return &FormatError{OpNopOut, "reserved Initiator Task Tag without the I bit"}
	}
	return nil
}

// SCSICommand is SCSI Command, RFC 7143 section 11.3. An extended CDB and
// the bidirectional read length are AHS.
type SCSICommand struct {
	Immediate bool
	Final     bool // no unsolicited Data-Out follows
	Read      bool
	Write     bool
	Attr      TaskAttr
	Priority  uint8 // 0 to 15; iSCSIProtocolLevel 2 only
	LUN       LUN
	ITT       TaskTag
	EDTL      uint32 // Expected Data Transfer Length in bytes
	CmdSN     Serial
	ExpStatSN Serial
	CDB       [16]byte
}

// Encode writes the PDU to h.
func (p *SCSICommand) Encode(h *Header) {
	h.start(OpSCSICommand, p.Immediate, bit(p.Final, flagFinal)|bit(p.Read, flagRead)|bit(p.Write, flagWrite)|byte(p.Attr)&7)
	h[2] = p.Priority << 4
	h.put64(8, uint64(p.LUN))
	h.put32(16, uint32(p.ITT))
	h.put32(20, p.EDTL)
	h.request(p.CmdSN, p.ExpStatSN)
	copy(h[32:], p.CDB[:])
}

// Decode reads the PDU from h.
func (p *SCSICommand) Decode(h *Header) error {
	if err := h.is(OpSCSICommand); err != nil {
		return err
	}
	p.Immediate = h.Immediate()
	p.Final = h.Final()
	p.Read = h[1]&flagRead != 0
	p.Write = h[1]&flagWrite != 0
	p.Attr = TaskAttr(h[1] & 7)
	p.Priority = h[2] >> 4
	p.LUN = h.LUN()
	p.ITT = h.ITT()
	p.EDTL = h.u32(20)
	p.CmdSN = h.CmdSN()
	p.ExpStatSN = h.ExpStatSN()
	copy(p.CDB[:], h[32:])
	switch {
	case p.ITT == ReservedTag:
		return &FormatError{OpSCSICommand, "reserved Initiator Task Tag"}
	case !p.Final && !p.Write:
		return &FormatError{OpSCSICommand, "F and W are both 0"}
	case p.EDTL > 0 && !p.Read && !p.Write:
		return &FormatError{OpSCSICommand, "Expected Data Transfer Length without R or W"}
	case p.Attr > AttrACA:
		return &FormatError{OpSCSICommand, "reserved task attribute"}
	}
	return nil
}

// TaskRequest is Task Management Function Request, RFC 7143 section 11.5.
type TaskRequest struct {
	Immediate  bool
	Function   TaskFunction
	LUN        LUN
	ITT        TaskTag
	Referenced TaskTag // Referenced Task Tag; ReservedTag where the function has none
	CmdSN      Serial
	ExpStatSN  Serial
	RefCmdSN   Serial
	ExpDataSN  Serial
}

// Encode writes the PDU to h.
func (p *TaskRequest) Encode(h *Header) {
	h.start(OpTaskRequest, p.Immediate, flagFinal|byte(p.Function)&0x7f)
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.Referenced)
	h.request(p.CmdSN, p.ExpStatSN)
	h.put32(32, uint32(p.RefCmdSN))
	h.put32(36, uint32(p.ExpDataSN))
}

// Decode reads the PDU from h. Any function number is accepted.
func (p *TaskRequest) Decode(h *Header) error {
	if err := h.is(OpTaskRequest); err != nil {
		return err
	}
	*p = TaskRequest{
		Immediate: h.Immediate(), Function: TaskFunction(h[1] & 0x7f), LUN: h.LUN(), ITT: h.ITT(), Referenced: h.TTT(),
		CmdSN: h.CmdSN(), ExpStatSN: h.ExpStatSN(), RefCmdSN: Serial(h.u32(32)), ExpDataSN: Serial(h.u32(36)),
	}
	if p.ITT == ReservedTag {
		return &FormatError{OpTaskRequest, "reserved Initiator Task Tag"}
	}
	return nil
}

// TextRequest is Text Request, RFC 7143 section 11.10. The data segment is text.
type TextRequest struct {
	Immediate bool
	Final     bool
	Continue  bool // the text goes on in the next request
	LUN       LUN
	ITT, TTT  TaskTag
	CmdSN     Serial
	ExpStatSN Serial
}

// Encode writes the PDU to h.
func (p *TextRequest) Encode(h *Header) {
	h.start(OpTextRequest, p.Immediate, bit(p.Final, flagFinal)|bit(p.Continue, flagContinue))
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.request(p.CmdSN, p.ExpStatSN)
}

// Decode reads the PDU from h.
func (p *TextRequest) Decode(h *Header) error {
	if err := h.is(OpTextRequest); err != nil {
		return err
	}
	*p = TextRequest{
		Immediate: h.Immediate(), Final: h.Final(), Continue: h[1]&flagContinue != 0, LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(),
		CmdSN: h.CmdSN(), ExpStatSN: h.ExpStatSN(),
	}
	switch {
	case p.ITT == ReservedTag:
		return &FormatError{OpTextRequest, "reserved Initiator Task Tag"}
	case p.Final && p.Continue:
		return &FormatError{OpTextRequest, "F and C are both 1"}
	}
	return nil
}

// LogoutRequest is Logout Request, RFC 7143 section 11.14.
type LogoutRequest struct {
	Immediate bool
	Reason    LogoutReason
	ITT       TaskTag
	CID       uint16 // not meaningful with CloseSession
	CmdSN     Serial
	ExpStatSN Serial
}

// Encode writes the PDU to h.
func (p *LogoutRequest) Encode(h *Header) {
	h.start(OpLogoutRequest, p.Immediate, flagFinal|byte(p.Reason)&0x7f)
	h.put32(16, uint32(p.ITT))
	h.put16(20, p.CID)
	h.request(p.CmdSN, p.ExpStatSN)
}

// Decode reads the PDU from h. Any reason is accepted.
func (p *LogoutRequest) Decode(h *Header) error {
	if err := h.is(OpLogoutRequest); err != nil {
		return err
	}
	*p = LogoutRequest{
		Immediate: h.Immediate(), Reason: LogoutReason(h[1] & 0x7f), ITT: h.ITT(), CID: h.u16(20),
		CmdSN: h.CmdSN(), ExpStatSN: h.ExpStatSN(),
	}
	if p.ITT == ReservedTag {
		return &FormatError{OpLogoutRequest, "reserved Initiator Task Tag"}
	}
	return nil
}

// Snack is SNACK Request, RFC 7143 section 11.16. It is legal at error recovery level 1 and above.
type Snack struct {
	Type      SnackType
	LUN       LUN
	ITT, TTT  TaskTag // TTT is the SNACK tag of an R-Data SNACK
	ExpStatSN Serial
	BegRun    Serial
	RunLength uint32
}

// Encode writes the PDU to h.
func (p *Snack) Encode(h *Header) {
	h.start(OpSnack, false, flagFinal|byte(p.Type)&0xf)
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.SetExpStatSN(p.ExpStatSN)
	h.put32(40, uint32(p.BegRun))
	h.put32(44, p.RunLength)
}

// Decode reads the PDU from h. Any type is accepted.
func (p *Snack) Decode(h *Header) error {
	if err := h.is(OpSnack); err != nil {
		return err
	}
	*p = Snack{
		Type: SnackType(h[1] & 0xf), LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(), ExpStatSN: h.ExpStatSN(),
		BegRun: Serial(h.u32(40)), RunLength: h.u32(44),
	}
	return nil
}
