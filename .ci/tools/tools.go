//go:build tools

// Package tools pins the linter.
package tools

import _ "honnef.co/go/tools/cmd/staticcheck"
