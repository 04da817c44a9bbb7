# `make demo` and `make test` need Python >= 3.10 and make, nothing else: they build .venv on first use.
PYTHON ?= python3
# `make test TORCH=2.14.1` takes that release in place of the one in constraints.txt, in an environment of its own;
# TORCH=newest takes the newest that pyproject.toml lets in.
TORCH :=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# an environment with nothing in it; with the package alone, for the demo; with what tests need; with all tools
MADE := $(VENV)/constraints.txt
READY := $(VENV)/ready
TESTED := $(VENV)/tested
STAMP := $(VENV)/installed
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --no-compile -c $(MADE)
# What no test imports, or one alone, is compiled by the process that imports it.
RARELY_IMPORTED := /(tests?|models|pip|setuptools|networkx|pygments|pytorch_lightning)/
# of what pip says: which package it is at, in lines that fit a terminal
SHOWN := while read -r what name rest; do name=$${name\#\#*/}; case "$$what $$name" in \
	Collecting*|Processing*) echo "  $${name%%-[cp][py][0-9]*}" ;; \
	*.metadata) ;; \
	Downloading*) echo "    downloading $$rest" ;; \
	"Installing collected") echo "  unpacking all of these: half a minute, the longest step" ;; \
	esac; done
PYTEST_ARGS ?=
# Tests wait at times, for ranks and limits of time: one process more than there are cores.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help install demo test test-all test-engines lint format bench docs clean
.DEFAULT_GOAL := help
.NOTPARALLEL: # all install into one environment

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: $(STAMP) ## Build .venv with the package and its tools

$(MADE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "lightning_topt needs Python >= 3.10; set PYTHON=..., e.g. make test PYTHON=python3.11" >&2; exit 1; }
	@echo "Making an environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	-@$(BIN)/python -m pip install -qq --no-compile --upgrade pip # that of Python 3.11 takes three times as long
	@sed '$(if $(TORCH),$(if $(filter newest,$(TORCH)),/^torch==/d,s/^torch==.*/torch==$(TORCH)/))' constraints.txt > $@

$(READY): $(MADE)
	@echo "Installing what lightning_topt needs (PyTorch is the largest)"
	@{ $(PIP) -e . && touch $@; } | $(SHOWN); test -e $@

$(TESTED): $(MADE)
	@echo "Installing what lightning_topt and its tests need (PyTorch is the largest)"
	@{ $(PIP) -e ".[test]" && touch $(READY) $@; } | $(SHOWN); test -e $@
	@# once, on all cores, not in each process of the tests
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY_IMPORTED)' $(VENV)/lib || true

$(STAMP): $(TESTED)
	@echo "Installing the tools for checks, benchmarks and notebooks"
	@{ $(PIP) -e ".[dev]" && touch $@; } | $(SHOWN); test -e $@

demo: $(READY) ## Train a small GPT under ddp, topt, and topt with less memory; ends with a table of the three
	@echo "Training a small GPT three times on 2 CPU ranks, in about a minute."
	@echo "Python, PyTorch and Lightning start first each time, which takes some seconds."
	@PYTHONWARNINGS=ignore $(BIN)/python examples/demo.py

test: export PYTHONDONTWRITEBYTECODE := # hundreds of processes would compile the package each for itself
test: $(TESTED) ## Run the whole test suite, in one process more than there are cores, at most 4
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-all: export PYTHONDONTWRITEBYTECODE := # as above
test-all: $(TESTED) ## Run the suite with the crossings of options that `make test` leaves out
	ONCE=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "" $(PYTEST_ARGS)

test-engines: $(STAMP) ## Run the tests under what starts ranks on clusters, which take minutes each
	$(BIN)/python -m pytest tests/engines -rs $(PYTEST_ARGS)

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run every benchmark; results go to benchmarks/results
	@for name in search.frontier foreign.overhead prediction.memory_limits; do \
		echo "benchmarks.$$name" && $(BIN)/python -m benchmarks.$$name || exit 1; done

docs: $(VENV)/docs-installed ## Build the documentation site into site/, without network, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e ".[docs]"
	@touch $@

clean: ## Remove the environment and caches
	rm -rf .venv .venv-torch-* .pytest_cache .mypy_cache .ruff_cache build dist site
