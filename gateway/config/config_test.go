package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/isergate/isergate/gateway/units"
)

const full = `# everything
data_dir: /var/lib/isergate
bucket:
  url: s3://bucket/prefix?region=eu-central-1
  single_writer: true
  requests: 16
  retry_for: 1m
portals:
  - 10.0.0.1:3260,advertise=gw.example.com:3260
  - "[::1]:3260"
  - 10.0.0.2:3260,transport=iser
open: true
demo: false
api:
  socket: /run/isergate/api.sock
  listen: 0.0.0.0:8443
  tls_cert: /etc/isergate/tls.crt
  tls_key: /etc/isergate/tls.key
  token_file: /etc/isergate/token
metrics:
  listen: 127.0.0.1:9464
log:
  level: debug
  format: json
debug:
  pprof: 127.0.0.1:6060
iser:
  memory: 64MiB
  no_crc: true
cache:
  journal: 8GiB
  segment: 32MiB
  arena: 64MiB
  map_memory: 128MiB
  read_cache: 100GB
  read_cache_memory: 256MiB
  dirty_budget: 1GiB
  object: 4MiB
  object_age: 500ms
  destage_parallel: 4
  unmet_after: 5s
  command_wait: 15s
`

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "isergate.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoadFull(t *testing.T) {
	c, err := Load(write(t, full), Flags{})
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		DataDir: "/var/lib/isergate",
		Bucket:  Bucket{URL: "s3://bucket/prefix?region=eu-central-1", SingleWriter: true, Requests: 16, RetryFor: time.Minute},
		Portals: []Portal{{"10.0.0.1:3260", "gw.example.com:3260", "auto"}, {"[::1]:3260", "", "auto"}, {"10.0.0.2:3260", "", "iser"}},
		Open:    true,
		API:     API{"/run/isergate/api.sock", "0.0.0.0:8443", "/etc/isergate/tls.crt", "/etc/isergate/tls.key", "/etc/isergate/token"},
		Metrics: Metrics{"127.0.0.1:9464"},
		Log:     Log{"debug", "json"},
		Debug:   Debug{"127.0.0.1:6060"},
		ISER:    ISER{64 * units.MiB, true},
		Cache: Cache{8 * units.GiB, 32 * units.MiB, 64 * units.MiB, 128 * units.MiB, 100e9, 256 * units.MiB, units.GiB, 4 * units.MiB,
			500 * time.Millisecond, 4, 5 * time.Second, 15 * time.Second},
	}
	if !reflect.DeepEqual(c, want) {
		t.Fatalf("got  %+v\nwant %+v", c, want)
	}
}

// Every key of the configuration occurs in the text above, so that a new one
// cannot stay untested.
func TestFullIsFull(t *testing.T) {
	_, lines, faults := Parse([]byte(full))
	if faults != nil {
		t.Fatal(faults)
	}
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for i := range typ.NumField() {
			field := typ.Field(i)
			key := prefix + field.Tag.Get("yaml")
			if lines[key] == 0 {
				t.Errorf("%s is not in the text", key)
			}
			if field.Type.Kind() == reflect.Struct {
				walk(key+".", field.Type)
			}
		}
	}
	walk("", reflect.TypeFor[Config]())
}

func TestDefaults(t *testing.T) {
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	c, err := Load("", Flags{})
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(here, "isergate-data")
	if c.DataDir != data || c.Bucket.URL != "file://"+data+"/bucket" || c.API.Socket != data+"/api.sock" || c.API.Listen != "" || c.Metrics.Listen != "" {
		t.Fatalf("%+v", c)
	}
	if len(c.Portals) != 1 || c.Portals[0].Listen != "127.0.0.1:3260" || c.Open || c.Demo {
		t.Fatalf("%+v", c)
	}
}

func TestFlagsOverride(t *testing.T) {
	dir, url, yes, format := "/data", "mem:", true, "text"
	c, err := Load(write(t, "data_dir: /else\nportals: [10.0.0.1:3260]\nlog: {format: nonsense}\n"),
		Flags{DataDir: &dir, Bucket: &url, Portals: []string{"127.0.0.1:0"}, Open: &yes, Demo: &yes, LogFormat: &format})
	if err != nil {
		t.Fatal(err)
	}
	if c.DataDir != "/data" || c.Bucket.URL != "mem:" || c.Portals[0].Listen != "127.0.0.1:0" || !c.Open || !c.Demo || c.Log.Format != "text" {
		t.Fatalf("%+v", c)
	}
}

func TestEveryFaultAtOnce(t *testing.T) {
	path := write(t, `dta_dir: /x
bucket:
  url: ftp://x
  requests: many
portals:
  - localhost:3260
  - 127.0.0.1:99999
  - 127.0.0.1:1,advertise=:1
  - 127.0.0.1:1,transport=rdma
  - 127.0.0.1:1,transport=tcp,transport=tcp
  - 127.0.0.1:1,weight=1
open: maybe
api:
  listen: 1.2.3.4:443
debug:
  pprof: 0.0.0.0:6060
cache:
  journal: 10 bananas
  object_age: 5
  destage_parallel: 1000
cache: {}
iser: {memory: 1MiB}
`)
	_, err := Load(path, Flags{Portals: []string{"nonsense"}})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		path + ":1: dta_dir: unknown key",
		path + ":3: bucket.url: \"ftp\" is no scheme",
		path + ":4: bucket.requests: \"many\" is no whole number",
		path + ":6: portals: portal \"localhost:3260\": \"localhost\" is no IP address",
		path + ":7: portals:",
		path + ":8: portals:",
		path + ":9: portals: portal \"127.0.0.1:1,transport=rdma\": \"rdma\" is no transport",
		path + ":10: portals: portal \"127.0.0.1:1,transport=tcp,transport=tcp\": transport is there twice",
		path + ":11: portals: portal \"127.0.0.1:1,weight=1\": only advertise=HOST:PORT and transport=",
		path + ":12: open: \"maybe\" is neither true nor false",
		path + ":14: api.listen: needs a certificate, set by api.tls_cert",
		path + ":14: api.listen: needs a private key, set by api.tls_key",
		path + ":14: api.listen: needs a file with the token that clients present, set by api.token_file",
		path + ":16: debug.pprof: 0.0.0.0:6060 is not a loopback address",
		path + ":18: cache.journal: \"10 bananas\" is no size",
		path + ":19: cache.object_age: \"5\" is no duration",
		path + ":20: cache.destage_parallel: 1000 is outside",
		path + ":21: cache: is already set in line 17",
		path + ":22: iser.memory: 1MiB is outside 16MiB",
		"--portal: portal \"nonsense\"",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
}

// A flag that an unset variable left empty is a fault, never the default; so is a bucket URL that does not parse.
func TestEmptyFlagsAndBucketURLs(t *testing.T) {
	empty, unclear := "", "s3://bucket/p?endpont=x"
	_, err := Load("", Flags{DataDir: &empty, Bucket: &empty, LogLevel: &empty})
	for _, want := range []string{"--data-dir: is empty", "--bucket: is empty", "--log-level: is empty"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in %v", want, err)
		}
	}
	if _, err := Load("", Flags{Bucket: &unclear}); err == nil || !strings.HasPrefix(err.Error(), `--bucket: parameter "endpont" is unknown`) {
		t.Error(err)
	}
	level := "loud"
	path := write(t, "log: {level: info}\nportals: [127.0.0.1:1]\n")
	_, err = Load(path, Flags{LogLevel: &level, Portals: []string{"127.0.0.1:2", "127.0.0.1:2"}})
	for _, want := range []string{"--log-level: \"loud\" is no level", "--portal: 127.0.0.1:2 is there twice"} {
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), path) {
			t.Errorf("missing %q in %v", want, err)
		}
	}
	odd := "/tmp/100% sure?"
	c, err := Load("", Flags{DataDir: &odd})
	if err != nil || c.Bucket.URL != "file:///tmp/100%25%20sure%3F/bucket" {
		t.Errorf("%q, %v", c.Bucket.URL, err)
	}
}

// A fault of a value that follows from another is not a fault of its own.
func TestDerivedValuesHaveNoFaults(t *testing.T) {
	for text, faults := range map[string]int{
		"cache: {journal: 40MiB}":                        2, // too small, and less than four segments
		"cache: {journal: 40MiB, dirty_budget: 1MiB}":    3,
		"cache: {journal: 128MiB, segment: 32MiB}":       0,
		"cache: {journal: 1GiB, dirty_budget: 2GiB}":     1,
		"cache: {journal: 1GiB, dirty_budget: 16777215}": 1,
	} {
		_, err := Load(write(t, text), Flags{})
		got := 0
		if err != nil {
			got = strings.Count(err.Error(), "\n") + 1
		}
		if got != faults {
			t.Errorf("%s: %d faults, want %d: %v", text, got, faults, err)
		}
	}
}

func TestDemoIsLoopbackOnly(t *testing.T) {
	yes := true
	for _, portal := range []string{"0.0.0.0:3260", ":3260", "10.1.2.3:3260", "[::]:3260"} {
		if _, err := Load("", Flags{Demo: &yes, Portals: []string{portal}}); err == nil || !strings.Contains(err.Error(), "loopback") {
			t.Errorf("%s: %v", portal, err)
		}
	}
	for _, portal := range []string{"127.0.0.1:3260", "127.3.2.1:3260", "[::1]:3260"} {
		if _, err := Load("", Flags{Demo: &yes, Portals: []string{portal}}); err != nil {
			t.Errorf("%s: %v", portal, err)
		}
	}
}

func TestSyntaxErrorHasLine(t *testing.T) {
	path := write(t, "open: true\n\tx: [\n")
	if _, err := Load(path, Flags{}); err == nil || !strings.Contains(err.Error(), path+":2: ") {
		t.Fatal(err)
	}
	if _, err := Load(write(t, "open: true\n---\nopen: true\n"), Flags{}); err == nil {
		t.Fatal("two documents were accepted")
	}
	if _, err := Load(filepath.Join(t.TempDir(), "none"), Flags{}); err == nil {
		t.Fatal("a missing file was accepted")
	}
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte("portals: 127.0.0.1:1\ncache: {journal: 1TB}"))
	f.Add([]byte("a: &x [1]\nb: *x\n? {c: d}\n: e"))
	f.Add([]byte("open: ~\n---\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, lines, faults := Parse(text)
		for _, fault := range faults {
			if fault.in("f").Error() == "" {
				t.Fatal("a fault without text")
			}
		}
		for key, line := range lines {
			if key == "" || line < 1 {
				t.Fatalf("key %q in line %d", key, line)
			}
		}
		c.Complete()
	})
}

func FuzzPortal(f *testing.F) {
	f.Add("127.0.0.1:3260,advertise=host:1")
	f.Add("[::1]:0")
	f.Add("10.0.0.1:3260,transport=iser,advertise=host:1")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePortal(text)
		if err != nil {
			return
		}
		if again, err := ParsePortal(p.String()); err != nil || again != p {
			t.Fatalf("%q: %v, %v", text, again, err)
		}
	})
}

// The README lists every key, and with the defaults that are in force.
func TestReadmeListsTheDefaults(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(readme), "\n```yaml\n")
	block, _, found := strings.Cut(rest, "\n```\n")
	if !found {
		t.Fatal("no configuration in the README")
	}
	t.Chdir(t.TempDir())
	got, lines, faults := Parse([]byte(block))
	if faults = append(faults, got.Complete()...); faults != nil {
		t.Fatal(faults)
	}
	var want Config
	if faults := want.Complete(); faults != nil {
		t.Fatal(faults)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("README %+v\nin force %+v", got, want)
	}
	_, all, _ := Parse([]byte(full))
	for key := range all {
		if lines[key] == 0 {
			t.Errorf("%s is not in the README", key)
		}
	}
}
