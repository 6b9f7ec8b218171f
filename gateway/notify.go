package gateway

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// supervisor is what started this process, if it speaks sd_notify(3). The zero
// value is none.
type supervisor struct {
	socket   string
	watchdog time.Duration // how often a sign of life is due; 0: never
}

// newSupervisor reads NOTIFY_SOCKET and WATCHDOG_USEC as sd_notify(3) and
// sd_watchdog_enabled(3) describe them.
func newSupervisor(getenv func(string) string) supervisor {
	s := supervisor{socket: getenv("NOTIFY_SOCKET")}
	if pid := getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return s
	}
	if usec, err := strconv.ParseInt(getenv("WATCHDOG_USEC"), 10, 64); err == nil && usec > 0 && usec < 1<<40 {
		s.watchdog = time.Duration(usec) * time.Microsecond
	}
	return s
}

// notifyTimeout bounds one message: a manager that does not read must not hold the node up.
const notifyTimeout = time.Second

// notify sends one state. Without a supervisor it does nothing.
func (s supervisor) notify(state string) error {
	if s.socket == "" {
		return nil
	}
	// A leading @ is the abstract name space, which package net understands.
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("service manager: %w", err)
	}
	defer c.Close()
	if err := c.SetWriteDeadline(time.Now().Add(notifyTimeout)); err != nil {
		return fmt.Errorf("service manager: %w", err)
	}
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("service manager: %w", err)
	}
	return nil
}

// keepAlive sends signs of life until ctx ends, as long as alive says so.
func (s supervisor) keepAlive(ctx context.Context, alive func() bool) {
	if s.socket == "" || s.watchdog == 0 {
		return
	}
	tick := time.NewTicker(s.watchdog / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if alive() {
				_ = s.notify("WATCHDOG=1")
			}
		}
	}
}
