// Package units reads and prints byte sizes as people write them.
package units

import (
	"fmt"
	"math"
	"math/big"
	"strings"
)

// Size is a number of bytes, never negative. In YAML and JSON text it is written
// like 10GiB.
type Size int64

// The binary multiples.
const (
	KiB Size = 1 << 10
	MiB Size = 1 << 20
	GiB Size = 1 << 30
	TiB Size = 1 << 40
)

var factors = map[string]int64{
	"": 1, "b": 1,
	"k": 1 << 10, "kib": 1 << 10, "kb": 1e3,
	"m": 1 << 20, "mib": 1 << 20, "mb": 1e6,
	"g": 1 << 30, "gib": 1 << 30, "gb": 1e9,
	"t": 1 << 40, "tib": 1 << 40, "tb": 1e12,
	"p": 1 << 50, "pib": 1 << 50, "pb": 1e15,
}

// ParseSize reads a size: a decimal number, with a fraction if the result is whole
// bytes, and a unit in any case. KiB, MiB, GiB, TiB and PiB, and K, M, G, T and P for
// short, are powers of 1024; kB, MB, GB, TB and PB are powers of 1000; no unit is bytes.
func ParseSize(s string) (Size, error) {
	text := strings.TrimSpace(s)
	end := 0
	for end < len(text) && (text[end] == '.' || text[end] >= '0' && text[end] <= '9') {
		end++
	}
	number, unit := text[:end], strings.ToLower(strings.TrimSpace(text[end:]))
	factor, known := factors[unit]
	if number == "" || len(number) > 40 || !known {
		return 0, fmt.Errorf("%q is no size: write a number and a unit, for example 10GiB, 512MiB or 2TB", s)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, fmt.Errorf("%q is no size: %q is not a number", s, number)
	}
	value.Mul(value, new(big.Rat).SetInt64(factor))
	if !value.IsInt() {
		return 0, fmt.Errorf("%q is not a whole number of bytes", s)
	}
	if !value.Num().IsInt64() || value.Num().Int64() == math.MaxInt64 {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return Size(value.Num().Int64()), nil
}

// String returns the size in the largest binary unit that leaves no fraction, so
// that ParseSize gives the same number back.
func (s Size) String() string {
	for _, u := range []struct {
		name string
		size Size
	}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} {
		if s >= u.size && s%u.size == 0 {
			return fmt.Sprintf("%d%s", s/u.size, u.name)
		}
	}
	return fmt.Sprintf("%dB", int64(s))
}

// Human returns the size rounded to about three digits, for tables.
func (s Size) Human() string {
	for _, u := range []struct {
		name string
		size Size
	}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} {
		if s >= u.size {
			text := fmt.Sprintf("%.1f", float64(s)/float64(u.size))
			return strings.TrimSuffix(text, ".0") + " " + u.name
		}
	}
	return fmt.Sprintf("%d B", int64(s))
}

// MarshalText implements encoding.TextMarshaler.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// Set implements the flag value interface of the command line.
func (s *Size) Set(text string) error { return s.UnmarshalText([]byte(text)) }

// Type names the value in the command line's help.
func (s *Size) Type() string { return "SIZE" }
