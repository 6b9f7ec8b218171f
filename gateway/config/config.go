// Package config is the configuration of one node: one YAML file, with the command
// line's flags over it. Every fault is reported at once, with its line where it has one.
package config

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isergate/isergate/gateway/units"
	"github.com/isergate/isergate/objectstore"
)

// DefaultDataDir is where a node without configuration keeps its data.
const DefaultDataDir = "isergate-data"

// SocketName is the file name of the API socket in the data directory.
const SocketName = "api.sock"

// maxSocketPath is what a unix socket address holds on Linux (unix(7)), less the
// terminating zero.
const maxSocketPath = 107

// Config is a node's configuration. The zero value of a field means its default;
// Complete fills the defaults in.
type Config struct {
	// DataDir holds the journal, the maps, the read cache, the catalogue and the API socket.
	DataDir string `yaml:"data_dir"`
	Bucket  Bucket `yaml:"bucket"`
	// Portals are where initiators connect.
	Portals []Portal `yaml:"portals"`
	// Open lets every initiator use every target. Without it an initiator needs an ACL entry.
	Open bool `yaml:"open"`
	// Demo serves a small open LUN on loopback portals.
	Demo    bool    `yaml:"demo"`
	API     API     `yaml:"api"`
	Metrics Metrics `yaml:"metrics"`
	Log     Log     `yaml:"log"`
	Debug   Debug   `yaml:"debug"`
	ISER    ISER    `yaml:"iser"`
	Cache   Cache   `yaml:"cache"`
}

// Bucket is the home of the volumes that this node creates.
type Bucket struct {
	// URL is s3://bucket/prefix?endpoint=…&region=…, file:///directory or mem:.
	URL string `yaml:"url"`
	// SingleWriter accepts a store that has no conditional writes: the operator
	// vouches that no other node writes to the prefix.
	SingleWriter bool `yaml:"single_writer"`
	// Requests bounds how many requests are under way at once.
	Requests int `yaml:"requests"`
	// RetryFor bounds how long one request is tried again after transient errors.
	RetryFor time.Duration `yaml:"retry_for"`
}

// API says where the admin API is served.
type API struct {
	// Socket is the path of the unix socket.
	Socket string `yaml:"socket"`
	// Listen is an optional TCP address; it needs the three files.
	Listen    string `yaml:"listen"`
	TLSCert   string `yaml:"tls_cert"`
	TLSKey    string `yaml:"tls_key"`
	TokenFile string `yaml:"token_file"`
}

// Metrics says where metrics are served besides the API.
type Metrics struct {
	// Listen is a TCP address; empty serves metrics on the API only.
	Listen string `yaml:"listen"`
}

// Log says what is logged and how.
type Log struct {
	Level  string `yaml:"level"`  // debug, info, warn or error
	Format string `yaml:"format"` // text or json
}

// Debug is for whoever examines a running node.
type Debug struct {
	// Pprof is a TCP address on loopback that serves profiles, without authentication; empty: none.
	Pprof string `yaml:"pprof"`
}

// ISER is for portals that serve iSER.
type ISER struct {
	// Memory bounds what all iSER connections receive commands and unsolicited data into.
	Memory units.Size `yaml:"memory"`
	// NoCRC does not ask initiators for CRCs over what is sent; those that ask get them.
	NoCRC bool `yaml:"no_crc"`
}

// The smallest sizes that take the pieces of up to 4 MiB that a logical unit hands over (scsi.MaxLanding): an eighth of a
// segment goes into one entry of the journal.
const (
	minSegment     = 32 * units.MiB
	minDirtyBudget = 16 * units.MiB
)

// Cache sizes the volume engine.
type Cache struct {
	Journal         units.Size    `yaml:"journal"`
	Segment         units.Size    `yaml:"segment"`
	Arena           units.Size    `yaml:"arena"`
	MapMemory       units.Size    `yaml:"map_memory"`
	ReadCache       units.Size    `yaml:"read_cache"`
	ReadCacheMemory units.Size    `yaml:"read_cache_memory"`
	DirtyBudget     units.Size    `yaml:"dirty_budget"`
	Object          units.Size    `yaml:"object"`
	ObjectAge       time.Duration `yaml:"object_age"`
	DestageParallel int           `yaml:"destage_parallel"`
	UnmetAfter      time.Duration `yaml:"unmet_after"`
	CommandWait     time.Duration `yaml:"command_wait"`
}

// Transports of a Portal.
const (
	TransportAuto = "auto" // both
	TransportTCP  = "tcp"  // iSCSI over TCP
	TransportISER = "iser" // iSER
)

// Portal is one address at which initiators connect.
type Portal struct {
	Listen string // ADDR:PORT
	// Advertise is what discovery tells initiators, HOST:PORT; empty: the address
	// that the initiator itself connected to.
	Advertise string
	// Transport is what is served there: TransportAuto, TransportTCP or TransportISER.
	Transport string
}

// PortalSyntax is what ParsePortal reads.
const PortalSyntax = "ADDR:PORT[,advertise=HOST:PORT][,transport=auto|tcp|iser]"

// ParsePortal reads PortalSyntax. ADDR is an IP address, in brackets for IPv6, or empty for all.
func ParsePortal(text string) (Portal, error) {
	parts := strings.Split(text, ",")
	p := Portal{Listen: parts[0]}
	host, _, err := splitHostPort(p.Listen)
	if err != nil {
		return Portal{}, fmt.Errorf("portal %q: %w", text, err)
	}
	if host != "" && net.ParseIP(strings.Trim(host, "[]")) == nil {
		return Portal{}, fmt.Errorf("portal %q: %q is no IP address: listen on an address of this machine, and advertise a name with advertise=NAME:PORT", text, host)
	}
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(part, "=")
		var field *string
		switch key {
		case "advertise":
			host, port, err := splitHostPort(value)
			if err != nil {
				return Portal{}, fmt.Errorf("portal %q: advertise: %w", text, err)
			}
			if host == "" || port == "0" || strings.ContainsAny(host, " \t\x00") {
				return Portal{}, fmt.Errorf("portal %q: advertise needs a host and a port that initiators can connect to", text)
			}
			field = &p.Advertise
		case "transport":
			if value != TransportAuto && value != TransportTCP && value != TransportISER {
				return Portal{}, fmt.Errorf("portal %q: %q is no transport: use auto, tcp or iser", text, value)
			}
			field = &p.Transport
		default:
			return Portal{}, fmt.Errorf("portal %q: only advertise=HOST:PORT and transport=auto|tcp|iser may follow the address", text)
		}
		if *field != "" {
			return Portal{}, fmt.Errorf("portal %q: %s is there twice", text, key)
		}
		*field = value
	}
	return p, nil
}

func splitHostPort(text string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(text)
	if err != nil {
		return "", "", fmt.Errorf("%q is not ADDR:PORT", text)
	}
	if n := len(port); n == 0 || n > 5 || strings.Trim(port, "0123456789") != "" {
		return "", "", fmt.Errorf("%q is no port number", port)
	}
	var number int
	if _, err := fmt.Sscanf(port, "%d", &number); err != nil || number > 65535 {
		return "", "", fmt.Errorf("%q is no port number", port)
	}
	return host, port, nil
}

// Loopback reports whether the portal can be reached from this machine only.
func (p Portal) Loopback() bool { return loopback(p.Listen) }

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// String is the inverse of ParsePortal.
func (p Portal) String() string {
	text := p.Listen
	if p.Advertise != "" {
		text += ",advertise=" + p.Advertise
	}
	if p.Transport != "" {
		text += ",transport=" + p.Transport
	}
	return text
}

// Flags are the values given on the command line; nil fields were not given.
type Flags struct {
	DataDir   *string
	Bucket    *string
	Portals   []string
	Open      *bool
	Demo      *bool
	LogFormat *string
	LogLevel  *string
}

// Load reads the file, if path is not empty, lays the flags over it, fills the defaults in
// and validates. The error joins all faults, one a line: first those of flags, then by line of the file.
func Load(path string, flags Flags) (Config, error) {
	var (
		c      Config
		lines  map[string]int
		faults []error
		inFile []Fault
	)
	if path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return Config{}, fmt.Errorf("configuration file: %w", err)
		}
		c, lines, inFile = Parse(text)
	}
	faults = append(faults, c.apply(flags)...)
	given := flags.given()
	for _, fault := range c.Complete() {
		fault.Line = lines[fault.Key]
		if flag, ok := given[fault.Key]; ok {
			fault.Key, fault.Line = flag, 0
		}
		inFile = append(inFile, fault)
	}
	slices.SortStableFunc(inFile, func(a, b Fault) int { return cmp.Compare(a.Line, b.Line) })
	for _, fault := range inFile {
		faults = append(faults, fault.in(path))
	}
	if len(faults) > 0 {
		return Config{}, errors.Join(faults...)
	}
	return c, nil
}

// given returns the flags that were given, by the keys that they replace.
func (f Flags) given() map[string]string {
	given := map[string]string{}
	for _, v := range []struct {
		value     *string
		key, flag string
	}{
		{f.DataDir, "data_dir", "--data-dir"}, {f.Bucket, "bucket.url", "--bucket"},
		{f.LogFormat, "log.format", "--log-format"}, {f.LogLevel, "log.level", "--log-level"},
	} {
		if v.value != nil && *v.value != "" { // an empty one replaces nothing
			given[v.key] = v.flag
		}
	}
	if f.Portals != nil {
		given["portals"] = "--portal"
	}
	return given
}

// apply lays the flags over c.
func (c *Config) apply(flags Flags) (faults []error) {
	text := func(to *string, from *string, flag string) {
		switch {
		case from == nil:
		case *from == "": // a variable of a script that is not set: the default would be a surprise
			faults = append(faults, fmt.Errorf("%s: is empty: give it a value, or leave it out", flag))
		default:
			*to = *from
		}
	}
	text(&c.DataDir, flags.DataDir, "--data-dir")
	text(&c.Bucket.URL, flags.Bucket, "--bucket")
	text(&c.Log.Format, flags.LogFormat, "--log-format")
	text(&c.Log.Level, flags.LogLevel, "--log-level")
	if flags.Open != nil {
		c.Open = *flags.Open
	}
	if flags.Demo != nil {
		c.Demo = *flags.Demo
	}
	if flags.Portals != nil {
		c.Portals = nil
	}
	for _, text := range flags.Portals {
		p, err := ParsePortal(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("--portal: %w", err))
			continue
		}
		c.Portals = append(c.Portals, p)
	}
	return faults
}

// Fault is one thing wrong with a configuration.
type Fault struct {
	Key  string // dotted path, for example api.tls_key, or the flag that set it; may be empty
	Line int    // in the file, from 1; 0 when the value is not from the file
	Text string
}

func (f Fault) in(path string) error {
	where := f.Key
	if f.Line > 0 {
		where = fmt.Sprintf("%s:%d: %s", path, f.Line, f.Key)
	}
	if f.Key == "" && f.Line == 0 {
		return fmt.Errorf("%s: %s", path, f.Text)
	}
	if f.Key == "" {
		return fmt.Errorf("%s%s", where, f.Text)
	}
	return fmt.Errorf("%s: %s", where, f.Text)
}

// Complete fills the defaults in and returns every fault of what results. Relative paths become
// absolute.
func (c *Config) Complete() (faults []Fault) {
	fault := func(key, format string, args ...any) {
		faults = append(faults, Fault{Key: key, Text: fmt.Sprintf(format, args...)})
	}
	absolute := func(path *string, key string) {
		if *path == "" {
			return
		}
		full, err := filepath.Abs(*path)
		if err != nil {
			fault(key, "%v", err)
			return
		}
		*path = full
	}

	if c.DataDir == "" {
		c.DataDir = DefaultDataDir
	}
	absolute(&c.DataDir, "data_dir")
	if c.Bucket.URL == "" {
		c.Bucket.URL = (&url.URL{Scheme: "file", Path: filepath.ToSlash(filepath.Join(c.DataDir, "bucket"))}).String()
	}
	c.completeBucket(fault)

	if len(c.Portals) == 0 {
		c.Portals = []Portal{{Listen: "127.0.0.1:3260"}}
	}
	seen := map[string]bool{}
	for i := range c.Portals {
		p := &c.Portals[i]
		if p.Transport == "" {
			p.Transport = TransportAuto
		}
		if seen[p.Listen] && !strings.HasSuffix(p.Listen, ":0") {
			fault("portals", "%s is there twice", p.Listen)
		}
		seen[p.Listen] = true
		if c.Demo && !p.Loopback() {
			fault("portals", "%s is not a loopback address, and --demo is open to everyone who can connect: use 127.0.0.1, or serve without --demo and add ACL entries", p.Listen)
		}
	}

	if c.API.Socket == "" {
		c.API.Socket = filepath.Join(c.DataDir, SocketName)
	}
	absolute(&c.API.Socket, "api.socket")
	if len(c.API.Socket) > maxSocketPath {
		fault("api.socket", "%s is longer than the %d bytes that a unix socket may have: set a shorter one", c.API.Socket, maxSocketPath)
	}
	c.completeListeners(fault)
	absolute(&c.API.TLSCert, "api.tls_cert")
	absolute(&c.API.TLSKey, "api.tls_key")
	absolute(&c.API.TokenFile, "api.token_file")

	if c.Log.Level == "" {
		c.Log.Level = "info"
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.Log.Level)); err != nil {
		fault("log.level", "%q is no level: use debug, info, warn or error", c.Log.Level)
	}
	if c.Log.Format == "" {
		c.Log.Format = "text"
	}
	if c.Log.Format != "text" && c.Log.Format != "json" {
		fault("log.format", "%q is no format: use text or json", c.Log.Format)
	}
	complete(&c.ISER.Memory, "iser.memory", 128*units.MiB, 16*units.MiB, units.TiB, fault)
	c.Cache.complete(c.Demo, fault)
	return faults
}

type faultFunc func(key, format string, args ...any)

func (c *Config) completeBucket(fault faultFunc) {
	scheme, rest, ok := strings.Cut(c.Bucket.URL, ":")
	switch {
	case !ok:
		fault("bucket.url", "%q is no bucket URL: use s3://bucket/prefix, file:///directory or mem:", c.Bucket.URL)
	case scheme == "s3" || scheme == "mem":
	case scheme == "file":
		if !strings.HasPrefix(rest, "///") {
			fault("bucket.url", "%q needs an absolute path: file:///directory", c.Bucket.URL)
		}
	default:
		fault("bucket.url", "%q is no scheme of a bucket URL: use s3, file or mem", scheme)
	}
	if scheme == "s3" || scheme == "mem" || strings.HasPrefix(rest, "///") {
		if _, err := objectstore.ParseURL(c.Bucket.URL); err != nil {
			fault("bucket.url", "%s", strings.TrimPrefix(err.Error(), objectstore.ErrInvalid.Error()+": bucket URL: "))
		}
	}
	if c.Bucket.Requests == 0 {
		c.Bucket.Requests = 32
	}
	if c.Bucket.Requests < 1 || c.Bucket.Requests > 1024 {
		fault("bucket.requests", "%d is outside 1 to 1024", c.Bucket.Requests)
	}
	if c.Bucket.RetryFor == 0 {
		c.Bucket.RetryFor = 30 * time.Second
	}
	if c.Bucket.RetryFor < 0 || c.Bucket.RetryFor > time.Hour {
		fault("bucket.retry_for", "%s is outside 0s to 1h", c.Bucket.RetryFor)
	}
}

func (c *Config) completeListeners(fault faultFunc) {
	if c.API.Listen != "" {
		if _, _, err := splitHostPort(c.API.Listen); err != nil {
			fault("api.listen", "%v", err)
		}
		for _, need := range []struct{ key, value, what string }{
			{"api.tls_cert", c.API.TLSCert, "a certificate"},
			{"api.tls_key", c.API.TLSKey, "a private key"},
			{"api.token_file", c.API.TokenFile, "a file with the token that clients present"},
		} {
			if need.value == "" {
				fault("api.listen", "needs %s, set by %s: the API is served on TCP only with TLS and a token", need.what, need.key)
			}
		}
	}
	if c.Metrics.Listen != "" {
		if _, _, err := splitHostPort(c.Metrics.Listen); err != nil {
			fault("metrics.listen", "%v", err)
		}
	}
	if c.Debug.Pprof != "" {
		if _, _, err := splitHostPort(c.Debug.Pprof); err != nil {
			fault("debug.pprof", "%v", err)
		} else if !loopback(c.Debug.Pprof) {
			fault("debug.pprof", "%s is not a loopback address, and profiles are served to everyone who can connect: use 127.0.0.1:PORT", c.Debug.Pprof)
		}
	}
}

// complete fills in the default of a size, and checks it.
func complete(value *units.Size, key string, usual, least, most units.Size, fault faultFunc) {
	if *value == 0 {
		*value = usual
	}
	if *value < least || *value > most {
		fault(key, "%s is outside %s to %s", *value, least, most)
	}
}

func (c *Cache) complete(demo bool, fault faultFunc) {
	journal, readCache := 4*units.GiB, 4*units.GiB
	if demo {
		journal, readCache = units.GiB, units.GiB
	}
	sizes := []struct {
		key                string
		value              *units.Size
		usual, least, most units.Size
	}{
		{"cache.journal", &c.Journal, journal, 4 * minSegment, 16 * units.TiB},
		{"cache.segment", &c.Segment, 64 * units.MiB, minSegment, units.GiB},
		{"cache.arena", &c.Arena, 256 * units.MiB, 32 * units.MiB, units.TiB},
		{"cache.map_memory", &c.MapMemory, 256 * units.MiB, 16 * units.MiB, units.TiB},
		{"cache.read_cache", &c.ReadCache, readCache, 64 * units.MiB, 64 * units.TiB},
		{"cache.read_cache_memory", &c.ReadCacheMemory, 128 * units.MiB, 16 * units.MiB, units.TiB},
		{"cache.object", &c.Object, 8 * units.MiB, units.MiB, 64 * units.MiB},
	}
	for _, s := range sizes {
		complete(s.value, s.key, s.usual, s.least, s.most, fault)
	}
	if c.Journal < 4*c.Segment {
		fault("cache.journal", "%s is less than four segments of %s: make the journal larger or cache.segment smaller", c.Journal, c.Segment)
	}
	if c.DirtyBudget == 0 {
		c.DirtyBudget = c.Journal / 4 // enough, unless the journal is at fault
	} else if c.DirtyBudget > c.Journal || c.DirtyBudget < minDirtyBudget {
		fault("cache.dirty_budget", "%s is outside %s to the journal's %s", c.DirtyBudget, minDirtyBudget, c.Journal)
	}
	times := []struct {
		key                string
		value              *time.Duration
		usual, least, most time.Duration
	}{
		{"cache.object_age", &c.ObjectAge, 5 * time.Second, 10 * time.Millisecond, time.Hour},
		{"cache.unmet_after", &c.UnmetAfter, 10 * time.Second, 10 * time.Millisecond, time.Hour},
		{"cache.command_wait", &c.CommandWait, 20 * time.Second, 10 * time.Millisecond, time.Minute},
	}
	for _, d := range times {
		if *d.value == 0 {
			*d.value = d.usual
		}
		if *d.value < d.least || *d.value > d.most {
			fault(d.key, "%s is outside %s to %s", *d.value, d.least, d.most)
		}
	}
	if c.DestageParallel == 0 {
		c.DestageParallel = 8
	}
	if c.DestageParallel < 1 || c.DestageParallel > 256 {
		fault("cache.destage_parallel", "%d is outside 1 to 256", c.DestageParallel)
	}
}
