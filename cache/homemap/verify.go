package homemap

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"

	"github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/ristretto/v2/z"
)

// verifyTables reads Badger's table files and verifies their checksums, here, where a
// panic can be caught.
func verifyTables(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	if err != nil {
		return fmt.Errorf("homemap: %w", err)
	}
	for _, f := range files {
		if err := verifyTable(f); err != nil {
			if system(err) {
				return fmt.Errorf("homemap: %s: %w", f, err)
			}
			return fmt.Errorf("%w: %s: %w", ErrDamaged, f, err)
		}
	}
	return nil
}

func verifyTable(file string) (err error) {
	if err := checkFooter(file); err != nil {
		return err
	}
	mf, err := z.OpenMmapFile(file, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("malformed table: %v", r)
		}
		mf.Close(-1)
	}()
	t, err := table.OpenTable(mf, table.Options{BlockSize: 4096, Compression: options.None, ChkMode: options.NoVerification})
	if err != nil {
		return err
	}
	return t.VerifyChecksum()
}

// checkFooter checks the lengths at the end of a table: Badger ends the process if they
// point outside of the file. The end is: index, its length (4 bytes, big-endian),
// checksum of the index, its length (4).
func checkFooter(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	u32 := func(off int64) (int64, error) {
		var b [4]byte
		if off < 0 {
			return 0, fmt.Errorf("a table of %d bytes", st.Size())
		}
		_, err := f.ReadAt(b[:], off)
		return int64(binary.BigEndian.Uint32(b[:])), err
	}
	sum, err := u32(st.Size() - 4)
	if err != nil {
		return err
	}
	index, err := u32(st.Size() - 8 - sum)
	if err != nil {
		return err
	}
	if index < 4 || index > st.Size()-8-sum {
		return fmt.Errorf("an index of %d bytes in a table of %d", index, st.Size())
	}
	return nil
}
