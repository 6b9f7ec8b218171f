package scsi

import (
	"context"
	"encoding/binary"
)

// Log pages.
const (
	logPageSupported   = 0x00
	logPageExceptions  = 0x2F // informational exceptions
	logPagePersistence = 0x36 // ours
)

// logSense is LOG SENSE (SPC-4, 6.8). Values are the same for every page control.
func logSense(ctx context.Context, c *call) Result {
	page, sub := c.cdb[2]&0x3F, c.cdb[3]
	first := binary.BigEndian.Uint16(c.cdb[5:])
	alloc := int64(binary.BigEndian.Uint16(c.cdb[7:]))
	if sub != 0 {
		return c.fail(invalidCDB(3, -1))
	}
	out := []byte{page, 0, 0, 0}
	var params []logParameter
	switch page {
	case logPageSupported:
		if first != 0 {
			return c.fail(invalidCDB(5, -1))
		}
		out = append(out, logPageSupported, logPageExceptions, logPagePersistence)
	case logPageExceptions:
		// No exception is pending: failures are reported as they happen.
		params = []logParameter{{0, []byte{0, 0, 0xFF, 0xFF}}} // and no temperature is known
	case logPagePersistence:
		params = persistenceLog(c.medium().Contract())
	default:
		return c.fail(invalidCDB(2, 5))
	}
	if n := len(params); n > 0 && first > params[n-1].code {
		return c.fail(invalidCDB(5, -1))
	}
	for _, p := range params {
		if p.code < first {
			continue
		}
		const binaryList = 0x03 // format and linking: binary list
		out = binary.BigEndian.AppendUint16(out, p.code)
		out = append(out, binaryList, byte(len(p.value)))
		out = append(out, p.value...)
	}
	binary.BigEndian.PutUint16(out[2:], uint16(len(out)-4))
	return c.reply(ctx, out, alloc)
}
