# make build   the binary, bin/isergate
# make test    installs what the tests need (Debian, Ubuntu), then runs all of them
# make lint    formatting, go.mod, vet, staticcheck
# make soak    power cuts, kill -9 and faults of the object store, longer
# make lab      a shell in a guest with the kernel's initiator, and a gateway for it
# make lab-test the kernel's initiator against the gateway over TCP and iSER, every check
# make fuzz    each fuzz target for FUZZTIME=2m
# make bench   figures beside a peer and the raw limits, in about seven minutes: BENCHFLAGS="-rounds 5 -json FILE -markdown README.md"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/isergate
STATICCHECK := $(CACHE)/staticcheck-$(shell sed -n 's|^require honnef.co/go/tools v||p' .ci/tools/go.mod)

.PHONY: build test lint unit race fuzz install bench bench-quick soak lab lab-test

build:
	CGO_ENABLED=0 go build -trimpath -o bin/isergate ./cmd/isergate

# One step after another, each with its output: the first that fails ends the run.
test:
	.ci/install
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory build
	$(MAKE) --no-print-directory unit
	$(MAKE) --no-print-directory race

install:
	.ci/install

lint: $(STATICCHECK)
	unformatted=$$(gofmt -l .)
	[ -z "$$unformatted" ] || { echo "not formatted by gofmt: $$unformatted" >&2; exit 1; }
	go mod tidy -diff
	go vet ./...
	$(STATICCHECK) ./...

$(STATICCHECK):
	.ci/install

# Everything, real initiators and S3 servers included. A missing one is a failure here.
unit:
	ISERGATE_REQUIRE_ALL=1 go test -count=1 -timeout 20m ./...

# The same under the race detector, without the slowest servers and the long runs.
race:
	go test -count=1 -race -short -timeout 12m ./...

# The guest's 10.0.2.2:3260 is this machine's 127.0.0.1:3260, where the gateway listens.
lab: build
	@dir=$$(mktemp -d)
	bin/isergate serve --demo --data-dir "$$dir/data" --portal 127.0.0.1:3260,advertise=10.0.2.2:3260 >"$$dir/log" 2>&1 &
	serve=$$!
	trap 'kill $$serve 2>/dev/null && wait; rm -rf "$$dir"' EXIT
	export ISERGATE_API="unix:$$dir/data/api.sock"
	until bin/isergate status 2>/dev/null; do
		kill -0 $$serve 2>/dev/null || { echo "make lab: the gateway has ended; its log:"; cat "$$dir/log"; exit 1; } >&2
		sleep 0.2
	done
	echo "The gateway, from another terminal here: export ISERGATE_API=$$ISERGATE_API; its log: $$dir/log. Both are deleted at the end."
	go run ./iser/lab/cmd shell

lab-test: install
	ISERGATE_REQUIRE_ALL=1 ISERGATE_LONG=1 go test -count=1 -v -timeout 60m -run 'TestLinux|TestGuest|TestKernelAlone' ./cmd/isergate ./iser/lab

fuzz:
	.ci/fuzz

# Longer than make test: ROUNDS of kill -9 of the program for each level, and SEEDS of power cuts in memory.
ROUNDS ?= 50
SEEDS ?= 5000
soak:
	ISERGATE_CRASH_ROUNDS=$(ROUNDS) go test -count=1 -v -timeout 4h -run 'TestKillWhileWriting|TestDataDirectoryLost|TestStopWhileWriting|TestPowerCut' ./cmd/isergate
	ISERGATE_SEEDS=$(SEEDS) go test -count=1 -timeout 4h -run 'TestCrash|TestChaos|TestCrashOldMaps' ./cache
	ISERGATE_LONG=1 ISERGATE_FAULT_ROUNDS=$(ROUNDS) go test -count=1 -v -timeout 4h -run 'TestStoreFaults|TestStoreRefusals' ./cmd/isergate
	ISERGATE_SEEDS=$$(($(SEEDS)/10)) go test -count=1 -v -timeout 4h -run TestS3Faults ./objectstore/volumelog

# As root, for tgtd. Nothing else should run on the machine.
bench: build
	go run ./cmd/isergate-bench $(BENCHFLAGS)

# Less than a minute, for whoever changed something: says what broke, not how fast it is.
bench-quick: build
	go run ./cmd/isergate-bench -quick $(BENCHFLAGS)
