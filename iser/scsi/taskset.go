package scsi

import "sync"

// task is a command's place in a task set.
type task struct {
	nexus   Nexus
	cmd     *Command
	attr    TaskAttribute
	enabled bool
	aborted bool          // ended by another nexus's task management
	ready   chan struct{} // closed when enabled; nil if enabled on arrival
	gone    chan struct{} // closed when it leaves; nil unless somebody waits for that

	prev, next *task
}

// taskSet orders the commands of a logical unit by their attribute (SAM-5, 8). A
// SIMPLE task is enabled once no HEAD OF QUEUE task and no older ORDERED task is in the
// set; an ORDERED task once no HEAD OF QUEUE task and no older task at all is; a HEAD
// OF QUEUE task at once. It starts nothing and waits for nothing itself.
//
// Without ORDERED and HEAD OF QUEUE tasks, add and remove take constant time and do not
// allocate.
type taskSet struct {
	mu      sync.Mutex
	head    *task // oldest
	tail    *task
	ordered int // ORDERED tasks in the set
	heads   int // HEAD OF QUEUE tasks in the set
	waiting int // tasks not enabled
}

// add puts t at the end of the set. Afterwards t.ready is nil if t is enabled.
func (s *taskSet) add(t *task) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch t.attr {
	case HeadOfQueue:
		t.enabled = true
		s.heads++
	case Ordered:
		t.enabled = s.head == nil
		s.ordered++
	default:
		t.enabled = s.heads == 0 && s.ordered == 0
	}
	if !t.enabled {
		t.ready = make(chan struct{})
		s.waiting++
	}
	t.prev, t.next = s.tail, nil
	if s.tail != nil {
		s.tail.next = t
	} else {
		s.head = t
	}
	s.tail = t
}

// remove takes t out, enabled or not, and enables what waited for it.
func (s *taskSet) remove(t *task) (aborted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		s.head = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	} else {
		s.tail = t.prev
	}
	t.prev, t.next = nil, nil
	switch t.attr {
	case HeadOfQueue:
		s.heads--
	case Ordered:
		s.ordered--
	}
	if !t.enabled {
		s.waiting--
	}
	if t.gone != nil {
		close(t.gone)
	}
	if s.waiting > 0 && s.heads == 0 {
		s.enableLocked()
	}
	return t.aborted
}

func (s *taskSet) enableLocked() {
	olderOrdered := false
	for t := s.head; t != nil; t = t.next {
		if !t.enabled && (t.attr == Ordered && t.prev == nil || t.attr != Ordered && !olderOrdered) {
			t.enabled = true
			s.waiting--
			close(t.ready)
		}
		if t.attr == Ordered {
			olderOrdered = true
		}
	}
}

// abortion is how one command is aborted, whatever its memory is used for meanwhile.
type abortion struct {
	abort  func(serial uint64)
	serial uint64
}

// abort marks every task for which victim holds, and returns how to abort them and
// channels that close when they have left the set.
func (s *taskSet) abort(victim func(*task) bool) (aborts []abortion, gone []<-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for t := s.head; t != nil; t = t.next {
		if !victim(t) || t.cmd.Abort == nil {
			continue
		}
		t.aborted = true
		if t.gone == nil {
			t.gone = make(chan struct{})
		}
		aborts = append(aborts, abortion{t.cmd.Abort, t.cmd.Serial})
		gone = append(gone, t.gone)
	}
	return aborts, gone
}
