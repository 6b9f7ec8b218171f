package objectstore

import (
	"errors"
	"strings"
	"testing"
)

func TestParseURL(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Location
	}{
		{"mem:", Location{Scheme: "mem"}},
		{"file:///var/lib/bucket", Location{Scheme: "file", Dir: "/var/lib/bucket"}},
		{"file:///var//lib/../bucket/", Location{Scheme: "file", Dir: "/var/bucket"}},
		{"file:///with%20space%3f", Location{Scheme: "file", Dir: "/with space?"}},
		{"s3://bucket", Location{Scheme: "s3", Bucket: "bucket"}},
		{"s3://bucket/", Location{Scheme: "s3", Bucket: "bucket"}},
		{"s3://bucket/some/prefix/", Location{Scheme: "s3", Bucket: "bucket", Prefix: "some/prefix"}},
		{"s3://bucket/p?region=eu-central-1", Location{Scheme: "s3", Bucket: "bucket", Prefix: "p", Region: "eu-central-1"}},
		{"s3://b.u_c-1?endpoint=https://s3.example.com:8443/", Location{Scheme: "s3", Bucket: "b.u_c-1", Endpoint: "https://s3.example.com:8443", PathStyle: true}},
		{"s3://bucket?endpoint=http%3A%2F%2F%5B%3A%3A1%5D%3A9000&path_style=false", Location{Scheme: "s3", Bucket: "bucket", Endpoint: "http://[::1]:9000"}},
		{"s3://bucket?path_style=true", Location{Scheme: "s3", Bucket: "bucket", PathStyle: true}},
	} {
		got, err := ParseURL(c.in)
		if err != nil || got != c.want {
			t.Errorf("%s: got %+v, %v; want %+v", c.in, got, err, c.want)
			continue
		}
		if again, err := ParseURL(got.String()); err != nil || again != got {
			t.Errorf("%s: %s parses to %+v, %v", c.in, got, again, err)
		}
	}
}

func TestParseURLFaults(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []string // parts of the message
	}{
		{"", []string{"is empty", "file:///absolute/directory", "mem:"}},
		{"/var/lib", []string{"has no scheme", "accepted are"}},
		{"gs://bucket", []string{`scheme "gs" is unknown`, "accepted are"}},
		{"%zz", []string{"is not a URL", "accepted are"}},
		{"mem:x", []string{"nothing behind the colon"}},
		{"file://var/lib", []string{"three slashes"}},
		{"file:var", []string{"three slashes"}},
		{"file:///", []string{"root directory"}},
		{"file:///a?b=c#d", []string{"no parameters", "fragment"}},
		{"s3:bucket", []string{"bucket's name is missing"}},
		{"s3:///prefix", []string{"bucket's name is missing"}},
		{"s3://b", []string{"3 to 63"}},
		{"s3://bucket/a//b", []string{"the prefix has an empty part"}},
		{"s3://bucket/../x", []string{"part that is ."}},
		{
			"s3://a:b@!?endpoint=ftp://x&region=e%20u&path_style=maybe&secret_key=hush&region=y#f",
			[]string{"credentials do not belong", "3 to 63", "neither https", `"region" is given 2 times`, "region is not letters", "true or false", `"secret_key" is unknown`, "fragment"},
		},
		{"s3://bucket?endpoint=https://u:hush@h", []string{"endpoint: credentials do not belong"}},
		{"s3://bucket?endpoint=https://", []string{"has no host"}},
		{"s3://bucket?endpoint=https://h:99999", []string{"port"}},
		{"s3://bucket?endpoint=https://h?x", []string{"parameters"}},
		{"s3://KEY:hush/more@bucket", []string{"credentials do not belong"}},
		{"s3://bucket?endpoint=%zz", []string{"name=value"}},
	} {
		_, err := ParseURL(c.in)
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: got %v", c.in, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", c.in, err, want)
			}
		}
		if strings.Contains(err.Error(), "hush") || strings.ContainsRune(err.Error(), '\n') {
			t.Errorf("%s: tells a secret, or has several lines: %q", c.in, err)
		}
	}
}

func TestOpenFaults(t *testing.T) {
	_, err := Open(t.Context(), "nonsense", Options{Connections: -1, StallTimeout: -1, Credentials: &Credentials{}})
	for _, want := range []string{"no scheme", "connections", "stall timeout", "access key"} {
		if err == nil || !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	t.Setenv("AWS_CONFIG_FILE", "/nonexistent")
	t.Setenv("AWS_REGION", "")
	t.Setenv("AWS_DEFAULT_REGION", "")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	if _, err := Open(t.Context(), "s3://bucket", Options{}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "region") {
		t.Errorf("no region: %v", err)
	}
}

func FuzzParseURL(f *testing.F) {
	for _, s := range []string{"mem:", "file:///a/b", "s3://bucket/p?endpoint=http://h:1&region=x&path_style=true", "s3://a:b@c", "s3://bucket/%2e%2e/x", "file:///%00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		loc, err := ParseURL(raw)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("%q: %v", raw, err)
			}
			return
		}
		again, err := ParseURL(loc.String())
		if err != nil || again != loc {
			t.Fatalf("%q: %+v prints as %q, which parses to %+v, %v", raw, loc, loc, again, err)
		}
		if loc.Scheme == "s3" && loc.Prefix != "" && keyFault(loc.Prefix, maxPrefix, maxPrefix) != "" {
			t.Fatalf("%q: bad prefix %q", raw, loc.Prefix)
		}
	})
}

// FuzzKeyPath: every valid key maps to names that map back to it, none of which leaves the
// directory or differs from another by case only.
func FuzzKeyPath(f *testing.F) {
	for _, s := range []string{"a/b", "A", "..a", "%2e", "ä/=", strings.Repeat("\u00ff", 40)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, key string) {
		if ValidateKey(key) != nil {
			return
		}
		dirs, file := keyPath(key)
		var parts []string
		for i, name := range append(dirs, file) {
			part, object, ok := parseName(name)
			if !ok || object != (i == len(dirs)) {
				t.Fatalf("%q: name %q", key, name)
			}
			if len(name) > 255 || name != strings.ToLower(name) || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00") {
				t.Fatalf("%q: unsafe name %q", key, name)
			}
			parts = append(parts, part)
		}
		if got := strings.Join(parts, "/"); got != key {
			t.Fatalf("%q comes back as %q", key, got)
		}
	})
}
