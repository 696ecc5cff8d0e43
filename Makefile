# Everything works with plain pip on a machine that has only Python. Targets re-use what is there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Any torch from 2.6 on works. PyPI's is a CUDA build of gigabytes; for the small one on a machine that reaches it:
# make demo PIP_TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
PIP_TORCH ?= torch==2.13.0

.PHONY: help setup demo test test-all test-long lint types docs lock sbom clean

help:
	@echo "make demo       set up, fetch SmolLM2-135M, export it, generate in every mode, compare the modes"
	@echo "make test       set up and run the tests"
	@echo "make test-all   those that start a Triton server or build TensorRT engines too"
	@echo "make test-long  the tests that take minutes or fetch larger models"
	@echo "make lint types ruff, contracts between packages, mypy"
	@echo "make docs       build the documentation into build/site"
	@echo "make lock       renew requirements/ci.txt: every package that the tests run with, with hashes"
	@echo "make sbom       write the software bill of materials of a release to build/sbom.json"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q $(PIP_TORCH)
	$(BIN)/python -m pip install -q -e ".[cpu,export,grammar,search,polygraphy,triton,dev,docs]"
	@touch $@

demo: setup
	$(BIN)/via-sd-export demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not long and not server and not engines"

test-all: setup
	$(BIN)/python -m pip install -q -e ".[tensorrt-rtx]"
	$(BIN)/python -m pytest -m "not long"

test-long: setup
	$(BIN)/python -m pytest -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/sphinx-build -q -E -W --keep-going docs build/site
	@echo "open build/site/index.html"

# The versions of Python and torch are those of .ci/run. Install with: pip install --require-hashes -r requirements/ci.txt
LOCK = $(BIN)/uv pip compile -q --upgrade --generate-hashes --python-version 3.11 --no-header --no-annotate pyproject.toml
RELEASED := $(foreach extra,cpu export grammar search polygraphy triton,--extra $(extra))

lock: setup
	$(BIN)/python -m pip install -q uv
	echo "torch==2.13.0" | $(LOCK) $(RELEASED) --extra tensorrt-rtx --extra dev --extra docs -c - -o requirements/ci.txt

sbom: setup
	$(BIN)/python -m pip install -q uv cyclonedx-bom
	mkdir -p build
	$(LOCK) $(RELEASED) -o build/release.txt
	$(BIN)/cyclonedx-py requirements build/release.txt --pyproject pyproject.toml --output-reproducible -o build/sbom.json

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
