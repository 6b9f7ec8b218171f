package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/isergate/isergate/gateway/api"
	"github.com/isergate/isergate/gateway/config"
)

// minToken is the least length of the API's token, in bytes.
const minToken = 16

// servers are the HTTP servers of a node: the API on its socket, the API on TCP, and
// the metrics.
type servers struct {
	running sync.WaitGroup
	list    []*http.Server
	cancel  context.CancelFunc // ends the calls under way
	socket  string
}

func metricsHandler(registry *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

// tcpAPI is what the API on TCP is served with.
type tcpAPI struct {
	token string
	cert  tls.Certificate
}

// readTCP reads the files of the API on TCP, if it is asked for, and reports all that is wrong with them.
func readTCP(c config.API) (tcpAPI, error) {
	if c.Listen == "" {
		return tcpAPI{}, nil
	}
	token, tokenErr := readToken(c.TokenFile)
	cert, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
	if err != nil {
		err = fmt.Errorf("api.tls_cert and api.tls_key: %w", err)
	}
	return tcpAPI{token, cert}, errors.Join(err, tokenErr)
}

// startServers serves what the configuration asks for.
func startServers(n *Node, secured tcpAPI) (_ *servers, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &servers{cancel: cancel, socket: n.cfg.API.Socket}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	options := api.Options{Service: n, Metrics: n.Metrics(), Logger: n.log}
	start := func(listener net.Listener, handler http.Handler) {
		server := api.NewHTTPServer(handler, n.log)
		server.BaseContext = func(net.Listener) context.Context { return ctx }
		s.list = append(s.list, server)
		s.running.Go(func() {
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				n.log.Error("a listener failed", "address", listener.Addr().String(), "err", err)
			}
		})
	}

	listener, err := listenSocket(s.socket)
	if err != nil {
		return nil, err
	}
	start(listener, api.Handler(options))

	if n.cfg.API.Listen != "" {
		options.Token = secured.token
		listener, err := net.Listen("tcp", n.cfg.API.Listen)
		if err != nil {
			return nil, fmt.Errorf("api.listen: %w", err)
		}
		start(tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{secured.cert}, MinVersion: tls.VersionTLS12}), api.Handler(options))
		n.log.Info("API on TCP", "address", listener.Addr().String())
	}
	if n.cfg.Metrics.Listen != "" {
		listener, err := net.Listen("tcp", n.cfg.Metrics.Listen)
		if err != nil {
			return nil, fmt.Errorf("metrics.listen: %w", err)
		}
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", n.Metrics())
		start(listener, mux)
		n.log.Info("metrics", "address", listener.Addr().String())
	}
	if n.cfg.Debug.Pprof != "" {
		listener, err := net.Listen("tcp", n.cfg.Debug.Pprof)
		if err != nil {
			return nil, fmt.Errorf("debug.pprof: %w", err)
		}
		start(listener, pprofHandler())
		n.log.Info("profiles", "address", listener.Addr().String())
	}
	return s, nil
}

// pprofHandler serves what "go tool pprof" asks for.
func pprofHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// close ends the calls under way, and the servers.
func (s *servers) close() error {
	s.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var errs []error
	for _, server := range s.list {
		if err := server.Shutdown(ctx); err != nil {
			errs = append(errs, server.Close())
		}
	}
	s.running.Wait()
	return errors.Join(errs...)
}

// listenSocket listens on a unix socket that only this user can use. One that is left from a
// process that is gone is replaced.
func listenSocket(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("API socket %s is in use by another process: stop it, or set api.socket", path)
	} else if errors.Is(err, unix.ECONNREFUSED) {
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("API socket %s: there is something else at this path: remove it, or set api.socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("API socket: %w", err)
		}
	}
	old := unix.Umask(0o177)
	listener, err := net.Listen("unix", path)
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	return listener, nil
}

// readToken reads the token from a file that nobody else may read.
func readToken(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("api.token_file: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("api.token_file: others may read %s: chmod 600 %s", path, path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("api.token_file: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if len(token) < minToken {
		return "", fmt.Errorf("api.token_file: %s holds less than %d bytes: put in a long random token", path, minToken)
	}
	return token, nil
}
