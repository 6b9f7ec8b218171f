package pdu

import (
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"strings"
)

// ParseNumber decodes a decimal or 0x-hexadecimal number between min and max inclusive
// (RFC 7143, 6.1). Anything else is ErrValue.
func ParseNumber(s string, min, max uint64) (uint64, error) {
	digits, base := s, 10
	if len(s) > 2 && s[0] == '0' && (s[1] == 'x' || s[1] == 'X') {
		digits, base = s[2:], 16
	}
	if digits == "" || strings.ContainsAny(digits, "+-_") {
		return 0, ErrValue
	}
	n, err := strconv.ParseUint(digits, base, 64)
	if err != nil || n < min || n > max {
		return 0, ErrValue
	}
	return n, nil
}

// ParseBool decodes "Yes" or "No". Anything else is ErrValue.
func ParseBool(s string) (bool, error) {
	switch s {
	case "Yes":
		return true, nil
	case "No":
		return false, nil
	}
	return false, ErrValue
}

// FormatBool returns "Yes" or "No".
func FormatBool(b bool) string {
	if b {
		return "Yes"
	}
	return "No"
}

// ParseBinary decodes a binary value: 0x and hexadecimal digits, or 0b and base64, padded or not. An odd
// number of hexadecimal digits has a leading zero. The result has 1 to max bytes; anything else is ErrValue.
func ParseBinary(s string, max int) ([]byte, error) {
	if len(s) < 3 || s[0] != '0' || len(s) > 2+2*max+4 {
		return nil, ErrValue
	}
	var out []byte
	var err error
	switch digits := s[2:]; s[1] {
	case 'x', 'X':
		if len(digits)%2 == 1 {
			digits = "0" + digits
		}
		out, err = hex.DecodeString(digits)
	case 'b', 'B':
		if strings.ContainsAny(digits, "\r\n") {
			return nil, ErrValue
		}
		out, err = base64.RawStdEncoding.Strict().DecodeString(trimPadding(digits))
	default:
		return nil, ErrValue
	}
	if err != nil || len(out) == 0 || len(out) > max {
		return nil, ErrValue
	}
	return out, nil
}

// trimPadding cuts correct base64 padding; wrong padding stays and fails in the decoder.
func trimPadding(s string) string {
	if len(s)%4 != 0 {
		return s
	}
	if t, ok := strings.CutSuffix(s, "=="); ok {
		return t
	}
	return strings.TrimSuffix(s, "=")
}

// FormatHex encodes a binary value as 0x and hexadecimal digits.
func FormatHex(b []byte) string { return "0x" + hex.EncodeToString(b) }

// FormatBase64 encodes a binary value as 0b and padded base64.
func FormatBase64(b []byte) string { return "0b" + base64.StdEncoding.EncodeToString(b) }
