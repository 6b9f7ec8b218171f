package pdu

// Serial is a 32-bit serial number: CmdSN, StatSN, DataSN and R2TSN. It wraps around, and its
// order is that of RFC 1982: a is before b if b is at most 2^31-1 steps ahead of a. The order of two numbers
// exactly 2^31 apart is undefined; here neither is before the other.
type Serial uint32

// Next returns s+1.
func (s Serial) Next() Serial { return s + 1 }

// Add returns s+n for a step n, which may be negative.
func (s Serial) Add(n int32) Serial { return s + Serial(uint32(n)) }

// Before reports whether s < t.
func (s Serial) Before(t Serial) bool { return s != t && uint32(t-s) < 1<<31 }

// After reports whether s > t.
func (s Serial) After(t Serial) bool { return t.Before(s) }

// AtMost reports whether s <= t.
func (s Serial) AtMost(t Serial) bool { return s == t || s.Before(t) }

// Distance returns t-s as a signed number of steps: how far t is ahead of s.
func (s Serial) Distance(t Serial) int32 { return int32(uint32(t - s)) }

// InWindow reports whether first <= s <= last, the test for a CmdSN in
// [ExpCmdSN, MaxCmdSN] (RFC 7143, 4.2.2.1). The window is closed if last = first-1.
func (s Serial) InWindow(first, last Serial) bool { return first.AtMost(s) && s.AtMost(last) }
