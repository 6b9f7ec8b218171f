package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxBody bounds a request, in bytes, and bodyTimeout the time in which it has to arrive.
const (
	maxBody     = 64 << 10
	bodyTimeout = 30 * time.Second
)

// Options of a Handler.
type Options struct {
	Service Service
	Metrics http.Handler // served under /metrics; nil: not at all
	// Token, if not empty, must be presented as a bearer token with each request.
	Token  string
	Logger *slog.Logger
}

// Handler serves the API and the metrics.
func Handler(o Options) http.Handler {
	s := &server{service: o.Service, log: o.Logger}
	mux := http.NewServeMux()
	handle := func(pattern string, f func(r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, f) })
	}
	handle("GET /v1/status", func(r *http.Request) (any, error) { return s.service.Status(r.Context()) })
	handle("GET /v1/volumes", func(r *http.Request) (any, error) { return s.service.Volumes(r.Context()) })
	handle("POST /v1/volumes", func(r *http.Request) (any, error) { return decoded(r, s.service.CreateVolume) })
	handle("GET /v1/volumes/{name}", func(r *http.Request) (any, error) {
		return s.service.Volume(r.Context(), r.PathValue("name"))
	})
	handle("PATCH /v1/volumes/{name}", func(r *http.Request) (any, error) {
		return named(r, "name", s.service.ChangeVolume)
	})
	handle("DELETE /v1/volumes/{name}", func(r *http.Request) (any, error) {
		return named(r, "name", func(ctx context.Context, name string, d DeleteVolume) (struct{}, error) {
			return struct{}{}, s.service.DeleteVolume(ctx, name, d)
		})
	})
	handle("POST /v1/volumes/{name}/wait", func(r *http.Request) (any, error) {
		return named(r, "name", s.service.WaitVolume)
	})
	handle("POST /v1/restore", func(r *http.Request) (any, error) { return decoded(r, s.service.RestoreVolume) })
	handle("GET /v1/targets", func(r *http.Request) (any, error) { return s.service.Targets(r.Context()) })
	handle("POST /v1/targets", func(r *http.Request) (any, error) { return decoded(r, s.service.CreateTarget) })
	handle("DELETE /v1/targets/{target}", func(r *http.Request) (any, error) {
		return struct{}{}, s.service.DeleteTarget(r.Context(), r.PathValue("target"))
	})
	handle("POST /v1/targets/{target}/luns", func(r *http.Request) (any, error) { return named(r, "target", s.service.MapLUN) })
	handle("DELETE /v1/targets/{target}/luns/{lun}", func(r *http.Request) (any, error) {
		lun, err := strconv.ParseUint(r.PathValue("lun"), 10, 16)
		if err != nil {
			return nil, Errorf(CodeInvalid, "%q is no logical unit number", r.PathValue("lun"))
		}
		return struct{}{}, s.service.UnmapLUN(r.Context(), r.PathValue("target"), uint16(lun))
	})
	handle("POST /v1/targets/{target}/acls", func(r *http.Request) (any, error) { return named(r, "target", s.service.AddACL) })
	handle("DELETE /v1/targets/{target}/acls/{initiator}", func(r *http.Request) (any, error) {
		return struct{}{}, s.service.RemoveACL(r.Context(), r.PathValue("target"), r.PathValue("initiator"))
	})
	handle("GET /v1/sessions", func(r *http.Request) (any, error) { return s.service.Sessions(r.Context()) })
	handle("POST /v1/drain", func(r *http.Request) (any, error) { return struct{}{}, s.service.Drain(r.Context()) })
	handle("/", func(r *http.Request) (any, error) {
		return nil, Errorf(CodeNotFound, "no such call: %s %s", r.Method, r.URL.Path)
	})
	if o.Metrics != nil {
		mux.Handle("GET /metrics", o.Metrics)
	}
	if o.Token == "" {
		return mux
	}
	want := sha256.Sum256([]byte(o.Token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(token))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			s.fail(w, r, Errorf(CodeDenied, "the token is missing or wrong: set ISERGATE_TOKEN or --token-file"))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

type server struct {
	service Service
	log     *slog.Logger
}

func (s *server) serve(w http.ResponseWriter, r *http.Request, f func(r *http.Request) (any, error)) {
	result, err := any(nil), s.receive(w, r)
	if err == nil {
		result, err = f(r)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if r.Method != http.MethodGet {
		s.log.Info("admin request", "method", r.Method, "path", r.URL.Path)
	}
	write(w, http.StatusOK, result)
}

// receive reads the body, within a time that does not bound the call itself: a deadline
// that stays on the connection would end a long wait.
func (s *server) receive(w http.ResponseWriter, r *http.Request) error {
	control := http.NewResponseController(w)
	timed := control.SetReadDeadline(time.Now().Add(bodyTimeout)) == nil // a recorder of a test has none
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if timed && err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return Errorf(CodeInvalid, "the request is larger than %d bytes", maxBody)
	case err != nil:
		return Errorf(CodeInvalid, "the request did not arrive: %w", err)
	}
	return nil
}

func (s *server) fail(w http.ResponseWriter, r *http.Request, err error) {
	var e *Error
	switch {
	case errors.As(err, &e):
	case errors.Is(err, context.Canceled):
		e = Errorf(CodeUnavailable, "the request was given up")
	default:
		e = Errorf(CodeInternal, "%w", err)
	}
	level := slog.LevelInfo
	if e.Code == CodeInternal {
		level = slog.LevelError
	}
	s.log.Log(r.Context(), level, "admin request failed", "method", r.Method, "path", r.URL.Path, "code", string(e.Code), "err", err)
	write(w, httpStatus[e.Code], struct {
		Error *Error `json:"error"`
	}{&Error{Code: e.Code, Text: err.Error()}})
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(body) // the peer has gone
}

// decode reads a request body strictly. An empty body is the zero value.
func decode(r *http.Request, into any) error {
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil {
		if _, after := decoder.Token(); !errors.Is(after, io.EOF) {
			err = errors.New("text after the document")
		}
	}
	if err != nil {
		return Errorf(CodeInvalid, "the request is not what this call takes: %w", err)
	}
	return nil
}

func decoded[Request, Result any](r *http.Request, f func(context.Context, Request) (Result, error)) (any, error) {
	var request Request
	if err := decode(r, &request); err != nil {
		return nil, err
	}
	return f(r.Context(), request)
}

func named[Request, Result any](r *http.Request, key string, f func(context.Context, string, Request) (Result, error)) (any, error) {
	return decoded(r, func(ctx context.Context, request Request) (Result, error) {
		return f(ctx, r.PathValue(key), request)
	})
}

// NewHTTPServer returns a server with time limits for the slow and the silent. A
// response may take as long as the call does.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}
