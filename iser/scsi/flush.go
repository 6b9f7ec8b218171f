package scsi

import "context"

func synchronizeCache10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.synchronizeCache(ctx, lba, n)
}

func synchronizeCache16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.synchronizeCache(ctx, lba, n)
}

// synchronizeCache is SYNCHRONIZE CACHE (SBC-3, 5.22). The whole medium is flushed,
// whatever the range, and GOOD is sent only then, whatever IMMED says.
func (c *call) synchronizeCache(ctx context.Context, lba, blocks uint64) Result {
	if !c.inRange(lba, blocks) {
		return c.fail(faultLBARange)
	}
	if err := c.medium().Flush(ctx); err != nil {
		return c.failErr(ctx, err)
	}
	return Result{}
}

func prefetch10(ctx context.Context, c *call) Result {
	lba, n := lbaCount10(c.cdb)
	return c.prefetch(ctx, lba, n)
}

func prefetch16(ctx context.Context, c *call) Result {
	lba, n := lbaCount16(c.cdb)
	return c.prefetch(ctx, lba, n)
}

// prefetch is PRE-FETCH (SBC-3, 5.11): it reads at most the maximum transfer length, and
// nothing with IMMED. GOOD, unlike CONDITION MET, promises no block in the cache.
func (c *call) prefetch(ctx context.Context, lba, blocks uint64) Result {
	if !c.inRange(lba, blocks) {
		return c.fail(faultLBARange)
	}
	if blocks == 0 {
		blocks = c.geometry.Blocks - lba
	}
	if c.cdb[1]&b1IMMED != 0 {
		return Result{}
	}
	step := uint64(stepBytes) / uint64(c.geometry.BlockSize)
	blocks = min(blocks, uint64(c.unit.opt.MaxTransfer))
	for end := lba + blocks; lba < end; {
		n := min(end-lba, step)
		b, err := c.medium().Read(ctx, Extent{LBA: lba, Blocks: n})
		if err != nil {
			return c.failErr(ctx, err)
		}
		b.Release()
		lba += n
	}
	return Result{}
}
