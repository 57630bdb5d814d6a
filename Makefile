# `make run` shows what Weir does, `make test` checks all of it; both set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := allocator tests
SAMPLE := allocator/traces/samples/serve-8-streams.csv.gz
PICTURE := out/serve-8-streams.svg

.PHONY: run test lint types unit prometheus compiled clean

run: $(READY)
	@mkdir -p out
	$(BIN)/weir replay $(SAMPLE) --plot $(PICTURE)

# Prometheus mostly waits, in real time, and types and compiling take one core each: at the same time, each with its
# output in one piece.
test: lint unit
	MYPYC_OPT_LEVEL=1 $(MAKE) --jobs=3 --output-sync=target types prometheus compiled \
	  ONLY="tests/conformance tests/unit/caching $(ONCE)"

# ruff does not follow links, so the folders metrics and stress are named; mypy does, and knows them
# as allocator.metrics and allocator.stress.
lint: $(READY)
	$(BIN)/ruff check allocator metrics stress tests
	$(BIN)/ruff format --check allocator metrics stress tests

types: $(READY)
	$(BIN)/mypy $(CODE)

# What measures coverage runs two to three times as slow, so only the tests that are to cover the code are measured, and
# of those not the few that do the same thing very often, or in processes of their own.  LONG: not compiled either.
MEASURED := tests/scenarios tests/unit
LONG := tests/scenarios/test_running_for_ever.py tests/unit/traces/test_needs.py tests/unit/stress/benchmarks/test_on_gpu.py tests/unit/test_packaging.py
OFTEN := tests/scenarios/test_faults.py tests/unit/caching/test_steps.py tests/unit/integrations/cupy/test_memory.py \
  tests/unit/stress/benchmarks/test_benchmarks.py tests/unit/test_collector.py tests/unit/traces/test_samples.py
# What they cover is covered by others as well.
AGAIN := tests/scenarios/test_metrics.py tests/scenarios/test_stream_identity.py tests/scenarios/test_undeclared.py \
  tests/unit/caching/test_turns.py tests/unit/cli/test_run.py tests/unit/devices/sim/test_oracle.py \
  tests/unit/integrations/cupy/test_scenarios.py tests/unit/traces/test_fuzz.py
# Of the wheel that the compiled tests are built with.
ONCE := tests/unit/test_compiled_install.py
OTHERS := $(LONG) $(AGAIN) tests/browser tests/conformance tests/faults tests/fuzz tests/gpu tests/model
# They decide which thread takes the next step, or count: in a process where a server of another test runs they could not.
ALONE := tests/schedules $(OFTEN)

# Many tests wait for a server, a browser or a child process: more workers than cores keep the cores busy.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null) && echo $$((2 * n)) || echo auto)

PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

unit: $(READY)
	$(PYTEST) --cov --cov-report=term --cov-report=json:coverage.json $(MEASURED) $(patsubst %,--ignore=%,$(LONG) $(AGAIN) $(OFTEN) $(ONCE))
	$(BIN)/python -m tests.coverage_check coverage.json --lines 97 --branches 92
	$(PYTEST) $(OTHERS)
	$(PYTEST) $(ALONE)

# In one process: each would start a server and a scene of its own.
prometheus: $(READY)
	$(BIN)/python -m pytest tests/prometheus

# Everything that a compiled module can change, on the compiled build.  ONLY: other tests, or one of them.
ONLY := tests/conformance tests/scenarios tests/unit/blocks tests/unit/caching tests/unit/events \
  tests/unit/integrations tests/unit/streams tests/unit/test_allocation.py tests/unit/test_collector.py $(ONCE)
compiled: $(READY)
	$(BIN)/python tests/compiled.py --numprocesses $(WORKERS) -q $(ONLY) $(LONG:%=--ignore=%)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Weir needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing; install it (Debian, Ubuntu: apt-get install python3-venv) and try again." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage coverage.xml coverage.json htmlcov
	rm -rf src/weir_allocator.egg-info
	find allocator metrics stress tests -name __pycache__ -type d -prune -exec rm -rf {} +
