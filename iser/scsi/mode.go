package scsi

import (
	"context"
	"encoding/binary"
)

// Mode pages.
const (
	modeRecovery   = 0x01 // read-write error recovery
	modeCaching    = 0x08
	modeControl    = 0x0A
	modeExceptions = 0x1C // informational exceptions control
	modeAll        = 0x3F
	subpageAll     = 0xFF
)

// Bits of mode pages and of the mode parameter header.
const (
	cachingWCE   = 0x04 // caching, byte 2
	controlSense = 0x04 // control, byte 2: D_SENSE
	controlSWP   = 0x08 // control, byte 4
	headerWP     = 0x80 // device-specific parameter
	headerDPOFUA = 0x10
	selectSP     = 0x01 // refused by the usage bitmap
)

// modeState is what the mode pages show.
type modeState struct {
	writeCache bool
	descriptor bool // D_SENSE
	protect    bool // SWP
}

// modePages has the pages in ascending order.
var modePages = [...]byte{modeRecovery, modeCaching, modeControl, modeExceptions}

// modePage renders a page, header included (SBC-3, 6.4; SPC-4, 7.5), or returns nil.
func modePage(code byte, s modeState) []byte {
	var p []byte
	switch code {
	case modeRecovery:
		p = make([]byte, 12)
		p[2] = 0xC0 // AWRE, ARRE
	case modeCaching:
		p = make([]byte, 20)
		if s.writeCache {
			p[2] |= cachingWCE
		}
	case modeControl:
		p = make([]byte, 12)
		p[2] = 0x02 // GLTSD: log parameters are not saved
		p[3] = 0x10 // QAM: unrestricted reordering
		p[5] = 0x40 // TAS
		if s.descriptor {
			p[2] |= controlSense
		}
		if s.protect {
			p[4] |= controlSWP
		}
	case modeExceptions:
		p = make([]byte, 12)
		p[2] = 0x08 // DEXCPT
	default:
		return nil
	}
	p[0], p[1] = code, byte(len(p)-2)
	return p
}

// modeChangeable is the mask of the bits that MODE SELECT changes, header included.
func modeChangeable(code byte) []byte {
	p := modePage(code, modeState{})
	clear(p[2:])
	switch code {
	case modeCaching:
		p[2] = cachingWCE
	case modeControl:
		p[2], p[4] = controlSense, controlSWP
	}
	return p
}

func (u *LogicalUnit) modeState() modeState {
	wce := cachingFacts(u.opt.Medium.Contract()).writeCache
	u.mu.Lock()
	defer u.mu.Unlock()
	return modeState{writeCache: wce, descriptor: u.dSense, protect: u.swp}
}

func modeSense6(ctx context.Context, c *call) Result {
	pages, f, ok := c.modePages(c.cdb[2], c.cdb[3])
	if !ok {
		return c.fail(f)
	}
	desc := c.blockDescriptor(c.cdb[1]&0x08 != 0, false)
	out := make([]byte, 4, 4+len(desc)+len(pages))
	out[2] = c.deviceSpecific()
	out[3] = byte(len(desc))
	out = append(append(out, desc...), pages...)
	out[0] = byte(len(out) - 1)
	return c.reply(ctx, out, int64(c.cdb[4]))
}

func modeSense10(ctx context.Context, c *call) Result {
	pages, f, ok := c.modePages(c.cdb[2], c.cdb[3])
	if !ok {
		return c.fail(f)
	}
	long := c.cdb[1]&0x10 != 0 // LLBAA
	desc := c.blockDescriptor(c.cdb[1]&0x08 != 0, long)
	out := make([]byte, 8, 8+len(desc)+len(pages))
	out[3] = c.deviceSpecific()
	if long && len(desc) > 0 {
		out[4] = 0x01 // LONGLBA
	}
	out[7] = byte(len(desc))
	out = append(append(out, desc...), pages...)
	binary.BigEndian.PutUint16(out, uint16(len(out)-2))
	return c.reply(ctx, out, int64(binary.BigEndian.Uint16(c.cdb[7:])))
}

// modePages renders the pages that byte 2 and 3 of a MODE SENSE ask for.
func (c *call) modePages(pcPage, sub byte) ([]byte, fault, bool) {
	pc, code := pcPage>>6, pcPage&0x3F
	if pc == 3 {
		return nil, faultSavingPages, false
	}
	if sub != 0 && sub != subpageAll {
		return nil, invalidCDB(3, -1), false
	}
	state := c.unit.modeState()
	if pc == 2 {
		// Defaults. That of WCE belongs to the volume's policy; its current value is
		// the best there is.
		state.descriptor, state.protect = false, false
	}
	var out []byte
	for _, p := range modePages {
		if code != p && code != modeAll {
			continue
		}
		if pc == 1 {
			out = append(out, modeChangeable(p)...)
		} else {
			out = append(out, modePage(p, state)...)
		}
	}
	if out == nil {
		return nil, invalidCDB(2, 5), false
	}
	return out, fault{}, true
}

func (c *call) deviceSpecific() byte {
	var b byte
	if c.protected {
		b |= headerWP
	}
	if cachingFacts(c.medium().Contract()).dpoFUA {
		b |= headerDPOFUA
	}
	return b
}

// blockDescriptor renders the mode parameter block descriptor (SBC-3, 6.4.2).
func (c *call) blockDescriptor(disabled, long bool) []byte {
	switch {
	case disabled:
		return nil
	case long:
		b := make([]byte, 16)
		binary.BigEndian.PutUint64(b, c.geometry.Blocks)
		binary.BigEndian.PutUint32(b[12:], c.geometry.BlockSize)
		return b
	default:
		b := make([]byte, 8)
		binary.BigEndian.PutUint32(b, uint32(min(c.geometry.Blocks, 0xFFFFFFFF)))
		binary.BigEndian.PutUint32(b[4:], c.geometry.BlockSize) // byte 4 is reserved, and zero
		return b
	}
}

func modeSelect6(ctx context.Context, c *call) Result {
	n := int(c.cdb[4])
	list, res, ok := c.parameterList(ctx, n)
	if !ok {
		return res
	}
	if n == 0 {
		return Result{}
	}
	if n < 4 {
		return c.fail(faultListLength)
	}
	res = c.modeSelect(ctx, list, 4, int(list[3]), false)
	res.DataOut = int64(n)
	return res
}

func modeSelect10(ctx context.Context, c *call) Result {
	n := int(binary.BigEndian.Uint16(c.cdb[7:]))
	list, res, ok := c.parameterList(ctx, n)
	if !ok {
		return res
	}
	if n == 0 {
		return Result{}
	}
	if n < 8 {
		return c.fail(faultListLength)
	}
	res = c.modeSelect(ctx, list, 8, int(binary.BigEndian.Uint16(list[6:])), list[4]&0x01 != 0)
	res.DataOut = int64(n)
	return res
}

// modeSelect checks the whole parameter list before it changes anything.
func (c *call) modeSelect(ctx context.Context, list []byte, header, descLen int, long bool) Result {
	u := c.unit
	u.modeMu.Lock()
	defer u.modeMu.Unlock()
	at := header
	if descLen > 0 {
		want := 8
		if long {
			want = 16
		}
		if descLen != want {
			return c.fail(invalidParameter(header-1, -1))
		}
		if len(list) < at+descLen {
			return c.fail(faultListLength)
		}
		if bad := c.checkDescriptor(list[at:at+descLen], long); bad >= 0 {
			return c.fail(invalidParameter(at+bad, -1))
		}
		at += descLen
	}
	old := u.modeState()
	state := old
	for at < len(list) {
		if len(list) < at+2 {
			return c.fail(faultListLength)
		}
		code := list[at] & 0x7F // PS is reserved here; bit 6, SPF, makes an unknown page
		current := modePage(code, state)
		if current == nil {
			return c.fail(invalidParameter(at, 6))
		}
		if list[at+1] != current[1] {
			return c.fail(invalidParameter(at+1, -1))
		}
		if len(list) < at+len(current) {
			return c.fail(faultListLength)
		}
		page, mask := list[at:at+len(current)], modeChangeable(code)
		for i := 2; i < len(page); i++ {
			if diff := (page[i] ^ current[i]) &^ mask[i]; diff != 0 {
				return c.fail(invalidParameter(at+i, topBit(diff)))
			}
		}
		switch code {
		case modeCaching:
			state.writeCache = page[2]&cachingWCE != 0
		case modeControl:
			state.descriptor = page[2]&controlSense != 0
			state.protect = page[4]&controlSWP != 0
		}
		at += len(current)
	}
	if state == old {
		return Result{}
	}
	if state.writeCache != old.writeCache {
		if err := c.medium().SetWriteCache(ctx, state.writeCache); err != nil {
			return c.failErr(ctx, err)
		}
		if u.modeState().writeCache != state.writeCache {
			// The configured policy acknowledges at the flush level: there is no write
			// cache to enable.
			return c.fail(newFault(IllegalRequest, 0x26, 0x02))
		}
	}
	u.mu.Lock()
	u.dSense, u.swp = state.descriptor, state.protect
	u.raiseLocked(uaModeChanged, &c.nexus)
	u.mu.Unlock()
	return Result{}
}

// checkDescriptor accepts a block descriptor that changes nothing, and returns the
// offset of what it would change, or -1.
func (c *call) checkDescriptor(d []byte, long bool) int {
	want := c.blockDescriptor(false, long)
	count := len(want) - 4
	if long {
		count = 8
	}
	same, zero, all := true, true, true
	for i := range count {
		same = same && d[i] == want[i]
		zero = zero && d[i] == 0
		all = all && d[i] == 0xFF
	}
	if !same && !zero && !all {
		return 0
	}
	size := len(want) - 3 // the length has three bytes in both forms that count here
	for i := size; i < len(want); i++ {
		if d[i] != want[i] {
			return i
		}
	}
	return -1
}
