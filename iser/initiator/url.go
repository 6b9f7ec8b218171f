package initiator

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/isergate/isergate/iser/iscsi/pdu"
	"github.com/isergate/isergate/iser/iwarp"
)

// ParseURL returns the options that a URL stands for, and the number of its logical unit, 0 if it has none. The caller adds the initiator's name.
//
//	iscsi://[user:secret@]host[:port]/target[/lun][?name=value&...]
//	iser://...
//
// Both know initial-r2t, immediate-data (yes or no), first-burst and max-burst (bytes); iscsi knows digests (none, prefer or required); iser knows
// crc (on or off), mpa (revision 1 or 2), peer-to-peer, hello, lax-statsn (yes or no), login (message or stream) and delay (a duration, before the first message).
func ParseURL(s string) (o Options, lun uint16, err error) {
	u, err := parseURL(s)
	if err != nil {
		return Options{}, 0, fmt.Errorf("initiator: URL: %w", err)
	}
	bad := func(format string, args ...any) (Options, uint16, error) {
		return Options{}, 0, fmt.Errorf("initiator: URL %q: %s", u.Redacted(), fmt.Sprintf(format, args...))
	}
	form := func(format string, args ...any) (Options, uint16, error) {
		return Options{}, 0, fmt.Errorf("initiator: URL %q: %s: %w", u.Redacted(), fmt.Sprintf(format, args...), ErrURLForm)
	}
	if u.Scheme != "iscsi" && u.Scheme != "iser" {
		return form("the scheme is neither iscsi nor iser")
	}
	if u.Hostname() == "" || u.Opaque != "" || u.Fragment != "" {
		return form("it is not scheme://host/target/lun")
	}
	o.Portal = net.JoinHostPort(u.Hostname(), DefaultPort)
	if u.Port() != "" {
		if n, err := strconv.ParseUint(u.Port(), 10, 16); err != nil || n == 0 {
			return bad("port %s is not between 1 and 65535", u.Port())
		}
		o.Portal = u.Host
	}
	target, number, numbered := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if target == "" {
		return form("no target name")
	}
	o.TargetName = target
	if numbered {
		n, err := strconv.ParseUint(number, 10, 14)
		if err != nil {
			return form("%q is no logical unit number", number)
		}
		lun = uint16(n)
	}
	if u.User != nil {
		secret, ok := u.User.Password()
		if !ok || u.User.Username() == "" {
			return bad("a user without a secret: write USER:SECRET@ before the host, or neither")
		}
		o.CHAP = &CHAP{User: u.User.Username(), Secret: secret}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return bad("%v", err)
	}
	q := urlQuery{query: query, iser: u.Scheme == "iser", o: &o}
	if err := q.apply(); err != nil {
		return bad("%v", err)
	}
	return o, lun, nil
}

// ErrURLForm is in the error of ParseURL if the URL as a whole has not the form, rather than one of its parts a wrong value.
var ErrURLForm = errors.New("use iscsi://HOST:PORT/TARGET/LUN or iser://HOST:PORT/TARGET/LUN")

var (
	errPort    = errors.New("the port is not a number from 1 to 65535; in USER and SECRET write %3A for a colon, %2F for a slash, %40 for an @")
	errEncoded = errors.New("an @ after the host: in USER and SECRET write %2F for a slash, %3F for a question mark, %23 for a #, %3A for a colon, %40 for an @")
	errUser    = errors.New("USER or SECRET holds a character that must be percent-encoded: write %2F for a slash, %25 for a percent sign, %40 for an @")
)

// parseURL parses a URL. Its errors quote nothing that may be part of a secret.
func parseURL(s string) (*url.URL, error) {
	scheme, rest, _ := strings.Cut(s, "://")
	authority := rest
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		authority = rest[:end]
	}
	if strings.Contains(rest[len(authority):], "@") {
		return nil, errEncoded // perhaps the end of a secret that began before
	}
	u, err := url.Parse(s)
	if err == nil {
		return u, nil
	}
	if at := strings.LastIndexByte(authority, '@'); at >= 0 {
		if _, err = url.Parse(scheme + "://" + rest[at+1:]); err == nil {
			return nil, errUser
		}
	}
	if strings.Contains(err.Error(), "invalid port") {
		return nil, errPort
	}
	var reason *url.Error // its text has the whole URL
	if errors.As(err, &reason) {
		err = reason.Err
	}
	return nil, fmt.Errorf("%w: %w", err, ErrURLForm)
}

// Options of the query.
const (
	urlOptions      = "initial-r2t, immediate-data, first-burst, max-burst"
	urlOptionsISCSI = urlOptions + ", digests"
	urlOptionsISER  = urlOptions + ", crc, mpa, peer-to-peer, hello, lax-statsn, login, delay"
)

func (q *urlQuery) scheme() string {
	if q.iser {
		return "iser"
	}
	return "iscsi"
}

func (q *urlQuery) options() string {
	if q.iser {
		return urlOptionsISER
	}
	return urlOptionsISCSI
}

// urlQuery applies the query of a URL to options.
type urlQuery struct {
	query url.Values
	iser  bool
	o     *Options
	wire  iwarp.Options
}

func (q *urlQuery) apply() error {
	if q.iser {
		q.o.ISER = new(ISER)
	}
	for name, values := range q.query {
		if len(values) > 1 {
			return fmt.Errorf("%s is given twice", name)
		}
		if known, err := q.set(name, values[0]); err != nil {
			return fmt.Errorf("%s=%q: %w", name, values[0], err)
		} else if !known {
			return fmt.Errorf("%s is not an option of %s: those are %s", name, q.scheme(), q.options())
		}
	}
	if !q.iser {
		return nil
	}
	p, err := iwarp.New(q.wire)
	q.o.ISER.Provider = p
	return err
}

func (q *urlQuery) set(name, value string) (known bool, err error) {
	is := func(yes, no string) bool {
		if value != yes && value != no {
			err = fmt.Errorf("neither %s nor %s", yes, no)
		}
		return value == yes
	}
	bytes := func(v *uint32) {
		var n uint64
		if n, err = strconv.ParseUint(value, 10, 32); err == nil && (n < 512 || n > pdu.MaxDataLength) {
			err = fmt.Errorf("not between 512 and %d bytes", pdu.MaxDataLength)
		}
		*v = uint32(n)
	}
	switch name {
	case "initial-r2t":
		q.o.InitialR2T = is("yes", "no")
		return true, err
	case "immediate-data":
		q.o.NoImmediateData = !is("yes", "no")
		return true, err
	case "first-burst":
		bytes(&q.o.FirstBurstLength)
		return true, err
	case "max-burst":
		bytes(&q.o.MaxBurstLength)
		return true, err
	case "digests":
		policy, ok := map[string]DigestPolicy{"none": DigestNone, "prefer": DigestPrefer, "required": DigestRequired}[value]
		if !ok {
			err = fmt.Errorf("none of none, prefer and required")
		}
		q.o.HeaderDigest, q.o.DataDigest = policy, policy
		return !q.iser, err
	}
	if !q.iser {
		return false, nil
	}
	switch name {
	case "crc":
		q.wire.NoCRC = !is("on", "off")
	case "mpa":
		if is("1", "2") {
			q.wire.Revision = 1
		}
	case "peer-to-peer":
		q.wire.PeerToPeer = is("yes", "no")
	case "hello":
		q.o.ISER.Hello = is("yes", "no")
	case "lax-statsn":
		q.o.ISER.LaxStatSN = is("yes", "no")
	case "login":
		q.o.ISER.Stream = is("stream", "message")
	case "delay":
		q.o.ISER.StartDelay, err = time.ParseDuration(value)
		if err == nil && q.o.ISER.StartDelay < 0 {
			err = fmt.Errorf("it is negative")
		}
	default:
		return false, nil
	}
	return true, err
}
