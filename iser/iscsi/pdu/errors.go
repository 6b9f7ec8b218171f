package pdu

import (
	"errors"
	"fmt"
)

var (
	// ErrShort means that the input ends before what it announces.
	ErrShort = errors.New("pdu: input is too short")
	// ErrOpcode means that a header was decoded as a PDU of another kind.
	ErrOpcode = errors.New("pdu: header carries another opcode")
	// ErrFormat means a format error of RFC 7143, section 7.7: header fields that are
	// invalid or contradict each other. At error recovery level 0 the receiver drops the session's connections.
	ErrFormat = errors.New("pdu: format error")

	// ErrText means that a data segment is not a list of key=value pairs
	// within the limits of RFC 7143, section 6.1.
	ErrText = errors.New("pdu: malformed text")
	// ErrTextTooLong means that the text of one exchange exceeds the receiver's limit.
	ErrTextTooLong = errors.New("pdu: text is too long")
	// ErrDuplicateKey means that a key appears twice in one exchange.
	ErrDuplicateKey = errors.New("pdu: duplicate text key")
	// ErrValue means that a value is not of the type or within the range that its key demands.
	ErrValue = errors.New("pdu: invalid value")
)

// FormatError says which field of a PDU made it a format error. It Is ErrFormat.
type FormatError struct {
	Opcode Opcode
	Field  string
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("pdu: format error: %v: %s", e.Opcode, e.Field)
}

// Is reports whether target is ErrFormat.
func (e *FormatError) Is(target error) bool { return target == ErrFormat }

// TextError says which key made a text malformed. It wraps one of ErrText, ErrTextTooLong,
// ErrDuplicateKey and ErrValue. Key is empty if the key itself could not be read.
type TextError struct {
	Key    string
	Detail string
	Err    error
}

func (e *TextError) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("%v: %s", e.Err, e.Detail)
	}
	return fmt.Sprintf("%v: %s: %s", e.Err, e.Key, e.Detail)
}

// Unwrap returns the class of the error.
func (e *TextError) Unwrap() error { return e.Err }
