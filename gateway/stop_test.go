package gateway

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/api"
	client "github.com/isergate/isergate/iser/initiator"
)

// deafConn is a connection whose reading can be stopped.
type deafConn struct {
	net.Conn
	mu     sync.Mutex
	cond   sync.Cond
	deaf   bool // guarded by mu
	closed bool // guarded by mu
}

func (c *deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.deaf && !c.closed {
		c.cond.Wait()
	}
	if c.deaf {
		return 0, net.ErrClosed // what came is not read at the end either
	}
	return n, err
}

func (c *deafConn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.cond.Broadcast()
	c.mu.Unlock()
	return c.Conn.Close()
}

func (c *deafConn) stopReading() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deaf = true
}

// Initiators that asked for more than they read do not keep a node from stopping in order, and in time, over either transport.
func TestStopWithDeafInitiators(t *testing.T) {
	const target, reads = "iqn.2026-11.com.example:deaf", 64
	config := testConfig(t)
	config.Open = true
	n := startNode(t, config)
	createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 64 << 20, Target: target})
	var wg sync.WaitGroup
	var deafs []*deafConn
	for name, iser := range map[string]*client.ISER{"tcp": nil, "iser": {}} {
		var deaf *deafConn
		s, err := client.Dial(t.Context(), client.Options{
			Portal: n.front.portals.list[0].Listen, InitiatorName: initiator + "." + name, TargetName: target, ISER: iser, QueueDepth: reads,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := new(net.Dialer).DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				if err := c.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
					return nil, err
				}
				deaf = &deafConn{Conn: c}
				deaf.cond.L = &deaf.mu
				return deaf, nil
			},
		})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		t.Cleanup(s.Kill)
		t.Cleanup(func() { _ = deaf.Close() }) // before that
		l, err := s.OpenLUN(t.Context(), 0)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		deaf.stopReading()
		deafs = append(deafs, deaf)
		for range reads {
			wg.Go(func() {
				if err := l.Read(t.Context(), 0, make([]byte, 1<<20)); err == nil {
					t.Errorf("%s: was read by nobody, and succeeded", name)
				}
			})
		}
	}
	still, running := 0, 0 // polls since the last change
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); still < 200; still++ {
		now, commands := 0, uint64(0)
		for _, s := range n.front.sessions() {
			now += s.Running
			commands += s.Commands
		}
		if now != running || commands < 2*reads {
			still, running = 0, now
		}
		if time.Now().After(deadline) {
			t.Fatal("the connections do not become full")
		}
		<-tick.C
	}
	stopNode(t, n)
	for _, c := range deafs {
		_ = c.Close()
	}
	wg.Wait()
}
