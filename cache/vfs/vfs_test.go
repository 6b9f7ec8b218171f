package vfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestSuite runs what every FS must do on each of them.
func TestSuite(t *testing.T) {
	pass := func(Op, string, int64, int) error { return nil }
	for name, make := range map[string]func(t *testing.T) (FS, string){
		"os":     func(t *testing.T) (FS, string) { return OS(), t.TempDir() },
		"mem":    func(t *testing.T) (FS, string) { return NewMem(), "/" },
		"faulty": func(t *testing.T) (FS, string) { return Faulty(NewMem(), pass), "/" },
	} {
		t.Run(name, func(t *testing.T) {
			fsys, root := make(t)
			suite(t, fsys, filepath.Join(root, "a", "b"))
		})
	}
}

func suite(t *testing.T, fsys FS, dir string) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	is := func(err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	name := func(s string) string { return filepath.Join(dir, s) }

	_, err := fsys.OpenFile(name("x"), os.O_RDWR|os.O_CREATE, 0o600)
	is(err, fs.ErrNotExist) // the directory is missing
	ok(fsys.MkdirAll(dir, 0o700))
	ok(fsys.MkdirAll(dir, 0o700))
	_, err = fsys.OpenFile(name("x"), os.O_RDWR, 0o600)
	is(err, fs.ErrNotExist)
	_, err = fsys.OpenFile(dir, os.O_RDONLY, 0)
	is(err, syscall.EISDIR)

	f, err := fsys.OpenFile(name("x"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	ok(err)
	_, err = fsys.OpenFile(name("x"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	is(err, fs.ErrExist)
	is(fsys.MkdirAll(name("x"), 0o700), syscall.ENOTDIR)

	// A vector longer than one system call takes, with empty pieces, at an odd offset.
	var bufs [][]byte
	var want []byte
	for i := range 3000 {
		b := bytes.Repeat([]byte{byte(i)}, i%7)
		bufs, want = append(bufs, b), append(want, b...)
	}
	n, err := f.WritevAt(bufs, 13)
	ok(err)
	if n != len(want) {
		t.Errorf("wrote %d of %d", n, len(want))
	}
	n, err = f.WritevAt(nil, 13)
	ok(err)
	if n != 0 {
		t.Errorf("wrote %d of nothing", n)
	}
	got := make([]byte, len(want))
	_, err = f.ReadAt(got, 13)
	ok(err)
	if !bytes.Equal(got, want) {
		t.Error("read something else")
	}
	if n, err := f.ReadAt(make([]byte, 100), int64(len(want))); n != 13 || err != io.EOF {
		t.Errorf("read at the end: %d, %v", n, err)
	}
	into := make([][]byte, len(bufs))
	for i, b := range bufs {
		into[i] = make([]byte, len(b))
	}
	n, err = f.ReadvAt(into, 13)
	ok(err)
	if n != len(want) || !bytes.Equal(bytes.Join(into, nil), want) {
		t.Errorf("read %d bytes into a vector, or something else", n)
	}
	if n, err := f.ReadvAt([][]byte{make([]byte, 7), nil, make([]byte, 7)}, int64(len(want)+13-10)); n != 10 || err != io.EOF {
		t.Errorf("read a vector at the end: %d, %v", n, err)
	}
	if _, err = f.ReadvAt(into, -1); err == nil {
		t.Error("negative offset was accepted")
	}
	_, err = f.WritevAt(bufs, -1)
	if err == nil {
		t.Error("negative offset was accepted")
	}
	ok(f.Truncate(5))
	ok(f.Truncate(100))
	size, err := f.Size()
	ok(err)
	if size != 100 {
		t.Errorf("size %d", size)
	}
	got = make([]byte, 100)
	_, err = f.ReadAt(got, 0)
	ok(err)
	if !bytes.Equal(got, make([]byte, 100)) {
		t.Error("what was cut off came back")
	}
	ok(ZeroFill(f, 0, 9<<20, nil))
	stop := make(chan struct{})
	close(stop)
	is(ZeroFill(f, 0, 9<<20, stop), ErrStopped)
	ok(f.SyncData())
	ok(f.Sync())
	ok(f.Close())
	is(f.Close(), fs.ErrClosed)
	is(f.SyncData(), fs.ErrClosed)
	_, err = f.WritevAt(bufs, 0)
	is(err, fs.ErrClosed)
	_, err = f.ReadAt(got, 0)
	is(err, fs.ErrClosed)
	_, err = f.ReadvAt(into, 0)
	is(err, fs.ErrClosed)

	ro, err := fsys.OpenFile(name("x"), os.O_RDONLY, 0)
	ok(err)
	_, err = ro.WriteAt([]byte{1}, 0)
	is(err, syscall.EBADF)
	ok(ro.Close())

	ok(fsys.Rename(name("x"), name("y")))
	is(fsys.Rename(name("x"), name("z")), fs.ErrNotExist)
	is(fsys.Rename(name("y"), filepath.Join(filepath.Dir(dir), "y")), syscall.EXDEV)
	ok(WriteFile(fsys, name("z"), []byte("first"), 0o600))
	ok(WriteFile(fsys, name("z"), []byte("second"), 0o600))
	b, err := ReadFile(fsys, name("z"), 100)
	ok(err)
	if string(b) != "second" {
		t.Errorf("read %q", b)
	}
	if _, err := ReadFile(fsys, name("z"), 5); err == nil {
		t.Error("a file above the limit was read")
	}
	ok(fsys.MkdirAll(name("d"), 0o700))
	infos, err := fsys.ReadDir(dir)
	ok(err)
	if s := fmt.Sprint(infos); s != "[{d 0 true} {y 9437184 false} {z 6 false}]" {
		t.Errorf("directory is %s", s)
	}
	info, err := fsys.Stat(name("z"))
	ok(err)
	if info != (Info{Name: "z", Size: 6}) {
		t.Errorf("got %+v", info)
	}
	_, err = fsys.Stat(name("nothing"))
	is(err, fs.ErrNotExist)
	is(fsys.Remove(filepath.Dir(dir)), syscall.ENOTEMPTY)
	is(fsys.Remove(name("nothing")), fs.ErrNotExist)
	ok(fsys.Remove(name("d")))
	ok(fsys.Remove(name("y")))
	ok(fsys.SyncDir(dir))
	is(fsys.SyncDir(name("nothing")), fs.ErrNotExist)
	free, err := fsys.Free(dir)
	ok(err)
	if free <= 0 {
		t.Errorf("%d bytes free", free)
	}
}

func write(t *testing.T, f File, off int64, s string) {
	t.Helper()
	if _, err := f.WriteAt([]byte(s), off); err != nil {
		t.Fatal(err)
	}
}

func create(t *testing.T, fsys FS, name string) File {
	t.Helper()
	f, err := fsys.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func content(m *Mem, name string) string {
	b, err := ReadFile(m, name, 1<<30)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestPowerLoss checks the model against what the package comment says.
func TestPowerLoss(t *testing.T) {
	none, all := CrashOptions{Survive: SurviveNone}, CrashOptions{Survive: SurviveAll}
	m := NewMem()
	f := create(t, m, "/f")
	write(t, f, 0, "one")
	if err := f.SyncData(); err != nil {
		t.Fatal(err)
	}
	if c := m.CrashClone(nil, none); len(c.names) != 0 {
		t.Error("a name survived without SyncDir")
	}
	if got := content(m.CrashClone(nil, all), "/f"); got != "one" {
		t.Errorf("got %q", got)
	}
	if err := m.SyncDir("/"); err != nil {
		t.Fatal(err)
	}
	write(t, f, 0, "two and more")
	if got := content(m.CrashClone(nil, none), "/f"); got != "one" {
		t.Errorf("got %q", got)
	}
	if got := content(m.CrashClone(nil, all), "/f"); got != "two and more" {
		t.Errorf("got %q", got)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if got := content(m.CrashClone(nil, none), "/f"); got != "two and more" {
		t.Errorf("got %q", got)
	}
	// A file that was replaced and not synced: the old one or the new one, whole.
	g := create(t, m, "/g")
	write(t, g, 0, "new")
	if err := g.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := m.Rename("/g", "/f"); err != nil {
		t.Fatal(err)
	}
	if got := content(m.CrashClone(nil, none), "/f"); got != "two and more" {
		t.Errorf("got %q", got)
	}
	// A failed sync, and a good one after it, made nothing durable; writing again does.
	write(t, g, 0, "NEW")
	m.LoseUnsynced("/f")
	if err := g.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := m.SyncDir("/"); err != nil {
		t.Fatal(err)
	}
	if got := content(m, "/f"); got != "NEW" {
		t.Errorf("got %q", got)
	}
	if got := content(m.CrashClone(nil, all), "/f"); got != "new" {
		t.Errorf("got %q", got)
	}
	write(t, g, 0, "NEW")
	if err := g.Sync(); err != nil {
		t.Fatal(err)
	}
	if got := content(m.CrashClone(nil, none), "/f"); got != "NEW" {
		t.Errorf("got %q", got)
	}
	if err := m.Corrupt("/f", 1, []byte{'E' ^ 'o'}); err != nil {
		t.Fatal(err)
	}
	if got := content(m.CrashClone(nil, none), "/f"); got != "NoW" {
		t.Errorf("got %q", got)
	}
	if err := m.Remove("/f"); err != nil {
		t.Fatal(err)
	}
	if got := content(m.CrashClone(nil, none), "/f"); got != "NoW" {
		t.Errorf("got %q", got)
	}
}

// TestTornSectors: unsynced sectors survive one by one, in every combination, and never in pieces.
func TestTornSectors(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	m := NewMem()
	f := create(t, m, "f")
	write(t, f, 0, string(bytes.Repeat([]byte("o"), 3*SectorSize)))
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := m.SyncDir("."); err != nil {
		t.Fatal(err)
	}
	write(t, f, 0, string(bytes.Repeat([]byte("n"), 3*SectorSize)))
	seen := map[string]bool{}
	for range 400 {
		got := content(m.CrashClone(rng, CrashOptions{}), "f")
		if len(got) != 3*SectorSize {
			t.Fatalf("%d bytes", len(got))
		}
		key := ""
		for s := 0; s < len(got); s += SectorSize {
			if got[s:s+SectorSize] != string(bytes.Repeat([]byte{got[s]}, SectorSize)) {
				t.Fatal("a sector was torn")
			}
			key += got[s : s+1]
		}
		seen[key] = true
	}
	if len(seen) != 8 {
		t.Errorf("saw %d of 8 combinations", len(seen))
	}
}

func TestCapacity(t *testing.T) {
	m := NewMem()
	m.SetCapacity(1000)
	f := create(t, m, "f")
	write(t, f, 0, string(make([]byte, 600)))
	g := create(t, m, "g")
	if n, err := g.WriteAt(make([]byte, 500), 0); !errors.Is(err, syscall.ENOSPC) || n != 0 {
		t.Errorf("got %d, %v", n, err)
	}
	write(t, g, 0, string(make([]byte, 400)))
	if free, _ := m.Free("."); free != 0 {
		t.Errorf("%d bytes free", free)
	}
	write(t, f, 0, "overwriting needs no room")
	if err := m.Remove("f"); err != nil {
		t.Fatal(err)
	}
	if free, _ := m.Free("."); free != 600 {
		t.Errorf("%d bytes free", free)
	}
	if err := g.Truncate(100); err != nil {
		t.Fatal(err)
	}
	if free, _ := m.Free("."); free != 900 {
		t.Errorf("%d bytes free", free)
	}
}

func TestFaulty(t *testing.T) {
	m := NewMem()
	var fault error
	var last Op
	fsys := Faulty(m, func(op Op, name string, off int64, n int) error {
		last = op
		return fault
	})
	f := create(t, fsys, "f")
	if last != OpCreate {
		t.Errorf("last operation is %s", last)
	}
	write(t, f, 0, "0123456789")
	fault = &Partial{N: 4, Err: syscall.EIO}
	if n, err := f.WriteAt([]byte("abcdefgh"), 0); n != 4 || !errors.Is(err, syscall.EIO) {
		t.Errorf("got %d, %v", n, err)
	}
	if n, err := f.WritevAt([][]byte{[]byte("A"), nil, []byte("BCDEF")}, 5); n != 4 || !errors.Is(err, syscall.EIO) {
		t.Errorf("got %d, %v", n, err)
	}
	if got := content(m, "f"); got != "abcd4ABCD9" {
		t.Errorf("got %q", got)
	}
	fault = &Flip{Bit: 8*1 + 0}
	b := make([]byte, 4)
	if n, err := f.ReadAt(b, 0); n != 4 || err != nil || string(b) != "accd" {
		t.Errorf("got %d, %v, %q", n, err, b)
	}
	fault = &Flip{Bit: 8*3 + 0}
	v := [][]byte{b[:2], b[2:]}
	if n, err := f.ReadvAt(v, 0); n != 4 || err != nil || string(b) != "abce" {
		t.Errorf("got %d, %v, %q", n, err, b)
	}
	fault = syscall.ENOSPC
	for name, err := range map[string]error{
		"sync":     f.Sync(),
		"syncdata": f.SyncData(),
		"truncate": f.Truncate(1),
		"remove":   fsys.Remove("f"),
		"rename":   fsys.Rename("f", "g"),
		"mkdir":    fsys.MkdirAll("d", 0),
		"syncdir":  fsys.SyncDir("."),
		"close":    f.Close(),
	} {
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if got := content(m, "f"); got != "abcd4ABCD9" {
		t.Errorf("got %q", got)
	}
}

// TestWriteFileAtomic cuts the power at every operation: the old content or the new one, whole.
func TestWriteFileAtomic(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		m := NewMem()
		if err := WriteFile(m, "/f", []byte("old content"), 0o600); err != nil {
			t.Fatal(err)
		}
		at, n := rng.IntN(6), 0
		var image *Mem
		fsys := Faulty(m, func(Op, string, int64, int) error {
			if n++; n-1 == at {
				image = m.CrashClone(rng, CrashOptions{})
			}
			return nil
		})
		if err := WriteFile(fsys, "/f", []byte("new content, longer"), 0o600); err != nil {
			t.Fatal(err)
		}
		if image == nil {
			image = m.CrashClone(nil, CrashOptions{Survive: SurviveNone})
			if got := content(image, "/f"); got != "new content, longer" {
				t.Fatalf("lost: %q", got)
			}
		}
		if got := content(image, "/f"); got != "old content" && got != "new content, longer" {
			t.Fatalf("power cut at operation %d: %q", at, got)
		}
	}
}
