package bench

import (
	"context"
	"sync"

	"github.com/isergate/isergate/iser/initiator"
)

// memory is a unit that keeps what is written, unless told otherwise.
type memory struct {
	mu     sync.Mutex
	block  uint32
	data   []byte
	writes int
	// spoil, if set, is called with the number of each write and may change what is written, and where.
	spoil func(n int, lba uint64, p []byte) (uint64, []byte)
	fail  func(n int) error
}

func newMemory(blocks uint64, block uint32) *memory {
	return &memory{block: block, data: make([]byte, blocks*uint64(block))}
}

func (m *memory) open(context.Context) (*Opened, error) {
	return &Opened{Unit: m, BlockSize: m.block, Blocks: uint64(len(m.data)) / uint64(m.block), Close: func() {}}, nil
}

func (m *memory) Read(_ context.Context, lba uint64, p []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(p, m.data[lba*uint64(m.block):])
	return nil
}

func (m *memory) Write(_ context.Context, lba uint64, p []byte, _ bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.writes++
	if m.fail != nil {
		if err := m.fail(m.writes); err != nil {
			return err
		}
	}
	if m.spoil != nil {
		lba, p = m.spoil(m.writes, lba, p)
	}
	copy(m.data[lba*uint64(m.block):], p)
	return nil
}

func (m *memory) Flush(context.Context) error { return nil }

var _ Unit = (*initiator.LUN)(nil)
