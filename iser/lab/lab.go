// Package lab runs a small Linux machine with the kernel's own iSCSI and iSER initiator and
// target, for tests and for people. The machine is emulated by qemu: neither KVM nor a
// kernel module on this machine is needed, nor RDMA hardware, nor root.
//
// The guest reaches this machine's 127.0.0.1:PORT as 10.0.2.2:PORT, and nothing else.
// DESIGN.md has the rest.
package lab

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
)

var (
	// ErrNotBuilt is returned when the guest's files are not on this machine: Build makes them.
	ErrNotBuilt = errors.New("lab: the guest is not built: run .ci/install")
	// ErrNoQEMU is returned when this machine has no qemu-system-x86_64.
	ErrNoQEMU = errors.New("lab: qemu-system-x86_64 is not installed: run .ci/install")
	// ErrGone is returned by what waits for a guest that has ended.
	ErrGone = errors.New("lab: the guest has ended")
)

const (
	// Host is this machine, as the guest calls it.
	Host = "10.0.2.2"
	// Address is the guest's own.
	Address = "10.0.2.15"

	qemu = "qemu-system-x86_64"
)

// inputs is everything that the guest's files are made from, but for Debian's packages.
//
//go:embed image.sh guest agent/main.go
var inputs embed.FS

// library is loaded into each script that runs in the guest.
//
//go:embed lib.sh
var library string

// Dir returns where the guest's files are, or will be: a directory of the user's cache,
// named for what they are made from.
func Dir() (string, error) {
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", fmt.Errorf("lab: %w", err)
		}
		cache = filepath.Join(home, ".cache")
	}
	sum := sha256.New()
	err := fs.WalkDir(inputs, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := inputs.ReadFile(path)
		fmt.Fprintf(sum, "%s %d\n", path, len(text))
		sum.Write(text)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	return filepath.Join(cache, "isergate", "lab-"+hex.EncodeToString(sum.Sum(nil))[:12]), nil
}

// Find returns Dir when a guest can be booted from it; else the error is ErrNotBuilt or
// ErrNoQEMU.
func Find() (string, error) {
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	if _, err := exec.LookPath(qemu); err != nil {
		return "", ErrNoQEMU
	}
	if _, err := os.Stat(filepath.Join(dir, "disk.img")); err != nil {
		return "", ErrNotBuilt
	}
	return dir, nil
}

// Build makes the guest's files, unless they are there, and returns their directory. It
// needs Debian's package lists and the programs that .ci/install installs, downloads about
// 0.3 GB and takes one to seven minutes. Two that build at once make them once. What was
// made from other inputs is removed: 0.4 GB each.
func Build(ctx context.Context, progress io.Writer) (string, error) {
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(parent, "lab.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lab: %s: %w", lock.Name(), err)
	}
	if err := prune(parent, dir); err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "disk.img")); err == nil {
		return dir, nil
	}
	out, err := os.MkdirTemp(parent, "lab-new-")
	if err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	defer os.RemoveAll(out)
	if err := build(ctx, out, filepath.Join(parent, "lab-downloads"), progress); err != nil {
		return "", fmt.Errorf("lab: making the guest: %w", err)
	}
	if err := os.Chmod(out, 0o755); err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	if err := os.Rename(out, dir); err != nil {
		return "", fmt.Errorf("lab: %w", err)
	}
	return dir, nil
}

// made are directories that Build makes, whole or, when it was killed, not.
var made = regexp.MustCompile(`^lab-([0-9a-f]{12}|new-[0-9]+)$`)

// prune removes what Build made, but for one. A guest that runs from it has its files open, and runs on. The caller holds the lock.
func prune(parent, but string) error {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if path := filepath.Join(parent, e.Name()); path != but && e.IsDir() && made.MatchString(e.Name()) {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
	}
	return nil
}

func build(ctx context.Context, out, downloads string, progress io.Writer) error {
	files, err := os.MkdirTemp(out, "inputs-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(files)
	if err := os.CopyFS(files, inputs); err != nil {
		return err
	}
	run := func(cmd *exec.Cmd) error {
		cmd.Stdout, cmd.Stderr = progress, progress
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(cmd.Args[0]), err)
		}
		return nil
	}
	guest := filepath.Join(files, "guest")
	agent := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(guest, "agent"), filepath.Join(files, "agent", "main.go"))
	agent.Dir = files // outside every module: it needs none
	agent.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=", "GOWORK=off")
	if err := run(agent); err != nil {
		return err
	}
	return run(exec.CommandContext(ctx, "bash", filepath.Join(files, "image.sh"), out, guest, downloads))
}
