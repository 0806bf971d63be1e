# The commands README names; each sets up what it needs first. An active virtual environment is used as it
# is, otherwise one is made in .venv. Extra arguments: make demo ARGS="--json demo.json"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
# Named after this checkout: another one's editable install in the same environment is not ours.
STAMP := $(VENV)/.installed$(subst /,-,$(CURDIR))
ARGS ?=

.PHONY: venv demo test test-unit test-integration test-compat lint bench-control bench-poa bench-smoke soak

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch '$@'

demo: $(STAMP)
	$(BIN)/dynamo-poa demo $(ARGS)

test: test-unit test-integration

# Unit tests share the cores; integration tests start whole graphs and measure time, so they go one by one.
test-unit: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --ignore tests/integration tests $(ARGS)

test-integration: $(STAMP)
	$(BIN)/python -m pytest -q tests/integration $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-control: $(STAMP)
	$(BIN)/python -m dynamo_poa.bench.control $(ARGS)

bench-poa: $(STAMP)
	$(BIN)/python -m dynamo_poa.bench.sweep $(ARGS)

# A few cells of both engines and their report: whether the bench works, in three minutes.
bench-smoke: $(STAMP)
	rm -rf build/smoke
	$(BIN)/dynamo-poa bench run smoke --out build/smoke $(ARGS)
	$(BIN)/dynamo-poa bench report build/smoke

# Twenty minutes of load while processes are killed and stopped: make soak ARGS="--minutes 3 --json soak.json"
soak: $(STAMP)
	$(BIN)/python -m dynamo_poa.bench.soak $(ARGS)

# The plugin, the controller and the frontend on a later Dynamo, workers on ours. That release's own dependencies
# need a second index for its mock engine, which is not used here, so it is installed without them.
COMPAT := $(CURDIR)/.venv-compat
COMPAT_VERSION := 1.6.1

$(COMPAT)/.installed: pyproject.toml constraints.txt
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	grep -v '^ai-dynamo' constraints.txt > $(COMPAT)/requirements.txt
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(COMPAT)/requirements.txt
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		ai-dynamo==$(COMPAT_VERSION) ai-dynamo-runtime==$(COMPAT_VERSION) -e .
	touch $@

test-compat: $(STAMP) $(COMPAT)/.installed
	DYN_POA_COMPAT_PYTHON=$(COMPAT)/bin/python $(BIN)/python -m pytest -q tests/compat $(ARGS)
