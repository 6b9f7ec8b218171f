package objectstore

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/logging"
	"golang.org/x/sync/errgroup"
)

// defaultRegion signs requests to stores that have no regions.
const defaultRegion = "us-east-1"

// s3Bucket is a bucket of an S3-compatible store. In a versioned bucket Delete leaves
// a marker and the old version; the store's lifecycle rules remove these.
type s3Bucket struct {
	client    *s3.Client
	transport *http.Transport
	loc       Location
	root      string // prefix with a slash behind it, or ""
	putOpts   []func(*s3.Options)
	single    bool // Options.SingleWriter

	noBatchDelete atomic.Bool // the store has no DeleteObjects
	checksums     atomic.Int32
	closed        context.Context
	close         context.CancelCauseFunc
}

// Whether the store takes the checksum that comes with a put.
const (
	checksumsUntried int32 = 0
	checksumsTaken   int32 = 1
	checksumsRefused int32 = 2
)

func openS3(ctx context.Context, loc Location, o Options) (Bucket, error) {
	load := []func(*config.LoadOptions) error{
		// A buildable client takes the authority that AWS_CA_BUNDLE names.
		config.WithHTTPClient(awshttp.NewBuildableClient()),
	}
	if loc.Region != "" {
		load = append(load, config.WithRegion(loc.Region))
	}
	if c := o.Credentials; c != nil {
		load = append(load, config.WithCredentialsProvider(
			credentials.NewStaticCredentialsProvider(c.AccessKeyID, c.SecretAccessKey, c.SessionToken)))
	}
	cfg, err := config.LoadDefaultConfig(ctx, load...)
	if err != nil {
		return nil, fmt.Errorf("%w: AWS configuration: %w", ErrInvalid, err)
	}
	buildable, ok := cfg.HTTPClient.(*awshttp.BuildableClient)
	if !ok {
		return nil, fmt.Errorf("%w: AWS configuration: HTTP client is %T", ErrInvalid, cfg.HTTPClient)
	}
	b := &s3Bucket{loc: loc, single: o.SingleWriter, transport: newTransport(buildable, o)}
	b.closed, b.close = context.WithCancelCause(context.Background())
	if loc.Prefix != "" {
		b.root = loc.Prefix + "/"
	}
	cfg.Credentials = &chain{cfg.Credentials}
	cfg.Logger = sdkLogger{o.Logger}
	b.client = s3.NewFromConfig(cfg, func(c *s3.Options) {
		c.HTTPClient = newHTTPClient(b.transport, o)
		c.Retryer = aws.NopRetryer{} // WithRetry retries, and knows which outcomes are unknown
		c.UsePathStyle = loc.PathStyle
		if loc.Endpoint != "" {
			c.BaseEndpoint = aws.String(loc.Endpoint)
		}
		// Clones stumble over the checksums that AWS checks; our objects carry their own.
		c.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenSupported
		c.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenSupported
		if c.BaseEndpoint != nil {
			c.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
			c.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
			if c.Region == "" {
				c.Region = defaultRegion
			}
			if loc.Endpoint == "" { // from AWS_ENDPOINT_URL_S3 or a profile
				c.UsePathStyle = true
			}
			if strings.HasPrefix(*c.BaseEndpoint, "http:") {
				// Over https the SDK leaves the payload unsigned by itself. Over http
				// signing it costs a SHA-256 of each object.
				b.putOpts = append(b.putOpts, s3.WithAPIOptions(v4.SwapComputePayloadSHA256ForUnsignedPayloadMiddleware))
			}
		}
	})
	if b.client.Options().Region == "" {
		return nil, fmt.Errorf("%w: no region: add region= to the bucket URL or set AWS_REGION", ErrInvalid)
	}
	return b, nil
}

// chain marks failures of the credential chain, which come without an HTTP status of S3.
type chain struct{ aws.CredentialsProvider }

func (c *chain) Retrieve(ctx context.Context) (aws.Credentials, error) {
	if c.CredentialsProvider == nil {
		return aws.Credentials{}, fmt.Errorf("%w: no credentials", ErrDenied)
	}
	got, err := c.CredentialsProvider.Retrieve(ctx)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: no credentials: %w", ErrDenied, err)
	}
	return got, err
}

// sdkLogger carries what the SDK remarks, all of it of use only while debugging.
type sdkLogger struct{ *slog.Logger }

func (l sdkLogger) Logf(c logging.Classification, format string, args ...any) {
	l.Debug("AWS SDK remark", "class", string(c), "text", fmt.Sprintf(format, args...))
}

// begin bounds ctx by the life of the bucket.
func (b *s3Bucket) begin(ctx context.Context, op Op, key string) (context.Context, func(), error) {
	if b.closed.Err() != nil {
		return nil, nil, fail(op, key, ErrClosed, nil)
	}
	if err := ended(ctx, op, key); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(b.closed, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(nil) }, nil
}

// s3Error classifies a failed request.
func (b *s3Bucket) s3Error(ctx context.Context, op Op, key string, err error) error {
	var known *opError
	if errors.As(err, &known) {
		return err
	}
	sentinel := sentinelOf(err)
	if context.Cause(ctx) == ErrClosed {
		sentinel = ErrClosed
	}
	return fail(op, key, sentinel, shortCause(err))
}

// PutIfAbsent is Bucket's.
func (b *s3Bucket) PutIfAbsent(ctx context.Context, key string, body []byte) error {
	if err := checkKey(OpPut, key); err != nil {
		return err
	}
	if b.single {
		switch _, err := b.Head(ctx, key); {
		case err == nil:
			return fail(OpPut, key, ErrExists, nil)
		case !errors.Is(err, ErrNotFound):
			return fail(OpPut, key, sentinelOf(err), err)
		}
	}
	ctx, end, err := b.begin(ctx, OpPut, key)
	if err != nil {
		return err
	}
	defer end()
	in := &s3.PutObjectInput{
		Bucket:        &b.loc.Bucket,
		Key:           aws.String(b.root + key),
		Body:          bytes.NewReader(body),
		ContentLength: aws.Int64(int64(len(body))),
	}
	if !b.single {
		in.IfNoneMatch = aws.String("*")
	}
	if err = b.putChecked(ctx, in, body); err == nil {
		return nil
	}
	if cause := context.Cause(ctx); outcomeUnknown(err) {
		if cause == ErrClosed {
			err = ErrClosed
		}
		return fail(OpPut, key, ErrUnknown, shortCause(err))
	}
	return b.s3Error(ctx, OpPut, key, err)
}

// putChecked sends a put with the CRC32C of its body in the header, so that a body that changes on its way is refused and not stored.
// A store that refuses the header is asked without it from then on.
func (b *s3Bucket) putChecked(ctx context.Context, in *s3.PutObjectInput, body []byte) error {
	known := b.checksums.Load()
	if known != checksumsRefused {
		sum := binary.BigEndian.AppendUint32(nil, crc32c(body))
		in.ChecksumCRC32C = aws.String(base64.StdEncoding.EncodeToString(sum))
	}
	_, err := b.client.PutObject(ctx, in, b.putOpts...)
	switch {
	case err == nil && known == checksumsUntried:
		b.checksums.CompareAndSwap(checksumsUntried, checksumsTaken)
	case err != nil && known == checksumsUntried && (Classify(err) == ClassInvalid || Classify(err) == ClassUnsupported):
		in.Body, in.ChecksumCRC32C = bytes.NewReader(body), nil
		if _, again := b.client.PutObject(ctx, in, b.putOpts...); again == nil {
			b.checksums.CompareAndSwap(checksumsUntried, checksumsRefused)
			return nil
		} else if Classify(again) != Classify(err) {
			return again // it got further: the header was in its way
		}
	}
	return err
}

// outcomeUnknown reports whether a failed put may have created its object all the same.
func outcomeUnknown(err error) bool {
	if Classify(err) != ClassTransient || neverSent(err) {
		return false
	}
	if status, _, ok := httpStatus(err); ok {
		// These say that the store did not take the request up.
		return status != http.StatusConflict && status != http.StatusTooManyRequests &&
			status != http.StatusBadRequest && status != http.StatusNotFound
	}
	return true
}

// Get is Bucket's.
func (b *s3Bucket) Get(ctx context.Context, key string, limit int64) ([]byte, error) {
	if err := checkGet(key, limit); err != nil {
		return nil, err
	}
	ctx, end, err := b.begin(ctx, OpGet, key)
	if err != nil {
		return nil, err
	}
	defer end()
	out, err := b.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &b.loc.Bucket, Key: aws.String(b.root + key)})
	if err != nil {
		return nil, b.s3Error(ctx, OpGet, key, err)
	}
	defer out.Body.Close()
	if out.ContentLength != nil {
		size := *out.ContentLength
		if size > limit {
			return nil, tooLarge(key, size, limit)
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(out.Body, body); err != nil {
			return nil, b.s3Error(ctx, OpGet, key, err)
		}
		// The last read verifies the checksum, where there is one.
		if _, err := out.Body.Read(make([]byte, 1)); err != nil && err != io.EOF {
			return nil, b.s3Error(ctx, OpGet, key, err)
		}
		return body, nil
	}
	body, err := io.ReadAll(io.LimitReader(out.Body, limit+1))
	if err != nil {
		return nil, b.s3Error(ctx, OpGet, key, err)
	}
	if int64(len(body)) > limit {
		return nil, tooLarge(key, int64(len(body)), limit)
	}
	return body, nil
}

// GetRange is Bucket's.
func (b *s3Bucket) GetRange(ctx context.Context, key string, off int64, into []byte) (int, error) {
	if err := checkRange(key, off); err != nil {
		return 0, err
	}
	if len(into) == 0 {
		_, err := b.Head(ctx, key)
		return 0, err
	}
	ctx, end, err := b.begin(ctx, OpGetRange, key)
	if err != nil {
		return 0, err
	}
	defer end()
	out, err := b.client.GetObject(ctx, &s3.GetObjectInput{
		Bucket: &b.loc.Bucket,
		Key:    aws.String(b.root + key),
		Range:  aws.String(fmt.Sprintf("bytes=%d-%d", off, off+int64(len(into))-1)),
	})
	if err != nil {
		if status, _, ok := httpStatus(err); ok && status == http.StatusRequestedRangeNotSatisfiable {
			return 0, nil // at or behind the end
		}
		return 0, b.s3Error(ctx, OpGetRange, key, err)
	}
	defer out.Body.Close()
	n, err := rangeLength(out, off, len(into))
	if err != nil {
		return 0, fail(OpGetRange, key, sentinelOf(err), err)
	}
	if _, err := io.ReadFull(out.Body, into[:n]); err != nil {
		return 0, b.s3Error(ctx, OpGetRange, key, err)
	}
	return n, nil
}

// rangeLength returns how many bytes the answer to a ranged get brings, and refuses an
// answer to another question.
func rangeLength(out *s3.GetObjectOutput, off int64, want int) (int, error) {
	length := int64(-1)
	if out.ContentLength != nil {
		length = *out.ContentLength
	}
	if out.ContentRange == nil {
		// The whole object: right only if that is what was asked for.
		if off == 0 && length >= 0 && length <= int64(want) {
			return int(length), nil
		}
		return 0, fmt.Errorf("%w: the store ignored the Range header", ErrUnsupported)
	}
	var first, last int64
	var total string
	if _, err := fmt.Sscanf(*out.ContentRange, "bytes %d-%d/%s", &first, &last, &total); err != nil {
		return 0, fmt.Errorf("%w: Content-Range %.60q", ErrCorrupt, *out.ContentRange)
	}
	n := last - first + 1
	if first != off || last < first || n > int64(want) || length >= 0 && length != n {
		return 0, fmt.Errorf("%w: asked for %d bytes at %d, got Content-Range %.60q and %d bytes", ErrCorrupt, want, off, *out.ContentRange, length)
	}
	if whole, err := strconv.ParseInt(total, 10, 64); err == nil && n < int64(want) && last+1 < whole {
		return 0, fmt.Errorf("%w: asked for %d bytes at %d, got %d of an object that goes on to %d", ErrTransient, want, off, n, whole)
	}
	return int(n), nil
}

// Head is Bucket's.
func (b *s3Bucket) Head(ctx context.Context, key string) (Info, error) {
	if err := checkKey(OpHead, key); err != nil {
		return Info{}, err
	}
	ctx, end, err := b.begin(ctx, OpHead, key)
	if err != nil {
		return Info{}, err
	}
	defer end()
	out, err := b.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &b.loc.Bucket, Key: aws.String(b.root + key)})
	if err == nil {
		return Info{Key: key, Size: aws.ToInt64(out.ContentLength), Modified: aws.ToTime(out.LastModified)}, nil
	}
	if status, _, ok := httpStatus(err); ok && status >= 300 && status < 500 {
		// An answer to HEAD has no body, so no code: a missing key and a missing bucket
		// look the same, and so do bad rights and a wrong clock. A GET tells them apart.
		if _, err := b.GetRange(ctx, key, 0, make([]byte, 1)); err != nil {
			return Info{}, fail(OpHead, key, sentinelOf(err), err)
		}
		return Info{}, fail(OpHead, key, ErrTransient, err) // created just now: ask again
	}
	return Info{}, b.s3Error(ctx, OpHead, key, err)
}

// List is Bucket's.
func (b *s3Bucket) List(ctx context.Context, prefix, startAfter string, max int) ([]Info, error) {
	if err := checkList(prefix, startAfter, max); err != nil {
		return nil, err
	}
	ctx, end, err := b.begin(ctx, OpList, prefix)
	if err != nil {
		return nil, err
	}
	defer end()
	in := &s3.ListObjectsV2Input{Bucket: &b.loc.Bucket}
	if full := b.root + prefix; full != "" {
		in.Prefix = &full
	}
	if startAfter != "" {
		in.StartAfter = aws.String(b.root + startAfter)
	}
	var out []Info
	last := startAfter
	for len(out) < max {
		in.MaxKeys = aws.Int32(int32(max - len(out)))
		page, err := b.client.ListObjectsV2(ctx, in)
		if err != nil {
			return nil, b.s3Error(ctx, OpList, prefix, err)
		}
		for _, o := range page.Contents {
			key, ok := strings.CutPrefix(aws.ToString(o.Key), b.root)
			if !ok || !strings.HasPrefix(key, prefix) {
				return nil, fail(OpList, prefix, ErrUnsupported, errors.New("the store listed keys outside of the prefix"))
			}
			if key <= last && (last != "" || key != "") {
				return nil, fail(OpList, prefix, ErrUnsupported, errors.New("the store's listing is not in byte order, or ignores start-after"))
			}
			last = key
			if ValidateKey(key) != nil {
				continue // not written by us
			}
			if len(out) < max {
				out = append(out, Info{Key: key, Size: aws.ToInt64(o.Size), Modified: aws.ToTime(o.LastModified)})
			}
		}
		if !aws.ToBool(page.IsTruncated) {
			break
		}
		if aws.ToString(page.NextContinuationToken) == "" {
			return nil, fail(OpList, prefix, ErrUnsupported, errors.New("the store cut a listing without a continuation token"))
		}
		in.ContinuationToken = page.NextContinuationToken
	}
	return out, nil
}

// Delete is Bucket's.
func (b *s3Bucket) Delete(ctx context.Context, keys ...string) error {
	if err := checkDelete(keys); err != nil {
		return err
	}
	ctx, end, err := b.begin(ctx, OpDelete, "")
	if err != nil {
		return err
	}
	defer end()
	for len(keys) > 0 {
		n := min(len(keys), MaxListPage)
		if err := b.deleteBatch(ctx, keys[:n]); err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

func (b *s3Bucket) deleteBatch(ctx context.Context, keys []string) error {
	if len(keys) == 1 || b.noBatchDelete.Load() {
		return b.deleteSingly(ctx, keys)
	}
	ids := make([]types.ObjectIdentifier, len(keys))
	for i, k := range keys {
		ids[i].Key = aws.String(b.root + k)
	}
	out, err := b.client.DeleteObjects(ctx, &s3.DeleteObjectsInput{
		Bucket: &b.loc.Bucket,
		Delete: &types.Delete{Objects: ids, Quiet: aws.Bool(true)},
	})
	if err != nil {
		status, code, ok := httpStatus(err)
		switch {
		case !ok || code == "NoSuchBucket":
		case status == http.StatusNotImplemented, status == http.StatusMethodNotAllowed:
			b.noBatchDelete.Store(true)
			return b.deleteSingly(ctx, keys)
		case status < 300 && ctx.Err() == nil, status == http.StatusBadRequest, status == http.StatusNotFound:
			// An answer that cannot be read, or a store that wants another checksum.
			return b.deleteSingly(ctx, keys)
		}
		return b.s3Error(ctx, OpDelete, "", err)
	}
	for _, e := range out.Errors {
		if code := aws.ToString(e.Code); code != "NoSuchKey" && code != "NoSuchVersion" {
			key := strings.TrimPrefix(aws.ToString(e.Key), b.root)
			return fail(OpDelete, key, deleteSentinel(code), fmt.Errorf("%s: %s", code, aws.ToString(e.Message)))
		}
	}
	return nil
}

// deleteSentinel maps the code of one key in the answer to DeleteObjects, which has no
// status of its own.
func deleteSentinel(code string) error {
	switch code {
	case "AccessDenied", "AllAccessDisabled", "InvalidObjectState":
		return ErrDenied
	case "NotImplemented", "MethodNotAllowed":
		return ErrUnsupported
	}
	return ErrTransient
}

// deleteSingly removes keys one by one, a few at a time.
func (b *s3Bucket) deleteSingly(ctx context.Context, keys []string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for _, key := range keys {
		g.Go(func() error {
			if ctx.Err() != nil {
				return fail(OpDelete, key, ErrTransient, ctx.Err())
			}
			_, err := b.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &b.loc.Bucket, Key: aws.String(b.root + key)})
			if err == nil {
				return nil
			}
			if err = b.s3Error(ctx, OpDelete, key, err); errors.Is(err, ErrNotFound) {
				return nil
			}
			return err
		})
	}
	return g.Wait()
}

// URL is Bucket's.
func (b *s3Bucket) URL() string { return b.loc.String() }

// Close is Bucket's.
func (b *s3Bucket) Close() error {
	b.close(ErrClosed)
	b.transport.CloseIdleConnections()
	return nil
}
