package portal

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// The first bytes tell, however they are cut, and no byte is lost.
func TestPeek(t *testing.T) {
	login := "\x43\x87\x00\x00\x00\x00\x00\x10 and so on"
	for _, c := range []struct {
		sent string
		mpa  bool
		read int // at most
	}{
		{mpaKey, true, 16},
		{mpaKey + "\x50\x02\x00\x08", true, 16},
		{login, false, 16},
		{"M", false, 16},
		{"MPA ID Rep Frame", false, 16}, // a reply is no request
		{"MPA ID Req FrameX"[:15] + "\x00", false, 16},
		{"GET / HTTP/1.1\r\n", false, 16},
		{"\x00", false, 16},
	} {
		for step := 1; step <= len(c.sent); step++ {
			ours, theirs := net.Pipe()
			go func() {
				for b := []byte(c.sent); len(b) > 0; {
					n := min(step, len(b))
					if _, err := theirs.Write(b[:n]); err != nil {
						return
					}
					b = b[n:]
				}
				theirs.Close()
			}()
			read, mpa, err := peek(ours, time.Now().Add(time.Minute))
			want := c.sent
			if c.sent == "M" { // the peer ends before it is told
				if !errors.Is(err, io.EOF) {
					t.Errorf("%q: %v, want EOF", c.sent, err)
				}
				continue
			}
			if err != nil || mpa != c.mpa || len(read) > c.read || string(read) != want[:len(read)] {
				t.Errorf("%q by %d: read %q, MPA %v, %v", c.sent, step, read, mpa, err)
			}
			rest, _ := io.ReadAll(ours)
			if string(read)+string(rest) != want {
				t.Errorf("%q by %d: %q and then %q", c.sent, step, read, rest)
			}
			ours.Close()
		}
	}
}

// Whoever ends, or says nothing more, before it is told is given up.
func TestPeekEnds(t *testing.T) {
	for n := range len(mpaKey) {
		ours, theirs := net.Pipe()
		go func() {
			theirs.Write([]byte(mpaKey[:n]))
			theirs.Close()
		}()
		if read, _, err := peek(ours, time.Now().Add(time.Minute)); !errors.Is(err, io.EOF) || string(read) != mpaKey[:n] {
			t.Errorf("%d bytes: %q, %v", n, read, err)
		}

		ours, theirs = net.Pipe()
		go theirs.Write([]byte(mpaKey[:n]))
		if _, _, err := peek(ours, time.Now().Add(20*time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes and silence: %v", n, err)
		}
		ours.Close()
		theirs.Close()
	}
}
