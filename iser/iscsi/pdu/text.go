package pdu

import (
	"bytes"
	"strings"
)

// Limits of text (RFC 7143, 6.1 and 12.1.3).
const (
	MaxKeyLength   = 63   // bytes of a key
	MaxValueLength = 255  // bytes of a value, unless its key says otherwise
	MaxBinary      = 1024 // bytes of CHAP_C and CHAP_R, decoded
	// MinTextLength is how much text in one exchange every receiver accepts.
	MinTextLength = 8192
)

// Reserved values, which a proposal never has.
const (
	ValueReject        = "Reject"
	ValueIrrelevant    = "Irrelevant"
	ValueNotUnderstood = "NotUnderstood"
)

// Pair is one key=value.
type Pair struct{ Key, Value string }

// Pairs is a list of keys in wire order.
type Pairs []Pair

// Get returns the value of the first pair with the key.
func (p Pairs) Get(key string) (string, bool) {
	for i := range p {
		if p[i].Key == key {
			return p[i].Value, true
		}
	}
	return "", false
}

// Add appends a pair.
func (p *Pairs) Add(key, value string) { *p = append(*p, Pair{key, value}) }

// Append appends the encoded pairs to b, each ended by a NUL.
func (p Pairs) Append(b []byte) []byte {
	for i := range p {
		b = AppendPair(b, p[i].Key, p[i].Value)
	}
	return b
}

// AppendPair appends one encoded pair to b. It does not judge key and value, but a NUL in them ends them for the receiver.
func AppendPair(b []byte, key, value string) []byte {
	b = append(b, key...)
	b = append(b, '=')
	b = append(b, value...)
	return append(b, 0)
}

// ParseText decodes the text of one exchange, in which a key may appear once. Errors
// are TextErrors.
func ParseText(b []byte) (Pairs, error) { return parseText(b, false) }

// ParseTextList decodes a SendTargets answer, in which TargetName and TargetAddress repeat.
func ParseTextList(b []byte) (Pairs, error) { return parseText(b, true) }

func parseText(b []byte, repeat bool) (Pairs, error) {
	var pairs Pairs
	var seen map[string]bool
	for len(b) > 0 {
		end := bytes.IndexByte(b, 0)
		if end < 0 {
			return nil, &TextError{Detail: "the last pair is not ended by a NUL", Err: ErrText}
		}
		pair := b[:end]
		b = b[end+1:]
		if end == 0 {
			continue // stray delimiters are harmless, and some peers count their padding
		}
		eq := bytes.IndexByte(pair, '=')
		if eq < 0 {
			return nil, &TextError{Detail: "a pair without =", Err: ErrText}
		}
		if eq == 0 || eq > MaxKeyLength {
			return nil, &TextError{Detail: "the key's length is not 1 to 63 bytes", Err: ErrText}
		}
		for _, c := range pair[:eq] {
			if c <= ' ' || c >= 0x7f {
				return nil, &TextError{Detail: "a key with characters that keys never have", Err: ErrText}
			}
		}
		key := string(pair[:eq])
		value := pair[eq+1:]
		if len(value) > valueLimit(key) {
			return nil, &TextError{Key: key, Detail: "the value is too long", Err: ErrText}
		}
		if !repeat {
			if seen == nil {
				seen = make(map[string]bool, 16)
			}
			if seen[key] {
				return nil, &TextError{Key: key, Detail: "it appears twice", Err: ErrDuplicateKey}
			}
			seen[key] = true
		}
		pairs = append(pairs, Pair{key, string(value)})
	}
	return pairs, nil
}

// valueLimit returns the longest value of a key in bytes.
func valueLimit(key string) int {
	switch key {
	case "CHAP_C", "CHAP_R":
		return len("0x") + 2*MaxBinary
	}
	return MaxValueLength
}

// Text collects the text of one exchange, which may span PDUs with the C bit, up
// to a limit. The zero value has the limit MinTextLength.
type Text struct {
	Limit int // bytes; 0 means MinTextLength
	buf   []byte
}

// Add appends a copy of a data segment. It returns a TextError that Is ErrTextTooLong at the limit.
func (t *Text) Add(segment []byte) error {
	limit := t.Limit
	if limit == 0 {
		limit = MinTextLength
	}
	if len(segment) > limit-len(t.buf) {
		return &TextError{Detail: "the exchange passes the limit", Err: ErrTextTooLong}
	}
	t.buf = append(t.buf, segment...)
	return nil
}

// Len returns the number of bytes collected.
func (t *Text) Len() int { return len(t.buf) }

// Parse decodes what was collected, as ParseText does, and empties the collection.
func (t *Text) Parse() (Pairs, error) {
	p, err := ParseText(t.buf)
	t.Reset()
	return p, err
}

// ParseList is Parse for a SendTargets answer.
func (t *Text) ParseList() (Pairs, error) {
	p, err := ParseTextList(t.buf)
	t.Reset()
	return p, err
}

// Reset empties the collection.
func (t *Text) Reset() { t.buf = t.buf[:0] }

// SplitList splits a list value at its commas. An empty value has no items.
func SplitList(value string) []string {
	if value == "" {
		return nil
	}
	return strings.Split(value, ",")
}
