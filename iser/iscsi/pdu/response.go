package pdu

// NopIn is NOP-In, RFC 7143 section 11.19: the answer to a ping (ITT valid), a ping of the target
// (TTT valid), or a bare update of the command window (neither).
type NopIn struct {
	LUN                LUN
	ITT, TTT           TaskTag
	StatSN             Serial
	ExpCmdSN, MaxCmdSN Serial
}

// Encode writes the PDU to h.
func (p *NopIn) Encode(h *Header) {
	h.start(OpNopIn, false, flagFinal)
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
}

// Decode reads the PDU from h.
func (p *NopIn) Decode(h *Header) error {
	if err := h.is(OpNopIn); err != nil {
		return err
	}
	*p = NopIn{LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(), StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN()}
	if p.ITT != ReservedTag && p.TTT != ReservedTag {
		return &FormatError{OpNopIn, "both task tags are valid"}
	}
	return nil
}

// SCSIResponse is SCSI Response, RFC 7143 section 11.4. The data segment is a 2-byte
// sense length and the sense data, with response data after it.
type SCSIResponse struct {
	BidiOverflow, BidiUnderflow bool // of the read part of a bidirectional command
	Overflow, Underflow         bool
	Response                    ServiceResponse
	Status                      uint8  // SCSI status; valid if Response is Completed
	StatusQualifier             uint16 // iSCSIProtocolLevel 2 only
	ITT                         TaskTag
	SnackTag                    TaskTag
	StatSN                      Serial
	ExpCmdSN, MaxCmdSN          Serial
	ExpDataSN                   Serial // number of Data-In (and R2T, if bidirectional) PDUs sent
	BidiResidual                uint32
	Residual                    uint32
}

// Encode writes the PDU to h.
func (p *SCSIResponse) Encode(h *Header) {
	h.start(OpSCSIResponse, false, flagFinal|bit(p.BidiOverflow, flagBidiOver)|bit(p.BidiUnderflow, flagBidiUnder)|
		bit(p.Overflow, flagOver)|bit(p.Underflow, flagUnder))
	h[2] = byte(p.Response)
	h[3] = p.Status
	h.put16(8, p.StatusQualifier)
	h.tags(p.ITT, p.SnackTag)
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put32(36, uint32(p.ExpDataSN))
	h.put32(40, p.BidiResidual)
	h.put32(44, p.Residual)
}

// Decode reads the PDU from h.
func (p *SCSIResponse) Decode(h *Header) error {
	if err := h.is(OpSCSIResponse); err != nil {
		return err
	}
	*p = SCSIResponse{
		BidiOverflow: h[1]&flagBidiOver != 0, BidiUnderflow: h[1]&flagBidiUnder != 0,
		Overflow: h[1]&flagOver != 0, Underflow: h[1]&flagUnder != 0,
		Response: ServiceResponse(h[2]), Status: h[3], StatusQualifier: h.u16(8), ITT: h.ITT(), SnackTag: h.TTT(),
		StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
		ExpDataSN: Serial(h.u32(36)), BidiResidual: h.u32(40), Residual: h.u32(44),
	}
	if p.Overflow && p.Underflow || p.BidiOverflow && p.BidiUnderflow {
		return &FormatError{OpSCSIResponse, "overflow and underflow are both 1"}
	}
	return nil
}

// TaskResponse is Task Management Function Response, RFC 7143 section 11.6.
type TaskResponse struct {
	Response           TaskResult
	Additional         [3]byte // additional response information (RFC 7144); iSCSIProtocolLevel 2 only
	ITT                TaskTag
	StatSN             Serial
	ExpCmdSN, MaxCmdSN Serial
}

// Encode writes the PDU to h.
func (p *TaskResponse) Encode(h *Header) {
	h.start(OpTaskResponse, false, flagFinal)
	h[2] = byte(p.Response)
	copy(h[8:11], p.Additional[:])
	h.put32(16, uint32(p.ITT))
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
}

// Decode reads the PDU from h.
func (p *TaskResponse) Decode(h *Header) error {
	if err := h.is(OpTaskResponse); err != nil {
		return err
	}
	*p = TaskResponse{
		Response: TaskResult(h[2]), Additional: [3]byte(h[8:11]), ITT: h.ITT(),
		StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
	}
	return nil
}

// TextResponse is Text Response, RFC 7143 section 11.11. The data segment is text.
type TextResponse struct {
	Final              bool
	Continue           bool // the text goes on in the next response
	LUN                LUN
	ITT, TTT           TaskTag
	StatSN             Serial
	ExpCmdSN, MaxCmdSN Serial
}

// Encode writes the PDU to h.
func (p *TextResponse) Encode(h *Header) {
	h.start(OpTextResponse, false, bit(p.Final, flagFinal)|bit(p.Continue, flagContinue))
	h.put64(8, uint64(p.LUN))
	h.tags(p.ITT, p.TTT)
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
}

// Decode reads the PDU from h.
func (p *TextResponse) Decode(h *Header) error {
	if err := h.is(OpTextResponse); err != nil {
		return err
	}
	*p = TextResponse{
		Final: h.Final(), Continue: h[1]&flagContinue != 0, LUN: h.LUN(), ITT: h.ITT(), TTT: h.TTT(),
		StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
	}
	switch {
	case p.Final && p.Continue:
		return &FormatError{OpTextResponse, "F and C are both 1"}
	case p.Final != (p.TTT == ReservedTag):
		return &FormatError{OpTextResponse, "F contradicts the Target Transfer Tag"}
	}
	return nil
}

// LogoutResponse is Logout Response, RFC 7143 section 11.15.
type LogoutResponse struct {
	Response           LogoutResult
	ITT                TaskTag
	StatSN             Serial
	ExpCmdSN, MaxCmdSN Serial
	Time2Wait          uint16 // seconds
	Time2Retain        uint16 // seconds
}

// Encode writes the PDU to h.
func (p *LogoutResponse) Encode(h *Header) {
	h.start(OpLogoutResponse, false, flagFinal)
	h[2] = byte(p.Response)
	h.put32(16, uint32(p.ITT))
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put16(40, p.Time2Wait)
	h.put16(42, p.Time2Retain)
}

// Decode reads the PDU from h.
func (p *LogoutResponse) Decode(h *Header) error {
	if err := h.is(OpLogoutResponse); err != nil {
		return err
	}
	*p = LogoutResponse{
		Response: LogoutResult(h[2]), ITT: h.ITT(), StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
		Time2Wait: h.u16(40), Time2Retain: h.u16(42),
	}
	return nil
}

// Async is Asynchronous Message, RFC 7143 section 11.9. With AsyncSCSI the data segment
// is a 2-byte sense length, the sense data and event data.
type Async struct {
	LUN                    LUN
	StatSN                 Serial
	ExpCmdSN, MaxCmdSN     Serial
	Event                  AsyncEvent
	VendorCode             uint8
	Param1, Param2, Param3 uint16
}

// Encode writes the PDU to h.
func (p *Async) Encode(h *Header) {
	h.start(OpAsync, false, flagFinal)
	h.put64(8, uint64(p.LUN))
	h.put32(16, uint32(ReservedTag))
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h[36] = byte(p.Event)
	h[37] = p.VendorCode
	h.put16(38, p.Param1)
	h.put16(40, p.Param2)
	h.put16(42, p.Param3)
}

// Decode reads the PDU from h. Any event is accepted.
func (p *Async) Decode(h *Header) error {
	if err := h.is(OpAsync); err != nil {
		return err
	}
	*p = Async{
		LUN: h.LUN(), StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(),
		Event: AsyncEvent(h[36]), VendorCode: h[37], Param1: h.u16(38), Param2: h.u16(40), Param3: h.u16(42),
	}
	return nil
}

// Reject is Reject, RFC 7143 section 11.17. The data segment is the header of the rejected PDU.
type Reject struct {
	Reason             RejectReason
	StatSN             Serial
	ExpCmdSN, MaxCmdSN Serial
	DataSN             Serial // DataSN or R2TSN; meaningful with RejectProtocolError of SNACK and RejectDataDigest
}

// Encode writes the PDU to h.
func (p *Reject) Encode(h *Header) {
	h.start(OpReject, false, flagFinal)
	h[2] = byte(p.Reason)
	h.put32(16, uint32(ReservedTag))
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put32(36, uint32(p.DataSN))
}

// Decode reads the PDU from h. Any reason is accepted.
func (p *Reject) Decode(h *Header) error {
	if err := h.is(OpReject); err != nil {
		return err
	}
	*p = Reject{
		Reason: RejectReason(h[2]), StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(), DataSN: Serial(h.u32(36)),
	}
	return nil
}
