package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/isergate/isergate/cache"
)

func sample() State {
	id := uuid.MustParse("6f1f7a55-5a0b-4b7c-9c0e-0123456789ab")
	return State{
		Node:     uuid.MustParse("00000000-0000-4000-8000-000000000001"),
		Revision: 7,
		Volumes: []Volume{{ID: id, Name: "db01", SizeBytes: 1 << 30, BlockSize: 512, Policy: cache.DefaultPolicy,
			Bucket: "file:///b", Created: time.Unix(1e9, 0).UTC(), Deleting: &Deletion{Purge: true}}},
		Buckets: []Bucket{{URL: "file:///b", Conditional: "honoured", Examined: time.Unix(1e9, 0).UTC()}},
		Targets: []Target{{Name: "iqn.2026-11.com.example:db", LUNs: []LUN{{3, id}},
			ACLs: []ACL{{Initiator: "iqn.2026-11.com.example:host", CHAP: &CHAP{"u", Secret("forward-secret"), "m", Secret("reverse-secret")}}}}},
	}
}

func TestRoundTripAndEveryPrefixFails(t *testing.T) {
	s := sample()
	text, err := Encode(s)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(text)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, s) {
		t.Fatalf("got %+v", got)
	}
	for n := range text {
		if _, err := Decode(text[:n]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("prefix of %d bytes: %v", n, err)
		}
	}
	for i := range text {
		bad := bytes.Clone(text)
		bad[i] ^= 0x10
		if _, err := Decode(bad); err == nil {
			t.Fatalf("byte %d changed: no error", i)
		}
	}
	if _, err := Decode(append(bytes.Clone(text), '\n')); !errors.Is(err, ErrCorrupt) {
		t.Fatal("trailing text was accepted")
	}
	newer := bytes.Replace(text, []byte("isergate-catalog 1 "), []byte("isergate-catalog 2 "), 1)
	if _, err := Decode(newer); !errors.Is(err, ErrVersion) {
		t.Fatalf("newer version: %v", err)
	}
}

func TestCloneIsDeep(t *testing.T) {
	s := sample()
	c := s.Clone()
	c.Volumes[0].Name = "x"
	c.Buckets[0].URL = "x"
	c.Volumes[0].Deleting.Purge = false
	c.Targets[0].LUNs[0].Number = 9
	c.Targets[0].ACLs[0].CHAP.User = "x"
	c.Targets[0].ACLs[0].CHAP.Secret[0] = 'x'
	c.Targets[0].ACLs[0].CHAP.MutualSecret[0] = 'x'
	if !reflect.DeepEqual(s, sample()) {
		t.Fatalf("%+v", s)
	}
}

func TestSecretsDoNotPrint(t *testing.T) {
	chap := sample().Targets[0].ACLs[0].CHAP
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "secret", chap.Secret)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "chap", *chap)
	text := log.String() + fmt.Sprintf("%v %+v %#v %s %q %x %d", *chap, *chap, *chap, chap.Secret, chap.Secret, chap.Secret, chap.Secret) +
		fmt.Sprintf("%v %+v", sample(), sample())
	for _, leak := range []string{"forward", "reverse", fmt.Sprintf("%x", "forward"), fmt.Sprint([]byte("forw"))[1:10]} {
		if strings.Contains(text, leak) {
			t.Fatalf("%q leaks in %s", leak, text)
		}
	}
}

func TestFileKeepsStateAndPrevious(t *testing.T) {
	dir := t.TempDir()
	f, err := OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	node := f.State().Node
	for _, s := range []string{"a", "b"} {
		if _, err := f.Update(func(s2 *State) error {
			s2.Targets = append(s2.Targets, Target{Name: "iqn.2026-11.com.example:" + s})
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	refused := errors.New("refused")
	if _, err := f.Update(func(s *State) error { s.Targets = nil; return refused }); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if _, err := f.Update(func(s *State) error { s.Targets = append(s.Targets, Target{Name: "x"}); return nil }); err == nil {
		t.Fatal("a state that does not check was accepted")
	}
	again, err := OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := again.State()
	if s.Node != node || s.Revision != 2 || len(s.Targets) != 2 {
		t.Fatalf("%+v", s)
	}
	text, err := os.ReadFile(filepath.Join(dir, previousName))
	if err != nil {
		t.Fatal(err)
	}
	if previous, err := Decode(text); err != nil || previous.Revision != 1 {
		t.Fatalf("%+v, %v", previous, err)
	}
	info, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(dir, fileName), []byte("garbage\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenFile(dir); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), previousName) {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, fileName)); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenFile(dir); !errors.Is(err, ErrCorrupt) {
		t.Fatal("a lost catalogue was replaced by an empty one:", err)
	}
}

// crashDisk stops before its nth operation, as a crash does; a file that is being
// written then is left torn.
type crashDisk struct {
	osDisk
	left int
}

var errCrash = errors.New("crash")

func (d *crashDisk) step() error {
	if d.left == 0 {
		return errCrash
	}
	d.left--
	return nil
}

func (d *crashDisk) WriteSynced(path string, content []byte) error {
	if err := d.step(); err != nil {
		_ = os.WriteFile(path, content[:len(content)/2], 0o600)
		return err
	}
	return d.osDisk.WriteSynced(path, content)
}

func (d *crashDisk) Link(from, to string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.osDisk.Link(from, to)
}

func (d *crashDisk) Rename(from, to string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.osDisk.Rename(from, to)
}

func (d *crashDisk) Remove(path string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.osDisk.Remove(path)
}

func (d *crashDisk) SyncDir(path string) error {
	if err := d.step(); err != nil {
		return err
	}
	return d.osDisk.SyncDir(path)
}

func TestCrashAtEveryStepLeavesOldOrNew(t *testing.T) {
	add := func(name string) func(*State) error {
		return func(s *State) error {
			s.Targets = append(s.Targets, Target{Name: "iqn.2026-11.com.example:" + name})
			return nil
		}
	}
	done := false
	for steps := 0; !done; steps++ {
		dir := t.TempDir()
		f, err := OpenFile(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Update(add("a")); err != nil {
			t.Fatal(err)
		}
		f.disk = &crashDisk{left: steps}
		_, err = f.Update(add("b"))
		done = err == nil
		if errors.Is(err, ErrUncertain) {
			if _, again := f.Update(add("c")); !errors.Is(again, ErrUncertain) {
				t.Fatalf("step %d: a change after an uncertain one: %v", steps, again)
			}
		}
		after, openErr := OpenFile(dir)
		if openErr != nil {
			t.Fatalf("step %d: %v", steps, openErr)
		}
		n := len(after.State().Targets)
		if n != 1 && n != 2 || done && n != 2 || n == 2 && err != nil && !errors.Is(err, ErrUncertain) {
			t.Fatalf("step %d: %d targets after %v", steps, n, err)
		}
		if _, err := after.Update(add("d")); err != nil {
			t.Fatalf("step %d: the catalogue cannot be changed any more: %v", steps, err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, name := range []string{"iqn.2026-11.io.isergate:demo", "IQN.1993-08.org.Debian:01:abcdef", "iqn.2026-11.x", "eui.02004567a425678d", "naa.52004567ba64678d"} {
		if _, err := CheckName(name); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"", "iqn", "iqn.2026-13.x", "iqn.2026-11.x:a b", "eui.1", "iqn.2026-11.x:" + strings.Repeat("a", 223), "iqn.2026-11.x:a/b", "iqn.2026-11.x:a,b"} {
		if _, err := CheckName(name); err == nil {
			t.Errorf("%q was accepted", name)
		}
	}
	for _, name := range []string{"a", "db-01.x_y"} {
		if err := CheckVolumeName(name); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"", "-a", "a/b", "a b", strings.Repeat("a", 65), uuid.NewString()} {
		if err := CheckVolumeName(name); err == nil {
			t.Errorf("%q was accepted", name)
		}
	}
}

func TestCHAPCheck(t *testing.T) {
	for _, c := range []CHAP{
		{User: "u", Secret: Secret("short")},
		{User: "", Secret: Secret("long enough 1")},
		{User: "u", Secret: Secret("long enough 1"), MutualUser: "m"},
		{User: "u", Secret: Secret("long enough 1"), MutualSecret: Secret("long enough 2")},
		{User: "u", Secret: Secret("long enough 1"), MutualUser: "m", MutualSecret: Secret("long enough 1")},
	} {
		if err := c.Check(); err == nil {
			t.Errorf("user %q, mutual %q: accepted", c.User, c.MutualUser)
		}
	}
}

func FuzzCatalog(f *testing.F) {
	s := sample()
	text, err := Encode(s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte("isergate-catalog 1 3 00000000\n{}\n"))
	// A body under a right checksum, so that the fuzzer gets past it.
	body, err := json.Marshal(s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Fuzz(func(t *testing.T, text []byte) {
		wrapped := append(fmt.Appendf(nil, "%s %d %d %08x\n", magic, version, len(text), checksum(version, len(text), text)), text...)
		for _, text := range [][]byte{text, wrapped} {
			s, err := Decode(text)
			if err != nil {
				continue
			}
			again, err := Encode(s)
			if err != nil {
				t.Fatal(err)
			}
			if back, err := Decode(again); err != nil || !reflect.DeepEqual(back, s) {
				t.Fatalf("%v: %+v became %+v", err, s, back)
			}
		}
	})
}
