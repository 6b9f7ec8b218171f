package portal_test

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

// FuzzConnection sends a connection's worth of bytes, cut in two, to a portal that serves both worlds: whatever they are, the portal closes the
// connection, gives back what it took, and serves others.
func FuzzConnection(f *testing.F) {
	stream := loginRequest(1, "RDMAExtensions=Yes")
	f.Add([]byte(key), uint16(3))
	f.Add(request(), uint16(16))
	f.Add(append(request(), make([]byte, 64)...), uint16(28))
	f.Add(stream, uint16(48))
	f.Add(append(stream, request()...), uint16(len(stream)))
	f.Add(append(append(stream, request()...), 0, 44, 0x41, 0x43), uint16(10))
	f.Add(append(stream, nopOut()...), uint16(len(stream)+5))
	f.Add(append(loginRequest(1, "RDMAExtensions=No"), nopOut()...), uint16(1))
	r := newRig(f, settings{})
	f.Cleanup(func() {
		s, err := initiator.Dial(r.context(), r.options(inSends))
		if err != nil {
			f.Fatal(err)
		}
		s.Kill()
	})
	base := r.memory.Usage().UsedBytes
	f.Fuzz(func(t *testing.T, data []byte, cut uint16) {
		c, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		n := min(int(cut), len(data))
		c.Write(data[:n])
		c.Write(data[n:])
		c.(*net.TCPConn).CloseWrite()
		if _, err := io.Copy(io.Discard, c); err != nil && isTimeout(err) {
			t.Fatal("the connection is still there")
		}
		await(t, "what it took comes back", func() bool { return r.memory.Usage().UsedBytes <= base })
	})
}
