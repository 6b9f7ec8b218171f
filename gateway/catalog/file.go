package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/google/uuid"
)

// The catalogue file is one header line and one JSON document:
//
//	isergate-catalog SP version SP length SP crc32c LF
//	JSON, length bytes
//
// version, length and crc32c are decimal, decimal and eight hexadecimal digits; the
// checksum (Castagnoli) covers "version SP length LF" and the JSON. The version says what a program
// must know to read the JSON; a program refuses a version that it does not know. Nothing follows.
const (
	magic          = "isergate-catalog"
	version        = 1
	maxFile        = 64 << 20
	maxHeader      = 128
	fileName       = "catalog"
	previousName   = "catalog.previous"
	temporaryName  = "catalog.new"
	temporaryName2 = "catalog.previous.new"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(version, length int, body []byte) uint32 {
	sum := crc32.Checksum(fmt.Appendf(nil, "%d %d\n", version, length), castagnoli)
	return crc32.Update(sum, castagnoli, body)
}

// Encode returns the catalogue file for s.
func Encode(s State) ([]byte, error) {
	body, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return nil, fmt.Errorf("catalog: %w", err)
	}
	body = append(body, '\n')
	text := fmt.Appendf(nil, "%s %d %d %08x\n", magic, version, len(body), checksum(version, len(body), body))
	return append(text, body...), nil
}

// Decode reads a catalogue file. It returns ErrVersion for a version it does not
// know and ErrCorrupt for everything that Encode does not write.
func Decode(text []byte) (State, error) {
	corrupt := func(format string, args ...any) (State, error) {
		return State{}, fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	head, _, ok := bytes.Cut(text[:min(len(text), maxHeader)], []byte("\n"))
	if !ok {
		return corrupt("no header line")
	}
	body := text[len(head)+1:]
	fields := strings.Split(string(head), " ")
	if fields[0] != magic || len(fields) < 2 {
		return corrupt("not a catalogue")
	}
	number, err := strconv.Atoi(fields[1])
	if err != nil {
		return corrupt("version %q", fields[1])
	}
	if number != version {
		return State{}, fmt.Errorf("%w: %d, this program knows %d: use the program that wrote it, or a newer one", ErrVersion, number, version)
	}
	if len(fields) != 4 {
		return corrupt("header has %d fields", len(fields))
	}
	length, err := strconv.Atoi(fields[2])
	if err != nil || length != len(body) {
		return corrupt("%d bytes where the header says %q", len(body), fields[2])
	}
	sum, err := strconv.ParseUint(fields[3], 16, 32)
	if err != nil || uint32(sum) != checksum(number, length, body) {
		return corrupt("checksum does not match")
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	var s State
	if err := decoder.Decode(&s); err != nil {
		return corrupt("%v", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return corrupt("text after the document")
	}
	if err := s.Check(); err != nil {
		return corrupt("%v", err)
	}
	return s, nil
}

// disk is what a File needs of a file system.
type disk interface {
	// WriteSynced creates or replaces a file, readable by its owner only, and syncs it.
	WriteSynced(path string, content []byte) error
	Link(from, to string) error
	Rename(from, to string) error
	Remove(path string) error
	SyncDir(path string) error
}

type osDisk struct{}

func (osDisk) WriteSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (osDisk) Link(from, to string) error   { return os.Link(from, to) }
func (osDisk) Rename(from, to string) error { return os.Rename(from, to) }
func (osDisk) Remove(path string) error     { return os.Remove(path) }

func (osDisk) SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// File is a Store in one file of a directory. The caller makes sure that no
// other process uses the directory.
type File struct {
	dir  string
	disk disk

	mu     sync.Mutex // guards what follows, and the files
	state  State
	failed error // set once the outcome of a change is unknown
}

// OpenFile opens the catalogue in dir, or makes an empty one with a new node identity if there is none.
// A damaged catalogue is an error: an older one must not come back unasked, it may
// let in whom the newer one had shut out.
func OpenFile(dir string) (*File, error) { return openFile(dir, osDisk{}) }

func openFile(dir string, disk disk) (*File, error) {
	f := &File{dir: dir, disk: disk}
	path, previous := filepath.Join(dir, fileName), filepath.Join(dir, previousName)
	text, err := readBounded(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Stat(previous); err == nil {
			return nil, fmt.Errorf("%w: %s is missing and %s is there: copy the latter to the former to go back to the state before the last change", ErrCorrupt, path, previousName)
		}
		f.state = State{Node: uuid.New()}
		if err := f.writeLocked(f.state); err != nil {
			return nil, err
		}
		return f, nil
	case err != nil:
		return nil, fmt.Errorf("catalog: %w", err)
	}
	if f.state, err = Decode(text); errors.Is(err, ErrCorrupt) {
		return nil, fmt.Errorf("%s: %w: to go back to the state before the last change, copy %s over it", path, err, previousName)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	// Whatever a crash left half done was never the catalogue.
	_ = disk.Remove(filepath.Join(dir, temporaryName))
	_ = disk.Remove(filepath.Join(dir, temporaryName2))
	return f, nil
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		return nil, fmt.Errorf("%w: larger than %d bytes", ErrCorrupt, maxFile)
	}
	return text, err
}

// State implements Store.
func (f *File) State() State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state.Clone()
}

// Update implements Store.
func (f *File) Update(change func(*State) error) (State, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed != nil {
		return f.state.Clone(), f.failed
	}
	next := f.state.Clone()
	if err := change(&next); err != nil {
		return f.state.Clone(), err
	}
	next.Node, next.Revision = f.state.Node, f.state.Revision+1
	if err := next.Check(); err != nil {
		return f.state.Clone(), fmt.Errorf("catalog: change refused: %w", err)
	}
	if err := f.writeLocked(next); err != nil {
		return f.state.Clone(), err
	}
	f.state = next
	return next.Clone(), nil
}

// writeLocked replaces the file. Until the last rename the old catalogue is in
// force; after it, the new one, once the directory is synced.
func (f *File) writeLocked(s State) error {
	text, err := Encode(s)
	if err != nil {
		return err
	}
	if len(text) > maxFile {
		return fmt.Errorf("catalog: change refused: the catalogue would be larger than %d bytes", maxFile)
	}
	if _, err := Decode(text); err != nil { // what cannot be read back is not published
		return fmt.Errorf("catalog: change refused: %w", err)
	}
	in := func(name string) string { return filepath.Join(f.dir, name) }
	if err := f.disk.WriteSynced(in(temporaryName), text); err != nil {
		return fmt.Errorf("catalog: change not made: %w", err)
	}
	_ = f.disk.Remove(in(temporaryName2))
	if err := f.disk.Link(in(fileName), in(temporaryName2)); err == nil {
		err = f.disk.Rename(in(temporaryName2), in(previousName))
		if err != nil {
			return fmt.Errorf("catalog: change not made: %w", err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("catalog: change not made: %w", err)
	}
	if err := f.disk.Rename(in(temporaryName), in(fileName)); err != nil {
		f.failed = fmt.Errorf("%w: %w", ErrUncertain, err)
		return f.failed
	}
	if err := f.disk.SyncDir(f.dir); err != nil {
		f.failed = fmt.Errorf("%w: %w", ErrUncertain, err)
		return f.failed
	}
	return nil
}

// Close implements Store.
func (f *File) Close() error { return nil }
