package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isergate/isergate/iser/initiator"
	"github.com/isergate/isergate/iser/initiator/oracle"
	"github.com/isergate/isergate/iser/lab"
	"github.com/isergate/isergate/iser/lab/labtest"
)

// machine is a guest in which the program runs, with its data and its bucket on a disk that forgets what was not flushed.
type machine struct {
	*labtest.Guest
	gateway *labtest.Running
	portal  string
}

const powerCutConfig = `
cache:
  journal: 128MiB
  segment: 32MiB
  arena: 64MiB
  map_memory: 32MiB
  read_cache: 64MiB
  read_cache_memory: 16MiB
  object_age: 200ms
iser:
  memory: 32MiB
`

// powerOn boots a machine and waits until the program serves.
func powerOn(t *testing.T, d *disk) *machine {
	t.Helper()
	m := &machine{Guest: labtest.Boot(t, lab.Options{Forward: []int{3260}, Disk: d.uri()})}
	m.portal = m.Forwarded(3260)
	m.Run("mkdir -p /disk && mount -t ext4 /dev/vdb /disk")
	m.gateway = m.Start("exec /disk/isergate serve --config /disk/config.yaml --data-dir /disk/data --bucket file:///disk/bucket --portal 0.0.0.0:3260 --open")
	m.isergate(t, "status --wait 60s")
	return m
}

func (m *machine) isergate(t *testing.T, args string) {
	t.Helper()
	if out, err := m.Try("ISERGATE_API=unix:/disk/data/api.sock /disk/isergate " + args); err != nil {
		t.Fatalf("isergate %s: %v\n%s\nthe gateway's log:\n%s", args, err, out, m.gateway.Output())
	}
}

// open is an oracle.Factory.
func (m *machine) open(target string) oracle.Factory {
	return func(ctx context.Context) (oracle.Unit, uint32, func(), error) {
		s, err := initiator.Dial(ctx, initiator.Options{Portal: m.portal, InitiatorName: "iqn.2026-11.io.isergate:oracle", TargetName: target})
		if err != nil {
			return nil, 0, nil, err
		}
		l, err := s.OpenLUN(ctx, 0)
		if err != nil {
			s.Close()
			return nil, 0, nil, err
		}
		return l, l.BlockSize, func() { s.Kill() }, nil
	}
}

// TestPowerCut cuts the power of a machine that serves a volume at `local` and one at `object`, with data, bucket and a real file system on a disk
// whose volatile cache loses or keeps each block that was not flushed. Nothing acknowledged is lost. ISERGATE_CRASH_ROUNDS says how often.
func TestPowerCut(t *testing.T) {
	if testing.Short() {
		t.Skip("a guest takes long")
	}
	need(t, "mke2fs")
	t.Parallel()
	rounds, rng := crashRounds(t, 1)
	dir, err := os.MkdirTemp("", "isergate-power-") // short: a socket's path is limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	stage, image := filepath.Join(dir, "stage"), filepath.Join(dir, "image")
	if err := os.Mkdir(stage, 0o755); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(stage, "isergate"), ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(stage, "config.yaml"), []byte(powerCutConfig), 0o600); err != nil {
		t.Fatal(err)
	}
	must(t, "mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", stage, image, "2G")
	d := newDisk(t, image)

	type volume struct {
		level, target string
		history       *oracle.History
	}
	var volumes []*volume
	for _, level := range []string{"local", "object"} {
		volumes = append(volumes, &volume{level, crashTarget + "." + level, newHistory(t, rng)})
	}
	m := powerOn(t, d)
	for _, v := range volumes {
		m.isergate(t, fmt.Sprintf("volume create %s --size 16MiB --ack %s --flush %s --target %s", v.level, v.level, v.level, v.target))
	}
	var checked, maybe uint64
	for range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		var acked atomic.Int64
		enough, after := make(chan struct{}, 1), 20+rng.Int64N(200)
		ended := make(chan error, len(volumes))
		for _, v := range volumes {
			seed := rng.Uint64()
			go func() {
				_, err := oracle.Run(ctx, m.open(v.target), oracle.Options{
					History: v.history, Workers: 8, Seed: seed, MaxBlocks: 16,
					ZeroShare: 30, UnmapShare: 50, SameShare: 30, FlushShare: 30, ReadShare: 100, FUAShare: 50,
					OnAck: func(uint64) {
						if acked.Add(1) == after {
							enough <- struct{}{}
						}
					},
				})
				if violation := (*oracle.Violation)(nil); errors.As(err, &violation) {
					ended <- err
					return
				}
				ended <- nil
			}()
		}
		select {
		case <-enough:
			<-d.arm(1 + rng.IntN(40))
		case <-time.After(labtest.Limit):
			t.Errorf("%d operations in %v", acked.Load(), labtest.Limit)
		}
		m.Close()
		writes, flushes, unsynced, err := d.restore(rng)
		cancel()
		for range volumes {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		if err != nil || t.Failed() {
			t.Fatalf("the disk: %v", err)
		}
		m = powerOn(t, d)
		for _, v := range volumes {
			if err := v.history.Crash(); err != nil {
				t.Fatal(err)
			}
			u, logical, closeUnit, err := m.open(v.target)(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			r, err := v.history.Verify(t.Context(), oracle.UnitReader(u, 0, logical), oracle.KeepAcked)
			if err == nil {
				err = r.Err()
			}
			closeUnit()
			if err != nil {
				t.Fatalf("%s: %v\n%s", v.level, err, m.gateway.Output())
			}
			if err := v.history.Rebase(r); err != nil {
				t.Fatal(err)
			}
			maybe += r.KeptMaybe
		}
		checked += uint64(acked.Load())
		t.Logf("power cut after %d acknowledgements: %d writes to the disk, %d flushes, %d writes not flushed", acked.Load(), writes, flushes, unsynced)
	}
	t.Logf("%d power cuts: %d acknowledged operations checked, 0 lost; %d blocks of unanswered writes survived", rounds, checked, maybe)
}
