package iscsi

import (
	"testing"
	"testing/synctest"
	"time"
)

// Workers that nobody needs end, those that were idle for the longest time first; at the end all do.
func TestIdleWorkersEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers()
		ended := make([]bool, 5)
		idle := make([]*worker, len(ended))
		for i := range idle {
			k := &worker{next: make(chan *Task, 1)}
			idle[i] = k
			go func() {
				for {
					if task := <-k.next; task == nil {
						ended[i] = true
						return
					}
					w.rest(k)
				}
			}()
			if !w.rest(k) {
				t.Fatal("a worker cannot rest")
			}
		}
		expect := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			n := 0
			for _, e := range ended {
				if e {
					n++
				}
			}
			if n != want {
				t.Fatalf("%s: ended %v, want %d", when, ended, want)
			}
		}
		time.Sleep(workerIdle + time.Second) // of the bubble; nobody is judged before a whole interval was seen
		expect("after one interval", 0)
		for range 2 { // two at a time are needed, again and again
			w.run(new(Task))
			w.run(new(Task))
			synctest.Wait()
		}
		time.Sleep(workerIdle)
		expect("two were needed", 3)
		if ended[3] || ended[4] {
			t.Errorf("the last ones to become idle ended: %v", ended)
		}
		w.run(new(Task))
		synctest.Wait()
		time.Sleep(workerIdle)
		expect("one was needed", 4)
		w.close()
		expect("closed", 5)
		if w.rest(&worker{}) {
			t.Error("a worker rests although all are to end")
		}
		if w.timer != nil {
			t.Error("the timer runs on")
		}
	})
}
