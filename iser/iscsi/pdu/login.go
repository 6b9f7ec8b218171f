package pdu

// LoginRequest is Login Request, RFC 7143 section 11.12. It is always
// immediate. The data segment is text.
type LoginRequest struct {
	Transit    bool
	Continue   bool
	CSG, NSG   Stage // NSG is meaningful with Transit
	VersionMax uint8
	VersionMin uint8
	ISID       ISID
	TSIH       uint16
	ITT        TaskTag
	CID        uint16
	CmdSN      Serial
	ExpStatSN  Serial
}

// Encode writes the PDU to h.
func (p *LoginRequest) Encode(h *Header) {
	h.start(OpLoginRequest, true, bit(p.Transit, flagTransit)|bit(p.Continue, flagContinue)|byte(p.CSG)&3<<2|byte(p.NSG)&3)
	h[2] = p.VersionMax
	h[3] = p.VersionMin
	copy(h[8:14], p.ISID[:])
	h.put16(14, p.TSIH)
	h.put32(16, uint32(p.ITT))
	h.put16(20, p.CID)
	h.request(p.CmdSN, p.ExpStatSN)
}

// Decode reads the PDU from h. The version range is not judged: 0205 is the target's answer to it.
func (p *LoginRequest) Decode(h *Header) error {
	if err := h.is(OpLoginRequest); err != nil {
		return err
	}
	*p = LoginRequest{
		Transit: h[1]&flagTransit != 0, Continue: h[1]&flagContinue != 0, CSG: Stage(h[1] >> 2 & 3), NSG: Stage(h[1] & 3),
		VersionMax: h[2], VersionMin: h[3], ISID: ISID(h[8:14]), TSIH: h.u16(14), ITT: h.ITT(), CID: h.u16(20),
		CmdSN: h.CmdSN(), ExpStatSN: h.ExpStatSN(),
	}
	if !p.Transit {
		p.NSG = 0
	}
	return stages(OpLoginRequest, p.Transit, p.Continue, p.CSG, p.NSG)
}

// LoginResponse is Login Response, RFC 7143 section 11.13. The data segment is text.
type LoginResponse struct {
	Transit            bool
	Continue           bool
	CSG, NSG           Stage // NSG is meaningful with Transit
	VersionMax         uint8
	VersionActive      uint8
	ISID               ISID
	TSIH               uint16
	ITT                TaskTag
	StatSN             Serial // the numbers are valid if the status class is 0
	ExpCmdSN, MaxCmdSN Serial
	Status             LoginStatus
}

// Encode writes the PDU to h.
func (p *LoginResponse) Encode(h *Header) {
	h.start(OpLoginResponse, false, bit(p.Transit, flagTransit)|bit(p.Continue, flagContinue)|byte(p.CSG)&3<<2|byte(p.NSG)&3)
	h[2] = p.VersionMax
	h[3] = p.VersionActive
	copy(h[8:14], p.ISID[:])
	h.put16(14, p.TSIH)
	h.put32(16, uint32(p.ITT))
	h.response(p.StatSN, p.ExpCmdSN, p.MaxCmdSN)
	h.put16(36, uint16(p.Status))
}

// Decode reads the PDU from h. The stages are not judged if the status is not success.
func (p *LoginResponse) Decode(h *Header) error {
	if err := h.is(OpLoginResponse); err != nil {
		return err
	}
	*p = LoginResponse{
		Transit: h[1]&flagTransit != 0, Continue: h[1]&flagContinue != 0, CSG: Stage(h[1] >> 2 & 3), NSG: Stage(h[1] & 3),
		VersionMax: h[2], VersionActive: h[3], ISID: ISID(h[8:14]), TSIH: h.u16(14), ITT: h.ITT(),
		StatSN: h.StatSN(), ExpCmdSN: h.ExpCmdSN(), MaxCmdSN: h.MaxCmdSN(), Status: LoginStatus(h.u16(36)),
	}
	if !p.Transit {
		p.NSG = 0
	}
	if p.Status != LoginSuccess {
		return nil
	}
	return stages(OpLoginResponse, p.Transit, p.Continue, p.CSG, p.NSG)
}

// stages checks the flags of RFC 7143, 11.12.1 to 11.12.3.
func stages(op Opcode, transit, cont bool, csg, nsg Stage) error {
	switch {
	case transit && cont:
		return &FormatError{op, "T and C are both 1"}
	case csg != StageSecurity && csg != StageOperational:
		return &FormatError{op, "CSG is not a login stage"}
	case transit && (nsg <= csg || nsg == 2):
		return &FormatError{op, "NSG does not follow CSG"}
	}
	return nil
}
