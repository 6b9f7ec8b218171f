package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrInUse means that a unit has a partition table, a file system or something of that kind, and that Options.Force did
// not allow to write over it.
var ErrInUse = errors.New("bench: the logical unit is in use")

// signature is what marks a format at a fixed place.
type signature struct {
	name   string
	offset int64 // negative: from the end
	magic  string
}

// signatures are those that util-linux's blkid knows and people have on LUNs.
var signatures = []signature{
	{"an ext2, ext3 or ext4 file system", 0x438, "\x53\xef"},
	{"an XFS file system", 0, "XFSB"},
	{"a Btrfs file system", 0x10040, "_BHRfS_M"},
	{"an F2FS file system", 0x400, "\x10\x20\xf5\xf2"},
	{"an NTFS file system", 3, "NTFS    "},
	{"an exFAT file system", 3, "EXFAT   "},
	{"a FAT file system", 0x52, "FAT32   "},
	{"a FAT file system", 0x36, "FAT16   "},
	{"a FAT file system", 0x36, "FAT12   "},
	{"a ReFS file system", 3, "ReFS\x00\x00\x00\x00"},
	{"a bcachefs or bcache device", 0x1018, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{"a bcachefs device", 0x1018, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
	{"an OCFS2 file system", 0x2000, "OCFSV2"},
	{"a GFS2 file system", 0x10000, "\x01\x16\x19\x70"},
	{"an ISO 9660 file system", 0x8001, "CD001"},
	{"a VMFS volume", 0x100000, "\x0d\xd0\x01\xc0"},
	{"an LVM physical volume", 0x000, "LABELONE"},
	{"an LVM physical volume", 0x200, "LABELONE"},
	{"an LVM physical volume", 0x400, "LABELONE"},
	{"an LVM physical volume", 0x600, "LABELONE"},
	{"a LUKS volume", 0, "LUKS\xba\xbe"},
	{"swap space", 0xff6, "SWAPSPACE2"},
	{"a member of a Linux RAID", 0, "\xfc\x4e\x2b\xa9"},
	{"a member of a Linux RAID", 0x1000, "\xfc\x4e\x2b\xa9"},
	{"a Ceph OSD", 0, "bluestore block device"},
	{"an Oracle ASM disk", 0x20, "ORCLDISK"},
	{"a qcow2 image", 0, "QFI\xfb"},
	{"a GUID partition table", 0x200, "EFI PART"},
	{"a GUID partition table", 0x1000, "EFI PART"},
	{"the backup of a GUID partition table", -0x200, "EFI PART"},
	{"the backup of a GUID partition table", -0x1000, "EFI PART"},
}

// Sizes of what content reads: every signature lies in one of them.
const (
	headBytes = 0x100000 + 4096
	tailBytes = 4096
	zfsLabel  = 0x20000 // the uberblocks of a ZFS label lie from here on
	zfsStep   = 1024
	zfsEnd    = 0x40000
)

// content names what a unit seems to hold, in words that follow "it has", or returns "" if it knows none of it.
func content(ctx context.Context, u *Opened) (string, error) {
	block := uint64(u.BlockSize)
	first := make([]byte, min(u.Blocks, (headBytes+block-1)/block)*block)
	last := make([]byte, min(u.Blocks, max(1, tailBytes/block))*block)
	read := func(lba uint64, p []byte) error {
		if err := u.Unit.Read(ctx, lba, p); err != nil {
			return fmt.Errorf("bench: read what the unit holds: %w", err)
		}
		return nil
	}
	piece := max(1, 128<<10/block) * block
	for at := uint64(0); at < uint64(len(first)); at += piece {
		if err := read(at/block, first[at:min(at+piece, uint64(len(first)))]); err != nil {
			return "", err
		}
	}
	if err := read(u.Blocks-uint64(len(last))/block, last); err != nil {
		return "", err
	}
	return recognize(first, last), nil
}

// recognize looks for signatures in the first and the last bytes of a unit.
func recognize(first, last []byte) string {
	for _, s := range signatures {
		in, at := first, s.offset
		if at < 0 {
			in, at = last, int64(len(last))+at
		}
		if at >= 0 && at+int64(len(s.magic)) <= int64(len(in)) && string(in[at:at+int64(len(s.magic))]) == s.magic {
			return s.name
		}
	}
	if partitioned(first) {
		return "an MBR partition table"
	}
	for at := zfsLabel; at+8 <= min(zfsEnd, len(first)); at += zfsStep {
		const uberblock = 0x00bab10c
		if binary.LittleEndian.Uint64(first[at:]) == uberblock || binary.BigEndian.Uint64(first[at:]) == uberblock {
			return "a ZFS pool"
		}
	}
	return ""
}

// partitioned reports whether a sector is an MBR with at least one partition.
func partitioned(sector []byte) bool {
	if len(sector) < 512 || !bytes.Equal(sector[510:512], []byte{0x55, 0xaa}) {
		return false
	}
	found := false
	for i := range 4 {
		e := sector[446+16*i:][:16]
		if e[0]&0x7f != 0 {
			return false // the status byte is 00h or 80h
		}
		found = found || e[4] != 0 && binary.LittleEndian.Uint32(e[12:]) != 0
	}
	return found
}
