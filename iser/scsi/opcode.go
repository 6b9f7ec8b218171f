package scsi

import (
	"context"
	"slices"
)

// opFlags say how a command is treated before its handler runs.
type opFlags uint8

const (
	ignoresAttention opFlags = 1 << iota // runs although a unit attention is pending
	needsMedium                          // NOT READY while the medium is ejected
	freeOfReserve                        // runs although another nexus holds a reservation
)

// operation is one command: an opcode or a service action of one.
type operation struct {
	name   string
	opcode byte
	sa     uint8 // service action, if hasSA
	hasSA  bool
	flags  opFlags
	// usage is the CDB usage data of REPORT SUPPORTED OPERATION CODES: one byte for
	// each byte of the CDB, with a one for each bit that is looked at. Its length is
	// that of the CDB. Bits of byte 1 outside it are refused: those change what a
	// command does. Other unused bits are ignored.
	usage []byte
	run   func(context.Context, *call) Result
}

func (o *operation) has(f opFlags) bool { return o.flags&f != 0 }

// allowsReserved reports whether the command runs while another nexus holds a
// reservation (SPC-2, 5.5.1; SBC-2, 4.11).
func (o *operation) allowsReserved(cdb []byte) bool {
	switch o.opcode {
	case 0x1B: // START STOP UNIT: starting only
		return len(cdb) > 4 && cdb[4]&0xF3 == 0x01
	case 0x1E: // PREVENT ALLOW MEDIUM REMOVAL: allowing only
		return len(cdb) > 4 && cdb[4]&0x03 == 0
	}
	return o.has(freeOfReserve)
}

// checkCDB checks what is common to all commands: the length, byte 1, and the NACA bit.
func (o *operation) checkCDB(cdb []byte) (fault, bool) {
	if len(cdb) < len(o.usage) {
		return invalidCDB(len(cdb), -1), false
	}
	known := o.usage[1]
	if o.hasSA {
		known |= serviceActionMask
	}
	if extra := cdb[1] &^ known; extra != 0 {
		return invalidCDB(1, topBit(extra)), false
	}
	if control := len(o.usage) - 1; cdb[control]&controlNACA != 0 {
		return invalidCDB(control, 2), false
	}
	return fault{}, true
}

const (
	serviceActionMask = 0x1F
	controlNACA       = 0x04
)

// topBit is the number of the most significant one in b, which is not zero.
func topBit(b byte) int8 {
	n := int8(7)
	for b&0x80 == 0 {
		b, n = b<<1, n-1
	}
	return n
}

// operations is the table of all commands: what is executed and what is reported are
// one thing.
type operations struct {
	byOpcode [256][]operation // several only with service actions
}

// find returns the operation for a CDB, or nil and why there is none.
func (t *operations) find(cdb []byte) (*operation, fault) {
	if len(cdb) == 0 {
		return nil, faultInvalidOpcode
	}
	ops := t.byOpcode[cdb[0]]
	if len(ops) == 0 {
		return nil, faultInvalidOpcode
	}
	if !ops[0].hasSA {
		return &ops[0], fault{}
	}
	if len(cdb) > 1 {
		if op := t.service(cdb[0], uint16(cdb[1]&serviceActionMask)); op != nil {
			return op, fault{}
		}
	}
	return nil, invalidCDB(1, 4)
}

func (t *operations) service(opcode byte, sa uint16) *operation {
	ops := t.byOpcode[opcode]
	i := slices.IndexFunc(ops, func(o operation) bool { return o.hasSA && uint16(o.sa) == sa })
	if i < 0 {
		return nil
	}
	return &ops[i]
}

// all calls yield for each operation, ascending.
func (t *operations) all(yield func(*operation) bool) {
	for i := range t.byOpcode {
		for j := range t.byOpcode[i] {
			if !yield(&t.byOpcode[i][j]) {
				return
			}
		}
	}
}

// usage patterns of the common CDB shapes; byte 1 is given.
func usage6(op, b1, b2, b3, b4 byte) []byte { return []byte{op, b1, b2, b3, b4, 0} }
func usage10(op, b1 byte) []byte {
	return []byte{op, b1, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0}
}
func usage12(op, b1 byte) []byte {
	return []byte{op, b1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}
}
func usage16(op, b1 byte) []byte {
	return []byte{op, b1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}
}

// Bits of byte 1 of medium access commands.
const (
	b1DPO   = 0x10
	b1FUA   = 0x08
	b1UNMAP = 0x08 // WRITE SAME
	b1NDOB  = 0x01 // WRITE SAME(16)
	b1IMMED = 0x02 // SYNCHRONIZE CACHE, PRE-FETCH
	b1NV    = 0x04 // SYNCHRONIZE CACHE, obsolete; ignored: everything is flushed
	b1BYTCH = 0x06 // VERIFY, WRITE AND VERIFY
)

func newOperations() *operations {
	const (
		quiet = ignoresAttention | freeOfReserve
		media = needsMedium
		dpfua = b1DPO | b1FUA
		dpbyt = b1DPO | b1BYTCH
	)
	t := new(operations)
	add := func(name string, flags opFlags, usage []byte, run func(context.Context, *call) Result) {
		op := operation{name: name, opcode: usage[0], flags: flags, usage: usage, run: run}
		t.byOpcode[op.opcode] = append(t.byOpcode[op.opcode], op)
	}
	addSA := func(name string, flags opFlags, usage []byte, run func(context.Context, *call) Result) {
		op := operation{name: name, opcode: usage[0], sa: usage[1] & serviceActionMask, hasSA: true, flags: flags, usage: usage, run: run}
		t.byOpcode[op.opcode] = append(t.byOpcode[op.opcode], op)
	}

	add("TEST UNIT READY", media, usage6(0x00, 0, 0, 0, 0), testUnitReady)
	add("REQUEST SENSE", quiet, usage6(0x03, 0x01, 0, 0, 0xFF), requestSense)
	add("READ(6)", media, usage6(0x08, 0x1F, 0xFF, 0xFF, 0xFF), read6)
	add("WRITE(6)", media, usage6(0x0A, 0x1F, 0xFF, 0xFF, 0xFF), write6)
	add("INQUIRY", quiet, usage6(0x12, 0x01, 0xFF, 0xFF, 0xFF), inquiry)
	add("MODE SELECT(6)", 0, usage6(0x15, 0x10, 0, 0, 0xFF), modeSelect6)
	add("RESERVE(6)", 0, usage6(0x16, 0, 0, 0, 0), reserve)
	add("RELEASE(6)", freeOfReserve, usage6(0x17, 0, 0, 0, 0), release)
	add("MODE SENSE(6)", 0, usage6(0x1A, 0x08, 0xFF, 0xFF, 0xFF), modeSense6)
	add("START STOP UNIT", 0, usage6(0x1B, 0x01, 0, 0x0F, 0xF7), startStopUnit)
	add("SEND DIAGNOSTIC", 0, usage6(0x1D, 0xF7, 0, 0xFF, 0xFF), sendDiagnostic)
	add("PREVENT ALLOW MEDIUM REMOVAL", 0, usage6(0x1E, 0, 0, 0, 0x03), preventAllow)
	add("READ CAPACITY(10)", media|freeOfReserve, []byte{0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0}, readCapacity10)
	add("READ(10)", media, usage10(0x28, dpfua), read10)
	add("WRITE(10)", media, usage10(0x2A, dpfua), write10)
	add("WRITE AND VERIFY(10)", media, usage10(0x2E, dpbyt), writeVerify10)
	add("VERIFY(10)", media, usage10(0x2F, dpbyt), verify10)
	add("PRE-FETCH(10)", media, usage10(0x34, b1IMMED), prefetch10)
	add("SYNCHRONIZE CACHE(10)", media, usage10(0x35, b1IMMED|b1NV), synchronizeCache10)
	add("READ DEFECT DATA(10)", media, []byte{0x37, 0, 0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0}, readDefectData10)
	add("WRITE SAME(10)", media, usage10(0x41, b1UNMAP), writeSame10)
	add("UNMAP", media, []byte{0x42, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0}, unmap)
	add("LOG SENSE", freeOfReserve, []byte{0x4D, 0, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0}, logSense)
	add("MODE SELECT(10)", 0, []byte{0x55, 0x10, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0}, modeSelect10)
	add("RESERVE(10)", 0, []byte{0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0}, reserve)
	add("RELEASE(10)", freeOfReserve, []byte{0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0}, release)
	add("MODE SENSE(10)", 0, []byte{0x5A, 0x18, 0xFF, 0xFF, 0, 0, 0, 0xFF, 0xFF, 0}, modeSense10)
	add("READ(16)", media, usage16(0x88, dpfua), read16)
	add("COMPARE AND WRITE", media, []byte{0x89, dpfua, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0xFF, 0, 0}, compareAndWrite)
	add("WRITE(16)", media, usage16(0x8A, dpfua), write16)
	add("ORWRITE(16)", media, usage16(0x8B, dpfua), orWrite)
	add("WRITE AND VERIFY(16)", media, usage16(0x8E, dpbyt), writeVerify16)
	add("VERIFY(16)", media, usage16(0x8F, dpbyt), verify16)
	add("PRE-FETCH(16)", media, usage16(0x90, b1IMMED), prefetch16)
	add("SYNCHRONIZE CACHE(16)", media, usage16(0x91, b1IMMED|b1NV), synchronizeCache16)
	add("WRITE SAME(16)", media, usage16(0x93, b1UNMAP|b1NDOB), writeSame16)
	addSA("READ CAPACITY(16)", media|freeOfReserve, []byte{0x9E, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}, readCapacity16)
	addSA("GET LBA STATUS", media, usage16(0x9E, 0x12), getLBAStatus)
	add("REPORT LUNS", quiet, []byte{0xA0, 0, 0xFF, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}, reportLUNs)
	addSA("REPORT SUPPORTED OPERATION CODES", freeOfReserve, []byte{0xA3, 0x0C, 0x87, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}, reportSupportedOpcodes)
	addSA("REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS", freeOfReserve, []byte{0xA3, 0x0D, 0x80, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}, reportSupportedTMFs)
	add("READ(12)", media, usage12(0xA8, dpfua), read12)
	add("WRITE(12)", media, usage12(0xAA, dpfua), write12)
	add("WRITE AND VERIFY(12)", media, usage12(0xAE, dpbyt), writeVerify12)
	add("VERIFY(12)", media, usage12(0xAF, dpbyt), verify12)
	add("READ DEFECT DATA(12)", media, []byte{0xB7, 0x1F, 0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0}, readDefectData12)
	return t
}
