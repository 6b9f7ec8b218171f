package objectstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
)

func TestDirFileSize(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	sizes := []int64{0, 1, dirChunk - 1, dirChunk, dirChunk + 1, 2 * dirChunk, maxDirObject - 1, maxDirObject}
	for range 10_000 {
		sizes = append(sizes, rng.Int64N(maxDirObject))
	}
	for _, n := range sizes {
		if got, ok := dirPayloadSize(dirFileSize(n)); !ok || got != n {
			t.Fatalf("%d bytes: got %d, %v", n, got, ok)
		}
	}
	for _, n := range []int64{-1, 0, 31, 33, 36, dirFileSize(dirChunk) + 1, dirFileSize(dirChunk) + 4, dirFileSize(maxDirObject) + 1, 1 << 62} {
		if got, ok := dirPayloadSize(n); ok {
			t.Errorf("a file of %d bytes gives %d", n, got)
		}
	}
}

// decodeFile is what a whole read does.
func decodeFile(key string, file []byte) ([]byte, error) {
	length, ok := dirPayloadSize(int64(len(file)))
	if !ok {
		return nil, ErrCorrupt
	}
	length, table, err := decodeDirTrailer(key, int64(len(file)), file[length:])
	if err != nil {
		return nil, err
	}
	payload := file[:length]
	for i := int64(0); i < dirChunks(length); i++ {
		if err := checkDirChunk(table, i, payload[i*dirChunk:min((i+1)*dirChunk, length)]); err != nil {
			return nil, err
		}
	}
	return payload, nil
}

func TestDirTrailer(t *testing.T) {
	for _, n := range []int{0, 1, 700, dirChunk, dirChunk + 1, 3 * dirChunk} {
		payload := bytes.Repeat([]byte{7, 1, 3}, n/3+1)[:n]
		file := append(bytes.Clone(payload), encodeDirTrailer("a/b", payload)...)
		if int64(len(file)) != dirFileSize(int64(n)) {
			t.Fatalf("%d bytes: file of %d", n, len(file))
		}
		if got, err := decodeFile("a/b", file); err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if _, err := decodeFile("a/c", file); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("under another key: %v", err)
		}
		// Every proper prefix fails; long payloads are sampled.
		for cut := 0; cut < len(file); cut += 1 + len(file)/2000 {
			if _, err := decodeFile("a/b", file[:cut]); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%d bytes: cut to %d of %d: %v", n, cut, len(file), err)
			}
		}
		// Every flipped bit fails.
		for at := 0; at < len(file); at += 1 + len(file)/500 {
			flipBack := byte(1 << (at % 8))
			file[at] ^= flipBack
			if _, err := decodeFile("a/b", file); Classify(err) != ClassCorrupt && Classify(err) != ClassUnsupported {
				t.Fatalf("%d bytes: bit flipped at %d: %v", n, at, err)
			}
			file[at] ^= flipBack
		}
	}
	newer := encodeDirTrailer("k", nil)
	binary.LittleEndian.PutUint16(newer[4:], dirVersion+1)
	if _, err := decodeFile("k", newer); !errors.Is(err, ErrUnsupported) || !errors.Is(err, errDirVersion) {
		t.Fatalf("newer version: %v", err)
	}
}

func FuzzDirTrailer(f *testing.F) {
	for _, n := range []int{0, 1, 70_000} {
		payload := make([]byte, n)
		f.Add("k", append(payload, encodeDirTrailer("k", payload)...))
	}
	f.Fuzz(func(t *testing.T, key string, file []byte) {
		payload, err := decodeFile(key, file)
		if err != nil {
			if c := Classify(err); c != ClassCorrupt && c != ClassUnsupported {
				t.Fatal(err)
			}
			return
		}
		if again := append(bytes.Clone(payload), encodeDirTrailer(key, payload)...); !bytes.Equal(again, file) {
			t.Fatal("a file that decodes is not what encodes to it")
		}
	})
}
