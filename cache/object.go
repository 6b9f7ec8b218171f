package cache

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/isergate/isergate/cache/extent"
	"github.com/isergate/isergate/cache/journal"
	"github.com/isergate/isergate/objectstore/volumelog"
)

// layout is what the home map has to know of an object.
type layout struct {
	extents []extent.Extent
}

// build makes the object of a flight: its records, with what they overwrite of each other
// left out, in order of address. The payload is read from the journal, verified, straight to its
// place in the object. The same flight always gives the same bytes.
func (v *Volume) build(b *builder, f *flight) ([]byte, *layout, error) {
	v.mu.RLock()
	bs, attrs := v.cfg.BlockSize, volumelog.Attributes{Name: v.cfg.Name, BlockSize: uint32(v.cfg.BlockSize)}
	v.mu.RUnlock()
	m := extent.NewMap()
	for _, p := range f.recs {
		switch p.rec.Kind {
		case journal.KindData, journal.KindZero, journal.KindSame:
			m.Insert(v.extentOf(p.rec, p.loc, bs))
		}
	}
	var list []extent.Extent
	payload := 0
	for x := range m.Walk() {
		list = append(list, x)
		payload += payloadOf(&x)
	}
	if err := b.Reset(len(list), payload); err != nil {
		return nil, nil, err
	}
	b.pieces, b.into = b.pieces[:0], b.into[:0]
	for i := range list {
		if err := v.appendExtent(b, &list[i]); err != nil {
			return nil, nil, err
		}
	}
	err := b.gather.Read(v.e.journal, b.pieces)
	clear(b.pieces)
	if err != nil {
		return nil, nil, err
	}
	attrs.SizeBytes = uint64(f.sizeAt)
	first, last := f.recs[0], f.recs[len(f.recs)-1]
	h := v.destage.writer.Header(f.seq)
	h.Attributes = attrs
	h.FirstLSN, h.LastLSN, h.Time = first.rec.LSN, last.rec.LSN, time.Unix(0, last.rec.Time)
	body, err := b.Finish(&h)
	if err != nil {
		return nil, nil, err
	}
	l := &layout{extents: make([]extent.Extent, len(list))}
	for i, x := range h.Extents {
		if l.extents[i], err = homeExtent(h.Location(x), x); err != nil {
			return nil, nil, err
		}
	}
	return body, l, nil
}

func payloadOf(x *extent.Extent) int {
	switch x.Kind {
	case extent.Data:
		return int(x.Sectors) * sectorBytes
	case extent.Same:
		return int(x.Loc.Block) * sectorBytes
	}
	return 0
}

func (v *Volume) appendExtent(b *builder, x *extent.Extent) error {
	off, n := x.Start*sectorBytes, x.Sectors*sectorBytes
	loc, skip := journalLocation(x)
	switch x.Kind {
	case extent.Zero:
		return b.Zero(x.LSN, off, n)
	case extent.Same:
		block := make([]byte, payloadOf(x))
		if err := v.e.journal.ReadAt(loc, skip, block); err != nil {
			return err
		}
		if x.Phase() != 0 {
			return fmt.Errorf("a repeated block begins within a block at sector %d: %w", x.Start, ErrDamaged)
		}
		return b.Same(x.LSN, off, n, block)
	}
	pieces, err := b.Data(x.LSN, off, int(n))
	if err != nil {
		return err
	}
	from := len(b.into)
	b.into = append(b.into, pieces...)
	b.pieces = append(b.pieces, journal.Piece{Loc: loc, Off: skip, Into: b.into[from:]})
	return nil
}

// homeExtent describes an extent of an object as one of the home map. What comes from a
// bucket is checked.
func homeExtent(loc volumelog.Location, x volumelog.Extent) (extent.Extent, error) {
	y := extent.Extent{Start: x.Offset / sectorBytes, Sectors: x.Length / sectorBytes, LSN: x.LSN}
	switch x.Kind {
	case volumelog.ExtentData:
		y.Kind = extent.Data
	case volumelog.ExtentZero:
		y.Kind = extent.Zero
	case volumelog.ExtentSame:
		y.Kind, y.Loc.Block = extent.Same, uint8(x.BlockLength/sectorBytes)
	}
	if y.Kind != extent.Zero {
		y.Loc.Ref, y.Loc.Epoch, y.Loc.Header, y.Loc.Sector = loc.Seq, uint32(loc.Epoch), loc.HeaderBlocks, loc.Sector
	}
	if err := y.Validate(); err != nil || loc.Epoch > 1<<32-1 {
		return extent.Extent{}, fmt.Errorf("object %d/%d names an extent that no volume has: %w: %w", loc.Epoch, loc.Seq, ErrDamaged, err)
	}
	return y, nil
}

// pools has the builders of each bucket: one that hangs holds no others' memory.
type pools struct {
	each int // builders of one bucket

	mu    sync.Mutex // guards byURL
	byURL map[string]*builders
}

func (p *pools) of(url string) *builders {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.byURL[url]
	if b == nil {
		if p.byURL == nil {
			p.byURL = map[string]*builders{}
		}
		b = newBuilders(p.each)
		p.byURL[url] = b
	}
	return b
}

// builder makes objects, one after the other.
type builder struct {
	volumelog.Builder
	gather journal.Gatherer
	pieces []journal.Piece // what the journal has to be read for
	into   [][]byte        // and where to
}

// builders bounds the memory of objects that are being built or sent to one bucket, on all
// volumes together, and reuses it: the builder that was used last is the next, because its memory may still be in the processor's cache,
// and because no more are made than are in use at once.
type builders struct {
	slots chan struct{} // one element per builder that is in use

	mu   sync.Mutex // guards idle
	idle []*builder
}

func newBuilders(n int) *builders { return &builders{slots: make(chan struct{}, n)} }

func (c *builders) take(ctx context.Context) (*builder, error) {
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	last := len(c.idle) - 1
	if last < 0 {
		return new(builder), nil
	}
	b := c.idle[last]
	c.idle = c.idle[:last]
	return b, nil
}

func (c *builders) give(b *builder) {
	c.mu.Lock()
	c.idle = append(c.idle, b)
	c.mu.Unlock()
	<-c.slots
}
