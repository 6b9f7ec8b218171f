//go:build !linux

package iwarp

import (
	"net"
	"syscall"
)

// system is for Linux only; elsewhere everything goes through package net.
type system struct{}

func (s *system) open(*net.TCPConn) syscall.RawConn                 { return nil }
func (s *system) read(syscall.RawConn, *receiver) error             { return syscall.ENOSYS }
func (s *system) write(syscall.RawConn, *sender, bool) (int, error) { return 0, syscall.ENOSYS }
func (s *system) segmentSize(syscall.RawConn) int                   { return 0 }
