package units

import "fmt"

// Count prints a number of things: "1 session", "2 sessions".
func Count[N int | int64 | uint64](n N, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}
