# Each target makes .venv with what is locked, if it is not there yet.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
PROTOS := $(wildcard proto/kvpool/v1/*.proto)

.PHONY: demo test check bench proto lock clean

demo: .venv/installed ## Bring up a server and two schedulers that share its pool
	$(BIN)/kvpool demo

test: .venv/installed ## All tests that need only Python
	$(BIN)/pytest

check: .venv/installed ## Under a minute: generated code, lint, types, unit and property tests
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py --check
	cd proto && ../$(BIN)/buf lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto tests/unit tests/property

bench: .venv/installed ## Speed, as JSON; ratios in one run only
	$(BIN)/python tests/bench/bench_steps.py
	$(BIN)/python tests/bench/bench_ranks.py

proto: .venv/installed ## Generate the Python of the protos
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

lock: .venv/installed ## Choose newest versions that pyproject.toml allows
	$(BIN)/pip install -q uv
	$(BIN)/uv pip compile --upgrade --universal --python-version 3.11 --extra dev --generate-hashes --no-header \
		--no-annotate --no-emit-index-url pyproject.toml -o requirements.lock

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
