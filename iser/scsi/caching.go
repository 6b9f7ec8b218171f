package scsi

// caching is what initiators are told about the cache.
type caching struct {
	writeCache  bool // WCE of the caching mode page
	dpoFUA      bool // DPOFUA of the mode parameter header
	volatile    bool // V_SUP of the extended INQUIRY page
	nonVolatile bool // NV_SUP of the extended INQUIRY page
}

// cachingFacts derives from the contract all that SCSI says about caching; nothing
// else may.
//
//   - WCE is set exactly when a plain write may be acknowledged below the flush level.
//   - V_SUP is set when acknowledged data may be gone after a fault that a flush (or a
//     power cut, with ack=memory) would have to survive.
//   - NV_SUP is set when acknowledged data is at its level, but in a journal rather
//     than in its home. It is never set together with WCE: some initiators then stop
//     flushing.
//   - FUA is always honoured, so DPOFUA is always set.
func cachingFacts(c Contract) caching {
	wce := c.WriteCache()
	volatile := wce || c.Ack <= LevelMemory
	return caching{
		writeCache:  wce,
		dpoFUA:      true,
		volatile:    volatile,
		nonVolatile: !volatile && c.Ack < LevelObject,
	}
}
