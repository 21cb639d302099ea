# `make demo` and `make test` each work alone on a fresh clone: both first make .venv with the pinned packages.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ON_RAY := tests/ray tests/test_snippets.py

.PHONY: demo test test-plain test-ray lint format fuzz proto clean

demo: $(INSTALLED)
	$(BIN)/raycloak demo

test: $(INSTALLED)
	MAKE=$(MAKE) exec $(BIN)/python -m tests.both_parts

test-plain: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(addprefix --ignore=,$(ON_RAY))

test-ray: $(INSTALLED)
	$(BIN)/python -m pytest $(ON_RAY)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stubs of the evidence service; a test compares them with what this makes.
proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. attestation/evidence.proto

# Seeds and findings go to FUZZ_DIR; INDEX=path/to/INDEX.json adds recorded evidence to the seeds.
FUZZ_DIR ?= build/fuzz
FUZZ_OPTIONS ?=

fuzz: $(INSTALLED)
	$(PIP) atheris==3.0.0
	$(BIN)/python -m tests.fuzz --folder $(FUZZ_DIR) $(if $(INDEX),--index $(INDEX)) $(FUZZ_OPTIONS)

# Build isolation is off because it would fetch a setuptools that constraints.txt does not pin.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch==2.13.0
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
