# The same few commands here and in CI. `make help` lists them.
# The first interpreter of these that is there; `make PYTHON=… test` takes another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
WORLDS ?= 10000
ARGS ?=
PYTEST_ARGS ?=
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check sim bench soak fix clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */	/' | expand -t 10

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Stoker needs Python 3.11 or newer: install it, or name one with 'make PYTHON=/path/to/python ...'"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## train a small model through the cache, kill a worker, watch the run go on
	$(BIN)/stoker demo $(ARGS)

test: $(STAMP)  ## all tests, the seeded worlds included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)  ## ruff, mypy --strict, import-linter, tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_tidy.py

sim: $(STAMP)  ## seeded worlds against the shipping state machines: make sim SEED=1 WORLDS=10000
	$(BIN)/python -m tests.sim.run --seed $(SEED) --worlds $(WORLDS)

soak: $(STAMP)  ## long chaos: many seeded worlds for SECONDS (default 600)
	$(BIN)/python -m tests.sim.run --seed $(SEED) --seconds $(or $(SECONDS),600)

bench: $(STAMP)  ## every benchmark, as one table of ratios
	$(BIN)/python benchmarks/all.py $(ARGS)

fix: $(STAMP)  ## format and sort
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
