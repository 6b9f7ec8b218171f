package objectstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	dirFormatFile = "FORMAT"
	dirFormat     = "isergate directory bucket, format 1\n"
	dirObjects    = "objects"
	dirTemp       = "tmp"
)

// Dir is a bucket in a local directory. When PutIfAbsent returns nil the object, its
// name and every directory above it are synced. Several processes of one machine may use
// the same directory at once. The file system must have hard links.
//
// After a directory could not be synced all puts fail: the kernel reports such an
// error once, and what a later sync says proves nothing.
type Dir struct {
	root   string
	sync   func(*os.File) error // of files and directories; tests put theirs here
	closed atomic.Bool

	mu       sync.Mutex          // guards all below
	durable  map[string]struct{} // directories whose own entry is synced
	poisoned error               // first failed sync of a directory
}

// OpenDir opens the directory bucket at the absolute path root, creates it if it is missing
// or empty, and removes what unfinished puts of ended processes left behind. A
// directory that holds something else is refused with ErrInvalid.
func OpenDir(root string) (*Dir, error) {
	return openDir(root, (*os.File).Sync)
}

func openDir(root string, sync func(*os.File) error) (*Dir, error) {
	d := &Dir{root: filepath.Clean(root), sync: sync, durable: make(map[string]struct{})}
	if err := d.open(); err != nil {
		return nil, openFault(d.root, err)
	}
	return d, nil
}

// openFault says why the bucket at root cannot be opened. It does not name root, which whoever asked for it does.
func openFault(root string, err error) error {
	sentinel, cause := sentinelOf(err), err
	var path *fs.PathError
	if errors.As(err, &path) && path.Path == root {
		cause = fmt.Errorf("%s: %w", path.Op, path.Err)
	}
	text := strings.TrimPrefix(cause.Error(), sentinel.Error()+": ")
	return &dirError{text: fmt.Sprintf("objectstore: open directory: %s: %s", strings.TrimPrefix(sentinel.Error(), "objectstore: "), text), sentinel: sentinel, cause: cause}
}

// dirError is why a directory cannot be opened as a bucket.
type dirError struct {
	text            string
	sentinel, cause error
}

// Error implements error.
func (e *dirError) Error() string { return e.text }

// Unwrap returns the sentinel and the cause.
func (e *dirError) Unwrap() []error { return []error{e.sentinel, e.cause} }

func (d *Dir) open() error {
	if !filepath.IsAbs(d.root) || d.root == "/" {
		return fmt.Errorf("%w: the path is not absolute, or the root", ErrInvalid)
	}
	if err := d.makeRoot(d.root); err != nil {
		return err
	}
	format, err := os.ReadFile(d.path(dirFormatFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := d.initialize(); err != nil {
			return err
		}
	case err != nil:
		return err
	case string(format) != dirFormat:
		return fmt.Errorf("%w: its file %s says %.60q, this version knows %q", ErrUnsupported, dirFormatFile, format, dirFormat)
	}
	if err := d.cleanTemp(); err != nil {
		return err
	}
	return d.syncAll()
}

// makeRoot makes path and what is missing above it, each synced into its parent.
func (d *Dir) makeRoot(path string) error {
	switch info, err := os.Stat(path); {
	case err == nil && info.IsDir():
		return nil
	case err == nil:
		if path == d.root {
			return fmt.Errorf("%w: it is not a directory", ErrInvalid)
		}
		return fmt.Errorf("%w: %s is not a directory", ErrInvalid, path)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	parent := filepath.Dir(path)
	if err := d.makeRoot(parent); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return d.syncDir(parent)
}

// initialize makes an empty directory a bucket. The format file comes last.
func (d *Dir) initialize() error {
	entries, err := os.ReadDir(d.root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch e.Name() {
		case "lost+found", dirObjects, dirTemp, dirFormatFile:
		default:
			return fmt.Errorf("%w: it holds other files (%.60q) and is no bucket; name an empty or new directory", ErrInvalid, e.Name())
		}
	}
	for _, name := range []string{dirObjects, dirTemp} {
		if err := os.Mkdir(d.path(name), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	f, err := d.createTemp()
	if err != nil {
		return err
	}
	defer f.discard()
	if _, err := f.Write([]byte(dirFormat)); err != nil {
		return err
	}
	if err := d.sync(f.File); err != nil {
		return err
	}
	if err := os.Link(f.Name(), d.path(dirFormatFile)); err != nil && !errors.Is(err, fs.ErrExist) {
		return linkError(err)
	}
	return d.syncDir(d.root)
}

// cleanTemp removes temporary files that no living process has locked.
func (d *Dir) cleanTemp() error {
	entries, err := os.ReadDir(d.path(dirTemp))
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := d.path(dirTemp, e.Name())
		f, err := os.OpenFile(name, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue // its owner was faster
		}
		if lock(f) == nil {
			err = os.Remove(name)
		}
		f.Close()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// syncAll makes durable what a killed process left in the page cache only: what is
// readable after open must not go away in a power cut.
func (d *Dir) syncAll() error {
	f, err := os.Open(d.root)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// PutIfAbsent is Bucket's.
func (d *Dir) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if err := checkKey(OpPut, key); err != nil {
		return err
	}
	if err := d.usable(ctx, OpPut, key); err != nil {
		return err
	}
	if len(body) > maxDirObject {
		return fail(OpPut, key, ErrTooLarge, nil)
	}
	d.mu.Lock()
	poisoned := d.poisoned
	d.mu.Unlock()
	if poisoned != nil {
		return fail(OpPut, key, ErrTransient, fmt.Errorf("a directory could not be synced before, reopen the bucket: %w", poisoned))
	}
	f, err := d.createTemp()
	if err != nil {
		return d.putError(key, err)
	}
	defer f.discard()
	if err := f.writeBody(body); err != nil {
		return d.putError(key, err)
	}
	if _, err := f.Write(encodeDirTrailer(key, body)); err != nil {
		return d.putError(key, err)
	}
	if err := d.sync(f.File); err != nil {
		return d.putError(key, err)
	}
	return d.publish(ctx, key, f.Name())
}

// publish gives the synced file temp the name of key.
func (d *Dir) publish(ctx context.Context, key, temp string) error {
	dirs, file := keyPath(key)
	parent := d.path(append([]string{dirObjects}, dirs...)...)
	if err := d.ensureDir(parent); err != nil {
		return d.putError(key, err)
	}
	if err := ended(ctx, OpPut, key); err != nil {
		return err
	}
	err := os.Link(temp, filepath.Join(parent, file))
	taken := errors.Is(err, fs.ErrExist)
	if err != nil && !taken {
		d.mu.Lock()
		clear(d.durable) // somebody may have removed a directory
		d.mu.Unlock()
		return d.putError(key, linkError(err))
	}
	// The winner may have died before it synced the name: the loser does it too, so
	// that "exists" is as durable as "created".
	if err := d.syncParent(parent); err != nil {
		return fail(OpPut, key, ErrUnknown, err)
	}
	if taken {
		return fail(OpPut, key, ErrExists, nil)
	}
	return nil
}

// putError classifies a failure before the object got its name.
func (d *Dir) putError(key string, err error) error {
	sentinel := sentinelOf(err)
	if errors.Is(sentinel, ErrNotFound) || errors.Is(sentinel, ErrExists) {
		// Something below the root went away under us; about key it says nothing.
		sentinel = ErrTransient
		if missing := d.rootMissing(); missing != nil {
			sentinel, err = ErrNoBucket, missing
		}
	}
	return fail(OpPut, key, sentinel, err)
}

// ensureDir makes path and what is missing between it and the root, each synced into
// its parent.
func (d *Dir) ensureDir(path string) error {
	if path == d.root {
		return nil
	}
	d.mu.Lock()
	_, known := d.durable[path]
	d.mu.Unlock()
	if known {
		return nil
	}
	parent := filepath.Dir(path)
	if err := d.ensureDir(parent); err != nil {
		return err
	}
	// The objects directory is made with the bucket; if it is gone, so is the bucket.
	if parent != d.root {
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := d.syncParent(parent); err != nil {
		return err
	}
	d.mu.Lock()
	d.durable[path] = struct{}{}
	d.mu.Unlock()
	return nil
}

func (d *Dir) syncParent(path string) error {
	err := d.syncDir(path)
	if err != nil {
		d.mu.Lock()
		if d.poisoned == nil {
			d.poisoned = err
		}
		d.mu.Unlock()
	}
	return err
}

// Get is Bucket's.
func (d *Dir) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	if err := checkGet(key, limit); err != nil {
		return nil, err
	}
	f, err := d.openObject(ctx, OpGet, key)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if f.length > limit {
		return nil, tooLarge(key, f.length, limit)
	}
	body := make([]byte, f.length)
	if _, err := f.read(body, 0); err != nil {
		return nil, fail(OpGet, key, sentinelOf(err), err)
	}
	return body, nil
}

// GetRange is Bucket's. It reads and verifies whole 64 KiB chunks.
func (d *Dir) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if err := checkRange(key, off); err != nil {
		return 0, err
	}
	f, err := d.openObject(ctx, OpGetRange, key)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := f.read(into, off)
	if err != nil {
		return 0, fail(OpGetRange, key, sentinelOf(err), err)
	}
	return n, nil
}

// dirObject is an open object whose trailer was verified.
type dirObject struct {
	*os.File
	length int64
	table  []byte
}

func (d *Dir) openObject(ctx context.Context, op Op, key string) (*dirObject, error) {
	if err := d.usable(ctx, op, key); err != nil {
		return nil, err
	}
	f, err := os.Open(d.keyFile(key))
	if err != nil {
		return nil, d.readError(op, key, err)
	}
	o := &dirObject{File: f}
	if err := o.readTrailer(key); err != nil {
		f.Close()
		return nil, fail(op, key, sentinelOf(err), err)
	}
	return o, nil
}

func (o *dirObject) readTrailer(key string) error {
	info, err := o.Stat()
	if err != nil {
		return err
	}
	length, ok := dirPayloadSize(info.Size())
	if !ok || !info.Mode().IsRegular() {
		return fmt.Errorf("%w: no object has a file of %d bytes", ErrCorrupt, info.Size())
	}
	trailer := make([]byte, info.Size()-length)
	if _, err := o.ReadAt(trailer, length); err != nil {
		return shortFile(err)
	}
	o.length, o.table, err = decodeDirTrailer(key, info.Size(), trailer)
	return err
}

// read fills into from off on and verifies all it returns.
func (o *dirObject) read(into []byte, off int64) (int, error) {
	if off >= o.length {
		return 0, nil
	}
	into = into[:min(int64(len(into)), o.length-off)]
	var scratch []byte
	for done := 0; done < len(into); {
		at := off + int64(done)
		index := at / dirChunk
		start := index * dirChunk
		size := min(dirChunk, o.length-start)
		whole := into[done:]
		if start == at && int64(len(whole)) >= size {
			whole = whole[:size]
		} else {
			if scratch == nil {
				scratch = make([]byte, dirChunk)
			}
			whole = scratch[:size]
		}
		if _, err := o.ReadAt(whole, start); err != nil {
			return 0, shortFile(err)
		}
		if err := checkDirChunk(o.table, index, whole); err != nil {
			return 0, err
		}
		if &whole[0] == &into[done] {
			done += len(whole)
		} else {
			done += copy(into[done:], whole[at-start:])
		}
	}
	return len(into), nil
}

// shortFile turns an unexpected end into corruption: objects never change.
func shortFile(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the file was cut", ErrCorrupt)
	}
	return err
}

// Head is Bucket's. It does not open the object.
func (d *Dir) Head(ctx context.Context, key string) (Info, error) {
	if err := checkKey(OpHead, key); err != nil {
		return Info{}, err
	}
	if err := d.usable(ctx, OpHead, key); err != nil {
		return Info{}, err
	}
	info, err := os.Lstat(d.keyFile(key))
	if err != nil {
		return Info{}, d.readError(OpHead, key, err)
	}
	return dirInfo(OpHead, key, info)
}

// dirInfo describes an object by its file.
func dirInfo(op Op, key string, file fs.FileInfo) (Info, error) {
	length, ok := dirPayloadSize(file.Size())
	if !ok || !file.Mode().IsRegular() {
		return Info{}, fail(op, key, ErrCorrupt, fmt.Errorf("no object has a file of %d bytes", file.Size()))
	}
	return Info{Key: key, Size: length, Modified: file.ModTime()}, nil
}

// Delete is Bucket's. Directories stay. The removal is not synced: a power cut may bring
// objects back, which is as if Delete had not been called yet.
func (d *Dir) Delete(ctx context.Context, keys ...string) error {
	if err := checkDelete(keys); err != nil {
		return err
	}
	for _, key := range keys {
		if err := d.usable(ctx, OpDelete, key); err != nil {
			return err
		}
		err := os.Remove(d.keyFile(key))
		if err == nil {
			continue
		}
		if err = d.readError(OpDelete, key, err); !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return nil
}

// URL is Bucket's.
func (d *Dir) URL() string { return (&url.URL{Scheme: "file", Path: d.root}).String() }

// Close is Bucket's.
func (d *Dir) Close() error {
	d.closed.Store(true)
	return nil
}

// List is Bucket's. A directory is read whole for each page.
func (d *Dir) List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error) {
	if err := checkList(prefix, startAfter, max); err != nil {
		return nil, err
	}
	if err := d.usable(ctx, OpList, prefix); err != nil {
		return nil, err
	}
	l := dirLister{d: d, ctx: ctx, prefix: prefix, startAfter: startAfter, max: max}
	if err := l.walk(d.path(dirObjects), ""); err != nil {
		return nil, d.readError(OpList, prefix, err)
	}
	return l.out, nil
}

type dirLister struct {
	d                  *Dir
	ctx                context.Context
	prefix, startAfter string
	max                int
	out                []Info
}

// dirEntry is an object or a subdirectory. The keys of a subdirectory start with key,
// which ends in a slash, so that byte order of these is byte order of the keys.
type dirEntry struct{ name, key string }

// walk appends the objects of the directory path, whose keys start with base.
func (l *dirLister) walk(path, base string) error {
	if err := l.ctx.Err(); err != nil {
		return fail(OpList, l.prefix, ErrTransient, err)
	}
	files, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	entries := make([]dirEntry, 0, len(files))
	for _, f := range files {
		part, object, ok := parseName(f.Name())
		if !ok || object == f.IsDir() {
			continue // not ours
		}
		e := dirEntry{f.Name(), base + part}
		if object {
			if strings.HasPrefix(e.key, l.prefix) && e.key > l.startAfter {
				entries = append(entries, e)
			}
			continue
		}
		e.key += "/"
		inPrefix := strings.HasPrefix(e.key, l.prefix) || strings.HasPrefix(l.prefix, e.key)
		if inPrefix && (e.key > l.startAfter || strings.HasPrefix(l.startAfter, e.key)) {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(a, b dirEntry) int { return strings.Compare(a.key, b.key) })
	for _, e := range entries {
		if len(l.out) == l.max {
			return nil
		}
		full := filepath.Join(path, e.name)
		if strings.HasSuffix(e.key, "/") {
			if err := l.walk(full, e.key); err != nil {
				return err
			}
			continue
		}
		file, err := os.Lstat(full)
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err != nil {
			return err
		}
		info, err := dirInfo(OpList, e.key, file)
		if err != nil {
			return err
		}
		l.out = append(l.out, info)
	}
	return nil
}

func (d *Dir) path(parts ...string) string {
	return filepath.Join(append([]string{d.root}, parts...)...)
}

func (d *Dir) keyFile(key string) string {
	dirs, file := keyPath(key)
	return filepath.Join(d.path(dirObjects), filepath.Join(dirs...), file)
}

func (d *Dir) usable(ctx context.Context, op Op, key string) error {
	if d.closed.Load() {
		return fail(op, key, ErrClosed, nil)
	}
	return ended(ctx, op, key)
}

// readError classifies a failure to reach an object. A missing bucket (an unmounted file
// system) must not read as a missing object.
func (d *Dir) readError(op Op, key string, err error) error {
	var known *opError
	if errors.As(err, &known) {
		return err
	}
	sentinel := sentinelOf(err)
	if errors.Is(err, syscall.ENOTDIR) {
		sentinel = ErrCorrupt
	}
	if sentinel == ErrNotFound {
		if missing := d.rootMissing(); missing != nil {
			return fail(op, key, ErrNoBucket, missing)
		}
		return fail(op, key, ErrNotFound, nil)
	}
	return fail(op, key, sentinel, err)
}

// rootMissing returns an error when the bucket's directory is not there any more.
func (d *Dir) rootMissing() error {
	for _, name := range []string{dirFormatFile, dirObjects} {
		if _, err := os.Stat(d.path(name)); err != nil {
			return err
		}
	}
	return nil
}

// tempFile is a locked temporary file: the lock tells it from a left-over.
type tempFile struct{ *os.File }

func (d *Dir) createTemp() (tempFile, error) {
	for {
		var random [16]byte
		rand.Read(random[:])
		f, err := os.OpenFile(d.path(dirTemp, hex.EncodeToString(random[:])), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return tempFile{}, err
		}
		t := tempFile{f}
		// A process that opens the bucket may see the file before it is locked, and
		// remove it under its own lock: only a locked file that has its name is ours.
		err = lock(f)
		if err == nil {
			_, err = os.Lstat(f.Name())
		}
		if err == nil {
			return t, nil
		}
		t.discard()
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, fs.ErrNotExist) {
			return tempFile{}, err
		}
	}
}

// writeBody writes the body, the whole blocks of a large one past the page cache: filling that costs more CPU than all
// else that is done with an object. The kernel refuses it (EINVAL) where file system or memory are not fit for it.
func (t tempFile) writeBody(body []byte) error {
	flags, err := unix.FcntlInt(t.Fd(), unix.F_GETFL, 0)
	if whole := len(body) &^ 4095; err == nil && whole >= 1<<20 {
		if _, err := unix.FcntlInt(t.Fd(), unix.F_SETFL, flags|unix.O_DIRECT); err == nil {
			done, err := t.Write(body[:whole])
			if _, back := unix.FcntlInt(t.Fd(), unix.F_SETFL, flags); back != nil || err != nil && !errors.Is(err, unix.EINVAL) {
				return errors.Join(err, back)
			}
			body = body[done:]
		}
	}
	_, err = t.Write(body)
	return err
}

// discard closes the file and removes its temporary name; the object's name stays.
func (t tempFile) discard() {
	os.Remove(t.Name())
	t.Close()
}

// lock takes the file's advisory lock, or fails with EWOULDBLOCK.
func lock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			return err
		}
	}
}

// syncDir makes the entries of a directory durable.
func (d *Dir) syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return d.sync(f)
}

// linkError says what a file system without hard links lacks.
func linkError(err error) error {
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EMLINK) {
		return fmt.Errorf("%w: the file system has no hard links, which put-if-absent needs: %w", ErrUnsupported, err)
	}
	return err
}

// sentinelOf returns the sentinel that decides the class of err.
func sentinelOf(err error) error {
	for _, s := range sentinelClass {
		if errors.Is(err, s.err) {
			return s.err
		}
	}
	return causeSentinel(err)
}
