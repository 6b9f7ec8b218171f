package journal

import (
	"cmp"
	"fmt"
	"io"
	"slices"
)

// Piece is a range of a payload to read: from byte Off of the payload at Loc on, as many bytes as Into has.
type Piece struct {
	Loc  Location
	Off  int64
	Into [][]byte
}

func (p *Piece) bytes() (n int64) {
	for _, b := range p.Into {
		n += int64(len(b))
	}
	return n
}

// at is where in the segment file the piece begins.
func (p *Piece) at() int64 { return int64(p.Loc.Block)*BlockSize + p.Off }

// A Gatherer reads many pieces with few system calls: those that lie close to each other in the journal, as the writes of a batch
// do, come with one. It keeps its scratch memory for the next use. Not for concurrent use.
type Gatherer struct {
	run  []Piece  // adjacent, whole blocks
	iov  [][]byte // what reads the run, with what lies in between
	skip []byte   // what lies in between lands here

	block [BlockSize]byte // one that is in several pieces
}

const (
	gatherGap   = 4       // blocks between two pieces that are read and dropped: a batch header is one
	gatherBytes = 4 << 20 // that one system call reads
	gatherIov   = 1000    // vectors of one system call, about
)

// Read reads all pieces and reorders them. What it promises of each is what ReadvAt does.
func (g *Gatherer) Read(j *Journal, pieces []Piece) error {
	slices.SortFunc(pieces, func(a, b Piece) int {
		return cmp.Or(cmp.Compare(a.Loc.Segment, b.Loc.Segment), cmp.Compare(a.at(), b.at()))
	})
	defer g.reset()
	end, bytes := int64(0), int64(0) // of the run
	for i := range pieces {
		p := &pieces[i]
		at, n := p.at(), p.bytes()
		if at%BlockSize != 0 || n%BlockSize != 0 {
			if err := j.ReadvAt(p.Loc, p.Off, p.Into); err != nil {
				return err
			}
			continue
		}
		if n == 0 {
			continue
		}
		gap := at - end
		if len(g.run) > 0 && (g.run[0].Loc.Segment != p.Loc.Segment || gap < 0 || gap > gatherGap*BlockSize ||
			bytes+gap+n > gatherBytes || len(g.iov)+1+len(p.Into) > gatherIov) {
			if err := g.flush(j, end); err != nil {
				return err
			}
			bytes = 0
		}
		if len(g.run) > 0 && gap > 0 {
			if g.skip == nil {
				g.skip = make([]byte, gatherGap*BlockSize)
			}
			g.iov = append(g.iov, g.skip[:gap])
			bytes += gap
		}
		g.run = append(g.run, *p)
		for _, b := range p.Into {
			if len(b) > 0 {
				g.iov = append(g.iov, b)
			}
		}
		end, bytes = at+n, bytes+n
	}
	return g.flush(j, end)
}

func (g *Gatherer) reset() {
	clear(g.run)
	clear(g.iov)
	g.run, g.iov = g.run[:0], g.iov[:0]
}

// flush reads the run, which ends at byte end of its segment file, and verifies it.
func (g *Gatherer) flush(j *Journal, end int64) error {
	if len(g.run) == 0 {
		return nil
	}
	defer g.reset()
	first := &g.run[0]
	from := first.at()
	s, err := j.acquire(first.Loc, first.Off, end-from)
	if err != nil {
		return err
	}
	defer j.giveBack(s)
	if n, err := s.file.ReadvAt(g.iov, from); int64(n) != end-from {
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("journal: read %s, block %d: %w", s.path, from/BlockSize, err)
	}
	for i := range g.run {
		p := &g.run[i]
		block := uint32(p.at() / BlockSize)
		if bad, ok := g.verify(p.Into, s.sums[block:]); !ok {
			j.metrics.corrupt.Inc()
			return &CorruptError{Path: s.path, Segment: s.generation, Block: block + uint32(bad), Detail: wrongChecksum}
		}
	}
	return nil
}

const wrongChecksum = "payload checksum is wrong"

// verify compares whole blocks, which may be in several pieces each, with their checksums and returns the first that differs.
func (g *Gatherer) verify(pieces [][]byte, sums []uint32) (bad int, ok bool) {
	block, filled := 0, 0
	for _, p := range pieces {
		for len(p) > 0 {
			whole := p
			if filled > 0 || len(p) < BlockSize {
				whole = g.block[:]
				n := copy(whole[filled:], p)
				filled, p = filled+n, p[n:]
				if filled < BlockSize {
					break
				}
			} else {
				p = p[BlockSize:]
			}
			if sumOf(whole[:BlockSize]) != sums[block] {
				return block, false
			}
			block, filled = block+1, 0
		}
	}
	return 0, true
}
