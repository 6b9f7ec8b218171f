package units

import "testing"

func TestParseSize(t *testing.T) {
	good := map[string]Size{
		"0": 0, "1": 1, "512B": 512, "10GiB": 10 << 30, "10gib": 10 << 30, "10G": 10 << 30, "1.5 MiB": 3 << 19,
		"2TB": 2e12, "4kB": 4000, "0.5KiB": 512, " 64TiB ": 64 << 40,
	}
	for text, want := range good {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "GiB", "-1GiB", "1e9", "1.2.3GiB", "10 GiBs", "0x10", "0.3B", "9999999PiB", "9223372036854775807", "+1", "1 2"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", text, got)
		}
	}
}

func TestHuman(t *testing.T) {
	for size, want := range map[Size]string{0: "0 B", 1023: "1023 B", KiB: "1 KiB", 3 << 19: "1.5 MiB", 10 * GiB: "10 GiB", 64 * TiB: "64 TiB"} {
		if got := size.Human(); got != want {
			t.Errorf("%d.Human() = %q, want %q", size, got, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, seed := range []string{"10GiB", "1.5MB", "0", ".", "1e9", "000001K"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		size, err := ParseSize(text)
		if err != nil {
			return
		}
		if size < 0 {
			t.Fatalf("ParseSize(%q) = %d", text, size)
		}
		if again, err := ParseSize(size.String()); err != nil || again != size {
			t.Fatalf("ParseSize(%q) = %d, %v; want %d", size.String(), again, err, size)
		}
	})
}

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 sessions", 1: "1 session", 2: "2 sessions"} {
		if got := Count(n, "session"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
