package scsi

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// Codes of vital product data pages.
const (
	vpdSupported    = 0x00
	vpdSerial       = 0x80
	vpdIdentity     = 0x83
	vpdExtended     = 0x86
	vpdBlockLimits  = 0xB0
	vpdCharacter    = 0xB1
	vpdProvisioning = 0xB2
	vpdPersistence  = 0xC0 // ours; DESIGN.md has the layout
)

// inquiry is INQUIRY (SPC-4, 6.6).
func inquiry(ctx context.Context, c *call) Result {
	alloc := int64(binary.BigEndian.Uint16(c.cdb[3:]))
	if c.cdb[1]&1 == 0 {
		if c.cdb[2] != 0 {
			return c.fail(invalidCDB(2, -1))
		}
		return c.reply(ctx, c.unit.standardInquiry(), alloc)
	}
	page, ok := c.unit.vitalProductData(c.cdb[2], c.nexus)
	if !ok {
		return c.fail(invalidCDB(2, -1))
	}
	return c.reply(ctx, page, alloc)
}

const standardInquiryLen = 96

// putText fills field with s, padded with spaces.
func putText(field []byte, s string) {
	n := copy(field, s)
	for i := n; i < len(field); i++ {
		field[i] = ' '
	}
}

func (u *LogicalUnit) standardInquiry() []byte {
	b := make([]byte, standardInquiryLen)
	if u.opt.Removable {
		b[1] = 0x80 // RMB
	}
	b[2] = 0x06                   // SPC-4
	b[3] = 0x12                   // HISUP, response data format 2
	b[4] = standardInquiryLen - 5 // additional length
	b[7] = 0x02                   // CMDQUE
	putText(b[8:16], u.opt.Vendor)
	putText(b[16:32], u.opt.Product)
	putText(b[32:36], u.opt.Revision)
	for i, v := range []uint16{
		0x00A0, // SAM-5
		0x0960, // iSCSI
		0x0460, // SPC-4
		0x04C0, // SBC-3
	} {
		binary.BigEndian.PutUint16(b[58+2*i:], v)
	}
	return b
}

// vitalProductData returns a page, header included.
func (u *LogicalUnit) vitalProductData(code byte, n Nexus) ([]byte, bool) {
	var body []byte
	switch code {
	case vpdSupported:
		body = []byte{vpdSupported, vpdSerial, vpdIdentity, vpdExtended, vpdBlockLimits, vpdCharacter, vpdProvisioning, vpdPersistence}
	case vpdSerial:
		body = []byte(u.opt.Identity.Serial)
	case vpdIdentity:
		body = u.designators(n)
	case vpdExtended:
		body = u.extendedInquiry()
	case vpdBlockLimits:
		body = u.blockLimits()
	case vpdCharacter:
		body = make([]byte, 60)
		body[1] = 0x01 // non-rotating medium
	case vpdProvisioning:
		const lbpu, lbpws, lbpws10, lbprz = 0x80, 0x40, 0x20, 0x04
		body = []byte{0, lbpu | lbpws | lbpws10 | lbprz, 0x02, 0} // thin
	case vpdPersistence:
		body = persistencePage(u.opt.Medium.Contract())
	default:
		return nil, false
	}
	page := make([]byte, 4, 4+len(body))
	page[1] = code
	binary.BigEndian.PutUint16(page[2:], uint16(len(body)))
	return append(page, body...), true
}

// extendedInquiry is VPD page 86h without its header.
func (u *LogicalUnit) extendedInquiry() []byte {
	const (
		headSup, ordSup, simpSup = 0x04, 0x02, 0x01
		nvSup, vSup              = 0x02, 0x01
		luiClr                   = 0x01
	)
	facts := cachingFacts(u.opt.Medium.Contract())
	b := make([]byte, 60)
	b[1] = headSup | ordSup | simpSup
	if facts.nonVolatile {
		b[2] |= nvSup
	}
	if facts.volatile {
		b[2] |= vSup
	}
	b[3] = luiClr // unit attentions are kept for each nexus
	return b
}

// blockLimits is VPD page B0h without its header.
func (u *LogicalUnit) blockLimits() []byte {
	g := u.opt.Medium.Geometry()
	granule := g.PhysicalSize / g.BlockSize
	b := make([]byte, 60)
	b[1] = maxCompareBlocks
	binary.BigEndian.PutUint16(b[2:], uint16(min(granule, 0xFFFF)))
	binary.BigEndian.PutUint32(b[4:], u.opt.MaxTransfer)
	binary.BigEndian.PutUint32(b[8:], g.OptimalBlocks)
	binary.BigEndian.PutUint32(b[16:], maxUnmapBlocks)
	binary.BigEndian.PutUint32(b[20:], maxUnmapDescs)
	if granule > 1 {
		// A granularity of one block says nothing new, and QEMU (7.2, block/iscsi.c) fails
		// an assertion at the first read of 64 KiB from a unit of 4 KiB blocks that says it.
		binary.BigEndian.PutUint32(b[24:], granule)
		binary.BigEndian.PutUint32(b[28:], 1<<31) // UGAVALID, alignment 0
	}
	binary.BigEndian.PutUint64(b[32:], maxWriteSame)
	return b
}

// Designator is one entry of VPD page 83h (SPC-4, 7.8.6.1).
type Designator struct {
	Protocol    uint8 // protocol identifier; counts if HasProtocol
	HasProtocol bool
	CodeSet     uint8 // 1 binary, 2 ASCII, 3 UTF-8
	Association uint8 // 0 logical unit, 1 target port, 2 target device
	Type        uint8 // 1 T10, 3 NAA, 4 relative target port, 5 target port group, 8 SCSI name string
	Value       []byte
}

func (d Designator) appendTo(b []byte) []byte {
	proto := byte(0)
	flags := d.Association&3<<4 | d.Type&0x0F
	if d.HasProtocol {
		proto, flags = d.Protocol<<4, flags|0x80
	}
	value := d.Value[:min(len(d.Value), 252)]
	b = append(b, proto|d.CodeSet&0x0F, flags, 0, byte(len(value)))
	return append(b, value...)
}

func (u *LogicalUnit) designators(n Nexus) []byte {
	naa := u.opt.Identity.NAA()
	vendor := make([]byte, 8, 8+len(u.opt.Identity.Serial))
	putText(vendor, u.opt.Vendor)
	vendor = append(vendor, u.opt.Identity.Serial...)
	b := Designator{CodeSet: 1, Type: 3, Value: naa[:]}.appendTo(nil)
	b = Designator{CodeSet: 2, Type: 1, Value: vendor}.appendTo(b)
	for _, d := range u.opt.PortDesignators(n) {
		b = d.appendTo(b)
	}
	return b
}

// NAA returns the NAA type 6 identifier: the nibble 6, a locally administered company
// identifier (02-49-53), and 100 bits of the SHA-256 of the UUID. It never changes, and two
// volumes do not share one.
func (i Identity) NAA() [16]byte {
	sum := sha256.Sum256(i.UUID[:])
	naa := [16]byte{0x60, 0x24, 0x95, 0x30}
	naa[3] |= sum[12] >> 4
	copy(naa[4:], sum[:12])
	return naa
}

// iscsiProtocol is the protocol identifier of iSCSI (SPC-4, 7.6.1).
const iscsiProtocol = 5

// ISCSIDesignators are the designators of an iSCSI target port: the relative target port
// identifier (the portal group tag), the port's name and the target's name.
func ISCSIDesignators(n Nexus) []Designator {
	ascii := func(assoc uint8, name string) Designator {
		value := []byte(name)
		for len(value) == 0 || len(value)%4 != 0 || value[len(value)-1] != 0 {
			value = append(value, 0)
		}
		return Designator{HasProtocol: true, Protocol: iscsiProtocol, CodeSet: 3, Association: assoc, Type: 8, Value: value}
	}
	port := binary.BigEndian.AppendUint16([]byte{0, 0}, n.PortalGroup)
	return []Designator{
		{HasProtocol: true, Protocol: iscsiProtocol, CodeSet: 1, Association: 1, Type: 4, Value: port},
		ascii(1, fmt.Sprintf("%s,t,0x%04x", n.TargetName, n.PortalGroup)),
		ascii(2, n.TargetName),
	}
}
