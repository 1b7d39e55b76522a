# Every target sets up the virtual environment it needs, and reuses it until pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.NOTPARALLEL:

# candidates, the first that fits is used; `make test PYTHON=/somewhere/python3.12` names another
PYTHON ?= python3 python3.11 python3.12 python3.13
PYTHON312 ?= python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12)
PYTEST_ARGS ?=
# test files at a time; compiling, most of the work, has one thread each. 0 shows everything in one process
WORKERS ?= 2
# a third less time for compiling what runs for milliseconds; `make test-all` compiles as users do
QUICK_COMPILING := --xla_backend_optimization_level=0
PAPER_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
MUTANTS_ARGS ?=
BENCH_PYTHON ?= python3
RUN_DIR ?= runs/demo

VENV := .venv
VENV_312 := .venv-312
VENV_CONVERT := .venv-convert
VENV_PREPARE := .venv-prepare
VENV_DOCS := .venv-docs
INPUTS := pyproject.toml constraints.txt
CODE := cheem_jax convert experiments tests

.PHONY: help demo test test-all test-slow faults mutants scale test-convert test-browser test-prepare test-312 docs paper bench gpu count-gpu lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.base ## learn the bundled stream of small tasks on this machine, in minutes
	@$(VENV)/bin/python -m cheem_jax demo --run-dir $(RUN_DIR)

test: $(VENV)/.test ## a test of every kind, about ten minutes on two cores; no torch, TensorFlow, network or GPU
	@XLA_FLAGS="$(QUICK_COMPILING) $${XLA_FLAGS:-}" $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-all: $(VENV)/.test ## those of `make test` and those marked `full`; three quarters of an hour on two cores
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not convert and not prepare and not browser" $(PYTEST_ARGS)

test-slow: $(VENV)/.test ## the tests that take minutes or install packages
	@$(VENV)/bin/python -m pytest -m slow --ignore tests/faults --ignore tests/test_hosts.py --ignore tests/test_layout.py $(PYTEST_ARGS)

faults: $(VENV)/.test ## kills, full disks, corrupted files and hostile input by the thousand, counted; about an hour
	@$(VENV)/bin/python -m pytest -m "slow or not slow" tests/faults $(PYTEST_ARGS)

mutants: $(VENV)/.test ## small changes of the core that `make test` should notice, counted: make mutants MUTANTS_ARGS="--only core"
	@XLA_FLAGS="$(QUICK_COMPILING) $${XLA_FLAGS:-}" $(VENV)/bin/python tests/mutation.py $(MUTANTS_ARGS)

scale: $(VENV)/.test ## several devices, several processes, jobs and a thousand tasks, in full; about half an hour
	@$(VENV)/bin/python -m pytest -m "slow or not slow" tests/test_layout.py tests/test_hosts.py experiments/test_launching.py tests/test_many_tasks.py $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu $(VENV)/bin/python experiments/bench/run.py --only many_tasks $(BENCH_ARGS)

test-convert: $(VENV_CONVERT)/.convert ## parity with timm, in an environment with torch
	@$(VENV_CONVERT)/bin/python -m pytest -m convert $(PYTEST_ARGS)

test-browser: $(VENV)/.browser ## reports and the served page in Chromium, which the system has to have (Debian: apt-get install chromium)
	@$(VENV)/bin/python -m pytest -m browser $(PYTEST_ARGS)

test-prepare: $(VENV_PREPARE)/.prepare ## TFDS's own builders, in an environment with TensorFlow
	@$(VENV_PREPARE)/bin/python -m pytest -m prepare $(PYTEST_ARGS)

test-312: ## the tests on Python 3.12, where there is one
	@$(call find_python,$(PYTHON312),0x30c0000 <= sys.hexversion < 0x30d0000)
	if [ -z "$$python" ]; then
	    echo "test-312: found no Python 3.12, so nothing was tested; name one with PYTHON312=/somewhere/python3.12"
	else
	    $(MAKE) $(VENV_312)/.test PYTHON="$$python"
	    $(VENV_312)/bin/python -m pytest $(PYTEST_ARGS)
	fi

docs: $(VENV_DOCS)/.docs ## the documentation site, in site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python -m mkdocs build --strict --site-dir site

paper: $(VENV)/.test ## every equation, table and figure of the paper at a small scale, one line each; a quarter of an hour at most
	@JAX_PLATFORMS=cpu XLA_FLAGS="$(QUICK_COMPILING) $${XLA_FLAGS:-}" $(VENV)/bin/python experiments/paper.py $(PAPER_ARGS)

bench: $(VENV_CONVERT)/.convert ## the benchmarks of docs/benchmarks.md on this CPU, PyTorch beside it; over an hour
	@JAX_PLATFORMS=cpu $(VENV_CONVERT)/bin/python experiments/bench/run.py $(BENCH_ARGS)

gpu: ## checks, speed and runs on an accelerator in 25 minutes, with a python that has JAX for it: make gpu BENCH_PYTHON=python3
	@PYTHONPATH=$(CURDIR) $(BENCH_PYTHON) experiments/gpu.py $(GPU_ARGS)

count-gpu: ## what a step asks of an H100, compiled for one that need not be there: make count-gpu BENCH_PYTHON=python3, which has jax[cuda13]
	@JAX_PLATFORMS=cpu PYTHONPATH=$(CURDIR) $(BENCH_PYTHON) -m experiments.bench.h100 $(BENCH_ARGS)

lint: $(VENV)/.dev ## formatting, lint and types
	@$(VENV)/bin/python -m ruff format --check $(CODE)
	$(VENV)/bin/python -m ruff check $(CODE)
	$(VENV)/bin/python -m pyright --level error --pythonpath $(VENV)/bin/python

format: $(VENV)/.dev ## format the code and mend what the linter can
	@$(VENV)/bin/python -m ruff format $(CODE)
	$(VENV)/bin/python -m ruff check --fix $(CODE)

clean: ## remove environments and caches; runs stay
	@rm -rf $(VENV) $(VENV_312) $(VENV_CONVERT) $(VENV_PREPARE) $(VENV_DOCS) site .pytest_cache .ruff_cache .hypothesis dist
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# ---- environments: a marker file says that the extras of its name are installed; `base` is none of them

$(VENV)/.base: $(INPUTS)
	$(call install,$(VENV),.)
	touch $@

$(VENV)/.test: $(INPUTS)
	$(call install,$(VENV),.[test])
	touch $(VENV)/.base $@

$(VENV)/.dev: $(INPUTS)
	$(call install,$(VENV),.[dev])
	touch $(VENV)/.base $(VENV)/.test $@

$(VENV)/.browser: $(INPUTS)
	$(call install,$(VENV),.[browser])
	touch $(VENV)/.base $(VENV)/.test $@

$(VENV_312)/.test: $(INPUTS)
	$(call install,$(VENV_312),.[test])
	touch $@

$(VENV_CONVERT)/.convert: $(INPUTS)
	$(call install,$(VENV_CONVERT),.[test$(comma)convert])
	touch $@

$(VENV_PREPARE)/.prepare: $(INPUTS)
	$(call install,$(VENV_PREPARE),.[test$(comma)prepare])
	touch $@

# the site is made from the sources: it needs the packages of its extra alone
$(VENV_DOCS)/.docs: $(INPUTS)
	@$(call find_python,$(PYTHON),sys.hexversion >= 0x30b0000)
	"$${python:?cheem_jax needs Python 3.11 or later}" -m venv --clear $(VENV_DOCS)
	extra='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")'
	$(VENV_DOCS)/bin/python -c "$$extra" | $(VENV_DOCS)/bin/python -m pip install --quiet --no-input \
	    --disable-pip-version-check --constraint constraints.txt --requirement /dev/stdin
	touch $@

# one shell per recipe
.ONESHELL:
comma := ,

# an environment whose interpreter has gone is made again
$(foreach venv,$(VENV) $(VENV_312) $(VENV_CONVERT) $(VENV_PREPARE) $(VENV_DOCS),$(shell test -x $(venv)/bin/python || rm -f $(venv)/.[a-z]*))

# $(call find_python,CANDIDATES,CONDITION ON sys): sets $python to the first that runs and fits, or to nothing.
# A version manager's shim exists without running, so each candidate is tried.
define find_python
python=
for candidate in $(1); do
    if "$$candidate" -c 'import sys; sys.exit(not ($(2)))' 2>/dev/null; then python=$$candidate; break; fi
done
endef

# $(call install,ENVIRONMENT,REQUIREMENT): makes the environment if need be, then installs the pinned versions.
# Bytecode is left to the first import: most of what is installed is never imported.
define install
@SECONDS=0
$(call find_python,$(PYTHON),sys.hexversion >= 0x30b0000)
if [ -z "$$python" ]; then
    echo "error: cheem_jax needs Python 3.11 or later, and none of these runs and is: $(PYTHON); name one with PYTHON=/somewhere/python3.11" >&2
    exit 2
fi
echo "Setting up $(1) with $$("$$python" --version), once; most of it is downloads"
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf $(1)
    if "$$python" -c 'import ensurepip' 2>/dev/null; then
        "$$python" -m venv $(1)
    elif "$$python" -m pip --version >/dev/null 2>&1; then
        "$$python" -m venv --without-pip $(1)
        "$$python" -m pip --python $(1)/bin/python install --quiet pip
    else
        echo "error: '$$python' can make no virtual environments; on Debian: apt-get install python3-venv" >&2
        exit 2
    fi
fi
$(1)/bin/python -m pip install --no-compile --prefer-binary --no-input --disable-pip-version-check \
    --constraint constraints.txt --editable '$(2)' \
    | sed -u -n -E -e 's/^ *Downloading ([^-]+)-([^-]+)-.*\(([0-9.]+ [MG]B)\).*/  \1 \2, \3/p' \
                   -e 's/^Installing collected packages.*/  installing .../p'
echo "Ready after $$SECONDS s"
endef
