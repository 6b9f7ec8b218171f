package portal_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iwarp"
)

// What a command returns is there when its status is: of every command of many new sessions at once, whose connections, queues and buffers are those
// of sessions that have just ended.
func TestFreshSessions(t *testing.T) {
	const blocks, size = 64, 4096
	sessions, workers := 8, 4
	if os.Getenv("ISERGATE_LONG") != "" {
		sessions = 2000
	}
	for _, crc := range []bool{true, false} {
		t.Run(fmt.Sprintf("crc=%v", crc), func(t *testing.T) {
			r := newRig(t, settings{noCRC: !crc})
			_, l := r.login(overTCP)
			image := make([]byte, blocks*size)
			for i := range image {
				image[i] = byte(i>>12) ^ byte(i*7) | 1
			}
			if err := l.Write(r.context(), 0, image, false); err != nil {
				t.Fatal(err)
			}
			want := l.Capacity
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					for i := range sessions {
						mode := []how{inSends, onStream}[(w+i)%2]
						o := r.options(mode)
						p, err := iwarp.New(iwarp.Options{NoCRC: !crc, MaxULPDU: []int{0, 128, 1000, 0}[i%4]})
						if err != nil {
							t.Error(err)
							return
						}
						o.ISER.Provider = p
						if err := fresh(r, o, want, image, size, uint64(w*1000+i)); err != nil {
							t.Errorf("worker %d, session %d, %s: %v", w, i, mode, err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// fresh is one session from login to its end. What it reads is compared with image.
func fresh(r *rig, o initiator.Options, want initiator.Capacity, image []byte, size int, seed uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rng := rand.New(rand.NewPCG(seed, 1))
	s, err := initiator.Dial(ctx, o)
	if err != nil {
		return fmt.Errorf("login: %w", err)
	}
	defer s.Kill()
	l, err := s.OpenLUN(ctx, 0)
	if err != nil {
		return err
	}
	if l.Capacity != want {
		return fmt.Errorf("capacity %+v, want %+v", l.Capacity, want)
	}
	errs := make(chan error, 4)
	n := 1 + rng.IntN(4)
	for k := range n {
		at := rng.IntN(len(image)/size) * size
		go func() { errs <- several(ctx, l, want, image[at:at+size], at, k%2 == 1) }()
	}
	for range n {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return err
	}
	if seed%3 == 0 {
		return s.Logout(ctx)
	}
	return nil
}

// several runs commands of a unit one after the other, and compares what they return.
func several(ctx context.Context, l *initiator.LUN, want initiator.Capacity, data []byte, at int, registered bool) error {
	buf := make([]byte, len(data))
	if registered {
		b, err := l.Session().Alloc(len(data))
		if err != nil {
			return err
		}
		defer l.Session().Free(b)
		buf = b
	}
	for range 4 {
		clear(buf)
		if err := l.Read(ctx, uint64(at/512), buf); err != nil {
			return err
		}
		if !bytes.Equal(buf, data) {
			return fmt.Errorf("at %d: % x, want % x", at, buf[:16], data[:16])
		}
		in := make([]byte, 96)
		rsp, err := l.Session().Execute(ctx, 0, []byte{0x12, 0, 0, 0, 96, 0}, nil, in)
		if err != nil || rsp.Err() != nil {
			return fmt.Errorf("INQUIRY: %w", errors.Join(err, rsp.Err()))
		}
		if rsp.Transferred < 36 || in[4] == 0 || in[8] == 0 {
			return fmt.Errorf("INQUIRY: %d bytes: % x", rsp.Transferred, in[:36])
		}
		c, err := l.ReadCapacity(ctx)
		if err != nil {
			return err
		}
		if c != want {
			return fmt.Errorf("capacity %+v, want %+v", c, want)
		}
	}
	return nil
}
