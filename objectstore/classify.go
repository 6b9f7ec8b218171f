package objectstore

import (
	"context"
	"crypto/x509"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"syscall"

	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// Class says what a caller can do about an error. Every error of this package has
// exactly one.
type Class int

// The classes. ClassDenied, ClassFull, ClassWrongRegion, ClassClockSkew and
// ClassInvalid with ErrNoBucket need a person, but a long-running caller such as
// destage must go on trying at a slow pace: stores answer 403 during outages and key
// rotation, and the fault ends without a restart once the person has acted.
const (
	ClassOK          Class = 0  // no error
	ClassTransient   Class = 1  // unreachable, overloaded, timed out, outcome unknown: retry
	ClassFenced      Class = 2  // 412: somebody created the key; read it back, then decide
	ClassNotFound    Class = 3  // the key is not there
	ClassDenied      Class = 4  // credentials or rights
	ClassCorrupt     Class = 5  // bytes are not what was written
	ClassFull        Class = 6  // no space or quota
	ClassWrongRegion Class = 7  // redirected, or signed for another region
	ClassClockSkew   Class = 8  // clocks differ too much
	ClassUnsupported Class = 9  // 501, or a store without conditional writes
	ClassInvalid     Class = 10 // can never succeed as asked
)

// String returns the class as used in metrics labels and logs.
func (c Class) String() string {
	switch c {
	case ClassOK:
		return "ok"
	case ClassTransient:
		return "transient"
	case ClassFenced:
		return "fenced"
	case ClassNotFound:
		return "not_found"
	case ClassDenied:
		return "denied"
	case ClassCorrupt:
		return "corrupt"
	case ClassFull:
		return "full"
	case ClassWrongRegion:
		return "wrong_region"
	case ClassClockSkew:
		return "clock_skew"
	case ClassUnsupported:
		return "unsupported"
	case ClassInvalid:
		return "invalid"
	}
	return "unclassified"
}

// sentinelClass is ordered: the first sentinel that an error Is decides.
var sentinelClass = []struct {
	err   error
	class Class
}{
	{ErrCorrupt, ClassCorrupt},
	{ErrExists, ClassFenced},
	{ErrClockSkew, ClassClockSkew},
	{ErrWrongRegion, ClassWrongRegion},
	{ErrDenied, ClassDenied},
	{ErrFull, ClassFull},
	{ErrNoConditionalPut, ClassUnsupported},
	{ErrUnsupported, ClassUnsupported},
	{ErrNoBucket, ClassInvalid},
	{ErrTooLarge, ClassInvalid},
	{ErrInvalid, ClassInvalid},
	{ErrClosed, ClassInvalid},
	{ErrNotFound, ClassNotFound},
	{ErrUnknown, ClassTransient},
	{ErrTransient, ClassTransient},
}

// Classify returns the class of err: by the sentinels of this package, then by HTTP
// status and S3 error code, then by errno. What it cannot place is ClassTransient: a
// caller that retries slowly is right more often than one that gives up.
//
// 403 is ClassDenied, but callers must treat it as retryable at a slow pace: an
// outage of the store's authentication, or a rotation of keys, looks the same.
func Classify(err error) Class {
	if err == nil {
		return ClassOK
	}
	for _, s := range sentinelClass {
		if errors.Is(err, s.err) {
			return s.class
		}
	}
	for _, s := range sentinelClass {
		if s.err == causeSentinel(err) {
			return s.class
		}
	}
	return ClassTransient
}

// causeSentinel maps an error that comes from outside of this package to a sentinel.
func causeSentinel(err error) error {
	if status, code, ok := httpStatus(err); ok {
		return statusSentinel(status, code)
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errnoSentinel(errno)
	}
	return ErrTransient
}

// httpStatus returns the status and, when the body could be read, the S3 code of the
// response that err carries. A store may lose the body and with it the code, so the
// status counts first.
func httpStatus(err error) (status int, code string, ok bool) {
	var re *smithyhttp.ResponseError
	if !errors.As(err, &re) || re.Response == nil || re.Response.Response == nil {
		return 0, "", false
	}
	var ae smithy.APIError
	if errors.As(err, &ae) {
		code = ae.ErrorCode()
	}
	return re.HTTPStatusCode(), code, true
}

// Answered reports whether err is an answer of a store, or of something in front of it that speaks for it: it was reached.
func Answered(err error) bool {
	status, _, ok := httpStatus(err)
	return ok && status > 0
}

// statusSentinel is the table of HTTP answers.
func statusSentinel(status int, code string) error {
	switch status {
	case http.StatusPreconditionFailed:
		return ErrExists
	case http.StatusNotFound:
		switch code {
		case "NoSuchKey", "NoSuchVersion":
			return ErrNotFound
		case "NoSuchBucket":
			return ErrNoBucket
		case "XAdminUserNotFound", "NoSuchUser":
			return ErrDenied
		}
		// A 404 without an S3 code can be anything between here and the store: it
		// must not be read as "the object does not exist".
		return ErrTransient
	case http.StatusUnauthorized:
		return ErrDenied
	case http.StatusForbidden:
		switch code {
		case "RequestTimeTooSkewed", "RequestInTheFuture", "RequestExpired":
			return ErrClockSkew
		case "QuotaExceeded":
			return ErrFull
		}
		return ErrDenied
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther,
		http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return ErrWrongRegion
	case http.StatusBadRequest:
		switch code {
		case "AuthorizationHeaderMalformed", "IllegalLocationConstraintException":
			return ErrWrongRegion
		case "ExpiredToken", "InvalidToken", "TokenRefreshRequired":
			return ErrDenied
		case "RequestTimeTooSkewed", "RequestExpired":
			return ErrClockSkew
		case "RequestTimeout", "IncompleteBody", "BadDigest":
			return ErrTransient // the body did not arrive as it was sent
		case "EntityTooLarge":
			return ErrTooLarge
		case "NotImplemented":
			return ErrUnsupported
		}
		return ErrInvalid
	case http.StatusRequestEntityTooLarge:
		return ErrTooLarge
	case http.StatusNotImplemented, http.StatusMethodNotAllowed, http.StatusHTTPVersionNotSupported:
		return ErrUnsupported
	case http.StatusInsufficientStorage:
		return ErrFull
	case http.StatusConflict:
		switch code {
		case "ExistingObjectIsDirectory", "ObjectParentIsFile":
			return ErrInvalid // a store on a file system: "a" and "a/b" cannot both exist
		}
		return ErrTransient
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return ErrTransient
	}
	if status >= 400 && status < 500 {
		return ErrInvalid
	}
	return ErrTransient // 5xx, and 2xx whose body could not be read
}

// errnoSentinel is the table of the local file system's answers.
func errnoSentinel(errno syscall.Errno) error {
	switch errno {
	case syscall.ENOSPC, syscall.EDQUOT:
		return ErrFull
	case syscall.EACCES, syscall.EPERM, syscall.EROFS:
		return ErrDenied
	case syscall.ENOENT:
		return ErrNotFound
	case syscall.EEXIST:
		return ErrExists
	case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EXDEV:
		return ErrUnsupported
	case syscall.ENAMETOOLONG, syscall.EINVAL, syscall.ENOTDIR, syscall.EISDIR:
		return ErrInvalid
	case syscall.EFBIG:
		return ErrTooLarge
	}
	return ErrTransient
}

// neverSent reports whether err proves that no byte of the request left this host.
func neverSent(err error) bool {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return true
	}
	var dns *net.DNSError
	return errors.As(err, &dns)
}

// Advice returns one sentence on what a person can do about err, "" for nil. It is for
// people; decide with Classify.
func Advice(err error) string {
	if err == nil {
		return ""
	}
	var ca x509.UnknownAuthorityError
	var host x509.HostnameError
	var dns *net.DNSError
	switch {
	case errors.As(err, &ca):
		return "The store's certificate is signed by an unknown authority: set AWS_CA_BUNDLE to a file with the authority's certificate."
	case errors.As(err, &host):
		return "The store's certificate is for another host name: check the endpoint in the bucket URL, and add path_style=true if the bucket name is put in front of the host."
	case errors.As(err, &dns) && dns.IsNotFound:
		return "The store's host name does not resolve: check the endpoint in the bucket URL, DNS, and add path_style=true if the bucket name is put in front of the host."
	case errors.Is(err, ErrNoBucket) && errors.Is(err, fs.ErrNotExist):
		return "The bucket's directory is missing or empty: mount or restore it; the gateway keeps trying."
	case errors.Is(err, ErrNoBucket):
		return "The bucket does not exist: create it, or correct its name or endpoint in the bucket URL."
	case errors.Is(err, ErrNoConditionalPut):
		return "The store cannot keep two writers apart: use a store that honours If-None-Match, or declare single-writer in the configuration if no other gateway can ever use this bucket."
	case errors.Is(err, ErrClosed):
		return "The bucket was closed by this process: nothing to do."
	case errors.Is(err, ErrTooLarge):
		return "The object is larger than this version expects or the store takes: check that the prefix belongs to this gateway alone."
	case errors.Is(err, context.Canceled):
		return "The request was cancelled: nothing to do."
	}
	switch Classify(err) {
	case ClassTransient:
		return "The store is unreachable or overloaded: check the endpoint, the network and the store; the gateway keeps trying."
	case ClassFenced:
		return "Another writer created this object: make sure that only one gateway serves the volume."
	case ClassNotFound:
		return "The object is not in the bucket: check the prefix in the bucket URL."
	case ClassDenied:
		return "The store refused the credentials or their rights: check the AWS credential chain (environment, profile, role) and the policy for GetObject, PutObject, DeleteObject and ListBucket; the gateway keeps trying."
	case ClassCorrupt:
		return "The store returned bytes that are not what was written: check its disks, and restore the object from a replica or a version."
	case ClassFull:
		return "The store is out of space or quota: add space or raise the quota; the gateway keeps trying."
	case ClassWrongRegion:
		return "The bucket is in another region or at another endpoint: set region= (and endpoint=) in the bucket URL."
	case ClassClockSkew:
		return "This host's clock and the store's differ too much: start a time service (chrony, systemd-timesyncd) on this host."
	case ClassUnsupported:
		return "The store does not implement a request that the gateway needs: use another store or a newer version of it."
	case ClassInvalid:
		return "The request is not valid for this store: check the bucket URL."
	}
	return ""
}
