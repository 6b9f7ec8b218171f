// Package arena hands out page-aligned memory outside the Go heap: the landing buffers in
// which an initiator's bytes arrive and from which the journal, the replicas and the bucket are
// fed. It is bounded: who asks for more than is free waits, in order of arrival.
//
// Memory is managed in pages of 4 KiB by a buddy system within chunks of 1 MiB. A request gets the
// pieces of its binary decomposition, largest first (60 KiB: 32+16+8+4), or smaller ones when
// the arena is fragmented, so that a request succeeds exactly when enough pages are free.
package arena

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// PageSize is the smallest piece, and the alignment of every piece, in bytes.
	PageSize = 4096
	// ChunkSize is the largest piece in bytes.
	ChunkSize = 1 << 20

	pagesPerChunk = ChunkSize / PageSize
	maxOrder      = 8 // a piece of order o has 1<<o pages
)

var (
	// ErrTooLarge is returned for a request that the whole arena could not satisfy, or that is not positive.
	ErrTooLarge = errors.New("arena: request does not fit")
	// ErrClosed is returned by Alloc after Close.
	ErrClosed = errors.New("arena: closed")
)

// Arena is a bounded set of pages. Methods may be called concurrently.
type Arena struct {
	size int64
	base uintptr

	mu      sync.Mutex // guards all below
	mem     []byte     // nil once unmapped
	buddies buddies
	waiting waiters
	headers [][][]byte // slice headers of freed pieces, for reuse
	mangle  bool
	closed  bool
}

// New maps an arena of bytes, rounded up to 1 MiB. The memory is zeroed and backed by
// the system as it is first touched.
func New(bytes int64) (*Arena, error) {
	if bytes <= 0 || bytes > 1<<43 || int64(int(bytes)) != bytes {
		return nil, fmt.Errorf("arena: size of %d bytes is out of range", bytes)
	}
	chunks := int((bytes + ChunkSize - 1) / ChunkSize)
	mem, err := unix.Mmap(-1, 0, chunks*ChunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("arena: map %d bytes: %w", chunks*ChunkSize, err)
	}
	a := &Arena{size: int64(len(mem)), mem: mem, base: uintptr(unsafe.Pointer(&mem[0]))}
	a.buddies.init(chunks)
	return a, nil
}

// SetMangle makes Free overwrite what it takes back, so that late readers of freed memory see garbage.
func (a *Arena) SetMangle(on bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mangle = on
}

// Region returns all the memory that Alloc hands out parts of, so that it can be registered with a device once. Only
// pieces may be touched; it ends with Close.
func (a *Arena) Region() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mem
}

// Usage is a snapshot.
type Usage struct {
	UsedBytes     int64 // in pieces that are handed out, page granular
	CapacityBytes int64
	Waiting       int // Alloc calls that wait
}

// Usage returns how full the arena is.
func (a *Arena) Usage() Usage {
	a.mu.Lock()
	defer a.mu.Unlock()
	total := len(a.buddies.state)
	return Usage{
		UsedBytes:     int64(total-a.buddies.free) * PageSize,
		CapacityBytes: a.size,
		Waiting:       a.waiting.n,
	}
}

// Alloc returns pieces of n bytes in all. Every piece starts on a page; every piece but the last is a power of two
// of pages long, at most 1 MiB; the capacity of the last reaches to the end of its pages. The content is
// undefined. Alloc waits while fewer pages are free, first come, first served, so that a large request is
// never overtaken for ever; it fails with ctx.Err() when ctx ends first, with ErrTooLarge, or with ErrClosed.
// The pieces belong to the caller until Free, which needs the same slice.
func (a *Arena) Alloc(ctx context.Context, n int64) ([][]byte, error) {
	if n <= 0 || n > a.size {
		return nil, fmt.Errorf("%w: %d bytes of %d", ErrTooLarge, n, a.size)
	}
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil, ErrClosed
	}
	if a.waiting.n == 0 && a.buddies.free >= pages(n) {
		bufs := a.takeLocked(n)
		a.mu.Unlock()
		return bufs, nil
	}
	w := &waiter{n: n, done: make(chan struct{})}
	a.waiting.push(w)
	a.mu.Unlock()

	select {
	case <-w.done:
		return w.bufs, w.err
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if w.queued {
		a.waiting.remove(w)
		a.serveLocked() // whoever stood behind may fit
		return nil, ctx.Err()
	}
	return w.bufs, w.err // served at the same moment
}

// TryAlloc is Alloc without the waiting: it returns nil where Alloc would wait or fail.
func (a *Arena) TryAlloc(n int64) [][]byte {
	if n <= 0 || n > a.size {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.waiting.n > 0 || a.buddies.free < pages(n) {
		return nil
	}
	return a.takeLocked(n)
}

func pages(n int64) int { return int((n + PageSize - 1) / PageSize) }

// takeLocked carves n bytes out of free pages, of which there are enough.
func (a *Arena) takeLocked(n int64) [][]byte {
	var bufs [][]byte
	if k := len(a.headers); k > 0 {
		bufs, a.headers = a.headers[k-1], a.headers[:k-1]
	} else {
		bufs = make([][]byte, 0, 8)
	}
	for left := pages(n); left > 0; {
		page, order := a.buddies.take(left)
		size := PageSize << order
		left -= 1 << order
		off := page * PageSize
		length := int(min(int64(size), n))
		n -= int64(length)
		bufs = append(bufs, a.mem[off:off+length:off+size])
	}
	return bufs
}

// Free takes back what Alloc returned: the same slice, with its pieces in place. The
// caller must not touch the pieces or the slice afterwards. Freeing what is not
// allocated panics.
func (a *Arena) Free(bufs [][]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, b := range bufs {
		off := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - a.base
		if off >= uintptr(len(a.mem)) || off%PageSize != 0 {
			panic("arena: Free of memory that is not the arena's")
		}
		page := int(off / PageSize)
		order := a.buddies.order(page)
		if a.mangle {
			piece := a.mem[off : off+PageSize<<order]
			for j := range piece {
				piece[j] = 0xdb
			}
		}
		a.buddies.give(page, order)
		bufs[i] = nil
	}
	if cap(bufs) > 0 && len(a.headers) < maxHeaders {
		a.headers = append(a.headers, bufs[:0])
	}
	a.serveLocked()
	if a.closed {
		a.unmapLocked()
	}
}

// maxHeaders bounds the slice headers that are kept for reuse.
const maxHeaders = 1024

// serveLocked hands free pages to those who wait, in order.
func (a *Arena) serveLocked() {
	for w := a.waiting.head; w != nil && a.buddies.free >= pages(w.n); w = a.waiting.head {
		a.waiting.remove(w)
		w.bufs = a.takeLocked(w.n)
		close(w.done)
	}
}

// Close ends the arena: those who wait, and later callers of Alloc, get ErrClosed. The memory is unmapped once
// the last piece is freed, at once if none is out. Close is idempotent.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	for w := a.waiting.head; w != nil; w = a.waiting.head {
		a.waiting.remove(w)
		w.err = ErrClosed
		close(w.done)
	}
	return a.unmapLocked()
}

func (a *Arena) unmapLocked() error {
	if a.mem == nil || a.buddies.free < len(a.buddies.state) {
		return nil
	}
	mem := a.mem
	a.mem = nil
	return unix.Munmap(mem)
}

// waiter is one Alloc that waits. bufs and err are set before done is closed.
type waiter struct {
	n          int64
	bufs       [][]byte
	err        error
	done       chan struct{}
	queued     bool
	prev, next *waiter
}

// waiters is a queue from which any element can leave.
type waiters struct {
	head, tail *waiter
	n          int
}

func (q *waiters) push(w *waiter) {
	w.queued, w.prev = true, q.tail
	if q.tail != nil {
		q.tail.next = w
	} else {
		q.head = w
	}
	q.tail = w
	q.n++
}

func (q *waiters) remove(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		q.tail = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
	q.n--
}
