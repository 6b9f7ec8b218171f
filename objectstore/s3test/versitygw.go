package s3test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
)

// versitygwFile is the name of the binary in the cache; .ci/install builds it.
const versitygwFile = "versitygw-1.8.0"

func versitygwBinary() (string, error) {
	if path := os.Getenv(EnvVersitygw); path != "" {
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("%w: versitygw, as %s says: %w", ErrNotInstalled, EnvVersitygw, err)
		}
		return path, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("%w: versitygw: %w", ErrNotInstalled, err)
	}
	path := filepath.Join(cache, "isergate", versitygwFile)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%w: versitygw (run .ci/install): %w", ErrNotInstalled, err)
	}
	return path, nil
}

func (s *Server) startVersitygw(ctx context.Context) error {
	binary, err := versitygwBinary()
	if err != nil {
		return err
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	s.Endpoint = "http://" + addr
	if err := os.Mkdir(s.path("data"), 0o700); err != nil {
		return err
	}
	s.ready = func(ctx context.Context) error { return answers(ctx, s.Endpoint+"/healthz") }
	s.front, err = startProcess(spec{
		log:  s.path("log"),
		env:  []string{"ROOT_ACCESS_KEY=" + s.AccessKey, "ROOT_SECRET_KEY=" + s.SecretKey},
		argv: []string{binary, "--port", addr, "--region", s.Region, "--health", "/healthz", "--keep-alive", "--quiet", "posix", s.path("data")},
	})
	if err != nil {
		return err
	}
	return s.waitReady(ctx)
}

// answers reports whether url answers with 200.
func answers(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}
