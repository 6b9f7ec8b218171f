package objectstore

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// answer is the SDK's error for an HTTP answer; code "" is a body that got lost.
func answer(status int, code string) error {
	var inner error = errors.New("cannot read the body")
	if code != "" {
		inner = &smithy.GenericAPIError{Code: code, Message: "some text"}
	}
	return &smithy.OperationError{ServiceID: "S3", OperationName: "Op", Err: &smithyhttp.ResponseError{
		Response: &smithyhttp.Response{Response: &http.Response{StatusCode: status, Header: http.Header{"X-Amz-Bucket-Region": {"eu-west-1"}}}},
		Err:      inner,
	}}
}

func TestClassify(t *testing.T) {
	refused := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	for _, c := range []struct {
		err  error
		want Class
	}{
		{nil, ClassOK},

		{ErrNotFound, ClassNotFound},
		{ErrExists, ClassFenced},
		{ErrTransient, ClassTransient},
		{ErrUnknown, ClassTransient},
		{ErrTooLarge, ClassInvalid},
		{ErrCorrupt, ClassCorrupt},
		{ErrDenied, ClassDenied},
		{ErrFull, ClassFull},
		{ErrWrongRegion, ClassWrongRegion},
		{ErrClockSkew, ClassClockSkew},
		{ErrUnsupported, ClassUnsupported},
		{ErrNoConditionalPut, ClassUnsupported},
		{ErrNoBucket, ClassInvalid},
		{ErrInvalid, ClassInvalid},
		{ErrClosed, ClassInvalid},
		{fmt.Errorf("while attaching: %w", fail(OpPut, "k", ErrDenied, io.EOF)), ClassDenied},
		{fmt.Errorf("%w: and %w", ErrUnknown, ErrDenied), ClassDenied},

		{answer(412, "PreconditionFailed"), ClassFenced},
		{answer(412, ""), ClassFenced},
		{answer(404, "NoSuchKey"), ClassNotFound},
		{answer(404, "NoSuchBucket"), ClassInvalid},
		{answer(404, "XAdminUserNotFound"), ClassDenied},
		{answer(404, ""), ClassTransient},
		{answer(404, "NotFound"), ClassTransient},
		{answer(401, ""), ClassDenied},
		{answer(403, ""), ClassDenied},
		{answer(403, "AccessDenied"), ClassDenied},
		{answer(403, "InvalidAccessKeyId"), ClassDenied},
		{answer(403, "SignatureDoesNotMatch"), ClassDenied},
		{answer(403, "RequestTimeTooSkewed"), ClassClockSkew},
		{answer(403, "QuotaExceeded"), ClassFull},
		{answer(400, "ExpiredToken"), ClassDenied},
		{answer(400, "AuthorizationHeaderMalformed"), ClassWrongRegion},
		{answer(400, "RequestTimeout"), ClassTransient},
		{answer(400, "BadDigest"), ClassTransient},
		{answer(400, "EntityTooLarge"), ClassInvalid},
		{answer(400, "NotImplemented"), ClassUnsupported},
		{answer(400, "InvalidArgument"), ClassInvalid},
		{answer(301, "PermanentRedirect"), ClassWrongRegion},
		{answer(307, "TemporaryRedirect"), ClassWrongRegion},
		{answer(405, "MethodNotAllowed"), ClassUnsupported},
		{answer(409, "ConditionalRequestConflict"), ClassTransient},
		{answer(409, "OperationAborted"), ClassTransient},
		{answer(409, "ObjectParentIsFile"), ClassInvalid},
		{answer(413, ""), ClassInvalid},
		{answer(418, ""), ClassInvalid},
		{answer(429, "SlowDown"), ClassTransient},
		{answer(500, "InternalError"), ClassTransient},
		{answer(501, "NotImplemented"), ClassUnsupported},
		{answer(502, ""), ClassTransient},
		{answer(503, "SlowDown"), ClassTransient},
		{answer(503, "ServiceUnavailable"), ClassTransient},
		{answer(507, "XMinioStorageFull"), ClassFull},
		{answer(200, ""), ClassTransient},

		{&fs.PathError{Op: "write", Path: "p", Err: syscall.ENOSPC}, ClassFull},
		{&fs.PathError{Op: "write", Path: "p", Err: syscall.EDQUOT}, ClassFull},
		{&fs.PathError{Op: "open", Path: "p", Err: syscall.EACCES}, ClassDenied},
		{&fs.PathError{Op: "open", Path: "p", Err: syscall.EROFS}, ClassDenied},
		{&fs.PathError{Op: "read", Path: "p", Err: syscall.EIO}, ClassTransient},
		{refused, ClassTransient},
		{&net.DNSError{Err: "no such host", Name: "s3.invalid", IsNotFound: true}, ClassTransient},
		{x509.UnknownAuthorityError{}, ClassTransient},
		{context.DeadlineExceeded, ClassTransient},
		{context.Canceled, ClassTransient},
		{io.ErrUnexpectedEOF, ClassTransient},
		{errors.New("something new"), ClassTransient},
	} {
		if got := Classify(c.err); got != c.want {
			t.Errorf("%v: class %v, want %v", c.err, got, c.want)
		}
		advice := Advice(c.err)
		if (advice == "") != (c.err == nil) {
			t.Errorf("%v: advice %q", c.err, advice)
		}
		if advice != "" && (!strings.HasSuffix(advice, ".") || strings.ContainsRune(advice, '\n')) {
			t.Errorf("%v: advice is not one sentence: %q", c.err, advice)
		}
	}
}

func TestClassNames(t *testing.T) {
	seen := make(map[string]bool)
	for c := ClassOK; c <= ClassInvalid; c++ {
		if s := c.String(); s == "unclassified" || seen[s] {
			t.Errorf("class %d is called %q", c, s)
		} else {
			seen[s] = true
		}
	}
}

func TestErrorText(t *testing.T) {
	err := fail(OpPut, "volumes/v/log/1/2", statusSentinel(301, ""), shortCause(answer(301, "PermanentRedirect")))
	const want = "objectstore: put volumes/v/log/1/2: wrong region: 301 PermanentRedirect: some text: the bucket is in region eu-west-1"
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	if !errors.Is(err, ErrWrongRegion) || Classify(err) != ClassWrongRegion {
		t.Errorf("class %v", Classify(err))
	}
}

// TestOutcomeUnknown: a put must not claim that nothing was written when it can't know.
func TestOutcomeUnknown(t *testing.T) {
	dial := &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	for _, c := range []struct {
		err  error
		want bool
	}{
		{answer(500, "InternalError"), true},
		{answer(503, "SlowDown"), true},
		{answer(502, ""), true},
		{answer(200, ""), true},
		{answer(408, ""), true},
		{io.ErrUnexpectedEOF, true},
		{context.DeadlineExceeded, true},
		{&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}, true},
		{&net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}, true},
		{dial, false},
		{&net.DNSError{IsNotFound: true}, false},
		{answer(403, "AccessDenied"), false},
		{answer(409, "ConditionalRequestConflict"), false},
		{answer(412, ""), false},
		{answer(429, ""), false},
		{answer(501, ""), false},
	} {
		if got := outcomeUnknown(c.err); got != c.want {
			t.Errorf("%v: unknown %v, want %v", c.err, got, c.want)
		}
	}
}
