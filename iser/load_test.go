package iser_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/iser"
	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// seedOf returns the seed of a random test: ISERGATE_SEED, or a new one, which is logged.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("ISERGATE_SEED"); s != "" {
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = v
	}
	t.Logf("ISERGATE_SEED=%d", seed)
	return seed
}

// Sessions write, read back and compare, while commands are aborted, the unit is reset, and connections break, at any moment: what was written is
// there, every buffer is given back (the rig checks), and everything ends.
func TestRandomLoad(t *testing.T) {
	for _, kind := range []string{"registered", "mixed", "unsolicited"} {
		t.Run(kind, func(t *testing.T) { randomLoad(t, kind, seedOf(t)) })
	}
}

const (
	loadSessions = 3
	loadWorkers  = 6
	loadRegion   = 256 // blocks of a worker
)

func randomLoad(t *testing.T, kind string, seed uint64) {
	r := newRig(t, func(r *rig, o *iscsi.Options, i *iser.Options) {
		o.QueueDepth = 16
		if kind == "unsolicited" {
			o.UnsolicitedData, i.Receives = true, 400
		} else {
			media[kind](r, o, i)
		}
	})
	var wg sync.WaitGroup
	for i := range loadSessions {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			for life := range 5 {
				if err := r.loadLife(rnd, i, life == 4); err != nil {
					t.Errorf("session %d, life %d: %v", i, life, err)
					return
				}
			}
		}()
	}
	wg.Wait()
	await(t, "the sessions end", func() bool { return len(r.srv.Sessions()) == 0 })
	await(t, "memory is given back", func() bool { return r.target.Usage().Connections == 0 && r.lent.Usage().UsedBytes == 0 })
}

// loadLife is a session from login to its end: by logout if it is the last, and else in any way.
func (r *rig) loadLife(rnd *rand.Rand, number int, last bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	o := initiator.Options{
		Portal: r.addr, InitiatorName: initiatorName, TargetName: targetName, ISID: pdu.ISID{0x40, 0, 0, 0, 1, byte(number)},
		ISER: &initiator.ISER{NoInvalidate: rnd.IntN(3) == 0, Hello: rnd.IntN(3) == 0}, QueueDepth: 12, FirstBurstLength: 65536,
	}
	var s *initiator.Session
	var lun *initiator.LUN
	var err error
	for {
		if s, err = initiator.Dial(ctx, o); err != nil {
			return fmt.Errorf("dial: %w", err)
		}
		if lun, err = s.OpenLUN(ctx, 0); err == nil {
			break
		}
		// Another session's reset may have ended a command.
		s.Kill()
		<-s.Done()
		if ctx.Err() != nil {
			return fmt.Errorf("open: %w", err)
		}
	}
	var wg sync.WaitGroup
	failed := make(chan error, loadWorkers)
	stop := make(chan struct{})
	for w := range loadWorkers {
		own := rand.New(rand.NewPCG(rnd.Uint64(), uint64(w)))
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := r.loadWorker(ctx, own, s, lun, (number*loadWorkers+w)*loadRegion, stop); err != nil {
				failed <- err
			}
		}()
	}
	for range 4 + rnd.IntN(8) {
		if rnd.IntN(4) == 0 {
			lun.Session().LUNReset(ctx, 0)
		} else {
			s.Ping(ctx, nil)
		}
	}
	if !last {
		s.Kill()
	}
	close(stop)
	wg.Wait()
	if last {
		if err := s.Logout(ctx); err != nil {
			return fmt.Errorf("logout: %w", err)
		}
	}
	s.Kill()
	<-s.Done()
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// loadWorker writes and reads in a region of its own until it is told to stop, or the session ends.
func (r *rig) loadWorker(ctx context.Context, rnd *rand.Rand, s *initiator.Session, lun *initiator.LUN, base int, stop chan struct{}) error {
	buf, err := s.Alloc(loadRegion * 512)
	if err != nil {
		return nil // the session has ended
	}
	defer s.Free(buf)
	for i := 0; ; i++ {
		select {
		case <-stop:
			if i > 2 {
				return nil
			}
		case <-s.Done():
			return nil
		default:
		}
		blocks := 1 + rnd.IntN([]int{8, 16, 40, loadRegion}[rnd.IntN(4)])
		lba := uint64(base + rnd.IntN(loadRegion-blocks+1))
		b := buf[:blocks*512]
		if rnd.IntN(4) == 0 {
			b = make([]byte, len(b))
		}
		want := pattern(rnd.IntN(1<<30), len(b))
		copy(b, want)
		if rnd.IntN(12) == 0 {
			short, cancel := context.WithTimeout(ctx, time.Duration(rnd.IntN(300))*time.Microsecond)
			lun.Write(short, lba, b, false)
			lun.Read(short, lba, b)
			cancel()
			continue
		}
		if err := lun.Write(ctx, lba, b, false); err != nil {
			if ctx.Err() != nil {
				return fmt.Errorf("write: %w", err)
			}
			continue
		}
		clear(b)
		if err := lun.Read(ctx, lba, b); err != nil {
			if ctx.Err() != nil {
				return fmt.Errorf("read: %w", err)
			}
			continue
		}
		if !bytes.Equal(b, want) {
			return errors.New("read something else than was written")
		}
	}
}
