# `make demo` and `make test` do all the set-up themselves, in .venv, and need no download beyond Python packages.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
PROMPT ?=

.PHONY: demo test lint bench real fuzz sanitize clean

demo: $(VENV)/ready
	$(BIN)/truedraft demo $(if $(PROMPT),--prompt '$(PROMPT)')

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow'

lint: $(VENV)/dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/python tools/docs.py --check

real: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

fuzz: $(VENV)/dev
	$(BIN)/python tools/fuzz.py

sanitize: $(VENV)/dev
	$(BIN)/python tools/sanitize.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/generate.py

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
NATIVE = $(wildcard src/truedraft/runtime/native/*.c src/truedraft/runtime/native/*.inc src/truedraft/stores/*.c)

$(VENV)/ready: pyproject.toml setup.py constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/dev: $(VENV)/ready
	$(INSTALL) '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
