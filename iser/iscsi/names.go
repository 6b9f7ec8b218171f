package iscsi

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxNameLength is the longest iSCSI name in bytes (RFC 7143, 4.2.7.1).
const MaxNameLength = 223

// ErrName means that a string is not an iSCSI name.
var ErrName = errors.New("iscsi: not an iSCSI name")

// CheckName returns an error that Is ErrName and says why, unless name is an iSCSI name in its normal form (RFC 7143, 4.2.7 and RFC 3722):
// iqn.yyyy-mm.domain[:string], eui. and 16, or naa. and 16 or 32 hexadecimal digits. Names are compared byte by byte.
func CheckName(name string) error {
	bad := func(why string) error { return fmt.Errorf("%w: %q: %s", ErrName, clip(name), why) }
	if name == "" {
		return bad("it is empty")
	}
	if len(name) > MaxNameLength {
		return bad("it is longer than 223 bytes")
	}
	if !utf8.ValidString(name) {
		return bad("it is not UTF-8")
	}
	kind, rest, _ := strings.Cut(name, ".")
	switch kind {
	case "iqn":
		return checkIQN(rest, bad)
	case "eui":
		if len(rest) != 16 || !isHex(rest) {
			return bad("eui. takes 16 hexadecimal digits")
		}
	case "naa":
		if len(rest) != 16 && len(rest) != 32 || !isHex(rest) {
			return bad("naa. takes 16 or 32 hexadecimal digits")
		}
	default:
		return bad("it begins with none of iqn., eui. and naa.")
	}
	return nil
}

func checkIQN(rest string, bad func(string) error) error {
	// yyyy-mm.domain
	if len(rest) < 9 || rest[4] != '-' || rest[7] != '.' || !digits(rest[:4]) || !digits(rest[5:7]) {
		return bad("iqn. takes a date yyyy-mm and a domain")
	}
	if m := rest[5:7]; m < "01" || m > "12" {
		return bad("the month is not 01 to 12")
	}
	for _, r := range rest[8:] {
		switch {
		case r < utf8.RuneSelf:
			if !(r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '.' || r == ':') {
				return bad("only a-z, 0-9, '-', '.' and ':' may stand in it")
			}
		case unicode.IsUpper(r) || unicode.IsSpace(r) || unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || !unicode.IsGraphic(r):
			return bad("it is not in normal form")
		}
	}
	return nil
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

func isHex(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
			return false
		}
	}
	return true
}

// clip shortens what a peer sent before it goes into a message.
func clip(s string) string {
	if len(s) > MaxNameLength {
		return s[:MaxNameLength] + "…"
	}
	return s
}
