package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fenced returns the blocks of a language in a Markdown text.
func fenced(text, language string) (blocks []string) {
	for {
		_, rest, found := strings.Cut(text, "\n```"+language+"\n")
		if !found {
			return blocks
		}
		block, after, found := strings.Cut(rest, "\n```\n")
		if !found {
			return blocks
		}
		blocks, text = append(blocks, block+"\n"), after
	}
}

// The README's walk-through runs as it is pasted; only the port is another one, which others may hold.
func TestReadmeWalkthrough(t *testing.T) {
	t.Parallel()
	need(t, "bash", "iscsi-inq", "qemu-img", "qemu-io")
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := fenced(string(text), "sh")
	if len(blocks) < 6 || !strings.Contains(blocks[0], "go build") {
		t.Fatalf("the walk-through has %d blocks and begins with %q", len(blocks), blocks[0])
	}
	script := strings.ReplaceAll(strings.Join(blocks[1:], "\n"), "127.0.0.1:3260", freeAddress(t))

	dir, err := os.MkdirTemp("", "isergate-readme-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	// Whatever fails, the gateway in the background ends with the script.
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-xc", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"+script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+os.Getenv("PATH"))
	cmd.WaitDelay = 30 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "gw1.log"))
		t.Fatalf("%v\n%s\nlog of the gateway:\n%s", err, out, log)
	}
	for _, want := range []string{"A write is acknowledged when it is in the object store", "Restored to", "read 1048576/1048576", "Everything acknowledged is in the bucket"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("missing %q in\n%s", want, out)
		}
	}
}
