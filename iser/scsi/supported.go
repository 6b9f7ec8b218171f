package scsi

import (
	"context"
	"encoding/binary"
)

// Command timeouts in seconds that REPORT SUPPORTED OPERATION CODES recommends. A
// command may wait for back-pressure or for the object store.
const (
	nominalTimeout     = 0 // no typical time is claimed
	recommendedTimeout = 60
)

const timeoutsLen = 12

func appendTimeouts(b []byte) []byte {
	b = append(b, 0, timeoutsLen-2, 0, 0)
	b = binary.BigEndian.AppendUint32(b, nominalTimeout)
	return binary.BigEndian.AppendUint32(b, recommendedTimeout)
}

// reportSupportedOpcodes is REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35).
func reportSupportedOpcodes(ctx context.Context, c *call) Result {
	const (
		rctd     = 0x80
		optAll   = 0
		optOne   = 1
		optSA    = 2
		optEvery = 3
	)
	timeouts := c.cdb[2]&rctd != 0
	opcode, sa := c.cdb[3], binary.BigEndian.Uint16(c.cdb[4:])
	alloc := int64(binary.BigEndian.Uint32(c.cdb[6:]))
	t := c.unit.ops
	if c.cdb[2]&7 == optAll {
		return c.reply(ctx, t.describeAll(timeouts), alloc)
	}
	ops := t.byOpcode[opcode]
	hasSA := len(ops) > 0 && ops[0].hasSA
	var op *operation
	switch c.cdb[2] & 7 {
	case optOne:
		if hasSA {
			return c.fail(invalidCDB(2, 2))
		}
		if len(ops) > 0 {
			op = &ops[0]
		}
	case optSA:
		if len(ops) > 0 && !hasSA {
			return c.fail(invalidCDB(2, 2))
		}
		op = t.service(opcode, sa)
	case optEvery:
		switch {
		case hasSA:
			op = t.service(opcode, sa)
		case len(ops) > 0 && sa == 0:
			op = &ops[0]
		}
	default:
		return c.fail(invalidCDB(2, 2))
	}
	return c.reply(ctx, describeOne(op, timeouts), alloc)
}

// describeAll is the all_commands parameter data.
func (t *operations) describeAll(timeouts bool) []byte {
	const ctdp, servactv = 0x02, 0x01
	b := make([]byte, 4, 2048)
	for op := range t.all {
		flags := byte(0)
		if timeouts {
			flags |= ctdp
		}
		if op.hasSA {
			flags |= servactv
		}
		b = append(b, op.opcode, 0, 0, op.sa, 0, flags, 0, byte(len(op.usage)))
		if timeouts {
			b = appendTimeouts(b)
		}
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// describeOne is the one_command parameter data; op is nil if there is none.
func describeOne(op *operation, timeouts bool) []byte {
	const (
		ctdp        = 0x80
		unsupported = 1
		standard    = 3
	)
	if op == nil {
		return []byte{0, unsupported, 0, 0}
	}
	b := []byte{0, standard, 0, byte(len(op.usage))}
	b = append(b, op.usage...)
	if timeouts {
		b[1] |= ctdp
		b = appendTimeouts(b)
	}
	return b
}

// reportSupportedTMFs is REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4, 6.36). The
// functions of byte 1, and QUERY TASK, need iSCSIProtocolLevel 2 (RFC 7144).
func reportSupportedTMFs(ctx context.Context, c *call) Result {
	const (
		repd         = 0x80
		abortTask    = 0x80
		abortTaskSet = 0x40
		clearTaskSet = 0x10
		lunReset     = 0x08
		queryTask    = 0x04
		targetReset  = 0x02

		queryAsync   = 0x04
		queryTaskSet = 0x02
		nexusReset   = 0x01
	)
	b := make([]byte, 4, 16)
	b[0] = abortTask | abortTaskSet | clearTaskSet | lunReset | queryTask | targetReset
	b[1] = queryAsync | queryTaskSet | nexusReset
	if c.cdb[2]&repd != 0 {
		b = b[:16]
		b[3] = 12 // no timeouts are recommended
	}
	alloc := int64(binary.BigEndian.Uint32(c.cdb[6:]))
	if alloc < 4 {
		return c.fail(invalidCDB(6, -1))
	}
	return c.reply(ctx, b, alloc)
}
