// Package isergate_test holds the rules that span packages.
package isergate_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/isergate/isergate"

// pkg is what go list says about a package, as far as it matters here.
type pkg struct {
	ImportPath string
	Imports    []string
}

// rule is one line of the layout: packages that match From (and not Except) import
// nothing that matches Never. A pattern is a path that matches itself; with /... behind it
// also all below. Paths within the module are written without its name.
type rule struct {
	From, Except, Never []string
	Why                 string
}

var rules = []rule{
	{
		From:  []string{"iser/scsi/..."},
		Never: []string{"iser", "iser/iscsi/...", "iser/tcp/...", "iser/rdma/...", "iser/iwarp/...", "iser/verbs/...", "iser/portal/...", "net"},
		Why:   "the logical unit knows no transport",
	},
	{
		From:  []string{"iser/iscsi/..."},
		Never: []string{"iser", "iser/tcp/...", "iser/rdma/...", "iser/iwarp/...", "iser/verbs/...", "iser/portal/..."},
		Why:   "the iSCSI core knows no transport",
	},
	{
		From:  []string{"iser"},
		Never: []string{"iser/tcp/...", "iser/iwarp/...", "iser/verbs/...", "iser/portal/..."},
		Why:   "the iSER datamover knows no RDMA provider",
	},
	{
		From:  []string{"iser/tcp/...", "iser/rdma/...", "iser/iwarp/...", "iser/verbs/..."},
		Never: []string{"iser", "iser/portal/...", "iser/initiator/..."},
		Why:   "datamover, provider interface and providers stand below what uses them",
	},
	{
		From:  []string{"iser/rdma/...", "iser/iwarp/...", "iser/verbs/..."},
		Never: []string{"iser/iscsi/...", "iser/scsi/...", "iser/tcp/..."},
		Why:   "RDMA knows no iSCSI",
	},
	{
		From:   []string{module + "/..."},
		Except: []string{"iser", "iser/iwarp/...", "iser/portal/...", "iser/initiator/..."},
		Never:  []string{"iser/iwarp/..."},
		Why:    "the software RNIC is wired by the portal, and by the initiator",
	},
	{
		From:  []string{"iser/..."},
		Never: []string{"cache/...", "cluster/...", "objectstore/...", "gateway/...", "cmd/..."},
		Why:   "the front knows no volumes, policies or S3",
	},
	{
		From:  []string{"cache/..."},
		Never: []string{"cluster/...", "iser/...", "gateway/...", "cmd/..."},
		Why:   "the cache declares what it calls",
	},
	{
		From:  []string{"objectstore/..."},
		Never: []string{"cache/...", "cluster/...", "iser/...", "gateway/...", "cmd/..."},
		Why:   "the object store is the lowest layer",
	},
	{
		From:  []string{"cluster/..."},
		Never: []string{"iser/...", "gateway/...", "cmd/..."},
		Why:   "the cluster knows no CDBs",
	},
	{
		From:  []string{"gateway/..."},
		Never: []string{"cmd/...", "iser/initiator/..."},
		Why:   "imports point downwards",
	},
	{
		From:  []string{"cmd/isergate/..."},
		Never: []string{"iser", "iser/iscsi/...", "iser/scsi/...", "iser/tcp/...", "iser/rdma/...", "iser/portal/...", "cache/...", "cluster/..."},
		Why:   "the gateway is wired by gateway; what measures it is a client",
	},
	{
		From:   []string{"cmd/isergate-bench/..."},
		Except: []string{"cmd/isergate-bench/internal/nulltarget"}, // what is measured, in a process of its own
		Never:  []string{"cache/...", "cluster/...", "gateway", "iser", "iser/iscsi/...", "iser/scsi/...", "iser/tcp/...", "iser/rdma/...", "iser/portal/..."},
		Why:    "the benchmark measures a process, by what any client can use",
	},
	{
		From:   []string{module + "/..."},
		Except: []string{"objectstore/..."},
		Never:  []string{"github.com/aws/..."},
		Why:    "objectstore is the only importer of the AWS SDK",
	},
	{
		From:   []string{module + "/..."},
		Except: []string{"cluster/..."},
		Never:  []string{"github.com/hashicorp/raft/...", "github.com/hashicorp/raft-wal/...", "github.com/hashicorp/raft-boltdb/..."},
		Why:    "cluster is the only importer of Raft",
	},
}

// binary is the package that users run.
const binary = module + "/cmd/isergate"

// testSupport is what none of the packages that make up the binary may import.
var testSupport = []string{"testing", "objectstore/buckettest/...", "objectstore/faulty/...", "objectstore/s3test/...", "iser/lab/..."}

// linked returns the packages of the module that end up in the binary.
func linked(pkgs []pkg) []pkg {
	byPath := make(map[string]pkg)
	for _, p := range pkgs {
		byPath[p.ImportPath] = p
	}
	var out []pkg
	var visit func(path string)
	visit = func(path string) {
		p, ok := byPath[path]
		if !ok {
			return
		}
		delete(byPath, path)
		out = append(out, p)
		for _, imported := range p.Imports {
			visit(imported)
		}
	}
	visit(binary)
	return out
}

// matches reports whether path is one of patterns.
func matches(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		base, tree := strings.CutSuffix(p, "/...")
		if top, _, _ := strings.Cut(base, "/"); slices.Contains([]string{"cache", "cluster", "cmd", "gateway", "iser", "objectstore"}, top) {
			base = module + "/" + base
		}
		return path == base || tree && strings.HasPrefix(path, base+"/")
	})
}

// violations returns one line for each import that breaks a rule.
func violations(pkgs []pkg) []string {
	var out []string
	for _, p := range pkgs {
		for _, r := range rules {
			if !matches(r.From, p.ImportPath) || matches(r.Except, p.ImportPath) {
				continue
			}
			for _, imported := range p.Imports {
				if matches(r.Never, imported) {
					out = append(out, fmt.Sprintf("%s imports %s: %s", p.ImportPath, imported, r.Why))
				}
			}
		}
	}
	for _, p := range linked(pkgs) {
		for _, imported := range p.Imports {
			if matches(testSupport, imported) {
				out = append(out, fmt.Sprintf("%s imports %s: test support stays out of the binary", p.ImportPath, imported))
			}
		}
	}
	return out
}

// TestImportRules holds the module to the layout. Test files are free.
func TestImportRules(t *testing.T) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports", "./...")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v: %s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) < 5 {
		t.Fatalf("go list found %d packages", len(pkgs))
	}
	for _, v := range violations(pkgs) {
		t.Error(v)
	}
}

// TestImportRulesCatch breaks each rule once.
func TestImportRulesCatch(t *testing.T) {
	for _, c := range []struct {
		from, imports string
		want          bool
	}{
		{"iser/scsi", "iser/tcp", true},
		{"iser/scsi", "net", true},
		{"iser/scsi", "net/netip", false},
		{"iser/scsi", "cache", true},
		{"iser/iscsi", "iser/tcp", true},
		{"iser/iscsi", "iser", true},
		{"iser/iscsi", "iser/scsi", false},
		{"iser/tcp", "iser/iscsi", false},
		{"iser/tcp", "objectstore", true},
		{"iser", "gateway", true},
		{"iser", "iser/rdma", false},
		{"iser", "iser/iwarp", true},
		{"iser", "iser/tcp", true},
		{"iser/iscsi", "iser/portal", true},
		{"iser/tcp", "iser", true},
		{"iser/iwarp", "iser/rdma", false},
		{"iser/iwarp", "iser/iscsi", true},
		{"iser/portal", "iser/iwarp", false},
		{"iser/portal", "iser", false},
		{"iser/initiator", "iser/iwarp", false},
		{"gateway", "iser/portal", false},
		{"gateway", "iser/iwarp", true},
		{"gateway", "iser/initiator", true},
		{"cache", "cluster", true},
		{"cache/journal", "iser/scsi", true},
		{"cache", "objectstore/volumelog", false},
		{"objectstore/volumelog", "cache", true},
		{"objectstore", "github.com/aws/smithy-go", false},
		{"cache", "github.com/aws/smithy-go", true},
		{"gateway", "github.com/aws/aws-sdk-go-v2/service/s3", true},
		{"cluster", "github.com/hashicorp/raft", false},
		{"cluster", "iser/scsi", true},
		{"gateway", "github.com/hashicorp/raft", true},
		{"gateway", "cmd/isergate", true},
		{"gateway", "cache", false},
		{"cmd/isergate", "gateway", false},
		{"cmd/isergate", "cache", true},
		{"cmd/isergate", "testing", true},
		{"cmd/isergate", "iser/iscsi", true},
		{"cmd/isergate", "iser/initiator/bench", false},
		{"cmd/isergate-bench", "cache", true},
		{"cmd/isergate-bench", "gateway", true},
		{"cmd/isergate-bench", "gateway/api", false},
		{"cmd/isergate-bench", "iser/initiator/bench", false},
		{"cmd/isergate-bench", "objectstore/s3test", false},
		{"cmd/isergate-bench", "iser/portal", true},
		{"cmd/isergate-bench/internal/nulltarget", "iser/portal", false},
		{"cmd/isergate", "objectstore/faulty", true},
		{"objectstore/s3test", "testing", false},
	} {
		imported := c.imports
		if !strings.Contains(imported, ".") && !strings.HasPrefix(imported, "net") && imported != "testing" {
			imported = module + "/" + imported
		}
		got := violations([]pkg{{module + "/" + c.from, []string{"fmt", imported}}})
		if (len(got) == 1) != c.want {
			t.Errorf("%s imports %s: violations %q, want one: %v", c.from, c.imports, got, c.want)
		}
	}
	through := []pkg{
		{binary, []string{module + "/gateway"}},
		{module + "/gateway", []string{module + "/objectstore/s3test"}},
		{module + "/objectstore/s3test", nil},
	}
	if got := violations(through); len(got) != 1 {
		t.Errorf("test support reached through gateway: violations %q, want one", got)
	}
}
