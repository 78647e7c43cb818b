#!/usr/bin/env bash
# Everything about the kernels on a machine with an NVIDIA GPU: install MLX's CUDA back-end, run the
# kernel tests on the device, run the benchmarks (kernels; decoding with stacks beside without),
# record what it ran on. Needs no network.
#
#   bash benchmarks/gpu_run.sh WHEELS        results in $OUT (default ./mlxstacks-out/gpu)
#
# WHEELS is a folder of wheels for Python 3.12 on x86-64 Linux, made where there is a network. For a
# machine that has CUDA 13 libraries as Python packages (nvidia-cublas, nvidia-cudnn-cu13, ...):
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux_2_35_x86_64 --platform manylinux_2_27_x86_64 \
#     --platform manylinux2014_x86_64 -d WHEELS mlx==0.32.4 mlx-cuda-13==0.32.4
#
# Add what the machine lacks: numpy, rich, pytest, hypothesis, pydantic; for `decode` also mlx-lm and
# what it imports, else that step says "not measured"; and nvidia-cuda-runtime where it has
# neither /usr/local/cuda nor that package, since MLX compiles kernels as it runs. For CUDA 12 take
# mlx-cuda-12 and the packages its metadata names. The wheels go to a folder of their own and change
# nothing else on the machine.
#
# Settings: PYTHON (python3.12, else python3), OUT, STEPS (default "install tests benchmark
# decode"), TESTS (default tests/ops), SITE (where the wheels go: a new folder, or one of an earlier
# run, which is replaced). REHEARSE=1 goes through the same steps on the CPU, at tiny shapes.
set -euo pipefail

wheels=${1:-}
root=$(cd "$(dirname "$0")/.." && pwd)
[ -n "$wheels" ] && [ -d "$wheels" ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" >&2; exit 2; }
wheels=$(cd "$wheels" && pwd)
OUT=${OUT:-$root/mlxstacks-out/gpu}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
PYTHON=${PYTHON:-$(command -v python3.12 || command -v python3 || echo python3)}
SITE=${SITE:-${TMPDIR:-/tmp}/mlxstacks-gpu-site}
STEPS=${STEPS:-install tests benchmark decode}
TESTS=${TESTS:-tests/ops}
REHEARSE=${REHEARSE:-}
# In every folder that this script makes for wheels: it removes no other.
MARKER=.made-by-gpu-run
cd "$root"

stop() {
  echo "$*" >&2
  exit 2
}
has() { case " $STEPS " in *" $1 "*) true ;; *) false ;; esac; }
say() { printf '\n== %s\n' "$*"; }

command -v "$PYTHON" >/dev/null || stop "no $PYTHON here: install Python 3.12, or set PYTHON"

if has install; then
  say "wheels of $wheels into $SITE"
  # mlx-cpu and the CUDA wheels bring a file of the same name: the last one unpacked would win.
  if [ -z "$REHEARSE" ] && ls "$wheels"/mlx_cpu-* >/dev/null 2>&1; then
    stop "$wheels holds mlx_cpu, which overwrites MLX's CUDA back-end: take it out"
  fi
  ls "$wheels"/*.whl >/dev/null 2>&1 || stop "$wheels holds no wheel: see the head of $0"
  if [ -e "$SITE" ] && [ ! -f "$SITE/$MARKER" ]; then
    stop "SITE=$SITE exists and was not made here: remove it, or set SITE to a folder of its own"
  fi
  rm -rf "$SITE"
  mkdir -p "$SITE"
  touch "$SITE/$MARKER"
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --target "$SITE" "$wheels"/*.whl
fi

export PYTHONPATH="$SITE:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# Compiled kernels of this run only.
MLX_PTX_CACHE_DIR=$(mktemp -d)
export MLX_PTX_CACHE_DIR
trap 'rm -rf "$MLX_PTX_CACHE_DIR"' EXIT

# MLX's library looks for CUDA beside itself; here it may lie in the interpreter's own packages.
nvidia_folders() {
  "$PYTHON" -c '
import glob, sys
print(*(f for p in sys.path if p for f in sorted(glob.glob(p + "/nvidia/*/" + sys.argv[1]))), sep="\n")
' "$1"
}
libraries=$(nvidia_folders lib | paste -sd: -)
if [ -n "$libraries" ]; then
  # An empty entry would be the current folder.
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"
fi
if [ -z "${CUDA_HOME:-}" ]; then
  while IFS= read -r folder; do
    if [ -f "$folder/cuda_runtime.h" ]; then
      CUDA_HOME=$(dirname "$folder")
      export CUDA_HOME
      break
    fi
  done < <(echo /usr/local/cuda/include; nvidia_folders include)
fi

say "machine"
{
  date -u +%Y-%m-%dT%H:%M:%SZ
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap,clocks.sm,clocks.mem \
    --format=csv 2>&1 || true
  echo "CUDA_HOME=${CUDA_HOME:-}"
  { command -v nvcc >/dev/null && nvcc --version | tail -2; } || true
  "$PYTHON" --version
  "$PYTHON" - <<'PY'
from importlib.metadata import distributions
names = ("mlx", "numpy", "pytest", "nvidia")
rows = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
for name, version in sorted(rows.items()):
    if name.startswith(names):
        print(name, version)
PY
  git -C "$root" rev-parse HEAD 2>/dev/null || true
} | tee "$OUT/machine.txt"

# One operation first: without CUDA's headers MLX fails at the first one, not at the import.
"$PYTHON" - "$REHEARSE" <<'PY'
import sys
import mlx.core as mx
if not sys.argv[1] and not (mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu):
    sys.exit(f"MLX {mx.__version__} from {mx.__file__} finds no CUDA device")
total = mx.exp(mx.arange(1000) / 1000).sum().item()
print(f"MLX {mx.__version__} on {mx.default_device()}: {mx.device_info()}, sum {total:.3f}")
PY

failed=0
if has tests; then
  say "kernel tests on the device"
  # References in float32: MLX's CUDA back-end multiplies matrices in TF32 otherwise, off by 3e-4.
  MLX_ENABLE_TF32=0 "$PYTHON" -m pytest $TESTS -m "${REHEARSE:+not }cuda" -q -rs \
    -p no:cacheprovider -W default --junitxml="$OUT/tests.xml" 2>&1 | tee "$OUT/tests.log" || failed=1
  # A suite that skips everything is no success.
  if ! grep -Eq '[0-9]+ passed' "$OUT/tests.log"; then
    echo "no test ran" >&2
    failed=1
  fi
fi

if has benchmark; then
  say "benchmark"
  "$PYTHON" -m benchmarks.bench_metal ${REHEARSE:+--quick} 2>"$OUT/bench.err" |
    tee "$OUT/bench.txt" || { failed=1; tail -n 20 "$OUT/bench.err" >&2; }
  tail -n 1 "$OUT/bench.txt" >"$OUT/bench.json"
  "$PYTHON" -m json.tool "$OUT/bench.json" >/dev/null || failed=1
fi

if has decode; then
  say "decoding with stacks, share of the base's speed"
  if "$PYTHON" -c 'import mlx_lm, pydantic' 2>/dev/null; then
    sizes="--preset gpu"
    if [ -n "$REHEARSE" ]; then
      sizes="--layers 2 --hidden 128 --intermediate 256 --vocab 256 --rounds 2 --tokens 4"
    fi
    # shellcheck disable=SC2086
    "$PYTHON" -m benchmarks.bench_decode $sizes \
      2>"$OUT/decode.err" | tee "$OUT/decode.txt" || { failed=1; tail -n 20 "$OUT/decode.err" >&2; }
    tail -n 1 "$OUT/decode.txt" >"$OUT/decode.json"
    "$PYTHON" -m json.tool "$OUT/decode.json" >/dev/null || failed=1
  else
    echo "not measured: mlx-lm and pydantic are not here" | tee "$OUT/decode.txt"
  fi
fi

say "results in $OUT"
ls -l "$OUT"
exit "$failed"
