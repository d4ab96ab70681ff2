# make demo | make test-quick | make test | make test-base | make test-long | make golden | make check | make mutants | make matrix | make dist | make docs: each creates the environment it needs first.
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)

.PHONY: demo test test-base test-long test-quick golden check matrix dist mutants mutants-sample docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The base installation alone in its newest versions, as `pip install .` makes it, and what runs tests.
BASE := .venv-base
$(BASE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BASE)
	$(BASE)/$(SCRIPTS)/python -m pip install --quiet --upgrade --upgrade-strategy eager --constraint constraints.txt . \
		pytest pytest-timeout pytest-xdist
	touch $@

demo: $(VENV)/.installed
	$(BIN)/privlora demo

# All tests but those that are marked long; test-long runs these, and pytest without -m both.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test: $(VENV)/.installed-dev test-base
	$(PYTEST) -m "not long"

# What users type and read first, as a fresh installation has it; what needs an extra is skipped.
test-base: $(BASE)/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BASE)/$(SCRIPTS)/python -m pytest -n 2 --dist loadscope -m "not long" -rs \
		tests/cli tests/starting tests/training/test_stopping.py tests/test_consoles.py tests/test_bad_inputs.py \
		tests/test_docs.py tests/test_site.py

test-long: $(VENV)/.installed-dev
	$(PYTEST) -m long

# Does every way of training give the weights and ledgers that it gave? Minutes; tests/golden says how they are kept.
golden: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden_runs.py

# In a minute of one core, without training anything: docs/testing.md says what it covers.
test-quick: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick

# Does a test find each way of breaking the package that tests/mutants lists? The sample is a random tenth.
mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py --jobs 2

mutants-sample: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py --jobs 2 --sample 0.1 $(if $(SEED),--seed $(SEED))

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32

# Wheel and sdist outside the checkout, in throw-away environments: the lowest and the newest versions, and each extra by itself.
matrix:
	$(PYTHON) tests/matrix.py

dist:
	$(PYTHON) tests/matrix.py newest

# The site, in site/index.html; a link that leads nowhere is an error.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo site/index.html

clean:
	rm -rf $(VENV) $(BASE) build dist site .pytest_cache .mypy_cache .ruff_cache
