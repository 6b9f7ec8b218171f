package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Open opens the journal in Options.Dir, or makes one, and calls replay for every record that is not released, in the
// order of commit. What was reported as synced is replayed, or Open fails: with *CorruptError if something
// that must have been durable is damaged. A record whose payload is damaged is replayed; reading it returns
// *CorruptError. The last batch, which a crash can have torn, is dropped whole unless it is whole. Everything that
// replay saw is durable when Open returns. replay must not keep Record.Note. An error of replay ends Open and is
// returned. An Open that reports damage has changed nothing.
func Open(opts Options, replay func(Record, Location) error) (*Journal, error) {
	opts.EnsureDefaults()
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	j := &Journal{
		opts:      opts,
		base:      time.Now(),
		stop:      make(chan struct{}),
		committer: make(chan struct{}),
		byGen:     map[uint64]*segment{},
		target:    int(opts.JournalBytes / opts.SegmentBytes),
	}
	j.wake.L = &j.mu
	usable := usable(opts.SegmentBytes)
	j.space = space{
		usable:  usable,
		entry:   entryCost(opts.MaxEntryBytes),
		private: max(2*BlockSize, min(4<<20, usable/8/BlockSize*BlockSize)),
	}
	j.metrics = newMetrics(j)
	err := (&recovery{j: j, replay: replay}).run()
	if err == nil {
		err = j.metrics.register(j)
	}
	if err != nil {
		for _, s := range j.slots {
			s.file.Close()
		}
		return nil, err
	}
	go j.commitLoop()
	j.Grow()
	return j, nil
}

// recovery is the state of one Open.
type recovery struct {
	j       *Journal
	replay  func(Record, Location) error
	headers map[uint64]segmentHeader // of the segments in j.byGen
	damaged []*segment               // slots whose header is not intact
	buf     []byte                   // scratch
}

func (r *recovery) run() error {
	j := r.j
	if err := j.opts.FS.MkdirAll(j.opts.Dir, 0o700); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	leftovers, err := r.openSlots()
	if err != nil {
		return err
	}
	newest, err := r.newest()
	if err != nil {
		return err
	}
	if newest != nil {
		if err := r.recoverFrom(newest); err != nil {
			return err
		}
	}
	// From here on files are changed.
	for _, name := range leftovers {
		if err := j.opts.FS.Remove(name); err != nil {
			return fmt.Errorf("journal: remove leftover: %w", err)
		}
	}
	return r.complete(newest == nil)
}

// openSlots opens the segment files and reads their headers. It returns the names of leftovers.
func (r *recovery) openSlots() (leftovers []string, err error) {
	j := r.j
	infos, err := j.opts.FS.ReadDir(j.opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	// What a process that died made and did not sync becomes durable here, or is not believed.
	if err := j.opts.FS.SyncDir(j.opts.Dir); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	r.headers = map[uint64]segmentHeader{}
	for _, info := range infos { // sorted by name, so by slot
		if base, ok := strings.CutSuffix(info.Name, tmpSuffix); ok && isSlotName(base) {
			leftovers = append(leftovers, filepath.Join(j.opts.Dir, info.Name))
			continue
		}
		if info.Dir || !isSlotName(info.Name) {
			j.opts.Logger.Warn("unknown name in the journal directory", "name", info.Name)
			continue
		}
		slot, _ := strconv.Atoi(info.Name)
		if slot != len(j.slots) {
			return nil, &CorruptError{Path: j.slotPath(len(j.slots)), Detail: "segment file is missing" + advice}
		}
		f, err := j.opts.FS.OpenFile(j.slotPath(slot), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
		s := &segment{slot: slot, path: j.slotPath(slot), file: f, blocks: uint32(j.opts.SegmentBytes / BlockSize)}
		j.slots = append(j.slots, s)
		if err := r.readHeader(s); err != nil {
			return nil, err
		}
	}
	return leftovers, nil
}

func isSlotName(name string) bool {
	return len(name) == 6 && strings.Trim(name, "0123456789") == ""
}

// readHeader sorts one slot: live (or once live) by generation, damaged, or never used.
func (r *recovery) readHeader(s *segment) error {
	j := r.j
	size, err := s.file.Size()
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	var h segmentHeader
	herr := errBadSegment
	if size >= BlockSize {
		b, err := r.read(s, 0, 1)
		if err != nil {
			return err
		}
		herr = h.decode(b)
		if herr == errBadSegment && size == j.opts.SegmentBytes && isZero(b) {
			// Never used: then there is no batch either.
			if b, err = r.read(s, 1, 1); err != nil {
				return err
			}
			if isZero(b) {
				return nil
			}
		}
	}
	switch {
	case errors.Is(herr, ErrVersion):
		return fmt.Errorf("%s: %w", s.path, herr)
	case herr == nil && h.segmentBytes != uint64(j.opts.SegmentBytes):
		return fmt.Errorf("%w: %s has segments of %d bytes, configured are %d; empty the journal before changing it",
			ErrGeometry, j.opts.Dir, h.segmentBytes, j.opts.SegmentBytes)
	case size != j.opts.SegmentBytes:
		return &CorruptError{Path: s.path, Segment: h.generation,
			Detail: fmt.Sprintf("file has %d bytes instead of %d", size, j.opts.SegmentBytes) + advice}
	case herr != nil:
		r.damaged = append(r.damaged, s)
		return nil
	}
	if other := j.byGen[h.generation]; other != nil {
		return &CorruptError{Path: s.path, Segment: h.generation, Detail: "same generation as " + other.path + advice}
	}
	s.generation = h.generation
	j.byGen[h.generation] = s
	r.headers[h.generation] = h
	for _, other := range r.headers {
		if other.incarnation != h.incarnation {
			return &CorruptError{Path: s.path, Segment: h.generation, Detail: "belongs to another journal than other files" + advice}
		}
	}
	return nil
}

// newest returns the segment that was active last, or nil if none ever was. A slot without an intact header is
// free if its header was torn while the slot was being recycled; then no batch of a newer generation was ever written to it.
func (r *recovery) newest() (*segment, error) {
	j := r.j
	var newest *segment
	for _, s := range j.byGen {
		if newest == nil || s.generation > newest.generation {
			newest = s
		}
	}
	known := uint64(0)
	if newest != nil {
		known = newest.generation
	}
	for _, s := range r.damaged {
		block, found, err := r.findBatch(s, 1, func(h *batchHeader) bool { return h.generation > known })
		if err != nil {
			return nil, err
		}
		if found {
			return nil, &CorruptError{Path: s.path, Detail: fmt.Sprintf("segment header is damaged, and block %d holds a batch", block) + advice}
		}
	}
	return newest, nil
}

// recoverFrom replays all live segments, up to the newest, and sets up j to go on there.
func (r *recovery) recoverFrom(newest *segment) error {
	j := r.j
	head := r.headers[newest.generation]
	j.incarnation = head.incarnation
	end, last, err := r.endOf(newest)
	if err != nil {
		return err
	}
	tail := end.tail
	for g := tail; g < newest.generation; g++ {
		s := j.byGen[g]
		if s == nil {
			path := j.opts.Dir
			if len(r.damaged) == 1 {
				path = r.damaged[0].path
			}
			return &CorruptError{Path: path, Segment: g, Detail: "the header of the segment is damaged or the file is gone" + advice}
		}
		next := r.headers[g+1]
		c := r.cursor(s)
		for c.number < next.firstBatch {
			ok, err := c.step()
			if err != nil {
				return err
			}
			if !ok {
				break
			}
			if err := r.replayBatch(s, c); err != nil {
				return err
			}
		}
		if c.number != next.firstBatch || c.prev != next.prevCRC {
			return c.damage(c.next, "batch is damaged, and a later one exists")
		}
		r.admit(s, c)
	}
	c := r.cursor(newest)
	for c.next < end.next {
		ok, err := c.step()
		if err != nil {
			return err
		}
		if !ok {
			return c.damage(c.next, "batch changed while it was being read")
		}
		if err := r.replayBatch(newest, c); err != nil {
			return err
		}
	}
	r.admit(newest, c)
	for g, s := range j.byGen {
		if g < tail {
			delete(j.byGen, g)
			s.generation = 0
		}
	}
	j.nextNumber, j.prevCRC = c.number, c.prev
	j.space.activeLeft = 0
	if left := int64(newest.blocks) - 1 - int64(newest.next); !newest.sealed && left > 0 {
		j.space.activeLeft = left * BlockSize
	}
	return r.harden(newest, last)
}

func (r *recovery) admit(s *segment, c *cursor) {
	if s.sums == nil {
		s.sums = make([]uint32, s.blocks)
	}
	s.next, s.sealed = c.next, c.sealed
	r.j.live = append(r.j.live, s)
}

// endOf finds where the newest segment ends: after the last batch that is whole. last is the block of that batch, or 0
// if it need not be written again.
func (r *recovery) endOf(s *segment) (end cursor, last uint32, err error) {
	c := r.cursor(s)
	before := *c
	for {
		saved := *c
		ok, err := c.step()
		if err != nil {
			return *c, 0, err
		}
		if !ok {
			break
		}
		before = saved
	}
	// A valid batch beyond the end proves that what should be at the end was durable once.
	block, found, err := r.findBatch(s, c.next, func(h *batchHeader) bool {
		return h.generation == s.generation && h.incarnation == c.incarnation
	})
	if err != nil {
		return *c, 0, err
	}
	if found {
		return *c, 0, c.damage(c.next, fmt.Sprintf("batch is damaged, and a later one exists at block %d", block))
	}
	if c.next == 1 {
		return *c, 0, nil
	}
	begun, err := c.nextBegun()
	if err != nil {
		return *c, 0, err
	}
	whole, err := r.payloadWhole(s, before.next)
	if err != nil {
		return *c, 0, err
	}
	switch {
	case whole:
		return *c, before.next, nil
	case begun:
		// The batch after it was begun, so this one had been synced: damage. Reads will say so.
		r.j.opts.Logger.Error("damaged payload in the journal", "path", s.path, "generation", s.generation, "block", before.next)
		return *c, 0, nil
	}
	r.j.opts.Logger.Info("dropped a torn batch", "path", s.path, "generation", s.generation, "block", before.next)
	return before, 0, nil
}

// payloadWhole verifies the payload of the batch at block, whose header is intact.
func (r *recovery) payloadWhole(s *segment, block uint32) (bool, error) {
	c := &cursor{r: r, s: s, next: block, blind: true}
	if ok, err := c.step(); !ok {
		return false, err
	}
	table := slices.Clone(c.h.sumTable(c.region))
	at := block + c.h.headerBlocks
	for len(table) > 0 {
		n := min(scanBlocks, uint32(len(table)/sumBytes))
		b, err := r.read(s, at, n)
		if err != nil {
			return false, err
		}
		sums := make([]uint32, n)
		fillSums(sums, table[:n*sumBytes])
		if _, ok := verify(b, sums); !ok {
			return false, nil
		}
		at, table = at+n, table[n*sumBytes:]
	}
	return true, nil
}

// replayBatch hands the records of the batch that c just read to the caller, and keeps the checksums.
func (r *recovery) replayBatch(s *segment, c *cursor) error {
	if s.sums == nil {
		s.sums = make([]uint32, s.blocks)
	}
	h := &c.h
	fillSums(s.sums[h.block+h.headerBlocks:], h.sumTable(c.region))
	for i := range h.records {
		rec, block := h.record(c.region, i)
		if rec.Kind == KindNote {
			note := make([]byte, rec.PayloadBytes)
			if len(note) > 0 {
				whole, err := r.read(s, block, 1)
				if err != nil {
					return err
				}
				if _, ok := verify(whole, s.sums[block:]); !ok {
					return c.damage(block, "payload of a note is damaged")
				}
				copy(note, whole)
			}
			rec.Note = note
		}
		if err := r.replay(rec, Location{Segment: s.generation, Block: block}); err != nil {
			return err
		}
	}
	return nil
}

// harden makes durable what was replayed, also if the process that wrote it died before its sync, or if that sync
// failed: the last batch is written again. It also wipes the block where the next batch will begin, so that a torn batch
// that was dropped can never be taken for whole later on.
func (r *recovery) harden(s *segment, last uint32) error {
	rewrite := func(block, n uint32) error {
		for n > 0 {
			k := min(n, scanBlocks)
			b, err := r.read(s, block, k)
			if err != nil {
				return err
			}
			if _, err := s.file.WriteAt(b, int64(block)*BlockSize); err != nil {
				return fmt.Errorf("journal: %w", err)
			}
			block, n = block+k, n-k
		}
		return nil
	}
	if err := rewrite(0, 1); err != nil {
		return err
	}
	if last != 0 {
		if err := rewrite(last, s.next-last); err != nil {
			return err
		}
	}
	if s.next < s.blocks {
		if _, err := s.file.WriteAt(zeroBlock[:], int64(s.next)*BlockSize); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
	}
	if err := s.file.SyncData(); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// complete makes the first segments, begins the first one of a new journal, and gathers the free ones.
func (r *recovery) complete(fresh bool) error {
	j := r.j
	for len(j.slots) > j.target && j.slots[len(j.slots)-1].generation == 0 {
		s := j.slots[len(j.slots)-1]
		s.file.Close()
		if err := j.opts.FS.Remove(s.path); err != nil {
			return fmt.Errorf("journal: remove surplus segment: %w", err)
		}
		if err := j.opts.FS.SyncDir(j.opts.Dir); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		j.slots = j.slots[:len(j.slots)-1]
	}
	for len(j.slots) < 2 {
		s, err := j.createSlot(len(j.slots))
		if err != nil {
			return fmt.Errorf("journal: make the first segments: %w", err)
		}
		j.slots = append(j.slots, s)
	}
	for _, s := range j.slots {
		if s.generation == 0 {
			j.freeLocked(s)
		}
	}
	if !fresh {
		return nil
	}
	j.incarnation = uuid.New()
	j.nextNumber = 1
	s := j.free[0]
	j.free = j.free[1:]
	j.space.free--
	return j.activate(s, 1, 1)
}
