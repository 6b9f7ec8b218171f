package portal_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/portal"
	"github.com/isergate/isergate/iser/rdma"
)

// exercise writes and reads through a LUN in sizes that go by every way there is: immediate, unsolicited and solicited.
func exercise(t *testing.T, r *rig, l *initiator.LUN, from uint64, seed uint64) {
	t.Helper()
	rng := rand.NewChaCha8(sha256.Sum256(binary.BigEndian.AppendUint64(nil, seed)))
	for _, n := range []int{512, 4096, 8192, 8704, 65536, 262144, 1 << 20} {
		data := make([]byte, n)
		rng.Read(data)
		if err := l.Write(r.context(), from, data, false); err != nil {
			t.Fatalf("write of %d: %v", n, err)
		}
		got := make([]byte, n)
		if err := l.Read(r.context(), from, got); err != nil {
			t.Fatalf("read of %d: %v", n, err)
		}
		if !bytes.Equal(got, data) {
			t.Fatalf("%d bytes do not read as written", n)
		}
	}
}

// One port, one LUN, every way to log in, at once; each way sees what the others wrote. Discovery lists the portal once, whatever the
// transport of the discovery session.
func TestBothWorlds(t *testing.T) {
	r := newRig(t, settings{})
	var luns []*initiator.LUN
	for _, h := range []how{overTCP, inSends, onStream} {
		_, l := r.login(h)
		luns = append(luns, l)
	}
	if got := r.transports(); got["tcp"] != 1 || got["iser"] != 2 {
		t.Errorf("sessions by transport: %v", got)
	}
	var wg sync.WaitGroup
	for i, l := range luns {
		wg.Go(func() { exercise(t, r, l, uint64(i)*4096, uint64(i)) })
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	stamp := bytes.Repeat([]byte("written by one, read by the others."), 4096)[:65536]
	for i, l := range luns {
		stamp[0] = byte(i)
		if err := l.Write(r.context(), 20000, stamp, true); err != nil {
			t.Fatal(err)
		}
		for j, other := range luns {
			got := make([]byte, len(stamp))
			if err := other.Read(r.context(), 20000, got); err != nil || !bytes.Equal(got, stamp) {
				t.Errorf("%d does not see what %d wrote (%v)", j, i, err)
			}
		}
	}
	for _, h := range []how{overTCP, inSends} {
		found, err := initiator.Discover(r.context(), r.addr, r.options(h))
		if err != nil {
			t.Fatalf("discovery by %s: %v", h, err)
		}
		if len(found) != 1 || len(found[0].Portals) != 1 {
			t.Errorf("discovery by %s found %+v", h, found)
		}
	}
}

// What a portal does not serve, it refuses at once, and says why.
func TestTransports(t *testing.T) {
	for _, c := range []struct {
		transport portal.Transport
		works     map[how]bool
		log       string
	}{
		{portal.TransportAuto, map[how]bool{overTCP: true, inSends: true, onStream: true}, ""},
		{portal.TransportTCP, map[how]bool{overTCP: true}, "transport=auto"},
		{portal.TransportISER, map[how]bool{inSends: true, onStream: true}, "RDMAExtensions"},
	} {
		t.Run(c.transport.String(), func(t *testing.T) {
			r := newRig(t, settings{portal: portal.Options{Transport: c.transport}})
			for _, h := range []how{overTCP, inSends, onStream} {
				s, err := initiator.Dial(r.context(), r.options(h))
				if (err == nil) != c.works[h] {
					t.Errorf("login by %s: %v", h, err)
				}
				if err == nil {
					l, err := s.OpenLUN(r.context(), 0)
					if err != nil {
						t.Fatal(err)
					}
					exercise(t, r, l, 0, 1)
					if err := s.Logout(r.context()); err != nil {
						t.Errorf("logout by %s: %v", h, err)
					}
					continue
				}
				var login *initiator.LoginError
				switch {
				case h == onStream && !errors.Is(err, initiator.ErrNoISER):
					t.Errorf("stream login: %v", err)
				case h == overTCP && !errors.As(err, &login):
					t.Errorf("the login was not answered: %v", err)
				}
			}
			if !strings.Contains(r.log.String(), c.log) {
				t.Errorf("the log does not say %q", c.log)
			}
			// Discovery over TCP is for all (ISER-3).
			if found, err := initiator.Discover(r.context(), r.addr, r.options(overTCP)); err != nil || len(found) != 1 {
				t.Errorf("discovery: %v, %v", found, err)
			}
		})
	}
}

// CHAP comes before resources in either mode (ISER-11).
func TestCHAP(t *testing.T) {
	r := newRig(t, settings{chap: &iscsi.CHAP{User: "host", Secret: []byte("a secret of host")}})
	for _, h := range []how{overTCP, inSends, onStream} {
		o := r.options(h)
		o.CHAP = &initiator.CHAP{User: "host", Secret: "another secret"}
		if s, err := initiator.Dial(r.context(), o); err == nil {
			s.Kill()
			t.Errorf("%s: a wrong secret was accepted", h)
		}
		o.CHAP = &initiator.CHAP{User: "host", Secret: "a secret of host"}
		s, err := initiator.Dial(r.context(), o)
		if err != nil {
			t.Fatalf("%s: %v", h, err)
		}
		l, err := s.OpenLUN(r.context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		exercise(t, r, l, 0, 2)
		s.Kill()
	}
}

// dial is a raw connection.
func (r *rig) dial() net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// closed waits until the peer closes, and returns what came before.
func closed(t *testing.T, c net.Conn) []byte {
	t.Helper()
	b, err := io.ReadAll(c)
	if isTimeout(err) {
		t.Fatalf("the connection is still there; read %q", b)
	}
	return b
}

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

const key = "MPA ID Req Frame"

// request is an MPA request of revision 2 without private data of the user.
func request() []byte {
	return append([]byte(key), 0x10, 2, 0, 8, 0, 1, 0, 1, 0x80, 0, 0, 0)
}

// What is neither an MPA request nor a login, or never becomes one, is closed; those who are logged in are not harmed.
func TestNeitherWorld(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, transport := range []portal.Transport{portal.TransportAuto, portal.TransportTCP, portal.TransportISER} {
		t.Run(transport.String(), func(t *testing.T) {
			r := newRig(t, settings{portal: portal.Options{Transport: transport}})
			by := overTCP
			if transport == portal.TransportISER {
				by = inSends
			}
			_, l := r.login(by)

			for n := range len(key) { // what ends before it is told
				c := r.dial()
				c.Write([]byte(key[:n]))
				c.(*net.TCPConn).CloseWrite()
				if b := closed(t, c); len(b) > 0 {
					t.Errorf("%d bytes of the key were answered by %q", n, b)
				}
			}
			for n := range len(key) { // the key, with one wrong byte
				b := request()
				b[n] ^= byte(1 + rng.IntN(255))
				c := r.dial()
				c.Write(append(b, make([]byte, 48)...))
				c.(*net.TCPConn).CloseWrite()
				closed(t, c)
			}
			for range 100 { // an MPA request that is damaged behind the key
				b := request()
				b[16] ^= byte(rng.Uint32())
				b[17] = byte(rng.Uint32())
				b[18], b[19] = byte(rng.IntN(4)), byte(rng.Uint32())
				c := r.dial()
				c.Write(append(b, make([]byte, rng.IntN(600))...))
				c.(*net.TCPConn).CloseWrite()
				closed(t, c)
			}
			for range 100 {
				b := make([]byte, 1+rng.IntN(4096))
				for i := range b {
					b[i] = byte(rng.Uint32())
				}
				if rng.IntN(2) == 0 {
					b = append(request(), b...) // garbage where FPDUs belong
				}
				c := r.dial()
				c.Write(b)
				c.(*net.TCPConn).CloseWrite()
				closed(t, c)
			}
			exercise(t, r, l, 0, 3)
		})
	}
}

// Connections that say nothing, too little, or one byte at a time hold up nobody, are bounded in number, and end.
func TestSilence(t *testing.T) {
	r := newRig(t, settings{portal: portal.Options{Timeout: 2 * time.Second, MaxPending: 100, MaxPendingPerAddress: 40}})
	var silent []net.Conn
	for i := range 40 {
		c := r.dial()
		c.Write([]byte(key[:i%len(key)]))
		silent = append(silent, c)
	}
	// From this address no more are let in, from another one they are.
	c := r.dial()
	c.Write(request())
	if b := closed(t, c); len(b) != 0 {
		t.Errorf("one connection more than the limit was answered by %q", b)
	}
	from := func(o initiator.Options) initiator.Options {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
		o.DialContext = d.DialContext
		return o
	}
	for range 5 {
		s, err := initiator.Dial(r.context(), from(r.options(overTCP)))
		if err != nil {
			t.Fatal(err)
		}
		s.Kill()
	}
	loris := r.silentByte(silent[0])
	for _, c := range silent {
		if b := closed(t, c); len(b) > 0 {
			t.Errorf("silence was answered by %q", b)
		}
	}
	<-loris
	// The places are free again.
	for _, h := range []how{overTCP, inSends, onStream} {
		s, l := r.login(h)
		exercise(t, r, l, 0, 4)
		s.Kill()
	}
}

// silentByte sends the key as slowly as it can until the connection is closed.
func (r *rig) silentByte(c net.Conn) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(300 * time.Millisecond)
		defer tick.Stop()
		for i := 0; i < len(key); i++ {
			if _, err := c.Write([]byte{key[i]}); err != nil {
				return
			}
			<-tick.C
		}
	}()
	return done
}

// A portal that is closed leaves nothing behind, whatever its connections are doing.
func TestClose(t *testing.T) {
	before := runtime.NumGoroutine()
	for range 3 {
		t.Run("portal", func(t *testing.T) {
			r := newRig(t, settings{})
			_, l := r.login(inSends)
			exercise(t, r, l, 0, 5)
			var conns []net.Conn
			for i := range 20 {
				c := r.dial()
				switch i % 4 {
				case 1:
					c.Write([]byte(key[:5]))
				case 2:
					c.Write(request()[:20]) // the private data is missing
				case 3:
					c.Write(request())
				}
				conns = append(conns, c)
			}
			if err := r.portal.Close(); err != nil {
				t.Error(err)
			}
			if err := r.portal.Close(); err != nil {
				t.Errorf("the second time: %v", err)
			}
			for i, c := range conns {
				if i%4 < 3 {
					closed(t, c)
				}
			}
			if _, err := r.portal.Accept(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("Accept: %v", err)
			}
			exercise(t, r, l, 0, 6) // who is logged in stays
		})
	}
	await(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

// Ten thousand connections that stop after their MPA request: bounded, and none of their memory stays.
func TestManyRequests(t *testing.T) {
	n := 10000
	if testing.Short() {
		n = 1000
	}
	r := newRig(t, settings{server: iscsi.Options{MaxLogins: 200, MaxLoginsPerAddress: 50}})
	_, l := r.login(inSends)
	base := r.memory.Usage().UsedBytes
	most := int64(0)
	for done := 0; done < n; {
		var batch []net.Conn
		for range min(180, n-done) {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+len(batch)/40))}}
			c, err := d.Dial("tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(patience))
			if _, err := c.Write(request()); err != nil {
				t.Fatal(err)
			}
			batch = append(batch, c)
		}
		for _, c := range batch { // answered, or refused by a limit
			b := make([]byte, 20)
			if k, err := io.ReadFull(c, b); err == nil && string(b[:16]) != "MPA ID Rep Frame" {
				t.Fatalf("answered by %q", b[:k])
			}
		}
		most = max(most, r.memory.Usage().UsedBytes-base)
		if done%3600 == 0 { // others get in meanwhile
			s, l := r.login(onStream)
			exercise(t, r, l, 4096, uint64(done))
			s.Kill()
		}
		for _, c := range batch {
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
		done += len(batch)
	}
	t.Logf("%d requests; %d KiB were lent at most", n, most>>10)
	if most > 200*64<<10 {
		t.Errorf("%d KiB for 200 connections that are not logged in", most>>10)
	}
	exercise(t, r, l, 0, 7)
	await(t, "their memory comes back", func() bool { return r.memory.Usage().UsedBytes <= base })
}

// A lack of memory is said: by a rejected MPA request, or by the status Out of Resources (ISER-13).
func TestOutOfMemory(t *testing.T) {
	r := newRig(t, settings{memory: 8 << 20})
	var refused int
	for i := range 16 {
		h := []how{inSends, onStream}[i%2]
		s, err := initiator.Dial(r.context(), r.options(h))
		if err == nil {
			t.Cleanup(func() { s.Kill() })
			continue
		}
		var login *initiator.LoginError
		var rejected *rdma.RejectedError
		switch {
		case errors.As(err, &login) && fmt.Sprintf("%04x", uint16(login.Status)) == "0302":
		case h == inSends && errors.As(err, &rejected):
		default:
			t.Errorf("login by %s: %v", h, err)
		}
		refused++
	}
	if refused == 0 || refused == 16 {
		t.Errorf("%d of 16 were refused", refused)
	}
	_, l := r.login(overTCP) // which needs none of it
	exercise(t, r, l, 0, 8)
}
