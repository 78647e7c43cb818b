"""Forward and backward of the gated delta recurrence: mlx-lm's loop beside `ops.gated_delta`.

    python -m benchmarks.bench_gated_delta [--rounds 5] [--shape bar] [--chunk 32 64]

Both get the same float32 arguments and cotangents, in one process, taking turns. Outputs and all
gradients are compared before anything is timed. Time is that of the process (all its threads): on a
busy machine it says more than the clock, which is printed too. Bytes are MLX's peak above what was
held before. `native` is `mx.fast.gated_delta_update` called in float32, and in the table of errors
in the dtype of q as well.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.timing import machine, spread
from mlxstacks.ops.gated_delta import (
    CHUNK,
    SEGMENT,
    gated_delta_native,
    gated_delta_update,
    log_gates,
    strengths,
)

NAMES = ("y", "end state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "state")
TOLERANCE = 1e-4

Update = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison; `slow` shifts the gates towards one."""

    T: int
    Hk: int
    Hv: int
    D: int
    vector: bool = False
    slow: float = 0.0
    dtype: mx.Dtype = mx.float32

    def arguments(self) -> list[mx.array]:
        """q, k (normalized), v, a, b, A_log, dt_bias, state of a batch of one."""
        random = np.random.default_rng(0)
        per_head = (self.Hv, self.D) if self.vector else (self.Hv,)
        q, k = random.standard_normal((2, 1, self.T, self.Hk, self.D))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v = random.standard_normal((1, self.T, self.Hv, self.D))
        a = random.standard_normal((1, self.T, *per_head)) - self.slow
        b = random.standard_normal((1, self.T, self.Hv))
        rate = np.log(random.uniform(0.5, 8.0, (self.Hv, 1) if self.vector else self.Hv))
        bias = random.standard_normal(per_head)
        state = 0.1 * random.standard_normal((1, self.Hv, self.D, self.D))
        tokens = [mx.array(x.astype(np.float32)).astype(self.dtype) for x in (q, k, v, a, b)]
        return [*tokens, *(mx.array(x.astype(np.float32)) for x in (rate, bias, state))]


SHAPES = {
    "bar": Shape(T=1024, Hk=4, Hv=8, D=64),
    "35b-a3b": Shape(T=256, Hk=16, Hv=32, D=128),
    "vector": Shape(T=1024, Hk=4, Hv=8, D=64, vector=True),
}


def mlx_lm_loop() -> Update:
    """mlx-lm's function as its models call it in training."""
    from mlx_lm.models import gated_delta as theirs

    return partial(theirs.gated_delta_update, use_kernel=False)


def native(*arrays: mx.array, widened: bool = True) -> tuple[mx.array, mx.array]:
    """MLX's own recurrence, in float32 or as it is."""
    q, k, v, a, b, A_log, dt_bias, state = arrays
    gates, beta = log_gates(a, A_log, dt_bias), strengths(b)
    if widened:
        return gated_delta_native(q, k, v, gates, beta, state)
    y, end = mx.fast.gated_delta_update(q, k, v, mx.exp(gates), beta, state)
    return y, end


def gradients(update: Update, arguments: list[mx.array], dy: mx.array) -> list[mx.array]:
    """Outputs and gradients of everything, not evaluated."""
    cotangents = [dy.astype(arguments[0].dtype), mx.ones_like(arguments[-1])]
    ends, found = mx.vjp(lambda *x: list(update(*x)), arguments, cotangents)
    return [*ends, *found]


def relative_errors(got: Sequence[mx.array], expected: Sequence[mx.array]) -> dict[str, float]:
    """|got - expected| / |expected| by name."""
    wide = [[np.array(x.astype(mx.float32)) for x in side] for side in (got, expected)]
    return {
        name: float(np.linalg.norm(x - y) / np.linalg.norm(y))
        for name, x, y in zip(NAMES, *wide, strict=True)
    }


@dataclass(frozen=True)
class Step:
    """One evaluation of forward and backward."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(update: Update, arguments: list[mx.array], dy: mx.array) -> Step:
    """Build the graph and evaluate it once."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    mx.eval(gradients(update, arguments, dy))
    mx.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Step(wall, cpu, mx.get_peak_memory() - before)


def compare(shape: Shape, chunks: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """Times, bytes and errors by name; ratios are to mlx-lm's loop of the same round."""
    arguments = shape.arguments()
    dy = mx.random.normal(arguments[2].shape, key=mx.random.key(1))
    updates: dict[str, Update] = {"mlx-lm loop": mlx_lm_loop()}
    for chunk in chunks:
        updates[f"chunk {chunk}"] = partial(gated_delta_update, use_kernel=False, chunk=chunk)
    if not shape.vector:
        updates["native"] = native
    mx.eval(arguments, dy)
    # The first evaluation also builds mlx-lm's compiled step.
    expected = gradients(updates["mlx-lm loop"], arguments, dy)
    errors = {
        name: max(relative_errors(gradients(update, arguments, dy), expected).values())
        for name, update in updates.items()
    }
    assert max(errors.values()) <= TOLERANCE, f"not the same numbers: {errors}"
    del expected
    steps: dict[str, list[Step]] = {name: [] for name in updates}
    for index in range(rounds):
        names = list(updates)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            steps[name].append(measure(updates[name], arguments, dy))
    return {
        name: summary(steps[name], steps["mlx-lm loop"]) | {"largest_relative_error": errors[name]}
        for name in updates
    }


def summary(steps: list[Step], loop: list[Step]) -> dict[str, Any]:
    """Spreads of one way, and of its ratios to the loop, round by round."""
    pairs = list(zip(steps, loop, strict=True))
    return {
        "cpu_seconds": spread([step.cpu_seconds for step in steps]).__dict__,
        "wall_seconds": spread([step.wall_seconds for step in steps]).__dict__,
        "loop_over_cpu": spread([b.cpu_seconds / a.cpu_seconds for a, b in pairs]).__dict__,
        "loop_over_wall": spread([b.wall_seconds / a.wall_seconds for a, b in pairs]).__dict__,
        "peak_bytes": max(step.peak_bytes for step in steps),
        "loop_over_bytes": min(b.peak_bytes / a.peak_bytes for a, b in pairs),
    }


def half_precision_errors(T: int) -> dict[str, dict[str, float]]:
    """Errors of y and the end state with slow gates, q in bf16, to the loop in float32."""
    shape = Shape(T=T, Hk=4, Hv=8, D=64, slow=7.0, dtype=mx.bfloat16)
    arguments = shape.arguments()
    expected = mlx_lm_loop()(*(x.astype(mx.float32) for x in arguments))
    ways: dict[str, Update] = {
        "mlx-lm loop": mlx_lm_loop(),
        f"chunk {CHUNK}": partial(gated_delta_update, use_kernel=False),
        "native, gates in bf16": partial(native, widened=False),
        "native": native,
    }
    found = {}
    for name, update in ways.items():
        pairs = zip(("y", "end state"), update(*arguments), expected, strict=True)
        found[name] = {
            what: float(mx.linalg.norm((x - z).flatten()) / mx.linalg.norm(z.flatten()))
            for what, x, z in pairs
        }
    return found


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """One table a shape."""
    shape = SHAPES[name]
    gates = "a gate a key dimension" if shape.vector else "one gate a head"
    print(f"\n{name}: T={shape.T} Hk={shape.Hk} Hv={shape.Hv} D={shape.D}, {gates}")
    print("| way | cpu s (p20 to p80) | loop / it | wall s | loop / it | MB | loop / it | error |")
    print("|---|---|---|---|---|---|---|---|")
    for way, row in rows.items():
        cpu, ratio = row["cpu_seconds"], row["loop_over_cpu"]
        wall, wall_ratio = row["wall_seconds"], row["loop_over_wall"]
        print(
            f"| {way} | {cpu['median']:.3f} ({cpu['p20']:.3f} to {cpu['p80']:.3f}) "
            f"| {ratio['median']:.1f} ({ratio['p20']:.1f} to {ratio['p80']:.1f}) "
            f"| {wall['median']:.3f} "
            f"| {wall_ratio['median']:.1f} ({wall_ratio['p20']:.1f} to {wall_ratio['p80']:.1f}) "
            f"| {row['peak_bytes'] / 1e6:.0f} | {row['loop_over_bytes']:.1f} "
            f"| {row['largest_relative_error']:.1e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--chunk", type=int, nargs="+", default=[CHUNK])
    settings = parser.parse_args()
    result: dict[str, Any] = {}
    for name in settings.shape:
        result[name] = compare(SHAPES[name], settings.chunk, settings.rounds)
        show(name, result[name])
    halves = half_precision_errors(512)
    print("\n| q in bf16, slow gates | error of y | of the end state |\n|---|---|---|")
    for way, row in halves.items():
        print(f"| {way} | {100 * row['y']:.2f}% | {100 * row['end state']:.4f}% |")
    document: dict[str, Any] = {"benchmark": "gated_delta", "machine": machine(), "result": result}
    document |= {"chunk": CHUNK, "segment": SEGMENT, "bf16_slow_gates": halves}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
