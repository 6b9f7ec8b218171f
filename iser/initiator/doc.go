// Package initiator is an iSCSI initiator (RFC 7143), over TCP and over iSER (RFC 7145): discovery, login with CHAP and digests, and
// SCSI commands with task management over one connection per session at error recovery level 0.
//
// Dial logs in and returns a Session, on which any number of goroutines may run commands;
// Session.OpenLUN returns a LUN with the block commands as methods. DialConn returns a Conn, on
// which a test of a target sends and receives single PDUs of its own making.
//
// A session does not reconnect. When its connection fails, everything outstanding ends with an error that Is
// ErrConnection, and whether such a command took effect is unknown: the caller dials again and finds out.
package initiator
