# make demo   compare three losses on embedded digits, equally tuned, four seeds each, and write a page
# make test   the whole test suite
# make lint   style and types
# make docs   the documentation site, strictly: build/site (make notebooks runs its notebooks again and stores what they print)
# Each creates the environment in .venv first, if it is missing or pyproject.toml changed.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format bench docs notebooks clean

# pip would compile on one core, and would compile tests, models and tools that nothing here imports. A file for a
# newer Python, as torch has one, does not compile: no failure.
UNUSED := /(tests|fontTools|mypy|mypyc|pip|setuptools)/|/transformers/models/|/pygments/lexers/|/torch/testing/_internal/
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' .venv/lib || true
	touch $@

demo: .venv/.ready
	$(BIN)/weince compare infonce dcl released --config digits_tiny --out runs/demo

# Tests start many processes: compile each module once, also where this variable says not to.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.ready
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python benchmarks/loss_cpu.py --profile

# An environment of its own, which is small: building the site imports neither torch nor this package.
.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade pip
	.venv-docs/bin/python -m pip install --quiet --group docs
	touch $@

docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

notebooks: .venv/.ready
	$(BIN)/python tools/notebooks.py

clean:
	rm -rf .venv .venv-docs build dist
