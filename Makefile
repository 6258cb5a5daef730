# Every target sets itself up: a fresh machine needs only make and Python 3.11 or newer.
PYTHON ?= python3
JAX ?= 0.8.0

VENV := .venv
JAX_VENV := .venv-jax-$(JAX)
BIN := $(VENV)/bin
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

# Stamps carry the interpreter's name, so another PYTHON rebuilds the environment.
MADE := .made-$(notdir $(PYTHON))
PIP := -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test test-all check lint types docs docs-serve test-jax sweep bench bench-compile clean
.NOTPARALLEL:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(VENV)/.demo  ## run the demo
	$(BIN)/python -m braintrace demo

test: $(VENV)/.dev  ## run the quick suite on two cores
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-all: $(VENV)/.dev  ## the same with every model and rule (half an hour)
	BRAINTRACE_ALL=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

check: lint types docs test  ## everything CI runs

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy over src
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documents as a site, a warning is an error: site/index.html
	$(MKDOCS) build --strict --quiet

docs-serve: $(VENV)/.dev  ## the site on http://127.0.0.1:8000, built again as pages change
	$(MKDOCS) serve

test-jax: $(JAX_VENV)/.dev  ## run the suite on a pinned JAX: make test-jax JAX=0.8.0 PYTHON=python3.12
	$(JAX_VENV)/bin/python -m pytest -q -n 2 --dist worksteal

sweep: $(VENV)/.dev  ## judge thousands of random programs
	$(BIN)/python benchmarks/sweep.py --count 2000

bench: $(VENV)/.dev  ## time and memory against BPTT and the published package (10 minutes)
	$(BIN)/python benchmarks/speed.py --suite headline
	$(BIN)/python benchmarks/speed.py --suite memory
	$(BIN)/python benchmarks/speed.py --suite roofline
	$(BIN)/python benchmarks/speed.py --suite compile

bench-compile: $(VENV)/.dev  ## compile time against the number of equations
	$(BIN)/python benchmarks/compile_time.py

clean:  ## remove environments, caches and build outputs
	rm -rf .venv .venv-jax-* .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist out site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

%/$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'braintrace needs Python 3.11 or newer: name one with PYTHON=/path/to/python3.11.' >&2; exit 1; }
	$(PYTHON) -m venv --clear $*
	@touch $@

$(VENV)/.demo: $(VENV)/$(MADE) pyproject.toml
	$(BIN)/python $(PIP) -e '.[plot,progress]'
	@touch $@

$(VENV)/.dev: $(VENV)/$(MADE) pyproject.toml
	$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

$(JAX_VENV)/.dev: $(JAX_VENV)/$(MADE) pyproject.toml
	$(JAX_VENV)/bin/python $(PIP) 'jax==$(JAX)' 'jaxlib==$(JAX)' -e '.[dev]'
	@touch $@
