# The commands README names; each sets up what it needs first. An active virtual environment is used as it
# is, otherwise one is made in .venv. Extra arguments: make demo ARGS="--json demo.json"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
# Named after this checkout: another one's editable install in the same environment is not ours.
STAMP := $(VENV)/.installed$(subst /,-,$(CURDIR))
ARGS ?=

.PHONY: venv demo test test-unit test-integration lint bench-control

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
