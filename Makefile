SHELL := /bin/bash
ENVIRONMENT := source scripts/environment.sh && use_environment dev &&
PYTHON := $(ENVIRONMENT) $$python

.PHONY: check format test

check:  ## linters, types, the direction of imports, spelling
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as check; check()"
	$(PYTHON) -m codespell_lib
	! grep -rnE '^(<<<<<<<|>>>>>>>) ' --include='*.md' --include='*.py' --include='*.toml' --exclude-dir=.venv .

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:
	./run_tests.sh
