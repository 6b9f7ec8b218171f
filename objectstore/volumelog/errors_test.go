package volumelog

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// An error names its key once, whoever named it.
func TestErrorsNameTheirKeyOnce(t *testing.T) {
	b := objectstore.NewMem()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	id, p := uuid.New(), Position{Epoch: 1, Seq: 2}
	key := LogKey(id, p)
	read := func(_ any, err error) error { return err }
	for name, err := range map[string]error{
		"header":   read(readHeaderOnce(t.Context(), b, id, p, -1)),
		"frames":   read(ReadFrames(t.Context(), b, id, Location{Epoch: 1, Seq: 2, HeaderBlocks: 1}, 0, 1, make([]byte, FrameBytes))),
		"object":   read(verifyObjectOnce(t.Context(), b, id, p)),
		"head":     confirm(t.Context(), b, key),
		"bare":     about("read", key, errors.New("connection reset")),
		"ours":     about("read", key, corruptf("%s is larger than it can be", key)),
		"manifest": read(readManifestOnce(t.Context(), b, id, p)),
		"part":     ReadCheckpoint(t.Context(), b, &Manifest{Volume: id, Position: p, Parts: make([]Part, 1)}, func(Entry) error { return nil }),
	} {
		key := key
		switch name {
		case "manifest":
			key = checkpointKey(id, p)
		case "part":
			key = partKey(id, p, uuid.Nil, 0)
		}
		if err == nil || strings.Count(err.Error(), key) != 1 || strings.Count(err.Error(), "volumelog: ") != 1 {
			t.Errorf("%s: %v", name, err)
		}
		if name != "bare" && name != "ours" && !errors.Is(err, objectstore.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
