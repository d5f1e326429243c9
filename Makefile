# Everything a newcomer needs: `make demo` runs the main job, `make test` proves the tree.
# Both set up what they need on a machine with nothing but Python >= 3.10 and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-full lint format chaos bench clean

demo: $(VENV)/.demo
	$(BIN)/minisgl-batch run examples/prompts.jsonl --model demo --output demo-output --overwrite
	$(BIN)/python examples/check_answers.py demo-output

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m tests.bench delivery $(ARGS)

clean:
	rm -rf demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# A stamp file per set of extras; a change of the pins or of pyproject.toml installs again.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[engine,embedded]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	touch $(VENV)/.demo $@
