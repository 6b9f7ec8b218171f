package main

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

// digest returns what a person needs of a gateway's log to see why a test failed, in whole lines: warnings, errors and whatever is no log line,
// such as a panic, first; then the end of the rest, without the logins that every command of a client causes.
func digest(log string) string {
	const most = 8000 // bytes of each part
	var important, rest []string
	logins := 0
	for line := range strings.Lines(log) {
		switch level := logLevel.FindStringSubmatch(line); {
		case level == nil || level[1] != "INFO" && level[1] != "DEBUG":
			important = append(important, line)
		case loginLine.MatchString(line):
			logins++
		default:
			rest = append(rest, line)
		}
	}
	var out strings.Builder
	part := func(what string, lines []string, fromEnd bool) {
		kept, size := 0, 0
		for kept < len(lines) {
			next := lines[kept]
			if fromEnd {
				next = lines[len(lines)-1-kept]
			}
			if size += len(next); size > most && kept > 0 {
				break
			}
			kept++
		}
		left := len(lines) - kept
		fmt.Fprintf(&out, "--- %s: %d of %d lines\n", what, kept, len(lines))
		if fromEnd {
			lines = lines[left:]
		}
		out.WriteString(strings.Join(lines[:kept], ""))
	}
	part("warnings, errors, and what is no log line, from the first", important, false)
	part(fmt.Sprintf("the rest, to the last, without %d logins", logins), rest, true)
	return out.String()
}

var (
	logLevel  = regexp.MustCompile(`^(?:time=\S+ level=|\{.*"level":")([A-Z]+)`)
	loginLine = regexp.MustCompile(`msg=login |"msg":"login"|msg="connection logged out"`)
)

// A failed test shows the cause, however much the gateway logged.
func TestDigest(t *testing.T) {
	t.Parallel()
	login := "time=2026-11-30T18:00:00Z level=INFO msg=login initiator=i target=t\n"
	cause := "time=2026-11-30T18:00:01Z level=WARN msg=\"protocol violation: session closed\" err=e\n"
	panicked := "panic: runtime error\n\ngoroutine 1 [running]:\n"
	info := func(n int) string { return fmt.Sprintf("time=2026-11-30T18:00:02Z level=INFO msg=%d\n", n) }
	log := strings.Repeat(login, 500) + cause + strings.Repeat(login, 500)
	for n := range 1000 {
		log += info(n)
	}
	log += panicked
	got := digest(log)
	for _, want := range []string{cause, panicked, info(999), "without 1000 logins", ": 4 of 4 lines"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
	if strings.Contains(got, login) || strings.Contains(got, info(0)) || len(got) > 20000 {
		t.Errorf("%d bytes:\n%s", len(got), got)
	}
	for line := range strings.Lines(got) {
		if !strings.HasPrefix(line, "---") && !strings.Contains(log, "\n"+line) {
			t.Errorf("a line that is cut: %q", line)
		}
	}
}
