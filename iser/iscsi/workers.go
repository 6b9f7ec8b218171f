package iscsi

import (
	"sync"
	"time"
)

// workers are goroutines that run tasks, and are used again: their stacks have grown to what a command needs, and the last one
// that became idle is the next one to run, because what it needs is still in the caches.
// How many there are at most follows from the command windows of the sessions.
type workers struct {
	mu     sync.Mutex
	idle   []*worker   // guarded by mu; a stack
	least  int         // how many were idle all the time since the last trim; guarded by mu
	timer  *time.Timer // of trim; nil while nobody is idle; guarded by mu
	closed bool        // guarded by mu
}

// worker is one goroutine.
type worker struct {
	next chan *Task // capacity 1; nil ends it
}

// workerIdle is how long an idle worker stays: twice as long at most.
const workerIdle = 10 * time.Second

func newWorkers() *workers { return new(workers) }

// run executes t on an idle worker, or on a new one. It does not wait.
func (w *workers) run(t *Task) {
	w.mu.Lock()
	n := len(w.idle) - 1
	if n < 0 {
		w.mu.Unlock()
		go w.work(t)
		return
	}
	k := w.idle[n]
	w.idle[n] = nil
	w.idle = w.idle[:n]
	w.least = min(w.least, n)
	w.mu.Unlock()
	k.next <- t
}

func (w *workers) work(t *Task) {
	k := &worker{next: make(chan *Task, 1)}
	for t != nil {
		t.run()
		if !w.rest(k) {
			return
		}
		t = <-k.next
	}
}

// rest makes k idle. It is false if k is to end.
func (w *workers) rest(k *worker) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.idle = append(w.idle, k)
	if w.timer == nil {
		w.least = 0
		w.timer = time.AfterFunc(workerIdle, w.trim)
	}
	return true
}

// trim ends the workers that nobody needed since the last trim.
func (w *workers) trim() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer == nil {
		return
	}
	w.endLocked(w.least)
	w.least = len(w.idle)
	if w.least == 0 {
		w.timer = nil
		return
	}
	w.timer.Reset(workerIdle)
}

// endLocked ends the n workers that have been idle for the longest time.
func (w *workers) endLocked(n int) {
	for _, k := range w.idle[:n] {
		k.next <- nil
	}
	rest := copy(w.idle, w.idle[n:])
	clear(w.idle[rest:])
	w.idle = w.idle[:rest]
}

// close ends the workers. Those that are busy end after their task.
func (w *workers) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.endLocked(len(w.idle))
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
}

// start runs f on a goroutine of its own.
func (w *workers) start(f func()) { go f() }
