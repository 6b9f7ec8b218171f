package objectstore

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// envDirChild makes the test binary a writer that gets killed.
const envDirChild = "ISERGATE_TEST_DIR_CHILD"

func TestMain(m *testing.M) {
	if root := os.Getenv(envDirChild); root != "" {
		dirChild(root)
	}
	os.Exit(m.Run())
}

// childKey and childBody derive an object from its number.
func childKey(n int) string { return fmt.Sprintf("volumes/V/log/%d/%d", n/50, n) }

func childBody(n int) []byte {
	rng := rand.New(rand.NewPCG(uint64(n), 7))
	body := make([]byte, rng.IntN(200_000))
	for i := 0; i+8 <= len(body); i += 8 {
		binary.LittleEndian.PutUint64(body[i:], rng.Uint64())
	}
	return body
}

// dirChild puts objects from several goroutines and prints the number of each that was
// acknowledged, until it is killed.
func dirChild(root string) {
	b, err := OpenDir(root)
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	first, err := strconv.Atoi(os.Getenv(envDirChild + "_FIRST"))
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	var out sync.Mutex
	say := func(text string) {
		out.Lock()
		defer out.Unlock()
		fmt.Println(text)
	}
	for g := range 4 {
		go func() {
			for n := first + g; ; n += 4 {
				if err := b.PutIfAbsent(context.Background(), childKey(n), childBody(n)); err != nil {
					say("failed: " + err.Error())
					os.Exit(1)
				}
				say(strconv.Itoa(n))
			}
		}()
	}
	select {}
}

// TestDirKilled kills a writer at random moments. All that it acknowledged must be there
// and whole, nothing may be there in part, and its temporary files must go.
func TestDirKilled(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	root := filepath.Join(t.TempDir(), "bucket")
	acked := make(map[string][]byte)
	for round := range 15 {
		first := round * 100_000
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), envDirChild+"="+root, envDirChild+"_FIRST="+strconv.Itoa(first))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		killAfter := 1 + rng.IntN(30)
		for i := 0; lines.Scan(); i++ {
			n, err := strconv.Atoi(lines.Text())
			if err != nil {
				t.Fatalf("round %d: writer says %q", round, lines.Text())
			}
			acked[childKey(n)] = childBody(n)
			if i == killAfter {
				cmd.Process.Kill() // what it printed before it died is still read
			}
		}
		cmd.Wait()

		b, err := OpenDir(root)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		left, err := os.ReadDir(filepath.Join(root, dirTemp))
		if err != nil || len(left) > 0 {
			t.Fatalf("round %d: %d temporary files left, %v", round, len(left), err)
		}
		checkDirObjects(t, b, acked)
	}
	if len(acked) < 15 {
		t.Fatalf("only %d objects written", len(acked))
	}
}

// checkDirObjects reads every object of b and wants at least those of acked.
func checkDirObjects(t *testing.T, b *Dir, acked map[string][]byte) {
	t.Helper()
	seen := 0
	for after := ""; ; {
		page, err := b.List(t.Context(), "", after, 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range page {
			after = info.Key
			body, err := b.Get(t.Context(), info.Key, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			want, ok := acked[info.Key]
			if ok {
				seen++
			} else { // written, and killed before it could be told
				n, err := strconv.Atoi(info.Key[strings.LastIndexByte(info.Key, '/')+1:])
				if err != nil {
					t.Fatal(err)
				}
				want = childBody(n)
			}
			if !bytes.Equal(body, want) {
				t.Fatalf("%s has other bytes than written", info.Key)
			}
		}
		if len(page) < 100 {
			break
		}
	}
	if seen != len(acked) {
		t.Fatalf("%d of %d acknowledged objects are there", seen, len(acked))
	}
}

// syncLog records what was synced, and can fail.
type syncLog struct {
	mu     sync.Mutex
	events []string // relative path and whether it is a file with content
	fail   func(path string) error
	root   string
	watch  string // path whose existence is recorded at each sync
}

func (l *syncLog) sync(f *os.File) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	path, err := filepath.Rel(l.root, f.Name())
	if err != nil {
		return err
	}
	if strings.HasPrefix(path, dirTemp+"/") {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		path = fmt.Sprintf("temp with %d bytes", info.Size())
	}
	if _, err := os.Lstat(filepath.Join(l.root, l.watch)); err == nil {
		path += ", visible"
	}
	l.events = append(l.events, path)
	if l.fail != nil {
		return l.fail(path)
	}
	return f.Sync()
}

// TestDirSyncs: the file is synced whole before it gets its name, each new directory is synced
// into its parent before anything below it counts, and the name is synced before the
// put returns, also when another writer made it.
func TestDirSyncs(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bucket")
	log := &syncLog{root: root, watch: "objects/a/b/k="}
	b, err := openDir(root, log.sync)
	if err != nil {
		t.Fatal(err)
	}
	log.events = nil
	put := func(key string, want error, events ...string) {
		t.Helper()
		if err := b.PutIfAbsent(t.Context(), key, []byte("12345")); !errors.Is(err, want) {
			t.Fatalf("put %s: %v", key, err)
		}
		if got := strings.Join(log.events, "; "); got != strings.Join(events, "; ") {
			t.Fatalf("put %s: synced %s\nwant %s", key, got, strings.Join(events, "; "))
		}
		log.events = nil
	}
	put("a/b/k", nil, "temp with 41 bytes", ".", "objects", "objects/a", "objects/a/b, visible")
	put("a/b/k", ErrExists, "temp with 41 bytes, visible", "objects/a/b, visible")
	put("a/l", nil, "temp with 41 bytes, visible", "objects/a, visible")

	// A second process knows nothing about what the first one synced.
	if b, err = openDir(root, log.sync); err != nil {
		t.Fatal(err)
	}
	log.events = nil
	put("a/b/m", nil, "temp with 41 bytes, visible", "., visible", "objects, visible", "objects/a, visible", "objects/a/b, visible")
}

func TestDirSyncFails(t *testing.T) {
	eio := &fs.PathError{Op: "sync", Path: "p", Err: syscall.EIO}
	root := filepath.Join(t.TempDir(), "bucket")
	log := &syncLog{root: root, watch: "none"}
	b, err := openDir(root, log.sync)
	if err != nil {
		t.Fatal(err)
	}
	// The file: nothing was written, and a new attempt may succeed.
	log.fail = func(path string) error {
		if strings.HasPrefix(path, "temp") {
			return eio
		}
		return nil
	}
	err = b.PutIfAbsent(t.Context(), "a/k", []byte("x"))
	if !errors.Is(err, ErrTransient) || errors.Is(err, ErrUnknown) {
		t.Fatalf("file sync failed: %v", err)
	}
	if _, err := b.Head(t.Context(), "a/k"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("object whose sync failed: %v", err)
	}
	log.fail = nil
	if err := b.PutIfAbsent(t.Context(), "a/k", []byte("x")); err != nil {
		t.Fatal(err)
	}
	// The name: the object may survive or not, and no later sync proves anything.
	log.fail = func(path string) error {
		if path == "objects/a" {
			return eio
		}
		return nil
	}
	if err := b.PutIfAbsent(t.Context(), "a/l", []byte("x")); !errors.Is(err, ErrUnknown) {
		t.Fatalf("directory sync failed: %v", err)
	}
	log.fail = nil
	for _, key := range []string{"a/l", "a/m", "b/n"} {
		if err := b.PutIfAbsent(t.Context(), key, []byte("x")); err == nil || Classify(err) != ClassTransient {
			t.Fatalf("put %s after a failed directory sync: %v", key, err)
		}
	}
	if got, err := b.Get(t.Context(), "a/k", 10); err != nil || string(got) != "x" {
		t.Fatalf("reads go on: %q, %v", got, err)
	}
}

// TestDirDamage: changed bytes are found by each way of reading that touches them.
func TestDirDamage(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bucket")
	b, err := OpenDir(root)
	if err != nil {
		t.Fatal(err)
	}
	body := childBody(11)
	if len(body) < 2*dirChunk {
		t.Fatalf("body of %d bytes", len(body))
	}
	// A block that ends with its own CRC32C has the CRC32C of all such blocks.
	seal := func(block []byte) { binary.LittleEndian.PutUint32(block[4092:], crc32c(block[:4092])) }
	seal(body[:4096])
	if err := b.PutIfAbsent(t.Context(), "k", body); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "objects", "k=")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	damaged := bytes.Clone(whole)
	damaged[dirChunk+100] ^= 4
	write(damaged)
	if _, err := b.Get(t.Context(), "k", 1<<20); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("get: %v", err)
	}
	into := make([]byte, 10)
	if _, err := b.GetRange(t.Context(), "k", 5, into); err != nil {
		t.Fatalf("range of an undamaged chunk: %v", err)
	}
	if _, err := b.GetRange(t.Context(), "k", dirChunk+5000, into); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("range of the damaged chunk, beside the damage: %v", err)
	}
	stale := bytes.Clone(whole)
	stale[7] ^= 1
	seal(stale[:4096])
	for _, content := range [][]byte{stale, nil, whole[:10], whole[:len(whole)-1], append(bytes.Clone(whole), 0)} {
		write(content)
		_, err := b.Get(t.Context(), "k", 1<<20)
		if !errors.Is(err, ErrCorrupt) {
			t.Fatalf("file of %d instead of %d bytes: %v", len(content), len(whole), err)
		}
	}
	write(nil)
	if _, err := b.Head(t.Context(), "k"); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("head: %v", err)
	}
	if _, err := b.List(t.Context(), "", "", 10); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("list: %v", err)
	}
	// A file under another's name.
	write(whole)
	if err := os.Rename(path, filepath.Join(root, "objects", "l=")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Get(t.Context(), "l", 1<<20); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("renamed file: %v", err)
	}
}

// A large body is stored whole, wherever it lies in memory and whatever its length.
func TestDirLargeBody(t *testing.T) {
	b, err := OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	memory := make([]byte, 3<<20)
	for i := range memory {
		memory[i] = byte(i * 7 >> 3)
	}
	for _, from := range []int{0, 1, 512} {
		for _, n := range []int{1<<20 - 1, 1 << 20, 1<<20 + 1, 2<<20 + 4096 - 512} {
			key := fmt.Sprintf("%d-%d", from, n)
			if err := b.PutIfAbsent(t.Context(), key, memory[from:from+n]); err != nil {
				t.Fatal(err)
			}
			if got, err := b.Get(t.Context(), key, 4<<20); err != nil || !bytes.Equal(got, memory[from:from+n]) {
				t.Errorf("%d bytes from %d: %d bytes, %v", n, from, len(got), err)
			}
		}
	}
}

func TestDirOpen(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "photo.jpg"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDir(dir); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "photo.jpg") {
		t.Errorf("a directory with other files: %v", err)
	}
	if _, err := OpenDir(filepath.Join(dir, "photo.jpg")); !errors.Is(err, ErrInvalid) {
		t.Errorf("a file: %v", err)
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "photo.jpg"):      "objectstore: open directory: invalid request: it is not a directory",
		dir:                                  "objectstore: open directory: invalid request: it holds other files (\"photo.jpg\") and is no bucket; name an empty or new directory",
		dir + "/" + strings.Repeat("x", 300): "objectstore: open directory: invalid request: stat: file name too long",
	} {
		if _, err := OpenDir(path); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	for _, path := range []string{"", "relative", "/"} {
		if _, err := OpenDir(path); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", path, err)
		}
	}
	root := filepath.Join(dir, "bucket")
	if _, err := OpenDir(root); err != nil {
		t.Fatal(err)
	}
	format := filepath.Join(root, dirFormatFile)
	if err := os.WriteFile(format, []byte("isergate directory bucket, format 9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDir(root); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a newer format: %v", err)
	}
}

// TestDirGone: a directory that went away (an unmounted file system) is not an empty
// bucket, and one that is in use keeps its temporary files when another process opens it.
func TestDirGone(t *testing.T) {
	root := filepath.Join(t.TempDir(), "bucket")
	b, err := OpenDir(root)
	if err != nil {
		t.Fatal(err)
	}
	mine, err := b.createTemp()
	if err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(root, dirTemp, "stale")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDir(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stale temporary file: %v", err)
	}
	if _, err := os.Stat(mine.Name()); err != nil {
		t.Errorf("temporary file in use: %v", err)
	}
	mine.discard()

	if err := b.PutIfAbsent(t.Context(), "d/k", nil); err != nil {
		t.Fatal(err)
	}
	// Somebody removes a directory of the bucket: the next put makes it again.
	if err := os.RemoveAll(filepath.Join(root, dirObjects, "d")); err != nil {
		t.Fatal(err)
	}
	if err := b.PutIfAbsent(t.Context(), "d/k", nil); !errors.Is(err, ErrTransient) {
		t.Errorf("put into a removed directory: %v", err)
	}
	if err := b.PutIfAbsent(t.Context(), "d/k", nil); err != nil {
		t.Errorf("put again: %v", err)
	}

	if err := os.Rename(root, root+"-elsewhere"); err != nil {
		t.Fatal(err)
	}
	for _, mounted := range []bool{false, true} {
		if mounted {
			if err := os.Mkdir(root, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		_, getErr := b.Get(t.Context(), "k", 1)
		_, headErr := b.Head(t.Context(), "k")
		_, listErr := b.List(t.Context(), "", "", 1)
		for name, err := range map[string]error{
			"get": getErr, "head": headErr, "list": listErr,
			"put": b.PutIfAbsent(t.Context(), "k", nil), "delete": b.Delete(t.Context(), "k"),
		} {
			if !errors.Is(err, ErrNoBucket) || errors.Is(err, ErrNotFound) {
				t.Errorf("%s in a missing directory (empty mount point %v): %v", name, mounted, err)
			}
			if advice := Advice(err); !strings.Contains(advice, "directory is missing or empty: mount or restore it") {
				t.Errorf("%s in a missing directory: %s", name, advice)
			}
		}
	}
}
