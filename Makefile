# The commands of this project. The first one that needs it makes .venv from pyproject.toml and constraints.txt.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PYTHON := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.installed
ARGS :=
LINT := lint-format lint-code lint-types lint-notebooks lint-sizes
# The tests are split into processes: one that has compiled some thousand programs is near the limit of memory maps, and
# XLA ends it with a segmentation fault. Each keeps about one core busy. JOBS of them run at a time, the longest first;
# what a process prints is shown, whole, when it ends.
TEST_FOLDERS := train ep kernels tools
TEST_PARTS := $(TEST_FOLDERS:%=test-%) test-others
JOBS := 2

# $(call need,MODULE): one clear line when the tool of a target is missing from the environment.
need = @$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("$(1)") is None)' || \
	{ echo "make $@: $(1) is missing from $(VENV); remove $(ENVIRONMENT) and try again" >&2; exit 1; }

.PHONY: help tiny test $(TEST_PARTS) lint format notebooks hooks $(LINT)

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 18

tiny: $(ENVIRONMENT) ## train configs/tiny.toml on 8 virtual CPU devices; ARGS="--train.steps 20" changes a setting
	@$(PYTHON) -m ep_jax.train --config configs/tiny.toml $(ARGS)

# Tests that call make must not inherit this make's variables.
PYTEST := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u VENV $(PYTHON) -m pytest

test: $(ENVIRONMENT) ## run the tests; ARGS="tests/test_config.py" runs a part
	$(call need,pytest)
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync $(TEST_PARTS)
else
	@$(PYTEST) $(ARGS)
endif

$(TEST_FOLDERS:%=test-%): test-%: $(ENVIRONMENT)
	@$(PYTEST) tests/$*

test-others: $(ENVIRONMENT)
	@$(PYTEST) $(TEST_FOLDERS:%=--ignore=tests/%)

lint: $(ENVIRONMENT) ## run what the pre-commit hooks run: format, lint, types, notebook pairs, file sizes
	@$(MAKE) --no-print-directory --keep-going $(LINT)

lint-format: $(ENVIRONMENT)
	$(call need,ruff)
	@$(PYTHON) -m ruff format --check --quiet . || { echo "lint-format: run make format" >&2; exit 1; }

lint-code: $(ENVIRONMENT)
	$(call need,ruff)
	@$(PYTHON) -m ruff check --quiet .

lint-types: $(ENVIRONMENT)
	$(call need,pyrefly)
	@$(PYTHON) -m pyrefly check --summary=none --python-interpreter-path "$(PYTHON)"

lint-notebooks: $(ENVIRONMENT)
	$(call need,jupytext)
	@$(PYTHON) .ci/check_notebooks.py

lint-sizes: $(ENVIRONMENT)
	@$(PYTHON) .ci/check_sizes.py

format: $(ENVIRONMENT) ## format the code and apply the safe fixes of the linter
	$(call need,ruff)
	@$(PYTHON) -m ruff format . && $(PYTHON) -m ruff check --fix .

notebooks: $(ENVIRONMENT) ## run the notebooks of experiments/ and write their results into the .ipynb files
	$(call need,jupytext)
	@files=$$(grep -rlE '^# *formats: ipynb' experiments --include='*.py' 2>/dev/null | sort); \
	[ -n "$$files" ] || { echo "experiments/ has no notebooks yet"; exit 0; }; \
	while IFS= read -r file; do echo "$$file"; $(PYTHON) -m jupytext --quiet --sync --execute "$$file" || exit 1; done <<<"$$files"

hooks: $(ENVIRONMENT) ## run `make lint` before every git commit
	$(call need,pre_commit)
	@git rev-parse --git-dir >/dev/null 2>&1 || { echo "make hooks: this folder is not a git checkout" >&2; exit 1; }
	@$(PYTHON) -m pre_commit install

$(ENVIRONMENT): pyproject.toml constraints.txt .python-version .ci/environment
	@bash .ci/environment "$(VENV)" dev
	@touch $@
