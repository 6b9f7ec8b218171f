// Package vfs is the file system as the cache sees it: an interface small enough
// to be implemented by a real disk, by a modelled disk that loses power, and by a
// wrapper that injects errors and stalls.
//
// What survives a power failure is part of the contract:
//
//   - bytes written to a File, and the size they need, survive once SyncData or Sync of that file
//     returned nil; before that any subset of the written 512-byte sectors may survive;
//   - the creation, removal or renaming of a name survives once SyncDir of its directory
//     returned nil; before that a prefix of the changes of that directory may survive;
//   - a directory made by MkdirAll survives once MkdirAll returned nil.
//
// After a failed SyncData or Sync nothing is known of the writes since the last good one,
// and a later success says nothing about them: the file must not be used to acknowledge
// anything any more.
package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// SectorSize is the unit in bytes that a disk writes whole or not at all.
const SectorSize = 512

// FS is a file system. Methods may be called concurrently. Errors wrap the usual
// sentinels: fs.ErrNotExist, fs.ErrExist, syscall.ENOSPC.
type FS interface {
	// OpenFile opens a file with the flags of package os: one of O_RDONLY, O_WRONLY and O_RDWR, and any of
	// O_CREATE, O_EXCL and O_TRUNC. Directories cannot be opened.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Remove deletes a file or an empty directory.
	Remove(name string) error
	// Rename gives a file another name in the same directory, replacing what had that name.
	Rename(oldName, newName string) error
	// ReadDir lists a directory, sorted by name.
	ReadDir(dir string) ([]Info, error)
	// MkdirAll makes a directory and its missing parents, durably.
	MkdirAll(dir string, perm fs.FileMode) error
	// SyncDir makes all changes of names in dir durable.
	SyncDir(dir string) error
	// Stat describes a file or directory.
	Stat(name string) (Info, error)
	// Free returns the bytes that files below dir can still take.
	Free(dir string) (int64, error)
}

// Info describes one name.
type Info struct {
	Name string // last element of the path
	Size int64  // bytes; 0 for a directory
	Dir  bool
}

// File is an open file. ReadAt and ReadvAt may be called concurrently with everything but a write of
// the same bytes; at most one of WriteAt, WritevAt and Truncate may be in
// progress. A write that returns fewer bytes than asked for also returns an error.
type File interface {
	io.ReaderAt
	io.WriterAt
	// ReadvAt fills bufs one after the other from off on, with one system call as far as the system's limits allow. It returns
	// the bytes read; fewer than asked for come with an error, at the end of the file io.EOF.
	ReadvAt(bufs [][]byte, off int64) (int, error)
	// WritevAt writes the concatenation of bufs at off: one system call as far as the system's limits
	// allow. bufs and what it holds are not changed and not retained.
	WritevAt(bufs [][]byte, off int64) (int, error)
	// SyncData makes all completed writes, and the file's size, durable.
	SyncData() error
	// Sync makes all completed writes and all attributes of the file durable; not its name.
	Sync() error
	// Truncate sets the size. New bytes read as zeros.
	Truncate(size int64) error
	// Size returns the size in bytes.
	Size() (int64, error)
	// Close frees the handle. It makes nothing durable. A second call returns fs.ErrClosed.
	Close() error
}

// zeros is what ZeroFill writes; nobody changes it.
var zeros [1 << 20]byte

// zeroFillSync is the number of bytes that ZeroFill leaves to the system before it syncs, so that a
// large fill never queues up in front of somebody else's sync.
const zeroFillSync = 4 << 20

// ZeroFill really writes n zero bytes at off, so that later overwrites need no allocation, no
// conversion of unwritten extents and no change of size, and makes them durable. It gives up with
// ErrStopped soon after stop is closed; stop may be nil.
func ZeroFill(f File, off, n int64, stop <-chan struct{}) error {
	unsynced := int64(0)
	for n > 0 {
		select {
		case <-stop:
			return ErrStopped
		default:
		}
		k := min(n, int64(len(zeros)))
		if _, err := f.WriteAt(zeros[:k], off); err != nil {
			return err
		}
		off, n, unsynced = off+k, n-k, unsynced+k
		if unsynced >= zeroFillSync && n > 0 {
			if err := f.SyncData(); err != nil {
				return err
			}
			unsynced = 0
		}
	}
	return f.Sync()
}

// ErrStopped is returned by ZeroFill when its caller closed the stop channel.
var ErrStopped = errors.New("vfs: stopped")

// ReadFile returns the whole content of a file of at most limit bytes.
func ReadFile(fsys FS, name string, limit int64) ([]byte, error) {
	f, err := fsys.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("vfs: %s has %d bytes, more than the limit of %d", name, size, limit)
	}
	b := make([]byte, size)
	n, err := f.ReadAt(b, 0)
	if n == len(b) {
		return b, nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return nil, fmt.Errorf("vfs: read %s: %w", name, err)
}

// WriteFile replaces the content of a file atomically and durably: after any crash the
// file holds the old bytes or the new ones, and the new ones once WriteFile returned nil. The
// directory must exist. name+".tmp" is used on the way; callers of the same name take turns.
func WriteFile(fsys FS, name string, data []byte, perm fs.FileMode) (err error) {
	tmp := name + ".tmp"
	f, err := fsys.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, perm)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = fsys.Rename(tmp, name)
	}
	if err != nil {
		// What failed is reported; a leftover temporary file is overwritten by the next call.
		_ = fsys.Remove(tmp)
		return err
	}
	return fsys.SyncDir(filepath.Dir(name))
}
