package vfs

import (
	"fmt"
	"io/fs"
	"os"
)

// Op names a call that a Hook sees.
type Op string

// The calls that a Hook sees. Calls that only look (ReadDir, Stat, Size, Free) pass unseen.
const (
	OpOpen     Op = "open"   // an existing or a new file, not O_CREATE
	OpCreate   Op = "create" // OpenFile with O_CREATE
	OpRemove   Op = "remove"
	OpRename   Op = "rename" // name is the old name
	OpMkdir    Op = "mkdir"
	OpSyncDir  Op = "syncdir"
	OpRead     Op = "read"   // ReadAt and ReadvAt
	OpWrite    Op = "write"  // WriteAt
	OpWritev   Op = "writev" // WritevAt
	OpSyncData Op = "syncdata"
	OpSync     Op = "sync"
	OpTruncate Op = "truncate" // off is the new size
	OpClose    Op = "close"
)

// Hook is called before each operation, on the goroutine that does it, possibly concurrently. While
// it blocks, the operation stalls. If it returns nil the operation goes ahead. If it
// returns a *Partial, a write is cut short; a *Flip changes one bit of what a read returns. Any other
// error is the operation's result and nothing is done.
type Hook func(op Op, name string, off int64, n int) error

// Partial makes a write write its first N bytes only and then fail with Err; a Sync
// or SyncData with Partial is done and then reported as failed.
type Partial struct {
	N   int
	Err error
}

func (p *Partial) Error() string { return fmt.Sprintf("partial, %d bytes: %v", p.N, p.Err) }

// Unwrap returns Err.
func (p *Partial) Unwrap() error { return p.Err }

// Flip inverts bit Bit (modulo the bits read) of what a read returns. The read succeeds.
type Flip struct{ Bit int64 }

func (f *Flip) Error() string { return fmt.Sprintf("flip of bit %d", f.Bit) }

// Faulty returns fsys with hook in front of its operations.
func Faulty(fsys FS, hook Hook) FS { return &faultyFS{fsys, hook} }

type faultyFS struct {
	FS
	hook Hook
}

func (s *faultyFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	op := OpOpen
	if flag&os.O_CREATE != 0 {
		op = OpCreate
	}
	if err := s.hook(op, name, 0, 0); err != nil {
		return nil, &fs.PathError{Op: string(op), Path: name, Err: err}
	}
	f, err := s.FS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &faultyFile{File: f, name: name, hook: s.hook}, nil
}

func (s *faultyFS) Remove(name string) error {
	if err := s.hook(OpRemove, name, 0, 0); err != nil {
		return &fs.PathError{Op: string(OpRemove), Path: name, Err: err}
	}
	return s.FS.Remove(name)
}

func (s *faultyFS) Rename(oldName, newName string) error {
	if err := s.hook(OpRename, oldName, 0, 0); err != nil {
		return &os.LinkError{Op: string(OpRename), Old: oldName, New: newName, Err: err}
	}
	return s.FS.Rename(oldName, newName)
}

func (s *faultyFS) MkdirAll(dir string, perm fs.FileMode) error {
	if err := s.hook(OpMkdir, dir, 0, 0); err != nil {
		return &fs.PathError{Op: string(OpMkdir), Path: dir, Err: err}
	}
	return s.FS.MkdirAll(dir, perm)
}

func (s *faultyFS) SyncDir(dir string) error {
	if err := s.hook(OpSyncDir, dir, 0, 0); err != nil {
		return &fs.PathError{Op: string(OpSyncDir), Path: dir, Err: err}
	}
	return s.FS.SyncDir(dir)
}

type faultyFile struct {
	File
	name string
	hook Hook
}

func (f *faultyFile) fault(op Op, err error) error {
	return &fs.PathError{Op: string(op), Path: f.name, Err: err}
}

func (f *faultyFile) ReadAt(p []byte, off int64) (int, error) {
	err := f.hook(OpRead, f.name, off, len(p))
	flip, flips := err.(*Flip)
	if err != nil && !flips {
		return 0, f.fault(OpRead, err)
	}
	n, rerr := f.File.ReadAt(p, off)
	if flips && n > 0 {
		bit := flip.Bit % int64(n*8)
		p[bit/8] ^= 1 << (bit % 8)
	}
	return n, rerr
}

func (f *faultyFile) ReadvAt(bufs [][]byte, off int64) (int, error) {
	total := 0
	for _, b := range bufs {
		total += len(b)
	}
	err := f.hook(OpRead, f.name, off, total)
	flip, flips := err.(*Flip)
	if err != nil && !flips {
		return 0, f.fault(OpRead, err)
	}
	n, rerr := f.File.ReadvAt(bufs, off)
	if flips && n > 0 {
		bit := flip.Bit % int64(n*8)
		for _, b := range bufs {
			if bit < int64(len(b)*8) {
				b[bit/8] ^= 1 << (bit % 8)
				break
			}
			bit -= int64(len(b) * 8)
		}
	}
	return n, rerr
}

func (f *faultyFile) WriteAt(p []byte, off int64) (int, error) {
	err := f.hook(OpWrite, f.name, off, len(p))
	if part, ok := err.(*Partial); ok {
		n, _ := f.File.WriteAt(p[:max(0, min(part.N, len(p)))], off)
		return n, f.fault(OpWrite, part.Err)
	}
	if err != nil {
		return 0, f.fault(OpWrite, err)
	}
	return f.File.WriteAt(p, off)
}

func (f *faultyFile) WritevAt(bufs [][]byte, off int64) (int, error) {
	total := 0
	for _, b := range bufs {
		total += len(b)
	}
	err := f.hook(OpWritev, f.name, off, total)
	if part, ok := err.(*Partial); ok {
		left, done := max(0, min(part.N, total)), 0
		for _, b := range bufs {
			b = b[:min(left, len(b))]
			n, _ := f.File.WriteAt(b, off+int64(done))
			done, left = done+n, left-len(b)
		}
		return done, f.fault(OpWritev, part.Err)
	}
	if err != nil {
		return 0, f.fault(OpWritev, err)
	}
	return f.File.WritevAt(bufs, off)
}

func (f *faultyFile) SyncData() error { return f.sync(OpSyncData, f.File.SyncData) }
func (f *faultyFile) Sync() error     { return f.sync(OpSync, f.File.Sync) }

func (f *faultyFile) sync(op Op, do func() error) error {
	err := f.hook(op, f.name, 0, 0)
	if part, ok := err.(*Partial); ok {
		_ = do() // done, and yet reported as failed
		return f.fault(op, part.Err)
	}
	if err != nil {
		return f.fault(op, err)
	}
	return do()
}

func (f *faultyFile) Truncate(size int64) error {
	if err := f.hook(OpTruncate, f.name, size, 0); err != nil {
		return f.fault(OpTruncate, err)
	}
	return f.File.Truncate(size)
}

func (f *faultyFile) Close() error {
	if err := f.hook(OpClose, f.name, 0, 0); err != nil {
		f.File.Close()
		return f.fault(OpClose, err)
	}
	return f.File.Close()
}
