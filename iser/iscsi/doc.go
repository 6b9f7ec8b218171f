// Package iscsi is the target side of iSCSI, RFC 7143 at error recovery level 0 with RFC 7144: login,
// key negotiation, CHAP, sessions, command ordering, task management, text, logout and asynchronous messages.
//
// It knows no transport and moves no payload. A Datamover (the split of RFC 5047) carries the PDUs of one
// connection and the bytes of its commands; Data-In, R2T and Data-Out exist only below that interface. It knows no
// volume either: a Backend says who may log in where, and gives the logical units.
//
// DESIGN.md has the invariants, the table from requirements to tests, and the limits.
package iscsi
