package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/isergate/isergate/cache"
	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/units"
	"github.com/isergate/isergate/iser/scsi"
)

// Each error of the engine that an initiator can meet has its sense data. An error that
// the table does not know stays what it is, and so do those of the context.
func TestToSCSI(t *testing.T) {
	for from, to := range map[error]error{
		cache.ErrBusy: scsi.ErrBusy, cache.ErrBudget: scsi.ErrSpace, cache.ErrUnmet: scsi.ErrUnmet, cache.ErrLostWrites: scsi.ErrLostWrites,
		cache.ErrUnreadable: scsi.ErrUnreadable, cache.ErrJournal: scsi.ErrWrite, cache.ErrFenced: scsi.ErrNotReady,
		cache.ErrOpening: scsi.ErrStarting, cache.ErrDamaged: scsi.ErrNotReady, cache.ErrClosed: scsi.ErrNotReady,
	} {
		err := toSCSI(fmt.Errorf("context: %w", from))
		if !errors.Is(err, to) || !errors.Is(err, from) {
			t.Errorf("%v became %v", from, err)
		}
	}
	for _, same := range []error{nil, context.Canceled, context.DeadlineExceeded, cache.ErrRange, errors.New("x")} {
		if err := toSCSI(same); err != same {
			t.Errorf("%v became %v", same, err)
		}
	}
}

func writeBlocks(t *testing.T, m medium, lba uint64, data []byte) {
	t.Helper()
	g := m.Geometry()
	l, err := m.Reserve(t.Context(), scsi.Extent{LBA: lba, Blocks: uint64(len(data)) / uint64(g.BlockSize)})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range l.Buffers() {
		data = data[copy(b, data):]
	}
	if err := l.Commit(t.Context(), false); err != nil {
		t.Fatal(err)
	}
}

func readBlocks(t *testing.T, m medium, lba, blocks uint64) []byte {
	t.Helper()
	b, err := m.Read(t.Context(), scsi.Extent{LBA: lba, Blocks: blocks})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	return bytes.Join(b.Buffers(), nil)
}

func TestMediumGeometryAndData(t *testing.T) {
	for _, block := range []int32{512, 4096} {
		t.Run(fmt.Sprint(block), func(t *testing.T) {
			n := startNode(t, testConfig(t))
			v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 4 << 20, BlockSize: block})
			m := medium{v}
			g := m.Geometry()
			if g.BlockSize != uint32(block) || g.Blocks*uint64(g.BlockSize) != 4<<20 || g.PhysicalSize != 4096 || g.OptimalBlocks*g.BlockSize != optimalBytes {
				t.Fatalf("%+v", g)
			}
			data := bytes.Repeat([]byte("isergate"), int(4*block)/8)
			writeBlocks(t, m, 5, data)
			if got := readBlocks(t, m, 5, 4); !bytes.Equal(got, data) {
				t.Fatal("what was written does not come back")
			}
			mapped, count, err := m.Mapped(t.Context(), 5, 4)
			if err != nil || !mapped || count < 1 || count > 4 {
				t.Fatalf("mapped %v for %d blocks, %v", mapped, count, err)
			}
			if err := m.WriteSame(t.Context(), scsi.Extent{LBA: 5, Blocks: 1}, bytes.Repeat([]byte{7}, int(block)), false); err != nil {
				t.Fatal(err)
			}
			if err := m.Deallocate(t.Context(), []scsi.Extent{{LBA: 6, Blocks: 3}}, true); err != nil {
				t.Fatal(err)
			}
			if err := m.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := append(bytes.Repeat([]byte{7}, int(block)), make([]byte, 3*block)...)
			if got := readBlocks(t, m, 5, 4); !bytes.Equal(got, want) {
				t.Fatal("write same and unmap do not read as they should")
			}
			c := m.Contract()
			if c.Ack != scsi.LevelLocal || c.Flush != scsi.LevelLocal || !c.Met || c.Epoch != 1 || c.Acked.LSN != 3 || c.Local.LSN != 3 || c.WriteCache() {
				t.Fatalf("%+v", c)
			}
		})
	}
}

// The smallest cache that a configuration may ask for takes the largest pieces that a logical unit hands over.
func TestSmallestCacheTakesTheLargestPiece(t *testing.T) {
	c := testConfig(t)
	c.Cache.Journal, c.Cache.Segment, c.Cache.DirtyBudget, c.Cache.Arena = 4, 1, 1, 1
	least := map[string]*units.Size{"cache.journal": &c.Cache.Journal, "cache.segment": &c.Cache.Segment, "cache.dirty_budget": &c.Cache.DirtyBudget, "cache.arena": &c.Cache.Arena}
	for _, fault := range c.Complete() {
		size, ok := least[fault.Key]
		_, text, _ := strings.Cut(fault.Text, "outside ")
		text, _, _ = strings.Cut(text, " ")
		if err := size.Set(text); !ok || err != nil {
			t.Fatal(fault, err)
		}
	}
	if faults := c.Complete(); faults != nil {
		t.Fatal(faults)
	}
	m := medium{createVolume(t, startNode(t, c), api.CreateVolume{Name: "v", SizeBytes: 64 << 20, BlockSize: 4096})}
	for i := range uint64(16) {
		writeBlocks(t, m, i*scsi.MaxLanding/4096, bytes.Repeat([]byte{byte(i + 1)}, scsi.MaxLanding))
	}
}

// MODE SELECT of WCE=0 raises ack to flush, survives a restart, and is undone by WCE=1.
func TestWriteCacheSwitchIsDurable(t *testing.T) {
	cfg := testConfig(t)
	n := startNode(t, cfg)
	v := createVolume(t, n, api.CreateVolume{Name: "v", SizeBytes: 1 << 20, Ack: "memory", Flush: "local"})
	if c := (medium{v}).Contract(); !c.WriteCache() {
		t.Fatalf("%+v", c)
	}
	if err := (medium{v}).SetWriteCache(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	stopNode(t, n)
	n = startNode(t, cfg)
	v = n.volume(v.id)
	if c := (medium{v}).Contract(); c.WriteCache() || c.Ack != scsi.LevelLocal {
		t.Fatalf("%+v", c)
	}
	if err := (medium{v}).SetWriteCache(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if c := (medium{v}).Contract(); !c.WriteCache() || c.Ack != scsi.LevelMemory {
		t.Fatalf("%+v", c)
	}
}
