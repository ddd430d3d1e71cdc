# The same few commands here and in CI. `make help` lists them.
# The first interpreter of these that is there; `make PYTHON=… test` takes another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
WORLDS ?= 10000
ARGS ?=
# End-to-end tests mostly wait, for processes and for time to pass: more of them run at once than there are cores.
JOBS ?= 4
PYTEST_ARGS ?=
STAMP := $(VENV)/.installed
# What tests start besides Python: programs, and the Debian packages that hold them.
PROGRAMS := etcd faketime fusermount3 ip iptables nginx openssl rsync sshd
PACKAGES := etcd-server faketime fuse3 iproute2 iptables nginx-light openssl openssh-server rsync

.DEFAULT_GOAL := help
.PHONY: help demo test check system sim bench soak chaos storm fuzz fix clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */	/' | expand -t 10

# Many containers set this, and then each of the thousands of processes that tests start compiles Stoker anew.
unexport PYTHONDONTWRITEBYTECODE

NATIVE := $(wildcard setup.py src/stoker/_native/*.cc src/stoker/_native/*.h)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Stoker needs Python 3.11 or newer: install it, or name one with 'make PYTHON=/path/to/python ...'"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || \
	  { echo "Stoker's native part needs a C++17 compiler: install g++ (on Debian, as root: apt-get install g++)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools pybind11 torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

# apt-get must not start a service of its own: policy-rc.d forbids that while it runs.
system:  ## programs that tests start (etcd, ip, ...), by apt-get where they are missing
	@export PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for program in $(PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	test -z "$$missing" && exit 0; \
	command -v apt-get >/dev/null && test "$$(id -u)" = 0 || \
	  { echo "The tests need$$missing: install them (on Debian, as root: apt-get install $(PACKAGES))"; exit 1; }; \
	policy=/usr/sbin/policy-rc.d; \
	test -e $$policy || { trap "rm -f $$policy" EXIT; printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES)

demo: $(STAMP)  ## train a small model through the cache, kill a worker, watch the run go on
	$(BIN)/stoker demo $(ARGS)

test: $(STAMP) system  ## all tests, the seeded worlds included; a part of them: make test TESTS=tests/unit
ifdef TESTS
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) $(TESTS)
else
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS) --ignore tests/e2e
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) tests/e2e
endif

check: $(STAMP)  ## ruff, mypy --strict, import-linter, tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_tidy.py

sim: $(STAMP)  ## seeded worlds against the shipping state machines: make sim SEED=1 WORLDS=10000
	$(BIN)/python -m tests.sim.run --seed $(SEED) --worlds $(WORLDS)

soak: $(STAMP)  ## long chaos: many seeded worlds for SECONDS (default 600), then as long mutated requests
	$(BIN)/python -m tests.sim.run --seed $(SEED) --seconds $(or $(SECONDS),600)
	$(BIN)/python -m tests.chaos.http_fuzz --seed $(SEED) --seconds $(or $(SECONDS),600)
	$(BIN)/python -m tests.chaos.s3_fuzz --seed $(SEED) --seconds $(or $(SECONDS),600)
	STOKER_MOUNT_LOOKUPS=10000000 $(BIN)/python -m pytest -q --timeout 7200 tests/unit/test_mount_memory.py

chaos: $(STAMP) system  ## faults on four test hosts against one run: make chaos SECONDS=600 SEED=1 [ARGS=--etcd]
	$(BIN)/python -m tests.chaos.run --seed $(SEED) --seconds $(or $(SECONDS),600) $(ARGS)

storm: $(STAMP)  ## faults on four cache servers and their origin under load: make storm SECONDS=600 SEED=1
	$(BIN)/python -m tests.chaos.storm --seed $(SEED) --seconds $(or $(SECONDS),600) $(ARGS)

fuzz: $(STAMP)  ## mutated requests against a cache server: make fuzz SECONDS=600 SEED=1 [ARGS="--only 17"]
	$(BIN)/python -m tests.chaos.http_fuzz --seed $(SEED) --seconds $(or $(SECONDS),600) $(ARGS)

bench: $(STAMP)  ## every benchmark, as one table of ratios
	$(BIN)/python benchmarks/all.py $(ARGS)

fix: $(STAMP)  ## format and sort
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
