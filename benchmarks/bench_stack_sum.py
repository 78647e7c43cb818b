"""Packed stacks beside one stack after another, on the CPU: `ops.stack_sum` against two loops.

    python -m benchmarks.bench_stack_sum [--stacks 10] [--tokens 256] [--dims 1024] [--rounds 15]

Float32, four experts of rank 16 a stack, the two best gates of each token, which all three are
given. The loop makes every expert's output (tokens, E, N) and then their weighted sum, as a
published implementation does; the rank-space loop weights the ranks instead and multiplies once a
stack. Results are compared before anything is timed. The base projection, to which the stacks are
added, is timed beside them.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from benchmarks.timing import machine, spread
from mlxstacks.ops.stack_sum import stack_sum

EXPERTS, RANK, TOP, SCALE = 4, 16, 2, 4.0
Stack = tuple[mx.array, mx.array, mx.array]  # A (E, r, K), B (E, N, r), gates (tokens, E)


def per_stack_loop(x: mx.array, stacks: Sequence[Stack]) -> mx.array:
    """One stack after another, every expert's output in full, (tokens, N)."""
    total = mx.zeros((len(x), stacks[0][1].shape[1]))
    for a, b, gates in stacks:
        z = x @ a.swapaxes(-1, -2)  # (E, tokens, r)
        outputs = z @ b.swapaxes(-1, -2)  # (E, tokens, N)
        total = total + SCALE * (gates.T[..., None] * outputs).sum(axis=0)
    return total


def rank_space_loop(x: mx.array, stacks: Sequence[Stack]) -> mx.array:
    """One stack after another, gates multiplied into the ranks, (tokens, N)."""
    total = mx.zeros((len(x), stacks[0][1].shape[1]))
    for a, b, gates in stacks:
        experts, rank, _ = a.shape
        z = (x @ a.reshape(experts * rank, -1).T).reshape(-1, experts, rank)
        z = (z * gates[..., None]).reshape(-1, experts * rank)
        total = total + SCALE * (z @ b.transpose(0, 2, 1).reshape(experts * rank, -1))
    return total


def make(stacks: int, tokens: int, dims: int) -> tuple[mx.array, list[Stack]]:
    """Tokens and random stacks with the softmax of the best TOP logits as gates."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(random.standard_normal(shape).astype(np.float32))

    made = []
    for _ in range(stacks):
        logits = normal(tokens, EXPERTS)
        least = mx.sort(logits, axis=-1)[:, -TOP, None]
        gates = mx.softmax(mx.where(logits >= least, logits, -mx.inf), axis=-1)
        a = normal(EXPERTS, RANK, dims) / dims**0.5
        made.append((a, normal(EXPERTS, dims, RANK) / RANK**0.5, gates))
    x = normal(tokens, dims)
    mx.eval(x, made)
    return x, made


def pack(stacks: Sequence[Stack]) -> tuple[mx.array, mx.array, mx.array]:
    """a_all (S*E*r, K), b_all (N, S*E*r), gates (tokens, S, E)."""
    a_all = mx.concatenate([a.reshape(-1, a.shape[-1]) for a, _, _ in stacks])
    b_all = mx.concatenate(
        [b.transpose(1, 0, 2).reshape(b.shape[1], -1) for _, b, _ in stacks], axis=1
    )
    packed = (a_all, b_all, mx.stack([gates for _, _, gates in stacks], axis=1))
    mx.eval(packed)
    return packed


def milliseconds(work: dict[str, Callable[[], mx.array]], rounds: int) -> dict[str, list[float]]:
    """Times by name, taking turns; each round begins with another one."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(-1, rounds):
        names = list(work)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            mx.eval(work[name]())
            if turn >= 0:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - started))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("stacks", 10), ("tokens", 256), ("dims", 1024), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    x, stacks = make(options.stacks, options.tokens, options.dims)
    a_all, b_all, gates = pack(stacks)
    base = mx.random.normal((options.dims, options.dims)) / options.dims**0.5
    work = {
        "loop, experts in full": lambda: per_stack_loop(x, stacks),
        "loop in rank space": lambda: rank_space_loop(x, stacks),
        "stack_sum": lambda: stack_sum(x, a_all, b_all, gates, SCALE),
    }
    wanted = np.array(work["loop, experts in full"]())
    for result in (work["loop in rank space"](), work["stack_sum"]()):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
    times = milliseconds({**work, "base projection": lambda: x @ base.T}, options.rounds)
    loop = times["loop, experts in full"]
    rows = {}
    print("| code | ms (p20 to p80) | of the loop |\n|---|---|---|")
    for name, found in times.items():
        cost = spread(found)
        ratio = spread([own / other for own, other in zip(found, loop, strict=True)])
        rows[name] = {"ms": cost.__dict__, "of_the_loop": ratio.__dict__}
        print(f"| {name} | {cost.median:.2f} ({cost.p20:.2f} to {cost.p80:.2f}) | "
              f"{ratio.median:.3f} ({ratio.p20:.3f} to {ratio.p80:.3f}) |")  # fmt: skip
    error = float(np.abs(np.array(work["stack_sum"]()) - wanted).max())
    sizes = {name: getattr(options, name) for name in ("stacks", "tokens", "dims")}
    print(json.dumps({"benchmark": "stack_sum", "machine": machine(), "sizes": sizes,
                      "largest_error": error, "result": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
