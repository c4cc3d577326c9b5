# `make demo` and `make test` do all the set-up themselves, in .venv, and need no download beyond Python packages.
runs = $(strip $(foreach python,$(1),$(if $(shell $(python) -c 'print(1)' 2> /dev/null),$(python))))
PYTHON ?= $(firstword $(call runs,python3.11 python3.12 python3.13 python3))
PYTHONS ?= python3.11 python3.13
VENV ?= .venv
BIN = $(VENV)/bin
PROMPT ?=

.PHONY: demo test lint test-pythons bench real fuzz sanitize clean

demo: $(VENV)/ready
	$(BIN)/truedraft demo $(if $(PROMPT),--prompt '$(PROMPT)')

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

lint: $(VENV)/dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/python tools/docs.py --check

# The part of the suite that is marked `pythons`, under the oldest and the newest Python promised, in venvs of their own
test-pythons: $(addprefix pythons/,$(notdir $(call runs,$(PYTHONS))))
	@for python in $(filter-out $(call runs,$(PYTHONS)),$(PYTHONS)); do echo "skipped: there is no $$python here"; done

pythons/%:
	$(filter %$*,$(PYTHONS)) -m venv $(VENV)/pythons/$*
	$(VENV)/pythons/$*/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt '.[dev]'
	OMP_NUM_THREADS=1 $(VENV)/pythons/$*/bin/python -m pytest -m pythons

real: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

fuzz: $(VENV)/dev
	$(BIN)/python tools/fuzz.py

sanitize: $(VENV)/dev
	$(BIN)/python tools/sanitize.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/generate.py

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
NATIVE = $(wildcard src/truedraft/runtime/native/*.c src/truedraft/runtime/native/*.inc src/truedraft/stores/*.c)

$(VENV)/ready: pyproject.toml setup.py constraints.txt $(NATIVE)
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	  echo "truedraft needs Python 3.11, 3.12 or 3.13, and $(or $(PYTHON),python3) is" \
	    "$$($(or $(PYTHON),false) --version 2> /dev/null || echo not there): make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/dev: $(VENV)/ready
	$(INSTALL) '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
