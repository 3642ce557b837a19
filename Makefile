# make demo   compare three losses on embedded digits, equally tuned, four seeds each, and write a page
# make test   the whole test suite
# make lint   style and types
# Each creates the environment in .venv first, if it is missing or pyproject.toml changed.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format bench clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.ready
	$(BIN)/weince compare infonce dcl released --config digits_tiny --out runs/demo

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

clean:
	rm -rf .venv build dist
