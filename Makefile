# `make help` says what there is. All of it lives in this folder, and `make clean` removes it. What pip
# does not have is installed by .ci/packages, which says so: as root on Debian by apt-get, elsewhere
# it stops and says what is missing.
# PYTHON=python3.12 picks another Python, TORCH=2.15.0 another torch, which gets an environment of its
# own, ARGS="..." passes arguments on, MAX_JOBS=2 limits compiling.
PYTHON ?= python3
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
FIRST_TORCH := $(firstword $(TORCH))
VENV := .venv$(if $(filter-out $(DEFAULT_TORCH),$(FIRST_TORCH)),-$(FIRST_TORCH))
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt setup.py preflight.py pyproject.toml torch_ext/qkv/version.py \
  $(shell find csrc cmake torch_ext \( -path torch_ext/qkv -o -name '*.egg-info' \) -prune -o -type f -print)

ifneq ($(words $(TORCH)),1)
ifeq ($(filter wheel release,$(MAKECMDGOALS)),)
$(error TORCH names several versions of torch, which only `make wheel` and `make release` take: $(TORCH))
endif
endif

.DELETE_ON_ERROR:
.PHONY: help demo gallery test test-commit test-long bench docs wheel sdist release lint format clean preflight $(VENV)/tests-ready

help:
	@echo 'make demo     train a small GPT on both attentions, two minutes; pictures and the model in demo/'
	@echo 'make gallery  what attention is, in pictures: one page, gallery/index.html; after make demo'
	@echo 'make test     build and run every test suite: what every change has to pass'
	@echo 'make test-commit  new random inputs, and a twelfth of the long layer, by the hash of HEAD: seven minutes'
	@echo 'make test-long  the same, uncut and with new random inputs, and a fuzzer: hours; ARGS="seed"'
	@echo 'make bench    measure this machine, then qkv against torch on it; ARGS="--help"; benchmarks/ has more'
	@echo 'make docs     the site, in build/site; open its index.html'
	@echo 'make wheel    one wheel, in dist/, for all the versions of torch in TORCH="2.13.0 2.15.0"'
	@echo 'make sdist    the source distribution, in dist/'
	@echo 'make release  all that a release uploads, checked, in dist/; for all versions of torch, or those in TORCH'
	@echo 'make lint     the formatters and linters over all tracked files, and pyright'
	@echo 'make format   the same, until nothing is left to format'
	@echo 'make clean    remove what these made'
	@echo 'TORCH=2.15.0 after any of them: with that version of torch, of the index that pip is set to'

# What cannot work is refused before anything is downloaded, but for a Python where there is none.
preflight:
	@PYTHON='$(PYTHON)' .ci/packages python
	@$(PYTHON) preflight.py $(TORCH)
	@.ci/packages compiler
	@$(PYTHON) preflight.py --compiler

# The environment, and what each purpose needs of requirements/; then qkv itself. Each only once, and
# again when what it was made from changes; CMake compiles only what changed.
PIP := pip install --quiet --disable-pip-version-check --no-compile -c requirements/constraints.txt
PIP_INSTALL := $(BIN)/python -m $(PIP)

$(VENV)/ready: requirements/demo.txt requirements/constraints.txt | preflight
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==$(FIRST_TORCH) -r $<
	@touch $@

$(VENV)/ready-%: requirements/%.txt requirements/constraints.txt $(VENV)/ready
	$(PIP_INSTALL) torch==$(FIRST_TORCH) -r $<
	@touch $@

$(VENV)/installed: $(VENV)/ready $(SOURCES)
	@echo 'Building qkv: minutes the first time, seconds after that'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e .
	@touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/train_gpt.py --compare $(ARGS)

gallery: $(VENV)/installed demo/gpt.pt
	$(BIN)/python examples/gallery.py $(ARGS)

# What `make demo` has trained already is not trained again.
demo/gpt.pt: | $(VENV)/installed
	$(BIN)/python examples/train_gpt.py --compare

# pip has one core's worth of work to do while the compiler has the other.
$(VENV)/tests-ready: preflight
	@.ci/packages googletest
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/installed $(VENV)/ready-test

test: $(VENV)/tests-ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" python tests/gate quick $(ARGS)

test-commit: $(VENV)/tests-ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" python tests/gate commit $(ARGS)

test-long: $(VENV)/tests-ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" python tests/gate long $(ARGS)

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks --suite grid $(ARGS)

# What `python -m benchmarks.peers` sets beside qkv, in an environment that has no qkv.
build/peers/ready: requirements/peers.txt requirements/constraints.txt
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m $(PIP) torch==$(DEFAULT_TORCH) -r $<
	@touch $@

docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/ready-wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" release/wheel.sh $(TORCH)

sdist: $(VENV)/ready-wheel
	$(BIN)/python -m build --no-isolation --sdist .

release: $(VENV)/ready-release
	@.ci/packages pango
	@PATH="$(CURDIR)/$(BIN):$$PATH" release/all.sh $(if $(filter file,$(origin TORCH)),,$(TORCH))

lint: $(VENV)/ready-lint
	$(BIN)/pre-commit run --all-files --show-diff-on-failure
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tests/budgets.py

format: $(VENV)/ready-lint
	$(BIN)/pre-commit run --all-files || $(BIN)/pre-commit run --all-files

clean:
	rm -rf .venv .venv-* build dist demo gallery torch_ext/qkv.egg-info torch_ext/qkv/lib torch_ext/qkv/include torch_ext/qkv/share
	rm -rf .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
