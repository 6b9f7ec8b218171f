package tcp

import "github.com/isergate/isergate/iser/iscsi/pdu"

// bursts are the R2Ts of a connection that are not answered completely, by transfer tag. Tags are given out in ascending order,
// and a slot is a tag's low bits: a tag whose slot is taken is left out.
type bursts struct {
	slots []*burst // a power of two
	open  int
	last  uint32 // tag
}

// minBursts is the size of the first table.
const minBursts = 16

// get returns the burst with the tag, or nil.
func (s *bursts) get(ttt pdu.TaskTag) *burst {
	if len(s.slots) == 0 {
		return nil
	}
	if b := s.slots[uint32(ttt)&uint32(len(s.slots)-1)]; b != nil && b.ttt == ttt {
		return b
	}
	return nil
}

// issued reports whether the tag was one of the last 2^31.
func (s *bursts) issued(ttt pdu.TaskTag) bool { return int32(s.last-uint32(ttt)) >= 0 && ttt != 0 }

// add gives b a fresh tag.
func (s *bursts) add(b *burst) {
	if 2*s.open >= len(s.slots) {
		old := s.slots
		s.slots = make([]*burst, max(2*len(old), minBursts))
		for _, o := range old {
			if o != nil {
				*s.slot(o.ttt) = o
			}
		}
	}
	for {
		s.last++
		b.ttt = pdu.TaskTag(s.last)
		if at := s.slot(b.ttt); *at == nil && b.ttt != pdu.ReservedTag {
			*at = b
			s.open++
			return
		}
	}
}

func (s *bursts) slot(ttt pdu.TaskTag) **burst { return &s.slots[uint32(ttt)&uint32(len(s.slots)-1)] }

// remove takes b out.
func (s *bursts) remove(b *burst) {
	*s.slot(b.ttt) = nil
	s.open--
}
