# One environment in .venv, made on demand; a stamp file per set of packages, so nothing is installed twice.
# Where packages come from is pip's own configuration; which versions is constraints.txt. Python itself compiles the
# modules that are imported, so pip does not compile all of them.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
NEWEST ?= .venv-newest
NEWEST_TORCH ?= torch
PYTEST_FLAGS ?= -n auto --dist worksteal

BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/python $(PIP) --constraint constraints.txt
EXTRAS := dev,docs,bench,databases,engine,measured,oracle-hf,ray
define UNBOUNDED
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = (each for name in "$(EXTRAS)".split(",") for each in project["optional-dependencies"][name])
print(*(re.sub(r",<[0-9.]+", "", each) for each in (*project["dependencies"], *extras)), sep="\n")
endef
export UNBOUNDED

# Where it is set, every Python that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help plan test test-all test-newest equal coverage compile compile-slots compile-pool bench docs lint types style format clean gpu-campaign

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

plan: $(VENV)/.base ## plan the example workload: prints the plan and writes plan.json
	$(BIN)/capplan plan examples/chat-96/workload.yaml -o plan.json

test: ## linters, types, import arrows, and the tests that a change is likely to break
test-all: ## everything CI runs: those and all other tests
test: SELECTED := -m 'not process and not fuzz and not long'
test test-all: $(VENV)/.test
	$(MAKE) --jobs=2 --output-sync=target compile lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(SELECTED)

test-newest: ## the tests with the newest versions of everything, beyond the bounds of pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(PYTHON) -c "$$UNBOUNDED" > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python $(PIP) --upgrade --requirement $(NEWEST)/requirements.txt $(NEWEST_TORCH)
	$(NEWEST)/bin/python $(PIP) --no-deps --editable .
	$(NEWEST)/bin/python -m pip list | grep -iE '^(llvmlite|numba|pydantic|torch|typer) '
	$(NEWEST)/bin/python -m pytest $(PYTEST_FLAGS)

equal: $(VENV)/.test ## compare plans, simulations, schemas, flags and figures with their recordings
	$(BIN)/python -m tests.equal $(EQUAL_FLAGS)

coverage: $(VENV)/.test ## the tests again, slower, with the lines that they run: 85 % at least
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --cov --cov-report=term

compile: compile-pool compile-slots ## compile once what tests call, into the cache on disk

compile-pool compile-slots: $(VENV)/.test
	$(BIN)/python -m tests.compile $(@:compile-%=%)

bench: $(VENV)/.test ## time what has a speed to keep
	$(BIN)/python -m pytest benchmarks --benchmark-only

docs: $(VENV)/.test ## build the documentation site into site/, strictly
	$(BIN)/mkdocs build --strict --quiet

gpu-campaign: $(VENV)/.test ## measure a CUDA machine into datasets/<gpu>, slice by slice; resumable
	$(BIN)/python -m capplan.profiling.campaign $(CAMPAIGN_FLAGS)

lint: types style ## ruff, mypy, import-linter

types: $(VENV)/.test
	$(BIN)/mypy

style: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(VENV)/.test ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) $(NEWEST) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	rm -rf .hypothesis .benchmarks .coverage .coverage.* htmlcov plan.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[$(EXTRAS)]' $(TORCH)
	@touch $@ $(VENV)/.base
