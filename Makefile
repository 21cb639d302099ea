# Each target works alone on a fresh clone: it first makes .venv with the pinned packages.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --durations=25
GPU_PLATFORMS := _2_34 _2_28 _2_27 _2_17 2014
ON_RAY := $(shell awk '$$1 == "ray" { print $$2 }' tests/marks.txt)

# An image may forbid the cache of bytecode. Then each of some hundred processes compiles this repository anew: a tenth of
# its start, and a third of the collection of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-fast test-plain test-ray test-profile mutations format code-lines fuzz gpu-bundle gpu-check \
	proto reference pictures wheel sbom clean

demo: $(INSTALLED)
	$(BIN)/raycloak demo

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The tests without a mark; tests/marks.py says what the marks are.
test-fast: $(INSTALLED)
	$(PYTEST) --numprocesses 2 --dist worksteal -m "not (ray or process or server or slow)"

# ROOM=coordinator/ledger runs the tests of one room.
test: $(INSTALLED)
ifdef ROOM
	$(PYTEST) tests/$(ROOM)
else
	MAKE=$(MAKE) exec $(BIN)/python -m tests.both_parts
endif

test-plain: $(INSTALLED)
	$(PYTEST) --numprocesses 2 --dist worksteal -m "not ray"

# Each process has a cluster of its own; a file's tests share what it starts there.
test-ray: $(INSTALLED)
	$(PYTEST) --numprocesses 2 --dist loadfile $(ON_RAY)

# Processor seconds by test file, to benchmarks/results. PLACES="tests/workers tests/ray" measures those alone.
test-profile: $(INSTALLED)
	$(BIN)/python -m tests.costs $(PLACES)

# Fifty seeded bugs, each of which a test must notice. ROOMS="masks ledger" makes those of some rooms.
mutations: $(INSTALLED)
	$(BIN)/python -m tests.mutations $(ROOMS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The code lines of the wheels, by room; tests/code_lines.py says what is counted.
code-lines: $(INSTALLED)
	$(BIN)/python -m tests.code_lines

# docs/reference/, from the docstrings of the public names; a test compares it with what this makes.
reference: $(INSTALLED)
	$(BIN)/python -m tests.reference

# docs/pictures/, from a run of the demo and by Chromium.
pictures: $(INSTALLED)
	$(BIN)/python -m tests.pictures

# The stubs of the three services; a test compares them with what this makes.
proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
		raycloak/attestation/service/evidence.proto raycloak/coordinator/client/service.proto
	cd lab && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
		raycloak_lab/adapter/adapter.proto

# Seeds and findings go to FUZZ_DIR; INDEX=path/to/INDEX.json adds recorded evidence to the seeds.
FUZZ_DIR ?= build/fuzz
FUZZ_OPTIONS ?=

fuzz: $(INSTALLED)
	$(PIP) atheris==3.0.0
	$(BIN)/python -m tests.fuzz --folder $(FUZZ_DIR) $(if $(INDEX),--index $(INDEX)) $(FUZZ_OPTIONS)

# dist/: both wheels of the commit that is checked out. Their bytes follow from the commit and from setuptools' version:
# they have the commit's time, modes that no umask changes, and no compression, whose bytes would follow from zlib's.
wheel: $(INSTALLED)
	rm -rf build/wheel dist
	mkdir -p build/wheel
	git -c tar.umask=0022 archive HEAD | tar --extract --same-permissions --directory build/wheel
	umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m pip wheel --quiet \
		--disable-pip-version-check --no-deps --no-index --no-build-isolation \
		--config-settings=--build-option=--compression=stored --wheel-dir dist build/wheel build/wheel/lab
	cd dist && sha256sum *.whl | tee SHA256SUMS

# The packages that the wheel requires, and those of the image: deploy/Dockerfile names the same extras.
sbom: wheel
	$(BIN)/python -m tests.sbom dist/raycloak-*.whl > dist/raycloak.cdx.json
	$(BIN)/python -m tests.sbom dist/raycloak-*.whl hf otel > dist/image.cdx.json

# What a machine with a GPU lacks, as one file: docs/gpu.md. pip matches a wheel's platform exactly. No run starts Ray's
# Java part, its libraries of reinforcement learning and language models, or the pages of its dashboard.
gpu-bundle: $(INSTALLED)
	rm -rf .gpu
	$(PIP) --no-deps --no-compile --only-binary=:all: --python-version 3.12 --implementation cp \
		$(GPU_PLATFORMS:%=--platform manylinux%_x86_64) --requirement benchmarks/gpu/requirements.txt --target .gpu/site
	cd .gpu/site/ray && rm -r jars rllib llm dashboard/client
	$(BIN)/python -m tarfile --create .gpu/site.tar.xz .gpu/site
	rm -r .gpu/site
	@echo 'Take this checkout with its folder .gpu to the machine, and there: make gpu-check'

# Needs no environment of this repository, which a machine without a network cannot have.
gpu-check:
	bash benchmarks/gpu/run.sh

# Build isolation is off because it would fetch a setuptools that constraints.txt does not pin.
$(INSTALLED): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch==2.13.0
	$(PIP) --no-build-isolation --editable '.[dev]' --editable lab
	touch $@

clean:
	rm -rf .venv build dist *.egg-info lab/build lab/*.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
