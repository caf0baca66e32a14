SHELL := /bin/bash
ENVIRONMENT := source scripts/environment.sh && use_environment dev &&
PYTHON := $(ENVIRONMENT) $$python

.PHONY: check ruff types imports spelling conflicts format test coverage

# Each is a hook in .pre-commit-config.yaml, too.
check: ruff types imports spelling conflicts

ruff:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

imports:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as check; check()"

spelling:
	$(PYTHON) -m codespell_lib

conflicts:
	! grep -rnE '^(<<<<<<<|>>>>>>>) ' --include='*.md' --include='*.py' --include='*.toml' --exclude-dir='.venv*' .

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:
	./run_tests.sh

coverage:  ## the suite (or TESTS="tests/state -k ema"), and the lines of titan_dit that no test reaches
	$(ENVIRONMENT) export OMP_NUM_THREADS=1 && $$python -m coverage erase && \
	    { $$python -m coverage run -m pytest $(TESTS); \
	    $$python -m coverage combine -q && $$python -m coverage report; }
