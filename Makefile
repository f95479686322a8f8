# Each target sets up what it needs, in .venv. This needs python3.11 (or newer), make and a package index.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo picture docs test test-wheel test-browser test-deploy test-ray test-mlflow test-huggingface test-third-party test-peft fuzz soak \
	chromium lint types check check-browser not-run bench bench-peers clean

setup: $(READY)

# Python compiles what it imports, so pip need not compile all of torch.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e '.[dev]'
	touch $(READY)

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/fedfactor run demo --out runs/demo

# The README's picture, from the demo's run directories.
picture: $(READY)
	$(BIN)/python docs/picture.py docs/demo.svg runs/demo/fedavg runs/demo/fedpara

# The documentation, into site/. A broken link, or a page that the navigation does not list, is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Each process has one torch thread, as in the engines. There is one process more than cores: some tests wait for others.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

# The wheel in a fresh environment outside of the checkout: downloads what it needs, or takes it from pip's cache.
test-wheel: $(READY)
	$(BIN)/python -m pytest -m wheel --durations=0 tests/test_wheel.py

# Real deployments of Flower's programs on this machine: takes many minutes.
test-deploy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m deploy --durations=0 tests/deploy
	@if $(MAKE) --no-print-directory .ray/ready; then $(MAKE) --no-print-directory test-ray; \
	else echo "NOT RUN: Flower's simulation, since Ray could not be installed"; fi

# Flower's simulation engine with the real Ray, in a folder of its own.
test-ray: $(READY) .ray/ready
	PYTHONPATH=.ray OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/deploy

.ray/ready:
	$(INSTALL) --target .ray \
		attrs==23.2.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 msgpack==1.2.4 ray==2.55.1 \
		referencing==0.37.0 rpds-py==2026.9.1
	touch .ray/ready

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

check: $(READY)
	$(MAKE) --jobs 2 lint types docs
	$(MAKE) test test-wheel check-browser not-run

not-run: $(READY)
	@echo "NOT RUN, since they take minutes or need large packages; make test-deploy, test-mlflow, test-huggingface,"
	@echo "test-third-party and test-peft run them:"
	@$(BIN)/python -m pytest -m 'deploy or ray or mlflow or huggingface or third_party or peft' --collect-only | grep '::'

# The report in a real browser. Installs Chromium where that is possible: Debian or Ubuntu, as root.
test-browser: $(READY) chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		echo "Chromium is not there; installing it with apt-get"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

# The logger for MLflow, with the real library, in a folder of its own: it brings some 40 packages.
test-mlflow: $(READY) .mlflow/ready
	PYTHONPATH=.mlflow OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m mlflow

.mlflow/ready:
	$(INSTALL) --target .mlflow \
		alembic==1.20.1 mlflow-skinny==3.17.2 sqlalchemy==2.1.8
	touch .mlflow/ready

# Data of Hugging Face and partitions of flwr-datasets, with the real packages (370 MB) in a folder of their own.
test-huggingface: $(READY) .huggingface/ready
	PYTHONPATH=.huggingface HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m huggingface tests/data

.huggingface/ready: tests/huggingface.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .huggingface -r tests/huggingface.txt
	touch .huggingface/ready

# Compositions and optimizers against LyCORIS, PEFT, pfl and flwr: the real packages (170 MB) in a folder of their own.
test-third-party: $(READY) .third-party/ready
	PYTHONPATH=.third-party HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m third_party tests/third_party

# Adapters in PEFT, merged models and tokenizers in transformers: the same packages.
test-peft: $(READY) .third-party/ready
	PYTHONPATH=.third-party HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m peft tests/third_party

.third-party/ready: tests/third_party.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .third-party -r tests/third_party.txt
	touch .third-party/ready

check-browser: $(READY)
	@if $(MAKE) --no-print-directory chromium; then $(MAKE) --no-print-directory test-browser; \
	else echo "NOT RUN: the tests in a browser, since there is no Chromium and it could not be installed"; fi

# A million damaged messages through the decoder and the reply check.
fuzz: $(READY)
	$(BIN)/python -m tests.soak.fuzz $(or $(MESSAGES),1000000)

# Rounds on the pool and on flower-local, each for SOAK_MINUTES, with kills, damaged replies, full disks and wrong clocks.
# Needs Linux and a C compiler.
soak: $(READY)
	$(BIN)/python -m tests.soak.soak pool $(or $(SOAK_MINUTES),60)
	$(BIN)/python -m tests.soak.soak flower-local $(or $(SOAK_MINUTES),60)

# One JSON line per figure on standard output; progress on standard error. Fine-tuning is compared with PEFT.
bench: $(READY) .third-party/ready
	$(BIN)/python -m benchmarks

# fedfactor, a plain PyTorch loop, pfl and Flower's simulation on the same workloads; the peers in their own environment.
bench-peers: $(READY) .bench-peers/ready
	$(BIN)/python -m benchmarks.peers .bench-peers

.bench-peers/ready: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .bench-peers
	.bench-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt
	touch .bench-peers/ready

clean:
	rm -rf site .venv .bench-peers .huggingface .mlflow .ray .third-party .mypy_cache .ruff_cache .pytest_cache .hypothesis
