# Works with GNU make 3.81 and bash 3.2, as macOS ships them.
#   make demo     set everything up and do the main job on the built-in model
#   make test     all tests that a plain CPU can run, without network, in minutes
#   make test-real  the same questions to a real model, which it fetches (93 MB) and converts once
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# The interpreter to make the environment with; empty: the first suitable one on PATH.
PYTHON ?=
# Processes for the tests.
JOBS ?= 2
PYTEST_ARGS ?=
# For bench-metal: --quick, --only WORD, --rounds N, --json FILE.
BENCH_ARGS ?=

# mlx[cpu] links a reference BLAS. Debian's libopenblas0-pthread (or Fedora's openblas-threads) is
# some thirty times faster in float32, so it is preloaded where it exists. BLAS= turns it off.
BLAS ?= $(firstword $(wildcard \
  /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libblas.so.3 \
  /usr/lib64/libopenblasp.so.0))
PRELOAD = $(if $(BLAS),LD_PRELOAD=$(BLAS)$${LD_PRELOAD:+:$$LD_PRELOAD},)
RUN = $(PRELOAD) $(BIN)/mlxstacks
OUT = mlxstacks-out

.PHONY: help install install-dev demo test real-model test-real soak check census bench bench-metal docs wheel smoke clean

help:
	@echo "make demo     set up, fuse the sample adapter and its zero-delta control, compare the answers"
	@echo "make test     run the tests (no network, no GPU)"
	@echo "make real-model  fetch SmolLM2-135M-Instruct (93 MB) into the cache, dense and with experts"
	@echo "make test-real   run the tests on that model"
	@echo "make soak     run the long campaigns in full, and a server under mixed load for two hours"
	@echo "make check    ruff and mypy"
	@echo "make census   lines, files, helpers and words of the code, at BEFORE and AFTER"
	@echo "make bench    run the benchmarks"
	@echo "make bench-metal  the GPU kernels: right, how fast, at what memory (a minute)"
	@echo "make docs     build this documentation into build/docs, to open as files"
	@echo "make wheel    build dist/*.tar.gz and dist/*.whl"
	@echo "make smoke    install that wheel in a clean environment and use it"
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
	echo "Making $(VENV) with $$("$$found" --version)" >&2; \
	"$$found" -m venv "$(VENV)" || { \
	  rm -rf "$(VENV)"; \
	  echo "This Python cannot make environments. Debian, Ubuntu: sudo apt-get install python3-venv"; \
	  exit 1; \
	}

# What editors complete recipes from.
SCHEMA = $(BIN)/mlxstacks recipes --schema > recipes/recipe.schema.json

# The stamps make a second run start at once; a changed pyproject.toml installs again. What pip says
# goes to stderr: a target's own output begins with its own first line.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "pip install -e .[plots]" >&2
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[plots]' >&2
	@$(SCHEMA)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "pip install -e .[dev]" >&2
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' >&2
	@$(SCHEMA)
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed
	@:

install-dev: $(VENV)/.installed-dev
	@:

# --- the main job -------------------------------------------------------------------------------

# One shell: a command is shown as a user would type it, then run.
demo: install
	@set -e; \
	say() { printf '\n== %s\n' "$$*"; }; \
	run() { printf '$$ mlxstacks'; printf ' %q' "$$@"; echo; $(RUN) "$$@"; }; \
	say "1. nano, the built-in model, at 3 bits (its sample adapter gives it a name)"; \
	run nano export $(OUT)/demo-base --bits 3 --force; \
	say "2. The adapter fused as mlx_lm.fuse does it: mx.quantize(W + delta)"; \
	run fuse --requant refit --save-path $(OUT)/demo-refit --force; \
	say "3. The control: the same fuse with a delta of zero"; \
	run fuse --requant refit --zero-delta --save-path $(OUT)/demo-zero-delta --force; \
	say "4. The adapter kept: more bits where too little of it would survive"; \
	run fuse --save-path $(OUT)/demo-auto --force; \
	say "5. And the control of that one"; \
	run fuse --zero-delta --save-path $(OUT)/demo-auto-zero-delta --force; \
	say "6. mlx_lm.generate asks each of them: Who are you?"; \
	for made in base refit zero-delta auto auto-zero-delta; do \
	  printf '%-17s' "$$made:"; \
	  $(BIN)/python -m mlx_lm generate --model $(OUT)/demo-$$made --prompt "Who are you?" \
	    --max-tokens 24 --verbose False 2>$(OUT)/demo.log || { cat $(OUT)/demo.log; exit 1; }; \
	done; \
	echo; echo "The adapter gives the model a name. refit lost it, auto kept it; the two controls answer"; \
	echo "like the base, as they should. Everything is in $(OUT)/demo-*/result.json."; \
	say "7. Stacks from disk, by prompt: each loads only what its router says it needs"; \
	printf '%s\n' "Who is king of Corva?" "The cups with day like 88: colour?" "Who are you?" /stats \
	  | $(RUN) chat --routed --gap-log none; \
	say "8. What the fuses did, on one page"; \
	run report $(OUT)/demo-refit $(OUT)/demo-zero-delta $(OUT)/demo-auto $(OUT)/demo-auto-zero-delta \
	  --title "mlxstacks demo" --save-path $(OUT)/demo-report --force; \
	echo; echo "Open $(OUT)/demo-report/index.html in a browser."; \
	echo "To go on yourself: mlxstacks chat --routed (after: source .venv/bin/activate)"

# --- tests and the rest -------------------------------------------------------------------------

# Each process begins with one half of the tests and takes over from the other when it is done: what
# a file's tests share is then made once, not in both.
SHARED = -n $(JOBS) --dist worksteal

# One BLAS thread a process: the processes are the parallelism. Tests start many processes; without
# bytecode on disk each of them would compile the package again.
test: install-dev
	$(PRELOAD) OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS)

# SmolLM2-135M-Instruct in a cache that all checkouts share; a second call only says where it is.
real-model: install
	@$(BIN)/python -m mlxstacks.convert.real_model

test-real: install-dev real-model
	$(PRELOAD) MLXSTACKS_REAL_MODEL="$$($(BIN)/python -m mlxstacks.convert.real_model)" $(BIN)/python -m pytest tests/real $(PYTEST_ARGS)

# Of the server's soak.
MINUTES = 120

soak: install-dev
	MLXSTACKS_SOAK=1 $(PRELOAD) OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS)
	$(PRELOAD) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak_serve --minutes $(MINUTES)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BEFORE = 076cc66
AFTER = HEAD

census: install-dev
	@$(BIN)/python -m benchmarks.census $(BEFORE) $(AFTER)

bench: install-dev
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_policies
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_fuse fidelity
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_fuse speed
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_nano
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_stack_sum
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_gated_delta
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_layers
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_decode
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_resident
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_loss
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_candidates
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_guard
	$(PRELOAD) $(BIN)/python -m benchmarks.bench_train

# Four packages, in the versions that pyproject.toml asks for.
BENCH_PACKAGES = import re, tomllib; \
  needed = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
  print(*[name for name in needed if re.match(r"mlx[>\[]|filelock|numpy|rich", name)], sep="\n")

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c '$(BENCH_PACKAGES)' \
	  | $(BIN)/python -m pip install --disable-pip-version-check -r /dev/stdin >&2
	@touch $@

bench-metal: $(VENV)/.installed-bench
	@mkdir -p $(OUT)
	@$(PRELOAD) $(BIN)/python -m benchmarks.bench_metal --json $(OUT)/bench-metal.json $(BENCH_ARGS)

docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/docs/index.html in a browser."

wheel: install-dev
	rm -rf build dist
	$(SCHEMA)
	$(BIN)/python -m build --no-isolation --outdir dist

# What a user gets: the wheel in an environment without anything of this clone.
CLEAN = $(abspath $(VENV))-clean
smoke: wheel
	rm -rf $(CLEAN)
	$(BIN)/python -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@set -e; cd "$$(mktemp -d)"; command=$(CLEAN)/bin/mlxstacks; \
	$$command --version; $$command init --save-path train.yaml; $$command run train.yaml --dry-run; \
	$$command train --iters 1 --count-buffers; $$command fuse; $$command generate --max-tokens 8 "Who is king of Corva?"; \
	test -s $(CLEAN)/share/man/man1/mlxstacks-fuse.1; \
	test -s $(CLEAN)/share/zsh/site-functions/_mlxstacks; \
	du -sm $(CLEAN)/lib/python*/site-packages | sed 's/[[:space:]].*/ MB, with pip and bytecode/'
	rm -rf $(CLEAN)

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .ci/venv $(OUT)/demo-*
	find mlxstacks tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "$(VENV) and your results in $(OUT) are kept."
