# `make demo` and `make test` each work alone on a fresh clone: both first make .venv with the pinned packages.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format clean

demo: $(INSTALLED)
	$(BIN)/raycloak demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Build isolation is off because it would fetch a setuptools that constraints.txt does not pin.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch==2.13.0
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
