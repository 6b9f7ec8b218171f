package pdu

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestTextRoundTrip(t *testing.T) {
	p := Pairs{{"InitiatorName", "iqn.2001-04.com.example:a"}, {"SessionType", "Normal"}, {"HeaderDigest", "CRC32C,None"}, {"TargetAlias", ""},
		{"CHAP_C", FormatHex(make([]byte, MaxBinary))}, {"X-com.example.key", "a=b"}}
	b := p.Append(nil)
	got, err := ParseText(b)
	if err != nil || !reflect.DeepEqual(got, p) {
		t.Fatalf("%v became %v, %v", p, got, err)
	}
	if v, ok := got.Get("SessionType"); !ok || v != "Normal" {
		t.Errorf("Get: %q, %v", v, ok)
	}
	if _, ok := got.Get("sessiontype"); ok {
		t.Error("keys are case-sensitive")
	}
	// A proper prefix either fails or, at a NUL, holds fewer pairs.
	for n := range len(b) {
		got, err := ParseText(b[:n])
		if n > 0 && b[n-1] != 0 && err == nil {
			t.Errorf("prefix of %d bytes decoded", n)
		}
		if err == nil && len(got) >= len(p) {
			t.Errorf("prefix of %d bytes has all pairs", n)
		}
	}
}

func TestTextErrors(t *testing.T) {
	for _, test := range []struct {
		in   string
		want error
	}{
		{"a", ErrText}, {"a=b", ErrText}, {"a\x00", ErrText}, {"=b\x00", ErrText},
		{strings.Repeat("k", 64) + "=v\x00", ErrText}, {"k k=v\x00", ErrText}, {"k\x7f=v\x00", ErrText},
		{"k=" + strings.Repeat("v", 256) + "\x00", ErrText}, {"CHAP_R=" + strings.Repeat("v", 2051) + "\x00", ErrText},
		{"a=b\x00c=d\x00a=b\x00", ErrDuplicateKey},
	} {
		_, err := ParseText([]byte(test.in))
		var te *TextError
		if !errors.Is(err, test.want) || !errors.As(err, &te) {
			t.Errorf("%.20q: %v", test.in, err)
		}
	}
	list, err := ParseTextList([]byte("TargetName=a\x00TargetAddress=1\x00TargetAddress=2\x00TargetName=b\x00"))
	if err != nil || len(list) != 4 {
		t.Errorf("list: %v, %v", list, err)
	}
	if p, err := ParseText([]byte("a=b\x00\x00\x00")); err != nil || len(p) != 1 {
		t.Errorf("stray delimiters: %v, %v", p, err)
	}
}

func TestTextAcrossPDUs(t *testing.T) {
	var text Text
	for _, s := range []string{"Max", "Connections=1\x00Init", "ialR2T=Yes\x00"} {
		if err := text.Add([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	p, err := text.Parse()
	if err != nil || !reflect.DeepEqual(p, Pairs{{"MaxConnections", "1"}, {"InitialR2T", "Yes"}}) || text.Len() != 0 {
		t.Errorf("%v, %v", p, err)
	}
	if err := text.Add(make([]byte, MinTextLength)); err != nil {
		t.Errorf("the minimum does not fit: %v", err)
	}
	if err := text.Add([]byte{0}); !errors.Is(err, ErrTextTooLong) {
		t.Errorf("past the limit: %v", err)
	}
}

func TestValues(t *testing.T) {
	for _, test := range []struct {
		in   string
		want uint64
		ok   bool
	}{
		{"0", 0, true}, {"512", 512, true}, {"0x200", 512, true}, {"0X1F", 31, true}, {"1000", 1000, true}, {"1001", 0, false}, {"", 0, false}, {"0x", 0, false},
		{"-1", 0, false}, {"+1", 0, false}, {"1_0", 0, false}, {"0x_1", 0, false}, {" 1", 0, false}, {"18446744073709551616", 0, false}, {"Yes", 0, false},
	} {
		got, err := ParseNumber(test.in, 0, 1000)
		if (err == nil) != test.ok || got != test.want || err != nil && !errors.Is(err, ErrValue) {
			t.Errorf("number %q: %d, %v", test.in, got, err)
		}
	}
	for in, want := range map[string]string{"0x616263": "abc", "0X616263": "abc", "0x1": "\x01", "0bYWJj": "abc", "0BYWI=": "ab", "0bYQ==": "a", "0bYQ": "a"} {
		got, err := ParseBinary(in, 3)
		if err != nil || string(got) != want {
			t.Errorf("binary %q: %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "0x", "0b", "61", "0x61626364", "0bYWJjZA==", "0xzz", "0bY", "0bYQ=", "0bYWJj\n", "0b====", "1x61"} {
		if got, err := ParseBinary(in, 3); !errors.Is(err, ErrValue) {
			t.Errorf("binary %q: %q, %v", in, got, err)
		}
	}
	if b, err := ParseBool("Yes"); !b || err != nil || FormatBool(b) != "Yes" {
		t.Error("Yes")
	}
	if b, err := ParseBool("No"); b || err != nil || FormatBool(b) != "No" {
		t.Error("No")
	}
	if _, err := ParseBool("yes"); !errors.Is(err, ErrValue) {
		t.Error("yes is not a boolean")
	}
	if got := SplitList("CRC32C,None"); !reflect.DeepEqual(got, []string{"CRC32C", "None"}) || SplitList("") != nil {
		t.Errorf("list: %v", got)
	}
}

func FuzzText(f *testing.F) {
	f.Add([]byte("InitiatorName=iqn.2001-04.com.example:a\x00SessionType=Discovery\x00"))
	f.Add([]byte("CHAP_C=0x0102\x00CHAP_R=0bYWJj\x00"))
	f.Add([]byte("a=1\x00\x00b=0x10\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := ParseTextList(b)
		if err != nil {
			return
		}
		again, err := ParseTextList(list.Append(nil))
		if err != nil || !reflect.DeepEqual(list, again) {
			t.Fatalf("%v became %v, %v", list, again, err)
		}
		for _, p := range list {
			if n, err := ParseNumber(p.Value, 1, 1<<40); err == nil && (n < 1 || n > 1<<40) {
				t.Fatalf("number %q out of range: %d", p.Value, n)
			}
			if bin, err := ParseBinary(p.Value, 64); err == nil {
				if len(bin) < 1 || len(bin) > 64 {
					t.Fatalf("binary %q: %d bytes", p.Value, len(bin))
				}
				for _, s := range []string{FormatHex(bin), FormatBase64(bin)} {
					if back, err := ParseBinary(s, 64); err != nil || !bytes.Equal(back, bin) {
						t.Fatalf("binary %q became %x, %v", s, back, err)
					}
				}
			}
		}
	})
}
