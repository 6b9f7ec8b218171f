// Package faulty is a decorator over objectstore.Bucket for tests: it fails, delays,
// hangs, loses and forges outcomes by script.
package faulty

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/isergate/isergate/objectstore"
)

// Action is what a Fault does to a call.
type Action int

const (
	// Fail returns the fault's Err; the store is not touched.
	Fail Action = 0
	// WinThenFail carries the call out and returns the fault's Err all the same: a
	// reply that got lost on its way.
	WinThenFail Action = 1
	// Hang waits until the call's ctx ends and returns ErrUnknown for a put, ErrTransient
	// for the rest; the store is not touched.
	Hang Action = 2
	// WinThenHang carries the call out and then hangs.
	WinThenHang Action = 3
	// Delay waits for the fault's Gate to be closed, or for the ctx to end, and carries
	// the call out then.
	Delay Action = 4
	// Drop returns success without touching the store: a store that lies. Only put and delete
	// can be dropped; for the others it does nothing.
	Drop Action = 5
	// Flip inverts one bit in the middle of the bytes that get or get_range bring.
	Flip Action = 6
)

// Fault changes matching calls. A call matches when its operation and key do.
type Fault struct {
	Op     objectstore.Op // "" for each
	Prefix string         // of the key; for delete, of any of its keys
	Nth    int            // the first matching call that is changed, from 1 on; 0 means 1
	Times  int            // how many matching calls from there on; 0 means all
	Action Action
	Err    error           // of Fail and WinThenFail; nil means ErrUnknown for a put, else ErrTransient
	Gate   <-chan struct{} // of Delay
	Began  chan<- struct{} // gets one value, without waiting for a reader, when a call is changed
}

// Bucket is a decorated bucket.
type Bucket struct {
	next objectstore.Bucket

	mu     sync.Mutex // guards all below
	faults []*armed
	down   error
	calls  map[objectstore.Op]int
}

type armed struct {
	Fault
	seen int
}

// Wrap returns b without faults.
func Wrap(b objectstore.Bucket) *Bucket {
	return &Bucket{next: b, calls: make(map[objectstore.Op]int)}
}

// Add arms faults. For each call the first fault that changes it counts; all that match
// count the call.
func (b *Bucket) Add(faults ...Fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range faults {
		b.faults = append(b.faults, &armed{Fault: f})
	}
}

// Clear disarms all faults.
func (b *Bucket) Clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = nil
}

// Down makes every call fail with err from now on, nil ends that: an outage.
func (b *Bucket) Down(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.down = err
}

// Calls returns how many calls of op there were, changed ones included.
func (b *Bucket) Calls(op objectstore.Op) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[op]
}

// match counts the call and returns the fault that changes it, nil for none.
func (b *Bucket) match(op objectstore.Op, keys []string) *Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls[op]++
	if b.down != nil {
		return &Fault{Action: Fail, Err: b.down}
	}
	var hit *Fault
	for _, f := range b.faults {
		if f.Op != "" && f.Op != op || !anyPrefix(keys, f.Prefix) {
			continue
		}
		f.seen++
		first := max(f.Nth, 1)
		if hit == nil && f.seen >= first && (f.Times == 0 || f.seen < first+f.Times) {
			hit = &f.Fault
		}
	}
	return hit
}

func anyPrefix(keys []string, prefix string) bool {
	if prefix == "" {
		return true
	}
	for _, k := range keys {
		if strings.HasPrefix(k, prefix) {
			return true
		}
	}
	return false
}

// run carries out call as the script wants it. It reports whether bytes shall be
// flipped.
func (b *Bucket) run(ctx context.Context, op objectstore.Op, keys []string, call func() error) (flip bool, err error) {
	f := b.match(op, keys)
	if f == nil {
		return false, call()
	}
	if f.Began != nil {
		select {
		case f.Began <- struct{}{}:
		default:
		}
	}
	failure := objectstore.ErrTransient
	if op == objectstore.OpPut {
		failure = objectstore.ErrUnknown
	}
	failure = fmt.Errorf("injected: %w", failure)
	if f.Err != nil {
		failure = f.Err
	}
	switch f.Action {
	case Fail:
		return false, failure
	case WinThenFail, WinThenHang:
		if err := call(); err != nil {
			return false, err
		}
		if f.Action == WinThenHang {
			<-ctx.Done()
			return false, fmt.Errorf("%w: %w", failure, ctx.Err())
		}
		return false, failure
	case Hang:
		<-ctx.Done()
		return false, fmt.Errorf("%w: %w", failure, ctx.Err())
	case Delay:
		select {
		case <-f.Gate:
		case <-ctx.Done():
			return false, fmt.Errorf("%w: %w", failure, ctx.Err())
		}
		return false, call()
	case Drop:
		if op == objectstore.OpPut || op == objectstore.OpDelete {
			return false, nil
		}
		return false, call()
	case Flip:
		return true, call()
	}
	return false, fmt.Errorf("%w: fault with unknown action %d", objectstore.ErrInvalid, f.Action)
}

// PutIfAbsent is objectstore.Bucket's.
func (b *Bucket) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	_, err := b.run(ctx, objectstore.OpPut, []string{key}, func() error {
		return b.next.PutIfAbsent(ctx, key, body)
	})
	return err
}

// Get is objectstore.Bucket's.
func (b *Bucket) Get(ctx context.Context, key string, limit int64) (body []byte, err error) {
	flip, err := b.run(ctx, objectstore.OpGet, []string{key}, func() (err error) {
		body, err = b.next.Get(ctx, key, limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	if flip {
		flipBit(body)
	}
	return body, nil
}

// GetRange is objectstore.Bucket's.
func (b *Bucket) GetRange(ctx context.Context, key string, off int64, into []byte) (n int, err error) {
	flip, err := b.run(ctx, objectstore.OpGetRange, []string{key}, func() (err error) {
		n, err = b.next.GetRange(ctx, key, off, into)
		return err
	})
	if err != nil {
		return 0, err
	}
	if flip {
		flipBit(into[:n])
	}
	return n, nil
}

func flipBit(b []byte) {
	if len(b) > 0 {
		b[len(b)/2] ^= 1
	}
}

// Head is objectstore.Bucket's.
func (b *Bucket) Head(ctx context.Context, key string) (info objectstore.Info, err error) {
	_, err = b.run(ctx, objectstore.OpHead, []string{key}, func() (err error) {
		info, err = b.next.Head(ctx, key)
		return err
	})
	if err != nil {
		return objectstore.Info{}, err
	}
	return info, nil
}

// List is objectstore.Bucket's. Faults match its prefix.
func (b *Bucket) List(ctx context.Context, prefix, startAfter string, max int) (page []objectstore.Info, err error) {
	_, err = b.run(ctx, objectstore.OpList, []string{prefix}, func() (err error) {
		page, err = b.next.List(ctx, prefix, startAfter, max)
		return err
	})
	if err != nil {
		return nil, err
	}
	return page, nil
}

// Delete is objectstore.Bucket's.
func (b *Bucket) Delete(ctx context.Context, keys ...string) error {
	_, err := b.run(ctx, objectstore.OpDelete, keys, func() error { return b.next.Delete(ctx, keys...) })
	return err
}

// URL is objectstore.Bucket's.
func (b *Bucket) URL() string { return b.next.URL() }

// Close is objectstore.Bucket's.
func (b *Bucket) Close() error { return b.next.Close() }
