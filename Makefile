# `make help` says what there is. All of it lives in .venv and build; nothing else is touched.
# PYTHON=python3.12 picks another Python, ARGS="..." passes arguments on, MAX_JOBS=2 limits compiling.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := CMakeLists.txt setup.py pyproject.toml torch_ext/qkv/version.py \
  $(shell find csrc cmake torch_ext -path torch_ext/qkv -prune -o -type f -print)

.DELETE_ON_ERROR:
.PHONY: help demo test test-long bench lint format clean

help:
	@echo 'make demo     train a small GPT on both attentions, two minutes; pictures in demo/'
	@echo 'make test     build and run every test suite: what every change has to pass'
	@echo 'make test-long  the same, uncut and with new random inputs, and a fuzzer: hours; ARGS="seed"'
	@echo 'make bench    measure this machine, then qkv against torch on it; ARGS="--help"'
	@echo 'make lint     the formatters and linters over all tracked files'
	@echo 'make format   the same, until nothing is left to format'
	@echo 'make clean    remove what these made'

# What pip does not have: see .ci/packages. Then the environment, then qkv itself; each only once,
# and again when what it was made from changes. CMake compiles only what changed.
.venv/ready: requirements-dev.txt
	@PYTHON='$(PYTHON)' .ci/packages compiler python
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.venv/installed: .venv/ready $(SOURCES)
	@echo 'Building qkv: minutes the first time, seconds after that'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e .
	@touch $@

demo: .venv/installed
	$(BIN)/python examples/train_gpt.py --compare $(ARGS)

test: .venv/installed
	@.ci/packages googletest
	@PATH="$(CURDIR)/$(BIN):$$PATH" tests/run

test-long: .venv/installed
	@.ci/packages googletest
	@PATH="$(CURDIR)/$(BIN):$$PATH" tests/run-long $(ARGS)

bench: .venv/installed
	$(BIN)/python -m qkv.bench $(ARGS)

lint: .venv/ready
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

format: .venv/ready
	$(BIN)/pre-commit run --all-files || $(BIN)/pre-commit run --all-files

clean:
	rm -rf .venv build dist demo torch_ext/qkv.egg-info torch_ext/qkv/lib torch_ext/qkv/include torch_ext/qkv/share
	rm -rf .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
