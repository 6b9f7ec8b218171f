package portal

import (
	"net"
	"time"
)

// mpaKey begins an MPA request, and nothing that iSCSI begins with (RFC 5044, 7.1).
const mpaKey = "MPA ID Req Frame"

// peek reads of a connection what tells an MPA request from iSCSI, and not a byte more than the key: as soon as a byte differs, it is
// not MPA. It returns what it read. It fails if the connection ends, or is silent at the deadline, before it is told.
func peek(nc net.Conn, deadline time.Time) (read []byte, mpa bool, err error) {
	if err := nc.SetReadDeadline(deadline); err != nil {
		return nil, false, err
	}
	buf := make([]byte, len(mpaKey))
	for n := 0; n < len(mpaKey); {
		k, err := nc.Read(buf[n:])
		n += k
		if string(buf[:n]) != mpaKey[:n] {
			nc.SetReadDeadline(time.Time{})
			return buf[:n], false, nil
		}
		if err != nil && n < len(mpaKey) {
			return buf[:n], false, err
		}
	}
	nc.SetReadDeadline(time.Time{})
	return buf, true, nil
}
