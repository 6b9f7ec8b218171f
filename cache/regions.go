package cache

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// zeroBytes is the size of the memory that unwritten blocks are read from.
const zeroBytes = 1 << 20

// zeroMemory returns the zeros that all engines of the process lend to readers. They are mapped without the right
// to write, for as long as the process lives: a write to them stops the process before it could
// show another volume's bytes to a reader.
var zeroMemory = sync.OnceValues(func() ([]byte, error) {
	b, err := unix.Mmap(-1, 0, zeroBytes, unix.PROT_READ, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of zeros: %w", zeroBytes, err)
	}
	return b, nil
})

// Regions returns all memory in which the buffers of every Landing and Borrowed of this engine lie: each buffer
// is within one region. None of it is on the Go heap, and nothing moves or grows, so that a device
// can register each region once. The regions are page-aligned. The last one, which zeros are read from, is mapped
// read-only: a device may read it and not write it. They stay mapped until Close is called, and after it for as long as a
// Landing or Borrowed is not given back; registrations end before Close.
func (e *Engine) Regions() [][]byte {
	return [][]byte{e.arena.Region(), e.readArena.Region(), e.reads.Region(), e.zeros}
}
