package objectstore

import (
	"strings"
)

// Keys map to paths below the objects directory one part at a time. Lower-case letters,
// digits, "_", "-" and "." (not as the first byte) stand for themselves; each other byte
// is %xx. Upper-case letters are escaped too, so that file systems that ignore case keep
// keys apart. The last part gets a "=" behind it, which no directory's name has: the
// keys "a" and "a/b" can both exist.
const objectMark = "="

func plainByte(c byte, first bool) bool {
	switch {
	case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '_', c == '-':
		return true
	case c == '.':
		return !first
	}
	return false
}

const hexDigits = "0123456789abcdef"

// escapePart returns the file name for one part of a key; at most three times as long.
func escapePart(part string) string {
	var b strings.Builder
	for i := range len(part) {
		c := part[i]
		if plainByte(c, i == 0) {
			b.WriteByte(c)
			continue
		}
		b.WriteByte('%')
		b.WriteByte(hexDigits[c>>4])
		b.WriteByte(hexDigits[c&15])
	}
	return b.String()
}

// unescapePart is the inverse of escapePart; ok is false for a name it never returns.
func unescapePart(name string) (part string, ok bool) {
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		if name[i] != '%' {
			b.WriteByte(name[i])
			continue
		}
		if i+2 >= len(name) {
			return "", false
		}
		hi := strings.IndexByte(hexDigits, name[i+1])
		lo := strings.IndexByte(hexDigits, name[i+2])
		if hi < 0 || lo < 0 {
			return "", false
		}
		b.WriteByte(byte(hi<<4 | lo))
		i += 2
	}
	part = b.String()
	return part, part != "" && escapePart(part) == name
}

// keyPath returns the directories and the file name of key, which must be valid.
func keyPath(key string) (dirs []string, file string) {
	parts := strings.Split(key, "/")
	for i, p := range parts {
		parts[i] = escapePart(p)
	}
	last := len(parts) - 1
	return parts[:last], parts[last] + objectMark
}

// parseName tells what a directory entry stands for. ok is false for foreign names.
func parseName(name string) (part string, object, ok bool) {
	name, object = strings.CutSuffix(name, objectMark)
	part, ok = unescapePart(name)
	return part, object, ok
}
