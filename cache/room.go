package cache

import "sync"

// room bounds what the readers of one bucket hold of the memory for reads: half of it. When the bucket hangs, its readers hold what they
// have until their patience ends, and those of other buckets, and of what is in the journal, go on in the rest.
type room struct {
	number uint32
	budget budget // in parts of all the memory, see shareOf
}

// allMemory is all the memory for reads, in the parts that rooms count.
const allMemory = 1 << 20

// shareOf is what a read takes of a room: its part of the arena or of the read cache, whichever is larger. One that is too large for
// a room takes all of it, and more of the memory than half.
func (e *Engine) shareOf(bytes int64, chunks int) int64 {
	arena, cache := bytes*allMemory/(e.opt.ArenaBytes/4), int64(chunks)*allMemory/int64(e.reads.MaxReserve())
	return min(max(arena, cache, 1), allMemory/2)
}

// rooms are those of all buckets.
type rooms struct {
	mu    sync.Mutex // guards byURL
	byURL map[string]*room
}

func (r *rooms) of(url string) *room {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byURL == nil {
		r.byURL = map[string]*room{}
	}
	o := r.byURL[url]
	if o == nil {
		o = &room{number: uint32(len(r.byURL))}
		o.budget.limit = allMemory / 2
		r.byURL[url] = o
	}
	return o
}
