# Every target sets itself up: a fresh machine needs only make and Python 3.11 or newer.
PYTHON ?= python3
JAX ?= 0.8.0
COUNT ?= 2000

VENV := .venv
JAX_VENV := .venv-jax-$(JAX)
BIN := $(VENV)/bin
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

# Stamps carry the interpreter's name, so another PYTHON rebuilds the environment.
MADE := .made-$(notdir $(PYTHON))
PIP := -m pip --disable-pip-version-check install --quiet
PYTEST := -m pytest -q -n 2 --dist worksteal

.PHONY: help demo demo-export live boards quick test test-most test-all costs mutants coverage test-browser check lint types docs docs-serve test-jax package sweep \
  bench bench-export bench-gpu compare bench-compile pictures gallery notebooks clean
.NOTPARALLEL:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 15

demo: $(VENV)/.demo  ## run the demo
	$(BIN)/python -m braintrace demo

demo-export: $(VENV)/.demo  ## a learner as C, compiled and run
	$(BIN)/python examples/learner_in_c.py

live: $(VENV)/.dev wasm  ## build docs/live.html again
	$(BIN)/python docs/live/build.py

boards: $(VENV)/.dev arm  ## run exported learners on boards of QEMU: Cortex-M4 and M33
	$(BIN)/python -m pytest -q tests/export/test_board.py

test: $(VENV)/.dev clang  ## run some cases of every test, on two cores
	$(BIN)/python $(PYTEST)

test-most: $(VENV)/.dev clang  ## more cases: those that CI runs
	BRAINTRACE_TESTS=most $(BIN)/python $(PYTEST)

test-all: $(VENV)/.dev clang  ## every case, with programs compiled by XLA
	BRAINTRACE_TESTS=all $(BIN)/python $(PYTEST)

quick: $(VENV)/.dev  ## tests by name, in one process: make quick K='reset or batch'
	BRAINTRACE_TESTS=most $(BIN)/python -m pytest -q -k '$(K)'

costs: $(VENV)/.dev clang  ## measure the processor time of every test again: tests/costs.json
	rm -rf out/costs && mkdir -p out/costs
	BRAINTRACE_COSTS=$$PWD/out/costs BRAINTRACE_TESTS=most $(BIN)/python $(PYTEST)
	$(BIN)/python tests/thinned.py out/costs/*

mutants: $(VENV)/.dev  ## break the library at random places and count what the tests notice
	$(BIN)/python benchmarks/mutants.py --count 200

coverage: $(VENV)/.dev clang  ## the cases of CI with the share of lines that they run
	BRAINTRACE_TESTS=most $(BIN)/python $(PYTEST) --cov=braintrace --cov-report=term:skip-covered

test-browser: $(VENV)/.browser chromium  ## open the drawings of graphs in a headless Chromium
	$(BIN)/python -m pytest -q tests/browser

check: lint types docs test-most  ## ruff, mypy, the site, the tests; CI runs these, test-browser and package

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy over src
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documents as a site, a warning is an error: site/index.html
	$(MKDOCS) build --strict --quiet

docs-serve: $(VENV)/.dev  ## the site on http://127.0.0.1:8000, built again as pages change
	$(MKDOCS) serve

test-jax: $(JAX_VENV)/.dev  ## the cases of CI on a pinned JAX: make test-jax JAX=0.8.0 PYTHON=python3.12
	BRAINTRACE_TESTS=most $(JAX_VENV)/bin/python $(PYTEST)

# The wheel is built from the sdist, installed beside nothing, and run away from the checkout.
package: $(VENV)/.dev  ## build dist/ and try the wheel in an empty environment
	rm -rf dist
	@out=$$($(BIN)/python -m build --outdir dist . 2>&1) || { echo "$$out"; exit 1; }
	$(PYTHON) -m venv --clear .venv-package
	.venv-package/bin/python $(PIP) dist/*.whl
	@home=$$PWD && cd "$$(mktemp -d)" && "$$home/.venv-package/bin/python" -I "$$home/tests/package/smoke.py"

sweep: $(VENV)/.dev  ## judge random programs with all rules, on two cores: make sweep COUNT=20000
	$(BIN)/python benchmarks/sweep.py --count $(COUNT) --workers 2

bench: $(VENV)/.dev  ## time and memory against BPTT and the published package
	$(BIN)/python benchmarks/speed.py --suite headline
	$(BIN)/python benchmarks/speed.py --suite memory
	$(BIN)/python benchmarks/speed.py --suite roofline
	$(BIN)/python benchmarks/speed.py --suite compile

bench-export: $(VENV)/.dev clang arm  ## learners in C: time, RAM, flash; then every cell under every rule
	$(BIN)/python benchmarks/export.py
	$(BIN)/python benchmarks/export.py --check

bench-gpu: $(VENV)/.dev  ## element-wise recurrences against BPTT by associative_scan, on a GPU
	$(BIN)/python benchmarks/time_in_kernel.py

compare: $(VENV)/.dev  ## the tables of docs/compare.md, hours in all: make compare PART='copy example'
	$(BIN)/python benchmarks/compare.py $(PART)

bench-compile: $(VENV)/.dev  ## compile time against the number of equations
	$(BIN)/python benchmarks/compile_time.py

pictures: $(VENV)/.dev  ## draw the pictures of the documents again
	$(BIN)/python docs/pictures.py

gallery: $(VENV)/.dev  ## run the examples that have no record, and draw all of them: docs/gallery/
	$(BIN)/python docs/gallery.py

notebooks: $(VENV)/.dev  ## write the notebooks of the tutorials again
	$(BIN)/python docs/notebooks.py

clean:  ## remove environments, caches and build outputs
	rm -rf .venv .venv-jax-* .venv-package .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist out site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Browsers and compilers are no Python packages: Debian's, where they can be installed.
.PHONY: chromium clang arm wasm
INSTALL := [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && export DEBIAN_FRONTEND=noninteractive && \
  apt-get -qq update && apt-get -qq install -y --no-install-recommends

chromium:
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v "$$name" >/dev/null 2>&1 && exit 0; \
	done; \
	{ $(INSTALL) chromium fonts-dejavu-core >/dev/null; } || \
	  { echo 'no Chromium: install it (Debian: chromium), or name it with CHROMIUM=/path/to/it.' >&2; exit 1; }

# Its sanitizers are a package of the same version. Without it some tests of exported C are skipped.
clang:
	@command -v clang >/dev/null 2>&1 || \
	  { $(INSTALL) clang >/dev/null && \
	    apt-get -qq install -y libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev >/dev/null; } || \
	  echo 'no clang: what needs it is skipped; install it (Debian: clang).' >&2

arm:
	@{ command -v arm-none-eabi-gcc && command -v qemu-system-arm; } >/dev/null 2>&1 || \
	  { $(INSTALL) gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm >/dev/null; } || \
	  { echo 'install arm-none-eabi-gcc with newlib, and qemu-system-arm.' >&2; exit 1; }

wasm: clang
	@[ -d /usr/lib/wasm32-wasi ] || \
	  { $(INSTALL) lld wasi-libc libclang-rt-$$(clang -dumpversion | cut -d. -f1)-dev-wasm32 >/dev/null; } || \
	  { echo 'install lld and wasi-libc, with the run-time library of clang for wasm32.' >&2; exit 1; }

%/$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'braintrace needs Python 3.11 or newer: name one with PYTHON=/path/to/python3.11.' >&2; exit 1; }
	$(PYTHON) -m venv --clear $*
	@touch $@

$(VENV)/.demo: $(VENV)/$(MADE) pyproject.toml
	$(BIN)/python $(PIP) -e '.[plot,progress,tasks]'
	@touch $@

$(VENV)/.dev: $(VENV)/$(MADE) pyproject.toml
	$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python $(PIP) -e '.[dev,browser]'
	@touch $@

$(JAX_VENV)/.dev: $(JAX_VENV)/$(MADE) pyproject.toml
	$(JAX_VENV)/bin/python $(PIP) 'jax==$(JAX)' 'jaxlib==$(JAX)' -e '.[dev]'
	@touch $@
