package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/isergate/isergate/iser/initiator/bench"
	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/s3test"
)

const (
	bucketName    = "bench"
	gatewayPrefix = "isergate"
	rawPrefix     = "raw"
	storeVolume   = "home"
	heldVolume    = "held"
)

// store measures the way to an S3 server and back: a gateway whose bucket is there, and the same objects put and
// got without a gateway.
type store struct {
	h       *harness
	server  *s3test.Server
	gateway *gateway
	volume  *target
	held    *target         // measured while the server is held; settles when it is let go
	seen    map[string]bool // the keys of objects that newObjects has returned
}

// wanted reports whether destaging and cold reads are to be measured: both or none, one needs the other.
func (s *store) wanted() bool {
	return s.h.cases.MatchString(ID{Class: classDestage}.String()) || s.h.cases.MatchString(ID{Class: classCold}.String())
}

// newStore starts the server and a gateway. It returns nil when the server is not installed.
func (h *harness) newStore(ctx context.Context) (_ *store, err error) {
	// The server keeps its data below TMPDIR: it belongs on the same file system as everything else.
	if err := os.Setenv("TMPDIR", h.dir); err != nil {
		return nil, err
	}
	server, err := s3test.Start(ctx, s3test.Versitygw)
	if errors.Is(err, s3test.ErrNotInstalled) {
		h.report.Notes = append(h.report.Notes, fmt.Sprintf("Destaging and cold reads are not measured: %v.", err))
		h.say("%v", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	h.report.Machine.Store = "versitygw 1.8.0"
	s := &store{h: h, server: server, seen: map[string]bool{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if err := server.CreateBucket(ctx, bucketName); err != nil {
		return nil, err
	}
	// The journal must hold what is written while the server is held.
	journal := max(2*h.o.Destage, h.o.Journal)
	if s.gateway, err = h.newGateway(ctx, "isergate-s3", server.URL(bucketName, gatewayPrefix), journal, "", server.Env()); err != nil {
		return nil, err
	}
	if s.volume, err = s.gateway.create(ctx, storeVolume, h.o.Destage, "local", journal*3/4); err != nil {
		return nil, err
	}
	if s.held, err = s.gateway.create(ctx, heldVolume, h.o.Size, "local", journal*3/4); err != nil {
		return nil, err
	}
	// The first write makes the gateway attach the volume to its bucket.
	for _, t := range []*target{s.volume, s.held} {
		if err := h.pass(ctx, t, bench.Write, fillBlock); err != nil {
			return nil, err
		}
		if err := t.settle(ctx); err != nil {
			return nil, err
		}
	}
	// Writers would wait for ever when the journal is full, which also holds a header for each batch.
	s.held.most = journal / 3
	drained := s.held.settle
	s.held.settle = func(ctx context.Context) error { return errors.Join(server.Resume(), drained(ctx)) }
	return s, s.gateway.prepared(ctx)
}

func (s *store) close() { s.server.Stop() }

// round measures durable writes while nothing is destaged; destages once and puts the same objects without a gateway; and
// reads them back both ways.
func (s *store) round(ctx context.Context, round int) error {
	for _, l := range loads() {
		id := ID{Load: l.name, Depth: l.depth, Class: classHeld, Target: ours}
		if !l.writes() || !s.h.cases.MatchString(id.String()) {
			continue
		}
		if err := s.server.Suspend(); err != nil {
			return err
		}
		sample, err := s.h.measure(ctx, s.held, l, classHeld, round)
		if err != nil {
			return err
		}
		sample.CPUPerOpSettled = 0
		s.h.record(round, id, sample)
	}
	if !s.wanted() {
		return nil
	}
	if _, err := s.newObjects(ctx); err != nil { // those of above
		return err
	}
	objects, err := s.destage(ctx, round)
	if err != nil {
		return err
	}
	if err := s.putRaw(ctx, round, objects); err != nil {
		return err
	}
	return s.cold(ctx, round, objects)
}

func (s *store) open(ctx context.Context, prefix string) (objectstore.Bucket, error) {
	return objectstore.Open(ctx, s.server.URL(bucketName, prefix), objectstore.Options{Credentials: s.server.Credentials()})
}

// destage writes to the volume while the server is held, lets the server go, and measures from when as many objects are in the
// bucket as may be under way at once to the end. It returns the objects of the round.
func (s *store) destage(ctx context.Context, round int) ([]object, error) {
	h := s.h
	if err := s.server.Suspend(); err != nil {
		return nil, err
	}
	err := h.pass(ctx, s.volume, bench.Write, h.o.Destage)
	if err := errors.Join(err, s.server.Resume()); err != nil {
		return nil, err
	}
	var waiting sync.WaitGroup
	var waitErr, profileErr error
	done := make(chan struct{})
	waiting.Go(func() {
		defer close(done)
		waitErr = s.volume.settle(ctx)
	})
	if round == 0 {
		waiting.Go(func() { profileErr = s.gateway.profile(ctx, classDestage, time.Second) })
	}
	id := ID{Load: fmt.Sprintf("%d MiB in objects of %d MiB", h.o.Destage>>20, objectBytes>>20), Depth: destageParallel, Class: classDestage, Target: ours}
	sample, err := s.watch(ctx, done)
	waiting.Wait()
	if err := errors.Join(err, waitErr, profileErr); err != nil {
		return nil, err
	}
	h.record(round, id, sample)
	objects, err := s.newObjects(ctx)
	if err == nil && len(objects) < 2*destageParallel {
		err = fmt.Errorf("destaging made %d objects, too few to compare", len(objects))
	}
	return objects, err
}

// watch follows what the volume has in the bucket until done is closed.
func (s *store) watch(ctx context.Context, done <-chan struct{}) (Sample, error) {
	first, err := s.gateway.client.Volume(ctx, storeVolume)
	if err != nil {
		return Sample{}, err
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for now := first; now.ObjectBytes < first.ObjectBytes+destageParallel*objectBytes; {
		select {
		case <-tick.C:
		case <-done:
			return Sample{}, errors.New("destaging ended before it could be measured: write more")
		case <-ctx.Done():
			return Sample{}, ctx.Err()
		}
		if now, err = s.gateway.client.Volume(ctx, storeVolume); err != nil {
			return Sample{}, err
		}
	}
	// The volume tells what is there without a gap, the metrics also what has overtaken.
	reading := func() (at time.Time, used time.Duration, bytes int64, err error) {
		at = time.Now()
		bytes, bytesErr := s.gateway.putBytes(ctx)
		used, err = s.volume.cpu()
		return at, used, bytes, errors.Join(bytesErr, err)
	}
	begin, cpuBefore, bytesBefore, err := reading()
	if err != nil {
		return Sample{}, err
	}
	<-done
	end, cpuAfter, bytesAfter, err := reading()
	if err != nil {
		return Sample{}, err
	}
	bytes := bytesAfter - bytesBefore
	return rawSample(rawResult{Operations: uint64((bytes + objectBytes - 1) / objectBytes), Bytes: uint64(bytes),
		Elapsed: end.Sub(begin), CPU: cpuAfter - cpuBefore}), nil
}

// newObjects lists the objects of the volumes' logs that came since the last call, but not those without data.
func (s *store) newObjects(ctx context.Context) ([]object, error) {
	b, err := s.open(ctx, gatewayPrefix)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	var out []object
	for after := ""; ; {
		page, err := b.List(ctx, "volumes/", after, 1000)
		if err != nil {
			return nil, err
		}
		for _, o := range page {
			after = o.Key
			if strings.Contains(o.Key, "/log/") && o.Size > frameBytes && !s.seen[o.Key] {
				s.seen[o.Key] = true
				out = append(out, object{o.Key, o.Size})
			}
		}
		if len(page) < 1000 {
			break
		}
	}
	return out, nil
}

// putRaw puts objects of the same sizes.
func (s *store) putRaw(ctx context.Context, round int, objects []object) (err error) {
	t := task{Kind: "put", Depth: destageParallel, URL: s.server.URL(bucketName, rawPrefix)}
	keys := make([]string, len(objects))
	for i, o := range objects {
		keys[i] = fmt.Sprintf("%d/%06d", round, i)
		t.Objects = append(t.Objects, object{keys[i], o.Size})
	}
	r, err := s.h.rawLimit(ctx, t, s.server.Env())
	if err != nil {
		return err
	}
	s.h.record(round, ID{Load: fmt.Sprintf("%d MiB in objects of %d MiB", s.h.o.Destage>>20, objectBytes>>20), Depth: destageParallel,
		Class: classDestage, Target: rawPut}, rawSample(r))
	b, err := s.open(ctx, rawPrefix)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := b.Delete(ctx, keys...); err != nil {
		return err
	}
	return syncFS(s.h.dir)
}

// cold reads the volume after restarts that leave the read cache empty, and ranges of its objects without a gateway.
func (s *store) cold(ctx context.Context, round int, objects []object) error {
	h := s.h
	sequential := ID{Load: "256 KiB sequential read", Depth: coldDepth, Class: classCold, Target: ours}
	random := ID{Load: "4 KiB random read", Depth: coldDepth, Class: classCold, Target: ours}
	for _, c := range []struct {
		id  ID
		o   bench.Options
		raw task
	}{
		{sequential, bench.Options{Pattern: bench.Read, BlockSize: 256 << 10, Depth: coldDepth, Count: uint64(h.o.Destage / (256 << 10))},
			task{Kind: "get", Depth: coldDepth, Range: 256 << 10, Objects: objects}},
		{random, bench.Options{Pattern: bench.RandRead, BlockSize: 4 << 10, Depth: coldDepth, Duration: h.o.Time, Seed: uint64(round)},
			task{Kind: "get", Depth: coldDepth, Range: frameBytes, Random: true, Duration: h.o.Time, Objects: objects}},
	} {
		if err := s.gateway.restart(ctx); err != nil {
			return err
		}
		if err := s.ready(ctx); err != nil {
			return err
		}
		var profile sync.WaitGroup
		var profileErr error
		if round == 0 {
			profile.Go(func() {
				profileErr = s.gateway.profile(ctx, profileName(c.id.Load, c.id.Depth, classCold), time.Second)
			})
		}
		before, err := s.volume.cpu()
		if err != nil {
			return err
		}
		r, err := h.bench(ctx, s.volume, c.o)
		if err != nil {
			return err
		}
		after, err := s.volume.cpu()
		if err != nil {
			return err
		}
		if profile.Wait(); profileErr != nil {
			return profileErr
		}
		h.record(round, c.id, benchSample(r, after-before))

		c.raw.URL = s.server.URL(bucketName, gatewayPrefix)
		raw, err := h.rawLimit(ctx, c.raw, s.server.Env())
		if err != nil {
			return err
		}
		c.id.Target = rawGet
		h.record(round, c.id, rawSample(raw))
	}
	return nil
}

// ready waits until the volume answers after a start.
func (s *store) ready(ctx context.Context) error {
	u, err := s.volume.open(ctx)
	if err != nil {
		return fmt.Errorf("after a restart in %s: %w", filepath.Base(s.gateway.dir), err)
	}
	u.Close()
	return nil
}
