# Everything that a newcomer and CI run. `make quickstart` and `make test` start from a bare
# checkout: the environment in .venv is made first and again whenever the dependencies change.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(firstword $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*)))
# cpu or gpu: which build of FAISS is installed beside the library. Unless one is named
# (`make venv EXTRA=gpu`) an environment that is there keeps its own.
EXTRA ?= $(or $(INSTALLED),cpu)
# Passed on: `make quickstart ARGS="--set seed=1"`, `make unit ARGS="-k assets"`.
ARGS ?=

# Tests with Ray start many processes each and run one at a time. They leave the cores idle for a
# quarter of it, in which the others run, at a lower priority, the longest first.
DISTRIBUTED := tests/distributed
# Runtimes of CPUs load libraries with which a process dies of a signal that other tests send.
RUNTIMES := tests/runtimes
SERIAL := tests/jobs tests/ray tests/drill -m ray
BESIDE := tests/jobs tests/drill tests/parity tests/unit -m "not ray"
CORES := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

SHELL := /bin/bash
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
OTHER_FAISS := $(if $(filter gpu,$(EXTRA)),faiss-cpu,faiss-gpu-cu12)
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' cluster/constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help venv quickstart causal2vec-quickstart cde-quickstart nomic-quickstart papers test core paths unit check \
  slow cuda-wheel docs drill mlflow clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 32

venv: $(STAMP) ## the environment in .venv, with the versions of cluster/constraints.txt

$(STAMP): pyproject.toml cluster/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rayembed needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing rayembed and its dependencies into $(VENV) (some minutes the first time)..."
	$(PYTHON) -m venv $(VENV)
	# faiss-cpu and faiss-gpu-cu12 own the same files: one that was installed before makes room.
	$(BIN)/python -m pip uninstall --disable-pip-version-check --quiet --quiet --yes $(OTHER_FAISS)
	rm -f $(VENV)/.installed-*
	# By itself and first, so that a CPU build of this version beside pip's index is taken.
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile torch==$(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -e ".[$(EXTRA),dev]" \
	  -c cluster/constraints.txt
	# pip compiles 32,000 files on one core. Some are templates or of other Pythons, and fail.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# One worker would train in its own process: the quickstarts show Ray, as clusters have it. Without:
# `make quickstart RUNTIME=local`.
RUNTIME := ray
ON_RAY = --set placement.runtime=$(RUNTIME)

quickstart: $(STAMP) ## train, evaluate and register a small NV-Embed on this machine
	$(BIN)/python jobs/train_nvembed.py --recipe nvembed-quickstart $(ON_RAY) $(ARGS)

causal2vec-quickstart: $(STAMP) ## the same with a small Causal2Vec
	$(BIN)/python jobs/train_causal2vec.py --recipe causal2vec-quickstart $(ON_RAY) $(ARGS)

cde-quickstart: $(STAMP) ## the same with a small CDE
	$(BIN)/python jobs/train_cde.py --recipe cde-quickstart $(ON_RAY) $(ARGS)

nomic-quickstart: $(STAMP) ## the same with a small Nomic Embed v2 MoE
	$(BIN)/python jobs/train_nomic.py --recipe nomic-quickstart $(ON_RAY) $(ARGS)

papers: $(STAMP) ## which claims of the papers hold at a small size; ARGS="--hours 3" does as many as fit
	$(BIN)/python jobs/papers/measure_directions.py $(ARGS)

# Tests that look at paths: frames, package data, PYTHONPATH, commands, links of the repository.
PATHS := tests/distributed/test_hangs.py $(addprefix tests/unit/test_,$(addsuffix .py,training_host_waits \
  training_hangs import_circles platform_folder house_guides security_code quiet stopping))

# Of a run that has `make paths` as well.
ELSEWHERE := $(if $(WITHOUT_PATHS),$(addprefix --ignore=,$(PATHS)))

test: $(STAMP) ## all tests
	@export TESTS_PREPARED_FOR=$$$$; status=0; log=$$(mktemp); trap 'kill $$beside 2>/dev/null; rm -f "$$log"' EXIT; \
	$(BIN)/python -m pytest $(DISTRIBUTED) $(CORES) $(ELSEWHERE) $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest $(RUNTIMES) -n logical --maxprocesses 8 $(ARGS) || status=$$?; \
	echo 'Beside the next ones: $(BESIDE); what they print follows at the end.'; \
	nice $(BIN)/python -m pytest $(BESIDE) $(CORES) $(ELSEWHERE) $(ARGS) > "$$log" 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest $(SERIAL) $(ARGS) || status=$$?; \
	wait $$beside || status=$$?; cat "$$log"; \
	exit $$status

core: $(STAMP) ## all tests of the core, from a copy without optional features and papers
	@place="$$(mktemp -d)"; trap 'rm -rf "$$place"' EXIT; status=0; \
	$(BIN)/python tests/support/parts.py "$$place/copy" && cd "$$place/copy" && export PYTHONPATH="$$PWD/platform" && \
	{ $(BIN)/python -m pytest $(DISTRIBUTED) $(CORES) $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest $(BESIDE) $(CORES) $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest $(SERIAL) $(ARGS) || status=$$?; \
	exit $$status; }

paths: $(STAMP) ## the tests that look at paths, from a copy with an awkward one
	@place="$$(mktemp -d)"; trap 'rm -rf "$$place"' EXIT; copy="$$place/rayembed ü copy/rayembed"; \
	mkdir -p "$$copy" && tar --exclude=./$(VENV) --exclude=./.git --exclude='./.*_cache' --exclude=./outputs -cf - . | tar -xf - -C "$$copy" && \
	ln -s "$(CURDIR)/$(VENV)" "$$copy" && cd "$$copy" && \
	PYTHONPATH="$$copy/platform" $(BIN)/python -m pytest $(PATHS) $(ARGS)

slow: $(STAMP) ## the tests that take many minutes each, one after the other
	$(BIN)/python -m pytest -m slow $(ARGS)

# The index may have a CPU build beside it, whose version counts as newer: `===` takes no other.
CUDA := .venv-cuda
CUDA_STAMP := $(CUDA)/.installed

$(CUDA_STAMP): pyproject.toml cluster/constraints.txt tests/support/no_accelerator.c
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --disable-pip-version-check --quiet torch===$(TORCH)
	$(CUDA)/bin/python -m pip install --disable-pip-version-check --quiet -e ".[cpu,dev]" -c cluster/constraints.txt
	$(CC) -shared -fPIC -O1 -o $(CUDA)/no_accelerator.so tests/support/no_accelerator.c
	touch $@

cuda-wheel: $(CUDA_STAMP) ## steps by the code of a GPU, without one, in torch's CUDA build (7 GB in .venv-cuda)
	LD_PRELOAD="$(CURDIR)/$(CUDA)/no_accelerator.so" $(CUDA)/bin/python -m pytest tests/cuda_wheel $(ARGS)

drill: $(STAMP) ## faults thrown at a small run, one after the other; a table of what they cost
	PYTHONPATH=tests/support $(BIN)/python tests/drill/run_drill.py $(ARGS)

unit: $(STAMP) ## the tests that take seconds
	$(BIN)/python -m pytest tests/unit -m "not assets and not whole" $(CORES) $(ARGS)

check: $(STAMP) ## format, lint, types, layers, spelling, English
	@test ! -e platform/__init__.py || { \
	  echo "platform/__init__.py would shadow Python's own module 'platform'; remove it." >&2; exit 1; }
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos
	$(BIN)/python tests/support/language.py

docs: $(STAMP) ## the documentation as a site in site/html, with a reference made from the code
	$(BIN)/python docs/site/build_site.py

mlflow: $(STAMP) ## MLflow's page for the runs of the quickstart
	@test -e outputs/mlflow.db || { echo "outputs/mlflow.db: no run yet; make quickstart" >&2; exit 1; }
	$(BIN)/mlflow server --host 127.0.0.1 --port 5000 --backend-store-uri sqlite:///outputs/mlflow.db

clean: ## remove caches and build outputs (not .venv, not outputs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find platform tests jobs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
