package loglimit

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Limit
		l.Init(3, time.Second)
		expect := func(left uint64, ok bool) {
			t.Helper()
			if gotLeft, got := l.Allow(); got != ok || gotLeft != left {
				t.Fatalf("%d, %t; want %d, %t", gotLeft, got, left, ok)
			}
		}
		for range 3 {
			expect(0, true)
		}
		for range 5 {
			expect(0, false)
		}
		time.Sleep(time.Second)
		expect(5, true)
		expect(0, false)
		time.Sleep(2500 * time.Millisecond)
		expect(1, true)
		expect(0, true)
		expect(0, false)
		time.Sleep(500 * time.Millisecond) // the half interval was not lost
		expect(1, true)
		time.Sleep(time.Hour) // a burst at most, however long the silence
		for range 3 {
			expect(0, true)
		}
		expect(0, false)
	})
}

func TestZeroValue(t *testing.T) {
	var l Limit
	for range 100 {
		if _, ok := l.Allow(); !ok {
			t.Fatal("the zero value limits")
		}
	}
}
