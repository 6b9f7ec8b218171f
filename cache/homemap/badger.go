package homemap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// BadgerOptions configure a Badger store. The zero value is usable.
type BadgerOptions struct {
	// ReserveBytes of free space on the file system are never used: 0 means 512 MiB.
	// A full disk kills the process inside of Badger, which maps sparse files. A quarter is enough to
	// open the store: what stopped writing at the reserve starts again.
	ReserveBytes int64
	// MemTableBytes: 0 means 32 MiB. At least 32 MiB, so that a Batch fits.
	MemTableBytes int64
	// BlockCacheBytes and IndexCacheBytes: 0 means 32 MiB and 16 MiB.
	BlockCacheBytes, IndexCacheBytes int64
	// Logger gets Badger's messages; nil means slog.Default.
	Logger *slog.Logger
}

func (o *BadgerOptions) ensureDefaults() {
	if o.ReserveBytes == 0 {
		o.ReserveBytes = 512 << 20
	}
	o.MemTableBytes = max(o.MemTableBytes, 32<<20)
	if o.BlockCacheBytes == 0 {
		o.BlockCacheBytes = 32 << 20
	}
	if o.IndexCacheBytes == 0 {
		o.IndexCacheBytes = 16 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}

// Badger is the Store on local disk, shared by all volumes of a node.
//
// Keys are the table's letter, the volume (16 bytes) and the number (8 bytes,
// big-endian). Beside them there is the chain: each batch carries a key of its own with
// the next number, so that a batch that Badger lost, with later ones still there, leaves
// a hole that OpenBadger sees.
type Badger struct {
	dir  string
	o    BadgerOptions
	db   *badger.DB
	lock *os.File
	free func() (int64, error) // bytes free on the file system

	open   sync.RWMutex // read-held by each call, so that Close waits for them
	closed bool

	write  sync.Mutex // guards what follows, and orders the batches
	failed error      // the first failed write
	chain  []link     // the batches whose keys are kept, oldest first
}

// link is one batch of the chain.
type link struct {
	number uint64
	bytes  uint64 // of the batch
}

const (
	chainTable   = 'c'
	numMemtables = 2
	// chainTables is how far the chain reaches back, in memtables: what Badger has not yet
	// moved out of its write-ahead logs is at most the active one and those that wait.
	chainTables   = numMemtables + 3
	chainOverhead = 128
)

// OpenBadger opens the store in dir, which it creates. ErrDamaged means that the caller
// is to close all use of it, call Wipe, and rebuild; ErrLocked that somebody else has
// it open; other errors come from the operating system, and wiping does not help.
//
// All files are read once and their checksums verified: Badger itself answers a damaged
// block as if its keys were not there, or ends the process.
func OpenBadger(dir string, o BadgerOptions) (*Badger, error) {
	o.ensureDefaults()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("homemap: %w", err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	s := &Badger{dir: dir, o: o, lock: lock}
	s.free = func() (int64, error) {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return 0, fmt.Errorf("homemap: statfs %s: %w", dir, err)
		}
		return int64(st.Bavail) * st.Bsize, nil
	}
	ok := false
	defer func() {
		if !ok {
			if s.db != nil {
				s.db.Close()
			}
			lock.Close()
		}
	}()
	// Opening writes too: a new log file is mapped at its full size.
	if err := s.checkSpace(o.ReserveBytes / 4); err != nil {
		return nil, err
	}
	if err := verifyTables(dir); err != nil {
		return nil, err
	}
	if s.db, err = openDB(dir, o); err != nil {
		return nil, err
	}
	if err := s.loadChain(); err != nil {
		return nil, err
	}
	ok = true
	return s, nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("homemap: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", ErrLocked, dir)
		}
		return nil, fmt.Errorf("homemap: lock %s: %w", dir, err)
	}
	return f, nil
}

// Wipe empties the directory of a store that is not open.
func Wipe(dir string) error {
	lock, err := lockDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("homemap: %w", err)
	}
	for _, e := range list {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("homemap: %w", err)
		}
	}
	if err := lock.Sync(); err != nil {
		return fmt.Errorf("homemap: sync %s: %w", dir, err)
	}
	return nil
}

// system reports an error that says nothing about the files' content.
func system(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EMFILE) ||
		errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EROFS) || errors.Is(err, unix.EDQUOT)
}

func openDB(dir string, o BadgerOptions) (db *badger.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, fmt.Errorf("%w: open %s: %v", ErrDamaged, dir, r)
		}
	}()
	db, err = badger.Open(badger.DefaultOptions(dir).
		WithSyncWrites(true).
		WithDetectConflicts(false).
		WithNumVersionsToKeep(1). // versions that an open view needs are kept
		WithMemTableSize(o.MemTableBytes).
		WithNumMemtables(numMemtables).
		WithBlockCacheSize(o.BlockCacheBytes).
		WithIndexCacheSize(o.IndexCacheBytes).
		WithCompression(options.None).
		WithNumCompactors(2).
		WithValueLogFileSize(64 << 20). // it stays empty: values are below the threshold
		WithMetricsEnabled(false).
		WithBypassLockGuard(true). // the directory is locked by us
		// Records have checksums of their own. Badger's would turn a damaged block into
		// a missing key; see DESIGN.md.
		WithChecksumVerificationMode(options.NoVerification).
		WithLogger(badgerLog{o.Logger.With("component", "badger", "dir", dir)}))
	switch {
	case err == nil:
		return db, nil
	case system(err):
		return nil, fmt.Errorf("homemap: open %s: %w", dir, err)
	}
	// Badger hides the cause of its errors: find out whether the system is at fault.
	if cause := probe(dir); cause != nil {
		return nil, fmt.Errorf("homemap: open %s: %w (%w)", dir, err, cause)
	}
	return nil, fmt.Errorf("%w: open %s: %w", ErrDamaged, dir, err)
}

// probe does what opening a store needs and returns an error of the system that says
// nothing about the files' content.
func probe(dir string) error {
	f, err := os.CreateTemp(dir, "probe")
	if err == nil {
		_, err = f.Write(make([]byte, 4096))
		if err == nil {
			err = f.Sync()
		}
		f.Close()
		os.Remove(f.Name())
	}
	if err != nil {
		return err
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		f, err := os.OpenFile(filepath.Join(dir, e.Name()), os.O_RDWR, 0)
		if err == nil {
			f.Close()
		} else if system(err) {
			return err
		}
	}
	return nil
}

func (s *Badger) checkSpace(reserve int64) error {
	free, err := s.free()
	if err != nil {
		return err
	}
	if free < reserve {
		return fmt.Errorf("%w: %d MiB are free in %s: free at least %d MiB more", ErrNoSpace, free>>20, s.dir, (reserve-free+1<<20-1)>>20)
	}
	return nil
}

func chainKey(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{chainTable}, n) }

// loadChain reads the chain and finds holes in it.
func (s *Badger) loadChain() error {
	err := s.db.View(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{chainTable}, PrefetchValues: true, PrefetchSize: 100})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := it.Item().Key()
			var n link
			err := it.Item().Value(func(v []byte) error {
				if len(key) != 9 || len(v) != 8 {
					return fmt.Errorf("%w: chain key of %d bytes", ErrDamaged, len(key))
				}
				n = link{binary.BigEndian.Uint64(key[1:]), binary.BigEndian.Uint64(v)}
				return nil
			})
			if err != nil {
				return err
			}
			if k := len(s.chain); k > 0 && s.chain[k-1].number+1 != n.number {
				return fmt.Errorf("%w: batches %d to %d are missing", ErrDamaged, s.chain[k-1].number+1, n.number-1)
			}
			s.chain = append(s.chain, n)
		}
		return nil
	})
	return s.readError(err)
}

// readError classifies an error of a read.
func (s *Badger) readError(err error) error {
	switch {
	case err == nil || errors.Is(err, ErrDamaged):
		return err
	case errors.Is(err, badger.ErrDBClosed):
		return ErrClosed
	}
	return fmt.Errorf("%w: %s: %w", ErrDamaged, s.dir, err)
}

// guard runs a read of Badger, whose decoders panic on damaged blocks.
func (s *Badger) guard(read func() error) (err error) {
	s.open.RLock()
	defer s.open.RUnlock()
	if s.closed {
		return ErrClosed
	}
	return s.recovered(read)
}

func (s *Badger) recovered(read func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %s: %v", ErrDamaged, s.dir, r)
		}
	}()
	return read()
}

// Get implements Reader.
func (s *Badger) Get(volume uuid.UUID, t Table, key uint64, dst []byte) (value []byte, ok bool, err error) {
	value = dst
	err = s.guard(func() error {
		return s.db.View(func(txn *badger.Txn) (err error) {
			value, ok, err = s.get(txn, volume, t, key, dst)
			return err
		})
	})
	return value, ok, err
}

func (s *Badger) get(txn *badger.Txn, volume uuid.UUID, t Table, key uint64, dst []byte) ([]byte, bool, error) {
	var k [keyLen]byte
	item, err := txn.Get(appendKey(k[:0], volume, t, key))
	if errors.Is(err, badger.ErrKeyNotFound) {
		return dst, false, nil
	}
	if err == nil {
		err = item.Value(func(v []byte) error {
			dst = append(dst, v...)
			return nil
		})
	}
	return dst, err == nil, s.readError(err)
}

// Scan implements Reader.
func (s *Badger) Scan(volume uuid.UUID, t Table, from uint64, keysOnly bool, fn func(uint64, []byte) (bool, error)) error {
	v, err := s.View()
	if err != nil {
		return err
	}
	defer v.Close()
	return v.Scan(volume, t, from, keysOnly, fn)
}

func (s *Badger) scan(txn *badger.Txn, volume uuid.UUID, t Table, from uint64, keysOnly bool, fn func(uint64, []byte) (bool, error)) error {
	var it *badger.Iterator
	var key uint64
	var value []byte
	// One step at a time, so that a panic in fn is not taken for damage.
	step := func(first bool) (more bool, err error) {
		err = s.guard(func() error {
			if first {
				start := appendKey(nil, volume, t, from)
				it = txn.NewIterator(badger.IteratorOptions{
					Prefix: start[:keyLen-8], PrefetchValues: false,
				})
				it.Seek(start)
			} else {
				it.Next()
			}
			if more = it.Valid(); !more {
				return nil
			}
			k := it.Item().Key()
			if len(k) != keyLen {
				return fmt.Errorf("%w: key of %d bytes", ErrDamaged, len(k))
			}
			key, value = binary.BigEndian.Uint64(k[keyLen-8:]), value[:0]
			if keysOnly {
				return nil
			}
			return s.readError(it.Item().Value(func(v []byte) error {
				value = append(value, v...)
				return nil
			}))
		})
		return more, err
	}
	defer func() {
		if it != nil {
			it.Close()
		}
	}()
	for first := true; ; first = false {
		more, err := step(first)
		if err != nil || !more {
			return err
		}
		v := value
		if keysOnly {
			v = nil
		}
		if more, err := fn(key, v); err != nil || !more {
			return err
		}
	}
}

// badgerView is a read transaction. Badger keeps what it sees until it is discarded.
type badgerView struct {
	s   *Badger
	txn *badger.Txn
}

// View implements Store.
func (s *Badger) View() (View, error) {
	s.open.RLock()
	defer s.open.RUnlock()
	if s.closed {
		return nil, ErrClosed
	}
	return &badgerView{s, s.db.NewTransaction(false)}, nil
}

func (v *badgerView) Get(volume uuid.UUID, t Table, key uint64, dst []byte) (value []byte, ok bool, err error) {
	value = dst
	err = v.s.guard(func() (err error) {
		value, ok, err = v.s.get(v.txn, volume, t, key, dst)
		return err
	})
	return value, ok, err
}

func (v *badgerView) Scan(volume uuid.UUID, t Table, from uint64, keysOnly bool, fn func(uint64, []byte) (bool, error)) error {
	return v.s.scan(v.txn, volume, t, from, keysOnly, fn)
}

func (v *badgerView) Close() { v.txn.Discard() }

// writableLocked returns why nothing can be written. The caller holds open for reading and
// write.
func (s *Badger) writableLocked() error {
	if s.closed {
		return ErrClosed
	}
	if s.failed != nil {
		return s.failed
	}
	return s.checkSpace(s.o.ReserveBytes)
}

// Apply implements Store.
func (s *Badger) Apply(volume uuid.UUID, b *Batch) error {
	s.open.RLock()
	defer s.open.RUnlock()
	s.write.Lock()
	defer s.write.Unlock()
	if err := s.writableLocked(); err != nil {
		return err
	}
	return s.applyLocked(volume, b.Records, b.Bytes())
}

func (s *Badger) applyLocked(volume uuid.UUID, records []Record, bytes int) error {
	txn := s.db.NewTransaction(true)
	defer txn.Discard()
	keys := make([]byte, 0, len(records)*keyLen)
	for i := range records {
		r := &records[i]
		at := len(keys)
		keys = appendKey(keys, volume, r.Table, r.Key)
		var err error
		switch {
		case r.Value == nil:
			err = txn.Delete(keys[at:len(keys):len(keys)])
		case len(r.Value) > maxValueBytes:
			return fmt.Errorf("homemap: value of %d bytes", len(r.Value))
		default:
			err = txn.Set(keys[at:len(keys):len(keys)], r.Value)
		}
		if err != nil {
			return fmt.Errorf("homemap: batch of %d records, %d bytes: %w", len(records), bytes, err)
		}
	}
	next := link{number: 1, bytes: uint64(bytes) + chainOverhead}
	sum := next.bytes
	keep := len(s.chain)
	if keep > 0 {
		next.number = s.chain[keep-1].number + 1
	}
	for keep > 0 && sum < chainTables*uint64(s.o.MemTableBytes) {
		keep--
		sum += s.chain[keep].bytes
	}
	drop := min(keep, 1000)
	for _, l := range s.chain[:drop] {
		if err := txn.Delete(chainKey(l.number)); err != nil {
			return fmt.Errorf("homemap: %w", err)
		}
	}
	if err := txn.Set(chainKey(next.number), binary.BigEndian.AppendUint64(nil, next.bytes)); err != nil {
		return fmt.Errorf("homemap: %w", err)
	}
	if err := txn.Commit(); err != nil {
		s.failed = fmt.Errorf("homemap: write to %s failed, reopen it: %w", s.dir, err)
		return s.failed
	}
	s.chain = append(s.chain[drop:], next)
	return nil
}

// Drop implements Store.
func (s *Badger) Drop(volume uuid.UUID) error {
	s.open.RLock()
	defer s.open.RUnlock()
	s.write.Lock()
	defer s.write.Unlock()
	if err := s.writableLocked(); err != nil {
		return err
	}
	// Without its meta record the volume does not exist: Open drops the rest.
	if err := s.applyLocked(volume, []Record{{Meta, 0, nil}}, recordOverhead); err != nil {
		return err
	}
	err := s.db.DropPrefix(appendKey(nil, volume, Pages, 0)[:keyLen-8], appendKey(nil, volume, Presence, 0)[:keyLen-8])
	if err != nil {
		s.failed = fmt.Errorf("homemap: drop in %s failed, reopen it: %w", s.dir, err)
		return s.failed
	}
	return nil
}

// Volumes implements Store.
func (s *Badger) Volumes() (out []uuid.UUID, err error) {
	err = s.guard(func() error {
		return s.db.View(func(txn *badger.Txn) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{byte(Meta)}})
			defer it.Close()
			for it.Rewind(); it.Valid(); it.Next() {
				if k := it.Item().Key(); len(k) == keyLen {
					out = append(out, uuid.UUID(k[1:17]))
				}
			}
			return nil
		})
	})
	return out, err
}

// Close implements Store. Views must have been closed.
func (s *Badger) Close() error {
	s.open.Lock()
	defer s.open.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	err := s.db.Close()
	s.lock.Close()
	if err != nil {
		return fmt.Errorf("homemap: close %s: %w", s.dir, err)
	}
	return nil
}

// badgerLog passes Badger's messages on. Its information is debugging to us, and so are its warnings: statistics of its caches.
type badgerLog struct{ l *slog.Logger }

func (b badgerLog) Errorf(f string, a ...any)   { b.l.Error("badger: " + text(f, a)) }
func (b badgerLog) Warningf(f string, a ...any) { b.l.Debug("badger: " + text(f, a)) }
func (b badgerLog) Infof(f string, a ...any)    { b.l.Debug("badger: " + text(f, a)) }
func (b badgerLog) Debugf(string, ...any)       {}

func text(f string, a []any) string { return strings.TrimSpace(fmt.Sprintf(f, a...)) }
