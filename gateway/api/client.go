package api

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	pathpkg "path"
	"strconv"
	"strings"
	"syscall"
)

// maxResponse bounds an answer, in bytes.
const maxResponse = 64 << 20

// Client is a Service at another process.
type Client struct {
	address string // as given, for messages
	base    string
	token   string
	http    *http.Client
}

var _ Service = (*Client)(nil)

// ClientOptions say how a Client connects.
type ClientOptions struct {
	Token  string // bearer token for https
	CAFile string // certificates to trust for https, PEM; empty: the system's
}

// NewClient returns a client for unix:PATH or https://HOST:PORT. It does not connect.
func NewClient(address string, o ClientOptions) (*Client, error) {
	c := &Client{address: address, token: o.Token}
	if path, ok := strings.CutPrefix(address, "unix:"); ok && path != "" {
		c.base = "http://node"
		c.http = &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", path)
			},
		}}
		return c, nil
	}
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
		return nil, Errorf(CodeInvalid, "%q is no API address: use unix:PATH or https://HOST:PORT", address)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.CAFile != "" {
		text, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, Errorf(CodeInvalid, "certificates to trust: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, Errorf(CodeInvalid, "%s holds no certificate in PEM form", o.CAFile)
		}
	}
	c.base = "https://" + u.Host
	c.http = &http.Client{Transport: &http.Transport{TLSClientConfig: config, Proxy: http.ProxyFromEnvironment}}
	return c, nil
}

// Unreachable reports whether err means that no node answered at the address.
func Unreachable(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}

func call[Result any](ctx context.Context, c *Client, method, path string, request any) (Result, error) {
	var result Result
	if path != pathpkg.Clean(path) { // a server would take it for another call
		return result, Errorf(CodeInvalid, "a name may not be empty, \".\" or \"..\"")
	}
	var body io.Reader
	if request != nil {
		text, err := json.Marshal(request)
		if err != nil {
			return result, Errorf(CodeInvalid, "%w", err)
		}
		body = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return result, Errorf(CodeInvalid, "%w", err)
	}
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := c.http.Do(r)
	if err != nil {
		return result, c.unreached(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxResponse))
	if err != nil {
		return result, Errorf(CodeUnavailable, "the connection to %s broke; whether the request took effect is not known: %w", c.address, err)
	}
	if response.StatusCode != http.StatusOK {
		var failed struct {
			Error *Error `json:"error"`
		}
		if err := json.Unmarshal(text, &failed); err != nil || failed.Error == nil {
			return result, Errorf(CodeInternal, "%s answered %s: it does not look like isergate", c.address, response.Status)
		}
		return result, failed.Error
	}
	if err := json.Unmarshal(text, &result); err != nil {
		return result, Errorf(CodeInternal, "%s answered what this program does not understand: %w", c.address, err)
	}
	return result, nil
}

func (c *Client) unreached(err error) error {
	var inner *url.Error
	if errors.As(err, &inner) {
		err = inner.Err
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case Unreachable(err):
		return Errorf(CodeUnavailable, "no gateway answers at %s: start one with \"isergate serve\", or name its socket with --api unix:PATH (%w)", c.address, err)
	case errors.Is(err, fs.ErrPermission):
		return Errorf(CodeDenied, "%s: permission denied: run as the user that runs the gateway (%w)", c.address, err)
	}
	return Errorf(CodeUnavailable, "%s: %w", c.address, err)
}

func volumePath(name string) string    { return "/v1/volumes/" + url.PathEscape(name) }
func targetPath(name string) string    { return "/v1/targets/" + url.PathEscape(name) }
func only[T any](_ T, err error) error { return err }

// Status implements Service.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return call[Status](ctx, c, http.MethodGet, "/v1/status", nil)
}

// Volumes implements Service.
func (c *Client) Volumes(ctx context.Context) ([]Volume, error) {
	return call[[]Volume](ctx, c, http.MethodGet, "/v1/volumes", nil)
}

// Volume implements Service.
func (c *Client) Volume(ctx context.Context, name string) (Volume, error) {
	return call[Volume](ctx, c, http.MethodGet, volumePath(name), nil)
}

// CreateVolume implements Service.
func (c *Client) CreateVolume(ctx context.Context, r CreateVolume) (Volume, error) {
	return call[Volume](ctx, c, http.MethodPost, "/v1/volumes", r)
}

// ChangeVolume implements Service.
func (c *Client) ChangeVolume(ctx context.Context, name string, r ChangeVolume) (Volume, error) {
	return call[Volume](ctx, c, http.MethodPatch, volumePath(name), r)
}

// DeleteVolume implements Service.
func (c *Client) DeleteVolume(ctx context.Context, name string, r DeleteVolume) error {
	return only(call[struct{}](ctx, c, http.MethodDelete, volumePath(name), r))
}

// WaitVolume implements Service.
func (c *Client) WaitVolume(ctx context.Context, name string, r WaitVolume) (Volume, error) {
	return call[Volume](ctx, c, http.MethodPost, volumePath(name)+"/wait", r)
}

// RestoreVolume implements Service.
func (c *Client) RestoreVolume(ctx context.Context, r RestoreVolume) (Restored, error) {
	return call[Restored](ctx, c, http.MethodPost, "/v1/restore", r)
}

// Targets implements Service.
func (c *Client) Targets(ctx context.Context) ([]Target, error) {
	return call[[]Target](ctx, c, http.MethodGet, "/v1/targets", nil)
}

// CreateTarget implements Service.
func (c *Client) CreateTarget(ctx context.Context, r CreateTarget) (Target, error) {
	return call[Target](ctx, c, http.MethodPost, "/v1/targets", r)
}

// DeleteTarget implements Service.
func (c *Client) DeleteTarget(ctx context.Context, target string) error {
	return only(call[struct{}](ctx, c, http.MethodDelete, targetPath(target), nil))
}

// MapLUN implements Service.
func (c *Client) MapLUN(ctx context.Context, target string, r MapLUN) (LUN, error) {
	return call[LUN](ctx, c, http.MethodPost, targetPath(target)+"/luns", r)
}

// UnmapLUN implements Service.
func (c *Client) UnmapLUN(ctx context.Context, target string, number uint16) error {
	return only(call[struct{}](ctx, c, http.MethodDelete, targetPath(target)+"/luns/"+strconv.Itoa(int(number)), nil))
}

// AddACL implements Service.
func (c *Client) AddACL(ctx context.Context, target string, r AddACL) (ACL, error) {
	return call[ACL](ctx, c, http.MethodPost, targetPath(target)+"/acls", r)
}

// RemoveACL implements Service.
func (c *Client) RemoveACL(ctx context.Context, target, initiator string) error {
	return only(call[struct{}](ctx, c, http.MethodDelete, targetPath(target)+"/acls/"+url.PathEscape(initiator), nil))
}

// Sessions implements Service.
func (c *Client) Sessions(ctx context.Context) ([]Session, error) {
	return call[[]Session](ctx, c, http.MethodGet, "/v1/sessions", nil)
}

// Drain implements Service.
func (c *Client) Drain(ctx context.Context) error {
	return only(call[struct{}](ctx, c, http.MethodPost, "/v1/drain", nil))
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// String returns the address as it was given.
func (c *Client) String() string { return fmt.Sprintf("api at %s", c.address) }
