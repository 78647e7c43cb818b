# Works with GNU make 3.81 and bash 3.2, as macOS ships them.
#   make demo     set everything up and do the main job on the built-in model
#   make test     all tests that a plain CPU can run, without network, in minutes
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# The interpreter to make the environment with; empty: the first suitable one on PATH.
PYTHON ?=
# Processes for the tests.
JOBS ?= 2
PYTEST_ARGS ?=

# mlx[cpu] links a reference BLAS. Debian's libopenblas0-pthread (or Fedora's openblas-threads) is
# some thirty times faster in float32, so it is preloaded where it exists. BLAS= turns it off.
BLAS ?= $(firstword $(wildcard \
  /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libblas.so.3 \
  /usr/lib64/libopenblasp.so.0))
PRELOAD = $(if $(BLAS),LD_PRELOAD=$(BLAS)$${LD_PRELOAD:+:$$LD_PRELOAD},)
RUN = $(PRELOAD) $(BIN)/mlxstacks
OUT = mlxstacks-out

.PHONY: help install install-dev demo test soak check bench wheel clean

help:
	@echo "make demo     set up, fuse the sample adapter and its zero-delta control, compare the answers"
	@echo "make test     run the tests (no network, no GPU)"
	@echo "make soak     run the long campaigns in full"
	@echo "make check    ruff and mypy"
	@echo "make bench    run the benchmarks"
	@echo "make wheel    build dist/*.whl"
	@echo "make clean    remove build products, caches and the demo's output"

# --- environment --------------------------------------------------------------------------------

SUITABLE = import platform, sys; \
  sys.exit(sys.version_info < (3, 11) or (sys.platform == "darwin" and platform.machine() != "arm64"))

$(BIN)/python:
	@found=; \
	for name in $(PYTHON) python3.12 python3.13 python3.11 python3.14 python3; do \
	  if command -v "$$name" >/dev/null 2>&1 && "$$name" -c '$(SUITABLE)' 2>/dev/null; then \
	    found="$$name"; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "mlxstacks needs Python 3.11 or newer (on a Mac: the arm64 build, not one under Rosetta)."; \
	  echo "  macOS:          brew install python@3.12      or the installer from https://www.python.org"; \
	  echo "  Debian, Ubuntu: sudo apt-get install python3.11 python3.11-venv"; \
	  echo "  anywhere:       uv python install 3.12 && make $(or $(MAKECMDGOALS),demo) PYTHON=\"\$$(uv python find 3.12)\""; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv "$(VENV)" || { \
	  rm -rf "$(VENV)"; \
	  echo "This Python cannot make environments. Debian, Ubuntu: sudo apt-get install python3-venv"; \
	  exit 1; \
	}

# The stamps make a second run start at once; a changed pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed
	@:

install-dev: $(VENV)/.installed-dev
	@:

# --- the main job -------------------------------------------------------------------------------

# Prints a command as a user would type it, then runs it.
show = @echo '$$ mlxstacks $(1)'; $(RUN) $(1)
PROMPT ?= Who are you?
ANSWERS = base refit zero-delta auto

demo: install
	@echo; echo "== 1. Fuse the sample adapter the usual way: mx.quantize(W + delta)"
	$(call show,fuse --requant refit --save-path $(OUT)/demo-refit --force)
	@echo; echo "== 2. The control: the same fuse with a delta of zero"
	$(call show,fuse --requant refit --zero-delta --save-path $(OUT)/demo-zero-delta --force)
	@echo; echo "== 3. Fuse it so that it is kept"
	$(call show,fuse --save-path $(OUT)/demo-auto --force)
	@echo; echo "== 4. Ask each of them: $(PROMPT)"
	@base=$$($(BIN)/mlxstacks nano --json | \
	  $(BIN)/python -c 'import json, sys; print(json.load(sys.stdin)["model_path"])') || exit 1; \
	for name in $(ANSWERS); do \
	  path="$(OUT)/demo-$$name"; \
	  if [ $$name = base ]; then path="$$base"; fi; \
	  echo "--- $$name"; \
	  $(PRELOAD) $(BIN)/mlx_lm.generate --model "$$path" --prompt "$(PROMPT)" \
	    --max-tokens 40 --temp 0 --verbose False || exit 1; \
	done
	@echo; echo "The models are in $(OUT)/demo-*; fuse_report.json in each holds every figure."

# --- tests and the rest -------------------------------------------------------------------------

# One BLAS thread a process: the processes are the parallelism.
test: install-dev
	$(PRELOAD) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

soak: install-dev
	MLXSTACKS_SOAK=1 $(PRELOAD) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install-dev
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_requant
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_fuse fidelity
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_fuse speed

wheel: install-dev
	rm -rf build
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .ci/venv $(OUT)/demo-*
	find mlxstacks tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "$(VENV) and your results in $(OUT) are kept."
