# From a fresh clone: `make demo` shows a finding, `make test` runs every check.
# Only make and Python 3.11 or later are needed; everything goes into .venv.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
AT_LEAST_311 := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c '$(AT_LEAST_311)' 2>/dev/null && echo $$p && break; done)
PYTEST_FLAGS ?=

.PHONY: demo test lint format bench docs clean .venv
.DEFAULT_GOAL := test

demo: $(VENV)/.package
	@echo "== a tensor-parallel MLP with a bug"
	@$(BIN)/spmdcheck examples/megatron_mlp.py; found=$$?; \
	if [ $$found -ne 1 ]; then echo "demo: expected a finding (exit code 1), got exit code $$found"; exit 1; fi
	@echo "== the same, mended"
	@$(BIN)/spmdcheck examples/megatron_mlp_fixed.py

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict spmdtypes

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	$(BIN)/python benchmarks/corpus.py tests/corpus
	$(BIN)/python benchmarks/speed.py

docs: $(VENV)/.package
	$(BIN)/python tools/write_codes.py
	$(BIN)/python -m pip install --quiet $(TORCH) --editable ".[docs]"
	$(BIN)/mkdocs build --quiet

.venv: $(VENV)/.package

# A stamp is touched last, so an interrupted install is taken up again. torch comes first and
# alone: it is by far the largest download, and its stamp outlives edits of pyproject.toml.
$(VENV)/.torch: Makefile
	@$(or $(PYTHON),false) -c '$(AT_LEAST_311)' || { \
	echo "Python 3.11 or later is needed, found: $(or $(PYTHON),none). Say: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet $(TORCH) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.package pyproject.toml
	$(BIN)/python -m pip install --quiet $(TORCH) --editable ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache
