package iscsi

import "time"

// workers are goroutines that run tasks, and are used again: their stacks have grown to what a command needs.
// How many there are at most follows from the command windows of the sessions.
type workers struct {
	tasks chan *Task // unbuffered: a send succeeds if a worker is idle
}

// workerIdle is how long an idle worker stays.
const workerIdle = 10 * time.Second

func newWorkers() *workers { return &workers{tasks: make(chan *Task)} }

// run executes t on an idle worker, or on a new one. It does not wait.
func (w *workers) run(t *Task) {
	select {
	case w.tasks <- t:
	default:
		go w.work(t)
	}
}

func (w *workers) work(t *Task) {
	idle := time.NewTimer(workerIdle)
	defer idle.Stop()
	for {
		t.run()
		t = nil
		idle.Reset(workerIdle)
		select {
		case t = <-w.tasks:
		case <-idle.C:
			return
		}
	}
}

// start runs f on a goroutine of its own.
func (w *workers) start(f func()) { go f() }
