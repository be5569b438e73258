# Each target works from a fresh clone: it makes .venv, installs what is pinned, builds the extension, then runs.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint bench clean

help: ## show this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: .venv/built ## fuse a small Nemotron, compare it with the original bit for bit, time both
	$(BIN)/relu2ir demo

test: .venv/built ## run the tests; a provider that cannot run here skips with its reason
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto $(PYTEST)

lint: .venv/installed ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/built ## the small benchmark of this machine
	$(BIN)/python benchmarks/benchmark_relu_squared.py

clean: ## remove what was built, .venv too
	rm -rf .venv build dist relu2ir.egg-info relu2ir/_C.abi3.so

.venv/installed: .ci/requirements.txt .ci/requirements-no-deps.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement .ci/requirements.txt
	$(BIN)/pip install --quiet --no-deps --requirement .ci/requirements-no-deps.txt
	touch $@

.venv/built: .venv/installed setup.py ops.yaml $(wildcard csrc/*) $(wildcard relu2ir/ir/*.py) relu2ir/building.py relu2ir/codegen.py relu2ir/providers/compiled.py
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
