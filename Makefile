# Development commands. Each one sets up what it needs; the environment lives in .venv/.
#   PYTHON=python3.12      the Python (3.10 or later) to make the environment with
#   VENV=path              an environment elsewhere
#   ARGS='partitions=2'    what `make train` passes to `gpipe train`
#   BENCH_ARGS='steps=3'   what `make bench` passes to `gpipe bench`
#   TEST_ARGS='-k launch'  what `make test` passes to pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?= partitions=4
TEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
# Newer than pyproject.toml once everything that it asks for is installed.
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv train bench gpu-check test lint type format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALLED) ## Make the environment, with this project in it (done by itself when needed)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is missing or older than Python 3.10; type make PYTHON=python3.12, say" >&2; exit 1; }
	@echo "Installing into $(VENV) (PyTorch is large: minutes, and 3 to 6 GB of disk)" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

train: $(INSTALLED) ## Train the default network, in 4 partitions, on the digits that come with the package
	$(BIN)/gpipe train $(ARGS)

bench: $(INSTALLED) ## Measure speed and memory on this machine (about two minutes on two quiet cores)
	$(BIN)/gpipe bench $(BENCH_ARGS)

gpu-check: $(INSTALLED) ## Check and measure on one CUDA GPU, in under eight minutes: results/gpu.md
	@$(BIN)/python -m gpipe_cli.gpu_check

test: $(INSTALLED) ## Run all tests
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(INSTALLED) ## Check style and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(INSTALLED) ## Check types (mypy; strictly in gpipe_cli/pipeline)
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code, and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches and build outputs; .venv/, data/ and results/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -exec rm -rf {} +
