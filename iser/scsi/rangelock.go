package scsi

import (
	"context"
	"sync"
)

// rangeLock is a claim on the blocks [first, end).
type rangeLock struct {
	first, end uint64
	exclusive  bool
	granted    bool
	ready      chan struct{} // closed when granted; nil if granted on arrival

	prev, next *rangeLock
}

func (a *rangeLock) conflicts(b *rangeLock) bool {
	return (a.exclusive || b.exclusive) && a.first < b.end && b.first < a.end
}

// rangeLocks lets a compare-and-change run alone on its blocks. Plain changes share,
// read-modify-write commands exclude. Claims are granted in order of arrival among
// those that conflict, so that nobody starves. While no exclusive claim exists, a
// shared one takes constant time and does not allocate.
type rangeLocks struct {
	mu        sync.Mutex
	head      *rangeLock
	tail      *rangeLock
	exclusive int // exclusive claims, granted or not
	waiting   int
}

// acquire fills l with a claim and returns when it is granted. After an error (ctx
// ended first) nothing is held.
func (r *rangeLocks) acquire(ctx context.Context, l *rangeLock, first, end uint64, exclusive bool) error {
	*l = rangeLock{first: first, end: end, exclusive: exclusive}
	r.mu.Lock()
	l.granted = true
	if exclusive {
		r.exclusive++
	}
	if r.exclusive > 0 {
		for o := r.head; o != nil; o = o.next {
			if o.conflicts(l) {
				l.granted = false
				l.ready = make(chan struct{})
				r.waiting++
				break
			}
		}
	}
	l.prev = r.tail
	if r.tail != nil {
		r.tail.next = l
	} else {
		r.head = l
	}
	r.tail = l
	ready := l.ready
	r.mu.Unlock()
	if ready == nil {
		return nil
	}
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		r.release(l)
		return ctx.Err()
	}
}

// release gives the claim up, granted or not.
func (r *rangeLocks) release(l *rangeLock) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.prev != nil {
		l.prev.next = l.next
	} else {
		r.head = l.next
	}
	if l.next != nil {
		l.next.prev = l.prev
	} else {
		r.tail = l.prev
	}
	l.prev, l.next = nil, nil
	if l.exclusive {
		r.exclusive--
	}
	if !l.granted {
		r.waiting--
	}
	if r.waiting > 0 {
		r.grantLocked()
	}
}

func (r *rangeLocks) grantLocked() {
	for l := r.head; l != nil; l = l.next {
		if l.granted {
			continue
		}
		free := true
		for o := r.head; o != l; o = o.next {
			if o.conflicts(l) {
				free = false
				break
			}
		}
		if free {
			l.granted = true
			r.waiting--
			close(l.ready)
		}
	}
}
