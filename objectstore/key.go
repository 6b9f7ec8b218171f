package objectstore

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Limits of keys, the same for every backend, so that what one takes all take.
const (
	// MaxKeyLen is the longest key in bytes, without the prefix of the URL.
	MaxKeyLen = 512
	// MaxKeyComponent is the longest part between slashes in bytes.
	MaxKeyComponent = 80
	// MaxListPage is the largest page that List returns.
	MaxListPage = 1000
)

// ValidateKey returns an error that Is ErrInvalid unless key is non-empty UTF-8 without
// control characters, within the limits, and its parts between slashes are non-empty
// and not "." or "..".
func ValidateKey(key string) error {
	if reason := keyFault(key, MaxKeyLen, MaxKeyComponent); reason != "" {
		return fmt.Errorf("%w: key %.100q %s", ErrInvalid, key, reason)
	}
	return nil
}

// keyFault returns what is wrong with a key or a prefix of keys, "" for nothing.
func keyFault(key string, maxLen, maxComponent int) string {
	switch {
	case key == "":
		return "is empty"
	case len(key) > maxLen:
		return fmt.Sprintf("is longer than %d bytes", maxLen)
	}
	if fault := textFault(key); fault != "" {
		return fault
	}
	for part := range strings.SplitSeq(key, "/") {
		switch {
		case part == "":
			return "has an empty part, or a slash at its start or end"
		case part == "." || part == "..":
			return "has a part that is . or .."
		case len(part) > maxComponent:
			return fmt.Sprintf("has a part longer than %d bytes", maxComponent)
		}
	}
	return ""
}

// textFault refuses what does not survive XML or a terminal.
func textFault(s string) string {
	if !utf8.ValidString(s) {
		return "is not UTF-8"
	}
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == 0xfffe || r == 0xffff {
			return "has control characters"
		}
	}
	return ""
}

// checkKey and its sisters validate the arguments of one operation.
func checkKey(op Op, key string) error {
	if err := ValidateKey(key); err != nil {
		return fail(op, "", ErrInvalid, err)
	}
	return nil
}

func checkRange(key string, off int64) error {
	if off < 0 {
		return fail(OpGetRange, key, ErrInvalid, fmt.Errorf("offset %d is negative", off))
	}
	return checkKey(OpGetRange, key)
}

func checkGet(key string, limit int64) error {
	if limit < 0 {
		return fail(OpGet, key, ErrInvalid, fmt.Errorf("limit %d is negative", limit))
	}
	return checkKey(OpGet, key)
}

func checkList(prefix, startAfter string, max int) error {
	if max < 1 || max > MaxListPage {
		return fail(OpList, "", ErrInvalid, fmt.Errorf("page size %d is not 1 to %d", max, MaxListPage))
	}
	for _, s := range []string{prefix, startAfter} {
		if len(s) > MaxKeyLen || textFault(s) != "" || strings.HasPrefix(s, "/") {
			return fail(OpList, "", ErrInvalid, fmt.Errorf("prefix or start %.100q is not part of a key", s))
		}
	}
	return nil
}

func checkDelete(keys []string) error {
	for _, k := range keys {
		if err := checkKey(OpDelete, k); err != nil {
			return err
		}
	}
	return nil
}
