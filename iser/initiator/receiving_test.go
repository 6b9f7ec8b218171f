package initiator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/isergate/isergate/cache/arena"
	"github.com/isergate/isergate/iser/initiator/internal/target"
	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
)

// The role goes from one goroutine to another in all ways there are, and nothing is ever waited for in vain.
func TestISERReceiving(t *testing.T) {
	m, err := arena.New(32 << 20)
	if err != nil {
		t.Fatal(err)
	}
	s := mustDial(t, ownOptions(own{target.StartBoth(t, iscsi.Options{}, m, nil, 1024, 512), &ISER{}}))
	ctx := testContext(t)
	l, err := s.OpenLUN(ctx, target.LUN)
	if err != nil {
		t.Fatal(err)
	}
	role := &s.mover.(*iserMover).recv.role
	cdb := []byte{0, 0, 0, 0, 0, 0} // TEST UNIT READY
	for round := range 50 {
		// Alone, in the goroutine of the caller; the role stays free, or goes to the mover's goroutine after a while.
		if err := l.TestUnitReady(ctx); err != nil {
			t.Fatal(err)
		}
		if round%10 == 0 {
			for role.Load() != roleTaken {
				if err := sleep(ctx, time.Millisecond); err != nil {
					t.Fatal(err)
				}
			}
		}
		// Nobody waits for the command; then somebody does.
		c, err := s.Submit(ctx, target.LUN, pdu.AttrSimple, cdb, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Ping(ctx, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		// Several at once, some of which are given up.
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				p := make([]byte, 4096)
				for j := range 20 {
					c, cancel := ctx, func() {}
					if i == 3 {
						c, cancel = context.WithTimeout(ctx, time.Duration(j)*20*time.Microsecond)
					}
					err := l.Read(c, uint64(8*i), p)
					if err != nil && (i < 3 || !errors.Is(err, context.DeadlineExceeded)) {
						t.Errorf("round %d: %v", round, err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
	}
	// The end is seen whoever receives.
	done := make(chan error, 1)
	go func() {
		for {
			if err := l.TestUnitReady(ctx); err != nil {
				done <- err
				return
			}
		}
	}()
	s.Kill()
	if err := <-done; !errors.Is(err, ErrClosed) && !errors.Is(err, ErrConnection) {
		t.Error(fmt.Errorf("after the end: %w", err))
	}
}
