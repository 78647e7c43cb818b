"""The kernels on this machine's GPU: are they right, how fast, beside the same in MLX operations.

    python -m benchmarks.bench_metal [--quick] [--rounds 7] [--only requant] [--json FILE]

With a Metal or CUDA device: shapes of Qwen3.5-35B-A3B, about a minute. Without one the kernels are
checked in the emulator at small shapes, and only MLX's operations are timed. A kernel whose result
differs from the reference, or that gives none, gets no speed; the others are measured, and the exit
status is 1. The last line of output is one JSON object, or names the file of --json that holds it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import mlx.core as mx
from rich.console import Console

from benchmarks.kernel_case import (
    QWEN_35B,
    SMALL,
    TINY,
    Arguments,
    Case,
    Comparison,
    Sizes,
)
from benchmarks.kernel_low_rank import expert_delta_case, stack_sum_case
from benchmarks.kernel_quantized import dequant_case, requant_case
from benchmarks.kernel_report import Row, card, print_rows
from benchmarks.kernel_timing import Call, Measured, copy_bytes_per_second, measure
from benchmarks.timing import Spread
from mlxstacks import memory
from mlxstacks.ops import kernels
from tests.metal_emulator import emulated, unavailable

# Policies of requant with the new width. At 8 bits the result alone would have 28% of the peak of
# MLX's operations, more than the bar allows to any implementation.
POLICIES = (("keep", None), ("nearest", None), ("promote", 6), ("refit", None))
GPU_BACKENDS = ("metal", "cuda")
KERNELS = "dequant, requant, expert_delta and stack_sum"
COPY_BYTES = {True: 1_000_000_000, False: 64_000_000}  # on a GPU, elsewhere
REASON_LENGTH = 2000  # characters of what a compiler says


def cases(sizes: Sizes) -> list[Case]:
    """Every kernel at these sizes."""
    shapes = {
        "down_proj": (sizes.experts, sizes.hidden, sizes.inner),
        "gate_proj": (sizes.experts, sizes.inner, sizes.hidden),
    }
    found: list[Case] = []
    for bits in (3, 4):
        for name, shape in shapes.items():
            found.append(dequant_case(sizes, name, shape, bits))
            for policy, new_bits in POLICIES:
                found.append(requant_case(sizes, name, shape, bits, policy, new_bits))
    for rank in sizes.ranks:
        found += [expert_delta_case(sizes, name, rank) for name in ("gate_proj", "down_proj")]
    return found + [stack_sum_case(sizes, tokens) for tokens in sizes.tokens]


def bench(case: Case, copy: Spread, rounds: int, timed: bool, barred: bool) -> Row:
    """Check one case on the kernel backend there is, then time it where `timed` and right.

    timed: False where the backend is no device, so that its time says nothing.
    barred: whether the bars of the design apply to these shapes.
    """
    arguments = case.make()
    checked = check(case, arguments[0])
    runs: dict[str, Sequence[Call]] = {"composition": _calls(case.composition, arguments)}
    if timed and isinstance(checked, Comparison) and checked.agrees:
        runs["kernel"] = _calls(case.run, arguments)
    measured: dict[str, Measured] = {}
    try:
        measured = measure(runs, rounds)
    except Exception as error:  # as below; too little memory is another reason
        checked = reason(error)
    comparison = checked if isinstance(checked, Comparison) else None
    own, other = measured.get("kernel"), measured.get("composition")
    return Row(
        kernel=case.kernel,
        case=case.label,
        ran_on=kernels.backend(),
        agrees=None if comparison is None else comparison.agrees,
        largest_error=None if comparison is None else comparison.largest_error,
        relative_error=None if comparison is None else comparison.relative_error,
        allowed_error=None if comparison is None else comparison.allowed,
        differs=() if comparison is None else comparison.differs,
        unchecked=None if isinstance(checked, Comparison) else checked,
        needed_bytes=case.needed_bytes(*arguments[0]),
        input_bytes=sum(x.nbytes for x in arguments[0]),
        kernel_seconds=own.seconds if own else None,
        kernel_alone_seconds=own.alone_seconds if own else None,
        kernel_peak_bytes=own.extra_bytes if own else None,
        composition=case.composition_name,
        composition_on=memory.device().kind,
        composition_seconds=other.seconds if other else None,
        composition_alone_seconds=other.alone_seconds if other else None,
        composition_peak_bytes=other.extra_bytes if other else None,
        copy_bytes_per_second=copy.median,
        barred=barred,
    )


def check(case: Case, arguments: Arguments) -> Comparison | str:
    """The kernel's result beside the reference, or why there is no result."""
    if kernels.backend() is None:
        return unavailable() or "no backend runs kernels here"
    try:
        result = case.run(*arguments)
        mx.eval(result)
        return case.compare(arguments, result)
    except Exception as error:  # a compiler that refuses one text says nothing about the others
        return reason(error)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:REASON_LENGTH]


def _calls(function: Callable[..., Sequence[mx.array]], sets: list[Arguments]) -> list[Call]:
    return [partial(function, *arguments) for arguments in sets]


def where() -> tuple[str, AbstractContextManager[object]]:
    """The backend that numbers are labelled with, and the context in which kernels run."""
    backend = kernels.backend()
    if backend in GPU_BACKENDS:
        return backend, nullcontext()
    return memory.device().kind, nullcontext() if unavailable() else emulated()


def first_line(backend: str) -> str:
    if backend == "metal":
        return f"Metal device: {memory.device().name}"
    if backend == "cuda":
        return f"No Metal device: timing the kernels on MLX's CUDA backend, {memory.device().name}"
    reason = unavailable()
    checked = (
        f"kernels are not checked either ({reason})"
        if reason
        else "kernels are checked in the emulator"
    )
    return f"No Metal device: {checked}; only MLX's own operations are timed, on the {backend}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes: a check, no measurement")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each (default 7)")
    parser.add_argument("--only", default="", help="cases whose kernel or label holds this word")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, allowed is 1 or more")
    backend, kernel_backend = where()
    on_gpu = backend in GPU_BACKENDS
    sizes = TINY if options.quick else (QWEN_35B if on_gpu else SMALL)
    word = options.only.lower()
    chosen = [case for case in cases(sizes) if word in f"{case.kernel} {case.label}".lower()]
    if not chosen:
        parser.error(f"no case holds {options.only!r}; kernels are {KERNELS}")
    try:
        return run(options, chosen, sizes, backend, kernel_backend)
    except KeyboardInterrupt:
        print("stopped: nothing is reported", file=sys.stderr)
        return 130


def run(
    options: argparse.Namespace,
    chosen: Sequence[Case],
    sizes: Sizes,
    backend: str,
    kernel_backend: AbstractContextManager[object],
) -> int:
    """Measure and report the chosen cases; the exit status."""
    on_gpu = backend in GPU_BACKENDS
    print(first_line(backend), flush=True)
    console = Console(width=None if sys.stdout.isatty() else 150)
    mx.random.seed(0)
    copy = copy_bytes_per_second(4_000_000 if options.quick else COPY_BYTES[on_gpu], options.rounds)
    facts = card(copy, backend, console)
    rows = []
    with kernel_backend:
        for case in chosen:
            print(f"{case.kernel} {case.label}", file=sys.stderr, flush=True)
            rows.append(bench(case, copy, options.rounds, on_gpu, sizes is QWEN_35B))
            mx.clear_cache()
    print_rows(rows, backend, console)
    print_summary(rows, backend)
    result = {"benchmark": "metal", "sizes": sizes.name, "machine": facts}
    text = json.dumps({**result, "rows": [row.as_json() for row in rows]}, allow_nan=False)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"All figures: {options.json}")
    return int(any(row.failed for row in rows))


def print_summary(rows: Sequence[Row], backend: str) -> None:
    """How many bars are met, and what was not measured."""
    verdicts = [verdict for row in rows for verdict in row.bars().values()]
    counts = {word: verdicts.count(word) for word in ("met", "not met", "not measured")}
    print("bars: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    if backend != "metal":
        print("Metal GPU: not measured")
    for row in rows:
        if row.failed:
            print(f"{row.kernel} {row.case}: {row.verdict()}")


if __name__ == "__main__":
    sys.exit(main())
