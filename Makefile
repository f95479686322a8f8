# `make demo` and `make test` do all their set-up themselves; they need python3.11 (or newer), make and a package index.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test lint types check bench bench-peers clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/fedfactor run recipes/demo.toml --out runs/demo

# Two processes, one torch thread each: the same split the engines use.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

# One JSON line a figure on standard output; progress on standard error.
bench: $(READY)
	$(BIN)/python -m benchmarks

# fedfactor, a plain PyTorch loop, pfl and Flower's simulation on the same workloads; the peers in their own environment.
bench-peers: $(READY) .bench-peers/ready
	$(BIN)/python -m benchmarks.peers .bench-peers

.bench-peers/ready: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .bench-peers
	.bench-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt
	touch .bench-peers/ready

clean:
	rm -rf .venv .bench-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis
