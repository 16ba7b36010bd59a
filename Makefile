# `make help` lists what there is.  Needs python3 >= 3.11 with its venv module, git and make; nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WANTED := setup.cfg pyproject.toml requirements.txt requirements-dev.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
PYTEST_ARGS ?=
# Two processes, each with servers of its own; one file's tests stay together, and the small files come last.
side-by-side := -n 2 --dist loadfile --no-loadscope-reorder
quick-tests := tests/app tests/house tests/routing tests/slotkeeper tests/tasks tests/tools tests/system/smoke
LOCK_ARGS ?=

.PHONY: help setup setup-dev run demo test test-all test-system test-nightly attack drill live-presets docs lint check format bench lock clean

help: ## Show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(VENV)/.installed ## Make .venv and install the pinned dependencies

run: setup ## Start everything on this machine, with three demo servers; Ctrl-C stops it
	@exec $(BIN)/slotkeeper up

demo: setup ## Start everything, run 20 mixed jobs, print the results, stop
	@exec $(BIN)/slotkeeper up --exit-after-demo --demo-jobs 20

test: setup-dev ## Install what the tests need and run the quick ones (PYTEST_ARGS="-k lease", PYTEST_ARGS="-n 0 --pdb")
	@exec $(BIN)/python -m pytest $(side-by-side) $(quick-tests) -m "not postgres" $(PYTEST_ARGS)

test-all: test test-system ## All tests but those of the night: also PostgreSQL, brokers, a browser, faults

test-system: setup-dev ## What test-all has beyond test
	@status=0
	$(BIN)/python -m pytest $(side-by-side) $(quick-tests) -m postgres $(PYTEST_ARGS) || status=$$?
	$(BIN)/python -m pytest $(side-by-side) tests/system --ignore tests/system/smoke $(PYTEST_ARGS) || status=$$?
	exit $$status

test-nightly: setup-dev ## Mutants, pairs of crash points, generated requests, long searches and attacks; takes hours
	@status=0
	$(BIN)/python -m pytest $(side-by-side) tests/nightly --ignore tests/nightly/live_presets $(PYTEST_ARGS) || status=$$?
	export SLOTKEEPER_ALL_PAIRS=1 SLOTKEEPER_TEST_EXAMPLES=500
	$(BIN)/python -m pytest $(side-by-side) tests/system/faults/test_crash_points.py tests/routing/queue $(PYTEST_ARGS) || status=$$?
	$(BIN)/python -m tests.system.attacks || status=$$?
	exit $$status

live-presets: setup-dev ## Run presets against real servers, installed into var/live; takes minutes (LIVE="cog mosec")
	@LIVE="$(LIVE)" exec $(BIN)/python -m pytest -m live_servers tests/nightly/live_presets $(PYTEST_ARGS)

docs: setup-dev ## Build the site of the documents into build/docs; a warning is an error
	@$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs . build/docs
	@echo "The site is in build/docs/docs"

lint: setup-dev ## Format, lint, types, import contracts, Lua lint: what can be said without running anything
	@step() { echo "== $$*"; "$$@"; }
	step $(BIN)/ruff format --check .
	step $(BIN)/ruff check .
	step $(BIN)/mypy
	step $(BIN)/mypy --config-file tests/mypy.ini
	step $(BIN)/lint-imports
	step $(BIN)/python -m pytest --quiet -n 0 -k luacheck tests/house/test_lua_headers.py # skipped where luacheck is not installed

check: lint test ## lint, then test

attack: setup-dev ## Attack a Slotkeeper of its own, for minutes, and print a score card (ATTACKS="bodies")
	@exec $(BIN)/python -m tests.system.attacks $(ATTACKS)

drill: setup-dev ## Let a Slotkeeper of its own fail on purpose, and prove that no job gets lost (DRILL_ARGS="--help")
	@exec $(BIN)/python -m tools.drill $(DRILL_ARGS)

format: setup-dev ## Format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup-dev ## Measure (BENCH_ARGS="handoff"); takes minutes and wants a quiet machine
	@exec $(BIN)/python -m tools.benchmarks $(BENCH_ARGS)

lock: ## Write requirements*.txt anew from setup.cfg, with all hashes (LOCK_ARGS="--upgrade")
	@tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT
	$(PYTHON) -m venv "$$tools"
	"$$tools/bin/pip" --disable-pip-version-check install -qq uv
	lock() { sed -n 's/^requires = \["\(.*\)"\]/\1/p' pyproject.toml | "$$tools/bin/uv" --quiet pip compile setup.cfg - \
		--universal --python-version 3.11 --generate-hashes --annotation-style line \
		--custom-compile-command "make lock" $(LOCK_ARGS) "$$@" >/dev/null; }
	lock --output-file requirements.txt
	lock --constraint requirements.txt --extra dev --output-file requirements-dev.txt

clean: ## Remove .venv and what tools have left; the state in var/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed-dev: $(WANTED) | $(VENV)/bin/python
	@echo "Installing Slotkeeper and what its tests need into $(VENV) ..."
	@$(call install,requirements-dev.txt)
	@touch $(VENV)/.installed $@

$(VENV)/.installed: $(WANTED) | $(VENV)/bin/python
	@echo "Installing Slotkeeper into $(VENV) ..."
	@$(call install,requirements.txt)
	@touch $@

$(VENV)/bin/python:
	@$(check-python)
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@test -e $(VENV) && new= || new=1
	@$(PYTHON) -m venv $(VENV) || { test -z "$$new" || rm -rf $(VENV); exit 1; }

# What is installed has a hash that was written down when it was tested, what builds this project too; the project itself
# has none, and so is installed by itself.
define install
$(PIP) --require-hashes --requirement $(1)
$(PIP) --no-deps --no-build-isolation --editable .
endef

# What is missing is said in one sentence, with the command that helps.
define check-python
if ! command -v $(PYTHON) >/dev/null; then
	echo "Slotkeeper needs Python 3.11 or newer, and there is no '$(PYTHON)' here: install it (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3" >&2; exit 1
fi
if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
	echo "Slotkeeper needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1): install a newer one beside it and name it: make PYTHON=python3.12" >&2; exit 1
fi
if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
	echo "'$(PYTHON)' cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1
fi
endef
