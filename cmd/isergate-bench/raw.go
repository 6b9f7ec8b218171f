package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/iser/initiator/bench"
	"github.com/isergate/isergate/objectstore"
)

// The raw limits are measured in a process of their own: this program, called with workerArg. It reads one task and writes one
// rawResult, both JSON.
const workerArg = "raw-limit-worker"

// task is what a worker does.
type task struct {
	Kind     string        `json:"kind"` // journal, put or get
	Depth    int           `json:"depth"`
	Duration time.Duration `json:"duration"` // of journal, and of get if it is random

	Path string `json:"path,omitempty"` // journal: a pre-zeroed file

	URL     string   `json:"url,omitempty"` // put, get
	Objects []object `json:"objects,omitempty"`
	Range   int      `json:"range,omitempty"`  // get: bytes of a request
	Random  bool     `json:"random,omitempty"` // get: ranges in random order, otherwise each once in order
}

// object is an object to put or get.
type object struct {
	Key  string `json:"key"`
	Size int64  `json:"size"`
}

// rawResult is what a worker measured.
type rawResult struct {
	Operations uint64        `json:"operations"`
	Bytes      uint64        `json:"bytes"`
	Elapsed    time.Duration `json:"elapsed"`
	CPU        time.Duration `json:"cpu"`
	P50        time.Duration `json:"p50"`
	P99        time.Duration `json:"p99"`
}

// rawLimit runs a task in a process of its own.
func (h *harness) rawLimit(ctx context.Context, t task, env []string) (rawResult, error) {
	self, err := os.Executable()
	if err != nil {
		return rawResult{}, err
	}
	text, err := json.Marshal(t)
	if err != nil {
		return rawResult{}, err
	}
	var out, problems bytes.Buffer
	cmd := exec.Command(self, workerArg)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(text), &out, &problems
	p, err := h.launcher.start("raw "+t.Kind, h.dir, cmd)
	if err != nil {
		return rawResult{}, err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.kill()
		return rawResult{}, ctx.Err()
	}
	if p.err != nil {
		return rawResult{}, fmt.Errorf("raw %s: %w: %s", t.Kind, p.err, problems.Bytes())
	}
	var r rawResult
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return rawResult{}, fmt.Errorf("raw %s: %w", t.Kind, err)
	}
	return r, nil
}

// worker is the main function of the process that rawLimit starts.
func worker(in io.Reader, out io.Writer) error {
	var t task
	if err := json.NewDecoder(in).Decode(&t); err != nil {
		return err
	}
	var r rawResult
	var err error
	switch t.Kind {
	case "journal":
		r, err = journalLimit(t)
	case "put":
		r, err = putLimit(context.Background(), t)
	case "get":
		r, err = getLimit(context.Background(), t)
	default:
		err = fmt.Errorf("unknown task %q", t.Kind)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(r)
}

// ownCPU returns the CPU time of this process.
func ownCPU() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// rawBlock is what one writer of journalLimit writes at once.
const rawBlock = 4096

// appendLoop is the bare group commit: all blocks that wait are written with one call and synced with one, to a pre-zeroed
// file that is used from its beginning again when it is full. There is no header, no checksum, and nothing to find anything by.
type appendLoop struct {
	file *os.File
	size int64

	mu      sync.Mutex
	waiting []*rawWriter  // guarded by mu
	kick    chan struct{} // buffered: someone waits
}

type rawWriter struct {
	block [rawBlock]byte
	done  chan struct{} // buffered
	hist  bench.Histogram
}

// commit serves the writers until quit is closed. Its error is that of the first write or sync that failed.
func (l *appendLoop) commit(quit <-chan struct{}) error {
	var batch []*rawWriter
	var buffer []byte
	var at int64
	for {
		select {
		case <-quit:
			return nil
		case <-l.kick:
		}
		l.mu.Lock()
		batch, l.waiting = l.waiting, batch[:0]
		l.mu.Unlock()
		buffer = buffer[:0]
		for _, w := range batch {
			buffer = append(buffer, w.block[:]...)
		}
		if at+int64(len(buffer)) > l.size {
			at = 0
		}
		if _, err := l.file.WriteAt(buffer, at); err != nil {
			return err
		}
		if err := unix.Fdatasync(int(l.file.Fd())); err != nil {
			return err
		}
		at += int64(len(buffer))
		for _, w := range batch {
			w.done <- struct{}{}
		}
	}
}

func journalLimit(t task) (rawResult, error) {
	f, err := os.OpenFile(t.Path, os.O_RDWR, 0)
	if err != nil {
		return rawResult{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return rawResult{}, err
	}
	if info.Size() < int64(t.Depth)*rawBlock {
		return rawResult{}, fmt.Errorf("%s holds %d bytes, less than %d blocks", t.Path, info.Size(), t.Depth)
	}
	l := &appendLoop{file: f, size: info.Size(), kick: make(chan struct{}, 1)}
	quit, failed := make(chan struct{}), make(chan struct{})
	var failure error
	var committer, running sync.WaitGroup
	committer.Go(func() {
		if failure = l.commit(quit); failure != nil {
			close(failed)
		}
	})
	var stop atomic.Bool
	timer := time.AfterFunc(t.Duration, func() { stop.Store(true) })
	defer timer.Stop()
	writers := make([]*rawWriter, t.Depth)
	begin, used := time.Now(), ownCPU()
	for i := range writers {
		w := &rawWriter{done: make(chan struct{}, 1)}
		writers[i] = w
		running.Go(func() {
			rng := rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)})
			_, _ = rng.Read(w.block[:])
			for !stop.Load() {
				start := time.Now()
				l.mu.Lock()
				l.waiting = append(l.waiting, w)
				l.mu.Unlock()
				select {
				case l.kick <- struct{}{}:
				default:
				}
				select {
				case <-w.done:
				case <-failed:
					return
				}
				w.hist.Record(time.Since(start))
			}
		})
	}
	running.Wait()
	r := rawResult{Elapsed: time.Since(begin), CPU: ownCPU() - used}
	close(quit)
	committer.Wait()
	if failure != nil {
		return rawResult{}, failure
	}
	var all bench.Histogram
	for _, w := range writers {
		all.Merge(&w.hist)
	}
	r.Operations = all.Count()
	r.Bytes = r.Operations * rawBlock
	r.P50, r.P99 = all.Quantile(0.5), all.Quantile(0.99)
	return r, nil
}

// window measures from the end of the first operations that it is told to skip to the end of the last one.
type window struct {
	mu      sync.Mutex
	skip    int // operations before it begins
	begin   time.Time
	used    time.Duration
	last    time.Time
	lastCPU time.Duration
	ops     uint64
	bytes   uint64
	hist    bench.Histogram
}

func newWindow(skip int) *window { return &window{skip: skip, begin: time.Now(), used: ownCPU()} }

func (w *window) record(start time.Time, bytes int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.skip > 0 {
		if w.skip--; w.skip == 0 {
			w.begin, w.used = now, ownCPU()
		}
		return
	}
	w.last, w.lastCPU = now, ownCPU()
	w.ops++
	w.bytes += uint64(bytes)
	w.hist.Record(now.Sub(start))
}

func (w *window) result() (rawResult, error) {
	if w.ops == 0 {
		return rawResult{}, errors.New("too few operations to measure anything")
	}
	return rawResult{Operations: w.ops, Bytes: w.bytes, Elapsed: w.last.Sub(w.begin), CPU: w.lastCPU - w.used,
		P50: w.hist.Quantile(0.5), P99: w.hist.Quantile(0.99)}, nil
}

// parallel calls f for 0 to n-1, depth at a time, until one fails.
func parallel(n, depth int, f func(i int) error) error {
	var next atomic.Int64
	var running sync.WaitGroup
	errs := make([]error, depth)
	var failed atomic.Bool
	for d := range depth {
		running.Go(func() {
			for !failed.Load() {
				i := int(next.Add(1) - 1)
				if i >= n {
					return
				}
				if errs[d] = f(i); errs[d] != nil {
					failed.Store(true)
				}
			}
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// putLimit puts the objects, conditionally as a gateway does, through the SDK and nothing else: no retry, no metrics, no format. It
// is measured from when the first Depth objects are put, as destaging is.
func putLimit(ctx context.Context, t task) (rawResult, error) {
	b, err := objectstore.Open(ctx, t.URL, objectstore.Options{})
	if err != nil {
		return rawResult{}, err
	}
	defer b.Close()
	var largest int64
	for _, o := range t.Objects {
		largest = max(largest, o.Size)
	}
	body := make([]byte, largest)
	_, _ = rand.NewChaCha8([32]byte{}).Read(body)
	w := newWindow(t.Depth)
	if err := parallel(len(t.Objects), t.Depth, func(i int) error {
		start := time.Now()
		o := t.Objects[i]
		if err := b.PutIfAbsent(ctx, o.Key, body[:o.Size]); err != nil {
			return err
		}
		w.record(start, int(o.Size))
		return nil
	}); err != nil {
		return rawResult{}, err
	}
	return w.result()
}

// getLimit gets ranges of the objects.
func getLimit(ctx context.Context, t task) (rawResult, error) {
	b, err := objectstore.Open(ctx, t.URL, objectstore.Options{})
	if err != nil {
		return rawResult{}, err
	}
	defer b.Close()
	type piece struct {
		key string
		off int64
		n   int
	}
	var pieces []piece
	for _, o := range t.Objects {
		for off := int64(0); off < o.Size; off += int64(t.Range) {
			pieces = append(pieces, piece{o.Key, off, int(min(int64(t.Range), o.Size-off))})
		}
	}
	if len(pieces) == 0 {
		return rawResult{}, errors.New("nothing to get")
	}
	buffers := sync.Pool{New: func() any { return new(make([]byte, t.Range)) }}
	w := newWindow(0)
	get := func(p piece) error {
		start := time.Now()
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		n, err := b.GetRange(ctx, p.key, p.off, (*buf)[:p.n])
		if err == nil && n != p.n {
			err = fmt.Errorf("%s: %d of %d bytes", p.key, n, p.n)
		}
		if err == nil {
			w.record(start, n)
		}
		return err
	}
	if !t.Random {
		err = parallel(len(pieces), t.Depth, func(i int) error { return get(pieces[i]) })
	} else {
		var stop atomic.Bool
		timer := time.AfterFunc(t.Duration, func() { stop.Store(true) })
		defer timer.Stop()
		err = parallel(1<<40, t.Depth, func(int) error {
			if stop.Load() {
				return io.EOF
			}
			return get(pieces[rand.IntN(len(pieces))])
		})
		if errors.Is(err, io.EOF) && stop.Load() {
			err = nil
		}
	}
	if err != nil {
		return rawResult{}, err
	}
	return w.result()
}
