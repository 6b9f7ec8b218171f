package homemap

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/cache/extent"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func mustOpenBadger(t testing.TB, dir string) *Badger {
	t.Helper()
	s, err := OpenBadger(dir, BadgerOptions{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// fillPages is a map of two checkpoints over many pages; every page holds one extent whose
// LSN is 1000 plus its number, or 5000 plus its number for the first ones.
const fillPages = 3000

func fill(t testing.TB, s Store) {
	t.Helper()
	m := mustOpen(t, s, smallCache(256<<10))
	insert := func(from, to, lsn uint64) {
		for i := from; i < to; i += 100 {
			var list []extent.Extent
			for p := i; p < i+100; p++ {
				list = append(list, extent.Extent{Start: p*extent.PageSectors + 8, Sectors: 8, LSN: lsn + p, Kind: extent.Data, Loc: extent.Location{Ref: lsn + p}})
			}
			if err := m.Insert(list...); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Checkpoint(ctx, Checkpoint{Position: Position{LSN: lsn}}); err != nil {
			t.Fatal(err)
		}
	}
	insert(0, fillPages, 1000)
	insert(0, fillPages/2, 5000)
	m.Close()
}

// verifyFill returns nil if the map holds what fill left at one of its checkpoints, or
// less (a prefix), and an error if it says anything else.
func verifyFill(s Store) error {
	m, err := Open(s, volume, Options{Cache: smallCache(256 << 10)})
	if err != nil {
		return err
	}
	defer m.Close()
	c, ok := m.Position()
	var out []extent.Extent
	for p := range uint64(fillPages) {
		if out, err = m.Lookup(p*extent.PageSectors, extent.PageSectors, out[:0]); err != nil {
			return err
		}
		old, young := ok, ok && c.LSN == 5000 && p < fillPages/2
		switch {
		case len(out) == 0 && !old, len(out) == 1 && out[0].LSN == 5000+p && p < fillPages/2,
			len(out) == 1 && out[0].LSN == 1000+p && !young:
		default:
			return fmt.Errorf("wrong data: page %d at position %+v: %+v", p, c, out)
		}
	}
	return nil
}

func TestBadgerReopen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := mustOpenBadger(t, dir)
	if _, err := OpenBadger(dir, BadgerOptions{Logger: quiet}); !errors.Is(err, ErrLocked) {
		t.Fatalf("opened twice: %v", err)
	}
	if err := Wipe(dir); !errors.Is(err, ErrLocked) {
		t.Fatalf("wiped while open: %v", err)
	}
	fill(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s = mustOpenBadger(t, dir)
		if err := verifyFill(s); err != nil {
			t.Fatal(err)
		}
		m := mustOpen(t, s, smallCache(1<<20))
		if c, ok := m.Position(); !ok || c.LSN != 5000 {
			t.Fatalf("position %+v", c)
		}
		m.Close()
		s.Close()
	}
	if err := probe(dir); err != nil {
		t.Fatal(err)
	}
	if err := probe(filepath.Join(dir, "absent")); err == nil {
		t.Fatal("a directory that is not there was found good")
	}
	// Deleted, it starts from nothing.
	if err := Wipe(dir); err != nil {
		t.Fatal(err)
	}
	if err := Wipe(filepath.Join(dir, "absent")); err != nil {
		t.Fatal(err)
	}
	s = mustOpenBadger(t, dir)
	defer s.Close()
	m := mustOpen(t, s, smallCache(1<<20))
	if _, ok := m.Position(); ok || m.PresentPages() != 0 {
		t.Fatal("something is left")
	}
}

func TestBadgerNoSpace(t *testing.T) {
	dir := t.TempDir()
	s := mustOpenBadger(t, dir)
	free := int64(1 << 40)
	s.free = func() (int64, error) { return free, nil }
	m := mustOpen(t, s, smallCache(2<<10))
	e := extent.Extent{Start: 8, Sectors: 8, LSN: 1, Kind: extent.Data}
	if err := m.Insert(e); err != nil {
		t.Fatal(err)
	}
	free = 100 << 20
	if err := m.Checkpoint(ctx, Checkpoint{}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("checkpoint on a full disk: %v", err)
	}
	var err error
	for e.LSN < 1000 && err == nil { // until too much is dirty
		e.LSN++
		e.Start += extent.PageSectors
		err = m.Insert(e)
	}
	if !errors.Is(err, ErrNoSpace) || m.cache.DirtyBytes() > 2*m.cache.limit {
		t.Fatalf("insert on a full disk: %v, %d bytes dirty", err, m.cache.DirtyBytes())
	}
	if err := m.Drop(); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("drop on a full disk: %v", err)
	}
	if _, err := OpenBadger(t.TempDir(), BadgerOptions{ReserveBytes: 1 << 60, Logger: quiet}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("open on a full disk: %v", err)
	}
	// Where a store stops writing, it can still be opened.
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	full, err := OpenBadger(t.TempDir(), BadgerOptions{ReserveBytes: 2 * int64(st.Bavail) * st.Bsize, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	fm := mustOpen(t, full, smallCache(2<<10))
	if err := fm.Insert(extent.Extent{Start: 8, Sectors: 8, LSN: 1, Kind: extent.Data}); err != nil {
		t.Fatal(err)
	}
	if err := fm.Checkpoint(ctx, Checkpoint{}); !errors.Is(err, ErrNoSpace) {
		t.Fatalf("checkpoint below the reserve: %v", err)
	}
	free = 1 << 40
	if err := m.Insert(e); err != nil {
		t.Fatal(err)
	}
	if err := m.Checkpoint(ctx, Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if fi, err := os.Stat(dir); err != nil || !fi.IsDir() {
		t.Fatal(err)
	}
}

// TestBadgerViewAcrossCompaction: a view sees its state though only one version of a
// key is kept.
func TestBadgerViewAcrossCompaction(t *testing.T) {
	s := mustOpenBadger(t, t.TempDir())
	defer s.Close()
	write := func(round int) {
		var b Batch
		for i := uint64(0); i < 1000; i++ {
			b.put(Pages, i, func(dst []byte) []byte {
				return append(dst, fmt.Sprintf("%d.%d %s", round, i, strings.Repeat("x", 1000))...)
			})
		}
		if err := s.Apply(volume, &b); err != nil {
			t.Fatal(err)
		}
	}
	write(0)
	v, err := s.View()
	if err != nil {
		t.Fatal(err)
	}
	for round := 1; round < 80; round++ { // two memtables
		write(round)
	}
	if err := s.db.Flatten(2); err != nil {
		t.Fatal(err)
	}
	n := uint64(0)
	err = v.Scan(volume, Pages, 0, false, func(key uint64, value []byte) (bool, error) {
		if key != n || !strings.HasPrefix(string(value), fmt.Sprintf("0.%d ", n)) {
			return false, fmt.Errorf("key %d is %.10q", key, value)
		}
		n++
		return true, nil
	})
	if err != nil || n != 1000 {
		t.Fatalf("%d keys, %v", n, err)
	}
	v.Close()
	if got, ok, err := s.Get(volume, Pages, 5, nil); err != nil || !ok || !strings.HasPrefix(string(got), "79.5 ") {
		t.Fatalf("got %.10q", got)
	}
}

// TestBadgerChain: a batch that is missing before others is damage; missing ones at the
// end are what a crash leaves.
func TestBadgerChain(t *testing.T) {
	dir := t.TempDir()
	s := mustOpenBadger(t, dir)
	for i := range uint64(10) {
		put(t, s, volume, Record{Pages, i, []byte("x")})
	}
	txn := s.db.NewTransaction(true)
	if err := errors.Join(txn.Delete(chainKey(10)), txn.Commit()); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = mustOpenBadger(t, dir)
	put(t, s, volume, Record{Pages, 11, []byte("x")})
	txn = s.db.NewTransaction(true)
	if err := errors.Join(txn.Delete(chainKey(5)), txn.Commit()); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := OpenBadger(dir, BadgerOptions{Logger: quiet}); !errors.Is(err, ErrDamaged) {
		t.Fatalf("a hole in the chain: %v", err)
	}
}

// TestBadgerChainStaysShort: the chain does not grow for ever.
func TestBadgerChainStaysShort(t *testing.T) {
	dir := t.TempDir()
	s := mustOpenBadger(t, dir)
	value := make([]byte, 900<<10)
	for range 60 {
		var b Batch
		for i := uint64(0); b.Fits(len(value)); i++ {
			b.put(Pages, i, func(dst []byte) []byte { return append(dst, value...) })
		}
		if err := s.Apply(volume, &b); err != nil {
			t.Fatal(err)
		}
		if len(s.chain) > 50 {
			t.Fatalf("%d links", len(s.chain))
		}
	}
	want := slices.Clone(s.chain)
	s.Close()
	s = mustOpenBadger(t, dir)
	defer s.Close()
	if !slices.Equal(s.chain, want) {
		t.Fatalf("read %d links, want %d", len(s.chain), len(want))
	}
}

// TestMain lets the damage test open stores in processes of their own: what Badger does
// with damaged files must not be able to hide in this one.
func TestMain(m *testing.M) {
	if dir := os.Getenv("HOMEMAP_TEST_OPEN"); dir != "" {
		s, err := OpenBadger(dir, BadgerOptions{Logger: quiet})
		if err == nil {
			err = verifyFill(s)
		}
		switch {
		case err == nil:
			fmt.Println("result: good")
		case errors.Is(err, ErrDamaged):
			fmt.Println("result: damaged:", err)
		default:
			fmt.Println("result: failed:", err)
		}
		if s != nil {
			s.Close()
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func copyDir(t testing.TB, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// sparseSize is the size of a file without the zeros at its end.
func sparseSize(b []byte) int {
	n := len(b)
	for n > 0 && b[n-1] == 0 {
		n--
	}
	return n
}

// TestBadgerDamage flips bits in, cuts and removes each of the files. What must come out
// is damage, or a state at which a crash could have left the store: never wrong data.
func TestBadgerDamage(t *testing.T) {
	seed := newSeed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	dirs := map[string]string{}
	// Closed: all is in tables. Crashed: copied while open, all is in the log.
	for _, kind := range []string{"closed", "crashed"} {
		dir := t.TempDir()
		s := mustOpenBadger(t, dir)
		fill(t, s)
		if kind == "closed" {
			s.Close()
		} else {
			to := filepath.Join(t.TempDir(), "copy")
			copyDir(t, dir, to)
			s.Close()
			dir = to
		}
		dirs[kind] = dir
	}
	counts := map[string]int{}
	for kind, dir := range dirs {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			good, err := os.ReadFile(filepath.Join(dir, f.Name()))
			if err != nil {
				t.Fatal(err)
			}
			size := max(sparseSize(good), 1)
			for i := range *damageFlag {
				to := filepath.Join(t.TempDir(), "damaged")
				copyDir(t, dir, to)
				bad := slices.Clone(good)
				what := "removed"
				switch {
				case i == 0:
				case i == 1:
					bad = bad[:r.IntN(size)]
					what = fmt.Sprintf("cut to %d bytes", len(bad))
				case i < 4 && size > 64:
					off := size - 1 - r.IntN(64)
					bad[off] ^= 1 << r.IntN(8)
					what = fmt.Sprintf("bit flipped at %d of %d", off, size)
				case i == 4 && size > 4096:
					off := r.IntN(size - 4096)
					clear(bad[off : off+4096])
					what = fmt.Sprintf("4 KiB cleared at %d of %d", off, size)
				default:
					off := r.IntN(size)
					if off < len(bad) {
						bad[off] ^= 1 << r.IntN(8)
					}
					what = fmt.Sprintf("bit flipped at %d of %d", off, size)
				}
				path := filepath.Join(to, f.Name())
				if i == 0 {
					err = os.Remove(path)
				} else {
					err = os.WriteFile(path, bad, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "HOMEMAP_TEST_OPEN="+to)
				out, err := cmd.CombinedOutput()
				_, result, _ := strings.Cut(string(out), "result: ")
				word := strings.TrimRight(strings.SplitN(result+" ", " ", 2)[0], ":\n")
				counts[kind+" "+word]++
				if err != nil || (word != "good" && word != "damaged") {
					t.Errorf("seed %d: %s: %s %s: %v\n%.2000s", seed, kind, f.Name(), what, err, out)
				}
				os.RemoveAll(to)
			}
		}
	}
	t.Log(counts)
}

func BenchmarkBadgerGet(b *testing.B) {
	s := mustOpenBadger(b, b.TempDir())
	defer s.Close()
	fill(b, s)
	var buf []byte
	r := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		if buf, _, err = s.Get(volume, Pages, r.Uint64N(fillPages), buf[:0]); err != nil {
			b.Fatal(err)
		}
	}
}
