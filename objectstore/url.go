package objectstore

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Location is a parsed bucket URL.
type Location struct {
	Scheme string // "s3", "file" or "mem"

	Dir string // file: absolute, cleaned path

	Bucket    string // s3
	Prefix    string // s3: without slashes at its ends, "" for none
	Endpoint  string // s3: scheme://host[:port][/path], "" for AWS
	Region    string // s3: "" for what the credential chain says
	PathStyle bool   // s3: endpoint/bucket/key instead of bucket.endpoint/key
}

// accepted is the end of every message about a URL that is not understood.
const accepted = `accepted are mem:, file:///absolute/directory, and s3://bucket/prefix?endpoint=https://host:port&region=name&path_style=true (all after "?" optional)`

var (
	bucketName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]$`)
	regionName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,62}$`)
	errUserinfo = errors.New("credentials do not belong into a bucket URL: give them by the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), a profile, a role or credential_process")
)

// maxPrefix leaves room for MaxKeyLen within the 1024 bytes that S3 allows.
const maxPrefix = 500

// ParseURL parses a bucket URL. Its error names every fault at once, Is ErrInvalid, and
// never repeats a part of the URL that may hold a secret.
func ParseURL(raw string) (Location, error) {
	loc, faults := parseURL(raw)
	if len(faults) > 0 {
		return Location{}, fmt.Errorf("%w: bucket URL: %w", ErrInvalid, joinFaults(faults))
	}
	return loc, nil
}

func parseURL(raw string) (Location, []error) {
	if raw == "" {
		return Location{}, []error{errors.New("is empty; " + accepted)}
	}
	u, err := url.Parse(raw)
	if err != nil {
		// The parser's text quotes pieces of the input.
		if strings.Contains(raw, "@") {
			return Location{}, []error{errors.New("is not a URL"), errUserinfo}
		}
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return Location{}, []error{fmt.Errorf("is not a URL (%v); %s", err, accepted)}
	}
	var faults []error
	if u.User != nil {
		faults = append(faults, errUserinfo)
	}
	if u.Fragment != "" || strings.HasSuffix(raw, "#") {
		faults = append(faults, errors.New(`has a fragment ("#…"); write "#" in a name as %23`))
	}
	switch u.Scheme {
	case "s3":
		loc, f := parseS3(u)
		return loc, append(faults, f...)
	case "file":
		loc, f := parseFile(u)
		return loc, append(faults, f...)
	case "mem":
		if u.Opaque != "" || u.Host != "" || u.Path != "" || u.RawQuery != "" {
			faults = append(faults, errors.New(`mem: takes nothing behind the colon`))
		}
		return Location{Scheme: "mem"}, faults
	case "":
		return Location{}, append(faults, errors.New("has no scheme; "+accepted))
	}
	return Location{}, append(faults, fmt.Errorf("scheme %q is unknown; %s", u.Scheme, accepted))
}

func parseFile(u *url.URL) (Location, []error) {
	var faults []error
	if u.Host != "" || u.Opaque != "" || !strings.HasPrefix(u.Path, "/") {
		faults = append(faults, errors.New("a file URL has three slashes and an absolute path: file:///var/lib/bucket"))
	}
	if u.RawQuery != "" {
		faults = append(faults, errors.New("a file URL takes no parameters"))
	}
	if strings.ContainsRune(u.Path, 0) {
		faults = append(faults, errors.New("the path has a zero byte"))
	}
	dir := path.Clean(u.Path)
	if dir == "/" {
		faults = append(faults, errors.New("the root directory cannot be a bucket"))
	}
	return Location{Scheme: "file", Dir: dir}, faults
}

func parseS3(u *url.URL) (Location, []error) {
	loc := Location{Scheme: "s3", Bucket: u.Host}
	var faults []error
	bad := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }

	switch {
	case u.Opaque != "" || u.Host == "":
		bad("the bucket's name is missing: s3://bucket/prefix")
	case !bucketName.MatchString(u.Host):
		bad("the bucket's name is not 3 to 63 letters, digits, dots, hyphens or underscores")
	}
	loc.Prefix = strings.Trim(u.Path, "/")
	if loc.Prefix != "" {
		if fault := keyFault(loc.Prefix, maxPrefix, maxPrefix); fault != "" {
			bad("the prefix %s", fault)
		}
	}

	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		bad(`the parameters are not of the form name=value&name=value with %%XX escapes`)
	}
	pathStyle := ""
	names := make([]string, 0, len(q))
	for name := range q {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		values := q[name]
		if len(values) != 1 {
			bad("parameter %q is given %d times", name, len(values))
		}
		v := values[0]
		switch name {
		case "endpoint":
			endpoint, err := cleanEndpoint(v)
			if err != nil {
				bad("endpoint: %w", err)
			}
			loc.Endpoint = endpoint
		case "region":
			if !regionName.MatchString(v) {
				bad("region is not letters, digits and hyphens")
			}
			loc.Region = v
		case "path_style":
			pathStyle = v
			if v != "true" && v != "false" {
				bad("path_style is true or false")
			}
		default:
			bad("parameter %q is unknown; there are endpoint, region and path_style (credentials come from the AWS credential chain)", name)
		}
	}
	// Clones rarely have DNS for bucket.host; AWS wants it.
	loc.PathStyle = pathStyle == "true" || pathStyle == "" && loc.Endpoint != ""
	return loc, faults
}

// cleanEndpoint checks an endpoint and drops a slash at its end.
func cleanEndpoint(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return "", errors.New("is not a URL; write https://host:port")
	case u.User != nil:
		return "", errUserinfo
	case u.Scheme != "https" && u.Scheme != "http":
		return "", errors.New("starts with neither https:// nor http://")
	case u.Hostname() == "":
		return "", errors.New("has no host")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return "", errors.New("has parameters or a fragment")
	}
	if p := u.Port(); p != "" {
		if n, err := strconv.Atoi(p); err != nil || n < 1 || n > 65535 {
			return "", errors.New("has a port that is not 1 to 65535")
		}
	}
	return strings.TrimRight(u.String(), "/"), nil
}

// String returns the URL in its canonical form, without credentials. ParseURL of it
// gives the same Location.
func (l Location) String() string {
	switch l.Scheme {
	case "file":
		return (&url.URL{Scheme: "file", Path: l.Dir}).String()
	case "mem":
		return "mem:"
	}
	u := url.URL{Scheme: "s3", Host: l.Bucket}
	if l.Prefix != "" {
		u.Path = "/" + l.Prefix
	}
	q := url.Values{}
	if l.Endpoint != "" {
		q.Set("endpoint", l.Endpoint)
	}
	if l.Region != "" {
		q.Set("region", l.Region)
	}
	if l.PathStyle != (l.Endpoint != "") {
		q.Set("path_style", strconv.FormatBool(l.PathStyle))
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// joinFaults joins on one line: these messages end up in a terminal.
func joinFaults(faults []error) error {
	if len(faults) == 1 {
		return faults[0]
	}
	return &faultList{faults}
}

type faultList struct{ errs []error }

func (l *faultList) Error() string {
	texts := make([]string, len(l.errs))
	for i, e := range l.errs {
		texts[i] = e.Error()
	}
	return strings.Join(texts, "; ")
}

func (l *faultList) Unwrap() []error { return l.errs }
