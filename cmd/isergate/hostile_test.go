package main

import (
	"bytes"
	"context"
	wire "encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
)

// loginPDU is the header of a first Login Request that announces so many bytes of text.
func loginPDU(text int) []byte {
	b := make([]byte, 48)
	b[0], b[1] = 0x43, 0x87 // immediate; transit from operational negotiation to full feature phase
	wire.BigEndian.PutUint32(b[4:], uint32(text))
	b[8] = 0x80 // ISID
	return b
}

// mpaRequest is an MPA request of revision 2 as Linux sends it.
func mpaRequest() []byte {
	return append([]byte("MPA ID Req Frame"), 0x10, 2, 0, 8, 0, 128, 0, 1, 0x80, 0, 0, 0)
}

// residentBytes is what a process holds of memory now.
func residentBytes(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// Garbage, logins and MPA requests that stop half way and connections that say nothing: whoever is logged in is served on, others can log in,
// memory stays bounded, and the login timer ends every connection that never logged in.
func TestHostileConnections(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	g := newGateway(t, "--open").start()
	g.run("volume", "create", "v", "--size", "64MiB", "--target", target)
	options := initiator.Options{Portal: g.portal, InitiatorName: host, TargetName: target}

	// use writes a stamp to one of 1024 blocks from a block on, and reads it.
	use := func(ctx context.Context, l *initiator.LUN, from, n uint64) error {
		block := bytes.Repeat(wire.BigEndian.AppendUint64(nil, n), 512)
		lba := (from + n%1024) * 8
		if err := l.Write(ctx, lba, block, n%16 == 0); err != nil {
			return err
		}
		got := make([]byte, len(block))
		if err := l.Read(ctx, lba, got); err != nil {
			return err
		}
		if !bytes.Equal(got, block) {
			return fmt.Errorf("block %d does not read as written", lba)
		}
		return nil
	}
	open := func(ctx context.Context) (*initiator.Session, *initiator.LUN) {
		t.Helper()
		s, err := initiator.Dial(ctx, options)
		if err != nil {
			t.Fatal(err)
		}
		l, err := s.OpenLUN(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		return s, l
	}
	s, l := open(t.Context())
	defer s.Close()
	var served uint64
	for ; served < 2000; served++ { // the program's memory for what is to come
		if err := use(t.Context(), l, 0, served); err != nil {
			t.Fatal(err)
		}
	}
	before := residentBytes(t, g.cmd.Process.Pid)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		// Slow enough that the memory for writes stays what it is.
		for tick := time.NewTicker(10 * time.Millisecond); ctx.Err() == nil; served++ {
			<-tick.C
			if err := use(ctx, l, 0, served); err != nil && ctx.Err() == nil {
				t.Errorf("the session that was there: %v", err)
				return
			}
		}
	})

	// Each attacker has an address of its own, as the limit for one address would otherwise end the attack.
	attackers := 0
	dial := func() net.Conn {
		t.Helper()
		attackers++
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(attackers/40+1))}}
		c, err := d.DialContext(t.Context(), "tcp", g.portal)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	// send writes what the gateway takes: it may close the connection at any byte.
	send := func(c net.Conn, b []byte) { _, _ = c.Write(b) }
	random := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}

	for i := range 500 {
		b := random(1 + rng.IntN(64<<10))
		switch i % 5 {
		case 1: // begins as a login
			copy(b, loginPDU(rng.IntN(8192)))
		case 2: // announces the largest segment there is
			copy(b, loginPDU(1<<24-1))
		case 3: // begins as iWARP
			b = append(mpaRequest(), b...)
		case 4: // nearly
			copy(b, mpaRequest()[:16+rng.IntN(12)])
		}
		c := dial()
		send(c, b)
		_ = c.Close()
	}

	var half []net.Conn
	for i := range 200 {
		c := dial()
		switch i % 7 {
		case 1:
			send(c, loginPDU(100)[:1+rng.IntN(47)])
		case 2:
			send(c, append(loginPDU(8192), random(rng.IntN(8191))...))
		case 3:
			text := append([]byte("InitiatorName=iqn.2026-11.com.example:h\x00SessionType=Discovery\x00"), make([]byte, 3)...)
			text = text[:len(text)/4*4]
			pdu := loginPDU(len(text))
			pdu[1] = 0x40 // to be continued
			send(c, append(pdu, text...))
		case 4:
			send(c, mpaRequest()[:1+rng.IntN(27)])
		case 5:
			send(c, mpaRequest())
		case 6: // and the start of a frame
			send(c, append(mpaRequest(), 0, 0x80, 0x41, 0x43, 0, 0))
		}
		half = append(half, c)
	}
	var loris sync.WaitGroup
	for i := range 8 {
		c := dial()
		half = append(half, c)
		slow := append(loginPDU(8192), make([]byte, 8192)...)
		if i%2 == 1 { // a frame of the largest size, byte by byte
			slow = append(append(mpaRequest(), 0xff, 0xff, 0x41, 0x43), make([]byte, 8192)...)
		}
		loris.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for _, b := range slow {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				<-tick.C
			}
		})
	}

	// All of them are connected now. Others get in.
	for range 5 {
		s, l := open(t.Context())
		if err := use(t.Context(), l, 4096, 1); err != nil {
			t.Error(err)
		}
		_ = s.Close()
	}
	for _, tr := range []transport{overISER, onStream} {
		s, err := initiator.Dial(t.Context(), g.options(tr, host, target))
		if err != nil {
			t.Fatalf("%s: %v", tr, err)
		}
		l, err := s.OpenLUN(t.Context(), 0)
		if err != nil {
			t.Fatalf("%s: %v", tr, err)
		}
		if err := use(t.Context(), l, 4096, 1); err != nil {
			t.Errorf("%s: %v", tr, err)
		}
		_ = s.Close()
	}
	most := int64(64 << 20)
	if raceEnabled {
		most *= 8
	}
	during := residentBytes(t, g.cmd.Process.Pid)
	t.Logf("memory before %d KiB, with %d connections that are not logged in %d KiB", before>>10, len(half), during>>10)
	if during-before > most {
		t.Errorf("memory grew by %d KiB", (during-before)>>10)
	}

	began := time.Now()
	for i, c := range half {
		if err := c.SetReadDeadline(began.Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d is still there", i)
		}
	}
	loris.Wait()
	t.Logf("all were closed after %s", time.Since(began).Round(time.Second))
	cancel()
	wg.Wait()
	s2, l2 := open(t.Context())
	defer s2.Close()
	if err := use(t.Context(), l2, 4096, 2); err != nil {
		t.Error(err)
	}
	after := residentBytes(t, g.cmd.Process.Pid)
	t.Logf("memory after %d KiB; %d writes of the session that was there", after>>10, served)
	if after-before > most {
		t.Errorf("memory grew by %d KiB", (after-before)>>10)
	}
}
