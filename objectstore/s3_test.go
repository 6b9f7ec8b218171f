package objectstore_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/objectstore"
)

var someKeys = &objectstore.Credentials{AccessKeyID: "AK", SecretAccessKey: "SK"}

// fake serves handler and opens a bucket on it with short time-outs.
func fake(t *testing.T, handler http.HandlerFunc) objectstore.Bucket {
	t.Helper()
	return fakeWith(t, objectstore.Options{Credentials: someKeys}, handler)
}

func fakeWith(t *testing.T, o objectstore.Options, handler http.HandlerFunc) objectstore.Bucket {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	b, err := objectstore.Open(t.Context(), fakeURL(server), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func fakeURL(server *httptest.Server) string {
	return "s3://bucket/pre?region=us-east-1&endpoint=" + url.QueryEscape(server.URL)
}

// xmlError answers as S3 does.
func xmlError(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>told so</Message></Error>", code)
}

// cut ends the connection of a request.
func cut(http.ResponseWriter) { panic(http.ErrAbortHandler) }

func TestS3PutRequest(t *testing.T) {
	var got http.Header
	var path, body string
	b := fake(t, func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		got, path, body = r.Header, r.Method+" "+r.URL.Path, string(raw)
	})
	if err := b.PutIfAbsent(t.Context(), "a/b", []byte("bytes")); err != nil {
		t.Fatal(err)
	}
	if path != "PUT /bucket/pre/a/b" || body != "bytes" {
		t.Errorf("request %s with %q", path, body)
	}
	for name, want := range map[string]string{
		"If-None-Match":        "*",
		"Content-Length":       "5",
		"X-Amz-Content-Sha256": "UNSIGNED-PAYLOAD",
		"X-Amz-Trailer":        "",
		"X-Amz-Checksum-Crc32": "",
		// CRC32C of "bytes", big-endian, in base64
		"X-Amz-Checksum-Crc32c":        "0G6ckg==",
		"X-Amz-Sdk-Checksum-Algorithm": "",
		"Content-Encoding":             "",
	} {
		if v := got.Get(name); v != want {
			t.Errorf("header %s is %q, want %q", name, v, want)
		}
	}
}

// TestS3Checksum: what changes on its way to the store is refused there; a store that takes no checksum gets none.
func TestS3Checksum(t *testing.T) {
	for _, c := range []struct {
		name   string
		refuse func(w http.ResponseWriter, r *http.Request) bool
		class  objectstore.Class // of a second put
		sums   int               // requests with a checksum, of three puts
		all    int
	}{
		{"taken", func(w http.ResponseWriter, r *http.Request) bool { return false }, objectstore.ClassOK, 3, 3},
		{"refused", func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("X-Amz-Checksum-Crc32c") == "" {
				return false
			}
			xmlError(w, 400, "InvalidArgument")
			return true
		}, objectstore.ClassOK, 1, 4},
		{"not implemented", func(w http.ResponseWriter, r *http.Request) bool {
			if r.Header.Get("X-Amz-Checksum-Crc32c") == "" {
				return false
			}
			xmlError(w, 501, "NotImplemented")
			return true
		}, objectstore.ClassOK, 1, 4},
		{"nothing is taken", func(w http.ResponseWriter, r *http.Request) bool { xmlError(w, 501, "NotImplemented"); return true }, objectstore.ClassUnsupported, 3, 6},
		{"damaged", func(w http.ResponseWriter, r *http.Request) bool { xmlError(w, 400, "BadDigest"); return true }, objectstore.ClassTransient, 3, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			var sums, all int
			b := fake(t, func(w http.ResponseWriter, r *http.Request) {
				if all++; r.Header.Get("X-Amz-Checksum-Crc32c") != "" {
					sums++
				}
				if body, err := io.ReadAll(r.Body); err != nil || string(body) != "bytes" {
					t.Errorf("body %q, %v", body, err)
				}
				c.refuse(w, r)
			})
			for range 3 {
				err := b.PutIfAbsent(t.Context(), "k", []byte("bytes"))
				if objectstore.Classify(err) != c.class || errors.Is(err, objectstore.ErrUnknown) {
					t.Errorf("%v", err)
				}
			}
			if sums != c.sums || all != c.all {
				t.Errorf("%d of %d requests with a checksum, want %d of %d", sums, all, c.sums, c.all)
			}
		})
	}
}

// TestS3Answers: what each operation makes of an answer, and that only a put whose
// request went out is of unknown outcome.
func TestS3Answers(t *testing.T) {
	for _, c := range []struct {
		name       string
		answer     http.HandlerFunc
		class      objectstore.Class
		putUnknown bool
		text       string
	}{
		{"500", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 500, "InternalError") }, objectstore.ClassTransient, true, "500"},
		{"503 without body", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) }, objectstore.ClassTransient, true, "503"},
		{"cut", func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body); cut(w) }, objectstore.ClassTransient, true, ""},
		{"403", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 403, "AccessDenied") }, objectstore.ClassDenied, false, "403 AccessDenied: told so"},
		{"404 of a proxy", func(w http.ResponseWriter, r *http.Request) { http.Error(w, "<html>nothing here", 404) }, objectstore.ClassTransient, false, ""},
		{"no bucket", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 404, "NoSuchBucket") }, objectstore.ClassInvalid, false, "no such bucket"},
		{"507", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 507, "StorageFull") }, objectstore.ClassFull, false, "full"},
		{"region", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Amz-Bucket-Region", "mars-1")
			w.Header().Set("Location", "http://127.0.0.1:1/elsewhere")
			xmlError(w, 301, "PermanentRedirect")
		}, objectstore.ClassWrongRegion, false, "region mars-1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := fake(t, c.answer)
			ctx := t.Context()
			_, getErr := b.Get(ctx, "k", 10)
			_, rangeErr := b.GetRange(ctx, "k", 0, make([]byte, 3))
			_, headErr := b.Head(ctx, "k")
			_, listErr := b.List(ctx, "", "", 10)
			for op, err := range map[objectstore.Op]error{
				objectstore.OpPut: b.PutIfAbsent(ctx, "k", []byte("k")), objectstore.OpGet: getErr, objectstore.OpGetRange: rangeErr,
				objectstore.OpHead: headErr, objectstore.OpList: listErr, objectstore.OpDelete: b.Delete(ctx, "k", "l"),
			} {
				if objectstore.Classify(err) != c.class || errors.Is(err, objectstore.ErrNotFound) || !strings.Contains(err.Error(), c.text) {
					t.Errorf("%s: class %v: %v", op, objectstore.Classify(err), err)
				}
				if unknown := op == objectstore.OpPut && c.putUnknown; errors.Is(err, objectstore.ErrUnknown) != unknown {
					t.Errorf("%s: unknown outcome %v, want %v: %v", op, !unknown, unknown, err)
				}
			}
		})
	}
}

func TestS3Unreachable(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	url := fakeURL(server)
	server.Close()
	b := openAt(t, url, someKeys)
	wantClass(t, b, objectstore.ErrTransient, objectstore.ClassTransient)
	if err := b.PutIfAbsent(t.Context(), "k", nil); errors.Is(err, objectstore.ErrUnknown) {
		t.Errorf("nothing was sent, yet: %v", err)
	}
	wantClass(t, openAt(t, "s3://bucket?region=r&endpoint=http://host.invalid", someKeys), objectstore.ErrTransient, objectstore.ClassTransient)
}

// TestS3Stalls: an attempt on which nothing moves ends by itself, in every phase.
func TestS3Stalls(t *testing.T) {
	release := make(chan struct{})
	short := objectstore.Options{Credentials: someKeys, StallTimeout: 100 * time.Millisecond, ResponseHeaderTimeout: 100 * time.Millisecond}
	stall := func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			w.Header().Set("Content-Length", "100000")
			w.Write(make([]byte, 1000))
			w.(http.Flusher).Flush()
		}
		<-release
	}
	b := fakeWith(t, short, stall)
	t.Cleanup(func() { close(release) }) // before the server closes
	// The server reads nothing: the upload stalls in the middle.
	err := b.PutIfAbsent(t.Context(), "k", make([]byte, 32<<20))
	if !errors.Is(err, objectstore.ErrUnknown) || !strings.Contains(err.Error(), "for 100ms") {
		t.Errorf("upload: %v", err)
	}
	// All was sent, and no answer comes.
	if err := b.PutIfAbsent(t.Context(), "k", []byte("k")); !errors.Is(err, objectstore.ErrUnknown) {
		t.Errorf("answer: %v", err)
	}
	if _, err := b.Head(t.Context(), "k"); !errors.Is(err, objectstore.ErrTransient) {
		t.Errorf("head: %v", err)
	}
	// The answer's body stalls.
	if _, err := b.Get(t.Context(), "k", 1<<20); !errors.Is(err, objectstore.ErrTransient) || !strings.Contains(err.Error(), "for 100ms") {
		t.Errorf("download: %v", err)
	}
}

func TestS3EndsInFlight(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	b := fake(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		arrived <- struct{}{}
		<-release
	})
	t.Cleanup(func() { close(release) })
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-arrived; cancel() }()
	if err := b.PutIfAbsent(ctx, "k", nil); !errors.Is(err, objectstore.ErrUnknown) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled put: %v", err)
	}
	go func() { <-arrived; b.Close() }()
	if _, err := b.Get(t.Context(), "k", 10); !errors.Is(err, objectstore.ErrClosed) {
		t.Errorf("get while the bucket is closed: %v", err)
	}
}

func TestS3Ranges(t *testing.T) {
	const whole = "0123456789"
	var answer func(w http.ResponseWriter)
	b := fake(t, func(w http.ResponseWriter, r *http.Request) { answer(w) })
	partial := func(contentRange, body string) func(w http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Content-Range", contentRange)
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(206)
			io.WriteString(w, body)
		}
	}
	for _, c := range []struct {
		name   string
		answer func(w http.ResponseWriter)
		off    int64
		n      int
		want   string
		err    error
	}{
		{"right", partial("bytes 2-4/10", "234"), 2, 3, "234", nil},
		{"short at the end", partial("bytes 8-9/10", "89"), 8, 5, "89", nil},
		{"unknown total", partial("bytes 8-9/*", "89"), 8, 5, "89", nil},
		{"less than there is", partial("bytes 2-4/10", "234"), 2, 5, "", objectstore.ErrTransient},
		{"whole for whole", func(w http.ResponseWriter) { io.WriteString(w, whole) }, 0, 10, whole, nil},
		{"whole for a part", func(w http.ResponseWriter) { io.WriteString(w, whole) }, 0, 5, "", objectstore.ErrUnsupported},
		{"whole for another part", func(w http.ResponseWriter) { io.WriteString(w, whole) }, 2, 20, "", objectstore.ErrUnsupported},
		{"other range", partial("bytes 3-5/10", "345"), 2, 3, "", objectstore.ErrCorrupt},
		{"too much", partial("bytes 2-6/10", "23456"), 2, 3, "", objectstore.ErrCorrupt},
		{"backwards", partial("bytes 2-1/10", ""), 2, 3, "", objectstore.ErrCorrupt},
		{"length differs", partial("bytes 2-4/10", "23"), 2, 3, "", objectstore.ErrCorrupt},
		{"garbage", partial("parsecs 2-4", "234"), 2, 3, "", objectstore.ErrCorrupt},
		{"behind the end", func(w http.ResponseWriter) { xmlError(w, 416, "InvalidRange") }, 20, 3, "", nil},
		{"cut", func(w http.ResponseWriter) {
			w.Header().Set("Content-Range", "bytes 2-4/10")
			w.Header().Set("Content-Length", "3")
			w.WriteHeader(206)
			io.WriteString(w, "2")
			w.(http.Flusher).Flush()
			cut(w)
		}, 2, 3, "", objectstore.ErrTransient},
	} {
		answer = c.answer
		into := make([]byte, c.n)
		n, err := b.GetRange(t.Context(), "k", c.off, into)
		if !errors.Is(err, c.err) || string(into[:n]) != c.want {
			t.Errorf("%s: %q, %v", c.name, into[:n], err)
		}
	}
}

func TestS3List(t *testing.T) {
	page := func(truncated bool, token string, keys ...string) string {
		out := fmt.Sprintf("<ListBucketResult><IsTruncated>%v</IsTruncated><NextContinuationToken>%s</NextContinuationToken>", truncated, token)
		for _, k := range keys {
			out += "<Contents><Key>" + k + "</Key><Size>3</Size><LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
		}
		return out + "</ListBucketResult>"
	}
	for _, c := range []struct {
		name  string
		pages []string
		want  string
		err   error
	}{
		{"short pages are gathered", []string{page(true, "t1", "pre/a"), page(true, "t2"), page(true, "t3", "pre/b", "pre/c"), page(false, "", "pre/d")}, "[a b c d]", nil},
		{"no more than asked for", []string{page(false, "", "pre/a", "pre/b", "pre/c", "pre/d", "pre/e", "pre/f")}, "[a b c d e]", nil},
		{"foreign keys", []string{page(false, "", "pre/a", "pre/a//b", "pre/c/")}, "[a]", nil},
		{"backwards", []string{page(false, "", "pre/b", "pre/a")}, "[]", objectstore.ErrUnsupported},
		{"twice", []string{page(true, "t", "pre/a"), page(false, "", "pre/a")}, "[]", objectstore.ErrUnsupported},
		{"other prefix", []string{page(false, "", "prefix/a")}, "[]", objectstore.ErrUnsupported},
		{"no token", []string{page(true, "", "pre/a")}, "[]", objectstore.ErrUnsupported},
		{"garbage", []string{"<ListBucketResult><Conte"}, "[]", objectstore.ErrTransient},
	} {
		n := 0
		b := fake(t, func(w http.ResponseWriter, r *http.Request) {
			if q := r.URL.Query(); q.Get("prefix") != "pre/" || n > 0 && q.Get("continuation-token") == "" {
				t.Errorf("%s: request %s", c.name, r.URL)
			}
			io.WriteString(w, c.pages[n])
			n++
		})
		infos, err := b.List(t.Context(), "", "", 5)
		keys := []string{}
		for _, i := range infos {
			keys = append(keys, i.Key)
		}
		if !errors.Is(err, c.err) || fmt.Sprint(keys) != c.want {
			t.Errorf("%s: %v, %v", c.name, keys, err)
		}
	}
}

func TestS3DeleteFallsBack(t *testing.T) {
	for _, c := range []struct {
		name    string
		batch   http.HandlerFunc
		err     error
		batches int64 // requests for two calls of Delete
		singles int64
	}{
		{"not implemented", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 501, "NotImplemented") }, nil, 1, 6},
		{"wants another checksum", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 400, "InvalidRequest") }, nil, 2, 6},
		{"garbage", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<DeleteResult><Err") }, nil, 2, 6},
		{"fine", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "<DeleteResult></DeleteResult>") }, nil, 2, 0},
		{"one was missing", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "<DeleteResult><Error><Key>pre/b</Key><Code>NoSuchKey</Code></Error></DeleteResult>")
		}, nil, 2, 0},
		{"one is denied", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "<DeleteResult><Error><Key>pre/b</Key><Code>AccessDenied</Code></Error></DeleteResult>")
		}, objectstore.ErrDenied, 2, 0},
		{"one failed", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "<DeleteResult><Error><Key>pre/b</Key><Code>InternalError</Code></Error></DeleteResult>")
		}, objectstore.ErrTransient, 2, 0},
		{"denied", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 403, "AccessDenied") }, objectstore.ErrDenied, 2, 0},
		{"no bucket", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 404, "NoSuchBucket") }, objectstore.ErrNoBucket, 2, 0},
		{"down", func(w http.ResponseWriter, r *http.Request) { xmlError(w, 503, "SlowDown") }, objectstore.ErrTransient, 2, 0},
	} {
		var batches, singles atomic.Int64
		b := fake(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost && r.URL.Query().Has("delete") {
				batches.Add(1)
				c.batch(w, r)
				return
			}
			if r.Method != http.MethodDelete {
				t.Errorf("%s: %s %s", c.name, r.Method, r.URL)
			}
			if singles.Add(1)%2 == 0 {
				xmlError(w, 404, "NoSuchKey")
				return
			}
			w.WriteHeader(http.StatusNoContent)
		})
		for range 2 {
			if err := b.Delete(t.Context(), "a", "b", "c"); !errors.Is(err, c.err) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if batches.Load() != c.batches || singles.Load() != c.singles {
			t.Errorf("%s: %d batches and %d single deletes, want %d and %d", c.name, batches.Load(), singles.Load(), c.batches, c.singles)
		}
	}
}

// TestS3ClockSkew: the store's clock is an hour ahead. The first request is refused, the
// retry is signed with the store's time.
func TestS3ClockSkew(t *testing.T) {
	ahead := func() time.Time { return time.Now().Add(time.Hour).UTC() }
	var refused atomic.Int64
	b := fake(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", ahead().Format(http.TimeFormat))
		signed, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
		if err != nil || ahead().Sub(signed).Abs() > 15*time.Minute {
			refused.Add(1)
			xmlError(w, 403, "RequestTimeTooSkewed")
		}
	})
	err := b.PutIfAbsent(t.Context(), "k", nil)
	if !errors.Is(err, objectstore.ErrClockSkew) || objectstore.Classify(err) != objectstore.ClassClockSkew {
		t.Errorf("first: %v", err)
	}
	if err := b.PutIfAbsent(t.Context(), "k", nil); err != nil {
		t.Errorf("second: %v", err)
	}
	if refused.Load() != 1 {
		t.Errorf("%d requests refused", refused.Load())
	}
}

// cleanAWS hides what the machine says about AWS.
func cleanAWS(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", filepath.Join(t.TempDir(), "none"))
	t.Setenv("AWS_CONFIG_FILE", filepath.Join(t.TempDir(), "none"))
}

func TestS3CredentialChain(t *testing.T) {
	cleanAWS(t)
	var mu sync.Mutex
	var auth string
	handler := func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		auth = r.Header.Get("Authorization")
	}
	put := func() error { return fakeWith(t, objectstore.Options{}, handler).PutIfAbsent(t.Context(), "k", nil) }

	if err := put(); !errors.Is(err, objectstore.ErrDenied) || errors.Is(err, objectstore.ErrUnknown) || auth != "" {
		t.Errorf("no credentials: sent %q: %v", auth, err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "AKENVIRONMENT")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "SK")
	if err := put(); err != nil || !strings.Contains(auth, "Credential=AKENVIRONMENT/") {
		t.Errorf("environment: sent %q: %v", auth, err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")

	config := filepath.Join(t.TempDir(), "config")
	profile := func(process string) {
		if err := os.WriteFile(config, []byte("[profile gateway]\ncredential_process = "+process+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("AWS_CONFIG_FILE", config)
	t.Setenv("AWS_PROFILE", "gateway")
	keys := filepath.Join(t.TempDir(), "keys")
	profile("cat " + keys + " 2>/dev/null")
	if err := put(); !errors.Is(err, objectstore.ErrDenied) || errors.Is(err, objectstore.ErrUnknown) {
		t.Errorf("failing process: %v", err)
	}
	text := `{"Version":1,"AccessKeyId":"AKPROCESS","SecretAccessKey":"SK","Expiration":"` + time.Now().Add(time.Hour).UTC().Format(time.RFC3339) + `"}`
	if err := os.WriteFile(keys, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := put(); err != nil || !strings.Contains(auth, "Credential=AKPROCESS/") {
		t.Errorf("process: sent %q: %v", auth, err)
	}
	os.WriteFile(config, []byte("[profile"), 0o600)
	if _, err := objectstore.Open(t.Context(), "s3://bucket?region=r", objectstore.Options{}); !errors.Is(err, objectstore.ErrInvalid) {
		t.Errorf("broken configuration file: %v", err)
	}
}

// TestS3EndpointFromEnvironment: the SDK's own variable works as endpoint= does.
func TestS3EndpointFromEnvironment(t *testing.T) {
	cleanAWS(t)
	var path atomic.Value
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { path.Store(r.URL.Path) }))
	defer server.Close()
	t.Setenv("AWS_ENDPOINT_URL_S3", server.URL)
	if err := openAt(t, "s3://bucket/pre", someKeys).PutIfAbsent(t.Context(), "k", []byte("k")); err != nil || path.Load() != "/bucket/pre/k" {
		t.Errorf("path %v: %v", path.Load(), err)
	}
}

func TestS3PrivateAuthority(t *testing.T) {
	cleanAWS(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 {
			t.Errorf("protocol %s", r.Proto)
		}
		if got := r.Header.Get("X-Amz-Content-Sha256"); r.Method == http.MethodPut && got != "UNSIGNED-PAYLOAD" {
			t.Errorf("payload hash %q", got)
		}
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // the refused handshake
	server.StartTLS()
	defer server.Close()
	err := openAt(t, fakeURL(server), someKeys).PutIfAbsent(t.Context(), "k", nil)
	if objectstore.Classify(err) != objectstore.ClassTransient || !strings.Contains(objectstore.Advice(err), "AWS_CA_BUNDLE") {
		t.Errorf("unknown authority: %v; advice %q", err, objectstore.Advice(err))
	}
	bundle := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(bundle, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_CA_BUNDLE", bundle)
	if err := openAt(t, fakeURL(server), someKeys).PutIfAbsent(t.Context(), "k", nil); err != nil {
		t.Errorf("with AWS_CA_BUNDLE: %v", err)
	}
	t.Setenv("AWS_CA_BUNDLE", filepath.Join(t.TempDir(), "missing"))
	if _, err := objectstore.Open(t.Context(), fakeURL(server), objectstore.Options{}); !errors.Is(err, objectstore.ErrInvalid) {
		t.Errorf("missing bundle: %v", err)
	}
}
