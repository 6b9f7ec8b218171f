package tcp

import (
	"net"

	"github.com/isergate/isergate/iser/iscsi"
)

// Listener makes a Conn of each connection that l accepts. It implements iscsi.Listener.
type Listener struct{ l net.Listener }

// NewListener returns a Listener on l, which it owns.
func NewListener(l net.Listener) *Listener { return &Listener{l} }

// Accept implements iscsi.Listener.
func (l *Listener) Accept() (iscsi.Datamover, error) {
	nc, err := l.l.Accept()
	if err != nil {
		return nil, err
	}
	return NewConn(nc), nil
}

// Addr returns the address of the listener.
func (l *Listener) Addr() net.Addr { return l.l.Addr() }

// Close stops accepting. Connections stay.
func (l *Listener) Close() error { return l.l.Close() }
