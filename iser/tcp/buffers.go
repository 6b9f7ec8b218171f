package tcp

import (
	"math/bits"
	"sync"
)

// Staging and send buffers come in powers of two from 4 KiB to 512 KiB; larger ones are not kept.
const (
	minClass = 12
	maxClass = 19
)

var pools [maxClass - minClass + 1]sync.Pool

// getBuffer returns a buffer of length n whose content is undefined.
func getBuffer(n int) []byte {
	class := max(bits.Len(uint(max(n-1, 0))), minClass)
	if class > maxClass {
		return make([]byte, n)
	}
	if p, _ := pools[class-minClass].Get().(*[]byte); p != nil {
		b := *p
		*p = nil
		headers.Put(p)
		return b[:n]
	}
	return make([]byte, n, 1<<class)
}

// headers keeps the slice headers that travel through pools, so that putting a buffer back does not allocate.
var headers = sync.Pool{New: func() any { return new([]byte) }}

// putBuffer gives a buffer back. Buffers that did not come from getBuffer are dropped.
func putBuffer(b []byte) {
	c := cap(b)
	if c < 1<<minClass || c > 1<<maxClass || c&(c-1) != 0 {
		return
	}
	p := headers.Get().(*[]byte)
	*p = b[:0]
	pools[bits.Len(uint(c))-1-minClass].Put(p)
}
