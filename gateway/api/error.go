package api

import (
	"errors"
	"fmt"
	"net/http"
)

// Code is the class of an error, and what a program decides by.
type Code string

// The classes of errors.
const (
	CodeInvalid     Code = "invalid"     // the request is wrong, and stays wrong
	CodeNotFound    Code = "not_found"   // what it names is not there
	CodeConflict    Code = "conflict"    // the state of the node does not allow it
	CodeDenied      Code = "denied"      // no token, or not the right one
	CodeTimeout     Code = "timeout"     // it did not happen in the time that was given
	CodeUnavailable Code = "unavailable" // the node cannot do it now
	CodeInternal    Code = "internal"
)

var httpStatus = map[Code]int{
	CodeInvalid:     http.StatusBadRequest,
	CodeNotFound:    http.StatusNotFound,
	CodeConflict:    http.StatusConflict,
	CodeDenied:      http.StatusUnauthorized,
	CodeTimeout:     http.StatusGatewayTimeout,
	CodeUnavailable: http.StatusServiceUnavailable,
	CodeInternal:    http.StatusInternalServerError,
}

// Error is an error of a Service. Its text is one line and says what to do.
type Error struct {
	Code Code   `json:"code"`
	Text string `json:"message"`
	err  error
}

// Error implements error.
func (e *Error) Error() string { return e.Text }

// Unwrap returns what led to it, on the side of the server.
func (e *Error) Unwrap() error { return e.err }

// Errorf makes an Error; %w works as in fmt.Errorf.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Text: err.Error(), err: errors.Unwrap(err)}
}

// CodeOf returns the class of err, CodeInternal if it has none.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeInternal
}
