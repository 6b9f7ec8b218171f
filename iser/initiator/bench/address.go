package bench

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/isergate/isergate/iser/initiator"
)

// maxLUN is the largest number of the flat addressing method (SAM-5, 4.7.7.3).
const maxLUN = 1<<14 - 1

// Address names a logical unit in the notation of libiscsi and QEMU:
//
//	iscsi://[USER[%SECRET]@]HOST[:PORT]/IQN/LUN
//	iser://[USER[%SECRET]@]HOST[:PORT]/IQN/LUN
//
// An IPv6 address stands in brackets. The port is 3260 unless it is given.
type Address struct {
	Transport Transport
	Portal    string // host:port
	Target    string // iSCSI name
	LUN       uint16
	// User and Secret are for CHAP, empty if the address has none.
	User, Secret string
}

// ErrAddress means that an address is not in the notation of Address.
var ErrAddress = errors.New("not iscsi://HOST:PORT/IQN/LUN or iser://HOST:PORT/IQN/LUN")

// ParseAddress reads the notation of Address. Its errors Are ErrAddress and never hold the secret.
func ParseAddress(s string) (Address, error) {
	bad := func(format string, args ...any) (Address, error) {
		return Address{}, fmt.Errorf("%w: %s", ErrAddress, fmt.Sprintf(format, args...))
	}
	var a Address
	scheme, rest, found := strings.Cut(s, "://")
	switch {
	case !found:
		return bad("no scheme")
	case strings.EqualFold(scheme, "iscsi"):
		a.Transport = TCP
	case strings.EqualFold(scheme, "iser"):
		a.Transport = ISER
	default:
		return bad("the scheme is %q", scheme)
	}
	authority, path, found := strings.Cut(rest, "/")
	if !found {
		return bad("no target name")
	}
	if at := strings.LastIndexByte(authority, '@'); at >= 0 {
		a.User, a.Secret, _ = strings.Cut(authority[:at], "%")
		if authority = authority[at+1:]; a.User == "" {
			return bad("no user before the @")
		}
	}
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		host, port = authority, initiator.DefaultPort
		if inner, bracketed := strings.CutPrefix(host, "["); bracketed {
			if host, bracketed = strings.CutSuffix(inner, "]"); !bracketed {
				return bad("%q is no host", authority)
			}
		}
	}
	bracketed := strings.HasPrefix(authority, "[")
	if ip, err := netip.ParseAddr(host); host == "" || err != nil && (bracketed || strings.ContainsAny(host, ":[]")) || err == nil && ip.Is6() != bracketed {
		return bad("%q is no host; an IPv6 address stands in brackets", authority)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return bad("%q is no port", port)
	}
	a.Portal = net.JoinHostPort(host, port)
	name, lun, found := strings.Cut(path, "/")
	if a.Target, err = url.PathUnescape(name); err != nil || a.Target == "" {
		return bad("%q is no target name", name)
	}
	if !found || lun == "" {
		return bad("no LUN after the target name")
	}
	if strings.ContainsRune(lun, '?') {
		return bad("options behind a question mark are not supported")
	}
	n, err := strconv.ParseUint(lun, 10, 16)
	if err != nil || n > maxLUN {
		return bad("%q is no LUN: use a number from 0 to %d", lun, maxLUN)
	}
	a.LUN = uint16(n)
	return a, nil
}

// String returns the address without user and secret.
func (a Address) String() string {
	scheme := "iscsi"
	if a.Transport == ISER {
		scheme = "iser"
	}
	return fmt.Sprintf("%s://%s/%s/%d", scheme, a.Portal, a.Target, a.LUN)
}
