package objectstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Options of Open. The zero value means the defaults.
type Options struct {
	// Logger gets what is worth a person's look; nil means slog.Default().
	Logger *slog.Logger

	// SingleWriter says that nobody else ever writes below this prefix. PutIfAbsent on
	// s3 then looks for the key and writes without a condition, which works on
	// stores without conditional writes and protects against nobody. Probe first without
	// it.
	SingleWriter bool

	// Credentials replaces the standard AWS chain when not nil.
	Credentials *Credentials

	// Connections is the number of idle connections kept to an s3 endpoint: at least the
	// number of requests in parallel, or each burst dials anew. Default 128.
	Connections int
	// ResponseHeaderTimeout bounds the wait for an answer once an s3 request was
	// sent whole. Default 60 s.
	ResponseHeaderTimeout time.Duration
	// StallTimeout aborts an attempt when less than 4 KiB/s of an s3 request or response body
	// moved for so long. Default 30 s.
	StallTimeout time.Duration
}

// Credentials are static keys for an s3 store.
type Credentials struct {
	AccessKeyID     string
	SecretAccessKey string
	SessionToken    string // optional
}

// EnsureDefaults fills in what is zero.
func (o *Options) EnsureDefaults() {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Connections == 0 {
		o.Connections = 128
	}
	if o.ResponseHeaderTimeout == 0 {
		o.ResponseHeaderTimeout = 60 * time.Second
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = 30 * time.Second
	}
}

// Validate reports every fault at once; the error Is ErrInvalid.
func (o *Options) Validate() error {
	var faults []error
	if o.Connections < 0 {
		faults = append(faults, fmt.Errorf("connections is %d, below 0", o.Connections))
	}
	if o.ResponseHeaderTimeout < 0 {
		faults = append(faults, fmt.Errorf("response header timeout is %v, below 0", o.ResponseHeaderTimeout))
	}
	if o.StallTimeout < 0 {
		faults = append(faults, fmt.Errorf("stall timeout is %v, below 0", o.StallTimeout))
	}
	if c := o.Credentials; c != nil && (c.AccessKeyID == "" || c.SecretAccessKey == "") {
		faults = append(faults, errors.New("credentials need an access key and a secret key"))
	}
	if len(faults) > 0 {
		return fmt.Errorf("%w: options: %w", ErrInvalid, joinFaults(faults))
	}
	return nil
}

// Open returns the bucket that url names:
//
//	s3://bucket/prefix?endpoint=https://host:port&region=name&path_style=true
//	file:///absolute/directory
//	mem:
//
// A directory is created if it is missing, and is refused if it holds something else. An
// s3 store is not contacted: whether it is there, lets us in, and keeps two writers
// apart is what Probe finds out. An error names every fault of url and o at once.
//
// The bucket does not retry; wrap it (WithRetry, WithLimit, WithMetrics).
func Open(ctx context.Context, url string, o Options) (Bucket, error) {
	o.EnsureDefaults()
	loc, err := ParseURL(url)
	if err := errors.Join(err, o.Validate()); err != nil {
		return nil, err
	}
	switch loc.Scheme {
	case "file":
		return OpenDir(loc.Dir)
	case "mem":
		return NewMem(), nil
	}
	return openS3(ctx, loc, o)
}
