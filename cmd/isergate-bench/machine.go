package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine says where the figures come from.
type Machine struct {
	Time       time.Time `json:"time"`
	Cores      int       `json:"cores"`
	CPU        string    `json:"cpu"`
	MemoryMiB  uint64    `json:"memory_mib"`
	Kernel     string    `json:"kernel"`
	FileSystem string    `json:"file_system"` // that holds all data of all targets
	Go         string    `json:"go"`
	Isergate   string    `json:"isergate"`
	Tgt        string    `json:"tgt,omitempty"`
	Store      string    `json:"store,omitempty"`
	Nice       int       `json:"nice"`        // of everything that is measured; below 0 it goes before what else runs
	LoadBefore string    `json:"load_before"` // load averages of 1, 5 and 15 minutes
	LoadAfter  string    `json:"load_after"`
}

// machine describes this machine and the file system of dir.
func machine(dir string) Machine {
	m := Machine{Time: time.Now().UTC().Truncate(time.Second), Cores: runtime.NumCPU(), Go: runtime.Version(), CPU: runtime.GOARCH,
		FileSystem: fileSystem(dir), LoadBefore: loadAverage()}
	// The system call returns 20 less the niceness.
	if p, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
		m.Nice = 20 - p
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryMiB = uint64(info.Totalram) * uint64(info.Unit) >> 20
	}
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if key, value, found := strings.Cut(lines.Text(), ":"); found && strings.TrimSpace(key) == "model name" {
				m.CPU = strings.TrimSpace(value)
				break
			}
		}
	}
	return m
}

// loadAverage returns the load averages.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(3, len(fields))], " ")
}

// fileSystem returns the type and device of the file system that holds dir.
func fileSystem(dir string) string {
	text, err := os.ReadFile("/proc/mounts")
	if err != nil {
		return ""
	}
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	best, longest := "", -1
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		at := fields[1]
		if within := at == "/" || dir == at || strings.HasPrefix(dir, at+"/"); within && len(at) >= longest {
			best, longest = fields[2]+" on "+fields[0], len(at)
		}
	}
	return best
}

// output runs a program and returns the first line that it prints.
func output(name string, args ...string) string {
	text, err := exec.Command(name, args...).Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(line)
}
