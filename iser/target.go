package iser

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"sync"
	"time"
	"unsafe"

	"github.com/isergate/isergate/iser/iscsi"
	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/rdma"
)

// Sizes of a connection's queues and buffers.
const (
	sendDepth = 256 // work requests of the send queue
	maxSGE    = 16  // elements of one

	// maxControl is the longest data segment that is sent in full feature phase of a normal session (ISER-R2).
	maxControl  = 128
	controlSize = headerLen + pdu.HeaderLen + maxControl

	// inlineWrite is the longest RDMA Write whose bytes are taken when it is posted: cheaper than waiting for the completion.
	inlineWrite = 4096

	// recvAHS is room for additional header segments: the default of MaxAHSLength.
	recvAHS     = 256
	recvSegment = 8192 // data segment of a received PDU (ISER-R13)
	recvSize    = headerLen + pdu.HeaderLen + recvAHS + recvSegment

	// loginBuffers are those of a connection that has not logged in: one receive, and two responses.
	loginBuffers = 3

	// immediates is how many immediate commands the iSCSI layer takes at once; reserve is for other PDUs outside of the window,
	// and for receives that wait for being posted again.
	immediates = 16
	reserve    = 16 + repostAt

	// bounceSize and bounceCount are of the buffers for data outside of registered memory, of one connection: an initiator that does not
	// answer, or not read, uses up its own.
	bounceSize  = 16 << 10
	bounceCount = 8

	minMemory = 3 << 20
)

// Defaults of Options.
const (
	DefaultReceives    = 192
	DefaultORD         = 32
	DefaultReadTimeout = 20 * time.Second
)

// unknownORD is the bound for peers that did not say how many RDMA Reads they serve.
const unknownORD = 8

// Options of a Target. The zero value of a field means its default.
type Options struct {
	Provider rdma.Provider // required

	// Memory is what all connections receive into and answer from; required, at least 3 MiB. It bounds what they take: a
	// login that finds too little is refused. It should be the Target's own.
	Memory rdma.Memory
	// Regions is memory outside the Go heap in which the buffers of tasks lie. Data elsewhere is copied once more.
	Regions [][]byte

	// Receives bounds the receives of one connection: the command window, 40 more, and with unsolicited Data-Out as many again for each PDU that
	// FirstBurstLength allows. Default 192.
	Receives int
	// ORD is how many RDMA Reads a connection has outstanding at most, IRD how many it serves; initiators issue
	// none, but one form of the first frame is one. Defaults 32 and 1.
	ORD, IRD int
	// ReadTimeout ends a connection whose RDMA Reads make no progress for so long, at most twice that. Default 20 s.
	ReadTimeout time.Duration
	// StrictWriteBase: an initiator that does not send TaggedBufferForSolicitedDataOnly advertises the start of its buffer, as RFC 7145
	// has it. Those in use advertise the first byte that they do not send (ISER-R1).
	StrictWriteBase bool
	// NoSendInvalidate leaves all invalidation to the initiator.
	NoSendInvalidate bool

	Logger *slog.Logger // nil: slog.Default
}

// EnsureDefaults replaces zero values.
func (o *Options) EnsureDefaults() {
	if o.Receives == 0 {
		o.Receives = DefaultReceives
	}
	if o.ORD == 0 {
		o.ORD = DefaultORD
	}
	if o.IRD == 0 {
		o.IRD = 1
	}
	if o.ReadTimeout == 0 {
		o.ReadTimeout = DefaultReadTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Validate returns everything that is wrong, after defaults.
func (o Options) Validate() error {
	o.EnsureDefaults()
	var errs []error
	bad := func(wrong bool, format string, args ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf("iser: "+format, args...))
		}
	}
	bad(o.Provider == nil, "Provider is required")
	bad(o.Memory == nil, "Memory is required")
	bad(o.Memory != nil && len(o.Memory.Region()) < minMemory, "Memory is less than %d bytes", minMemory)
	bad(o.Receives < 8 || o.Receives > 1<<15, "Receives is %d, not 8 to 32768", o.Receives)
	bad(o.ORD < 1 || o.ORD > 1024, "ORD is %d, not 1 to 1024", o.ORD)
	bad(o.IRD < 1 || o.IRD > 1024, "IRD is %d, not 1 to 1024", o.IRD)
	bad(o.ReadTimeout < 0, "ReadTimeout is negative")
	return errors.Join(errs...)
}

// Target is what all iSER connections of a node share: a protection domain, registered memory, its limits. Methods may
// be called concurrently.
type Target struct {
	opt     Options
	pd      rdma.PD
	arena   *rdma.Arena
	regions []region
	smalls  sync.Pool // of *small

	mu sync.Mutex
	// The fields below are guarded by mu.
	cond   sync.Cond // a connection or a preparation is gone
	used   int64     // bytes of Memory that are promised
	login  int64     // those of connections before full feature phase
	open   int       // connections that were not closed, and preparations
	live   int       // connections and preparations that hold something
	closed bool
}

// region is registered memory.
type region struct {
	base, size uintptr
	lkey       uint32
	mr         rdma.MR
}

func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// NewTarget registers the memory. It owns neither the memory nor the provider.
func NewTarget(o Options) (*Target, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.EnsureDefaults()
	t := &Target{opt: o}
	t.cond.L = &t.mu
	t.smalls.New = func() any { return new(small) }
	var err error
	if t.pd, err = o.Provider.AllocPD(); err != nil {
		return nil, fmt.Errorf("iser: protection domain: %w", err)
	}
	if err := t.register(); err != nil {
		t.deregister()
		return nil, err
	}
	return t, nil
}

func (t *Target) register() (err error) {
	if t.arena, err = rdma.NewArena(t.pd, t.opt.Memory); err != nil {
		return err
	}
	for _, r := range t.opt.Regions {
		mr, err := t.pd.Register(r, rdma.LocalWrite)
		if err != nil {
			return fmt.Errorf("iser: register %d bytes: %w", len(r), err)
		}
		t.regions = append(t.regions, region{base: addrOf(r), size: uintptr(len(r)), lkey: mr.LKey(), mr: mr})
	}
	return nil
}

// deregister gives everything back.
func (t *Target) deregister() error {
	var errs []error
	for _, r := range t.regions {
		errs = append(errs, r.mr.Deregister())
	}
	if t.arena != nil {
		errs = append(errs, t.arena.Close())
	}
	errs = append(errs, t.pd.Close())
	return errors.Join(errs...)
}

// Close deregisters the memory, after all connections were closed: it waits until they have given back what they held, but not longer than ctx. It
// fails with rdma.ErrBusy if a connection was not closed, or a task of one not released: then nothing is deregistered, and the memory has to stay.
func (t *Target) Close(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	stop := context.AfterFunc(ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.cond.Broadcast()
	})
	defer stop()
	for t.live > 0 && t.open == 0 && ctx.Err() == nil {
		t.cond.Wait()
	}
	if t.live > 0 {
		return fmt.Errorf("%w: %d iSER connections", rdma.ErrBusy, t.live)
	}
	t.closed = true
	return t.deregister()
}

// Usage is how much of a Target is taken.
type Usage struct {
	Connections              int   // those that hold memory
	UsedBytes, CapacityBytes int64 // of Options.Memory
}

// Usage returns a snapshot.
func (t *Target) Usage() Usage {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Usage{Connections: t.live, UsedBytes: t.used, CapacityBytes: int64(len(t.opt.Memory.Region()))}
}

// memoryWait bounds the wait for memory that is there by the Target's own count, but shared or not yet given back.
const memoryWait = 2 * time.Second

// slabBytes is what rdma.NewSlab takes of an arena.
func slabBytes(count, size int) int64 {
	const piece, page = 1 << 20, 4096
	stride := (size + 63) &^ 63
	total := int64(0)
	for left := count; left > 0; {
		n := min(piece, 1<<bits.Len(uint(left*stride-1)))
		total += int64(max(n, page))
		left -= n / stride
	}
	return total
}

// enter counts a connection or a preparation in, with bytes of memory. Those that have not logged in get a quarter of it together.
func (t *Target) enter(bytes int64, login bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return rdma.ErrClosed
	}
	if err := t.promiseLocked(bytes, login); err != nil {
		return err
	}
	t.open++
	t.live++
	return nil
}

func (t *Target) promiseLocked(bytes int64, login bool) error {
	capacity := int64(len(t.opt.Memory.Region()))
	if t.used+bytes > capacity || login && t.login+bytes > capacity/4 {
		return fmt.Errorf("%w: memory of iSER connections: %d of %d bytes are taken", iscsi.ErrResources, t.used, capacity)
	}
	t.used += bytes
	if login {
		t.login += bytes
	}
	return nil
}

// promise takes bytes for a connection that is counted already.
func (t *Target) promise(bytes int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.promiseLocked(bytes, false)
}

// loggedIn takes bytes out of the share of those that have not.
func (t *Target) loggedIn(bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.login -= bytes
}

func (t *Target) giveBack(bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used -= bytes
}

// closing counts a connection as closed: Close waits for it.
func (t *Target) closing() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open--
	t.cond.Broadcast()
}

// leave counts a connection out that holds nothing any more.
func (t *Target) leave(bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used -= bytes
	t.live--
	t.cond.Broadcast()
}

// slab takes buffers whose memory was promised.
func (t *Target) slab(ctx context.Context, count, size int) (*rdma.Slab, error) {
	ctx, cancel := context.WithTimeout(ctx, memoryWait)
	defer cancel()
	s, err := rdma.NewSlab(ctx, t.arena, count, size)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", iscsi.ErrResources, err)
	}
	return s, nil
}

// phaseMemory is what full feature phase of a connection needs.
type phaseMemory struct {
	recvs  *rdma.Slab
	bounce *rdma.Slab // nil in a discovery session
}

// phaseBytes is what phase takes for n receives.
func phaseBytes(p *iscsi.Parameters, n int) int64 {
	bytes := slabBytes(n, recvSize)
	if p.RDMAExtensions {
		bytes += slabBytes(bounceCount, bounceSize)
	}
	return bytes
}

// phase takes the memory for full feature phase, which was promised.
func (t *Target) phase(ctx context.Context, p *iscsi.Parameters, n int) (m phaseMemory, err error) {
	if m.recvs, err = t.slab(ctx, n, recvSize); err != nil || !p.RDMAExtensions {
		return m, err
	}
	if m.bounce, err = t.slab(ctx, bounceCount, bounceSize); err != nil {
		m.recvs.Close()
	}
	return m, err
}

func (m *phaseMemory) close() {
	for _, s := range []*rdma.Slab{m.recvs, m.bounce} {
		if s != nil {
			s.Close()
		}
	}
}

// key returns the key of the region that b lies in.
func (t *Target) key(b []byte) (uint32, bool) {
	for i := range t.regions {
		r := &t.regions[i]
		if off := addrOf(b) - r.base; off <= r.size && uintptr(len(b)) <= r.size-off {
			return r.lkey, true
		}
	}
	if t.arena.Contains(b) {
		return t.arena.MR().LKey(), true
	}
	return 0, false
}

// receives is how many a connection with these parameters posts: for the command window and immediate commands, each with the unsolicited data
// that it may bring, and some PDUs that are neither (ISER-61).
func receives(p *iscsi.Parameters) int {
	if !p.RDMAExtensions {
		return p.CommandWindow + repostAt // discovery
	}
	return (p.CommandWindow+immediates)*perCommand(p) + reserve
}

// perCommand is how many PDUs a command may bring, itself included.
func perCommand(p *iscsi.Parameters) int {
	if p.InitialR2T {
		return 1
	}
	segment := int(p.TargetRecvDataSegmentLength)
	return 1 + (int(p.FirstBurstLength)+segment-1)/segment
}
