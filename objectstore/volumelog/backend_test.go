package volumelog

import (
	"testing"

	"github.com/google/uuid"

	"github.com/isergate/isergate/objectstore"
)

// The life of a volume on the backends that need no server.
func TestLifeOnBackends(t *testing.T) {
	dir, err := objectstore.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string]objectstore.Bucket{"mem": objectstore.NewMem(), "dir": dir} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if err := b.Close(); err != nil {
					t.Error(err)
				}
			}()
			id := uuid.New()
			a, _ := attach(t, b, id, want(1, 1, 0), "a")
			a.puts(5)
			for range 3 {
				a.puts(1)
				a.checkpoint()
			}
			if n, err := a.CollectCheckpoints(ctx); n != 2 || err != nil {
				t.Fatal(n, err)
			}
			a.puts(2)
			p, lsn, _ := a.Stored()
			w := want(3, 1, 10)
			w.From, w.FromLSN = p, lsn
			c, state := attach(t, b, id, w, "c")
			if state.LSN != 10 || len(c.img.applied) != 0 {
				t.Fatalf("%+v", state)
			}
			if err := c.put(1, 11, 13); err != nil {
				t.Fatal(err)
			}
			wantErr(t, a.put(11, 11, 11), ErrFenced)
			d, state := restore(t, b, id, "d")
			if state.LSN != 13 || state.Generation != LineageStride || state.Epoch != 4 || state.Objects != 3 {
				t.Fatalf("%+v", state)
			}
			wantTags(t, d, "aaaaaaaaaaccc")
			all, err := List(ctx, b, true)
			if err != nil || len(all) != 1 || all[0].LSN != 13 || all[0].Err != nil || len(all[0].Damaged) != 0 || all[0].Epoch != 4 {
				t.Fatalf("%+v, %v", all, err)
			}
			if n, err := Purge(ctx, b, id); err != nil || n != 21 {
				t.Fatal(n, err)
			}
			if ok, err := Exists(ctx, b, id); ok || err != nil {
				t.Fatal(ok, err)
			}
		})
	}
}
